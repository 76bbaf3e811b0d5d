"""One global batch gives one loss, one norm and one update, however it is split. fp32, real engine."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from ds_pretrain.config.plan import load_plan
from ds_pretrain.core.distributed import World
from ds_pretrain.training.setup import open_run_engine
from tests.engine.small import (
    NO_DROPOUT,
    largest_difference,
    reference,
    scale_sensitive,
    step_on,
    uneven_batch,
    whole_weights,
)
from tests.ranks import run_ranks
from tests.scenario import make_run
from tests.tiers import slow_but

RATE = 0.1  # of an Adam whose epsilon is as large as the gradients: a wrong scale shows in the weights
SPLITS = list(product((1, 2, 3), (1, 2)))  # ZeRO stages and numbers of ranks
NEAR = {"rel": 1e-6, "abs": 0.0}


def _run_file(folder: Path, stage: int, clip: float = 1.0) -> str:
    return str(make_run(folder, deepspeed=scale_sensitive(stage, clip=clip), model=NO_DROPOUT))


def _train_in_splits(world: World, run_file: str, sequences: int, micros: list[int]) -> Any:
    """Two steps in each split from the same start, and how far the weights end from plain torch's."""
    plan = load_plan(run_file)
    batches = [uneven_batch(sequences, seed) for seed in (0, 1)]
    expected = reference(plan, batches, RATE)
    runs = []
    for micro in micros:
        engine = open_run_engine(plan, world)
        records = [step_on(engine, plan, batch, micro, RATE, world) for batch in batches]
        runs.append((records, largest_difference(whole_weights(engine), expected.weights)))
    return expected.losses, expected.z_losses, expected.norms, expected.clip_factors, runs


@pytest.mark.parametrize(("stage", "num_ranks"), slow_but(SPLITS, (2, 1), (3, 2)))
def test_p31_loss_norm_and_update_do_not_depend_on_the_split(
    tmp_path: Path, stage: int, num_ranks: int
) -> None:
    """Micro-batches x accumulation of 1x8, 2x4, 4x2 on one rank; half the accumulation on two."""
    results = run_ranks(
        _train_in_splits,
        num_ranks,
        _run_file(tmp_path, stage),
        8,
        [1, 2, 4],
    )
    for losses, z_losses, norms, _, runs in results:
        assert losses[0] != pytest.approx(losses[1], rel=1e-4)
        for records, difference in runs:
            assert [record.loss for record in records] == pytest.approx(losses, **NEAR)
            assert [record.z_loss for record in records] == pytest.approx(z_losses, **NEAR)
            assert [record.grad_norm for record in records] == pytest.approx(norms, **NEAR)
            assert difference < 1e-6


@pytest.mark.parametrize(("stage", "num_ranks"), slow_but(SPLITS, (2, 1), (3, 2)))
def test_p27_the_norm_is_before_clipping_and_the_update_is_clipped_as_torch_does(
    tmp_path: Path, stage: int, num_ranks: int
) -> None:
    """Accumulation 1 and 3. P-29: every micro-batch of a window counts, and none is left over."""
    micros = [6 // num_ranks, 2 // num_ranks]
    results = run_ranks(
        _train_in_splits,
        num_ranks,
        _run_file(tmp_path, stage, 0.05),
        6,
        micros,
    )
    for _, _, norms, factors, runs in results:
        assert min(norms) > 0.5  # far above what it is clipped to
        for records, difference in runs:
            assert [record.grad_norm for record in records] == pytest.approx(norms, **NEAR)
            assert [record.clip_factor for record in records] == pytest.approx(factors, **NEAR)
            assert all(record.update_applied for record in records)
            assert difference < 1e-6


def _train_on_ignored(world: World, run_file: str, ignore_from: int) -> Any:
    plan = load_plan(run_file)
    batches = [uneven_batch(4, seed=0, ignore_from=ignore_from)]
    engine = open_run_engine(plan, world)
    start = whole_weights(engine)
    records = [step_on(engine, plan, batches[0], 1, RATE, world)]
    moved = whole_weights(engine)
    records.append(step_on(engine, plan, uneven_batch(4, seed=1), 1, RATE, world))
    expected = reference(plan, [*batches, uneven_batch(4, seed=1)], RATE) if ignore_from else None
    difference = largest_difference(whole_weights(engine), expected.weights) if expected else None
    undecayed = {name for name in start if "norm" in name or "embed" in name}
    unmoved = all((start[name] == moved[name]).all() for name in undecayed)
    return records, expected and expected.losses, expected and expected.norms, difference, unmoved


@pytest.mark.parametrize("stage", slow_but([1, 2, 3], 3))
def test_p32_a_rank_whose_labels_are_all_ignored_contributes_nothing(tmp_path: Path, stage: int) -> None:
    for records, losses, norms, difference, _ in run_ranks(
        _train_on_ignored, 2, _run_file(tmp_path, stage), 2
    ):
        assert [record.loss for record in records] == pytest.approx(losses, **NEAR)
        assert [record.grad_norm for record in records] == pytest.approx(norms, **NEAR)
        assert difference < 1e-6
        assert records[0].num_valid_tokens == 1 + 6
        assert records[0].num_valid_tokens_min_rank == 0  # counted, so that a person can see it
        assert records[0].loss_max_rank == pytest.approx(losses[0], **NEAR)
        assert records[1].num_valid_tokens_min_rank == 7


@pytest.mark.parametrize("stage", slow_but([1, 2, 3], 3))
def test_p32_a_batch_without_a_valid_label_is_finite_and_moves_nothing(tmp_path: Path, stage: int) -> None:
    for records, _, _, _, unmoved in run_ranks(_train_on_ignored, 2, _run_file(tmp_path, stage), 0):
        assert (records[0].loss, records[0].z_loss, records[0].grad_norm) == (0.0, 0.0, 0.0)
        assert (records[0].num_valid_tokens, records[0].num_valid_tokens_min_rank) == (0, 0)
        assert records[0].update_applied
        assert unmoved  # what does not decay; the rest decays, as in any step
        assert records[1].loss == pytest.approx(5.55, abs=0.2)
