"""`ds-pretrain branch RUN --at STEP NEW.toml`: a run that begins where another one stood.

Up to STEP the new run file says what the parent did; from there on it may say something else. The parent's
checkpoint becomes the new run's own first one: its files are linked (copied where links cannot reach), and
its manifest is written anew, with the new run's name and id. So a start finds it as it finds any other, the
watchdog can go back to it, and what becomes of the parent's folder does not matter to the new run.
"""

import json
import os
import shutil
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ds_pretrain.checkpoint.inventory import chosen, size, verified
from ds_pretrain.checkpoint.layout import MANIFEST, PARTIAL, RUN_STATE, Manifest, parse_manifest, step_name
from ds_pretrain.checkpoint.retention import CALM, note_branch
from ds_pretrain.checkpoint.synced import copied_beside, make_synced
from ds_pretrain.errors import InputError
from ds_pretrain.files import checksum, free_bytes, sync_folder, write_atomic, write_point
from ds_pretrain.past import past_changes
from ds_pretrain.plan import Plan
from ds_pretrain.preflight import Inputs, find_problems, open_inputs
from ds_pretrain.run_directory import (
    Lineage,
    RunLock,
    RunRecord,
    differences,
    occupied_problem,
    write_record,
)
from ds_pretrain.state import RunState


@dataclass(frozen=True)
class Parent:
    """The checkpoint that a run branches from."""

    folder: Path
    manifest: Manifest
    num_rollbacks: int

    @property
    def name(self) -> str:
        return str(self.manifest.identity.get("name"))


def branch(root: Path, step: int, plan: Plan) -> None:
    """Make the run directory of `plan` so that a start goes on from the checkpoint of `step` under `root`.

    Everything is checked first, without an engine; nothing is left behind where it fails.

    Raises:
        InputError: with every problem found.
    """
    parent = _read(chosen(root, step))
    inputs = open_inputs(plan)
    record = _record(plan, parent, inputs)
    target = _place(plan) / step_name(step)
    if problems := list(_problems(plan, parent, inputs, record)):
        raise InputError(problems)
    for line in _warnings(parent):
        print(f"WARNING    {line}", file=sys.stderr)
    if reason := verified(parent.folder):
        raise InputError(f"{parent.folder} is broken: {reason}; branch from another checkpoint")
    lock = RunLock(plan)
    lock.take()
    try:
        how = _begin(plan, parent, record, target)
        _note(parent, plan)
    finally:
        lock.release()
    print(f"branched   {plan.run.name} from {parent.name} at step {step:,}: {target} ({how})")
    print(f"next       ds-pretrain train {plan.run_path}, with the same overrides if there were any")


