"""The cost of our save and restore against DeepSpeed's: one engine, one disk, in turn.

    python benchmarks/checkpoint.py [--ranks 2] [--rounds 7]

A Llama of 55M parameters, fp32, ZeRO-3, two ranks.

* stall: the time that training stands still for one of our saves (until the loop goes on, in the next step
  until its masters are copied, and between later steps to take the save to its end) over
  `engine.save_checkpoint`. The first save, which allocates the buffers, is told apart.
* a step while files are written behind it over a quiet step. The writing wants a core of its own: the bar
  is only judged where there are more cores than ranks.
* restore: ours finds the newest checkpoint, checks every byte and loads it; the other is
  `engine.load_checkpoint` of the same files. The bar is for a start: files are not in the page cache, as on
  a host that comes up. With everything in the cache is told too: then the checksum alone takes as long as
  DeepSpeed's load. CPU time, which other work on the machine moves less, is told beside both.
* bytes that a rank reads at a restore, over its own files, for each of the two times that it reads them.

Every round takes both sides in turn; the slowest rank counts.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import torch
from ranks import start_ranks
from report import finish, judge, spread

from ds_pretrain.checkpoint import restore as restore_module
from ds_pretrain.checkpoint.manifest import Manifest, owner_rank, step_name
from ds_pretrain.checkpoint.save import SaveProgress, Saves
from ds_pretrain.checkpoint.storage import StorageLayout
from ds_pretrain.config.plan import load_plan
from ds_pretrain.core.distributed import World, barrier, broadcast_from_main, gather_rows
from ds_pretrain.core.state import RunState
from ds_pretrain.data.indexed import IndexedWriter
from ds_pretrain.engine.engine import ZeroEngine, initialize_distributed
from ds_pretrain.models.loss import cross_entropy_and_z
from ds_pretrain.training.setup import open_run_engine

ROOT = Path(__file__).parent.parent
STALL_BAR, STEP_BAR, RESTORE_BAR, BYTES_BAR = 0.10, 1.10, 1.25, 1.1
QUIET_STEPS = 1  # before each save
MODEL = {
    "model_type": "llama",
    "vocab_size": 16384,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
}
RUN = """
name = "checkpoint"
out = "{folder}/out"
deepspeed = "{root}/ds_configs/cpu.json"
[model]
config = "{folder}/model.json"
[schedule]
kind = "cosine"
length = "10 steps"
peak_lr = 1e-3
warmup = "1 steps"
[batch]
tokens = 512
micro_batch_size = 1
[sources]
noise = "{folder}/noise"
[[phases]]
name = "main"
seq_len = 64
mixture = {{ noise = 1.0 }}
[checkpoint]
every = "1_000_000 steps"
"""


@dataclass
class Times:
    """Seconds of each round, on the slowest rank; the first save is not among the stalls."""

    first_stall: float = 0.0
    stalls: list[float] = field(default_factory=list)
    saves: list[float] = field(default_factory=list)  # engine.save_checkpoint
    steps_behind: list[float] = field(default_factory=list)
    quiet_steps: list[float] = field(default_factory=list)
    restores: dict[str, list[float]] = field(default_factory=lambda: {"cold": [], "warm": []})
    loads: dict[str, list[float]] = field(default_factory=lambda: {"cold": [], "warm": []})
    restores_cpu: dict[str, list[float]] = field(default_factory=lambda: {"cold": [], "warm": []})
    loads_cpu: dict[str, list[float]] = field(default_factory=lambda: {"cold": [], "warm": []})
    bytes_ratios: list[float] = field(default_factory=list)  # read / own, of each pass


class Rank:
    """One rank of the benchmark. Every method is collective."""

    def __init__(self, run_file: Path) -> None:
        self.world = World.from_environment()
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // self.world.size))
        initialize_distributed(self.world)
        self.engine = cast(ZeroEngine, open_run_engine(load_plan(run_file), self.world))
        self.root, self.other = run_file.parent / "ours", run_file.parent / "deepspeed"
        self.saves = Saves(StorageLayout(self.root, self.root), self.world, lambda step: None)
        self.ids = torch.randint(0, MODEL["vocab_size"], (1, 64))  # type: ignore[call-overload]  # [B, T]
        self.times, self.stalled, self.cpu_seconds = Times(), 0.0, 0.0

    def step(self) -> float:
        """One optimizer step; its seconds."""
        return self.timed(self._step)

    def timed(self, act: Callable[[], object]) -> float:
        """Seconds of `act`, begun together, on the slowest rank; `cpu_seconds` are those of all ranks."""
        barrier(self.world)
        began, began_cpu = perf_counter(), process_time()
        act()
        took = gather_rows(self.world, [perf_counter() - began, process_time() - began_cpu])
        self.cpu_seconds = float(took[:, 1].sum())
        return float(took[:, 0].max())

    def save_behind(self, number: int) -> None:
        """One of our saves, with steps while it is written; its stall."""
        manifest = blank_manifest(number, self.world)
        assert self.saves.begin(RunState(number), manifest, {"deepspeed.json": "{}"}, self.engine) is None
        stall = 0.0
        while self.saves.is_under_way:
            if SaveProgress.DONE not in self.stages():
                self.times.steps_behind.append(self.step())
            stall += self.timed(partial(self.advance, self.stages()))
        stall += self.stalled
        if number == 0:
            self.times.first_stall = stall
        else:
            self.times.stalls.append(stall)

    def stages(self) -> list[int]:
        """How far each rank's part of the save is."""
        return [int(stage) for stage in gather_rows(self.world, [self.saves.progress])[:, 0]]

    def advance(self, stages: list[int]) -> None:
        outcome = self.saves.advance(stages)
        assert outcome is None or outcome.problem is None, outcome
        if outcome is not None:
            self.stalled = outcome.stall_seconds  # in `begin`, and in the step that waited for the copy

    def save_plainly(self, number: int) -> None:
        """`engine.save_checkpoint`, as a loop written on DeepSpeed calls it."""
        save = partial(self.engine._engine.save_checkpoint, str(self.other), tag=f"tag_{number}")
        self.times.saves.append(self.timed(save))

    def restore(self) -> None:
        """Restore as a start does: find, verify, load."""
        found = restore_module.find_latest(StorageLayout(self.root, self.root), self.world)
        assert found is not None
        restore_module.restore(found, self.engine, 0, self.world)

    def load_plainly(self, folder: Path) -> None:
        self.engine._engine.load_checkpoint(str(folder.parent), tag=folder.name)

    def forget(self, folder: Path, state: str) -> None:
        """Drop this rank's files of a folder from the page cache, if the state is to be cold."""
        for path in files_of(folder, self.world) if state == "cold" else ():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def clear(self, keep: Path | None = None) -> None:
        """Remove earlier checkpoints, and let the disk write what it still has to."""
        barrier(self.world)
        if self.world.is_main:
            for folder in (*self.root.glob("step_*"), *self.other.glob("tag_*")):
                if folder != keep:
                    shutil.rmtree(folder)
            os.sync()
        barrier(self.world)

    def _step(self) -> None:
        loss, _ = cross_entropy_and_z(self.engine.logits(self.ids), self.ids, None)
        self.engine.backward(loss / self.ids.numel())
        self.engine.step(1e-4)


