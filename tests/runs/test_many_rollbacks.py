"""Ten rollbacks in a row, in one process a rank: nothing of them stays behind."""

from pathlib import Path
from typing import Any

from tests.ranks import run_ranks
from tests.runs.golden import trace
from tests.runs.sick import make_sick_run
from tests.runs.watched import Trouble, run_watched
from tests.scenario import LLAMA

STEPS = [12 + 6 * i for i in range(10)]  # far enough apart that each is a place of its own
WATCHDOG = """
[watchdog]
window = 8
patience = 3
skip_before = "1 steps"
skip_after = "1 steps"
rollbacks = 20
"""
OVERRIDES = ('validation.every="1000 steps"',)
GROWTH_BYTES = 4 * 2**20


def test_ten_rollbacks_in_a_row_leak_nothing_and_the_run_ends_as_if_there_had_been_none(
    tmp_path: Path,
) -> None:
    model = {**LLAMA, "num_hidden_layers": 1}
    more: dict[str, Any] = {
        "steps": STEPS[-1] + 6,
        "save_every": "3 steps",
        "batch_tokens": 64,
        "model": model,
    }
    clean_file = make_sick_run(tmp_path / "clean", WATCHDOG, **more)
    sick_file = make_sick_run(tmp_path / "sick", WATCHDOG, **more)
    clean = run_ranks(run_watched, 2, str(clean_file), (), OVERRIDES)
    passing = [Trouble("rate", step, step + 1) for step in STEPS]
    sick = run_ranks(run_watched, 2, str(sick_file), passing, OVERRIDES)
    for rank in (0, 1):
        assert sick[rank].code == 0, sick[rank].said
        assert [r.response for r in sick[rank].final.rollbacks] == ["replay"] * 10
        third, last = sick[rank].usage[2], sick[rank].usage[-1]
        assert last.num_threads <= third.num_threads
        assert last.num_files <= third.num_files
        assert last.rss_bytes <= third.rss_bytes + GROWTH_BYTES
        assert sick[rank].digest == clean[rank].digest
        assert sick[rank].streams == clean[rank].streams
    assert trace(tmp_path / "sick" / "out") == trace(tmp_path / "clean" / "out")
