"""After a rollback with skip, a run is bitwise one that begins afresh at that checkpoint with that ledger."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from ds_pretrain.watchdog.rollback_log import read_rollback_log
from tests.harness import Fault, Record, record_run
from tests.ranks import run_ranks
from tests.runs.results import trace, validations
from tests.runs.unhealthy import BATCH, make_unhealthy_run
from tests.scenario import LLAMA

POISON = Fault("labels", 15 * BATCH, 18 * BATCH)  # what steps 16 to 18 read
DROPOUT: dict[str, Any] = {
    "steps": 28,
    "model": LLAMA,
}  # whose masks tell random streams that were not gone back to


def _fresh(sick_file: Path, folder: Path, to_step: int, **more: Any) -> Path:
    """A run of its own that has nothing but that checkpoint and that ledger."""
    run_file = make_unhealthy_run(folder, **more)
    name = f"step_{to_step:09d}"
    shutil.copytree(sick_file.parent / "out/checkpoints" / name, folder / "out/checkpoints" / name)
    shutil.copy(sick_file.parent / "out/rollbacks.json", folder / "out/rollbacks.json")
    return run_file


def _after(ended: Record, to_step: int) -> list[tuple[int, Any]]:
    """What was trained from the last rollback on."""
    last = max(i for i, (step, _) in enumerate(ended.trained) if step == to_step + 1)
    return list(ended.trained[last:])


def _skipped_run(folder: Path, **more: Any) -> tuple[Path, list[Record], int]:
    """A run that met bad data, replayed and skipped it, and ended; and the step that it skipped from."""
    run_file = make_unhealthy_run(folder, **more)
    ranks: list[Record] = run_ranks(record_run, 2, str(run_file), faults=[POISON])
    assert [r.code for r in ranks] == [0, 0], ranks[0].stderr
    replay, skip = read_rollback_log(folder / "out").rollbacks
    assert (replay.response, skip.response) == ("replay", "skip")
    return run_file, ranks, skip.to_step


def test_after_a_skip_everything_is_bitwise_that_of_a_fresh_run_with_that_ledger(tmp_path: Path) -> None:
    sick_file, sick, to_step = _skipped_run(tmp_path / "sick", **DROPOUT)
    fresh_file = _fresh(sick_file, tmp_path / "fresh", to_step, **DROPOUT)
    fresh: list[Record] = run_ranks(record_run, 2, str(fresh_file), faults=[POISON])
    for went_back, began in zip(sick, fresh, strict=True):
        assert began.code == 0, began.stderr
        assert began.rollbacks == []
        assert went_back.digest == began.digest  # masters, moments and Adam's steps
        assert went_back.streams == began.streams
        assert _after(went_back, to_step) == began.trained
        assert {step: went_back.rates[step] for step in began.rates} == began.rates
        assert went_back.final.to_json() == began.final.to_json()  # what the watchdog remembers, too
    outs = [file.parent / "out" for file in (sick_file, fresh_file)]
    assert trace(outs[0])[to_step:] == trace(outs[1])  # losses, norms, rates, clip factors, checksums
    checked = validations(outs[1])
    assert {step: validations(outs[0])[step] for step in checked} == checked


@pytest.mark.slow
def test_after_a_skip_one_rank_reads_the_same_samples_as_two_and_learns_the_same(tmp_path: Path) -> None:
    sick_file, sick, to_step = _skipped_run(tmp_path / "sick", steps=28)
    fresh_file = _fresh(sick_file, tmp_path / "fresh", to_step, steps=28)
    [fresh] = run_ranks(record_run, 1, str(fresh_file), faults=[POISON])
    assert fresh.code == 0, fresh.stderr
    assert fresh.trained == _after(sick[0], to_step)
    assert fresh.final.ledger == sick[0].final.ledger
    [sick_trace, fresh_trace] = [trace(file.parent / "out") for file in (sick_file, fresh_file)]
    assert [s["step"] for s in fresh_trace] == list(range(to_step + 1, 29))
    for other, same in zip(sick_trace[to_step:], fresh_trace, strict=True):
        assert same["batch_checksum"] == other["batch_checksum"]
        assert same["loss"] == pytest.approx(other["loss"], abs=1e-5)
