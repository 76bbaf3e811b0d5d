"""Starts the loop as the launcher does, on a rank, and makes it meet something."""

import contextlib
import io
import os
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ds_pretrain import train as train_module
from ds_pretrain.core.distributed import World
from ds_pretrain.core.run_files import stop_file
from ds_pretrain.training import saver


@dataclass(frozen=True)
class Ended:
    """How a rank's start ended: the exit code, and what it said."""

    code: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Stop:
    """A request to stop: how, on which rank, after which step (None: while the engine opens)."""

    how: str  # "SIGTERM", "SIGINT" or "file"
    rank: int
    step: int | None

    def ask(self, world: World, out: Path) -> None:
        if world.rank == self.rank and self.how == "file":
            stop_file(out).touch()
        elif world.rank == self.rank:
            os.kill(os.getpid(), getattr(signal, self.how))


def start(world: World, run_file: str, overrides: tuple[str, ...] = (), stop: Stop | None = None) -> Ended:
    """The loop's entry on this rank. Collective."""
    patch = pytest.MonkeyPatch()
    out = Path(run_file).parent / "out"
    open_engine = train_module.open_run_engine
    if stop is not None and stop.step is None:

        def opened(*args: Any) -> Any:
            stop.ask(world, out)
            return open_engine(*args)

        patch.setattr(train_module, "open_run_engine", opened)
    measure = train_module.measure

    def measured(*args: Any) -> Any:
        record, asked = measure(*args)
        if stop is not None and record.step == stop.step:
            stop.ask(world, out)  # after this step's ranks have agreed: the next one sees it
        return record, asked

    patch.setattr(train_module, "measure", measured)
    if train_module.STOP_PATIENCE_SECONDS == saver.STOP_PATIENCE_SECONDS:  # what is to be shipped shall be
        patch.setattr(train_module, "STOP_PATIENCE_SECONDS", saver.PATIENCE_SECONDS)
    said, complained = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complained):
        code = train_module.main([run_file, *overrides])
    patch.undo()
    return Ended(code, said.getvalue(), complained.getvalue())


def copied(folder: Path, to: Path) -> Path:
    """A run with all that lies in its folder, in another one; its run file there."""
    shutil.copytree(folder, to, dirs_exist_ok=True)
    run_file = to / "run.toml"
    run_file.write_text(run_file.read_text().replace(str(folder), str(to)))
    return run_file


def contents(folder: Path) -> dict[str, bytes]:
    """Every file under a folder, by its relative name."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
