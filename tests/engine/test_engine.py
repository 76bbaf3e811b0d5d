"""DeepSpeed behavior that we rely on, on real ranks: each test fails when it, or our use of it, changes."""

import gc
import math
from itertools import product
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn

from ds_pretrain.config.plan import load_plan
from ds_pretrain.core.distributed import World
from ds_pretrain.engine.engine import ZeroEngine, get_dtype, open_partitioning
from ds_pretrain.train import main
from ds_pretrain.training import step as step_module
from ds_pretrain.training.setup import open_run_engine
from tests.engine.small import NO_DROPOUT, scale_sensitive, share, step_on, uneven_batch, whole_weights
from tests.harness import record_run
from tests.ranks import KILLED, run_ranks, run_ranks_each
from tests.runs.results import trace
from tests.scenario import deepspeed_json, make_run
from tests.tiers import slow, slow_but

STAGES = pytest.mark.parametrize("stage", slow_but([1, 2, 3], 3))
WITH_PRECISIONS = pytest.mark.parametrize(
    ("stage", "bf16"), slow_but(product((1, 2, 3), (False, True)), (1, True), (2, False), (3, True))
)
RATE = 1e-2

COSINE = 'kind = "cosine"\nlength = "24 steps"\npeak_lr = 1e-2\nwarmup = "12 steps"\nmin_lr_ratio = 0.1\n'
WSD = 'kind = "wsd"\nlength = "24 steps"\npeak_lr = 1e-2\nwarmup = "7 steps"\ndecay = "12 steps"\n'


def _with_schedule(run_file: Path, schedule: str) -> Path:
    before, rest = run_file.read_text().split("[schedule]\n")
    run_file.write_text(f"{before}[schedule]\n{schedule}[batch]{rest.split('[batch]')[1]}")
    return run_file


@pytest.mark.parametrize("schedule", [COSINE, slow(WSD)], ids=["cosine", "wsd"])
def test_p10_the_rates_in_the_live_groups_after_a_resume_are_the_uninterrupted_ones(
    tmp_path: Path, schedule: str
) -> None:
    small: dict[str, Any] = {"batch_tokens": 32, "save_every": "4 steps"}
    straight_file = _with_schedule(make_run(tmp_path / "straight", **small), schedule)
    cut_file = _with_schedule(make_run(tmp_path / "cut", **small), schedule)
    straight = run_ranks(record_run, 1, str(straight_file))[0].rates
    assert run_ranks(record_run, 1, str(cut_file), kill_after=5, allow_kill=True) == [KILLED]
    resumed = run_ranks(record_run, 1, str(cut_file))[0].rates

    asked = load_plan(straight_file).schedule
    assert straight == {step: [asked.lr(step - 1)] * 2 for step in range(1, 25)}
    assert len({rates[0] for rates in straight.values()}) > 15
    assert set(resumed) >= set(range(5, 25))  # more if the kill caught the save of step 4
    assert resumed == {step: straight[step] for step in resumed}


def test_p11_a_step_is_an_optimizer_step_whatever_the_accumulation_and_the_world(tmp_path: Path) -> None:
    seen: list[dict[int, list[float]]] = []
    for num_ranks in (1, 2):
        run_files = [
            make_run(
                tmp_path / f"{num_ranks}x{accumulation}",
                steps=8,
                micro_batch_size=1,
                batch_tokens=16 * num_ranks * accumulation,
            )
            for accumulation in (1, 4)
        ]
        for ranks in run_ranks_each(record_run, num_ranks, *((str(run_file),) for run_file in run_files)):
            seen += [ended.rates for ended in ranks]
        for run_file in run_files:
            recorded = [record["learning_rate"] for record in trace(run_file.parent / "out")]
            assert recorded == [seen[0][step][0] for step in range(1, 9)]
    assert len(seen) == 6
    assert all(rates == seen[0] for rates in seen)
    decayed = 1e-2 * (1 - 0.5**0.5)
    assert [rates[0] for rates in seen[0].values()] == pytest.approx([0, 5e-3, *[1e-2] * 5, decayed])


def _poison_one_rank(world: World, run_file: str, bad: float) -> Any:
    """Three steps, the second one poisoned on the last rank; and the two good ones alone."""
    plan = load_plan(run_file)
    good, bad_batch = [uneven_batch(4, seed) for seed in (0, 1)], uneven_batch(4, 2)
    engine = open_run_engine(plan, world)
    step_on(engine, plan, good[0], 1, RATE, world)
    before = engine.digest(), whole_weights(engine)
    patch = pytest.MonkeyPatch()
    if world.rank == world.size - 1:
        patch.setattr(ZeroEngine, "backward", _poisoned(ZeroEngine.backward, bad))
    record = step_on(engine, plan, bad_batch, 1, RATE, world)
    patch.undo()
    after = engine.digest(), whole_weights(engine)
    step_on(engine, plan, good[1], 1, RATE, world)
    clean = open_run_engine(plan, world)
    for batch in good:
        last = step_on(clean, plan, batch, 1, RATE, world)
    same_weights = all((before[1][name] == after[1][name]).all() for name in before[1])
    return record, before[0] == after[0], same_weights, engine.digest() == clean.digest(), last


