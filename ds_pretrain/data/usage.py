"""How much of each source a run reads in each phase, and how often twice, known before it starts.
How much of it has been read up to a step is known by the same arithmetic.

An epoch is passed when each of its chunks was read or left out: what is left out where a phase takes samples
of another length (less than a window, see chunks.py) counts as passed, and comes in the next epoch.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from ds_pretrain.core.state import SkipLedger
from ds_pretrain.core.text import format_count_of, format_epochs
from ds_pretrain.data.chunks import Position
from ds_pretrain.data.filtered import get_chosen_tokens
from ds_pretrain.data.indexed import TokenSource
from ds_pretrain.data.mixture import BLOCK_DRAWS
from ds_pretrain.data.sampler import NO_SKIPS, Sampler


@dataclass(frozen=True)
class SourceUse:
    """The use of one source in one phase; skipped draws count as read."""

    source: str
    phase: str
    seq_len: int
    draws: int
    share: float  # of the phase's draws
    tokens: int
    repeated_tokens: int  # of these, those of epochs after the first
    epochs: float  # of the source from the start of the run to the end of the phase
    unused_tokens: int  # before the phase, as it takes another length: they come in the next epoch


def compute_usage(sampler: Sampler, ledger: SkipLedger = NO_SKIPS) -> list[SourceUse]:
    """The use of every source in every phase, in the order of phases. Each source must hold a chunk."""
    uses = []
    for phase, trained in _count_by_phase(sampler).items():
        mixture, seq_len = sampler.mixtures[phase], sampler.timeline.seq_len_of(phase)
        starts, draws = sampler.starts(phase, ledger), int(ledger.draws(phase, trained, 1)[0])
        ends = sampler.moved(starts, phase, draws)
        counts = zip(mixture.names, mixture.draws_of_source_before(draws), strict=True)
        for name, count in counts:
            chunks, start, end = sampler.chunks[name], starts[name], ends[name]
            new = max(0, chunks.num_chunks - end.chunk) * (chunks.chunk_tokens // seq_len)
            left = chunks.end_of_window(start) - chunks.chunks_before(start)
            uses.append(
                SourceUse(
                    source=name,
                    phase=phase,
                    seq_len=seq_len,
                    draws=count,
                    share=count / draws,
                    tokens=count * seq_len,
                    repeated_tokens=min(count, max(0, end.draws - new)) * seq_len if count else 0,
                    epochs=chunks.chunks_before(end) / chunks.num_chunks,
                    unused_tokens=(
                        round(left * chunks.chunk_tokens) if count and start.seq_len != seq_len else 0
                    ),
                )
            )
    return uses


@dataclass(frozen=True)
class SourceRead:
    """The use of one source up to a step."""

    tokens: int  # trained on
    skipped_tokens: int  # left out by the ledger
    epochs: float  # passed: trained on, skipped, or left out where the length changed
    share: float | None  # of what the phase of that step has trained on; None: the phase does not read it
    weight: float | None  # its share of a whole block of the phase


def read_so_far(sampler: Sampler, step: int, ledger: SkipLedger = NO_SKIPS) -> dict[str, SourceRead]:
    """Return the use of each source by `step` finished steps. Shares are of the phase of the last step."""
    tokens, skipped = dict.fromkeys(sampler.chunks, 0), dict.fromkeys(sampler.chunks, 0)
    epochs = dict.fromkeys(sampler.chunks, 0.0)
    current = sampler.timeline.at(max(0, step - 1)).phase
    shares: dict[str, float] = {}
    for phase, trained in sampler.timeline.trained_by_phase(step).items():
        if not trained:  # it begins with the next step
            continue
        draws = int(ledger.draws(phase, trained, 1)[0])
        seq_len, starts = sampler.timeline.seq_len_of(phase), sampler.starts(phase, ledger)
        read = _count_trained(sampler, phase, draws, ledger)
        for name, end in sampler.moved(starts, phase, draws).items():
            count, left_out = read[name]
            tokens[name] += count * seq_len
            skipped[name] += left_out * seq_len
            epochs[name] = sampler.chunks[name].chunks_before(end) / sampler.chunks[name].num_chunks
            if phase == current:
                shares[name] = count / trained
    mixture = sampler.mixtures[current]
    weights = {name: quota / BLOCK_DRAWS for name, quota in zip(mixture.names, mixture.quotas, strict=True)}
    return {
        name: SourceRead(tokens[name], skipped[name], epochs[name], shares.get(name), weights.get(name))
        for name in sampler.chunks
    }


def _count_trained(
    sampler: Sampler, phase: str, draws: int, ledger: SkipLedger
) -> dict[str, tuple[int, int]]:
    """Count the trained and the skipped draws of each source among the first `draws` draws of a phase."""
    mixture = sampler.mixtures[phase]
    before = np.array(mixture.draws_of_source_before(draws))
    skipped = np.zeros_like(before)
    for start, stop in ledger.merged(phase):
        if stop <= draws:  # what is read next lies in none
            edges = (mixture.draws_of_source_before(edge) for edge in (start, stop))
            skipped += np.diff(np.array(list(edges)), axis=0)[0]
    counts = zip((before - skipped).tolist(), skipped.tolist(), strict=True)
    return dict(zip(mixture.names, counts, strict=True))


def find_step_beyond(
    sampler: Sampler, source: str, epochs: float, ledger: SkipLedger = NO_SKIPS
) -> tuple[int, str] | None:
    """The first step, and its phase, after which more than `epochs` of a source were passed, if any."""
    chunks = sampler.chunks[source]
    for phase in _count_by_phase(sampler):
        start = sampler.starts(phase, ledger).get(source)
        if start is None:
            continue
        segments = [segment for segment in sampler.timeline.segments if segment.phase == phase]
        steps = range(segments[0].first_step, segments[-1].end_step + 1)

        def is_beyond(step: int, phase: str = phase, start: Position = start) -> bool:
            trained = sampler.timeline.trained_by_phase(step)[phase]
            draws = int(ledger.draws(phase, trained, 1)[0])
            there = sampler.moved({source: start}, phase, draws)[source]
            return chunks.chunks_before(there) > epochs * chunks.num_chunks

        first = bisect_left(steps, True, key=is_beyond)
        if first < len(steps):
            return steps[first], phase
    return None


def format_usage(
    sampler: Sampler, sources: Mapping[str, TokenSource], ledger: SkipLedger = NO_SKIPS
) -> Iterator[str]:
    """Format the use of the run's data, warnings last."""
    yield from format_forecast(sampler, sources, ledger)
    used = {name: sources[name] for name in sampler.chunks}
    yield from (f"warning    {words}" for words in find_overlaps(used))


