"""Loss curves for tests of the watchdog, faults grafted on them, and what is said of them."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace

from ds_pretrain.config.schema import WatchdogSection
from ds_pretrain.core.state import Verdict, WatchdogState
from ds_pretrain.watchdog.backtest import Point
from ds_pretrain.watchdog.detector import OK, judge

DEFAULTS = WatchdogSection()
LEVEL, SPREAD, NORM = 3.0, 0.04, 0.3
NUM_HEALTHY = 300  # points before a fault: the window is full


def healthy(
    num_points: int = NUM_HEALTHY, first: int = 1, seed: int = 0, level: float = LEVEL
) -> list[Point]:
    """A flat curve with normal noise in the loss and in the logarithm of the norm."""
    chance = random.Random(seed)
    points = []
    for step in range(first, first + num_points):
        loss = level + SPREAD * chance.gauss(0, 1)
        norm = NORM * math.exp(0.06 * chance.gauss(0, 1))
        points.append(Point(step, loss, loss, norm, phase="main"))
    return points


def after(points: Sequence[Point], num_points: int, seed: int = 1, level: float = LEVEL) -> list[Point]:
    """More of the same behind them."""
    return healthy(num_points, points[-1].step + 1, seed, level)


def raised(points: Sequence[Point], nats: float) -> list[Point]:
    return [replace(p, loss=p.loss + nats, loss_max_rank=p.loss_max_rank + nats) for p in points]


def broken(points: Sequence[Point], loss: float = math.nan, norm: float | None = None) -> list[Point]:
    return [replace(p, loss=loss, loss_max_rank=loss, grad_norm=norm) for p in points]


def judged(
    points: Sequence[Point], settings: WatchdogSection = DEFAULTS, memory: WatchdogState | None = None
) -> tuple[list[Verdict], WatchdogState]:
    memory, verdicts = memory or WatchdogState(), []
    for point in points:
        memory, verdict = judge(settings, memory, point, point.has_norm)
        verdicts.append(verdict)
    return verdicts, memory


def said(points: Sequence[Point], settings: WatchdogSection = DEFAULTS) -> list[tuple[int, Verdict]]:
    """The verdicts that say something, with their steps."""
    verdicts, _ = judged(points, settings)
    return [(p.step, v) for p, v in zip(points, verdicts, strict=True) if v != OK]


def first_roll_back(points: Sequence[Point], settings: WatchdogSection = DEFAULTS) -> tuple[int, Verdict]:
    return next((step, verdict) for step, verdict in said(points, settings) if verdict.interrupts)


BEFORE = healthy()
NEXT = BEFORE[-1].step + 1  # the step at which the faults below begin
