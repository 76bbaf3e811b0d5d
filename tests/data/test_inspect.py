"""Sources that are unfit for a run are found before it; the content of a source is reported."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds_pretrain.data import inspect as inspect_module
from ds_pretrain.data.indexed import IndexedWriter, TokenSource, corpus_file, open_source
from ds_pretrain.data.inspect import Passage, check_source, describe_source, read_passages
from ds_pretrain.data.sampler import SampleIds
from ds_pretrain.data.tokenizer import Tokenizer, open_tokenizer_of

MEGATRON = Path(__file__).parent / "megatron"


def write(
    prefix: Path, ids: list[int], vocab_size: int, foreign: bool = False, **sidecar: object
) -> TokenSource:
    writer = IndexedWriter(prefix, vocab_size)
    writer.add([np.array(ids)])
    writer.finish(sidecar)
    if foreign:
        prefix.with_name(f"{prefix.name}.json").unlink()
    return open_source(prefix)


def test_a_fit_source_has_no_problems() -> None:
    for name in ("megatron_lm", "gpt_neox", "megatron_lm_sentences"):
        assert check_source(open_source(MEGATRON / name), 128, 257) == []


def test_a_source_shorter_than_one_sequence_is_a_problem(tmp_path: Path) -> None:
    source = write(tmp_path / "x", [1] * 8, 10)
    assert check_source(source, 7, 10) == []
    (problem,) = check_source(source, 8, 10)
    assert (
        "x.bin: 8 tokens, fewer than one sample of 8 + 1; shorten the sequence or prepare more text"
        in problem
    )


def test_p36_an_id_out_of_range_is_named_by_file_and_offset(tmp_path: Path) -> None:
    ids = [1] * 70_000
    ids[66_000] = 300
    source = write(tmp_path / "x", ids, 301, foreign=True)
    assert check_source(source, 8, 301) == []
    (problem,) = check_source(source, 8, 300)
    assert (
        f"{tmp_path}/x.bin: offset 132000: token 66000 has id 300, outside the model's vocabulary of 300"
        in problem
    )


def test_p36_int32_ids_read_as_uint16_are_found(tmp_path: Path) -> None:
    ids = np.arange(40_000, 41_000, dtype="<i4")
    source = write(tmp_path / "x", ids.view("<u2").tolist(), 65_536, foreign=True)
    assert source.num_tokens == 2000
    assert "token 0 has id 40000" in check_source(source, 8, 32_000)[0]


def test_p36_a_negative_id_is_found() -> None:
    source = open_source(MEGATRON / "gpt_neox")
    stream = np.array(source.stream)
    stream[5] = -1
    damaged = TokenSource(source.prefix, stream, source.sequence_lengths, source.document_bounds, None)
    assert "offset 20: token 5 has id -1" in check_source(damaged, 8, 257)[0]


def test_p36_a_long_source_is_sampled_at_both_ends_and_between(tmp_path: Path) -> None:
    for place in (0, 1_500_000, 2_999_999):
        ids = np.ones(3_000_000, dtype=np.int64)
        ids[place] = 99
        source = write(tmp_path / f"x{place}", ids, 100, foreign=True)  # type: ignore[arg-type]
        assert f"token {place} has id 99" in check_source(source, 8, 99, scan_tokens=1_000_000)[0]


def test_p41_a_tokenizer_larger_than_the_model_is_a_problem_though_no_id_is(tmp_path: Path) -> None:
    source = write(tmp_path / "x", [1] * 20, 103, tokenizer="bpe+3", max_id=1)
    assert check_source(source, 8, 103) == []
    (problem,) = check_source(source, 8, 100)
    assert "x.json: its tokenizer 'bpe+3' has 103 entries, added tokens included, but the model's" in problem
    assert problem.endswith("set vocab_size in the model config to at least 103")


def test_p41_the_largest_recorded_id_counts_where_sampling_misses_it(tmp_path: Path) -> None:
    source = write(tmp_path / "x", [1] * 20, 50, max_id=80)
    (problem,) = check_source(source, 8, 60)
    assert "the largest token id is 80, but the model's vocabulary is 60" in problem


def test_all_problems_of_a_source_are_reported_at_once(tmp_path: Path) -> None:
    source = write(tmp_path / "x", [9] * 5, 10, tokenizer="t", eos_id=2)
    assert len(check_source(source, 8, 9)) == 3


def test_p37_the_report_gives_eos_per_million_and_warns_at_none(tmp_path: Path) -> None:
    report = describe_source(replace(open_source(MEGATRON / "megatron_lm"), sidecar={"eos_id": 256}))
    assert report.eos_per_million == pytest.approx(300 / 42_347 * 1e6)
    assert report.warnings == ()
    none = describe_source(write(tmp_path / "x", [1] * 100, 10, eos_id=5))
    assert none.eos_per_million == 0
    assert "x: 0 EOS (id 5) per million tokens: documents run into one another" in none.warnings[0]


def test_p37_a_foreign_source_says_that_its_separators_are_not_known() -> None:
    report = describe_source(open_source(MEGATRON / "megatron_lm"))
    assert report.eos_per_million is None
    assert "nothing says which id is EOS" in report.warnings[0]


def test_p37_eos_stays_a_label_though_padding_has_the_same_id(tmp_path: Path) -> None:
    """Three documents of 3, 5 and 9 tokens in rows of 8: each EOS is a label, unmasked."""
    eos = pad = 0
    documents = [[*range(1, n), eos] for n in (3, 5, 9)]
    writer = IndexedWriter(tmp_path / "x", 10)
    writer.add([np.array(document) for document in documents])
    writer.finish({"eos_id": eos, "pad_id": pad})
    source = open_source(tmp_path / "x")
    stream = [token for document in documents for token in document]
    labels = source.samples(range(source.num_samples(8)), 8)[:, 1:]
    assert labels.ravel().tolist() == stream[1:17]
    assert int((labels == eos).sum()) == len(documents)
    assert json.loads((tmp_path / "x.json").read_text())["eos_id"] == eos


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
        for found in read_passages(_ids(samples, seq_len), samples, {"book": book}):
            start = found.sample * seq_len
            tokens = STREAM[start : start + seq_len + 1]
            assert found.text == "<|endoftext|>".join(
                part.decode("utf-8", "replace") for part in tokens.split(b"|")
            )
            assert found.documents == tuple(sorted({_owner(start + at) for at in range(seq_len + 1)}))


def test_passages_come_in_the_order_asked_for_from_all_sources(tmp_path: Path) -> None:
    sources = {name: _source(tmp_path / name, {"tokenizer": "bytes"}) for name in ("book", "web")}
    ids = _ids([0, 2, 1], 5, [0, 1, 0])
    assert read_passages(ids, [2, 1, 2], sources) == [
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
        monkeypatch.setattr(inspect_module, "_CHUNK", chunk)
        for seq_len in (1, 2, 3, 9):
            samples = list(range(source.num_samples(seq_len)))
            found = [p.documents for p in read_passages(_ids(samples, seq_len), samples, {"book": source})]
            assert found == [
                tuple(sorted(set(owners[s * seq_len : s * seq_len + seq_len + 1]))) for s in samples
            ]


def test_without_a_tokenizer_the_ids_are_shown_and_it_is_said(tmp_path: Path) -> None:
    book = _source(tmp_path / "book", {})
    [found] = read_passages(_ids([0], 3), [0], {"book": book})
    assert found.text == "[token ids: no tokenizer is known for book] 102 105 114 115"


def test_a_lost_tokenizer_costs_the_text_and_not_the_passage(tmp_path: Path) -> None:
    book = _source(tmp_path / "book", {"tokenizer": str(tmp_path / "gone")})
    [found] = read_passages(_ids([0], 3), [0], {"book": book})
    assert f"[token ids: {corpus_file(book.prefix, 'json')}: its tokenizer is neither" in found.text
    assert found.text.endswith("] 102 105 114 115")


def test_a_tokenizer_is_loaded_only_where_a_passage_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = {name: _source(tmp_path / name, {"tokenizer": "bytes"}) for name in ("book", "web")}
    loaded: list[Path] = []

    def counting(source: TokenSource) -> Tokenizer | None:
        loaded.append(source.prefix)
        return open_tokenizer_of(source)

    monkeypatch.setattr(inspect_module, "open_tokenizer_of", counting)
    ids = _ids([0, 1, 2], 3, [0, 1, 1])
    assert read_passages(ids, [], sources) == []
    assert loaded == []
    read_passages(ids, [1, 2], sources)
    assert loaded == [tmp_path / "web"]
