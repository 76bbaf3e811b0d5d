"""Runs every benchmark and ends with a line for each result.

    python -m benchmarks [DATA]

DATA is the text of tiny Shakespeare, which `nanogpt_row.py` needs; `watchdog_curves.py` needs the folder
`curves` beside it. Without DATA these are skipped, and `same_numbers.py`, which needs a commit, always is.
Exit code 1 if a bar was missed or a benchmark ended without a result.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
NOT_BENCHMARKS = {"__main__", "report", "ranks", "collectives", "run_numbers", "trees"}
NEEDS_DATA = {
    "nanogpt_row": "it needs the text of tiny Shakespeare: python -m benchmarks DATA",
    "watchdog_curves": "it needs the folder `curves` beside that text: python -m benchmarks DATA",
}
NEEDS_COMMIT = {"same_numbers": "it needs a commit: python benchmarks/same_numbers.py BASE_COMMIT"}


def names() -> list[str]:
    """The benchmarks of this folder."""
    return sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in NOT_BENCHMARKS)


def run(name: str, words: Sequence[str]) -> tuple[list[dict[str, Any]], int]:
    """Run one benchmark, showing what it prints; its results and its exit code."""
    print(f"\n== {name}", flush=True)
    results = []
    with subprocess.Popen(
        [sys.executable, str(FOLDER / f"{name}.py"), *words], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            results += result_in(line)
    return results, process.returncode


def result_in(line: str) -> list[dict[str, Any]]:
    """The result that a line of output is, if it is one."""
    try:
        result = json.loads(line)
    except ValueError:
        return []
    return [result] if isinstance(result, dict) and "holds" in result else []


def verdicts(name: str, results: Sequence[dict[str, Any]], code: int) -> list[tuple[bool, str]]:
    """Return whether each result holds, with a line that says so."""
    lines = []
    for result in results:
        bar = f"{result['better'].replace('_', ' ')} {result['bar']:g}"
        lines.append((bool(result["holds"]), f"{result['name']}: {result['figure']:g} ({bar})"))
    if not results or (code and all(holds for holds, _ in lines)):
        lines.append((False, f"{name}: ended with exit code {code} and no result that tells why"))
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Every benchmark, in turn.")
    parser.add_argument("data", nargs="?", type=Path, metavar="DATA", help="the text of tiny Shakespeare")
    words = parser.parse_args()
    lines: list[tuple[bool, str]] = []
    skipped = []
    for name in names():
        if name in NEEDS_COMMIT:
            skipped.append(f"skipped  {name}: {NEEDS_COMMIT[name]}")
        elif name in NEEDS_DATA and words.data is None:
            skipped.append(f"skipped  {name}: {NEEDS_DATA[name]}")
        else:
            lines += verdicts(name, *run(name, [str(words.data)] if name in NEEDS_DATA else []))
    print("\n== results")
    for holds, text in lines:
        print(f"{'holds' if holds else 'MISSED':<7}  {text}")
    for text in skipped:
        print(text)
    return 0 if all(holds for holds, _ in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
