"""Validation measures the same on any number of ranks, and training does not notice it."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from ds_pretrain.config.plan import load_plan
from ds_pretrain.core.distributed import World
from ds_pretrain.core.jsonl import read_metrics
from ds_pretrain.data.loader import read_validation_batches
from ds_pretrain.models.loss import cross_entropy_and_z
from ds_pretrain.training import validation as validation_module
from ds_pretrain.training.preflight import prepare_inputs
from ds_pretrain.training.setup import open_run_engine, open_validation_sets
from ds_pretrain.training.validation import evaluate
from tests.engine.small import build_whole_model
from tests.harness import record_run
from tests.ranks import run_ranks, run_ranks_each
from tests.runs.results import trace, validations
from tests.scenario import deepspeed_json, make_run
from tests.tiers import slow


def _train_and_watch(world: World, run_file: str, overrides: tuple[str, ...]) -> Any:
    """The digest of the trained state, and the inputs of each validation pass on this rank."""
    passes: list[list[Any]] = []
    patch = pytest.MonkeyPatch()
    batches = validation_module.read_validation_batches

    def watched(*args: Any) -> Any:
        passes.append([])
        for micro in batches(*args):
            passes[-1].append((micro.input_ids.tolist(), micro.labels.tolist()))
            yield micro

    patch.setattr(validation_module, "read_validation_batches", watched)
    digest = record_run(world, run_file, overrides).digest
    patch.undo()
    return digest, passes


def test_p09_training_is_bitwise_the_same_with_validation_at_every_step_or_never(tmp_path: Path) -> None:
    """With dropout on, so that one number drawn by a validation would show."""
    outcomes, calls = {}, {}
    for every in ("1 step", "7 steps", "never"):
        run_file = make_run(tmp_path / every, steps=9, save_every="100 steps")
        overrides = () if every == "never" else (f"validation.every={every}",)
        if every == "never":
            head, rest = run_file.read_text().split("[validation]")
            run_file.write_text(f"{head}[checkpoint]{rest.split('[checkpoint]')[1]}")
        calls[every] = (str(run_file), overrides)
    for every, results in zip(calls, run_ranks_each(_train_and_watch, 2, *calls.values()), strict=True):
        out = tmp_path / every / "out"
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
    """What the loop finds of fresh weights, twice; plain torch's loss of each token; the mode afterwards."""
    plan = load_plan(run_file)
    [sets] = open_validation_sets(plan, prepare_inputs(plan, world).validation).values()
    engine = open_run_engine(plan, world)
    gathered = []
    patch = pytest.MonkeyPatch()
    gather = validation_module.gather_rows
    patch.setattr(validation_module, "gather_rows", lambda *a: (gathered.append(1), gather(*a))[1])
    first, second = (evaluate(engine, sets, 2, world) for _ in range(2))
    patch.undo()
    model = build_whole_model(plan).eval()
    [chosen] = sets
    rows = torch.from_numpy(chosen.source.samples(chosen.indices, chosen.seq_len))  # [n, T + 1]
    with torch.no_grad():
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits  # [n, T, V]
    losses = functional.cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none")  # [n, T]
    module = engine._engine.module  # type: ignore[attr-defined]
    before = _as_before(engine, chosen, world)
    return first, second, losses.double().tolist(), module.training, len(gathered), before


def _as_before(engine: Any, chosen: Any, world: World) -> float | None:
    """The mean as it was taken before there were positions, on one rank."""
    if world.size > 1:
        return None
    nll, count = 0.0, 0
    with engine.evaluation_mode():
        for micro in read_validation_batches(chosen, world, 2):
            logits = engine.logits(micro.input_ids)
            nll += cross_entropy_and_z(logits, micro.labels, None)[0].item()
            count += int((micro.labels >= 0).sum())
    return nll / count


@pytest.mark.parametrize("stage", [slow(1), 3])
def test_the_validation_loss_is_plain_torchs_mean_on_any_number_of_ranks(tmp_path: Path, stage: int) -> None:
    """P-43: seven samples, which neither 2 nor 3 ranks nor micro-batches of 2 divide; no rank waits."""
    run_file = make_run(tmp_path, micro_batch_size=2, batch_tokens=16 * 12, deepspeed=deepspeed_json(stage))
    run_file.write_text(run_file.read_text().replace("tokens = 160\n", f"tokens = {7 * 16}\n"))
    for num_ranks in (1, 2, 3):
        for first, second, losses, training, num_gathered, before in run_ranks(
            _evaluate, num_ranks, str(run_file)
        ):
            expected = torch.tensor(losses)  # [n, T]
            assert expected.shape == (7, 16)
            assert first == second
            assert first.losses == {"held_out": pytest.approx(expected.mean().item(), rel=1e-6)}
            assert before in (None, first.losses["held_out"])
            assert training
            spans = {"1": (0, 1), "2": (1, 2), "4": (2, 4), "8": (4, 8), "16": (8, 16)}
            assert first.by_position == {
                "held_out": {
                    end: pytest.approx(expected[:, slice(*span)].mean().item(), rel=1e-6)
                    for end, span in spans.items()
                }
            }
            assert first.retrieval == {}
            assert num_gathered == 2  # one for each of the two


