"""`ds-pretrain audit RUN`: proves which samples a run was trained on, and shows what a step read.

Everything is computed again from the run file, the ledger and the data, and held against what the run wrote
down as it trained. Nothing is changed, anywhere.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ds_pretrain.commands.audit_facts import report
from ds_pretrain.commands.audit_history import Taken, read_history
from ds_pretrain.commands.audit_proof import batch_checksum, prove
from ds_pretrain.commands.audit_run import Audited, changed_words, opened
from ds_pretrain.core.errors import EXIT_FAILED, EXIT_FINISHED, InputError
from ds_pretrain.core.text import counted, say
from ds_pretrain.data.inspect import Passage, passages
from ds_pretrain.data.sampler import SampleIds

_SHORT = 200  # characters of a sample, unless one rank's are asked for
_CHUNK = 1 << 16  # draws named at once


def audit_command(words: Any) -> int:
    """Prove the run, show a step, or list what was skipped; 1 if something does not hold."""
    _refuse_contradictions(words)
    with opened(Path(words.run), words.overrides) as run:
        if words.step is not None:
            lines = shown_step(run, words.step, words.rank, words.attempt)
        elif words.skipped:
            lines = skipped_samples(run)
        else:
            history = read_history(run)
            proof = prove(run, history, words.all)
            _print(report(run, history, proof))
            return EXIT_FAILED if proof.problems else EXIT_FINISHED
        _print(lines)
        return EXIT_FINISHED


def _refuse_contradictions(words: Any) -> None:
    alone = [name for name in ("rank", "attempt") if getattr(words, name) is not None and words.step is None]
    problems = [f"--{name} belongs to --step; name the step too" for name in alone]
    if words.skipped and words.step is not None:
        problems.append("--skipped and --step are two questions; ask one at a time")
    if words.all and (words.skipped or words.step is not None):
        problems.append("--all belongs to the audit of the whole run; leave out --skipped and --step")
    if problems:
        raise InputError(problems)


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        if not say(sys.stdout, line):
            break  # nobody reads any more


def skipped_samples(run: Audited) -> Iterator[str]:
    """A line of tab-separated words for every sample that the ledger skips; overlaps are listed once."""
    yield "skip\tphase\tdraw\tsource\tepoch\tsample"
    for number, skip in enumerate(run.ledger.skips, 1):
        before = run.ledger_of(number - 1).merged(skip.phase)
        seq_len = run.plan.timeline.seq_len_of(skip.phase)
        for start in range(skip.start, skip.stop, _CHUNK):
            draws = np.arange(start, min(start + _CHUNK, skip.stop), dtype=np.uint64)
            for first, stop in before:
                draws = draws[(draws < first) | (draws >= stop)]
            ids = run.sampler.at_draws(skip.phase, seq_len, draws, skip.step, run.ledger)
            for draw, (source, epoch, sample) in zip(draws.tolist(), ids.listed(), strict=True):
                yield f"{number}\t{skip.phase}\t{draw}\t{source}\t{epoch}\t{sample}"


def shown_step(run: Audited, step: int, rank: int | None, attempt: int | None) -> Iterator[str]:
    """What a step read, as it was taken in the attempt or the last time.

    Raises:
        InputError: the step is not recorded, not in that attempt, or had no such rank.
    """
    history = read_history(run, step)
    every = history.taken
    chosen = [taken for taken in every if attempt in (None, taken.attempt)]
    if not every:
        raise InputError(
            f"step {step:,} is not in {run.out / 'metrics.jsonl'}, whose newest is step {history.newest:,} "
            f"of {run.plan.last_step:,}; name one that was recorded"
        )
    if not chosen:
        attempts = ", ".join(str(number) for number in sorted({taken.attempt for taken in every}))
        raise InputError(f"attempt {attempt} did not take step {step:,}; those that did: {attempts}")
    taken = chosen[-1]
    ids = run.sampler.ids(step - 1, run.ledger_of(taken.num_skips))
    _refuse_rank(taken, rank, step)
    return _step_lines(run, ids, taken, [t for t in every if t is not taken], rank)


def _refuse_rank(taken: Taken, rank: int | None, step: int) -> None:
    if rank is not None and taken.world_size is None:
        raise InputError(
            f"--rank {rank}: the record of how attempt {taken.attempt} began is lost, and with it the number "
            "of ranks; leave out --rank"
        )
    if rank is not None and not 0 <= rank < (taken.world_size or 0):
        raise InputError(
            f"--rank {rank}: step {step:,} of attempt {taken.attempt} was taken on "
            f"{counted(taken.world_size or 0, 'rank')}; expected {_numbers(taken.world_size or 0)}"
        )


def _ranks(taken: Taken) -> str:
    return "an unknown number of ranks" if taken.world_size is None else counted(taken.world_size, "rank")


def _numbers(world_size: int) -> str:
    return "0" if world_size == 1 else f"0 to {world_size - 1}"


def _step_lines(
    run: Audited, ids: SampleIds, taken: Taken, others: Sequence[Taken], rank: int | None
) -> Iterator[str]:
    num_samples = len(ids.sample)
    ranks = _ranks(taken)
    yield (
        f"step       {ids.step + 1:,} of attempt {taken.attempt}: {counted(num_samples, 'sample')} on {ranks}"
        f", {_in_force(taken)}"
    )
    for other in others:
        yield (
            f"also       taken in attempt {other.attempt} on {_ranks(other)}, "
            f"{_in_force(other)}, "
            f"{'the same' if other.checksum == taken.checksum else 'other'} samples"
        )
    read = batch_checksum(run, ids)
    if read == taken.checksum:
        yield "checksum   as recorded: these are the samples that were read"
    else:
        yield (
            f"checksum   {read}, and {taken.checksum} was recorded: these are NOT the samples that were "
            f"read; {changed_words(run) or '`ds-pretrain audit RUN` says what does not hold'}"
        )
    share = num_samples * taken.shared // (taken.world_size or 1)
    reader = None if rank is None else rank // taken.shared
    places = range(num_samples) if reader is None else range(reader * share, (reader + 1) * share)
    for place, passage in zip(places, passages(ids, places, run.sources), strict=True):
        whose = "" if taken.world_size is None else f"{_who(place // share, taken.shared)}, "
        yield f"--- {whose}{_place_words(passage, int(ids.draw[place]))}"
        yield _legible(passage.text) if rank is not None else _shortened(passage.text)


def _who(reader: int, shared: int) -> str:
    if shared == 1:
        return f"rank {reader}"
    return f"ranks {reader * shared} to {(reader + 1) * shared - 1}"


def _in_force(taken: Taken) -> str:
    return f"{taken.num_skips} skip{'' if taken.num_skips == 1 else 's'} in force"


def _place_words(passage: Passage, draw: int) -> str:
    documents = ", ".join(map(str, passage.documents))
    return (
        f"draw {draw}: {passage.source}, epoch {passage.epoch}, sample {passage.sample}, "
        f"document{'s' if len(passage.documents) > 1 else ''} {documents}"
    )


def _shortened(text: str) -> str:
    words = " ".join(_legible(text).split())
    return words if len(words) <= _SHORT else f"{words[: _SHORT - 3]}..."


def _legible(text: str) -> str:
    """What a terminal would obey is written out."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
