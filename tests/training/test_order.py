"""The real loop on other numbers of ranks trains on the same batches, and goes the same way."""

from pathlib import Path

import pytest

from tests.engine.small import NO_DROPOUT
from tests.harness import record_run
from tests.ranks import run_ranks
from tests.runs.results import trace
from tests.scenario import make_run


def test_any_number_of_ranks_trains_on_the_same_batches(tmp_path: Path) -> None:
    traces, orders = {}, []
    for num_ranks in (1, 2, 3):
        folder = tmp_path / str(num_ranks)
        run_file = make_run(folder, steps=5, micro_batch_size=1, batch_tokens=16 * 6, model=NO_DROPOUT)
        orders += [ended.samples for ended in run_ranks(record_run, num_ranks, str(run_file))]
        traces[num_ranks] = trace(folder / "out")
    assert len(orders) == 6
    assert all(samples == orders[0] for samples in orders)
    assert len({str(ids) for ids in orders[0].values()}) == 5
    for num_ranks in (2, 3):
        for alone, shared in zip(traces[1], traces[num_ranks], strict=True):
            for key in ("batch_checksum", "tokens", "samples", "num_valid_tokens", "learning_rate"):
                assert shared[key] == alone[key]
            # The update differs by the order in which numbers are added, and by nothing else.
            assert shared["loss"] == pytest.approx(alone["loss"], rel=1e-4)
            assert shared["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-3)
