"""A keyed permutation of [0, N) that needs no index array: order as arithmetic.

A generalized Feistel network over Z_a x Z_b with a*b just above N, and cycle walking for the few values that
land outside [0, N): methods 2 and 3 of Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA
2002 (https://eprint.iacr.org/2001/012). The round function is the finalizer of SplitMix64 (Steele, Lea and
Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014). It shuffles; it hides nothing.

Everything is vectorized uint64 arithmetic, so the same numbers come out on every machine. Changing any
constant here changes the data order of every run.
"""

import hashlib
import math

import numpy as np
from numpy.typing import NDArray

MAX_SIZE = 1 << 62

# Halves of a few bits have few round functions, so small sizes need more rounds before all orders are equally
# likely: 8 leave a visible bias at N = 4, 24 leave none. At 4,096 and above 8 already pass.
_ROUNDS = 8
_SMALL_SIZE, _SMALL_ROUNDS = 1024, 24

_GOLDEN = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1
_CHUNK = 1 << 15  # elements worked on at once: the temporaries stay in cache, and memory stays small

Words = NDArray[np.uint64]


def make_key(*parts: int | str) -> int:
    """A 64-bit key from values: the same on every machine and in every process, unlike `hash`."""
    text = "".join(f"{type(part).__name__}:{len(str(part))}:{part};" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def derive_keys(key: int, counters: NDArray[np.integer]) -> Words:
    """One 64-bit key for each counter (an epoch, a block), from the key they share."""
    return derive_round_keys(key, mix_counters(counters))


def mix_counters(counters: NDArray[np.integer]) -> Words:
    """The half of `derive_keys` that no key enters: worth keeping for counters that come again."""
    return _mix(_to_words(counters) + np.uint64(_GOLDEN))


def derive_round_keys(key: int, mixed_counters: Words) -> Words:
    """The other half."""
    return _mix(mixed_counters ^ np.uint64(key))


def permute(index: NDArray[np.integer], size: int, key: int | Words) -> Words:
    """Map each index through the keyed permutation of [0, size); the cost does not depend on `size`.

    `key` may be an array of the shape of `index`: each element is then permuted under its own key.

    Raises:
        ValueError: `size` is not in [1, 2**62], or an index is not in [0, size).
    """
    if not 1 <= size <= MAX_SIZE:
        raise ValueError(f"cannot permute {size} elements: the size must be in [1, 2**62]")
    index = np.asarray(index)
    if index.size and not (int(index.min()) >= 0 and int(index.max()) < size):
        raise ValueError(f"an index is outside [0, {size}): they run from {index.min()} to {index.max()}")
    flat = _to_words(index).reshape(-1)
    keys = np.broadcast_to(np.asarray(key, dtype=np.uint64), index.shape).reshape(-1)
    out = np.empty_like(flat)
    for start in range(0, flat.size, _CHUNK):
        part = slice(start, start + _CHUNK)
        out[part] = _walk(flat[part], size, _mix(_collapse_equal(keys[part]).copy()))
    return out.reshape(index.shape)


def _walk(values: Words, size: int, keys: Words) -> Words:
    """Apply the network until each value is back in [0, size): still a bijection, as cycles are followed."""
    values = _apply_network(values, size, keys)
    outside = np.flatnonzero(values >= np.uint64(size))
    while outside.size:
        values[outside] = _apply_network(values[outside], size, keys[outside] if keys.size > 1 else keys)
        outside = outside[values[outside] >= np.uint64(size)]
    return values


def _collapse_equal(keys: Words) -> Words:
    """One key where all are the same, as within an epoch or a block: less to compute."""
    return keys[:1] if keys.size and bool((keys == keys[0]).all()) else keys


def _choose_radices(size: int) -> tuple[int, int]:
    """The two radices (a, b): as equal as can be, a*b >= size, at most one row too many."""
    a = math.isqrt(size - 1) + 1
    return a, -(-size // a)


def _choose_num_rounds(size: int) -> int:
    return _SMALL_ROUNDS if size < _SMALL_SIZE else _ROUNDS


def _apply_network(values: Words, size: int, keys: Words) -> Words:
    a, b = _choose_radices(size)
    left, right = np.divmod(values, np.uint64(b))
    for number in range(0, _choose_num_rounds(size), 2):
        left = _add(left, _apply_round(right, keys, number, a), a)
        right = _add(right, _apply_round(left, keys, number + 1, b), b)
    return left * np.uint64(b) + right


def _apply_round(half: Words, keys: Words, number: int, modulus: int) -> Words:
    """A pseudo-random word in [0, modulus) from one half: 32 bits, scaled (modulus is at most 2**31)."""
    words = half + (keys + np.uint64((number + 1) * _GOLDEN & _WORD))
    _stir(words)
    words >>= np.uint64(32)  # the best bits; the last step of the finalizer would not change them
    words *= np.uint64(modulus)
    words >>= np.uint64(32)
    return words


def _add(half: Words, other: Words, modulus: int) -> Words:
    """half + other modulo `modulus`, without a division: the sum is below twice the modulus."""
    total = half + other
    # Unsigned: below the modulus the difference wraps round to a huge number, and the sum is the lesser.
    np.minimum(total, total - np.uint64(modulus), out=total)
    return total


def _stir(words: Words) -> None:
    """The finalizer of SplitMix64 but for its last shift, in place."""
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)


def _mix(words: Words) -> Words:
    """The whole finalizer. The words given are used up."""
    _stir(words)
    words ^= words >> np.uint64(31)
    return words


def _to_words(values: NDArray[np.integer]) -> Words:
    return np.asarray(values).astype(np.uint64)
