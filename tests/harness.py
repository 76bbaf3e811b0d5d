"""Runs the real loop on a rank, makes it meet something, and keeps what it did.

This module owns every seam of the package that runs in tests are hooked at.
"""

import argparse
import contextlib
import hashlib
import io
import json
import math
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ds_pretrain import train as train_module
from ds_pretrain.checkpoint import reshard
from ds_pretrain.checkpoint import restore as restore_module
from ds_pretrain.checkpoint.manifest import EXPIRED, list_published, parse_step
from ds_pretrain.checkpoint.storage import StorageLayout
from ds_pretrain.config.plan import load_plan
from ds_pretrain.core.distributed import World, barrier, gather_objects
from ds_pretrain.core.errors import EXIT_FINISHED, Preempted, RunError
from ds_pretrain.core.run_files import StopSignal, run_lock, stop_file
from ds_pretrain.core.state import RunState, SkipLedger
from ds_pretrain.data.loader import Batch, BatchLoader
from ds_pretrain.engine import partitions
from ds_pretrain.engine.engine import ZeroEngine
from ds_pretrain.monitor.monitor import Monitor
from ds_pretrain.training import rollback, saver, setup
from ds_pretrain.training.resume import StartOptions
from ds_pretrain.training.saver import Saver
from tests.checkpoint.saving import save_now

Whole = dict[str, dict[str, np.ndarray[Any, Any]]]
UNSEEN = 5  # a token that no text holds
OWN_POINTS = ("leave", "load", "person")  # where a rank can be killed besides the write points


@dataclass(frozen=True)
class Fault:
    """What goes wrong, and on which rank (None: all).

    "labels": those of draws [first, stop) are nonsense, whenever they are read. "full_disk": no rollback can
    be written down. "lost": the first checkpoint that would be gone back to is none. The others happen at
    steps [first, stop), the first time that each is taken, or `again` and again. "rate": the learning rate is
    `value`. "gradient": it is multiplied by `value`. "loss": it is `value`, and its gradient is sound.
    "batch": the labels of the whole step are nonsense. "state": the moments are ruined.
    """

    kind: str
    first: int = 0
    stop: int = 0  # 0: one step
    rank: int | None = None
    value: float | None = None  # None: 3.0, far too large a rate, or no number
    again: bool = False


@dataclass(frozen=True)
class Kill:
    """SIGKILL of one rank (None: all): when it passes a write point, or so many seconds after its start.

    A rollback has more points: "leave", where it has given up one checkpoint of those it leaves, "load", as a
    checkpoint begins to load, and "person", where it saves for one.
    """

    rank: int | None
    point: str | None = None  # its name, or a pattern of it
    passes: int = 0  # let it pass so often before
    seconds: float | None = None
    others_sleep: float = 0.03  # seconds that every other rank loses at each of its write points
    step_sleeps: float = 0.0  # seconds that every step lasts longer


@dataclass(frozen=True)
class Stop:
    """A signal or a request to stop: how, on which rank, after which step (None: while the engine opens)."""

    how: str  # "file" or the name of a signal
    rank: int
    step: int | None

    def ask(self, world: World, out: Path) -> None:
        if world.rank == self.rank and self.how == "file":
            stop_file(out).touch()
        elif world.rank == self.rank:
            os.kill(os.getpid(), getattr(signal, self.how))


@dataclass(frozen=True)
class Snapshot:
    """An engine's state, free of how it is cut: the same on every rank, apart from `streams`."""

    tensors: Whole  # parameter -> fp32, weight (as fp32), exp_avg, exp_avg_sq
    options: dict[str, dict[str, Any]]  # group -> its options
    steps: list[int]  # of every state of every rank
    distinct_steps: bool  # no two states share a tensor
    module: dict[str, np.ndarray[Any, Any]]  # buffers and frozen parameters
    streams: str  # digest of this rank's random streams


