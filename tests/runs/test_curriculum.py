"""One run file of several phases: killed anywhere, it is the run that was never killed."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ds_pretrain.commands.cli import main
from ds_pretrain.commands.sample import load_trained_model
from ds_pretrain.config.plan import load_plan
from ds_pretrain.training.curriculum import resolve_model_text
from ds_pretrain.watchdog.rollback_log import read_rollback_log
from tests.harness import record_run
from tests.models.rope_reference import check_rope
from tests.ranks import KILLED, run_ranks
from tests.runs.curriculum import ANNEAL, LAST, LONG, RAMP, make_curriculum
from tests.runs.results import resumed_at, trace, validations
from tests.runs.unhealthy import POISON, WATCHDOG, make_unhealthy_run
from tests.tiers import slow

# Killed within each segment, where the start after it goes on from what was last saved before; and stopped on
# each boundary, where it goes on exactly there.
KILLED_AFTER = (RAMP - 2, LONG - 2, LONG + 2, ANNEAL + 2)
BOUNDARIES = (RAMP, LONG, ANNEAL)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The uninterrupted run on so many ranks: its folder and what the ranks say."""

    @cache
    def train(world_size: int) -> Any:
        folder = tmp_path_factory.mktemp("straight")
        return folder, run_ranks(record_run, world_size, str(make_curriculum(folder)))

    return train


@pytest.mark.parametrize("world_size", [slow(1), 2])
def test_ended_in_each_segment_and_on_each_boundary_it_is_bitwise_the_run_that_was_not(
    straight: Any, world_size: int, tmp_path: Path
) -> None:
    folder, whole = straight(world_size)
    run_file = make_curriculum(tmp_path)
    read: dict[int, Any] = {}
    for step in sorted((*KILLED_AFTER, *BOUNDARIES)):
        if step in BOUNDARIES:
            run_ranks(record_run, world_size, str(run_file), stop_after=step)
        else:
            assert run_ranks(record_run, world_size, str(run_file), kill_after=step, allow_kill=True) == (
                [KILLED] * world_size
            )
    ended = run_ranks(record_run, world_size, str(run_file))
    starts = resumed_at(tmp_path / "out")
    assert set(BOUNDARIES) <= set(starts)
    assert all(any(low <= step < low + 5 for step in starts) for low in (RAMP, LONG, ANNEAL))
    assert [rank.digest for rank in ended] == [rank.digest for rank in whole]
    assert trace(tmp_path / "out") == trace(folder / "out")
    assert validations(tmp_path / "out") == validations(folder / "out")
    for rank in ended:
        read |= rank.samples
        assert rank.rates.items() <= whole[0].rates.items()
    assert read.items() <= whole[0].samples.items()


@pytest.mark.slow
def test_on_one_rank_and_on_others_in_turn_it_reads_the_same_samples_at_the_same_rates(
    straight: Any, tmp_path: Path
) -> None:
    folder, whole = straight(2)
    run_file = make_curriculum(tmp_path)
    samples: dict[int, Any] = {}
    rates: dict[int, Any] = {}
    for world_size, until in ((1, RAMP), (2, LONG), (1, LONG + 2), (2, ANNEAL), (1, None)):
        for rank in run_ranks(record_run, world_size, str(run_file), stop_after=until):
            samples, rates = samples | rank.samples, rates | rank.rates
    assert resumed_at(tmp_path / "out") == [RAMP, LONG, LONG + 2, ANNEAL]
    assert samples == whole[0].samples
    assert rates == whole[0].rates
    there, here = trace(folder / "out"), trace(tmp_path / "out")
    assert [record["step"] for record in here] == list(range(1, LAST + 1))
    for key in ("batch_checksum", "learning_rate", "tokens", "samples", "phase", "num_valid_tokens"):
        assert [record[key] for record in here] == [record[key] for record in there], key
    for key in ("loss", "grad_norm"):
        expected = pytest.approx([record[key] for record in there], rel=2e-4)
        assert [record[key] for record in here] == expected, key


def test_the_phases_are_what_the_run_file_says(straight: Any) -> None:
    folder, _ = straight(2)
    records = trace(folder / "out")
    assert [record["phase"] for record in records] == ["main"] * 8 + ["long"] * 5 + ["anneal"] * 5
    tokens = [record["tokens"] for record in records]
    assert [b - a for a, b in zip([0, *tokens], tokens, strict=False)] == [1024] * 4 + [2048] * 14
    rates = [record["learning_rate"] for record in records]
    assert rates[3] == pytest.approx(rates[4] / 2**0.5)  # the square root of half the batch
    assert rates[4:14] == [1e-2] * 10
    assert rates[14] < 1e-2
    assert rates[-1] < 2e-3


def test_what_a_checkpoint_says_of_its_model_is_what_was_trained(straight: Any) -> None:
    folder, _ = straight(2)
    plan = load_plan(folder / "run.toml")
    last = folder / "out" / "checkpoints" / f"step_{LAST:09d}"
    saved = json.loads((last / "model.json").read_text())
    assert saved["max_position_embeddings"] == 1024
    assert saved["rope_parameters"]["rope_theta"] == 8e4
    assert (
        resolve_model_text(plan, LONG) == (folder / "model.json").read_text()
    )  # of before the change, as it was
    model = load_trained_model(plan, last)
    assert check_rope(model).problems == ()
    assert model.config.rope_parameters["rope_theta"] == 8e4


@pytest.mark.slow
def test_documents_kept_apart_survive_a_new_start_too(tmp_path: Path) -> None:
    runs = []
    for name, stops in (("straight", ()), ("cut", (LONG, LONG + 2))):
        run_file = make_curriculum(tmp_path / name)
        run_file.write_text(run_file.read_text().replace("qk_norm", "mask_documents = true\nqk_norm"))
        for step in stops:
            run_ranks(record_run, 2, str(run_file), stop_after=step)
        digests = [rank.digest for rank in run_ranks(record_run, 2, str(run_file))]
        runs.append((digests, trace(tmp_path / name / "out")))
    assert resumed_at(tmp_path / "cut" / "out") == [LONG, LONG + 2]
    assert runs[0] == runs[1]
    records = runs[0][1]
    assert records[-1]["num_valid_tokens"] < 2048  # a label across a boundary is none


def test_a_skip_at_the_end_of_a_phase_stays_in_it_and_the_next_one_begins_behind_it(tmp_path: Path) -> None:
    second = (
        '[[phases]]\nname = "long"\nstart = "24 steps"\nseq_len = 32\nmixture = { text = 0.7, code = 0.3 }\n'
    )
    run_file = make_unhealthy_run(tmp_path, WATCHDOG + second, micro_batch_size=2)
    # What is poisoned is what the last four steps of the first phase read.
    ranks = run_ranks(record_run, 2, str(run_file), faults=[POISON])
    assert [rank.code for rank in ranks] == [0, 0]
    [skip] = read_rollback_log(tmp_path / "out").ledger.skips
    assert (skip.phase, skip.stop) == ("main", 24 * 8)
    assert [record["phase"] for record in trace(tmp_path / "out")] == ["main"] * 24 + ["long"] * 16
    assert main(["audit", str(tmp_path / "out"), "--all"]) == 0  # each sample once, and no token twice
