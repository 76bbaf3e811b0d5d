"""Checkpoints are published whole or not at all, and only whole ones are used: real ranks, small files."""

import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_pretrain.checkpoint import restore as restore_module
from ds_pretrain.checkpoint import save as save_module
from ds_pretrain.checkpoint import snapshot
from ds_pretrain.checkpoint import storage as storage_module
from ds_pretrain.checkpoint.manifest import list_published, parse_manifest, step_name
from ds_pretrain.checkpoint.retention import KNOWN_GOOD, PINNED, prune, select_expired
from ds_pretrain.checkpoint.save import SaveOutcome, Saves
from ds_pretrain.checkpoint.storage import StorageLayout
from ds_pretrain.config.timeline import Multiples
from ds_pretrain.core.distributed import World, barrier
from ds_pretrain.core.errors import InputError, RunError
from ds_pretrain.core.files import Capture
from ds_pretrain.core.state import Rollback, RunState, Skip, SkipLedger
from ds_pretrain.training.rollback import list_saved_steps
from tests.checkpoint.saving import save_now
from tests.checkpoint.test_manifest import MANIFEST
from tests.ranks import heard, run_ranks

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

    def save(self, folder: Path, tag: str, capture: Capture) -> None:
        rank = self.world.rank
        shard = torch.full((8,), rank)
        capture({tag: shard}, folder / tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        if rank == 0:
            capture({"model": tag}, folder / tag / "mp_rank_00_model_states.pt")
        shard.zero_()  # training goes on: what is written is what was captured

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

    def save(self, folder: Path, tag: str, capture: Capture) -> Exception | None:
        super().save(folder, tag, capture)
        return self.error if self.world.rank == self.broken_rank else None


def _save(root: Path, step: int, world: World, shards: SmallShards | None = None) -> SaveOutcome:
    manifest = replace(MANIFEST, step=step, world_size=world.size, files={})
    state = RunState(step, SkipLedger((Skip("main", 0, 5, "spike", 1, 1),)))
    return save_now(root, state, manifest, TEXTS, shards or SmallShards(world), world)


def _find(root: Path, world: World) -> tuple[str | None, list[str], str | None]:
    """The name of what was found, what was told, and the type and text of what was raised."""
    with heard() as told:
        try:
            found = restore_module.find_latest(StorageLayout(root, root), world)
        except RunError as error:
            return None, told, f"{type(error).__name__}: {error}"
    return found.folder.name if found else None, told, None


def _names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def _save_find_restore(world: World, folder: str) -> Any:
    root = Path(folder) / "checkpoints"
    nothing = restore_module.find_latest(StorageLayout(root, root), world)
    _save(root, 3, world)
    saved = _save(root, 6, world)
    found = restore_module.find_latest(StorageLayout(root, root), world)
    assert found is not None
    shards = SmallShards(world)
    state = restore_module.restore(found, shards, 7, world)
    written = torch.load(found.folder / FILES[1], weights_only=True)[f"{found.folder.name}.partial"].tolist()
    same = saved.problem is None and saved.bytes == found.manifest.total_bytes and written == [1] * 8
    return nothing, list(found.manifest.files), found.folder.name, same, state, shards.loaded


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
        assert message.endswith("; renamed to step_000000006.broken, trying the one before it")
        assert Path(name).name in message or "manifest" in message
        if name != "manifest.json":
            expected = {
                "cut": "bytes, the manifest says",
                "flipped": "checksum of",
                "gone": "cannot be read",
            }[kind]
            assert expected in message
        assert second[name, kind] == ("step_000000003", told, None)  # the same choice, for the same reason


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
        assert raised.startswith(f"InputError: no checkpoint in {tmp_path} verifies")
        assert "a run never restarts at step 0 by itself" in raised
        assert len(told) == 2
        assert again is None
        assert raised_again == raised  # what was set aside is remembered too


def test_a_second_broken_checkpoint_of_a_step_does_not_displace_the_first(tmp_path: Path) -> None:
    world = World()
    for _ in range(3):
        _save(tmp_path, 3, world)
        (tmp_path / step_name(3) / "run.toml").unlink()
        with pytest.raises(InputError, match=r"no checkpoint in .* verifies"):
            restore_module.find_latest(StorageLayout(tmp_path, tmp_path), world)
    assert _names(tmp_path) == ["latest", *(f"step_000000003.broken{n}" for n in ("", 2, 3))]


def test_a_torn_folder_is_no_checkpoint_and_the_next_save_of_its_step_replaces_it(tmp_path: Path) -> None:
    world = World()
    _save(tmp_path, 3, world)
    torn = tmp_path / "step_000000006.partial"
    torn.mkdir()
    (torn / "zero_pp_rank_9_mp_rank_00_model_states.pt").write_text("of a save that was killed")
    told = "step_000000006.partial is an unfinished save; skipped, and deleted after the next save"
    assert _find(tmp_path, world) == ("step_000000003", [told], None)
    _save(tmp_path, 6, world)
    assert "rank_9" not in (tmp_path / "step_000000006/manifest.json").read_text()
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
    outcome = _save(root, 6, world, FullDisk(world, rank, error))
    barrier(world)
    return outcome.problem, _find(root, world), _names(root)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("file write failed")])
