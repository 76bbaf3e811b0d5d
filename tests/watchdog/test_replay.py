"""The findings of a replay, from the numbers of the two passes."""

from dataclasses import replace
from math import nan
from typing import Any

import pytest

from ds_pretrain.core.state import Rollback
from ds_pretrain.watchdog.replay import (
    Difference,
    Replay,
    ReplayedStep,
    conclude,
    find_difference,
    find_suspect_hosts,
    read_passes,
)

BACK = Rollback(10, 23, 20, "lasting_spike", "replay", 1)
HOSTS = ("alpha:0", "alpha:1", "beta:0")
USUAL = ReplayedStep(2.0, 1.0, 77, 3, (1.9, 2.0, 2.1))


def _replay(difference: Difference | None, num_compared: int = 13) -> Replay:
    return Replay(1, BACK, HOSTS, {}, difference, num_compared)


@pytest.mark.parametrize(
    ("again", "expected"),
    [
        (USUAL, None),
        (replace(USUAL, checksum=78, loss=9.0), Difference(20, "data")),
        (replace(USUAL, loss=2.1, rank_losses=(1.9, 2.0, 2.4)), Difference(20, "loss", (2,))),
        (replace(USUAL, loss=2.1, rank_losses=(1.8, 2.2, 2.4)), Difference(20, "loss", ())),
        (replace(USUAL, loss=2.0000001, rank_losses=None), Difference(20, "loss")),
        (replace(USUAL, grad_norm=1.5), Difference(20, "norm", ())),
        (replace(USUAL, grad_norm=None, rank_losses=None), Difference(20, "norm")),
    ],
)
def test_the_cause_is_named_before_its_effect(again: ReplayedStep, expected: Difference | None) -> None:
    assert find_difference(20, USUAL, again) == expected


def test_what_is_no_number_both_times_is_the_same_to_the_bit() -> None:
    odd = ReplayedStep(nan, None, 77, 3, (nan, 2.0, 2.1))
    assert find_difference(20, odd, odd) is None


def test_the_first_difference_stays_the_first_and_steps_unknown_the_first_time_do_not_count() -> None:
    replay = Replay(1, BACK, HOSTS, {11: USUAL, 12: USUAL, 13: USUAL})
    for step, seen in [
        (10, USUAL),
        (11, USUAL),
        (12, replace(USUAL, grad_norm=3.0)),
        (13, replace(USUAL, loss=4.0)),
    ]:
        replay = replay.after(step, seen)
    assert replay.difference == Difference(12, "norm", ())
    assert replay.num_compared == 3


def test_a_difference_on_one_rank_names_it_and_its_host() -> None:
    replay = _replay(Difference(20, "loss", (2,)))
    compared = conclude(replay, recurred=False)
    assert compared.finding == "passing_fault"
    assert "step 20 is the first that differs: only rank 2 (beta:0) had another loss" in compared.message
    assert find_suspect_hosts(replay) == ["beta"]


@pytest.mark.parametrize(
    ("difference", "words"),
    [
        (Difference(20, "norm"), "the same loss on every rank and another gradient norm, so a backward pass"),
        (Difference(20, "loss", ()), "another loss on every rank, so the update of step 19 or the weights"),
        (Difference(20, "loss"), "another loss; each rank's is not on record there, so"),
    ],
)
def test_a_difference_on_all_ranks_names_what_made_it_and_every_host(
    difference: Difference, words: str
) -> None:
    compared = conclude(_replay(difference), recurred=False)
    assert compared.finding == "passing_fault"
    assert words in compared.message
    assert "one of alpha, beta" in compared.message


def test_the_same_numbers_to_the_bit_mean_data_or_state() -> None:
    compared = conclude(_replay(None), recurred=True)
    assert compared.finding == "data_or_state"
    assert "all 13 losses and norms are the same to the bit" in compared.message


def test_what_cannot_be_compared_is_said_to_be_so() -> None:
    elsewhere = Replay(1, BACK, HOSTS, {20: replace(USUAL, num_ranks=4)}).after(20, replace(USUAL, loss=9.0))
    assert elsewhere.difference is None
    assert conclude(elsewhere, recurred=False).finding == "other_ranks"
    assert "1 step ran on another number of ranks" in conclude(elsewhere, recurred=False).message
    shared = Replay(1, BACK, HOSTS, {20: replace(USUAL, sequence_parallel_size=3)}).after(
        20, replace(USUAL, loss=9.0)
    )
    assert ", or of ranks a sequence, the first time" in conclude(shared, recurred=False).message
    assert conclude(_replay(None, 0), recurred=False).message == (
        "metrics.jsonl lacks the first pass, so the replay cannot be compared"
    )
    data = conclude(_replay(Difference(20, "data")), recurred=False)
    assert (data.finding, "has a source changed?" in data.message) == ("unknown", True)
    twice = conclude(_replay(Difference(20, "norm")), recurred=True)
    assert twice.finding == "data_or_state"
    assert "the run is not deterministic, or a fault comes and goes" in twice.message


def test_where_all_ranks_share_each_sequence_no_rank_and_no_update_is_accused_of_another_loss() -> None:
    alone = replace(USUAL, rank_losses=(), sequence_parallel_size=3)
    other = find_difference(20, alone, replace(alone, loss=2.1))
    assert other == Difference(20, "loss")
    compared = conclude(_replay(other), recurred=False)
    assert compared.message.endswith(
        "another loss; each rank's is not on record there, so one of alpha, beta"
    )
    assert find_difference(20, alone, replace(alone, grad_norm=1.5)) == Difference(20, "norm", ())


def _step(step: int, loss: float, attempt: int = 1) -> dict[str, Any]:
    return {
        "event": "step",
        "step": step,
        "loss": loss,
        "grad_norm": 1.0,
        "batch_checksum": step,
        "attempt": attempt,
    }


def test_both_passes_are_read_from_the_end_of_a_record_however_often_it_was_started() -> None:
    decided = {
        "event": "rollback",
        "incident": 2,
        "hosts": list(HOSTS),
        "rank_losses": {"20": [1.0, 2.0, 3.0]},
    }
    records = [
        *(_step(step, 50.0) for step in range(1, 24)),  # of before another rollback
        {**decided, "incident": 1},
        *(_step(step, 1.0) for step in range(9, 24)),
        decided,
        *(_step(step, 2.0) for step in range(11, 15)),
        {"event": "resume", "step": 12, "attempt": 2, "world_size": 2, "sequence_parallel_size": 2},
        *(_step(step, 3.0, 2) for step in range(13, 17)),
    ]
    records.insert(0, {"event": "start", "step": 0, "attempt": 1, "world_size": 3})
    replay, second = read_passes(reversed(records), 2, BACK)
    assert sorted(replay.first) == list(range(11, 24))
    assert {seen.loss for seen in replay.first.values()} == {1.0}
    assert replay.first[20].rank_losses == (1.0, 2.0, 3.0)
    assert replay.hosts == HOSTS
    assert {(seen.num_ranks, seen.sequence_parallel_size) for seen in replay.first.values()} == {(3, 1)}
    assert [seen.sequence_parallel_size for _, seen in sorted(second.items())] == [1, 1, 2, 2, 2, 2]
    assert {step: seen.num_ranks for step, seen in second.items()} == {
        11: 3,
        12: 3,
        13: 2,
        14: 2,
        15: 2,
        16: 2,
    }
    assert {step: seen.loss for step, seen in second.items()} == {
        11: 2.0,
        12: 2.0,
        13: 3.0,
        14: 3.0,
        15: 3.0,
        16: 3.0,
    }
