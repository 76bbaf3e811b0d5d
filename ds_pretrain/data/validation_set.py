"""Validation data: fixed samples, and prompts that hide a key in them. The same at every validation.
and on every rank.

A prompt asks for its key at the end: does a window of this length work? After the passkey of Mohtashami &
Jaggi (arXiv:2305.16300) and RULER's needles (arXiv:2404.06654), for models that follow no instructions:
marker and key are random rare tokens in the middle of running text, and the marker ends the prompt. What is
measured is how much less the key surprises than in the same text without it. Exact answers say nothing until
a model is good; this moves as soon as anything is carried over.

Shapes: T tokens of a sample, R prompts of one length, n tokens of it.
"""

from dataclasses import dataclass
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from ds_pretrain.data.indexed import TokenSource

MARKER_TOKENS, KEY_TOKENS = 4, 8
SHORTEST_PROMPT = 4 * (MARKER_TOKENS + KEY_TOKENS)  # marker and key stand in it twice, the rest is text
DEPTHS = (0, 25, 50, 75, 100)  # percent of the text before the key
NUM_PLACES = len(DEPTHS) + 1  # and nowhere
_NUM_TEXTS = 4  # each with a marker and a key of its own


@dataclass(frozen=True, eq=False)
class ValidationSet:
    """Samples of one source, spread evenly over it."""

    name: str
    source: TokenSource
    seq_len: int
    indices: NDArray[np.int64]
    mask_documents: bool = False


def make_validation_set(
    name: str, source: TokenSource, seq_len: int, tokens: int, mask_documents: bool = False
) -> ValidationSet:
    """About `tokens` tokens of a source: at least one sample, at most all that it has."""
    available = source.num_samples(seq_len)
    count = min(available, max(1, tokens // seq_len))
    indices = np.arange(count, dtype=np.int64) * available // count
    return ValidationSet(name, source, seq_len, indices, mask_documents)


def list_doublings(seq_len: int) -> list[int]:
    """1, 2, 4, ..., `seq_len`: where buckets of positions end, and how long prompts are."""
    return [2**power for power in range(seq_len.bit_length()) if 2**power < seq_len] + [seq_len]


def list_prompt_lengths(seq_len: int) -> list[int]:
    """The lengths of prompts for samples of `seq_len` tokens: none where these are too short."""
    return [n for n in list_doublings(seq_len) if n >= SHORTEST_PROMPT]


@dataclass(frozen=True, eq=False)
class Prompts:
    """The prompts of one source, by length. Those of a length: text by text, the places in order."""

    rows: dict[int, NDArray[np.int64]]  # n to [R, n + 1]
    seq_len: int
    mask_documents: bool


def make_prompts(chosen: ValidationSet) -> Prompts:
    """Prompts of powers of two, up to the length of the validation's samples. The same on every rank."""
    count = len(chosen.indices)
    picked = chosen.indices[np.arange(_NUM_TEXTS) * count // _NUM_TEXTS]
    texts = chosen.source.samples(picked, chosen.seq_len)  # [_NUM_TEXTS, T + 1]
    rare = _find_rare_tokens(texts, _find_separators(chosen.source, picked, texts))
    needles = [_draw_needles(rare, f"{chosen.name}:{number}") for number in range(_NUM_TEXTS)]
    rows = {
        length: np.stack(
            [
                _build_prompt(text, needle, depth, length)
                for text, needle in zip(texts, needles, strict=True)
                for depth in (*DEPTHS, None)
            ]
        )
        for length in list_prompt_lengths(chosen.seq_len)
    }
    return Prompts(rows, chosen.seq_len, chosen.mask_documents)


def score_prompts(prompts: Prompts, nll: NDArray[np.float64]) -> dict[str, dict[str, float]]:
    """Return, by length and depth, the share of the key's loss that its first appearance in the text removed.

    `nll` [lengths * NUM_PLACES] are sums over the keys' tokens. 1: the model is certain of the key. 0: it
    might as well not be there. Below 0: the text with the key misleads it.
    """
    by_length = nll.reshape(len(prompts.rows), NUM_PLACES)
    return {
        str(length): {
            str(depth): float(1 - at / sums[-1]) for depth, at in zip(DEPTHS, sums[:-1], strict=True)
        }
        for length, sums in zip(prompts.rows, by_length, strict=True)
    }


def _build_prompt(
    text: NDArray[np.int64], needle: NDArray[np.int64], depth: int | None, length: int
) -> NDArray[np.int64]:
    """Text, marker and key, text, marker and key: [length + 1]. At no depth: text, marker and key."""
    room = length + 1 - len(needle)
    if depth is None:
        return np.concatenate([text[:room], needle])
    room -= len(needle)
    before = room * depth // 100
    return np.concatenate([text[:before], needle, text[before:room], needle])


def _find_separators(
    source: TokenSource, picked: NDArray[np.int64], texts: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the tokens that end documents: the source's own id, or the last ones of those in `texts`.

    `picked` says which samples the texts [n, T + 1] are.
    """
    eos = (source.sidecar or {}).get("eos_id")
    if eos is not None:
        return np.array([eos], np.int64)
    ends = []
    for first, text in zip(picked.tolist(), texts, strict=True):
        first *= len(text) - 1
        starts = source.document_starts(first, len(text) + 1)  # also one right after the text
        ends.append(text[starts[starts > 0] - 1])
        if first + len(text) == source.num_tokens:
            ends.append(text[-1:])
    return np.unique(np.concatenate(ends))


def _find_rare_tokens(texts: NDArray[np.int64], separators: NDArray[np.int64]) -> NDArray[np.int64]:
    """The rarer half of the tokens that occur, known to the model, without what ends documents."""
    tokens, counts = np.unique(texts, return_counts=True)
    inside = ~np.isin(tokens, separators)
    if inside.any():  # or documents are of one token each
        tokens, counts = tokens[inside], counts[inside]
    return tokens[np.argsort(counts, kind="stable")][: max(1, len(tokens) // 2)]


def _draw_needles(tokens: NDArray[np.int64], seed: str) -> NDArray[np.int64]:
    """A marker and a key, all tokens different where there are as many: drawn by hash, from no stream."""
    order = sorted(tokens.tolist(), key=lambda token: sha256(f"{seed}:{token}".encode()).digest())
    return np.resize(np.asarray(order, np.int64), MARKER_TOKENS + KEY_TOKENS)
