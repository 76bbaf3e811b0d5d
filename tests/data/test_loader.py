"""The feed: the same global batch on any number of ranks, with no position of its own."""

import threading
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ds_pretrain.core.distributed import World
from ds_pretrain.core.metrics import IGNORED
from ds_pretrain.core.state import RunState, Skip, SkipLedger
from ds_pretrain.data.filtered import open_filtered
from ds_pretrain.data.indexed import IndexedWriter, TokenSource, open_source
from ds_pretrain.data.loader import Batch, BatchLoader, build_micro_batch, read_validation_batches
from ds_pretrain.data.validation_set import make_validation_set
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


def _batches(size: int, step: int, micro_batch_size: int = 1) -> list[Batch]:
    """What each rank of a world of `size` gets."""
    sampler = sampler_of(SOURCES)
    batches = []
    for rank in range(size):
        with feed_of(sampler, SOURCES, rank, size, micro_batch_size) as feed:
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
        for name, _, sample in sampler_of(SOURCES).ids(step, SkipLedger()).to_list()
    ]
    checksum = sum(crc32(np.array(row, dtype=np.int64).tobytes()) for row in expected)
    for size in WORLDS:
        batches = _batches(size, step)
        assert _tokens(batches) == expected
        assert {tuple(batch.ids.to_list()) for batch in batches} == {tuple(batches[0].ids.to_list())}
        assert sum(sum(batch.checksums) for batch in batches) == checksum
        assert {batch.num_valid_tokens for batch in batches} == {24 * SEQ_LEN}


def test_p39_no_sample_is_read_by_two_ranks() -> None:
    sources = {"few": source_of(40, 1), "many": source_of(60, 2)}  # 72 draws, about 36 of each
    sampler, rows = sampler_of(sources), []
    for rank in range(4):
        with feed_of(sampler, sources, rank, 4) as feed:
            rows += [tuple(row) for step in range(3) for row in _tokens([feed.at(RunState(step))])]
    assert len(set(rows)) == len(rows) == 72


