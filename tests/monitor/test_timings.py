"""What a run has measured of itself, read back."""

import json
from pathlib import Path

import pytest

from ds_pretrain.core.jsonl import METRICS, JsonLines
from ds_pretrain.monitor import timings
from ds_pretrain.monitor.timings import Timings, read_timings


def test_medians_of_what_was_measured_are_read_past_torn_lines(tmp_path: Path) -> None:
    file = JsonLines(tmp_path / METRICS)  # as a run writes it
    for seconds in (9.0, 2.0, 3.0):
        file.write({"event": "step", "attempt": 1, "step": 1, "step_seconds": seconds})
    file.write({"event": "checkpoint", "step": 1, "stall_seconds": 0.5, "total_seconds": 8.0})
    file.write({"event": "checkpoint", "step": 2, "stall_seconds": 0.7, "total_seconds": 10.0})
    file.write({"event": "resume", "step": 2})  # of a version that did not measure it
    file.write({"event": "resume", "step": 2, "restore_seconds": 40})
    file.write({"event": "resume", "step": 2, "restore_seconds": float("nan")})
    file.close()
    with (tmp_path / METRICS).open("a") as torn:
        torn.write('{"event": "step", "step_sec')
    found = read_timings(tmp_path)
    assert found == Timings(3.0, pytest.approx(0.6), 9.0, 40, step=1)


def test_of_a_long_run_the_newest_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timings, "_NEWEST", 3)
    lines = [json.dumps({"event": "step", "step": seconds, "step_seconds": seconds}) for seconds in range(10)]
    (tmp_path / METRICS).write_text("\n".join(lines))
    assert read_timings(tmp_path) == Timings(step_seconds=8, step=9)


def test_a_run_that_has_not_begun_has_measured_nothing(tmp_path: Path) -> None:
    assert read_timings(tmp_path / "none") == Timings()
