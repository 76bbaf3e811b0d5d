"""`ds-pretrain audit RUN`: proves which samples a run was trained on, and shows what a step read.

Everything is computed again from the run file, the ledger and the data, and held against what the run wrote
down as it trained. Nothing is changed, anywhere.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ds_pretrain.commands.audit_history import (
    Audited,
    History,
    Span,
    Taken,
    describe_changes,
    open_audited,
    read_history,
    skip_words,
)
from ds_pretrain.config.timeline import Segment, Timeline
from ds_pretrain.core.errors import EXIT_FAILED, EXIT_FINISHED, InputError
from ds_pretrain.core.jsonl import METRICS
from ds_pretrain.core.state import Skip, SkipLedger
from ds_pretrain.core.text import format_count_of, join_listed, say
from ds_pretrain.data.inspect import read_passages
from ds_pretrain.data.loader import read_samples
from ds_pretrain.data.sampler import NO_SKIPS, SampleIds, compute_checksums

Interval: TypeAlias = tuple[int, int]  # draws [start, stop) of a phase

_MOST_CHECKSUMS = 1000  # steps read again, unless all are asked for
_MOST_NAMED = 10  # of steps, of attempts, of rollbacks, or of faults of one kind
_CHUNK = 1 << 16  # draws named at once
_ROWS = 64  # samples read at once
_SHORT = 200  # characters of a sample, unless one rank's are asked for


def execute(words: Any) -> int:
    """Prove the run, show a step, or list what was skipped; 1 if something does not hold."""
    _refuse_contradictions(words)
    with open_audited(Path(words.run), words.overrides) as run:
        code = EXIT_FINISHED
        if words.step is not None:
            lines = show_step(run, words.step, words.rank, words.attempt)
        elif words.skipped:
            lines = list_skipped_samples(run)
        else:
            history = read_history(run)
            proof = prove(run, history, words.all)
            lines = format_report(run, history, proof)
            code = EXIT_FAILED if proof.problems else EXIT_FINISHED
        for line in lines:
            if not say(sys.stdout, line):
                break  # nobody reads any more
        return code


def _refuse_contradictions(words: Any) -> None:
    alone = [name for name in ("rank", "attempt") if getattr(words, name) is not None and words.step is None]
    problems = [f"--{name} belongs to --step; name the step too" for name in alone]
    if words.skipped and words.step is not None:
        problems.append("give either --skipped or --step")
    if words.all and (words.skipped or words.step is not None):
        problems.append("--all audits the whole run and cannot be combined with --skipped or --step")
    if problems:
        raise InputError(problems)


@dataclass(frozen=True)
class Read:
    """Draws that an interval of steps read."""

    phase: str
    first_step: int
    last_step: int
    draws: tuple[Interval, ...]  # ascending
    ledger: SkipLedger = NO_SKIPS  # in force


@dataclass(frozen=True)
class Proof:
    """The findings of an audit."""

    reads: tuple[Read, ...]
    num_checked: int  # steps that were read again
    every: bool  # each step was, and each sample counted
    problems: tuple[str, ...]  # in words; none: everything holds


def prove(run: Audited, history: History, every: bool) -> Proof:
    """Check the run's data; `every` re-reads each step and counts each epoch's samples."""
    reads = tuple(_list_reads(run, history))
    problems = [*run.problems, *history.problems, *_find_record_problems(run, history)]
    problems += [*_draw_problems(run, reads), *_start_problems(run, reads)]
    if every:
        problems += _find_epoch_problems(run, reads)
    checked, wrong = _check_checksums(run, history, every)
    problems += wrong
    return Proof(reads, checked, every, tuple(problems))


def _find_record_problems(run: Audited, history: History) -> Iterator[str]:
    """Steps that are missing from the record, and counters that are not what the timeline says."""
    rows, timeline = history.rows, run.plan.timeline
    seen = np.flatnonzero(rows["seen"])
    counters = zip(*(c.tolist() for c in (seen, rows["samples"][seen], rows["tokens"][seen])), strict=True)
    wrong = [
        (step, samples, tokens)
        for step, samples, tokens in counters
        if (samples, tokens) != (timeline.samples_before(step), timeline.tokens_before(step))
    ]
    for step, samples, tokens in wrong[:_MOST_NAMED]:
        yield (
            f"step {step:,} counts samples to {samples:,} and tokens to {tokens:,}; expected "
            f"{timeline.samples_before(step):,} and {timeline.tokens_before(step):,}: a step before it was "
            "lost or taken twice, or the batch was changed"
        )
    if len(wrong) > _MOST_NAMED:
        yield f"and {len(wrong) - _MOST_NAMED:,} more steps count otherwise than the run file says"
    missing = history.first_step + 1 + np.flatnonzero(~rows["seen"][history.first_step + 1 :])
    if missing.size:
        meaning = (
            "the counters of other steps are wrong too, so it is unknown whether they were trained"
            if wrong
            else "the counters of the steps around agree, so this is a hole in the record (monitoring was "
            "degraded, or a line was torn), not in the training"
        )
        yield f"{format_steps(missing)} {'is' if missing.size == 1 else 'are'} not in {METRICS}: {meaning}"
    if run.saved_step > history.newest:
        yield (
            f"{METRICS} ends with step {history.newest:,}, and a checkpoint of step {run.saved_step:,} is "
            "there: the end of the record is lost, and nothing says what the steps between read"
        )


def _list_reads(run: Audited, history: History) -> Iterator[Read]:
    """The draws of all steps up to the newest, interval by interval of one segment and one ledger.

    A step that is not in the record has the ledger of the next that is: a skip begins at the earliest with
    the draws of the first step after the restored checkpoint.
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
        intervals = _find_draw_intervals(ledger, segment, trained, (stop - first) * segment.sequences)
        yield Read(segment.phase, first + 1, stop, intervals, ledger)


