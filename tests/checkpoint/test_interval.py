"""The interval between saves: against Daly's exact model, at its edges, and in words."""

from math import exp, expm1, sqrt

import pytest
from scipy.optimize import minimize_scalar

from ds_pretrain.checkpoint.interval import Costs, check_stall, format_interval_advice, format_seconds

HOUR = 3600.0


def exact_seconds(stall: float, mtbf: float) -> float:
    """The minimum of Daly's expected wall-clock time with exponential failures, from save to save.

    M exp(R/M) (exp((t + stall)/M) - 1) / t for each second of work; the restart time R moves no minimum.
    """

    def cost(log_work: float) -> float:
        work = exp(log_work)
        return expm1((work + stall) / mtbf) / work

    found = minimize_scalar(cost, bounds=(-10.0, 15.0), method="bounded", options={"xatol": 1e-9})
    return exp(float(found.x)) + stall


@pytest.mark.parametrize(
    ("stall", "mtbf"), [(0.5, 8 * HOUR), (30.0, 8 * HOUR), (300.0, HOUR), (600.0, HOUR), (1800.0, HOUR)]
)
def test_dalys_interval_is_the_minimum_of_the_exact_model(stall: float, mtbf: float) -> None:
    exact, costs = exact_seconds(stall, mtbf), Costs(stall, 0.0, 0.0, mtbf)
    assert costs.daly_seconds == pytest.approx(exact, rel=4e-3)
    assert abs(costs.young_seconds + stall - exact) >= abs(costs.daly_seconds - exact)


def test_a_published_example() -> None:
    """Saves of 5 minutes, a failure every 24 hours: sqrt(2 * 5 * 1440) = 120 minutes."""
    assert Costs(300.0, 0.0, 0.0, 24 * HOUR).young_seconds == pytest.approx(120 * 60)


def test_saves_that_cost_more_than_two_failures_are_as_far_apart_as_failures() -> None:
    assert Costs(2 * HOUR, 0.0, 0.0, HOUR).daly_seconds == 3 * HOUR
    almost = Costs(2 * HOUR - 1e-6, 0.0, 0.0, HOUR).daly_seconds
    assert almost == pytest.approx(2 * HOUR * (1 + 1 / 3 + 1 / 9))


def test_what_is_lost_is_least_near_the_advice_and_counts_writing_and_restoring() -> None:
    costs = Costs(2.0, 60.0, 120.0, 8 * HOUR)
    best = costs.best_seconds
    assert costs.young_seconds == sqrt(2 * 2.0 * 8 * HOUR)
    assert costs.lost_fraction(best) == pytest.approx(2.0 / best + (best / 2 + 180.0) / (8 * HOUR))
    assert costs.lost_fraction(best) < min(costs.lost_fraction(best / 1.2), costs.lost_fraction(best * 1.2))


def test_the_advice_is_never_shorter_than_a_save_takes() -> None:
    assert Costs(0.05, 240.0, 30.0, 4 * HOUR).best_seconds == 240.0
    assert Costs(0.0, 240.0, 30.0, 4 * HOUR).best_seconds == 240.0


def test_a_share_is_never_more_than_all() -> None:
    assert Costs(60.0, 0.0, 0.0, HOUR).lost_fraction(10.0) == 1.0
    assert Costs(60.0, 0.0, 0.0, HOUR).lost_fraction(0.0) == 1.0


def test_the_advice_in_words() -> None:
    costs = Costs(2.0, 60.0, 120.0, 8 * HOUR)
    assert list(format_interval_advice(costs, 2 * HOUR)) == [
        "a save every 5.7 min loses least: 1.80% of the time is expected to be lost (Daly 2006; Young 1974 "
        "says 5.7 min)",
        "checkpoint.every is about 2 h at present: 13.15% is expected to be lost",
    ]
    assert len(list(format_interval_advice(costs, None))) == 1


def test_a_stall_longer_than_its_share_is_warned_of() -> None:
    assert check_stall(3.0, 60.0, 0.05) is None
    assert check_stall(3.2, 40.0, 0.05) == (
        "saves block training for 3.2 s each, 8.0% of the 40 s save interval "
        "(checkpoint.max_stall_fraction = 5.0%); save less often (checkpoint.every), or free host memory "
        "for asynchronous saves"
    )
    assert "all of the 0 s" in str(check_stall(1.0, 0.0, 0.05))


def test_spans_are_spoken_with_two_digits_in_the_unit_that_fits() -> None:
    spans = {0.0: "0 s", 0.0421: "0.042 s", 3.25: "3.2 s", 9.97: "10 s", 99.4: "99 s", 99.6: "1.7 min"}
    spans |= {840.0: "14 min", 2.5 * HOUR: "2.5 h", 72 * HOUR: "72 h", 5000 * HOUR: "5,000 h"}
    assert {seconds: format_seconds(seconds) for seconds in spans} == spans
