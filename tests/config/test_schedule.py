"""Learning-rate schedules, at every boundary."""

from itertools import pairwise
from math import cos, pi, sqrt
from typing import get_args

import pytest

from ds_pretrain.config.schedule import DecayShape
from ds_pretrain.config.schema import CosineSection, WsdSection
from tests.timelines import cosine, wsd

Schedule = CosineSection | WsdSection

SHAPES: tuple[DecayShape, ...] = get_args(DecayShape)
FLOORS = {"linear": 0.0, "cosine": 0.0, "1-sqrt": 0.1, "exponential": 0.05}
LENGTH, WARMUP, DECAY = 1000, 100, 200
STABLE = LENGTH - WARMUP - DECAY


def shaped(shape: DecayShape, warmup: int = WARMUP) -> WsdSection:
    return wsd(3e-4, LENGTH, warmup, DECAY, shape, FLOORS[shape])


def fraction(schedule: Schedule, step: int) -> float:
    return schedule.lr(step) / schedule.peak_lr


ALL: list[Schedule] = [*map(shaped, SHAPES), cosine(3e-4, LENGTH, WARMUP, 0.1), cosine(3e-4, LENGTH, 0, 0.0)]


def test_a_quarter_and_half_of_the_warmup_give_a_quarter_and_half_of_the_peak() -> None:
    schedules: list[Schedule] = [
        cosine(3e-4, 50_000, 2_000, 0.0),
        *(wsd(3e-4, 50_000, 2_000, 5_000, shape, 0.1) for shape in SHAPES),
    ]
    for schedule in schedules:
        assert schedule.lr(500) == pytest.approx(7.5e-5, rel=1e-12)
        assert schedule.lr(1_000) == pytest.approx(1.5e-4, rel=1e-12)
        assert schedule.lr(2_000) == 3e-4


def test_a_cosine_without_a_floor_is_at_half_the_peak_half_way_down() -> None:
    assert cosine(3e-4, 50_000, 2_000, 0.0).lr(26_000) == pytest.approx(1.5e-4, rel=1e-12)
    assert cosine(3e-4, 50_000, 2_000, 0.0).lr(50_000) == pytest.approx(0.0, abs=1e-18)
    assert cosine(3e-4, 50_000, 2_000, 0.1).lr(50_000) == pytest.approx(3e-5, rel=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_p14_wsd_is_right_at_every_boundary(shape: DecayShape) -> None:
    """Steps 0, w-1, w, w+s-1, w+s, total-1, total, where the stable stretch s is derived."""
    schedule, floor = shaped(shape), FLOORS[shape]
    last = (DECAY - 1) / DECAY
    left = {
        "linear": 1 - last,
        "cosine": 0.5 * (1 + cos(pi * last)),
        "1-sqrt": 1 - sqrt(last),
        "exponential": (floor**last - floor) / (1 - floor),
    }[shape]
    expected = {
        0: 0.0,
        WARMUP - 1: (WARMUP - 1) / WARMUP,
        WARMUP: 1.0,
        WARMUP + STABLE - 1: 1.0,
        WARMUP + STABLE: 1.0,
        LENGTH - 1: floor + (1 - floor) * left,
        LENGTH: floor,
    }
    assert schedule.decay_start == WARMUP + STABLE
    assert {step: fraction(schedule, step) for step in expected} == pytest.approx(
        expected, rel=1e-12, abs=1e-15
    )
    assert fraction(schedule, LENGTH - 1) > floor


@pytest.mark.parametrize("shape", SHAPES)
def test_the_middle_of_a_decay_has_the_value_of_its_shape(shape: DecayShape) -> None:
    halfway = {
        "linear": 0.5,
        "cosine": 0.5,
        "1-sqrt": 0.1 + 0.9 * (1 - sqrt(0.5)),
        "exponential": sqrt(0.05),
    }
    assert fraction(shaped(shape), LENGTH - DECAY // 2) == pytest.approx(halfway[shape], rel=1e-12)


@pytest.mark.parametrize("schedule", ALL, ids=str)
def test_a_schedule_rises_to_the_peak_then_never_rises_and_never_jumps(schedule: Schedule) -> None:
    fractions = [fraction(schedule, step) for step in range(LENGTH + 1)]
    changes = [after - before for before, after in pairwise(fractions)]
    assert all(change > 0 for change in changes[: schedule.warmup.steps])
    assert all(change <= 0 for change in changes[schedule.warmup.steps :])
    assert max(fractions) == fractions[schedule.warmup.steps] == 1.0
    steepest = 0.9 * sqrt(1 / DECAY)  # the first step of 1-sqrt; all others are far below
    assert max(map(abs, changes)) <= steepest + 1e-12


@pytest.mark.parametrize(
    "schedule", [*(shaped(s, warmup=0) for s in SHAPES), cosine(1e-3, 10, 0, 0.1)], ids=str
)
def test_without_warmup_the_first_step_is_at_the_peak(schedule: Schedule) -> None:
    assert schedule.lr(0) == schedule.peak_lr


def test_schedules_that_are_all_warmup_or_all_decay_work() -> None:
    assert cosine(1.0, 10, 10, 0.1).lr(10) == 1.0
    assert wsd(1.0, 10, 0, 10, "linear", 0.0).lr(5) == 0.5
    assert wsd(1.0, 10, 5, 5, "linear", 0.0).lr(5) == 1.0


@pytest.mark.parametrize("schedule", ALL, ids=str)
@pytest.mark.parametrize("step", [-1, LENGTH + 1])
def test_p14_a_step_outside_the_schedule_is_refused(schedule: Schedule, step: int) -> None:
    with pytest.raises(ValueError, match=f"covers steps 0 to {LENGTH}; step {step} lies outside it"):
        schedule.lr(step)


@pytest.mark.parametrize("schedule", ALL, ids=str)
def test_corners_lie_inside_the_run_in_order(schedule: Schedule) -> None:
    steps = list(schedule.corners().values())
    assert steps == sorted(steps)
    assert (steps[0], steps[-1]) == (0, LENGTH - 1)
    assert schedule.warmup.steps in steps
    if isinstance(schedule, WsdSection):
        assert schedule.corners()["decay start"] == schedule.decay_start
