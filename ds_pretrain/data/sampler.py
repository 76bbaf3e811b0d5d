"""Maps a step to its samples: a pure function of (run file, step, skip ledger).

Seeking to any step costs the same, nothing is replayed, and the number of ranks does not enter: each rank
takes its slice of the one global batch. The S samples of a step are the next S trained draws of its phase; a
draw picks a source by the phase's mixture, and a source's draws visit each of its samples once an epoch.
Every source is read on where the phases before have left it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from ds_pretrain.config.timeline import Timeline, check_chunk_lengths, compute_chunk_lengths
from ds_pretrain.core.errors import InputError
from ds_pretrain.core.state import Skip, SkipLedger
from ds_pretrain.data.chunks import Chunks, Position
from ds_pretrain.data.indexed import TokenSource
from ds_pretrain.data.mixture import Mixture, make_mixture
from ds_pretrain.data.permutation import make_key

NO_SKIPS = SkipLedger()
_STARTS_KEPT = 16  # a step asks for its own phase, and now and then someone asks for all


@dataclass(frozen=True)
class SampleIds:
    """The samples of one global batch, in order: arrays of [S]."""

    step: int
    seq_len: int
    names: tuple[str, ...]  # of the sources
    source: NDArray[np.int64]  # index into names
    epoch: NDArray[np.int64]
    sample: NDArray[np.int64]  # within the source
    draw: NDArray[np.uint64]  # within the phase

    def to_list(self) -> list[tuple[str, int, int]]:
        """(source, epoch, sample) of each, as plain values."""
        rows = zip(self.source.tolist(), self.epoch.tolist(), self.sample.tolist(), strict=True)
        return [(self.names[source], epoch, sample) for source, epoch, sample in rows]

    def group_by_source(self) -> dict[str, dict[str, list[int]]]:
        """{source: {epoch: [samples]}}, in order; an epoch is text, as it is in JSON."""
        groups: dict[str, dict[str, list[int]]] = {}
        for source, epoch, sample in self.to_list():
            groups.setdefault(source, {}).setdefault(str(epoch), []).append(sample)
        return groups


@dataclass(frozen=True)
class Sampler:
    """The order of a run's data."""

    timeline: Timeline
    mixtures: Mapping[str, Mixture]  # of each phase
    chunks: Mapping[str, Chunks]  # of each source
    _starts: dict[tuple[str, SkipLedger], Mapping[str, Position]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def ids(self, step: int, ledger: SkipLedger) -> SampleIds:
        """The samples of the update after `step` finished steps."""
        segment = self.timeline.at(step)
        draws = ledger.draws(segment.phase, self.timeline.trained_draws_before(step), segment.sequences)
        return self.at_draws(segment.phase, segment.seq_len, draws, step, ledger)

    def at_draws(
        self, phase: str, seq_len: int, draws: NDArray[np.uint64], step: int, ledger: SkipLedger = NO_SKIPS
    ) -> SampleIds:
        """Return the samples of draws of a phase, trained or skipped, as ordered; `step` is only noted.

        Of the ledger the entries of earlier phases count: they move where the phase begins.
        """
        mixture = self.mixtures[phase]
        starts = self.starts(phase, ledger)
        source, draw_of_source = mixture.locate(draws)
        epoch, sample = np.empty_like(source), np.empty_like(source)
        for index in np.unique(source):
            name, here = mixture.names[index], source == index
            epoch[here], sample[here] = self.chunks[name].locate(starts[name], seq_len, draw_of_source[here])
        return SampleIds(step, seq_len, mixture.names, source, epoch, sample, draws)

    def skipped(self, skip: Skip, ledger: SkipLedger = NO_SKIPS) -> SampleIds:
        """Return the samples of a skip ledger entry, by rising draw."""
        draws = np.arange(skip.start, skip.stop, dtype=np.uint64)
        return self.at_draws(skip.phase, self.timeline.seq_len_of(skip.phase), draws, skip.step, ledger)

    def starts(self, phase: str, ledger: SkipLedger) -> Mapping[str, Position]:
        """Return each source's position at the start of a phase."""
        known = self._starts.get((phase, ledger))
        if known is None:
            known = self._walked(phase, ledger)
            if len(self._starts) >= _STARTS_KEPT:
                self._starts.clear()
            self._starts[phase, ledger] = known
        return known

    def _walked(self, phase: str, ledger: SkipLedger) -> Mapping[str, Position]:
        """`starts`, from the beginning: as many steps as there are phases."""
        position = dict.fromkeys(self.mixtures[phase].names, Position())
        for earlier, trained in self.timeline.trained_by_phase(self.timeline.last_step).items():
            if earlier == phase:
                break
            draws = int(ledger.draws(earlier, trained, 1)[0])  # trained and skipped ones
            position |= self.moved(position, earlier, draws)
        return position

    def moved(self, starts: Mapping[str, Position], phase: str, draws: int) -> dict[str, Position]:
        """Return each source's position after `draws` draws of a phase, from those in `starts`."""
        mixture, seq_len = self.mixtures[phase], self.timeline.seq_len_of(phase)
        counts = zip(mixture.names, mixture.draws_of_source_before(draws), strict=True)
        return {
            name: self.chunks[name].after(starts[name], seq_len, count)
            for name, count in counts
            if name in starts
        }


def compute_checksums(rows: NDArray[np.int64]) -> tuple[int, ...]:
    """The CRC-32 of each sample, tokens of [n, T + 1]; a step records the sum over its batch."""
    return tuple(crc32(row.tobytes()) for row in rows)


def make_sampler(
    seed: int,
    timeline: Timeline,
    weights: Mapping[str, Mapping[str, float]],
    sources: Mapping[str, TokenSource],
    chunk_tokens: Mapping[str, int | None] = MappingProxyType({}),
) -> Sampler:
    """The sampler of a run: `weights` maps each phase to its mixture.

    `chunk_tokens` says what a source is cut into, if it is not the longest samples that a phase takes of it.

    Raises:
        InputError: a weight that cannot be drawn, lengths that do not divide a source's chunks.
    """
    seq_lens = {segment.phase: segment.seq_len for segment in timeline.segments}
    lengths = compute_chunk_lengths(seq_lens, weights, chunk_tokens)
    if problems := check_chunk_lengths(seq_lens, weights, lengths):
        raise InputError(problems)
    return Sampler(
        timeline=timeline,
        mixtures={
            phase: make_mixture(mixture, make_key(seed, "mixture", phase))
            for phase, mixture in weights.items()
        },
        chunks={
            name: Chunks(sources[name].num_samples(length), length, make_key(seed, "samples", name, length))
            for name, length in lengths.items()
        },
    )
