"""The file that keeps everything, and the terminal that may lose its reader."""

import io
import json
import math
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ds_pretrain.core.text import say
from ds_pretrain.monitor.sinks import (
    JsonLines,
    Terminal,
    count,
    duration,
    event_line,
    latest_attempt,
    read_metrics,
    step_line,
)


def step(step: int, attempt: int = 1, **changed: Any) -> dict[str, Any]:
    record = {
        "event": "step",
        "attempt": attempt,
        "step": step,
        "loss": 3.25,
        "z_loss": None,
        "learning_rate": 2.4e-4,
        "grad_norm": 1.5,
        "clip_factor": 0.66,
        "update_applied": True,
        "tokens": 1_234_567,
        "step_seconds": 2.0,
        "data_wait_seconds": 0.1,
        "tokens_per_second": 12_345.0,
        "mfu": 0.412,
        "eta_seconds": 90_000.0,
    }
    return {**record, **changed}


def write_all(path: Path, *records: dict[str, Any]) -> None:
    lines = JsonLines(path)
    for record in records:
        lines.write(record)
    lines.close()


def test_every_record_comes_back_with_the_same_bits(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    values = {"event": "step", "step": 1, "loss": 0.1 + 0.2, "tiny": 5e-324, "name": "Zürich 数", "z": None}
    write_all(path, values)
    write_all(path, {"event": "stop", "where": Path("a/b"), "nested": {"list": [1.5, (2,)]}})
    assert list(read_metrics(path)) == [
        values,
        {"event": "stop", "where": "a/b", "nested": {"list": [1.5, [2]]}},
    ]


def test_a_record_is_in_the_file_before_write_returns(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "m.jsonl")
    lines.write({"step": 1})
    assert list(read_metrics(tmp_path / "m.jsonl")) == [{"step": 1}]
    assert lines.bytes_written == (tmp_path / "m.jsonl").stat().st_size
    lines.close()
    lines.close()


def test_non_finite_numbers_are_strict_json_on_disk_and_numbers_again_when_read(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write_all(path, {"a": math.nan, "losses": {"b": math.inf}, "c": [-math.inf]})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    assert json.loads(path.read_text(), parse_constant=refuse) == {
        "a": "nan",
        "losses": {"b": "inf"},
        "c": ["-inf"],
    }
    (record,) = read_metrics(path)
    assert math.isnan(record["a"])
    assert record["losses"] == {"b": math.inf}
    assert record["c"] == [-math.inf]


@pytest.mark.parametrize("torn", [b'{"step": 2, "lo', b"\x00\x00\x00", b'{"step": 2, "name": "\xc3', b"17"])
def test_a_torn_last_line_costs_that_record_alone(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "m.jsonl"
    write_all(path, {"step": 1})
    with path.open("ab") as file:
        file.write(torn)
    assert list(read_metrics(path)) == [{"step": 1}]
    write_all(path, {"step": 2}, {"step": 3})
    assert list(read_metrics(path)) == [{"step": 1}, {"step": 2}, {"step": 3}]


def test_a_line_torn_by_a_full_disk_costs_that_record_alone(tmp_path: Path) -> None:
    """A limit on the size of files stands for the full disk: the kernel writes a part, then refuses."""
    code = f"""
import resource, signal
from pathlib import Path
from ds_pretrain.monitor.sinks import JsonLines
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
lines = JsonLines(Path({str(tmp_path / "m.jsonl")!r}))
lines.write({{"step": 1}})
resource.setrlimit(resource.RLIMIT_FSIZE, (20, resource.RLIM_INFINITY))
try:
    lines.write({{"step": 2, "text": "x" * 50}})
except OSError:
    print("refused")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
lines.write({{"step": 3}})
"""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    assert limit[1] == resource.RLIM_INFINITY, "this test needs to lower a limit and raise it again"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "refused\n"
    assert (tmp_path / "m.jsonl").read_bytes().count(b"\n") == 3  # the torn line was really there, and ended
    assert list(read_metrics(tmp_path / "m.jsonl")) == [{"step": 1}, {"step": 3}]


def test_p51_the_latest_attempt_supersedes_all_steps_from_where_it_starts_again() -> None:
    history = [
        {"event": "start", "step": 0, "attempt": 1},
        *(step(s, 1) for s in range(1, 11)),
        {"event": "validation", "step": 4, "attempt": 1, "losses": {"web": 1.0}},
        {"event": "validation", "step": 6, "attempt": 1, "losses": {"web": 1.5}},
        {"event": "validation", "step": 10, "attempt": 1, "losses": {"web": 2.0}},
        {"event": "resume", "step": 5, "attempt": 2},
        *(step(s, 2) for s in range(6, 8)),
        {"event": "warning", "attempt": 2},
    ]
    kept = latest_attempt(history)
    assert [(r["step"], r["attempt"]) for r in kept] == [
        (1, 1),
        (2, 1),
        (3, 1),
        (4, 1),
        (5, 1),
        (6, 2),
        (7, 2),
    ]
    assert [r["losses"]["web"] for r in latest_attempt(history, "validation")] == [1.0]
    twice = [*history, *(step(s, 3) for s in range(4, 10))]
    assert [r["attempt"] for r in latest_attempt(twice)] == [1, 1, 1, 3, 3, 3, 3, 3, 3]


def test_a_validation_repeated_after_a_resume_counts_once() -> None:
    history = [step(1), step(2), {"event": "validation", "step": 2, "attempt": 1, "losses": {"web": 1.0}}]
    history.append({"event": "validation", "step": 2, "attempt": 2, "losses": {"web": 1.5}})
    assert [r["attempt"] for r in latest_attempt(history, "validation")] == [2]


def test_the_step_line_tells_everything_in_human_units() -> None:
    assert step_line(step(1200), 480_000) == (
        "step 1,200/480,000 0.2%  loss 3.2500  lr 2.40e-04  norm 1.500  clip 0.66  12.3k tok/s  "
        "data wait 5%  MFU 41.2%  1.23M tokens  ETA 1d 01h"
    )


def test_the_step_line_leaves_out_what_is_unknown_and_shows_a_dropped_update() -> None:
    record = step(3, grad_norm=None, clip_factor=None, update_applied=False, loss=math.nan, z_loss=0.00123)
    record |= {"mfu": None, "tokens_per_second": None, "eta_seconds": None, "step_seconds": 0.0}
    assert step_line(record, 10) == (
        "step 3/10 30.0%  loss nan  z 1.23e-03  lr 2.40e-04  norm non-finite  UPDATE DROPPED  1.23M tokens"
    )


def test_validations_and_events_read_as_sentences() -> None:
    validation = {"event": "validation", "step": 1000, "attempt": 1, "losses": {"web": 2.5, "code": 1.25}}
    assert event_line(validation) == "validation at step 1,000  loss web 2.5000  code 1.2500"
    by_position = {"web": {"1": 5.0, "512": 2.75, "1024": 2.25}, "code": {"1": 4.0}}
    retrieval = {"web": {"512": {"0": 1.0}, "1024": {"0": 0.125, "50": -0.25, "100": 0.99}}}
    assert event_line(validation | {"by_position": by_position, "retrieval": retrieval}) == (
        "validation at step 1,000  loss web 2.5000 (to 512: 2.7500, to 1,024: 2.2500) "
        "key at 1,024: -0.25 to 0.99  code 1.2500 (to 1: 4.0000)"
    )
    retrieval["web"]["1024"] = {"0": -0.0, "100": -0.004}
    line = event_line(validation | {"by_position": by_position, "retrieval": retrieval})
    assert "key at 1,024: 0.00 to 0.00" in line
    checkpoint = {"event": "checkpoint", "step": 7, "attempt": 2, "seconds": 1.23456789, "time": 1.0}
    assert event_line(checkpoint) == "checkpoint at step 7  seconds 1.23"
    assert event_line({"event": "stop", "attempt": 1, "reason": "SIGTERM"}) == "stop  reason SIGTERM"


def test_no_value_of_an_event_is_told_in_the_spelling_of_python() -> None:
    event = {"event": "odd", "attempt": 1, "is_new": True, "hosts": ["a", None], "gone": [], "none": None}
    assert event_line(event) == "odd  is_new true  hosts a, none  gone nothing"
    skipped = {"phase": "main", "start": 3, "stop": 4, "num_samples": 1}
    assert (
        event_line({"event": "rollback", "skipped": skipped})
        == "rollback  skipped main draws 3 to 4, 1 sample"
    )


def test_what_was_read_is_one_line_with_each_share_beside_its_weight() -> None:
    web = {"tokens": 1_200_000, "skipped_tokens": 12_345, "epochs": 0.374, "share": 0.7402, "weight": 0.75}
    code = {"tokens": 950, "skipped_tokens": 0, "epochs": 1.0, "share": None, "weight": None}
    record = {"event": "data", "step": 1000, "attempt": 1, "phase": "main", "time": 1.0}
    assert event_line(record | {"sources": {"web": web, "code": code}}) == (
        "data at step 1,000  main: web 1.20M tokens, 0.37 epochs, 12.3k skipped (74.0% for 75.0%)  "
        "code 950 tokens, 1.00 epochs"
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.4, "59s"), (59.6, "1m 00s"), (725, "12m 05s"), (3599.7, "1h 00m"), (12_000, "3h 20m"),
     (370_800, "4d 07h"), (-3, "0s")],
)  # fmt: skip
def test_durations_show_the_two_units_that_matter(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (950, "950"), (999.7, "1.00k"), (12_345, "12.3k"), (99_960, "100k"), (4_194_304, "4.19M"),
     (1.2e12, "1.20T"), (5e15, "5000T")],
)  # fmt: skip
def test_counts_show_three_digits(number: float, text: str) -> None:
    assert count(number) == text


