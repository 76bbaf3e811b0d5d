"""The feed: the same global batch on any number of ranks, with no position of its own."""

import threading
from dataclasses import replace
from zlib import crc32

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ds_pretrain.data.feed import Batch, to_micro_batch
from ds_pretrain.data.indexed import TokenSource
from ds_pretrain.record import IGNORED
from ds_pretrain.state import RunState, Skip, SkipLedger
from tests.data.in_memory import SEQ_LEN, feed_of, sampler_of, source_of

SOURCES = {"few": source_of(60, 1), "many": source_of(700, 2)}
WORLDS = (1, 2, 3, 4, 8)
STEPS = (0, 1, 7, 999)  # of 1,000


class CountingSource(TokenSource):
    """Counts the samples that are read."""

    num_read = 0

    def samples(self, indices: NDArray[np.integer], seq_len: int) -> NDArray[np.int64]:  # type: ignore[override]
        type(self).num_read += len(indices)
        return super().samples(indices, seq_len)


class BrokenSource(TokenSource):
    """A disk that fails."""

    def samples(self, indices: NDArray[np.integer], seq_len: int) -> NDArray[np.int64]:  # type: ignore[override]
        raise OSError("the disk is gone")


def _as(kind: type[TokenSource], source: TokenSource) -> TokenSource:
    return kind(source.prefix, source.stream, source.sequence_lengths, source.document_bounds, source.sidecar)


def _batches(size: int, step: int, micro_sequences: int = 1) -> list[Batch]:
    """What each rank of a world of `size` gets."""
    sampler = sampler_of(SOURCES)
    batches = []
    for rank in range(size):
        with feed_of(sampler, SOURCES, rank, size, micro_sequences) as feed:
            batches.append(feed.at(RunState(step)))
    return batches


def _tokens(batches: list[Batch]) -> list[list[int]]:
    """Inputs and last label of every sample, over micro-batches and ranks in order: [S, T + 1]."""
    rows = [
        torch.cat([micro.input_ids, micro.labels[:, -1:]], dim=1)
        for batch in batches
        for micro in batch.micro_batches
    ]
    return torch.cat(rows).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("step", STEPS)
def test_the_global_batch_is_the_same_list_of_samples_for_every_world(step: int) -> None:
    expected = [
        SOURCES[name].sample(sample, SEQ_LEN).tolist()
        for name, _, sample in sampler_of(SOURCES).ids(step, SkipLedger()).listed()
    ]
    checksum = sum(crc32(np.array(row, dtype=np.int64).tobytes()) for row in expected)
    for size in WORLDS:
        batches = _batches(size, step)
        assert _tokens(batches) == expected
        assert {tuple(batch.ids.listed()) for batch in batches} == {tuple(batches[0].ids.listed())}
        assert sum(sum(batch.checksums) for batch in batches) == checksum
        assert {batch.num_valid_tokens for batch in batches} == {24 * SEQ_LEN}


def test_p39_no_sample_is_read_by_two_ranks() -> None:
    sources = {"few": source_of(40, 1), "many": source_of(60, 2)}  # 72 draws, about 36 of each
    sampler, rows = sampler_of(sources), []
    for rank in range(4):
        with feed_of(sampler, sources, rank, 4) as feed:
            rows += [tuple(row) for step in range(3) for row in _tokens([feed.at(RunState(step))])]
    assert len(set(rows)) == len(rows) == 72


