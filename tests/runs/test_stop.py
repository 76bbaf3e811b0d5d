"""Stopping: one rank is asked, all save and exit "preempted", and the run goes on as if it never stopped."""

from pathlib import Path

import pytest

from ds_pretrain.core.errors import EXIT_FINISHED, EXIT_PREEMPTED
from ds_pretrain.core.jsonl import read_metrics
from ds_pretrain.core.run_files import read_exit, stop_file
from tests.harness import Stop, record_run, start
from tests.ranks import run_ranks
from tests.runs.results import trace
from tests.scenario import make_run
from tests.tiers import slow_but

STEPS = 6
STOPS = {
    "SIGTERM to rank 1": (Stop("SIGTERM", 1, 3), 4),
    "SIGINT to rank 0": (Stop("SIGINT", 0, 2), 3),
    "stop file": (Stop("file", 0, 4), 5),
    "SIGTERM to rank 1 during start-up": (Stop("SIGTERM", 1, None), 1),
    "stop file during start-up": (Stop("file", 0, None), 1),
}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a run that was never stopped."""
    run_file = make_run(tmp_path_factory.mktemp("straight"), steps=STEPS, save_every="100 steps")
    run_ranks(record_run, 2, str(run_file))
    return run_file.parent / "out"


@pytest.mark.parametrize("name", slow_but(STOPS, "SIGTERM to rank 1", "stop file during start-up"))
def test_a_stop_is_saved_by_all_ranks_and_resumed_exactly(tmp_path: Path, straight: Path, name: str) -> None:
    stop, step = STOPS[name]
    run_file = make_run(tmp_path, steps=STEPS, save_every="100 steps")
    out = tmp_path / "out"
    for ended in run_ranks(start, 2, str(run_file), (), stop):
        assert ended.code == EXIT_PREEMPTED
        assert "Traceback" not in ended.stderr
        if ended.stderr:  # rank 0 speaks
            said = (
                f"ds_pretrain: preempted at step {step}, checkpoint saved; rerun the same command to resume\n"
            )
            assert ended.stderr.endswith(said)
    assert read_exit(out) == EXIT_PREEMPTED
    assert not stop_file(out).exists()  # or the next start would stop as well
    names = sorted(p.name for p in (out / "checkpoints").glob("step_*"))
    assert names == sorted({"step_000000001", f"step_{step:09d}"})
    events = [(r["event"], r["step"]) for r in read_metrics(out / "metrics.jsonl") if r["event"] == "stop"]
    assert events == [("stop", step)]

    ended = run_ranks(start, 2, str(run_file))[0]
    assert ended.code == EXIT_FINISHED
    assert f"resume     step {step}/{STEPS} from {out}/checkpoints/step_{step:09d}" in ended.stdout
    assert read_exit(out) == EXIT_FINISHED
    assert trace(out) == trace(straight)


@pytest.mark.slow
def test_three_stops_in_a_row_are_as_exact_as_one(tmp_path: Path, straight: Path) -> None:
    run_file = make_run(tmp_path, steps=STEPS, save_every="100 steps")
    for rank, step in ((1, 1), (0, 3), (1, None)):  # the last start stops after its first step: 5
        codes = [ended.code for ended in run_ranks(start, 2, str(run_file), (), Stop("SIGTERM", rank, step))]
        assert codes == [EXIT_PREEMPTED] * 2
    assert [ended.code for ended in run_ranks(start, 2, str(run_file))] == [EXIT_FINISHED] * 2
    assert trace(tmp_path / "out") == trace(straight)
