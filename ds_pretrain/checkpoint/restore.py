"""Finds and restores checkpoints: the newest whose manifest verifies on every rank.

`latest` is for people and other tools; a restore does not read it.
"""

import contextlib
import itertools
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from ds_pretrain.checkpoint.manifest import (
    ABANDONED,
    BROKEN,
    EXPIRED,
    MANIFEST,
    SOURCE_MANIFEST,
    Manifest,
    list_published,
    parse_manifest,
    parse_step,
    step_name,
)
from ds_pretrain.checkpoint.reshard import find_layout_changes
from ds_pretrain.checkpoint.retention import PINNED
from ds_pretrain.checkpoint.rng import load_streams
from ds_pretrain.checkpoint.storage import StorageLayout
from ds_pretrain.checkpoint.universal import UniversalShards, open_foreign, prepare_universal
from ds_pretrain.checkpoint.universal import load as load_universal
from ds_pretrain.checkpoint.verify import (
    Found,
    assemble,
    find_at_step,
    find_damage,
    find_in_folder,
    look_everywhere,
    recover,
    rename_broken,
)
from ds_pretrain.core.distributed import EVERY_RANK, World, log, run_on_main
from ds_pretrain.core.errors import InputError, RunError, mark_agreed
from ds_pretrain.core.state import RunState


class Shards(UniversalShards, Protocol):
    """The part of an engine that a restore needs. Collective."""

    def load(self, folder: Path, tag: str) -> None: ...


def find_latest(
    storage: StorageLayout, world: World, is_left: Callable[[RunState], bool] = lambda state: False
) -> Found | None:
    """The newest checkpoint that verifies on every rank, or None where there has never been one. Collective.

    What is missing or broken here is fetched from the remote. A folder that does not verify is renamed, not
    deleted, and the reason is logged. One that `is_left`, on a branch that a rollback has
    given up, is skipped; `discard_after` gives it up.

    Raises:
        InputError: there are checkpoints, and none verifies.
        RunError: a disk or the remote place does not answer.
    """
    told = look_everywhere(storage.root, world, lambda: _list_local_steps(storage, world))
    remote = storage.remote if world.is_main else None
    uploaded = look_everywhere(storage.root, world, lambda: [] if remote is None else remote.list_steps())[0]
    passed_over: list[int] = []
    for step in sorted({step for steps, _ in told for step in steps} | set(uploaded), reverse=True):
        outcome = find_at_step(storage, step, world)
        if isinstance(outcome, Found):
            if not is_left(outcome.state):
                return outcome
            log.warning(f"checkpoint step {step:,} is skipped: abandoned by a rollback to an earlier step")
            passed_over.append(step)
        else:
            _set_aside(storage, step, outcome, world)
    if uploaded or any(steps or had_broken for steps, had_broken in told):
        steps = ", ".join(f"{step:,}" for step in passed_over)
        but = (
            f"; steps {steps} verify, but a rollback abandoned them: after a stop, "
            'watchdog.mode = "observe" resumes from them'
        )
        raise mark_agreed(
            InputError(
                f"no checkpoint in {storage.root} verifies (broken ones are listed above and renamed to "
                f"*{BROKEN}{but if steps else ''}); a run never restarts at step 0 by itself; put an "
                f"intact checkpoint back, or give the run file a new `out`"
            )
        )
    return None


def discard_after(storage: StorageLayout, to_step: int, world: World) -> None:
    """Give up the checkpoints after `to_step`, here and at the remote: the run was rolled back.

    They lose their name; the next pruning deletes them, but for pinned ones, which stay under another name.
    """
    if storage.is_leader(world):
        for folder in list_published(storage.root):
            if (parse_step(folder.name) or 0) > to_step:
                with contextlib.suppress(OSError):
                    folder.rename(_abandoned_name(folder))
    if storage.remote is not None and world.is_main:
        try:
            for step in storage.remote.list_steps():
                if step > to_step and storage.remote.get_size(step, PINNED) is None:
                    storage.remote.remove(step, MANIFEST)
        except OSError as error:
            log.warning(
                f"checkpoints after step {to_step:,} may still be at the remote: {error}; training continues"
            )


def _abandoned_name(folder: Path) -> Path:
    if not (folder / PINNED).exists():
        return folder.with_name(f"{folder.name}{EXPIRED}")
    names = (folder.with_name(f"{folder.name}{ABANDONED}{number}") for number in itertools.count(1))
    free = next(name for name in names if not name.exists())
    log.warning(
        f"{folder.name} is pinned, and of a branch that the run has left: it is kept as {free.name}",
        extra=EVERY_RANK,
    )
    return free