def test_a_save_that_fails_on_one_rank_fails_on_all_and_publishes_nothing(
    tmp_path: Path, rank: int, error: Exception
) -> None:
    for problem, found, names in run_ranks(_save_on_a_full_disk, 2, str(tmp_path), rank, error):
        assert problem == f"rank {rank}: {error}"
        assert found == ("step_000000003", [], None)
        assert names == ["latest", "step_000000003"]
    assert (tmp_path / "latest").read_text() == "step_000000003\n"


def _fail_at(world: World, folder: str, rank: int, point: str) -> Any:
    root = Path(folder)
    _save(root, 3, world)
    patch = pytest.MonkeyPatch()

    def refuse(name: str) -> None:
        if name.startswith(point):
            raise OSError(5, "Input/output error")

    if world.rank == rank:
        for module in (save_module, snapshot):
            patch.setattr(module, "write_point", refuse)
    outcome = _save(root, 6, world)
    barrier(world)
    patch.undo()
    return outcome.problem, _find(root, world)


@pytest.mark.parametrize(
    ("rank", "point"),
    [
        (0, "manifest"),
        *(
            pytest.param(rank, point, marks=pytest.mark.slow)
            for rank, point in ((1, "write rank"), (1, "sync"), (0, "write run_state"), (0, "rename"))
        ),
    ],
)
def test_a_failure_at_any_point_of_a_save_reaches_every_rank(tmp_path: Path, rank: int, point: str) -> None:
    for problem, found in run_ranks(_fail_at, 2, str(tmp_path), rank, point):
        assert problem == f"rank {rank}: [Errno 5] Input/output error"
        assert found == ("step_000000003", [], None)


def test_too_little_room_is_found_before_anything_is_written(tmp_path: Path) -> None:
    world = World()
    _save(tmp_path, 3, world)
    room = Saves(StorageLayout(tmp_path, tmp_path), world, lambda step: None, expected_bytes=10**18)
    outcome = room.begin(RunState(6), replace(MANIFEST, step=6), TEXTS, SmallShards(world))
    assert outcome is not None
    assert "bytes free, and a checkpoint needs 1,000,000,000,000,000,000" in str(outcome.problem)
    assert _names(tmp_path) == ["latest", "step_000000003"]