@pytest.mark.parametrize("micro_batch_size", [1, 3])
def test_p43_every_rank_has_as_many_micro_batches_of_one_shape(micro_batch_size: int) -> None:
    for size in (1, 2, 4, 8):
        for batch in _batches(size, 5, micro_batch_size):
            shapes = [tuple(micro.input_ids.shape) for micro in batch.micro_batches]
            assert shapes == [(micro_batch_size, SEQ_LEN)] * (24 // size // micro_batch_size)


def test_the_labels_are_the_tokens_that_follow_and_none_is_ignored_because_of_its_id() -> None:
    micro = build_micro_batch(np.array([[5, 0, 256, 256, 2], [1, 2, 3, 4, 5]]))
    assert micro.input_ids.tolist() == [[5, 0, 256, 256], [1, 2, 3, 4]]
    assert micro.labels.tolist() == [[0, 256, 256, 2], [2, 3, 4, 5]]


@pytest.mark.parametrize("rows", [1, 2])
def test_an_ignored_label_leaves_the_inputs_as_they_are(rows: int) -> None:
    tokens = np.arange(rows * 5).reshape(rows, 5)
    micro = build_micro_batch(tokens)
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
    assert back.ids.to_list() == sampler.ids(2, SkipLedger()).to_list()
    assert (
        skipping.ids.to_list() == sampler.ids(6, ledger).to_list() != sampler.ids(6, SkipLedger()).to_list()
    )


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
    saved = _batches(2, 5, micro_batch_size=2)
    expected = _tokens([replace(batch, micro_batches=batch.micro_batches[:1]) for batch in saved])
    found, sums = [], set()
    for rank in range(size):
        with feed_of(sampler_of(SOURCES), SOURCES, rank, size, 2) as feed:
            batches, checksum = feed.first_micro_batches(RunState(5), num_ranks=2, micro_batch_size=2)
        sums.add(checksum)
        assert len(batches) == (2 if size == 1 else 1)
        for batch in batches:
            rows = torch.cat([batch.input_ids, batch.labels[:, -1:]], dim=1)
            found += [row for row, labels in zip(rows.tolist(), batch.labels, strict=True) if labels[0] >= 0]
            assert bool(((batch.labels >= 0).all(dim=1) | (batch.labels == IGNORED).all(dim=1)).all())
    assert found == expected
    assert sums == {sum(sum(batch.checksums[:2]) for batch in saved)}


EOS = 9


def _source_of_documents(documents: list[list[list[int]]], name: str = "documents") -> TokenSource:
    """Documents, each a list of sequences of token ids."""
    sequences = [sequence for document in documents for sequence in document]
    stream = np.array([token for sequence in sequences for token in sequence], "<i4")
    lengths = np.array([len(sequence) for sequence in sequences], np.int32)
    bounds = np.cumsum([0, *(len(document) for document in documents)]).astype(np.int64)
    return TokenSource(Path(name), stream, lengths, bounds, None)


def _random_documents(seed: int, num_documents: int = 300) -> TokenSource:
    """Documents of 0 to 3 sequences of 0 to 6 tokens, so that some are empty, some of several rows."""
    random = np.random.default_rng(seed)
    return _source_of_documents(
        [
            [random.integers(0, 20, random.integers(0, 7)).tolist() for _ in range(random.integers(0, 4))]
            for _ in range(num_documents)
        ],
        f"random_{seed}",
    )


def _document_of_each_token(source: TokenSource) -> NDArray[np.int64]:
    return np.repeat(np.arange(source.num_documents), source.document_lengths)


def _feed_masked(
    sources: dict[str, TokenSource], rank: int = 0, size: int = 1, micro: int = 1
) -> BatchLoader:
    return BatchLoader(
        sampler_of(sources), sources, World(rank, size, rank), {"main": micro}, mask_documents=True
    )


@pytest.mark.parametrize("seed", range(5))
def test_documents_begin_where_the_index_says(seed: int) -> None:
    source = _random_documents(seed)
    of_token = _document_of_each_token(source)
    begins = np.flatnonzero(np.diff(of_token, prepend=-1))
    for start, count in [(0, 1), (0, source.num_tokens), *((at, at % 17) for at in range(0, 600, 7))]:
        inside = begins[(begins >= start) & (begins < start + count)] - start
        found = source.document_starts(start, count)
        assert found.dtype == np.int64
        assert found.tolist() == inside.tolist()


def test_an_opened_source_finds_them_in_its_index_without_copying_it(tmp_path: Path) -> None:
    writer = IndexedWriter(tmp_path / "text", 20)
    writer.add([np.arange(n) for n in (3, 1, 5, 2, 7)])
    writer.finish({})
    source = open_source(tmp_path / "text")
    assert source.document_starts(0, 18).tolist() == [0, 3, 4, 9, 11]
    assert source.document_starts(4, 5).tolist() == [0]
    assert source.document_starts(5, 4).tolist() == []
    assert source._byte_offsets is source.byte_offsets is not None
    assert source._byte_offsets.base is not None


def test_labels_across_a_boundary_are_ignored_and_documents_are_numbered_from_the_left() -> None:
    rows = np.array([[5, 6, 7, 8, 9], [1, 2, 3, 4, 5]])
    starts = np.array([[0, 0, 1, 0, 0], [1, 1, 1, 0, 1]], dtype=np.bool_)
    micro = build_micro_batch(rows, starts)
    assert micro.documents is not None
    assert micro.documents.dtype == torch.int32
    assert micro.documents.tolist() == [[0, 0, 1, 1], [0, 1, 2, 2]]
    assert micro.input_ids.tolist() == [[5, 6, 7, 8], [1, 2, 3, 4]]
    assert micro.labels.tolist() == [[6, IGNORED, 8, 9], [IGNORED, IGNORED, 4, IGNORED]]


def test_p37_the_separator_belongs_to_the_document_that_it_ends_and_is_learned() -> None:
    documents = [[[1, 2, EOS]], [[3, 4, 5, 6, EOS]], [[7, 8, 1, 2, 3, 4, 5, 6, EOS]]]  # 3, 5 and 9 tokens
    sources = {"only": _source_of_documents(documents)}
    chosen = make_validation_set("held_out", sources["only"], 8, 100, mask_documents=True)
    [first, second] = read_validation_batches(chosen, World(), 1)
    assert first.input_ids.tolist() == [[1, 2, EOS, 3, 4, 5, 6, EOS]]
    assert first.labels.tolist() == [[2, EOS, IGNORED, 4, 5, 6, EOS, IGNORED]]
    assert second.labels.tolist() == [[8, 1, 2, 3, 4, 5, 6, EOS]]
    assert first.documents is not None
    assert second.documents is not None
    assert first.documents.tolist() == [[0, 0, 0, 1, 1, 1, 1, 1]]
    assert second.documents.tolist() == [[0] * 8]


def test_p38_boundaries_come_from_the_index_and_no_token_id_makes_one() -> None:
    """Separators inside a document split nothing; a document without one is split from the next."""
    documents = [[[EOS, EOS, 1, EOS]], [[2, 3]], [[4, 5], [6, 7, 8]]]
    source = _source_of_documents(documents)
    chosen = make_validation_set("held_out", source, 10, 100, mask_documents=True)
    [batch] = read_validation_batches(chosen, World(), 1)
    assert batch.documents is not None
    assert batch.documents.tolist() == [[0, 0, 0, 0, 1, 1, 2, 2, 2, 2]]
    assert batch.labels.tolist() == [[EOS, 1, EOS, IGNORED, 3, IGNORED, 5, 6, 7, 8]]


def test_a_document_that_began_in_the_row_before_is_the_first_of_its_row() -> None:
    source = _source_of_documents([[[1, 2, 3, 4, 5, 6]], [[7, 8, 1]]])
    chosen = make_validation_set("held_out", source, 4, 100, mask_documents=True)
    _, second = read_validation_batches(chosen, World(), 1)
    assert second.documents is not None
    assert second.documents.tolist() == [[0, 0, 1, 1]]
    assert second.labels.tolist() == [[6, IGNORED, 8, 1]]


def test_a_document_that_begins_with_the_next_row_takes_the_last_label() -> None:
    source = _source_of_documents([[[1, 2, 3, 4]], [[5, 6, 7, 8, 1]]])
    chosen = make_validation_set("held_out", source, 4, 100, mask_documents=True)
    first, second = read_validation_batches(chosen, World(), 1)
    assert first.labels.tolist() == [[2, 3, 4, IGNORED]]
    assert second.labels.tolist() == [[6, 7, 8, 1]]


@pytest.mark.parametrize("size", WORLDS)
def test_every_rank_counts_the_valid_labels_of_the_whole_global_batch(size: int) -> None:
    sources = {"few": _random_documents(1), "many": _random_documents(2, 2000)}
    documents_of = {name: _document_of_each_token(source) for name, source in sources.items()}
    for step in (0, 7):
        batches = []
        for rank in range(size):
            with _feed_masked(sources, rank, size) as feed:
                batches.append(feed.at(RunState(step)))
        micro_batches = [micro for batch in batches for micro in batch.micro_batches]
        num_valid = sum(int((micro.labels != IGNORED).sum()) for micro in micro_batches)
        assert {batch.num_valid_tokens for batch in batches} == {num_valid}
        assert 0 < num_valid < 24 * SEQ_LEN
        for micro, (name, _, sample) in zip(micro_batches, batches[0].ids.to_list(), strict=True):
            documents = documents_of[name][sample * SEQ_LEN :][: SEQ_LEN + 1]
            assert micro.documents is not None
            numbers = np.unique(documents[:-1], return_inverse=True)[1]
            assert micro.documents.tolist() == [numbers.tolist()]
            crossed = documents[1:] != documents[:-1]
            assert (micro.labels[0] == IGNORED).tolist() == crossed.tolist()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_first_micro_batches_are_masked_as_the_ranks_had_them(size: int) -> None:
    sources = {"only": _random_documents(3, 2000)}
    expected = []
    for rank in (0, 1):
        with _feed_masked(sources, rank, 2, micro=2) as feed:
            first = feed.at(RunState(5)).micro_batches[0]
            assert first.documents is not None
            expected += list(zip(first.labels.tolist(), first.documents.tolist(), strict=True))
    found = []
    for rank in range(size):
        with _feed_masked(sources, rank, size, micro=2) as feed:
            for micro in feed.first_micro_batches(RunState(5), num_ranks=2, micro_batch_size=2)[0]:
                assert micro.documents is not None
                found += list(zip(micro.labels.tolist(), micro.documents.tolist(), strict=True))
    there = [(labels, documents) for labels, documents in found if labels != [IGNORED] * SEQ_LEN]
    assert there == [pair for pair in expected if pair[0] != [IGNORED] * SEQ_LEN]


def test_documents_are_not_told_apart_unless_asked_for() -> None:
    sources = {"only": _random_documents(3, 2000)}
    with feed_of(sampler_of(sources), sources) as feed:
        batch = feed.at(RunState(0))
    assert {micro.documents for micro in batch.micro_batches} == {None}
    assert all((micro.labels >= 0).all() for micro in batch.micro_batches)
    chosen = make_validation_set("held_out", sources["only"], SEQ_LEN, 40)
    assert {micro.documents for micro in read_validation_batches(chosen, World(), 1)} == {None}


def test_a_micro_batch_moves_its_tokens_and_keeps_its_documents() -> None:
    micro = build_micro_batch(np.array([[1, 2, 3]]), np.array([[True, True, False]]))
    there = micro.to(torch.device("meta"))
    assert there.input_ids.device.type == there.labels.device.type == "meta"
    assert there.documents is micro.documents


def test_the_boundaries_of_a_view_are_those_of_its_own_documents() -> None:
    source = _source_of_documents([[[1, 2, 3]], [[4]], [[5, 6, 7]], [[8, 9, 1, 2]], [[3]]])
    long = open_filtered(source, 3, None)
    chosen = make_validation_set("held_out", long, 9, 100, mask_documents=True)
    [batch] = read_validation_batches(chosen, World(), 1)
    assert batch.input_ids.tolist() == [[1, 2, 3, 5, 6, 7, 8, 9, 1]]
    assert batch.documents is not None
    assert batch.documents.tolist() == [[0, 0, 0, 1, 1, 1, 2, 2, 2]]
    assert batch.labels.tolist() == [[2, 3, IGNORED, 6, 7, IGNORED, 9, 1, 2]]
