"""A run that begins from another's checkpoint: ours, or a universal one of anyone's, and what it may lack."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ds_pretrain.core.errors import EXIT_BAD_INPUT, EXIT_FINISHED
from tests.harness import Stop, record_run, start
from tests.ranks import run_ranks
from tests.runs.results import copied, trace
from tests.scenario import LLAMA, make_run
from tests.tiers import slow

OPTIONS: dict[str, Any] = {
    "steps": 6,
    "save_every": "2 steps",
    "batch_tokens": 96,
    "micro_batch_size": 1,
    "model": {**LLAMA, "attention_dropout": 0.0},
}


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that stopped after step 4."""
    run_file = make_run(tmp_path_factory.mktemp("parent"), **OPTIONS)
    run_ranks(start, 2, str(run_file), (), Stop("file", 0, 3))
    return run_file.parent


@pytest.fixture
def origin(parent: Path, tmp_path: Path) -> Path:
    """The newest checkpoint of a copy of that run."""
    return copied(parent, tmp_path / "parent").parent / "out" / "checkpoints" / "step_000000004"


def _child(tmp_path: Path, origin: Path) -> tuple[Path, tuple[str, ...]]:
    """Another run of the same data, with a name and a directory of its own."""
    run_file = tmp_path / "parent" / "child.toml"
    text = (tmp_path / "parent" / "run.toml").read_text()
    run_file.write_text(text.replace('name = "tiny"', 'name = "child"'))
    return run_file, (f"resume_from={origin}", f"out={tmp_path}/child")


@pytest.mark.parametrize("num_ranks", [2, slow(3)])
def test_a_run_begins_where_the_other_ones_checkpoint_stands_and_trains_what_that_would_have(
    origin: Path, tmp_path: Path, num_ranks: int
) -> None:
    run_file, overrides = _child(tmp_path, origin)
    ranks = run_ranks(start, num_ranks, str(run_file), overrides)
    assert [ended.code for ended in ranks] == [EXIT_FINISHED] * num_ranks
    assert f"resume     step 4/6 from {origin} (" in ranks[0].stdout
    record = json.loads((tmp_path / "child" / "run.json").read_text())
    assert record["origin"] == str(origin)
    assert record["attempt"] == 1
    assert record["wandb_id"] != json.loads((tmp_path / "parent/out/run.json").read_text())["wandb_id"]

    run_ranks(record_run, 2, str(tmp_path / "parent" / "run.toml"))
    ours, theirs = trace(tmp_path / "child"), trace(tmp_path / "parent" / "out")[-2:]
    assert [step["samples"] for step in ours] == [step["samples"] for step in theirs] == [30, 36]
    assert [step["batch_checksum"] for step in ours] == [step["batch_checksum"] for step in theirs]
    assert [step["loss"] for step in ours] == pytest.approx([s["loss"] for s in theirs], abs=1e-6)
    if num_ranks == 2:
        assert ours == theirs

    [ended] = run_ranks(start, 1, str(run_file), overrides)  # from now on it has its own
    assert "all 6 steps done" in ended.stdout


def test_what_differs_from_the_other_run_is_refused_or_accepted_and_recorded(
    origin: Path, tmp_path: Path
) -> None:
    run_file, overrides = _child(tmp_path, origin)
    ranks = run_ranks(start, 2, str(run_file), (*overrides, "seed=9", "schedule.peak_lr=2e-2"))
    assert [ended.code for ended in ranks] == [EXIT_BAD_INPUT] * 2
    assert "`seed` is 9, but the run of" in ranks[0].stderr
    assert "`schedule.peak_lr` is 0.02" in ranks[0].stderr
    assert not (tmp_path / "child" / "run.json").exists()

    accepted = (*overrides, "schedule.peak_lr=2e-2", 'accept_changes=["schedule"]')
    ranks = run_ranks(start, 2, str(run_file), accepted)
    assert [ended.code for ended in ranks] == [EXIT_FINISHED] * 2
    [change] = json.loads((tmp_path / "child" / "run.json").read_text())["changes"]
    assert change == {"attempt": 1, "field": "schedule.peak_lr", "old": 0.01, "new": 0.02}


def test_a_broken_or_absent_checkpoint_to_begin_from_is_named_and_not_moved(
    origin: Path, tmp_path: Path
) -> None:
    run_file, overrides = _child(tmp_path, origin)
    shard = next(origin.glob("*optim_states.pt"))
    shard.write_bytes(shard.read_bytes()[:-1])
    for words, message in (
        (overrides, f"{origin} does not verify: {shard.name} has"),
        (
            (f"resume_from={tmp_path}/nothing", overrides[1]),
            f"resume_from = {tmp_path}/nothing is not a folder; name a checkpoint folder",
        ),
    ):
        ranks = run_ranks(start, 2, str(run_file), words)
        assert [ended.code for ended in ranks] == [EXIT_BAD_INPUT] * 2
        assert message in ranks[0].stderr
        assert ranks[1].stderr == ""
    assert shard.exists()


def test_a_run_that_lost_its_own_checkpoints_does_not_begin_again_from_the_other_ones(
    origin: Path, tmp_path: Path
) -> None:
    run_file, overrides = _child(tmp_path, origin)
    run_ranks(start, 2, str(run_file), overrides)
    shutil.rmtree(tmp_path / "child" / "checkpoints")
    [ended] = run_ranks(start, 1, str(run_file), overrides)
    assert ended.code == EXIT_BAD_INPUT
    assert "had a checkpoint at step 6 and now has none" in ended.stderr


def test_a_universal_checkpoint_of_deepspeeds_own_tool_takes_its_word_and_a_flag(
    origin: Path, tmp_path: Path
) -> None:
    """DeepSpeed's files are pickles, which can run code: without our manifest a person has to trust them."""
    foreign = tmp_path / "foreign"
    subprocess.run(
        [
            *(sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"),
            *("--input_folder", str(origin), "--output_folder", str(foreign), "--num_extract_workers", "1"),
        ],
        check=True,
        capture_output=True,
    )
    run_file, (_, out) = _child(tmp_path, origin)
    overrides = (f"resume_from={foreign}", out)
    [ended] = run_ranks(start, 1, str(run_file), overrides)
    assert ended.code == EXIT_BAD_INPUT
    assert "has no manifest: it has no checksums, and DeepSpeed's files are pickles" in ended.stderr
    assert "if that is right, start with --trust-pickle" in ended.stderr
    assert "has no rng" in ended.stderr
    assert "add 'rng' to accept_missing" in ended.stderr

    allowed = (*overrides, 'accept_missing=["run_state", "rng"]')
    [ended] = run_ranks(start, 1, str(run_file), allowed)
    assert ended.code == EXIT_BAD_INPUT
    assert "has no run_state" not in ended.stderr

    ranks = run_ranks(start, 3, str(run_file), (*allowed, "--trust-pickle"))
    assert [ended.code for ended in ranks] == [EXIT_FINISHED] * 3
    assert f"resume     step 4/6 from {foreign} (no probe loss in the checkpoint)" in ranks[0].stdout
    assert "as --trust-pickle allows" in ranks[0].stderr
    run_ranks(record_run, 2, str(tmp_path / "parent" / "run.toml"))
    losses = [
        [s["loss"] for s in trace(out)[-2:]] for out in (tmp_path / "child", tmp_path / "parent" / "out")
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
