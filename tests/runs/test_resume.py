"""Coming back: a run goes on, is finished, or says why it cannot; it never silently starts again."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from ds_pretrain.core.distributed import World
from ds_pretrain.core.errors import EXIT_BAD_INPUT, EXIT_FINISHED, InputError
from ds_pretrain.core.run_files import read_exit
from ds_pretrain.training import preflight as preflight_module
from tests.harness import Stop, start
from tests.ranks import run_ranks
from tests.runs.results import contents, trace
from tests.scenario import make_run

SMALL: dict[str, Any] = {"steps": 4, "batch_tokens": 64, "save_every": "2 steps"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that finished on two ranks. Tests copy its `out`, or leave it as it is."""
    run_file = make_run(tmp_path_factory.mktemp("finished"), **SMALL)
    assert [ended.code for ended in run_ranks(start, 2, str(run_file))] == [EXIT_FINISHED] * 2
    return run_file.parent


def _copy(finished: Path, folder: Path) -> Path:
    """The same run in a folder of its own; its run file."""
    run_file = make_run(folder, **SMALL)
    shutil.copytree(finished / "out", folder / "out")
    return run_file


def _same_sources(run_file: Path, finished: Path) -> tuple[str, ...]:
    """Overrides for a copy: the data stay where they are, as they belong to what the run is."""
    return tuple(f"sources.{name}={finished}/{name}" for name in ("text", "code"))


def test_a_finished_run_exits_zero_and_says_so(tmp_path: Path, finished: Path) -> None:
    run_file = _copy(finished, tmp_path)
    before = trace(tmp_path / "out")
    endings = run_ranks(start, 2, str(run_file), _same_sources(run_file, finished))
    assert [ended.code for ended in endings] == [EXIT_FINISHED] * 2
    assert f"finished   {tmp_path}/out: all 4 steps done" in endings[0].stdout
    assert read_exit(tmp_path / "out") == EXIT_FINISHED
    assert trace(tmp_path / "out") == before


def test_a_run_that_lost_its_checkpoints_refuses_to_start_again(tmp_path: Path, finished: Path) -> None:
    run_file = _copy(finished, tmp_path)
    shutil.rmtree(tmp_path / "out" / "checkpoints")
    endings = run_ranks(start, 2, str(run_file), _same_sources(run_file, finished))
    assert [ended.code for ended in endings] == [EXIT_BAD_INPUT] * 2
    assert f"{tmp_path}/out had a checkpoint at step 4 and now has none" in endings[0].stderr
    assert "put the checkpoints back, or give the run file a new `out`" in endings[0].stderr
    assert len(trace(tmp_path / "out")) == 4


def test_a_run_whose_checkpoints_are_all_broken_refuses_now_and_at_the_next_start(
    tmp_path: Path, finished: Path
) -> None:
    run_file = _copy(finished, tmp_path)
    for folder in (tmp_path / "out" / "checkpoints").glob("step_*"):
        (folder / "run_state.json").write_text("{}")
    first, second = (run_ranks(start, 2, str(run_file), _same_sources(run_file, finished)) for _ in range(2))
    assert [ended.code for ended in first + second] == [EXIT_BAD_INPUT] * 4
    assert first[0].stderr.count(" is broken: ") == 3
    for ended in (first[0], second[0]):
        assert "checkpoints verifies (broken ones are listed above and renamed" in ended.stderr
        assert "a run never restarts at step 0 by itself" in ended.stderr


def test_a_broken_newest_checkpoint_costs_its_steps_and_nothing_else(tmp_path: Path, finished: Path) -> None:
    run_file = _copy(finished, tmp_path)
    shard = next((tmp_path / "out" / "checkpoints" / "step_000000004").glob("*rank_1*optim_states.pt"))
    shard.write_bytes(shard.read_bytes()[:-100])
    endings = run_ranks(start, 2, str(run_file), _same_sources(run_file, finished))
    assert [ended.code for ended in endings] == [EXIT_FINISHED] * 2
    assert "step_000000004 is broken" in endings[0].stderr
    assert "resume     step 2/4 from " in endings[0].stdout
    assert trace(tmp_path / "out") == trace(finished / "out")