def _evaluate_masked(world: World, run_file: str) -> Any:
    """By position with documents kept apart; plain torch on each document by itself."""
    plan = load_plan(run_file)
    [sets] = open_validation_sets(plan, prepare_inputs(plan, world).validation).values()
    engine = open_run_engine(plan, world)
    found = evaluate(engine, sets, 2, world)
    model = build_whole_model(plan).eval()
    alone: dict[int, list[float]] = {}
    [chosen] = sets
    for index in chosen.indices.tolist():
        row = torch.from_numpy(chosen.source.sample(index, chosen.seq_len))  # [T + 1]
        starts = chosen.source.document_starts(index * chosen.seq_len, chosen.seq_len + 1).tolist()
        edges = sorted({0, *starts, len(row)})
        for start, stop in pairwise(edges):
            if stop - start < 2:
                continue
            with torch.no_grad():
                logits = model(input_ids=row[None, start : stop - 1], use_cache=False).logits[0]
            losses = functional.cross_entropy(logits, row[start + 1 : stop], reduction="none")
            for position, loss in enumerate(losses.tolist()):
                alone.setdefault(position, []).append(loss)
    return found, alone


def test_with_documents_kept_apart_a_position_is_that_in_the_document(tmp_path: Path) -> None:
    run_file = make_run(tmp_path)
    text = run_file.read_text().replace("seq_len = 16", "seq_len = 64")
    text = text.replace("qk_norm = true", "qk_norm = true\nmask_documents = true")
    run_file.write_text(
        text.replace("tokens = 160\n", "tokens = 320\n").replace("tokens = 128", "tokens = 512")
    )
    for num_ranks in (1, 2):
        for found, alone in run_ranks(_evaluate_masked, num_ranks, str(run_file)):
            ends = [1, 2, 4, 8, 16, 32, 64]
            expected = {}
            for before, end in zip([0, *ends], ends, strict=False):
                losses = [loss for at in range(before, end) for loss in alone.get(at, [])]
                expected[str(end)] = pytest.approx(sum(losses) / len(losses), rel=1e-5)
            assert found.by_position == {"held_out": expected}
            every = [loss for losses in alone.values() for loss in losses]
            assert found.losses == {"held_out": pytest.approx(sum(every) / len(every), rel=1e-5)}
            assert sum(len(losses) for at, losses in alone.items() if at == 0) > 5  # several in a row


def _retrieve(world: World, run_file: str) -> Any:
    plan = load_plan(run_file)
    [sets] = open_validation_sets(plan, prepare_inputs(plan, world).validation).values()
    engine = open_run_engine(plan, world)
    streams = torch.get_rng_state().tolist()
    logits = engine.logits
    engine.logits = lambda *a: (torch.rand(1), logits(*a))[1]  # type: ignore[method-assign]  # as a model may
    found, plain = evaluate(engine, sets, 2, world, True), evaluate(engine, sets, 2, world)
    again = evaluate(engine, sets, 2, world, True)
    return found, again, plain, torch.get_rng_state().tolist() == streams


def test_retrieval_is_the_same_on_any_number_of_ranks_and_moves_nothing(tmp_path: Path) -> None:
    run_file = make_run(tmp_path)
    text = (
        run_file.read_text().replace("seq_len = 16", "seq_len = 128").replace("tokens = 128", "tokens = 1536")
    )
    run_file.write_text(text.replace("tokens = 160", "tokens = 640"))
    results = [result for ranks in (1, 2, 3) for result in run_ranks(_retrieve, ranks, str(run_file))]
    first = results[0][0].retrieval["held_out"]
    assert {length: list(found) for length, found in first.items()} == {
        length: ["0", "25", "50", "75", "100"] for length in ("64", "128")
    }
    for found, again, plain, still in results:
        assert again == found
        assert (found.losses, found.by_position) == (plain.losses, plain.by_position)
        assert still
        for length, scores in first.items():
            assert found.retrieval["held_out"][length] == pytest.approx(scores, abs=1e-5)


def test_a_run_puts_positions_and_keys_on_file_where_it_is_asked_to(tmp_path: Path) -> None:
    calls = []
    for name, asked in (("asked", ("validation.retrieval=true",)), ("plain", ())):
        run_file = make_run(tmp_path / name, steps=4, batch_tokens=256)
        overrides = ("phases.0.seq_len=64", "batch.micro_batch_size=1", "validation.every=4 steps", *asked)
        calls.append((str(run_file), overrides))
    run_ranks_each(record_run, 2, *calls)
    asked_for, plain = (
        next(r for r in read_metrics(tmp_path / name / "out/metrics.jsonl") if r["event"] == "validation")
        for name in ("asked", "plain")
    )
    assert list(plain["by_position"]["held_out"]) == ["1", "2", "4", "8", "16", "32", "64"]
    assert "retrieval" not in plain
    assert list(asked_for["retrieval"]["held_out"]) == ["64"]
    for key in ("losses", "by_position"):
        assert asked_for[key] == plain[key]