@dataclass(frozen=True)
class Record:
    """What a start did on one rank. Steps count from 1, but those of `samples`, which count from 0."""

    code: int
    stdout: str
    stderr: str
    digest: str  # of the engine's fp32 masters and moments
    streams: str  # of the random streams
    rates: dict[int, list[float]]  # in the live groups, by step
    trained: list[tuple[int, list[Any]]]  # (step, samples) of every step taken, in order
    final: RunState
    verdicts: list[tuple[Any, ...]]  # (step, action, kind, onset, message) of every step taken, in order
    rollbacks: list[RunState]  # the state gone on from, after each
    at_rollbacks: list[Any]  # what was asked for after each
    saves: list[int]  # the steps saved at
    restored: Snapshot | None
    saved: dict[int, Snapshot]  # at every save, by step
    finished: Snapshot | None

    @property
    def samples(self) -> dict[int, list[Any]]:
        """What each step read, the last time that it was taken."""
        return {step - 1: samples for step, samples in self.trained}


def record_run(
    world: World,
    run_file: str,
    overrides: tuple[str, ...] = (),
    *,
    faults: Sequence[Fault] | None = None,
    kill: Kill | None = None,
    kill_after: int | None = None,
    stop_after: int | None = None,
    snapshots: bool = False,
    alter: Callable[[nn.Module], None] | None = None,
    plant: Callable[[World, Any, pytest.MonkeyPatch], None] | None = None,
    at_rollback: Callable[[], Any] | None = None,
    real_tool: bool = False,
) -> Record:
    """Train; with `stop_after`, stop as a preempted run does after that step, its checkpoint saved.

    With `kill_after`, this process is SIGKILLed once that step is recorded. A run with faults may end with an
    error, and writes what it trained beside the run as it happens, so that a rank which is killed has told it
    too. `alter` changes the module before the engine is opened, `plant` acts once a checkpoint is restored.
    DeepSpeed's tool runs in this process, which has imported it already, unless `real_tool`.
    """
    log = Path(run_file).with_name("trained.jsonl") if faults is not None and world.is_main else None
    seen = _Seen(world, log, snapshots, at_rollback)
    code, stderr = EXIT_FINISHED, io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(stderr):
        if not real_tool:
            patch.setattr(reshard, "_run_tool", tool_in_this_process)
        _alter(patch, alter)
        _make_faults(patch, world, faults or ())
        seen.watch(patch, plant)
        _kill(patch, world, kill, kill_after)
        plan = load_plan(run_file, overrides)
        try:
            with StopSignal(plan.out, world) as stop:
                train_module.train(plan, world, stop, run_lock(plan.out), StartOptions(stop_after))
        except RunError as error:
            if faults is None and not (isinstance(error, Preempted) and stop_after is not None):
                error.add_note(stderr.getvalue())
                raise
            code = error.exit_code
            stderr.write(str(error))
            if world.is_main and not isinstance(error, Preempted):
                train_module._record_exit(plan, code)
    return seen.record(code, "", stderr.getvalue())


def start(world: World, run_file: str, overrides: tuple[str, ...] = (), stop: Stop | None = None) -> Record:
    """The loop's entry on this rank, as the launcher starts it. Collective."""
    out = Path(run_file).parent / "out"
    seen, stdout, stderr = _Seen(world), io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        _ask(patch, world, out, stop)
        seen.watch(patch)
        if (
            train_module.STOP_PATIENCE_SECONDS == saver.STOP_PATIENCE_SECONDS
        ):  # what is to be shipped shall be
            patch.setattr(train_module, "STOP_PATIENCE_SECONDS", saver.PATIENCE_SECONDS)
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            code = train_module.main([run_file, *overrides])
    return seen.record(code, stdout.getvalue(), stderr.getvalue())


