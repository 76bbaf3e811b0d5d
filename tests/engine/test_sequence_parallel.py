"""Ranks that share each sequence, under a real engine: what plain torch makes of whole sequences.

Shapes: S sequences of the global batch, T tokens of a sequence.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ds_pretrain.config.plan import load_plan
from ds_pretrain.core.distributed import World, gather_objects
from ds_pretrain.core.errors import InputError
from ds_pretrain.core.state import SkipLedger
from ds_pretrain.engine.sequence_parallel import SequenceParallel
from ds_pretrain.training import setup as run_setup
from ds_pretrain.training.preflight import prepare_inputs
from ds_pretrain.training.rollback import find_high_loss_samples
from ds_pretrain.training.setup import open_loader, open_run_engine
from tests.engine.small import (
    NO_DROPOUT,
    reference,
    scale_sensitive,
    step_on,
    uneven_batch,
    whole_weights,
)
from tests.ranks import run_ranks
from tests.scenario import make_run
from tests.tiers import slow

RATE = 1e-2


def _train(world: World, run_file: str) -> Any:
    """The records of three steps, what plain torch makes of them, and how far weights are from its own."""
    plan = load_plan(run_file)
    engine = open_run_engine(plan, world)
    batches = [uneven_batch(4, seed) for seed in range(3)]
    records = [step_on(engine, plan, batch, 1, RATE, world) for batch in batches]
    weights, expected = whole_weights(engine), reference(plan, batches, RATE)
    off = max(
        float(np.abs(weights[name] - expected.weights[name]).max() / np.abs(expected.weights[name]).max())
        for name in expected.weights
    )
    return records, expected, off


@pytest.mark.parametrize(
    ("num_ranks", "shared", "stage", "recompute", "heads"),
    [
        slow(2, 2, 3, False, 2),
        (2, 2, 3, True, 4),
        slow(2, 2, 1, False, 1),
        (4, 2, 3, False, 2),
        slow(4, 4, 3, True, 2),
    ],
    ids=["zero3", "recompute", "zero1", "two groups of two", "more ranks than key-value heads"],
)
def test_shared_sequences_train_as_plain_torch_does(
    tmp_path: Path, num_ranks: int, shared: int, stage: int, recompute: bool, heads: int
) -> None:
    config = {**scale_sensitive(stage), "sequence_parallel_size": shared}
    run_file = make_run(tmp_path, deepspeed=config, model={**NO_DROPOUT, "num_key_value_heads": heads})
    if recompute:
        run_file.write_text(
            run_file.read_text().replace("qk_norm", "activation_checkpointing = true\nqk_norm")
        )
    for records, expected, off in run_ranks(_train, num_ranks, str(run_file)):
        assert [record.loss for record in records] == pytest.approx(expected.losses, rel=1e-5)
        assert [record.z_loss for record in records] == pytest.approx(expected.z_losses, rel=1e-5)
        assert [record.grad_norm for record in records] == pytest.approx(expected.norms, rel=1e-5)
        assert off < 1e-5
        if num_ranks == shared:
            assert [record.loss_max_rank for record in records] == [record.loss for record in records]


def _groups(world: World) -> Any:
    """Our groups of two and DeepSpeed's, and what each rank has of a row."""
    import deepspeed.runtime.sequence_parallel.parallel_state_sp as theirs

    theirs.initialize_sequence_parallel(2)
    ours = SequenceParallel(world, 2)
    ranks = [
        torch.distributed.get_process_group_ranks(g) for g in (ours._group, theirs._SEQUENCE_PARALLEL_GROUP)
    ]
    with ours.disabled():
        whole = ours.local_shard(torch.arange(8).expand(3, 8)).tolist()
    with pytest.raises(ValueError, match="rows of 7 tokens cannot be divided among 2 ranks"):
        ours.local_shard(torch.zeros(1, 7))
    return (
        ranks,
        world.data_parallel_world(2).rank,
        ours.local_shard(torch.arange(8).expand(3, 8)).tolist(),
        whole,
    )


