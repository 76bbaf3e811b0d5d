"""Which source, and which sample of it, each draw of a mixture reads: O(1) a draw, and exact at every split.

Draws come in blocks of 4,096. In each block every source has the same whole number of draws (its quota, by
largest remainder), and the places within the block are shuffled by a permutation of the block's own. So the
number of draws of a source before any draw is known without replaying anything.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ds_pretrain.data.permute import Words, derive_keys, permute
from ds_pretrain.errors import InputError

BLOCK_DRAWS = 4096


@dataclass(frozen=True)
class Mixture:
    """Sources in the order of their names, their draws in each block, and the key of the shuffles."""

    names: tuple[str, ...]
    quotas: tuple[int, ...]
    key: int

    def locate(self, draws: NDArray[np.integer]) -> tuple[NDArray[np.int64], Words]:
        """The index of the source in `names`, and the number of the draw within that source.

        Over whole blocks, each source's draws are numbered 0, 1, 2, ... and each number occurs once.
        """
        draws = np.asarray(draws)
        block = draws.astype(np.uint64) // np.uint64(BLOCK_DRAWS)
        place = draws.astype(np.uint64) % np.uint64(BLOCK_DRAWS)
        slot = permute(place, BLOCK_DRAWS, derive_keys(self.key, block))
        quotas = np.asarray(self.quotas, dtype=np.uint64)
        starts = np.cumsum(quotas) - quotas  # first slot of each source
        source = np.repeat(np.arange(len(quotas)), self.quotas)[slot]
        return source, block * quotas[source] + (slot - starts[source])

    def draws_of_source_before(self, draw: int) -> tuple[int, ...]:
        """How many of the draws [0, draw) read each source: exact, and of one cost for every `draw`."""
        blocks, rest = divmod(draw, BLOCK_DRAWS)
        source, _ = self.locate(np.arange(draw - rest, draw, dtype=np.uint64))
        partial = np.bincount(source, minlength=len(self.quotas))
        return tuple(blocks * quota + int(n) for quota, n in zip(self.quotas, partial, strict=True))


def make_mixture(weights: Mapping[str, float], key: int) -> Mixture:
    """The mixture nearest to `weights` (any positive scale) whose quotas are whole draws a block.

    Raises:
        InputError: a weight is not positive and finite, or too small to be drawn once a block.
    """
    if not weights:
        raise InputError("the mixture is empty; give at least one source a positive weight")
    names = tuple(sorted(weights))  # the order of keys in a run file must not move the data
    values = np.array([weights[name] for name in names], dtype=np.float64)
    bad = [name for name, value in zip(names, values, strict=True) if not (np.isfinite(value) and value > 0)]
    if bad:
        raise InputError(
            f"mixture weight of {name!r} is {weights[name]}; expected a positive number "
            "(leave a source out to draw none of it)"
            for name in bad
        )
    quotas = _largest_remainder(values / values.sum())
    total = float(values.sum())
    smallest = total / BLOCK_DRAWS
    small = [name for name, quota in zip(names, quotas, strict=True) if quota == 0]
    if small:
        raise InputError(
            f"mixture weight of {name!r} is {weights[name]:g} of {total:g}, less than one draw in "
            f"{BLOCK_DRAWS}; the smallest sure to be drawn is {smallest:.3g}: raise it, or leave it out"
            for name in small
        )
    return Mixture(names=names, quotas=quotas, key=key)


def locate_samples(
    draw_of_source: NDArray[np.integer], num_samples: int, key: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The epoch and the sample that each draw of one source reads: every sample once an epoch.

    `key` is made from (seed, source name, sequence length); each epoch has a permutation of its own.
    """
    draws = np.asarray(draw_of_source).astype(np.uint64)
    epoch = draws // np.uint64(num_samples)
    sample = permute(draws % np.uint64(num_samples), num_samples, derive_keys(key, epoch))
    return epoch.astype(np.int64), sample.astype(np.int64)


def _largest_remainder(shares: NDArray[np.float64]) -> tuple[int, ...]:
    """Whole quotas that add up to a block: rounded down, plus one for the largest remainders."""
    exact = shares * BLOCK_DRAWS
    quotas = np.floor(exact).astype(np.int64)
    missing = BLOCK_DRAWS - int(quotas.sum())
    order = np.argsort(-(exact - quotas), kind="stable")
    quotas[order[:missing]] += 1
    return tuple(int(quota) for quota in quotas)
