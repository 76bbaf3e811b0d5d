"""Recorded curves judged again: the points of a CSV file or a run, their verdicts, what was taken back."""

import csv
import math
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from ds_pretrain.config.schema import WatchdogSection
from ds_pretrain.core.errors import InputError
from ds_pretrain.core.state import Verdict, WatchdogState
from ds_pretrain.watchdog.detector import judge

_EVERY = 1000  # points between two memories kept to roll back to, each of some kB
_MOST_PROBLEMS = 10
_OF_THE_LOSS = ("blip", "spike", "lasting_spike", "recurring_spike")
_DECISIONS = ("rollback", "needs_operator")


@dataclass(frozen=True)
class Point:
    """One recorded step, as the judgement wants it."""

    step: int
    loss: float  # nan if it was
    loss_max_rank: float
    grad_norm: float | None = None
    has_norm: bool = True  # False: not recorded, rather than not finite
    update_applied: bool | None = None  # not recorded in a CSV file
    phase: str = ""
    loss_other_ranks: float | None = None  # not recorded in a CSV file


@dataclass(frozen=True)
class Incident:
    """Consecutive verdicts about one onset and one thing, as one line."""

    verdict: Verdict  # the gravest of them, the last of those
    at_step: int  # of that
    first_step: int
    last_step: int


@dataclass(frozen=True)
class RolledBack:
    """An interval of a run that does not count any more, judged as it happened."""

    decision: Mapping[str, Any]  # the event, without what is long
    num_steps: int
    found: tuple[Incident, ...]


def read_csv(path: Path) -> list[Point]:
    """Columns `step` and `loss`, and `grad_norm` if recorded; others are ignored, blank is not recorded.

    Raises:
        InputError: it is no such file, with the first lines that cannot be read.
    """
    points, problems = [], []
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            reader.fieldnames = [name.strip().lower() for name in reader.fieldnames or []]
            if not {"step", "loss"} <= set(columns := reader.fieldnames or []):
                problems.append(f"{path} has the columns {columns}; expected step, loss and maybe grad_norm")
            for row in () if problems else reader:
                try:
                    points.append(_parse_csv_point(row))
                except ValueError as error:
                    problems.append(f"{path}, line {reader.line_num}: {error}")
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} cannot be read as CSV: {error}") from error
    if not points and not problems:
        problems = [f"{path} has no rows; expected one for each step"]
    if len(problems) > _MOST_PROBLEMS:
        problems[_MOST_PROBLEMS:] = [f"and {len(problems) - _MOST_PROBLEMS} more lines like these"]
    if problems:
        raise InputError(problems)
    for before, after in pairwise(points):
        if after.step <= before.step:
            raise InputError(
                f"{path}: step {after.step} follows step {before.step}; expected rising steps; keep the "
                f"last record of a repeated step"
            )
    return points


def _parse_csv_point(row: Mapping[str, str | None]) -> Point:
    step, loss = _parse_number("step", row["step"]), _parse_number("loss", row["loss"])
    if not (math.isfinite(step) and step == int(step) and step >= 0):
        raise ValueError(f"step is {row['step']!r}; expected a whole number")
    norm = row.get("grad_norm")
    has_norm = bool(norm and norm.strip())
    return Point(int(step), loss, loss, _parse_number("grad_norm", norm) if has_norm else None, has_norm)


def _parse_number(name: str, text: str | None) -> float:
    try:
        return float(text or "")
    except ValueError:
        raise ValueError(f"{name} is {text!r}; expected a number") from None


def parse_point(record: Mapping[str, Any]) -> Point | None:
    """A step record of metrics.jsonl; None if its step or its loss is missing or is none."""
    try:
        norm, others = record["grad_norm"], record.get("loss_other_ranks")
        return Point(
            step=int(record["step"]),
            loss=float(record["loss"]),
            loss_max_rank=float(record["loss_max_rank"]),
            grad_norm=None if norm is None else float(norm),
            update_applied=record["update_applied"],
            phase=sys.intern(record["phase"]),  # one text for all of them
            loss_other_ranks=None if others is None else float(others),
        )
    except (KeyError, ValueError, TypeError, OverflowError):
        return None


