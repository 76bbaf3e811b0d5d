"""One incident of the logbook: all that is recorded under its number, as a section of the page.

Records are as `reduced` leaves them, but for `curve_plot` and `worst_rank`: what these say is kept.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ds_pretrain.monitor.logbook_text import (
    Record,
    block,
    counted,
    escaped,
    known,
    number,
    plain,
    sentence,
    when,
    where,
)
from ds_pretrain.monitor.plots import text_plot

_WIDTH, _HEIGHT = 72, 10  # of a plot, in characters
MOST_SUSPECTS = 20
_ALIKE = 0.05  # of its loss: a rank that stands out by less tells nothing
_TEXT_CHARACTERS = 120  # of a suspect
_MARKS = {"X": "decided here", "N": "loss not finite", "!": "since the onset"}


@dataclass(frozen=True)
class _Point:
    step: int
    loss: float


def of_kind(records: Sequence[Record], *kinds: str) -> list[Record]:
    """The records of these kinds, in their order."""
    return [record for record in records if record.get("event") in kinds]


def outcome(records: Sequence[Record]) -> str:
    """How an incident has ended so far: "healed", "needs a person", "open", ..."""
    if of_kind(records, "needs_person"):
        return "needs a person"
    ended = of_kind(records, "outcome")
    return plain(ended[-1].get("outcome", "ended")) if ended else "open"


def incident(records: Sequence[Record]) -> Iterator[str]:
    """The paragraphs of an incident, in the order in which things happened."""
    decisions = of_kind(records, "rollback", "needs_person")
    first = decisions[0] if decisions else records[0]
    yield f"**{_title(first)}** Outcome: **{outcome(records)}**."
    yield f"{where(first)}."
    if not decisions:
        yield "What was decided is not recorded: the start ended just then; cure.json has the rollback."
    for decision in decisions:
        yield from _seen(decision)
        yield from _decided(decision)
    for record in of_kind(records, "suspects"):
        yield from _suspects(record)
    for record in of_kind(records, "compared"):
        yield _compared(record)
    for record in of_kind(records, "outcome"):
        yield f"Ended ({where(record)}): {plain(record.get('outcome', 'unknown'))}{_after(record)}"
    if outcome(records) == "open":
        yield "Nothing is recorded of how it ended."


def verdict(record: Record, observed: Record | None = None) -> Iterator[str]:
    """The paragraphs of a verdict to roll back that was not acted upon, and of what would have been done."""
    why = "the mode was observe, or the start ended right here" if observed is None else "the mode is observe"
    yield f"{where(record)}. Nothing was done: {why}."
    yield from _seen(record)
    if observed is not None:
        yield would_have(observed)


def would_have(observed: Record) -> str:
    """What mode "act" would have done, in a sentence."""
    response, to_step, reason = (observed.get(name) for name in ("response", "to_step", "reason"))
    if response == "stop":
        done, back = "**a person would have been asked**", "; the next start would go on from step"
    else:
        done, back = f"**{escaped(response or 'roll back')}**", ", back to the checkpoint of step"
    is_said = to_step is None or f"step {number(to_step)}" in escaped(reason)
    target = "" if is_said else f"{back} {number(to_step)}"
    return f"In mode act: {done}{target}{f': {escaped(reason)}' if reason else ''}."


def _title(record: Record) -> str:
    trouble = plain(record.get("trouble", "trouble of an unknown kind"))
    trouble = trouble[:1].upper() + trouble[1:]
    onset = known(record, "onset")
    return trouble + ("." if onset is None else f" since step {number(onset)}.")


def _after(record: Record) -> str:
    return f": {sentence(record['message'])}" if record.get("message") else "."


def _seen(record: Record) -> Iterator[str]:
    if record.get("message"):
        yield f"Seen: {sentence(record['message'])}"
    if picture := record.get("picture"):
        yield block(picture)
    if said := record.get("worst_rank"):
        yield said


def curve_plot(record: Record) -> str | None:
    """The record's `curve` as a small picture; None if it has none that can be drawn."""
    curve, onset, decided = record.get("curve"), record.get("onset"), record.get("step")
    points = [_Point(int(step), float(loss)) for step, loss in curve] if isinstance(curve, list) else []
    if not points:
        return None

    def mark(point: _Point) -> str:
        if point.step == decided:
            return "X"
        if not math.isfinite(point.loss):
            return "N"
        return "!" if isinstance(onset, int) and point.step >= onset else " "

    marks = [mark(point) for point in points]
    legend = {mark: meaning for mark, meaning in _MARKS.items() if mark in marks}
    return text_plot(points, marks, "trouble", legend, _WIDTH, _HEIGHT)


