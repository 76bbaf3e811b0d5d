"""The logbook's records as a page for a person at 3 a.m. Pure: records in, Markdown out.

The newest comes first: a page opens at its top, and what is wrong now has to stand there.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

from ds_pretrain.monitor.logbook_incident import incident, outcome, verdict, would_have
from ds_pretrain.monitor.logbook_memory import ENDS, STARTS, AnyEntry, Remembered, Small
from ds_pretrain.monitor.logbook_text import (
    LONGEST_TEXT,
    Record,
    block,
    counted,
    escaped,
    known,
    number,
    plain,
    ranges,
    sentence,
    when,
    where,
)

_MOST_LINKS = 20  # at the top
_MOST_TROUBLES = 10  # told one by one in an entry of small things


def page(told: Remembered, run_name: str) -> str:
    """LOGBOOK.md of a run."""
    parts = [*_head(told, run_name), *(part for entry in told.entries[::-1] for part in _safely(entry))]
    if told.num_older:
        parts.append(f"{told.num_older:,} older entries are in incidents.jsonl only.")
    return "\n\n".join(parts) + "\n"


def _head(told: Remembered, run_name: str) -> Iterator[str]:
    yield f"# Logbook of {escaped(run_name)}"
    yield (
        "Generated from incidents.jsonl and written anew with each event: what you write here is lost, "
        "your own notes belong in another file. Newest first; times are UTC."
    )
    try:
        yield f"**Now: {_now(told)}**"
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        yield f"**Now: unknown**, the last records cannot be understood ({escaped(error)})."
    links = "".join(_link(one.records) for one in told.incidents[::-1][:_MOST_LINKS])
    start = told.last(*STARTS)
    last = f"the last {where(start)}" if start else "none is known"
    num_starts = sum(told.counts[kind] for kind in STARTS)
    yield (
        f"{counted(told.num_incidents, 'incident')} ({told.num_open:,} open{links}); "
        f"{counted(num_starts, 'start')}, {last}; {counted(told.counts['dropped'], 'dropped update')}, "
        f"{counted(told.counts['save_failed'], 'failed save')}."
    )
    person = told.last("needs_person", *STARTS)
    if person and person.get("event") == "needs_person":
        yield block(str(known(person, "diagnosis", "reason", "message") or "no diagnosis was recorded"))


def _link(records: Sequence[Record]) -> str:
    of = _number_of(records)
    return f"; [{of}](#incident-{of})" if of.isdigit() else ""


def _now(told: Remembered) -> str:
    """Where the run stood when the last record was written."""
    last, newest = told.last(*STARTS, *ENDS), told.last()
    if last is None:
        return "nothing has happened yet." if newest is None else f"nothing known of a start, {when(newest)}."
    kind = last.get("event")
    if kind == "needs_person":
        return f"NEEDS A PERSON ({where(last)}); do not just start it again. The diagnosis:"
    if kind in ENDS:
        return f"{'finished' if kind == 'finish' else 'stopped on request'} ({where(last)})."
    incidents = [one.records for one in told.incidents]
    if incidents and outcome(incidents[-1]) == "open":
        return f"recovering from incident {_number_of(incidents[-1])} ({where(incidents[-1][-1])})."
    saved = told.last("save_failed", "checkpoint", *STARTS) or last
    if saved.get("event") == "save_failed":
        return f"SAVES FAIL ({where(saved)}): {sentence(saved.get('problem', 'problem not recorded'))}"
    said = told.last("watchdog", "outcome", *STARTS) or last
    if said.get("event") == "watchdog" and said.get("action") != "ok":
        would = "" if said.get("action") == "watch" else "it would have rolled back for "
        return f"no response open; the watchdog last saw ({when(said)}): {would}{_message(said)}"
    return (
        f"healthy since {when(told.last('watchdog', 'dropped', 'outcome', 'checkpoint', *STARTS) or last)}."
    )


def _message(record: Record) -> str:
    return sentence(record.get("message", "trouble"))


def _number_of(records: Sequence[Record]) -> str:
    return escaped(next(r["incident"] for r in records if r.get("incident") is not None))


def _safely(entry: AnyEntry) -> Iterator[str]:
    """The entry's parts; the plain records where they are not as expected: a newer version wrote them."""
    try:
        yield from list(_parts(entry))
    except (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError) as error:
        yield f"## Entry that cannot be understood ({escaped(error)})"
        records = list(entry.troubles.values()) if isinstance(entry, Small) else entry.records
        yield from (_plainly(record) for record in records[:_MOST_TROUBLES])


