"""The watchdog's cost per step of the trainer's loop: seconds and collectives.

    python benchmarks/watchdog_cost.py [--ranks 2] [--steps 200]

The loop is `ds_pretrain.train.train` itself with the watchdog acting, `skip_update_sigmas` set, and a full
window.
Within its real steps the calls that are the watchdog's are timed: the limit for the norm, showing it to
DeepSpeed, the judgement with all that is kept of each rank, and the note of healthy steps. Not on and off in
turn: half a percent of a step is far below what steps differ by from one to the next, and what it adds are
calls in one thread that nothing waits for. Each rank's loss travels in the one row that is reduced anyway.

The Llama of `examples/nanogpt_llama.json`: 0.8M parameters, 768 tokens a step, on two ranks with a core each.
It is the least that anyone trains, so steps are as short as they come; larger ones only lower the watchdog's
share. That is taken over blocks of ten steps, in each of which the spreads are refreshed once. Bar: 0.005,
and one collective of ours a step.
"""

import argparse
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from collectives import counted
from ranks import start_ranks
from report import finish, judge, spread

from ds_pretrain.config.plan import load_plan
from ds_pretrain.core.distributed import World
from ds_pretrain.core.run_files import StopSignal, run_lock
from ds_pretrain.data.indexed import IndexedWriter
from ds_pretrain.engine import engine as engine_module
from ds_pretrain.engine.engine import Update, ZeroEngine, initialize_distributed
from ds_pretrain.engine.skip_step import skip_updates_above
from ds_pretrain.train import train
from ds_pretrain.training.rollback import Watchdog
from ds_pretrain.training.saver import Saver

ROOT = Path(__file__).parent.parent
WARM_UP = 220  # steps: the window of 200 is full
BLOCK_STEPS = 10
BAR = 0.005
CALLS = ((Watchdog, "norm_limit"), (Watchdog, "judge"), (Saver, "note_health"))
RUN = """
name = "watchdog_cost"
out = "{folder}/out"
deepspeed = "{root}/ds_configs/cpu.json"
[model]
config = "{root}/examples/nanogpt_llama.json"
[schedule]
kind = "cosine"
length = "{steps} steps"
peak_lr = 1e-3
warmup = "5 steps"
[batch]
tokens = 768
micro_batch_size = {micro_batch_size}
[sources]
noise = "{folder}/noise"
[[phases]]
name = "main"
seq_len = 64
mixture = {{ noise = 1.0 }}
[checkpoint]
every = "1_000_000 steps"
[watchdog]
skip_update_sigmas = 100.0
"""


class Spent:
    """Seconds of the watchdog's calls and of whole steps, and our collectives, step by step."""

    def __init__(self, counts: Counter[tuple[str, str]]) -> None:
        self._counts, self._watchdog, self._num_ours = counts, 0.0, 0
        self._step, self._since = ZeroEngine.step, perf_counter()
        self.watchdog: list[float] = []
        self.steps: list[float] = []
        self.collectives: list[int] = []

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, its seconds kept."""

        def wrapper(*args: Any) -> Any:
            since = perf_counter()
            result = call(*args)
            self._watchdog += perf_counter() - since
            return result

        return wrapper

    @contextmanager
    def dropping(self, optimizer: Any, limit: float | None) -> Iterator[list[float]]:
        """`dropping_above`, but for what it surrounds."""
        since = perf_counter()
        with skip_updates_above(optimizer, limit) as dropped:
            self._watchdog += perf_counter() - since
            yield dropped
            since = perf_counter()
        self._watchdog += perf_counter() - since

    def step(self, engine: ZeroEngine, rate: float, norm_limit: float | None = None) -> Update:
        """A step ends where that of the engine does."""
        update = self._step(engine, rate, norm_limit)
        num_ours = sum(num for (package, _), num in self._counts.items() if package == "ds_pretrain")
        self.watchdog.append(self._watchdog)
        self.steps.append(perf_counter() - self._since)
        self.collectives.append(num_ours - self._num_ours)
        self._watchdog, self._num_ours, self._since = 0.0, num_ours, perf_counter()
        return update


def measure_rank(run_file: Path) -> Spent:
    """Train on this rank."""
    world = World.from_environment()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world.size))
    initialize_distributed(world)
    plan = load_plan(run_file)
    with counted() as counts:
        spent = Spent(counts)
        patches = [patch.object(kind, name, spent.timed(getattr(kind, name))) for kind, name in CALLS]
        patches.append(patch.object(ZeroEngine, "step", lambda *args: spent.step(*args)))
        patches.append(patch.object(engine_module, "skip_updates_above", spent.dropping))
        for each in patches:
            each.start()
        with StopSignal(plan.out, world) as stop:
            train(plan, world, stop, run_lock(plan.out))
    return spent


def write_run(folder: Path, ranks: int, steps: int) -> Path:
    """A run file over random tokens; the path of it."""
    random = np.random.default_rng(0)
    writer = IndexedWriter(folder / "noise", 66)
    writer.add([random.integers(0, 66, 1_000) for _ in range(500)])
    writer.finish({"eos_id": 65})
    run_file = folder / "run.toml"
    run_file.write_text(RUN.format(folder=folder, root=ROOT, steps=steps, micro_batch_size=12 // ranks))
    return run_file


def report(spent: Spent) -> None:
    """Print the calls, the steps and their ratio, and end the process."""
    calls, steps = np.array(spent.watchdog[WARM_UP:]), np.array(spent.steps[WARM_UP:])
    blocks = len(steps) // BLOCK_STEPS
    print(f"the watchdog:  {spread(calls.tolist(), 'us a step', 1e6)}")
    print(f"a step:        {spread(steps.tolist(), 'ms', 1e3)}")
    shares = [
        float(calls[at : at + BLOCK_STEPS].sum() / steps[at : at + BLOCK_STEPS].sum())
        for at in range(0, blocks * BLOCK_STEPS, BLOCK_STEPS)
    ]
    print(f"its share of each of {blocks} blocks of ten steps: {spread(shares)}")
    ordinary = spent.collectives[WARM_UP:]  # the last save comes after the last step
    finish(
        [
            judge("watchdog: its calls / a step", float(np.median(shares)), BAR, "at_most"),
            judge("collectives of ours in a step", max(ordinary), 1, "at_most"),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="What the watchdog adds to a step.")
    parser.add_argument("--ranks", type=int, choices=(2, 4), default=2)
    parser.add_argument("--steps", type=int, default=200, help="after a window that fills first")
    parser.add_argument("--run-file", type=Path, help=argparse.SUPPRESS)  # this process is one rank
    words = parser.parse_args()
    if words.run_file is None:
        with tempfile.TemporaryDirectory() as name:
            run_file = write_run(Path(name), words.ranks, WARM_UP + words.steps)
            sys.exit(start_ranks(__file__, run_file, words.ranks))
    spent = measure_rank(words.run_file)
    if World.from_environment().is_main:
        report(spent)


if __name__ == "__main__":
    main()
