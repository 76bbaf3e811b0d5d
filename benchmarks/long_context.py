"""Long sequences: what they cost in memory, and with --train what they teach.

    python benchmarks/long_context.py [--train]

Memory: the peak of one step of the trainer at 8 times a length of 256, once plain (no recomputation, torch's
own cross-entropy) and once with `recompute` and the loss in chunks, each in a process of its own. A small
step goes first, so weights, moments and buffers are there before anything is counted: the figure is what the
long step needs beyond them. On a CPU that is the growth of the resident set, with an allocator that gives
large blocks back at once; on a GPU, torch's own count. Bar: 0.35.

--train: a byte-level Llama of 0.36M parameters on the source of Python's standard library, two ranks. After
a main phase at 256 one run goes on with a long phase at 1,024, with a higher theta and long documents; the
other goes on at 256 for as many tokens. The loss on positions 256 to 1,024 of held-out files, in samples of
1,024: after the long phase / before it, and with it / without it. Bars: 0.9 each.
"""

import argparse
import json
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, Literal, cast
from unittest.mock import patch

import numpy as np
import torch
from ranks import start_ranks
from report import finish, judge
from torch import Tensor
from torch.nn import functional

from ds_pretrain import train as train_module
from ds_pretrain.config.plan import Plan, load_plan
from ds_pretrain.core.distributed import World
from ds_pretrain.core.errors import Preempted
from ds_pretrain.core.metrics import IGNORED
from ds_pretrain.core.run_files import StopSignal, run_lock
from ds_pretrain.data.indexed import IndexedWriter, open_source
from ds_pretrain.data.loader import Batch, MicroBatch
from ds_pretrain.data.validation_set import make_validation_set
from ds_pretrain.engine.engine import Engine, initialize_distributed
from ds_pretrain.models.pretrained import Pretrained
from ds_pretrain.training import step as step_module
from ds_pretrain.training.resume import StartOptions
from ds_pretrain.training.setup import open_run_engine
from ds_pretrain.training.validation import evaluate

