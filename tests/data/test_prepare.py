"""Preparing a corpus: what comes out, whatever the workers and however often it is killed."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds_pretrain.data import encode
from ds_pretrain.data import prepare as prepare_module
from ds_pretrain.data.indexed import open_source
from ds_pretrain.data.prepare import Summary, prepare
from ds_pretrain.data.sources import check_source, describe_source
from ds_pretrain.data.tokenizer import load_tokenizer
from ds_pretrain.errors import InputError

ENDS = ("bin", "idx", "json")


def run(sources: list[Path], out: Path, tokenizer: str = "bytes", **options: Any) -> Summary:
    said: list[str] = options.pop("said", [])
    return prepare([str(s) for s in sources], tokenizer, out, progress=False, say=said.append, **options)


def corpus_bytes(prefix: Path) -> list[bytes]:
    return [prefix.with_name(f"{prefix.name}.{end}").read_bytes() for end in ENDS]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Sixty text files of very different lengths, some empty, one not UTF-8."""
    rng = random.Random(0)
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(60):
        words = rng.choice([0, 1, 10, 100, 5000])
        text = " ".join(rng.choice(["alpha", "beta", "γάμμα", "\n"]) for _ in range(words))
        (folder / f"{number:02}.txt").write_text(text, encoding="utf-8")
    (folder / "60.txt").write_bytes(b"caf\xe9")
    (folder / "61.txt").write_text(" \n ")
    return folder


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    with path.open("w") as file:
        for number in range(3000):
            file.write(json.dumps({"text": f"row {number} " * (number % 50)}) + "\n")
    return path


def test_the_stream_is_each_document_and_one_separator(folder: Path, tmp_path: Path) -> None:
    summary = run([folder], tmp_path / "out")
    texts = [path.read_bytes().decode("utf-8", "replace") for path in sorted(folder.iterdir())]
    kept = [text for text in texts if text.strip()]
    expected = [token for text in kept for token in [*text.encode(), 256]]
    source = open_source(summary.prefix)
    assert source.tokens(0, source.num_tokens).tolist() == expected
    assert (
        (summary.documents, summary.tokens)
        == (len(kept), len(expected))
        == (source.num_documents, source.num_tokens)
    )
    assert summary.empty_dropped == len(texts) - len(kept) > 1
    assert summary.longest == max(len(text.encode()) + 1 for text in kept) == source.document_lengths.max()
    assert (summary.replaced, summary.dtype, summary.vocab_size) == (1, "uint16", 257)
    assert all(path.is_file() for path in summary.paths)
    assert not (tmp_path / "out.partial").exists()


def test_p37_d_documents_have_d_separators_at_their_ends_none_doubled(tmp_path: Path) -> None:
    """Also when the tokenizer adds an end of its own, and when a text spells the token out."""
    import tokenizers

    texts = tmp_path / "texts"
    texts.mkdir()
    for number, length in enumerate((3, 5, 9)):
        (texts / f"{number}.txt").write_text("w" * (length - 1) + "</s>" * (number == 1))
    run([texts], tmp_path / "plain", str(tmp_path / "bpe"), train_tokenizer_size=257)
    model = tokenizers.Tokenizer.from_file(str(tmp_path / "bpe/tokenizer.json"))
    model.add_special_tokens(["</s>"])
    model.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", model.token_to_id("</s>"))]
    )
    (tmp_path / "ending").mkdir()
    model.save(str(tmp_path / "ending/tokenizer.json"))
    eos = model.token_to_id("</s>")
    for out, tokenizer, token in (("plain", "bpe", 0), ("doubled", "ending", eos)):
        if out != "plain":
            run([texts], tmp_path / out, str(tmp_path / tokenizer), eos_token="</s>")
        source = open_source(tmp_path / out)
        stream = source.tokens(0, source.num_tokens)
        ends = np.cumsum(source.document_lengths) - 1
        np.testing.assert_array_equal(np.flatnonzero(stream == token), ends)
        assert source.document_lengths.tolist() == [3, 5 + 4, 9]
        assert describe_source(source).warnings == ()


def test_p36_p41_type_vocabulary_and_tokenizer_are_stored_beside_the_data(
    folder: Path, tmp_path: Path
) -> None:
    summary = run([folder], tmp_path / "out", str(tmp_path / "bpe"), train_tokenizer_size=300)
    tokenizer = load_tokenizer(str(tmp_path / "bpe"))
    source = open_source(tmp_path / "out")
    assert source.sidecar == {
        "version": 1,
        "dtype": "uint16",
        "vocab_size": tokenizer.vocab_size,
        "documents": summary.documents,
        "tokens": summary.tokens,
        "tokenizer": str(tmp_path / "bpe"),
        "tokenizer_hash": tokenizer.hash,
        "eos_id": tokenizer.eos_id,
        "eos_token": "<|endoftext|>",
        "max_id": int(source.tokens(0, source.num_tokens).max()),
    }
    assert "added tokens included" in check_source(source, 8, tokenizer.vocab_size - 1)[0]


