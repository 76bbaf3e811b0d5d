"""`ds-pretrain watchdog`: recordings in, verdicts and plots out; what cannot be read is said."""

import json
import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from ds_pretrain.monitor.plots import terminal_plot, text_plot

from ds_pretrain.commands import cli
from ds_pretrain.commands import watchdog as watchdog_replay
from ds_pretrain.commands.watchdog import Point, incidents, read_csv, read_run, read_settings, replay, report
from ds_pretrain.config.schema import WatchdogSection
from ds_pretrain.core.errors import InputError
from ds_pretrain.watchdog import backtest as judged
from ds_pretrain.watchdog.backtest import History
from ds_pretrain.watchdog.detector import OK, Verdict
from tests.scenario import make_run
from tests.watchdog.test_detector import BEFORE, NEXT, after, broken, raised

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
        ("step,loss\n1,3.0\n1e300,3\n", "line 3: step is '1e300'; expected a whole number below 10^15"),
        ("step,loss\n1,3.0\n-1,3\n", "line 3: step is '-1'; expected a whole number"),
        ("Loss,step,loss ,LOSS\n1,1,1,1\n", "has the column loss twice"),
        ("", "has the columns []; expected step, loss"),
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


def test_column_names_are_taken_in_any_case_and_with_blanks(tmp_path: Path) -> None:
    path = tmp_path / "curve.csv"
    path.write_text("LR,Step, loss, GRAD_NORM ,LOSS\n9,1,3.0,0.5\n\n9,2,2.5,,\n")
    with pytest.raises(InputError, match="column loss twice"):
        read_csv(path)
    path.write_text(path.read_text().replace("LOSS", "other"))
    first, second = read_csv(path)
    assert (first.step, first.loss, first.grad_norm, first.has_norm) == (1, 3.0, 0.5, True)
    assert (second.step, second.loss, second.has_norm) == (2, 2.5, False)
    path.write_text("step,loss,Loss\n1,3.0,7.0\n")
    assert read_csv(path)[0].loss == 3.0


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


def test_the_same_trouble_again_and_again_is_one_line() -> None:
    points = [replace(p, loss=20.0, loss_max_rank=20.0) for p in [*BEFORE, *after(BEFORE, 500)]]
    points += raised(after(points, 10_000, 4)[9_600:], 0.5)
    lines = list(report(points, replay(points, WatchdogSection())))
    grave = [line for line in lines if line.startswith("roll_back")]
    assert grave[0].startswith(
        "roll_back  worse_than_guessing, step 30 to 780, 26 times, at last: loss 20 and "
    )
    assert len(grave) == 1
    assert lines[-1] == f"{len(points):,} steps judged: 26 roll_back, 0 watched or healed"


def test_troubles_far_apart_are_told_one_by_one() -> None:
    points = [*BEFORE]
    for seed in (2, 3):
        points += broken(after(points, 20, seed))
        points += after(points, 300, seed)
    lines = [line.split(":")[0] for line in report(points, replay(points, WatchdogSection()))]
    assert lines[:2] == [
        f"roll_back  non_finite, step {NEXT} to {NEXT + 19}",
        f"roll_back  non_finite, step {NEXT + 320} to {NEXT + 339}",
    ]


def decision(to_step: int, step: int, event: str = "rollback", **more: object) -> dict[str, object]:
    known = {"incident": 1, "onset": NEXT, "trouble": "lasting_spike", "response": "skip"}
    return {"event": event, "step": step, "to_step": to_step, **known, **more}