def _poisoned(backward: Any, bad: float) -> Any:
    return lambda self, loss: backward(self, loss * bad)


@WITH_PRECISIONS
def test_a_non_finite_gradient_on_one_rank_drops_all_updates(tmp_path: Path, stage: int, bf16: bool) -> None:
    run_file = make_run(tmp_path, deepspeed=deepspeed_json(stage, bf16), model=NO_DROPOUT)
    bad = math.inf if bf16 and stage == 3 else math.nan
    for record, same_state, same_weights, as_if_never_seen, last in run_ranks(
        _poison_one_rank, 2, str(run_file), bad
    ):
        assert (record.update_applied, record.grad_norm, record.clip_factor) == (False, None, None)
        assert same_state
        assert same_weights
        assert as_if_never_seen
        assert last.update_applied
        assert last.grad_norm is not None


def _flip_bits(world: World, run_file: str) -> Any:
    """The digest, and the digests after one bit of each kind of state was flipped in the last element."""
    plan = load_plan(run_file)
    engine = open_run_engine(plan, world)
    step_on(engine, plan, uneven_batch(4), 1, RATE, world)
    optimizer = engine._engine.optimizer  # type: ignore[attr-defined]
    inner = optimizer.optimizer
    base, flipped = engine.digest(), {}
    for number, (master, state) in enumerate(inner.state.items()):
        tensors = {"master": master.data, **{k: v for k, v in state.items() if torch.is_tensor(v)}}
        for name, tensor in tensors.items():
            bits = tensor.view(-1)[-1:].view(torch.int32)
            bits ^= 1
            flipped[number, name] = engine.digest()
            bits ^= 1
    return base, flipped, engine.digest()


@WITH_PRECISIONS
def test_the_digest_sees_a_bit_of_any_master_moment_or_step(tmp_path: Path, stage: int, bf16: bool) -> None:
    run_file = make_run(tmp_path, deepspeed=deepspeed_json(stage, bf16))
    [(base, flipped, again)] = run_ranks(_flip_bits, 1, str(run_file))
    assert again == base
    assert {name for _, name in flipped} == {"master", "exp_avg", "exp_avg_sq", "step"}
    assert len({number for number, _ in flipped}) == 2  # the groups that decay and that do not
    assert len({base, *flipped.values()}) == 9


def _save_and_load(world: World, run_file: str, folder: str) -> Any:
    plan = load_plan(run_file)
    batches = [uneven_batch(4, seed) for seed in range(4)]
    engine = open_run_engine(plan, world)
    for batch in batches[:2]:
        step_on(engine, plan, batch, 1, RATE, world)
    saved = engine.digest()
    engine.save(Path(folder), "tag")
    unmoved = engine.digest() == saved
    expected = [step_on(engine, plan, batch, 1, RATE, world).loss for batch in batches[2:]], engine.digest()

    outcomes = []
    for opened in (engine, open_run_engine(plan, world)):
        if opened is engine:  # a window is open: its gradients must not reach the first step after the load
            for micro in share(batches[0], world, 1).micro_batches[:1]:
                opened.backward(opened.logits(micro.input_ids).float().square().mean() * 1e3)
        opened.load(Path(folder), "tag")
        restored = opened.digest() == saved
        losses = [step_on(opened, plan, batch, 1, RATE, world).loss for batch in batches[2:]]
        outcomes.append((restored, (losses, opened.digest()) == expected))
    decays = [group["weight_decay"] for group in opened._engine.optimizer.param_groups]  # type: ignore[attr-defined]
    names = sorted(path.name for path in Path(folder).iterdir())
    gc.collect()
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if folder in line]
    return unmoved, outcomes, decays, names, mapped


@pytest.mark.parametrize(
    ("stage", "bf16", "num_ranks"),
    slow_but(
        [(stage, *more) for stage in (1, 2, 3) for more in ((False, 1), (False, 2), (True, 2))],
        (1, True, 2),
        (2, False, 1),
        (3, False, 2),
    ),
)
def test_what_is_saved_loads_exactly_in_the_live_engine_and_in_a_new_one(
    tmp_path: Path, stage: int, bf16: bool, num_ranks: int
) -> None:
    """Also into an open window, which a load must close. And DeepSpeed writes no `latest`."""
    config = deepspeed_json(stage, bf16)
    run_file = make_run(tmp_path / "run", deepspeed=config, model=NO_DROPOUT)
    results = run_ranks(_save_and_load, num_ranks, str(run_file), str(tmp_path / "shards"))
    for unmoved, outcomes, decays, names, mapped in results:
        assert unmoved
        assert outcomes == [(True, True), (True, True)]
        assert decays == [0.1, 0.0]  # as the JSON says, and none for norms and embeddings
        assert "latest" not in names
        assert mapped == []  # nothing of the engine lies in a file that may be pruned


