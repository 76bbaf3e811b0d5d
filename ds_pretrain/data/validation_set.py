"""Validation on fixed samples: the same at every validation and on any number of ranks.

Shapes: B sequences of a micro-batch, T tokens of a sequence.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ds_pretrain.core.distributed import World
from ds_pretrain.core.metrics import IGNORED
from ds_pretrain.data.indexed import TokenSource
from ds_pretrain.data.loader import MicroBatch, mark_starts, to_micro_batch


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


def validation_batches(chosen: ValidationSet, world: World, micro_sequences: int) -> Iterator[MicroBatch]:
    """This rank's micro-batches. Every rank gets as many: missing rows are filled with ignored labels."""
    per_round = world.size * micro_sequences
    for start in range(0, len(chosen.indices), per_round):
        first = start + world.rank * micro_sequences
        mine = chosen.indices[first : min(first + micro_sequences, start + per_round)]
        filler = np.repeat(chosen.indices[:1], micro_sequences - len(mine))
        indices = np.concatenate([mine, filler])  # [B]
        starts = (
            mark_starts([chosen.source] * len(indices), indices, chosen.seq_len)
            if chosen.mask_documents
            else None
        )
        batch = to_micro_batch(chosen.source.samples(indices, chosen.seq_len), starts)
        batch.labels[len(mine) :] = IGNORED
        yield batch
