"""Whole runs through the real launcher, as a user starts them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ds_pretrain.core.run_files import read_exit, read_ranks
from tests.harness import record_run
from tests.ranks import free_port, run_ranks
from tests.runs.results import trace
from tests.scenario import make_run

COMMAND = [sys.executable, "-m", "ds_pretrain"]


def _steps(out: Path) -> int:
    metrics = out / "metrics.jsonl"
    return metrics.read_text().count('"event": "step"') if metrics.exists() else 0


def _wait_for_step(process: subprocess.Popen[str], out: Path, step: int) -> None:
    deadline = time.monotonic() + 600
    while _steps(out) < step:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "the run did not get going"
        time.sleep(0.02)


def _start(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.slow
def test_sigkill_of_a_rank_and_sigterm_of_the_command_cost_nothing(tmp_path: Path) -> None:
    """SIGKILL a rank, start, SIGTERM the command, start: bitwise the straight run, and no orphans."""
    run_file = make_run(tmp_path / "run", steps=30, save_every="5 steps")
    out = tmp_path / "run/out"
    words = ("train", str(run_file), "--ranks", "2")

    process = _start(*words)
    _wait_for_step(process, out, 7)
    os.kill(read_ranks(out)[1].pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 1, output

    process = _start(*words)
    _wait_for_step(process, out, 12)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 75, output
    assert read_exit(out) == 75

    assert not [r for r in read_ranks(out) if Path(f"/proc/{r.pid}").exists()]
    run_ranks(record_run, 2, str(run_file))
    run_ranks(record_run, 2, str(run_file), (f"out={tmp_path}/straight",))
    assert trace(out) == trace(tmp_path / "straight")
    assert len(trace(out)) == 30


def test_the_deepspeed_launcher_works_directly(tmp_path: Path) -> None:
    run_file = make_run(tmp_path / "run", steps=3)
    deepspeed = Path(sys.executable).with_name("deepspeed")
    argv = [
        str(deepspeed),
        *("--num_gpus", "1", "--master_port", str(free_port())),  # another worker's tests may launch as well
        "--module",
        "ds_pretrain.train",
        str(run_file),
        "schedule.peak_lr=2e-3",
    ]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert trace(tmp_path / "run/out")[2]["learning_rate"] == pytest.approx(2e-3)
    assert json.loads((tmp_path / "run/out/checkpoints/step_000000003/manifest.json").read_text())[
        "overrides"
    ] == ["schedule.peak_lr=2e-3"]


def test_bad_input_through_the_launcher_is_one_message_and_code_2(tmp_path: Path) -> None:
    run_file = make_run(tmp_path / "run")
    done = subprocess.run(
        [*COMMAND, "train", str(run_file), "--ranks", "3"], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 2
    assert "world sizes that do: 1, 2, 4" in done.stderr
    assert not (tmp_path / "run/out").exists()