@dataclass
class _Seen:
    """What was seen so far."""

    world: World
    log: Path | None = None
    snapshots: bool = False
    at_rollback: Callable[[], Any] | None = None
    engine: Any = None
    final: RunState = field(default_factory=RunState)
    rates: dict[int, list[float]] = field(default_factory=dict)
    trained: list[tuple[int, list[Any]]] = field(default_factory=list)
    verdicts: list[tuple[Any, ...]] = field(default_factory=list)
    rollbacks: list[RunState] = field(default_factory=list)
    at_rollbacks: list[Any] = field(default_factory=list)
    saves: list[int] = field(default_factory=list)
    restored: Snapshot | None = None
    saved: dict[int, Snapshot] = field(default_factory=dict)

    def watch(self, patch: pytest.MonkeyPatch, plant: Any = None) -> None:
        take_step, restore, save = train_module.take_step, restore_module.restore, Saver.save
        judge, roll_back = rollback.Watchdog.judge, rollback.Watchdog.roll_back

        def stepped(engine: Any, batch: Batch, *args: Any) -> Any:
            self.engine = engine
            self._train(batch)
            taken = take_step(engine, batch, *args)
            self.rates[batch.ids.step + 1] = engine.learning_rates()
            return taken

        def restoring(found: Any, engine: Any, *args: Any) -> Any:
            state = restore(found, engine, *args)
            if self.snapshots and self.restored is None:
                self.restored = snapshot(engine._engine, self.world)
            if plant is not None:
                plant(self.world, engine, patch)
            return state

        def saving(saver: Saver, state: RunState, *args: Any) -> None:
            self.saves.append(state.step)
            if self.snapshots:
                self.saved[state.step] = snapshot(self.engine._engine, self.world)
            save(saver, state, *args)

        def judged(watchdog: Any, state: RunState, record: Any, *args: Any) -> Any:
            self.final, verdict = judge(watchdog, state, record, *args)
            told = (verdict.action, verdict.kind, verdict.onset, verdict.message)
            self.verdicts.append((record.step, *told))
            return self.final, verdict

        def rolled_back(*args: Any) -> RunState:
            self.final = roll_back(*args)
            self.rollbacks.append(self.final)
            if self.at_rollback is not None:
                self.at_rollbacks.append(self.at_rollback())
            return self.final

        patch.setattr(train_module, "take_step", stepped)
        patch.setattr(restore_module, "restore", restoring)
        patch.setattr(Saver, "save", saving)
        patch.setattr(rollback.Watchdog, "judge", judged)
        patch.setattr(rollback.Watchdog, "roll_back", rolled_back)

    def _train(self, batch: Batch) -> None:
        step = batch.ids.step + 1
        self.trained.append((step, batch.ids.to_list()))
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(json.dumps({"step": step, "draws": batch.ids.draw.tolist()}) + "\n")

    def record(self, code: int, stdout: str, stderr: str) -> Record:
        streams = streams_digest()
        return Record(
            code=code,
            stdout=stdout,
            stderr=stderr,
            digest=self.engine.digest() if self.engine is not None else "",
            streams=streams,
            finished=snapshot(self.engine._engine, self.world) if self.snapshots else None,
            **{name: getattr(self, name) for name in Record.__dataclass_fields__ if hasattr(self, name)},
        )


def _alter(patch: pytest.MonkeyPatch, alter: Callable[[nn.Module], None] | None) -> None:
    build = setup.build_model

    def built(*args: Any, **options: Any) -> Any:
        model = build(*args, **options)
        alter(model.module)
        return model

    if alter is not None:
        patch.setattr(setup, "build_model", built)


def _ask(patch: pytest.MonkeyPatch, world: World, out: Path, stop: Stop | None) -> None:
    open_engine, measure = train_module.open_run_engine, train_module.measure

    def opened(*args: Any) -> Any:
        stop.ask(world, out)
        return open_engine(*args)

    def measured(*args: Any) -> Any:
        record, asked = measure(*args)
        if record.step == stop.step:
            stop.ask(world, out)  # after this step's ranks have agreed: the next one sees it
        return record, asked

    if stop is not None and stop.step is None:
        patch.setattr(train_module, "open_run_engine", opened)
    elif stop is not None:
        patch.setattr(train_module, "measure", measured)


