"""Where a run's checkpoints are, and how a host gets the files that its ranks load.

One folder that all hosts share; or a folder of each host's own, which holds the files of its own ranks only;
and, beside either, a place to which checkpoints were shipped. What is fetched comes under another name and is
renamed once its checksum is right.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from ds_pretrain.checkpoint.manifest import (
    BROKEN,
    MANIFEST,
    PARTIAL,
    FileEntry,
    Manifest,
    is_shared_by_ranks,
    owner,
    step_name,
)
from ds_pretrain.checkpoint.remote import Remote, folder_as_remote
from ds_pretrain.checkpoint.rng import RNG
from ds_pretrain.core.distributed import Failure, World, from_main, gather_objects, gather_work
from ds_pretrain.core.files import checksum, sync_folder, write_atomic, write_point

Verify = Literal["full", "sizes"]
Tell = Callable[[str], None]
ASSEMBLED = "assembled"  # in the run directory: checkpoints put together from what the hosts have


@dataclass(frozen=True)
class Places:
    """Where to look. The same on every rank, up to what each host has in a folder of its own."""

    root: Path  # where this host saves
    out: Path  # the run directory, which all hosts share
    per_host: bool = False  # True if `root` is a folder of each host's own
    remote: Remote | None = None
    verify: Verify = "full"

    def leads(self, world: World) -> bool:
        """True on the rank that creates, renames and removes in `root`."""
        return world.is_main or (self.per_host and world.local_rank == 0)

    def leader(self, world: World) -> int:
        """The rank that leads in this rank's `root`."""
        return world.rank - world.local_rank if self.per_host else 0

    def share(self, manifest: Manifest, world: World) -> list[str]:
        """The files that this rank checks, and fetches to its host where they are missing."""
        if not self.per_host:
            return [name for name in manifest.files if owner(name) % world.size == world.rank]
        return [
            name
            for name in manifest.files
            if owner(name) == world.rank or (world.local_rank == 0 and is_shared_by_ranks(name))
        ]


def wrong_file(path: Path, entry: FileEntry, verify: Verify) -> str | None:
    """Why a file is not the one that a manifest lists; None if it is.

    Raises:
        OSError: the disk did not answer, which says nothing about the file.
    """
    try:
        size = path.stat().st_size
        if size != entry.bytes:
            return f"{path.name} has {size:,} bytes, the manifest says {entry.bytes:,}"
        if verify == "full" and checksum(path) != entry.sha256:
            return f"the checksum of {path.name} does not match the manifest"
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        return f"{path.name} is listed and cannot be read ({error.strerror})"
    return None


@dataclass(frozen=True)
class Problem:
    """Why a file was not fetched. One that does not last may be gone at the next start."""

    text: str
    lasts: bool


def complete(
    places: Places, manifest: Manifest, text: str, wrong: Sequence[str], world: World
) -> Problem | None:
    """Fetch what is `wrong` of this rank's share into its host's folder; why any rank could not. Collective.

    A file that stands in the place of one is set aside, not deleted.
    """
    assert places.remote is not None
    folder, remote = places.root / step_name(manifest.step), places.remote
    exists = gather_objects(world, places.leads(world) and _exists(folder))[places.leader(world)]
    building = folder if exists else folder.with_name(folder.name + PARTIAL)
    problem = _agreed_problem(world, lambda: _begun(building, manifest) if places.leads(world) else None)
    if problem is None:
        fetch = partial(
            _first_problem, [partial(_fetched, [remote], manifest, name, building) for name in wrong]
        )
        problem = _agreed_problem(world, fetch)
    if problem is None:
        publishes = places.leads(world) and not exists
        problem = _agreed_problem(world, lambda: _publish(building, folder, text) if publishes else None)
    return problem


def assembled(places: Places, manifest: Manifest, text: str, world: World, tell: Tell) -> Path | Problem:
    """A folder that all hosts share, put together from what they and the remote place have. Collective.

    Or why it cannot be.
    """
    folder = places.out / ASSEMBLED / step_name(manifest.step)
    building = folder.with_name(folder.name + PARTIAL)
    if from_main(world, world.is_main and held_here(folder, manifest, text) == list(manifest.files)):
        return folder
    tell(f"putting the checkpoint of step {manifest.step:,} together in {folder.parent}")
    problem = _agreed_problem(world, lambda: _begun(building, manifest) if world.is_main else None)
    if problem is None:
        mine = _to_bring(places, manifest, text, world)
        bring = partial(
            _first_problem, [partial(_fetched, ways, manifest, name, building) for name, ways in mine.items()]
        )
        problem = _agreed_problem(world, bring)
    if problem is None:
        problem = _agreed_problem(world, lambda: _publish(building, folder, text) if world.is_main else None)
    return folder if problem is None else problem


