"""An update whose norm is above the limit never was: on real ranks, for each ZeRO optimizer of DeepSpeed."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ds_pretrain.config.plan import load_plan
from ds_pretrain.core.distributed import World
from ds_pretrain.core.errors import RunError
from ds_pretrain.engine.engine import Engine, Update
from ds_pretrain.engine.skip_step import skip_updates_above
from ds_pretrain.models.loss import cross_entropy_and_z
from ds_pretrain.training.setup import open_run_engine
from tests.engine.small import NO_DROPOUT, GlobalBatch, share, uneven_batch, whole_weights
from tests.ranks import run_ranks
from tests.scenario import deepspeed_json, make_run
from tests.tiers import slow_but

LIMIT = 5.0  # between the norms of the usual batches and that of the wild one
WILD = 1e3  # what the wild loss is multiplied by, on one rank alone


def config(stage: int, bf16: bool = False, **zero: Any) -> dict[str, Any]:
    base = deepspeed_json(stage, bf16)
    return {**base, "zero_optimization": {**base["zero_optimization"], **zero}}


OFFLOAD: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}
CONFIGS = {
    **{f"zero{stage}_fp32": config(stage) for stage in (1, 2, 3)},
    **{f"zero{stage}_bf16": config(stage, bf16=True) for stage in (1, 2, 3)},
    "zero1_bf16_accumulation": config(1, bf16=True) | {"data_types": {"grad_accum_dtype": "bf16"}},
    **{
        f"zero{stage}_offload": config(stage, **OFFLOAD) | {"zero_force_ds_cpu_optimizer": False}
        for stage in (1, 2, 3)
    },
    "zero3_offload_both": config(3, **OFFLOAD, offload_param={"device": "cpu"})
    | {"zero_force_ds_cpu_optimizer": False},
    "zero3_secondary_partition": config(3, zero_hpz_partition_size=2),
    "zero2_no_clipping": config(2) | {"gradient_clipping": 0.0},
    "zero3_no_clipping": config(3) | {"gradient_clipping": 0.0},
}


def update(
    engine: Engine, batch: GlobalBatch, world: World, limit: float | None = None, scale: float = 1.0
) -> tuple[list[float], Update]:
    """One step of two micro-batches a rank; the loss of each."""
    losses = []
    for micro in share(batch, world, 2).micro_batches:
        logits = engine.logits(micro.input_ids)  # [B, T, V]
        nll, _ = cross_entropy_and_z(logits, micro.labels, None)
        engine.backward(nll * scale / batch.num_valid_tokens)
        losses.append(nll.item())
    return losses, engine.step(1e-2, limit)


def _drop_some(world: World, run_file: str, folder: str) -> Any:
    """Steps with two that are dropped between them, across a save and a load; the same without those two."""
    plan = load_plan(run_file)
    good = [uneven_batch(8, seed) for seed in range(5)]
    wild = uneven_batch(8, 99), world, LIMIT, WILD if world.rank == world.size - 1 else 1.0
    engine = open_run_engine(plan, world)
    engine.save(Path(folder), "start")
    expected, clean_end = [update(engine, batch, world) for batch in good], engine.digest()
    engine.load(Path(folder), "start")
    seen = [update(engine, batch, world, LIMIT) for batch in good[:2]]
    before = engine.digest(), whole_weights(engine)
    dropped = [update(engine, *wild)[1]]
    after = engine.digest(), whole_weights(engine)
    unmoved = before[0] == after[0] and all((before[1][k] == after[1][k]).all() for k in before[1])
    seen.append(update(engine, good[2], world, LIMIT))
    dropped.append(update(engine, *wild)[1])
    engine.save(Path(folder), "tag")
    seen.append(update(engine, good[3], world, LIMIT))
    engine.load(Path(folder), "tag")
    seen[3] = update(engine, good[3], world, LIMIT)
    seen.append(update(engine, good[4], world, LIMIT))
    end = engine.digest()

    engine.load(Path(folder), "tag")
    restored = engine.digest()
    _, applied = update(engine, wild[0], world, None, wild[3])
    return unmoved, dropped, seen == expected, end == clean_end, applied, engine.digest() != restored


@pytest.mark.parametrize(
    "name", slow_but(CONFIGS, "zero1_bf16", "zero2_fp32", "zero3_bf16", "zero3_offload_both")
)
def test_a_run_whose_wild_updates_are_dropped_is_bitwise_the_run_that_never_saw_them(
    tmp_path: Path, name: str
) -> None:
    run_file = make_run(tmp_path / "run", deepspeed=CONFIGS[name], model=NO_DROPOUT)
    results = run_ranks(_drop_some, 2, str(run_file), str(tmp_path / "shards"))
    for unmoved, dropped, same_steps, same_end, applied, moved in results:
        assert unmoved
        assert [(u.applied, u.clip_factor) for u in dropped] == [(False, None)] * 2
        assert all(u.grad_norm is not None and u.grad_norm > LIMIT for u in dropped)
        assert same_steps
        assert same_end
        assert applied.applied
        assert applied.grad_norm == dropped[1].grad_norm  # the norm that the step would have had
        assert moved
    assert results[0][1] == results[1][1]


def test_an_optimizer_that_cannot_be_limited_is_an_error_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("deepspeed.elsewhere")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    optimizer: Any = type("Optimizer", (), {"__module__": module.__name__})()
    said = r"with this DeepSpeed: deepspeed\.elsewhere has none of"
    with pytest.raises(RunError, match=said), skip_updates_above(optimizer, 1.0):
        raise AssertionError("not reached")
