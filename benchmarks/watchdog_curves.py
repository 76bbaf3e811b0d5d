"""The watchdog over recorded curves of others, and over faults grafted onto the healthy ones of them.

    python benchmarks/watchdog_curves.py FOLDER [--places 300] [--seed 0] [--only ROW ...] [-v]

FOLDER has NAME.csv (step, loss, grad_norm, lr) and labels.json: per curve `points`, `kind`, and `events`
with start, end and what an experienced operator would have done. It may also be a file that lies beside a
folder `curves`.

1. Labelled curves, defaults only, as they are, subsampled by 2, 5 and 10, averaged by 4 and 16, and begun in
   the middle. A roll_back in no event labelled "roll back" or "stop" is a false alarm; on a curve as it is,
   an event so labelled is found if a roll_back comes within `patience` points of its start. A "stop" that
   was found ends its run: later events of that curve are not reached. An excerpt of less than 20 points is
   judged with a window of 2 and a patience of 3, since the defaults would still be warming up at its end.
   Nor is a drift watched where no such event is labelled: its statistic stays below 0.7 of a roll_back.
2. Grafts, defaults only, at seeded random places past the second window of every curve of 1,000 points and
   more without an event to roll back for: `--places` for each third of the range of each row, shared evenly
   among the curves that have room for the graft. No spike is open at a place, and no transient spike of the
   labels began less than `patience` points before it: that would be two faults in one. A spread is that of
   the 200 points before the place: 1.4826 MAD about their straight line. Bars, for the worst third of each
   row: 1 % rolled back in vain, 95 % found in time. A curve that is left untouched has no false alarm.
"""

import argparse
import json
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing import Pool
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

import numpy as np
from report import finish, judge

from ds_pretrain.config.schema import WatchdogSection
from ds_pretrain.core.state import Verdict, WatchdogState
from ds_pretrain.watchdog.backtest import Point, read_csv, replay
from ds_pretrain.watchdog.detector import judge as judge_step

DEFAULTS = WatchdogSection()
PATIENCE = DEFAULTS.patience
FITTED = WatchdogSection(window=2, patience=3)
FEWEST_POINTS, LONG = 20, 1000
GRAVE = ("roll back", "stop")
MOST_NATS = 10.0  # a blow-up rises no further
IN_TIME = PATIENCE + 6
AFTER = 300  # points judged after the end of a graft
THIRDS = ("low", "mid", "high")


@dataclass(frozen=True)
class Place:
    """A point at which faults are grafted: the points from it on, and the memory just before."""

    points: Sequence[Point]
    memory: WatchdogState
    spread: float
    level: float  # median of the 30 losses before
    random: random.Random


@dataclass(frozen=True)
class Graft:
    """A curve with a fault, and what must be said of it. Indices count from the place."""

    points: Sequence[Point]
    wanted: Literal["nothing", "watch", "roll_back", "stop"]
    onset: int = 0  # a delay counts from here
    by: int = 0  # the last index at which it is in time
    watch_by: int | None = None  # the same for a watch before a roll_back
    most_onset_error: int | None = None


@dataclass(frozen=True)
class Outcome:
    """The verdict on a graft, and whether it is right."""

    third: int
    wanted: str
    right: bool
    said: str
    delay: int | None = None
    onset_error: float | None = None


@dataclass(frozen=True)
class Row:
    """A kind of graft: `make(place, share)` with the share, in [0, 1), of the way through its range."""

    make: Callable[[Place, float], Graft]
    horizon: Callable[[float], int] = lambda share: 300  # points, at a share of its range
    needs_norm: bool = False
    most_wrong: float = 0.01  # share of the places of a third that may be rolled back in vain
    least_found: float = 0.95  # share of them that have to be found in time


# -- labelled curves