def replay(points: Iterable[Point], settings: WatchdogSection) -> list[Verdict]:
    """The verdict of each point; after a roll_back the watchdog starts afresh, as the curve continues."""
    memory, verdicts = WatchdogState(), []
    for point in points:
        memory, verdict = judge(settings, memory, point, point.has_norm)
        verdicts.append(verdict)
    return verdicts


def find_incidents(points: Sequence[Point], verdicts: Sequence[Verdict]) -> list[Incident]:
    """The verdicts that say something, those of one onset together."""
    found: list[Incident] = []
    for point, verdict in zip(points, verdicts, strict=True):
        if verdict.kind is None:
            continue
        last = found[-1] if found else None
        if last is not None and _is_same(last.verdict, verdict):
            found[-1] = replace(last, last_step=point.step)
            if verdict.interrupts or not last.verdict.interrupts:
                found[-1] = replace(found[-1], verdict=verdict, at_step=point.step)
        else:
            found.append(Incident(verdict, point.step, point.step, point.step))
    return found


def _is_same(one: Verdict, other: Verdict) -> bool:
    if one.kind in _OF_THE_LOSS and other.kind in _OF_THE_LOSS:
        return one.onset == other.onset
    return one.kind == other.kind and (one.kind == "drift" or one.onset == other.onset)


class RecordedCurve:
    """The steps of a run that count so far, each judged when it was taken, and what was taken back.

    A step taken again supersedes all that was recorded at it and later: the memory is then that of the step
    before, as that of the run was.
    """

    def __init__(self, settings: WatchdogSection) -> None:
        self.points: list[Point] = []
        self.verdicts: list[Verdict] = []
        self.taken_back: list[RolledBack] = []
        self.num_left_out = 0  # step records that hold no step
        self._settings, self._memory = settings, WatchdogState()
        self._memories: list[WatchdogState] = []  # before each point that is a multiple of _EVERY
        self._left: tuple[list[Point], list[Verdict]] = [], []  # the last that ceased to count

    def take(self, record: Mapping[str, Any]) -> None:
        """Judge a step record, or note what a decision takes back; other records are skipped."""
        if record.get("event") in _DECISIONS:
            self._note(record)
        elif record.get("event") == "step":
            point = parse_point(record)
            if point is None:
                self.num_left_out += 1
                return
            if self.points and point.step <= self.points[-1].step:
                self._rewind(point.step)
            self._judge(point)

    def _judge(self, point: Point) -> None:
        if len(self.points) % _EVERY == 0:
            self._memories.append(self._memory)
        self._memory, verdict = judge(self._settings, self._memory, point, point.has_norm)
        self.points.append(point)
        self.verdicts.append(verdict)

    def _rewind(self, step: int) -> None:
        """To before `step`: what stays since the last memory that was kept is judged again."""
        index = bisect_left(self.points, step, key=_get_step)
        self._left = self.points[index:], self.verdicts[index:]
        kept = index // _EVERY
        again = self.points[kept * _EVERY : index]
        self._memory = self._memories[kept]
        del self.points[kept * _EVERY :], self.verdicts[kept * _EVERY :], self._memories[kept:]
        for point in again:
            self._judge(point)

    def _note(self, record: Mapping[str, Any]) -> None:
        """A rollback, or a stop with what the next start resumes from: what came after that is taken back."""
        step, to_step = record.get("step"), record.get("to_step")
        if not isinstance(step, int) or not isinstance(to_step, int):
            return
        points, verdicts = self.points, self.verdicts
        if not points or points[-1].step < step:  # a crash kept it from being reported at once
            points, verdicts = self._left
        first, end = (bisect_right(points, at, key=_get_step) for at in (to_step, step))
        found = find_incidents(points[first:end], verdicts[first:end])
        decision = {
            name: record.get(name) for name in ("event", "incident", "step", "to_step", "onset", "trouble")
        }
        self.taken_back.append(RolledBack(decision, max(0, end - first), tuple(found)))


def _get_step(point: Point) -> int:
    return point.step
