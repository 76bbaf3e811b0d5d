"""Checkpoints are published whole or not at all, and only whole ones are used: real ranks, small files."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_pretrain.checkpoint import store
from ds_pretrain.checkpoint.layout import parse_manifest, published, step_name
from ds_pretrain.errors import InputError, RunError
from ds_pretrain.state import RunState, Skip, SkipLedger
from ds_pretrain.world import World, barrier
from tests.checkpoint.test_layout import MANIFEST
from tests.ranks import run_ranks

TEXTS = {"run.toml": "name = 'x'\n", "deepspeed.json": "{}", "model.json": "{}"}
FILES = [
    "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
    "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
    "deepspeed.json",
    "model.json",
    "mp_rank_00_model_states.pt",
    "rng/rank_00000.pt",
    "rng/rank_00001.pt",
    "run.toml",
    "run_state.json",
]


class SmallShards:
    """Names its files as DeepSpeed does."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.loaded: str | None = None

    def save(self, folder: Path, tag: str) -> None:
        rank = self.world.rank
        (folder / tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").write_text(f"{tag} {rank}")
        if rank == 0:
            (folder / tag / "mp_rank_00_model_states.pt").write_text(f"{tag} model")

    def load(self, folder: Path, tag: str) -> None:
        self.loaded = f"{folder.name}/{tag}"

    def load_universal(self, folder: Path, tag: str, optimizer_steps: int) -> list[str]:
        raise AssertionError("these ranks are those that saved")

    def group_members(self) -> list[tuple[str, list[str]]]:
        return []


class FullDisk(SmallShards):
    """One rank cannot write its shard."""

    def __init__(self, world: World, rank: int, error: Exception) -> None:
        super().__init__(world)
        self.broken_rank, self.error = rank, error

    def save(self, folder: Path, tag: str) -> None:
        if self.world.rank == self.broken_rank:
            raise self.error
        super().save(folder, tag)


def _save(root: Path, step: int, world: World, shards: SmallShards | None = None) -> Any:
    manifest = replace(MANIFEST, step=step, world_size=world.size, files={})
    state = RunState(step, SkipLedger((Skip("main", 0, 5, "spike", 1, 1),)))
    return store.save(root, state, manifest, TEXTS, shards or SmallShards(world), world)


def _find(root: Path, world: World) -> tuple[str | None, list[str], str | None]:
    """The name of what was found, what was told, and the type and text of what was raised."""
    told: list[str] = []
    try:
        found = store.find(root, world, told.append)
    except RunError as error:
        return None, told, f"{type(error).__name__}: {error}"
    return found.folder.name if found else None, told, None


def _names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def _save_find_restore(world: World, folder: str) -> Any:
    root = Path(folder) / "checkpoints"
    nothing = store.find(root, world, print)
    _save(root, 3, world)
    sealed = _save(root, 6, world)
    found = store.find(root, world, print)
    assert found is not None
    shards = SmallShards(world)
    state = store.restore(found, shards, 7, world, print)
    return nothing, list(sealed.files), found.folder.name, found.manifest == sealed, state, shards.loaded


def test_what_was_saved_is_found_and_restored_on_every_rank(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    for nothing, files, name, same, state, loaded in run_ranks(_save_find_restore, 2, str(tmp_path)):
        assert nothing is None
        assert sorted(files) == FILES
        assert name == "step_000000006"
        assert same
        assert state == RunState(6, SkipLedger((Skip("main", 0, 5, "spike", 1, 1),)))
        assert loaded == "checkpoints/step_000000006"
    assert _names(root) == ["latest", "step_000000003", "step_000000006"]
    assert (root / "latest").read_text() == "step_000000006\n"
    on_disk = {p.relative_to(root / name).as_posix() for p in (root / name).rglob("*") if p.is_file()}
    assert on_disk == {*FILES, "manifest.json"}


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


DAMAGE: dict[str, Callable[[Path], None]] = {"cut": _truncate, "flipped": _flip_a_bit, "gone": Path.unlink}


def _break_each_file(world: World, folder: str) -> Any:
    pristine, root = Path(folder) / "pristine", Path(folder) / "checkpoints"
    _save(pristine, 3, world)
    _save(pristine, 6, world)
    outcomes = {}
    for name in [*FILES, "manifest.json"]:
        for kind, damage in DAMAGE.items():
            if world.is_main:
                shutil.rmtree(root, ignore_errors=True)
                shutil.copytree(pristine, root)
                damage(root / step_name(6) / name)
            barrier(world)
            outcomes[name, kind] = _find(root, world)
            barrier(world)
            if world.is_main:
                outcomes[name, kind] = (*outcomes[name, kind], _names(root))
            barrier(world)
    return outcomes


def test_a_checkpoint_with_any_file_damaged_is_named_set_aside_and_the_one_before_it_used(
    tmp_path: Path,
) -> None:
    first, second = run_ranks(_break_each_file, 2, str(tmp_path))
    assert len(first) == 30
    for (name, kind), (found, told, raised, names) in first.items():
        assert (found, raised) == ("step_000000003", None)
        assert names == ["latest", "step_000000003", "step_000000006.broken"]
        [message] = told
        folder = tmp_path / "checkpoints" / "step_000000006"
        assert message.startswith(f"checkpoint {folder} is broken: ")
        assert message.endswith("; set aside as step_000000006.broken, trying the one before it")
        assert name in message or "manifest" in message
        if name != "manifest.json":
            expected = {
                "cut": "bytes, the manifest says",
                "flipped": "checksum of",
                "gone": "cannot be read",
            }[kind]
            assert expected in message
        assert second[name, kind] == ("step_000000003", [], None)  # the same choice; rank 0 speaks


def _find_among_broken(world: World, folder: str) -> Any:
    root = Path(folder)
    for step in (3, 6):
        _save(root, step, world)
        if world.is_main:
            _flip_a_bit(root / step_name(step) / "mp_rank_00_model_states.pt")
    barrier(world)
    return _find(root, world), _find(root, world)


def test_when_no_checkpoint_verifies_nothing_starts_again(tmp_path: Path) -> None:
    for (found, told, raised), (again, _, raised_again) in run_ranks(_find_among_broken, 2, str(tmp_path)):
        assert found is None
        assert raised is not None
        assert raised.startswith(f"InputError: none of the 2 checkpoints in {tmp_path} verifies")
        assert "a run never silently starts again at step 0" in raised
        assert len(told) in (0, 2)
        assert (again, raised_again) == (
            None,
            None,
        )  # nothing is left: the run directory remembers, and refuses
    assert _names(tmp_path) == ["latest", "step_000000003.broken", "step_000000006.broken"]


def test_a_second_broken_checkpoint_of_a_step_does_not_displace_the_first(tmp_path: Path) -> None:
    world, told = World(), list[str]()
    for _ in range(3):
        _save(tmp_path, 3, world)
        (tmp_path / step_name(3) / "run.toml").unlink()
        with pytest.raises(InputError, match="none of the 1 checkpoints"):
            store.find(tmp_path, world, told.append)
    assert _names(tmp_path) == ["latest", *(f"step_000000003.broken{n}" for n in ("", 2, 3))]


def test_a_torn_folder_is_no_checkpoint_and_the_next_save_of_its_step_replaces_it(tmp_path: Path) -> None:
    world = World()
    _save(tmp_path, 3, world)
    torn = tmp_path / "step_000000006.partial"
    torn.mkdir()
    (torn / "zero_pp_rank_9_mp_rank_00_model_states.pt").write_text("of a save that was killed")
    assert _find(tmp_path, world) == ("step_000000003", [], None)
    sealed = _save(tmp_path, 6, world)
    assert not any("rank_9" in name for name in sealed.files)
    assert _names(tmp_path) == ["latest", "step_000000003", "step_000000006"]
    assert _find(tmp_path, world) == ("step_000000006", [], None)


def test_latest_is_for_people_and_what_it_says_does_not_matter(tmp_path: Path) -> None:
    world = World()
    _save(tmp_path, 3, world)
    _save(tmp_path, 6, world)
    (tmp_path / "latest").write_text("step_000000099\n")
    assert _find(tmp_path, world) == ("step_000000006", [], None)


def test_a_step_saved_again_replaces_the_checkpoint_of_that_step(tmp_path: Path) -> None:
    world = World()
    _save(tmp_path, 3, world)
    (tmp_path / step_name(3) / "left_over").write_text("x")
    _save(tmp_path, 3, world)
    assert not (tmp_path / step_name(3) / "left_over").exists()
    assert _find(tmp_path, world) == ("step_000000003", [], None)


def _save_on_a_full_disk(world: World, folder: str, rank: int, error: Exception) -> Any:
    root = Path(folder)
    _save(root, 3, world)
    with pytest.raises(RunError) as caught:
        _save(root, 6, world, FullDisk(world, rank, error))
    barrier(world)
    return str(caught.value), _find(root, world), _names(root)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("file write failed")])
