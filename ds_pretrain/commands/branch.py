"""`ds-pretrain branch RUN --at STEP NEW.toml`: a run that begins where another one stood.

Up to STEP the new run file says what the parent did; from there on it may say something else. The parent's
checkpoint becomes the new run's own first one: its files are linked (copied where links cannot reach), and
its manifest is written again, with the new run's name and id. So a start finds it as it finds any other, the
watchdog can roll back to it, and what becomes of the parent's folder does not matter to the new run.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ds_pretrain.checkpoint.inventory import format_bytes, verify_folder
from ds_pretrain.checkpoint.manifest import (
    MANIFEST,
    PARTIAL,
    RUN_STATE,
    Manifest,
    parse_manifest,
    step_name,
)
from ds_pretrain.checkpoint.remote import Remote, open_folder_as_remote, reopen_remote
from ds_pretrain.checkpoint.retention import KNOWN_GOOD, PINNED, manifest_checksum
from ds_pretrain.checkpoint.verify import find_damage
from ds_pretrain.commands.checkpoints import find_parent_location
from ds_pretrain.config.plan import Plan, load_plan
from ds_pretrain.core.errors import InputError
from ds_pretrain.core.files import (
    free_bytes,
    make_synced,
    sync_folder,
    write_atomic,
    write_point,
)
from ds_pretrain.core.run_files import hold_run_directory, run_lock
from ds_pretrain.core.state import RunState
from ds_pretrain.core.text import join_listed
from ds_pretrain.training.compatibility import find_differences
from ds_pretrain.training.preflight import Inputs, find_problems, open_inputs
from ds_pretrain.training.record import (
    RECORD,
    Lineage,
    RunRecord,
    draw_run_id,
    list_foreign_files,
    write_record,
)


@dataclass(frozen=True)
class Parent:
    """The checkpoint that a run branches from, in a folder here or at a place where copies are."""

    location: Remote  # that holds the folder of the step
    manifest: Manifest
    manifest_sum: str  # SHA-256 of its text
    num_rollbacks: int

    @property
    def name(self) -> str:
        """The name of its run."""
        return str(self.manifest.identity.get("name"))

    @property
    def directory(self) -> str:
        """The run or remote that holds it, for messages."""
        return self.location.location.rstrip("/")

    @property
    def where(self) -> str:
        """The checkpoint itself, in words."""
        return f"{self.directory}/{step_name(self.manifest.step)}"

    @property
    def folder(self) -> Path | None:
        """The folder on this host; None if it lies at a URL."""
        return None if "://" in self.directory else Path(self.where)


def execute(words: argparse.Namespace) -> int:
    """Make a run that begins from a checkpoint of another."""
    create_branch(find_parent_location(words.parent), words.at, load_plan(words.run_file, words.overrides))
    return 0


def create_branch(location: Path | Remote, step: int, plan: Plan) -> None:
    """Make the run directory of `plan` so that a start resumes from the checkpoint of `step` at `location`.

    Everything is checked first, without an engine; nothing is left behind where it fails.

    Raises:
        InputError: with every problem found.
    """
    parent = _read_parent(open_folder_as_remote(location) if isinstance(location, Path) else location, step)
    inputs = open_inputs(plan)
    manifest = parent.manifest
    record = RunRecord(
        name=plan.run.name,
        identity={**manifest.identity, "name": plan.run.name},  # the parent's past under a new name
        attempt=0,
        wandb_id=draw_run_id(),
        saved_step=step,
        origin=parent.where,
        num_inherited=parent.num_rollbacks,
        lineage=Lineage(parent.name, manifest.wandb_id, parent.directory, step, parent.manifest_sum),
    )
    target = _find_checkpoints_folder(plan) / step_name(step)
    if problems := list(_find_problems(plan, parent, inputs, record)):
        raise InputError(problems)
    _warn_of_decay(manifest)
    if parent.folder is not None and (reason := verify_folder(parent.folder)):
        raise InputError(f"{parent.where} is broken: {reason}; branch from another checkpoint")
    lock = run_lock(plan.out)
    hold_run_directory(lock, plan.out, f"{plan.run_path}: out")
    try:
        how = _begin(plan, parent, record, target)
        _pin(parent, plan)
    finally:
        lock.release()
    print(f"branched   {plan.run.name} from {parent.name} at step {step:,}: {target} ({how})")
    print(f"next       ds-pretrain train {plan.run_path}, with the same overrides if there were any")


def _read_parent(location: Remote, step: int) -> Parent:
    if step not in (there := location.list_steps()):
        steps = join_listed([f"{s:,}" for s in there], len(there)) or "none"
        raise InputError(f"{location.location} has no checkpoint of step {step:,}; it has: {steps}")
    try:
        texts = [location.read(step, name) or b"" for name in (MANIFEST, RUN_STATE)]
        manifest, state = parse_manifest(texts[0].decode()), RunState.from_json(texts[1].decode())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{location.location}/{step_name(step)} is broken: its manifest or {RUN_STATE} cannot be read "
            f"({error}); branch from another checkpoint"
        ) from None
    return Parent(location, manifest, manifest_checksum(texts[0]), len(state.rollbacks))


def _find_checkpoints_folder(plan: Plan) -> Path:
    """The folder that a start finds its checkpoints in: all hosts see it, also where each has its own."""
    if plan.run.checkpoint.local_dir is None:
        return plan.checkpoints
    assert plan.upload_to is not None, "with local_dir, checkpoints are uploaded"
    if "://" in plan.upload_to:
        raise InputError(
            f"{plan.run_path}: checkpoint.local_dir and checkpoint.upload_to = {plan.upload_to} leave no "
            f"folder that all hosts share; set upload_to to a shared folder, or remove local_dir"
        )
    return Path(plan.upload_to)


def _find_problems(plan: Plan, parent: Parent, inputs: Inputs, record: RunRecord) -> Iterator[str]:
    step, run = parent.manifest.step, plan.run
    if run.name == parent.name:
        yield (
            f"{plan.run_path}: name = {run.name!r} is the parent's; give the branch a name of its own "
            "(what is logged goes by it)"
        )
    if run.resume_from is not None:
        yield (
            f"{plan.run_path}: resume_from = {run.resume_from} names another beginning than --at; delete it"
        )
    is_over = step >= plan.last_step
    if is_over:
        yield (
            f"{plan.run_path}: schedule.length = {run.schedule.length} ends at step {plan.last_step:,}, "
            f"and the branch begins at step {step:,}; raise it (it counts from the parent's step 0)"
        )
    if inside := list(_find_overlaps(plan, parent)):
        yield from (f"{plan.run_path}: {problem}" for problem in inside)
    elif found := list_foreign_files(plan.out):
        yield f"{plan.run_path}: out = {plan.out} is not empty ({found}); give an empty or a new folder"
    elif (problem := _check_remote(plan)) is not None:
        yield problem
    elif not is_over:
        yield from find_problems(plan, inputs, None, "the branch")
    if not is_over:  # else that is what differs
        yield from find_differences(plan, record, inputs.data)


def _find_overlaps(plan: Plan, parent: Parent) -> Iterator[str]:
    """Find locations of the new run inside the parent's: deleting the one would delete both."""
    section = plan.run.checkpoint
    locations = {
        "out": plan.run.out,
        "checkpoint.local_dir": section.local_dir,
        "checkpoint.upload_to": section.upload_to,
    }
    for key, location in locations.items():
        if location is None:
            continue
        if "://" in location:
            if location.rstrip("/") == parent.directory:
                yield f"{key} = {location} holds the parent's checkpoints; choose another location"
        elif (whose := _find_holder(parent, Path(location).resolve())) is not None:
            yield f"{key} = {location} lies in {whose}; name a folder outside of it"


