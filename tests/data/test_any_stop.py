"""A run stopped after any number of steps goes on with exactly the next row, and later epochs are whole."""

import random

import pytest
import torch

from ds_pretrain.core.state import RunState
from tests.data.in_memory import SEQ_LEN, feed_of, sampler_of, source_of

NUM_ROWS, SEQUENCES, WORLD = 5_000, 8, 2
STEPS = 2 * NUM_ROWS // SEQUENCES  # two epochs: 1,250
SOURCES = {"rows": source_of(NUM_ROWS)}
# 200 rows in; around the ends of the epochs; anywhere.
STOPS = [25, 1, 2, 623, 624, 625, 626, 1248, *random.Random(3).sample(range(3, 1240), 8)]


def _rows(first: int, last: int, rank: int) -> list[list[list[int]]]:
    """The rows that one rank gets at each step: a feed of its own, as after a start."""
    found = []
    with feed_of(sampler_of(SOURCES, SEQUENCES, STEPS + 4), SOURCES, rank, WORLD) as feed:
        for step in range(first, last):
            batch = feed.at(RunState(step))
            found.append(torch.cat([micro.input_ids for micro in batch.micro_batches]).tolist())
    return found


@pytest.fixture(scope="module")
def straight() -> list[list[list[list[int]]]]:
    """By rank and step, what a run that is never stopped reads."""
    return [_rows(0, STEPS, rank) for rank in range(WORLD)]


@pytest.mark.parametrize("stop", STOPS)
def test_p01_the_next_row_after_a_stop_anywhere_is_the_next_row_on_each_rank(
    straight: list[list[list[list[int]]]], stop: int
) -> None:
    for rank in range(WORLD):
        until = min(stop + 3, STEPS)
        assert _rows(stop, until, rank) == straight[rank][stop:until]


def test_p01_epochs_after_a_stop_have_their_full_length(straight: list[list[list[list[int]]]]) -> None:
    every_row = sorted(SOURCES["rows"].sample(row, SEQ_LEN)[:SEQ_LEN].tolist() for row in range(NUM_ROWS))
    half, stop = STEPS // 2, 25
    resumed = [straight[rank][:stop] + _rows(stop, STEPS, rank) for rank in range(WORLD)]
    for steps in (range(half), range(half, STEPS)):
        rows = [row for rank in range(WORLD) for step in steps for row in resumed[rank][step]]
        assert sorted(rows) == every_row
    first, second = ([r for s in steps for r in resumed[0][s]] for steps in (range(half), range(half, STEPS)))
    assert first != second
