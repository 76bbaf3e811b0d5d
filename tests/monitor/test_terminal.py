"""The terminal, which may lose its reader."""

import io
import math
import os
import subprocess
import sys
from typing import Any

from ds_pretrain.monitor.terminal import Terminal, format_event, format_step


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


def test_the_step_line_tells_everything_in_human_units() -> None:
    assert format_step(step(1200), 480_000) == (
        "step 1,200/480,000 0.2%  loss 3.2500  lr 2.40e-04  norm 1.500  clip 0.66  12.3k tok/s  "
        "data wait 5%  MFU 41.2%  1.23M tokens  ETA 1d 01h"
    )


def test_the_step_line_leaves_out_what_is_unknown_and_shows_a_dropped_update() -> None:
    record = step(3, grad_norm=None, clip_factor=None, update_applied=False, loss=math.nan, z_loss=0.00123)
    record |= {"mfu": None, "tokens_per_second": None, "eta_seconds": None, "step_seconds": 0.0}
    assert format_step(record, 10) == (
        "step 3/10 30.0%  loss nan  z 1.23e-03  lr 2.40e-04  norm non-finite  UPDATE SKIPPED  1.23M tokens"
    )


def test_validations_and_events_read_as_sentences() -> None:
    validation = {"event": "validation", "step": 1000, "attempt": 1, "losses": {"web": 2.5, "code": 1.25}}
    assert format_event(validation) == "validation at step 1,000  loss web 2.5000  code 1.2500"
    by_position = {"web": {"1": 5.0, "512": 2.75, "1024": 2.25}, "code": {"1": 4.0}}
    retrieval = {"web": {"512": {"0": 1.0}, "1024": {"0": 0.125, "50": -0.25, "100": 0.99}}}
    assert format_event(validation | {"by_position": by_position, "retrieval": retrieval}) == (
        "validation at step 1,000  loss web 2.5000 (to 512: 2.7500, to 1,024: 2.2500) "
        "key at 1,024: -0.25 to 0.99  code 1.2500 (to 1: 4.0000)"
    )
    retrieval["web"]["1024"] = {"0": -0.0, "100": -0.004}
    line = format_event(validation | {"by_position": by_position, "retrieval": retrieval})
    assert "key at 1,024: 0.00 to 0.00" in line
    checkpoint = {"event": "checkpoint", "step": 7, "attempt": 2, "seconds": 1.23456789, "time": 1.0}
    assert format_event(checkpoint) == "checkpoint at step 7  seconds 1.23"
    assert format_event({"event": "stop", "attempt": 1, "reason": "SIGTERM"}) == "stop  reason SIGTERM"
    resume = {"event": "resume", "step": 3, "attempt": 2, "probe": "probe loss 5.1 matches"}
    assert format_event(resume) == "resume at step 3  probe loss 5.1 matches"


def test_no_value_of_an_event_is_told_in_the_spelling_of_python() -> None:
    event = {"event": "odd", "attempt": 1, "is_new": True, "hosts": ["a", None], "gone": [], "none": None}
    assert format_event(event) == "odd  is_new true  hosts a, none  gone nothing"
    skipped = {"phase": "main", "start": 3, "stop": 4, "num_samples": 1}
    assert (
        format_event({"event": "rollback", "skipped": skipped})
        == "rollback  skipped main draws 3 to 4, 1 sample"
    )


def test_what_was_read_is_one_line_with_each_share_beside_its_weight() -> None:
    web = {"tokens": 1_200_000, "skipped_tokens": 12_345, "epochs": 0.374, "share": 0.7402, "weight": 0.75}
    code = {"tokens": 950, "skipped_tokens": 0, "epochs": 1.0, "share": None, "weight": None}
    record = {"event": "data", "step": 1000, "attempt": 1, "phase": "main", "time": 1.0}
    assert format_event(record | {"sources": {"web": web, "code": code}}) == (
        "data at step 1,000  main: web 1.20M tokens, 0.37 epochs, 12.3k skipped (74.0% for 75.0%)  "
        "code 950 tokens, 1.00 epochs"
    )


def test_a_terminal_without_a_tty_gets_whole_lines_and_no_control_characters() -> None:
    stream = io.StringIO()
    terminal = Terminal(stream, 10)
    terminal.write(step(1))
    terminal.write(step(2))
    terminal.close()
    assert len(stream.getvalue().splitlines()) == 2
    assert all(c.isprintable() or c == "\n" for c in stream.getvalue())


def test_a_closed_stream_is_silence() -> None:
    stream = io.StringIO()
    terminal = Terminal(stream, 10)
    stream.close()
    terminal.write(step(1))
    terminal.write(step(2))


def test_a_reader_that_goes_away_changes_neither_the_run_nor_its_exit_code() -> None:
    code = """
import sys
from ds_pretrain.monitor.terminal import Terminal
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
    record = {
        "event": "skipped_update",
        "step": 7,
        "attempt": 1,
        "samples": [("text", 0, n) for n in range(1000)],
    }
    assert format_event(record) == "skipped update at step 7  samples 1,000 in metrics.jsonl"


def test_nested_values_are_told_in_a_few_words_and_never_poured_out() -> None:
    skipped = {"phase": "main", "start": 100, "stop": 200, "num_samples": 100, "samples": {"web": {"0": [1]}}}
    record = {"event": "rollback", "step": 9, "attempt": 1, "incident": 1, "skipped": skipped}
    record |= {"rank_losses": {"8": [1.0, 2.0], "9": [1.0, 9.0]}, "hosts": ["a:0", "b:0"], "to_step": None}
    assert format_event(record) == (
        "rollback at step 9  incident 1  skipped main draws 100 to 200, 100 samples  "
        "rank_losses 2 in metrics.jsonl  hosts a:0, b:0"
    )
    few = {"event": "high_loss_samples", "attempt": 1, "samples": [{"loss": 9.0, "text": "x" * 5000}]}
    assert format_event(few) == "high loss samples  samples 1 in metrics.jsonl"


def test_a_text_of_many_lines_is_one_line_and_a_long_one_is_cut() -> None:
    record = {"event": "needs_operator", "attempt": 1, "diagnosis": "look\n  here\x1b[31m"}
    assert format_event(record) == "needs operator  diagnosis look here [31m"
    record["diagnosis"] = "x" * 5000
    assert (
        format_event(record)
        == f"needs operator  diagnosis {'x' * 400}... (5,000 characters in metrics.jsonl)"
    )
