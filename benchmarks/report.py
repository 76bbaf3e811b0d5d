"""Shared by all benchmarks: run two things in turn, print medians and ranges, judge the bar."""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Literal


def time_in_turn(
    first: Callable[[], object], second: Callable[[], object], rounds: int
) -> tuple[list[float], list[float]]:
    """Wall seconds of each call, `rounds` of each, in turn, so that a slow minute of the machine hits both.

    The order within a round alternates: whoever goes second finds warmer caches.
    """
    seconds: tuple[list[float], list[float]] = ([], [])
    for index in range(rounds):
        for which in ((0, 1), (1, 0))[index % 2]:
            start = time.perf_counter()
            (first, second)[which]()
            seconds[which].append(time.perf_counter() - start)
    return seconds


def spread(values: Sequence[float], unit: str = "", scale: float = 1.0) -> str:
    """`median (least to greatest)`, each times `scale`, in `unit`."""
    low, mid, high = min(values), statistics.median(values), max(values)
    return f"{mid * scale:.4g} ({low * scale:.4g} to {high * scale:.4g}) {unit}".rstrip()


def judge(name: str, figure: float, bar: float, better: Literal["at_least", "at_most"]) -> bool:
    """Return whether `figure` meets `bar`; print the verdict as one JSON line."""
    holds = figure >= bar if better == "at_least" else figure <= bar
    line = {"name": name, "figure": round(figure, 4), "bar": bar, "better": better, "holds": holds}
    print(json.dumps(line), flush=True)
    return holds


def finish(verdicts: Sequence[bool]) -> None:
    """End the benchmark: exit code 1 if any bar was missed."""
    raise SystemExit(0 if all(verdicts) else 1)