ROOT = Path(__file__).parent.parent
MEMORY_BAR, TRAIN_BAR = 0.35, 0.9
SHORT, LONG = 256, 2048
VOCABULARY = 16384
MODEL = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": LONG,
    "tie_word_embeddings": True,
}
SMALL = {
    **MODEL,
    "vocab_size": 257,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "max_position_embeddings": SHORT,
}
VARIANTS = ("plain", "chunked", "recompute", "both")
MAIN_STEPS, LONG_STEPS = 240, 80
HEAD = """
name = "long_context"
out = "{folder}/{name}"
deepspeed = "{root}/ds_configs/cpu.json"
[model]
config = "{model}"
activation_checkpointing = {recompute}
[schedule]
kind = "wsd"
length = "{steps} steps"
peak_lr = {peak}
warmup = "{warmup} steps"
decay = "20%"
[batch]
tokens = {tokens}
micro_batch_size = {micro}
[sources]
text = {{ path = "{folder}/train", chunk_tokens = 1024 }}
long = {{ path = "{folder}/train", min_document_tokens = 8192 }}
[[phases]]
name = "main"
seq_len = {seq_len}
mixture = {{ text = 1.0 }}
"""
LONG_PHASE = f"""
[[phases]]
name = "long"
start = "{MAIN_STEPS} steps"
seq_len = 1024
micro_batch_size = 2
mixture = {{ text = 0.3, long = 0.7 }}
rope = {{ theta = 8e4 }}
"""
ENDING = """
[checkpoint]
every = "1_000_000 steps"
[monitor]
log_every = 50
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--train", action="store_true", help="train with and without a long phase instead")
    parser.add_argument("--run-file", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--stop-after", type=int, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.variant is not None:
        print(json.dumps(peak_bytes(words.run_file, words.variant)))
        return
    if words.run_file is not None:
        train_and_look(words.run_file, words.stop_after)
        return
    with tempfile.TemporaryDirectory() as folder:
        finish(compare_training(Path(folder)) if words.train else compare_memory(Path(folder)))


def compare_memory(folder: Path) -> list[bool]:
    """The peak of a long step in each variant, and plain against both."""
    write_noise(folder / "train")
    (folder / "model.json").write_text(json.dumps(MODEL))
    peaks: dict[str, int] = {}
    for variant in VARIANTS:
        recompute = "true" if variant in ("recompute", "both") else "false"
        run_file = write_run(
            folder, variant, SHORT, recompute=recompute, model=folder / "model.json", micro=1, tokens=SHORT
        )
        command = [sys.executable, __file__, "--run-file", str(run_file), "--variant", variant]
        frugal = {
            "MALLOC_MMAP_THRESHOLD_": str(1 << 16),
            "MALLOC_TRIM_THRESHOLD_": "0",
            "OMP_NUM_THREADS": "2",
        }
        done = subprocess.run(
            command, env={**os.environ, **frugal}, stdout=subprocess.PIPE, text=True, check=True
        )
        peaks[variant] = json.loads(done.stdout.splitlines()[-1])
        print(
            f"{variant:<9}  {peaks[variant] / 1e6:8.0f} MB beyond the state, a step of {LONG:,} tokens",
            flush=True,
        )
    return [judge("long_context memory", peaks["both"] / peaks["plain"], MEMORY_BAR, "at_most")]


def peak_bytes(run_file: Path, variant: str) -> int:
    """Return the bytes that a step at LONG needs beyond those in use before it, in this process."""
    world = World()
    initialize_distributed(world)
    engine = open_run_engine(load_plan(run_file), world)
    plain = patch.object(step_module, "cross_entropy_and_z", torchs_loss)
    with plain if variant in ("plain", "recompute") else nullcontext():
        step_module.take_step(engine, noise_batch(SHORT), 1e-3, None, world)
        before = reset_peak(engine)
        step_module.take_step(engine, noise_batch(LONG), 1e-3, None, world)
    return peak(engine) - before


def torchs_loss(logits: Tensor, labels: Tensor, z_loss: object) -> tuple[Tensor, Tensor]:
    """Compute the loss as a trainer without its own loss does."""
    flat = logits.float().flatten(0, 1)  # [B * T, V]
    nll = functional.cross_entropy(flat, labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return nll, nll.new_zeros(())


def noise_batch(seq_len: int) -> Batch:
    """One sequence of random tokens."""
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, VOCABULARY, (1, seq_len + 1)))
    micro = MicroBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    return Batch(ids=cast(Any, None), micro_batches=(micro,), num_valid_tokens=seq_len, checksums=())


def reset_peak(engine: Engine) -> int:
    """Forget the peak so far; what lies in memory now."""
    if engine.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return int(torch.cuda.memory_allocated())
    Path("/proc/self/clear_refs").write_text("5")  # man 5 proc_pid_clear_refs: the peak becomes what is now
    return status_bytes("VmRSS")


def peak(engine: Engine) -> int:
    """The most that lay in memory since."""
    return int(torch.cuda.max_memory_allocated()) if engine.device.type == "cuda" else status_bytes("VmHWM")


def status_bytes(name: Literal["VmRSS", "VmHWM"]) -> int:
    """A size of this process as the kernel counts it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def compare_training(folder: Path) -> list[bool]:
    """Three models: before the long phase, after it, and after as many tokens without it."""
    print(runpy.run_path(str(ROOT / "examples/demo.py"))["split_by_file"](folder), flush=True)
    for part in ("train", "validation"):
        write_bytes(folder / "text" / part, folder / part)
    (folder / "model.json").write_text(json.dumps(SMALL))
    more = {
        "recompute": "false",
        "model": folder / "model.json",
        "micro": 8,
        "tokens": 4096,
        "peak": 3e-3,
        "warmup": 25,
        "steps": MAIN_STEPS + LONG_STEPS,
    }
    with_long = write_run(folder, "with", SHORT, LONG_PHASE, **more)
    without = write_run(folder, "without", SHORT, "", **more)
    before = far_loss("before", trained(with_long, MAIN_STEPS))
    shutil.copytree(folder / "with", folder / "without")  # the same main phase; what lies ahead may differ
    longer = far_loss("with", trained(with_long, None))
    shorter = far_loss("without", trained(without, None))
    return [
        judge("long_context after/before the long phase", longer / before, TRAIN_BAR, "at_most"),
        judge("long_context with/without a long phase", longer / shorter, TRAIN_BAR, "at_most"),
    ]


