"""A sample as a person looks at it: its documents and its text."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds_pretrain.data import passages as passages_module
from ds_pretrain.data.indexed import TokenSource, file_of, open_source
from ds_pretrain.data.passages import Passage, passages
from ds_pretrain.data.sampler import SampleIds
from ds_pretrain.data.tokenizer import Tokenizer, tokenizer_of
from ds_pretrain.data.writer import IndexedWriter

DOCUMENTS = ("first words", "2nd", "the third one is longer", "é", "last")
STREAM = "".join(text + "|" for text in DOCUMENTS).encode()  # | for EOS: what the corpus holds, by byte


def _source(prefix: Path, sidecar: dict[str, Any]) -> TokenSource:
    writer = IndexedWriter(prefix, 257)
    writer.add([np.array([*text.encode(), 256]) for text in DOCUMENTS])
    writer.finish({"eos_id": 256, **sidecar})
    return open_source(prefix)


def _ids(samples: list[int], seq_len: int, source: list[int] | None = None) -> SampleIds:
    where = np.array([0] * len(samples) if source is None else source)
    epochs, draws = np.arange(len(samples)), np.arange(len(samples), dtype=np.uint64)
    return SampleIds(3, seq_len, ("book", "web"), where, epochs, np.array(samples), draws)


def _owner(token: int) -> int:
    return STREAM[:token].count(b"|")


def test_a_passage_has_the_text_of_its_tokens_and_every_document_that_they_lie_in(tmp_path: Path) -> None:
    book = _source(tmp_path / "book", {"tokenizer": "bytes"})
    for seq_len in (1, 2, 3, 7, 20):
        samples = list(range(book.num_samples(seq_len)))
        for found in passages(_ids(samples, seq_len), samples, {"book": book}):
            start = found.sample * seq_len
            tokens = STREAM[start : start + seq_len + 1]
            assert found.text == "<|endoftext|>".join(
                part.decode("utf-8", "replace") for part in tokens.split(b"|")
            )
            assert found.documents == tuple(sorted({_owner(start + at) for at in range(seq_len + 1)}))


def test_passages_come_in_the_order_asked_for_from_all_sources(tmp_path: Path) -> None:
    sources = {name: _source(tmp_path / name, {"tokenizer": "bytes"}) for name in ("book", "web")}
    ids = _ids([0, 2, 1], 5, [0, 1, 0])
    assert passages(ids, [2, 1, 2], sources) == [
        Passage("book", 2, 1, (0,), " words"),
        Passage("web", 1, 2, (0, 1), "s<|endoftext|>2nd<|endoftext|>"),
        Passage("book", 2, 1, (0,), " words"),
    ]


def test_documents_of_several_sequences_and_without_tokens_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron's own corpora have both; the index may be longer than what is added up at once."""
    lengths, bounds = np.array([3, 2, 0, 4, 0, 1], np.int32), np.array([0, 2, 3, 3, 5, 6], np.int64)
    source = TokenSource(tmp_path / "x", np.arange(10), lengths, bounds, None)
    owners = [0] * 5 + [3] * 4 + [4]  # documents 1 and 2 hold no token
    for chunk in (1, 2, 100):
        monkeypatch.setattr(passages_module, "_CHUNK", chunk)
        for seq_len in (1, 2, 3, 9):
            samples = list(range(source.num_samples(seq_len)))
            found = [p.documents for p in passages(_ids(samples, seq_len), samples, {"book": source})]
            assert found == [
                tuple(sorted(set(owners[s * seq_len : s * seq_len + seq_len + 1]))) for s in samples
            ]


def test_without_a_tokenizer_the_ids_are_shown_and_it_is_said(tmp_path: Path) -> None:
    book = _source(tmp_path / "book", {})
    [found] = passages(_ids([0], 3), [0], {"book": book})
    assert found.text == "[token ids: no tokenizer is known for book] 102 105 114 115"


def test_a_lost_tokenizer_costs_the_text_and_not_the_passage(tmp_path: Path) -> None:
    book = _source(tmp_path / "book", {"tokenizer": str(tmp_path / "gone")})
    [found] = passages(_ids([0], 3), [0], {"book": book})
    assert f"[token ids: {file_of(book.prefix, 'json')}: its tokenizer is neither" in found.text
    assert found.text.endswith("] 102 105 114 115")


def test_a_tokenizer_is_loaded_only_where_a_passage_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = {name: _source(tmp_path / name, {"tokenizer": "bytes"}) for name in ("book", "web")}
    loaded: list[Path] = []

    def counting(source: TokenSource) -> Tokenizer | None:
        loaded.append(source.prefix)
        return tokenizer_of(source)

    monkeypatch.setattr(passages_module, "tokenizer_of", counting)
    ids = _ids([0, 1, 2], 3, [0, 1, 1])
    assert passages(ids, [], sources) == []
    assert loaded == []
    passages(ids, [1, 2], sources)
    assert loaded == [tmp_path / "web"]
