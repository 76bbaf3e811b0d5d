"""A small real engine on a rank, global batches made by hand, and plain torch to compare with.

Shapes: S sequences of the global batch, B of a micro-batch, T tokens of a sequence, V vocabulary.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import deepspeed
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ds_pretrain.commands.sample import build_whole_model
from ds_pretrain.config.plan import Plan
from ds_pretrain.core.distributed import World
from ds_pretrain.core.metrics import IGNORED, StepRecord
from ds_pretrain.core.state import RunState
from ds_pretrain.data.loader import Batch, MicroBatch
from ds_pretrain.models.param_groups import build_parameter_groups
from ds_pretrain.training.step import RankSignals, measure, take_step
from tests.scenario import LLAMA, deepspeed_json

NO_DROPOUT = {**LLAMA, "attention_dropout": 0.0}
SEQ_LEN = 16


@dataclass(frozen=True)
class GlobalBatch:
    """The batch of one step over all ranks."""

    input_ids: Tensor  # [S, T]
    labels: Tensor  # [S, T]

    @property
    def num_valid_tokens(self) -> int:
        return int((self.labels != IGNORED).sum())


def uneven_batch(sequences: int, seed: int = 0, ignore_from: int | None = None) -> GlobalBatch:
    """Random tokens; each sequence has another number of valid ones, none from sequence `ignore_from` on."""
    tokens = torch.from_numpy(np.random.default_rng(seed).integers(0, 257, (sequences, SEQ_LEN + 1)))
    labels = tokens[:, 1:].clone()  # [S, T]
    for row in range(sequences):
        labels[row, 1 + row * 5 % SEQ_LEN :] = IGNORED
        if ignore_from is not None and row >= ignore_from:
            labels[row] = IGNORED
    return GlobalBatch(tokens[:, :-1].contiguous(), labels)


def share(batch: GlobalBatch, world: World, micro_batch_size: int) -> Batch:
    """This rank's part, in micro-batches."""
    size = len(batch.labels) // world.size
    first = world.rank * size
    return Batch(
        ids=None,  # type: ignore[arg-type]  # the step does not look at them
        micro_batches=tuple(
            MicroBatch(
                batch.input_ids[at : at + micro_batch_size],
                batch.labels[at : at + micro_batch_size],
            )
            for at in range(first, first + size, micro_batch_size)
        ),
        num_valid_tokens=batch.num_valid_tokens,
        checksums=(),
    )


def scale_sensitive(stage: int, bf16: bool = False, clip: float = 1.0) -> dict[str, Any]:
    """A DeepSpeed JSON whose Adam shows the scale of a gradient: epsilon is as large as gradients are."""
    config = deepspeed_json(stage, bf16, gradient_clipping=clip)
    config["optimizer"]["params"] |= {"eps": 1e-2}
    return config


NO_SIGNALS = RankSignals(stop=False, save=False, save_progress=0)


def step_on(
    engine: Any, plan: Plan, batch: GlobalBatch, micro_batch_size: int, rate: float, world: World
) -> StepRecord:
    """One real step of the loop, and its record."""
    mine = share(batch, world.data_parallel_world(engine.sequence_parallel_size), micro_batch_size)
    losses, update = take_step(engine, mine, rate, plan.run.model.z_loss, world)
    record, _ = measure(plan, RunState(), mine, rate, losses, update, 0.0, NO_SIGNALS, world)
    return record


def whole_weights(engine: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Every weight of the engine's module, whole. Collective."""
    weights = {}
    for name, parameter in engine._engine.module.named_parameters():
        sharded = hasattr(parameter, "ds_id")
        with deepspeed.zero.GatheredParameters([parameter]) if sharded else nullcontext():
            weights[name] = parameter.detach().float().clone().numpy()
    return weights


@dataclass(frozen=True)
class Reference:
    """Results of plain torch, in one process, on the same global batches."""

    losses: list[float]
    z_losses: list[float]
    norms: list[float]
    clip_factors: list[float]
    weights: dict[str, np.ndarray[Any, Any]]


def reference(plan: Plan, batches: list[GlobalBatch], rate: float) -> Reference:
    """Train in plain torch: whole batches, torch's own loss, clipping and AdamW."""
    model = build_whole_model(plan)
    params = plan.deepspeed["optimizer"]["params"]
    options = {"betas": tuple(params["betas"]), "eps": params["eps"], "weight_decay": params["weight_decay"]}
    optimizer = torch.optim.AdamW(build_parameter_groups(model, decay_embeddings=False), lr=rate, **options)
    clip = float(plan.deepspeed["gradient_clipping"])
    losses, z_losses, norms, factors = [], [], [], []
    for batch in batches:
        logits = model(input_ids=batch.input_ids, use_cache=False).logits.flatten(0, 1)  # [S * T, V]
        labels = batch.labels.flatten()  # [S * T]
        loss = functional.cross_entropy(logits, labels, ignore_index=IGNORED)
        z_loss = (plan.run.model.z_loss or 0.0) * logits[labels != IGNORED].logsumexp(-1).square().mean()
        optimizer.zero_grad()
        (loss + z_loss).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip))
        optimizer.step()
        losses.append(loss.item())
        z_losses.append(z_loss.item())
        norms.append(norm)
        factors.append(min(1.0, clip / (norm + 1e-6)))
    weights = {name: p.detach().clone().numpy() for name, p in model.named_parameters()}
    return Reference(losses, z_losses, norms, factors, weights)


def largest_difference(a: dict[str, np.ndarray[Any, Any]], b: dict[str, np.ndarray[Any, Any]]) -> float:
    """Over all weights of two models of the same names."""
    assert a.keys() == b.keys()
    return max(float(np.abs(a[name] - b[name]).max()) for name in a)
