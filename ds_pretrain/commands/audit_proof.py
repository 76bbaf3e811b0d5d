"""What does not hold of a run's record, in words: steps, counters, draws, epochs and the data itself."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ds_pretrain.commands.audit_history import History
from ds_pretrain.commands.audit_run import Audited, changed_words
from ds_pretrain.config.timeline import Segment
from ds_pretrain.core.jsonl import METRICS
from ds_pretrain.core.state import SkipLedger
from ds_pretrain.data.loader import read_samples
from ds_pretrain.data.sampler import NO_SKIPS, SampleIds, checksums

Interval: TypeAlias = tuple[int, int]  # draws [start, stop) of a phase

_MOST_CHECKSUMS = 1000  # steps read again, unless all are asked for
MOST_NAMED = 10  # of steps, or of faults of one kind
_CHUNK = 1 << 16  # draws named at once
_ROWS = 64  # samples read at once


@dataclass(frozen=True)
class Read:
    """Draws that a stretch of steps read."""

    phase: str
    first_step: int
    last_step: int
    draws: tuple[Interval, ...]  # ascending
    ledger: SkipLedger = NO_SKIPS  # in force


@dataclass(frozen=True)
class Proof:
    """What was found out."""

    reads: tuple[Read, ...]
    num_checked: int  # steps that were read again
    every: bool  # each step was, and each sample counted
    problems: tuple[str, ...]  # in words; none: everything holds


def prove(run: Audited, history: History, every: bool) -> Proof:
    """What holds and what does not; `every` reads each step again, and counts each epoch's samples."""
    reads = tuple(_reads(run, history))
    problems = [*run.problems, *history.problems, *_record_problems(run, history)]
    problems += [*_draw_problems(run, reads), *_start_problems(run, reads)]
    if every:
        problems += _epoch_problems(run, reads)
    checked, wrong = _checksums(run, history, every)
    problems += wrong
    return Proof(reads, checked, every, tuple(problems))


def _record_problems(run: Audited, history: History) -> Iterator[str]:
    """Steps that are missing from the record, and counters that are not what the timeline says."""
    rows, timeline = history.rows, run.plan.timeline
    seen = np.flatnonzero(rows["seen"])
    counted = zip(
        *(column.tolist() for column in (seen, rows["tokens"][seen], rows["samples"][seen])), strict=True
    )
    wrong = [
        step
        for step, tokens, samples in counted
        if (tokens, samples) != (timeline.tokens_before(step), timeline.samples_before(step))
    ]
    for step in wrong[:MOST_NAMED]:
        yield (
            f"step {step:,} counts samples to {rows['samples'][step]:,} and tokens to "
            f"{rows['tokens'][step]:,}; expected {timeline.samples_before(step):,} and "
            f"{timeline.tokens_before(step):,}: a step before it was lost or taken twice, or the batch was "
            "changed"
        )
    if len(wrong) > MOST_NAMED:
        yield f"and {len(wrong) - MOST_NAMED:,} more steps count otherwise than the run file says"
    missing = history.first_step + 1 + np.flatnonzero(~rows["seen"][history.first_step + 1 :])
    if missing.size:
        yield (
            f"{steps_words(missing)} {'is' if missing.size == 1 else 'are'} not in {METRICS}: "
            + (
                "the counters of the steps around agree, so this is a hole in the record (monitoring was "
                "degraded, or a line was torn), not in the training"
                if not wrong
                else "the counters of other steps are wrong too, so whether they were trained cannot be told"
            )
        )
    if run.saved_step > history.newest:
        yield (
            f"{METRICS} ends with step {history.newest:,}, and a checkpoint of step {run.saved_step:,} is "
            "there: the end of the record is lost, and nothing says what the steps between read"
        )


