"""Prompts that hide a key in validation text and ask for it at the end: does a window of this length work?

After the passkey of Mohtashami & Jaggi (arXiv:2305.16300) and RULER's needles (arXiv:2404.06654), for models
that follow no instructions: marker and key are random rare tokens in the middle of running text, and the
prompt ends with the marker again. What is measured is how much less the key surprises than in the same text
without it. Exact answers say nothing until a model is good; this moves as soon as anything is carried over.

Shapes: R prompts of one length, n tokens of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from ds_pretrain.core.distributed import World
from ds_pretrain.core.metrics import IGNORED
from ds_pretrain.data.indexed import TokenSource
from ds_pretrain.data.lengths import KEY_TOKENS, MARKER_TOKENS, prompt_lengths
from ds_pretrain.data.loader import MicroBatch, to_micro_batch
from ds_pretrain.data.validation_set import ValidationSet

DEPTHS = (0, 25, 50, 75, 100)  # percent of the text before the key
NUM_PLACES = len(DEPTHS) + 1  # and nowhere
_NUM_TEXTS = 4  # each with a marker and a key of its own


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
    rare = _rare_tokens(texts, _separators(chosen.source, picked, texts))
    needles = [_drawn(rare, f"{chosen.name}:{number}") for number in range(_NUM_TEXTS)]
    rows = {
        length: np.stack(
            [
                _prompt(text, needle, depth, length)
                for text, needle in zip(texts, needles, strict=True)
                for depth in (*DEPTHS, None)
            ]
        )
        for length in prompt_lengths(chosen.seq_len)
    }
    return Prompts(rows, chosen.seq_len, chosen.mask_documents)


def prompt_batches(
    prompts: Prompts, length: int, world: World, micro_sequences: int
) -> Iterator[tuple[MicroBatch, NDArray[np.int64]]]:
    """This rank's micro-batches of one length, and the place of each row's key.

    No more tokens than a micro-batch of whole samples has, and as many batches on every rank: missing rows
    are filled with ignored labels. Only the key at the end has labels.
    """
    rows = prompts.rows[length]
    size = micro_sequences * max(1, prompts.seq_len // length)
    size = min(size, -(-len(rows) // world.size))  # and no more than there are
    for start in range(0, len(rows), world.size * size):
        first = start + world.rank * size
        mine = np.arange(first, min(first + size, len(rows)))
        filled = np.concatenate([mine, np.zeros(size - len(mine), np.int64)])  # [B]
        starts = np.zeros((size, length + 1), np.bool_) if prompts.mask_documents else None
        batch = to_micro_batch(rows[filled], starts)
        batch.labels[:, :-KEY_TOKENS] = IGNORED
        batch.labels[len(mine) :] = IGNORED
        yield batch, filled % NUM_PLACES


def scores(prompts: Prompts, nll: NDArray[np.float64]) -> dict[str, dict[str, float]]:
    """By length and depth, the share of the key's surprise that hiding it in the text took away.

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


def _prompt(
    text: NDArray[np.int64], needle: NDArray[np.int64], depth: int | None, length: int
) -> NDArray[np.int64]:
    """Text, marker and key, text, marker and key: [length + 1]. At no depth: text, marker and key."""
    room = length + 1 - len(needle)
    if depth is None:
        return np.concatenate([text[:room], needle])
    room -= len(needle)
    before = room * depth // 100
    return np.concatenate([text[:before], needle, text[before:room], needle])


def _separators(
    source: TokenSource, picked: NDArray[np.int64], texts: NDArray[np.int64]
) -> NDArray[np.int64]:
    """What ends documents: the id that the source names, or, if it names none, the ends of those in `texts`.

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


def _rare_tokens(texts: NDArray[np.int64], separators: NDArray[np.int64]) -> NDArray[np.int64]:
    """The rarer half of the tokens that occur, known to the model, without what ends documents."""
    tokens, counts = np.unique(texts, return_counts=True)
    inside = ~np.isin(tokens, separators)
    if inside.any():  # or documents are of one token each
        tokens, counts = tokens[inside], counts[inside]
    return tokens[np.argsort(counts, kind="stable")][: max(1, len(tokens) // 2)]


def _drawn(tokens: NDArray[np.int64], seed: str) -> NDArray[np.int64]:
    """A marker and a key, all tokens different where there are as many: drawn by hash, from no stream."""
    order = sorted(tokens.tolist(), key=lambda token: sha256(f"{seed}:{token}".encode()).digest())
    return np.resize(np.asarray(order, np.int64), MARKER_TOKENS + KEY_TOKENS)
