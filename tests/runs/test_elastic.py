"""One run on 1 to 4 ranks, under ZeRO 1, 2 and 3: the same command goes on, with the same bits and data."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import pytest
import torch
from torch import nn

from ds_pretrain.checkpoint import universal
from ds_pretrain.checkpoint.rng import derive_streams
from ds_pretrain.config.plan import load_plan
from ds_pretrain.core.distributed import World
from ds_pretrain.training import setup as run_setup
from tests.harness import (
    Fault,
    Record,
    convert_here,
    record_run,
    restore_and_save,
    same,
    snapshot,
    streams_digest,
)
from tests.ranks import heard, run_ranks, run_ranks_each
from tests.runs.results import losses
from tests.scenario import LLAMA, deepspeed_json, make_run
from tests.tiers import slow

STEP, STEPS = 3, 6
train = partial(record_run, snapshots=True)
NO_DROPOUT = {**LLAMA, "attention_dropout": 0.0}  # whose masks depend on which rank a sequence falls to
# Sub-groups of at most 2,000 elements: several in each parameter group, of sizes that no world divides.
SMALL_SUB_GROUPS = deepspeed_json(3, zero_optimization={"stage": 3, "sub_group_size": 2_000})


def _make(folder: Path, **more: Any) -> Path:
    options = {"steps": STEPS, "batch_tokens": 16 * 12, "micro_batch_size": 1, "save_every": f"{STEP} steps"}
    return make_run(folder, **{"model": NO_DROPOUT, **options, **more})


def _continued(run_file: Path, folder: Path, **more: Any) -> Path:
    """A run that stands where another stood after STEP steps."""
    other = _make(folder, **more)
    checkpoint = f"out/checkpoints/step_{STEP:09d}"
    for suffix in ("", ".universal"):
        if (source := run_file.parent / f"{checkpoint}{suffix}").is_dir():
            shutil.copytree(source, folder / f"{checkpoint}{suffix}")
    return other


@dataclass(frozen=True)
class Pairs:
    """Straight runs by world, and what each other world made of their checkpoint."""

    straight: dict[int, list[Record]]
    continued: dict[tuple[int, int], list[Record]]  # (saved on, went on) -> each rank's
    losses: dict[int | tuple[int, int], dict[int, float]]


@pytest.fixture(scope="module", params=[(1, 2, 3), slow((1, 2, 3, 4))], ids=str)
def pairs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pairs]:
    worlds: tuple[int, ...] = request.param
    folder = tmp_path_factory.mktemp("elastic")
    straight, continued, found = {}, {}, {}
    files = {world: _make(folder / f"{world}", deepspeed=SMALL_SUB_GROUPS) for world in worlds}
    for world, run_file in files.items():
        straight[world] = run_ranks(train, world, str(run_file))
        found[world] = losses(run_file)
    saved = [file.parent / "out" / "checkpoints" / f"step_{STEP:09d}" for file in files.values()]
    run_ranks_each(convert_here, 1, *((str(checkpoint),) for checkpoint in saved))
    for after in worlds:
        sources = [before for before in worlds if before != after]
        runs = [
            _continued(files[before], folder / f"{before}-{after}", deepspeed=SMALL_SUB_GROUPS)
            for before in sources
        ]
        ended = run_ranks_each(train, after, *((str(run),) for run in runs))
        for before, run, ranks in zip(sources, runs, ended, strict=True):
            continued[before, after] = ranks
            found[before, after] = losses(run)
    yield Pairs(straight, continued, found)
    shutil.rmtree(folder)


def test_p16_masters_moments_and_weights_are_bitwise_those_saved_right_after_the_load(pairs: Pairs) -> None:
    for (before, after), outcomes in pairs.continued.items():
        saved = pairs.straight[before][0].saved[STEP]
        assert len(saved.tensors) > 20
        kinds = {"fp32", "weight", "exp_avg", "exp_avg_sq"}
        assert all(set(found) == kinds for found in saved.tensors.values())
        for outcome in outcomes:
            assert outcome.restored is not None
            assert same(outcome.restored.tensors, saved.tensors), (before, after)


def test_p17_every_state_has_its_own_adam_step_and_every_group_its_own_options(pairs: Pairs) -> None:
    for (before, _), outcomes in pairs.continued.items():
        saved = pairs.straight[before][0].saved[STEP]
        assert {name: group["weight_decay"] for name, group in saved.options.items()} == {
            "decay": 0.1,
            "no_decay": 0.0,
        }
        for outcome in outcomes:
            assert outcome.restored is not None
            assert outcome.restored.options == saved.options
            assert len(outcome.restored.steps) >= 3 * len(outcomes)  # several sub-groups on every rank
            assert set(outcome.restored.steps) == {STEP}
            assert set(outcome.finished.steps) == {STEPS}
            assert outcome.restored.distinct_steps


def test_p04_no_sample_is_repeated_or_lost_and_all_worlds_read_the_same(pairs: Pairs) -> None:
    expected = pairs.straight[1][0].samples
    assert set(expected) == set(range(STEPS))
    drawn = [tuple(map(str, np.ravel(sample))) for step in expected.values() for sample in step]
    assert len(drawn) == 12 * STEPS
    for outcomes in pairs.straight.values():
        assert all(outcome.samples == expected for outcome in outcomes)
    for (before, _), outcomes in pairs.continued.items():
        done = {step: ids for step, ids in pairs.straight[before][0].samples.items() if step < STEP}
        for outcome in outcomes:
            assert done.keys().isdisjoint(outcome.samples)
            assert done | outcome.samples == expected


def test_losses_on_another_number_of_ranks_are_those_of_the_uninterrupted_run(pairs: Pairs) -> None:
    for (before, after), found in _continued_losses(pairs):
        straight = pairs.losses[before]
        assert set(found) == set(range(STEP + 1, STEPS + 1))
        for step, loss in found.items():
            assert loss == pytest.approx(straight[step], rel=1e-6), (before, after, step)


def _continued_losses(pairs: Pairs) -> list[tuple[tuple[int, int], dict[int, float]]]:
    return [(key, found) for key, found in pairs.losses.items() if isinstance(key, tuple)]


def test_p04_ranks_that_were_there_keep_their_streams_and_new_ones_get_derived_ones(pairs: Pairs) -> None:
    for (before, after), outcomes in pairs.continued.items():
        for rank, outcome in enumerate(outcomes):
            assert outcome.restored is not None
            if rank < before:
                assert outcome.restored.streams == pairs.straight[before][rank].saved[STEP].streams
            else:
                derive_streams(7, STEP, rank)
                assert outcome.restored.streams == streams_digest()
        new = ", ".join(map(str, range(before, after)))
        said = (
            f"random streams of ranks {new}, which step_000000003.universal does not have, are derived from "
        )
        assert (said + "(seed 7, step 3, rank)" in outcomes[0].stderr) == (after > before)


def test_p15_the_log_says_what_differs_and_that_the_form_beside_the_checkpoint_is_used(pairs: Pairs) -> None:
    for (before, after), outcomes in pairs.continued.items():
        said = f"step_000000003 (ranks {before} -> {after}): using step_000000003.universal"
        assert said in outcomes[0].stderr


@pytest.mark.slow
def test_p15_two_ranks_then_three_then_one_then_two_train_the_one_run(tmp_path: Path) -> None:
    options: dict[str, Any] = {"steps": 8, "save_every": "100 steps"}
    straight_file, cut_file = _make(tmp_path / "straight", **options), _make(tmp_path / "cut", **options)
    straight = run_ranks(train, 2, str(straight_file))
    samples: dict[int, Any] = {}
    for world, last in ((2, 2), (3, 4), (1, 6), (2, None)):
        outcomes = run_ranks(train, world, str(cut_file), stop_after=last, real_tool=True)
        assert samples.keys().isdisjoint(outcomes[0].samples)
        samples |= outcomes[0].samples
        if world == 3:
            assert "converting once (there is no universal checkpoint yet)" in outcomes[0].stderr
    assert samples == straight[0].samples
    assert set(samples) == set(range(8))  # it ran to the last step that was asked for
    expected = losses(straight_file)
    assert losses(cut_file) == {step: pytest.approx(loss, rel=1e-6) for step, loss in expected.items()}


@pytest.mark.slow
def test_p16_the_round_trip_over_three_and_one_ranks_is_bitwise(tmp_path: Path) -> None:
    run_file = _make(tmp_path, deepspeed=SMALL_SUB_GROUPS)
    saved = run_ranks(train, 2, str(run_file), stop_after=STEP)[0].saved[STEP]
    for world in (3, 1, 2):
        restored = run_ranks(restore_and_save, world, str(run_file))[0]
        assert same(restored.tensors, saved.tensors)
        assert restored.options == saved.options
    run_ranks(train, 2, str(run_file))
    uncut = _make(tmp_path / "uncut", deepspeed=SMALL_SUB_GROUPS)
    run_ranks(train, 2, str(uncut))
    after = {step: loss for step, loss in losses(uncut).items() if step > STEP}
    assert {step: loss for step, loss in losses(run_file).items() if step > STEP} == after  # to the last bit


@pytest.mark.parametrize(
    ("before", "after", "bf16", "num_before", "num_after"),
    [(3, 2, True, 2, 3), slow(2, 3, False, 3, 2), slow(1, 3, True, 1, 2), slow(3, 1, False, 2, 2)],
)
def test_the_zero_stage_and_the_micro_batch_may_change_with_the_ranks(
    tmp_path: Path, before: int, after: int, bf16: bool, num_before: int, num_after: int
) -> None:
    run_file = _make(tmp_path, deepspeed=deepspeed_json(before, bf16))
    first = run_ranks(train, num_before, str(run_file), stop_after=STEP)
    (tmp_path / "deepspeed.json").write_text(json.dumps(deepspeed_json(after, bf16)))
    second = run_ranks(train, num_after, str(run_file), ("batch.micro_batch_size=2",))
    assert f"zero_optimization.stage {before} -> {after}" in second[0].stderr
    for outcome in second:
        assert outcome.restored is not None
        assert same(outcome.restored.tensors, first[0].saved[STEP].tensors)
        assert outcome.restored.options == first[0].saved[STEP].options
        assert set(outcome.finished.steps) == {STEPS}
    assert set(losses(run_file)) == set(range(1, STEPS + 1))


def test_offload_may_change_and_p18_a_step_at_rate_zero_leaves_what_was_loaded(tmp_path: Path) -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    offload = deepspeed_json(3, True, zero_optimization=zero, zero_force_ds_cpu_optimizer=False)
    run_file = _make(tmp_path, deepspeed=deepspeed_json(3, True))
    first = run_ranks(train, 2, str(run_file), stop_after=STEP)
    (tmp_path / "deepspeed.json").write_text(json.dumps(offload))
    rate_zero = [Fault("rate", 1, STEPS, value=0.0, again=True)]
    second = run_ranks(train, 1, str(run_file), stop_after=STEP + 1, faults=rate_zero)
    assert "zero_optimization.offload_optimizer.device none -> cpu" in second[0].stderr
    saved, after = first[0].saved[STEP].tensors, second[0].finished.tensors
    for name in saved:
        for kind in ("fp32", "weight"):
            assert after[name][kind].tobytes() == saved[name][kind].tobytes()
        assert after[name]["exp_avg"].tobytes() != saved[name]["exp_avg"].tobytes()  # there was a step


def freeze_and_mark(module: nn.Module) -> None:
    """A first start with frozen parameters and a buffer that are not what initialization gives."""
    freeze(module)
    norm = module.get_parameter("model.layers.0.input_layernorm.weight")
    big = module.get_parameter("model.layers.1.mlp.up_proj.weight")
    with torch.no_grad(), deepspeed.zero.GatheredParameters([norm, big], modifier_rank=0):
        norm.copy_(torch.linspace(0.5, 1.5, 32))
        big.mul_(3.0)
    module.get_buffer("counts").copy_(torch.tensor([3.0, 1.0, 4.0]))


def freeze(module: nn.Module) -> None:
    """The same parameters frozen and the same buffer there, as initialized."""
    module.get_parameter("model.layers.0.input_layernorm.weight").requires_grad_(False)
    module.get_parameter("model.layers.1.mlp.up_proj.weight").requires_grad_(False)
    module.register_buffer("counts", torch.zeros(3))


@pytest.mark.parametrize(("stage", "bf16", "after"), [slow(3, False, 3), (3, True, 1), slow(2, True, 2)])
def test_p16_tied_weights_frozen_parameters_and_buffers_come_back(
    tmp_path: Path, stage: int, bf16: bool, after: int
) -> None:
    tied = {**NO_DROPOUT, "tie_word_embeddings": True}
    before = 2 if after != 2 else 3
    run_file = _make(tmp_path, model=tied, deepspeed=deepspeed_json(stage, bf16))
    first = run_ranks(train, before, str(run_file), stop_after=STEP, alter=freeze_and_mark)[0].saved[STEP]
    assert set(first.module) == {
        *("counts", "model.layers.0.input_layernorm.weight", "model.layers.1.mlp.up_proj.weight")
    }
    assert "lm_head.weight" not in first.tensors
    for outcome in run_ranks(train, after, str(run_file), alter=freeze):
        assert outcome.restored is not None
        assert same(outcome.restored.tensors, first.tensors)
        for name, value in first.module.items():
            assert outcome.restored.module[name].tobytes() == value.tobytes()
            assert outcome.finished.module[name].tobytes() == value.tobytes()
    assert first.module["counts"].tolist() == [3.0, 1.0, 4.0]


def _start_from(world: World, run_file: str, folder: str, accept_missing: tuple[str, ...]) -> Any:
    plan = load_plan(run_file)
    with heard() as told:
        found = universal.open_foreign(Path(folder), accept_missing, world)
        engine: Any = run_setup.open_run_engine(plan, world)
        state = universal.load(found, engine, plan.run.seed, world)
    return state, snapshot(engine._engine, world), told


@pytest.mark.parametrize("stage", [slow(2), 3])
def test_a_universal_checkpoint_that_deepspeeds_own_tool_wrote_goes_on_if_what_it_lacks_is_allowed(
    tmp_path: Path, stage: int
) -> None:
    run_file = _make(tmp_path, deepspeed=deepspeed_json(stage))
    saved = run_ranks(train, 2, str(run_file), stop_after=STEP)[0].saved[STEP]
    folder, result = tmp_path / f"out/checkpoints/step_{STEP:09d}", tmp_path / "foreign"
    subprocess.run(
        [
            *(sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"),
            *("--input_folder", str(folder), "--output_folder", str(result), "--num_extract_workers", "1"),
        ],
        check=True,
        capture_output=True,
    )
    lacking = ("manifest", "run_state", "rng")
    for state, restored, told in run_ranks(_start_from, 3, str(run_file), str(result), lacking):
        assert state.step == STEP
        assert same(restored.tensors, saved.tensors)
        assert restored.options == saved.options
        assert set(restored.steps) == {STEP}
        for name, line in zip(lacking, told, strict=False):
            allowed_by = "--trust-pickle" if name == "manifest" else "accept_missing"
            assert line.startswith(f"{result} has no {name}, as {allowed_by} allows: ")
        assert "random streams of ranks 0, 1, 2" in told[3]