def _reads(run: Audited, history: History) -> Iterator[Read]:
    """The draws of all steps up to the newest, stretch by stretch of one segment and one ledger.

    A step that is not in the record has the ledger of the next that is: a skip begins at the earliest with
    the draws of the first step after the checkpoint gone back to.
    """
    rows = history.rows
    seen = np.flatnonzero(rows["seen"])
    following = seen[np.minimum(np.searchsorted(seen, np.arange(1, history.newest + 1)), seen.size - 1)]
    num_skips = rows["num_skips"][following]  # [newest], of step 1 first
    edges = {0, history.newest, history.first_step, *(np.flatnonzero(np.diff(num_skips)) + 1).tolist()}
    edges |= {s.first_step for s in run.plan.timeline.segments if s.first_step < history.newest}
    for first, stop in pairwise(sorted(edges)):
        segment = run.plan.timeline.at(first)
        ledger = run.ledger_of(int(num_skips[first]))
        trained = segment.first_draw + (first - segment.first_step) * segment.sequences
        intervals = _intervals(ledger, segment, trained, (stop - first) * segment.sequences)
        yield Read(segment.phase, first + 1, stop, intervals, ledger)


def _intervals(ledger: SkipLedger, segment: Segment, first: int, count: int) -> tuple[Interval, ...]:
    """The draws of trained samples [first, first + count): what lies between the two ends, less the skips."""
    start = int(ledger.draws(segment.phase, first, 1)[0])
    stop = int(ledger.draws(segment.phase, first + count - 1, 1)[0]) + 1
    found = []
    for skip_start, skip_stop in ledger.merged(segment.phase):
        if start < skip_stop and skip_start < stop:
            found.append((start, skip_start))
            start = skip_stop
    found.append((start, stop))
    assert sum(b - a for a, b in found) == count
    return tuple(found)


def _draw_problems(run: Audited, reads: Sequence[Read]) -> Iterator[str]:
    """Where what was trained and what was skipped are not disjoint, or leave out a draw between them."""
    for phase in dict.fromkeys(read.phase for read in reads):
        mine = [read for read in reads if read.phase == phase]
        end = max(read.draws[-1][1] for read in mine)
        pieces = [(*draws, f"steps {r.first_step:,} to {r.last_step:,}") for r in mine for draws in r.draws]
        pieces += [
            (start, min(stop, end), "the skip ledger")
            for start, stop in run.ledger.merged(phase)
            if start < end
        ]
        position, before = 0, "the beginning"
        for start, stop, who in sorted(pieces):
            if start > position:
                yield (
                    f"{phase} draws [{position}, {start}) are in no step and in no skip, between {before} "
                    f"and {who}; expected every draw in one of them: those samples were lost"
                )
            elif start < position:
                twice = f"{phase} draws [{start}, {min(position, stop)}) are of {before} and of {who} too"
                meaning = (
                    "they were trained although the ledger skips them"
                    if "the skip ledger" in (before, who)
                    else "they were trained twice"
                )
                yield f"{twice}; expected every draw in one of them: {meaning}"
            if stop > position:
                position, before = stop, who


def _start_problems(run: Audited, reads: Sequence[Read]) -> Iterator[str]:
    """Stretches whose phase began elsewhere in the data: a skip in an earlier phase was decided later."""
    for read in reads:
        starts = run.sampler.starts(read.phase, run.ledger)
        moved = [
            name for name, at in run.sampler.starts(read.phase, read.ledger).items() if at != starts[name]
        ]
        if moved:
            yield (
                f"steps {read.first_step:,} to {read.last_step:,} of phase {read.phase} were trained before "
                f"the ledger skipped more of an earlier phase; expected none after it: of {', '.join(moved)} "
                "they read other samples than those that follow on the earlier phase"
            )


def _epoch_problems(run: Audited, reads: Sequence[Read]) -> Iterator[str]:
    """Tokens that were trained more than once in an epoch, counted one by one.

    An epoch of a source goes on from phase to phase, whatever their sequence lengths.
    """
    lengths = {s.phase: s.seq_len for s in run.plan.timeline.segments}
    unit = gcd(*lengths.values())  # tokens; each sample is whole ones
    counts: dict[tuple[str, int], NDArray[np.uint8]] = {}
    repeated: dict[tuple[str, int], int] = {}
    for read in reads:
        for start, stop in read.draws:
            for first in range(start, stop, _CHUNK):
                draws = np.arange(first, min(first + _CHUNK, stop), dtype=np.uint64)
                ids = run.sampler.at_draws(read.phase, lengths[read.phase], draws, 0, read.ledger)
                _count(run, ids, unit, counts, repeated)
    for (source, epoch), times in sorted(repeated.items()):
        yield (
            f"{times * unit:,} tokens of {source} were trained again within its epoch {epoch}; expected each "
            "at most once"
        )