def measure_rank(run_file: Path, rounds: int) -> Times:
    """Both sides of everything, in turn, on this rank."""
    rank = Rank(run_file)
    for _ in range(3):
        rank.step()
    rank.save_behind(0)
    for number in range(1, rounds + 1):
        sides = (rank.save_behind, rank.save_plainly)
        for side in sides if number % 2 else sides[::-1]:
            rank.clear()
            rank.times.quiet_steps += [rank.step() for _ in range(QUIET_STEPS)]
            side(number)
    rank.clear()
    rank.save_behind(rounds + 1)
    folder = rank.root / step_name(rounds + 1)
    rank.clear(keep=folder)
    for number in range(2 * rounds):
        state = ("cold", "warm")[number // 2 % 2]
        ours = (rank.times.restores[state], rank.times.restores_cpu[state], rank.restore)
        plain = partial(rank.load_plainly, folder)
        theirs = (rank.times.loads[state], rank.times.loads_cpu[state], plain)
        for wall, cpu, act in (ours, theirs) if number % 2 else (theirs, ours):
            rank.forget(folder, state)
            wall.append(rank.timed(act))
            cpu.append(rank.cpu_seconds)
    own = sum(path.stat().st_size for path in files_of(folder, rank.world))
    read = bytes_read(rank.restore)
    rank.times.bytes_ratios = gather_rows(rank.world, [read / own / 2])[:, 0].tolist()
    return rank.times


def bytes_read(act: Callable[[], object]) -> int:
    """Bytes that this process reads from files while it does something, or maps into memory."""
    mapped, from_file = [], torch.UntypedStorage.from_file

    def counted(name: str, shared: bool, size: int) -> Any:
        mapped.append(size)
        return from_file(name, shared, size)

    before = read_so_far()
    with patch.object(torch.UntypedStorage, "from_file", counted):
        act()
    return read_so_far() - before + sum(mapped)


def read_so_far() -> int:
    """Bytes that this process has asked the kernel for, from any file or cache."""
    return int(Path("/proc/self/io").read_text().split()[1])


def files_of(folder: Path, world: World) -> list[Path]:
    """The files that this rank wrote, and loads."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if owner_rank(path.relative_to(folder).as_posix()) == world.rank]


def blank_manifest(step: int, world: World) -> Manifest:
    """A manifest that says what a restore looks at, before the files are known."""
    return Manifest(
        step=step,
        tokens=0,
        samples=0,
        world_size=world.size,
        zero_stage=3,
        versions={},
        created="2026-01-01T00:00:00+00:00",
        attempt=1,
        wandb_id=None,
        overrides=(),
        identity={},
        files={},
    )


def write_run(folder: Path) -> Path:
    """A run file with its model and a few random tokens; the path of it."""
    writer = IndexedWriter(folder / "noise", 4096)
    writer.add([np.random.default_rng(0).integers(0, 4096, 1_000) for _ in range(10)])
    writer.finish({"eos_id": 0})
    (folder / "model.json").write_text(json.dumps(MODEL))
    run_file = folder / "run.toml"
    run_file.write_text(RUN.format(folder=folder, root=ROOT))
    return run_file


def report(times: Times, ranks: int) -> None:
    """Print every figure, and end the process."""
    ms = partial(spread, unit="ms", scale=1e3)
    print(f"stall of our save:           {ms(times.stalls)}; the first {times.first_stall * 1e3:.4g} ms")
    print(f"engine.save_checkpoint:      {ms(times.saves)}")
    print(f"step while files are written: {ms(times.steps_behind)}; quiet step: {ms(times.quiet_steps)}")
    for state in ("cold", "warm"):
        print(f"verified restore, {state}:      {ms(times.restores[state])}")
        print(f"engine.load_checkpoint, {state}: {ms(times.loads[state])}")
        cpu = median_ratio(times.restores_cpu[state], times.loads_cpu[state])
        print(f"ratio of the CPU time of all ranks, {state}: {cpu:.4g}")
    cores = len(os.sched_getaffinity(0))
    behind = median_ratio(times.steps_behind, times.quiet_steps)
    verdicts = [
        judge("save: stall / engine.save_checkpoint", median_ratio(times.stalls, times.saves), *at(STALL_BAR))
    ]
    if cores > ranks:
        verdicts.append(judge("step during a write / quiet step", behind, *at(STEP_BAR)))
    else:
        print(
            f"a step during a write / a quiet step: {behind:.4g}; the bar of {STEP_BAR} is for a "
            f"machine with a free core, and {ranks} ranks leave none of {cores} free"
        )
    warm = median_ratio(times.restores["warm"], times.loads["warm"])
    print(f"verified restore / engine.load_checkpoint with all files in the page cache: {warm:.4g}")
    cold = median_ratio(times.restores["cold"], times.loads["cold"])
    verdicts += [
        judge("restore: verified / engine.load_checkpoint, cold", cold, *at(RESTORE_BAR)),
        judge(
            "restore: bytes read by a rank / its own files, a pass", max(times.bytes_ratios), *at(BYTES_BAR)
        ),
    ]
    finish(verdicts)


def at(bar: float) -> tuple[float, Any]:
    return bar, "at_most"


def median_ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(ours) / statistics.median(theirs)


def main() -> None:
    parser = argparse.ArgumentParser(description="Our save and restore against DeepSpeed's.")
    parser.add_argument("--ranks", type=int, choices=(1, 2, 4), default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--run-file", type=Path, help=argparse.SUPPRESS)  # this process is one rank
    words = parser.parse_args()
    if words.run_file is None:
        with tempfile.TemporaryDirectory() as name:
            run_file = write_run(Path(name))
            sys.exit(start_ranks(__file__, run_file, words.ranks, ["--rounds", str(words.rounds)]))
    times = measure_rank(words.run_file, words.rounds)
    if broadcast_from_main(World.from_environment(), None) is None and World.from_environment().is_main:
        report(times, World.from_environment().size)


if __name__ == "__main__":
    main()
