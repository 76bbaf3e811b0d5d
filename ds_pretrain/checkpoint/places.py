"""Where a run's checkpoints are, and how a host gets the files that its ranks load.

One folder that all hosts share; or a folder of each host's own, which holds the files of its own ranks only;
and, beside either, a place to which checkpoints were shipped. What is fetched comes under another name and is
renamed once its checksum is right.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ds_pretrain.checkpoint.layout import (
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
from ds_pretrain.errors import RunError, agreed
from ds_pretrain.files import checksum, sync_folder, write_atomic, write_point
from ds_pretrain.world import World, from_main, gather_objects

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
    folder = places.root / step_name(manifest.step)
    exists = gather_objects(world, folder.exists())[places.leader(world)]
    building = folder if exists else folder.with_name(folder.name + PARTIAL)
    problem = None
    if places.leads(world):
        problem = _tried(lambda: (building / RNG).mkdir(parents=True, exist_ok=True))
    problem = next((p for p in gather_objects(world, problem) if p is not None), None)
    for name in wrong:
        problem = problem or _fetched(places.remote, manifest, name, building)
    problems = [p for p in gather_objects(world, problem) if p is not None]
    if not problems and not exists and places.leads(world):
        problem = _tried(lambda: _publish(building, folder, text))
        problems += [problem] if problem else []
    return next((p for found in gather_objects(world, problems) for p in found), None)


def assembled(places: Places, manifest: Manifest, text: str, world: World, tell: Tell) -> Path:
    """A folder that all hosts share, put together from what they and the remote place have. Collective.

    Raises:
        RunError: a file of it is nowhere intact, or the run directory cannot hold it.
    """
    folder = places.out / ASSEMBLED / step_name(manifest.step)
    building = folder.with_name(folder.name + PARTIAL)
    if from_main(world, (folder / MANIFEST).is_file() and (folder / MANIFEST).read_text() == text):
        return folder
    tell(f"putting the checkpoint of step {manifest.step:,} together in {folder.parent}")
    problem = None
    if world.is_main:
        problem = _tried(lambda: (building / RNG).mkdir(parents=True, exist_ok=True))
    problem = from_main(world, problem)
    held = gather_objects(world, held_here(places, manifest, text) if places.leads(world) else [])
    for place, name in enumerate(manifest.files):
        holder = next((rank for rank, names in enumerate(held) if name in names), place % world.size)
        if holder != world.rank or problem is not None:
            continue
        problem = Problem(f"{name} is on no host", lasts=True)
        if name in held[holder]:
            problem = _fetched(folder_as_remote(places.root), manifest, name, building)
        if problem is not None and places.remote is not None:
            problem = _fetched(places.remote, manifest, name, building)
    problems = [p for p in gather_objects(world, problem) if p is not None]
    if not problems and world.is_main:
        problem = _tried(lambda: _publish(building, folder, text))
        problems += [problem] if problem else []
    for problem in from_main(world, problems):
        raise agreed(
            RunError(f"the checkpoint of step {manifest.step:,} cannot be put together: {problem.text}")
        )
    return folder


def held_here(places: Places, manifest: Manifest, text: str) -> list[str]:
    """The files of a checkpoint that this host has, by their size."""
    folder = places.root / step_name(manifest.step)
    try:
        if (folder / MANIFEST).read_text(encoding="utf-8") != text:
            return []
        return [
            name
            for name, entry in manifest.files.items()
            if wrong_file(folder / name, entry, "sizes") is None
        ]
    except (OSError, ValueError):
        return []


def _fetched(remote: Remote, manifest: Manifest, name: str, folder: Path) -> Problem | None:
    """Copy one file into `folder`, and check it; why that failed."""
    path, entry = folder / name, manifest.files[name]
    arriving = path.with_name(f"{path.name}{PARTIAL}")
    try:
        write_point(f"fetch {path.name}")
        if remote.fetch(manifest.step, name, arriving) != entry:
            arriving.unlink()
            what = f"{remote.place}: {name} of step {manifest.step} is not what the manifest lists"
            return Problem(what, lasts=True)
        if path.exists():
            path.rename(path.with_name(f"{path.name}{BROKEN}"))
        write_point(f"fetched {path.name}")
        arriving.rename(path)
    except OSError as error:
        return Problem(str(error), lasts=isinstance(error, FileNotFoundError))
    return None


def _publish(building: Path, folder: Path, text: str) -> None:
    for part in (building / "rng", building):
        sync_folder(part)
    write_atomic(building / MANIFEST, text)
    write_point("publish fetched")
    building.rename(folder)
    sync_folder(folder.parent)


def _tried(act: Callable[[], None]) -> Problem | None:
    try:
        act()
    except OSError as error:
        return Problem(str(error), lasts=False)
    return None