@pytest.mark.parametrize("micro_sequences", [1, 3])
def test_p43_every_rank_has_as_many_micro_batches_of_one_shape(micro_sequences: int) -> None:
    for size in (1, 2, 4, 8):
        for batch in _batches(size, 5, micro_sequences):
            shapes = [tuple(micro.input_ids.shape) for micro in batch.micro_batches]
            assert shapes == [(micro_sequences, SEQ_LEN)] * (24 // size // micro_sequences)


def test_the_labels_are_the_tokens_that_follow_and_none_is_ignored_because_of_its_id() -> None:
    micro = to_micro_batch(np.array([[5, 0, 256, 256, 2], [1, 2, 3, 4, 5]]))
    assert micro.input_ids.tolist() == [[5, 0, 256, 256], [1, 2, 3, 4]]
    assert micro.labels.tolist() == [[0, 256, 256, 2], [2, 3, 4, 5]]


@pytest.mark.parametrize("rows", [1, 2])
def test_an_ignored_label_leaves_the_inputs_as_they_are(rows: int) -> None:
    tokens = np.arange(rows * 5).reshape(rows, 5)
    micro = to_micro_batch(tokens)
    micro.labels[:] = IGNORED
    assert micro.input_ids.tolist() == [[5 * row + place for place in range(4)] for row in range(rows)]


def test_p02_a_feed_starts_at_the_step_that_it_is_asked_for_however_often_the_run_was_resumed() -> None:
    sampler = sampler_of(SOURCES)
    with feed_of(sampler, SOURCES) as feed:
        straight = [_tokens([feed.at(RunState(step))]) for step in range(12)]
    assert len({str(rows) for rows in straight}) == 12
    resumed = []
    for first, stop in ((0, 3), (3, 4), (4, 9), (9, 12)):
        with feed_of(sampler_of(SOURCES), SOURCES) as feed:
            resumed += [_tokens([feed.at(RunState(step))]) for step in range(first, stop)]
    assert resumed == straight


def test_p06_the_reads_before_the_first_batch_do_not_depend_on_the_step() -> None:
    reads = []
    for step in (10, 1_000_000):
        sources = {"only": _as(CountingSource, source_of(60))}
        CountingSource.num_read = 0
        with feed_of(sampler_of(sources, steps=2_000_000), sources) as feed:
            feed.at(RunState(step))
            for ahead in list(feed._ahead.values()):  # what is read ahead while the first step trains
                ahead.result()
        reads.append(CountingSource.num_read)
    assert reads == [72, 72]  # the batch of 24, and the two that follow


def test_what_was_read_ahead_for_another_step_or_ledger_is_thrown_away() -> None:
    sampler = sampler_of(SOURCES)
    ledger = SkipLedger((Skip("main", 0, 100, "spike", 5, 1),))
    with feed_of(sampler, SOURCES) as feed:
        feed.at(RunState(5))
        back = feed.at(RunState(2))
        skipping = feed.at(RunState(6, ledger))
    assert back.ids.listed() == sampler.ids(2, SkipLedger()).listed()
    assert skipping.ids.listed() == sampler.ids(6, ledger).listed() != sampler.ids(6, SkipLedger()).listed()


def test_nothing_is_read_past_the_last_step() -> None:
    sources = {"only": _as(CountingSource, source_of(60))}
    CountingSource.num_read = 0
    with feed_of(sampler_of(sources, steps=9), sources) as feed:
        feed.at(RunState(8))
        assert not feed._ahead
    assert CountingSource.num_read == 24


def test_a_disk_that_fails_raises_where_the_batch_is_asked_for() -> None:
    sources = {"only": _as(BrokenSource, source_of(60))}
    with (
        feed_of(sampler_of(sources), sources) as feed,
        pytest.raises(OSError, match="the disk is gone"),
    ):
        feed.at(RunState(0))


def test_closing_a_feed_ends_its_thread() -> None:
    with feed_of(sampler_of(SOURCES), SOURCES) as feed:
        feed.at(RunState(0))
        assert any(thread.name.startswith("feed") for thread in threading.enumerate())
    assert not any(thread.name.startswith("feed") for thread in threading.enumerate())


@pytest.mark.parametrize("size", WORLDS)
def test_first_micro_batches_are_the_same_samples_on_any_number_of_ranks(size: int) -> None:
    """Those that two ranks, with micro-batches of two, read first; rows that fill up have ignored labels."""
    saved = _batches(2, 5, micro_sequences=2)
    expected = _tokens([replace(batch, micro_batches=batch.micro_batches[:1]) for batch in saved])
    found, sums = [], set()
    for rank in range(size):
        with feed_of(sampler_of(SOURCES), SOURCES, rank, size, 2) as feed:
            batches, checksum = feed.first_micro_batches(RunState(5), num_ranks=2, micro_sequences=2)
        sums.add(checksum)
        assert len(batches) == (2 if size == 1 else 1)
        for batch in batches:
            rows = torch.cat([batch.input_ids, batch.labels[:, -1:]], dim=1)
            found += [row for row, labels in zip(rows.tolist(), batch.labels, strict=True) if labels[0] >= 0]
            assert bool(((batch.labels >= 0).all(dim=1) | (batch.labels == IGNORED).all(dim=1)).all())
    assert found == expected
    assert sums == {sum(sum(batch.checksums[:2]) for batch in saved)}
