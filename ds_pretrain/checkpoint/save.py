"""Saves, one at a time: snapshot now, write behind, publish once every rank's files are on disk.

A save goes to a folder with another name. When all ranks have written and synced, rank 0 writes the
manifest, renames the folder and replaces `latest`, on a thread too; so does the leader of each host where
every host has a folder of its own. Whatever dies in between leaves the checkpoint before intact. Ranks agree
on how far a save is through one number each, which rides in the row of a step.
"""

import contextlib
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Generic, Protocol, TypeVar

from ds_pretrain.checkpoint.manifest import (
    MANIFEST,
    PARTIAL,
    REPLACED,
    RUN_STATE,
    FileEntry,
    Manifest,
    step_name,
)
from ds_pretrain.checkpoint.rng import RNG, dump_streams, rng_file
from ds_pretrain.checkpoint.snapshot import Buffers, Snapshot
from ds_pretrain.checkpoint.storage import StorageLayout
from ds_pretrain.core.distributed import World, broadcast_from_main, gather_objects, gather_rows
from ds_pretrain.core.files import Capture, free_bytes, sync_folder, write_atomic, write_point
from ds_pretrain.core.metrics import Probe
from ds_pretrain.core.state import RunState

Result = TypeVar("Result")
_PATIENCE_SECONDS = 60.0  # between two collectives of a wait: far below the timeout of one


class Saveable(Protocol):
    """The part of an engine that a save needs. Collective."""

    def save(self, folder: Path, tag: str, capture: Capture) -> Exception | None:
        """Hand this rank's files to `capture`, and call what that returns before the next update or load.

        Why it could not, once every rank is through.
        """
        ...


@dataclass(frozen=True)
class SaveOutcome:
    """The outcome of a save, the same on every rank. `problem` says why it was not published."""

    step: int
    problem: str | None
    bytes: int
    stall_seconds: float  # that training stood still, on the slowest rank
    total_seconds: float


class SaveProgress(IntEnum):
    """The progress of a background save, as a number that ranks reduce in the row of a step."""

    RUNNING = 1
    DONE = 2
    FAILED = 3


class BackgroundTask(Generic[Result]):
    """Runs `act` on a thread of its own, from now on; its error is kept for whoever asks."""

    def __init__(self, act: Callable[[], Result], name: str) -> None:
        self.error: Exception | None = None
        self.result: Result | None = None  # once it is done
        self._act = act
        self._thread = threading.Thread(target=self._run, name=name)
        self._thread.start()

    @property
    def progress(self) -> SaveProgress:
        """The progress of the work; never waits."""
        if self._thread.is_alive():
            return SaveProgress.RUNNING
        return SaveProgress.FAILED if self.error is not None else SaveProgress.DONE

    def wait(self, seconds: float | None = None) -> None:
        """Return when it is done or has failed, or after so many seconds."""
        self._thread.join(seconds)

    def _run(self) -> None:
        try:
            self.result = self._act()
        except Exception as error:  # a thread has no caller
            self.error = error


@dataclass
class _InFlight:
    step: int
    manifest: Manifest
    began: float
    stall_seconds: float
    snapshot: Snapshot
    job: BackgroundTask[dict[Path, FileEntry]]
    here: Mapping[str, FileEntry] | None = None  # the files in this host's folder, once all are written
    publishing: BackgroundTask[None] | None = None  # on a leader