def _goes_on_while_written(world: World, folder: str) -> Any:
    root, told = Path(folder), list[int]()
    several = Saves(StorageLayout(root, root), world, told.append)
    gate = threading.Event()
    patch = pytest.MonkeyPatch()
    patch.setattr(snapshot, "write_point", lambda name: gate.wait(30))
    begun = several.begin(RunState(3), replace(MANIFEST, step=3), TEXTS, SmallShards(world))
    while_writing = (several.progress != 0, several.advance([several.progress] * world.size), _names(root))
    gate.set()
    outcome = several.finish()
    patch.undo()
    return begun, while_writing, outcome and outcome.problem, several.progress != 0, _names(root), told


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    results = run_ranks(_goes_on_while_written, 2, str(tmp_path))
    for rank, (begun, while_writing, problem, busy, names, told) in enumerate(results):
        assert begun is None
        assert while_writing == (True, None, ["step_000000003.partial"])
        assert problem is None
        assert not busy
        assert names == ["latest", "step_000000003"]
        assert told == ([3] if rank == 0 else [])


def _find_on(world: World, folder: str) -> Any:
    return _find(Path(folder), world)


def test_a_checkpoint_of_another_number_of_ranks_is_found_like_any_other(tmp_path: Path) -> None:
    _save(tmp_path, 3, World())
    for found, told, raised in run_ranks(_find_on, 2, str(tmp_path)):
        assert (found, told, raised) == ("step_000000003", [], None)


def test_a_disk_that_does_not_answer_says_nothing_about_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    _save(tmp_path, 3, world)

    def refuse(path: Path) -> str:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(storage_module, "compute_checksum", refuse)
    found, told, raised = _find(tmp_path, world)
    assert (found, told) == (None, [])
    assert "cannot be checked ([Errno 5] Input/output error); it is not changed" in str(raised)
    monkeypatch.undo()
    assert _find(tmp_path, world) == ("step_000000003", [], None)


def test_pruning_keeps_the_newest_and_deletes_what_killed_saves_left(tmp_path: Path) -> None:
    world = World()
    for step in (3, 6, 9, 12):
        _save(tmp_path, step, world)
    (tmp_path / "step_000000007.partial").mkdir()
    (tmp_path / "step_000000001.broken").mkdir()
    with heard() as told:
        prune(tmp_path, keep=2, keep_every=None)
    assert [path.name for path in list_published(tmp_path)] == ["step_000000012", "step_000000009"]
    assert _names(tmp_path) == ["latest", "step_000000001.broken", "step_000000009", "step_000000012"]
    assert told == []
    prune(tmp_path, keep=5, keep_every=None)
    assert len(list_published(tmp_path)) == 2


def test_a_deletion_that_fails_is_told_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    for step in (3, 6):
        _save(tmp_path, step, world)

    def refuse(path: Path) -> None:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with heard() as told:
        prune(tmp_path, keep=1, keep_every=None)
    torn = tmp_path / "step_000000003.expired.partial"
    assert told == [f"cannot delete {torn}: [Errno 16] Device or resource busy; training continues"]
    assert _find(tmp_path, world) == ("step_000000006", [], None)  # half deleted, it is no checkpoint

    monkeypatch.undo()
    _save(tmp_path, 9, world)
    monkeypatch.setattr(Path, "rename", lambda self, target: refuse(self))
    with heard() as told:
        prune(tmp_path, keep=1, keep_every=None)
    assert told == [
        f"cannot delete the old checkpoint {tmp_path / step_name(6)}: [Errno 16] Device or resource busy; "
        f"training continues"
    ]


def test_the_first_checkpoint_at_or_after_each_multiple_stays_where_none_lies_on_it() -> None:
    """As with saves by the clock, or multiples of tokens: 10 tokens a step, from step 30 on 100."""
    steps = [3, 9, 14, 21, 28, 33, 41, 47]
    tens = Multiples(10, ((0, 0, 1),))
    assert select_expired(steps, keep=1, keep_every=tens, protected=()) == [3, 9, 28]
    tokens = Multiples(1000, ((0, 0, 10), (30, 300, 100)))  # 600 tokens at step 33, 1,400 at 41, 2,000 at 47
    assert select_expired(steps, keep=1, keep_every=tokens, protected=()) == [3, 9, 14, 21, 28, 33]
    assert select_expired([*steps, 60], keep=1, keep_every=tokens, protected=()) == [3, 9, 14, 21, 28, 33]


