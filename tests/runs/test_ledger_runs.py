"""Real runs whose skips lie where they can do harm: never trained is the union of the ledger, and no more.

Told twice: by what the ranks read as they trained, and by the checksums in the metrics against the data.
"""

import shutil
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from ds_pretrain.checkpoint.manifest import MANIFEST, list_published, parse_manifest, step_name
from ds_pretrain.commands.cli import main
from ds_pretrain.config.plan import load_plan
from ds_pretrain.core.errors import EXIT_BAD_INPUT
from ds_pretrain.core.state import SkipLedger
from ds_pretrain.data.loader import read_samples
from ds_pretrain.data.sampler import make_sampler
from ds_pretrain.training.preflight import open_inputs
from ds_pretrain.watchdog.rollback_log import read_rollback_log
from tests.harness import Fault, Kill, record_run, start
from tests.ranks import KILLED, run_ranks
from tests.runs.results import counted, trace, validations
from tests.runs.unhealthy import BATCH, make_unhealthy_run

STEPS = 28
WATCHDOG = """
[watchdog]
window = 8
patience = 3
policy = ["skip", "skip"]
skip_before = "{before} steps"
skip_after = "{after} steps"
"""


def _make(folder: Path, before: int = 1, after: int = 4, **more: Any) -> Path:
    return make_unhealthy_run(folder, WATCHDOG.format(before=before, after=after), **{"steps": STEPS, **more})


def _poison(first_step: int, last_step: int) -> Fault:
    """What these steps read before anything was skipped."""
    return Fault("labels", (first_step - 1) * BATCH, last_step * BATCH)


def _require_exact(run_file: Path) -> list[tuple[int, int]]:
    """The ledger's intervals, after all draws but their union were found trained once each, in order."""
    out = run_file.parent / "out"
    ledger = read_rollback_log(out).ledger
    union = {draw for skip in ledger.skips for draw in range(skip.start, skip.stop)}
    steps = counted(run_file)
    assert list(steps) == list(range(1, STEPS + 1))
    trained = [draw for draws in steps.values() for draw in draws]
    assert trained == [d for d in range(len(trained) + len(union)) if d not in union][: len(trained)]
    records = trace(out)
    assert [r["step"] for r in records] == list(range(1, STEPS + 1))
    assert [r["batch_checksum"] for r in records] == _checksums(run_file, ledger)
    assert [r["samples"] for r in records] == [BATCH * step for step in range(1, STEPS + 1)]
    assert sorted(validations(out)) == list(range(4, STEPS + 1, 4))
    assert main(["audit", str(run_file), "--all"]) == 0
    for folder in list_published(out / "checkpoints"):
        _require_counters(folder)
    return [(skip.start, skip.stop) for skip in ledger.skips]


def _require_counters(folder: Path) -> None:
    """A checkpoint says how many samples were trained."""
    manifest = parse_manifest((folder / MANIFEST).read_text())
    assert manifest.samples == BATCH * manifest.step


def _checksums(run_file: Path, ledger: SkipLedger) -> list[int]:
    """What each step should have read, of the data on disk: not by the feed."""
    plan = load_plan(str(run_file), ())
    inputs = open_inputs(plan)
    weights = {phase.name: phase.mixture for phase in plan.run.phases}
    sampler = make_sampler(plan.run.seed, plan.timeline, weights, inputs.sources)
    union = {draw for skip in ledger.skips for draw in range(skip.start, skip.stop)}
    left = [draw for draw in range(STEPS * BATCH + len(union)) if draw not in union]
    sums = []
    for step in range(STEPS):
        draws = np.array(left[step * BATCH : (step + 1) * BATCH], np.uint64)
        rows = read_samples(sampler.at_draws("main", 16, draws, step), inputs.sources, 0, BATCH)
        sums.append(sum(crc32(row.tobytes()) for row in rows))
    return sums


def test_a_window_over_another_with_a_kill_before_the_load_and_a_restart_on_another_number_of_ranks(
    tmp_path: Path,
) -> None:
    """They cover saves and validations. What the first went back to is lost, too: an older one serves."""
    run_file = _make(tmp_path, before=5)
    bad = [_poison(14, 16), _poison(22, 25)]
    killed = run_ranks(record_run, 2, str(run_file), faults=bad, kill=Kill(None, "load"), allow_kill=True)
    assert killed == [KILLED] * 2  # the first skip is written down, and its checkpoint not loaded
    [first] = read_rollback_log(tmp_path / "out").rollbacks
    shutil.rmtree(tmp_path / "out/checkpoints" / step_name(first.to_step))
    [ended] = run_ranks(record_run, 1, str(run_file), faults=bad)
    assert ended.code == 0, ended.stderr
    assert [r.response for r in ended.final.rollbacks] == ["skip", "skip"]
    assert ended.trained[0][0] < first.to_step + 1
    skip = read_rollback_log(tmp_path / "out").ledger.skips[
        0
    ]  # known before the restart: the data is told again
    assert f"skipped    {skip.stop - skip.start} samples of main; without them the run's data" in ended.stderr
    (start, stop), (start_2, stop_2) = _require_exact(run_file)
    assert start_2 < start < stop < stop_2
    window = range(start // BATCH + 1, stop // BATCH + 1)  # the steps that had read it
    assert any(step % 2 == 0 for step in window)  # a save
    assert any(step % 4 == 0 for step in window)  # a validation


@pytest.mark.slow
def test_a_skip_that_reaches_past_the_last_step_and_a_kill_after_it(tmp_path: Path) -> None:
    """The trouble is found as the run would end: it goes back, reads on past the bad data, and then ends."""
    run_file = _make(tmp_path)
    bad = [_poison(STEPS - 2, STEPS)]
    killed = run_ranks(
        record_run, 2, str(run_file), faults=bad, kill=Kill(None, "rolled back"), allow_kill=True
    )
    assert killed == [KILLED] * 2
    killed = run_ranks(record_run, 1, str(run_file), faults=bad, kill_after=STEPS - 1, allow_kill=True)
    assert killed == [KILLED]
    ranks = run_ranks(record_run, 2, str(run_file), faults=bad)
    assert [r.code for r in ranks] == [0, 0], ranks[0].stderr
    assert [r.response for r in ranks[0].final.rollbacks] == ["skip"]
    [(_, stop)] = _require_exact(run_file)
    assert stop == STEPS * BATCH  # as far as the run had read, and no further
    cure = tmp_path / "out/rollbacks.json"
    cure.write_text(cure.read_text()[:-20])
    [ended] = run_ranks(start, 1, str(run_file))
    assert ended.code == EXIT_BAD_INPUT
    assert "rollbacks.json cannot be read (" in ended.stderr
    assert "it records which data was skipped; put an intact copy back" in ended.stderr
