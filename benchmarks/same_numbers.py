"""A refactoring changes no numbers: the examples of a base commit and of this tree, compared bit for bit.

    python benchmarks/same_numbers.py BASE_COMMIT [--only demo]

Both commits are checked out as git work trees in a temporary folder; files that are not committed yet are
copied into the second. Each trains its own examples/demo.toml (stopped half-way and resumed), heal.toml (on
poisoned text, so that it rolls back twice and skips) and curriculum.toml (stopped and resumed in its second
phase), in turn, in fp32 on two CPU ranks, with fewer steps than the files say. Base prepares and poisons the
text once, and both read the same bytes.

Compared are all fields of metrics.jsonl that are not times; what `ds-pretrain audit` counts, the samples that
it shows of some steps and those that it lists as skipped; and every tensor and number in DeepSpeed's shards
of the last checkpoint. Nothing of the package is imported here: each tree runs its own commands, and the
results are read with json and torch. A name that was changed on purpose goes into RENAMED of run_numbers.py.

Bar: no value differs. A value that one side lacks differs, and so does each thing that was to be compared
and is not there: a benchmark that compared nothing has missed its bar.
"""

import argparse
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from report import finish, judge
from run_numbers import (
    AUDIT,
    EVENTS,
    MASTERS,
    MOMENTS,
    RENAMED,
    SAMPLES,
    SHARDS,
    SKIPPED,
    STEPS,
    VALIDATIONS,
    Numbers,
    compare,
    of_audit,
    of_last_checkpoint,
    of_records,
    of_shown_step,
    of_skipped,
    read_records,
)
from trees import Tree, changed_files, checked_out, commit_of, copy_changes, end_on_sigterm

ROOT = Path(__file__).parent.parent
RANKS = 2
PREEMPTED = 75  # the exit code of a run that was asked to stop
LEAST_SAMPLES = 4  # of a step
SPLIT = "import sys; sys.path.insert(0, 'examples'); import demo; demo.split_by_file(demo.FOLDER)"
POISON = "import sys; sys.path.insert(0, 'examples'); import heal; print(heal.poison())"


@dataclass(frozen=True)
class Example:
    """A run file in examples/, how it is shortened, and what has to be found afterwards."""

    name: str
    durations: Mapping[str, str]  # in the run file: what it says, and what is to stand there
    last_step: int
    records: Mapping[str, int]  # events of metrics.jsonl, and how many there are at least
    num_masters: int  # at least
    audited: tuple[int, ...]  # steps whose samples are compared one by one
    stop_after: int | None = None  # the first start ends there

    @property
    def out(self) -> str:
        return f"runs/{self.name}/run"

    @property
    def run_file(self) -> str:
        return f"examples/{self.name}.toml"

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of numbers that it has."""
        more = [VALIDATIONS] if "validation" in self.records else []
        more += [SKIPPED] if "rollback" in self.records else []
        return STEPS, *more, EVENTS, AUDIT, SAMPLES, MASTERS, MOMENTS, SHARDS


EXAMPLES = (
    Example(
        name="demo",
        durations={"50 steps": "24 steps", "25 steps": "12 steps", "10 steps": "6 steps"},
        last_step=24,
        records={"resume": 1, "validation": 2, "data": 2, "finish": 1},
        num_masters=5_048_832,
        audited=(1, 14, 24),
        stop_after=13,
    ),
    Example(
        name="heal",
        durations={"160 steps": "112 steps"},
        last_step=112,
        records={
            "watchdog": 2,
            "rollback": 2,
            "high_loss_samples": 2,
            "replay_compared": 1,
            "outcome": 2,
            "finish": 1,
        },
        num_masters=870_000,
        audited=(1, 75, 112),
    ),
    Example(
        name="curriculum",
        durations={
            "80 steps": "24 steps",
            "60 steps": "18 steps",
            "40 steps": "12 steps",
            "20 steps": "6 steps",
            "5 steps": "2 steps",
        },
        last_step=24,
        records={"resume": 1, "validation": 4, "data": 4, "finish": 1},
        num_masters=5_048_832,
        audited=(3, 12, 14, 24),
        stop_after=13,
    ),
)


def shortened(text: str, durations: Mapping[str, str]) -> str:
    """A run file's text with other durations, whatever the names of its keys.

    Raises:
        ValueError: the text lacks one of them.
    """
    if missing := [old for old in durations if f'"{old}"' not in text]:
        raise ValueError(f"it has no {', '.join(missing)}; expected each, to shorten the run")
    return re.sub(r'"(\d+ steps)"', lambda found: f'"{durations.get(found[1], found[1])}"', text)


def shorten(tree: Tree) -> None:
    """Write the shorter run files over the tree's own."""
    for example in EXAMPLES:
        path = tree.folder / example.run_file
        try:
            path.write_text(shortened(path.read_text(), example.durations))
        except ValueError as error:
            sys.exit(f"{tree.name}: {example.run_file}: {error}")


def share_data(trees: Sequence[Tree], folder: Path) -> None:
    """Let the trees find their data at the same place, under their own names."""
    for name in ("demo", "heal"):
        (folder / name).mkdir()
        for tree in trees:
            (tree.folder / "runs" / name).mkdir(parents=True)
            (tree.folder / "runs" / name / "data").symlink_to(folder / name)


