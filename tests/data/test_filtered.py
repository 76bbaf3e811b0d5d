"""A view is a source like any other: the stream of its documents, and nothing is copied or rewritten."""

import re
import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from ds_pretrain.core.errors import InputError
from ds_pretrain.data import filtered as module
from ds_pretrain.data.filtered import get_chosen_tokens, open_filtered
from ds_pretrain.data.indexed import IndexedWriter, TokenSource, open_source
from ds_pretrain.data.inspect import check_source, describe_source, read_passages
from ds_pretrain.data.sampler import NO_SKIPS, SampleIds, make_sampler
from tests.data.in_memory import feed_of
from tests.data.slow_order import timeline

MEGATRON = Path(__file__).parent / "megatron"
BOUNDS = [(None, 40), (40, None), (30, 60), (1, None), (0, 0), (None, 10_000)]


def _random_source(seed: int) -> TokenSource:
    """Documents of several sequences, one sequence and none; sequences and documents without tokens."""
    random = np.random.default_rng(seed)
    lengths = random.integers(0, 30, 40).astype(np.int32)
    bounds = np.sort(np.concatenate([[0, 40], random.integers(0, 41, 20)])).astype(np.int64)
    stream = random.integers(0, 60_000, int(lengths.sum())).astype("<u2")
    return TokenSource(Path(f"random_{seed}"), stream, lengths, bounds, None)


def _documents(source: TokenSource) -> list[list[int]]:
    lengths = source.document_lengths
    ends = np.cumsum(lengths)
    return [source.tokens(int(e - n), int(n)).tolist() for e, n in zip(ends, lengths, strict=True)]


def _write(prefix: Path, lengths: list[int], vocab_size: int = 1000, first_id: int = 0) -> TokenSource:
    """Documents of ids 0, 1, 2, ... without end; int32 where the vocabulary needs it."""
    writer = IndexedWriter(prefix, vocab_size)
    ids = np.arange(sum(lengths)) % (vocab_size - first_id) + first_id
    writer.add(np.split(ids, np.cumsum(lengths)[:-1]))
    writer.finish({})
    return open_source(prefix)