def _to_bring(places: Places, manifest: Manifest, text: str, world: World) -> dict[str, list[Remote]]:
    """The files that this rank brings, and where it may take each from. Collective."""
    root = places.root / step_name(manifest.step)
    held = gather_objects(world, set(held_here(root, manifest, text)) if places.leads(world) else set())
    leaders = gather_objects(world, places.leader(world))
    mine = {}
    for place, name in enumerate(manifest.files):
        holders = [rank for rank, leader in enumerate(leaders) if name in held[leader]]
        ranks = holders or range(world.size)
        if ranks[place % len(ranks)] == world.rank:
            here = [folder_as_remote(places.root)] if holders else []
            mine[name] = [*here, *([places.remote] if places.remote is not None else [])]
    return mine


def held_here(folder: Path, manifest: Manifest, text: str) -> list[str]:
    """The files of a checkpoint that a folder has, by their size, if its manifest is this one."""
    try:
        if (folder / MANIFEST).read_text(encoding="utf-8") != text:
            return []
        return [n for n, entry in manifest.files.items() if wrong_file(folder / n, entry, "sizes") is None]
    except (OSError, ValueError):
        return []


def _fetched(ways: Sequence[Remote], manifest: Manifest, name: str, folder: Path) -> Problem | None:
    """Copy one file into `folder` from the first of `ways` that has it right; why none has."""
    path, entry = folder / name, manifest.files[name]
    arriving = path.with_name(f"{path.name}{PARTIAL}")
    problem = Problem(f"{name} is on no host", lasts=True)
    try:
        if wrong_file(path, entry, "full") is None:
            return None  # an earlier try got so far
        for remote in (way for way in ways for _ in range(2)):  # what arrives wrong may arrive right
            write_point(f"fetch {path.name}")
            found = _arrived(remote, manifest.step, name, arriving)
            if found == entry:
                if path.exists():
                    path.rename(path.with_name(f"{path.name}{BROKEN}"))
                write_point(f"fetched {path.name}")
                arriving.rename(path)
                return None
            arriving.unlink(missing_ok=True)
            what = "is not there" if found is None else "is not what the manifest lists"
            problem = Problem(f"{remote.place}: {name} of step {manifest.step} {what}", lasts=True)
    except OSError as error:
        return Problem(str(error), lasts=False)
    return problem


def _arrived(remote: Remote, step: int, name: str, path: Path) -> FileEntry | None:
    try:
        return remote.fetch(step, name, path)
    except FileNotFoundError:
        return None


def _first_problem(acts: Sequence[Callable[[], Problem | None]]) -> Problem | None:
    return next((problem for act in acts if (problem := act()) is not None), None)


def _agreed_problem(world: World, act: Callable[[], Problem | None]) -> Problem | None:
    """Work on every rank; the first problem of any. Collective."""
    for found in gather_work(world, act):
        if isinstance(found, Failure):
            return Problem(found.text, lasts=False)
        if found is not None:
            problem: Problem = found
            return problem
    return None


def _begun(building: Path, manifest: Manifest) -> None:
    """A folder to build in, without what a save that was killed has left there."""
    (building / RNG).mkdir(parents=True, exist_ok=True)
    for path in [*building.iterdir(), *(building / RNG).iterdir()]:
        name = path.relative_to(building).as_posix()
        if (
            path.is_file()
            and name != MANIFEST
            and name.endswith((PARTIAL, "_states.pt"))
            and name not in manifest.files
        ):
            path.unlink()


def _publish(building: Path, folder: Path, text: str) -> None:
    for part in (building / RNG, building):
        sync_folder(part)
    write_atomic(building / MANIFEST, text)
    write_point("publish fetched")
    building.rename(folder)
    sync_folder(folder.parent)


def _exists(folder: Path) -> bool:
    try:
        return folder.exists()
    except OSError:
        return False
