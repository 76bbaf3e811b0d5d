"""Runs the real loop, makes it meet trouble, and keeps what each rank made of it, step by step.

What was trained is written beside the run as it happens, so a rank that is killed has told it too.
"""

import contextlib
import io
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_pretrain import train as train_module
from ds_pretrain.checkpoint import reshard as convert
from ds_pretrain.core.distributed import World
from ds_pretrain.core.state import RunState, SkipLedger
from ds_pretrain.data.loader import Batch, Feed
from ds_pretrain.engine.engine import ZeroEngine
from ds_pretrain.training import rollback as healing
from ds_pretrain.watchdog import rollback_log as cure
from tests.runs.elastic import streams_digest, tool_in_this_process
from tests.runs.golden import run_rank
from tests.runs.sick import UNSEEN

BATCH = 8  # samples of a step, unless a test says otherwise


@dataclass(frozen=True)
class Trouble:
    """What goes wrong, and on which rank (None: all).

    "labels": those of draws [first, stop) are nonsense, whenever they are read. The others happen at steps
    [first, stop), the first time that each is taken. "rate": the gradients are far too large. "loss": it is
    no number, and its gradient is sound. "gradient": it is no number, and its loss is sound.
    """

    kind: str
    first: int
    stop: int
    rank: int | None = None


@dataclass(frozen=True)
class Usage:
    """What a process holds."""

    rss_bytes: int
    num_threads: int
    num_files: int


@dataclass(frozen=True)
class Watched:
    """What one rank did."""

    code: int
    said: str
    final: RunState
    verdicts: list[tuple[Any, ...]]  # (step, action, kind, onset, message) of every step taken, in order
    rollbacks: list[RunState]  # the state gone on from, after each
    usage: list[Usage]  # after each rollback
    trained: list[tuple[int, list[Any]]]  # (step, samples) of every step taken, in order
    digest: str = ""  # of masters and moments
    streams: str = ""  # of the random streams
    rates: Any = None  # by step, of the live groups


def run_watched(
    world: World,
    run_file: str,
    troubles: Sequence[Trouble] = (),
    overrides: tuple[str, ...] = (),
    kill_at: str | None = None,
    kill_after: int | None = None,
) -> Watched:
    """Train. With `kill_at`, this process is SIGKILLed at that write point of a rollback, or as it begins to
    "load"; with `kill_after`, once that step is recorded.
    """
    seen = _Seen(world, Path(run_file).with_name("trained.jsonl"))
    said, code, ended = io.StringIO(), 0, ("", None, None)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said):
        _make_trouble(patch, world, troubles, seen)
        _record(patch, seen)
        _kill(patch, kill_at)
        patch.setattr(convert, "_run_tool", tool_in_this_process)
        try:
            ended = run_rank(world, run_file, kill_after, overrides)
        except train_module.RunError as error:
            code = error.exit_code
            said.write(str(error))
    return Watched(
        code,
        said.getvalue(),
        seen.state,
        seen.verdicts,
        seen.rollbacks,
        seen.usage,
        seen.trained,
        ended[0],
        streams_digest(),
        ended[1],
    )


def counted(run_file: Path) -> dict[int, list[Any]]:
    """(draw, samples) by step of the history that counts: a step taken again supersedes it and all later."""
    steps: dict[int, list[Any]] = {}
    for line in run_file.with_name("trained.jsonl").read_text().splitlines():
        record = json.loads(line)
        steps = {step: draws for step, draws in steps.items() if step < record["step"]}
        steps[record["step"]] = record["draws"]
    return steps


class _Seen:
    def __init__(self, world: World, log: Path) -> None:
        self._log = log.open("a", buffering=1) if world.is_main else None
        self.state = RunState()
        self.verdicts: list[tuple[Any, ...]] = []
        self.rollbacks: list[RunState] = []
        self.usage: list[Usage] = []
        self.trained: list[tuple[int, list[Any]]] = []

    def train(self, batch: Batch) -> None:
        self.trained.append((batch.ids.step + 1, batch.ids.listed()))
        if self._log is not None:
            record = {"step": batch.ids.step + 1, "draws": batch.ids.draw.tolist()}
            self._log.write(json.dumps(record) + "\n")


def _make_trouble(patch: pytest.MonkeyPatch, world: World, troubles: Sequence[Trouble], seen: _Seen) -> None:
    take_step, read = train_module.take_step, Feed._read
    mine = [t for t in troubles if t.rank in (None, world.rank)]
    met: set[tuple[str, int]] = set()

    def stepped(engine: Any, batch: Batch, rate: float, *args: Any) -> Any:
        seen.train(batch)
        step = batch.ids.step + 1
        kinds = {t.kind for t in mine if t.first <= step < t.stop and (t.kind, step) not in met}
        met.update((kind, step) for kind in kinds)
        with _unsound(ZeroEngine) if "gradient" in kinds else contextlib.nullcontext():
            losses, update = take_step(engine, batch, 3.0 if "rate" in kinds else rate, *args)
        if "loss" in kinds:
            losses[0] = float("nan")
        return losses, update

    def poisoned(self: Feed, step: int, ledger: SkipLedger) -> Batch:
        batch = read(self, step, ledger)
        share = len(batch.checksums)
        draws = batch.ids.draw[world.rank * share : (world.rank + 1) * share]  # [S / W]
        for trouble in mine:
            if trouble.kind == "labels":
                is_bad = torch.from_numpy((draws >= trouble.first) & (draws < trouble.stop))
                rows = iter(is_bad.split([len(m.labels) for m in batch.micro_batches]))
                for micro in batch.micro_batches:
                    micro.labels[next(rows)] = UNSEEN
        return batch

    patch.setattr(train_module, "take_step", stepped)
    patch.setattr(Feed, "_read", poisoned)


@contextlib.contextmanager
def _unsound(engine: Any) -> Iterator[None]:
    backward = engine.backward
    with pytest.MonkeyPatch.context() as once:
        once.setattr(engine, "backward", lambda self, loss: backward(self, loss * float("nan")))
        yield


def _record(patch: pytest.MonkeyPatch, seen: _Seen) -> None:
    judge, roll_back = healing.Watchdog.judge, healing.Watchdog.roll_back

    def judged(self: Any, state: RunState, record: Any, *args: Any) -> Any:
        after, verdict = judge(self, state, record, *args)
        seen.state = after
        told = (verdict.action, verdict.kind, verdict.onset, verdict.message)
        seen.verdicts.append((record.step, *told))
        return after, verdict

    def rolled_back(*args: Any) -> RunState:
        seen.state = roll_back(*args)
        seen.rollbacks.append(seen.state)
        seen.usage.append(usage())
        return seen.state

    patch.setattr(healing.Watchdog, "judge", judged)
    patch.setattr(healing.Watchdog, "roll_back", rolled_back)


def _kill(patch: pytest.MonkeyPatch, kill_at: str | None) -> None:
    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    write_point: Callable[[str], None] = cure.write_point
    patch.setattr(cure, "write_point", lambda name: die() if name == kill_at else write_point(name))
    if kill_at == "load":
        patch.setattr(healing.store, "restore", die)


def usage() -> Usage:
    """Of this process, now."""
    rss_pages = int(Path("/proc/self/statm").read_text().split()[1])
    threads, files = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
    assert threads >= threading.active_count()
    return Usage(rss_pages * os.sysconf("SC_PAGE_SIZE"), threads, files)
