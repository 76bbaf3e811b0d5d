"""Write-ahead log of rollbacks, persisted before weights are loaded, so a crash resumes the rollback.

`rollbacks.json` in the run directory holds the rollbacks and the skip ledger. A checkpoint with fewer
rollbacks is abandoned, if it is newer than what was restored; else a run resumes from
it, with the rollbacks and the ledger from here. A stop is written down like a rollback, with the checkpoint
that the next start resumes from.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ds_pretrain.core.errors import InputError
from ds_pretrain.core.files import write_atomic, write_point
from ds_pretrain.core.jsonl import read_as
from ds_pretrain.core.state import Rollback, RunState, Skip, SkipLedger, is_abandoned

ROLLBACKS = "rollbacks.json"


@dataclass(frozen=True)
class RollbackLog:
    """The rollbacks before a start, which it must know."""

    rollbacks: tuple[Rollback, ...] = ()
    skips: tuple[Skip, ...] = ()
    unreported: str | None = None  # why an operator is needed, if the run died before its exit code said so

    @property
    def ledger(self) -> SkipLedger:
        return SkipLedger(self.skips)

    def is_abandoned(self, state: RunState, heeds_stop: bool = True) -> bool:
        """True if a rollback abandoned a checkpoint's state (see `core.state.is_abandoned`)."""
        return is_abandoned(state, self.rollbacks, heeds_stop)

    def apply_to(self, state: RunState) -> RunState:
        """The state to resume from where a checkpoint has this one."""
        if len(state.rollbacks) >= len(self.rollbacks):
            return state  # it knows of them
        return replace(state, ledger=self.ledger, rollbacks=self.rollbacks)


def read_rollback_log(out: Path) -> RollbackLog:
    """Read the rollback log; empty if there has been no rollback.

    Raises:
        InputError: the file is there and cannot be read.
    """
    path = out / ROLLBACKS
    try:
        return read_as(RollbackLog, path.read_bytes())
    except FileNotFoundError:
        return RollbackLog()
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path} cannot be read ({error}): it records which data was skipped; put an intact copy "
            f"back, or move it away to resume with the newest checkpoint's ledger"
        ) from error


def write_rollback_log(out: Path, state: RunState, unreported: str | None = None) -> None:
    """Make a rollback or a stop count, all or nothing: `state` is the one that the run resumes from.

    With `unreported`, the diagnosis of a stop, the next start ends with it unless `mark_reported` came first.
    """
    rollback_log = RollbackLog(state.rollbacks, state.ledger.skips, unreported)
    write_point("rollback log")
    write_atomic(out / ROLLBACKS, json.dumps(asdict(rollback_log), indent=1) + "\n")
    write_point("rolled back")


def mark_reported(out: Path) -> None:
    """An operator has been asked for, by the exit code: the next start continues."""
    rollback_log = read_rollback_log(out)
    if rollback_log.unreported is not None:
        write_rollback_log(out, RunState(ledger=rollback_log.ledger, rollbacks=rollback_log.rollbacks))
