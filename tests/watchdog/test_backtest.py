"""Recorded curves in, verdicts out; what cannot be read is said."""

from dataclasses import replace
from pathlib import Path

import pytest

from ds_pretrain.config.schema import WatchdogSection
from ds_pretrain.core.errors import InputError
from ds_pretrain.watchdog import backtest
from ds_pretrain.watchdog.backtest import Point, RecordedCurve, find_incidents, read_csv, replay
from tests.watchdog.curves import BEFORE, NEXT, after, raised

SICK = [*BEFORE, *raised(after(BEFORE, 40), 0.5)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("step,perplexity\n1,2\n", "has the columns ['step', 'perplexity']; expected step, loss"),
        ("step,loss\n", "has no rows; expected one for each step"),
        ("step,loss\n1,3.0\n2,high\nx,3\n", "line 3: loss is 'high'; expected a number"),
        ("step,loss\n1,3.0\n2,high\nx,3\n", "line 4: step is 'x'; expected a number"),
        ("step,loss\n1,3.0\n1.5,3\n", "line 3: step is '1.5'; expected a whole number"),
        ("step,loss\n1,3.0\n-1,3\n", "line 3: step is '-1'; expected a whole number"),
        ("", "has the columns []; expected step, loss"),
        ("step,loss\n1,3.0\n5,3\n4,3\n", "step 4 follows step 5; expected rising steps"),
        ("step,loss\n" + "x,1\n" * 30, "and 20 more lines like these"),
    ],
)
def test_a_csv_file_that_is_no_curve_is_said(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "curve.csv"
    path.write_text(text)
    with pytest.raises(InputError) as raised_error:
        read_csv(path)
    assert said in str(raised_error.value)


def test_bytes_that_are_no_text_are_said(tmp_path: Path) -> None:
    path = tmp_path / "curve.csv"
    path.write_bytes(b"step,loss\n1,\xff\n")
    with pytest.raises(InputError, match="cannot be read as CSV"):
        read_csv(path)


def test_the_columns_may_be_written_in_any_case(tmp_path: Path) -> None:
    path = tmp_path / "curve.csv"
    path.write_text("Step, Loss\n1,2.5\n")
    [point] = read_csv(path)
    assert (point.step, point.loss) == (1, 2.5)


def test_blank_is_not_recorded_and_nan_is_not_finite(tmp_path: Path) -> None:
    path = tmp_path / "curve.csv"
    path.write_text("step,loss,grad_norm,lr\n1,3.0,,\n2,nan,NaN,1e-3\n3,3.0,inf,\n4,,1.0,\n")
    with pytest.raises(InputError, match="line 5: loss is ''"):
        read_csv(path)
    path.write_text(path.read_text().replace("4,,1.0,\n", ""))
    first, second, third = read_csv(path)
    assert (first.has_norm, second.has_norm, third.has_norm) == (False, True, True)
    kinds = [v.kind for v in replay([first, second, third], WatchdogSection())]
    assert kinds == [None, "non_finite", "non_finite"]


def test_verdicts_about_one_thing_are_one_incident() -> None:
    points = [*BEFORE, *raised(after(BEFORE, 4), 0.5)]
    points += after(points, 30, 2)
    points += raised(after(points, 1), 0.5)
    points += after(points, 30, 3)
    found = find_incidents(points, replay(points, WatchdogSection()))
    assert [(one.first_step, one.last_step, one.verdict.kind, one.verdict.action) for one in found] == [
        (NEXT, NEXT + 5, "spike", "ok"),
        (NEXT + 34, NEXT + 36, "blip", "ok"),
    ]


@pytest.mark.parametrize("every", [7, 1000])
def test_a_step_taken_again_is_judged_as_if_the_first_time_had_never_been(
    every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backtest, "_EVERY", every)
    settings = WatchdogSection(window=20, patience=10)
    points = [replace(p, step=number) for number, p in enumerate(SICK * 6, start=1)]
    history = RecordedCurve(settings)
    for point in points:
        history.take(recorded(point))
    assert len({verdict.onset for verdict in history.verdicts}) > 6
    for first in (2_030, 1_985, 1_984, 1_700, 2):
        again = [replace(p, loss=p.loss * 1.02) for p in points[first - 1 : first + 99]]
        for point in again:
            history.take(recorded(point))
        assert history.points == points[: first - 1] + again
        assert history.verdicts == replay(history.points, settings)


def recorded(point: Point) -> dict[str, object]:
    return {"event": "step", **vars(point)}
