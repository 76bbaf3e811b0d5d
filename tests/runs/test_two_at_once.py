"""Ranks, nodes and programs that meet in one folder: one of them acts, or it is said."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds_pretrain.checkpoint import reshard as reshard_module
from ds_pretrain.checkpoint import restore as restore_module
from ds_pretrain.checkpoint import snapshot, universal
from ds_pretrain.checkpoint.manifest import step_name, universal_folder
from ds_pretrain.checkpoint.retention import prune
from ds_pretrain.checkpoint.storage import StorageLayout
from ds_pretrain.core.distributed import World, barrier
from ds_pretrain.core.errors import EXIT_BAD_INPUT, EXIT_FINISHED, RunError
from tests import harness
from tests.checkpoint import test_restore as test_store
from tests.harness import Record, Stop, start
from tests.ranks import run_ranks
from tests.runs.chaos import look
from tests.scenario import make_run, write_corpus
from tests.tiers import slow


def _spied(world: World, folder: str) -> list[tuple[str, str]]:
    """Save four checkpoints and prune, each rank the first of its host; what this one did to names."""
    host_world, root, done = (
        World(world.rank, world.size, local_rank=0),
        Path(folder),
        list[tuple[str, str]](),
    )
    patch = pytest.MonkeyPatch()

    def spy(owner: Any, name: str) -> None:
        act = getattr(owner, name)

        def spied(*args: Any, **options: Any) -> Any:
            if str(args[0]).startswith(folder) and not (name == "mkdir" and args[0].exists()):
                done.append((name, Path(args[0]).name))
            return act(*args, **options)

        patch.setattr(owner, name, spied)

    for owner, name in ((Path, "mkdir"), (Path, "rename"), (os, "replace"), (shutil, "rmtree")):
        spy(owner, name)
    for step in (3, 6, 9, 12):
        assert test_store._save(root, step, host_world).problem is None
        if host_world.is_main:
            prune(root, keep=2, keep_every=None)
        barrier(world)
    assert restore_module.find_latest(StorageLayout(root, root), host_world) is not None
    patch.undo()
    return done


def test_p21_one_global_rank_creates_renames_and_prunes_whatever_the_local_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(_spied, 2, str(tmp_path))
    assert [name for act, name in first if act == "rename" and "old" not in name] == [
        f"step_00000000{step}.partial" if step < 10 else f"step_0000000{step}.partial" for step in (3, 6)
    ] + ["step_000000009.partial", "step_000000003", "step_000000012.partial", "step_000000006"]
    assert {act for act, _ in first} == {"mkdir", "rename", "replace", "rmtree"}
    assert set(second) <= {("mkdir", "rng")}  # which its own file goes into, if rank 0 has not made it yet


def _lose_a_shard(world: World, folder: str, lost: str) -> Any:
    """Rank 1 writes and syncs, and then its file is gone, or empty."""
    root, write = Path(folder), snapshot.write_summed
    assert test_store._save(root, 3, world).problem is None
    patch = pytest.MonkeyPatch()

    def written(path: Path, value: Any) -> Any:
        entry = write(path, value)
        if world.rank == 1 and "optim_states" in path.name:
            path.unlink()
            if lost == "emptied":
                path.touch()
        return entry

    patch.setattr(snapshot, "write_summed", written)
    outcome = test_store._save(root, 6, world)
    patch.undo()
    return outcome.problem


@pytest.mark.parametrize("lost", ["gone", slow("emptied")])
def test_p21_a_shard_that_is_lost_before_publication_fails_the_save_loudly(tmp_path: Path, lost: str) -> None:
    for problem in run_ranks(_lose_a_shard, 2, str(tmp_path), lost):
        assert problem is not None
        assert "zero_pp_rank_1_mp_rank_00_optim_states.pt" in problem
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", step_name(3)]
    assert (tmp_path / "latest").read_text() == f"{step_name(3)}\n"


@pytest.mark.parametrize("asked", [slow(0), 1])
def test_p23_a_save_that_one_rank_is_asked_for_is_saved_by_all_at_one_step(
    tmp_path: Path, asked: int
) -> None:
    run_file = make_run(tmp_path, steps=6, save_every="100 steps")
    for ended in run_ranks(start, 2, str(run_file), stop=Stop("SIGUSR1", asked, 3)):
        assert ended.code == EXIT_FINISHED
        assert ended.saves == [1, 4, 6]
    assert look(tmp_path / "out").torn == ()
    names = sorted(path.name for path in (tmp_path / "out" / "checkpoints").glob("step_*"))
    assert names == [step_name(step) for step in (1, 4, 6)]


def _start_on_its_own_disk(world: World, folder: str) -> Record:
    """The same words on both ranks; each host has its own disk under the paths in them."""
    os.chdir(Path(folder) / f"host_{world.rank}")
    return start(world, "run.toml")


@pytest.mark.parametrize("corpus", ["text", slow("held_out")])
def test_p40_ranks_whose_hosts_hold_other_files_under_the_same_path_do_not_train(
    tmp_path: Path, corpus: str
) -> None:
    for rank in (0, 1):
        folder = tmp_path / f"host_{rank}"
        run_file = make_run(folder)
        text = run_file.read_text().replace(f'out = "{folder}/out"', f'out = "{tmp_path}/out"')
        run_file.write_text(text.replace(f"{folder}/", ""))
    write_corpus(tmp_path / "host_1" / corpus, 77, num_documents=119)
    ranks = run_ranks(_start_on_its_own_disk, 2, str(tmp_path))
    assert [ended.code for ended in ranks] == [EXIT_BAD_INPUT] * 2
    assert "reads another run file, DeepSpeed JSON, model config or corpus" in ranks[0].stderr
    assert not (tmp_path / "out").exists()


def test_p40_two_prepares_of_one_corpus_at_once_leave_one_whole_corpus(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(40):
        words = [["one", "two", "three"][word] for word in random.integers(0, 3, 20_000)]
        (texts / f"{number:02}.txt").write_text(" ".join(words))
    command = [sys.executable, "-m", "ds_pretrain", "prepare", str(texts), "--tokenizer", "bytes"]
    both = [
        subprocess.Popen([*command, "--out", str(tmp_path / "both")], stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=600)[1] for process in both]
    codes = sorted(process.returncode for process in both)
    assert codes in ([0, 0], [0, EXIT_BAD_INPUT]), said
    assert not any("Traceback" in text for text in said), said
    subprocess.run([*command, "--out", str(tmp_path / "alone")], check=True, capture_output=True)
    for end in ("bin", "idx"):
        assert (tmp_path / f"both.{end}").read_bytes() == (tmp_path / f"alone.{end}").read_bytes()


def _convert_at_once(world: World, folder: str) -> str:
    reshard_module._run_tool = harness.tool_in_this_process
    barrier(world)
    try:
        reshard_module.convert(Path(folder))
    except RunError as error:
        return f"{type(error).__name__}: {error}"
    return "converted"


def test_p40_two_conversions_at_once_leave_one_whole_form(tmp_path: Path) -> None:
    run_file = make_run(tmp_path, steps=3)
    run_ranks(start, 2, str(run_file))
    folder = tmp_path / "out" / "checkpoints" / step_name(3)
    ends = run_ranks(_convert_at_once, 2, str(folder))
    refused = f"InputError: {folder} is being converted by another program; wait until "
    assert sorted(end.startswith(refused) for end in ends if end != "converted") in ([], [True]), ends
    form = universal.open_foreign(universal_folder(folder), [], World())
    assert form.state.step == 3