def _make_faults(patch: pytest.MonkeyPatch, world: World, faults: Sequence[Fault]) -> None:
    take_step, read = train_module.take_step, BatchLoader._read
    mine = [fault for fault in faults if fault.rank in (None, world.rank)]
    met: set[tuple[Fault, int]] = set()

    def stepped(engine: Any, batch: Batch, rate: float, *args: Any) -> Any:
        step = batch.ids.step + 1
        now = {
            fault.kind: fault
            for fault in mine
            if fault.first <= step < max(fault.stop, fault.first + 1)
            and (fault.again or (fault, step) not in met)
        }
        met.update((fault, step) for fault in now.values())
        if "rate" in now:
            rate = 3.0 if now["rate"].value is None else now["rate"].value
        if "batch" in now:
            for micro in batch.micro_batches:
                micro.labels.fill_(UNSEEN)
        if "state" in now:
            for state in engine._engine.optimizer.optimizer.state.values():
                state["exp_avg"].fill_(1.0)
                state["exp_avg_sq"].fill_(1e-12)
        with pytest.MonkeyPatch.context() as once:
            if "gradient" in now:
                factor, backward = now["gradient"].value, ZeroEngine.backward
                factor = math.nan if factor is None else factor
                once.setattr(ZeroEngine, "backward", lambda self, loss: backward(self, loss * factor))
            losses, update = take_step(engine, batch, rate, *args)
        if "loss" in now:
            losses[0] = math.nan if now["loss"].value is None else now["loss"].value
        return losses, update

    def poisoned(feed: BatchLoader, step: int, ledger: SkipLedger) -> Batch:
        batch = read(feed, step, ledger)
        share = len(batch.checksums)
        draws = batch.ids.draw[world.rank * share : (world.rank + 1) * share]  # [S / W]
        for fault in labels:
            is_bad = torch.from_numpy((draws >= fault.first) & (draws < fault.stop))
            rows = iter(is_bad.split([len(m.labels) for m in batch.micro_batches]))
            for micro in batch.micro_batches:
                micro.labels[next(rows)] = UNSEEN
        return batch

    labels = [fault for fault in mine if fault.kind == "labels"]
    if labels:
        patch.setattr(BatchLoader, "_read", poisoned)
    mine = [fault for fault in mine if fault.kind in ("rate", "gradient", "loss", "batch", "state")]
    if mine:
        patch.setattr(train_module, "take_step", stepped)
    kinds = {fault.kind for fault in faults}
    if "full_disk" in kinds:
        patch.setattr(rollback, "write_rollback_log", disk_is_full)
    if "lost" in kinds:
        answers, found = ["a file of it is gone"], rollback.find_at_step
        patch.setattr(rollback, "find_at_step", lambda *args: answers.pop() if answers else found(*args))


def disk_is_full(*args: Any) -> Any:
    """Stands for what writes."""
    raise OSError(28, "No space left on device")


def die(*args: Any) -> None:
    """As by a power cut: nothing runs any more."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # the signal arrives before this returns


def at_write_points(act: Callable[[str], None]) -> None:
    """Call `act` with the name of every write point that this process passes from now on."""
    for name, module in list(sys.modules.items()):
        if name.startswith("ds_pretrain.") and "write_point" in vars(module):
            vars(module)["write_point"] = act


def _kill(patch: pytest.MonkeyPatch, world: World, kill: Kill | None, kill_after: int | None) -> None:
    if kill_after is not None:
        step = Monitor.step

        def recorded(monitor: Monitor, record: Any) -> None:
            step(monitor, record)
            if record.step == kill_after:
                die()

        patch.setattr(Monitor, "step", recorded)
    if kill is None:
        return
    if kill.step_sleeps:
        take_step = train_module.take_step
        patch.setattr(
            train_module, "take_step", lambda *args: (time.sleep(kill.step_sleeps), take_step(*args))[1]
        )
    if kill.rank not in (None, world.rank):
        at_write_points(lambda name: time.sleep(kill.others_sleep))
    elif kill.seconds is not None:
        timer = threading.Timer(kill.seconds, die)
        timer.daemon = True
        timer.start()
    elif kill.point in OWN_POINTS:
        owner, name, act = {
            "leave": (restore_module, "discard_after", _leave_one),
            "load": (restore_module, "restore", die),
            "person": (Saver, "save_for_operator", die),
        }[kill.point]
        patch.setattr(owner, name, act)
    else:
        left = [kill.passes]

        def passed(name: str) -> None:
            if fnmatch(name, kill.point):
                left[0] -= 1
                if left[0] < 0:
                    die()

        at_write_points(passed)


def _leave_one(places: StorageLayout, to_step: int, world: World, *args: Any) -> None:
    later = [folder for folder in list_published(places.root) if (parse_step(folder.name) or 0) > to_step]
    if world.is_main and later:
        later[0].rename(later[0].with_name(f"{later[0].name}{EXPIRED}"))
    barrier(world)
    die()


def tool_in_this_process(source: Path, result: Path, _: Any) -> None:
    """DeepSpeed's tool called here: a process of its own takes seconds to start."""
    from deepspeed.checkpoint import ds_to_universal

    words = {"input_folder": str(source), "output_folder": str(result), "keep_temp_folder": False}
    words |= {"num_extract_workers": 1, "num_merge_workers": 1, "strict": True, "inject_missing_state": True}
    ds_to_universal.main(argparse.Namespace(**words))


