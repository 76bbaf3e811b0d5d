"""Reads what a run left on disk, for tests that compare runs."""

import json
import shutil
from pathlib import Path
from typing import Any

from ds_pretrain.core.jsonl import read_metrics, select_latest_attempt

# What a step says about itself, apart from how long it took.
_TIMES = {
    "step_seconds",
    "data_wait_seconds",
    "tokens_per_second",
    "mfu",
    "goodput",
    "eta_seconds",
    "attempt",
}


def trace(out: Path) -> list[dict[str, Any]]:
    """The last attempt's record of every step, without times."""
    steps = [r for r in select_latest_attempt(read_metrics(out / "metrics.jsonl")) if r["event"] == "step"]
    return [{key: value for key, value in step.items() if key not in _TIMES} for step in steps]


def validations(out: Path) -> dict[int, Any]:
    """The losses of every validation, by step."""
    records = read_metrics(out / "metrics.jsonl")
    return {r["step"]: r["losses"] for r in records if r["event"] == "validation"}


def resumed_at(out: Path) -> list[int]:
    """The steps that starts went on from, in order."""
    return [r["step"] for r in read_metrics(out / "metrics.jsonl") if r["event"] == "resume"]


def losses(run_file: Path) -> dict[int, float]:
    """The loss of every step."""
    return {record["step"]: record["loss"] for record in trace(run_file.parent / "out")}


def counted(run_file: Path) -> dict[int, list[Any]]:
    """(draw, samples) by step of the history that counts: a step taken again supersedes it and all later."""
    steps: dict[int, list[Any]] = {}
    for line in run_file.with_name("trained.jsonl").read_text().splitlines():
        record = json.loads(line)
        steps = {step: draws for step, draws in steps.items() if step < record["step"]}
        steps[record["step"]] = record["draws"]
    return steps


def copied(folder: Path, to: Path) -> Path:
    """A run with all that lies in its folder, in another one; its run file there."""
    shutil.copytree(folder, to, dirs_exist_ok=True)
    run_file = to / "run.toml"
    run_file.write_text(run_file.read_text().replace(str(folder), str(to)))
    return run_file


def contents(folder: Path) -> dict[str, bytes]:
    """Every file under a folder, by its relative name."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
