"""Runs the real loop on a rank, and says everything that a resumed run must repeat bit for bit."""

import os
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from ds_pretrain import train as train_module
from ds_pretrain.config.plan import load_plan
from ds_pretrain.core.distributed import World
from ds_pretrain.core.errors import Preempted
from ds_pretrain.core.jsonl import latest_attempt, read_metrics
from ds_pretrain.core.run_files import StopSignal, run_lock
from ds_pretrain.data.sampler import Sampler
from ds_pretrain.engine.engine import ZeroEngine
from ds_pretrain.training import setup as opening
from ds_pretrain.training.resume import Wish

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


def run_rank(
    world: World,
    run_file: str,
    kill_after: int | None = None,
    overrides: tuple[str, ...] = (),
    stop_after: int | None = None,
) -> Any:
    """Train; with `kill_after`, this process is SIGKILLed once that step is recorded.

    With `stop_after` it ends saved at that step, so that the next start begins exactly there.

    Returns the digest of the engine's fp32 masters and moments, and at each step the rates in its live groups
    and the samples that it read.
    """
    engines: list[ZeroEngine] = []
    rates: dict[int, list[float]] = {}
    samples: dict[int, list[Any]] = {}
    patch = pytest.MonkeyPatch()
    open_engine, measure, ids = train_module.open_run_engine, train_module.measure, Sampler.ids

    def opened(*args: Any) -> Any:
        engines.append(open_engine(*args))
        return engines[-1]

    def measured(*args: Any) -> Any:
        record, asked = measure(*args)
        rates[record.step] = engines[-1].rates()
        return record, asked

    def sampled(self: Sampler, step: int, ledger: Any) -> Any:
        result = ids(self, step, ledger)
        samples[step] = result.listed()
        return result

    class KillingMonitor(opening.Monitor):
        def step(self, record: Any) -> None:
            super().step(record)
            if record.step == kill_after:
                os.kill(os.getpid(), signal.SIGKILL)

    patch.setattr(train_module, "open_run_engine", opened)
    patch.setattr(train_module, "measure", measured)
    patch.setattr(Sampler, "ids", sampled)
    patch.setattr(opening, "Monitor", KillingMonitor)
    plan = load_plan(run_file, overrides)
    ending = nullcontext() if stop_after is None else pytest.raises(Preempted)
    with StopSignal(plan.out, world) as stop, ending:
        train_module.train(plan, world, stop, run_lock(plan.out), Wish(stop_after))
    patch.undo()
    return engines[-1].digest(), rates, samples


def run_until(world: World, run_file: str, step: int | None) -> Any:
    """Train as `run_rank` does up to a step where it is saved, or to the end."""
    return run_rank(world, run_file, None, (), step)


def trace(out: Path) -> list[dict[str, Any]]:
    """The last attempt's record of every step, without times."""
    steps = [r for r in latest_attempt(read_metrics(out / "metrics.jsonl")) if r["event"] == "step"]
    return [{key: value for key, value in step.items() if key not in _TIMES} for step in steps]


def validations(out: Path) -> dict[int, Any]:
    """The losses of every validation, by step."""
    records = read_metrics(out / "metrics.jsonl")
    return {r["step"]: r["losses"] for r in records if r["event"] == "validation"}


def resumed_at(out: Path) -> list[int]:
    """The steps that starts went on from, in order."""
    return [r["step"] for r in read_metrics(out / "metrics.jsonl") if r["event"] == "resume"]
