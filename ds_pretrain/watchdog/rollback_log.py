"""The rollbacks of a run, on disk before it goes on from one: whatever dies then, the cure is continued.

`cure.json` in the run directory holds the rollbacks and the skip ledger. A checkpoint that knows of fewer
rollbacks lies on the branch that was left, if it is newer than what was gone back to; else a run goes on from
it, with the rollbacks and the ledger from here. A stop is written down like a rollback, with the checkpoint
that the next start goes on from.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from ds_pretrain.core.errors import InputError
from ds_pretrain.core.files import write_atomic, write_point
from ds_pretrain.core.state import Rollback, RunState, Skip, SkipLedger
from ds_pretrain.watchdog.policy import is_abandoned

CURE = "cure.json"
Made = TypeVar("Made", Rollback, Skip)


@dataclass(frozen=True)
class Cure:
    """What a start has to know of the rollbacks before it."""

    rollbacks: tuple[Rollback, ...] = ()
    ledger: SkipLedger = field(default_factory=SkipLedger)
    untold: str | None = None  # why a person is needed, if the run died before its exit code said so

    def abandons(self, state: RunState, heeds_stop: bool = True) -> bool:
        """True if a checkpoint's state lies on a branch that was left (see `is_abandoned`)."""
        return is_abandoned(state, self.rollbacks, heeds_stop)

    def applied(self, state: RunState) -> RunState:
        """The state to go on from where a checkpoint has this one."""
        if len(state.rollbacks) >= len(self.rollbacks):
            return state  # it knows of them
        return replace(state, ledger=self.ledger, rollbacks=self.rollbacks)


def read_cure(out: Path) -> Cure:
    """What was written last; nothing if there has been no rollback.

    Raises:
        InputError: the file is there and cannot be read.
    """
    path = out / CURE
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        skips = tuple(_made(Skip, one) for one in data["skips"])
        rollbacks = tuple(_made(Rollback, one) for one in data["rollbacks"])
        untold = data.get("untold")
        return Cure(rollbacks, SkipLedger(skips), None if untold is None else str(untold))
    except FileNotFoundError:
        return Cure()
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(
            f"{path} cannot be read ({error}): it says which data the watchdog skipped; put an intact copy "
            "back, or move it away to go on as the newest checkpoint knows it"
        ) from error


def _made(kind: type[Made], data: Mapping[str, Any]) -> Made:
    for one in fields(kind):
        if type(data[one.name]) is not one.type:
            raise TypeError(f"{one.name} = {data[one.name]!r}")
    return kind(**data)


def write_cure(out: Path, state: RunState, untold: str | None = None) -> None:
    """Make a rollback or a stop count, all or nothing: `state` is the one that the run goes on from.

    With `untold`, the diagnosis of a stop, the next start ends with it at once unless `note_told` came first.
    """
    cure: dict[str, Any] = {
        "rollbacks": [vars(r) for r in state.rollbacks],
        "skips": [vars(s) for s in state.ledger.skips],
    }
    if untold is not None:
        cure["untold"] = untold
    write_point("cure")
    write_atomic(out / CURE, json.dumps(cure, indent=1) + "\n")
    write_point("cured")


def note_told(out: Path) -> None:
    """A person has been asked for, by the exit code: the next start goes on."""
    cure = read_cure(out)
    if cure.untold is not None:
        write_cure(out, RunState(ledger=cure.ledger, rollbacks=cure.rollbacks))