def _count(
    run: Audited,
    ids: SampleIds,
    unit: int,
    counts: dict[tuple[str, int], NDArray[np.uint8]],
    repeated: dict[tuple[str, int], int],
) -> None:
    """Count samples, in stretches of `unit` tokens. An epoch is forgotten two epochs later."""
    pieces = np.arange(ids.seq_len // unit)
    for index in np.unique(ids.source).tolist():
        name, mine = ids.names[index], ids.source == index
        for epoch in np.unique(ids.epoch[mine]).tolist():
            samples = ids.sample[mine & (ids.epoch == epoch)]
            places = (samples[:, None] * len(pieces) + pieces).reshape(-1)
            size = run.sources[name].num_samples(unit)
            times = counts.setdefault((name, epoch), np.zeros(size, np.uint8))
            again = places.size - np.unique(places[times[places] == 0]).size
            times[places] = 1
            if again:
                repeated[name, epoch] = repeated.get((name, epoch), 0) + again
            counts.pop((name, epoch - 2), None)


def _checksums(run: Audited, history: History, every: bool) -> tuple[int, list[str]]:
    """How many steps were read again, and those that did not read what was recorded."""
    rows = history.rows
    chosen = np.flatnonzero(rows["seen"])
    if not every:
        chosen = _spread(rows, chosen)
    wrong = []
    for step in chosen.tolist():
        read = batch_checksum(run, run.sampler.ids(step - 1, run.ledger_of(int(rows["num_skips"][step]))))
        if read != rows["checksum"][step]:
            wrong.append((step, read))
    why = changed_words(run)
    problems = [
        f"step {step:,}: its samples have the checksum {read} now, and {rows['checksum'][step]} was recorded "
        "as it was trained: the data was changed since, or it read other samples than the ledger says"
        f"{why and f' ({why})'}"
        for step, read in wrong[:MOST_NAMED]
    ]
    if len(wrong) > MOST_NAMED:
        problems.append(f"and {len(wrong) - MOST_NAMED:,} more steps whose samples have other checksums")
    return len(chosen), problems


def _spread(rows: NDArray[np.void], steps: NDArray[np.int64]) -> NDArray[np.int64]:
    """Steps all over the run, and those that follow a start or a rollback."""
    if steps.size <= _MOST_CHECKSUMS:
        return steps
    changed = np.diff(rows["attempt"][steps]) | np.diff(rows["num_rollbacks"][steps])
    edges = steps[1:][changed != 0][-_MOST_CHECKSUMS // 2 :]
    even = np.linspace(0, steps.size - 1, _MOST_CHECKSUMS - edges.size).astype(np.int64)
    return np.unique(np.concatenate([edges, steps[even]]))


def batch_checksum(run: Audited, ids: SampleIds) -> int:
    """The CRC-32 sum of a batch's samples, read again."""
    total = 0
    for first in range(0, len(ids.sample), _ROWS):
        stop = min(first + _ROWS, len(ids.sample))
        total += sum(checksums(read_samples(ids, run.sources, first, stop)))
    return total


def steps_words(steps: NDArray[np.int64]) -> str:
    """Ascending steps in words: "steps 3, 5 to 7"."""
    groups = np.split(steps, np.flatnonzero(np.diff(steps) > 1) + 1)
    words = [f"{g[0]:,}" if g.size == 1 else f"{g[0]:,} to {g[-1]:,}" for g in groups[:MOST_NAMED]]
    more = f", ... ({steps.size:,} in all)" if len(groups) > MOST_NAMED else ""
    return f"{'step' if steps.size == 1 else 'steps'} {', '.join(words)}{more}"
