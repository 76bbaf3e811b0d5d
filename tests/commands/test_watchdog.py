"""`ds-pretrain watchdog`: recordings in, verdicts and plots out; what cannot be read is said."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from ds_pretrain.commands import cli
from ds_pretrain.commands.watchdog import format_report, read_run, read_settings
from ds_pretrain.config.schema import WatchdogSection
from ds_pretrain.core.errors import InputError
from ds_pretrain.core.state import Verdict
from ds_pretrain.watchdog.backtest import Point, replay
from ds_pretrain.watchdog.detector import OK
from tests.scenario import make_run
from tests.watchdog.curves import BEFORE, NEXT, after, broken, raised

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
    assert "X" in next(line for line in lines if line.startswith("verdict "))


def test_overrides_judge_with_other_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    curve = str(write_csv(tmp_path / "curve.csv", SICK))
    assert cli.main(["watchdog", curve, "watchdog.patience=60"]) == 0
    assert "340 steps judged: 0 roll_back, 1 watched or healed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("watchdog.patience=0", "`watchdog.patience` = 0: expected greater than 0"),
        ("watchdog.patiense=9", "unknown key `watchdog.patiense`; did you mean `patience`?"),
        ("watchdog.window=1", "`watchdog.window` = 1: expected greater than or equal to 2"),
        ("monitor.log_every=3", "unknown key `monitor`"),
        ("watchdog.mode=off", 'watchdog.mode is "off"; add watchdog.mode=observe'),
    ],
)
def test_a_wrong_override_is_said(
    override: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["watchdog", str(write_csv(tmp_path / "curve.csv", SICK)), override]) == 2
    assert said in capsys.readouterr().err


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


def test_a_place_without_a_recording_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a CSV file, a run file, or a run directory"):
        read_settings(tmp_path, [])
    with pytest.raises(InputError, match=r"has no metrics.jsonl that can be read"):
        read_run(tmp_path, WatchdogSection())
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(InputError, match="holds no step; expected a run that has trained"):
        read_run(tmp_path, WatchdogSection())


def test_a_report_of_many_incidents_is_cut_and_begins_with_those_to_roll_back() -> None:
    points = BEFORE[:200]
    verdicts = [Verdict("watch", "norm_rise", p.step, "high") for p in points]
    verdicts[150] = Verdict("roll_back", "drift", 100, "rising")
    lines = list(format_report(points, verdicts))
    assert len(lines) == 42
    assert sum(line.startswith("roll_back") for line in lines) == 1
    assert lines[-2] == "...        and 160 more"
    assert lines[-1] == "200 steps judged: 1 roll_back, 199 watched or healed"


def test_troubles_far_apart_are_told_one_by_one() -> None:
    points = [*BEFORE]
    for seed in (2, 3):
        points += broken(after(points, 20, seed))
        points += after(points, 300, seed)
    lines = [line.split(":")[0] for line in format_report(points, replay(points, WatchdogSection()))]
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
        (["watchdog.loss_sigmas=900", "watchdog.drift_threshold=1"], "nothing"),
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
    write_event(tmp_path, decision(NEXT - 21, NEXT + 29, "needs_operator", incident=2))
    write_event(tmp_path, {**decision(0, 3, "needs_operator"), "to_step": None})  # nothing to go back to
    write_event(tmp_path, {"event": "rollback", "step": "x"})
    assert cli.main(["watchdog", str(tmp_path)]) == 0
    *_, first, second, total, taken = capsys.readouterr().out.splitlines()
    assert f"with these settings: roll_back at step {NEXT + 29}, lasting_spike since" in first
    assert second.startswith(
        f"incident 2, given up from step {NEXT + 29} to {NEXT - 21}: a stop, lasting_spike"
    )
    assert total == "330 steps judged: 1 roll_back, 0 watched or healed"
    assert taken == "130 steps taken back, judged as they happened: 2 roll_back"


def test_lines_without_a_step_are_left_out_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_metrics(tmp_path, BEFORE)
    wrong: list[dict[str, object]] = [{}, {"step": 5}, {"loss": 1.0}]
    wrong += [{**vars(BEFORE[0]), "loss": loss} for loss in ("abc", 10**400, [])]
    wrong += [{**vars(BEFORE[0]), "step": step} for step in ("x", None)]
    for fields in wrong:
        write_event(tmp_path, {"event": "step", **fields})
    assert cli.main(["watchdog", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "8 step records have no step or loss and were ignored"
    assert lines[-2].startswith("300 steps judged: 0 roll_back")


def test_a_record_of_nothing_but_wrong_lines_is_said(tmp_path: Path) -> None:
    tmp_path.joinpath("metrics.jsonl").write_text('{"event": "step"}\n')
    with pytest.raises(InputError, match=r"holds no step \(1 records of none\)"):
        read_run(tmp_path, WatchdogSection())
    tmp_path.joinpath("metrics.jsonl").write_text("[" * 100_000)
    with pytest.raises(InputError, match="holds no step; expected"):
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
        (b"", "run.json cannot be read (Invalid JSON: EOF"),
        (b'{"overrides": ["a=1"', "run.json cannot be read (Invalid JSON: EOF"),
        (b"null", "run.json cannot be read (Input should be an object"),
        (b'{"overrides": null}', "`overrides`: Input should be a valid array, found null"),
        (b'{"overrides": [1]}', "`overrides.0`: Input should be a valid string, found 1"),
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
