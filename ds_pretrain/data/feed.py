"""This rank's micro-batches of each step, read ahead by a thread.

Nothing here has a position of its own. `at(state)` asks for the step of the state; what was read ahead for
another step or another skip ledger is thrown away. So there is no iterator to restore and none to get wrong.

Shapes: S sequences of the global batch, B of a micro-batch, T tokens of a sequence.
"""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import ceil
from time import perf_counter
from types import TracebackType
from typing import NamedTuple
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds_pretrain.data.indexed import TokenSource
from ds_pretrain.data.sampler import SampleIds, Sampler
from ds_pretrain.record import IGNORED
from ds_pretrain.state import RunState, SkipLedger
from ds_pretrain.world import World, uses_gpu

_READ_AHEAD_STEPS = 2


class MicroBatch(NamedTuple):
    """Inputs and the tokens that follow them."""

    input_ids: Tensor  # [B, T] int64
    labels: Tensor  # [B, T] int64, already shifted: labels[b, t] follows input_ids[b, t]


@dataclass(frozen=True)
class Batch:
    """One rank's part of a global batch."""

    ids: SampleIds  # of the global batch
    micro_batches: tuple[MicroBatch, ...]
    num_valid_tokens: int  # of the global batch: what the loss is normalized by
    checksums: tuple[int, ...]  # CRC-32 of each of this rank's samples, in order
    wait_seconds: float = 0.0


class Feed:
    """Reads ahead on one thread. Every rank must be asked for the same steps."""

    def __init__(
        self, sampler: Sampler, sources: Mapping[str, TokenSource], world: World, micro_sequences: int
    ) -> None:
        self.sampler = sampler
        self.sources = sources
        self._world = world
        self._micro_sequences = micro_sequences
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="feed")
        self._ahead: dict[tuple[int, SkipLedger], Future[Batch]] = {}

    def __enter__(self) -> "Feed":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def at(self, state: RunState) -> Batch:
        """The batch of the update after `state.step` finished steps; the next ones are then read ahead."""
        started = perf_counter()
        wanted = [
            (step, state.ledger)
            for step in range(state.step, state.step + 1 + _READ_AHEAD_STEPS)
            if step < self.sampler.timeline.last_step
        ]
        for key in [k for k in self._ahead if k not in wanted]:
            self._ahead.pop(key).cancel()
        for key in wanted:
            if key not in self._ahead:
                self._ahead[key] = self._thread.submit(self._read, *key)
        batch = self._ahead.pop(wanted[0]).result()
        return replace(batch, wait_seconds=perf_counter() - started)

    def read(self, step: int, ledger: SkipLedger) -> Batch:
        """This rank's part of the update after `step` finished steps, under any ledger: for a look back."""
        return self._thread.submit(self._read, step, ledger).result()

    def first_micro_batches(
        self, state: RunState, num_ranks: int, micro_sequences: int
    ) -> tuple[list[MicroBatch], int]:
        """What the first micro-batches of `num_ranks` ranks read at a state, spread over the ranks there are.

        This rank's part, as many micro-batches on every rank (rows that are not there have ignored labels),
        and the sum of the CRC-32 of all the samples. On as many ranks it is this rank's own first one.
        """
        ids = self.sampler.ids(state.step, state.ledger)
        share = len(ids.sample) // num_ranks
        starts = [rank * share for rank in range(num_ranks)]
        rows = np.concatenate(  # [K, T + 1]
            [read_samples(ids, self.sources, start, start + micro_sequences) for start in starts]
        )
        checksum = sum(crc32(row.tobytes()) for row in rows)
        per_rank = ceil(len(rows) / self._world.size / self._micro_sequences) * self._micro_sequences
        mine = rows[self._world.rank * per_rank : (self._world.rank + 1) * per_rank]
        filled = np.concatenate([mine, np.repeat(rows[:1], per_rank - len(mine), axis=0)])
        batches = []
        for first in range(0, per_rank, self._micro_sequences):
            batch = to_micro_batch(filled[first : first + self._micro_sequences])
            batch.labels[max(0, len(mine) - first) :] = IGNORED
            batches.append(batch)
        return batches, checksum

    def _read(self, step: int, ledger: SkipLedger) -> Batch:
        ids = self.sampler.ids(step, ledger)
        share = len(ids.sample) // self._world.size
        first = self._world.rank * share
        rows = read_samples(ids, self.sources, first, first + share)  # [S / W, T + 1]
        return Batch(
            ids=ids,
            micro_batches=tuple(
                to_micro_batch(rows[i : i + self._micro_sequences])
                for i in range(0, share, self._micro_sequences)
            ),
            num_valid_tokens=len(ids.sample) * ids.seq_len,  # every token of every sample is trained on
            checksums=tuple(crc32(row.tobytes()) for row in rows),
        )


def read_samples(
    ids: SampleIds, sources: Mapping[str, TokenSource], first: int, stop: int
) -> NDArray[np.int64]:
    """The tokens of samples [first, stop) of a global batch: [stop - first, T + 1]."""
    rows = np.empty((stop - first, ids.seq_len + 1), dtype=np.int64)
    source, sample = ids.source[first:stop], ids.sample[first:stop]
    for index in np.unique(source):
        here = source == index
        rows[here] = sources[ids.names[index]].samples(sample[here], ids.seq_len)
    return rows


def to_micro_batch(rows: NDArray[np.int64]) -> MicroBatch:
    """[B, T + 1] tokens to inputs and labels of [B, T]. No label is ignored because of its id."""
    tokens = torch.from_numpy(rows)  # [B, T + 1]
    # Copies: with one row both slices count as contiguous, and an ignored label would overwrite an input.
    inputs, labels = tokens[:, :-1].clone(), tokens[:, 1:].clone()  # [B, T] each
    if uses_gpu():
        inputs, labels = inputs.pin_memory(), labels.pin_memory()
    return MicroBatch(inputs, labels)
