"""The `checkpoints` command: what a person sees of checkpoints, and may do to them."""

from pathlib import Path

import pytest

from ds_pretrain.checkpoint.layout import step_name
from ds_pretrain.checkpoint.retention import CALM
from ds_pretrain.cli import main
from ds_pretrain.world import World
from tests.checkpoint.test_store import _save as save
from tests.scenario import make_run


def made(folder: Path) -> Path:
    for step in (10, 20):
        save(folder / "out" / "checkpoints", step, World())
    return folder / "out"


def test_the_list_has_a_line_for_each_checkpoint_the_newest_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = made(tmp_path)
    (out / "checkpoints" / step_name(10) / CALM).touch()
    assert main(["checkpoints", str(out), "pin", "20"]) == 0
    assert main(["checkpoints", str(make_run(tmp_path))]) == 0  # by its run file
    kept, newest, older = capsys.readouterr().out.splitlines()
    assert kept == "step_000000020 is kept for good"
    assert newest.startswith("step         20  ")
    assert newest.endswith(" s old  pinned")
    assert older.endswith(" s old  calm")
    assert main(["checkpoints", str(out), "unpin", "20"]) == 0
    assert main(["checkpoints", str(out), "list"]) == 0
    assert "pinned" not in capsys.readouterr().out


def test_verify_names_what_is_broken_and_moves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = made(tmp_path)
    assert main(["checkpoints", str(out), "verify"]) == 0
    shard = next((out / "checkpoints" / step_name(20)).glob("bf16_*"))
    shard.write_bytes(shard.read_bytes()[:-1])
    before = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert main(["checkpoints", str(out), "verify", "10"]) == 0
    capsys.readouterr()
    assert main(["checkpoints", str(out), "verify"]) == 2
    said = capsys.readouterr()
    assert f"step_000000020  {shard.name} has" in said.out
    assert "step_000000010  intact" in said.out
    assert "not every checkpoint is intact" in said.err
    assert main(["checkpoints", str(out), "universal", "20"]) == 2
    assert "only an intact checkpoint is converted" in capsys.readouterr().err
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == before


def test_a_step_that_is_not_there_is_answered_with_those_that_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = made(tmp_path)
    assert main(["checkpoints", str(out), "pin", "30"]) == 2
    assert "has no checkpoint of step 30; it has: 20, 10" in capsys.readouterr().err
    assert main(["checkpoints", str(out), "pin"]) == 2
    assert "name the step" in capsys.readouterr().err
    assert main(["checkpoints", str(tmp_path / "out" / "checkpoints")]) == 0
    assert "holds no checkpoint" in capsys.readouterr().out
