"""The watchdog over recorded curves of others, and over faults grafted onto the healthy ones of them.

    python benchmarks/watchdog_curves.py FOLDER [--places 20] [--seed 0]

FOLDER has NAME.csv (step, loss, grad_norm, lr) and labels.json: per curve `points`, `kind`, and `events`
with start, end and what an experienced operator would have done. It may also be a file that lies beside a
folder `curves`.

1. Labelled curves, defaults only. A roll_back in no event labelled "roll back" or "stop" is a false alarm; an
   event so labelled is found if a roll_back comes within `patience` points of its start. A "stop" that was
   found ends its run: later events of that curve are not reached. An excerpt of less than 20 points is judged
   with a window of 2 and a patience of 3, since the defaults would still be warming up at its end.
2. Grafted faults, defaults only, at seeded random places past the second window of every curve of 1,000
   points and more without an event to roll back for. A place is a memory: each fault is judged on from there,
   all on the same points. No line of the log is missing among them, and no transient spike of the labels
   began less than `patience` points before: that would be two faults in one. A spread is that of the 200
   points before it: 1.4826 MAD about their straight line.
   `patience` counts from the step at which a fault passes `loss_sigmas`; onsets are errors in points.
"""

import argparse
import json
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from report import finish, judge

from ds_pretrain.config.schema import WatchdogSection
from ds_pretrain.core.state import Verdict, WatchdogState
from ds_pretrain.watchdog.backtest import Point, read_csv, replay
from ds_pretrain.watchdog.detector import judge as judge_step

DEFAULTS = WatchdogSection()
FITTED = WatchdogSection(window=2, patience=3)
FEWEST_POINTS, LONG = 20, 1000
GRAVE = ("roll back", "stop")
HORIZON = 300  # points judged after a graft
LEVEL_POINTS = 30  # that the level of a curve is a median of
MOST_NATS = 10.0  # a blow-up rises no further


@dataclass(frozen=True)
class Place:
    """A point at which faults are grafted: the points after it, and the memory just before."""

    points: tuple[Point, ...]
    memory: WatchdogState
    spread: float
    level: float  # median of the 30 losses before
    random: random.Random


@dataclass(frozen=True)
class Graft:
    """A curve with a fault, and what must be said of it."""

    points: tuple[Point, ...]
    roll_back_by: int | None  # the last index at which the roll_back is in time; None: there must be none
    watch_by: int | None = None  # the same for a watch
    onset: int = 0  # index
    most_onset_error: int = 5


@dataclass(frozen=True)
class Outcome:
    """The verdict on a graft."""

    right: bool
    kind: str
    delay: int | None = None
    onset_error: float | None = None
    most_onset_error: int = 5


# -- labelled curves


def judge_labelled(folder: Path, labels: Mapping[str, Any]) -> list[bool]:
    """Print a line for each curve; whether both bars hold."""
    false_alarms, found, missed = 0, 0, 0
    for name, label in labels.items():
        points = read_csv(folder / f"{name}.csv")
        settings = FITTED if len(points) < FEWEST_POINTS else DEFAULTS
        verdicts = replay(points, settings)
        events = [event for event in label["events"] if event["action"] in GRAVE]
        alarms = [i for i, verdict in enumerate(verdicts) if verdict.roll_back]
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


# -- faults


def raised(point: Point, nats: float) -> Point:
    return replace(point, loss=point.loss + nats, loss_max_rank=point.loss_max_rank + nats)


def jump(place: Place) -> Graft:
    """A lasting jump of 8 spreads."""
    return Graft(tuple(raised(p, 8 * place.spread) for p in place.points), DEFAULTS.patience)


def blow_up(place: Place) -> Graft:
    """Raise the loss by one sigma, doubling every one to two steps."""
    steps = place.random.uniform(1, 2)
    rise = [place.spread * 2 ** min(t / steps, 60) for t in range(len(place.points))]
    passes = next(t for t, nats in enumerate(rise) if nats > DEFAULTS.loss_sigmas * place.spread)
    points = (raised(p, min(nats, MOST_NATS)) for p, nats in zip(place.points, rise, strict=True))
    return Graft(tuple(points), passes + DEFAULTS.patience)