def test_retention_keeps_the_newest_every_nth_the_pinned_and_the_newest_calm(tmp_path: Path) -> None:
    steps = [1, 10, 20, 30, 40, 50]
    assert select_expired(steps, keep=2, keep_every=None, protected=()) == [1, 10, 20, 30]
    assert select_expired(steps, keep=1, keep_every=Multiples(20, ((0, 0, 1),)), protected=()) == [1, 10, 30]
    assert select_expired(steps, keep=1, keep_every=None, protected={10, 30}) == [1, 20, 40]
    for step in steps:
        _save(tmp_path, step, World())
    (tmp_path / step_name(10) / PINNED).touch()
    for step in (1, 30):
        (tmp_path / step_name(step) / KNOWN_GOOD).touch()
    prune(tmp_path, keep=1, keep_every=Multiples(40, ((0, 0, 1),)))
    assert [path.name for path in list_published(tmp_path)] == [step_name(step) for step in (50, 40, 30, 10)]
    assert _find(tmp_path, World()) == ("step_000000050", [], None)


def test_the_manifest_is_written_last_and_names_every_file_with_its_size(tmp_path: Path) -> None:
    _save(tmp_path, 3, World())
    folder = tmp_path / step_name(3)
    manifest = parse_manifest((folder / "manifest.json").read_text())
    sizes = {name: (folder / name).stat().st_size for name in manifest.files}
    assert {name: entry.bytes for name, entry in manifest.files.items()} == sizes
    assert manifest.total_bytes == sum(sizes.values())


def test_p19_what_a_kill_left_without_its_name_is_named_and_gets_it_back_if_it_is_whole(
    tmp_path: Path,
) -> None:
    """Between the two renames of a step that is saved again, neither the old nor the new one has the name."""
    world = World()
    for step in (3, 6):
        _save(tmp_path, step, world)
    whole = tmp_path / "step_000000006"
    shutil.copytree(whole, tmp_path / "step_000000006.replaced.partial")
    whole.rename(tmp_path / "step_000000006.partial")
    shutil.copytree(tmp_path / "step_000000003", tmp_path / "step_000000009.partial")
    (tmp_path / "step_000000009.partial" / "manifest.json").unlink()
    found, told, raised = _find(tmp_path, world)
    assert (found, raised) == ("step_000000006", None)
    assert told == [
        "step_000000006 was complete but not renamed when the run died; renamed now",
        "step_000000009.partial is an unfinished save; skipped, and deleted after the next save",
    ]
    assert (tmp_path / "step_000000006.replaced.partial").exists()  # until the next save


def test_p19_the_older_save_of_a_step_comes_back_if_the_newer_is_not_whole(tmp_path: Path) -> None:
    world = World()
    _save(tmp_path, 6, world)
    shutil.copytree(tmp_path / "step_000000006", tmp_path / "step_000000006.partial")
    (tmp_path / "step_000000006").rename(tmp_path / "step_000000006.replaced.partial")
    (tmp_path / "step_000000006.partial" / "run.toml").write_text("cut")
    found, told, _ = _find(tmp_path, world)
    assert found == "step_000000006"
    assert told == ["step_000000006 was complete but not renamed when the run died; renamed now"]


def test_what_is_being_deleted_does_not_come_back(tmp_path: Path) -> None:
    world = World()
    _save(tmp_path, 3, world)
    (tmp_path / "step_000000003").rename(tmp_path / "step_000000003.expired.partial")
    assert _find(tmp_path, world) == (None, [], None)


def test_the_watchdog_has_as_many_calm_checkpoints_as_it_may_go_back_to(tmp_path: Path) -> None:
    world = World()
    for step in (2, 4, 6, 8, 10):
        _save(tmp_path, step, world)
        if step < 8:
            (tmp_path / step_name(step) / KNOWN_GOOD).touch()
    prune(tmp_path, keep=1, keep_every=None, num_known_good=2)
    assert _names(tmp_path) == ["latest", *map(step_name, (4, 6, 10))]


