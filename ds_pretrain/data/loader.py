"""This rank's micro-batches: of each step, read ahead by a thread, and of a validation.

Nothing here has a position of its own. `at(state)` asks for the step of the state; what was read ahead for
another step or another skip ledger is thrown away. So there is no iterator to restore and none to get wrong.

Shapes: S sequences of the global batch, B of a micro-batch, T tokens of a sequence, n of a prompt.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from time import perf_counter
from types import TracebackType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds_pretrain.core.distributed import World, uses_gpu
from ds_pretrain.core.metrics import IGNORED
from ds_pretrain.core.state import RunState, SkipLedger
from ds_pretrain.data.indexed import TokenSource
from ds_pretrain.data.sampler import SampleIds, Sampler, compute_checksums
from ds_pretrain.data.validation_set import KEY_TOKENS, NUM_PLACES, Prompts, ValidationSet

_READ_AHEAD_STEPS = 2


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Inputs, the tokens that follow them, and which documents they lie in."""

    input_ids: Tensor  # [B, T] int64
    labels: Tensor  # [B, T] int64, already shifted: labels[b, t] follows input_ids[b, t]
    documents: Tensor | None = None  # [B, T] int32: 0, 1, 2, ... from the left; None: they are not told apart

    def to(self, device: torch.device) -> "MicroBatch":
        """Inputs and labels on a device. Documents stay: what a kernel needs of them is worked out here."""
        return replace(
            self,
            input_ids=self.input_ids.to(device, non_blocking=True),
            labels=self.labels.to(device, non_blocking=True),
        )


@dataclass(frozen=True)
class Batch:
    """One rank's part of a global batch."""

    ids: SampleIds  # of the global batch
    micro_batches: tuple[MicroBatch, ...]
    num_valid_tokens: int  # of the global batch: what the loss is normalized by
    checksums: tuple[int, ...]  # CRC-32 of each of this rank's samples, in order
    wait_seconds: float = 0.0


class BatchLoader:
    """Reads ahead on one thread. Every rank must be asked for the same steps.

    With `mask_documents`, micro-batches tell their documents apart and labels across a boundary are ignored.
    """

    def __init__(
        self,
        sampler: Sampler,
        sources: Mapping[str, TokenSource],
        world: World,
        micro_batch_size: Mapping[str, int],
        mask_documents: bool = False,
    ) -> None:
        """`micro_batch_size` says for each phase how many sequences a micro-batch has."""
        self.sampler = sampler
        self.sources = sources
        self._world = world
        self._micro_batch_sizes = micro_batch_size
        self._mask_documents = mask_documents
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="feed")
        self._ahead: dict[tuple[int, SkipLedger], Future[Batch]] = {}

    def __enter__(self) -> "BatchLoader":
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
        self, state: RunState, num_ranks: int, micro_batch_size: int
    ) -> tuple[list[MicroBatch], int]:
        """Return the first micro-batches of `num_ranks` ranks at a state, spread over the present ranks.

        This rank's part, as many micro-batches on every rank (rows that are not there have ignored labels),
        and the sum of the CRC-32 of all the samples. On as many ranks it is this rank's own first one.
        """
        ids = self.sampler.ids(state.step, state.ledger)
        share = len(ids.sample) // num_ranks
        spans = [(rank * share, rank * share + micro_batch_size) for rank in range(num_ranks)]
        rows = np.concatenate([read_samples(ids, self.sources, *span) for span in spans])  # [K, T + 1]
        starts = None
        if self._mask_documents:
            starts = np.concatenate([read_starts(ids, self.sources, *span) for span in spans])  # [K, T + 1]

        def read(chosen: NDArray[np.int64]) -> MicroBatch:
            return build_micro_batch(rows[chosen], None if starts is None else starts[chosen])

        dealt = read_padded_batches(len(rows), self._world, self._micro_at(state.step), read)
        return [batch for batch, _ in dealt], sum(compute_checksums(rows))

    def _micro_at(self, step: int) -> int:
        return self._micro_batch_sizes[self.sampler.timeline.at(step).phase]

    def _read(self, step: int, ledger: SkipLedger) -> Batch:
        micro = self._micro_at(step)
        ids = self.sampler.ids(step, ledger)
        share = len(ids.sample) // self._world.size
        first = self._world.rank * share
        rows = read_samples(ids, self.sources, first, first + share)  # [S / W, T + 1]
        num_valid, starts = len(ids.sample) * ids.seq_len, None
        if self._mask_documents:  # the index of all samples, so that no rank has to ask another
            all_starts = read_starts(ids, self.sources, 0, len(ids.sample))  # [S, T + 1]
            num_valid -= int(np.count_nonzero(all_starts[:, 1:]))
            starts = all_starts[first : first + share]  # [S / W, T + 1]
        return Batch(
            ids=ids,
            micro_batches=tuple(
                build_micro_batch(rows[at], None if starts is None else starts[at])
                for i in range(0, share, micro)
                for at in [slice(i, i + micro)]
            ),
            num_valid_tokens=num_valid,
            checksums=compute_checksums(rows),
        )


