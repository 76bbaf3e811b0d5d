"""`make demo`: text in, a run that is killed and comes back bitwise, and a few lines from the model.

Trains examples/demo.toml on the standard library of the running Python: two CPU ranks in fp32, or every GPU
found in bf16. Everything goes through the commands that a user types.
"""

import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

RUN_FILE = "examples/demo.toml"
FOLDER = Path("runs/demo")
OUT, TWIN = FOLDER / "run", FOLDER / "twin"
COMMAND = str(Path(sys.executable).with_name("ds-pretrain"))
LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "site-packages", "__pycache__"}
COMPARED = ("loss", "z_loss", "grad_norm", "clip_factor", "learning_rate", "batch_checksum")


def main() -> int:
    """Run the demo; 0 if the resumed run is bitwise its uninterrupted twin."""
    started = time.monotonic()
    shutil.rmtree(FOLDER, ignore_errors=True)
    devices = num_gpus()
    ranks = ["--ranks", str(devices or 2)]
    precision = ["deepspeed=ds_configs/zero3_bf16.json"] if devices else []

    title("1. Text: the standard library of this Python, split into training and validation by file")
    print(split_by_file(FOLDER))
    title("2. A tokenizer and two token files")
    tokenizer = str(FOLDER / "tokenizer")
    run(
        "prepare",
        FOLDER / "text/train",
        "--train-tokenizer",
        4096,
        "--tokenizer",
        tokenizer,
        "--out",
        FOLDER / "data/train",
    )
    run("prepare", FOLDER / "text/validation", "--tokenizer", tokenizer, "--out", FOLDER / "data/validation")
    title("3. What the run file resolves to")
    run("check", RUN_FILE, *precision)
    half = last_step() // 2
    title(f"4. Train, and kill every rank with SIGKILL after step {half}")
    train_and_kill([*ranks, *precision], half)
    title("5. The same command again: it resumes from the newest intact checkpoint")
    run("train", RUN_FILE, *ranks, *precision)
    title("6. Its twin, never interrupted")
    run("train", RUN_FILE, *ranks, *precision, f"out={TWIN}")
    title("7. Is the resumed run the uninterrupted one?")
    same = compare()
    title("8. What a model says after a minute of training: the shape of code, not yet code")
    run("sample", RUN_FILE, *precision, "--prompt", "def ", "--count", 2, "--tokens", 60)
    title(f"Done in {time.monotonic() - started:.0f} s")
    print(WHERE.format(out=OUT))
    return 0 if same else 1


WHERE = """\
{out}/metrics.jsonl       every step, as JSON lines
{out}/checkpoints/        DeepSpeed's shards, random streams and run file, under a manifest with checksums
{out}/run.json            which run this is, how often it was started
runs/demo/tokenizer, runs/demo/data    the tokenizer and the token files

Next:
  touch {out}/stop                                            stops a running run, saved (exit code 75)
  .venv/bin/ds-pretrain check examples/demo.toml --world 3    a world that does not divide the batch
  .venv/bin/ds-pretrain train examples/demo.toml --ranks 2 out=runs/longer 'schedule.length=400 steps'
  docs/first-run.md                                           your own text, your own model
"""


def split_by_file(folder: Path) -> str:
    """Copy the standard library's source into folder/text; one file in twenty is held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    counts = {"train": [0, 0], "validation": [0, 0]}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if LEFT_OUT & set(name.parts):
            continue
        held_out = int(hashlib.sha256(name.as_posix().encode()).hexdigest(), 16) % 20 == 0
        part = "validation" if held_out else "train"
        target = folder / "text" / part / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        counts[part][0] += 1
        counts[part][1] += path.stat().st_size
    return ", ".join(f"{part}: {files} files, {size / 1e6:.1f} MB" for part, (files, size) in counts.items())


def train_and_kill(words: list[str], after_step: int) -> None:
    """Start the run as a user would, and SIGKILL all its ranks once a step is recorded."""
    process = subprocess.Popen(command("train", RUN_FILE, *words))
    while process.poll() is None and reached() < after_step:
        time.sleep(0.05)
    for record in sorted((OUT / "ranks").glob("*.json")):
        os.kill(json.loads(record.read_text())["pid"], signal.SIGKILL)
    code = process.wait()
    print(f"\nkilled at step {reached()}, as intended: the command says {code}, a crash", flush=True)


def compare() -> bool:
    """Compare every step of both runs, bit for bit."""
    resumed, straight = steps(OUT), steps(TWIN)
    starts = sorted({record["attempt"] for record in resumed.values()})
    different = [
        (step, key)
        for step in sorted(resumed.keys() | straight.keys())
        for key in COMPARED
        if resumed.get(step, {}).get(key) != straight.get(step, {}).get(key)
    ]
    for step, record in resumed.items():
        if step % 10 == 0:
            print(f"step {step:3}  resumed {record['loss']!r:20}  straight {straight[step]['loss']!r:20}")
    if different:
        print(f"DIFFERENT at {different[:5]}")
        return False
    print(
        f"{len(resumed)} steps in {len(starts)} starts: {', '.join(COMPARED)} are bitwise equal "
        "to the run that was never interrupted"
    )
    return True


def steps(out: Path) -> dict[int, dict[str, Any]]:
    """Each step's record by the last start that made it."""
    records = [
        json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines() if line.endswith("}")
    ]
    return {record["step"]: record for record in records if record["event"] == "step"}


def reached() -> int:
    """The last step on record."""
    return max(steps(OUT), default=0) if (OUT / "metrics.jsonl").exists() else 0


def last_step() -> int:
    """The run's length, from its file."""
    import tomllib

    return int(tomllib.loads(Path(RUN_FILE).read_text())["schedule"]["length"].split()[0])


def num_gpus() -> int:
    """GPUs of this host."""
    listing = shutil.which("nvidia-smi") and subprocess.run(
        ["nvidia-smi", "-L"], capture_output=True, text=True
    )
    return listing.stdout.count("GPU ") if listing and listing.returncode == 0 else 0


def command(*words: Any) -> list[str]:
    return [COMMAND, *map(str, words)]


def run(*words: Any) -> None:
    """Show a command and run it; its failure is the demo's."""
    print(f"$ ds-pretrain {shlex.join(map(str, words))}", flush=True)
    code = subprocess.run(command(*words)).returncode
    if code:
        sys.exit(code)


def title(text: str) -> None:
    print(f"\n\033[1m== {text}\033[0m" if sys.stdout.isatty() else f"\n== {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
