"""The arguments of the `train` and `verify-resume` commands."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ds_pretrain.commands import cli, train
from ds_pretrain.launch.command import Command
from tests.scenario import make_run


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Command, Path]]:
    """What would have been launched, and where."""
    calls: list[tuple[Command, Path]] = []

    def note(command: Command, out: Path) -> int:
        calls.append((command, out))
        return 75

    monkeypatch.setattr(train, "run", note)
    return calls


def after_the_module(command: Command) -> list[str]:
    """The words that every rank gets."""
    return list(command.argv[command.argv.index("ds_pretrain.train") + 1 :])


def test_train_passes_its_flags_on_behind_the_overrides(
    tmp_path: Path, launched: list[tuple[Command, Path]]
) -> None:
    run_file = str(make_run(tmp_path))
    words = ["train", run_file, "--ranks", "2", "--stop-after", "7", "seed=3", "--trust-pickle"]
    assert cli.main(words) == 75
    assert cli.main(["train", run_file]) == 75
    [(first, out), (second, _)] = launched
    assert after_the_module(first) == [run_file, "seed=3", "--trust-pickle", "--stop-after", "7"]
    assert after_the_module(second) == [run_file]
    assert out == tmp_path / "out"


@pytest.mark.parametrize("step", [0, -1, 13])
def test_a_step_that_the_run_does_not_have_cannot_be_stopped_after(
    step: int, tmp_path: Path, launched: list[tuple[Command, Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", str(make_run(tmp_path, steps=12)), f"--stop-after={step}"]) == 2
    assert f"--stop-after {step}: the run has steps 1 to 12" in capsys.readouterr().err
    assert launched == []


def test_verify_resume_launches_as_train_does(
    tmp_path: Path, launched: list[tuple[Command, Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    """The same command but for its own overrides; here nothing is trained, and that is said."""
    run_file = str(make_run(tmp_path))
    assert (
        cli.main(["verify-resume", run_file, "schedule.peak_lr=2e-3", "--ranks", "2", "--steps", "4"]) == 75
    )
    assert (
        "the first launch ended with code 75, and there is no checkpoint of step 4" in capsys.readouterr().out
    )
    [(command, out)] = launched
    words = after_the_module(command)
    assert (words[:2], words[-2:]) == ([run_file, "schedule.peak_lr=2e-3"], ["--stop-after", "8"])
    assert out == tmp_path / "out.verify-resume/run"
    assert [host.slots for host in command.hosts] == [2]


def test_verify_resume_finds_problems_before_anything_is_launched(
    tmp_path: Path, launched: list[tuple[Command, Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["verify-resume", str(make_run(tmp_path)), "--ranks", "3"]) == 2
    assert "world sizes that do: 1, 2, 4" in capsys.readouterr().err
    assert launched == []
    assert not (tmp_path / "out.verify-resume").exists()


def _unread(words: list[str], *streams: str) -> subprocess.CompletedProcess[bytes]:
    """A command whose named streams have no reader any more."""
    reader, writer = os.pipe()
    os.close(reader)
    given = {name: writer if name in streams else subprocess.PIPE for name in ("stdout", "stderr")}
    ended = subprocess.run([sys.executable, "-m", "ds_pretrain", *words], check=False, **given)
    os.close(writer)
    return ended


def test_a_command_that_nobody_reads_any_more_ends_in_silence(tmp_path: Path) -> None:
    run_file = str(make_run(tmp_path))
    (tmp_path / "out").mkdir()
    ended = _unread(["checkpoints", run_file], "stdout")
    assert (ended.returncode, ended.stderr) == (128 + 13, b"")
    assert _unread(["checkpoints", run_file, "pin"], "stdout", "stderr").returncode == 2