def _find_draw_intervals(
    ledger: SkipLedger, segment: Segment, first: int, count: int
) -> tuple[Interval, ...]:
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
    """Find draws that were both trained and skipped, or neither."""
    ledger = "the skip ledger"
    for phase in dict.fromkeys(read.phase for read in reads):
        mine = [read for read in reads if read.phase == phase]
        end = max(read.draws[-1][1] for read in mine)
        pieces = [(*draws, f"steps {r.first_step:,} to {r.last_step:,}") for r in mine for draws in r.draws]
        pieces += [(start, min(stop, end), ledger) for start, stop in run.ledger.merged(phase) if start < end]
        position, before = 0, "the beginning"
        for start, stop, who in sorted(pieces):
            if start > position:
                yield (
                    f"{phase} draws [{position}, {start}) are in no step and in no skip, between {before} "
                    f"and {who}; expected every draw in one of them: those samples were lost"
                )
            elif start < position:
                skipped = ledger in (before, who)
                yield (
                    f"{phase} draws [{start}, {min(position, stop)}) are of {before} and of {who} too; "
                    "expected every draw in one of them: they were trained "
                    f"{'although the ledger skips them' if skipped else 'twice'}"
                )
            if stop > position:
                position, before = stop, who


def _start_problems(run: Audited, reads: Sequence[Read]) -> Iterator[str]:
    """Intervals whose phase began elsewhere in the data: a skip in an earlier phase was decided later."""
    for read in reads:
        starts, then = (run.sampler.starts(read.phase, ledger) for ledger in (run.ledger, read.ledger))
        if moved := [name for name in then if then[name] != starts[name]]:
            yield (
                f"steps {read.first_step:,} to {read.last_step:,} of phase {read.phase} were trained before "
                f"the ledger skipped more of an earlier phase; expected none after it: of {', '.join(moved)} "
                "they read other samples than those that follow on the earlier phase"
            )


