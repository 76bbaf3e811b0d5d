"""What a run read, trained and saved adds up: nothing twice, nothing left out, also over failures."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_pretrain.errors import EXIT_FAILED, EXIT_FINISHED
from ds_pretrain.world import World
from tests.ranks import KILLED, run_ranks
from tests.runs.golden import run_rank, trace
from tests.runs.starts import start
from tests.scenario import deepspeed_json, make_run


def test_p29_every_sample_of_every_window_is_trained_on_once_over_kills(tmp_path: Path) -> None:
    """Accumulation 3, killed twice between checkpoints: the draws that count are each there once."""
    run_file = make_run(tmp_path, steps=7, micro_sequences=1, batch_tokens=16 * 6, save_every="2 steps")
    read: dict[int, Any] = {}
    for kill_after in (3, 5):
        assert run_ranks(run_rank, 2, str(run_file), kill_after, allow_kill=True) == [KILLED] * 2
    straight_file = make_run(tmp_path / "straight", steps=7, micro_sequences=1, batch_tokens=16 * 6)
    [(_, _, straight), _] = run_ranks(run_rank, 2, str(straight_file))
    [(_, _, read), _] = run_ranks(run_rank, 2, str(run_file))
    assert read == {step: straight[step] for step in (4, 5, 6)}  # the last checkpoint was of step 4
    draws = Counter(sample for samples in straight.values() for sample in samples)
    assert sum(draws.values()) == 42
    records = trace(tmp_path / "out")
    assert [record["step"] for record in records] == list(range(1, 8))
    assert [record["samples"] for record in records] == [6 * step for step in range(1, 8)]
    assert [record["tokens"] for record in records] == [96 * step for step in range(1, 8)]
    assert [r["batch_checksum"] for r in records] == [
        r["batch_checksum"] for r in trace(straight_file.parent / "out")
    ]


def _start_on_a_disk_that_fills_up(world: World, run_file: str, full_at: str) -> Any:
    patch = pytest.MonkeyPatch()
    save = torch.save

    def saving(value: Any, path: Any, **options: Any) -> None:
        if world.rank == 1 and full_at in str(path):
            raise OSError(28, "No space left on device")
        save(value, path, **options)

    patch.setattr(torch, "save", saving)
    ended = start(world, run_file)
    patch.undo()
    return ended


@pytest.mark.parametrize("stage", [2, 3])
def test_a_failed_save_ends_all_ranks_and_the_next_start_goes_on_exactly(tmp_path: Path, stage: int) -> None:
    options: dict[str, Any] = {"steps": 5, "batch_tokens": 64, "save_every": "2 steps"}
    options |= {"deepspeed": deepspeed_json(stage)}
    straight_file = make_run(tmp_path / "straight", **options)
    run_ranks(run_rank, 2, str(straight_file))

    run_file = make_run(tmp_path / "full", **options)
    endings = run_ranks(
        _start_on_a_disk_that_fills_up, 2, str(run_file), "step_000000004", timeout_seconds=60
    )
    assert [ended.code for ended in endings] == [EXIT_FAILED] * 2  # a supervisor may try again
    said = "checkpoint step_000000004 was not saved (rank 1: [Errno 28] No space left on device)"
    assert said in endings[0].stderr
    assert "the one before it is intact" in endings[0].stderr
    assert "Traceback" not in endings[0].stderr

    again = run_ranks(start, 2, str(run_file))
    assert [ended.code for ended in again] == [EXIT_FINISHED] * 2
    assert "step_000000002: 2 of 5 steps done" in again[0].stdout
    assert trace(tmp_path / "full" / "out") == trace(tmp_path / "straight" / "out")
    names = sorted(path.name for path in (tmp_path / "full" / "out" / "checkpoints").glob("step_*"))
    assert names == ["step_000000002", "step_000000004", "step_000000005"]  # nothing torn is left
