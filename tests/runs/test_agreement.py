"""Trouble on one rank only: every rank comes to the same verdicts, ledger and place in the data."""

from pathlib import Path

import pytest

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
LABELS = Fault("labels", 13 * SEQUENCES, 16 * SEQUENCES, rank=0)  # what steps 14 to 16 read


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


def test_p54_a_spike_on_one_rank_is_one_decision_of_all_through_replay_and_skip(tmp_path: Path) -> None:
    """One rank alone reads nonsense, whenever it reads those draws; the loss of the others is sound."""
    agreed = _require_agreement(_run(tmp_path, 2, LABELS))
    assert agreed.code == 0, agreed.stderr
    assert [r.response for r in agreed.final.rollbacks] == ["replay", "skip"]
    assert len(agreed.final.ledger.skips) == 1
    assert [v[0] for v in agreed.verdicts if v[1] == "roll_back"] == [r.step for r in agreed.final.rollbacks]


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