def _parts(entry: AnyEntry) -> Iterator[str]:
    if isinstance(entry, Small):
        first_step, last_step = entry.reach
        yield f"## Small things, steps {first_step:,} to {last_step:,}"
        yield from _small(entry)
        return
    first, *others = entry.records
    for record in entry.records:
        if "not_understood" in record:
            raise ValueError(record["not_understood"])
    if entry.kind == "incident":
        yield f"## Incident {_number_of(entry.records)}"
        yield from incident(entry.records)
    elif entry.kind == "verdict":
        trouble = plain(first.get("trouble", "trouble"))
        yield f"## {trouble[:1].upper()}{trouble[1:]}, no response"
        yield from verdict(first, others[0] if others else None)
    elif entry.kind == "changes":
        yield "## Changed for a start"
        yield f"{where(first)}:"
        yield "\n".join(_change(record) for record in entry.records)
    else:
        yield from _single(first, entry.note)


def _change(record: Record) -> str:
    old, new = (escaped(record.get(name, "unknown")) for name in ("old", "new"))
    return f"- {escaped(record.get('field', 'something'))}: {old} before, {new} from then on"


def _small(entry: Small) -> Iterator[str]:
    if entry.num_dropped:
        why = ", ".join(f"{count:,} for {plain(cause)}" for cause, count in entry.causes.most_common(5))
        steps = ranges(entry.steps, more=entry.num_dropped - len(entry.steps))
        last = where(entry.last_dropped)
        yield f"{counted(entry.num_dropped, 'update')} dropped ({why}): steps {steps}. Last: {last}."
    if entry.num_troubles:
        told = list(entry.troubles.values())
        num_healed = entry.num_healed + sum(r.get("action") == "ok" for r in told)
        yield (
            f"Watched, nothing was done: {counted(entry.num_troubles, 'trouble')}, none grave enough to roll "
            f"back for; {num_healed:,} seen to heal, what else there was came to nothing or to what stands "
            "above. The last ones:"
        )
        yield "\n".join(_watched(told)[-_MOST_TROUBLES:][::-1])


def _watched(told: Sequence[Record]) -> list[str]:
    """A line each; of those of one kind in a row, as a drift has them that comes and goes, the last."""
    lines = []
    for kind, group in groupby(told, key=lambda r: (r.get("trouble"), r.get("action") == "ok")):
        same = list(group)
        last, is_healed = same[-1], kind[1]
        before = known(same[0], "first_step", "step")
        since = f", {len(same):,} times since step {number(before)}" if len(same) > 1 else ""
        lines.append(
            f"- {where(last)}: {plain(last.get('trouble', 'trouble'))}, "
            f"{'healed' if is_healed else 'watched'}{since}: {_message(last)}"
        )
    return lines


def _single(record: Record, note: str) -> Iterator[str]:
    kind = record.get("event")
    if kind in STARTS:
        yield f"## {'Start' if kind == 'start' else 'Resume'}"
        size = known(record, "world_size")
        ranks = "" if size is None else f", {counted(size, 'rank')}"
        begun = known(record, "checkpoint")
        yield (f"{where(record)}{ranks}{'' if begun is None else f', from {escaped(begun)}'}.{note}")
    elif kind == "stop":
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
    elif kind == "observed":
        yield "## Only observed"
        yield f"{where(record)}. {would_have(record)}"
    else:
        yield f"## {escaped(kind)}"
        yield _plainly(record)


def _plainly(record: Record) -> str:
    told = ("event", "time", "step", "tokens", "attempt", "not_understood")
    rest = {k: v for k, v in record.items() if k not in told}
    words = "; ".join(f"{escaped(k)} {escaped(v, LONGEST_TEXT)}" for k, v in rest.items())
    return f"{escaped(record.get('event'))}: {where(record)}.{f' {words}' if words else ''}"
