"""A snapshot writes what it captured, whatever training changes later; training waits only for the copy."""

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ds_pretrain.checkpoint.save import Saves
from ds_pretrain.checkpoint.snapshot import LATER_BYTES, Snapshot
from ds_pretrain.checkpoint.storage import StorageLayout
from ds_pretrain.config.plan import load_plan
from ds_pretrain.core.distributed import World
from ds_pretrain.core.files import Capture
from ds_pretrain.core.state import RunState
from ds_pretrain.engine.engine import Engine
from ds_pretrain.training.setup import open_run_engine
from tests.checkpoint.test_manifest import MANIFEST
from tests.engine.small import step_on, uneven_batch
from tests.ranks import run_ranks
from tests.scenario import make_run

NUM_LARGE = LATER_BYTES // 4


def on_a_thread(act: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def test_whoever_changes_a_master_waits_until_it_is_copied_and_the_wait_is_counted(tmp_path: Path) -> None:
    path, master = tmp_path / "rank_0_optim_states.pt", torch.ones(NUM_LARGE)
    snapshot = Snapshot({})
    wait = snapshot.capture({"master": master}, path)

    def change() -> None:
        wait()
        master.zero_()

    step = on_a_thread(change)
    step.join(0.2)
    assert step.is_alive()  # nothing is copied before `write`
    snapshot.write()
    step.join(60)
    assert not step.is_alive()
    assert snapshot.waited_seconds > 0.1
    assert bool((torch.load(path, weights_only=True)["master"] == 1).all())
    assert bool((master == 0).all())


def test_all_but_large_masters_and_moments_is_copied_at_once(tmp_path: Path) -> None:
    buffer, count = torch.ones(NUM_LARGE), torch.ones(3)
    snapshot = Snapshot({})
    snapshot.capture({"buffer": buffer}, tmp_path / "mp_rank_00_model_states.pt")
    snapshot.capture({"step": count}, tmp_path / "rank_0_optim_states.pt")
    buffer.zero_()
    count.zero_()
    for path in snapshot.write():
        assert all(bool((value == 1).all()) for value in torch.load(path, weights_only=True).values())


class FailsAfterCapture:
    """An engine whose save fails when it has captured a master."""

    def save(self, folder: Path, tag: str, capture: Capture) -> Exception:
        self.wait = capture({"master": torch.ones(NUM_LARGE)}, folder / tag / "rank_0_optim_states.pt")
        return OSError("no room")


def test_nobody_waits_for_a_save_that_failed_to_begin(tmp_path: Path) -> None:
    engine, root = FailsAfterCapture(), tmp_path / "checkpoints"
    saves = Saves(StorageLayout(root, root), World(), lambda step: None)
    outcome = saves.begin(RunState(3), MANIFEST, {}, engine)
    assert outcome is not None
    assert outcome.problem == "rank 0: no room"
    step = on_a_thread(engine.wait)
    step.join(60)
    assert not step.is_alive()


def _note(asked: list[str], engine: Engine) -> None:
    asked.append(engine.digest())


def _change_while_copied(world: World, run_file: str, folder: str) -> Any:
    plan = load_plan(run_file)
    engine, batch = open_run_engine(plan, world), uneven_batch(4)
    step_on(engine, plan, batch, 4, 1e-3, world)
    engine.save(Path(folder), "tag")
    seen = []
    for change in (
        lambda: step_on(engine, plan, batch, 4, 1e-3, world),
        lambda: engine.load(Path(folder), "tag"),
        lambda: step_on(engine, plan, batch, 4, 1e-3, world),
    ):
        before = engine.digest()
        asked: list[str] = []
        wait = partial(_note, asked, engine)
        engine.save(Path(folder), "copied", lambda value, path, wait=wait: wait)  # type: ignore[misc]
        assert asked == []
        change()
        seen.append((len(asked), set(asked) == {before}, engine.digest() == before))
    return seen


def test_the_engine_waits_before_a_step_and_before_a_load(tmp_path: Path) -> None:
    run_file = make_run(tmp_path / "run")
    [seen] = run_ranks(_change_while_copied, 1, str(run_file), str(tmp_path / "shards"))
    assert seen == [(2, True, False)] * 3
