"""What metrics.jsonl tells of a run: the steps that count, and under which skip ledger each was taken.

The record is streamed, and a step keeps a few dozen bytes: a run of a million steps fits into any machine.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ds_pretrain.commands.audit_run import Audited, skip_words
from ds_pretrain.core.errors import InputError
from ds_pretrain.core.jsonl import METRICS, read_metrics

Span: TypeAlias = tuple[int, int]  # work taken back: steps after the first, up to the second

_ROW = np.dtype(
    [
        ("seen", "?"),  # recorded, and not taken back since
        ("applied", "?"),
        ("attempt", "<i4"),
        ("num_rollbacks", "<i4"),  # in force when it was trained
        ("num_skips", "<i4"),  # of the ledger then
        ("tokens", "<i8"),
        ("samples", "<i8"),
        ("checksum", "<i8"),
    ]
)


@dataclass(frozen=True)
class Taken:
    """One time that a step was taken."""

    attempt: int
    num_skips: int
    world_size: int | None  # None: the record of that start is lost
    checksum: int
    shared: int = 1  # neighboring ranks that read the same


@dataclass
class History:
    """What metrics.jsonl tells."""

    rows: NDArray[Any]  # of each step that counts, [newest + 1] of _ROW
    first_step: int = 0  # the record begins after it: not 0 in a run that began from another's checkpoint
    newest: int = 0
    worlds: dict[int, int | None] = field(default_factory=dict)  # number of ranks of each attempt
    shared: dict[int, int] = field(default_factory=dict)  # how many neighbors of them read the same
    rolled_back: list[Span] = field(default_factory=list)  # by rollbacks
    restarted: list[Span] = field(default_factory=list)  # by starts from an older checkpoint
    taken: list[Taken] = field(default_factory=list)  # each time that the step asked for was taken
    problems: list[str] = field(default_factory=list)


def read_history(run: Audited, wanted: int | None = None) -> History:
    """Stream metrics.jsonl; with `wanted`, each time that this step was taken is kept too.

    Raises:
        InputError: it holds no step.
    """
    reading = _Reading(run, wanted)
    try:
        for record in read_metrics(run.out / METRICS):
            reading.take(record)
    except OSError as error:
        raise InputError(f"{run.out / METRICS} cannot be read: {error}") from error
    history = reading.history
    if not history.rows["seen"].any():
        raise InputError(f"{run.out / METRICS} holds no step that counts; expected a run that has trained")
    history.rows = history.rows[: history.newest + 1]
    return history


class _Reading:
    """Where in the record one stands: the attempt, the rollbacks in force, the newest step."""

    def __init__(self, run: Audited, wanted: int | None) -> None:
        self._run, self._wanted = run, wanted
        self.history = History(np.zeros(1024, _ROW))
        self._attempt = 0
        self._num_rollbacks = run.num_inherited  # in force
        skipped = (rollback.response == "skip" for rollback in run.rollbacks)
        self._num_skips = list(accumulate(skipped, initial=0))  # of so many rollbacks

    def take(self, record: Mapping[str, Any]) -> None:
        kind, step, attempt = record.get("event"), record.get("step"), record.get("attempt")
        if not isinstance(step, int) or not isinstance(attempt, int):
            return
        if attempt != self._attempt:
            self._begin(attempt)
        if kind in ("start", "resume"):
            size = record.get("world_size")
            self.history.worlds[attempt] = size if isinstance(size, int) and size > 0 else None
            shared = record.get("sequence_parallel_size", 1)
            self.history.shared[attempt] = shared if isinstance(shared, int) and shared > 0 else 1
            if step < 0:
                self.history.problems.append(
                    f"attempt {attempt} is recorded to begin after step {step:,}; expected 0 or more"
                )
            self._stand(max(0, min(step, self._run.plan.last_step)))
        elif kind == "rollback":
            self._roll_back(step, record)
        elif kind == "step":
            if 1 <= step <= self._run.plan.last_step:
                self._step(step, record)
            else:
                self.history.problems.append(
                    f"step {step:,} of attempt {attempt} is recorded; expected steps 1 to "
                    f"{self._run.plan.last_step:,}, as schedule.length says"
                )

    def _begin(self, attempt: int) -> None:
        """A start knows of every rollback before it, also of one that a crash kept out of the record."""
        self._attempt = attempt
        own = self._run.rollbacks[self._run.num_inherited :]
        self._know(self._run.num_inherited + sum(rollback.attempt < attempt for rollback in own))
        self.history.worlds.setdefault(attempt, None)

    def _know(self, num_rollbacks: Any) -> None:
        if isinstance(num_rollbacks, int):
            self._num_rollbacks = max(self._num_rollbacks, min(num_rollbacks, len(self._run.rollbacks)))

    def _stand(self, step: int) -> None:
        history = self.history
        if not history.first_step and history.newest == 0 and self._run.record.origin is not None:
            history.first_step = step
        if step < history.newest:
            history.restarted.append((step, history.newest))
        self._go_to(step)

    def _roll_back(self, step: int, record: Mapping[str, Any]) -> None:
        incident, to_step = record.get("incident"), record.get("to_step")
        self._know(incident)
        known = self._run.rollbacks
        if not (isinstance(incident, int) and isinstance(to_step, int) and 1 <= incident <= len(known)):
            self.history.problems.append(
                f"{METRICS} tells of rollback {incident} at step {step:,}, and cure.json and the "
                f"checkpoints know {len(known)}; put cure.json back: what was skipped since cannot be told"
            )
        else:
            told = (step, to_step, record.get("response"))
            noted = known[incident - 1]
            if told != (noted.step, noted.to_step, noted.response):
                self.history.problems.append(
                    f"rollback {incident} is a {told[2]} at step {step:,} to step {to_step:,} in {METRICS}, "
                    f"and a {noted.response} at step {noted.step:,} to step {noted.to_step:,} in cure.json; "
                    "expected the same"
                )
            self._compare_skip(incident, record.get("skipped"))
        if record.get("retold") is True:
            return  # after a crash: the starts since then have taken back what was, and trained on from there
        if isinstance(to_step, int) and 0 <= to_step < self.history.newest:
            self.history.rolled_back.append((to_step, self.history.newest))
            self._go_to(to_step)

    def _compare_skip(self, incident: int, told: Any) -> None:
        place = self._num_skips[incident] - 1
        if not isinstance(told, Mapping) or not 0 <= place < len(self._run.ledger.skips):
            return
        noted = self._run.ledger.skips[place]
        if (told.get("phase"), told.get("start"), told.get("stop")) != (noted.phase, noted.start, noted.stop):
            self.history.problems.append(
                f"rollback {incident} skipped {told.get('phase')} draws [{told.get('start')}, "
                f"{told.get('stop')}) in {METRICS}, and {skip_words(noted)} in the ledger; expected the same"
            )
            return
        samples = self._run.sampler.skipped(noted, self._run.ledger_of(place + 1)).grouped()
        if told.get("samples", samples) != samples:
            self.history.problems.append(
                f"rollback {incident} lists other samples in {METRICS} than {skip_words(noted)} are by the "
                "run file and the data; expected the same: one of the three was changed"
            )

    def _step(self, step: int, record: Mapping[str, Any]) -> None:
        history = self.history
        if step <= history.newest:
            self._taken_again(step)
        num_skips = self._num_skips[self._num_rollbacks]
        try:
            numbers = [int(record[name]) for name in ("tokens", "samples", "batch_checksum")]
            flags = (True, bool(record["update_applied"]))
            row = np.array((*flags, self._attempt, self._num_rollbacks, num_skips, *numbers), _ROW)
        except (KeyError, TypeError, ValueError, OverflowError):
            return  # the step is then missing, and named
        self._go_to(step)
        history.rows[step] = row
        if step == self._wanted:
            world_size = history.worlds.get(self._attempt)
            shared = history.shared.get(self._attempt, 1)
            history.taken.append(Taken(self._attempt, num_skips, world_size, numbers[-1], shared))

    def _taken_again(self, step: int) -> None:
        """Back without a word: by a rollback whose record is lost, or not as training does."""
        history, known = self.history, self._run.rollbacks
        lost = known[self._num_rollbacks : self._num_rollbacks + 1]
        if lost and (lost[0].attempt, lost[0].to_step) == (self._attempt, step - 1):
            self._know(self._num_rollbacks + 1)
            history.rolled_back.append((step - 1, history.newest))
        else:
            history.problems.append(
                f"step {step:,} of attempt {self._attempt} is recorded again, with no rollback and no start "
                "before it; expected each step once: a line was copied, or one of what happened is lost"
            )
        self._go_to(step - 1)

    def _go_to(self, step: int) -> None:
        """What was recorded after `step` does not count any more."""
        history = self.history
        while step >= len(history.rows):
            history.rows = np.concatenate([history.rows, np.zeros_like(history.rows)])
        history.rows["seen"][step + 1 : history.newest + 1] = False
        history.newest = step
