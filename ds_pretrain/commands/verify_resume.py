"""`ds-pretrain verify-resume`: proof on one's own cluster and configuration that a resume changes nothing.

The first launch trains 2K steps, from the beginning or from a checkpoint of the run, and saves after K and
after 2K. What it saved after step K (at 2K, and where a phase ends in between) is put aside, the second
launch, the same command, resumes after K and trains to 2K, and what both made of these K steps is compared:
samples, losses and norms from metrics.jsonl, every tensor and random stream from the checkpoints.

    OUT.verify-resume/
        verify-resume.lock              says whose folder this is, and holds it while the command runs
        run/                            a run directory like any other; the resumed run ends here
        straight/step_000000006/        what the uninterrupted run saved
"""

import argparse
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ds_pretrain.checkpoint.inventory import choose_folder
from ds_pretrain.checkpoint.manifest import parse_step, step_name
from ds_pretrain.commands.train import launch
from ds_pretrain.config.plan import load_plan
from ds_pretrain.config.timeline import Timeline
from ds_pretrain.core.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_PREEMPTED, InputError
from ds_pretrain.core.files import FileLock
from ds_pretrain.core.jsonl import METRICS, read_metrics, show_value
from ds_pretrain.core.text import format_count_of

Start = Callable[[Sequence[str], Sequence[str]], int]  # overrides and flags of a launch to its exit code

_LOCK = "verify-resume.lock"
_KEEP_ALL = 1_000_000
# What a step must repeat, the cause before its effects: data, then rates, then what was computed of them.
_REPEATED = {
    "batch_checksum": "its samples differ (batch_checksum)",
    "samples": "it is at another sample",
    "num_valid_tokens": "its number of valid tokens differs",
    "learning_rate": "its learning rate differs",
    "loss": "its loss differs",
    "z_loss": "its z-loss differs",
    "grad_norm": "its gradient norm differs",
    "update_applied": "its update was applied in one of them only",
}


@dataclass(frozen=True)
class Workdir:
    """The folders of one proof."""

    folder: Path

    @property
    def out(self) -> Path:
        return self.folder / "run"

    def saved(self, step: int) -> Path:
        """A checkpoint of the run."""
        return self.out / "checkpoints" / step_name(step)

    def straight(self, step: int) -> Path:
        """The uninterrupted run's save, under its own name, which its manifest needs."""
        return self.folder / "straight" / step_name(step)


def execute(words: argparse.Namespace) -> int:
    """Prove that a resumed run is bitwise the uninterrupted one, or name what differs first."""
    return verify_resume(words.run_file, words.overrides, words.steps, partial(launch, words), words.begin)


def verify_resume(
    run_file: str, overrides: Sequence[str], steps: int, start: Start, begin: int | None = None
) -> int:
    """Train 2 x `steps` steps, again from the middle, and compare; 0 if bitwise equal, 1 if not.

    Args:
        start: launches the run file with overrides and flags, as `ds-pretrain train` does.
        begin: from the run's checkpoint of this step instead of from the beginning.

    Raises:
        InputError: the run has too few steps or no such checkpoint, or the folder for it is somebody else's.
    """
    plan, first = load_plan(run_file, overrides), begin or 0
    middle, last = first + steps, first + 2 * steps
    if steps < 1:
        raise InputError(f"--steps {steps}: give 1 or more")
    if plan.last_step < last:
        after = "" if begin is None else f" after step {begin:,}"
        raise InputError(
            f"{plan.run_path}: schedule.length is {format_count_of(plan.last_step, 'step')}, and the proof "
            f"trains {2 * steps:,}{after} (twice --steps {steps}); take fewer steps, or a longer schedule"
        )
    origin = None if begin is None else choose_folder(plan.out / "checkpoints", begin).absolute()
    workdir = Workdir(plan.out.with_name(f"{plan.out.name}.verify-resume"))
    launch_both = partial(
        start, [*overrides, *_build_overrides(workdir, middle, origin)], ["--stop-after", str(last)]
    )
    with _hold_workdir(workdir.folder):
        code = _train_twice(launch_both, workdir, middle, last)
        if code == EXIT_FINISHED and not _compare(workdir, middle, last):
            code = EXIT_FAILED
    if code != EXIT_FINISHED:
        print(f"kept for a closer look: {workdir.folder}")
        return code
    for line in describe_coverage(plan.timeline, middle, last):
        print(line)
    shutil.rmtree(workdir.folder)
    return EXIT_FINISHED


def _train_twice(launch_run: Callable[[], int], workdir: Workdir, middle: int, last: int) -> int:
    """Both launches; what the first saved after the middle is out of the second one's way, in `straight/`."""
    for which, saves in (("first", (middle, last)), ("second", (last,))):
        print(f"verify-resume: the {which} launch", flush=True)
        code = launch_run()
        missing = [step for step in saves if not workdir.saved(step).is_dir()]
        if missing or code not in (EXIT_FINISHED, EXIT_PREEMPTED):
            lacking = f", and there is no checkpoint of step {missing[0]:,}" if missing else ""
            print(f"verify-resume: the {which} launch ended with code {code}{lacking}; nothing is proven")
            return code or EXIT_FAILED
        if which == "first":
            workdir.straight(last).parent.mkdir()
            for folder in list(workdir.saved(last).parent.iterdir()):
                if (parse_step(folder.name.partition(".")[0]) or 0) > middle:
                    folder.rename(workdir.straight(last).with_name(folder.name))
    return EXIT_FINISHED


