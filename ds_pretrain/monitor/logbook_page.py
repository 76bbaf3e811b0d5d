"""The logbook's records as a page for a person at 3 a.m. Pure: records in, Markdown out.

The newest comes first: a page opens at its top, and what is wrong now has to stand there.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ds_pretrain.monitor.logbook_incident import incident, of_kind, outcome, verdict
from ds_pretrain.monitor.logbook_text import (
    LONGEST_TEXT,
    Record,
    block,
    counted,
    escaped,
    known,
    number,
    ranges,
    sentence,
    when,
    where,
)

_MOST_ENTRIES = 200  # the newest; the rest is in incidents.jsonl
_MOST_LINKS = 20  # at the top
_MOST_TROUBLES = 10  # told one by one in an entry of small things
_STARTS = ("start", "resume")
_ENDS = ("stop", "stopped", "finish", "failed", "needs_person")


@dataclass
class Entry:
    """What belongs together: an incident, the small things between two others, or a single record."""

    kind: Literal["incident", "small", "verdict", "other"]
    records: list[Record] = field(default_factory=list)
    note: str = ""  # what only the records before it tell


def page(records: Sequence[Record], run_name: str) -> str:
    """LOGBOOK.md of a run; `records` are those of incidents.jsonl, the oldest first."""
    entries = entries_of(records)
    shown = entries[::-1][:_MOST_ENTRIES]
    parts = [*_head(records, entries, run_name), *(part for entry in shown for part in _safely(entry))]
    if len(shown) < len(entries):
        parts.append(f"{len(entries) - len(shown):,} older entries are in incidents.jsonl only.")
    return "\n\n".join(parts) + "\n"


def entries_of(records: Sequence[Record]) -> list[Entry]:
    """The records put together as entries, the oldest first."""
    entries: list[Entry] = []
    incidents: dict[Any, Entry] = {}
    start: Record | None = None
    ended = True  # what the start before had to say
    for record in records:
        kind, of = record.get("event"), record.get("incident")
        if isinstance(of, int | str):
            if of not in incidents:
                incidents[of] = Entry("incident", _what_led_to(record, entries))
                entries.append(incidents[of])
            incidents[of].records.append(record)
        elif kind == "watchdog" and record.get("action") == "roll_back":
            entries.append(Entry("verdict", [record]))
        elif kind in ("dropped", "watchdog"):
            if not entries or entries[-1].kind != "small":
                entries.append(Entry("small"))
            entries[-1].records.append(record)
        else:
            note = _restart_note(record, start, ended) if kind in _STARTS else ""
            entries.append(Entry("other", [record], note))
        if kind in _STARTS:
            start, ended = record, False
        ended = ended or kind in _ENDS
    return [entry for entry in entries if entry.records]


def _what_led_to(decision: Record, entries: Sequence[Entry]) -> list[Record]:
    """Take what the watchdog said of a decision's trouble out of the entries just before it."""
    found: list[Record] = []
    for entry in [e for e in entries[-3:] if e.kind in ("small", "verdict")]:
        same = [r for r in entry.records if r.get("event") == "watchdog" and _is_same(r, decision)]
        found += same
        entry.records = [r for r in entry.records if not any(r is taken for taken in same)]
    return found


def _is_same(said: Record, decision: Record) -> bool:
    return said.get("attempt") == decision.get("attempt") and (
        (said.get("onset") is not None and said.get("onset") == decision.get("onset"))
        or (said.get("action") == "roll_back" and said.get("step") == decision.get("step"))
    )


def _restart_note(record: Record, before: Record | None, ended: bool) -> str:
    if before is None:
        return ""
    was, now = before.get("world_size"), record.get("world_size")
    note = (
        f" The number of ranks changed: {number(was)} -> {number(now)}." if was and now and was != now else ""
    )
    if not ended:
        note += " The start before left no word of its end: it was killed, or it failed."
    return note


def _head(records: Sequence[Record], entries: Sequence[Entry], run_name: str) -> Iterator[str]:
    yield f"# Logbook of {escaped(run_name)}"
    yield (
        "Generated from incidents.jsonl and written anew with each event: what you write here is lost, "
        "your own notes belong in another file. Newest first; times are UTC."
    )
    try:
        yield f"**Now: {_now(records, entries)}**"
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        yield f"**Now: unknown**, the last records cannot be understood ({escaped(error)})."
    incidents = [entry.records for entry in entries if entry.kind == "incident"]
    starts = [record for record in records if record.get("event") in _STARTS]
    counts = Counter(str(record.get("event")) for record in records)
    num_open = sum(outcome(of) == "open" for of in incidents)
    links = "".join(_link(of) for of in incidents[::-1][:_MOST_LINKS])
    last = f"the last {where(starts[-1])}" if starts else "none is known"
    yield (
        f"{counted(len(incidents), 'incident')} ({num_open:,} open{links}); "
        f"{counted(len(starts), 'start')}, {last}; {counted(counts['dropped'], 'dropped update')}, "
        f"{counted(counts['save_failed'], 'failed save')}."
    )
    person = of_kind(records, "needs_person", *_STARTS)[-1:]
    if person and person[0].get("event") == "needs_person":
        yield block(str(known(person[0], "diagnosis", "reason", "message") or "no diagnosis was recorded"))


def _link(records: Sequence[Record]) -> str:
    of = _number_of(records)
    return f"; [{of}](#incident-{of})" if of.isdigit() else ""


