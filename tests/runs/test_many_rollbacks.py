"""Ten rollbacks in a row, in one process a rank: nothing of them stays behind."""

import gc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ds_pretrain.core.distributed import World
from ds_pretrain.data.loader import Feed
from ds_pretrain.training import rollback as healing
from ds_pretrain.watchdog.replay import Replay
from tests.ranks import run_ranks
from tests.runs.golden import trace
from tests.runs.sick import make_sick_run
from tests.runs.watched import Trouble, Watched, run_watched
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
# What a rollback may add: itself to the state, and to this test's own list of states one, with its memory of
# the watchdog.
A_ROLLBACK_EACH = {
    "Rollback": 1,
    "RunState": 1,
    "WatchdogState": 1,
    "Usual": 2,
}


def held() -> Counter[str]:
    """What of the project's is alive in this process: objects by type, and how much the collections hold."""
    gc.collect()
    ours = [one for one in gc.get_objects() if type(one).__module__.startswith("ds_pretrain.")]
    held = Counter(type(one).__qualname__ for one in ours)
    for one in ours:
        if isinstance(one, Replay):
            held["steps of replays"] += len(one.first)
        elif isinstance(one, Feed):
            held["batches ahead"] += len(one._ahead)
    return held


def _run_held(
    world: World, run_file: str, troubles: list[Trouble], overrides: tuple[str, ...]
) -> tuple[Watched, list[Counter[str]]]:
    """What a rank did, and what was alive after each rollback."""
    found: list[Counter[str]] = []
    roll_back = healing.Watchdog.roll_back

    def counted(*args: Any) -> Any:
        state = roll_back(*args)
        found.append(held())
        return state

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(healing.Watchdog, "roll_back", counted)
        return run_watched(world, run_file, troubles, overrides), found


@pytest.mark.slow
def test_ten_rollbacks_in_a_row_leak_nothing_and_the_run_ends_as_if_there_had_been_none(
    tmp_path: Path,
) -> None:
    model = {**LLAMA, "num_hidden_layers": 1}
    more: dict[str, Any] = {
        "steps": STEPS[-1] + 6,
        "save_every": "3 steps",
        "batch_tokens": 64,
        "micro_sequences": 2,
        "model": model,
    }
    clean_file = make_sick_run(tmp_path / "clean", WATCHDOG, **more)
    sick_file = make_sick_run(tmp_path / "sick", WATCHDOG, **more)
    clean = run_ranks(run_watched, 2, str(clean_file), (), OVERRIDES)
    passing = [Trouble("rate", step, step + 1) for step in STEPS]
    results = run_ranks(_run_held, 2, str(sick_file), passing, OVERRIDES)
    sick = [watched for watched, _ in results]
    for rank, (_, alive) in enumerate(results):
        assert sick[rank].code == 0, sick[rank].said
        assert [r.response for r in sick[rank].final.rollbacks] == ["replay"] * 10
        assert alive[2]["steps of replays"] > 0 or rank > 0
        grown = Counter(
            {kind: alive[9][kind] - alive[2][kind] - 7 * A_ROLLBACK_EACH.get(kind, 0) for kind in alive[9]}
        )
        assert {kind: more for kind, more in grown.items() if more >= 7} == {}  # one a rollback would be 7
        assert all(grown[kind] <= 3 for kind in ("steps of replays", "Seen", "batches ahead"))
        third, last = sick[rank].usage[2], sick[rank].usage[-1]
        assert last.num_threads <= third.num_threads
        assert last.num_files <= third.num_files
        assert last.rss_bytes <= third.rss_bytes + GROWTH_BYTES
        assert sick[rank].digest == clean[rank].digest
        assert sick[rank].streams == clean[rank].streams
    assert trace(tmp_path / "sick" / "out") == trace(tmp_path / "clean" / "out")
