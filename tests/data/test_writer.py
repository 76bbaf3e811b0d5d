"""Written corpora read back, at the edges of the token types, and after a kill."""

import json
from pathlib import Path

import numpy as np
import pytest

from ds_pretrain.core.errors import InputError
from ds_pretrain.data.indexed import open_source
from ds_pretrain.data.writer import IndexedWriter, dtype_for, partial_folder

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
    assert dtype_for(vocab_size).name == name
    writer = IndexedWriter(tmp_path / "edge", vocab_size)
    writer.add([np.array([vocab_size - 1, 0])])
    writer.finish({})
    assert open_source(tmp_path / "edge").tokens(0, 2).tolist() == [vocab_size - 1, 0]


@pytest.mark.parametrize("vocab_size", [0, -1, 2**31 + 1])
def test_p36_a_vocabulary_that_no_token_type_holds_is_refused(vocab_size: int) -> None:
    with pytest.raises(InputError, match=f"a vocabulary of {vocab_size} entries; expected 1 to 2147483648"):
        dtype_for(vocab_size)


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

    monkeypatch.setattr("ds_pretrain.data.writer.os.replace", crash)
    with pytest.raises(KeyboardInterrupt):
        writer.finish({})
    assert partial_folder(tmp_path / "x").is_dir()


def test_the_sidecar_is_json_that_people_can_read(tmp_path: Path) -> None:
    writer = IndexedWriter(tmp_path / "x", 10)
    writer.add(DOCUMENTS)
    writer.finish({"tokenizer": "t"})
    assert json.loads((tmp_path / "x.json").read_text())["tokenizer"] == "t"
