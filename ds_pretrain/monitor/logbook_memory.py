"""What the logbook's page is made of, in memory: the newest entries, and counts of all that was before.

A record is cut to what the page says of it when it is taken. So a page is made without reading anything, and
what is kept stays small, however long the run, however many samples were skipped and on however many ranks.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from ds_pretrain.monitor.logbook_incident import MOST_SUSPECTS, curve_plot, outcome, worst_rank
from ds_pretrain.monitor.logbook_text import LONGEST_BLOCK, LONGEST_TEXT, Record, number, one_line

STARTS = ("start", "resume")
ENDS = ("stop", "finish", "needs_person")
# What is written down. Steps, validations, checkpoints and shipping are routine: metrics.jsonl has them.
NOTEWORTHY = {
    *STARTS,
    *ENDS,
    *("save_failed", "warning", "changed", "watchdog", "observed", "dropped"),
    *("rollback", "suspects", "compared", "outcome"),
}
MOST_ENTRIES = 200  # the newest; of older ones only counts are kept
_MOST_RECORDS = 50  # of an entry
_MOST_STEPS = 500  # of dropped updates, in an entry
_MOST_TROUBLES = 100  # of an entry, the newest
_MOST_CAUSES = 20
_MOST_LISTED = 50  # ranks, hosts or documents
_BULKY = ("curve", "rank_losses", "skipped", "samples")
_WRONG = (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError)


@dataclass
class Entry:
    """What belongs together: an incident, the changes of a start, or a single record."""

    kind: Literal["incident", "verdict", "changes", "other"]
    records: list[Record] = field(default_factory=list)
    note: str = ""  # what only the records before it tell

    def take(self, record: Record) -> None:
        """Add a record. Of too many, those in the middle are forgotten."""
        self.records.append(record)
        if len(self.records) > _MOST_RECORDS:
            del self.records[_MOST_RECORDS // 2]


@dataclass
class Small:
    """The small things between two entries, counted: dropped updates, and what the watchdog saw."""

    num_dropped: int = 0
    causes: Counter[str] = field(default_factory=Counter)
    steps: list[int] = field(default_factory=list)  # of the dropped updates, the first of them
    last_dropped: Record = field(default_factory=dict)
    troubles: dict[tuple[str, ...], Record] = field(default_factory=dict)  # what was said last of each
    num_troubles: int = 0
    num_healed: int = 0  # of those that are forgotten
    span: list[int] = field(default_factory=list)  # the first and the last step of what is counted

    def take(self, record: Record) -> None:
        """Count a record."""
        if record.get("event") != "dropped":
            self._take_trouble(record)
            return
        cause = one_line(record.get("cause") or "cause not recorded")
        self.num_dropped += 1
        self.causes[cause if cause in self.causes or len(self.causes) < _MOST_CAUSES else "other"] += 1
        self.last_dropped = record
        if isinstance(record.get("step"), int) and len(self.steps) < _MOST_STEPS:
            self.steps.append(record["step"])
        self._reach(record)

    def _take_trouble(self, record: Record) -> None:
        before = self.troubles.get(_trouble(record))
        self.num_troubles += before is None
        first = (before or record).get("first_step", record.get("step"))
        self.troubles[_trouble(record)] = {**record, "first_step": first}
        if len(self.troubles) > _MOST_TROUBLES:
            oldest = self.troubles.pop(next(iter(self.troubles)))
            self.num_healed += oldest.get("action") == "ok"
            self._reach(oldest)

    def forget(self, decision: Record) -> None:
        """What was said of a decision's trouble is told with the decision."""
        if decision.get("onset") is not None and self.troubles.pop(_trouble(decision), None) is not None:
            self.num_troubles -= 1

    @property
    def reach(self) -> tuple[int, int]:
        """The first and the last step."""
        told = [r.get(name) for r in self.troubles.values() for name in ("first_step", "step")]
        steps = [step for step in [*told, *self.span] if isinstance(step, int)]
        return min(steps, default=0), max(steps, default=0)

    def _reach(self, record: Record) -> None:
        steps = [record.get("first_step"), record.get("step"), *self.span]
        known = [step for step in steps if isinstance(step, int)]
        self.span = [min(known), max(known)] if known else []


AnyEntry: TypeAlias = Entry | Small