def test_a_save_that_fails_on_one_rank_fails_on_all_and_publishes_nothing(
    tmp_path: Path, rank: int, error: Exception
) -> None:
    for message, found, names in run_ranks(_save_on_a_full_disk, 2, str(tmp_path), rank, error):
        assert message == (
            f"checkpoint step_000000006 was not saved (rank {rank}: {error}); the one before it is intact"
        )
        assert found == ("step_000000003", [], None)
        assert names == ["latest", "step_000000003", "step_000000006.partial"]
    assert (tmp_path / "latest").read_text() == "step_000000003\n"


def _fail_in(world: World, folder: str, name: str) -> Any:
    root = Path(folder)
    _save(root, 3, world)
    patch = pytest.MonkeyPatch()

    def refuse(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    if world.rank == 1 or name in ("write_atomic", "_start_partial"):  # the latter two run on rank 0 alone
        patch.setattr(store, name, refuse)
    with pytest.raises(RunError) as caught:
        _save(root, 6, world)
    barrier(world)
    patch.undo()
    return str(caught.value), _find(root, world)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("save_streams", "checkpoint step_000000006 was not saved (rank 1: [Errno 5] Input/output error)"),
        ("sync_file", "checkpoint step_000000006 was not saved (rank 1: [Errno 5] Input/output error)"),
        ("_start_partial", "rank 0: [Errno 5] Input/output error"),
        ("write_atomic", "rank 0: [Errno 5] Input/output error"),
    ],
)
def test_a_failure_at_any_stage_of_a_save_reaches_every_rank(tmp_path: Path, name: str, message: str) -> None:
    for raised, found in run_ranks(_fail_in, 2, str(tmp_path), name):
        assert raised.startswith(message)
        assert found == ("step_000000003", [], None)