def drift(place: Place) -> Graft:
    """0.1 % of the loss a step, to be found before it has risen by 10 % over what it was at the place.

    Where the healthy loss still falls, a drift raises it so far after more than 100 steps, and begins to be
    one where the loss is last within 1 % of its lowest.
    """
    points = tuple(raised(p, 0.001 * t * p.loss) for t, p in enumerate(place.points))
    half = LEVEL_POINTS // 2
    levels = [median(p.loss for p in points[t - half : t + half]) for t in range(half, len(points) - half)]
    risen = [t + half for t, level in enumerate(levels) if level >= 1.1 * place.level]
    lowest = [t for t, level in enumerate(levels) if level <= 1.01 * min(levels)][-1]
    onset = lowest + half if lowest else 0
    by = max(100, risen[0] if risen else len(points)) - 1
    return Graft(points, by, onset=onset, most_onset_error=100)


def norm_first(place: Place) -> Graft:
    """The norm rises tenfold over 5 steps, then the loss jumps by 8 spreads; both stay."""
    points = []
    for t, point in enumerate(place.points):
        assert point.grad_norm is not None
        scaled = replace(point, grad_norm=point.grad_norm * 10 ** (min(t + 1, 5) / 5))
        points.append(raised(scaled, 8 * place.spread if t >= 5 else 0.0))
    return Graft(tuple(points), 5 + DEFAULTS.patience, watch_by=4, onset=5)


def nan_loss(place: Place) -> Graft:
    """Loss and norm are NaN from here on."""
    points = (replace(p, loss=math.nan, loss_max_rank=math.nan, grad_norm=math.nan) for p in place.points)
    return Graft(tuple(points), DEFAULTS.patience)


def infinite_norm(place: Place) -> Graft:
    """The loss is fine, and every update is dropped."""
    points = (replace(p, grad_norm=None, has_norm=True) for p in place.points)
    return Graft(tuple(points), DEFAULTS.patience)


# -- what has to be left alone


def transient(place: Place) -> Graft:
    """8 to 100 spreads that last, or die away, for 2 steps to 5 less than `patience`."""
    num_steps = place.random.randint(2, DEFAULTS.patience - 5)
    height = math.exp(place.random.uniform(math.log(8), math.log(100))) * place.spread
    fades = place.random.random() < 0.5
    points = [
        raised(p, height * (1 - t / num_steps if fades else 1)) if t < num_steps else p
        for t, p in enumerate(place.points)
    ]
    return Graft(tuple(points), None)


def blip(place: Place) -> Graft:
    """One step of up to 100 spreads."""
    return Graft(
        (raised(place.points[0], place.random.uniform(6, 100) * place.spread), *place.points[1:]), None
    )


def dip(place: Place) -> Graft:
    """Easy data for 60 to 250 steps: the loss falls by 10 spreads, and comes back."""
    num_steps = place.random.randint(60, 250)
    nats = min(10 * place.spread, 0.9 * min(p.loss for p in place.points))
    points = (raised(p, -nats) if t < num_steps else p for t, p in enumerate(place.points))
    return Graft(tuple(points), None)


def phase_change(place: Place) -> Graft:
    """A level shift of up to 30 spreads, up or down, at a declared change of phase."""
    nats = place.random.choice((-1, 1)) * place.random.uniform(8, 30) * place.spread
    nats = max(nats, 0.1 - min(p.loss for p in place.points))
    points = (replace(raised(p, nats), phase="next") for p in place.points)
    return Graft(tuple(points), None)


def untouched(place: Place) -> Graft:
    """Change nothing."""
    return Graft(place.points, None)


FAULTS: tuple[Callable[[Place], Graft], ...] = (
    *(jump, blow_up, drift, norm_first, nan_loss, infinite_norm),
    *(transient, blip, dip, phase_change, untouched),
)
NEED_A_NORM = (norm_first,)


# -- grafting


def judge_grafted(folder: Path, labels: Mapping[str, Any], num_places: int, seed: int) -> list[bool]:
    """Print a table of all faults; whether every bar holds."""
    outcomes: dict[str, list[Outcome]] = defaultdict(list)
    for name, label in labels.items():
        if label["points"] < LONG or any(event["action"] in GRAVE for event in label["events"]):
            continue
        points = read_csv(folder / f"{name}.csv")
        spikes = [event["start"] for event in label["events"] if event["kind"].startswith("transient")]
        places = choose_places(points, spikes, num_places, random.Random(f"{seed} {name}"))
        for place in places:
            for fault in FAULTS:
                if fault not in NEED_A_NORM or place.points[0].has_norm:
                    outcome = judge_graft(place, fault(place))
                    outcomes[fault.__name__].append(outcome)
                    if not outcome.right:
                        print(f"WRONG  {fault.__name__} on {name} at step {place.points[0].step}: {outcome}")
    return [bar for name in outcomes for bar in report_fault(name, outcomes[name])]