@pytest.mark.parametrize("chunk", [1, 3, 1 << 18])
def test_a_view_is_the_stream_of_the_chosen_documents(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK", chunk)
    num_views, random = 0, Random(0)
    for seed in range(12):
        source = _random_source(seed)
        for least, most in BOUNDS:
            chosen = [
                (number, document)
                for number, document in enumerate(_documents(source))
                if (least or 0) <= len(document) <= (most if most is not None else 10**9)
            ]
            stream = [token for _, document in chosen for token in document]
            if not stream:
                continue
            num_views += 1
            found = open_filtered(source, least, most)
            assert (found.num_tokens, found.num_documents) == (len(stream), len(chosen))
            assert found.dtype == source.dtype
            assert found.tokens(0, len(stream)).tolist() == stream
            assert found.document_lengths.tolist() == [len(document) for _, document in chosen]
            for _ in range(20):
                start = random.randrange(len(stream))
                count = random.randrange(len(stream) - start + 1)
                assert found.tokens(start, count).tolist() == stream[start : start + count]
            for seq_len in (1, 7, 50):
                assert found.num_samples(seq_len) == (len(stream) - 1) // seq_len
                for index in range(found.num_samples(seq_len)):
                    row = stream[index * seq_len : index * seq_len + seq_len + 1]
                    assert found.sample(index, seq_len).tolist() == row
                    assert found.samples([index], seq_len).tolist() == [row]
            with pytest.raises(IndexError, match="no tokens"):
                found.tokens(len(stream), 1)
            details = get_chosen_tokens(found)
            assert details is not None
            assert details.documents.tolist() == [number for number, _ in chosen]
            assert [int(source.stream[details.origin_of(at)]) for at in range(len(stream))] == stream
    assert num_views > 40


def test_the_documents_of_a_view_begin_where_its_index_says() -> None:
    """Of the view's stream, as a source of the same documents that was written as its own corpus."""
    for seed in range(8):
        found = open_filtered(_random_source(seed), 20, 90)
        begins = np.cumsum(found.document_lengths) - found.document_lengths
        for start, count in ((0, found.num_tokens), (5, 40), (33, 1)):
            inside = {int(b) - start for b in begins if start <= b < start + count}
            assert found.document_starts(start, count).tolist() == sorted(inside)


def test_a_view_without_bounds_is_the_source_itself() -> None:
    source = _random_source(1)
    assert open_filtered(source, None, None) is source
    assert get_chosen_tokens(source) is None


def test_a_view_of_a_corpus_on_disk_reads_the_right_documents() -> None:
    for name in ("megatron_lm", "gpt_neox", "megatron_lm_sentences"):
        source = open_source(MEGATRON / name)
        middle = int(np.median(source.document_lengths))
        longer, shorter = open_filtered(source, middle, None), open_filtered(source, None, middle - 1)
        assert longer.num_tokens + shorter.num_tokens == source.num_tokens
        assert longer.num_documents + shorter.num_documents == source.num_documents
        assert int(longer.document_lengths.min()) >= middle > int(shorter.document_lengths.max())
        both = _documents(longer) + _documents(shorter)
        assert sorted(both) == sorted(_documents(source))


@pytest.mark.parametrize(
    ("least", "most", "words"),
    [(61, None, "at least 61 tokens"), (None, 19, "at most 19 tokens"), (30, 25, "30 to 25 tokens")],
)
def test_no_document_of_the_length_is_refused_with_the_lengths_there_are(
    tmp_path: Path, least: int | None, most: int | None, words: str
) -> None:
    source = _write(tmp_path / "books", [20, 60, 33])
    expected = (
        f"{tmp_path}/books.idx: none of its 3 documents has {words}: the shortest has 20 and the longest 60; "
        "change min_document_tokens or max_document_tokens"
    )
    with pytest.raises(InputError, match=re.escape(expected)):
        open_filtered(source, least, most)


def test_p05_the_choice_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    """Other documents are other data; the same ones, wherever the file lies, are the same."""
    lengths = [20, 60, 33, 41, 25, 80]
    source = _write(tmp_path / "books", lengths)
    views = [
        open_filtered(source, *bounds) for bounds in ((None, 30), (30, None), (30, 60), (40, None), (40, 60))
    ]
    fingerprints = {found.fingerprint() for found in views} | {source.fingerprint()}
    assert len(fingerprints) == len(views) + 1
    assert (
        open_filtered(source, 34, None).fingerprint() == open_filtered(source, 40, None).fingerprint()
    )  # the same documents
    lengths = source.sequence_lengths
    least, most = int(lengths.min()), int(lengths.max())
    assert (
        open_filtered(source, 1, None).fingerprint() == open_filtered(source, least, most).fingerprint()
    )  # all of them
    for ending in ("bin", "idx", "json"):
        shutil.copy(tmp_path / f"books.{ending}", tmp_path / f"moved.{ending}")
    assert open_filtered(open_source(tmp_path / "moved"), 40, None).fingerprint() == views[3].fingerprint()


@pytest.mark.parametrize("bounds", [(40, None), (None, 35)])
def test_p05_a_corpus_that_changed_under_a_view_is_another_one(
    tmp_path: Path, bounds: tuple[int | None, int | None]
) -> None:
    """A chosen document that is longer, gone, or begins with another token."""
    lengths = [20, 60, 33, 41, 25, 80]
    told = open_filtered(_write(tmp_path / "books", lengths), *bounds).fingerprint()
    others = [[20, 61, 32, 41, 25, 80], [33, 41, 25, 80], [*lengths, 20, 80]]
    changed = [open_filtered(_write(tmp_path / f"b{n}", other), *bounds) for n, other in enumerate(others)]
    changed.append(open_filtered(_write(tmp_path / "ids", lengths, first_id=1), *bounds))
    assert told not in {found.fingerprint() for found in changed}


def test_p36_a_view_reads_ids_of_every_token_type_as_they_are(tmp_path: Path) -> None:
    """uint16 up to 65,535 and int32 beyond, and int64 for the model."""
    for vocab_size, name in ((65_536, "uint16"), (65_537, "int32")):
        lengths = [50, 9, 50]
        source = _write(tmp_path / name, lengths, vocab_size, first_id=vocab_size - 40)
        found = open_filtered(source, 10, None)
        assert found.dtype.name == name
        rows = found.samples([0, 1], 49)
        assert rows.dtype == np.int64
        ids = np.arange(109) % 40 + vocab_size - 40
        assert rows[0].tolist() == ids[:50].tolist()
        assert rows[1].tolist() == [*ids[49:50], *ids[59:108]]
        assert int(rows.max()) == vocab_size - 1


def test_p36_an_id_out_of_range_in_a_view_is_named_by_its_place_in_the_file(tmp_path: Path) -> None:
    source = _write(tmp_path / "x", [50, 9, 50])  # the ids are the places
    (tmp_path / "x.json").unlink()
    found = open_filtered(open_source(source.prefix), 10, None)
    (problem,) = check_source(found, 8, 100)
    assert f"{tmp_path}/x.bin: offset 200: token 100 has id 100, outside the model's vocabulary" in problem
    assert check_source(open_filtered(source, None, 9), 8, 1000) == []


def test_a_view_shorter_than_one_sequence_is_a_problem_that_names_the_choice(tmp_path: Path) -> None:
    found = open_filtered(_write(tmp_path / "x", [50, 9, 50]), None, 20)
    (problem,) = check_source(found, 9, 1000)
    assert problem == (
        f"{tmp_path}/x.bin: in documents of at most 20 tokens: 9 tokens, fewer than one sample of 9 + 1; "
        "shorten the sequence or prepare more text"
    )


def test_a_view_is_described_by_what_is_in_it(tmp_path: Path) -> None:
    writer = IndexedWriter(tmp_path / "x", 10)
    writer.add([np.array([1, 2, 9]), np.array([3] * 7 + [9]), np.array([4, 9])])
    writer.finish({"eos_id": 9})
    report = describe_source(open_filtered(open_source(tmp_path / "x"), None, 3))
    assert report.eos_per_million == 400_000


def test_a_passage_of_a_view_names_the_documents_of_the_corpus(tmp_path: Path) -> None:
    lengths = [20, 60, 33, 41, 25, 80]
    found = open_filtered(_write(tmp_path / "x", lengths), 40, None)  # documents 1, 3, 5
    samples = list(range(found.num_samples(30)))
    ids = SampleIds(
        step=0,
        seq_len=30,
        names=("x",),
        source=np.zeros(len(samples), np.int64),
        epoch=np.zeros(len(samples), np.int64),
        sample=np.array(samples),
        draw=np.arange(len(samples), dtype=np.uint64),
    )
    told = [passage.documents for passage in read_passages(ids, samples, {"x": found})]
    assert told == [(1,), (1, 3), (3,), (3, 5), (5,), (5,)]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_run_reads_a_view_through_its_phases_on_any_number_of_ranks(size: int) -> None:
    """A source and a view of it under two names, the second phase with longer samples."""
    books = open_source(MEGATRON / "megatron_lm")
    sources = {"books": books, "long": open_filtered(books, int(np.median(books.document_lengths)), None)}
    line = timeline([("main", 8, [(6, 8)]), ("long", 32, [(6, 8)])])
    weights = {"main": {"books": 0.5, "long": 0.5}, "long": {"long": 1.0}}
    sampler = make_sampler(7, line, weights, sources)
    assert len(set(sampler.ids(7, NO_SKIPS).sample.tolist())) == 8
    for step in range(12):
        ids = sampler.ids(step, NO_SKIPS)
        stream = {name: source.tokens(0, source.num_tokens) for name, source in sources.items()}
        expected = [
            stream[name][at * ids.seq_len : (at + 1) * ids.seq_len].tolist() for name, _, at in ids.to_list()
        ]
        read = []
        for rank in range(size):
            with feed_of(sampler, sources, rank, size) as feed:
                for micro in feed.read(step, NO_SKIPS).micro_batches:
                    read += micro.input_ids.tolist()
        assert read == expected


def test_p06_a_view_reads_its_index_in_parts_and_keeps_what_it_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two million documents a few long ones: the memory is that of the parts."""
    monkeypatch.setattr(module, "_CHUNK", 1 << 12)
    lengths = np.full(2_000_000, 3, np.int32)
    lengths[::10_000] = 500
    stream = np.zeros(int(lengths.sum()), np.uint8)
    bounds = np.arange(lengths.size + 1, dtype=np.int64)
    source = replace(_random_source(0), stream=stream, sequence_lengths=lengths, document_bounds=bounds)
    tracemalloc.start()
    found = open_filtered(source, 100, None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.num_documents == 200
    assert peak < 2_000_000  # bytes; a whole index of starts would be 16 million