def _find_on(world: World, folder: str) -> Any:
    return _find(Path(folder), world)


def test_a_checkpoint_of_another_number_of_ranks_is_found_like_any_other(tmp_path: Path) -> None:
    _save(tmp_path, 3, World())
    for found, told, raised in run_ranks(_find_on, 2, str(tmp_path)):
        assert (found, told, raised) == ("step_000000003", [], None)


def test_a_disk_that_fails_while_a_checkpoint_is_checked_makes_it_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    _save(tmp_path, 3, world)

    def refuse(path: Path) -> str:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(store, "checksum", refuse)
    _, [message], _ = _find(tmp_path, world)
    assert "cannot be read to its end (Input/output error)" in message


def test_pruning_keeps_the_newest_and_deletes_what_killed_saves_left(tmp_path: Path) -> None:
    world, told = World(), list[str]()
    for step in (3, 6, 9, 12):
        _save(tmp_path, step, world)
    (tmp_path / "step_000000007.partial").mkdir()
    (tmp_path / "step_000000001.broken").mkdir()
    store.prune(tmp_path, 2, world, told.append)
    assert [path.name for path in published(tmp_path)] == ["step_000000012", "step_000000009"]
    assert _names(tmp_path) == ["latest", "step_000000001.broken", "step_000000009", "step_000000012"]
    assert told == []
    store.prune(tmp_path, 5, world, told.append)
    assert len(published(tmp_path)) == 2


def test_a_deletion_that_fails_is_told_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, told = World(), list[str]()
    for step in (3, 6):
        _save(tmp_path, step, world)

    def refuse(path: Path) -> None:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(shutil, "rmtree", refuse)
    store.prune(tmp_path, 1, world, told.append)
    torn = tmp_path / "step_000000003.partial"
    assert told == [f"cannot delete {torn}: [Errno 16] Device or resource busy; training goes on"]
    assert _find(tmp_path, world) == ("step_000000006", [], None)  # half deleted, it is no checkpoint

    told.clear()
    monkeypatch.undo()
    _save(tmp_path, 9, world)
    monkeypatch.setattr(Path, "rename", lambda self, target: refuse(self))
    store.prune(tmp_path, 1, world, told.append)
    assert told == [
        f"cannot delete the old checkpoint {tmp_path / step_name(6)}: "
        "[Errno 16] Device or resource busy; training goes on"
    ]


def test_the_manifest_is_written_last_and_names_every_file_with_its_size(tmp_path: Path) -> None:
    _save(tmp_path, 3, World())
    folder = tmp_path / step_name(3)
    manifest = parse_manifest((folder / "manifest.json").read_text())
    sizes = {name: (folder / name).stat().st_size for name in manifest.files}
    assert {name: entry.bytes for name, entry in manifest.files.items()} == sizes
    assert manifest.total_bytes == sum(sizes.values())