def choose_places(
    points: Sequence[Point], spikes: Sequence[int], num_places: int, chance: random.Random
) -> list[Place]:
    """Seeded random places, with the memory of the healthy curve before each."""
    first = 2 * DEFAULTS.window
    spacing = points[first + 1].step - points[first].step
    whole = [
        index
        for index in range(first, len(points) - HORIZON)
        if points[index + HORIZON - 1].step - points[index - 1].step == HORIZON * spacing
        and not any(0 <= points[index].step - start < DEFAULTS.patience * spacing for start in spikes)
    ]
    indices = sorted(chance.sample(whole, num_places))
    memory, places = WatchdogState(), []
    for index, point in enumerate(points[: indices[-1] + 1]):
        if index in indices:
            before = [p.loss for p in points[index - DEFAULTS.window : index]]
            spread, level = spread_about_line(before), median(before[-LEVEL_POINTS:])
            ahead = tuple(points[index : index + HORIZON])
            places.append(Place(ahead, memory, spread, level, random.Random(f"{index} {chance.random()}")))
        memory, _ = judge_step(DEFAULTS, memory, point, point.has_norm)
    return places


def spread_about_line(losses: Sequence[float]) -> float:
    """1.4826 MAD of the losses about their straight line."""
    steps = np.arange(len(losses))
    deviations = np.asarray(losses) - np.polyval(np.polyfit(steps, losses, 1), steps)
    return float(1.4826 * np.median(np.abs(deviations - np.median(deviations))))


def judge_graft(place: Place, graft: Graft) -> Outcome:
    """Judge on from the place; whether what was said is right."""
    memory, watched = place.memory, None
    for index, point in enumerate(graft.points):
        memory, verdict = judge_step(DEFAULTS, memory, point, point.has_norm)
        if verdict.action == "watch" and watched is None:
            watched = index
        if verdict.roll_back:
            return rolled_back(graft, verdict, index, watched)
    return Outcome(graft.roll_back_by is None, "nothing", None)


def rolled_back(graft: Graft, verdict: Verdict, index: int, watched: int | None) -> Outcome:
    assert verdict.onset is not None
    stride = graft.points[1].step - graft.points[0].step
    error = abs(verdict.onset - graft.points[graft.onset].step) / stride
    in_time = graft.roll_back_by is not None and index <= graft.roll_back_by
    warned = graft.watch_by is None or (watched is not None and watched <= graft.watch_by)
    right = in_time and warned and error <= graft.most_onset_error
    return Outcome(right, str(verdict.kind), index - graft.onset, error, graft.most_onset_error)


def report_fault(name: str, outcomes: Sequence[Outcome]) -> list[bool]:
    """Print what was said of one fault at all places; whether its bars hold."""
    kinds = ", ".join(f"{kind} {n}" for kind, n in Counter(one.kind for one in outcomes).most_common())
    delays = [one.delay for one in outcomes if one.delay is not None]
    errors = [one.onset_error for one in outcomes if one.onset_error is not None]
    timing = f"; after {median(delays):.0f} points (at most {max(delays)})" if delays else ""
    timing += f"; onset off by {median(errors):.0f} (at most {max(errors):.0f})" if errors else ""
    print(f"{name:14} {len(outcomes):4} places: {kinds}{timing}")
    wrong = sum(not one.right for one in outcomes)
    if name in ("transient", "blip", "dip", "phase_change", "untouched"):
        return [judge(f"watchdog: false alarms, {name}", wrong, 0, "at_most")]
    recall = 1 - wrong / len(outcomes)
    most = max((one.most_onset_error for one in outcomes), default=0)
    return [
        judge(f"watchdog: recall, {name}", recall, 1, "at_least"),
        judge(f"watchdog: onset error in points, {name}", max(errors, default=math.inf), most, "at_most"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="The watchdog over recorded curves and grafted faults.")
    parser.add_argument("folder", type=Path, help="of curves and labels.json, or a file beside such a folder")
    parser.add_argument("--places", type=int, default=20, help="per curve")
    parser.add_argument("--seed", type=int, default=0)
    words = parser.parse_args()
    folder = words.folder.parent / "curves" if words.folder.is_file() else words.folder
    labels = json.loads((folder / "labels.json").read_text(encoding="utf-8"))
    verdicts = judge_labelled(folder, labels)
    finish(verdicts + judge_grafted(folder, labels, words.places, words.seed))


if __name__ == "__main__":
    main()