def describe_coverage(timeline: Timeline, middle: int, last: int) -> Iterator[str]:
    """Say which steps a resume at `middle` proves, and which parts of the run it does not."""
    here, elsewhere = [], []
    for segment in timeline.segments:
        several = sum(other.phase == segment.phase for other in timeline.segments) > 1
        name = segment.phase + (f" ({segment.tokens_per_step:,} tokens a step)" if several else "")
        if segment.first_step < last and segment.end_step > middle:
            here.append(name)
        else:
            elsewhere.append(f"{name} from step {segment.first_step:,}")
    steps = f"through steps {middle + 1:,} to {last:,}"
    yield f"proved     a resume after step {middle:,}, {steps}: {', '.join(here)}"
    if elsewhere:
        yield (
            f"not proved {', '.join(elsewhere)}; --from STEP starts at a checkpoint of the run: one from "
            f"K steps before a change puts the resume right on it"
        )


def find_first_difference(
    straight: Mapping[int, Mapping[str, Any]], resumed: Mapping[int, Mapping[str, Any]], steps: range
) -> str | None:
    """The first step that differs between two starts, and in what; None if all of `steps` are the same.

    Both map a step to its record in metrics.jsonl.
    """
    for step in steps:
        here, there = straight.get(step), resumed.get(step)
        if here is None or there is None:
            which = "uninterrupted" if here is None else "resumed"
            return f"step {step:,}: the {which} run has no record of it in metrics.jsonl"
        for field, words in _REPEATED.items():
            if repr(here.get(field)) != repr(there.get(field)):  # NaN is like NaN
                values = (
                    f"{show_value(here.get(field))} uninterrupted, {show_value(there.get(field))} resumed"
                )
                return f"step {step:,}: {words}: {values}"
    return None


def _build_overrides(workdir: Workdir, middle: int, origin: Path | None) -> list[str]:
    """Build overrides that change no number: folder, resume step, save steps and W&B."""
    return [
        f"out={workdir.out}",
        f"checkpoint.every={middle} steps",  # the next multiple lies at or behind the last step, saved anyway
        f"checkpoint.keep_last={_KEEP_ALL}",
        "checkpoint.local_dir=none",
        "checkpoint.upload_to=none",
        f"resume_from={origin or 'none'}",
        "monitor.wandb=off",
    ]


@contextmanager
def _hold_workdir(folder: Path) -> Iterator[None]:
    """An empty folder with our mark, for this process alone; what an earlier proof left in it is deleted."""
    if folder.exists() and not (folder / _LOCK).is_file():
        raise InputError(
            f"{folder} exists and was not made by verify-resume, which needs a folder of that name: move it"
        )
    busy = f"{folder}: another verify-resume of this run is at work; wait for it"
    lock = FileLock(folder / _LOCK, lambda holder: busy)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.take()
    except OSError as error:
        raise InputError(f"{folder}: cannot write there ({error.strerror}); choose another `out`") from None
    try:
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
        yield
    except InputError:
        if [path.name for path in folder.iterdir()] == [_LOCK]:  # refused before anything was made
            shutil.rmtree(folder)
        raise
    finally:
        lock.release()


def _compare(workdir: Workdir, middle: int, last: int) -> bool:
    """Compare the second halves of both launches; print what differs."""
    from ds_pretrain.checkpoint.diff import compare_checkpoints, format_differences  # which imports torch

    steps: dict[int, dict[int, Mapping[str, Any]]] = {1: {}, 2: {}}  # of both attempts
    found = None  # where the second launch began
    path = workdir.out / METRICS
    for record in read_metrics(path) if path.is_file() else ():
        kind, attempt = record.get("event"), record.get("attempt")
        if kind == "step" and attempt in steps:
            steps[attempt][record["step"]] = record
        elif kind in ("start", "resume") and attempt == 2 and found is None:
            found = record.get("step")
    if found != middle:
        where = f"at a step that {METRICS} does not show" if found is None else f"after step {found:,}"
        print(
            f"verify-resume: the second launch went on {where}, expected {middle:,} (see above why); nothing "
            "is proven"
        )
        return False
    half = range(middle + 1, last + 1)
    different_step = find_first_difference(steps[1], steps[2], half)
    states = compare_checkpoints(workdir.straight(last), workdir.saved(last))
    lines = [] if states.is_same_state else list(format_differences(states))
    if different_step is None and not lines:
        print(
            f"bitwise equal: {format_count_of(states.num_tensors, 'tensor')}, "
            f"{format_count_of(len(half), 'step')}, {format_count_of(states.num_streams, 'random stream')} "
            f"on {format_count_of(states.num_ranks, 'rank')}"
        )
        return True
    print("a resumed run is not the uninterrupted one; docs/operations.md says what to look at")
    for line in filter(None, (different_step, *lines)):
        print(line)
    return False
