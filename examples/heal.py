"""`make heal`: a run meets data that ruin it, and heals itself: back, once more, back further, and past them.

Trains examples/heal.toml on two CPU ranks, on text of which what six steps read is overwritten with noise.
Everything goes through the commands that a user types; the noise goes into the token file beforehand.
"""

import shutil
import sys
import time
from pathlib import Path

import numpy as np
from demo import run, split_by_file, title

from ds_pretrain.config.plan import load_plan
from ds_pretrain.core.state import SkipLedger
from ds_pretrain.data.indexed import open_source
from ds_pretrain.data.sampler import make_sampler

RUN_FILE = "examples/heal.toml"
FOLDER = Path("runs/heal")
POISONED = range(70, 76)  # steps


def main() -> int:
    """Run it; 0 if the run came to its end."""
    started = time.monotonic()
    shutil.rmtree(FOLDER, ignore_errors=True)
    title("1. Text: the standard library of this Python, as bytes")
    print(split_by_file(FOLDER))
    run("prepare", FOLDER / "text/train", "--tokenizer", "bytes", "--out", FOLDER / "data/train", "--quiet")
    title(f"2. What steps {POISONED[0]} to {POISONED[-1]} will read is overwritten with noise")
    print(f"{poison()} samples")
    title("3. Train. The watchdog needs no help")
    run("train", RUN_FILE, "--ranks", 2)
    title("4. What was trained, and what was not")
    run("audit", FOLDER / "run")
    title("5. What the run wrote down")
    print((FOLDER / "run/LOGBOOK.md").read_text())
    title(f"Done in {time.monotonic() - started:.0f} s")
    return 0


def poison() -> int:
    """Overwrite the samples that POISONED will read; how many there are."""
    plan = load_plan(RUN_FILE)
    [phase] = plan.run.phases
    source = open_source(plan.run.sources["stdlib"].path)
    sampler = make_sampler(plan.run.seed, plan.timeline, {phase.name: phase.mixture}, {"stdlib": source})
    samples = np.concatenate([sampler.ids(step - 1, SkipLedger()).sample for step in POISONED])
    noise = np.random.default_rng(0)
    stream = np.memmap(source.prefix.with_name("train.bin"), dtype=source.dtype, mode="r+")
    for sample in samples:
        stream[sample * phase.seq_len : (sample + 1) * phase.seq_len] = noise.integers(
            128, 256, phase.seq_len
        )
    stream.flush()
    return len(samples)


if __name__ == "__main__":
    sys.exit(main())
