"""SIGKILL at every write point and at any moment: nothing saved is lost, and the result is bit for bit."""

import random
import shutil
from collections.abc import Callable
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ds_pretrain.checkpoint.manifest import parse_step
from ds_pretrain.checkpoint.verify import recover
from tests.checkpoint.test_upload import POINTS
from tests.harness import Kill, record_run, restore_and_save, start
from tests.ranks import KILLED, run_ranks
from tests.runs.chaos import SHIPPING_MODULES, Left, look, lost, write_points
from tests.runs.results import trace, validations
from tests.runs.unhealthy import CURE_POINTS
from tests.scenario import LLAMA, deepspeed_json, make_run
from tests.tiers import slow

INTERVAL = 2
SHARD = "*zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt"
OWN = [
    (rank, name)
    for rank in (0, 1)
    for name in (
        SHARD.format(rank=rank, kind="optim"),
        SHARD.format(rank=rank, kind="model"),
        f"rank_0000{rank}.pt",
    )
]
WRITTEN = [*OWN, *((0, name) for name in ("run.toml", "deepspeed.json", "model.json", "run_state.json"))]
# Each other one at the second save of its start, so that the run gets on.
WRITES = [
    Kill(rank, f"{moment} {name}", passes=(place + late) % 2)
    for late, moment in enumerate(("write", "sync"))
    for place, (rank, name) in enumerate(WRITTEN)
]
PUBLISHING = [
    Kill(0, point, passes)
    for point in ("manifest", "rename", "sync the folder", "latest")
    for passes in (0, 1)
]
PRUNING = [Kill(0, "prune"), Kill(0, "delete"), Kill(0, "delete", passes=1)]
CONVERTING = [Kill(0, f"convert_{at}") for at in ("begin", "check", "global", "manifest", "publish", "clean")]
SAVED_AGAIN = [Kill(0, point) for point in ("set the old one aside", "rename", "sync the folder")]
FETCHING = [
    Kill(0, "fetch *"),
    Kill(1, "fetch *optim_states.pt"),
    Kill(0, "fetched *optim_states.pt"),
    Kill(1, "fetched *"),
    Kill(0, "publish fetched"),
]
# One of each kind, for every run of the tests; the others are in the slow tier.
SOME = [
    Kill(1, "write *optim_states.pt", passes=1),
    Kill(0, "write run_state.json"),
    Kill(0, "sync *model_states.pt", passes=1),
    *(Kill(0, point) for point in ("manifest", "rename", "sync the folder", "latest")),
    *(Kill(0, point, passes=1) for point in ("prune", "delete")),
]
SEEDED = random.Random(1)
# Slow steps: the fastest machine shall not come to the end of the run.
MOMENTS = [Kill(place % 2, seconds=SEEDED.uniform(0.2, 1.6), step_sleeps=0.2) for place in range(8)]


def test_every_write_point_of_the_source_is_killed_at() -> None:
    """Here; in the process that ships, tests/checkpoint/test_upload.py kills at each in turn."""
    kills = [*WRITES, *PUBLISHING, *PRUNING, *CONVERTING, *SAVED_AGAIN, *FETCHING]
    found = write_points()
    assert {point for module in SHIPPING_MODULES for point in found[module]} == set(POINTS)
    points = {point for module in found.keys() - SHIPPING_MODULES for point in found[module]}
    points -= {*CURE_POINTS, "publish branch"}  # test_rollback.py kills at those, test_branch.py at this one
    assert {"write *", "manifest", "convert_begin"} <= points
    killed = {
        point for point in points for kill in kills if kill.point is not None and fnmatch(kill.point, point)
    }
    assert killed == points


def _make(folder: Path, **more: Any) -> Path:
    options = {"steps": 40, "batch_tokens": 32, "micro_batch_size": 1, "save_every": f"{INTERVAL} steps"}
    return make_run(folder, **{**options, **more})


def _kill(run_file: Path, kill: Kill, before: Left, ranks: int = 2, overrides: tuple[str, ...] = ()) -> Left:
    """Start, and be killed; what is left of it, which must be all that there was."""
    ended = run_ranks(record_run, ranks, str(run_file), overrides, kill=kill, allow_kill=True)
    after = look(run_file.parent / "out")
    assert after.torn == (), kill
    assert lost(before, after, INTERVAL) is None, kill
    if kill.seconds is None:
        assert ended == [KILLED] * ranks, f"{kill} was never reached"
    return after


Straight = Callable[..., tuple[list[Any], Path]]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Straight:
    """By ZeRO stage and length, what each rank of a run that was never killed returned, and its directory."""

    @cache
    def train(stage: int, steps: int = 40) -> tuple[list[Any], Path]:
        folder = tmp_path_factory.mktemp("straight")
        run_file = _make(folder, deepspeed=deepspeed_json(stage), steps=steps)
        return run_ranks(record_run, 2, str(run_file)), run_file.parent / "out"

    return train


