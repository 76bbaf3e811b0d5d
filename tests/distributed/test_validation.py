"""Validation measures the same on any number of ranks, and training does not notice it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from ds_pretrain import step as step_module
from ds_pretrain.opening import open_run_engine, prepare_inputs, validation_sets
from ds_pretrain.plan import load_plan
from ds_pretrain.step import evaluate
from ds_pretrain.world import World
from tests.distributed.small import whole_model
from tests.ranks import run_ranks
from tests.runs.golden import run_rank, trace, validations
from tests.scenario import deepspeed_json, make_run


def _train_and_watch(world: World, run_file: str, overrides: tuple[str, ...]) -> Any:
    """The digest of the trained state, and the inputs of each validation pass on this rank."""
    passes: list[list[Any]] = []
    patch = pytest.MonkeyPatch()
    batches = step_module.validation_batches

    def watched(*args: Any) -> Any:
        passes.append([])
        for micro in batches(*args):
            passes[-1].append((micro.input_ids.tolist(), micro.labels.tolist()))
            yield micro

    patch.setattr(step_module, "validation_batches", watched)
    digest, _, _ = run_rank(world, run_file, None, overrides)
    patch.undo()
    return digest, passes


def test_p09_training_is_bitwise_the_same_with_validation_at_every_step_or_never(tmp_path: Path) -> None:
    """With dropout on, so that one number drawn by a validation would show."""
    outcomes = {}
    for every in ("1 step", "7 steps", "never"):
        run_file = make_run(tmp_path / every, steps=9, save_every="100 steps")
        overrides = () if every == "never" else (f"validation.every={every}",)
        if every == "never":
            head, rest = run_file.read_text().split("[validation]")
            run_file.write_text(f"{head}[checkpoint]{rest.split('[checkpoint]')[1]}")
        results = run_ranks(_train_and_watch, 2, str(run_file), overrides)
        out = run_file.parent / "out"
        outcomes[every] = [digest for digest, _ in results], trace(out)
        num_passes = {"1 step": 9, "7 steps": 2, "never": 0}[every]  # the last step is always validated
        assert len(validations(out)) == num_passes
        for _, passes in results:
            assert len(passes) == num_passes
            assert all(batches == passes[0] for batches in passes)
    assert outcomes["1 step"] == outcomes["7 steps"] == outcomes["never"]
    assert len(outcomes["never"][1]) == 9
    at_every_step = validations(tmp_path / "1 step" / "out")
    assert len({losses["held_out"] for losses in at_every_step.values()}) == 9
    seven = validations(tmp_path / "7 steps" / "out")
    assert seven == {step: at_every_step[step] for step in (7, 9)}


def _evaluate(world: World, run_file: str) -> Any:
    """The loss of fresh weights by the loop and by plain torch on the same samples; the mode afterwards."""
    plan = load_plan(run_file)
    sets = validation_sets(plan, prepare_inputs(plan, world))
    engine = open_run_engine(plan, world)
    first, second = (evaluate(engine, plan, sets, world) for _ in range(2))
    model = whole_model(plan).eval()
    expected = {}
    for chosen in sets:
        rows = torch.from_numpy(chosen.source.samples(chosen.indices, chosen.seq_len))  # [n, T + 1]
        with torch.no_grad():
            logits = model(input_ids=rows[:, :-1], use_cache=False).logits  # [n, T, V]
        expected[chosen.name] = functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item()
    module = engine._engine.module  # type: ignore[attr-defined]
    return first, second, expected, len(sets[0].indices), module.training


@pytest.mark.parametrize("stage", [1, 3])
def test_the_validation_loss_is_plain_torchs_mean_on_any_number_of_ranks(tmp_path: Path, stage: int) -> None:
    """P-43: seven samples, which neither 2 nor 3 ranks nor micro-batches of 2 divide; no rank waits."""
    run_file = make_run(tmp_path, micro_sequences=2, batch_tokens=16 * 12, deepspeed=deepspeed_json(stage))
    run_file.write_text(run_file.read_text().replace("tokens = 160\n", f"tokens = {7 * 16}\n"))
    for num_ranks in (1, 2, 3):
        for first, second, expected, num_samples, training in run_ranks(_evaluate, num_ranks, str(run_file)):
            assert num_samples == 7
            assert first == second
            assert first == {"held_out": pytest.approx(expected["held_out"], rel=1e-6)}
            assert training
