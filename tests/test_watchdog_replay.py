"""`ds-pretrain watchdog`: recordings in, verdicts and plots out; what cannot be read is said."""

import json
import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ds_pretrain import cli
from ds_pretrain.config import WatchdogSection
from ds_pretrain.errors import InputError
from ds_pretrain.watchdog import OK, Verdict
from ds_pretrain.watchdog_plot import terminal_plot, text_plot
from ds_pretrain.watchdog_replay import Point, incidents, read_csv, read_run, read_settings, replay, report
from tests.scenario import make_run
from tests.test_watchdog import BEFORE, NEXT, after, broken, raised

SICK = [*BEFORE, *raised(after(BEFORE, 40), 0.5)]


def write_csv(path: Path, points: Sequence[Point]) -> Path:
    lines = [f"{p.step},{p.loss},{'' if p.grad_norm is None else p.grad_norm},1e-3" for p in points]
    path.write_text("\n".join(["step,loss,grad_norm,lr", *lines, ""]))
    return path


def write_metrics(out: Path, points: Sequence[Point], attempt: int = 1) -> None:
    out.mkdir(exist_ok=True)
    with (out / "metrics.jsonl").open("a") as file:
        for p in points:
            record = {"event": "step", "attempt": attempt, **vars(p), "phase": "main"}
            file.write(json.dumps({k: "nan" if v != v else v for k, v in record.items()}) + "\n")


def test_a_curve_is_judged_plotted_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["watchdog", str(write_csv(tmp_path / "curve.csv", SICK))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("roll_back")] == [
        next(line for line in lines if f"lasting_spike, step {NEXT}" in line)
    ]
    assert lines[-1] == "340 steps judged: 1 roll_back, 0 watched or healed"
    assert "X" in next(line for line in lines if line.startswith("verdicts"))


def test_overrides_judge_with_other_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    curve = str(write_csv(tmp_path / "curve.csv", SICK))
    assert cli.main(["watchdog", curve, "watchdog.patience=60"]) == 0
    assert "340 steps judged: 0 roll_back, 1 watched or healed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("watchdog.patience=0", "`watchdog.patience` = 0: expected more than 0"),
        ("watchdog.patiense=9", "unknown key `watchdog.patiense`; did you mean `patience`?"),
        ("watchdog.window=1", "`watchdog.window` = 1: expected at least 2"),
        ("monitor.every=3", "unknown key `monitor`"),
        ("watchdog.mode=off", 'watchdog.mode is "off"; add watchdog.mode=observe'),
    ],
)
def test_a_wrong_override_is_said(
    override: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["watchdog", str(write_csv(tmp_path / "curve.csv", SICK)), override]) == 2
    assert said in capsys.readouterr().err


