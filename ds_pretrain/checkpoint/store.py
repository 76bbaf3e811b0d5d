"""Finds and restores checkpoints: the newest folder whose manifest verifies on every rank.

`latest` is for people and other tools; a restore does not read it.
"""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ds_pretrain.checkpoint.layout import (
    BROKEN,
    MANIFEST,
    RUN_STATE,
    Manifest,
    UnknownVersion,
    owner,
    parse_manifest,
    published,
    step_of,
)
from ds_pretrain.checkpoint.rng import load_streams
from ds_pretrain.checkpoint.universal import Universal, UniversalShards, layout_changes, opened, prepared
from ds_pretrain.checkpoint.universal import load as load_universal
from ds_pretrain.checkpoint.universal_layout import SOURCE_MANIFEST
from ds_pretrain.errors import InputError, RunError, agreed
from ds_pretrain.files import checksum
from ds_pretrain.state import RunState
from ds_pretrain.world import World, from_main, gather_objects

Tell = Callable[[str], None]


class Shards(UniversalShards, Protocol):
    """What a restore needs of an engine. Collective."""

    def load(self, folder: Path, tag: str) -> None: ...


@dataclass(frozen=True)
class Found:
    """A checkpoint that verified on every rank."""

    folder: Path
    manifest: Manifest
    state: RunState
    universal: Universal | None = None  # what is loaded in its place where its shards do not fit this start


def find(root: Path, world: World, tell: Tell) -> Found | None:
    """The newest checkpoint that verifies on every rank, or None where there has never been one. Collective.

    A folder that does not verify is named with its reason and set aside, not deleted.

    Raises:
        InputError: there are checkpoints, and none verifies.
    """
    candidates: list[Path] = from_main(world, published(root))
    for folder in candidates:
        reason = _verdict(folder, world)
        if reason is None:
            return _open(folder)
        _on_main(world, partial(_set_aside, folder, reason, tell))
    if candidates or from_main(world, any(root.glob(f"step_*{BROKEN}*"))):
        raise agreed(
            InputError(
                f"no checkpoint in {root} verifies (what does not was named and set aside as *{BROKEN}); "
                "a run never silently starts again at step 0: put an intact checkpoint back, or give "
                "the run file a new `out`"
            )
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
        reason = broken_reason(folder, World())
        if reason is None:
            return folder
        reasons.append(f"{folder}: {reason}")
    wanted = "a checkpoint" if step is None else f"a checkpoint of step {step}"
    raise InputError([f"{root} does not hold {wanted} that verifies; train first, or name another", *reasons])


def elsewhere(path: Path, accept_missing: Collection[str], world: World, tell: Tell) -> Found:
    """The checkpoint at a place: one of ours, or a universal one, also of DeepSpeed's own tool. Collective.

    Args:
        accept_missing: what the user allows a universal one to lack, of `universal.MISSING`.

    Raises:
        InputError: it is none, does not verify, or lacks something that was not allowed.
    """
    if from_main(world, (path / MANIFEST).is_file()):
        if (reason := _verdict(path, world)) is not None:
            raise InputError(f"{path} does not verify: {reason}; name another checkpoint")
        return _open(path)
    form = opened(path, accept_missing, world, tell)
    if (path / SOURCE_MANIFEST).is_file():
        manifest = parse_manifest((path / SOURCE_MANIFEST).read_text(encoding="utf-8"))
    else:
        manifest = _unknown_manifest(form)
    return Found(path, manifest, form.state, form)


def _unknown_manifest(form: Universal) -> Manifest:
    """What is known of a checkpoint that something else wrote: where it stands, and no run of ours."""
    world_size, stage = (form.manifest.world_size, form.manifest.zero_stage) if form.manifest else (0, 0)
    return Manifest(
        step=form.state.step,
        tokens=0,
        samples=0,
        world_size=world_size,
        zero_stage=stage,
        versions={},
        created="",
        attempt=0,
        wandb_id=None,
        overrides=(),
        identity={},
        files={},
    )


def fitted(found: Found, config: Mapping[str, Any], world: World, tell: Tell) -> Found:
    """A checkpoint that this start can load: converted if ranks, ZeRO stage or offload differ. Collective.

    Before the model is built. `config` is the DeepSpeed JSON of this start.

    Raises:
        InputError: something differs that no conversion bridges.
        RunError: the conversion failed; the checkpoint is unharmed.
    """
    if found.universal is not None:
        return found
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


def broken_reason(folder: Path, world: World) -> str | None:
    """Why a folder is no checkpoint, as far as this rank can tell: all sizes, the checksums of its own files.

    Raises:
        OSError: the disk did not answer, which says nothing about the checkpoint.
    """
    try:
        manifest = parse_manifest((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest.step != step_of(folder.name):
            return f"its manifest is of step {manifest.step:,}"
        for name, entry in manifest.files.items():
            found = (folder / name).stat().st_size
            if found != entry.bytes:
                return f"{name} has {found:,} bytes, the manifest says {entry.bytes:,}"
        for name, entry in manifest.files.items():
            if owner(name) % world.size == world.rank and checksum(folder / name) != entry.sha256:
                return f"the checksum of {name} does not match the manifest"
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        lost = Path(str(error.filename)).name
        return (
            "it has no manifest"
            if lost == MANIFEST
            else f"{lost} is listed and cannot be read ({error.strerror})"
        )
    except UnknownVersion:
        raise
    except ValueError as error:
        return f"its manifest cannot be read: {error}"
    return None


def _verdict(folder: Path, world: World) -> str | None:
    """The reason why any rank finds it broken. Collective. Raises where a rank could not tell."""
    reason = unclear = None
    try:
        reason = broken_reason(folder, world)
    except (OSError, UnknownVersion) as error:
        unclear = f"rank {world.rank}: {error}"
    told = gather_objects(world, (reason, unclear))
    if doubts := [doubt for _, doubt in told if doubt is not None]:
        raise agreed(
            RunError(
                f"{folder} cannot be checked ({doubts[0]}); it is left as it is: mend the disk, or use "
                "the program that wrote it, and start again"
            )
        )
    return next((reason for reason, _ in told if reason is not None), None)


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
        raise agreed(RunError(f"rank 0: {problem}"))