class Saves:
    """The saves of one run on one rank. Methods marked collective must be called by all ranks together."""

    def __init__(
        self, storage: StorageLayout, world: World, published: Callable[[int], None], expected_bytes: int = 0
    ) -> None:
        """`published` runs on a thread of each leader once a checkpoint is published on all hosts."""
        self._storage, self._world, self._published = storage, world, published
        self._leads, self._root = storage.is_leader(world), storage.root
        self._expected_bytes = expected_bytes  # of one checkpoint in `root`; the last one tells better
        self._buffers: Buffers = {}
        self._save: _InFlight | None = None
        self._after: BackgroundTask[None] | None = None  # what follows the last publication, on a leader

    @property
    def progress(self) -> int:
        """The progress of the work; never waits."""
        if self._save is None:
            return 0
        if self._save.here is not None:
            return int(self._save.publishing.progress if self._save.publishing else SaveProgress.DONE)
        return int(self._save.job.progress)

    def begin(
        self, state: RunState, manifest: Manifest, texts: Mapping[str, str], engine: Saveable
    ) -> SaveOutcome | None:
        """Snapshot `state` and start to write it; how the save ended, if it could not begin. Collective."""
        assert self._save is None, "one save at a time: `finish` the one before"
        self._wait_after()
        began = perf_counter()
        manifest = broadcast_from_main(self._world, manifest)  # one text on all hosts
        unfinished = self._unfinished(state.step)
        refused = gather_objects(self._world, self._start(unfinished))
        problem = next((p for p in refused if p is not None), None)
        snapshot = Snapshot(self._buffers)
        if problem is None:
            problem = self._own(engine.save(self._root, unfinished.name, snapshot.capture))
            snapshot.add(dump_streams(), unfinished / rng_file(self._world.rank))
            if self._world.is_main:
                for file, text in {**texts, RUN_STATE: state.to_json()}.items():
                    snapshot.add(text.encode(), unfinished / file)
            snapshot.settle()
        stall = perf_counter() - began
        problems = gather_objects(self._world, (problem, stall))
        if any(p for p, _ in problems):
            snapshot.abandon()
            return self._failed(state.step, [p for p, _ in problems if p], max(s for _, s in problems), began)
        job = BackgroundTask(snapshot.write, "snapshot")
        self._save = _InFlight(state.step, manifest, began, max(s for _, s in problems), snapshot, job)
        return None

    @property
    def is_under_way(self) -> bool:
        """The same on every rank."""
        return self._save is not None

    def record_probe(self, step: int, probe: Probe) -> None:
        """Take the probe of the weights after `step` finished steps, if it is they that are being saved."""
        if self._save is not None and self._save.step == step and self._save.here is None:
            self._save.manifest = replace(self._save.manifest, probe=probe)

    def advance(self, progress: Sequence[int]) -> SaveOutcome | None:
        """Advance the save as far as all ranks allow; return its outcome if it ended. Collective."""
        save = self._save
        if save is None or any(one == SaveProgress.RUNNING for one in progress):
            return None
        if save.here is not None:
            return self._ended(save)
        problem = self._own(save.job.error)
        leader, folder = self._storage.find_leader(self._world), self._unfinished(save.step)
        entries = save.job.result or {}  # nothing where it failed
        mine = (leader, {path.relative_to(folder).as_posix(): entry for path, entry in entries.items()})
        gathered = gather_objects(self._world, (problem, save.snapshot.waited_seconds, mine))
        save.stall_seconds += max(waited for _, waited, _ in gathered)
        if any(p for p, _, _ in gathered):
            self._save = None
            return self._failed(save.step, [p for p, _, _ in gathered if p], save.stall_seconds, save.began)
        save.here = {name: e for _, _, (of, own) in gathered if of == leader for name, e in own.items()}
        everything = (item for _, _, (_, own) in gathered for item in own.items())
        save.manifest = replace(save.manifest, files=dict(sorted(everything)))
        if self._leads:
            save.publishing = BackgroundTask(
                partial(publish, self._root, save.manifest, save.here), "publish"
            )
        return None

    def finish(self) -> SaveOutcome | None:
        """Wait until the save under way is published or has failed. Collective."""
        outcome = None
        while self._save is not None and outcome is None:
            (self._save.publishing or self._save.job).wait(_PATIENCE_SECONDS)
            outcome = self.advance([int(s) for s in gather_rows(self._world, [self.progress])[:, 0]])
        self._wait_after()
        return outcome

    def _start(self, unfinished: Path) -> str | None:
        """Make the folder of a save, on a leader; why there can be none."""
        if not self._leads:
            return None
        try:
            unfinished.parent.mkdir(parents=True, exist_ok=True)
            if unfinished.exists():
                shutil.rmtree(unfinished)  # what an earlier save of this step left when it was killed
            free, needed = free_bytes(unfinished.parent), self._expected_bytes
            if free < needed:
                return f"{unfinished.parent} has {free:,} bytes free, and a checkpoint needs {needed:,}"
            (unfinished / RNG).mkdir(parents=True)
        except OSError as error:
            return str(error)
        return None

    def _ended(self, save: _InFlight) -> SaveOutcome:
        error = save.publishing.error if save.publishing else None
        problems = [p for p in gather_objects(self._world, self._own(error)) if p is not None]
        self._save = None
        if problems:
            if self._leads:
                withdraw(self._root, save.manifest)
            return self._failed(save.step, problems, save.stall_seconds, save.began)
        total = perf_counter() - save.began
        if self._leads:
            self._after = BackgroundTask(partial(self._published, save.step), "after a save")
        assert save.here is not None
        self._expected_bytes = sum(entry.bytes for entry in save.here.values())
        return SaveOutcome(save.step, None, save.manifest.total_bytes, save.stall_seconds, total)

    def _failed(self, step: int, problems: Sequence[str], stall_seconds: float, began: float) -> SaveOutcome:
        if self._leads:
            shutil.rmtree(self._unfinished(step), ignore_errors=True)
        told = "; ".join(dict.fromkeys(problems))
        return SaveOutcome(step, told, 0, stall_seconds, perf_counter() - began)

    def _wait_after(self) -> None:
        if self._after is not None:
            self._after.wait()
            self._after = None

    def _own(self, problem: object) -> str | None:
        return None if problem is None else f"rank {self._world.rank}: {problem}"

    def _unfinished(self, step: int) -> Path:
        return self._root / f"{step_name(step)}{PARTIAL}"


