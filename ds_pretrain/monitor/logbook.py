"""The logbook of a run: the records in `incidents.jsonl`, and `LOGBOOK.md`, rendered from them.

The file of records is append-only. The page is rewritten atomically from the newest records at each event, so
a failed write repairs itself. Text from the data is in indented blocks, which nothing in it can end.
"""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby, islice
from pathlib import Path
from statistics import median
from typing import Any

from ds_pretrain.core.files import sync_file, write_atomic
from ds_pretrain.core.jsonl import JsonLines, read_metrics, read_metrics_backwards
from ds_pretrain.core.text import draw_loss_plot, format_count, format_count_of, format_plain

INCIDENTS = "incidents.jsonl"
PAGE = "LOGBOOK.md"
Record = Mapping[str, Any]

_STARTS = ("start", "resume")
_ENDS = ("stop", "finish", "needs_operator")
# What is written down. Steps, validations, checkpoints and uploads are routine: metrics.jsonl has them.
_NOTEWORTHY = {
    *_STARTS,
    *_ENDS,
    *("save_failed", "warning", "config_changed", "watchdog", "observed", "skipped_update"),
    *("rollback", "high_loss_samples", "replay_compared", "outcome"),
}
_REMEMBERED_STEPS = 2000  # long enough for the onset of a slow drift
_MOST_POINTS = 200  # of the curve in a record
_STEPS_BEFORE = 100  # of the onset in a curve, at least: what was normal has to be seen
_PAUSE_SECONDS = 60.0  # between two pages that tell nothing but small things: they may come with each step

_MOST_RECORDS = 2000  # read for a page
_IN_FULL = 10  # incidents that are told in full
_MOST_EVENTS = 200  # lines
_MOST_SAMPLES = 20
_WIDTH, _HEIGHT = 72, 10  # of a plot, in characters
_ALIKE = 0.05  # of its loss: a rank that stands out by less tells nothing
_BULKY = ("curve", "rank_losses", "hosts", "samples")
_LEGEND = {"X": "decided here", "N": "loss not finite", "!": "since the onset"}
_WORDS = {
    "stop": "preempted, checkpoint saved; rerun the same command to resume",
    "finish": "finished",
    "checkpoint": "saves work again",
}
# What the records' words mean: an operator reads the page, a program incidents.jsonl.
_PLAIN = {
    "blip": "a high loss of one step",
    "spike": "a spike of the loss",
    "lasting_spike": "a spike of the loss that lasts",
    "recurring_spike": "a spike of the loss that recurs",
    "drift": "a slow rise of the loss",
    "fall": "a sudden fall of the loss",
    "frozen_loss": "a loss that never changes",
    "outlier_rank": "a high loss of one rank",
    "norm_rise": "a high gradient norm",
    "frozen_norm": "a gradient norm that never changes",
    "non_finite": "a non-finite loss or gradient norm",
    "worse_than_guessing": "a loss worse than guessing",
    "outlier_norm": "an outlier gradient norm",
    "recurred": "it recurred",
    "passing_fault": "a passing fault",
    "data_or_state": "the data or the state",
    "other_ranks": "not to be compared, on another number of ranks",
}


