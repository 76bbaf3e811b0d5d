"""The run directory: which run it holds, how often it was started, and what a start may not change."""

import json
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ds_pretrain.config.plan import Plan
from ds_pretrain.config.timeline import changed_chunks
from ds_pretrain.core.errors import InputError
from ds_pretrain.core.files import folder_problem, write_atomic
from ds_pretrain.core.run_files import save_file, stop_file
from ds_pretrain.core.run_lock import LOCK
from ds_pretrain.core.text import changed_fields, listed
from ds_pretrain.training.identity import identity_of, with_unit
from ds_pretrain.training.known_run import KnownRun
from ds_pretrain.training.meaning import compared
from ds_pretrain.training.past import past_changes, rates_words
from ds_pretrain.watchdog.rollback_log import read_cure

_FILE = "run.json"
# What a launch leaves in a directory before there is a record.
_OURS_BEFORE_THE_RECORD = {
    LOCK,
    ".shared",
    ".launch.lock",
    "launches.jsonl",
    "deepspeed_env",
    "ranks",
    "exit_code.json",
} | {
    stop_file(Path()).name,
    save_file(Path()).name,
}


@dataclass(frozen=True)
class Lineage:
    """The checkpoint of another run that a branch began from."""

    name: str  # of that run
    run: str | None  # its id
    directory: str  # of its checkpoints
    step: int
    manifest: str  # SHA-256 of the checkpoint's manifest, which lists those of all its files


@dataclass(frozen=True)
class RunRecord:
    """What `run.json` remembers from start to start."""

    name: str
    identity: Mapping[str, Any]
    attempt: int  # starts so far
    wandb_id: str
    saved_step: int | None  # of the newest checkpoint ever published
    origin: str | None = None  # the checkpoint that it began from, if it began from another run's
    num_inherited: int = 0  # rollbacks of that run, which are not this one's
    changes: tuple[Mapping[str, Any], ...] = ()  # what `accept_changes` let through, and at which attempt
    overrides: tuple[str, ...] = ()  # of the command line, at the last start
    lineage: Lineage | None = None  # of a branch


def read_record(out: Path) -> RunRecord | None:
    """What the directory remembers, or None if it holds no run."""
    path = out / _FILE
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        lists = {key: tuple(data[key]) for key in ("changes", "overrides")}
        lineage = data.get("lineage") and Lineage(**data["lineage"])
        return RunRecord(**{**data, **lists, "lineage": lineage})
    except (
        FileNotFoundError,
        NotADirectoryError,
    ):  # the latter is a folder that cannot be, not a lost record
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(
            f"{path} cannot be read ({error}); put an intact copy back (each checkpoint's manifest has the "
            "W&B id), or give the run file a new `out`"
        ) from error


def directory_problems(
    plan: Plan, data: Mapping[str, str], known: KnownRun | None = None, origin: KnownRun | None = None
) -> list[str]:
    """Why this plan cannot go on in its run directory; empty if it can, or if the directory is new.

    `data` describes the content of each source. `known` is what the newest checkpoint remembers: a kill may
    have come between its publication and the note of it in the record, and the record may be lost. `origin`
    is what the checkpoint at `resume_from` remembers that a run without either begins from: of another run
    all is compared, of this one, which goes on elsewhere or is a copy of its own past, what lies before it.
    """
    try:
        record = read_record(plan.out)
    except InputError as error:
        return list(error.problems)
    if problem := folder_problem(plan.out, f"{plan.run_path}: out"):
        return [problem]
    if problems := _foreign_files(plan) if record is None else []:
        return problems
    goes_on = record is None and known is None and origin is not None and origin.name == plan.run.name
    newest = origin if goes_on else known
    record = record or _remembered(plan, known, origin)
    if record is None or (record.origin is not None and not record.identity):  # what is not ours says nothing
        return []
    steps = (record.saved_step, None if newest is None else newest.step)
    met = max((step for step in steps if step is not None), default=None)
    return differences(plan, replace(record, saved_step=met), data)


def lost_words(plan: Plan, saved_step: int) -> str:
    """Why a run without the checkpoints that it had does not start."""
    return (
        f"{plan.out} had a checkpoint at step {saved_step:,} and now has none; a run never silently starts "
        "again at step 0: put the checkpoints back, or give the run file a new `out`"
    )


def _remembered(plan: Plan, known: KnownRun | None, origin: KnownRun | None) -> RunRecord | None:
    """The record of a run that has none, as a checkpoint has it: its own, else one of another run."""
    if known is not None:
        return RunRecord(
            known.name, known.identity, known.attempt, known.wandb_id or _new_id(), saved_step=known.step
        )
    if origin is None:
        return None
    return RunRecord(
        plan.run.name,
        {**origin.identity, "name": plan.run.name} if origin.identity else {},
        attempt=0,
        wandb_id=_new_id(),
        saved_step=None,
        origin=origin.folder,
        num_inherited=origin.num_rollbacks,
    )


def _new_id() -> str:
    return uuid.uuid4().hex[:12]