def _fail_to_write(world: World, run_file: str, folder: str) -> Any:
    plan = load_plan(run_file)
    engine = open_run_engine(plan, world)
    step_on(engine, plan, uneven_batch(4), 1, RATE, world)
    patch = pytest.MonkeyPatch()
    if world.rank == 1:

        def refuse(*_: Any, **__: Any) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(torch, "save", refuse)
    failure = engine.save(Path(folder), "tag")
    patch.undo()
    again = engine.save(Path(folder), "again")
    left = sorted(path.name for path in Path(folder).iterdir())
    return failure and str(failure), again, left


@STAGES
def test_a_rank_that_cannot_write_says_so_and_no_rank_waits_for_it(tmp_path: Path, stage: int) -> None:
    run_file = make_run(tmp_path / "run", deepspeed=deepspeed_json(stage))
    results = run_ranks(_fail_to_write, 2, str(run_file), str(tmp_path / "shards"))
    left = ["again", "tag"]  # none of DeepSpeed's recovery scripts, which it would copy on one rank alone
    assert results == [(None, None, left), ("[Errno 28] No space left on device", None, left)]


def _decay_of_each_parameter(world: World, run_file: str) -> Any:
    """Return the factor of weight decay alone: weights after a step of zero gradients over those before."""
    plan = load_plan(run_file)
    engine = open_run_engine(plan, world)
    decays = [group["weight_decay"] for group in engine._engine.optimizer.param_groups]  # type: ignore[attr-defined]
    before = whole_weights(engine)
    step_on(engine, plan, uneven_batch(4, ignore_from=0), 1, 0.5, world)
    after = whole_weights(engine)
    shrinks = {name: float(after[name].sum() / before[name].sum()) for name in before if before[name].sum()}
    return decays, shrinks


@STAGES
def test_projections_decay_as_the_json_says_and_the_others_do_not(tmp_path: Path, stage: int) -> None:
    run_file = make_run(tmp_path, deepspeed=scale_sensitive(stage))
    [(decays, shrinks)] = run_ranks(_decay_of_each_parameter, 1, str(run_file))
    assert decays == [0.1, 0.0]
    for name, factor in shrinks.items():
        exempt = "norm" in name or "embed" in name
        assert factor == pytest.approx(1.0 if exempt else 1 - 0.5 * 0.1, rel=1e-4), name
    assert len(shrinks) == 2 * 11 + 3


def test_z_loss_off_in_every_spelling_is_bitwise_the_run_without_it(tmp_path: Path) -> None:
    on_line, run_files = "z_loss = 1e-4\n", {}
    for line in ("", "z_loss = 0.0\n", 'z_loss = "off"\n', "z_loss = 0\n", "z_loss = false\n", on_line):
        run_file = make_run(tmp_path / str(len(run_files)), steps=4, save_every="100 steps")
        run_file.write_text(run_file.read_text().replace(on_line, line))
        run_files[line] = run_file
    run_ranks_each(record_run, 1, *((str(run_file),) for run_file in run_files.values()))
    traces = {line: trace(run_file.parent / "out") for line, run_file in run_files.items()}
    on = traces.pop(on_line)
    assert len(traces[""]) == 4
    assert all(record["z_loss"] is None for record in traces[""])
    assert all(found == traces[""] for found in traces.values())

    assert on[0]["loss"] == traces[""][0]["loss"]  # reported apart
    assert on[0]["z_loss"] == pytest.approx(1e-4 * math.log(257) ** 2, rel=0.1)
    assert on[3]["loss"] != traces[""][3]["loss"]


def _lose_every_update(world: World, run_file: str) -> int:
    patch = pytest.MonkeyPatch()
    whole = step_module.cross_entropy_and_z

    def broken(*args: Any) -> Any:
        nll, z = whole(*args)
        return nll * math.nan, z

    patch.setattr(step_module, "cross_entropy_and_z", broken)
    return main([run_file])


def test_a_run_whose_every_update_is_dropped_exits_with_its_own_code(tmp_path: Path) -> None:
    run_file = make_run(tmp_path, steps=3)
    assert run_ranks(_lose_every_update, 2, str(run_file)) == [4, 4]
    records = trace(tmp_path / "out")
    assert [record["update_applied"] for record in records] == [False] * 3
    assert (tmp_path / "out" / "exit_code.json").read_text().startswith('{"exit_code": 4')


def _type_at_birth(world: World, bf16: bool, has_fp16: bool) -> bool:
    accelerator = deepspeed.accelerator.get_accelerator()
    accelerator.is_fp16_supported = lambda: has_fp16
    config = {**deepspeed_json(bf16=bf16), "train_micro_batch_size_per_gpu": 1}
    with open_partitioning(config)():
        linear = nn.Linear(4, 4)
    return linear.weight.ds_tensor.dtype == get_dtype(config)


@pytest.mark.parametrize("has_fp16", [True, False])
@pytest.mark.parametrize("bf16", [True, False])
def test_sharded_parameters_have_the_type_of_the_json_on_any_hardware(bf16: bool, has_fp16: bool) -> None:
    assert run_ranks(_type_at_birth, 1, bf16, has_fp16) == [True]
