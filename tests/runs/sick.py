"""Runs of the real loop that meet a fault, and what they make of it."""

import contextlib
import io
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_pretrain import train as train_module
from ds_pretrain.checkpoint.manifest import DOOMED, published, step_of
from ds_pretrain.checkpoint.storage import Places
from ds_pretrain.config.plan import load_plan
from ds_pretrain.core.distributed import World, barrier
from ds_pretrain.core.state import SkipLedger
from ds_pretrain.data.loader import Batch, Feed
from ds_pretrain.engine.engine import ZeroEngine
from ds_pretrain.training import rollback as healing
from ds_pretrain.watchdog import rollback_log as cure
from tests.runs.golden import run_rank
from tests.scenario import LLAMA, make_run

CURE_POINTS = ("cure", "cured")  # the write points of a rollback
UNSEEN = 5  # a token that no text holds
OPTIONS: dict[str, Any] = {
    "steps": 40,
    "batch_tokens": 128,
    "micro_sequences": 4,
    "save_every": "2 steps",
    "model": {**LLAMA, "attention_dropout": 0.0},
}
# A window and a patience that fit a run of forty steps.
WATCHDOG = """
[watchdog]
window = 8
patience = 3
skip_before = "1 steps"
skip_after = "4 steps"
"""


@dataclass(frozen=True)
class Fault:
    """What goes wrong.

    "data": draws [first, stop) teach nonsense, whenever they are read. "state": at the step `first` one
    rank's moments are ruined, once. "passing": at the step `first` the update is far too large, once.
    "rank": as that, and one rank computes the loss of other labels. "rate": the rate is absurd from step
    `first` on. "nan": at step `first`, or from it to before `stop`, one rank's gradient is no number.
    """

    kind: str
    first: int
    stop: int = 0
    rank: int = 1


BATCH = 8  # samples of a step
POISON = Fault("data", 20 * BATCH, 24 * BATCH)  # what steps 21 to 24 read


def make_sick_run(folder: Path, watchdog: str = WATCHDOG, **more: Any) -> Path:
    run_file = make_run(folder, **{**OPTIONS, **more})
    run_file.write_text(run_file.read_text() + watchdog)
    return run_file


def run_sick(
    world: World,
    run_file: str,
    fault: Fault | None,
    overrides: tuple[str, ...] = (),
    kill_at: str | None = None,
    met: bool = False,
) -> Any:
    """Train; the exit code, what was said, and what `run_rank` returns. What passes, once `met`, is over.

    With `kill_at`, this process is SIGKILLed at that write point of a rollback, when it has given up one
    checkpoint of those it leaves, as it begins to load, or when it saves for a person. "unwritable" kills
    nothing: the disk is full when a rollback is to be written down.
    """
    patch = pytest.MonkeyPatch()
    take_step, read, over = train_module.take_step, Feed._read, [met]

    def stepped(engine: Any, batch: Batch, rate: float, *args: Any) -> Any:
        step = batch.ids.step + 1
        if fault is None or fault.kind == "data":
            return take_step(engine, batch, rate, *args)
        if fault.kind == "rate":
            return take_step(engine, batch, 30.0 if step >= fault.first else rate, *args)
        if not fault.first <= step < max(fault.stop, fault.first + 1) or (over[0] and fault.kind != "nan"):
            return take_step(engine, batch, rate, *args)
        over[0] = True
        if fault.kind == "state" and world.rank == fault.rank:
            for state in engine._engine.optimizer.optimizer.state.values():
                state["exp_avg"].fill_(1.0)
                state["exp_avg_sq"].fill_(1e-12)
        if fault.kind in ("passing", "rank"):
            rate = 3.0
        if fault.kind == "rank" and world.rank == fault.rank:
            for micro in batch.micro_batches:
                micro.labels.fill_(UNSEEN)
        if fault.kind == "nan" and world.rank == fault.rank:
            backward = ZeroEngine.backward
            with pytest.MonkeyPatch.context() as once:
                once.setattr(ZeroEngine, "backward", lambda self, loss: backward(self, loss * float("nan")))
                return take_step(engine, batch, rate, *args)
        return take_step(engine, batch, rate, *args)

    def poisoned(self: Feed, step: int, ledger: SkipLedger) -> Batch:
        batch, first = read(self, step, ledger), world.rank
        share = len(batch.checksums)
        draws = batch.ids.draw[first * share : (first + 1) * share]  # [S / W]
        assert fault is not None
        is_bad = torch.from_numpy((draws >= fault.first) & (draws < fault.stop))
        rows = iter(is_bad.split([len(m.labels) for m in batch.micro_batches]))
        for micro in batch.micro_batches:
            micro.labels[next(rows)] = UNSEEN
        return batch

    def point(name: str) -> None:
        if name == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    patch.setattr(train_module, "take_step", stepped)
    if fault is not None and fault.kind == "data":
        patch.setattr(Feed, "_read", poisoned)
    patch.setattr(cure, "write_point", point)
    if kill_at == "person":
        patch.setattr(
            train_module.Saver, "save_for_person", lambda *args: os.kill(os.getpid(), signal.SIGKILL)
        )
    if kill_at == "unwritable":
        patch.setattr(healing, "write_cure", _full)
    if kill_at == "leave":
        patch.setattr(healing.store, "leave", _leave_one)
    if kill_at == "load":
        patch.setattr(healing.store, "restore", lambda *args: os.kill(os.getpid(), signal.SIGKILL))
    said = io.StringIO()
    ended: Any = None
    code = 0
    with contextlib.redirect_stderr(said):
        try:
            ended = run_rank(world, run_file, None, overrides)
        except train_module.RunError as error:
            code = error.exit_code
            said.write(str(error))
            if world.is_main:
                train_module._record_exit(load_plan(run_file, overrides), code)
    patch.undo()
    return code, said.getvalue(), ended


def _full(*args: Any) -> None:
    raise OSError(28, "No space left on device")


def _leave_one(places: Places, to_step: int, world: World) -> None:
    later = [folder for folder in published(places.root) if (step_of(folder.name) or 0) > to_step]
    if world.is_main and later:
        later[0].rename(later[0].with_name(f"{later[0].name}{DOOMED}"))
    barrier(world)
    os.kill(os.getpid(), signal.SIGKILL)
