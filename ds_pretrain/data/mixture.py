"""Maps a draw of a mixture to its source and sample: O(1) anywhere, and exact at every split.

Draws come in blocks of 4,096. In each block every source has the same whole number of draws (its quota, by
largest remainder), and the places within the block are shuffled under a key of the block's own. Whoever asks
for a draw lays its block out: 4,096 places are few, and then the draws of a source are numbered 0, 1, 2, ...
in the order in which they are read, so that an epoch visits each sample once before the next one begins.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ds_pretrain.core.errors import InputError
from ds_pretrain.data.permutation import Words, derive_keys, derive_round_keys, mix_counters, permute

BLOCK_DRAWS = 4096
_BITS = np.uint64(BLOCK_DRAWS.bit_length() - 1)  # of a place
_PLACE = np.uint64(BLOCK_DRAWS - 1)  # these bits
_PLACES = np.arange(BLOCK_DRAWS, dtype=np.uint64)
_MIXED_PLACES = mix_counters(_PLACES)
_BLOCKS_KEPT = 8  # a batch lies in one block or a few, and the next batch in the last of them


@dataclass(frozen=True)
class Mixture:
    """Sources in the order of their names, their draws in each block, and the key of the shuffles."""

    names: tuple[str, ...]
    quotas: tuple[int, ...]
    key: int

    def locate(self, draws: NDArray[np.integer]) -> tuple[NDArray[np.int64], Words]:
        """The index of the source in `names`, and the number of the draw within that source: [n] each.

        Each source's draws are numbered 0, 1, 2, ... in the order of the draws.
        """
        number: Words = draws.astype(np.uint64)
        if len(self.names) == 1:
            return np.zeros(len(draws), dtype=np.int64), number
        source = np.empty(len(draws), dtype=np.int64)
        block, place = number >> _BITS, (number & _PLACE).view(np.int64)
        quotas = np.asarray(self.quotas, dtype=np.uint64)
        # Neighbors share a block: one layout for each interval of them.
        edges = [0, *(np.flatnonzero(block[1:] != block[:-1]) + 1).tolist(), len(draws)]
        for first, end in pairwise(edges):
            if first < end:
                sources, earlier = _build_layout(self.quotas, self.key, int(block[first]))
                places = place[first:end]
                read = sources[places]
                source[first:end] = read
                number[first:end] = (block[first] * quotas)[read] + earlier[places]
        return source, number

    def draws_of_source_before(self, draw: int) -> tuple[int, ...]:
        """Count the draws in [0, draw) of each source: exact, and O(1) in `draw`."""
        blocks, rest = divmod(draw, BLOCK_DRAWS)
        source, _ = self.locate(np.arange(draw - rest, draw, dtype=np.uint64))
        partial = np.bincount(source, minlength=len(self.quotas))
        return tuple(blocks * quota + int(n) for quota, n in zip(self.quotas, partial, strict=True))


@lru_cache(maxsize=_BLOCKS_KEPT)
def _build_layout(
    quotas: tuple[int, ...], key: int, block: int
) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    """The source of each place of a block, and how many earlier places read the same: [BLOCK_DRAWS] each."""
    block_key = int(derive_keys(key, np.array([block], dtype=np.uint64))[0])
    # A shuffle by sorting random words. Each holds its place in its low bits, so that no two are equal.
    words = derive_round_keys(block_key, _MIXED_PLACES) & ~_PLACE | _PLACES
    words.sort()
    words &= _PLACE
    in_turn, count = _build_in_turn(quotas)
    source = np.empty(BLOCK_DRAWS, dtype=np.uint16)
    source[words.view(np.int64)] = in_turn
    by_source = np.argsort(source, kind="stable")  # of 16 bits: a radix sort
    earlier = np.empty(BLOCK_DRAWS, dtype=np.uint16)
    earlier[by_source] = count
    return source, earlier


@lru_cache(maxsize=_BLOCKS_KEPT)
def _build_in_turn(quotas: tuple[int, ...]) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    """Sources one after another, each as often as its quota, and 0, 1, 2, ... within each."""
    sources = np.repeat(np.arange(len(quotas), dtype=np.uint16), quotas)
    return sources, np.concatenate([np.arange(quota, dtype=np.uint16) for quota in quotas])


def compute_block_quotas(weights: Mapping[str, float]) -> dict[str, int]:
    """Draws of each source in a block, by name in order, for positive finite weights of any scale.

    By largest remainder: rounded down, plus one for the largest remainders, so that they add up to a block.
    """
    names = sorted(weights)  # the order of keys in a run file must not move the data
    values = np.array([weights[name] for name in names], dtype=np.float64)
    values /= values.max()  # a sum of huge weights would overflow
    exact = values / values.sum() * BLOCK_DRAWS
    quotas = np.floor(exact).astype(np.int64)
    order = np.argsort(-(exact - quotas), kind="stable")
    quotas[order[: BLOCK_DRAWS - int(quotas.sum())]] += 1
    return dict(zip(names, quotas.tolist(), strict=True))


def make_mixture(weights: Mapping[str, float], key: int) -> Mixture:
    """The mixture nearest to `weights` (any positive scale) whose quotas are whole draws a block.

    Raises:
        InputError: a weight is not positive and finite, or too small to be drawn once a block.
    """
    if not weights:
        raise InputError("the mixture is empty; give at least one source a positive weight")
    names = tuple(sorted(weights))
    values = np.array([weights[name] for name in names], dtype=np.float64)
    bad = [name for name, value in zip(names, values, strict=True) if not (np.isfinite(value) and value > 0)]
    if bad:
        raise InputError(
            f"mixture weight of {name!r} is {weights[name]}; expected a positive number "
            "(leave a source out to draw none of it)"
            for name in bad
        )
    largest = float(values.max())
    values /= largest  # a sum of huge weights would overflow
    shares = values / values.sum()
    quotas = tuple(compute_block_quotas(weights).values())
    smallest = largest * (float(values.sum()) / BLOCK_DRAWS)
    small = [at for at, quota in enumerate(quotas) if quota == 0]
    if small:
        raise InputError(
            f"mixture weight of {names[at]!r} is {weights[names[at]]:g}, {shares[at]:.3g} of the total, "
            f"less than one draw in {BLOCK_DRAWS}; the smallest weight that is drawn is {smallest:.3g}; "
            f"raise or remove it"
            for at in small
        )
    return Mixture(names=names, quotas=quotas, key=key)


def locate_samples(
    draw_of_source: NDArray[np.integer], num_samples: int, key: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The epoch and the sample that each draw of one source reads: every sample once an epoch.

    `key` is made from (seed, source name, sequence length); each epoch has a permutation of its own.
    """
    draws = np.asarray(draw_of_source).astype(np.uint64)
    epoch = draws // np.uint64(num_samples)
    sample = permute(draws % np.uint64(num_samples), num_samples, derive_keys(key, epoch))
    return epoch.astype(np.int64), sample.astype(np.int64)
