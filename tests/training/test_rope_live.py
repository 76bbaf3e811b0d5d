"""Rotary positions that change under a real, open ZeRO-3 engine, and after a restart."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_pretrain.config.plan import load_plan
from ds_pretrain.config.schema import RopeSection
from ds_pretrain.core.distributed import World
from ds_pretrain.models.rope import apply_rope
from ds_pretrain.models.rope_config import build_rope_config
from ds_pretrain.training.setup import open_run_engine
from tests.engine.small import NO_DROPOUT, step_on, uneven_batch, whole_weights
from tests.models.rope_reference import TOLERANCE, check_rope
from tests.models.tiny import rotary_tables
from tests.ranks import run_ranks
from tests.scenario import deepspeed_json, make_run
from tests.tiers import slow_but

RATE = 1e-2
MODELS: dict[str, dict[str, Any]] = {
    "llama": NO_DROPOUT,
    "qwen3": NO_DROPOUT | {"model_type": "qwen3", "head_dim": 8},
}
CHANGES = {
    "theta": RopeSection(theta=8e6),
    "yarn": RopeSection(kind="yarn", factor=64.0),
    "llama3": RopeSection(kind="llama3", factor=64.0),
}
LENGTH = 8192


def _tables(engine: Any) -> dict[str, list[float]]:
    tables = rotary_tables(engine._engine.module)
    assert tables
    assert all(table.dtype == torch.float32 for table in tables.values())
    return {name: table.tolist() for name, table in tables.items()}


def _change_train_save_load(
    world: World, before: str, after: str, model: str, folder: str
) -> tuple[bool, ...]:
    """Train, change, train, save; then load into an engine that was opened with the changed config."""
    plan, changed = load_plan(before), load_plan(after)
    live: Any = open_run_engine(plan, world)
    module = live._engine.module
    step_on(live, plan, uneven_batch(4, 0), 1, RATE, world)
    old, weights, digest = _tables(live), whole_weights(live), live.digest()
    num_tables = apply_rope(module, json.loads(model))
    same = live.digest() == digest and str(whole_weights(live)) == str(weights)
    losses = [step_on(live, plan, uneven_batch(4, seed), 1, RATE, world).loss for seed in (1, 2)]
    moved = live.digest() != digest
    assert live.save(Path(folder), "tag") is None
    fresh: Any = open_run_engine(changed, world)
    fresh.load(Path(folder), "tag")
    check = check_rope(module)
    return (
        num_tables == len(old) and _tables(live) != old,
        same and moved and all(loss > 0 for loss in losses),
        fresh.digest() == live.digest(),
        _tables(fresh) == _tables(live),
        fresh._engine.module.config.to_dict() == module.config.to_dict(),
        step_on(fresh, plan, uneven_batch(4, 3), 1, RATE, world).loss
        == step_on(live, plan, uneven_batch(4, 3), 1, RATE, world).loss,
        check.problems == () and check.num_tables == len(old) and 0 < check.worst_error < TOLERANCE,
    )


@pytest.mark.parametrize(
    ("family", "change", "bf16"),
    slow_but(product(MODELS, CHANGES, (False, True)), ("llama", "theta", True), ("qwen3", "yarn", False)),
)
def test_p58_positions_change_under_an_open_engine_and_are_the_same_after_a_restart(
    tmp_path: Path, family: str, change: str, bf16: bool
) -> None:
    model = MODELS[family]
    after = build_rope_config(model, CHANGES[change], LENGTH)
    runs = [
        str(make_run(tmp_path / name, deepspeed=deepspeed_json(3, bf16), model=config))
        for name, config in (("before", model), ("after", after))
    ]
    results = run_ranks(_change_train_save_load, 2, *runs, json.dumps(after), str(tmp_path / "shards"))
    assert results == [(True,) * 7] * 2
