"""A step of the trainer's loop against a step of a bare DeepSpeed loop: same engine, same batches, in turn.

    python benchmarks/step_overhead.py [--ranks 2] [--rounds 12]

Ours is `ds_pretrain.train.train` itself, untouched: only the `step` of the engine that it opens is wrapped,
and after every ten it takes ten bare ones before it lets the loop go on. A step lasts from the end of one
optimizer step to the end of the next, so all that the loop does for a step lies in it: the feed, the loss,
the reduction over ranks, the record and its line of metrics.jsonl, the terminal, each check of what is due.
The bare side takes the batches that ours just took, read before: forward, torch's cross-entropy in fp32,
backward, step.

The 5M-parameter Llama of examples/, fp32, ZeRO-3, two ranks with a core each: with one rank there would be
no reduction to pay for. Bar: the median of ours at most 1.03 times that of the bare loop. The ratio of CPU
times, which other work on the machine moves less, is printed for comparison.
"""

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, Literal, NamedTuple, cast
from unittest.mock import patch

import numpy as np
import torch
from ranks import start_ranks
from report import finish, judge, spread
from torch.nn.functional import cross_entropy

from ds_pretrain import train as train_module
from ds_pretrain.config.plan import Plan, load_plan
from ds_pretrain.core.distributed import World, gather_objects
from ds_pretrain.core.run_files import StopSignal, run_lock
from ds_pretrain.core.state import RunState
from ds_pretrain.data.indexed import IndexedWriter
from ds_pretrain.data.loader import MicroBatch
from ds_pretrain.engine.engine import Engine, Update, ZeroEngine, initialize_distributed
from ds_pretrain.models.pretrained import Pretrained
from ds_pretrain.training.preflight import open_inputs
from ds_pretrain.training.setup import open_loader, open_run_engine

ROOT = Path(__file__).parent.parent
BLOCK_STEPS = 10
BAR = 1.03
RUN = """
name = "step_overhead"
out = "{folder}/out"
deepspeed = "{root}/ds_configs/cpu.json"
[model]
config = "{root}/examples/llama_5m.json"
[schedule]
kind = "cosine"
length = "{steps} steps"
peak_lr = 1e-3
warmup = "5 steps"
[batch]
tokens = 2048
micro_batch_size = {micro_batch_size}
[sources]
noise = "{folder}/noise"
[[phases]]
name = "main"
seq_len = 256
mixture = {{ noise = 1.0 }}
[checkpoint]
every = "1_000_000 steps"
"""


class Instant(NamedTuple):
    """A moment, or the time between two: seconds on the wall, seconds of this process on its cores."""

    wall: float
    cpu: float

    @staticmethod
    def now() -> "Instant":
        return Instant(perf_counter(), process_time())

    def until_now(self) -> "Instant":
        return Instant(perf_counter() - self.wall, process_time() - self.cpu)


Block = list[Instant]  # of each step


class InTurn:
    """Stands in for the `step` of the loop's engine: tells the time, takes bare steps between blocks."""

    def __init__(self, engine: ZeroEngine, batches: list[tuple[MicroBatch, ...]]) -> None:
        self._step, self._deepspeed, self._batches = engine.step, engine._engine, batches
        self._num_steps, self._since = 0, Instant.now()
        self.ours: list[Block] = []
        self.bare: list[Block] = []

    def step(self, rate: float, norm_limit: float | None = None) -> Update:
        update = self._step(rate, norm_limit)
        if self._num_steps % BLOCK_STEPS == 0:
            self.ours.append([])
        self.ours[-1].append(self._since.until_now())
        self._num_steps += 1
        if self._num_steps % BLOCK_STEPS == 0:
            self.bare.append(self._bare_block(self._num_steps - BLOCK_STEPS))
        self._since = Instant.now()
        return update

    def _bare_block(self, first: int) -> Block:
        block = []
        for micro_batches in self._batches[first : first + BLOCK_STEPS]:
            since = Instant.now()
            bare_step(self._deepspeed, micro_batches)
            block.append(since.until_now())
        return block


