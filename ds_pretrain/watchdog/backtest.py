"""A curve with its verdicts: what they are about, and what of a run's curve was taken back."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ds_pretrain.config.schema import WatchdogSection
from ds_pretrain.core.watchdog_memory import Memory
from ds_pretrain.watchdog.curves import Point, recorded_point
from ds_pretrain.watchdog.detector import judge
from ds_pretrain.watchdog.verdict import Verdict

_MOST_MEMORIES = 512  # kept to go back to; each of some kB
_NEAR = 200  # points: one that comes again within so many is told with the one before
_OF_THE_LOSS = ("blip", "spike", "lasting_spike")
_DECISIONS = ("rollback", "needs_person")


@dataclass(frozen=True)
class Incident:
    """Consecutive verdicts about one onset and one thing, as one line."""

    verdict: Verdict  # the gravest of them, the last of those
    at_step: int  # of that
    first_step: int
    last_step: int
    last_index: int  # of its last point
    times: int = 1  # that it began anew: after a roll_back the watchdog starts afresh


@dataclass(frozen=True)
class TakenBack:
    """A stretch of a run that does not count any more, judged as it happened."""

    decision: Mapping[str, Any]  # the event, without what is long
    num_steps: int
    found: tuple[Incident, ...]


def replay(points: Iterable[Point], settings: WatchdogSection) -> list[Verdict]:
    """The verdict of each point; after a roll_back the watchdog starts afresh, as the curve goes on."""
    memory, verdicts = Memory(), []
    for point in points:
        memory, verdict = judge(settings, memory, point, point.has_norm)
        verdicts.append(verdict)
    return verdicts


def incidents(points: Sequence[Point], verdicts: Sequence[Verdict]) -> list[Incident]:
    """The verdicts that say something, those of one onset together."""
    found: list[Incident] = []
    for index, (point, verdict) in enumerate(zip(points, verdicts, strict=True)):
        if verdict.kind is None:
            continue
        last = found[-1] if found else None
        if last is not None and _same(last.verdict, verdict):
            found[-1] = replace(last, last_step=point.step, last_index=index)
            if verdict.roll_back or not last.verdict.roll_back:
                found[-1] = replace(found[-1], verdict=verdict, at_step=point.step)
        else:
            found.append(Incident(verdict, point.step, point.step, point.step, index))
    return found


def _same(one: Verdict, other: Verdict) -> bool:
    if one.kind in _OF_THE_LOSS and other.kind in _OF_THE_LOSS:
        return one.onset == other.onset
    return one.kind == other.kind and (one.kind == "drift" or one.onset == other.onset)


def folded(found: Sequence[Incident]) -> list[Incident]:
    """The same trouble again and again, as a curve has it that stays sick, as one."""
    shown: list[Incident] = []
    for one in found:
        last = shown[-1] if shown else None
        is_again = (
            last is not None
            and (last.verdict.kind, last.verdict.action) == (one.verdict.kind, one.verdict.action)
            and one.verdict.roll_back
            and one.last_index - last.last_index <= _NEAR
        )
        if last is not None and is_again:
            shown[-1] = replace(
                last,
                verdict=one.verdict,
                at_step=one.at_step,
                last_step=one.last_step,
                last_index=one.last_index,
                times=last.times + one.times,
            )
        else:
            shown.append(one)
    return shown


class History:
    """The steps of a run that count so far, each judged when it was taken, and what was taken back.

    A step taken again supersedes all that was recorded at it and later: the memory is then that of the step
    before, as that of the run was. Memories are kept for that at ever wider distances: what is held besides
    the points and verdicts does not grow with the run.
    """

    def __init__(self, settings: WatchdogSection) -> None:
        self.points: list[Point] = []
        self.verdicts: list[Verdict] = []
        self.taken_back: list[TakenBack] = []
        self.num_left_out = 0  # step records that hold no step
        self._settings, self._memory = settings, Memory()
        self._memories: list[tuple[int, Memory]] = []  # with the number of points before it
        self._every = 64  # points between two of them
        self._left: tuple[list[Point], list[Verdict]] = [], []  # the last that ceased to count

    def take(self, record: Mapping[str, Any]) -> None:
        """Judge a step record, or note what a decision takes back; other records are passed over."""
        if record.get("event") in _DECISIONS:
            self._note(record)
        elif record.get("event") == "step":
            point = recorded_point(record)
            if point is None:
                self.num_left_out += 1
            else:
                self._judge(point)

    def _judge(self, point: Point) -> None:
        if self.points and point.step <= self.points[-1].step:
            self._go_back(point.step)
        index = len(self.points)
        if index % self._every == 0 and (not self._memories or self._memories[-1][0] < index):
            self._memories.append((index, self._memory))
        if len(self._memories) > _MOST_MEMORIES:
            self._memories, self._every = self._memories[::2], self._every * 2
        self._memory, verdict = judge(self._settings, self._memory, point, point.has_norm)
        self.points.append(point)
        self.verdicts.append(verdict)

    def _go_back(self, step: int) -> None:
        """To before `step`."""
        index = bisect_left(self.points, step, key=_step)
        self._left = self.points[index:], self.verdicts[index:]
        del self.points[index:], self.verdicts[index:]
        while self._memories and self._memories[-1][0] > index:
            self._memories.pop()
        start, self._memory = self._memories[-1] if self._memories else (0, Memory())
        for point in self.points[start:]:
            self._memory, _ = judge(self._settings, self._memory, point, point.has_norm)

    def _note(self, record: Mapping[str, Any]) -> None:
        """A rollback, or a stop with what the next start goes on from: what came after that is taken back."""
        step, to_step = record.get("step"), record.get("to_step")
        if not isinstance(step, int) or not isinstance(to_step, int):
            return
        points, verdicts = self.points, self.verdicts
        if not points or points[-1].step < step:  # a crash kept it from being told at once
            points, verdicts = self._left
        first, end = (bisect_right(points, at, key=_step) for at in (to_step, step))
        found = incidents(points[first:end], verdicts[first:end])
        decision = {
            name: record.get(name) for name in ("event", "incident", "step", "to_step", "onset", "trouble")
        }
        self.taken_back.append(TakenBack(decision, max(0, end - first), tuple(found)))


def _step(point: Point) -> int:
    return point.step