def _find_holder(parent: Parent, location: Path) -> str | None:
    roots: dict[Path, str] = {}
    if parent.folder is not None:
        root = parent.folder.parent.resolve()
        roots[root] = f"the parent's folder of checkpoints ({root})"
        if root.name == "checkpoints":
            roots[root.parent] = f"the parent's run directory ({root.parent})"
    for folder in (location, *location.parents):
        if os.path.isfile(folder / MANIFEST):
            return f"a checkpoint ({folder})"
        if folder in roots:
            return roots[folder]
    return None


def _check_remote(plan: Plan) -> str | None:
    """Return why the new run's checkpoints cannot be uploaded, as far as looking tells; a start proves it."""
    location = plan.run.checkpoint.upload_to
    if location is None:
        return None
    with suppress(InputError, OSError):
        remote = reopen_remote(location)
        found = (remote.read_label() or b"").decode(errors="replace")
        if found := found or "".join(f"step {step:,}" for step in remote.list_steps()[:1]):
            return (
                f"{plan.run_path}: checkpoint.upload_to = {location} holds the checkpoints of another "
                f"run ({found[:200]}); give each run its own location"
            )
    return None


def _warn_of_decay(manifest: Manifest) -> None:
    with suppress(KeyError, TypeError):
        schedule = manifest.identity["schedule"]
        if manifest.step > (start := schedule["length"] - schedule["decay"]):
            print(
                f"WARNING    step {manifest.step:,} is in the parent's decay, which started at step "
                f"{start:,}: its weights are cooled down already; choose an earlier, stable checkpoint",
                file=sys.stderr,
            )


