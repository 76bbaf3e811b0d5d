"""Ten rollbacks in a row, in one process a rank: nothing of them stays behind."""

import gc
import os
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ds_pretrain.data.loader import BatchLoader
from ds_pretrain.watchdog.replay import Replay
from tests.harness import Fault, record_run
from tests.ranks import run_ranks
from tests.runs.results import trace
from tests.runs.unhealthy import make_unhealthy_run
from tests.scenario import LLAMA

STEPS = [12 + 6 * i for i in range(10)]  # far enough apart that each is a place of its own
WATCHDOG = """
[watchdog]
window = 8
patience = 3
skip_before = "1 steps"
skip_after = "1 steps"
max_rollbacks = 20
"""
OVERRIDES = ('validation.every="1000 steps"',)
GROWTH_BYTES = 4 * 2**20
# What a rollback may add: itself to the state, and to this test's own list of states one, with its memory of
# the watchdog.
A_ROLLBACK_EACH = {
    "Rollback": 1,
    "RunState": 1,
    "WatchdogState": 1,
    "RunningStats": 3,
}


def held() -> Counter[str]:
    """What of the project's is alive in this process: objects by type, and how much the collections hold."""
    gc.collect()
    ours = [one for one in gc.get_objects() if type(one).__module__.startswith("ds_pretrain.")]
    held = Counter(type(one).__qualname__ for one in ours)
    for one in ours:
        if isinstance(one, Replay):
            held["steps of replays"] += len(one.first)
        elif isinstance(one, BatchLoader):
            held["batches ahead"] += len(one._ahead)
    return held


@dataclass(frozen=True)
class Usage:
    """What a process holds."""

    rss_bytes: int
    num_threads: int
    num_files: int


def usage_and_held() -> tuple[Usage, Counter[str]]:
    """Of this process, now."""
    rss_pages = int(Path("/proc/self/statm").read_text().split()[1])
    threads, files = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
    assert threads >= threading.active_count()
    return Usage(rss_pages * os.sysconf("SC_PAGE_SIZE"), threads, files), held()


@pytest.mark.slow
def test_ten_rollbacks_in_a_row_leak_nothing_and_the_run_ends_as_if_there_had_been_none(
    tmp_path: Path,
) -> None:
    model = {**LLAMA, "num_hidden_layers": 1}
    more: dict[str, Any] = {
        "steps": STEPS[-1] + 6,
        "save_every": "3 steps",
        "batch_tokens": 64,
        "micro_batch_size": 2,
        "model": model,
    }
    clean_file = make_unhealthy_run(tmp_path / "clean", WATCHDOG, **more)
    sick_file = make_unhealthy_run(tmp_path / "sick", WATCHDOG, **more)
    clean = run_ranks(record_run, 2, str(clean_file), OVERRIDES)
    passing = [Fault("rate", step, step + 1) for step in STEPS]
    options: dict[str, Any] = {"faults": passing, "at_rollback": usage_and_held}
    sick = run_ranks(record_run, 2, str(sick_file), OVERRIDES, **options)
    for rank, ended in enumerate(sick):
        usage, alive = zip(*ended.at_rollbacks, strict=True)
        assert ended.code == 0, ended.stderr
        assert [r.response for r in ended.final.rollbacks] == ["replay"] * 10
        assert alive[2]["steps of replays"] > 0 or rank > 0
        grown = Counter(
            {kind: alive[9][kind] - alive[2][kind] - 7 * A_ROLLBACK_EACH.get(kind, 0) for kind in alive[9]}
        )
        assert {kind: more for kind, more in grown.items() if more >= 7} == {}  # one a rollback would be 7
        assert all(grown[kind] <= 3 for kind in ("steps of replays", "Seen", "batches ahead"))
        third, last = usage[2], usage[-1]
        assert last.num_threads <= third.num_threads
        assert last.num_files <= third.num_files
        assert last.rss_bytes <= third.rss_bytes + GROWTH_BYTES
        assert ended.digest == clean[rank].digest
        assert ended.streams == clean[rank].streams
    assert trace(tmp_path / "sick" / "out") == trace(tmp_path / "clean" / "out")
