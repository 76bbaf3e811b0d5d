"""Sources in memory, and the sampler and feeds over them."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ds_pretrain.config.timeline import Timeline, parse_duration
from ds_pretrain.core.distributed import World
from ds_pretrain.data.indexed import TokenSource
from ds_pretrain.data.loader import BatchLoader
from ds_pretrain.data.sampler import Sampler, make_sampler
from tests.timelines import single_phase

SEQ_LEN = 4


def source_of(num_samples: int, seed: int = 0) -> TokenSource:
    """A source of exactly `num_samples` samples of SEQ_LEN, all of them different."""
    num_tokens = num_samples * SEQ_LEN + 1
    stream = np.random.default_rng(seed).integers(0, 2**31 - 1, num_tokens).astype("<i4")
    lengths, bounds = np.array([num_tokens], np.int32), np.array([0, 1], np.int64)
    return TokenSource(Path(f"memory_{seed}"), stream, lengths, bounds, None)


def timeline_of(sequences: int, steps: int) -> Timeline:
    """One phase, "main"."""
    return single_phase("main", SEQ_LEN, sequences, parse_duration(f"{steps} steps"))


def sampler_of(
    sources: Mapping[str, TokenSource], sequences: int = 24, steps: int = 1000, seed: int = 7
) -> Sampler:
    """The sampler of a run that draws evenly from all sources."""
    return make_sampler(seed, timeline_of(sequences, steps), {"main": dict.fromkeys(sources, 1.0)}, sources)


def feed_of(
    sampler: Sampler,
    sources: Mapping[str, TokenSource],
    rank: int = 0,
    size: int = 1,
    micro_batch_size: int = 1,
) -> BatchLoader:
    """The feed of one rank; no process is needed."""
    micro = dict.fromkeys(sampler.mixtures, micro_batch_size)
    return BatchLoader(sampler, sources, World(rank, size, rank), micro)
