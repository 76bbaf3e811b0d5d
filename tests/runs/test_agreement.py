"""Trouble on one rank only: every rank comes to the same verdicts, ledger and place in the data."""

import platform
import re
from pathlib import Path

import pytest

from ds_pretrain.core.jsonl import METRICS, read_metrics
from tests.harness import Fault, Record, record_run
from tests.ranks import run_ranks
from tests.runs.unhealthy import make_unhealthy_run
from tests.tiers import slow

WATCHDOG = """
[watchdog]
window = 8
patience = 3
max_non_finite_steps = 2
skip_before = "1 steps"
skip_after = "4 steps"
"""
SEQUENCES = 12  # that two and three ranks divide
DRAWS = 13 * SEQUENCES, 16 * SEQUENCES  # what steps 14 to 16 read


def _run(folder: Path, num_ranks: int, trouble: Fault) -> list[Record]:
    batch = {"batch_tokens": 16 * SEQUENCES, "micro_batch_size": SEQUENCES // num_ranks}
    run_file = make_unhealthy_run(folder, WATCHDOG, steps=24, save_every="3 steps", **batch)
    ranks: list[Record] = run_ranks(record_run, num_ranks, str(run_file), faults=[trouble])
    return ranks


def _require_agreement(ranks: list[Record]) -> Record:
    """Every verdict with its numbers, the states gone back to, all that was read, the end: to the bit."""
    first = ranks[0]
    for rank in ranks[1:]:
        assert rank.verdicts == first.verdicts
        assert rank.trained == first.trained
        assert [s.to_json() for s in rank.rollbacks] == [s.to_json() for s in first.rollbacks]
        assert rank.final.to_json() == first.final.to_json()
        assert (rank.code, rank.rates) == (first.code, first.rates)
    return first


def test_p54_a_spike_is_one_decision_of_all_ranks_through_replay_and_skip(tmp_path: Path) -> None:
    """All ranks read nonsense, whenever they read those draws."""
    agreed = _require_agreement(_run(tmp_path, 2, Fault("labels", *DRAWS)))
    assert agreed.code == 0, agreed.stderr
    assert [r.response for r in agreed.final.rollbacks] == ["replay", "skip"]
    assert len(agreed.final.ledger.skips) == 1
    assert [v[0] for v in agreed.verdicts if v[1] == "roll_back"] == [r.step for r in agreed.final.rollbacks]


def test_w07_p54_a_high_loss_of_one_rank_is_watched_by_all_and_its_host_named(tmp_path: Path) -> None:
    """One rank alone reads nonsense; the loss of the other is sound."""
    agreed = _require_agreement(_run(tmp_path, 2, Fault("labels", *DRAWS, rank=1)))
    assert agreed.code == 0, agreed.stderr
    assert agreed.final.rollbacks == ()
    [event] = [
        event
        for event in read_metrics(tmp_path / "out" / METRICS)
        if event["event"] == "watchdog" and event["trouble"] == "outlier_rank"
    ]
    assert (event["action"], event["onset"]) == ("watch", 14)
    assert re.fullmatch(
        r"the loss of one rank is \d\.\d+, \d\.\d+ above the mean \(0\.0\d+ is usual\), since step 14; "
        rf"rank 1 on {re.escape(platform.node())}:1: check that host and the data that it reads",
        event["message"],
    )


@pytest.mark.parametrize(("kind", "num_ranks", "rank"), [slow("loss", 3, 2), ("gradient", 2, 0)])
def test_p54_a_loss_or_a_gradient_of_one_rank_that_is_no_number_is_one_decision_of_all(
    tmp_path: Path, kind: str, num_ranks: int, rank: int
) -> None:
    """Two steps in a row, the first time that they are taken: replayed, and over."""
    agreed = _require_agreement(_run(tmp_path, num_ranks, Fault(kind, 14, 16, rank)))
    assert agreed.code == 0, agreed.stderr
    [rollback] = agreed.final.rollbacks
    assert (rollback.kind, rollback.response) == ("non_finite", "replay")
    assert (rollback.onset, rollback.step) == (14, 15)
    assert [v[:4] for v in agreed.verdicts if v[2] == "non_finite"] == [
        (14, "watch", "non_finite", 14),
        (15, "roll_back", "non_finite", 14),
    ]
    assert agreed.final.num_skipped_updates == 0  # what was dropped was gone back behind