class Remembered:
    """The records of a logbook so far, as far as its page tells of them."""

    def __init__(self) -> None:
        self.entries: list[AnyEntry] = []  # the newest, the oldest first
        self.num_older = 0  # entries before them
        self.num_records = self.num_incidents = 0
        self.counts: Counter[str] = Counter()  # of records, by kind
        self._last: dict[str, tuple[int, Record]] = {}  # of each kind
        self._incidents: dict[int | str, Entry] = {}
        self._older: dict[int | str, bool] = {}  # incidents without an entry, and whether they are open
        self._ended = True  # the start before had a last word

    @property
    def incidents(self) -> list[Entry]:
        """Those that still have an entry, the oldest first."""
        return list(self._incidents.values())

    @property
    def num_open(self) -> int:
        """Incidents without an outcome."""
        return sum(self._older.values()) + sum(outcome(one.records) == "open" for one in self.incidents)

    def last(self, *kinds: str) -> Record | None:
        """The newest record of these kinds; of no kinds, of all."""
        found = [self._last[kind] for kind in kinds or self._last if kind in self._last]
        return max(found, key=lambda one: one[0])[1] if found else None

    def take(self, whole: Record) -> None:
        """Remember one more record."""
        record, kind = reduced(whole), whole.get("event")
        incident = record.get("incident")
        if isinstance(incident, int | str):
            self._take_of_incident(incident, record)
        elif kind == "watchdog" and record.get("action") == "roll_back":
            self._append(Entry("verdict", [record]))
        elif kind == "observed" and (said := self._verdict_of(record)) is not None:
            said.take(record)
        elif kind == "changed":
            newest = self.entries[-1] if self.entries else None
            if isinstance(newest, Entry) and newest.kind == "changes" and _same_start(newest, record):
                newest.take(record)
            else:
                self._append(Entry("changes", [record]))
        elif kind in ("dropped", "watchdog"):
            if not self.entries or not isinstance(self.entries[-1], Small):
                self._append(Small())
            self.entries[-1].take(record)
        else:
            note = self._restart_note(record) if kind in STARTS else ""
            self._append(Entry("other", [record], note))
        self._ended = kind in ENDS or (self._ended and kind not in STARTS)
        self.num_records += 1
        known = kind if isinstance(kind, str) and (kind in NOTEWORTHY or kind == "checkpoint") else "other"
        self.counts[known] += 1
        self._last[known] = self.num_records, record

    def _take_of_incident(self, incident: int | str, record: Record) -> None:
        if incident in self._older:
            self._older[incident] &= outcome([record]) == "open"
            return
        if incident not in self._incidents:
            self._take_what_led_to(record)
            self.num_incidents += 1
            self._incidents[incident] = Entry("incident")
            self._append(self._incidents[incident])
        self._incidents[incident].take(record)

    def _take_what_led_to(self, decision: Record) -> None:
        """Leave out what the watchdog said of a decision's trouble just before."""
        for entry in self.entries[-3:]:
            if isinstance(entry, Small):
                entry.forget(decision)
                is_empty = not (entry.num_dropped or entry.num_troubles)
            else:
                is_empty = entry.kind == "verdict" and _is_same(entry.records[0], decision)
            if is_empty:
                self.entries = [other for other in self.entries if other is not entry]

    def _verdict_of(self, observed: Record) -> Entry | None:
        for entry in self.entries[-3:]:
            if not isinstance(entry, Entry) or entry.kind != "verdict":
                continue
            if _same_start(entry, observed) and entry.records[0].get("step") == observed.get("step"):
                return entry
        return None

    def _restart_note(self, record: Record) -> str:
        before = self.last(*STARTS)
        if before is None:
            return ""
        was, now = before.get("world_size"), record.get("world_size")
        note = (
            f" The number of ranks changed: {number(was)} -> {number(now)}."
            if was and now and was != now
            else ""
        )
        if not self._ended:
            note += " The start before left no word of its end: it was killed, or it failed."
        return note

    def _append(self, entry: AnyEntry) -> None:
        self.entries.append(entry)
        if len(self.entries) <= MOST_ENTRIES:
            return
        open_ones = [id(one) for one in self.incidents if outcome(one.records) == "open"]
        gone = next((one for one in self.entries[:-1] if id(one) not in open_ones), self.entries[0])
        self.entries = [other for other in self.entries if other is not gone]
        self.num_older += 1
        for incident in [name for name, one in self._incidents.items() if one is gone]:
            self._older[incident] = outcome(self._incidents.pop(incident).records) == "open"


def remembered(records: Iterable[Record]) -> Remembered:
    """What is remembered of records, the oldest first."""
    memory = Remembered()
    for record in records:
        memory.take(record)
    return memory


def reduced(record: Record) -> dict[str, Any]:
    """A record without what the page does not show: of samples and losses stays what is said of them."""
    short = {name: _short(value) for name, value in record.items() if name not in _BULKY}
    try:
        return short | dict(_said_of_bulk(record))
    except _WRONG as error:
        return short | {"not_understood": one_line(error)}


def _said_of_bulk(record: Record) -> Iterator[tuple[str, Any]]:
    if "curve" in record:
        yield "picture", curve_plot(record)
    if "rank_losses" in record:
        yield "worst_rank", worst_rank(record)
        yield "hosts", None  # one for each rank
    if (skipped := record.get("skipped")) is not None:
        yield "skipped", _counts_of(skipped) if isinstance(skipped, Mapping) else one_line(skipped)
    if (samples := record.get("samples")) is not None:
        yield "num_samples", len(samples)
        yield "samples", [{k: _short(v) for k, v in sample.items()} for sample in samples[:MOST_SUSPECTS]]


def _counts_of(skipped: Record) -> dict[str, Any]:
    samples = skipped.get("samples") or {}
    counts = {one_line(name): sum(len(ids) for ids in epochs.values()) for name, epochs in samples.items()}
    rest = {name: _short(value) for name, value in skipped.items() if name != "samples"}
    return rest | {"samples": dict(list(counts.items())[:_MOST_LISTED])}


def _short(value: Any) -> Any:
    if isinstance(value, str):
        return value[: LONGEST_BLOCK + 1]
    if isinstance(value, list | tuple):
        return [_short(one) if isinstance(one, str) else _flat(one) for one in value[:_MOST_LISTED]]
    return _flat(value)


def _flat(value: Any) -> Any:
    """Plain values as they are; of anything nested its beginning as text."""
    return one_line(value, LONGEST_TEXT) if isinstance(value, Mapping | list | tuple) else value


def _trouble(record: Record) -> tuple[str, ...]:
    onset = record.get("onset")
    return str(record.get("attempt")), str(onset), "" if onset else str(record.get("step"))


def _same_start(entry: Entry, record: Record) -> bool:
    return bool(entry.records[0].get("attempt") == record.get("attempt"))


def _is_same(said: Record, decision: Record) -> bool:
    """A verdict's trouble is that of a decision."""
    return said.get("attempt") == decision.get("attempt") and (
        (said.get("onset") is not None and said.get("onset") == decision.get("onset"))
        or said.get("step") == decision.get("step")
    )
