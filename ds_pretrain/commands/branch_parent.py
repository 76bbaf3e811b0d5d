"""The checkpoint that a run branches from: in a folder here, or at a place where copies are shipped to."""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ds_pretrain.checkpoint.inventory import chosen, size, verified
from ds_pretrain.checkpoint.manifest import (
    MANIFEST,
    RUN_STATE,
    FileEntry,
    Manifest,
    parse_manifest,
    step_name,
)
from ds_pretrain.checkpoint.remote import Remote
from ds_pretrain.checkpoint.retention import CALM, PINNED, manifest_sum, note_branch
from ds_pretrain.core.errors import InputError
from ds_pretrain.core.files import checksum, copied_beside, free_bytes, make_synced
from ds_pretrain.core.state import RunState


@dataclass(frozen=True)
class Parent:
    """A checkpoint, and where it is."""

    place: Path | Remote  # that holds the folder of the step
    manifest: Manifest
    manifest_sum: str  # SHA-256 of its text
    num_rollbacks: int

    @property
    def name(self) -> str:
        """Of its run."""
        return str(self.manifest.identity.get("name"))

    @property
    def directory(self) -> str:
        """What holds it, in words."""
        return str(self.place.absolute()) if isinstance(self.place, Path) else self.place.place.rstrip("/")

    @property
    def where(self) -> str:
        """Itself, in words."""
        return f"{self.directory}/{step_name(self.manifest.step)}"

    @property
    def is_calm(self) -> bool:
        """True if enough healthy steps came after it."""
        if isinstance(self.place, Path):
            return (Path(self.where) / CALM).exists()
        return self.place.size(self.manifest.step, CALM) is not None


def read_parent(place: Path | Remote, step: int) -> Parent:
    """The checkpoint of a step. Raises InputError: there is none, or it cannot be read."""
    folder = chosen(place, step) if isinstance(place, Path) else _chosen_there(place, step)
    try:
        if isinstance(place, Path):
            texts = [(Path(folder) / name).read_bytes() for name in (MANIFEST, RUN_STATE)]
        else:
            texts = [place.read(step, name) or b"" for name in (MANIFEST, RUN_STATE)]
        manifest, state = parse_manifest(texts[0].decode()), RunState.from_json(texts[1].decode())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{folder} is broken: its manifest or {RUN_STATE} cannot be read ({error}); branch from another "
            "checkpoint"
        ) from None
    return Parent(place, manifest, manifest_sum(texts[0]), len(state.rollbacks))


def _chosen_there(place: Remote, step: int) -> str:
    if step not in (there := place.steps()):
        listed = ", ".join(f"{s:,}" for s in there) or "none"
        raise InputError(f"{place.place} has no checkpoint of step {step:,}; it has: {listed}")
    return f"{place.place}/{step_name(step)}"


def require_whole(parent: Parent) -> None:
    """Read every byte of a checkpoint here; one elsewhere is summed while it is fetched.

    Raises:
        InputError: it is broken.
    """
    if isinstance(parent.place, Path) and (reason := verified(Path(parent.where))):
        raise InputError(f"{parent.where} is broken: {reason}; branch from another checkpoint")


def overlaps(parent: Parent, places: dict[str, str | None]) -> Iterator[str]:
    """Places of a new run, by key of the run file, that are the parent's: who deletes one takes both."""
    for key, place in places.items():
        if place is None:
            continue
        if "://" in place:
            if place.rstrip("/") == parent.directory:
                yield f"{key} = {place} is where the parent's checkpoints are; name another place"
        elif (whose := _holder(parent, Path(place).resolve())) is not None:
            yield f"{key} = {place} lies in {whose}; name a folder outside of it"


def _holder(parent: Parent, place: Path) -> str | None:
    roots: dict[Path, str] = {}
    if isinstance(parent.place, Path):
        root = parent.place.resolve()
        roots[root] = f"the parent's folder of checkpoints ({root})"
        if root.name == "checkpoints":
            roots[root.parent] = f"the parent's run directory ({root.parent})"
    for folder in (place, *place.parents):
        if os.path.isfile(folder / MANIFEST):
            return f"a checkpoint ({folder})"
        if folder in roots:
            return roots[folder]
    return None


def bring(parent: Parent, building: Path) -> tuple[int, str]:
    """Put every file that the manifest lists into a folder; the bytes that were written, and how.

    A link takes no room: nothing writes into a checkpoint's files, and a deletion takes one of two names.

    Raises:
        InputError: there is no room, or what arrived is not what the manifest says.
    """
    shutil.rmtree(building, ignore_errors=True)
    make_synced(building)
    num_written = 0
    for name, entry in parent.manifest.files.items():
        path = building / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(parent.place, Path) and _linked(Path(parent.where) / name, path):
            continue
        if (free := free_bytes(building)) < (missing := parent.manifest.total_bytes - num_written):
            is_here = isinstance(parent.place, Path)
            how = "cannot be linked there, and a copy takes" if is_here else "takes"
            raise InputError(
                f"{building.parent}: {parent.where} {how} {size(missing)} where {size(free)} are free; make "
                f"room, or put `out` on {'the file system of the parent' if is_here else 'a larger disk'}"
            )
        _write(parent, name, entry, path)
        num_written += entry.bytes
    return num_written, "copied" if isinstance(parent.place, Path) else "fetched"


def _linked(source: Path, path: Path) -> bool:
    try:
        os.link(source, path)
    except OSError:  # another file system, or one without links
        return False
    return True


def _write(parent: Parent, name: str, entry: FileEntry, path: Path) -> None:
    if isinstance(parent.place, Path):
        copied_beside(Path(parent.where) / name, path).rename(path)
        if checksum(path) != entry.sha256:
            raise InputError(f"{path} was copied and reads back as something else; look at that disk")
        return
    if parent.place.fetch(parent.manifest.step, name, path) != entry:
        raise InputError(
            f"{parent.where} is broken: {name} is not what its manifest says; branch from another checkpoint"
        )


def pin(parent: Parent, name: str, out: str) -> None:
    """Keep the checkpoint for good, and say for whom. Raises OSError where it is not ours to write to."""
    if isinstance(parent.place, Path):
        note_branch(Path(parent.where), name, out)
        return
    step = parent.manifest.step
    before = parent.place.read(step, PINNED) or b""
    parent.place.write(step, PINNED, before + json.dumps({"name": name, "out": out}).encode() + b"\n")
