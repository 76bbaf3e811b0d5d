"""The run directory: which run it holds, how often it was started, and what a start may not change."""

import json
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ds_pretrain.errors import InputError
from ds_pretrain.files import ensure_writable_folder, folder_problem, write_atomic
from ds_pretrain.plan import Plan, changed_fields

_FILE = "run.json"


@dataclass(frozen=True)
class RunRecord:
    """What `run.json` remembers from start to start."""

    name: str
    identity: Mapping[str, Any]
    attempt: int  # starts so far
    wandb_id: str
    saved_step: int | None  # of the newest checkpoint ever published
    changes: tuple[Mapping[str, Any], ...] = ()  # what `accept_changes` let through, and at which attempt


def read_record(out: Path) -> RunRecord | None:
    """What the directory remembers, or None if it holds no run."""
    path = out / _FILE
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return RunRecord(**{**data, "changes": tuple(data["changes"])})
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


def directory_problems(plan: Plan, data: Mapping[str, str]) -> list[str]:
    """Why this plan cannot go on in its run directory; empty if it can, or if the directory is new.

    `data` describes the content of each source.
    """
    try:
        record = read_record(plan.out)
    except InputError as error:
        return list(error.problems)
    if problem := folder_problem(plan.out, f"{plan.run_path}: out"):
        return [problem]
    if record is None:
        return []
    if record.name != plan.run.name:
        return [
            f"{plan.out} holds the run {record.name!r}, and {plan.run_path} is {plan.run.name!r}; "
            "give it an `out` of its own"
        ]
    return [
        f"{plan.run_path}: `{path}` is {_short(new)}, but the run in {plan.out} was started with "
        f"{_short(old)}; "
        + (
            f'set it back, or accept it with accept_changes = ["{path}"]'
            if plan.may_change(path)
            else "set it back, or start another run with a new `name` and `out`"
        )
        for path, (old, new) in changed_fields(record.identity, plan.identity(data)).items()
        if not plan.accepts(path)
    ]


def is_of_this_run(plan: Plan) -> bool:
    """True if the run directory holds this run; False if it is new, of another run, or cannot be read."""
    try:
        record = read_record(plan.out)
    except InputError:
        return False
    return record is not None and record.name == plan.run.name


def claim(
    plan: Plan, data: Mapping[str, str], found_step: int | None, found_wandb_id: str | None = None
) -> RunRecord:
    """Count one more start of the run in its directory, which is created if need be. On rank 0 only.

    `found_step` and `found_wandb_id` are those of the checkpoint to go on from, None if there is none.

    Raises:
        InputError: the directory cannot be written, holds another run, or has lost its checkpoints.
    """
    problems = directory_problems(plan, data)
    if problems:
        raise InputError(problems)
    before = read_record(plan.out)
    if before is not None and before.saved_step is not None and found_step is None:
        raise InputError(
            f"{plan.out} had a checkpoint at step {before.saved_step:,} and now has none; a run never "
            "silently starts again at step 0: put the checkpoints back, or give the run file a new `out`"
        )
    ensure_writable_folder(plan.out, f"{plan.run_path}: out")
    identity = json.loads(json.dumps(plan.identity(data)))
    wandb_id = found_wandb_id or uuid.uuid4().hex[:12]
    record = before or RunRecord(plan.run.name, identity, 0, wandb_id, None)
    attempt = record.attempt + 1
    changes = [
        {"attempt": attempt, "field": path, "old": old, "new": new}
        for path, (old, new) in changed_fields(record.identity, identity).items()
    ]
    record = replace(record, attempt=attempt, identity=identity, changes=(*record.changes, *changes))
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


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
