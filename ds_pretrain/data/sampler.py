"""Which samples a step reads: a pure function of (run file, step, skip ledger), and of nothing else.

Seeking to any step costs the same, nothing is replayed, and the number of ranks does not enter: each rank
takes its slice of the one global batch. The S samples of a step are the next S trained draws of its phase; a
draw picks a source by the phase's mixture, and a source's draws visit each of its samples once an epoch.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ds_pretrain.data.indexed import TokenSource
from ds_pretrain.data.mixture import Mixture, locate_samples, make_mixture
from ds_pretrain.data.permute import make_key
from ds_pretrain.state import Skip, SkipLedger
from ds_pretrain.timeline import Timeline


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

    def listed(self) -> list[tuple[str, int, int]]:
        """(source, epoch, sample) of each, as plain values."""
        rows = zip(self.source.tolist(), self.epoch.tolist(), self.sample.tolist(), strict=True)
        return [(self.names[source], epoch, sample) for source, epoch, sample in rows]


@dataclass(frozen=True)
class Sampler:
    """The order of a run's data."""

    seed: int
    timeline: Timeline
    mixtures: Mapping[str, Mixture]  # of each phase
    num_samples: Mapping[tuple[str, int], int]  # of (source, seq_len)

    def ids(self, step: int, ledger: SkipLedger) -> SampleIds:
        """The samples of the update after `step` finished steps."""
        segment = self.timeline.at(step)
        draws = ledger.draws(segment.phase, self.timeline.trained_draws_before(step), segment.sequences)
        return self.at_draws(segment.phase, segment.seq_len, draws, step)

    def at_draws(self, phase: str, seq_len: int, draws: NDArray[np.uint64], step: int) -> SampleIds:
        """What draws of a phase read, trained or skipped, in the order asked for; `step` is only noted."""
        mixture = self.mixtures[phase]
        source, draw_of_source = mixture.locate(draws)
        epoch, sample = np.empty_like(source), np.empty_like(source)
        for index in np.unique(source):
            name, here = mixture.names[index], source == index
            key = make_key(self.seed, "samples", name, seq_len)
            epoch[here], sample[here] = locate_samples(
                draw_of_source[here], self.num_samples[name, seq_len], key
            )
        return SampleIds(step, seq_len, mixture.names, source, epoch, sample, draws)

    def skipped(self, skip: Skip) -> SampleIds:
        """What an entry of the ledger leaves out, by rising draw."""
        segment = next(s for s in self.timeline.segments if s.phase == skip.phase)
        draws = np.arange(skip.start, skip.stop, dtype=np.uint64)
        return self.at_draws(skip.phase, segment.seq_len, draws, skip.step)


def make_sampler(
    seed: int,
    timeline: Timeline,
    weights: Mapping[str, Mapping[str, float]],
    sources: Mapping[str, TokenSource],
) -> Sampler:
    """The sampler of a run: `weights` maps each phase to its mixture.

    Raises:
        InputError: a weight that cannot be drawn.
    """
    return Sampler(
        seed=seed,
        timeline=timeline,
        mixtures={
            phase: make_mixture(mixture, make_key(seed, "mixture", phase))
            for phase, mixture in weights.items()
        },
        num_samples={
            (name, segment.seq_len): sources[name].num_samples(segment.seq_len)
            for segment in timeline.segments
            for name in weights[segment.phase]
        },
    )