def test_sizes_alone_let_a_changed_byte_through_and_that_is_what_was_asked_for(tmp_path: Path) -> None:
    world = World()
    for step in (3, 6):
        _save(tmp_path, step, world)
    _flip_a_bit(tmp_path / step_name(6) / FILES[0])
    sizes = StorageLayout(tmp_path, tmp_path, verify="sizes")
    found = restore_module.find_latest(sizes, world)
    assert found is not None
    assert found.manifest.step == 6
    _truncate(tmp_path / step_name(6) / FILES[0])
    found = restore_module.find_latest(sizes, world)
    assert found is not None
    assert found.manifest.step == 3


def test_what_was_saved_after_the_step_gone_back_to_is_given_up_and_what_is_pinned_is_kept_aside(
    tmp_path: Path,
) -> None:
    world = World()
    for step in (2, 4, 6, 8):
        _save(tmp_path, step, world)
    (tmp_path / step_name(6) / PINNED).touch()
    with heard() as told:
        restore_module.discard_after(StorageLayout(tmp_path, tmp_path), 2, world)
    assert _names(tmp_path) == [
        *("latest", step_name(2), f"{step_name(4)}.expired.partial", f"{step_name(6)}.abandoned_1"),
        f"{step_name(8)}.expired.partial",
    ]
    assert told == [
        f"{step_name(6)} is pinned, and of a branch that the run has left: "
        f"it is kept as {step_name(6)}.abandoned_1"
    ]
    _save(tmp_path, 6, world)  # the run comes by again
    (tmp_path / step_name(6) / PINNED).touch()
    restore_module.discard_after(StorageLayout(tmp_path, tmp_path), 2, world)
    prune(tmp_path, keep=1, keep_every=None)
    assert {f"{step_name(6)}.abandoned_1", f"{step_name(6)}.abandoned_2"} <= set(_names(tmp_path))
    assert list_published(tmp_path) == [tmp_path / step_name(2)]


def test_a_checkpoint_on_a_branch_that_was_left_is_passed_over(tmp_path: Path) -> None:
    world = World()
    for step in (2, 4, 6):
        _save(tmp_path, step, world)
    with heard() as told:
        found = restore_module.find_latest(
            StorageLayout(tmp_path, tmp_path), world, lambda state: state.step > 2
        )
    assert found is not None
    assert found.manifest.step == 2
    assert told == [
        f"checkpoint step {step} is skipped: abandoned by a rollback to an earlier step" for step in (6, 4)
    ]
    assert (tmp_path / step_name(6)).exists()  # a start that is refused now has changed nothing


def test_what_was_left_keeps_its_name_until_something_older_is_found_to_be_whole(tmp_path: Path) -> None:
    world = World()
    for step in (2, 4, 6):
        _save(tmp_path, step, world)
    _truncate(tmp_path / step_name(2) / FILES[0])
    with pytest.raises(InputError, match="steps 6, 4 verify, but a rollback abandoned them"):
        restore_module.find_latest(StorageLayout(tmp_path, tmp_path), world, lambda state: state.step > 2)
    assert {step_name(4), step_name(6)} <= set(_names(tmp_path))
    found = restore_module.find_latest(StorageLayout(tmp_path, tmp_path), world)  # as mode "observe" would
    assert found is not None
    assert found.manifest.step == 6


def test_a_pinned_calm_checkpoint_of_a_branch_that_was_left_is_not_gone_back_to(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        _save(tmp_path, step, World())
        (tmp_path / step_name(step) / KNOWN_GOOD).touch()
    back = Rollback(2, 7, 5, "lasting_spike", "replay", 1)
    assert list_saved_steps(tmp_path, (), known_good=True) == [6, 4, 2]
    assert list_saved_steps(tmp_path, (back,), known_good=True) == [2]
    (tmp_path / step_name(4) / KNOWN_GOOD).unlink()
    assert list_saved_steps(tmp_path, (), known_good=True) == [6, 2]
    assert list_saved_steps(tmp_path, (), known_good=False) == [6, 4, 2]
