"""`ds-pretrain branch RUN --at STEP NEW.toml`: a run that begins where another one stood.

Up to STEP the new run file says what the parent did; from there on it may say something else. The parent's
checkpoint becomes the new run's own first one: its files are linked (copied where links cannot reach), and
its manifest is written anew, with the new run's name and id. So a start finds it as it finds any other, the
watchdog can go back to it, and what becomes of the parent's folder does not matter to the new run.
"""

import shutil
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ds_pretrain.checkpoint.inventory import size
from ds_pretrain.checkpoint.manifest import MANIFEST, PARTIAL, Manifest, step_name
from ds_pretrain.checkpoint.remote import Remote, remote_at
from ds_pretrain.checkpoint.retention import CALM
from ds_pretrain.commands.branch_parent import Parent, bring, overlaps, pin, read_parent, require_whole
from ds_pretrain.config.plan import Plan
from ds_pretrain.core.errors import InputError
from ds_pretrain.core.files import sync_folder, write_atomic, write_point
from ds_pretrain.core.run_lock import RunLock
from ds_pretrain.training.compatibility import differences
from ds_pretrain.training.preflight import Inputs, find_problems, open_inputs
from ds_pretrain.training.record import Lineage, RunRecord, occupied_problem, write_record


def branch(place: Path | Remote, step: int, plan: Plan) -> None:
    """Make the run directory of `plan` so that a start goes on from the checkpoint of `step` at `place`.

    Everything is checked first, without an engine; nothing is left behind where it fails.

    Raises:
        InputError: with every problem found.
    """
    parent = read_parent(place, step)
    inputs = open_inputs(plan)
    record = _record(plan, parent, inputs)
    target = _place(plan) / step_name(step)
    if problems := list(_problems(plan, parent, inputs, record)):
        raise InputError(problems)
    for line in _warnings(parent):
        print(f"WARNING    {line}", file=sys.stderr)
    require_whole(parent)
    lock = RunLock(plan.out, f"{plan.run_path}: out")
    lock.take()
    try:
        how = _begin(plan, parent, record, target)
        _note(parent, plan)
    finally:
        lock.release()
    print(f"branched   {plan.run.name} from {parent.name} at step {step:,}: {target} ({how})")
    print(f"next       ds-pretrain train {plan.run_path}, with the same overrides if there were any")


def _record(plan: Plan, parent: Parent, inputs: Inputs) -> RunRecord:
    """What the new run's directory remembers before its first start: the parent's past under a new name."""
    manifest = parent.manifest
    lineage = Lineage(parent.name, manifest.wandb_id, parent.directory, manifest.step, parent.manifest_sum)
    return RunRecord(
        name=plan.run.name,
        identity={**manifest.identity, "name": plan.run.name},
        attempt=0,
        wandb_id=uuid.uuid4().hex[:12],
        saved_step=manifest.step,
        origin=parent.where,
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
    is_over = step >= plan.last_step
    if is_over:
        yield (
            f"{plan.run_path}: schedule.length = {section.schedule.length} ends at step {plan.last_step:,}, "
            f"and the branch begins at step {step:,}: nothing is left to train; it counts from the parent's "
            "beginning"
        )
    checkpoint = section.checkpoint
    places = {
        "out": section.out,
        "checkpoint.local": checkpoint.local,
        "checkpoint.ship_to": checkpoint.ship_to,
    }
    if inside := list(overlaps(parent, places)):
        yield from (f"{plan.run_path}: {problem}" for problem in inside)
    elif (problem := occupied_problem(plan) or _shipped_problem(plan)) is not None:
        yield problem
    elif not is_over:
        yield from find_problems(plan, inputs, None, "the branch")
    if not is_over:  # else that is what differs
        yield from differences(plan, record, inputs.data)


def _shipped_problem(plan: Plan) -> str | None:
    """Why checkpoints of the new run cannot go to its place, as far as looking tells; a start proves it."""
    place = plan.run.checkpoint.ship_to
    if place is None:
        return None
    try:
        remote = remote_at(place)
        found = remote.label() or (b"" if not (steps := remote.steps()) else f"step {steps[0]:,}".encode())
    except (InputError, OSError):
        return None
    if not found:
        return None
    return (
        f"{plan.run_path}: checkpoint.ship_to = {place} holds the checkpoints of another run "
        f"({found.decode(errors='replace')[:200]}); give each run a place of its own"
    )


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
        pin(parent, plan.run.name, str(plan.out.absolute()))
    except OSError as error:
        print(
            f"WARNING    {parent.where} could not be pinned ({error.strerror or error}): its run may prune "
            "it; the branch has what it needs",
            file=sys.stderr,
        )


def _begin(plan: Plan, parent: Parent, record: RunRecord, target: Path) -> str:
    """Fill the run directory, the checkpoint's name last; how its files came there."""
    building = target.with_name(target.name + PARTIAL)
    try:
        num_written, how = bring(parent, building)
        write_record(plan.out, record)  # before the manifest: a start after a kill here knows the lineage
        write_atomic(building / MANIFEST, _manifest(plan, parent, record).to_json())
        if parent.is_calm:
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
    return f"{size(num_written)} {how}" if num_written else "linked, no bytes copied"


def _manifest(plan: Plan, parent: Parent, record: RunRecord) -> Manifest:
    """That of the parent's checkpoint, as one of the new run.

    Its probe stays: the first start knows by the identities whether its model computes the same there.
    """
    return replace(
        parent.manifest,
        identity=record.identity,
        wandb_id=record.wandb_id,
        attempt=record.attempt,
        overrides=plan.overrides,
    )
