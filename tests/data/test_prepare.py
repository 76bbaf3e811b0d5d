"""Preparing a corpus: what comes out, whatever the workers and however often it is killed."""

import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds_pretrain.commands import cli
from ds_pretrain.core.errors import EXIT_BAD_INPUT, EXIT_PREEMPTED, InputError, Preempted
from ds_pretrain.data import prepare as prepare_module
from ds_pretrain.data.indexed import IndexedWriter, open_source
from ds_pretrain.data.inspect import check_source, describe_source
from ds_pretrain.data.prepare import DocumentBatch, PrepareOptions, Summary, prepare, raise_on_signals
from ds_pretrain.data.tokenizer import load_tokenizer

ENDS = ("bin", "idx", "json")


def run(sources: list[Path], out: Path | str, tokenizer: str = "bytes", **options: Any) -> Summary:
    said: list[str] = options.pop("said", [])
    chosen = PrepareOptions([str(s) for s in sources], tokenizer, out, progress=False, **options)
    return prepare(chosen, said.append)


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
    assert all((tmp_path / f"out.{end}").is_file() for end in ENDS)
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
    monkeypatch.setattr(prepare_module, "_BATCH_CHARACTERS", 1000)
    run([rows, folder], tmp_path / "other", workers=workers)
    assert corpus_bytes(tmp_path / "other") == corpus_bytes(tmp_path / "one")


class Killed(BaseException):
    """Stands for a kill at a chosen place."""


def test_work_that_ends_anywhere_continues_without_starting_over(
    rows: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run([rows, folder], tmp_path / "whole")
    monkeypatch.setattr(prepare_module, "_BATCH_CHARACTERS", 20_000)
    monkeypatch.setattr(prepare_module, "SYNC_TOKENS", 50_000)
    read_batches, starts = prepare_module.read_batches, []

    def dies_later(*args: Any) -> Iterator[DocumentBatch]:
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
    replace = os.replace
    calls: list[Any] = []

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
    assert "the files of the interrupted call are gone; starting over" in said[0]


def interrupt(
    rows: Path, out: Path, monkeypatch: pytest.MonkeyPatch, after: int = 20, sync_tokens: int = 50_000
) -> None:
    """Leave a prepare of `rows` half done."""
    read_batches = prepare_module.read_batches
    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "_BATCH_CHARACTERS", 20_000)
        patch.setattr(prepare_module, "SYNC_TOKENS", sync_tokens)

        def dies(*args: Any) -> Iterator[DocumentBatch]:
            for number, batch in enumerate(read_batches(*args)):
                if number == after:
                    raise Killed
                yield batch

        patch.setattr(prepare_module, "read_batches", dies)
        with pytest.raises(Killed):
            run([rows], out, workers=1)
    assert (out.with_name("out.partial") / "state.json").is_file()


