"""Real runs killed at random, again and again; what was torn, lost or wrong afterwards must be nothing.

    python benchmarks/chaos.py [--kills 200] [--seed N]

A run of a tiny Llama under ZeRO-3 saves every other step. Each start of it gets a SIGKILL: on a random rank,
at a random moment or at a random one of the named write points of a save, a pruning or a conversion, while
the other ranks are slowed at each of theirs. The others die with it, as when a host is lost, and the same
run is started again. After each kill the folder is read as any program would read it. Runs take turns: every
other one stays on two ranks, and must end bit for bit like one that was never killed; the others change
between 1, 2 and 3 ranks at each start, convert on the way, and must read the same samples and come to the
same losses within 1e-6. Bar: no bad outcome. The folders are kept if there was one.
"""

import argparse
import importlib
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from report import finish, judge

ROOT = Path(__file__).parent.parent
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
sys.path.insert(0, str(ROOT))

# By name: they are test code, which is not type-checked.
ranks_, harness, tools, results, scenario = (
    importlib.import_module(f"tests.{name}")
    for name in ("ranks", "harness", "runs.chaos", "runs.results", "scenario")
)

INTERVAL, KILLS_A_RUN = 2, 12
NEVER_PASSED = {"set the old one aside"}  # by a run that never saves a step twice
NO_DROPOUT = {**scenario.LLAMA, "attention_dropout": 0.0}  # masks depend on which rank a sequence falls to
OVERRIDES = ("checkpoint.keep_last=3", "validation.every='1000 steps'")
SAME_LOSS = 1e-6


@dataclass
class Tally:
    """The counts so far."""

    seed: int
    steps: int = 40  # of each run
    kills: int = 0
    starts: int = 0
    where: Counter[str] = field(default_factory=Counter)
    bad: dict[str, list[str]] = field(default_factory=lambda: {"torn": [], "lost": [], "wrong": []})

    @property
    def num_bad(self) -> int:
        return sum(len(found) for found in self.bad.values())

    def add(self, kind: str, what: object) -> None:
        self.bad[kind].append(str(what))
        print(f"{kind.upper()}: {what}", flush=True)


def make(folder: Path, steps: int) -> Path:
    """A run that 1, 2 and 3 ranks can train; its run file."""
    options: dict[str, Any] = {"batch_tokens": 16 * 6, "micro_batch_size": 1, "model": NO_DROPOUT}
    scenario.make_run(
        folder, steps=steps, save_every=f"{INTERVAL} steps", deepspeed=scenario.deepspeed_json(), **options
    )
    return folder / "run.toml"


def any_kill(choose: random.Random, ranks: int, converts: bool) -> Any:
    """A random rank at a random moment, or at a random write point of its first three saves."""
    rank, pause = choose.randrange(ranks), choose.choice((0.0, 0.02, 0.1))
    if choose.random() < 0.5:
        return harness.Kill(rank, seconds=choose.uniform(0.0, 2.5), others_sleep=pause)
    found = tools.write_points()
    modules = sorted(found.keys() - tools.SHIPPING_MODULES)
    points = [point for module in modules for point in sorted(found[module] - NEVER_PASSED)]
    if converts and choose.random() < 0.5:
        point, passes = choose.choice([point for point in points if point.startswith("convert_")]), 0
    else:
        point = choose.choice([point for point in points if not point.startswith("convert_")])
        passes = choose.randrange(8 if "*" in point else 2)
    return harness.Kill(0 if "*" not in point else rank, point, passes=passes, others_sleep=pause)


def torture(
    run_file: Path, choose: random.Random, worlds: tuple[int, ...], kills: int, tally: Tally
) -> list[Any] | None:
    """Kill a run until it has had so many, then let it come to its end; None if it failed by itself."""
    out, left, killed, saved_on = run_file.parent / "out", tools.Left(0, 0, 0, ()), 0, 0
    while killed < kills:
        ranks = choose.choice(worlds)
        kill = any_kill(choose, ranks, converts=left.newest > 0 and ranks != saved_on)
        ended = attempt(run_file, ranks, kill, tally)
        after = tools.look(out)
        for torn in after.torn:
            tally.add("torn", f"{torn} after {kill} in {run_file.parent}")
        if loss := tools.lost(left, after, INTERVAL):
            tally.add("lost", f"{loss} after {kill} in {run_file.parent}")
        if ended is None or ended[0] is not ranks_.KILLED:
            return ended
        left, saved_on = after, ranks if after.newest > left.newest else saved_on
        killed, tally.kills = killed + 1, tally.kills + 1
        tally.where[kill.point or "a random moment"] += 1
        if after.newest == tally.steps:  # killed after its last save: another start has nothing to do
            return []
    return attempt(run_file, choose.choice(worlds), None, tally)