def test_a_run_directory_of_another_run_is_refused_on_all_ranks_and_left_as_it_is(finished: Path) -> None:
    before = contents(finished / "out")
    endings = run_ranks(start, 2, str(finished / "run.toml"), ("name=other",))
    assert [ended.code for ended in endings] == [EXIT_BAD_INPUT] * 2
    assert "holds the run 'tiny'" in endings[0].stderr
    assert "give it its own `out`" in endings[0].stderr
    assert _without_exit_code(contents(finished / "out")) == _without_exit_code(before)


def test_another_trajectory_in_the_same_directory_is_refused_with_both_values(finished: Path) -> None:
    before = contents(finished / "out")
    endings = run_ranks(start, 2, str(finished / "run.toml"), ("seed=8", "schedule.peak_lr=2e-2"))
    assert [ended.code for ended in endings] == [EXIT_BAD_INPUT] * 2
    assert "`seed` is 8, but the run in" in endings[0].stderr
    assert "`schedule.peak_lr` is 0.02, but the run in" in endings[0].stderr
    assert _without_exit_code(contents(finished / "out")) == _without_exit_code(before)


def test_a_schedule_made_shorter_than_the_run_stands_is_refused(finished: Path) -> None:
    overrides = ("schedule.length=3 steps", "schedule.warmup=1 step", 'accept_changes=["schedule"]')
    endings = run_ranks(start, 2, str(finished / "run.toml"), overrides)
    assert [ended.code for ended in endings] == [EXIT_BAD_INPUT] * 2
    assert "is at step 4, beyond the schedule (3 steps)" in endings[0].stderr


def _start_without_data_on_rank_1(world: World, run_file: str) -> Any:
    patch = pytest.MonkeyPatch()
    if world.rank == 1:

        def missing(plan: Any) -> Any:
            raise InputError(["sources.text: no such file on this host", "sources.code: nor here"])

        patch.setattr(preflight_module, "open_inputs", missing)
    return start(world, run_file)


def test_what_one_rank_alone_cannot_read_stops_all_of_them_before_anything_is_written(tmp_path: Path) -> None:
    run_file = make_run(tmp_path, **SMALL)
    endings = run_ranks(_start_without_data_on_rank_1, 2, str(run_file))
    assert [ended.code for ended in endings] == [EXIT_BAD_INPUT] * 2
    assert "sources.text: no such file on this host" in endings[0].stderr  # rank 0 tells what rank 1 met
    assert "sources.code: nor here" in endings[0].stderr
    assert not (tmp_path / "out").exists()


def test_an_output_that_is_a_file_is_bad_input(tmp_path: Path) -> None:
    run_file = make_run(tmp_path, **SMALL)
    (tmp_path / "out").write_text("in the way")
    endings = run_ranks(start, 2, str(run_file))
    assert [ended.code for ended in endings] == [EXIT_BAD_INPUT] * 2
    assert "out" in endings[0].stderr
    assert "Traceback" not in endings[0].stderr
    assert (tmp_path / "out").read_text() == "in the way"


def test_a_run_that_was_stopped_at_its_last_step_is_finished_at_the_next_start(tmp_path: Path) -> None:
    """And makes no progress then without being an error."""
    run_file = make_run(tmp_path, **SMALL)
    run_ranks(start, 1, str(run_file), (), Stop("SIGTERM", 0, 3))
    [ended] = run_ranks(start, 1, str(run_file))
    assert ended.code == EXIT_FINISHED
    assert "all 4 steps done" in ended.stdout


def _without_exit_code(files: dict[str, bytes]) -> dict[str, bytes]:
    """The launcher reads the code of the latest start there."""
    return {name: data for name, data in files.items() if name != "exit_code.json"}
