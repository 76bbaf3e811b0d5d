"""Corpora of other projects open as they are; a damaged one is refused by file, place and fix."""

import hashlib
import json
import re
import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds_pretrain.core.errors import InputError
from ds_pretrain.data.indexed import HEADER_BYTES, IndexedWriter, choose_dtype, open_source, partial_folder

MEGATRON = Path(__file__).parent / "megatron"
EXPECTED = json.loads((MEGATRON / "expected.json").read_text())


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A copy of the Megatron-LM corpus that a test may damage; its prefix."""
    for end in ("bin", "idx"):
        shutil.copy(MEGATRON / f"megatron_lm.{end}", tmp_path / f"web.{end}")
    return tmp_path / "web"


def patch(path: Path, offset: int, data: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[offset : offset + len(data)] = data
    path.write_bytes(content)


@pytest.mark.parametrize(("name", "dtype"), [("megatron_lm", "uint16"), ("gpt_neox", "int32")])
def test_what_megatron_lm_and_gpt_neox_wrote_opens_as_it_is(name: str, dtype: str) -> None:
    source = open_source(MEGATRON / name)
    tokens = source.tokens(0, source.num_tokens)
    assert hashlib.sha256(tokens.tobytes()).hexdigest() == EXPECTED["sha256_tokens_int64"]
    assert source.dtype.name == dtype
    assert (source.num_documents, source.num_tokens) == (EXPECTED["documents"], EXPECTED["tokens"])
    assert source.document_lengths[:8].tolist() == EXPECTED["document_lengths_head"]
    assert int(source.document_lengths.sum()) == source.num_tokens
    assert int((tokens == EXPECTED["eos"]).sum()) == EXPECTED["documents"]


def test_a_document_of_several_sequences_is_one_document() -> None:
    source = open_source(MEGATRON / "megatron_lm_sentences")
    assert source.num_documents == EXPECTED["sentences"]["documents"]
    assert source.num_tokens == EXPECTED["sentences"]["tokens"]
    assert source.sequence_lengths.size > source.num_documents
    ends = np.cumsum(source.document_lengths) - 1
    assert (source.stream[ends] == EXPECTED["eos"]).all()


@pytest.mark.parametrize("ending", ["", ".bin", ".idx"])
def test_a_prefix_may_be_given_with_its_ending_and_hold_dots(corpus: Path, ending: str) -> None:
    for end in ("bin", "idx"):
        corpus.with_suffix(f".{end}").rename(corpus.parent / f"web.v1.2.{end}")
    assert open_source(f"{corpus.parent}/web.v1.2{ending}").num_documents == 300


def test_a_sample_is_its_stretch_of_the_stream_and_its_last_label_begins_the_next() -> None:
    source = open_source(MEGATRON / "megatron_lm")
    stream = source.tokens(0, source.num_tokens)
    for seq_len in (1, 7, 64, 1024):
        count = source.num_samples(seq_len)
        assert count == (source.num_tokens - 1) // seq_len
        ids = [0, count - 1, count // 2, count // 2]
        rows = source.samples(ids, seq_len)
        assert rows.dtype == np.int64
        for row, index in zip(rows, ids, strict=True):
            np.testing.assert_array_equal(row, stream[index * seq_len : index * seq_len + seq_len + 1])
            np.testing.assert_array_equal(row, source.sample(index, seq_len))
        with pytest.raises(IndexError, match="no tokens"):
            source.sample(count, seq_len)


def test_tokens_outside_the_stream_are_refused() -> None:
    source = open_source(MEGATRON / "megatron_lm")
    for start, count in [(-1, 5), (source.num_tokens, 1), (0, source.num_tokens + 1)]:
        with pytest.raises(IndexError, match=f"among {source.num_tokens}"):
            source.tokens(start, count)


class CountingStream:
    """A stream of ten million tokens that notes which stretches are read."""

    shape = (10_000_000,)
    dtype = np.dtype("<u2")

    def __init__(self) -> None:
        self.read: list[tuple[int, int]] = []

    def __getitem__(self, part: slice) -> np.ndarray[Any, Any]:
        self.read.append((part.start, part.stop))
        return np.zeros(part.stop - part.start, dtype=self.dtype)


def test_p06_a_sample_reads_its_own_tokens_wherever_it_is() -> None:
    stream = CountingStream()
    source = replace(open_source(MEGATRON / "megatron_lm"), stream=stream)  # type: ignore[arg-type]
    source.samples([0, 78_123, 5], 128)
    assert stream.read == [(0, 129), (78_123 * 128, 78_123 * 128 + 129), (5 * 128, 5 * 128 + 129)]


def test_p06_opening_and_reading_a_huge_corpus_needs_little_memory(tmp_path: Path) -> None:
    writer = IndexedWriter(tmp_path / "big", 50_000)
    writer.add([np.arange(10)])
    writer.finish({})
    # One document of 2 billion tokens: a sparse file of 4 GB.
    tokens = 2_000_000_000
    with (tmp_path / "big.bin").open("r+b") as file:
        file.truncate(2 * tokens)
    patch(tmp_path / "big.idx", HEADER_BYTES, tokens.to_bytes(4, "little"))
    (tmp_path / "big.json").unlink()
    tracemalloc.start()
    source = open_source(tmp_path / "big")
    assert source.sample(source.num_samples(1024) - 1, 1024).sum() == 0
    source.fingerprint()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000


def test_the_fingerprint_follows_the_corpus(corpus: Path) -> None:
    first = open_source(corpus).fingerprint()
    assert open_source(MEGATRON / "megatron_lm").fingerprint() == first
    seen = {first, open_source(MEGATRON / "gpt_neox").fingerprint()}
    for offset in (0, corpus.with_suffix(".bin").stat().st_size - 2):
        patch(corpus.with_suffix(".bin"), offset, b"\x07\x00")
        seen.add(open_source(corpus).fingerprint())
    assert len(seen) == 4


@pytest.mark.parametrize("end", ["bin", "idx"])
def test_a_missing_half_is_named(corpus: Path, end: str) -> None:
    corpus.with_suffix(f".{end}").unlink()
    with pytest.raises(
        InputError, match=rf"web\.{end}: no such file; a source is a PREFIX.bin and a PREFIX.idx"
    ):
        open_source(corpus)


def test_both_missing_halves_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        open_source(tmp_path / "nothing")
    assert len(caught.value.problems) == 2


SEQUENCES = 300


@pytest.mark.parametrize(
    ("offset", "data", "message"),
    [
        (0, b"TMTIDIDX", "starts with b'TMTIDIDX.*expected b'MMIDIDX"),
        (9, b"\x02", "offset 9: version 2, expected 1"),
        (17, b"\x07", r"offset 17: type code 7, expected one of \[1, 2, 3, 4, 5, 8\]"),
        (18, b"\x00\x00", r"its header \(0 sequences, 301 document bounds\) asks for"),
        (
            34 + 4 * 5,
            b"\x00",
            r"offset 1282: sequence 6 of 86 tokens is said to begin at byte 546 .* byte 664",
        ),
        (34 + 4 * 300 + 8 * 7, b"\x01", "sequence 7 of 55 tokens is said to begin at byte"),
        (34 + 12 * 300, b"\x01", "offset 3634: the 301 document bounds do not rise from 0 to 300 sequences"),
        (34 + 12 * 300 + 8 * 9, b"\xff", "document bounds do not rise"),
        (34 + 12 * 300 + 8 * 300, b"\xff", "document bounds do not rise"),
    ],
)
def test_a_damaged_index_is_refused_by_offset(corpus: Path, offset: int, data: bytes, message: str) -> None:
    patch(corpus.with_suffix(".idx"), offset, data)
    with pytest.raises(InputError, match=rf"web\.idx: .*{message}"):
        open_source(corpus)


@pytest.mark.parametrize("size", [0, 20, 34, 3000, 6041])
def test_a_truncated_index_is_refused(corpus: Path, size: int) -> None:
    path = corpus.with_suffix(".idx")
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(
        InputError, match=r"web\.idx: .*cut short: copy it again, or prepare the source again"
    ):
        open_source(corpus)


def test_a_truncated_bin_is_refused_with_both_sizes(corpus: Path) -> None:
    path = corpus.with_suffix(".bin")
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(
        InputError, match=r"web\.bin: 84692 bytes, but web.idx lists 42347 uint16 tokens.* 84694"
    ):
        open_source(corpus)


def test_p36_an_odd_byte_length_is_refused(corpus: Path) -> None:
    path = corpus.with_suffix(".bin")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(
        InputError, match=r"web\.bin: 84693 bytes is not a multiple of 2, the bytes of a uint16"
    ):
        open_source(corpus)


def test_p36_a_file_of_another_token_type_is_refused(corpus: Path) -> None:
    shutil.copy(MEGATRON / "gpt_neox.bin", corpus.with_suffix(".bin"))
    with pytest.raises(InputError, match=r"2\.00 times as many: another token type\?"):
        open_source(corpus)
    patch(corpus.with_suffix(".idx"), 17, b"\x03")  # and an index that says so: int16 for what is int32
    with pytest.raises(InputError, match="another token type"):
        open_source(corpus)


def test_a_corpus_without_documents_or_tokens_is_refused(tmp_path: Path) -> None:
    writer = IndexedWriter(tmp_path / "none", 100)
    writer.finish({})
    with pytest.raises(InputError, match=r"none\.idx: holds no documents; prepare the source again"):
        open_source(tmp_path / "none")
    writer = IndexedWriter(tmp_path / "empty", 100)
    writer.add([np.array([], dtype=np.int64)])
    writer.finish({})
    with pytest.raises(InputError, match=r"empty\.bin: holds no tokens"):
        open_source(tmp_path / "empty")


def test_p36_a_sidecar_of_another_corpus_is_refused_on_every_point(corpus: Path) -> None:
    sidecar = {"dtype": "int32", "tokens": 1, "documents": 300}
    corpus.with_suffix(".json").write_text(json.dumps(sidecar))
    with pytest.raises(InputError) as caught:
        open_source(corpus)
    assert len(caught.value.problems) == 2
    assert "web.json: dtype = 'int32', but the index says 'uint16'; they belong to different" in str(
        caught.value
    )


def test_a_sidecar_that_is_not_json_is_refused(corpus: Path) -> None:
    corpus.with_suffix(".json").write_text("{")
    with pytest.raises(InputError, match=r"web\.json: not JSON .*; remove it"):
        open_source(corpus)


@pytest.mark.parametrize("prefix", ["", ".", "/", "..", "data/..", Path()])
def test_a_source_without_a_name_is_refused(prefix: Path | str) -> None:
    with pytest.raises(InputError, match=r"names a folder; expected a corpus in it by its prefix, such as "):
        open_source(prefix)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        *((name, "512", "a whole number") for name in ("vocab_size", "max_id", "eos_id")),
        *((name, None, "a whole number") for name in ("vocab_size", "max_id", "eos_id")),
        *(("vocab_size", value, "a whole number, at least 1") for value in (0, -1, 1.5, True, [], {})),
        *((name, 3, "text") for name in ("tokenizer", "tokenizer_hash", "eos_token")),
    ],
)
def test_p36_a_sidecar_with_values_of_another_type_is_refused(
    corpus: Path, name: str, value: object, expected: str
) -> None:
    corpus.with_name(f"{corpus.name}.json").write_text(json.dumps({name: value}))
    with pytest.raises(
        InputError, match=re.escape(f"{name} = {value!r}; expected {expected}") + ".*: correct or remove it"
    ):
        open_source(corpus)


def test_a_sidecar_nested_beyond_reading_is_refused(corpus: Path) -> None:
    corpus.with_name(f"{corpus.name}.json").write_text("[" * 100_000)
    with pytest.raises(InputError, match=r"\.json: not JSON \(.*recursion.*\); remove it"):
        open_source(corpus)


def test_a_name_too_long_for_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot be read \(File name too long\); correct its name"):
        open_source(tmp_path / ("x" * 300))


def test_a_file_that_may_not_be_read_is_refused(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(self: Path, mode: str = "r") -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", closed)
    with pytest.raises(InputError, match=r"\.idx: cannot be read \(Permission denied\); .* its permissions"):
        open_source(corpus)


MEGATRON = Path(__file__).parent / "megatron"
DOCUMENTS = [np.array([1, 2, 9]), np.array([3, 9]), np.array([4, 5, 6, 7, 9])]


def test_what_is_written_reads_back_and_the_sidecar_says_what_it_is(tmp_path: Path) -> None:
    writer = IndexedWriter(tmp_path / "a.b", 10)
    writer.add(DOCUMENTS[:1])
    writer.add([])
    writer.add(DOCUMENTS[1:])
    assert not (tmp_path / "a.b.bin").exists()
    assert not (tmp_path / "a.b.idx").exists()
    writer.finish({"eos_id": 9})
    source = open_source(tmp_path / "a.b")
    assert source.tokens(0, 10).tolist() == np.concatenate(DOCUMENTS).tolist()
    assert source.document_lengths.tolist() == [3, 2, 5]
    assert source.sidecar == {
        "version": 1,
        "dtype": "uint16",
        "vocab_size": 10,
        "documents": 3,
        "tokens": 10,
        "eos_id": 9,
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.b.bin", "a.b.idx", "a.b.json"]


@pytest.mark.parametrize(("name", "vocab_size"), [("megatron_lm", 257), ("gpt_neox", 65_537)])
def test_the_bytes_are_those_that_megatron_lm_and_gpt_neox_write(
    tmp_path: Path, name: str, vocab_size: int
) -> None:
    source = open_source(MEGATRON / name)
    ends = np.cumsum(source.document_lengths)
    writer = IndexedWriter(tmp_path / name, vocab_size)
    writer.add(np.split(source.tokens(0, source.num_tokens), ends[:-1]))
    writer.finish({})
    for end in ("bin", "idx"):
        assert (tmp_path / f"{name}.{end}").read_bytes() == (MEGATRON / f"{name}.{end}").read_bytes()


@pytest.mark.parametrize(
    ("vocab_size", "name"), [(1, "uint16"), (65_536, "uint16"), (65_537, "int32"), (2**31, "int32")]
)
def test_p36_the_token_type_holds_the_last_id(tmp_path: Path, vocab_size: int, name: str) -> None:
    assert choose_dtype(vocab_size).name == name
    writer = IndexedWriter(tmp_path / "edge", vocab_size)
    writer.add([np.array([vocab_size - 1, 0])])
    writer.finish({})
    assert open_source(tmp_path / "edge").tokens(0, 2).tolist() == [vocab_size - 1, 0]


@pytest.mark.parametrize("vocab_size", [0, -1, 2**31 + 1])
def test_p36_a_vocabulary_that_no_token_type_holds_is_refused(vocab_size: int) -> None:
    with pytest.raises(InputError, match=f"a vocabulary of {vocab_size} entries; expected 1 to 2147483648"):
        choose_dtype(vocab_size)


@pytest.mark.parametrize(("wrong", "vocab_size"), [(65_536, 65_536), (300, 257), (-1, 257), (2**31, 100_000)])
def test_p36_an_id_outside_the_vocabulary_is_never_written(
    tmp_path: Path, wrong: int, vocab_size: int
) -> None:
    writer = IndexedWriter(tmp_path / "x", vocab_size)
    writer.add(DOCUMENTS[:1])
    with pytest.raises(
        InputError, match=rf"a token id of {wrong} in documents 1 to 2, outside the vocabulary"
    ):
        writer.add([DOCUMENTS[1], np.array([5, wrong])])
    writer.close()


def test_a_writer_continues_from_what_was_synced(tmp_path: Path) -> None:
    for prefix in ("whole", "torn"):
        writer = IndexedWriter(tmp_path / prefix, 10)
        writer.add(DOCUMENTS[:2])
        writer.sync()
        if prefix == "torn":
            writer.add(DOCUMENTS * 3)
            writer.close()  # killed: more than what is to come is on disk, but was never synced
            writer = IndexedWriter(tmp_path / prefix, 10, keep_documents=2, keep_tokens=5)
        writer.add(DOCUMENTS[2:])
        writer.finish({})
    for end in ("bin", "idx", "json"):
        assert (tmp_path / f"torn.{end}").read_bytes() == (tmp_path / f"whole.{end}").read_bytes()


def test_a_writer_does_not_continue_from_what_is_not_there(tmp_path: Path) -> None:
    writer = IndexedWriter(tmp_path / "x", 10)
    writer.add(DOCUMENTS[:1])
    writer.close()
    with pytest.raises(InputError, match="tokens: 6 bytes, expected at least 10; remove"):
        IndexedWriter(tmp_path / "x", 10, keep_documents=2, keep_tokens=5)


def test_an_old_index_never_meets_new_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    IndexedWriter(tmp_path / "x", 10).finish({})
    writer = IndexedWriter(tmp_path / "x", 10)
    writer.add(DOCUMENTS)

    def crash(*_: object) -> None:
        assert not (tmp_path / "x.idx").exists()
        raise KeyboardInterrupt

    monkeypatch.setattr("ds_pretrain.data.indexed.os.replace", crash)
    with pytest.raises(KeyboardInterrupt):
        writer.finish({})
    assert partial_folder(tmp_path / "x").is_dir()


def test_the_sidecar_is_json_that_people_can_read(tmp_path: Path) -> None:
    writer = IndexedWriter(tmp_path / "x", 10)
    writer.add(DOCUMENTS)
    writer.finish({"tokenizer": "t"})
    assert json.loads((tmp_path / "x.json").read_text())["tokenizer"] == "t"
