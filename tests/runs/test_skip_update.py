"""A run with `skip_update_sigmas` skips an outlier update, as if its batch had never been seen."""

import math
from pathlib import Path
from typing import Any

import pytest

from ds_pretrain.core.jsonl import read_metrics
from tests.harness import Fault, record_run
from tests.ranks import KILLED, run_ranks
from tests.runs.results import trace
from tests.runs.unhealthy import WATCHDOG, make_unhealthy_run
from tests.tiers import slow

DROPPING = WATCHDOG + "skip_update_sigmas = 40\n"
WILD_STEP = 22
WILD = 1e4


def _wild(factor: float = WILD) -> list[Fault]:
    """One rank's gradients are multiplied."""
    return [Fault("gradient", WILD_STEP, rank=1, value=factor)]


def _learned(out: Path) -> list[Any]:
    """What each step shows of the weights and of the schedule."""
    return [(r["step"], r["loss"], r["learning_rate"], r["update_applied"]) for r in trace(out)]


@pytest.mark.parametrize("killed", [False, slow(True)], ids=["straight", "killed"])
def test_a_wild_update_is_dropped_as_if_it_were_no_number_also_across_a_kill(
    tmp_path: Path, killed: bool
) -> None:
    ends = {}
    for name, factor in (("wild", WILD), ("nan", math.nan)):
        run_file = make_unhealthy_run(tmp_path / name, DROPPING)
        ends[name] = run_ranks(record_run, 2, str(run_file), faults=_wild(factor))
    if killed:
        run_file = make_unhealthy_run(tmp_path / "cut", DROPPING)
        options: dict[str, Any] = {"kill_after": WILD_STEP + 3, "allow_kill": True}
        assert run_ranks(record_run, 2, str(run_file), faults=_wild(), **options) == [KILLED] * 2
        ends["cut"] = run_ranks(record_run, 2, str(run_file), faults=_wild())

    outs = {name: tmp_path / name / "out" for name in ends}
    for name in ends:
        assert _learned(outs[name]) == _learned(outs["wild"])
        assert [(end.code, end.digest) for end in ends[name]] == [(0, end.digest) for end in ends["wild"]]
    steps = {record["step"]: record for record in trace(outs["wild"])}
    assert [step for step, record in steps.items() if not record["update_applied"]] == [WILD_STEP]
    assert 100 < steps[WILD_STEP]["grad_norm"] < math.inf
    assert steps[WILD_STEP]["clip_factor"] is None
    assert steps[WILD_STEP + 1]["learning_rate"] == steps[WILD_STEP]["learning_rate"]
    events = [record for record in read_metrics(outs["wild"] / "metrics.jsonl") if "event" in record]
    [dropped] = [event for event in events if event["event"] == "skipped_update"]
    assert (dropped["step"], dropped["cause"], len(dropped["samples"])) == (WILD_STEP, "outlier_norm", 8)
    assert any(e["event"] == "watchdog" and "update skipped: gradient norm" in e["message"] for e in events)
    assert not any(event["event"] == "rollback" for event in events)


@pytest.mark.slow
def test_a_run_without_drop_sigmas_or_that_only_observes_applies_it(tmp_path: Path) -> None:
    for name, watchdog in (("off", WATCHDOG), ("observe", DROPPING + 'mode = "observe"\n')):
        run_file = make_unhealthy_run(tmp_path / name, watchdog)
        run_file.write_text(run_file.read_text().replace('length = "40 steps"', 'length = "23 steps"'))
        run_ranks(record_run, 2, str(run_file), faults=_wild())
        assert all(record["update_applied"] for record in trace(tmp_path / name / "out"))
