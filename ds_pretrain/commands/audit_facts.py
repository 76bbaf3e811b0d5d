"""What an audit says of a run when it has looked: a line a fact, the word first."""

from collections.abc import Iterator, Sequence

import numpy as np

from ds_pretrain.commands.audit_checked import steps_of_skip
from ds_pretrain.commands.audit_history import History, Span
from ds_pretrain.commands.audit_proof import Proof, steps_words
from ds_pretrain.commands.audit_run import Audited, changed_words, skip_words
from ds_pretrain.core.text import counted

_MOST_LISTED = 10  # of attempts or rollbacks


def report(run: Audited, history: History, proof: Proof) -> Iterator[str]:
    """The facts, then the problems, then the verdict."""
    yield from _counts(run, history, not proof.problems)
    yield from _checks(history, proof)
    yield from _never_trained(run, history, proof)
    yield from _work_lines(run, history)
    yield from (f"problem    {problem}" for problem in proof.problems)
    count = len(proof.problems)
    yield (
        f"not ok     {run.out}: {count} problem{'s' if count > 1 else ''}"
        if count
        else f"ok         {run.out}"
    )


def _counts(run: Audited, history: History, holds: bool) -> Iterator[str]:
    """What was trained; that it was once is said only if everything `holds`."""
    timeline, start, newest = run.plan.timeline, history.first_step, history.newest
    once = ", each exactly once" if holds else " by the counters"
    samples = timeline.samples_before(newest) - timeline.samples_before(start)
    tokens = timeline.tokens_before(newest) - timeline.tokens_before(start)
    yield f"run        {run.plan.run.name}: step {newest:,} of {run.plan.last_step:,}"
    if start:
        yield f"origin     {run.record.origin}: steps 1 to {start:,} are of that run; audit it for them"
    yield f"steps      {newest - start:,} trained{once}: {start + 1:,} to {newest:,}"
    yield f"samples    {samples:,} trained{once}"
    yield f"tokens     {tokens:,} trained{once}"


def _checks(history: History, proof: Proof) -> Iterator[str]:
    """How it is known."""
    recorded = int(np.count_nonzero(history.rows["seen"]))
    yield f"checksums  {proof.num_checked:,} of {counted(recorded, 'step')} read again from the data"
    if not proof.problems:
        how = "an epoch is a permutation, and no draw came twice"
        if len({read.phase for read in proof.reads}) > 1:
            how += "; a phase reads on where the one before left each source"
        how = "counted one by one" if proof.every else how
        yield f"epochs     no sample came twice within one: {how}"


def _work_lines(run: Audited, history: History) -> Iterator[str]:
    own = [r.response for r in run.rollbacks[run.num_inherited :] if r.response != "stop"]
    what = f" ({', '.join(own[:_MOST_LISTED])})" if own else ""
    yield f"rollbacks  {len(own)}{f'{what}, which {_work(run, history.rolled_back)}' if own else ''}"
    restarts = len(history.worlds) - 1
    yield f"restarts   {restarts}{f', which {_work(run, history.restarted)}' if restarts else ''}"
    yield f"attempts   {_attempts(history)}"


def _never_trained(run: Audited, history: History, proof: Proof) -> Iterator[str]:
    ends = {read.phase: read.draws[-1][1] for read in proof.reads}
    for number, skip in enumerate(run.ledger.skips, 1):
        ahead = "" if skip.stop <= ends.get(skip.phase, 0) else "; the run has not come past it yet"
        first, last = steps_of_skip(skip, run.ledger_of(number - 1), run.plan.timeline)
        samples = counted(skip.stop - skip.start, "sample")
        yield (
            f"skip {number:<6}{skip_words(skip)}, {samples}, which steps {first:,} "
            f"to {last:,} would have read: {skip.cause}, decided at step {skip.step:,} of attempt "
            f"{skip.attempt}{ahead}"
        )
    skipped = sum(
        stop - start
        for phase in dict.fromkeys(skip.phase for skip in run.ledger.skips)
        for start, stop in run.ledger.merged(phase)
    )
    dropped = np.flatnonzero(history.rows["seen"] & ~history.rows["applied"])
    unlearned = sum(run.plan.timeline.at(step - 1).sequences for step in dropped.tolist())
    if dropped.size:
        yield f"dropped    {steps_words(dropped)}: {counted(unlearned, 'sample')} read and not learned from"
    yield f"untrained  {counted(skipped + unlearned, 'sample')}: {skipped:,} skipped, {unlearned:,} dropped"


def _work(run: Audited, spans: Sequence[Span]) -> str:
    before = run.plan.timeline.tokens_before
    steps, tokens = sum(b - a for a, b in spans), sum(before(b) - before(a) for a, b in spans)
    if not steps:
        return "took nothing back"
    if changed_words(run):  # then they may have had other batches than the plan has now
        return f"took back {counted(steps, 'step')}"
    return f"took back {counted(steps, 'step')} ({tokens:,} tokens)"


def _attempts(history: History) -> str:
    worlds = [
        f"number {number} on {size or 'an unknown number of'} rank{'' if size == 1 else 's'}"
        for number, size in history.worlds.items()
    ]
    more = ", ..." if len(worlds) > _MOST_LISTED else ""
    return f"{len(worlds)}: {', '.join(worlds[:_MOST_LISTED])}{more}"