def test_groups_are_neighbors_as_deepspeeds_are_and_each_rank_has_its_span_of_a_row() -> None:
    for rank, (ranks, reader, own, whole) in enumerate(run_ranks(_groups, 4)):
        assert ranks == [[rank // 2 * 2, rank // 2 * 2 + 1]] * 2
        assert reader == rank // 2
        assert own == [[0, 1, 2, 3] if rank % 2 == 0 else [4, 5, 6, 7]] * 3
        assert whole == [list(range(8))] * 3


def _refusal(world: World, run_file: str, overrides: tuple[str, ...], is_spread: bool) -> str:
    """Return the error with which the engine refuses to open."""
    patch = pytest.MonkeyPatch()
    if not is_spread:
        patch.setattr(run_setup, "replace_kernel", lambda module, change: None)
    with pytest.raises(InputError) as refused:
        open_run_engine(load_plan(run_file, overrides), world)
    patch.undo()
    return str(refused.value)


@pytest.mark.parametrize(
    ("heads", "overrides", "is_spread", "expected"),
    [
        (
            4,
            (),
            False,
            "`sequence_parallel_size` = 2 does not work with this model: sequence-parallel logits differ",
        ),
        slow(
            3,
            (),
            True,
            "does not work with this model: Attention head count 3 is not divisible by SP size 2; use a",
        ),
        slow(
            4,
            ("model.attention=eager",),
            True,
            '`sequence_parallel_size`: "llama" attends by "eager", which ranks',
        ),
    ],
    ids=["not exchanged", "cannot be exchanged", "no kernel"],
)
def test_a_model_that_computes_something_else_when_shared_is_refused_before_it_trains(
    tmp_path: Path, heads: int, overrides: tuple[str, ...], is_spread: bool, expected: str
) -> None:
    model = {**NO_DROPOUT, "hidden_size": 24, "num_attention_heads": heads, "num_key_value_heads": 1}
    config = {**scale_sensitive(3), "sequence_parallel_size": 2}
    run_file = make_run(tmp_path, deepspeed=config, model=model)
    for message in run_ranks(_refusal, 2, str(run_file), overrides, is_spread):
        assert expected in message


def _suspects(world: World, run_file: str) -> Any:
    plan = load_plan(run_file)
    inputs = prepare_inputs(plan, world)
    engine = open_run_engine(plan, world)
    with open_loader(plan, inputs.sources, world) as feed:
        found = find_high_loss_samples(engine, feed, lambda step: None, [1, 2], SkipLedger(), world)
    is_imported = "deepspeed.runtime.sequence_parallel.ulysses_sp" in sys.modules
    return found, gather_objects(world, is_imported)


@pytest.mark.slow
def test_suspects_are_whole_samples_and_a_run_that_shares_nothing_imports_nothing(tmp_path: Path) -> None:
    told = []
    for num_ranks, shared in ((1, 1), (2, 1), (2, 2), (4, 2)):
        config = {**scale_sensitive(3), "sequence_parallel_size": shared}
        run_file = make_run(tmp_path / f"{num_ranks}x{shared}", deepspeed=config, model=NO_DROPOUT)
        found, is_imported = run_ranks(_suspects, num_ranks, str(run_file))[0]
        assert is_imported == [shared > 1] * num_ranks
        told.append(found)
    assert len(told[0]) == 8
    for found in told[1:]:
        losses = [suspect["loss"] for suspect in told[0]]
        assert [suspect["loss"] for suspect in found] == pytest.approx(losses, rel=1e-5)
        assert [{**s, "loss": 0} for s in found] == [{**s, "loss": 0} for s in told[0]]


def _group_losses(world: World, run_file: str) -> Any:
    """The highest loss and the fewest valid tokens of any reader, of two steps."""
    plan = load_plan(run_file)
    engine = open_run_engine(plan, world)
    records = [step_on(engine, plan, uneven_batch(4, seed), 1, RATE, world) for seed in range(2)]
    return [(record.loss_max_rank, record.num_valid_tokens_min_rank) for record in records]


@pytest.mark.slow
def test_the_highest_loss_is_that_of_a_group_and_not_of_its_early_tokens(tmp_path: Path) -> None:
    found = []
    for num_ranks, shared in ((2, 1), (4, 2)):
        config = {**scale_sensitive(3), "sequence_parallel_size": shared}
        run_file = make_run(tmp_path / str(shared), deepspeed=config, model=NO_DROPOUT)
        found.append(run_ranks(_group_losses, num_ranks, str(run_file))[0])
    for (highest, fewest), (expected, num_tokens) in zip(found[1], found[0], strict=True):
        assert highest == pytest.approx(expected, rel=1e-5)
        assert fewest == num_tokens