def _now(records: Sequence[Record], entries: Sequence[Entry]) -> str:
    """Where the run stood when the last record was written."""
    telling = [r for r in records if r.get("event") in (*_STARTS, *_ENDS)]
    if not telling:
        return (
            "nothing has happened yet." if not records else f"nothing known of a start, {when(records[-1])}."
        )
    last = telling[-1]
    kind = last.get("event")
    if kind == "needs_person":
        return f"NEEDS A PERSON ({where(last)}); do not just start it again. The diagnosis:"
    if kind in _ENDS:
        words = {"finish": "finished", "failed": "failed"}.get(str(kind), "stopped on request")
        return f"{words} ({where(last)})."
    incidents = [entry.records for entry in entries if entry.kind == "incident"]
    if incidents and outcome(incidents[-1]) == "open":
        return f"recovering from incident {_number_of(incidents[-1])} ({where(incidents[-1][-1])})."
    saved = of_kind(records, "save_failed", "checkpoint", *_STARTS)[-1]
    if saved.get("event") == "save_failed":
        return f"SAVES FAIL ({where(saved)}): {sentence(saved.get('problem', 'problem not recorded'))}"
    said = of_kind(records, "watchdog", "outcome", *_STARTS)[-1]
    if said.get("event") == "watchdog" and said.get("action") != "ok":
        would = "" if said.get("action") == "watch" else "it would have rolled back for "
        return f"no response open; the watchdog last saw ({when(said)}): {would}{_message(said)}"
    since = of_kind(records, "watchdog", "dropped", "outcome", "checkpoint", *_STARTS)[-1]
    return f"healthy since {when(since)}."


def _message(record: Record) -> str:
    return sentence(record.get("message", "trouble"))


def _number_of(records: Sequence[Record]) -> str:
    return escaped(next(r["incident"] for r in records if r.get("incident") is not None))


def _safely(entry: Entry) -> Iterator[str]:
    """The entry's parts; the plain records where they are not as expected: a newer version wrote them."""
    try:
        yield from list(_parts(entry))
    except (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError) as error:
        yield f"## Entry that cannot be understood ({escaped(error)})"
        yield from (_plainly(record) for record in entry.records[:_MOST_TROUBLES])


def _parts(entry: Entry) -> Iterator[str]:
    first = entry.records[0]
    if entry.kind == "incident":
        yield f"## Incident {_number_of(entry.records)}"
        yield from incident([r for r in entry.records if r.get("event") != "watchdog"])
    elif entry.kind == "verdict":
        yield f"## {escaped(first.get('trouble', 'Trouble'))}, no response"
        yield from verdict(first)
    elif entry.kind == "small":
        steps = [r["step"] for r in entry.records if "step" in r] or [0]
        yield f"## Small things, steps {min(steps):,} to {max(steps):,}"
        yield from _small(entry.records)
    else:
        yield from _single(first, entry.note)


def _small(records: Sequence[Record]) -> Iterator[str]:
    dropped = of_kind(records, "dropped")
    if dropped:
        causes = Counter(str(r.get("cause") or "cause not recorded") for r in dropped)
        why = ", ".join(f"{count:,} {escaped(cause)}" for cause, count in causes.most_common(5))
        steps = ranges([r["step"] for r in dropped if "step" in r])
        yield f"{counted(len(dropped), 'update')} dropped ({why}): steps {steps}. Last: {where(dropped[-1])}."
    troubles: dict[Any, Record] = {}
    for said in of_kind(records, "watchdog"):
        troubles[
            (said.get("attempt"), said.get("onset"), said.get("step") if not said.get("onset") else 0)
        ] = said
    healed = [r for r in troubles.values() if r.get("action") == "ok"]
    if troubles:
        yield f"Troubles seen: {len(troubles):,}; healed by themselves: {len(healed):,}. The last ones:"
        yield "\n".join(
            f"- {where(r)}: {escaped(r.get('trouble', 'trouble'))}, "
            f"{'healed' if r.get('action') == 'ok' else 'watched'}: {_message(r)}"
            for r in list(troubles.values())[::-1][:_MOST_TROUBLES]
        )


def _single(record: Record, note: str) -> Iterator[str]:
    kind = record.get("event")
    if kind in _STARTS:
        yield f"## {'Start' if kind == 'start' else 'Resume'}"
        size = known(record, "world_size")
        ranks = "" if size is None else f", {counted(size, 'rank')}"
        begun = known(record, "checkpoint")
        yield (f"{where(record)}{ranks}{'' if begun is None else f', from {escaped(begun)}'}.{note}")
    elif kind in ("stop", "stopped"):
        yield "## Stop on request"
        yield f"{where(record)}. Saved; the same command goes on from there."
    elif kind == "finish":
        yield "## Finished"
        yield f"{where(record)}."
    elif kind == "save_failed":
        yield "## Failed save"
        row = known(record, "in_a_row")
        yield (
            f"{where(record)}: {sentence(record.get('problem', 'problem not recorded'))}"
            f"{'' if row is None else f' It is number {number(row)} in a row.'}"
        )
    elif kind == "checkpoint":
        yield "## Saves work again"
        yield f"{where(record)}."
    elif kind in ("rollback", "needs_person"):  # without a number
        yield f"## {'Rollback' if kind == 'rollback' else 'Needs a person'}"
        yield from incident([record])
    else:
        yield f"## {escaped(kind)}"
        yield _plainly(record)


def _plainly(record: Record) -> str:
    rest = {k: v for k, v in record.items() if k not in ("event", "time", "step", "tokens", "attempt")}
    told = "; ".join(f"{escaped(k)} {escaped(v, LONGEST_TEXT)}" for k, v in rest.items())
    return f"{escaped(record.get('event'))}: {where(record)}.{f' {told}' if told else ''}"
