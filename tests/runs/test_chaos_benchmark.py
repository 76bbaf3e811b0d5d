"""The benchmark of random kills as a program: it kills, counts, and ends with 1 if anything was bad."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # the program; tests/runs/test_kill_anywhere.py kills the same runs
ROOT = Path(__file__).parents[2]
BAD = """
import chaos
tally = chaos.Tally(1, kills=7)
tally.add("torn", "step 3")
tally.add("wrong", "step 5")
chaos.report(tally)
"""


def test_a_few_kills_end_with_a_line_that_says_how_many_were_bad() -> None:
    words = [sys.executable, "benchmarks/chaos.py", "--kills", "2", "--steps", "8", "--seed", "5"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 kills, " in done.stdout
    assert "0 torn, 0 lost, 0 wrong" in done.stdout
    expected = {"name": "chaos: bad outcomes of 2 kills", "figure": 0, "bar": 0, "better": "at_most"}
    assert json.loads(done.stdout.splitlines()[-1]) == expected | {"holds": True}


def test_one_bad_outcome_is_one_too_many() -> None:
    words = [sys.executable, "-c", BAD]
    done = subprocess.run(words, cwd=ROOT / "benchmarks", capture_output=True, text=True)
    assert done.returncode == 1
    assert "1 torn, 0 lost, 1 wrong" in done.stdout
    assert json.loads(done.stdout.splitlines()[-1])["holds"] is False