SLOW = """
import sys, time
from ds_pretrain.data import prepare
prepare._BATCH_CHARACTERS, prepare.SYNC_TOKENS = 5_000, 100_000
encoded = prepare.encode_in_order
def slowly(*args):
    for item in encoded(*args):
        time.sleep(0.004)
        yield item
prepare.encode_in_order = slowly
folder = sys.argv[1]
options = prepare.PrepareOptions(sys.argv[2:], folder + "/bpe", folder + "/torn", 2, train_tokenizer_size=300)
summary = prepare.prepare(options)
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


def test_outputs_inside_the_source_folder_are_not_tokenized(folder: Path, tmp_path: Path) -> None:
    said: list[str] = []
    (folder / "tok").mkdir()
    (folder / "tok/notes.txt").write_text("about the tokenizer")
    first = run([folder], folder / "out", str(folder / "bpe"), train_tokenizer_size=300)
    before = corpus_bytes(folder / "out")
    again = run([folder], folder / "out", str(folder / "bpe"), overwrite=True, said=said)
    assert (again.documents, again.tokens) == (first.documents, first.tokens)
    assert corpus_bytes(folder / "out") == before
    assert any("out.json" in line or "out.bin" in line for line in said)
    with pytest.raises(
        InputError, match=r"out\.json: belongs to the tokenizer, or is what this command writes"
    ):
        run([folder / "out.json"], folder / "out", overwrite=True)
    assert corpus_bytes(folder / "out") == before


def test_interrupted_work_inside_the_source_folder_continues(
    rows: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first call left there must not change the inputs of the second."""
    interrupt(folder, folder / "out", monkeypatch, after=8, sync_tokens=1)
    assert run([folder], folder / "out").resumed_at > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer": "./nope"}, "tokenizer ./nope: no such file or folder"),
        ({"text_column": "body"}, "no column 'body'"),
        ({"train_tokenizer_size": 300, "tokenizer": "DIR/bpe", "text_column": "body"}, "no column 'body'"),
        ({"train_tokenizer_size": 3, "tokenizer": "DIR/bpe"}, "at least 257 entries"),
        ({"train_tokenizer_size": 300, "tokenizer": "DIR/bpe", "eos_token": "</s>"}, "leave it out"),
        ({"eos_token": "</s>"}, "--eos-token </s>: `bytes` ends a document with an id of its own"),
        ({"workers": 0}, "--workers 0: expected at least 1"),
    ],
)
def test_nothing_is_written_by_a_call_that_fails(
    rows: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    folder = tmp_path / "new/sub"
    before = sorted(tmp_path.rglob("*"))
    options = {k: v.replace("DIR", str(folder)) if isinstance(v, str) else v for k, v in options.items()}
    with pytest.raises(InputError, match=message):
        run([rows], folder / "y", **options)
    assert sorted(tmp_path.rglob("*")) == before


def test_all_that_is_wrong_is_reported_at_once(rows: Path, tmp_path: Path) -> None:
    run([rows], tmp_path / "out")
    with pytest.raises(InputError) as caught:
        run([rows, rows, tmp_path / "gone.txt"], tmp_path / "out", "./nope", workers=0)
    for problem, said in zip(
        caught.value.problems,
        ("--workers 0", "gone.txt: no such", "given twice", "tokenizer ./nope", "exist already"),
        strict=True,
    ):
        assert said in problem


@pytest.mark.parametrize("out", ["", ".", "/", "..", "p/..", "p/dir/"])
def test_a_prefix_without_a_name_is_refused(rows: Path, out: str) -> None:
    with pytest.raises(InputError, match=r"names a folder; expected a corpus in it by its prefix, such as "):
        run([rows], out)


def test_a_prefix_too_long_for_a_file_is_refused(rows: Path, tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"--out: cannot write .* \(File name too long\); choose another prefix"
    ):
        run([rows], tmp_path / ("x" * 250))


def test_a_folder_that_training_did_not_make_is_never_overwritten(
    folder: Path, rows: Path, tmp_path: Path
) -> None:
    """Neither the texts themselves, nor a trained tokenizer to which someone added something."""
    run([rows], tmp_path / "a", str(tmp_path / "bpe"), train_tokenizer_size=300)
    (tmp_path / "bpe/mine.txt").write_text("mine")
    for path in (folder, tmp_path / "bpe", rows):
        with pytest.raises(InputError, match="was not made by --train-tokenizer"):
            run([rows], tmp_path / "b", str(path), train_tokenizer_size=400, overwrite=True)
    assert len(list(folder.iterdir())) == 62
    assert (tmp_path / "bpe/mine.txt").exists()


@pytest.mark.parametrize("state", ["", "{", "[]", '{"key": "x", "counts": {"unknown": 1}}'])
def test_a_damaged_state_starts_over_and_it_is_said(folder: Path, tmp_path: Path, state: str) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial/state.json").write_text(state)
    said: list[str] = []
    assert run([folder], tmp_path / "out", said=said).resumed_at == 0
    assert "state.json: cannot be read; starting over" in said[0]


def test_a_full_disk_says_what_to_do_and_keeps_what_was_synced(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run([rows], tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "_BATCH_CHARACTERS", 20_000)
        patch.setattr(prepare_module, "SYNC_TOKENS", 50_000)
        add, calls = IndexedWriter.add, [0]

        def full(self: Any, documents: Any) -> None:
            calls[0] += 1
            if calls[0] == 20:
                raise OSError(28, "No space left on device")
            add(self, documents)

        patch.setattr(IndexedWriter, "add", full)
        with pytest.raises(
            InputError, match=r"--out .*out: cannot be written \(No space left on device\); free disk space"
        ):
            run([rows], tmp_path / "out")
    assert run([rows], tmp_path / "out").resumed_at > 0
    assert corpus_bytes(tmp_path / "out") == corpus_bytes(tmp_path / "whole")


def test_work_is_synced_by_time_too(rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_module, "SYNC_SECONDS", 0.0)
    interrupt(rows, tmp_path / "out", monkeypatch, sync_tokens=1 << 24)
    assert run([rows], tmp_path / "out").resumed_at > 0


ENDLESS = """
import sys, time
from ds_pretrain.commands import cli
from ds_pretrain.data import prepare
prepare._BATCH_CHARACTERS = 5_000
encoded = prepare.encode_in_order
def slowly(*args):
    for number, item in enumerate(encoded(*args)):
        if number == 10:
            print("half way", flush=True)
        if number >= 10:
            time.sleep(0.2)
        yield item
if sys.argv.pop(1) == "slowly":
    prepare.encode_in_order = slowly
sys.exit(cli.main(["prepare", *sys.argv[1:]]))
"""


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGTERM, signal.SIGHUP))],
)
def test_a_stop_keeps_the_work_and_says_how_to_continue(
    rows: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """Also below the tokens of a sync: Ctrl-C, SIGTERM and SIGHUP lose nothing that was tokenized."""
    words = [str(rows), "--tokenizer", "bytes", "--out", str(tmp_path / "out"), "--quiet"]
    process = subprocess.Popen(
        [sys.executable, "-c", ENDLESS, "slowly", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: (
            [signal.signal(s, signal.SIG_DFL) for s in (signal.SIGTERM, signal.SIGHUP)]
            and signal.signal(signal.SIGINT, signal.default_int_handler)
        ),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "half way\n"
    process.send_signal(number)
    _, complained = process.communicate(timeout=60)
    assert process.returncode == EXIT_PREEMPTED
    (line,) = complained.splitlines()
    found = re.fullmatch(
        r"ds-pretrain: .*/out: interrupted; ([\d,]+) documents, [\d,]+ tokens are kept, and the same command "
        "continues after them",
        line,
    )
    assert found, line
    done = subprocess.run(
        [sys.executable, "-c", ENDLESS, "fast", *words],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert f"out: continuing after {found[1]} documents" in done.stderr
    run([rows], tmp_path / "whole")
    assert corpus_bytes(tmp_path / "out") == corpus_bytes(tmp_path / "whole")


def test_a_stop_before_anything_is_written_says_so_and_leaves_nothing(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ds_pretrain.data.tokenizer.train_tokenizer", interrupted)
    with pytest.raises(
        Preempted, match="interrupted before a document was written; the same command starts over"
    ):
        run([rows], tmp_path / "new/out", str(tmp_path / "bpe"), train_tokenizer_size=300)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_signals_are_given_back(folder: Path, tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    run([folder], tmp_path / "out")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


def test_a_hangup_that_is_ignored_stays_ignored() -> None:
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with raise_on_signals():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def test_another_thread_can_prepare(folder: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(run, [folder], tmp_path / "out").result().documents > 0


def test_the_command_says_loudly_which_bytes_were_not_utf8(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--tokenizer", "bytes", "--quiet", "--out"]
    assert cli.main(["prepare", str(folder), *words, str(tmp_path / "out")]) == 0
    assert "WARNING    1 document with U+FFFD in place of bytes that are not UTF-8" in capsys.readouterr().err
    (folder / "60.txt").unlink()
    assert cli.main(["prepare", str(folder), *words, str(tmp_path / "clean")]) == 0
    assert "WARNING" not in capsys.readouterr().err


def test_the_command_sees_the_slash_at_the_end_of_a_prefix(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dir").mkdir()
    assert (
        cli.main(["prepare", str(rows), "--tokenizer", "bytes", "--out", f"{tmp_path}/dir/"])
        == EXIT_BAD_INPUT
    )
    assert f"'{tmp_path}/dir/' names a folder; expected a corpus in it" in capsys.readouterr().err
    assert not (tmp_path / "dir.bin").exists()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("screen", "enabled"), [(Terminal(), True), (io.StringIO(), True), (Terminal(), False)]
)
def test_a_terminal_gets_a_bar_that_is_wiped_and_a_short_call_leaves_nothing_in_a_log(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, screen: io.StringIO, enabled: bool
) -> None:
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(prepare_module, "_TERMINAL_SECONDS", 0.0)
    monkeypatch.setattr(prepare_module, "_BATCH_CHARACTERS", 20_000)
    prepare(PrepareOptions([str(rows)], "bytes", tmp_path / "out", progress=enabled))
    if screen.isatty() and enabled:
        assert "of 1 input: " in screen.getvalue()
        assert " tokens/s]" in screen.getvalue()
        assert screen.getvalue().endswith("\r")
    else:
        assert screen.getvalue() == ""