def find_newest_intact(root: Path, step: int | None = None) -> Path:
    """The newest checkpoint (or that of `step`) whose manifest verifies, read by this process alone.

    Raises:
        InputError: there is none; each that does not verify is named with its reason. Nothing is moved.
    """
    reasons = []
    for folder in list_published(root):
        if step is not None and parse_step(folder.name) != step:
            continue
        reason = find_damage(folder)
        if reason is None:
            return folder
        reasons.append(f"{folder}: {reason}")
    wanted = "a checkpoint" if step is None else f"a checkpoint of step {step}"
    raise InputError([f"{root} does not hold {wanted} that verifies; train first, or name another", *reasons])


def open_external(path: Path, accept_missing: Collection[str], world: World) -> Found:
    """The checkpoint at a place: one of ours, or a universal one, also of DeepSpeed's own tool. Collective.

    Args:
        accept_missing: what the user allows a universal one to lack, of `universal.MISSING`.

    Raises:
        InputError: it is none, does not verify, or lacks something that was not allowed.
    """
    if run_on_main(world, lambda: (path / MANIFEST).is_file()):
        outcome = find_in_folder(path, world)
        if isinstance(outcome, Found):
            return outcome
        raise mark_agreed(InputError(f"{path} does not verify: {outcome}; name another checkpoint"))
    form = open_foreign(path, accept_missing, world)
    if (path / SOURCE_MANIFEST).is_file():
        manifest = parse_manifest((path / SOURCE_MANIFEST).read_text(encoding="utf-8"))
    else:  # something else wrote it: where it stands is known, and no run of ours
        manifest = Manifest(
            step=form.state.step,
            tokens=0,
            samples=0,
            world_size=form.manifest.world_size,
            zero_stage=form.manifest.zero_stage,
            versions={},
            created="",
            attempt=0,
            wandb_id=None,
            overrides=(),
            identity={},
            files={},
        )
    return Found(path, manifest, form.state, universal=form)


def reshard_if_needed(found: Found, config: Mapping[str, Any], storage: StorageLayout, world: World) -> Found:
    """A checkpoint that this start can load: converted if ranks, ZeRO stage or offload differ. Collective.

    Before the model is built. `config` is the DeepSpeed JSON of this start.

    Raises:
        InputError: something differs that no conversion bridges.
        RunError: the conversion failed; the checkpoint is unharmed.
    """
    if found.deepspeed is None:
        return found
    changes = find_layout_changes(found.deepspeed, found.manifest.world_size, config, world.size)
    if not changes:
        return found
    folder = found.folder
    if storage.per_host and folder.parent == storage.root:
        outcome = assemble(storage, found.manifest, found.text, world)
        if not isinstance(outcome, Path):
            raise mark_agreed(RunError(f"{folder} cannot be put together to be converted: {outcome.text}"))
        folder = outcome
    return replace(found, universal=prepare_universal(folder, changes, world))


def restore(found: Found, shards: Shards, seed: int, world: World) -> RunState:
    """Load shards and this rank's random streams. Collective."""
    if found.universal is not None:
        return load_universal(found.universal, shards, seed, world)
    try:
        shards.load(found.folder.parent, found.folder.name)
    except RunError:
        raise
    except Exception as error:  # of DeepSpeed, on files whose sizes are right
        raise RunError(
            f"{found.folder} cannot be loaded ({type(error).__name__}: {error}); "
            'checkpoint.verify = "full" finds a damaged file'
        ) from error
    load_streams(found.folder, world.rank)
    return found.state


def _list_local_steps(storage: StorageLayout, world: World) -> tuple[list[int], bool]:
    """The steps in this host's folder, and whether something was renamed there before; on its leader."""
    if not storage.is_leader(world):
        return [], False
    for line in recover(storage.root):
        log.warning(line, extra=EVERY_RANK)
    steps = [step for folder in list_published(storage.root) if (step := parse_step(folder.name)) is not None]
    return steps, any(storage.root.glob(f"step_*{BROKEN}*"))


def _set_aside(storage: StorageLayout, step: int, reason: str, world: World) -> None:
    """Rename what there is of a broken checkpoint, on every host. Collective."""
    folder = storage.root / step_name(step)
    leads = storage.is_leader(world)
    told = look_everywhere(
        folder, world, lambda: rename_broken(folder).name if leads and folder.exists() else None
    )
    names = [name for name in told if name is not None]
    done = f"renamed to {names[0]}" if names else "nothing of it is here"
    log.warning(f"checkpoint {folder} is broken: {reason}; {done}, trying the one before it")