def judge_labelled(folder: Path, labels: Mapping[str, Any]) -> list[bool]:
    """Print a line for each curve; whether the bars hold."""
    false_alarms, found, missed = 0, 0, 0
    for name, label in labels.items():
        points = read_csv(folder / f"{name}.csv")
        settings = FITTED if len(points) < FEWEST_POINTS else DEFAULTS
        verdicts = replay(points, settings)
        events = [event for event in label["events"] if event["action"] in GRAVE]
        alarms = [i for i, verdict in enumerate(verdicts) if verdict.interrupts]
        wrong = [i for i in alarms if not any(e["start"] <= points[i].step <= e["end"] for e in events)]
        ends = [grave_event(points, alarms, event, settings) for event in until_stopped(events)]
        false_alarms += len(wrong)
        found += sum(end is not None for end in ends)
        missed += sum(end is None for end in ends)
        fitted = f"  (window {settings.window}, patience {settings.patience})" if settings is FITTED else ""
        print(
            f"{name:26} {len(points):6} points  {sum(v.action == 'watch' for v in verdicts):4} watched  "
            f"false alarms {len(wrong)}  {describe(events, ends, verdicts, alarms)}{fitted}"
        )
    return [
        judge("watchdog: false alarms on labelled curves", false_alarms, 0, "at_most"),
        judge(
            "watchdog: share of labelled faults found in time", found / max(1, found + missed), 1, "at_least"
        ),
    ]


