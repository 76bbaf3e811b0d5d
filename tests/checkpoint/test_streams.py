"""Random streams over a save and a load by real ranks: each its own, or the start stops."""

import hashlib
import pickle
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ds_pretrain.checkpoint import restore as restore_module
from ds_pretrain.checkpoint.manifest import MANIFEST, FileEntry, parse_manifest
from ds_pretrain.checkpoint.rng import load_streams, rng_file, seed_streams
from ds_pretrain.checkpoint.storage import StorageLayout
from ds_pretrain.core.distributed import World
from ds_pretrain.core.errors import EXIT_FINISHED
from tests.checkpoint import test_restore as test_store
from tests.harness import start
from tests.ranks import run_ranks
from tests.runs.chaos import look
from tests.scenario import make_run


def _draws() -> list[float]:
    """From python, numpy and torch; on a machine with a GPU, from that too."""
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.normal()),  # noqa: NPY002 - the stream that libraries draw from
        float(torch.randn(())),
        float(torch.randn((), device="cuda" if torch.cuda.is_available() else "cpu")),
    ]


def _save_after_draws(world: World, folder: str) -> list[list[float]]:
    """Each rank draws another number of times before the save; what it would draw afterwards."""
    seed_streams(7, world.rank)
    for _ in range(3 + 5 * world.rank):
        _draws()
    outcome = test_store._save(Path(folder), 3, world)
    assert outcome.problem is None
    return [_draws() for _ in range(4)]


def _draws_after_restore(world: World, folder: str) -> list[list[float]]:
    seed_streams(99, 1 - world.rank)  # a fresh process has streams too, others
    found = restore_module.find_latest(StorageLayout(Path(folder), Path(folder)), world)
    assert found is not None
    restore_module.restore(found, test_store.SmallShards(world), 7, world)
    return [_draws() for _ in range(4)]


def test_p07_each_rank_goes_on_with_its_own_streams_in_new_processes(tmp_path: Path) -> None:
    expected = run_ranks(_save_after_draws, 2, str(tmp_path))
    assert expected[0] != expected[1]
    assert run_ranks(_draws_after_restore, 2, str(tmp_path)) == expected


class Foreign:
    """Something that safe loading does not let in."""


def _hold_a_pickled_object(path: Path) -> None:
    torch.save({"python": Foreign()}, path)


def _hold_a_bare_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps(Foreign()))


def _lack_a_stream(path: Path) -> None:
    streams = torch.load(path, weights_only=True)
    del streams["numpy"]
    torch.save(streams, path)


def _be_garbage(path: Path) -> None:
    path.write_bytes(b"\0" * 500)


WRONG: dict[str, Callable[[Path], None]] = {
    "a pickled object": _hold_a_pickled_object,
    "a bare pickle": _hold_a_bare_pickle,
    "no numpy stream": _lack_a_stream,
    "garbage": _be_garbage,
    "nothing": Path.unlink,
}


@pytest.mark.parametrize("kind", WRONG)
def test_p08_streams_that_cannot_be_restored_raise(tmp_path: Path, kind: str) -> None:
    test_store._save(tmp_path, 3, World())
    folder = tmp_path / "step_000000003"
    load_streams(folder, 0)
    WRONG[kind](folder / rng_file(0))
    with pytest.raises(Exception):  # noqa: B017 - whatever it is: it is not passed over
        load_streams(folder, 0)


@pytest.mark.parametrize(
    "kind",
    ["a pickled object", *(pytest.param(k, marks=pytest.mark.slow) for k in ("no numpy stream", "nothing"))],
)
def test_p08_a_start_whose_streams_cannot_be_restored_trains_no_step(tmp_path: Path, kind: str) -> None:
    """Even where the manifest vouches for the file, on one rank of two."""
    run_file = make_run(tmp_path, steps=6)
    assert [ended.code for ended in run_ranks(start, 2, str(run_file))] == [EXIT_FINISHED] * 2
    out = tmp_path / "out"
    (out / "checkpoints" / "step_000000006").rename(tmp_path / "kept")
    folder = out / "checkpoints" / "step_000000003"
    name = rng_file(1)
    WRONG[kind](folder / name)
    manifest = parse_manifest((folder / MANIFEST).read_text())
    files = dict(manifest.files)
    del files[name]
    if (folder / name).exists():
        content = (folder / name).read_bytes()
        files[name] = FileEntry(len(content), hashlib.sha256(content).hexdigest())
    (folder / MANIFEST).write_text(replace(manifest, files=files).to_json())
    before = (out / "metrics.jsonl").read_bytes()
    ranks: list[Any] = run_ranks(start, 2, str(run_file))
    assert all(ended.code not in (EXIT_FINISHED, 75) for ended in ranks)
    assert (
        "rank_00001.pt" in ranks[1].stderr or "weights_only" in ranks[1].stderr or "numpy" in ranks[1].stderr
    )
    steps = (out / "metrics.jsonl").read_bytes()[len(before) :]
    assert b'"event": "step"' not in steps
    assert look(out).newest == 3