def test_a_terminal_without_a_tty_gets_whole_lines_and_no_control_characters() -> None:
    stream = io.StringIO()
    terminal = Terminal(stream, 10)
    terminal.write(step(1))
    terminal.write(step(2))
    terminal.close()
    assert len(stream.getvalue().splitlines()) == 2
    assert all(c.isprintable() or c == "\n" for c in stream.getvalue())


def test_a_stream_that_cannot_print_a_name_prints_it_escaped() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    assert say(stream, "Zürich")
    assert raw.getvalue() == b"Z\\xfcrich\n"


def test_a_closed_stream_is_silence() -> None:
    stream = io.StringIO()
    terminal = Terminal(stream, 10)
    stream.close()
    terminal.write(step(1))
    terminal.write(step(2))


def test_a_reader_that_goes_away_changes_neither_the_run_nor_its_exit_code() -> None:
    code = """
import sys
from ds_pretrain.monitor.sinks import Terminal
terminal = Terminal(sys.stdout, 10)
sys.stdin.readline()  # until the reader is gone
for _ in range(1000):
    terminal.write({"event": "stop", "attempt": 1})
sys.exit(75)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": ""},
    )
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stderr is not None
    process.stdout.close()
    process.stdin.write(b"\n")
    process.stdin.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 75


def test_a_long_list_is_counted_in_the_terminal_and_whole_in_the_file() -> None:
    record = {"event": "dropped", "step": 7, "attempt": 1, "samples": [("text", 0, n) for n in range(1000)]}
    assert event_line(record) == "dropped at step 7  samples 1,000 in metrics.jsonl"


def test_nested_values_are_told_in_a_few_words_and_never_poured_out() -> None:
    skipped = {"phase": "main", "start": 100, "stop": 200, "num_samples": 100, "samples": {"web": {"0": [1]}}}
    record = {"event": "rollback", "step": 9, "attempt": 1, "incident": 1, "skipped": skipped}
    record |= {"rank_losses": {"8": [1.0, 2.0], "9": [1.0, 9.0]}, "hosts": ["a:0", "b:0"], "to_step": None}
    assert event_line(record) == (
        "rollback at step 9  incident 1  skipped main draws 100 to 200, 100 samples  "
        "rank_losses 2 in metrics.jsonl  hosts a:0, b:0"
    )
    few = {"event": "suspects", "attempt": 1, "samples": [{"loss": 9.0, "text": "x" * 5000}]}
    assert event_line(few) == "suspects  samples 1 in metrics.jsonl"


def test_a_text_of_many_lines_is_one_line_and_a_long_one_is_cut() -> None:
    record = {"event": "needs_person", "attempt": 1, "diagnosis": "look\n  here\x1b[31m"}
    assert event_line(record) == "needs_person  diagnosis look here [31m"
    record["diagnosis"] = "x" * 5000
    assert event_line(record) == f"needs_person  diagnosis {'x' * 400}... (5,000 characters in metrics.jsonl)"
