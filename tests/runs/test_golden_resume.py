"""N steps straight == k steps, SIGKILL, resume: bit for bit, wherever the run is cut."""

from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

from tests.harness import record_run
from tests.ranks import KILLED, run_ranks
from tests.runs.results import trace, validations
from tests.scenario import deepspeed_json, make_run
from tests.tiers import slow_but

KILLS = (2, 4, 5, 8, 11)  # before the first checkpoint, right after one, in between, late; all in one run


# Every pair of precision, accumulation, ZeRO stage and number of ranks, in the fewest runs.
CONFIGURATIONS = [
    ("fp32", 1, 1, 1),
    ("fp32", 1, 2, 2),
    ("fp32", 1, 3, 2),
    ("fp32", 3, 1, 2),
    ("fp32", 3, 2, 1),
    ("bf16", 1, 3, 1),
    ("bf16", 3, 1, 1),
    ("bf16", 3, 2, 2),
    ("bf16", 3, 3, 2),
]
QUICK = [("fp32", 1, 3, 2), ("bf16", 3, 1, 1), ("bf16", 3, 2, 2)]  # each value at least once


@pytest.mark.parametrize(
    ("precision", "accumulation", "stage", "num_ranks"), slow_but(CONFIGURATIONS, *QUICK)
)
def test_a_run_killed_five_times_is_bitwise_the_run_that_never_was(
    tmp_path: Path, precision: str, accumulation: int, stage: int, num_ranks: int
) -> None:
    options: dict[str, Any] = {
        "deepspeed": deepspeed_json(stage, precision == "bf16"),
        "micro_batch_size": 1,
        "batch_tokens": 16 * num_ranks * accumulation,
        "save_every": "2 steps",
    }
    straight_file = make_run(tmp_path / "straight", **options)
    straight = run_ranks(record_run, num_ranks, str(straight_file))

    cut_file = make_run(tmp_path / "cut", **options)
    for kill_after in KILLS:
        killed = run_ranks(record_run, num_ranks, str(cut_file), kill_after=kill_after, allow_kill=True)
        assert killed == [KILLED] * num_ranks
    finished = run_ranks(record_run, num_ranks, str(cut_file))

    assert trace(cut_file.parent / "out") == trace(straight_file.parent / "out")
    assert len(trace(cut_file.parent / "out")) == 12
    assert validations(cut_file.parent / "out") == validations(straight_file.parent / "out")
    for ended, expected in zip(finished, straight, strict=True):
        assert ended.digest == expected.digest
        assert {11, 12} <= set(ended.rates) <= {9, 10, 11, 12}  # killed after 11: the save of 10 may be lost
        assert ended.rates == {step: expected.rates[step] for step in ended.rates}
        assert ended.samples == {step: expected.samples[step] for step in ended.samples}


def test_the_configurations_have_every_pair() -> None:
    values = [sorted({one[at] for one in CONFIGURATIONS}, key=str) for at in range(4)]
    for first, second in combinations(range(4), 2):
        there = {(one[first], one[second]) for one in CONFIGURATIONS}
        assert there == set(product(values[first], values[second]))
    assert [sorted({one[at] for one in QUICK}, key=str) for at in range(4)] == values


def test_the_golden_comparison_sees_a_difference(tmp_path: Path) -> None:
    """Two seeds differ in every compared value, so equality above means something."""
    run_file = make_run(tmp_path / "run")
    [one] = run_ranks(record_run, 1, str(run_file))
    first = trace(tmp_path / "run" / "out")
    [other] = run_ranks(record_run, 1, str(run_file), ("seed=8", f"out={tmp_path}/other"))
    second = trace(tmp_path / "other")
    assert one.digest != other.digest
    assert one.samples != other.samples
    for key in ("loss", "grad_norm", "batch_checksum"):
        assert all(a[key] != b[key] for a, b in zip(first, second, strict=True))
