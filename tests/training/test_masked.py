"""Documents kept apart under a real engine: what plain torch makes of each document alone.

Shapes: S sequences of the global batch, B of a micro-batch, T tokens of a sequence, V vocabulary.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from ds_pretrain.commands.sample import build_whole_model
from ds_pretrain.config.deepspeed import resolve_deepspeed
from ds_pretrain.config.plan import Plan, load_plan
from ds_pretrain.core.distributed import World, gather_rows
from ds_pretrain.data.loader import build_micro_batch
from ds_pretrain.engine.engine import ZeroEngine, gather, get_dtype, open_engine, open_partitioning
from ds_pretrain.models.attention import bind_attention_inputs, refuse_leaks
from ds_pretrain.models.build import build_model
from ds_pretrain.models.loss import cross_entropy_and_z
from ds_pretrain.models.param_groups import build_parameter_groups
from tests.engine.small import NO_DROPOUT, SEQ_LEN, scale_sensitive
from tests.ranks import run_ranks
from tests.scenario import make_run
from tests.tiers import slow

SEQUENCES = 4
RATE = 1e-2


def _rows() -> tuple[Any, Any]:
    """[S, T + 1] tokens, and which begin a document: a row of one, many of one token, a cut at the end."""
    tokens = np.random.default_rng(3).integers(0, 257, (SEQUENCES, SEQ_LEN + 1))
    starts = np.zeros_like(tokens, dtype=np.bool_)
    starts[1, 2:9] = True
    starts[2, 5] = starts[2, SEQ_LEN] = True
    starts[3, [0, 7, 11]] = True
    return tokens, starts


def _open(plan: Plan, world: World, recompute: bool, apart: bool = True) -> ZeroEngine:
    config = resolve_deepspeed(plan.deepspeed, peak=RATE, micro_batch_size=1)
    model = build_model(
        plan.model_text, qk_norm=plan.run.model.qk_norm, recompute=recompute, seed=plan.run.seed,
        dtype=get_dtype(config), world=world, partition=open_partitioning(config), gather=gather(config),
    )  # fmt: skip
    groups = build_parameter_groups(model.module, decay_embeddings=False)
    inputs = bind_attention_inputs(model.config, get_dtype(config)) if apart else None
    return open_engine(model.module, groups, config, inputs)


def _train(world: World, run_file: str, recompute: bool, micro_batch_size: int) -> Any:
    """Mean loss and gradient norm of one step on the global batch."""
    engine = _open(load_plan(run_file), world, recompute)
    with engine.evaluation_mode():
        refuse_leaks(engine.logits, 257, engine.device, "sdpa")
    tokens, starts = _rows()
    share = SEQUENCES // world.size
    first = world.rank * share
    micro_batches = [
        build_micro_batch(tokens[at : at + micro_batch_size], starts[at : at + micro_batch_size])
        for at in range(first, first + share, micro_batch_size)
    ]
    num_valid = tokens[:, 1:].size - int(starts[:, 1:].sum())
    total = 0.0
    for micro in micro_batches:
        there = micro.to(engine.device)
        logits = engine.logits(there.input_ids, there.documents)  # [B, T, V]
        nll, _ = cross_entropy_and_z(logits, there.labels, None)
        engine.backward(nll * world.size / num_valid)
        total += nll.item()
    update = engine.step(RATE)
    return float(gather_rows(world, [total]).sum()) / num_valid, update.grad_norm


def _alone(plan: Plan) -> tuple[float, float]:
    """The same in plain torch, in one process: each document a row of its own, as if nothing were packed."""
    model = build_whole_model(plan)
    tokens, starts = _rows()
    losses = []
    for row, begins in zip(tokens, starts, strict=True):
        cuts = [0, *(np.flatnonzero(begins[1:]) + 1).tolist(), SEQ_LEN + 1]
        for start, stop in pairwise(cuts):
            document = torch.from_numpy(row[start:stop])[None]  # [1, length]
            if document.shape[1] > 1:
                logits = model(input_ids=document[:, :-1], use_cache=False).logits[0]
                losses.append(functional.cross_entropy(logits, document[0, 1:], reduction="none"))
    loss = torch.cat(losses).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    return loss.item(), float(norm)


@pytest.mark.parametrize(("recompute", "micro_batch_size"), [slow(False, 1), (True, 2)])
def test_p38_a_packed_batch_on_two_ranks_trains_as_each_document_alone(
    tmp_path: Path, recompute: bool, micro_batch_size: int
) -> None:
    run_file = make_run(tmp_path, deepspeed=scale_sensitive(3), model=NO_DROPOUT)
    loss, norm = _alone(load_plan(run_file))
    for found in run_ranks(_train, 2, str(run_file), recompute, micro_batch_size):
        assert found == pytest.approx((loss, norm), rel=2e-5)


def _told_nothing(world: World, run_file: str) -> Any:
    engine = _open(load_plan(run_file), world, recompute=False, apart=False)
    micro = build_micro_batch(*_rows())
    plain = engine.logits(micro.input_ids)
    try:
        engine.logits(micro.input_ids, micro.documents)
    except ValueError as error:
        return list(plain.shape), str(error)


def test_an_engine_that_cannot_tell_documents_apart_says_so(tmp_path: Path) -> None:
    run_file = make_run(tmp_path, deepspeed=scale_sensitive(3), model=NO_DROPOUT)
    [(shape, message)] = run_ranks(_told_nothing, 1, str(run_file))
    assert shape == [SEQUENCES, SEQ_LEN, 257]
    assert message == "documents given to an engine that was opened without document_inputs"