def _read(folder: Path) -> Parent:
    try:
        manifest = parse_manifest((folder / MANIFEST).read_text(encoding="utf-8"))
        state = RunState.from_json((folder / RUN_STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{folder} is broken: its manifest or {RUN_STATE} cannot be read ({error}); branch from another "
            "checkpoint"
        ) from None
    return Parent(folder, manifest, len(state.rollbacks))


def _record(plan: Plan, parent: Parent, inputs: Inputs) -> RunRecord:
    """What the new run's directory remembers before its first start: the parent's past under a new name."""
    manifest, folder = parent.manifest, str(parent.folder.absolute())
    lineage = Lineage(
        parent.name,
        manifest.wandb_id,
        str(parent.folder.absolute().parent),
        manifest.step,
        checksum(parent.folder / MANIFEST),
    )
    return RunRecord(
        name=plan.run.name,
        identity={**manifest.identity, "name": plan.run.name},
        attempt=0,
        wandb_id=uuid.uuid4().hex[:12],
        saved_step=manifest.step,
        origin=folder,
        num_inherited=parent.num_rollbacks,
        lineage=lineage,
    )


def _place(plan: Plan) -> Path:
    """The folder that a start finds its checkpoints in: all hosts see it, also where each has its own."""
    if plan.run.checkpoint.local is None:
        return plan.checkpoints
    assert plan.ship_to is not None, "with a local folder, checkpoints are shipped"
    if "://" in plan.ship_to:
        raise InputError(
            f"{plan.run_path}: checkpoint.local and checkpoint.ship_to = {plan.ship_to} leave no folder that "
            "all hosts share; name a shared folder as ship_to, or leave `local` out"
        )
    return Path(plan.ship_to)


def _problems(plan: Plan, parent: Parent, inputs: Inputs, record: RunRecord) -> Iterator[str]:
    step, section = parent.manifest.step, plan.run
    if section.name == parent.name:
        yield (
            f"{plan.run_path}: name = {section.name!r} is the parent's; give the branch a name of its own "
            "(what is logged goes by it)"
        )
    if section.resume_from is not None:
        yield (
            f"{plan.run_path}: resume_from = {section.resume_from} names another beginning than --at; "
            "delete it"
        )
    if step >= plan.last_step:
        yield (
            f"{plan.run_path}: schedule.length = {section.schedule.length} ends at step {plan.last_step:,}, "
            f"and the branch begins at step {step:,}: nothing is left to train; it counts from the parent's "
            "beginning"
        )
    if (problem := occupied_problem(plan)) is not None:
        yield problem
    else:
        yield from find_problems(plan, inputs, None, "the branch")
    yield from differences(plan, record, inputs.data)


def _warnings(parent: Parent) -> Iterator[str]:
    schedule: Mapping[str, Any] = parent.manifest.identity.get("schedule", {})
    with suppress(KeyError, TypeError):
        start = schedule["length"] - schedule["decay"]
        if parent.manifest.step > start:
            yield (
                f"step {parent.manifest.step:,} lies in the parent's decay, which began at step {start:,}: "
                "these weights are cooled down already; a stable checkpoint is one up to there"
            )


def _note(parent: Parent, plan: Plan) -> None:
    """Pin the parent's checkpoint. The branch does not need it, so one that is another's to write to may be
    left as it is."""
    try:
        note_branch(parent.folder, plan.run.name, str(plan.out.absolute()))
    except OSError as error:
        print(
            f"WARNING    {parent.folder} could not be pinned ({error.strerror}): its run may prune it; the "
            "branch has what it needs",
            file=sys.stderr,
        )


def _begin(plan: Plan, parent: Parent, record: RunRecord, target: Path) -> str:
    """Fill the run directory, the checkpoint's name last; how its files came there."""
    building = target.with_name(target.name + PARTIAL)
    try:
        num_copied = _brought(parent, building)
        write_record(plan.out, record)  # before the manifest: a start after a kill here knows the lineage
        write_atomic(building / MANIFEST, _manifest(plan, parent, record).to_json())
        if (parent.folder / CALM).exists():
            (building / CALM).touch()
        for folder in {building, *(path.parent for path in building.rglob("*"))}:
            sync_folder(folder)
        write_point("publish branch")
        building.rename(target)
        sync_folder(target.parent)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        (plan.out / "run.json").unlink(missing_ok=True)
        with suppress(OSError):
            target.parent.rmdir()  # if it is empty
        raise
    return f"{size(num_copied)} copied" if num_copied else "linked, no bytes copied"


def _brought(parent: Parent, building: Path) -> int:
    """Link each file that the manifest lists, or copy it; the bytes that were copied.

    Nothing writes into a checkpoint's files, and a deletion takes away one of two names.
    """
    shutil.rmtree(building, ignore_errors=True)
    make_synced(building)
    num_copied = 0
    for name, entry in parent.manifest.files.items():
        source, path = parent.folder / name, building / name
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source, path)
            continue
        except OSError:  # another file system, or one without links
            pass
        if (free := free_bytes(building)) < (missing := parent.manifest.total_bytes - num_copied):
            raise InputError(
                f"{building.parent}: {parent.folder} cannot be linked there, and a copy takes "
                f"{size(missing)} where {size(free)} are free; make room, or put `out` on the file system of "
                "the parent"
            )
        copied_beside(source, path).rename(path)
        if checksum(path) != entry.sha256:
            raise InputError(f"{path} was copied and reads back as something else; look at that disk")
        num_copied += entry.bytes
    return num_copied


def _manifest(plan: Plan, parent: Parent, record: RunRecord) -> Manifest:
    """That of the parent's checkpoint, as one of the new run."""
    old, new = record.identity, json.loads(json.dumps(plan.identity({})))
    ahead = {path for path in past_changes(old, new, parent.manifest.step + 1) if path.startswith("phases.")}
    return replace(
        parent.manifest,
        identity=record.identity,
        wandb_id=record.wandb_id,
        attempt=record.attempt,
        overrides=plan.overrides,
        probe=None if ahead else parent.manifest.probe,  # other positions have another loss
    )