def until_stopped(events: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """The events up to the first that ends the run."""
    stops = [i for i, event in enumerate(events) if event["action"] == "stop"]
    return events[: stops[0] + 1] if stops else events


def grave_event(
    points: Sequence[Point], alarms: Sequence[int], event: Mapping[str, Any], settings: WatchdogSection
) -> int | None:
    """Points from the start of an event to its first roll_back, if that came in time."""
    start = next(i for i, point in enumerate(points) if point.step >= event["start"])
    delays = [i - start for i in alarms if i >= start]
    return delays[0] if delays and delays[0] <= settings.patience else None


def describe(
    events: Sequence[Mapping[str, Any]],
    ends: Sequence[int | None],
    verdicts: Sequence[Verdict],
    alarms: Sequence[int],
) -> str:
    kind = verdicts[alarms[0]].kind if alarms else ""
    texts = ["MISSED" if end is None else f"{kind} after {end} points" for end in ends]
    return ", ".join(texts + ["not reached: the run has stopped"] * (len(events) - len(ends)))


def judge_variants(folder: Path, labels: Mapping[str, Any]) -> list[bool]:
    """Print what is wrong on the labelled curves and their variants; whether the bars hold."""
    num_wrong, num_drifts = 0, 0
    for name, label in labels.items():
        points = read_csv(folder / f"{name}.csv")
        events = [event for event in label["events"] if event["action"] in GRAVE]
        for variant, curve in make_variants(points).items():
            if len(curve) < FEWEST_POINTS:
                continue
            wrong = [
                (point.step, verdict)
                for point, verdict in zip(curve, replay(curve, DEFAULTS), strict=True)
                if verdict.interrupts or verdict.kind == "drift"
                if not any(e["start"] <= point.step <= e["end"] for e in events)
            ]
            interrupting = [(step, verdict) for step, verdict in wrong if verdict.interrupts]
            num_wrong += len(interrupting)
            num_drifts += 0 if events else len(wrong) - len(interrupting)
            for step, verdict in wrong[:1]:
                print(f"WRONG  {name}, {variant}, step {step}: {verdict.action}, {verdict.message}")
    return [
        judge("watchdog: false alarms on variants of the labelled curves", num_wrong, 0, "at_most"),
        judge("watchdog: points in a watched drift, healthy curves and variants", num_drifts, 0, "at_most"),
    ]


def make_variants(points: Sequence[Point]) -> dict[str, Sequence[Point]]:
    """A curve as it would have been recorded more coarsely, or from a later step on."""
    variants: dict[str, Sequence[Point]] = {"as it is": points}
    variants |= {f"every {n}th": points[::n] for n in (2, 5, 10)}
    variants |= {f"mean of {n}": average(points, n) for n in (4, 16)}
    for share in (0.1, 0.25, 0.5, 0.75):
        variants[f"from {share:.0%}"] = points[int(share * len(points)) :]
    return variants


def average(points: Sequence[Point], num: int) -> list[Point]:
    """Means of `num` consecutive points; not finite if one of them is not."""
    means = []
    for at in range(0, len(points) - num + 1, num):
        group = points[at : at + num]
        loss = fmean(point.loss for point in group)
        norms = [point.grad_norm for point in group if point.grad_norm is not None]
        norm = fmean(norms) if len(norms) == num else None
        means.append(replace(group[0], loss=loss, loss_max_rank=loss, grad_norm=norm))
    return means


# -- grafts


def raised(point: Point, nats: float) -> Point:
    return replace(point, loss=point.loss + nats, loss_max_rank=point.loss_max_rank + nats)


def lowered(place: Place, falls: Sequence[float]) -> list[Point]:
    """The points with the loss lowered by `falls`, as far as it stays above 0."""
    pairs = zip(place.points, falls, strict=False)
    return [raised(point, -min(nats, 0.9 * point.loss)) for point, nats in pairs]


def lerp(share: float, low: float, high: float) -> float:
    return low + share * (high - low)


def lerp_log(share: float, low: float, high: float) -> float:
    return float(low * (high / low) ** share)


def find_jump_nats(place: Place, share: float, least: float = 0.5, most: float = 3.0) -> float:
    """A jump of at least 6 spreads."""
    return max(lerp_log(share, least, most), lerp_log(share, 6.0, 30.0) * place.spread)


# Faults


def jump(place: Place, share: float) -> Graft:
    """A lasting jump: 0.5 to 3 nats, and at least 6 to 30 spreads."""
    nats = find_jump_nats(place, share)
    return Graft([raised(p, nats) for p in place.points], "roll_back", by=IN_TIME, most_onset_error=5)


def small_jump(place: Place, share: float) -> Graft:
    """A lasting jump of 8 to 20 spreads and less than 0.4 nats: the promise begins at 0.5."""
    nats = min(0.4, lerp_log(share, 8, 20) * place.spread)
    return Graft([raised(p, nats) for p in place.points], "roll_back", by=2 * IN_TIME)


def uneven_jump(place: Place, share: float) -> Graft:
    """A lasting jump of all 64 ranks, that of one of them 2 to 16 times as high."""
    nats, times = max(1.0, 9 * place.spread), lerp_log(share, 2, 16)
    others = nats * (64 - times) / 63
    points = [
        replace(raised(p, nats), loss_max_rank=p.loss + times * nats, loss_other_ranks=p.loss + others)
        for p in place.points
    ]
    return Graft(points, "roll_back", by=IN_TIME)


def climb(place: Place, share: float) -> Graft:
    """A lasting jump of 1 nat that takes 2 to 20 points."""
    num, nats = int(lerp(share, 2, 20)), max(1.0, 10 * place.spread)
    points = [raised(p, nats * min(1.0, (t + 1) / num)) for t, p in enumerate(place.points)]
    return Graft(points, "roll_back", by=IN_TIME + num)


def blow_up(place: Place, share: float) -> Graft:
    """Raise the loss by one sigma, doubling every one to two steps."""
    steps = lerp(share, 1, 2)
    rise = [place.spread * 2 ** min(t / steps, 60) for t in range(len(place.points))]
    passes = next(t for t, nats in enumerate(rise) if nats > DEFAULTS.loss_sigmas * place.spread)
    points = [raised(p, min(nats, MOST_NATS)) for p, nats in zip(place.points, rise, strict=True)]
    return Graft(points, "roll_back", by=passes + IN_TIME, most_onset_error=8)


def drift(place: Place, share: float) -> Graft:
    """The loss falls no more, and rises by 0.03 to 0.2 % a step: found before that is 15 %, or 100 points."""
    rate, half, losses = lerp_log(share, 0.0003, 0.002), 15, [p.loss for p in place.points]
    usual = [median(losses[max(0, t - half) : t + half + 1]) for t in range(len(losses))]
    points = [raised(p, usual[0] * (1 + rate * t) - usual[t]) for t, p in enumerate(place.points)]
    return Graft(points, "roll_back", by=max(100, int(0.15 / rate)))


def norm_first(place: Place, share: float) -> Graft:
    """The norm rises 5 to 50 times over 5 steps, then the loss jumps; both stay."""
    nats, times = find_jump_nats(place, share), lerp_log(share, 5, 50)
    points = []
    for t, point in enumerate(place.points):
        assert point.grad_norm is not None
        scaled = replace(point, grad_norm=point.grad_norm * times ** (min(t + 1, 5) / 5))
        points.append(raised(scaled, nats if t >= 5 else 0.0))
    return Graft(points, "roll_back", onset=5, by=5 + IN_TIME, watch_by=4)


def norm_growth(place: Place, share: float) -> Graft:
    """W-05: the norm grows a hundredfold over 20 to 300 steps, then the loss jumps by 1."""
    num, nats = int(lerp(share, 20, 300)), max(1.0, 8 * place.spread)
    points = []
    for t, point in enumerate(place.points):
        assert point.grad_norm is not None
        scaled = replace(point, grad_norm=point.grad_norm * 100 ** (min(t, num) / num))
        points.append(raised(scaled, nats if t >= num else 0.0))
    return Graft(points, "roll_back", onset=num, by=num + IN_TIME, watch_by=num - 1)


def nan_loss(place: Place, share: float) -> Graft:
    """Loss and norm are NaN from here on; or the loss is fine, and every update is skipped."""
    if share < 0.5:
        points = [replace(p, loss=math.nan, loss_max_rank=math.nan, grad_norm=math.nan) for p in place.points]
    else:
        points = [replace(p, grad_norm=None, has_norm=True) for p in place.points]
    return Graft(points, "roll_back", by=PATIENCE, most_onset_error=0)


def non_finite_often(place: Place, share: float) -> Graft:
    """W-03: 3 to 19 steps that are not finite, and a good one, again and again."""
    num = int(lerp(share, 3, 20))
    points = [
        p if t % (num + 1) == num else replace(p, loss=math.nan, loss_max_rank=math.nan, grad_norm=None)
        for t, p in enumerate(place.points)
    ]
    return Graft(points, "roll_back", by=200)


def relapse_often(place: Place, share: float) -> Graft:
    """W-02: +1 in one step of three, of two, in two of three; or +3."""
    nats = max(lerp(share, 1, 3), 7 * place.spread)
    good, bad = place.random.choice(((2, 1), (1, 1), (1, 2), (2, 2)))
    points = [raised(p, nats if t % (good + bad) < bad else 0.0) for t, p in enumerate(place.points)]
    return Graft(points, "roll_back", by=200)


def relapse_long(place: Place, share: float) -> Graft:
    """W-02: 6 to 28 bad steps and 2 to 6 good ones, again and again."""
    bad, good = int(lerp(share, 6, 29)), place.random.randint(2, 6)
    nats = max(1.0, 7 * place.spread)
    points = [raised(p, nats if t % (good + bad) < bad else 0.0) for t, p in enumerate(place.points)]
    return Graft(points, "roll_back", by=200)


def jump_in_easy_data(place: Place, share: float) -> Graft:
    """W-04: the loss is 0.5 lower for 35 to 200 points, and +1 for good begins within 50 points of that."""
    num, begin = int(lerp(share, 35, 200)), place.random.randint(5, 50)
    easy = lowered(place, [0.5 * (t < num) for t in range(len(place.points))])
    nats = max(1.0, 6 * place.spread)
    points = [raised(p, nats if t >= begin else 0.0) for t, p in enumerate(easy)]
    return Graft(points, "roll_back", onset=begin, by=begin + IN_TIME + PATIENCE)


def jump_after_easy_data(place: Place, share: float) -> Graft:
    """W-04: the same within 50 points of the end of the easy data."""
    num = int(lerp(share, 35, 200))
    begin = num + place.random.randint(0, 50)
    easy = lowered(place, [0.5 * (t < num) for t in range(len(place.points))])
    nats = max(1.0, 6 * place.spread)
    points = [raised(p, nats if t >= begin else 0.0) for t, p in enumerate(easy)]
    return Graft(points, "roll_back", onset=begin, by=begin + IN_TIME + PATIENCE)


def oscillation(place: Place, share: float) -> Graft:
    """W-06: an oscillation of period 10 to 60 that grows to 3 nats in 300 to 900 steps."""
    period, num = lerp(share, 10, 60), place.random.randint(300, 900)
    phase = place.random.uniform(0, 2 * math.pi)
    points = []
    for t, point in enumerate(place.points):
        nats = 3 * min(1.0, t / num) * math.sin(2 * math.pi * t / period + phase)
        points.append(raised(point, max(nats, 0.1 - point.loss)))
    return Graft(points, "roll_back", by=num)


def jump_in_new_phase(place: Place, share: float) -> Graft:
    """W-11: a level shift at a change of phase, and a lasting jump from its 6th to 50th point on."""
    begin, nats = int(lerp(share, 5, 50)), find_jump_nats(place, place.random.random(), 0.5, 1.0)
    shifted = phase_change(place, place.random.random()).points
    points = [raised(p, nats if t >= begin else 0.0) for t, p in enumerate(shifted)]
    return Graft(points, "roll_back", onset=begin, by=begin + IN_TIME)


def frozen_loss(place: Place, share: float) -> Graft:
    """W-08: the loss is one exact value while norms live, or exactly 0."""
    loss = 0.0 if share > 2 / 3 else place.points[0].loss * (1 if share < 1 / 3 else 0.8)
    points = [replace(p, loss=loss, loss_max_rank=loss) for p in place.points]
    return Graft(points, "stop", by=IN_TIME, watch_by=20)


# What is watched, and no more


def outlier_rank(place: Place, share: float) -> Graft:
    """W-07: one rank of 8 to 512 at +3 (+1.5 to +6) for good."""
    num, nats = round(lerp_log(share, 8, 512)), place.random.choice((3.0, 3.0, 1.5, 6.0))
    is_known = place.random.random() < 0.5  # what the others have
    points = [
        replace(
            p,
            loss=p.loss + nats / num,
            loss_max_rank=p.loss + nats,
            loss_other_ranks=p.loss if is_known else None,
        )
        for p in place.points
    ]
    return Graft(points, "watch", by=200)


# What has to be left alone


def transient(place: Place, share: float) -> Graft:
    """8 to 100 spreads that last, or die away, for 2 steps to 2 less than `patience`."""
    num = place.random.randint(2, PATIENCE - 2)
    height, fades = lerp_log(share, 8, 100) * place.spread, place.random.random() < 0.5
    points = [
        raised(p, height * (1 - t / num if fades else 1)) if t < num else p
        for t, p in enumerate(place.points)
    ]
    return Graft(points, "nothing")


def bump(place: Place, share: float) -> Graft:
    """W-10: a flat bump of 20 to 28 steps, +1."""
    num, nats = int(lerp(share, 20, 29)), max(1.0, 8 * place.spread)
    return Graft([raised(p, nats) if t < num else p for t, p in enumerate(place.points)], "nothing")


def blip(place: Place, share: float) -> Graft:
    """One step of any size, or five of them 20 steps apart."""
    nats, num = lerp_log(share, 6, 10_000) * place.spread, place.random.choice((1, 5))
    bad = {20 * n for n in range(num)}
    return Graft([raised(p, nats) if t in bad else p for t, p in enumerate(place.points)], "nothing")


def dip(place: Place, share: float) -> Graft:
    """W-01: 4 to 14 spreads lower for 60 to 250 points."""
    num, nats = place.random.choice((60, 150, 150, 250)), lerp(share, 4, 14) * place.spread
    return Graft(lowered(place, [nats * (t < num) for t in range(len(place.points))]), "nothing")


def gain_length(share: float) -> int:
    return int(lerp_log(share, 100, 2500))


def gain_horizon(share: float) -> int:
    return gain_length(share) + 100 + AFTER


def gain(place: Place, share: float) -> Graft:
    """W-01: -0.3 (-0.15 to -0.6) for 100 to 2,500 points, ending at once."""
    num, nats = gain_length(share), place.random.choice((0.3, 0.3, 0.15, 0.6))
    return Graft(lowered(place, [nats * (t < num) for t in range(len(place.points))]), "nothing")


def gain_that_fades(place: Place, share: float) -> Graft:
    """W-01: the same, ending over 100 points (30 to 100)."""
    num, nats = gain_length(share), place.random.choice((0.3, 0.3, 0.15, 0.6))
    end = place.random.choice((100, 100, 30))
    falls = [nats * max(0.0, min(1.0, 1 - (t - num) / end)) for t in range(len(place.points))]
    return Graft(lowered(place, falls), "nothing")


def gain_in_steps(place: Place, share: float) -> Graft:
    """-0.3 that comes over 1 to 200 points and ends in two steps, 60 to 200 points apart."""
    num, nats = gain_length(share), 0.3
    begin, last = min(num // 2, place.random.choice((1, 50, 200))), place.random.randint(60, 200)
    falls = [
        nats * min(1.0, (t + 1) / begin) if t < num else nats / 2 if t < num + last else 0.0
        for t in range(len(place.points))
    ]
    return Graft(lowered(place, falls), "nothing")


def tooth_length(share: float) -> int:
    return int(lerp_log(share, 150, 1000))


def sawtooth(place: Place, share: float) -> Graft:
    """W-01: an epoch's sawtooth of 0.2 to 0.3: a slow gain, then a jump back, three times."""
    num, nats = tooth_length(share), place.random.uniform(0.2, 0.3)
    falls = [nats * (t % num) / num if t < 3 * num else 0.0 for t in range(len(place.points))]
    return Graft(lowered(place, falls), "nothing")


def sawtooth_edge(place: Place, share: float) -> Graft:
    """W-01: the other way round: a drop at the edge of each epoch, regained slowly, three times."""
    num, nats = tooth_length(share), place.random.uniform(0.2, 0.3)
    falls = [nats * (1 - (t % num) / num) if t < 3 * num else 0.0 for t in range(len(place.points))]
    return Graft(lowered(place, falls), "nothing")


def sawtooth_steps(place: Place, share: float) -> Graft:
    """W-01: a drop at the edge, a slow gain on top of it, and a jump back to before both, three times."""
    num, nats = tooth_length(share), place.random.uniform(0.2, 0.3)
    falls = [
        nats * (0.5 + 0.5 * (t % num) / num) if t < 3 * num and t % num < 0.9 * num else 0.0
        for t in range(len(place.points))
    ]
    return Graft(lowered(place, falls), "nothing")


def phase_change(place: Place, share: float) -> Graft:
    """W-11: a level shift of up to 30 spreads, up or down, at a declared change of phase."""
    nats = place.random.choice((-1, 1)) * lerp(share, 4, 30) * place.spread
    nats = max(nats, 0.1 - min(p.loss for p in place.points))
    return Graft([replace(raised(p, nats), phase="next") for p in place.points], "nothing")


def noisier_phase(place: Place, share: float) -> Graft:
    """A change of phase after which the noise is 1 to 4 times as strong."""
    times, chance = lerp(share, 1, 4), place.random
    extra = place.spread * math.sqrt(times**2 - 1)
    points = [
        replace(raised(p, max(extra * chance.gauss(0, 1), -0.9 * p.loss)), phase="next") for p in place.points
    ]
    return Graft(points, "nothing")


def noisier(place: Place, share: float) -> Graft:
    """The noise is 1 to 3 times as strong from here on."""
    times, chance = lerp(share, 1, 3), place.random
    extra = place.spread * math.sqrt(times**2 - 1)
    return Graft([raised(p, max(extra * chance.gauss(0, 1), -0.9 * p.loss)) for p in place.points], "nothing")


def untouched(place: Place, share: float) -> Graft:
    """Change nothing."""
    return Graft(place.points, "nothing")


def sawtooth_horizon(share: float) -> int:
    return 3 * tooth_length(share) + AFTER


ROWS = {
    "jump": Row(jump),
    "small_jump": Row(small_jump, least_found=0.5),
    "uneven_jump": Row(uneven_jump),
    "climb": Row(climb),
    "blow_up": Row(blow_up),
    "drift": Row(drift, lambda share: 600),
    "norm_first": Row(norm_first, needs_norm=True),
    "nan": Row(nan_loss),
    "transient": Row(transient),
    "blip": Row(blip),
    "untouched": Row(untouched, lambda share: 1000, most_wrong=0.0),
    "noisier": Row(noisier, lambda share: 600),
    "noisier_phase": Row(noisier_phase, lambda share: 600),
    "W-01 dip": Row(dip, lambda share: 250 + AFTER),
    "W-01 gain": Row(gain, gain_horizon),
    "W-01 gain_that_fades": Row(gain_that_fades, gain_horizon),
    "W-01 gain_in_steps": Row(gain_in_steps, lambda share: gain_horizon(share) + 100),
    "W-01 sawtooth": Row(sawtooth, sawtooth_horizon),
    "W-01 sawtooth_edge": Row(sawtooth_edge, sawtooth_horizon),
    "W-01 sawtooth_steps": Row(sawtooth_steps, sawtooth_horizon),
    "W-02 relapse_often": Row(relapse_often),
    "W-02 relapse_long": Row(relapse_long),
    "W-03 non_finite_often": Row(non_finite_often),
    "W-04 jump_in_easy_data": Row(jump_in_easy_data, lambda share: 400),
    "W-04 jump_after_easy_data": Row(jump_after_easy_data, lambda share: 400),
    "W-05 norm_growth": Row(norm_growth, lambda share: 400, needs_norm=True),
    "W-06 oscillation": Row(oscillation, lambda share: 900),
    "W-07 outlier_rank": Row(outlier_rank, lambda share: 600),
    "W-08 frozen_loss": Row(frozen_loss),
    "W-10 bump": Row(bump),
    "W-11 phase_change": Row(phase_change),
    "W-11 jump_in_new_phase": Row(jump_in_new_phase),
}


# -- grafting


@dataclass(frozen=True)
class Work:
    """The places of all rows on one curve, for one process."""

    name: str
    points: Sequence[Point]
    spikes: Sequence[int]  # steps at which labelled transient spikes begin
    num_places: Mapping[tuple[str, int], int]  # by row and third
    seed: int


def plan_works(
    folder: Path, labels: Mapping[str, Any], rows: Sequence[str], num_places: int, seed: int
) -> list[Work]:
    """Share the places of each row and third evenly among the curves that have room for the graft."""
    curves = {}
    for name, label in labels.items():
        if label["points"] >= LONG and not any(event["action"] in GRAVE for event in label["events"]):
            curves[name] = read_csv(folder / f"{name}.csv")
    shares: dict[str, dict[tuple[str, int], int]] = {name: {} for name in curves}
    for row in rows:
        for third in range(3):
            needed = 3 * DEFAULTS.window + ROWS[row].horizon((third + 1) / 3)
            fitting = [
                name
                for name, points in curves.items()
                if len(points) >= needed and (points[-1].has_norm or not ROWS[row].needs_norm)
            ]
            for name in fitting:
                shares[name][row, third] = math.ceil(num_places / len(fitting))
    longest_first = sorted(curves.items(), key=lambda item: -len(item[1]))
    return [
        Work(name, points, find_spikes(labels[name]), shares[name], seed) for name, points in longest_first
    ]


def find_spikes(label: Mapping[str, Any]) -> list[int]:
    """The steps at which the labelled transient spikes begin."""
    return [event["start"] for event in label["events"] if event["kind"].startswith("transient")]


def judge_grafts(work: Work) -> list[tuple[str, str, Outcome]]:
    """The outcomes of all rows on one curve, each with its place and the name of its row."""
    name, points, seed = work.name, work.points, work.seed
    chance = random.Random(f"{seed} {name}")
    healthy = find_healthy_indices(points, work.spikes)
    wanted: dict[int, list[tuple[str, float]]] = defaultdict(list)  # by index
    for (row, third), num in work.num_places.items():
        for _ in range(num):
            share = round((third + chance.random()) / 3, 6)
            last = len(points) - ROWS[row].horizon(share)
            wanted[chance.choice([index for index in healthy if index <= last])].append((row, share))
    outcomes, memory = [], WatchdogState()
    for index in range(max(wanted, default=-1) + 1):
        for row, share in wanted.get(index, ()):
            seeded = random.Random(f"{seed} {name} {row} {share}")
            place = make_place(points, index, ROWS[row].horizon(share), memory, seeded)
            outcome = judge_graft(place, ROWS[row].make(place, share), min(2, int(3 * share)))
            outcomes.append((f"{name} at {points[index].step}, {share}", row, outcome))
        memory, _ = judge_step(DEFAULTS, memory, points[index], points[index].has_norm)
    return outcomes


def find_healthy_indices(points: Sequence[Point], spikes: Sequence[int]) -> list[int]:
    """The indices past the second window at which no spike is open."""
    first = 2 * DEFAULTS.window
    spacing = points[first + 1].step - points[first].step
    memory, indices = WatchdogState(), []
    for index, point in enumerate(points):
        labelled = any(0 <= point.step - start < PATIENCE * spacing for start in spikes)
        if index >= first and memory.spike is None and not labelled:
            indices.append(index)
        memory, _ = judge_step(DEFAULTS, memory, point, point.has_norm)
    return indices


def make_place(
    points: Sequence[Point], index: int, horizon: int, memory: WatchdogState, chance: random.Random
) -> Place:
    before = [p.loss for p in points[index - DEFAULTS.window : index]]
    ahead = points[index : index + horizon]
    return Place(ahead, memory, spread_about_line(before), median(before[-30:]), chance)


def spread_about_line(losses: Sequence[float]) -> float:
    """1.4826 MAD of the losses about their straight line."""
    steps = np.arange(len(losses))
    deviations = np.asarray(losses) - np.polyval(np.polyfit(steps, losses, 1), steps)
    return float(1.4826 * np.median(np.abs(deviations - np.median(deviations))))


def judge_graft(place: Place, graft: Graft, third: int) -> Outcome:
    """Judge on from the place; whether what was said is right."""
    memory, watched = place.memory, None
    for index, point in enumerate(graft.points):
        memory, verdict = judge_step(DEFAULTS, memory, point, point.has_norm)
        if verdict.action == "watch" and watched is None:
            watched = index
        if verdict.interrupts:
            return judge_interruption(graft, verdict, index, watched, third)
    if graft.wanted == "watch" and watched is not None:
        return Outcome(third, graft.wanted, watched <= graft.by, "watch", watched)
    return Outcome(third, graft.wanted, graft.wanted == "nothing", "nothing")


def judge_interruption(
    graft: Graft, verdict: Verdict, index: int, watched: int | None, third: int
) -> Outcome:
    assert verdict.onset is not None
    stride = graft.points[1].step - graft.points[0].step
    error = abs(verdict.onset - graft.points[graft.onset].step) / stride
    is_right = verdict.action == graft.wanted and graft.onset <= index <= graft.by
    warned = graft.watch_by is None or (watched is not None and watched <= graft.watch_by)
    exact = graft.most_onset_error is None or error <= graft.most_onset_error
    right = is_right and warned and exact
    return Outcome(third, graft.wanted, right, str(verdict.kind), index - graft.onset, error)


def judge_rows(works: Sequence[Work], rows: Sequence[str], verbose: bool) -> list[bool]:
    """Print a table of all rows; whether their bars hold."""
    outcomes: dict[str, list[Outcome]] = defaultdict(list)
    with Pool() as pool:
        for found in pool.imap_unordered(judge_grafts, works):
            for where, row, outcome in found:
                outcomes[row].append(outcome)
                if verbose and not outcome.right:
                    print(f"WRONG  {row} on {where}: {outcome}")
    wrong = {row: report_row(row, outcomes[row]) for row in rows}
    return [bar for row in rows for bar in judge_row(row, outcomes[row], wrong[row])]


def report_row(name: str, outcomes: Sequence[Outcome]) -> float:
    """Print what was said of one row in each third of its range; the largest share of wrong ones."""
    shares = []
    for third, word in enumerate(THIRDS):
        some = [one for one in outcomes if one.third == third]
        said = ", ".join(f"{said} {n}" for said, n in Counter(one.said for one in some).most_common())
        delays = [one.delay for one in some if one.delay is not None and one.right]
        timing = f"; after {median(delays):.0f} (at most {max(delays)})" if delays else ""
        shares.append(sum(not one.right for one in some) / len(some))
        print(f"{name:26} {word:4} {len(some):4} places: {100 * shares[-1]:5.1f} % wrong: {said}{timing}")
    return max(shares)


def judge_row(name: str, outcomes: Sequence[Outcome], wrong: float) -> list[bool]:
    """Judge the worst third of a row: what must be left alone, or found in time."""
    if outcomes[0].wanted == "nothing":
        return [judge(f"watchdog: {name}, rolled back in vain", wrong, ROWS[name].most_wrong, "at_most")]
    return [judge(f"watchdog: {name}, found in time", 1 - wrong, ROWS[name].least_found, "at_least")]


def main() -> None:
    parser = argparse.ArgumentParser(description="The watchdog over recorded curves and grafted faults.")
    parser.add_argument("folder", type=Path, help="of curves and labels.json, or a file beside such a folder")
    parser.add_argument("--places", type=int, default=300, help="for each third of the range of a row")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", help="rows whose name has one of these words")
    parser.add_argument("-v", dest="verbose", action="store_true", help="name each graft judged wrong")
    words = parser.parse_args()
    folder = words.folder.parent / "curves" if words.folder.is_file() else words.folder
    labels = json.loads((folder / "labels.json").read_text(encoding="utf-8"))
    rows = [row for row in ROWS if not words.only or any(word in row for word in words.only)]
    verdicts = [] if words.only else judge_labelled(folder, labels)
    verdicts += [] if words.only else judge_variants(folder, labels)
    works = plan_works(folder, labels, rows, words.places, words.seed)
    finish(verdicts + judge_rows(works, rows, words.verbose))


if __name__ == "__main__":
    main()
