"""One run file of several phases: killed anywhere, it is the run that was never killed."""

from pathlib import Path
from typing import Any

import pytest

from tests.ranks import KILLED, run_ranks
from tests.runs.curriculum import ANNEAL, LAST, LONG, RAMP, make_curriculum
from tests.runs.golden import run_rank, trace, validations

KILLS = (RAMP - 2, RAMP, LONG - 1, LONG, LONG + 2, ANNEAL, ANNEAL + 2)  # in each segment, on each boundary


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The uninterrupted run on two ranks: its folder and what its ranks say."""
    folder = tmp_path_factory.mktemp("straight")
    return folder, run_ranks(run_rank, 2, str(make_curriculum(folder)))


def test_killed_in_each_segment_and_on_each_boundary_it_is_bitwise_the_run_that_was_not(
    straight: Any, tmp_path: Path
) -> None:
    folder, whole = straight
    run_file = make_curriculum(tmp_path)
    read: dict[int, Any] = {}
    for step in KILLS:
        assert run_ranks(run_rank, 2, str(run_file), step, allow_kill=True) == [KILLED] * 2
    ended = run_ranks(run_rank, 2, str(run_file))
    assert [digest for digest, _, _ in ended] == [digest for digest, _, _ in whole]
    assert trace(tmp_path / "out") == trace(folder / "out")
    assert validations(tmp_path / "out") == validations(folder / "out")
    for _, rates, samples in ended:
        read |= samples
        assert rates.items() <= whole[0][1].items()
    assert read.items() <= whole[0][2].items()


def test_on_one_rank_and_on_others_in_turn_it_reads_the_same_samples_at_the_same_rates(
    straight: Any, tmp_path: Path
) -> None:
    folder, whole = straight
    run_file = make_curriculum(tmp_path)
    samples: dict[int, Any] = {}
    rates: dict[int, Any] = {}
    for world_size, until in ((1, RAMP + 1), (2, LONG), (1, ANNEAL - 1), (2, ANNEAL + 1)):
        run_ranks(run_rank, world_size, str(run_file), until, allow_kill=True)
    for _, own_rates, own_samples in run_ranks(run_rank, 1, str(run_file)):
        samples, rates = samples | own_samples, rates | own_rates
    assert samples.items() <= whole[0][2].items()
    assert rates.items() <= whole[0][1].items()
    there, here = trace(folder / "out"), trace(tmp_path / "out")
    assert [record["step"] for record in here] == list(range(1, LAST + 1))
    for key in ("batch_checksum", "learning_rate", "tokens", "samples", "phase", "num_valid_tokens"):
        assert [record[key] for record in here] == [record[key] for record in there], key
    for key in ("loss", "grad_norm"):
        expected = pytest.approx([record[key] for record in there], rel=2e-4)
        assert [record[key] for record in here] == expected, key


def test_the_phases_are_what_the_run_file_says(straight: Any) -> None:
    folder, _ = straight
    records = trace(folder / "out")
    assert [record["phase"] for record in records] == ["main"] * 8 + ["long"] * 5 + ["anneal"] * 5
    tokens = [record["tokens"] for record in records]
    assert [b - a for a, b in zip([0, *tokens], tokens, strict=False)] == [1024] * 4 + [2048] * 14
    rates = [record["learning_rate"] for record in records]
    assert rates[3] == pytest.approx(rates[4] / 2**0.5)  # the square root of half the batch
    assert rates[4:14] == [1e-2] * 10
    assert rates[14] < 1e-2
    assert rates[-1] < 2e-3