def test_p41_a_tokenizer_with_added_tokens_needs_rows_for_all_of_them(folder: Path, tmp_path: Path) -> None:
    import tokenizers

    run([folder], tmp_path / "base", str(tmp_path / "bpe"), train_tokenizer_size=257)
    path = tmp_path / "bpe/tokenizer.json"
    model = tokenizers.Tokenizer.from_file(str(path))
    model.add_tokens(["alpha", "beta", "γάμμα"])  # plain ones: they occur in the text
    model.save(str(path))
    run([folder], tmp_path / "added", str(tmp_path / "bpe"))
    source = open_source(tmp_path / "added")
    base = load_tokenizer("bytes").vocab_size
    assert source.sidecar is not None
    assert (source.sidecar["vocab_size"], source.sidecar["max_id"]) == (base + 3, base + 2)
    assert check_source(source, 8, base + 3) == []
    assert len(check_source(source, 8, base)) == 2  # by the tokenizer's size, and by an id in the data


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_workers_do_not_change_the_output(
    rows: Path, folder: Path, tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run([rows, folder], tmp_path / "one", workers=1)
    monkeypatch.setattr(encode, "_BATCH_CHARACTERS", 1000)
    run([rows, folder], tmp_path / "other", workers=workers)
    assert corpus_bytes(tmp_path / "other") == corpus_bytes(tmp_path / "one")


class Killed(BaseException):
    """Stands for a kill at a chosen place."""


def test_work_that_ends_anywhere_continues_without_starting_over(
    rows: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run([rows, folder], tmp_path / "whole")
    monkeypatch.setattr(encode, "_BATCH_CHARACTERS", 20_000)
    monkeypatch.setattr(prepare_module, "SYNC_TOKENS", 50_000)
    read_batches, starts = encode.read_batches, []

    def dies_later(*args: Any) -> Iterator[encode.Batch]:
        starts.append(args[2].documents)
        for number, batch in enumerate(read_batches(*args)):
            if number == 15:
                raise Killed
            yield batch

    monkeypatch.setattr(prepare_module, "read_batches", dies_later)
    for _ in range(100):
        try:
            summary = run([rows, folder], tmp_path / "torn", workers=2)
            break
        except Killed:
            assert not any((tmp_path / f"torn.{end}").exists() for end in ENDS)
    assert len(starts) > 3
    assert starts == sorted(set(starts))
    assert summary.resumed_at == starts[-1] > 0
    assert corpus_bytes(tmp_path / "torn") == corpus_bytes(tmp_path / "whole")


@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_kill_while_publishing_is_survived(
    folder: Path, tmp_path: Path, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run([folder], tmp_path / "whole")
    replace, calls = os.replace, []

    def dies_after(source: Any, target: Any) -> None:
        if Path(target).name.startswith("torn."):
            if len(calls) == after - 1:
                raise Killed
            calls.append(target)
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", dies_after)
        with pytest.raises(Killed):
            run([folder], tmp_path / "torn")
    assert not (tmp_path / "torn.idx").exists()
    run([folder], tmp_path / "torn")
    assert corpus_bytes(tmp_path / "torn") == corpus_bytes(tmp_path / "whole")
    assert not (tmp_path / "torn.partial").exists()


def test_changed_inputs_start_over_and_it_is_said(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(rows, tmp_path / "out", monkeypatch)
    with rows.open("a") as file:
        file.write(json.dumps({"text": "one more"}) + "\n")
    said: list[str] = []
    summary = run([rows], tmp_path / "out", said=said)
    assert summary.resumed_at == 0
    assert "the inputs or the tokenizer changed since the interrupted call; starting over" in said[0]
    run([rows], tmp_path / "fresh")
    assert corpus_bytes(tmp_path / "out") == corpus_bytes(tmp_path / "fresh")


def test_lost_partial_files_start_over_and_it_is_said(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(rows, tmp_path / "out", monkeypatch)
    (tmp_path / "out.partial/tokens").unlink()
    said: list[str] = []
    assert run([rows], tmp_path / "out", said=said).resumed_at == 0
    assert "what the interrupted call wrote is no longer there; starting over" in said[0]


def interrupt(rows: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave a prepare of `rows` half done."""
    with monkeypatch.context() as patch:
        patch.setattr(encode, "_BATCH_CHARACTERS", 20_000)
        patch.setattr(prepare_module, "SYNC_TOKENS", 50_000)

        def dies(*args: Any) -> Iterator[encode.Batch]:
            for number, batch in enumerate(encode.read_batches(*args)):
                if number == 20:
                    raise Killed
                yield batch

        patch.setattr(prepare_module, "read_batches", dies)
        with pytest.raises(Killed):
            run([rows], out, workers=1)
    assert (out.with_name("out.partial") / "state.json").is_file()


SLOW = """
import sys, time
from ds_pretrain.data import encode, prepare
encode._BATCH_CHARACTERS, prepare.SYNC_TOKENS = 5_000, 100_000
encoded = prepare.encode_in_order
def slowly(*args):
    for item in encoded(*args):
        time.sleep(0.004)
        yield item
prepare.encode_in_order = slowly
folder = sys.argv[1]
summary = prepare.prepare(sys.argv[2:], folder + "/bpe", folder + "/torn", 2, train_tokenizer_size=300)
print(summary.resumed_at, summary.documents)
"""


def test_sigkill_in_the_middle_then_the_same_command_gives_the_same_bytes(
    rows: Path, folder: Path, tmp_path: Path
) -> None:
    inputs = [str(rows), str(folder)]
    command = [sys.executable, "-c", SLOW, str(tmp_path), *inputs]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    state = tmp_path / "torn.partial/state.json"
    deadline = time.monotonic() + 120
    while not state.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    done = json.loads(state.read_text())["counts"]["documents"]
    assert not (tmp_path / "torn.idx").exists()
    again = subprocess.run(command, capture_output=True, text=True, check=True)
    resumed_at, documents = map(int, again.stdout.split())
    assert resumed_at == done > 0
    assert documents > resumed_at
    assert "already trained on these inputs; used as it is" in again.stderr
    assert f"torn: continuing after {done:,} documents" in again.stderr
    run([rows, folder], tmp_path / "whole", str(tmp_path / "bpe"))
    assert corpus_bytes(tmp_path / "torn") == corpus_bytes(tmp_path / "whole")


def test_an_existing_corpus_is_kept_unless_overwriting_is_asked_for(
    folder: Path, rows: Path, tmp_path: Path
) -> None:
    run([folder], tmp_path / "out")
    before = corpus_bytes(tmp_path / "out")
    with pytest.raises(
        InputError, match=r"--out .*out: out.bin, out.idx, out.json exist already; choose another"
    ):
        run([rows], tmp_path / "out.bin")
    assert corpus_bytes(tmp_path / "out") == before
    run([rows], tmp_path / "out", overwrite=True)
    run([rows], tmp_path / "fresh")
    assert corpus_bytes(tmp_path / "out") == corpus_bytes(tmp_path / "fresh")


def test_a_tokenizer_is_never_trained_over_another(folder: Path, rows: Path, tmp_path: Path) -> None:
    bpe = str(tmp_path / "bpe")
    first = run([folder], tmp_path / "a", bpe, train_tokenizer_size=300)
    with pytest.raises(InputError, match="exists, and was not trained on these inputs with 301 entries"):
        run([folder], tmp_path / "b", bpe, train_tokenizer_size=301)
    with pytest.raises(InputError, match="exists, and was not trained on these inputs"):
        run([rows], tmp_path / "b", bpe, train_tokenizer_size=300)
    assert run([rows], tmp_path / "b", bpe).tokenizer_hash == first.tokenizer_hash
    assert run([rows], tmp_path / "c", bpe, train_tokenizer_size=300, overwrite=True).tokenizer_hash != (
        first.tokenizer_hash
    )
    assert sorted(path.name for path in tmp_path.iterdir() if "partial" in path.name) == []


def test_a_tokenizer_smaller_than_asked_for_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("aaaa bbbb")
    said: list[str] = []
    run([tmp_path / "a.txt"], tmp_path / "out", str(tmp_path / "bpe"), train_tokenizer_size=5000, said=said)
    assert "(not 5000: the text has no more pairs to merge)" in said[0]


def test_training_the_built_in_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="`bytes` is built in; pass the folder to write with --tokenizer"):
        run([folder], tmp_path / "out", train_tokenizer_size=300)


def test_sources_without_text_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(" \n")
    with pytest.raises(InputError, match=r"a\.txt: no documents with text \(1 empty ones\); check the path"):
        run([tmp_path / "a.txt"], tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_an_unwritable_output_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"--out = .*file: cannot write there"):
        run([folder], tmp_path / "file/out")


def test_workers_below_one_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--workers 0: expected at least 1"):
        run([folder], tmp_path / "out", workers=0)


def test_an_error_while_reading_reaches_the_caller_and_keeps_no_rubbish(rows: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no column 'body'"):
        run([rows], tmp_path / "out", text_column="body")
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_a_second_prepare_at_the_same_place_is_refused(folder: Path, tmp_path: Path) -> None:
    import fcntl

    (tmp_path / "out.partial").mkdir()
    descriptor = os.open(tmp_path / "out.partial", os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(InputError, match=r"out\.partial: another prepare is writing there; wait for it"):
            run([folder], tmp_path / "out")
    finally:
        os.close(descriptor)
    run([folder], tmp_path / "out")


def test_lines_and_paragraphs_can_be_documents(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\n\nthree\n")
    assert run([path], tmp_path / "file").documents == 1
    summary = run([path], tmp_path / "line", document="line")
    assert (summary.documents, summary.empty_dropped) == (3, 1)
    assert run([path], tmp_path / "paragraph", document="paragraph").documents == 2
