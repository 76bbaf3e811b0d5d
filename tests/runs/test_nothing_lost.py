"""A run reads, trains and saves everything once, also over failures."""

from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ds_pretrain.checkpoint import snapshot
from ds_pretrain.core.distributed import World
from ds_pretrain.core.errors import EXIT_BAD_INPUT, EXIT_CANNOT_SAVE, EXIT_FINISHED, InputError
from ds_pretrain.training import saver as saver_module
from ds_pretrain.training.setup import require_shared_folder
from tests.harness import record_run, start
from tests.ranks import KILLED, run_ranks
from tests.runs.results import trace
from tests.scenario import deepspeed_json, make_run
from tests.tiers import slow


def test_p29_every_sample_of_every_window_is_trained_on_once_over_kills(tmp_path: Path) -> None:
    """Accumulation 3, killed twice between checkpoints: the draws that count are each there once."""
    run_file = make_run(tmp_path, steps=7, micro_batch_size=1, batch_tokens=16 * 6, save_every="2 steps")
    for kill_after in (3, 5):
        assert run_ranks(record_run, 2, str(run_file), kill_after=kill_after, allow_kill=True) == [KILLED] * 2
    straight_file = make_run(tmp_path / "straight", steps=7, micro_batch_size=1, batch_tokens=16 * 6)
    straight = run_ranks(record_run, 2, str(straight_file))[0].samples
    read = run_ranks(record_run, 2, str(run_file))[0].samples
    assert set(read) >= {4, 5, 6}  # killed after 5: from step 4 on, or from 2 if 4 was still being written
    assert read == {step: straight[step] for step in read}
    draws = Counter(sample for samples in straight.values() for sample in samples)
    assert sum(draws.values()) == 42
    records = trace(tmp_path / "out")
    assert [record["step"] for record in records] == list(range(1, 8))
    assert [record["samples"] for record in records] == [6 * step for step in range(1, 8)]
    assert [record["tokens"] for record in records] == [96 * step for step in range(1, 8)]
    assert [r["batch_checksum"] for r in records] == [
        r["batch_checksum"] for r in trace(straight_file.parent / "out")
    ]


def _start_on_a_disk_that_fills_up(
    world: World, run_file: str, full_at: str, overrides: list[str], times: int = 100
) -> Any:
    patch = pytest.MonkeyPatch()
    write, failed = snapshot.write_summed, list[Path]()

    def written(path: Path, value: Any) -> Any:
        if world.rank == 1 and full_at in str(path) and len(failed) < times:
            failed.append(path)
            raise OSError(28, "No space left on device")
        return write(path, value)

    patch.setattr(snapshot, "write_summed", written)
    patch.setattr(saver_module, "RETRY_SECONDS", 0.0)
    ended = start(world, run_file, overrides)
    patch.undo()
    return ended


OPTIONS: dict[str, Any] = {"steps": 5, "batch_tokens": 64, "save_every": "2 steps"}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[dict[str, Any]]]:
    """By ZeRO stage, the steps of a run whose disk never fills up."""

    @cache
    def train(stage: int) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp("straight")
        run_ranks(record_run, 2, str(make_run(folder, **OPTIONS, deepspeed=deepspeed_json(stage))))
        return trace(folder / "out")

    return train


@pytest.mark.parametrize("stage", [slow(2), 3])
def test_p20_a_save_that_fails_is_told_and_training_goes_on(
    straight: Callable[[int], list[dict[str, Any]]], tmp_path: Path, stage: int
) -> None:
    run_file = make_run(tmp_path / "full", **OPTIONS, deepspeed=deepspeed_json(stage))
    ranks = run_ranks(_start_on_a_disk_that_fills_up, 2, str(run_file), "step_000000004", [])
    assert [ended.code for ended in ranks] == [EXIT_FINISHED] * 2
    assert (
        "checkpoint step 4 was not saved: rank 1: [Errno 28] No space left on device; the previous one is "
        "intact (1 of 3 consecutive failures)"
    ) in ranks[0].stderr
    assert trace(tmp_path / "full" / "out") == straight(stage)
    names = sorted(path.name for path in (tmp_path / "full" / "out" / "checkpoints").glob("step_*"))
    assert names == ["step_000000001", "step_000000002", "step_000000005"]  # nothing torn is left


def test_p20_saves_that_keep_failing_end_all_ranks_and_the_next_start_goes_on_exactly(
    straight: Callable[[int], list[dict[str, Any]]], tmp_path: Path
) -> None:
    run_file = make_run(tmp_path / "full", **OPTIONS)
    overrides = ["checkpoint.max_consecutive_failures=1"]
    ranks = run_ranks(_start_on_a_disk_that_fills_up, 2, str(run_file), "step_000000004", overrides)
    assert [ended.code for ended in ranks] == [EXIT_CANNOT_SAVE] * 2
    assert "1 consecutive checkpoint saves failed (last: rank 1: [Errno 28] No space left" in ranks[0].stderr
    assert "Traceback" not in ranks[0].stderr

    again = run_ranks(start, 2, str(run_file))
    assert [ended.code for ended in again] == [EXIT_FINISHED] * 2
    assert "resume     step 2/5 from " in again[0].stdout
    assert trace(tmp_path / "full" / "out") == straight(3)


def test_p20_the_last_save_is_tried_again_until_it_is_published(tmp_path: Path) -> None:
    """Code 0 says that the last step is saved: one failure of that save must not end in it."""
    run_file = make_run(tmp_path / "once", **OPTIONS)
    ranks = run_ranks(_start_on_a_disk_that_fills_up, 2, str(run_file), "step_000000005", [], 1)
    assert [ended.code for ended in ranks] == [EXIT_FINISHED] * 2
    assert "checkpoint step 5 was not saved" in ranks[0].stderr
    assert (tmp_path / "once" / "out" / "checkpoints" / "step_000000005" / "manifest.json").exists()

    run_file = make_run(tmp_path / "always", **OPTIONS)
    ranks = run_ranks(_start_on_a_disk_that_fills_up, 2, str(run_file), "step_000000005", [])
    assert [ended.code for ended in ranks] == [EXIT_CANNOT_SAVE] * 2


def _with_an_override_of_its_own(world: World, run_file: str) -> Any:
    return start(world, run_file, ("seed=8",) if world.rank == 1 else ())


def test_ranks_that_read_different_files_do_not_train_together(tmp_path: Path) -> None:
    ranks = run_ranks(_with_an_override_of_its_own, 2, str(make_run(tmp_path)))
    assert [ended.code for ended in ranks] == [EXIT_BAD_INPUT] * 2
    assert "reads another run file, DeepSpeed JSON, model config or corpus" in ranks[0].stderr
    assert ranks[1].stderr == ""  # every rank met it: one says it
    assert not (tmp_path / "out").exists()


def _require_shared(world: World, folder: str) -> str:
    mine = Path(folder) / (f"host_{world.rank}" if folder.endswith("apart") else "")
    mine.mkdir(parents=True, exist_ok=True)
    try:
        require_shared_folder(mine, world, patience_seconds=1.0)
    except InputError as error:
        return str(error)
    return "shared"


def test_p22_a_run_directory_that_hosts_do_not_share_is_found_at_the_start(tmp_path: Path) -> None:
    assert run_ranks(_require_shared, 2, str(tmp_path / "one")) == ["shared", "shared"]
    for message in run_ranks(_require_shared, 2, str(tmp_path / "apart")):
        assert "is not the same folder on" in message
        assert "`out` must lie on a file system that all hosts share" in message