class Logbook:
    """A sink that sees every step and event, and writes down the noteworthy ones for people.

    Opening raises OSError when what earlier starts wrote cannot be read, or not be added to.
    `write` and `close` raise OSError when the disk refuses. A record that was refused is missing from the
    file; a page that was refused is made again later.
    """

    def __init__(self, out: Path, run_name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._incidents, self._page, self._name, self._clock = out / INCIDENTS, out / PAGE, run_name, clock
        self._counts: Counter[str] = Counter()  # of records, by kind
        self._outcomes: dict[int, str] = {}  # of incidents, by number
        if self._incidents.is_file():
            for record in read_metrics(self._incidents):
                self._count(record)
        self._file = JsonLines(self._incidents)
        self._steps: deque[tuple[int, float, int | None]] = deque(maxlen=_REMEMBERED_STEPS)
        self._page_is_old = self._save_failed = False
        self._tried_at = -float("inf")

    def write(self, record: Record) -> None:
        """Remember a step, or write an event down if it is noteworthy."""
        kind = record.get("event")
        if kind == "step":
            self._remember(record)
        if kind in _NOTEWORTHY or (kind == "checkpoint" and self._save_failed):  # saves work again
            self._save_failed = kind == "save_failed" or (self._save_failed and kind != "checkpoint")
            self._file.write(self._completed(record))
            self._count(record)
            self._page_is_old = True
            if kind not in ("skipped_update", "watchdog"):  # these may come with each step
                sync_file(self._incidents)
                self._make_page()
        if self._page_is_old and self._clock() >= self._tried_at + _PAUSE_SECONDS:
            self._make_page()

    def close(self) -> None:
        """Bring the page up to date, flush and close; closing twice is fine."""
        try:
            if self._page_is_old:
                self._make_page()
        finally:
            self._file.close()

    def _count(self, record: Record) -> None:
        self._counts[str(record.get("event"))] += 1
        if isinstance(number := record.get("incident"), int):
            ended = _describe_outcome(record)
            if ended != "open" or number not in self._outcomes:
                self._outcomes[number] = ended

    def _remember(self, record: Record) -> None:
        step, loss = record["step"], record["loss"]
        while self._steps and self._steps[-1][0] >= step:  # rolled back: that branch is left
            self._steps.pop()
        self._steps.append((step, loss, record.get("tokens")))

    def _completed(self, record: Record) -> dict[str, Any]:
        """The record with the tokens of its step, and with the curve if a decision was taken by it."""
        done, step = dict(record), record.get("step")
        if record.get("event") == "skipped_update":  # there may be thousands of them
            done["num_samples"] = len(done.pop("samples", None) or ())  # metrics.jsonl has their ids
        if "tokens" not in record:
            known = next((tokens for at, _, tokens in reversed(self._steps) if at == step), None)
            done |= {} if known is None else {"tokens": known}
        if record.get("event") in ("rollback", "needs_operator") and isinstance(step, int):
            done["curve"] = self._curve(step, record.get("onset"))
        return done

    def _curve(self, step: int, onset: int | None) -> list[list[float]]:
        """[step, loss] from well before the onset to `step`; thinned evenly, the last one always there."""
        began = step if onset is None else onset
        first = began - max(_STEPS_BEFORE, step - began)
        points = [[at, loss] for at, loss, _ in self._steps if first <= at <= step]
        every = -(-len(points) // _MOST_POINTS) or 1
        return points[::-1][::every][::-1]

    def _make_page(self) -> None:
        self._tried_at = self._clock()  # first: a disk that refuses is not asked again with each step
        in_full = _select_incidents(self._outcomes)
        newest = [
            record
            if record.get("incident") in in_full
            else {name: value for name, value in record.items() if name not in _BULKY}
            for record in islice(read_metrics_backwards(self._incidents), _MOST_RECORDS)
        ]
        write_atomic(self._page, render(newest, self._name, self._counts, self._outcomes))
        self._page_is_old = False


def _select_incidents(numbers: Iterable[int]) -> Sequence[int]:
    """The incidents that a page tells in full, the newest first."""
    return sorted(numbers, reverse=True)[:_IN_FULL]


def render(
    newest: Sequence[Record], run_name: str, counts: Mapping[str, int], outcomes: Mapping[int, str]
) -> str:
    """LOGBOOK.md from the newest records, the newest first; `counts` and `outcomes` are those of all."""
    incidents: dict[int, list[Record]] = {}
    for record in newest[::-1]:
        if isinstance(number := record.get("incident"), int):
            incidents.setdefault(number, []).append(record)
    in_full = _select_incidents(incidents)
    parts = list(_format_head(newest, run_name, counts, outcomes))
    for number in in_full:
        parts += [f"## Incident {number}", *_format_incident(incidents[number], outcomes[number])]
    if older := sorted(incidents.keys() - set(in_full), reverse=True):
        parts.append("## Older incidents")
        parts.append(_format_block(*(f"{n}: {_format_title(incidents[n])}; {outcomes[n]}" for n in older)))
    events = list(_format_events([record for record in newest[::-1] if "incident" not in record]))[::-1]
    if events:
        parts += ["## Events", _format_block(*events[:_MOST_EVENTS])]
    if len(newest) < sum(counts.values()) or len(events) > _MOST_EVENTS:
        parts.append("What is older is in incidents.jsonl.")
    return "\n\n".join(parts) + "\n"


def _format_head(
    newest: Sequence[Record], run_name: str, counts: Mapping[str, int], outcomes: Mapping[int, str]
) -> Iterator[str]:
    yield f"# Logbook of {_format_line(run_name)}"
    yield (
        "Generated from incidents.jsonl and rewritten at each event: keep your own notes in another file. "
        "Newest first; times are UTC."
    )
    yield f"**Now: {_format_now(newest, outcomes)}**"
    num_open = sum(one == "open" for one in outcomes.values())
    num_starts = sum(counts.get(kind, 0) for kind in _STARTS)
    yield (
        f"{format_count_of(len(outcomes), 'incident')} ({num_open:,} open); "
        f"{format_count_of(num_starts, 'start')}; "
        f"{format_count_of(counts.get('skipped_update', 0), 'skipped update')}, "
        f"{format_count_of(counts.get('save_failed', 0), 'failed save')}."
    )
    last = _find_last(newest, *_STARTS, "needs_operator")
    if last is not None and last["event"] == "needs_operator":
        yield _format_block(*str(last.get("diagnosis") or last.get("reason")).splitlines())


def _format_now(newest: Sequence[Record], outcomes: Mapping[int, str]) -> str:
    """Say where the run stood when the last record was written."""
    last = _find_last(newest, *_STARTS, *_ENDS)
    if last is None:
        return f"running, {_format_time(newest[0])}." if newest else "nothing has happened yet."
    if last["event"] == "needs_operator":
        return f"OPERATOR ACTION REQUIRED ({_format_place(last)}); restarting alone does not help. Diagnosis:"
    if last["event"] in _ENDS:
        return f"{'finished' if last['event'] == 'finish' else 'stopped on request'} ({_format_place(last)})."
    if outcomes and outcomes[max(outcomes)] == "open":
        return f"recovering from incident {max(outcomes)}."
    saved = _find_last(newest, "save_failed", "checkpoint", *_STARTS) or last
    if saved["event"] == "save_failed":
        return f"SAVES FAIL ({_format_place(saved)}): {_format_line(saved.get('problem'))}"
    said = _find_last(newest, "watchdog", "outcome", *_STARTS) or last
    if said["event"] == "watchdog" and said.get("action") != "ok":
        return (
            f"no rollback open; last watchdog verdict ({_format_time(said)}): "
            f"{_format_line(said.get('message'))}"
        )
    return (
        f"healthy since "
        f"{_format_time(_find_last(newest, 'watchdog', 'skipped_update', 'outcome', *_STARTS) or last)}."
    )


def _format_events(oldest_first: Sequence[Record]) -> Iterator[str]:
    """A line for each, in their order; skipped updates, and verdicts of one kind, in a row are one line."""
    start: Record | None = None
    has_ended = True  # the start before had a last word
    for _, group in groupby(enumerate(oldest_first), key=_group_key):
        records = [record for _, record in group]
        last, note = records[-1], ""
        kind = last.get("event")
        if kind in _STARTS:
            was, now = (start or {}).get("world_size"), last.get("world_size")
            note = f" (before: {was:,})" if was and was != now else ""
            note += "" if has_ended else "; the start before left no word of its end: killed, or failed"
            start = last
        has_ended = kind in _ENDS or (has_ended and kind not in _STARTS)
        since = f"{len(records):,} times since step {records[0].get('step'):,}, " if len(records) > 1 else ""
        yield f"{_format_place(last)}: {since}{_describe_event(last)}{note}"


def _group_key(numbered: tuple[int, Record]) -> tuple[Any, ...]:
    """Return the fields that consecutive records must share to become one line; None for others."""
    index, record = numbered
    small = record.get("event") in ("skipped_update", "watchdog")
    shared = (record.get(name) for name in ("event", "cause", "trouble", "action"))
    return tuple(shared) if small else (index,)


def _describe_event(record: Record) -> str:
    """An event that belongs to no incident, without its time and place."""
    kind = record.get("event")
    if kind in _STARTS:
        size, begun = record.get("world_size"), record.get("checkpoint")
        ranks = "" if size is None else f", {format_count_of(size, 'rank')}"
        return f"{kind}{ranks}{'' if begun is None else f', from {_format_line(begun)}'}"
    if kind in _WORDS:
        return _WORDS[kind]
    if kind == "skipped_update":
        return f"update skipped for {_format_plain(record.get('cause'))}"
    if kind == "save_failed":
        return (
            f"SAVE FAILED, number {record.get('num_consecutive')} in a row: "
            f"{_format_line(record.get('problem'))}"
        )
    if kind == "config_changed":
        old, new = _format_line(record.get("old")), _format_line(record.get("new"))
        return f"{_format_line(record.get('field'))} changed: {old} before, {new} from this start on"
    if kind == "watchdog":
        action = {"ok": "healed", "watch": "watched"}.get(record["action"], "to roll back for")
        return f"{_format_plain(record.get('trouble'))}, {action}: {_format_line(record.get('message'))}"
    return f"{_format_line(kind)}: {_format_line(record.get('message'))}"


def _describe_outcome(record: Record) -> str:
    """Say how an incident ended, as far as this record knows."""
    if record.get("event") == "needs_operator":
        return "operator action required"
    return _format_plain(record.get("outcome")) if record.get("event") == "outcome" else "open"


def _format_title(records: Sequence[Record]) -> str:
    """When an incident was decided upon, its trouble, and what was done."""
    first = records[0]
    since = "" if first.get("onset") is None else f" since step {first['onset']:,}"
    trouble = _format_plain(first["trouble"]) if first.get("trouble") else "unrecorded trouble"
    done = f"; {first['response']}" if "response" in first else ""
    return f"{_format_place(first)}: {trouble}{since}{done}"


def _format_incident(records: Sequence[Record], outcome: str) -> Iterator[str]:
    """The paragraphs of an incident, in the order in which things happened."""
    yield f"{_format_title(records)}. Outcome: **{outcome}**."
    for record in records:
        kind = record.get("event")
        if kind in ("rollback", "needs_operator"):
            yield from _format_decision(record)
        elif kind == "high_loss_samples":
            yield from _format_high_loss_samples(record)
        elif kind == "replay_compared":
            yield _format_comparison(record)
        elif kind == "outcome":
            yield (
                f"Ended ({_format_place(record)}): {_describe_outcome(record)}: "
                f"{_format_line(record.get('message'))}."
            )


def _format_decision(record: Record) -> Iterator[str]:
    """Format an incident's evidence, its decision, and the data that is skipped."""
    yield f"Seen: {_format_line(record.get('message'))}."
    if plot := _draw_curve(record):
        yield _format_block(*plot.splitlines())
    if worst := describe_worst_rank(record):
        yield worst
    to_step = f"step {record['to_step']:,}" if record.get("to_step") is not None else "no checkpoint"
    if record.get("event") == "needs_operator":
        yield (
            f"Decided: **operator action required**: {_format_line(record.get('reason'))}; the next start "
            f"resumes from {to_step}."
        )
        yield _format_block(*str(record.get("diagnosis")).splitlines())
        return
    yield f"Decided: **{record.get('response')}**, back to {to_step}: {_format_line(record.get('reason'))}."
    yield _format_skipped(record.get("skipped"))


def _format_skipped(skipped: Record | None) -> str:
    if not skipped:
        return "Skipped: no data."
    sources = skipped.get("samples", {})
    named = ", ".join(
        f"{sum(map(len, ids.values())):,} of {_format_line(name)}" for name, ids in sources.items()
    )
    return (
        f"Skipped: {format_count_of(skipped['num_samples'], 'sample')} ({named}) of phase "
        f"{_format_line(skipped['phase'])}, draws {skipped['start']:,} to {skipped['stop'] - 1:,}. The exact "
        "ids are in incidents.jsonl; `ds-pretrain audit RUN --skipped` lists them."
    )


def _format_high_loss_samples(record: Record) -> Iterator[str]:
    samples = record.get("samples") or []
    yield (
        f"High-loss samples: {format_count_of(len(samples), 'sample')} of the offending batches with the "
        f"highest loss under the restored weights."
    )
    lines = [
        f"loss {one['loss']:.4g}  {_format_line(one['source'])}, documents {_format_line(one['documents'])}, "
        f"sample {one['sample']:,} (epoch {one['epoch']}), step {one['step']:,}  "
        f"{_format_line(one['text'], 120)}"
        for one in samples[:_MOST_SAMPLES]
    ]
    if samples:
        yield _format_block(*lines)


def _format_comparison(record: Record) -> str:
    said = (
        f"Replayed ({_format_time(record)}): **{_format_plain(record.get('finding'))}**: "
        f"{_format_line(record.get('message'))}."
    )
    if (first := record.get("first_difference")) is not None:
        said += f" First difference at step {first:,}."
    for name in ("ranks", "hosts"):
        if found := record.get(name):
            said += f" {name.title()}: {_format_line(found)}."
    return said


def _draw_curve(record: Record) -> str | None:
    """The record's `curve` as a small picture; None if it has none."""
    onset, decided = record.get("onset"), record.get("step")
    points = [(int(step), float(loss)) for step, loss in record.get("curve") or ()]
    if not points:
        return None

    def mark(step: int, loss: float) -> str:
        if step == decided:
            return "X"
        if not math.isfinite(loss):
            return "N"
        return "!" if onset is not None and step >= onset else " "

    marks = [mark(*point) for point in points]
    legend = {mark: meaning for mark, meaning in _LEGEND.items() if mark in marks}
    return draw_loss_plot(points, marks, legend, _WIDTH, _HEIGHT)


def describe_worst_rank(record: Record) -> str | None:
    """Name the rank and host whose loss stood out most at the onset; None for one rank or if unknown.

    That is the first rank without a finite loss, else the one furthest above the median of the others. Of
    ranks that share sequences, which have one loss, it is their group.
    """
    shared, onset = record.get("sequence_parallel_size", 1), record.get("onset") or 0
    by_step = {int(step): losses[::shared] for step, losses in (record.get("rank_losses") or {}).items()}
    worst: tuple[float, int, int] | None = None  # (gap, step, reader)
    for step, losses in sorted(by_step.items()):
        if len(losses) < 2 or step < onset:
            continue
        heights = [loss if math.isfinite(loss) else math.inf for loss in losses]
        reader = heights.index(max(heights))
        gap = math.inf
        if math.isfinite(heights[reader]):
            gap = heights[reader] - median(heights[:reader] + heights[reader + 1 :])
        if worst is None or gap > worst[0]:
            worst = gap, step, reader
    if worst is None:
        return None
    gap, step, reader = worst
    losses = by_step[step]
    ranks = "ranks" if shared == 1 else f"groups of {shared} ranks"
    if math.isfinite(gap) and gap <= _ALIKE * abs(losses[reader]):
        return f"The {len(losses):,} {ranks} had about the same loss at step {step:,}: {median(losses):.4g}."
    first = reader * shared
    who = f"rank {first}" if shared == 1 else f"the group of ranks {first} to {first + shared - 1}"
    hosts = (record.get("hosts") or [])[first : first + shared]
    others = [loss for at, loss in enumerate(losses) if at != reader and math.isfinite(loss)]
    usual = f"the median of the others was {median(others):.4g}" if others else "no other is finite"
    return (
        f"At step {step:,} {who}{f' on {_format_line(hosts)}' if hosts else ''} stood out most of "
        f"{len(losses):,} {ranks}, with a loss of {losses[reader]:.4g}; {usual}."
    )


def _find_last(newest: Sequence[Record], *kinds: str) -> Record | None:
    return next((record for record in newest if record.get("event") in kinds), None)


def _format_plain(value: Any) -> str:
    return _PLAIN.get(value, _format_line(value)) if isinstance(value, str) else "cause not recorded"


def _format_line(value: Any, longest: int = 300) -> str:
    """`value` as printable characters in one line, without a full stop, cut after `longest`."""
    text = format_plain(value)
    line = " ".join("".join(c if c.isprintable() else " " for c in text[:longest]).split())
    return line.removesuffix(".") if len(text) <= longest else f"{line}..."


def _format_block(*lines: str) -> str:
    """Lines as a code block that nothing in them can end."""
    return "\n".join("    " + "".join(c if c.isprintable() else " " for c in line[:1000]) for line in lines)


def _format_time(record: Record) -> str:
    """The time of a record, UTC, to the second."""
    seconds = record.get("time")
    if seconds is None:
        return "time unknown"
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _format_place(record: Record) -> str:
    """Time, step, tokens and attempt of a record, as far as it knows them."""
    parts = [_format_time(record)]
    if (step := record.get("step")) is not None:
        parts.append(f"step {step:,}")
    if (tokens := record.get("tokens")) is not None:
        parts.append(f"{format_count(tokens)} tokens")
    if (attempt := record.get("attempt")) is not None:
        parts.append(f"attempt {attempt}")
    return ", ".join(parts)