def read_padded_batches(
    num_rows: int, world: World, size: int, read: Callable[[NDArray[np.int64]], MicroBatch]
) -> Iterator[tuple[MicroBatch, NDArray[np.int64]]]:
    """This rank's micro-batches of `size` rows of 0, 1, ..., as `read` makes them, and which rows each holds.

    As many on every rank, dealt in turn: rows that are not there are row 0 with ignored labels.
    """
    for start in range(0, num_rows, world.size * size):
        first = start + world.rank * size
        mine = np.arange(first, min(first + size, num_rows))
        rows = np.concatenate([mine, np.zeros(size - len(mine), np.int64)])  # [B]
        batch = read(rows)
        batch.labels[len(mine) :] = IGNORED
        yield batch, rows


def read_validation_batches(
    chosen: ValidationSet, world: World, micro_batch_size: int
) -> Iterator[MicroBatch]:
    """This rank's micro-batches of a validation, as many as every other rank's."""

    def read(rows: NDArray[np.int64]) -> MicroBatch:
        samples, source = chosen.indices[rows], chosen.source
        masked = chosen.mask_documents
        starts = mark_starts([source] * len(samples), samples, chosen.seq_len) if masked else None
        return build_micro_batch(source.samples(samples, chosen.seq_len), starts)

    for batch, _ in read_padded_batches(len(chosen.indices), world, micro_batch_size, read):
        yield batch


def read_prompt_batches(
    prompts: Prompts, length: int, world: World, micro_batch_size: int
) -> Iterator[tuple[MicroBatch, NDArray[np.int64]]]:
    """This rank's micro-batches of the prompts of one length, and the place of each row's key.

    No more tokens than a micro-batch of whole samples has. Only the key at the end has labels.
    """

    def read(chosen: NDArray[np.int64]) -> MicroBatch:
        starts = np.zeros((len(chosen), length + 1), np.bool_) if prompts.mask_documents else None
        batch = build_micro_batch(rows[chosen], starts)
        batch.labels[:, :-KEY_TOKENS] = IGNORED
        return batch

    rows = prompts.rows[length]  # [R, n + 1]
    size = min(micro_batch_size * max(1, prompts.seq_len // length), -(-len(rows) // world.size))
    for batch, chosen in read_padded_batches(len(rows), world, size, read):
        yield batch, chosen % NUM_PLACES


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


def read_starts(
    ids: SampleIds, sources: Mapping[str, TokenSource], first: int, stop: int
) -> NDArray[np.bool_]:
    """Return which tokens of samples [first, stop) begin a document, by the index: [stop - first, T + 1]."""
    chosen = [sources[ids.names[index]] for index in ids.source[first:stop]]
    return mark_starts(chosen, ids.sample[first:stop], ids.seq_len)


def mark_starts(
    sources: Sequence[TokenSource], samples: NDArray[np.int64], seq_len: int
) -> NDArray[np.bool_]:
    """Return which tokens of sample `samples[i]` of `sources[i]` begin a document: [n, T + 1]."""
    marks = np.zeros((len(samples), seq_len + 1), dtype=np.bool_)
    for mark, source, sample in zip(marks, sources, samples.tolist(), strict=True):
        mark[source.document_starts(sample * seq_len, seq_len + 1)] = True
    return marks


def build_micro_batch(rows: NDArray[np.int64], starts: NDArray[np.bool_] | None = None) -> MicroBatch:
    """[B, T + 1] tokens to inputs and labels of [B, T]. No label is ignored because of its id.

    `starts` [B, T + 1] says which tokens begin a document: as labels they are ignored, as inputs they are the
    first of the next document of their row. The row begins one in any case.
    """
    tokens = torch.from_numpy(rows)  # [B, T + 1]
    # Copies: with one row both slices count as contiguous, and an ignored label would overwrite an input.
    inputs, labels = tokens[:, :-1].clone(), tokens[:, 1:].clone()  # [B, T] each
    documents = None
    if starts is not None:
        labels[torch.from_numpy(starts[:, 1:])] = IGNORED
        begun = np.concatenate([np.zeros_like(starts[:, :1]), starts[:, 1:-1]], axis=1)  # [B, T]
        documents = torch.from_numpy(begun.cumsum(axis=1, dtype=np.int32))  # [B, T]
    if uses_gpu():
        inputs, labels = inputs.pin_memory(), labels.pin_memory()
    return MicroBatch(inputs, labels, documents)