def _pin(parent: Parent, plan: Plan) -> None:
    """Keep the parent's checkpoint for good, and say for whom.

    The branch does not need it, so one that is another's to write to may be left as it is.
    """
    location, step = parent.location, parent.manifest.step
    mark = {"name": plan.run.name, "out": str(plan.out.absolute())}
    try:
        location.write(step, PINNED, (location.read(step, PINNED) or b"") + json.dumps(mark).encode() + b"\n")
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
        num_written = _copy_files(parent, building)
        write_record(plan.out, record)  # before the manifest: a start after a kill here knows the lineage
        write_atomic(building / MANIFEST, _build_manifest(plan, parent, record).to_json())
        if num_written and (reason := find_damage(building)):
            raise InputError(f"{building} was copied and reads back wrong ({reason}); look at that disk")
        if parent.location.get_size(parent.manifest.step, KNOWN_GOOD) is not None:
            (building / KNOWN_GOOD).touch()
        for folder in {building, *(path.parent for path in building.rglob("*"))}:
            sync_folder(folder)
        write_point("publish branch")
        building.rename(target)
        sync_folder(target.parent)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        (plan.out / RECORD).unlink(missing_ok=True)
        with suppress(OSError):
            target.parent.rmdir()  # if it is empty
        raise
    how = "fetched" if parent.folder is None else "copied"
    return f"{format_bytes(num_written)} {how}" if num_written else "linked, no bytes copied"


def _build_manifest(plan: Plan, parent: Parent, record: RunRecord) -> Manifest:
    """The manifest of the parent's checkpoint, as one of the new run.

    Its probe stays: the first start knows by the identities whether its model computes the same there.
    """
    return replace(
        parent.manifest,
        identity=record.identity,
        wandb_id=record.wandb_id,
        attempt=record.attempt,
        overrides=plan.overrides,
    )


def _copy_files(parent: Parent, building: Path) -> int:
    """Put every file that the manifest lists into a folder; the bytes that were written.

    A link takes no room: nothing writes into a checkpoint's files, and a deletion takes one of two names.

    Raises:
        InputError: there is no room, or what arrived is not what the manifest says.
    """
    shutil.rmtree(building, ignore_errors=True)
    make_synced(building)
    num_written, here = 0, parent.folder
    for name, entry in parent.manifest.files.items():
        path = building / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):  # another file system, or one without links
            if here is not None:
                os.link(here / name, path)
                continue
        if (free := free_bytes(building)) < (missing := parent.manifest.total_bytes - num_written):
            how = "takes" if here is None else "cannot be linked there, and a copy takes"
            larger = "a larger disk" if here is None else "the file system of the parent"
            raise InputError(
                f"{building.parent}: {parent.where} {how} {format_bytes(missing)} where "
                f"{format_bytes(free)} are free; free disk space, or put `out` on {larger}"
            )
        if parent.location.download(parent.manifest.step, name, path) != entry:
            raise InputError(
                f"{parent.where} is broken: {name} is not what its manifest says; branch from another "
                "checkpoint"
            )
        num_written += entry.bytes
    return num_written