def _find_epoch_problems(run: Audited, reads: Sequence[Read]) -> Iterator[str]:
    """Tokens that were trained more than once in an epoch, counted one by one.

    An epoch of a source continues from phase to phase, whatever their sequence lengths.
    """
    lengths = {s.phase: s.seq_len for s in run.plan.timeline.segments}
    unit = gcd(*lengths.values())  # tokens; each sample is whole ones
    seen: dict[tuple[str, int], NDArray[np.bool_]] = {}  # of the units of a source, by epoch
    repeated: Counter[tuple[str, int]] = Counter()
    for read in reads:
        for draws in (chunk for interval in read.draws for chunk in _chunk_draws(*interval)):
            ids = run.sampler.at_draws(read.phase, lengths[read.phase], draws, 0, read.ledger)
            pieces = np.arange(ids.seq_len // unit)
            for index, epoch in sorted({*zip(ids.source.tolist(), ids.epoch.tolist(), strict=True)}):
                name = ids.names[index]
                samples = ids.sample[(ids.source == index) & (ids.epoch == epoch)]
                places = (samples[:, None] * len(pieces) + pieces).reshape(-1)
                times = seen.setdefault((name, epoch), np.zeros(run.sources[name].num_samples(unit), bool))
                repeated[name, epoch] += places.size - np.unique(places[~times[places]]).size
                times[places] = True
                seen.pop((name, epoch - 2), None)
    for (source, epoch), times_again in sorted(repeated.items()):
        if times_again:
            yield (
                f"{times_again * unit:,} tokens of {source} were trained again within its epoch {epoch}; "
                "expected each at most once"
            )


def _chunk_draws(start: int, stop: int) -> Iterator[NDArray[np.uint64]]:
    """The draws of an interval, so many at once as fit into memory."""
    for first in range(start, stop, _CHUNK):
        yield np.arange(first, min(first + _CHUNK, stop), dtype=np.uint64)


def _check_checksums(run: Audited, history: History, every: bool) -> tuple[int, list[str]]:
    """Re-read steps; return how many, and those whose checksum differs from the record."""
    rows = history.rows
    chosen = np.flatnonzero(rows["seen"])
    if not every:
        chosen = _spread(rows, chosen)
    wrong = []
    for step in chosen.tolist():
        read = compute_batch_checksum(
            run, run.sampler.ids(step - 1, run.ledger_of(int(rows["num_skips"][step])))
        )
        if read != rows["checksum"][step]:
            wrong.append((step, read))
    why = describe_changes(run)
    problems = [
        f"step {step:,}: its samples have the checksum {read} now, and {rows['checksum'][step]} was recorded "
        "as it was trained: the data was changed since, or it read other samples than the ledger says"
        f"{why and f' ({why})'}"
        for step, read in wrong[:_MOST_NAMED]
    ]
    if len(wrong) > _MOST_NAMED:
        problems.append(f"and {len(wrong) - _MOST_NAMED:,} more steps whose samples have other checksums")
    return len(chosen), problems


def _spread(rows: NDArray[np.void], steps: NDArray[np.int64]) -> NDArray[np.int64]:
    """Steps all over the run, and those that follow a start or a rollback."""
    if steps.size <= _MOST_CHECKSUMS:
        return steps
    changed = np.diff(rows["attempt"][steps]) | np.diff(rows["num_rollbacks"][steps])
    edges = steps[1:][changed != 0][-_MOST_CHECKSUMS // 2 :]
    even = np.linspace(0, steps.size - 1, _MOST_CHECKSUMS - edges.size).astype(np.int64)
    return np.unique(np.concatenate([edges, steps[even]]))


def compute_batch_checksum(run: Audited, ids: SampleIds) -> int:
    """The CRC-32 sum of a batch's samples, read again."""
    total = 0
    for first in range(0, len(ids.sample), _ROWS):
        stop = min(first + _ROWS, len(ids.sample))
        total += sum(compute_checksums(read_samples(ids, run.sources, first, stop)))
    return total


def format_steps(steps: NDArray[np.int64]) -> str:
    """Ascending steps in words: "steps 3, 5 to 7"."""
    groups = np.split(steps, np.flatnonzero(np.diff(steps) > 1) + 1)
    words = [f"{g[0]:,}" if g.size == 1 else f"{g[0]:,} to {g[-1]:,}" for g in groups[:_MOST_NAMED]]
    more = f", ... ({steps.size:,} in all)" if len(groups) > _MOST_NAMED else ""
    return f"{'step' if steps.size == 1 else 'steps'} {', '.join(words)}{more}"


def format_report(run: Audited, history: History, proof: Proof) -> Iterator[str]:
    """The facts, a line each with its word first, then the problems, then the verdict."""
    timeline, start, newest = run.plan.timeline, history.first_step, history.newest
    once = " by the counters" if proof.problems else ", each exactly once"
    samples = timeline.samples_before(newest) - timeline.samples_before(start)
    tokens = timeline.tokens_before(newest) - timeline.tokens_before(start)
    yield f"run        {run.plan.run.name}: step {newest:,} of {run.plan.last_step:,}"
    if start:
        yield f"origin     {run.record.origin}: steps 1 to {start:,} are of that run; audit it for them"
    yield f"steps      {newest - start:,} trained{once}: {start + 1:,} to {newest:,}"
    yield f"samples    {samples:,} trained{once}"
    yield f"tokens     {tokens:,} trained{once}"
    recorded = int(np.count_nonzero(history.rows["seen"]))
    yield f"checksums  {proof.num_checked:,} of {format_count_of(recorded, 'step')} read again from the data"
    if not proof.problems:
        how = "an epoch is a permutation, and no draw came twice"
        if len({read.phase for read in proof.reads}) > 1:
            how += "; a phase reads on where the one before left each source"
        yield f"epochs     no sample came twice within one: {'counted one by one' if proof.every else how}"
    yield from _describe_untrained(run, history, proof)
    own = [r.response for r in run.rollbacks[run.record.num_inherited :] if r.response != "stop"]
    what = (
        f" ({', '.join(own[:_MOST_NAMED])}), which {_describe_work(run, history.rolled_back)}" if own else ""
    )
    yield f"rollbacks  {len(own)}{what}"
    restarts = len(history.worlds) - 1
    yield f"restarts   {restarts}{f', which {_describe_work(run, history.restarted)}' if restarts else ''}"
    starts = [f"number {n} on {_format_ranks(size)}" for n, size in history.worlds.items()]
    yield f"attempts   {len(starts)}: {join_listed(starts, _MOST_NAMED)}"
    yield from (f"problem    {problem}" for problem in proof.problems)
    count = len(proof.problems)
    yield f"not ok     {run.out}: {format_count_of(count, 'problem')}" if count else f"ok         {run.out}"


def _describe_untrained(run: Audited, history: History, proof: Proof) -> Iterator[str]:
    ends = {read.phase: read.draws[-1][1] for read in proof.reads}
    for number, skip in enumerate(run.ledger.skips, 1):
        ahead = "" if skip.stop <= ends.get(skip.phase, 0) else "; the run has not come past it yet"
        first, last = find_steps_of_skip(skip, run.ledger_of(number - 1), run.plan.timeline)
        yield (
            f"skip {number:<6}{skip_words(skip)}, {format_count_of(skip.stop - skip.start, 'sample')}, which "
            f"steps {first:,} to {last:,} would have read: {skip.cause}, decided at step {skip.step:,} of "
            f"attempt {skip.attempt}{ahead}"
        )
    phases = dict.fromkeys(skip.phase for skip in run.ledger.skips)
    skipped = sum(stop - start for phase in phases for start, stop in run.ledger.merged(phase))
    dropped = np.flatnonzero(history.rows["seen"] & ~history.rows["applied"])
    unlearned = sum(run.plan.timeline.at(step - 1).sequences for step in dropped.tolist())
    if dropped.size:
        yield (
            f"skipped    updates of {format_steps(dropped)}: {format_count_of(unlearned, 'sample')} read, "
            f"updates not applied"
        )
    yield (
        f"untrained  {format_count_of(skipped + unlearned, 'sample')}: {skipped:,} skipped, {unlearned:,} "
        f"in skipped updates"
    )


def _describe_work(run: Audited, spans: Sequence[Span]) -> str:
    before = run.plan.timeline.tokens_before
    steps, tokens = sum(b - a for a, b in spans), sum(before(b) - before(a) for a, b in spans)
    if not steps:
        return "took nothing back"
    # If the run file was changed, they may have had other batches than the plan has now.
    return f"took back {format_count_of(steps, 'step')}" + (
        "" if describe_changes(run) else f" ({tokens:,} tokens)"
    )


def _format_ranks(world_size: int | None) -> str:
    return "an unknown number of ranks" if world_size is None else format_count_of(world_size, "rank")


def find_steps_of_skip(skip: Skip, before: SkipLedger, timeline: Timeline) -> tuple[int, int]:
    """The first and the last step that would have read a skip's draws under the ledger before it."""
    ends = []
    for draw in (skip.start, skip.stop - 1):
        merged = before.merged(skip.phase)
        trained = draw - sum(min(stop, draw) - start for start, stop in merged if start < draw)
        segments = [s for s in timeline.segments if s.phase == skip.phase]
        segment = [s for s in segments if s.first_draw <= trained][-1]
        ends.append(segment.first_step + (trained - segment.first_draw) // segment.sequences + 1)
    return ends[0], ends[1]


def list_skipped_samples(run: Audited) -> Iterator[str]:
    """A line of tab-separated words for every sample that the ledger skips; overlaps are listed once."""
    yield "skip\tphase\tdraw\tsource\tepoch\tsample"
    for number, skip in enumerate(run.ledger.skips, 1):
        before = run.ledger_of(number - 1).merged(skip.phase)
        seq_len = run.plan.timeline.seq_len_of(skip.phase)
        for draws in _chunk_draws(skip.start, skip.stop):
            for first, stop in before:
                draws = draws[(draws < first) | (draws >= stop)]
            ids = run.sampler.at_draws(skip.phase, seq_len, draws, skip.step, run.ledger)
            for draw, (source, epoch, sample) in zip(draws.tolist(), ids.to_list(), strict=True):
                yield f"{number}\t{skip.phase}\t{draw}\t{source}\t{epoch}\t{sample}"


def show_step(run: Audited, step: int, rank: int | None, attempt: int | None) -> Iterator[str]:
    """List the samples of a step, as read in `attempt` or the last time.

    Raises:
        InputError: the step is not recorded, not in that attempt, or had no such rank.
    """
    history = read_history(run, step)
    every = history.taken
    if not every:
        raise InputError(
            f"step {step:,} is not in {run.out / METRICS}, whose newest is step {history.newest:,} "
            f"of {run.plan.last_step:,}; name one that was recorded"
        )
    chosen = [taken for taken in every if attempt in (None, taken.attempt)]
    if not chosen:
        attempts = ", ".join(str(number) for number in sorted({taken.attempt for taken in every}))
        raise InputError(f"attempt {attempt} did not take step {step:,}; those that did: {attempts}")
    taken = chosen[-1]
    size = taken.world_size
    if rank is not None and size is None:
        raise InputError(
            f"--rank {rank}: the record of how attempt {taken.attempt} began is lost, and with it the "
            f"number of ranks; omit --rank"
        )
    if rank is not None and not 0 <= rank < (size or 0):
        raise InputError(
            f"--rank {rank}: step {step:,} of attempt {taken.attempt} was taken on {_format_ranks(size)}; "
            f"expected 0 to {(size or 0) - 1}"
        )
    return _format_step(run, step, taken, [other for other in every if other is not taken], rank)


def _format_step(
    run: Audited, step: int, taken: Taken, others: Sequence[Taken], rank: int | None
) -> Iterator[str]:
    ids = run.sampler.ids(step - 1, run.ledger_of(taken.num_skips))
    num_samples = len(ids.sample)
    yield (
        f"step       {step:,} of attempt {taken.attempt}: {format_count_of(num_samples, 'sample')} on "
        f"{_format_ranks(taken.world_size)}, {format_count_of(taken.num_skips, 'skip')} in force"
    )
    for other in others:
        yield (
            f"also       taken in attempt {other.attempt} on {_format_ranks(other.world_size)}, "
            f"{format_count_of(other.num_skips, 'skip')} in force, "
            f"{'the same' if other.checksum == taken.checksum else 'other'} samples"
        )
    read = compute_batch_checksum(run, ids)
    if read == taken.checksum:
        yield "checksum   as recorded: these are the samples that were read"
    else:
        yield (
            f"checksum   {read}, and {taken.checksum} was recorded: these are NOT the samples that were "
            f"read; {describe_changes(run) or '`ds-pretrain audit RUN` says what does not hold'}"
        )
    sp_size = taken.sequence_parallel_size
    share = num_samples * sp_size // (taken.world_size or 1)
    reader = None if rank is None else rank // sp_size
    places = range(num_samples) if reader is None else range(reader * share, (reader + 1) * share)
    for place, passage in zip(places, read_passages(ids, places, run.sources), strict=True):
        whose = "" if taken.world_size is None else f"{_name_reader(place // share, sp_size)}, "
        whole = ", ".join(map(str, passage.documents))
        documents = f"{'documents' if len(passage.documents) > 1 else 'document'} {whole}"
        yield (
            f"--- {whose}draw {int(ids.draw[place])}: {passage.source}, epoch {passage.epoch}, sample "
            f"{passage.sample}, {documents}"
        )
        yield _escape(passage.text) if rank is not None else _shorten(passage.text)


def _name_reader(reader: int, sp_size: int) -> str:
    first = reader * sp_size
    return f"rank {first}" if sp_size == 1 else f"ranks {first} to {first + sp_size - 1}"


def _shorten(text: str) -> str:
    words = " ".join(_escape(text).split())
    return words if len(words) <= _SHORT else f"{words[: _SHORT - 3]}..."


def _escape(text: str) -> str:
    """Escape control characters, which a terminal would obey."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
