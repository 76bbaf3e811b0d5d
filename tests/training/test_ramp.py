"""A batch that changes from step to step is plain torch's: no window holds what belongs to another."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_pretrain.commands.sample import build_whole_model
from ds_pretrain.config import deepspeed as deepspeed_module
from ds_pretrain.config.plan import load_plan
from ds_pretrain.core.distributed import World
from ds_pretrain.core.state import SkipLedger
from ds_pretrain.data.loader import BatchLoader
from ds_pretrain.models.param_groups import build_parameter_groups
from ds_pretrain.training.curriculum import open_sampler
from ds_pretrain.training.preflight import open_inputs
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
from tests.harness import record_run
from tests.ranks import run_ranks
from tests.runs.results import trace
from tests.scenario import make_run
from tests.tiers import slow, slow_but

RATE = 0.02  # of an Adam whose epsilon is as large as the gradients: a wrong scale shows in the weights
NEAR = {"rel": 3e-6, "abs": 0.0}  # a window that took or lacked one micro-batch is off by tenths
WINDOWS = (1, 5, 2, 4, 3, 1, 1, 5, 4)  # micro-batches of each step: each change up and down, and none


def _change_each_step(world: World, run_file: str, managed: bool = False) -> Any:
    """Loss, norm and clipping of each step, beside plain torch's, and how far the weights end apart."""
    patch = pytest.MonkeyPatch()
    if managed:
        resolve = deepspeed_module.resolve_deepspeed
        own = {"managed_gradient_accumulation": True, "gradient_accumulation_steps": 2}
        patch.setattr("ds_pretrain.config.plan.resolve_deepspeed", lambda *a, **k: resolve(*a, **k) | own)
    plan = load_plan(run_file)
    micro = 2 // world.size  # so that a step has the same micro-batches on one rank and on two
    batches = [uneven_batch(2 * count, seed) for seed, count in enumerate(WINDOWS)]
    expected = reference(plan, batches, RATE)
    engine = open_run_engine(plan, world)
    records = [step_on(engine, plan, batch, micro, RATE, world) for batch in batches]
    patch.undo()
    found = [[r.loss, r.grad_norm, r.clip_factor] for r in records]
    wanted = [
        list(numbers) for numbers in zip(expected.losses, expected.norms, expected.clip_factors, strict=True)
    ]
    return found, wanted, largest_difference(whole_weights(engine), expected.weights)


@pytest.mark.parametrize(("stage", "num_ranks"), slow_but(product((1, 2, 3), (1, 2)), (2, 1), (3, 2)))
def test_each_window_is_plain_torchs_across_every_change_of_the_batch(
    tmp_path: Path, stage: int, num_ranks: int
) -> None:
    run_file = make_run(tmp_path, deepspeed=scale_sensitive(stage), model=NO_DROPOUT)
    for found, wanted, difference in run_ranks(_change_each_step, num_ranks, str(run_file)):
        for numbers, expected in zip(found, wanted, strict=True):
            assert numbers == pytest.approx(expected, **NEAR)
        assert len(found) == len(WINDOWS)
        assert difference < 2e-6


@pytest.mark.parametrize("stage", slow_but([1, 2, 3], 3))
def test_were_the_engine_to_count_windows_they_would_be_mixed(tmp_path: Path, stage: int) -> None:
    """What the test above is worth: with DeepSpeed's own counter some step has no update or another norm."""
    run_file = make_run(tmp_path, deepspeed=scale_sensitive(stage), model=NO_DROPOUT)
    [(found, wanted, difference)] = run_ranks(_change_each_step, 1, str(run_file), True)
    near = [
        numbers == pytest.approx(expected, **NEAR) for numbers, expected in zip(found, wanted, strict=True)
    ]
    assert not all(near)
    assert difference > 1e-4


def _with_ramp(run_file: Path) -> str:
    text = run_file.read_text()
    ramp = 'ramp = { "0" = 32, "2 steps" = 64, "192 tokens" = 96, "6 steps" = 128, "8 steps" = 160 }\n'
    text = text.replace("micro_batch_size = 2\n", f'micro_batch_size = 1\n{ramp}lr_scaling = "sqrt"\n', 1)
    run_file.write_text(text)
    return str(run_file)


def _whole_run(run_file: str) -> tuple[list[float], list[float], list[int]]:
    """Losses, norms and tokens a step of plain torch, in one process, on the samples that the run reads."""
    plan = load_plan(run_file)
    sources = open_inputs(plan).sources
    model = build_whole_model(plan)
    params = plan.deepspeed["optimizer"]["params"]
    options = {"betas": tuple(params["betas"]), "eps": params["eps"], "weight_decay": params["weight_decay"]}
    optimizer = torch.optim.AdamW(build_parameter_groups(model, decay_embeddings=False), lr=0.0, **options)
    losses, norms, tokens = [], [], []
    with BatchLoader(open_sampler(plan, sources), sources, World(), {"main": 1}) as feed:
        for step in range(plan.last_step):
            micros = feed.read(step, SkipLedger()).micro_batches
            inputs = torch.cat([micro.input_ids for micro in micros])  # [S, T]
            labels = torch.cat([micro.labels for micro in micros])  # [S, T]
            logits = model(input_ids=inputs, use_cache=False).logits.flatten(0, 1)  # [S * T, V]
            loss = torch.nn.functional.cross_entropy(logits, labels.flatten())
            z_loss = (plan.run.model.z_loss or 0.0) * logits.logsumexp(-1).square().mean()
            optimizer.zero_grad()
            (loss + z_loss).backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
            for group in optimizer.param_groups:
                group["lr"] = plan.lr(step, step)
            optimizer.step()
            losses.append(loss.item())
            tokens.append(labels.numel())
    return losses, norms, tokens


@pytest.mark.parametrize(("stage", "num_ranks"), [slow(1, 2), slow(2, 2), slow(3, 1), (3, 2)])
def test_a_run_whose_batch_rises_four_times_is_plain_torch_on_the_same_samples(
    tmp_path: Path, stage: int, num_ranks: int
) -> None:
    """Through the loop itself: from 1 to 5 micro-batches a rank where there are two, under the rate rule."""
    made = make_run(tmp_path, steps=11, batch_tokens=160, deepspeed=scale_sensitive(stage), model=NO_DROPOUT)
    run_file = _with_ramp(made)
    losses, norms, tokens = _whole_run(run_file)
    assert tokens == [32] * 2 + [64] * 2 + [96] * 2 + [128] * 2 + [160] * 3
    run_ranks(record_run, num_ranks, run_file)
    records = trace(tmp_path / "out")
    assert [record["loss"] for record in records] == pytest.approx(losses, rel=1e-5)
    assert [record["grad_norm"] for record in records] == pytest.approx(norms, rel=1e-5)
    rates = [record["learning_rate"] for record in records]
    assert rates[2] == pytest.approx(1e-2 * (64 / 160) ** 0.5)
    assert rates[8] == pytest.approx(1e-2)