def _assert_bitwise(
    run_file: Path, straight: tuple[list[Any], Path], overrides: tuple[str, ...] = ()
) -> None:
    """Start for the last time; the whole run must be the one that was never killed."""
    out, (expected, other) = run_file.parent / "out", straight
    finished = run_ranks(record_run, len(expected), str(run_file), overrides)
    assert [rank.digest for rank in finished] == [rank.digest for rank in expected]
    assert trace(out) == trace(other)
    assert validations(out) == validations(other)


@pytest.mark.parametrize(
    ("stage", "steps", "kills"),
    [
        pytest.param(3, 20, SOME, id="one of a kind"),
        slow(3, 40, WRITES[: len(WRITTEN)], id="write"),
        slow(3, 40, WRITES[len(WRITTEN) :: 3], id="sync"),
        slow(3, 40, [*PUBLISHING, *PRUNING], id="publish and prune"),
        slow(1, 40, MOMENTS, id="random moments"),
    ],
)
def test_p19_a_run_killed_in_every_way_is_bitwise_the_run_that_never_was(
    tmp_path: Path, straight: Straight, stage: int, steps: int, kills: list[Kill]
) -> None:
    run_file = _make(tmp_path, deepspeed=deepspeed_json(stage), steps=steps)
    assert sum(kill.seconds or 0 for kill in kills) < 40 * 0.2
    left = Left(0, 0, 0, ())
    for kill in kills:
        left = _kill(run_file, kill, left, overrides=("checkpoint.keep_last=2",))
    _assert_bitwise(run_file, straight(stage, steps), ("checkpoint.keep_last=2",))


@pytest.mark.parametrize("kills", [[CONVERTING[2], CONVERTING[4]], slow(CONVERTING)], ids=["some", "all"])
def test_a_conversion_killed_at_every_point_goes_on_to_the_same_bits(
    tmp_path: Path, kills: list[Kill]
) -> None:
    """Two ranks, then one; the one is killed in its conversion, again and again."""
    options = {"steps": 6, "save_every": "2 steps", "model": {**LLAMA, "attention_dropout": 0.0}}
    straight_file, killed_file = (_make(tmp_path / name, **options) for name in ("straight", "killed"))
    for run_file in (straight_file, killed_file):
        assert run_ranks(record_run, 2, str(run_file), kill=Kill(1, "write *", 9), allow_kill=True) == (
            [KILLED] * 2
        )
    left = look(killed_file.parent / "out")
    assert left.newest == 4
    straight = (run_ranks(record_run, 1, str(straight_file)), straight_file.parent / "out")
    for kill in kills:
        left = _kill(killed_file, kill, left, ranks=1)
        assert left.newest == 4
    _assert_bitwise(killed_file, straight)


@pytest.mark.parametrize("kills", [[FETCHING[1], FETCHING[4]], slow(FETCHING)], ids=["some", "all"])
def test_a_start_killed_while_it_fetches_what_was_shipped_goes_on_to_the_same_bits(
    tmp_path: Path, straight: Straight, kills: list[Kill]
) -> None:
    run_file, vault = _make(tmp_path, deepspeed=deepspeed_json(3), steps=8), tmp_path / "vault"
    overrides = (f"checkpoint.upload_to={vault}",)
    assert [ended.code for ended in run_ranks(start, 2, str(run_file), overrides)] == [0, 0]
    shutil.rmtree(tmp_path / "out" / "checkpoints")  # the disk is lost; at the place, what came after step 4
    for folder in vault.glob("step_*"):
        if parse_step(folder.name) not in (2, 4):
            shutil.rmtree(folder)
    for kill in kills:
        if kill.rank == 1:  # which may have all of its files from the start before
            shutil.rmtree(tmp_path / "out" / "checkpoints", ignore_errors=True)
        assert (
            run_ranks(record_run, 2, str(run_file), overrides, kill=kill, allow_kill=True) == [KILLED] * 2
        ), kill
        assert look(tmp_path / "out").torn == (), kill
        assert look(tmp_path / "out").newest == 0, kill
    _assert_bitwise(run_file, straight(3, 8), overrides)


@pytest.mark.parametrize("kills", [SAVED_AGAIN[1:2], slow(SAVED_AGAIN)], ids=["some", "all"])
def test_a_kill_while_a_step_is_saved_again_leaves_a_checkpoint_of_that_step(
    tmp_path: Path, kills: list[Kill]
) -> None:
    run_file = _make(tmp_path, steps=6)
    run_ranks(record_run, 2, str(run_file))
    left = look(tmp_path / "out")
    assert left.newest == 6
    for kill in kills:
        assert run_ranks(restore_and_save, 2, str(run_file), kill=kill, allow_kill=True) == [KILLED] * 2
        list(recover(tmp_path / "out" / "checkpoints"))  # what a start does first
        assert look(tmp_path / "out").newest == 6, kill
        assert look(tmp_path / "out").torn == ()
