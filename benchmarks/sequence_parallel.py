"""Sequences that two ranks share (`sequence_parallel_size`): what they compute, and the memory a rank needs.

    python benchmarks/sequence_parallel.py

Exactness: three steps of a small Llama with QK-norm, grouped key-value heads and z-loss, fp32, under each
ZeRO stage, against plain torch on the whole sequences in one process. The largest relative error of a loss,
of a gradient norm, and of the weights after the steps (by the largest of each tensor). Adam's epsilon is as
large as gradients are, so that their scale shows and the noise of tiny ones does not. Bar: 10 millionths.

Memory: the peak of a step of 4,096 tokens with `recompute` and the loss in chunks, the model and the counting
of `long_context.py`, on two ranks that share the sequence / on two that have one each. The higher of the two
ranks. Bar: 0.7.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import deepspeed
import numpy as np
import torch
from long_context import MODEL, SHORT, noise_batch, peak, reset_peak, write_noise, write_run
from ranks import start_ranks
from report import finish, judge
from torch.nn import functional

from ds_pretrain.commands.sample import build_whole_model
from ds_pretrain.config.plan import Plan, load_plan
from ds_pretrain.core.distributed import World, gather_rows
from ds_pretrain.data.loader import Batch, MicroBatch
from ds_pretrain.engine.engine import initialize_distributed
from ds_pretrain.models.param_groups import build_parameter_groups
from ds_pretrain.training.setup import open_run_engine
from ds_pretrain.training.step import take_step

ROOT = Path(__file__).parent.parent
ERROR_BAR, MEMORY_BAR = 10.0, 0.7
LONG = 4096
STEPS, SEQUENCES, RATE, Z_LOSS = 3, 4, 1e-2, 1e-4
TINY = {
    **MODEL,
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
VARIANTS = {"ZeRO-1": (1, "false"), "ZeRO-2": (2, "false"), "ZeRO-3": (3, "false"), "recompute": (3, "true")}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run-file", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--measure", choices=("errors", "memory"), help=argparse.SUPPRESS)
    parser.add_argument("--deepspeed", help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.run_file is not None:
        plan = load_plan(words.run_file, [f"deepspeed={words.deepspeed}", "model.qk_norm=true"])
        measure(plan, words.measure, words.run_file)
        return
    with tempfile.TemporaryDirectory() as folder:
        finish([compare_with_torch(Path(folder)), compare_memory(Path(folder))])


def compare_with_torch(folder: Path) -> bool:
    """The errors of each variant, and the largest of all."""
    write_noise(folder / "train")
    (folder / "tiny.json").write_text(json.dumps(TINY))
    errors: list[float] = []
    print(f"{'':<10} largest relative error of  loss     norm     weights")
    for name, (stage, recompute) in VARIANTS.items():
        run_file = write_run(
            folder, name, SHORT, recompute=recompute, model=folder / "tiny.json", micro=1, tokens=SHORT
        )
        found = on_two_ranks(folder, run_file, "errors", 2, stage)
        print(f"{name:<10} {'':<26} " + "  ".join(f"{error:.1e}" for error in found), flush=True)
        errors += found
    return judge("sequence_parallel error in millionths", max(errors) * 1e6, ERROR_BAR, "at_most")


def compare_memory(folder: Path) -> bool:
    """The peak of a rank that shares a long sequence, and of one that has it alone."""
    (folder / "model.json").write_text(json.dumps({**MODEL, "max_position_embeddings": LONG}))
    run_file = write_run(
        folder, "memory", SHORT, recompute="true", model=folder / "model.json", micro=1, tokens=2 * SHORT
    )
    frugal = {"MALLOC_MMAP_THRESHOLD_": str(1 << 16), "MALLOC_TRIM_THRESHOLD_": "0"}
    peaks = {}
    for shared in (1, 2):
        with patch.dict(os.environ, {**frugal, "OMP_NUM_THREADS": "1"}):
            [peaks[shared]] = on_two_ranks(folder, run_file, "memory", shared, 3)
        print(
            f"{shared} of 2 ranks a sequence  {peaks[shared] / 1e6:8.0f} MB a rank beyond the state, "
            f"sequences of {LONG:,} tokens",
            flush=True,
        )
    return judge("sequence_parallel memory", peaks[2] / peaks[1], MEMORY_BAR, "at_most")


def on_two_ranks(folder: Path, run_file: Path, what: str, shared: int, stage: int) -> list[float]:
    """Measure with two ranks, `shared` of which share each sequence."""
    config = json.loads((ROOT / "ds_configs/cpu.json").read_text()) | {"sequence_parallel_size": shared}
    config["optimizer"]["params"] |= {"eps": 1e-2}
    config["zero_optimization"] |= {"stage": stage, "overlap_comm": stage == 3}
    file = folder / f"zero{stage}_{shared}.json"
    file.write_text(json.dumps(config))
    if start_ranks(__file__, run_file, 2, ["--measure", what, "--deepspeed", str(file)]):
        raise SystemExit(f"{run_file} did not run")
    found: list[float] = json.loads(run_file.with_suffix(".json").read_text())
    return found


def measure(plan: Plan, what: str, run_file: Path) -> None:
    """One rank. Collective."""
    world = World.from_environment()
    initialize_distributed(world)
    found = gather_rows(world, errors(plan, world) if what == "errors" else [peak_bytes(plan, world)])
    if world.is_main:
        run_file.with_suffix(".json").write_text(json.dumps(found.max(axis=0).tolist()))


def peak_bytes(plan: Plan, world: World) -> int:
    """Return the bytes that a step at LONG needs beyond those in use before it, on this rank."""
    engine = open_run_engine(plan, world)
    take_step(engine, noise_batch(SHORT), 1e-3, None, world)
    before = reset_peak(engine)
    take_step(engine, noise_batch(LONG), 1e-3, None, world)
    return peak(engine) - before


def errors(plan: Plan, world: World) -> list[float]:
    """Return the errors of losses, norms and weights against torch in this process. Collective."""
    engine = open_run_engine(plan, world)
    losses, norms, weights = in_torch(plan)
    found = np.zeros(3)
    for step in range(STEPS):
        rows = tokens(step)  # [S, T + 1]
        micro = tuple(MicroBatch(rows[i : i + 1, :-1], rows[i : i + 1, 1:]) for i in range(SEQUENCES))
        batch = Batch(cast(Any, None), micro, SEQUENCES * SHORT, ())
        sums, update = take_step(engine, batch, RATE, Z_LOSS, world)
        loss = gather_rows(world, sums.tolist())[:, :2].sum() / batch.num_valid_tokens
        off = abs(loss / losses[step] - 1), abs((update.grad_norm or 0.0) / norms[step] - 1)
        found[:2] = np.maximum(found[:2], off)
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            off_weight = (parameter.detach() - weights[name]).abs().max() / weights[name].abs().max()
        found[2] = max(found[2], float(off_weight))
    return [float(error) for error in found]


def in_torch(plan: Plan) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, gradient norms and weights of plain torch on whole sequences."""
    model, losses, norms = build_whole_model(plan), [], []
    params = plan.deepspeed["optimizer"]["params"]
    options = {"betas": tuple(params["betas"]), "eps": params["eps"], "weight_decay": params["weight_decay"]}
    optimizer = torch.optim.AdamW(build_parameter_groups(model, decay_embeddings=False), lr=RATE, **options)
    for step in range(STEPS):
        rows = tokens(step)  # [S, T + 1]
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits.flatten(0, 1)  # [S * T, V]
        loss = functional.cross_entropy(logits, rows[:, 1:].flatten())
        loss = loss + Z_LOSS * logits.logsumexp(-1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        clip = float(plan.deepspeed["gradient_clipping"])
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, {name: p.detach() for name, p in model.named_parameters()}


def tokens(step: int) -> torch.Tensor:
    """Random ones: [S, T + 1]."""
    return torch.from_numpy(np.random.default_rng(step).integers(0, 257, (SEQUENCES, SHORT + 1)))


if __name__ == "__main__":
    main()