def trained(run_file: Path, stop_after: int | None) -> dict[str, Any]:
    """Train on two ranks, and what is then found of the held-out files."""
    words = [] if stop_after is None else ["--stop-after", str(stop_after)]
    if start_ranks(__file__, run_file, 2, words):
        raise SystemExit(f"{run_file} did not train")
    found: dict[str, Any] = json.loads(run_file.with_suffix(".json").read_text())
    return found


def train_and_look(run_file: Path, stop_after: int | None) -> None:
    """One rank: train as `ds-pretrain train` does, then look at positions up to 1,024. Collective."""
    torch.set_num_threads(1)
    world, plan = World.from_environment(), load_plan(run_file)
    initialize_distributed(world)
    engines: list[Engine] = []

    def opened(plan: Plan, world: World, base: Pretrained | None) -> Engine:
        engines.append(open_run_engine(plan, world, base))
        return engines[-1]

    with (
        patch.object(train_module, "open_run_engine", opened),
        StopSignal(plan.out, world) as stop,
        suppress(Preempted),
    ):
        train_module.train(plan, world, stop, run_lock(plan.out), StartOptions(stop_after))
    source = open_source(run_file.parent / "validation")
    sets = [make_validation_set("held_out", source, seq_len, 1 << 17) for seq_len in (1024, SHORT)]
    seen, short = (evaluate(engines[0], [one], 4, world, retrieval=True) for one in sets)
    if world.is_main:
        found = {"by_position": seen.by_position["held_out"], "retrieval": seen.retrieval["held_out"]["1024"]}
        run_file.with_suffix(".json").write_text(json.dumps({**found, "short": short.losses["held_out"]}))


def far_loss(name: str, found: Mapping[str, Any]) -> float:
    """The mean loss at positions 256 to 1,024; all that was found is printed."""
    by_position = found["by_position"]
    print(f"{name:<8}", "  ".join(f"to {end}: {loss:.3f}" for end, loss in by_position.items()))
    keys = "  ".join(f"{depth} %: {score:.2f}" for depth, score in found["retrieval"].items())
    print(f"{'':<8} in samples of {SHORT}: {found['short']:.3f}; keys at 1,024: {keys}", flush=True)
    return float(by_position["512"] + 2 * by_position["1024"]) / 3


def write_run(folder: Path, name: str, seq_len: int, phases: str = "", **more: object) -> Path:
    """A run file and the run directory that it names."""
    fields = {"peak": 1e-3, "warmup": 1, "steps": 10, **more}
    run_file = folder / f"{name}.toml"
    head = HEAD.format(folder=folder, name=name, root=ROOT, seq_len=seq_len, **fields)
    run_file.write_text(head + phases + ENDING)
    return run_file


def write_noise(prefix: Path) -> None:
    """A source that a run file can name."""
    writer = IndexedWriter(prefix, VOCABULARY)
    writer.add([np.random.default_rng(0).integers(0, 256, 1 << 14)])
    writer.finish({"eos_id": 256})


def write_bytes(folder: Path, prefix: Path) -> None:
    """Each file is a document: its bytes, and 256 at its end."""
    writer = IndexedWriter(prefix, 257)
    for path in sorted(folder.rglob("*.py")):
        writer.add([np.append(np.frombuffer(path.read_bytes(), np.uint8).astype(np.int64), 256)])
    writer.finish({"eos_id": 256})


if __name__ == "__main__":
    main()