def prepare(base: Tree) -> None:
    """Make the data as examples/demo.py and heal.py do; curriculum.toml reads those of the demo."""
    text, tokenizer = "runs/demo/text", ("--tokenizer", "runs/demo/tokenizer")
    base.run(["-c", SPLIT])
    words = [f"{text}/train", "--train-tokenizer", "4096", *tokenizer, "--out", "runs/demo/data/train"]
    base.command("prepare", *words, "--quiet")
    words = [f"{text}/validation", *tokenizer, "--out", "runs/demo/data/validation"]
    base.command("prepare", *words, "--quiet")
    words = [f"{text}/train", "--tokenizer", "bytes", "--out", "runs/heal/data/train"]
    base.command("prepare", *words, "--quiet")
    print(f"data: {base.run(['-c', POISON]).strip()} samples of heal.toml are poisoned", flush=True)


def train(tree: Tree, example: Example) -> None:
    """Train an example to its end."""
    began = time.perf_counter()
    words = ["train", example.run_file, "--ranks", str(RANKS)]
    if example.stop_after is not None:
        tree.command(*words, "--stop-after", str(example.stop_after), code=PREEMPTED)
    tree.command(*words)
    print(f"{example.name}, {tree.name}: trained in {time.perf_counter() - began:.0f} s", flush=True)


def read(tree: Tree, example: Example) -> tuple[Numbers, list[str]]:
    """The numbers of a run that has ended, and what is missing in them."""
    out = tree.folder / example.out
    records = read_records((out / "metrics.jsonl").read_text(), RENAMED if tree.name == "base" else {})
    shards, num_shards = of_last_checkpoint(out)
    numbers = {**of_records(records), **shards, SAMPLES: {}}
    numbers[AUDIT] = of_audit(tree.command("audit", example.out))
    missing = missing_records(records, example)
    if num_shards != RANKS:
        missing.append(f"{num_shards} optimizer shards in the last checkpoint, expected {RANKS}")
    for step in example.audited:
        shown = of_shown_step(step, tree.command("audit", example.out, "--step", str(step)))
        if sum(place.endswith(": sample") for place in shown) < LEAST_SAMPLES:
            missing.append(
                f"the audit shows too few samples of step {step}, expected {LEAST_SAMPLES} or more"
            )
        numbers[SAMPLES] |= shown
    if SKIPPED in example.kinds:
        numbers[SKIPPED] = of_skipped(tree.command("audit", example.out, "--skipped"))
    return numbers, [f"{example.name}, {tree.name}: {problem}" for problem in missing]


def missing_records(records: Sequence[Mapping[str, object]], example: Example) -> list[str]:
    """The steps and events that metrics.jsonl should hold and does not."""
    steps = {str(record.get("step")) for record in records if record["event"] == "step"}
    lost = [step for step in range(1, example.last_step + 1) if str(step) not in steps]
    missing = (
        [f"{len(lost)} of {example.last_step} steps are not recorded, the first {lost[0]}"] if lost else []
    )
    counts = Counter(record["event"] for record in records)
    for event, least in example.records.items():
        found = counts[RENAMED.get(event, event)]
        if found < least:
            missing.append(f"{found} `{event}` records, expected {least} or more")
    return missing


def report(example: Example, base: Numbers, now: Numbers) -> tuple[int, list[str]]:
    """Print a line for each kind of number; how many values differ, and what should have been compared."""
    num_different, missing = 0, []
    least = {MASTERS: example.num_masters, MOMENTS: 2 * example.num_masters}
    for kind in example.kinds:
        found = compare(kind, base.get(kind, {}), now.get(kind, {}))
        print(f"{example.name:<10}  {kind:<18}  {found.num_compared:>12,} compared  ", end="")
        print(f"{found.num_different:,} different", flush=True)
        print(*(f"    {words}\n" for words in found.named), sep="", end="", flush=True)
        num_different += found.num_different
        if found.num_compared < least.get(kind, 1):
            expected = f"expected {least.get(kind, 1):,} or more"
            missing.append(f"{example.name}: {found.num_compared:,} {kind} compared, {expected}")
    return num_different, missing


def measure(base: Tree, now: Tree, examples: Sequence[Example]) -> int:
    """Train the examples in both trees; how many values differ or are missing."""
    figure = 0
    for example in examples:
        train(base, example)
        train(now, example)
        (before, first), (after, second) = read(base, example), read(now, example)
        num_different, third = report(example, before, after)
        missing = [*first, *second, *third]
        print(*(f"    {problem}\n" for problem in missing), sep="", end="", flush=True)
        figure += num_different + len(missing)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description="A base commit's numbers against those of this tree.")
    parser.add_argument("base", metavar="BASE_COMMIT", help="before the refactoring")
    names = [example.name for example in EXAMPLES]
    parser.add_argument("--only", nargs="+", choices=names, metavar="EXAMPLE", help="of the examples")
    words = parser.parse_args()
    commit, head = commit_of(ROOT, words.base), commit_of(ROOT, "HEAD")
    if commit is None or head is None:
        parser.error(f"{words.base} is no commit of {ROOT}")
    examples = [example for example in EXAMPLES if words.only is None or example.name in words.only]
    end_on_sigterm()
    began, changes = time.perf_counter(), changed_files(ROOT)
    state = f" and {len(changes)} files that are not committed: {', '.join(changes)}" if changes else ""
    print(f"base {commit[:12]}, now {head[:12]}{state}", flush=True)
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name,
        checked_out(ROOT, Path(name), commit, "base") as base,
        checked_out(ROOT, Path(name), head, "now") as now,
    ):
        copy_changes(ROOT, changes, now)
        data = Path(name) / "data"
        data.mkdir()
        share_data([base, now], data)
        for tree in (base, now):
            shorten(tree)
            tree.require_own_package()
        prepare(base)
        figure = measure(base, now, examples)
    print(f"{time.perf_counter() - began:.0f} s in all")
    what = ", ".join(example.name for example in examples)
    finish([judge(f"values that differ from {commit[:12]}: {what}", figure, 0, "at_most")])


if __name__ == "__main__":
    main()