def bare_step(deepspeed: Any, micro_batches: tuple[MicroBatch, ...]) -> None:
    """Take a step as a loop written straight on DeepSpeed does. The learning rate stays as it is."""
    for micro in micro_batches:
        logits = deepspeed(input_ids=micro.input_ids, use_cache=False).logits  # [B, T, V]
        loss = cross_entropy(logits.float().view(-1, logits.shape[-1]), micro.labels.view(-1))
        deepspeed.backward(loss / len(micro_batches), scale_wrt_gas=False)
    deepspeed.step()


def measure_rank(run_file: Path) -> tuple[list[Block], list[Block]]:
    """Train on this rank; the blocks of our loop and of the bare one, without those that warm up."""
    world = World.from_environment()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world.size))
    initialize_distributed(world)
    plan = load_plan(run_file)
    batches = read_batches(plan, world)
    in_turn: list[InTurn] = []

    def open_in_turn(plan: Plan, world: World, base: Pretrained | None) -> Engine:
        engine = cast(ZeroEngine, open_run_engine(plan, world, base))
        in_turn.append(InTurn(engine, batches))
        vars(engine)["step"] = in_turn[0].step
        return engine

    with patch.object(train_module, "open_run_engine", open_in_turn), StopSignal(plan.out, world) as stop:
        train_module.train(plan, world, stop, run_lock(plan.out))
    return in_turn[0].ours[1:], in_turn[0].bare[1:]


def read_batches(plan: Plan, world: World) -> list[tuple[MicroBatch, ...]]:
    """This rank's micro-batches of every step."""
    with open_loader(plan, open_inputs(plan).sources, world) as feed:
        return [feed.at(RunState(step)).micro_batches for step in range(plan.last_step)]


def write_run(folder: Path, ranks: int, rounds: int) -> Path:
    """A run file over random tokens; the path of it."""
    random = np.random.default_rng(0)
    writer = IndexedWriter(folder / "noise", 4096)
    writer.add([random.integers(0, 4096, 1_000) for _ in range(1_000)])
    writer.finish({"eos_id": 0})
    run_file = folder / "run.toml"
    steps = (rounds + 1) * BLOCK_STEPS
    text = RUN.format(folder=folder, root=ROOT, steps=steps, micro_batch_size=8 // ranks)
    run_file.write_text(text)
    return run_file


def report(ours: list[Block], bare: list[Block]) -> None:
    """Print both sides and their ratio, and end the process."""
    print(f"our loop:   {spread([step.wall for block in ours for step in block], 'ms a step', 1e3)}")
    print(f"bare loop:  {spread([step.wall for block in bare for step in block], 'ms a step', 1e3)}")
    blocks = [
        statistics.median(step.wall for step in mine) / statistics.median(step.wall for step in theirs)
        for mine, theirs in zip(ours, bare, strict=True)
    ]
    print(f"ratio in each of {len(blocks)} pairs of blocks: {spread(blocks)}")
    print(f"ratio of the CPU time of rank 0: {median_ratio(ours, bare, 'cpu'):.4g}")
    ratio = median_ratio(ours, bare, "wall")
    finish([judge("step: our loop / bare DeepSpeed loop", ratio, BAR, "at_most")])


def median_ratio(ours: list[Block], bare: list[Block], clock: Literal["wall", "cpu"]) -> float:
    """The median step of ours over that of the bare loop."""
    mine, theirs = (
        statistics.median(float(getattr(step, clock)) for block in side for step in block)
        for side in (ours, bare)
    )
    return mine / theirs


def main() -> None:
    parser = argparse.ArgumentParser(description="Our step against a bare DeepSpeed step.")
    parser.add_argument("--ranks", type=int, choices=(1, 2, 4), default=2)
    parser.add_argument("--rounds", type=int, default=12, help="blocks of ten steps, of each")
    parser.add_argument("--run-file", type=Path, help=argparse.SUPPRESS)  # this process is one rank
    words = parser.parse_args()
    if words.run_file is None:
        with tempfile.TemporaryDirectory() as name:
            run_file = write_run(Path(name), words.ranks, words.rounds)
            sys.exit(start_ranks(__file__, run_file, words.ranks))
    results = measure_rank(words.run_file)
    everyone = gather_objects(World.from_environment(), results)
    if World.from_environment().is_main:
        report(*everyone[0])  # ranks wait for one another in every step: each sees the same times


if __name__ == "__main__":
    main()