def write_event(out: Path, record: dict[str, object]) -> None:
    with (out / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


def healed_run(out: Path) -> None:
    """A lasting spike, taken back, and calm the second time."""
    write_metrics(out, SICK[: NEXT + 29])
    write_event(out, decision(NEXT - 51, NEXT + 29))
    write_metrics(out, [*BEFORE[-50:], *after(BEFORE, 100)], attempt=1)


def test_what_was_taken_back_is_judged_as_it_happened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    healed_run(tmp_path)
    assert cli.main(["watchdog", str(tmp_path)]) == 0
    *_, told, total, taken = capsys.readouterr().out.splitlines()
    assert told == (
        f"incident 1, taken back from step {NEXT + 29} to {NEXT - 51}: roll_back, lasting_spike since step "
        f"{NEXT}; with these settings: roll_back at step {NEXT + 29}, lasting_spike since step {NEXT}"
    )
    assert total == "400 steps judged: 0 roll_back, 0 watched or healed"
    assert taken == "80 steps taken back, judged as they happened: 1 roll_back"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["watchdog.patience=60"], f"no roll_back, only watched, spike since step {NEXT}"),
        (["watchdog.patience=10"], f"roll_back at step {NEXT + 9}, lasting_spike since step {NEXT}"),
        (["watchdog.loss_sigmas=900", "watchdog.drift=1"], "nothing"),
    ],
)
def test_what_was_taken_back_is_judged_with_the_settings_asked_for(
    overrides: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    healed_run(tmp_path)
    assert cli.main(["watchdog", str(tmp_path), *overrides]) == 0
    assert f"; with these settings: {said}\n" in capsys.readouterr().out


def test_a_rollback_that_is_told_late_and_a_stop_are_judged_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_metrics(tmp_path, SICK[: NEXT + 29])
    write_metrics(tmp_path, BEFORE[-50:-40], attempt=2)
    write_event(tmp_path, decision(NEXT - 51, NEXT + 29))  # a crash kept it from being told at once
    write_metrics(tmp_path, [*BEFORE[-40:], *raised(after(BEFORE, 30), 0.5)], attempt=2)
    write_event(tmp_path, decision(NEXT - 21, NEXT + 29, "needs_person", incident=2))
    write_event(tmp_path, {**decision(0, 3, "needs_person"), "to_step": None})  # nothing to go back to
    write_event(tmp_path, {"event": "rollback", "step": "x"})
    assert cli.main(["watchdog", str(tmp_path)]) == 0
    *_, first, second, total, taken = capsys.readouterr().out.splitlines()
    assert f"with these settings: roll_back at step {NEXT + 29}, lasting_spike since" in first
    assert second.startswith(
        f"incident 2, given up from step {NEXT + 29} to {NEXT - 21}: a stop, lasting_spike"
    )
    assert total == "330 steps judged: 1 roll_back, 0 watched or healed"
    assert taken == "130 steps taken back, judged as they happened: 2 roll_back"


@pytest.mark.parametrize("most", [8, 512])
def test_a_step_taken_again_is_judged_as_if_the_first_time_had_never_been(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judged, "_MOST_MEMORIES", most)
    settings = WatchdogSection(window=20, patience=10)
    points = [replace(p, step=number) for number, p in enumerate(SICK * 6, start=1)]
    history = History(settings)
    for point in points:
        history.take(recorded(point))
    assert len({verdict.onset for verdict in history.verdicts}) > 6
    for first in (2_030, 1_985, 1_984, 1_700, 2):
        again = [replace(p, loss=p.loss * 1.02) for p in points[first - 1 : first + 99]]
        for point in again:
            history.take(recorded(point))
        assert history.points == points[: first - 1] + again
        assert history.verdicts == replay(history.points, settings)


def test_how_much_is_remembered_to_go_back_to_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judged, "_MOST_MEMORIES", 8)
    history = History(WatchdogSection(window=8))
    for step in range(1, 3_000):
        history.take(recorded(Point(step, 2.0, 2.0, 1.0 + step / 1e9)))
    assert 4 <= len(history._memories) <= 8


def recorded(point: Point) -> dict[str, object]:
    return {"event": "step", **vars(point)}


