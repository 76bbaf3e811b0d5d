"""Loads into engines that have trained, and steps that must change nothing: real ranks, small engines."""

from pathlib import Path
from typing import Any

import pytest

from ds_pretrain.config.plan import load_plan
from ds_pretrain.core.distributed import World
from ds_pretrain.core.errors import InputError
from ds_pretrain.training.setup import open_run_engine
from tests.engine.small import NO_DROPOUT, share, step_on, uneven_batch, whole_weights
from tests.ranks import run_ranks
from tests.scenario import deepspeed_json, make_run
from tests.tiers import slow, slow_but

RATE = 1e-2


def _same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(a[name].tobytes() == b[name].tobytes() for name in a)


def _step_at_rate_zero(world: World, run_file: str, folder: str) -> tuple[bool, bool, bool]:
    plan = load_plan(run_file)
    engine: Any = open_run_engine(plan, world)
    for seed in range(2):
        step_on(engine, plan, uneven_batch(4, seed), 1, RATE, world)
    assert engine.save(Path(folder), "tag") is None
    saved, digest = whole_weights(engine), engine.digest()
    fresh: Any = open_run_engine(plan, world)
    different = not _same(whole_weights(fresh), saved)
    fresh.load(Path(folder), "tag")
    moments = fresh.digest() == digest
    step_on(fresh, plan, uneven_batch(4, 2), 1, 0.0, world)
    stepped = fresh.digest() != digest
    return different and moments, _same(whole_weights(fresh), saved), stepped


@pytest.mark.parametrize("stage", slow_but([1, 2, 3], 3))
def test_p18_after_a_restore_a_step_at_rate_zero_leaves_the_weights_as_saved(
    tmp_path: Path, stage: int
) -> None:
    """In bf16: masters that were not restored would overwrite the weights at the first step."""
    run_file = make_run(tmp_path / "run", deepspeed=deepspeed_json(stage, bf16=True), model=NO_DROPOUT)
    results = run_ranks(_step_at_rate_zero, 2, str(run_file), str(tmp_path / "shards"))
    assert results == [(True, True, True)] * 2


def test_p18_stage_0_is_refused_by_name(tmp_path: Path) -> None:
    """With bf16 it keeps no optimizer state in its checkpoints."""
    run_file = make_run(tmp_path, deepspeed=deepspeed_json(0, bf16=True))
    with pytest.raises(InputError, match=r"zero_optimization.stage.* = 0") as refused:
        load_plan(str(run_file))
    assert any("expected greater than or equal to 1" in problem for problem in refused.value.problems)


def _go_back_twice(world: World, run_file: str, folder: str) -> Any:
    """Train, save, train on; load, save at once, train, load that; against a fresh engine."""
    plan, place = load_plan(run_file), Path(folder)
    live: Any = open_run_engine(plan, world)
    batches = [uneven_batch(4, seed) for seed in range(6)]

    def train(engine: Any, seeds: range) -> list[tuple[float, float | None]]:
        records = [step_on(engine, plan, batches[seed], 1, RATE, world) for seed in seeds]
        return [(record.loss, record.grad_norm) for record in records]

    train(live, range(2))
    assert live.save(place, "first") is None
    saved = live.digest()
    straight = train(live, range(2, 6))
    live.load(place, "first")
    once = live.digest() == saved
    assert live.save(place, "second") is None  # at once, without a step in between
    in_between = train(live, range(2, 4))
    micro = share(batches[5], world, 1).micro_batches[0]
    live.backward(live.logits(micro.input_ids).float().square().mean())  # a window is open
    live.load(place, "second")
    twice = live.digest() == saved
    again = train(live, range(2, 6))
    fresh: Any = open_run_engine(plan, world)
    fresh.load(place, "first")
    anew = train(fresh, range(2, 6))
    return (
        once,
        twice,
        in_between == straight[:2],
        again == straight,
        anew == straight,
        (live.digest() == fresh.digest()),
    )


@pytest.mark.parametrize(("stage", "bf16"), [slow(3, False), (3, True), slow(2, True), slow(1, False)])
def test_p25_a_live_engine_goes_back_twice_with_the_losses_of_a_fresh_one(
    tmp_path: Path, stage: int, bf16: bool
) -> None:
    run_file = make_run(tmp_path / "run", deepspeed=deepspeed_json(stage, bf16), model=NO_DROPOUT)
    results = run_ranks(_go_back_twice, 2, str(run_file), str(tmp_path / "shards"))
    assert results == [(True,) * 6] * 2
