"""The run of a directory, as `run.json` and the checkpoints there remember it. No torch."""

import hashlib
import json
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import NonNegativeInt

from ds_pretrain.checkpoint.manifest import (
    MANIFEST,
    RUN_STATE,
    Manifest,
    list_published,
    parse_manifest,
    parse_step,
)
from ds_pretrain.core.errors import InputError
from ds_pretrain.core.files import write_atomic
from ds_pretrain.core.jsonl import read_as
from ds_pretrain.core.run_files import LOCK, save_file, stop_file
from ds_pretrain.core.state import RunState
from ds_pretrain.core.text import join_listed

RECORD = "run.json"
_VERSION = 2
# What a launch leaves in a directory before there is a record.
_OURS_BEFORE_THE_RECORD = {
    *(LOCK, ".shared", ".launch.lock", "launches.jsonl", "deepspeed_env", "ranks", "exit_code.json"),
    *(stop_file(Path()).name, save_file(Path()).name),
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
    """The content of `run.json`, kept from start to start."""

    name: str
    identity: Mapping[str, Any]
    attempt: int  # starts so far
    wandb_id: str
    saved_step: int | None  # of the newest checkpoint ever published
    origin: str | None = None  # the checkpoint that it began from, if it began from another run's
    num_inherited: NonNegativeInt = 0  # rollbacks of that run, which are not this one's
    changes: tuple[Mapping[str, Any], ...] = ()  # of the identity, and at which attempt
    overrides: tuple[str, ...] = ()  # of the command line, at the last start
    lineage: Lineage | None = None  # of a branch


@dataclass(frozen=True)
class KnownRun:
    """A run as one of its checkpoints knows it: enough to continue where `run.json` was lost."""

    folder: str
    step: int
    attempt: int
    wandb_id: str | None
    identity: Mapping[str, Any]
    num_rollbacks: int = 0

    @property
    def name(self) -> str:
        """The run's own."""
        return str(self.identity.get("name"))

    @staticmethod
    def of(folder: Path, manifest: Manifest, state: RunState) -> "KnownRun":
        """Return the run that a checkpoint folder describes."""
        return KnownRun(
            str(folder.absolute()),
            manifest.step,
            manifest.attempt,
            manifest.wandb_id,
            manifest.identity,
            len(state.rollbacks),
        )


def read_record(out: Path) -> RunRecord | None:
    """Read the record of a run directory; None if it holds no run.

    Raises:
        InputError: the record is there and cannot be read.
    """
    path = out / RECORD
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict) or data.pop("version", None) != _VERSION:
            raise ValueError(
                f"it is not a record of format {_VERSION}; resume with the ds_pretrain that wrote it"
            )
        return read_as(RunRecord, json.dumps(data))
    except (FileNotFoundError, NotADirectoryError):  # the latter: a folder that cannot be, no lost record
        return None
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path} cannot be read ({error}); put an intact copy back (each checkpoint's manifest "
            "has the W&B id), or give the run file a new `out`"
        ) from error


def write_record(out: Path, record: RunRecord) -> None:
    """Replace `run.json`."""
    write_atomic(out / RECORD, json.dumps({"version": _VERSION, **asdict(record)}, indent=1) + "\n")


def note_saved(out: Path, step: int) -> None:
    """Remember that a checkpoint was published: a later start that finds none must not begin at step 0."""
    record = read_record(out)
    if record is not None:
        write_record(out, replace(record, saved_step=max(step, record.saved_step or 0)))


def draw_run_id() -> str:
    """An id that no other run has; W&B knows the run by it."""
    return uuid.uuid4().hex[:12]


def build_record_from_checkpoint(
    name: str, known: KnownRun | None, origin: KnownRun | None
) -> RunRecord | None:
    """Make the record of a run that has none from a checkpoint: its own, else one of another run."""
    if known is not None:
        return RunRecord(
            known.name, known.identity, known.attempt, known.wandb_id or draw_run_id(), saved_step=known.step
        )
    if origin is None:
        return None
    return RunRecord(
        name,
        {**origin.identity, "name": name} if origin.identity else {},
        attempt=0,
        wandb_id=draw_run_id(),
        saved_step=None,
        origin=origin.folder,
        num_inherited=origin.num_rollbacks,
    )


def list_foreign_files(out: Path) -> str:
    """The first files of a folder that no launch leaves there, listed; empty if there are none."""
    names = {path.name for path in out.iterdir()} if out.is_dir() else set()
    return join_listed(sorted(names - _OURS_BEFORE_THE_RECORD), 5)


def describe_lost_checkpoints(out: Path, saved_step: int) -> str:
    """Say why a run without the checkpoints that it had does not start."""
    return (
        f"{out} had a checkpoint at step {saved_step:,} and now has none; a run never restarts at step "
        f"0 by itself; put the checkpoints back, or give the run file a new `out`"
    )


def find_lost_checkpoints(out: Path, checkpoints: Path) -> list[str]:
    """Say why a start would find nothing to resume from on this host; empty if it would find something."""
    try:
        record = read_record(out)
        there = any(checkpoints.glob("step_*"))  # a start says itself why it set a checkpoint aside
    except (InputError, OSError):  # said by whoever reads the record
        return []
    if record is None or record.saved_step is None or there:
        return []
    return [describe_lost_checkpoints(out, record.saved_step)]


def read_newest_known_run(checkpoints: Path) -> KnownRun | None:
    """Read what the newest readable checkpoint of a folder remembers; None if there is none.

    It reads the small files alone, and skips what a start would rename.
    """
    try:
        folders = list_published(checkpoints)
    except OSError:
        return None
    return next((known for folder in folders if (known := read_known(folder)) is not None), None)


def read_known(folder: Path) -> KnownRun | None:
    """Read what one checkpoint remembers; None if it cannot be read, or is of another program."""
    try:
        manifest = parse_manifest((folder / MANIFEST).read_text(encoding="utf-8"))
        text = (folder / RUN_STATE).read_bytes()
        if hashlib.sha256(text).hexdigest() != manifest.files[RUN_STATE].sha256:
            return None
        state = RunState.from_json(text.decode())
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return KnownRun.of(folder, manifest, state) if parse_step(folder.name) in (None, manifest.step) else None