def test_lines_without_a_step_are_left_out_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_metrics(tmp_path, BEFORE)
    wrong: list[dict[str, object]] = [{}, {"step": 5}, {"loss": 1.0}]
    wrong += [{"step": 400, "loss": loss} for loss in ("abc", 10**400, True)]
    wrong += [{"step": step, "loss": 1.0} for step in (-1, True, 10**300)]
    for fields in wrong:
        write_event(tmp_path, {"event": "step", **fields})
    write_event(tmp_path, {"event": "step", "step": NEXT, "loss": 2.0})  # as an older version would write it
    assert cli.main(["watchdog", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "9 step records hold no step and loss, and were left out"
    assert lines[-2].startswith("301 steps judged: 0 roll_back")


def test_a_record_of_nothing_but_wrong_lines_is_said(tmp_path: Path) -> None:
    tmp_path.joinpath("metrics.jsonl").write_text('{"event": "step"}\n')
    with pytest.raises(InputError, match=r"holds no step \(1 records of none\)"):
        read_run(tmp_path, WatchdogSection())
    tmp_path.joinpath("metrics.jsonl").write_text("[" * 100_000)
    with pytest.raises(InputError, match="nested too deeply"):
        read_run(tmp_path, WatchdogSection())


def run_directory(tmp_path: Path, record: bytes) -> Path:
    run_file, out = make_run(tmp_path), tmp_path / "out"
    write_metrics(out, BEFORE)
    (out / "run.toml").write_text(run_file.read_text())
    (out / "run.json").write_bytes(record)
    return out


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (b"", "run.json is not valid JSON: Expecting value"),
        (b"garbage", "run.json is not valid JSON"),
        (b'{"overrides": ["a=1"', "run.json is not valid JSON"),
        (b"null", "run.json must hold one JSON object, found null"),
        (b"[]", "run.json must hold one JSON object, found a list"),
        (b'{"overrides": null}', "run.json: `overrides` = null: expected a list of texts"),
        (b'{"overrides": [1]}', "run.json: `overrides` = [1]: expected a list of texts"),
        (b"\xff{}", "run.json is not UTF-8 text"),
    ],
)
def test_a_run_record_that_cannot_be_read_is_said_with_the_way_out(
    record: bytes, said: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError) as raised_error:
        read_settings(run_directory(tmp_path, record), [])
    assert said in str(raised_error.value)
    assert "put an intact copy back, or move it away to judge without them" in str(raised_error.value)


def test_a_run_file_in_a_run_directory_that_is_no_text_is_said(tmp_path: Path) -> None:
    out = run_directory(tmp_path, b"{}")
    (out / "run.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match=r"run.toml is not UTF-8 text"):
        read_settings(out, [])


def test_a_wrong_override_is_said_of_the_override_that_makes_it(tmp_path: Path) -> None:
    out = run_directory(tmp_path, b'{"overrides": ["watchdog.window=1", "watchdog.mode", "seed=3"]}')
    words = ["watchdog.patienc=9", "watchdog.drift=0.1", "nonsense"]
    with pytest.raises(InputError) as raised_error:
        read_settings(out, words)
    last_start = f" of {out / 'run.json'}, from the last start"
    assert sorted(problem.split(": ")[0] for problem in raised_error.value.problems) == [
        "override 'nonsense' is not of the form section.key=value, like schedule.peak=2e-4",
        f"override 'watchdog.mode'{last_start} is not of the form section.key=value, like schedule.peak=2e-4",
        "override 'watchdog.patienc=9'",
        f"override 'watchdog.window=1'{last_start}",
    ]
    with pytest.raises(InputError, match=r"^override 'watchdog.patienc=9': unknown key `watchdog.patienc`"):
        read_settings(tmp_path / "run.toml", ["watchdog.patienc=9"])


def test_what_the_run_file_suffers_from_is_not_said_of_an_override(tmp_path: Path) -> None:
    out = run_directory(tmp_path, b"{}")
    (out / "run.toml").write_text((out / "run.toml").read_text() + "\n[watchdog]\nwindow = 1\n")
    with pytest.raises(InputError) as raised_error:
        read_settings(out, ["watchdog.patience=9", "watchdog.drift=7"])
    assert sorted(problem.split(": ")[0] for problem in raised_error.value.problems) == [
        str(out / "run.toml"),
        "override 'watchdog.drift=7'",
    ]


def test_a_place_where_no_plot_can_be_written_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    curve, nowhere = str(write_csv(tmp_path / "curve.csv", BEFORE)), tmp_path / "none" / "x.svg"
    assert cli.main(["watchdog", curve, "--svg", str(nowhere)]) == 2
    said = capsys.readouterr()
    assert f"--svg {nowhere}: there is no folder {nowhere.parent}; create it, or name another" in said.err
    assert said.out == ""
    assert cli.main(["watchdog", curve, "--svg", str(tmp_path)]) == 2
    assert (
        f"--svg {tmp_path} cannot be written (Is a directory); name another file" in capsys.readouterr().err
    )


def test_a_long_curve_shows_signs_of_life(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog_replay, "_SIGN_OF_LIFE", 150)
    assert cli.main(["watchdog", str(write_csv(tmp_path / "curve.csv", SICK))]) == 0
    assert capsys.readouterr().err == "150 read and judged\n300 read and judged\n"
