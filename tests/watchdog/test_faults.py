"""The watchdog under the faults of the field, over a range of sizes, lengths and curves.

`benchmarks/watchdog_curves.py` grafts the same faults on recorded curves and measures recall and delay.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from ds_pretrain.core.state import Verdict, WatchdogState
from ds_pretrain.watchdog.backtest import Point
from ds_pretrain.watchdog.detector import OK
from tests.watchdog.curves import DEFAULTS, SPREAD, broken, judged, raised

PATIENCE = DEFAULTS.patience
PLACE = 600  # points before a fault


def make_curve(kind: str, num_points: int) -> list[Point]:
    """A loss that is flat, falls as one does in training, or does so with little noise; norms with noise."""
    chance, points = random.Random(kind), []
    for step in range(1, PLACE + num_points + 1):
        fallen = 0.0 if kind == "flat" else 4.0 / (1 + step / 100) ** 0.7
        spread = 0.01 if kind == "quiet" else SPREAD
        loss = 3.0 + fallen + spread * chance.gauss(0, 1)
        norm = 0.3 * math.exp(0.06 * chance.gauss(0, 1))
        points.append(Point(step, loss, loss, norm, phase="main"))
    return points


CURVES = {kind: make_curve(kind, 3600) for kind in ("flat", "falling", "quiet")}
MEMORIES = {kind: judged(points[:PLACE])[1] for kind, points in CURVES.items()}
each_curve = pytest.mark.parametrize("kind", list(CURVES))


def ahead(kind: str, num_points: int) -> list[Point]:
    return CURVES[kind][PLACE : PLACE + num_points]


def graft(kind: str, nats: Sequence[float] | Callable[[int], float], num_points: int = 300) -> list[Point]:
    """The points from the place on, each loss higher by so many nats."""
    added = nats if not callable(nats) else [nats(t) for t in range(num_points)]
    return [raised([p], n)[0] for p, n in zip(ahead(kind, len(added)), added, strict=True)]


def say(kind: str, points: Sequence[Point]) -> list[tuple[int, Verdict]]:
    """What is said of these points behind the healthy curve, with the index of each."""
    verdicts, _ = judged(points, memory=MEMORIES[kind])
    return [(t, verdict) for t, verdict in enumerate(verdicts) if verdict != OK]


def find_interruption(kind: str, points: Sequence[Point]) -> tuple[int, Verdict]:
    return next((t, verdict) for t, verdict in say(kind, points) if verdict.interrupts)


def require_none(kind: str, points: Sequence[Point]) -> None:
    assert not any(verdict.interrupts for _, verdict in say(kind, points))


# What begins and ends without harm


@each_curve
@pytest.mark.parametrize("spreads", [4, 6, 8, 10, 14])
def test_w01_a_dip_that_ends_is_not_rolled_back(kind: str, spreads: int) -> None:
    nats = spreads * MEMORIES[kind].loss.mad_sigma
    require_none(kind, graft(kind, lambda t: -nats if t < 150 else 0.0, 500))


@each_curve
@pytest.mark.parametrize("ending", [1, 100])
@pytest.mark.parametrize("length", [100, 500, 1500, 2500])
def test_w01_a_gain_that_ends_is_not_rolled_back(kind: str, length: int, ending: int) -> None:
    points = graft(kind, lambda t: -0.3 * max(0.0, min(1.0, 1 - (t - length) / ending)), length + 400)
    require_none(kind, points)


@each_curve
@pytest.mark.parametrize("nats", [0.2, 0.3])
@pytest.mark.parametrize("is_slow_gain", [False, True])
def test_w01_the_sawtooth_of_an_epoch_is_not_rolled_back(kind: str, nats: float, is_slow_gain: bool) -> None:
    def tooth(t: int) -> float:
        share = t % 300 / 300
        return -nats * (share if is_slow_gain else 1 - share) if t < 900 else 0.0

    require_none(kind, graft(kind, tooth, 1200))


def test_w01_a_return_from_a_gain_is_said_with_the_level_before_it() -> None:
    said = say("flat", graft("flat", lambda t: -0.3 if t < 500 else 0.0, 700))
    message = next(v.message for t, v in said if t >= 500 + PATIENCE - 1)
    assert message.startswith("loss 3.")
    assert message.endswith(" it had before a fall: what was too easy is over")


@each_curve
@pytest.mark.parametrize("since", [150, 500, 1500])
def test_w01_levels_passed_in_the_ordinary_descent_excuse_no_jump(kind: str, since: int) -> None:
    points = graft(kind, lambda t: 0.5 if t >= since else 0.0, since + 60)
    t, verdict = find_interruption(kind, points)
    assert (t, verdict.kind) == (since + PATIENCE - 1, "lasting_spike")


@each_curve
def test_w01_a_return_that_overshoots_is_rolled_back(kind: str) -> None:
    points = graft(kind, lambda t: -0.3 if t < 500 else 0.5, 600)
    t, verdict = find_interruption(kind, points)
    assert (t, verdict.kind) == (500 + PATIENCE - 1, "lasting_spike")


@each_curve
@pytest.mark.parametrize("length", [20, 25, 28])
def test_w10_a_bump_shorter_than_the_patience_is_not_rolled_back(kind: str, length: int) -> None:
    before = raised(CURVES[kind][PLACE - 5 : PLACE], 0.5 * MEMORIES[kind].loss.mad_sigma)
    _, memory = judged(CURVES[kind][: PLACE - 5])
    verdicts, _ = judged([*before, *graft(kind, lambda t: float(t < length))], memory=memory)
    assert not any(verdict.interrupts for verdict in verdicts)


def test_w10_patience_counts_from_the_first_bad_step_seen_and_not_from_the_onset() -> None:
    slope = [0.08, 0.1, 0.12, 0.15]  # the onset lies in it
    points = graft("flat", [*slope, *[1.0] * (PATIENCE - 1), *[0.0] * 50])
    healed = say("flat", points)[-1][1]
    assert (healed.action, healed.message.startswith("spike of 29 steps")) == ("ok", True)
    points = graft("flat", [*slope, *[1.0] * 60])
    t, verdict = find_interruption("flat", points)
    assert t == len(slope) + PATIENCE - 1
    assert verdict.onset is not None
    assert verdict.onset <= PLACE + len(slope)


# What does not heal


@each_curve
@pytest.mark.parametrize(("bad", "good"), [(1, 2), (1, 1), (2, 1), (25, 3), (10, 5)])
def test_w02_a_spike_that_relapses_is_rolled_back_within_200_steps(kind: str, bad: int, good: int) -> None:
    t, verdict = find_interruption(kind, graft(kind, lambda t: float(t % (bad + good) < bad)))
    assert t < 200
    assert verdict.kind in ("recurring_spike", "lasting_spike")


def test_w02_a_recurring_spike_says_how_many_of_the_last_steps_were_high() -> None:
    t, verdict = find_interruption("flat", graft("flat", lambda t: float(t % 3 == 0)))
    assert verdict.kind == "recurring_spike"
    assert 3 * 42 <= t <= 3 * 44  # a step of normal data may be high too while a spike is open
    assert verdict.message.endswith(f"since step {PLACE + t + 1}: 45 of the last {t + 1} steps are so high")


def test_w02_several_blips_within_a_window_are_ignored() -> None:
    require_none("flat", graft("flat", lambda t: 2.0 * (t % 10 == 0), 600))


@pytest.mark.parametrize("bad", [3, 10, 19])
def test_w03_non_finite_steps_with_a_good_one_between_them_are_rolled_back(bad: int) -> None:
    points = ahead("flat", 300)
    sick = [p if t % (bad + 1) == bad else broken([p])[0] for t, p in enumerate(points)]
    t, verdict = find_interruption("flat", sick)
    num_good = t // (bad + 1)
    assert (t, verdict.kind) == (DEFAULTS.max_non_finite_steps - 1 + num_good, "non_finite")
    assert verdict.message.endswith(f"20 of the last {t + 1} steps")
    assert sum(v.interrupts for _, v in say("flat", sick)) == 1


def test_w03_a_change_of_phase_between_non_finite_steps_absolves_none() -> None:
    points = ahead("flat", 100)
    sick = [p if t % 10 == 9 else broken([p])[0] for t, p in enumerate(points)]
    t, verdict = find_interruption("flat", [replace(p, phase="next") for p in sick])
    assert (t, verdict.kind) == (DEFAULTS.max_non_finite_steps + 1, "non_finite")


@each_curve
@pytest.mark.parametrize(("num_easy", "begin"), [(35, 10), (35, 50), (100, 20), (200, 5), (200, 50)])
@pytest.mark.parametrize("is_after", [False, True])
def test_w04_a_jump_at_a_change_of_data_is_found(
    kind: str, num_easy: int, begin: int, is_after: bool
) -> None:
    begin += num_easy if is_after else 0
    points = graft(kind, lambda t: (t >= begin) - 0.5 * (t < num_easy), 400)
    t, _ = find_interruption(kind, points)
    assert begin < t <= begin + 2 * PATIENCE + 6


@each_curve
@pytest.mark.parametrize("length", [20, 100, 300])
def test_w05_a_norm_that_grows_is_watched_before_the_loss_moves(kind: str, length: int) -> None:
    growing = [
        replace(p, grad_norm=(p.grad_norm or 0) * 100 ** (t / length))
        for t, p in enumerate(ahead(kind, length))
    ]
    said = [v for _, v in say(kind, growing)]
    assert {(v.action, v.kind) for v in said} == {("watch", "norm_rise")}


@each_curve
@pytest.mark.parametrize("period", [10, 20, 40, 60])
def test_w06_an_oscillation_that_grows_is_rolled_back(kind: str, period: int) -> None:
    wave = graft(kind, lambda t: 3 * t / 600 * math.sin(2 * math.pi * t / period), 600)
    t, verdict = find_interruption(kind, wave)
    assert t < 450
    assert verdict.kind in ("recurring_spike", "lasting_spike", "drift")


# One rank


@each_curve
@pytest.mark.parametrize("num_ranks", [8, 64, 512])
@pytest.mark.parametrize("is_known", [True, False])
def test_w07_one_rank_of_many_is_watched_and_never_rolled_back(
    kind: str, num_ranks: int, is_known: bool
) -> None:
    points = [
        replace(
            p,
            loss=p.loss + 3 / num_ranks,
            loss_max_rank=p.loss + 3,
            loss_other_ranks=p.loss if is_known else None,
        )
        for p in ahead(kind, 600)
    ]
    said = say(kind, points)
    require_none(kind, points)
    first, verdict = said[0]
    assert (first, verdict.action, verdict.kind) == (PATIENCE // 2 - 1, "watch", "outlier_rank")
    assert verdict.onset == PLACE + 1
    assert "above the mean (0 is usual), since step 601" in verdict.message
    assert said[-1][0] < DEFAULTS.window + 50  # after a window that is how it is


@each_curve
@pytest.mark.parametrize("times", [2, 8])
def test_w07_a_jump_of_all_ranks_is_found_though_one_rank_is_worse(kind: str, times: int) -> None:
    points = [
        replace(raised([p], 1.0)[0], loss_max_rank=p.loss + times, loss_other_ranks=p.loss + 0.9)
        for p in ahead(kind, 100)
    ]
    t, verdict = find_interruption(kind, points)
    assert (t, verdict.kind) == (PATIENCE - 1, "lasting_spike")


def test_w07_a_spike_of_the_others_may_heal_while_one_rank_is_high() -> None:
    points = [
        replace(raised([p], 0.4)[0], loss_max_rank=p.loss + 3, loss_other_ranks=p.loss + (10 < t < 15))
        for t, p in enumerate(ahead("flat", 100))
    ]
    require_none("flat", points)
    spiking = [t for t, v in say("flat", points) if v.kind == "spike"]
    assert (spiking[0], spiking[-1]) == (11, 14)


# Frozen numbers


@pytest.mark.parametrize("loss", [3.0, 2.5])
def test_w08_a_frozen_loss_is_watched_and_then_stops_for_the_operator(loss: float) -> None:
    frozen = [replace(p, loss=loss, loss_max_rank=loss) for p in ahead("flat", 60)]
    said = [(t, v) for t, v in say("flat", frozen) if v.kind == "frozen_loss"]
    assert (said[0][0], said[0][1].action) == (PATIENCE // 2, "watch")
    t, verdict = next((t, v) for t, v in said if v.interrupts)
    assert (t, verdict.action, verdict.onset) == (PATIENCE, "stop", PLACE + 2)
    assert verdict.message == (
        f"the loss has been exactly {loss:g} for 30 steps, since step {PLACE + 2}: it is not computed from "
        "the data, or there are no labels"
    )


def test_w08_a_loss_of_zero_is_watched_at_once() -> None:
    zero = [replace(p, loss=0.0, loss_max_rank=0.0) for p in ahead("flat", 60)]
    said = say("flat", zero)
    assert (said[0][0], said[0][1].action, said[0][1].kind) == (0, "watch", "frozen_loss")
    t, verdict = find_interruption("flat", zero)
    assert (t, verdict.action, verdict.onset) == (PATIENCE - 1, "stop", PLACE + 1)


def test_w08_a_run_whose_loss_is_zero_from_its_first_step_stops() -> None:
    zero = [replace(p, loss=0.0, loss_max_rank=0.0) for p in CURVES["flat"][:60]]
    verdicts, _ = judged(zero, memory=WatchdogState())
    assert [v.action for v in verdicts].index("stop") == PATIENCE - 1


# Drifts and phases


def test_w09_a_drift_that_ends_is_said_to_be_over() -> None:
    points = graft("flat", lambda t: 0.13 * min(1.0, t / 100, max(0.0, (400 - t) / 100)), 600)
    said = [(v.action, v.onset) for _, v in say("flat", points) if v.kind == "drift"]
    assert set(said[:-1]) == {("watch", said[0][1])}  # one onset: said once in a live run
    assert said[-1] == ("ok", said[0][1])
    message = [v.message for _, v in say("flat", points) if v.kind == "drift"][-1]
    assert message == f"the rise of the loss since step {said[0][1]} is over"


@each_curve
@pytest.mark.parametrize("shift", [-0.5, 0.0, 1.0])
@pytest.mark.parametrize("begin", [5, 10, 25, 50])
def test_w11_a_jump_early_in_a_phase_is_found_and_the_shift_at_its_start_expected(
    kind: str, shift: float, begin: int
) -> None:
    points = [replace(p, phase="next") for p in graft(kind, lambda t: shift + (t >= begin), 300)]
    t, verdict = find_interruption(kind, points)
    assert (t, verdict.kind) == (begin + PATIENCE - 1, "lasting_spike")
    assert verdict.onset is not None
    assert abs(verdict.onset - (PLACE + 1 + begin)) <= 5
    require_none(kind, [replace(p, phase="next") for p in graft(kind, lambda t: shift, 300)])