def _foreign_files(plan: Plan) -> list[str]:
    """A folder with files of somebody's is no run directory: training would write over them."""
    names = {path.name for path in plan.out.iterdir()} if plan.out.is_dir() else set()
    foreign = sorted(names - _OURS_BEFORE_THE_RECORD)
    if not foreign or "checkpoints" in names:  # with checkpoints it is a run that lost its record
        return []
    return [
        f"{plan.run_path}: out = {plan.out} holds files that are not of a run ({listed(foreign, 5)}); give "
        "an empty or a new folder"
    ]


def occupied_problem(plan: Plan) -> str | None:
    """Why a new run cannot have this run directory; None if there is none, or nothing in it."""
    names = {path.name for path in plan.out.iterdir()} if plan.out.is_dir() else set()
    if not (foreign := sorted(names - _OURS_BEFORE_THE_RECORD)):
        return None
    found = listed(foreign, 5)
    return f"{plan.run_path}: out = {plan.out} is not empty ({found}); give an empty or a new folder"


def differences(plan: Plan, record: RunRecord, data: Mapping[str, str]) -> list[str]:
    """What of the run's past, as its record has it, the plan says otherwise; both values of each."""
    if record.name != plan.run.name:
        return [
            f"{plan.out} holds the run {record.name!r}, and {plan.run_path} is {plan.run.name!r}; "
            "give it an `out` of its own"
        ]
    where = f"the run in {plan.out}" if record.origin is None else f"the run of {record.origin}"
    begun = {skip.phase for skip in read_cure(plan.out).ledger.skips}
    identity = identity_of(plan, data)
    try:
        changes = past_changes(*compared(record.identity, identity), record.saved_step, begun)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        return [
            f"{where} has an identity that cannot be read ({type(error).__name__}: {error}); put an intact "
            f"{_FILE} back: the manifest of each checkpoint has the same `identity`"
        ]
    chunks = {path: pair for path, pair in changes.items() if path.startswith("chunk_tokens.")}
    is_of_length = any(path.endswith(".seq_len") for path in changes)  # then that is what has changed
    old_chunks, new_chunks = (
        {path.removeprefix("chunk_tokens."): pair[index] for path, pair in chunks.items()} for index in (0, 1)
    )
    chunk_problems = [] if is_of_length else changed_chunks(old_chunks, new_chunks)
    return [f"{plan.run_path}: {problem}" for problem in chunk_problems] + [
        f"{plan.run_path}: {_otherwise(path, old, new, where)}"
        f"{rates_words(path, record.identity, identity, record.saved_step)}; "
        + (
            f'set it back, or accept it with accept_changes = ["{path}"]'
            if plan.may_change(path)
            else "set it back, or start another run with a new `name` and `out`"
            if record.lineage is None or record.attempt
            else f"set it back: a branch has its parent's past, which goes up to step {record.lineage.step:,}"
        )
        for path, (old, new) in changes.items()
        if path not in chunks and not plan.accepts(path)
    ]


def _otherwise(path: str, old: Any, new: Any, where: str) -> str:
    if path.startswith("phases.") and path.endswith(".name"):
        return f"the phase `{old}` is called `{new}`, but {where} was started with it as `{old}`"
    now = "no longer there" if new is None else with_unit(path, new)
    before = "without it" if old is None else f"with {with_unit(path, old)}"
    return f"`{path}` is {now}, but {where} was started {before}"


def claim(
    plan: Plan, data: Mapping[str, str], known: KnownRun | None, origin: KnownRun | None = None
) -> RunRecord:
    """Count one more start of the run in its directory. On rank 0 only, which holds the lock.

    `known` is what the checkpoint to go on from remembers, None if there is none; `origin` is what another
    run's checkpoint remembers that this run begins from, which agrees with it in all but the name.

    Raises:
        InputError: the directory or the checkpoint is of another run, or the checkpoints are lost.
    """
    if problems := directory_problems(plan, data, known, origin):
        raise InputError(problems)
    identity = identity_of(plan, data)
    before = read_record(plan.out)
    if before is not None and known is not None and known.wandb_id not in (None, before.wandb_id):
        raise InputError(
            f"{known.folder} is a checkpoint of another run ({known.identity.get('name')!r}, "
            f"{known.wandb_id}), and {plan.out} holds {before.name!r} ({before.wandb_id}); move it out of "
            "there, or give it as "
            "resume_from to a run of its own"
        )
    if before is not None and before.saved_step is not None and known is None:
        raise InputError(lost_words(plan, before.saved_step))
    record = before or _remembered(plan, known, origin)
    record = record or RunRecord(plan.run.name, identity, 0, _new_id(), None)
    attempt = record.attempt + 1
    changes = [
        {"attempt": attempt, "field": path, "old": old, "new": new}
        for path, (old, new) in changed_fields(*compared(record.identity or identity, identity)).items()
    ]
    record = replace(
        record,
        attempt=attempt,
        identity=identity,
        changes=(*record.changes, *changes),
        overrides=plan.overrides,
    )
    write_record(plan.out, record)
    return record


def write_record(out: Path, record: RunRecord) -> None:
    """Replace `run.json`."""
    write_atomic(out / _FILE, json.dumps(asdict(record), indent=1) + "\n")


def note_saved(out: Path, step: int) -> None:
    """Remember that a checkpoint was published: a later start that finds none must not begin at step 0."""
    record = read_record(out)
    if record is not None:
        write_record(out, replace(record, saved_step=max(step, record.saved_step or 0)))