def test_the_svg_stands_alone_and_tells_each_verdict(tmp_path: Path) -> None:
    curve, picture = write_csv(tmp_path / "curve.csv", SICK), tmp_path / "plot.svg"
    assert cli.main(["watchdog", str(curve), "--svg", str(picture)]) == 0
    root = ElementTree.parse(picture).getroot()
    titles = [node.text or "" for node in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == 30
    assert titles[-1].startswith(f"step {NEXT + 29}: roll_back, lasting_spike: loss ")
    assert "<script" not in picture.read_text()
    assert "href" not in picture.read_text()


def test_a_run_directory_is_judged_by_its_own_settings_and_latest_attempt(tmp_path: Path) -> None:
    run_file = make_run(tmp_path)
    out = tmp_path / "out"
    write_metrics(out, SICK)
    write_metrics(out, after(BEFORE, 40), attempt=2)  # taken again, and calm
    (out / "run.toml").write_text(run_file.read_text() + "\n[watchdog]\nwindow = 100\n")
    (out / "run.json").write_text(json.dumps({"overrides": ["watchdog.patience=7"]}))
    run, settings = read_settings(out, ["watchdog.loss_sigmas=9.0"])
    assert (run, settings) == (out, WatchdogSection(window=100, patience=7, loss_sigmas=9.0))
    history = read_run(out, WatchdogSection())
    assert [p.step for p in history.points] == list(range(1, NEXT + 40))
    assert history.verdicts == replay(history.points, WatchdogSection())
    assert set(history.verdicts) == {OK}


def test_a_run_file_names_its_run(tmp_path: Path) -> None:
    run_file = make_run(tmp_path)
    write_metrics(tmp_path / "out", broken(BEFORE[:40]))
    run, settings = read_settings(run_file, ["watchdog.patience=8"])
    assert run == tmp_path / "out"
    assert settings.patience == 8
    assert read_run(run, settings).verdicts[19].kind == "non_finite"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("step,perplexity\n1,2\n", "has the columns ['step', 'perplexity']; expected step, loss"),
        ("step,loss\n", "has no rows; expected one for each step"),
        ("step,loss\n1,3.0\n2,high\nx,3\n", "line 3: loss is 'high'; expected a number"),
        ("step,loss\n1,3.0\n2,high\nx,3\n", "line 4: step is 'x'; expected a number"),
        ("step,loss\n1,3.0\n1.5,3\n", "line 3: step is '1.5'; expected a whole number"),
        ("step,loss\n1,3.0\n5,3\n4,3\n", "step 4 stands behind step 5; expected rising steps"),
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


def test_a_place_without_a_recording_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is no CSV file, no run file, and no run directory"):
        read_settings(tmp_path, [])
    with pytest.raises(InputError, match=r"has no metrics.jsonl that can be read"):
        read_run(tmp_path, WatchdogSection())
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(InputError, match="holds no step; expected a run that has trained"):
        read_run(tmp_path, WatchdogSection())


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
    found = incidents(points, replay(points, WatchdogSection()))
    assert [(one.first_step, one.last_step, one.verdict.kind, one.verdict.action) for one in found] == [
        (NEXT, NEXT + 5, "spike", "ok"),
        (NEXT + 34, NEXT + 36, "blip", "ok"),
    ]


def test_a_report_of_many_incidents_is_cut_but_for_those_to_roll_back() -> None:
    points = BEFORE[:200]
    verdicts = [Verdict("watch", "norm_rise", p.step, "high") for p in points]
    verdicts[150] = Verdict("roll_back", "drift", 100, "rising")
    lines = list(report(points, verdicts))
    assert len(lines) == 42
    assert sum(line.startswith("roll_back") for line in lines) == 1
    assert lines[-2] == "...        and 160 more that were watched or healed"
    assert lines[-1] == "200 steps judged: 1 roll_back, 199 watched or healed"


def test_a_plot_needs_a_finite_loss() -> None:
    points = broken(BEFORE[:5])
    assert terminal_plot(points, [OK] * 5) == "no finite loss to plot"
    flat = [replace(p, loss=2.0) for p in BEFORE[:5]]
    assert terminal_plot(flat, [OK] * 5).splitlines()[0].split() == ["2", "-----"]
    assert math.isnan(points[0].loss)


def test_a_plot_of_any_size_shows_in_each_column_the_mark_that_comes_first_in_the_legend() -> None:
    points = [Point(step, 2.0 if step < 8 else 4.0, 2.0, 1.0) for step in range(1, 13)]
    legend = {"A": "worst", "b": "bad"}
    lines = text_plot(points, list("     b bbA b"), "marks", legend, width=6, height=3).splitlines()
    assert lines == [
        "        4    |--",
        "             |",
        "        2 ---|",
        "marks       bbAb",
        "step      1   12   A worst  b bad",
    ]
    short = text_plot(points[-2:], ["A", "b"], "marks", legend, 6, 3).splitlines()
    assert short[-1] == "step      11 12   A worst  b bad"
    single = text_plot(points[-1:], ["b"], "marks", legend, 6, 3).splitlines()
    assert single[-1] == "step      12   A worst  b bad"
    assert text_plot([], [], "marks", legend, 6, 3) == "no finite loss to plot"
