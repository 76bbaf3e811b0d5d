"""Seeking in the data order: draw 10^12 of a source of 10^11 samples must cost what draw 0 costs.

    python benchmarks/data_order.py

Bars: at most 1.5 times the time of draw 0, at most 1 ms for a batch of 1,024, at most 1 MB of memory.
"""

import statistics
import tracemalloc

import numpy as np
from report import finish, judge, spread, time_in_turn

from ds_pretrain.data.mixture import locate_samples, make_mixture
from ds_pretrain.data.permute import make_key

BATCH = 1024
NUM_SAMPLES = 10**11
FAR = 10**12
ROUNDS, CALLS = 50, 20
MIXTURE = make_mixture({"web": 0.85, "code": 0.15}, make_key(7, "main"))
KEYS = {name: make_key(7, name, 4096) for name in MIXTURE.names}


def batch_at(draw: int) -> None:
    """What one step asks: the source, the epoch and the sample of each draw of a batch."""
    source, number = MIXTURE.locate(np.arange(draw, draw + BATCH))
    for index, name in enumerate(MIXTURE.names):
        locate_samples(number[source == index], NUM_SAMPLES, KEYS[name])


def calls_at(draw: int) -> None:
    """Several batches, so that one timing is long beside the clock's grain."""
    for _ in range(CALLS):
        batch_at(draw)


def peak_bytes(draw: int) -> int:
    """The most memory that one batch takes, index and results."""
    tracemalloc.start()
    batch_at(draw)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def main() -> None:
    batch_at(0)
    near, far = time_in_turn(lambda: calls_at(0), lambda: calls_at(FAR), ROUNDS)
    per_batch = 1e3 / CALLS
    print(f"draw 0:     {spread(near, 'ms a batch of 1,024', per_batch)}")
    print(f"draw 10^12: {spread(far, 'ms a batch of 1,024', per_batch)}")
    ratio = statistics.median(b / a for a, b in zip(near, far, strict=True))
    finish(
        [
            judge("seek: time at draw 10^12 / at draw 0", ratio, 1.5, "at_most"),
            judge("seek: milliseconds a batch of 1,024", statistics.median(far) * per_batch, 1.0, "at_most"),
            judge("seek: megabytes", max(peak_bytes(0), peak_bytes(FAR)) / 1e6, 1.0, "at_most"),
        ]
    )


if __name__ == "__main__":
    main()
