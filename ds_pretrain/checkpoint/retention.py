"""When a checkpoint is due, and which checkpoints stay.

One rank prunes; what it deletes loses its name first; a failure stops nothing.
"""

import hashlib
import json
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from ds_pretrain.checkpoint.manifest import (
    EXPIRED,
    MANIFEST,
    PARTIAL,
    RUN_STATE,
    find_orphaned_universals,
    list_published,
    parse_step,
)
from ds_pretrain.config.timeline import Duration, Multiples
from ds_pretrain.core.distributed import EVERY_RANK, log
from ds_pretrain.core.files import write_point
from ds_pretrain.core.state import Rollback, RunState, is_abandoned

PINNED = "pinned"  # a file in a checkpoint's folder: never prune it
KNOWN_GOOD = "known_good"  # a file in a checkpoint's folder: enough healthy steps came after it
UPLOADED = "uploaded"  # a file in a checkpoint's folder: the remote has this very checkpoint whole


class WallClock:
    """Time since the last save, on one rank: its answer has to be shared before anyone acts on it."""

    def __init__(self, triggers: Sequence[Duration]) -> None:
        self._seconds = min((t.seconds for t in triggers if t.unit == "seconds"), default=None)
        self._since = monotonic()

    def is_due(self) -> bool:
        """True if the shortest wall-clock trigger has passed since `restart`."""
        return self._seconds is not None and monotonic() - self._since >= self._seconds

    def restart(self) -> None:
        """Count from now: a checkpoint was saved."""
        self._since = monotonic()


def is_marked_abandoned(folder: Path, rollbacks: Sequence[Rollback]) -> bool:
    """True if a checkpoint is of a branch that the run has left, or cannot be read."""
    try:
        return is_abandoned(RunState.from_json((folder / RUN_STATE).read_text(encoding="utf-8")), rollbacks)
    except (OSError, ValueError, KeyError, TypeError):
        return True


def select_expired(
    steps: Sequence[int], *, keep: int, keep_every: Multiples | None, protected: Collection[int]
) -> list[int]:
    """The steps to delete: all but the newest `keep`, the first at or after each multiple, the protected."""
    newest = sorted(steps, reverse=True)[:keep]
    first = {} if keep_every is None else {keep_every.before(step): step for step in sorted(steps)[::-1]}
    first.pop(0, None)  # what lies before the first multiple
    return [
        step
        for step in sorted(steps)
        if step not in newest and step not in protected and step not in first.values()
    ]


def prune(
    root: Path,
    *,
    keep: int,
    keep_every: Multiples | None,
    only_uploaded: bool = False,
    num_known_good: int = 1,
) -> None:
    """Delete expired checkpoints, their universal forms, and what killed saves left. On rank 0.

    With `only_uploaded`, one that is not complete at the remote stays until `2 * keep` newer ones exist: a
    remote that does not answer must not fill the disk. The newest `num_known_good` known-good ones stay, for
    rollbacks.
    """
    folders = {
        step: folder for folder in list_published(root) if (step := parse_step(folder.name)) is not None
    }
    not_uploaded = {step for step, folder in folders.items() if only_uploaded and not is_uploaded(folder)}
    abandoned = select_expired(list(folders), keep=2 * keep, keep_every=keep_every, protected=())
    pinned = {step for step, folder in folders.items() if (folder / PINNED).exists()}
    known_good = sorted(step for step, folder in folders.items() if (folder / KNOWN_GOOD).exists())
    protected = pinned | set(known_good[-num_known_good:]) | (not_uploaded - set(abandoned))
    for step in select_expired(list(folders), keep=keep, keep_every=keep_every, protected=protected):
        if step in not_uploaded:
            log.warning(
                f"checkpoint step {step:,} is deleted without having been uploaded: {2 * keep} newer ones "
                f"exist; fix the remote, save less often, or raise checkpoint.keep_last",
                extra=EVERY_RANK,
            )
        try:
            write_point("prune")
            folders[step].rename(folders[step].with_name(f"{folders[step].name}{EXPIRED}"))
        except OSError as error:
            log.warning(
                f"cannot delete the old checkpoint {folders[step]}: {error}; training continues",
                extra=EVERY_RANK,
            )
    for torn in (*root.glob(f"*{PARTIAL}"), *find_orphaned_universals(root)):
        try:
            write_point("delete")
            shutil.rmtree(torn)
        except OSError as error:
            log.warning(f"cannot delete {torn}: {error}; training continues", extra=EVERY_RANK)


def read_branches(mark: bytes) -> list[tuple[str, str]]:
    """The runs that a checkpoint was pinned for, from the content of its mark: name and run directory."""
    try:
        lines = [json.loads(line) for line in mark.decode().splitlines()]
        return [(str(line["name"]), str(line["out"])) for line in lines]
    except (ValueError, TypeError, KeyError):
        return []


def is_uploaded(folder: Path) -> bool:
    """True if the remote has this very checkpoint whole."""
    return read_mark(folder, UPLOADED) is not None


def read_mark(folder: Path, name: str) -> dict[str, Any] | None:
    """A mark in a folder, if it is of the manifest there: a later save may have replaced the folder."""
    try:
        mark: Any = json.loads((folder / name).read_bytes())
        belongs = mark["manifest"] == manifest_checksum((folder / MANIFEST).read_bytes())
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return mark if belongs else None


def manifest_checksum(text: bytes) -> str:
    """The checksum of a manifest's text, which identifies a save in markers."""
    return hashlib.sha256(text).hexdigest()