def format_forecast(
    sampler: Sampler, sources: Mapping[str, TokenSource], ledger: SkipLedger = NO_SKIPS
) -> Iterator[str]:
    """Format the part of the usage that a skip changes."""
    uses = compute_usage(sampler, ledger)
    names = list(dict.fromkeys(use.source for use in uses))
    one_phase = len(_count_by_phase(sampler)) == 1
    for name in names:
        source, mine = sources[name], [use for use in uses if use.source == name]
        told = (
            f"source     {name}: {source.num_tokens:,} tokens, "
            f"{format_count_of(source.num_documents, 'document')}"
        )
        if one_phase:
            yield f"{told}; {_format_share(mine[0])}, {format_epochs(mine[0].epochs)}"
            continue
        tokens = sum(use.tokens for use in mine)
        yield f"{told}; {tokens:,} tokens of it are read, {format_epochs(mine[-1].epochs)}"
        yield from (f"           {_describe_phase(use)}" for use in mine)
    for name in names:
        if passed := find_step_beyond(sampler, name, 1, ledger):
            last = [use.epochs for use in uses if use.source == name][-1]
            yield (
                f"warning    sources.{name} passes one epoch at step {passed[0]:,} (phase {passed[1]}), and "
                f"the run reads {format_epochs(last, 1)}: what was read is read again from there on"
            )


def check_usage(
    sampler: Sampler, max_epochs: Mapping[str, float | None], ledger: SkipLedger = NO_SKIPS
) -> list[str]:
    """Sources that the run reads more often than `max_epochs` allows, by name; None allows anything."""
    uses = compute_usage(sampler, ledger)
    problems = []
    for name, most in max_epochs.items():
        mine = [use for use in uses if use.source == name]
        if most is None or not mine or (passed := find_step_beyond(sampler, name, most, ledger)) is None:
            continue
        chunks = sampler.chunks[name]
        problems.append(
            f"sources.{name}.max_epochs = {most:g} is passed at step {passed[0]:,} of "
            f"{sampler.timeline.last_step:,} (phase {passed[1]}): the run takes "
            f"{sum(use.tokens for use in mine):,} tokens of {chunks.num_chunks * chunks.chunk_tokens:,}, "
            f"{format_epochs(mine[-1].epochs, most)}; shorten the run, lower the weight of {name}, "
            "add text to it, or raise max_epochs"
        )
    return problems


def find_overlaps(sources: Mapping[str, TokenSource]) -> Iterator[str]:
    """Sources of different names that hold the same documents of one corpus."""
    for (one, first), (other, second) in combinations(sources.items(), 2):
        documents, tokens = _count_common(first, second)
        if tokens:
            yield (
                f"sources.{one} and sources.{other} have {format_count_of(documents, 'document')} of "
                f"{first.prefix} in common, {format_count_of(tokens, 'token')}: each repeats what the other "
                "reads, and their epochs are counted apart"
            )


def _count_common(first: TokenSource, second: TokenSource) -> tuple[int, int]:
    """Documents that two sources both have, and the tokens of these."""
    if first.prefix.absolute() != second.prefix.absolute():
        return 0, 0
    one, other = get_chosen_tokens(first), get_chosen_tokens(second)
    if one is None or other is None:
        inner = second if one is None else first
        return inner.num_documents, inner.num_tokens
    both, at, _ = np.intersect1d(one.documents, other.documents, assume_unique=True, return_indices=True)
    return both.size, int(first.document_lengths[at].sum())


def _count_by_phase(sampler: Sampler) -> dict[str, int]:
    """The phases in order, and what each trains on."""
    return sampler.timeline.trained_by_phase(sampler.timeline.last_step)


def _format_share(use: SourceUse) -> str:
    return f"{use.share:.1%} of the draws, {use.tokens:,} tokens"


def _describe_phase(use: SourceUse) -> str:
    words = f"{use.phase}: {_format_share(use)} in {format_count_of(use.draws, 'sample')} of {use.seq_len:,}"
    if use.repeated_tokens:
        words += f", {use.repeated_tokens:,} of them not for the first time"
    words += f"; {format_epochs(use.epochs)} by its end"
    if use.unused_tokens:
        words += f"; {use.unused_tokens:,} tokens before it wait for the next epoch, as the length changes"
    return words
