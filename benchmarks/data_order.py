"""Seeking in the data order: draw 10^12 of a source of 10^11 samples must cost what draw 0 costs.

    python benchmarks/data_order.py

Bars: at most 1.5 times the time of draw 0; a batch of 1,024 at most 1 ms, also when nothing of its two blocks
is laid out yet, and at most 1 MB of memory; a million draws at most 0.2 s. A batch of the last of eight
phases, of sequences of two lengths in turn: at most 1.5 times the time of the first, and 3 ms. Ratios and the
million are judged by medians, a batch by the least of many rounds: beside something so short the machine's
other work is long, and only adds. Its load is printed, and the range of each.
"""

import os
import time
import tracemalloc
from collections.abc import Callable
from statistics import median

import numpy as np
from report import finish, judge, spread, time_in_turn

from ds_pretrain.config.timeline import Segment, Timeline
from ds_pretrain.core.state import SkipLedger
from ds_pretrain.data import mixture
from ds_pretrain.data.chunks import Chunks
from ds_pretrain.data.mixture import BLOCK_DRAWS, locate_samples, make_mixture
from ds_pretrain.data.permutation import make_key
from ds_pretrain.data.sampler import Sampler

BATCH = 1024
NUM_SAMPLES = 10**11
FAR = 10**12
ROUNDS, CALLS = 50, 20
MIXTURE = make_mixture({"web": 0.85, "code": 0.15}, make_key(7, "main"))
KEYS = {name: make_key(7, name, 4096) for name in MIXTURE.names}
STEPS = 10**6  # of each phase
NAMES = tuple(f"phase {number}" for number in range(8))
PHASES = Sampler(
    timeline=Timeline(
        tuple(
            Segment(phase, at * STEPS, (at + 1) * STEPS, seq_len, BATCH, at * STEPS * BATCH, 0, 0)
            for at, (phase, seq_len) in enumerate(zip(NAMES, (4096, 32768, 32768, 4096) * 2, strict=True))
        )
    ),
    mixtures=dict.fromkeys(NAMES, MIXTURE),
    chunks={name: Chunks(NUM_SAMPLES // 8, 32768, key) for name, key in KEYS.items()},
)


def batch_at(draw: int) -> None:
    """Return the source, epoch and sample of each draw of a batch, as one step asks for them."""
    source, number = MIXTURE.locate(np.arange(draw, draw + BATCH))
    for index, name in enumerate(MIXTURE.names):
        locate_samples(number[source == index], NUM_SAMPLES, KEYS[name])


def calls_at(draw: int) -> None:
    """Several batches, so that one timing is long beside the clock's grain."""
    for _ in range(CALLS):
        batch_at(draw)


def calls_of_phase(number: int) -> None:
    """Several batches at the end of a phase."""
    for step in range((number + 1) * STEPS - CALLS, (number + 1) * STEPS):
        PHASES.ids(step, SkipLedger())


def cold_batch() -> None:
    """The first batch after a start, or after a jump, at its dearest: half in one block, half in the next."""
    mixture._build_layout.cache_clear()
    batch_at(FAR // BLOCK_DRAWS * BLOCK_DRAWS - BATCH // 2)


def million() -> None:
    """A million draws in one call, none of their blocks laid out."""
    mixture._build_layout.cache_clear()
    MIXTURE.locate(np.arange(FAR, FAR + 10**6))


def seconds_of(call: Callable[[], None], rounds: int) -> list[float]:
    """Wall seconds of each of `rounds` calls."""
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds


def peak_bytes(call: Callable[[], None]) -> int:
    """The most memory that one call takes, layouts and results."""
    tracemalloc.start()
    call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def main() -> None:
    batch_at(0)
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    near, far = time_in_turn(lambda: calls_at(0), lambda: calls_at(FAR), ROUNDS)
    cold, many = seconds_of(cold_batch, 10 * ROUNDS), seconds_of(million, ROUNDS)
    first, last = time_in_turn(lambda: calls_of_phase(0), lambda: calls_of_phase(7), ROUNDS)
    per_batch = 1e3 / CALLS
    print(f"draw 0:         {spread(near, 'ms a batch of 1,024', per_batch)}")
    print(f"draw 10^12:     {spread(far, 'ms a batch of 1,024', per_batch)}")
    print(f"nothing cached: {spread(cold, 'ms a batch of 1,024 over two blocks', 1e3)}")
    print(f"a million:      {spread(many, 's')}")
    print(f"first of eight: {spread(first, 'ms a batch of 1,024 in windows', per_batch)}")
    print(f"last of eight:  {spread(last, 'ms a batch of 1,024 in windows', per_batch)}")
    ratio = median(b / a for a, b in zip(near, far, strict=True))
    later = median(b / a for a, b in zip(first, last, strict=True))
    finish(
        [
            judge("seek: time at draw 10^12 / at draw 0", ratio, 1.5, "at_most"),
            judge("seek: milliseconds a batch of 1,024", min(far) * per_batch, 1.0, "at_most"),
            judge("seek: milliseconds the first batch", min(cold) * 1e3, 1.0, "at_most"),
            judge("seek: seconds a million draws", median(many), 0.2, "at_most"),
            judge("seek: time in the last of eight phases / in the first", later, 1.5, "at_most"),
            judge("seek: milliseconds a batch of the last phase", min(last) * per_batch, 3.0, "at_most"),
            judge("seek: megabytes", peak_bytes(cold_batch) / 1e6, 1.0, "at_most"),
        ]
    )


if __name__ == "__main__":
    main()
