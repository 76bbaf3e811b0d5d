"""The run state: to JSON and back, and the draws that a skip ledger leaves."""

import json
import random

import numpy as np
import pytest

from ds_pretrain.core.state import Rollback, RunState, Skip, SkipLedger, WatchdogState


def skip(start: int, stop: int, phase: str = "main") -> Skip:
    return Skip(phase, start, stop, cause="spike", step=7, attempt=2)


def left_by_hand(skips: list[tuple[int, int]], first: int, count: int) -> list[int]:
    """The reference: walk over the draws one by one, leaving out the skipped ones."""
    skipped = {draw for start, stop in skips for draw in range(start, stop)}
    return [draw for draw in range(2_000) if draw not in skipped][first : first + count]


def test_a_state_comes_back_from_json_as_it_was() -> None:
    ledger = SkipLedger((skip(3, 9), skip(5, 2**63, "anneal")))
    for state in (RunState(), RunState(step=10**15, ledger=ledger)):
        assert RunState.from_json(state.to_json()) == state


def test_a_state_of_another_version_is_refused() -> None:
    text = json.dumps({**json.loads(RunState().to_json()), "version": 99})
    with pytest.raises(ValueError, match="format 99, expected 3 "):
        RunState.from_json(text)


def test_a_finished_step_moves_the_step_and_the_count_of_healthy_ones() -> None:
    state = RunState(step=4, ledger=SkipLedger((skip(1, 2),)))
    after = state.after_step()
    assert after == RunState(step=5, ledger=state.ledger, num_healthy_steps=1)
    assert after.num_updates == 5
    dropped = after.after_step(applied=False, healthy=False)
    assert dropped == RunState(step=6, ledger=state.ledger, num_skipped_updates=1, num_healthy_steps=0)
    assert dropped.num_updates == 5


def test_rollbacks_and_what_the_watchdog_remembers_come_back_from_json() -> None:
    memory = WatchdogState(step=7, phase="main", lowest_level=0.1 + 0.2)
    state = RunState(8, SkipLedger(), 1, 3, memory, (Rollback(4, 7, 6, "spike", "replay", 2),))
    assert RunState.from_json(state.to_json()) == state


@pytest.mark.parametrize(("start", "stop"), [(5, 5), (6, 5), (-1, 5)])
def test_an_empty_or_negative_skip_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="a skip needs 0 <= start < stop"):
        skip(start, stop)


def test_an_empty_ledger_leaves_every_draw() -> None:
    draws = SkipLedger().draws("main", 10**15, 4)
    assert draws.tolist() == [10**15 + i for i in range(4)]
    assert draws.dtype == np.uint64


@pytest.mark.parametrize(
    "skips",
    [
        [(0, 5)],
        [(5, 10), (10, 15)],  # adjacent
        [(5, 10), (8, 15)],  # overlapping
        [(5, 50), (10, 20)],  # one inside the other
        [(30, 40), (5, 10)],  # decided out of order
        [(5, 10), (5, 10)],  # twice
        [(5, 10), (11, 12)],  # a single draw between
    ],
)
def test_overlapping_and_adjacent_skips_count_once(skips: list[tuple[int, int]]) -> None:
    ledger = SkipLedger()
    for start, stop in skips:
        ledger = ledger.with_skip(skip(start, stop))
    assert ledger.draws("main", 0, 60).tolist() == left_by_hand(skips, 0, 60)


def test_random_ledgers_leave_what_a_walk_over_the_draws_leaves() -> None:
    source = random.Random(0)
    for _ in range(300):
        starts = [source.randrange(0, 300) for _ in range(source.randrange(0, 8))]
        skips = [(start, start + source.randrange(1, 60)) for start in starts]
        first, count = source.randrange(0, 300), source.randrange(1, 40)
        ledger = SkipLedger(tuple(skip(*interval) for interval in skips))
        assert ledger.draws("main", first, count).tolist() == left_by_hand(skips, first, count)


def test_the_draws_of_consecutive_batches_join_without_gap_or_repeat() -> None:
    ledger = SkipLedger((skip(7, 21), skip(40, 44)))
    batches = [draw for first in range(0, 60, 5) for draw in ledger.draws("main", first, 5).tolist()]
    assert batches == ledger.draws("main", 0, 60).tolist()


def test_a_skip_of_another_phase_moves_nothing() -> None:
    assert SkipLedger((skip(0, 100, "anneal"),)).draws("main", 0, 3).tolist() == [0, 1, 2]