def publish(root: Path, manifest: Manifest, here: Mapping[str, FileEntry]) -> None:
    """Make the written folder of a save a checkpoint: manifest, rename, `latest`, each all or nothing.

    `here` are the files of the manifest that this folder holds.
    """
    name = step_name(manifest.step)
    unfinished, final = root / f"{name}{PARTIAL}", root / name
    for folder in {(unfinished / file).parent for file in here}:
        sync_folder(folder)
    for file, entry in here.items():  # other hosts may have written elsewhere
        if (unfinished / file).stat().st_size != entry.bytes:
            raise OSError(f"{file} has another size here than where it was written")
    write_point("manifest")
    write_atomic(unfinished / MANIFEST, manifest.to_json())
    if final.exists():  # the same step again, after older weights were restored
        write_point("set the old one aside")
        replaced = root / f"{name}{REPLACED}"
        if replaced.exists():  # of a save of this step that was killed
            shutil.rmtree(replaced)
        final.rename(replaced)
    write_point("rename")
    unfinished.rename(final)
    write_point("sync the folder")
    sync_folder(root)
    write_point("latest")
    with contextlib.suppress(OSError):  # for people and other tools: no restore reads it
        write_atomic(root / "latest", f"{name}\n")


def withdraw(root: Path, manifest: Manifest) -> None:
    """Take back a publication that another host could not make; what it replaced has its name again."""
    final = root / step_name(manifest.step)
    replaced = root / f"{final.name}{REPLACED}"
    with contextlib.suppress(OSError):
        if (final / MANIFEST).is_file() and (final / MANIFEST).read_text() == manifest.to_json():
            final.rename(root / f"{final.name}{PARTIAL}")
        if replaced.exists() and not final.exists():
            replaced.rename(final)
