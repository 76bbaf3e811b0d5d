"""How often ranks talk to one another in a step: once for the trainer, and never more for the watchdog."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.collectives import counted
from ds_pretrain.core.distributed import World
from ds_pretrain.engine.engine import Update, ZeroEngine
from ds_pretrain.train import main
from ds_pretrain.training.saver import Saver
from tests.ranks import run_ranks
from tests.scenario import deepspeed_json, make_run
from tests.tiers import slow


def _count(world: World, run_file: str, *overrides: str) -> Any:
    """Of each step, from the end of the engine's step before: ours, and all; and whether any had a limit."""
    steps, limits = [], []
    step = ZeroEngine.step
    with counted() as counts, pytest.MonkeyPatch.context() as patch:

        def noting(engine: ZeroEngine, rate: float, norm_limit: float | None = None) -> Update:
            update = step(engine, rate, norm_limit)
            ours = sorted(
                name for (package, name), n in counts.items() for _ in range(n) if package == "ds_pretrain"
            )
            steps.append((ours, sum(counts.values())))
            limits.append(norm_limit is not None)
            counts.clear()
            return update

        patch.setattr(ZeroEngine, "step", noting)
        patch.setattr(Saver, "is_due", lambda self, state: False)  # a save has collectives of its own
        code = main([run_file, "validation=none", *overrides])
    return code, steps[1:], any(limits)  # the first ones open the run


@pytest.mark.parametrize("stage", [slow(2), 3])
def test_a_step_has_one_reduction_of_ours_and_the_watchdog_adds_none(tmp_path: Path, stage: int) -> None:
    dropping = ["watchdog.window=8", "watchdog.skip_update_sigmas=100"]
    found = {}
    for name, words in (("off", ["watchdog.mode=off"]), ("acting", dropping)):
        json = deepspeed_json(stage)
        run_file = make_run(tmp_path / name, deepspeed=json, save_every="1000 steps")
        results = run_ranks(_count, 2, str(run_file), *words)
        for code, steps, limited in results:
            assert code == 0
            assert limited == (name == "acting")
            assert [ours for ours, _ in steps] == [["all_gather"]] * 11
        found[name] = [total for _, steps, _ in results for _, total in steps]
    assert found["acting"] == found["off"]
    assert found["off"][0] > 1  # DeepSpeed's are counted as well
