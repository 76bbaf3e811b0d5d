"""Messages of rare failures, each from where a user would meet it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_pretrain import train as train_module
from ds_pretrain.checkpoint.manifest import FileEntry
from ds_pretrain.checkpoint.save import publish
from ds_pretrain.checkpoint.storage import StorageLayout
from ds_pretrain.checkpoint.verify import Problem, assemble
from ds_pretrain.commands.cli import main
from ds_pretrain.core.distributed import World
from ds_pretrain.core.errors import EXIT_BAD_INPUT, EXIT_CANNOT_SAVE, EXIT_FAILED, EXIT_FINISHED
from ds_pretrain.engine.engine import ZeroEngine
from ds_pretrain.training import saver as saver_module
from tests.checkpoint.test_manifest import MANIFEST
from tests.harness import Fault, Record, Stop, disk_is_full, record_run, start
from tests.ranks import run_ranks
from tests.runs.unhealthy import make_unhealthy_run
from tests.scenario import LLAMA, make_run


def _start_with(world: World, run_file: str, where: str, act: str, overrides: tuple[str, ...] = ()) -> Record:
    """A start in which `where.act` meets a full disk, or what stands for it."""
    modules = {
        "saving": (saver_module, disk_is_full),
        "train": (train_module, disk_is_full),
        "memory": (saver_module, lambda: 1),
        "engine": (ZeroEngine, _corrupt),
    }
    owner, instead = modules[where]
    patch = pytest.MonkeyPatch()
    patch.setattr(owner, act, instead)
    ended = start(world, run_file, overrides)
    patch.undo()
    return ended


def _corrupt(self: Any, folder: Path, tag: str) -> None:
    raise KeyError("module")


def test_a_save_that_cannot_be_noted_is_a_save_all_the_same(tmp_path: Path) -> None:
    run_file = make_run(tmp_path, steps=4)
    [ended] = run_ranks(_start_with, 1, str(run_file), "saving", "note_saved")
    assert ended.code == EXIT_FINISHED
    assert "the checkpoint of step 4 could not be noted in" in ended.stderr


def test_an_exit_code_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    [ended] = run_ranks(_start_with, 1, str(make_run(tmp_path, steps=4)), "train", "record_exit")
    assert ended.code == EXIT_FINISHED
    assert "exit code 0 could not be written to" in ended.stderr


def test_copies_that_do_not_fit_in_memory_make_saves_stand_still_and_say_so(tmp_path: Path) -> None:
    run_file = make_run(tmp_path, steps=4)
    ranks = run_ranks(_start_with, 2, str(run_file), "memory", "available_memory_bytes")
    assert [ended.code for ended in ranks] == [EXIT_FINISHED] * 2
    assert "has 1 bytes of memory free, and copies of its ranks' shards need" in ranks[0].stderr
    assert "saves block training while they write" in ranks[0].stderr


def test_shards_whose_sizes_are_right_and_that_cannot_be_loaded_name_the_check_that_finds_them(
    tmp_path: Path,
) -> None:
    run_file = make_run(tmp_path, steps=6, save_every="2 steps")
    run_ranks(start, 1, str(run_file), (), Stop("file", 0, 2))
    [ended] = run_ranks(_start_with, 1, str(run_file), "engine", "load")
    assert ended.code == EXIT_FAILED
    assert "step_000000003 cannot be loaded (KeyError: 'module')" in ended.stderr
    assert 'checkpoint.verify = "full" finds a damaged file' in ended.stderr


def test_a_probe_on_other_data_is_said_not_to_be_one(tmp_path: Path) -> None:
    options: dict[str, Any] = {"steps": 6, "model": {**LLAMA, "attention_dropout": 0.0}}
    run_file = make_run(tmp_path, **options)
    run_ranks(start, 1, str(run_file), (), Stop("file", 0, 2))
    for source in ("text", "code"):
        (tmp_path / f"{source}.bin").rename(tmp_path / f"{source}.other")
        data = bytearray((tmp_path / f"{source}.other").read_bytes())
        data[::2] = bytes(60 + byte % 7 if 32 <= byte < 127 else byte for byte in data[::2])
        (tmp_path / f"{source}.bin").write_bytes(bytes(data))
    [ended] = run_ranks(start, 1, str(run_file), ('accept_changes=["sources"]',))
    assert ended.code == EXIT_FINISHED, ended.stderr
    assert "probe loss not compared: the data of its step changed" in ended.stdout


def test_a_file_that_is_another_here_than_where_it_was_written_stops_a_publication(tmp_path: Path) -> None:
    (tmp_path / "step_000000007.partial").mkdir()
    (tmp_path / "step_000000007.partial" / "run.toml").write_text("x")

    manifest = replace(MANIFEST, step=7)
    with pytest.raises(OSError, match=r"run\.toml has another size here than where it was written"):
        publish(tmp_path, manifest, {"run.toml": FileEntry(5, "0")})
    assert not (tmp_path / "step_000000007").exists()


def test_pieces_that_nobody_has_are_named(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    outcome = assemble(StorageLayout(tmp_path, tmp_path / "out", per_host=True), MANIFEST, "{}", World())
    assert isinstance(outcome, Problem)
    assert outcome.is_permanent
    assert outcome.text.endswith("is on no host")


def test_proving_more_steps_than_a_schedule_has_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file = make_run(tmp_path, steps=6)
    assert main(["verify-resume", str(run_file), "--steps", "4", "--ranks", "1"]) == EXIT_BAD_INPUT
    assert "take fewer steps, or a longer schedule" in capsys.readouterr().err


def test_a_rollback_that_cannot_be_written_down_is_not_made(tmp_path: Path) -> None:
    run_file = make_unhealthy_run(tmp_path)
    ranks = run_ranks(record_run, 2, str(run_file), faults=[Fault("rate", 22), Fault("full_disk")])
    assert [ended.code for ended in ranks] == [EXIT_CANNOT_SAVE] * 2
    assert "cannot be written: [Errno 28]" in ranks[0].stderr


def test_a_checkpoint_that_cannot_be_gone_back_to_is_named_and_an_older_one_taken(tmp_path: Path) -> None:
    run_file = make_unhealthy_run(tmp_path)
    ranks = run_ranks(record_run, 2, str(run_file), faults=[Fault("rate", 22), Fault("lost")])
    assert [ended.code for ended in ranks] == [0, 0]
    assert "cannot be restored: a file of it is gone" in ranks[0].stderr
