"""The errors a user can meet, each with the exit code of the process that raises it.

An error says what was found, what was expected and what to do. A supervisor reads the exit code:

====  ==================================================================================
code  meaning
====  ==================================================================================
0     finished: the last step is done and saved
1     crashed; restarting is reasonable
2     bad input; change what the message names before restarting
3     the watchdog stopped for its operator; action required before restarting
4     no optimizer step was applied although steps were left
5     several consecutive checkpoint saves failed
75    preempted: a checkpoint is saved; rerun the same command
====  ==================================================================================
"""

from collections.abc import Iterable
from typing import TypeVar

EXIT_FINISHED = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_NEEDS_OPERATOR = 3
EXIT_NO_PROGRESS = 4
EXIT_CANNOT_SAVE = 5
EXIT_PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: try again

# The last line of a run.
EXIT_MEANINGS = {
    EXIT_FINISHED: "finished: the last step is done and saved",
    EXIT_FAILED: "crashed; rerun the same command to resume from the newest intact checkpoint",
    EXIT_BAD_INPUT: "bad input; the message above says what to change",
    EXIT_NEEDS_OPERATOR: "the watchdog stopped for its operator; action required before restarting",
    EXIT_NO_PROGRESS: "no optimizer step was applied although steps were left",
    EXIT_CANNOT_SAVE: "checkpoint saves keep failing; free disk space or fix the storage",
    EXIT_PREEMPTED: "preempted",
}


class RunError(Exception):
    """Base of every error that a user can meet."""

    exit_code = EXIT_FAILED
    agreed = False  # True if every rank raises it: then one of them says it


class InputError(RunError):
    """The user's input cannot be used. Carries all problems found, not the first."""

    exit_code = EXIT_BAD_INPUT

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__(self._report())

    def _report(self) -> str:
        if len(self.problems) == 1:
            return self.problems[0]
        return f"{len(self.problems)} problems:\n" + "\n".join(f"  - {p}" for p in self.problems)


Agreed = TypeVar("Agreed", bound=RunError)


def mark_agreed(error: Agreed) -> Agreed:
    """Mark an error that every rank raises together."""
    error.agreed = True
    return error


class NeedsOperator(RunError):
    """The watchdog has spent its responses. Raised by every rank."""

    agreed = True
    exit_code = EXIT_NEEDS_OPERATOR


class NoProgress(RunError):
    """The run has steps left and made none. Raised by every rank."""

    agreed = True
    exit_code = EXIT_NO_PROGRESS


class CannotSave(RunError):
    """Several saves in a row have failed; training on would only add to what can be lost."""

    agreed = True
    exit_code = EXIT_CANNOT_SAVE


class Preempted(RunError):
    """The run was asked to stop, and stopped with everything saved. Raised by every rank."""

    agreed = True
    exit_code = EXIT_PREEMPTED