def worst_rank(record: Record) -> str | None:
    """Which rank stood out most at a step of the trouble, and on which host; None for one rank or unknown.

    That is the first rank without a finite loss, else the one furthest above the median of the others.
    """
    by_step, onset = record.get("rank_losses") or {}, record.get("onset")
    shared = record.get("sequence_parallel_size", 1)  # neighbors share sequences, and have one loss
    by_step = {step: losses[::shared] for step, losses in by_step.items()}
    worst: tuple[float, int, int] | None = None  # (gap, step, rank)
    for step, losses in sorted((int(step), losses) for step, losses in by_step.items()):
        if len(losses) < 2 or (isinstance(onset, int) and step < onset):
            continue
        heights = [loss if math.isfinite(loss) else math.inf for loss in losses]
        rank = heights.index(max(heights))
        others = heights[:rank] + heights[rank + 1 :]
        gap = heights[rank] - median(others) if math.isfinite(heights[rank]) else math.inf
        if worst is None or gap > worst[0]:
            worst = gap, step, rank
    if worst is None:
        return None
    _, step, rank = worst
    losses, hosts = by_step[str(step)], record.get("hosts")
    who, ranks = _who(rank, shared), "ranks" if shared == 1 else f"groups of {shared} ranks"
    named = hosts[rank * shared : (rank + 1) * shared] if isinstance(hosts, list) else []
    host = f" on {escaped(', '.join(named))}" if named else ""
    others = [loss for other, loss in enumerate(losses) if other != rank and math.isfinite(loss)]
    whose = (
        f"the other {'rank' if shared == 1 else 'group'} had"
        if len(losses) == 2
        else "the median of the others was"
    )
    usual = f"; {whose} {median(others):.4g}" if others else "; no other is finite"
    if math.isfinite(worst[0]) and worst[0] <= _ALIKE * abs(losses[rank]):
        return (
            f"The {len(losses):,} {ranks} were alike: the highest loss furthest from the others was "
            f"{losses[rank]:.4g} at step {step:,}, of {who}{host}{usual}."
        )
    return (
        f"At step {step:,} {who}{host} stood out most of {len(losses):,} {ranks}, with a loss of "
        f"{losses[rank]:.4g}{usual}."
    )


def _who(reader: int, shared: int) -> str:
    if shared == 1:
        return f"rank {reader}"
    return f"the group of ranks {reader * shared} to {(reader + 1) * shared - 1}"


def _decided(record: Record) -> Iterator[str]:
    to_step, reason = record.get("to_step"), record.get("reason")
    because = f": {escaped(reason)}" if reason else ""
    if record.get("event") == "needs_person":
        back = "" if to_step is None else f"; the next start goes on from step {number(to_step)} or before"
        yield f"Decided: **a person is needed**{because}{back}."
        if record.get("diagnosis"):
            yield block(str(record["diagnosis"]))
        return
    is_said = to_step is None or f"step {number(to_step)}" in because  # by the reason
    target = "" if is_said else f", back to the checkpoint of step {number(to_step)}"
    yield f"Decided: **{escaped(record.get('response', 'roll back'))}**{target}{because}."
    skipped = record.get("skipped")
    yield "Skipped: no data." if not skipped else _skipped(skipped)


def _skipped(skipped: Any) -> str:
    if not isinstance(skipped, Mapping):  # what an older version wrote
        return f"Skipped: {escaped(skipped)}."
    per_source = skipped.get("samples") or {}
    named = ", ".join(f"{number(n)} of {escaped(source)}" for source, n in per_source.items())
    total = known(skipped, "num_samples")
    total = sum(per_source.values()) if total is None else total
    start, stop = skipped.get("start"), skipped.get("stop")
    draws = "" if start is None or stop is None else f", draws {number(start)} to {number(stop - 1)}"
    return (
        f"Skipped: {counted(total, 'sample')}{f' ({named})' if named else ''} of phase "
        f"{escaped(skipped.get('phase', 'unknown'))}{draws}. The exact ids are in incidents.jsonl; "
        "`ds-pretrain audit RUN --skipped` lists them."
    )


def _suspects(record: Record) -> Iterator[str]:
    samples, found = record.get("samples") or [], record.get("num_samples") or 0
    yield (
        f"Suspects: of the offending batches, {counted(found, 'sample')} with the highest loss under the "
        "weights gone back to."
    )
    rows = ["| loss | source | document | sample | step | text begins |", "|---|---|---|---|---|---|"]
    for sample in samples:
        documents = ", ".join(number(d) for d in sample.get("documents") or [])
        epoch = sample.get("epoch")
        cells = [
            number(sample.get("loss", "")),
            escaped(sample.get("source", "")),
            documents,
            number(sample.get("sample", "")) + (f" (epoch {number(epoch)})" if epoch else ""),
            number(sample.get("step", "")),
            escaped(sample.get("text", ""), _TEXT_CHARACTERS),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    if samples:
        yield "\n".join(rows)
    if found > len(samples):
        yield f"{found - len(samples):,} more are in incidents.jsonl."


def _compared(record: Record) -> str:
    said = f"Replayed ({when(record)}): **{plain(record.get('finding', 'no finding'))}**{_after(record)}"
    if (first := record.get("first_difference")) is not None:
        said += f" First difference at step {number(first)}."
    for name in ("ranks", "hosts"):
        if found := record.get(name):
            said += f" {name.title()}: {', '.join(number(one) for one in found)}."
    return said