def attempt(run_file: Path, ranks: int, kill: Any, tally: Tally) -> list[Any] | None:
    """One start; what its ranks returned, None if it failed by itself."""
    tally.starts += 1
    try:
        # Ranks that fail because another one was killed are no failure.
        ended: list[Any] = ranks_.run_ranks(
            harness.record_run, ranks, str(run_file), OVERRIDES, kill=kill, allow_kill=kill is not None
        )
    except ranks_.RankFailure as error:
        tally.add("lost", f"{ranks} ranks did not start again in {run_file.parent}: {error}")
        return None
    if kill is not None and any(isinstance(value, str) for value in ended):
        tally.add("lost", f"{ranks} ranks with {kill} in {run_file.parent}: {ended}")
        return None
    return ended


def compare(run_file: Path, ended: list[Any], straight: tuple[Path, list[Any]], bitwise: bool) -> list[str]:
    """How a run differs from the one that was never killed."""
    steps, expected = results.trace(run_file.parent / "out"), results.trace(straight[0].parent / "out")
    if bitwise:
        same = steps == expected and (
            not ended or [e.digest for e in ended] == [e.digest for e in straight[1]]
        )
        return [] if same else [f"{run_file.parent} does not end with the bits of {straight[0].parent}"]
    found = []
    if [s["batch_checksum"] for s in steps] != [s["batch_checksum"] for s in expected]:
        found.append(f"{run_file.parent} read other samples")
    apart = max((abs(a["loss"] - b["loss"]) for a, b in zip(steps, expected, strict=False)), default=9.0)
    if len(steps) != len(expected) or apart > SAME_LOSS:
        found.append(f"{run_file.parent}: {len(steps)} steps, losses {apart:.2g} apart")
    return found


def torture_all(folder: Path, kills: int, tally: Tally, tell: Callable[[str], None]) -> None:
    """Runs in turn until there were so many kills."""
    choose = random.Random(tally.seed)
    straight_file = make(folder / "straight", tally.steps)
    straight = (straight_file, ranks_.run_ranks(harness.record_run, 2, str(straight_file), OVERRIDES))
    number = 0
    while tally.kills < kills:
        number += 1
        bitwise, run_file = number % 2 == 1, make(folder / f"run_{number}", tally.steps)
        worlds = (2,) if bitwise else (1, 2, 3)
        ended = torture(run_file, choose, worlds, min(KILLS_A_RUN, kills - tally.kills), tally)
        for difference in compare(run_file, ended, straight, bitwise) if ended is not None else ():
            tally.add("wrong", difference)
        tell(f"run {number}, {worlds} ranks: {tally.kills} kills so far")


def start_ranks_silently() -> None:
    """Send the ranks' output nowhere: they inherit it from the process that forks them."""
    shown = [os.dup(number) for number in (1, 2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(nowhere, number)
    forkserver.ensure_running()
    for number, kept in zip((1, 2), shown, strict=True):
        os.dup2(kept, number)


def main() -> None:
    parser = argparse.ArgumentParser(description="Kills at random, and what they cost.")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--steps", type=int, default=40, help="of each run")
    words = parser.parse_args()
    tally = Tally(words.seed, words.steps)
    start_ranks_silently()
    print(f"seed {tally.seed}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="chaos."))
    torture_all(folder, words.kills, tally, lambda text: print(text, flush=True))
    if not tally.num_bad:
        shutil.rmtree(folder)
    report(tally)


def report(tally: Tally) -> None:
    """Print what was killed where and what it cost; return the exit code."""
    print(f"{tally.kills} kills, {tally.starts} starts; killed at:")
    for point, count in sorted(tally.where.items()):
        print(f"  {count:4d}  {point}")
    print(", ".join(f"{len(found)} {kind}" for kind, found in tally.bad.items()))
    finish([judge(f"chaos: bad outcomes of {tally.kills} kills", tally.num_bad, 0, "at_most")])


if __name__ == "__main__":
    main()
