"""Saves, verifies, publishes, restores and prunes checkpoints.

A save goes to a folder with another name; each rank syncs and sums the files it wrote; then rank 0 writes the
manifest, renames the folder and replaces `latest`. Whatever dies in between leaves the checkpoint before intact.
A restore takes the newest folder whose manifest verifies on every rank. `latest` is for people and other tools.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ds_pretrain.checkpoint.layout import (
    BROKEN,
    MANIFEST,
    PARTIAL,
    RUN_STATE,
    FileEntry,
    Manifest,
    owner,
    parse_manifest,
    published,
    step_name,
    step_of,
)
from ds_pretrain.checkpoint.rng import load_streams, save_streams
from ds_pretrain.checkpoint.universal import Universal, layout_changes, prepared
from ds_pretrain.checkpoint.universal import load as load_universal
from ds_pretrain.errors import InputError, RunError
from ds_pretrain.files import checksum, sync_file, sync_folder, write_atomic
from ds_pretrain.state import RunState
from ds_pretrain.world import World, from_main, gather_objects

Tell = Callable[[str], None]


class Shards(Protocol):
    """What a checkpoint needs of an engine. Collective."""

    def save(self, folder: Path, tag: str) -> None:
        """Raises OSError or RuntimeError on a rank that could not write, once every rank is done."""
        ...

    def load(self, folder: Path, tag: str) -> None: ...

    def load_universal(self, folder: Path, tag: str, optimizer_steps: int) -> list[str]:
        """Load what any number of ranks can; what on this rank is then not bitwise what its files hold."""
        ...

    def group_members(self) -> list[tuple[str, list[str]]]:
        """The name of each parameter group and the names of its parameters."""
        ...


@dataclass(frozen=True)
class Found:
    """A checkpoint that verified on every rank."""

    folder: Path
    manifest: Manifest
    state: RunState
    universal: Universal | None = None  # what is loaded in its place where its shards do not fit this start


def save(
    root: Path, state: RunState, manifest: Manifest, texts: Mapping[str, str], shards: Shards, world: World
) -> Manifest:
    """Write and publish a checkpoint of `state`; the manifest with its files. Collective.

    Raises:
        RunError: a rank could not write; nothing was published, and what was there before is intact.
    """
    name = step_name(state.step)
    unfinished = root / f"{name}{PARTIAL}"
    _on_main(world, lambda: _start_partial(unfinished))
    problem: str | None = None
    entries: dict[str, FileEntry] = {}
    try:
        shards.save(root, unfinished.name)
        save_streams(unfinished, world.rank)
        if world.is_main:
            for file, text in {**texts, RUN_STATE: state.to_json()}.items():
                (unfinished / file).write_text(text, encoding="utf-8")
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError where a disk is full
        problem = f"rank {world.rank}: {error}"
    _agree(world, problem, name)  # every file is written once all ranks are here
    try:
        entries = _seal(unfinished, world.rank)
    except OSError as error:
        problem = f"rank {world.rank}: {error}"
    _agree(world, problem, name)
    files = {n: e for rank_entries in gather_objects(world, entries) for n, e in rank_entries.items()}
    sealed = replace(manifest, files=dict(sorted(files.items())))
    _on_main(world, lambda: _publish(root, unfinished, name, sealed))
    return sealed


def find(root: Path, world: World, tell: Tell) -> Found | None:
    """The newest checkpoint that verifies on every rank, or None where there has never been one. Collective.

    A folder that does not verify is named with its reason and set aside, not deleted.

    Raises:
        InputError: there are checkpoints, and none verifies.
    """
    candidates: list[Path] = from_main(world, published(root))
    for folder in candidates:
        reasons = [r for r in gather_objects(world, _broken_reason(folder, world)) if r is not None]
        if not reasons:
            return _open(folder)
        _on_main(world, partial(_set_aside, folder, reasons[0], tell))
    if candidates:
        raise InputError(
            f"none of the {len(candidates)} checkpoints in {root} verifies (each is named above and set aside as "
            f"*{BROKEN}); a run never silently starts again at step 0: put an intact checkpoint back, or give "
            "the run file a new `out`"
        )
    return None


def newest_intact(root: Path, step: int | None = None) -> Path:
    """The newest checkpoint (or that of `step`) whose manifest verifies, read by this process alone.

    Raises:
        InputError: there is none; each that does not verify is named with its reason. Nothing is moved.
    """
    reasons = []
    for folder in published(root):
        if step is not None and step_of(folder.name) != step:
            continue
        reason = _broken_reason(folder, World())
        if reason is None:
            return folder
        reasons.append(f"{folder}: {reason}")
    wanted = "a checkpoint" if step is None else f"a checkpoint of step {step}"
    raise InputError([f"{root} does not hold {wanted} that verifies; train first, or name another", *reasons])


def fitted(found: Found, config: Mapping[str, Any], world: World, tell: Tell) -> Found:
    """A checkpoint that this start can load: converted if ranks, ZeRO stage or offload differ. Collective.

    Before the model is built. `config` is the DeepSpeed JSON of this start.

    Raises:
        InputError: something differs that no conversion bridges.
        RunError: the conversion failed; the checkpoint is unharmed.
    """
    saved = json.loads((found.folder / "deepspeed.json").read_text(encoding="utf-8"))
    changes = layout_changes(saved, found.manifest.world_size, config, world.size)
    if not changes:
        return found
    return replace(found, universal=prepared(found.folder, changes, world, tell))


def restore(found: Found, shards: Shards, seed: int, world: World, tell: Tell) -> RunState:
    """Load shards and this rank's random streams. Collective."""
    if found.universal is not None:
        return load_universal(found.universal, shards, seed, world, tell)
    shards.load(found.folder.parent, found.folder.name)
    load_streams(found.folder, world.rank)
    return found.state