def convert_here(world: World, folder: str) -> None:
    """Convert a checkpoint offline."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reshard, "_run_tool", tool_in_this_process)
        reshard.convert(Path(folder))


def restore_and_save(world: World, run_file: str, kill: Kill | None = None) -> Snapshot:
    """Restore a run and save it again at once, as if it had been stopped before its first step."""
    plan = load_plan(run_file)
    root = plan.out / "checkpoints"
    found = restore_module.find_latest(StorageLayout(root, root), world)
    assert found is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reshard, "_run_tool", tool_in_this_process)
        _kill(patch, world, kill, None)
        found = restore_module.reshard_if_needed(found, plan.deepspeed, StorageLayout(root, root), world)
    engine = setup.open_run_engine(plan, world)
    state = restore_module.restore(found, engine, plan.run.seed, world)
    texts = {"deepspeed.json": plan.deepspeed_text}
    manifest = replace(found.manifest, world_size=world.size, files={})
    save_now(root, state, manifest, texts, engine, world)
    return snapshot(engine._engine, world)


def snapshot(engine: Any, world: World) -> Snapshot:
    """All of an engine's state, whole. Collective."""
    mine = [
        (
            part.name,
            part.start,
            {
                "fp32": _array(part.master),
                "weight": _array(part.weight.float()),
                **{kind: _array(moment) for kind, moment in part.moments.items()},
            },
        )
        for part in partitions.list_parts(engine)
        if part.master.numel()  # not padding alone
    ]
    pieces = sorted(
        (piece for rank in gather_objects(world, mine) for piece in rank), key=lambda piece: piece[:2]
    )
    tensors: Whole = {}
    for name, start, kinds in pieces:
        for kind, values in kinds.items():
            before = tensors.setdefault(name, {}).get(kind, np.empty(0, values.dtype))
            assert len(before) == start
            tensors[name][kind] = np.concatenate([before, values])
    states = [s for s in engine.optimizer.optimizer.state.values() if "step" in s]
    steps = gather_objects(world, [int(state["step"]) for state in states])
    addresses = [state["step"].data_ptr() for state in states if torch.is_tensor(state["step"])]
    options = {str(group["name"]): dict(group) for group in partitions.copy_options(engine)}
    return Snapshot(
        tensors,
        options,
        [step for rank in steps for step in rank],
        len(set(addresses)) == len(addresses),
        _rest(engine),
        streams_digest(),
    )


def streams_digest() -> str:
    """A hash of this process's random streams."""
    return hashlib.sha256(repr((torch.get_rng_state().tolist(), random.getstate())).encode()).hexdigest()


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return tensor.detach().cpu().clone().numpy()


def _rest(engine: Any) -> dict[str, np.ndarray[Any, Any]]:
    import deepspeed

    frozen = {name: p for name, p in engine.module.named_parameters() if not p.requires_grad}
    with deepspeed.zero.GatheredParameters(list(frozen.values())):
        found = {name: _array(p.float()) for name, p in frozen.items()}
    persistent = set(engine._get_buffer_names())
    return found | {
        name: _array(b.float()) for name, b in engine.module.named_buffers() if name in persistent
    }


def same(a: Whole, b: Whole) -> bool:
    """True if two snapshots hold the same parameters with the same bits."""
    return a.keys() == b.keys() and all(
        a[name].keys() == b[name].keys()
        and all(a[name][kind].tobytes() == b[name][kind].tobytes() for kind in a[name])
        for name in a
    )