def prune(root: Path, keep: int, world: World, tell: Tell) -> None:
    """Delete all but the newest `keep` checkpoints. A deletion that fails is told, never raised. Collective."""
    if world.is_main:
        for folder in published(root)[keep:]:
            doomed = folder.with_name(f"{folder.name}{PARTIAL}")  # no longer a checkpoint, before it is torn
            try:
                folder.rename(doomed)
            except OSError as error:
                tell(f"cannot delete the old checkpoint {folder}: {error}; training goes on")
        for torn in root.glob(f"*{PARTIAL}"):  # also what saves left that were killed
            try:
                shutil.rmtree(torn)
            except OSError as error:
                tell(f"cannot delete {torn}: {error}; training goes on")


def _start_partial(unfinished: Path) -> None:
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    if unfinished.exists():
        shutil.rmtree(unfinished)  # what an earlier save of this step left when it was killed
    unfinished.mkdir()


def _seal(unfinished: Path, rank: int) -> dict[str, FileEntry]:
    """Sync and sum the files that this rank wrote."""
    entries = {}
    for path in sorted(p for p in unfinished.rglob("*") if p.is_file()):
        name = path.relative_to(unfinished).as_posix()
        if owner(name) == rank:
            sync_file(path)
            entries[name] = FileEntry(path.stat().st_size, checksum(path))
    return entries


def _publish(root: Path, unfinished: Path, name: str, manifest: Manifest) -> None:
    sync_folder(unfinished / "rng")
    write_atomic(unfinished / MANIFEST, manifest.to_json())
    final = root / name
    if final.exists():  # the same step saved again: after a rollback, or by another start
        shutil.rmtree(final)
    unfinished.rename(final)
    sync_folder(root)
    write_atomic(root / "latest", f"{name}\n")


def _broken_reason(folder: Path, world: World) -> str | None:
    """Why a folder is no checkpoint, as far as this rank can tell: all sizes, and the checksums of its own files."""
    try:
        manifest = parse_manifest((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "it has no manifest"
    except (OSError, ValueError) as error:
        return f"its manifest cannot be read: {error}"
    for name, entry in manifest.files.items():
        try:
            found = (folder / name).stat().st_size
        except OSError as error:
            return f"{name} is listed and cannot be read ({error.strerror})"
        if found != entry.bytes:
            return f"{name} has {found:,} bytes, the manifest says {entry.bytes:,}"
    try:
        for name, entry in manifest.files.items():
            if owner(name) % world.size == world.rank and checksum(folder / name) != entry.sha256:
                return f"the checksum of {name} does not match the manifest"
    except OSError as error:
        return f"{name} cannot be read to its end ({error.strerror})"
    return None


def _open(folder: Path) -> Found:
    manifest = parse_manifest((folder / MANIFEST).read_text(encoding="utf-8"))
    return Found(folder, manifest, RunState.from_json((folder / RUN_STATE).read_text(encoding="utf-8")))


def _set_aside(folder: Path, reason: str, tell: Tell) -> None:
    aside = folder.with_name(folder.name + BROKEN)
    number = 2
    while aside.exists():
        aside = folder.with_name(f"{folder.name}{BROKEN}{number}")
        number += 1
    folder.rename(aside)
    tell(f"checkpoint {folder} is broken: {reason}; set aside as {aside.name}, trying the one before it")


def _agree(world: World, problem: str | None, name: str) -> None:
    """Every rank raises if any has a problem, and waits for all otherwise. Collective."""
    problems = [p for p in gather_objects(world, problem) if p is not None]
    if problems:
        raise RunError(
            f"checkpoint {name} was not saved ({'; '.join(problems)}); the one before it is intact"
        )


def _on_main(world: World, act: Callable[[], None]) -> None:
    """Do on rank 0 what is done once; every rank waits, and every rank raises if it failed. Collective."""
    problem = None
    if world.is_main:
        try:
            act()
        except OSError as error:
            problem = str(error)
    problem = from_main(world, problem)
    if problem is not None:
        raise RunError(f"rank 0: {problem}")
