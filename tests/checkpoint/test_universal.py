"""Universal checkpoints: what fits, what is refused, and torn, stale, damaged or slow conversions."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from time import sleep
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_pretrain.checkpoint import reshard, universal
from ds_pretrain.checkpoint import restore as restore_module
from ds_pretrain.checkpoint.manifest import (
    MANIFEST,
    RUN_STATE,
    FileEntry,
    Group,
    UniversalManifest,
    find_orphaned_universals,
    parse_manifest,
    parse_universal,
    seal,
    unfinished_universal_folder,
    universal_folder,
)
from ds_pretrain.checkpoint.retention import prune
from ds_pretrain.checkpoint.storage import StorageLayout, find_first_problem
from ds_pretrain.core import distributed
from ds_pretrain.core.distributed import World
from ds_pretrain.core.errors import InputError, RunError
from ds_pretrain.core.files import compute_checksum
from ds_pretrain.core.state import RunState
from ds_pretrain.engine import partitions
from tests import harness
from tests.checkpoint.test_restore import MANIFEST as SAVED
from tests.ranks import KILLED, heard, run_ranks
from tests.scenario import deepspeed_json

STEP = 5
SHAPES = {"a.weight": (3, 5), "a.bias": (5,)}
OLD = deepspeed_json(3)


def write_checkpoint(root: Path, world_size: int = 2, steps: int = STEP) -> Path:
    """A ZeRO-3 checkpoint as DeepSpeed writes it: two groups of a parameter each, of odd sizes."""
    folder = root / f"step_{STEP:09d}"
    folder.mkdir(parents=True)
    whole = {name: torch.arange(1.0, 16.0)[: torch.Size(shape).numel()] for name, shape in SHAPES.items()}
    for rank in range(world_size):
        flats = []
        for values in whole.values():
            share = -(-len(values) // world_size)
            padded = torch.cat([values, torch.zeros(share * world_size - len(values))])
            flats.append(padded[rank * share : (rank + 1) * share].clone())
        state = {
            i: {"step": torch.tensor(float(steps)), "exp_avg": f * 2, "exp_avg_sq": f * 3}
            for i, f in enumerate(flats)
        }
        groups = [
            {"name": "decay", "weight_decay": 0.1, "params": [0]},
            {"name": "no_decay", "weight_decay": 0.0, "params": [1]},
        ]
        optimizer = {
            "zero_stage": 3,
            "fp32_flat_groups": flats,
            "optimizer_state_dict": {"state": state if steps else {}, "param_groups": groups},
        }
        torch.save(
            {"optimizer_state_dict": optimizer}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        )
        model = {
            "module": {},
            "param_shapes": [{n: torch.Size(s)} for n, s in SHAPES.items()],
            "global_steps": STEP,
            "ds_version": "0.19.8",
        }
        model |= {
            "dp_world_size": world_size,
            "mp_world_size": 1,
            "skipped_steps": 0,
            "buffer_names": [],
            "shared_params": {},
        }
        torch.save(model, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    (folder / RUN_STATE).write_text(RunState(STEP).to_json())
    files = {path.name: FileEntry(path.stat().st_size, compute_checksum(path)) for path in folder.iterdir()}
    manifest = replace(SAVED, step=STEP, world_size=world_size, files=files)
    (folder / MANIFEST).write_text(manifest.to_json())
    return folder


@pytest.fixture(autouse=True)
def tool_in_this_process(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """DeepSpeed's tool called here: its own process takes seconds to start. Lists what was converted."""
    calls: list[Path] = []

    def call(folder: Path, result: Path, source: Any) -> None:
        calls.append(folder)
        harness.tool_in_this_process(folder, result, source)

    monkeypatch.setattr(reshard, "_run_tool", call)
    return calls


def _prepared(folder: Path) -> tuple[reshard.Universal, list[str]]:
    with heard() as told:
        return universal.prepare_universal(folder, ["ranks 2 -> 3"], World()), told


def test_a_conversion_holds_every_parameter_whole_and_says_what_it_holds(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    found, told = _prepared(folder)
    assert found.folder == universal_folder(folder)
    assert (found.state, found.manifest.optimizer_steps) == (RunState(STEP), STEP)
    for name, shape in SHAPES.items():
        for kind, factor in (("fp32", 1), ("exp_avg", 2), ("exp_avg_sq", 3)):
            loaded = torch.load(found.folder / "zero" / name / f"{kind}.pt", weights_only=True)["param"]
            assert loaded.shape == shape
            assert torch.equal(loaded.reshape(-1), torch.arange(1.0, 16.0)[: loaded.numel()] * factor)
    assert found.manifest.groups == (Group("decay", ("a.weight",)), Group("no_decay", ("a.bias",)))
    assert (found.manifest.world_size, found.manifest.zero_stage) == (2, 3)
    assert told == [
        f"resharding {folder.name} (ranks 2 -> 3): converting once (there is no universal checkpoint yet)"
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == [folder.name, f"{folder.name}.universal"]


def test_a_conversion_is_done_once_and_used_again_while_it_verifies(
    tmp_path: Path, tool_in_this_process: list[Path]
) -> None:
    folder = write_checkpoint(tmp_path)
    _prepared(folder)
    _, [message] = _prepared(folder)
    assert message.endswith("using step_000000005.universal, which verifies")
    assert tool_in_this_process == [folder]


def _cut(cache: Path, folder: Path) -> None:
    path = cache / "zero" / "a.bias" / "fp32.pt"
    path.write_bytes(path.read_bytes()[:-1])


def _flip(cache: Path, folder: Path) -> None:
    path = cache / "zero" / "a.weight" / "exp_avg.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def _gone(cache: Path, folder: Path) -> None:
    (cache / "zero" / "optimizer_state.pt").unlink()


def _no_manifest(cache: Path, folder: Path) -> None:
    cache.rename(unfinished_universal_folder(folder))  # as a kill before the rename leaves it, half written
    shutil.rmtree(unfinished_universal_folder(folder) / "zero")


def _bad_manifest(cache: Path, folder: Path) -> None:
    (cache / "universal.json").write_text("{}")


def _unsealed_manifest(cache: Path, folder: Path) -> None:
    path = cache / "universal.json"  # as earlier versions wrote it
    fields = json.loads(path.read_text())
    assert fields.pop("sha256")
    path.write_text(json.dumps(fields))


def _saved_again(cache: Path, folder: Path) -> None:
    path = folder / MANIFEST
    again = replace(parse_manifest(path.read_text()), attempt=2)
    path.write_text(again.to_json())


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_cut, "zero/a.bias/fp32.pt has "),
        (_flip, "the checksum of zero/a.weight/exp_avg.pt does not match the manifest"),
        (_gone, "No such file or directory"),
        (_no_manifest, "there is no universal checkpoint yet"),
        (_unsealed_manifest, "universal.json does not match its own checksum"),
        (_bad_manifest, "universal.json has no version"),
        (_saved_again, "step_000000005.universal was made of another save of that step"),
    ],
)
def test_a_torn_damaged_or_stale_conversion_is_named_and_done_again(
    tmp_path: Path, tool_in_this_process: list[Path], damage: Callable[[Path, Path], None], said: str
) -> None:
    folder = write_checkpoint(tmp_path)
    _prepared(folder)
    damage(universal_folder(folder), folder)
    _, [message] = _prepared(folder)
    assert "converting once (" in message
    assert said in message
    assert len(tool_in_this_process) == 2
    _, [message] = _prepared(folder)
    assert message.endswith("which verifies")
    assert sorted(p.name for p in tmp_path.iterdir()) == [folder.name, f"{folder.name}.universal"]


def _killed_at(world: World, folder: str, point: str) -> None:
    def kill(name: str) -> None:
        if name == point:
            os.kill(os.getpid(), signal.SIGKILL)

    reshard._run_tool = harness.tool_in_this_process
    reshard.write_point = kill
    reshard.convert(Path(folder))


@pytest.mark.parametrize(
    "point",
    [
        "manifest",
        "clean",
        *(pytest.param(p, marks=pytest.mark.slow) for p in ("begin", "check", "global", "publish")),
    ],
)
def test_a_conversion_killed_at_any_point_is_done_again_or_was_complete(
    tmp_path: Path, tool_in_this_process: list[Path], point: str
) -> None:
    folder = write_checkpoint(tmp_path)
    assert run_ranks(_killed_at, 1, str(folder), f"convert_{point}", allow_kill=True) == [KILLED]
    assert universal_folder(folder).exists() == (point == "clean")
    assert unfinished_universal_folder(folder).exists()
    found, _ = _prepared(folder)
    assert len(tool_in_this_process) == (0 if point == "clean" else 1)
    assert universal.open_foreign(found.folder, ["rng"], World()).state == RunState(STEP)


def test_pruning_a_checkpoint_prunes_its_universal_form(tmp_path: Path) -> None:
    for folder in (write_checkpoint(tmp_path), tmp_path / "step_000000009"):
        folder.mkdir(exist_ok=True)
        universal_folder(folder).mkdir()
    prune(tmp_path, keep=1, keep_every=None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000000009", "step_000000009.universal"]


def test_p15_a_checkpoint_before_the_first_update_is_refused_with_a_way_out(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, steps=0)
    with pytest.raises(InputError, match="was saved before the first applied update") as caught:
        _prepared(folder)
    assert "start it on 2 ranks with the same DeepSpeed JSON" in str(caught.value)
    assert not unfinished_universal_folder(folder).exists()


def test_an_optimizer_without_adams_moments_is_refused_by_what_it_lacks(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    path = folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    shard = torch.load(path, weights_only=False)
    for state in shard["optimizer_state_dict"]["optimizer_state_dict"]["state"].values():
        del state["exp_avg_sq"]
    torch.save(shard, path)
    with pytest.raises(
        InputError, match="its optimizer keeps no exp_avg_sq, which the universal format needs"
    ):
        _prepared(folder)


def test_p16_a_conversion_with_one_wrong_bit_is_found_before_it_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint(tmp_path)
    right = reshard._run_tool

    def wrong(source: Path, result: Path, opened: Any) -> None:
        right(source, result, opened)
        path = result / "zero" / "a.weight" / "exp_avg.pt"
        values = torch.load(path, weights_only=True)
        values.view(torch.uint8)[-1] ^= 1
        torch.save(values, path)

    monkeypatch.setattr(reshard, "_run_tool", wrong)
    with pytest.raises(RunError, match=r"conversion is wrong.*a.weight: exp_avg differs from rank 1's shard"):
        _prepared(folder)
    assert not universal_folder(folder).exists()


def test_p17_states_that_disagree_on_the_step_are_damage(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    path = folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shard = torch.load(path, weights_only=False)
    shard["optimizer_state_dict"]["optimizer_state_dict"]["state"][1]["step"] += 1
    torch.save(shard, path)
    with pytest.raises(RunError, match=r"disagree on how many updates they had: \[5, 6\]"):
        _prepared(folder)


def test_a_tool_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the tool in its own process
    folder = write_checkpoint(tmp_path)
    monkeypatch.setattr(reshard.sys, "executable", shutil.which("false"))
    with pytest.raises(
        RunError, match=r"DeepSpeed could not convert .*exit code 1\); the checkpoint is intact"
    ) as caught:
        _prepared(folder)
    assert "can be resumed on 2 ranks. DeepSpeed said:" in str(caught.value)


def test_a_disk_too_small_is_found_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint(tmp_path)
    monkeypatch.setattr(reshard, "free_bytes", lambda path: 10)
    with pytest.raises(
        InputError, match=r"needs [\d,]+ bytes beside it, and .* has 10 free; free disk space"
    ):
        _prepared(folder)
    assert [p.name for p in tmp_path.iterdir()] == [folder.name]


def _slow(world: World, folder: str, poll_seconds: float) -> Any:
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_group, _set_pg_timeout

    def act(source: Path) -> None:
        sleep(5)
        raise InputError(["first", "second"])

    dist.barrier()
    _set_pg_timeout(timedelta(seconds=2), _get_default_group())
    patch = pytest.MonkeyPatch()
    patch.setattr(universal, "convert", act)
    patch.setattr(distributed, "PROGRESS_SECONDS", 1.0)
    with heard() as told:
        try:
            universal.prepare_universal(Path(folder), ["ranks 2 -> 3"], world, poll_seconds)
        except InputError as error:
            return error.problems, told
    return None


def test_p42_ranks_outlive_a_conversion_longer_than_their_timeout_and_all_hear_how_it_ended(
    tmp_path: Path,
) -> None:
    folder = write_checkpoint(tmp_path)
    for problems, told in run_ranks(_slow, 2, str(folder), 0.3):
        assert problems == ("first", "second")
        assert any("converting step_000000005: " in line and "seconds so far" in line for line in told)


def _fail_to_convert(world: World, folder: str) -> list[tuple[str, bool]]:
    ended = []
    for error in (OSError(116, "Stale file handle"), TimeoutError("slow disk"), ZeroDivisionError("odd")):

        def act(source: Path, error: Exception = error) -> None:
            raise error

        patch = pytest.MonkeyPatch()
        patch.setattr(universal, "convert", act)
        try:
            universal.prepare_universal(Path(folder), ["ranks 2 -> 3"], world, 0.1)
        except RunError as met:
            ended.append((str(met), met.agreed))
        patch.undo()
    return ended


def test_whatever_ends_a_conversion_is_told_to_every_rank(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    start = "rank 0: converting step_000000005 failed: "
    for ended in run_ranks(_fail_to_convert, 2, str(folder)):
        assert ended == [
            (f"{start}OSError: [Errno 116] Stale file handle", True),
            (f"{start}TimeoutError: slow disk", True),
            (f"{start}ZeroDivisionError: odd", True),
        ]


def _see_late(world: World, folder: str, num_looks: int) -> tuple[str, int]:
    """Rank 1 sees nothing of what rank 0 converted until it has looked so often."""
    looks = 0
    opened, patch = find_first_problem, pytest.MonkeyPatch()

    def look(*asked: Any) -> str | None:
        nonlocal looks
        if world.rank == 1:
            looks += 1
            if looks <= num_looks:
                return "optimizer_state.pt is listed and cannot be read (No such file or directory)"
        return opened(*asked)

    def told_by_rank_0(path: Path) -> Any:
        assert world.is_main, "another rank may not see this file"
        return read(path)

    read = universal.read_universal
    patch.setattr(universal, "read_universal", told_by_rank_0)
    patch.setattr(universal, "find_first_problem", look)
    patch.setattr(universal, "SIGHT_SECONDS", 3.0)
    try:
        form = universal.prepare_universal(Path(folder), ["ranks 2 -> 3"], world, 0.05)
    except RunError as error:
        return str(error), looks
    return form.folder.name, looks


@pytest.mark.parametrize("converted", [False, True])
def test_a_rank_that_sees_the_converted_files_late_waits_until_it_does(
    tmp_path: Path, converted: bool
) -> None:
    folder = write_checkpoint(tmp_path)
    if converted:
        _prepared(folder)
    outcomes = run_ranks(_see_late, 2, str(folder), 3)
    assert [name for name, _ in outcomes] == [universal_folder(folder).name] * 2
    assert outcomes[1][1] >= 4


def test_a_rank_that_never_sees_the_converted_files_is_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    for said, _ in run_ranks(_see_late, 2, str(folder), 1_000_000):
        assert "is complete on rank 0, and 3 seconds later not here (" in said
        assert said.startswith("rank 1: ")
        assert "optimizer_state.pt is listed" in said


def test_p17_every_group_gets_its_own_saved_options_by_name_and_none_that_its_optimizer_does_not_know() -> (
    None
):
    ruined = [
        {"name": "decay", "weight_decay": 0.1, "lr": 1.0, "fused": None, "params": [1]} for _ in range(2)
    ]
    engine = SimpleNamespace(optimizer=SimpleNamespace(param_groups=ruined))
    before = [
        {"name": "decay", "weight_decay": 0.3, "lr": 9.0},
        {"name": "no_decay", "weight_decay": 0.0, "lr": 9.0},
    ]
    saved = [
        {"name": "no_decay", "weight_decay": 0.0, "lr": 1.0, "fused": None, "params": [0]},
        {"name": "decay", "weight_decay": 0.1, "lr": 1.0, "fused": None, "params": [1]},
    ]
    partitions.repair_options(engine, before, saved)
    assert ruined == [
        {"name": "decay", "weight_decay": 0.1, "lr": 1.0, "params": [1]},
        {"name": "no_decay", "weight_decay": 0.0, "lr": 1.0, "params": [1]},
    ]


def test_what_fits_needs_no_conversion_and_what_differs_is_named() -> None:
    assert reshard.find_layout_changes(OLD, 2, OLD, 2) == []
    offload = {"stage": 2, "offload_optimizer": {"device": "cpu"}, "sub_group_size": 1000}
    new = deepspeed_json(2, True, zero_optimization=offload)
    assert reshard.find_layout_changes(OLD, 2, new, 3) == [
        "ranks 2 -> 3",
        "zero_optimization.stage 3 -> 2",
        "zero_optimization.offload_optimizer.device none -> cpu",
        "zero_optimization.sub_group_size 1000000000 -> 1000",
        "bf16.enabled False -> True",
    ]


def test_what_no_conversion_bridges_is_refused_by_name_all_at_once() -> None:
    lion = {**OLD, "optimizer": {"type": "Lion", "params": {}}}
    nvme = {**lion, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}
    with pytest.raises(InputError) as caught:
        reshard.find_layout_changes(OLD, 2, nvme, 2)
    assert len(caught.value.problems) == 2
    assert "optimizer.type changed from AdamW to Lion" in caught.value.problems[0]
    assert "zero_optimization.offload_optimizer.device = nvme" in caught.value.problems[1]
    adam = {**OLD, "optimizer": {**OLD["optimizer"], "type": "Adam"}}
    assert reshard.find_layout_changes(OLD, 2, adam, 2) == ["optimizer.type AdamW -> Adam"]


class Shards:
    """An engine with given groups, that loads what it is told to load."""

    def __init__(self, groups: list[tuple[str, list[str]]], wrong: list[str]) -> None:
        self.groups, self.wrong, self.loaded = groups, wrong, False

    def group_members(self) -> list[tuple[str, list[str]]]:
        return self.groups

    def load_universal(self, folder: Path, tag: str, optimizer_steps: int) -> list[str]:
        self.loaded = True
        return self.wrong


def test_p17_other_parameter_groups_are_refused_by_name_before_anything_is_loaded(tmp_path: Path) -> None:
    found, _ = _prepared(write_checkpoint(tmp_path))
    shards = Shards([("decay", ["a.weight", "a.bias"])], [])
    with pytest.raises(InputError) as caught:
        universal.load(found, shards, 7, World())
    assert len(caught.value.problems) == 2
    assert (
        "parameter group 'decay' is not that of step_000000005.universal: without none, with a.bias"
        in str(caught.value)
    )
    assert (
        "parameter group 'no_decay' is not that of step_000000005.universal: without a.bias, with none"
        in str(caught.value)
    )
    assert not shards.loaded


def _load_wrong(world: World, folder: str) -> str:
    found = universal.open_foreign(Path(folder), ["rng"], world)
    groups = [("decay", ["a.weight"]), ("no_decay", ["a.bias"])]
    try:
        universal.load(found, Shards(groups, ["a.bias: wrong"] if world.rank == 1 else []), 7, world)
    except RunError as error:
        return str(error)
    return ""


def test_p16_what_one_rank_did_not_load_as_saved_stops_all_of_them(tmp_path: Path) -> None:
    found, _ = _prepared(write_checkpoint(tmp_path))
    assert (
        run_ranks(_load_wrong, 2, str(found.folder))
        == [f"rank 1: {found.folder} was not restored as it was saved: a.bias: wrong"] * 2
    )


def test_everything_that_a_foreign_universal_checkpoint_lacks_is_listed_with_how_to_allow_it(
    tmp_path: Path,
) -> None:
    found, _ = _prepared(write_checkpoint(tmp_path))
    (found.folder / "universal.json").unlink()
    (found.folder / RUN_STATE).unlink()
    with pytest.raises(InputError) as caught:
        universal.open_foreign(found.folder, [], World())
    assert len(caught.value.problems) == 3
    for name, problem in zip(("manifest", "run_state", "rng"), caught.value.problems, strict=True):
        assert problem.startswith(f"{found.folder} has no {name}: {universal.MISSING[name]}")
        way = "start with --trust-pickle" if name == "manifest" else f"add '{name}' to accept_missing"
        assert problem.endswith(way)
    with pytest.raises(InputError, match="is neither a checkpoint of ours"):
        universal.open_foreign(tmp_path, [], World())
    opened = universal.open_foreign(found.folder, list(universal.MISSING), World())
    assert (opened.state, opened.manifest.optimizer_steps) == (RunState(STEP), STEP)
    assert (opened.manifest.groups, opened.manifest.files) == ((), {})


def test_a_checkpoint_at_another_place_is_opened_whatever_wrote_it(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    form, _ = _prepared(folder)
    ours = restore_module.open_external(folder, [], World())
    copied = restore_module.open_external(form.folder, ["rng"], World())
    assert ours.universal is None
    assert copied.universal is not None
    assert ours.manifest == copied.manifest
    assert ours.state == copied.state == RunState(STEP)
    assert restore_module.reshard_if_needed(copied, {}, StorageLayout(folder, folder), World()) is copied
    for name in ("universal.json", "source_manifest.json", RUN_STATE):
        (form.folder / name).unlink()
    found = restore_module.open_external(form.folder, list(universal.MISSING), World())
    assert (found.state, found.manifest.step) == (RunState(STEP), STEP)
    assert (found.manifest.identity, found.manifest.wandb_id) == ({}, None)
    (folder / RUN_STATE).write_text("{}")
    with pytest.raises(InputError, match=f"{folder} does not verify: "):
        restore_module.open_external(folder, [], World())


def test_damage_in_a_universal_checkpoint_at_another_place_is_found(tmp_path: Path) -> None:
    found, _ = _prepared(write_checkpoint(tmp_path))
    _flip(found.folder, found.folder)
    with pytest.raises(InputError, match=r"the checksum of zero/a\.weight/exp_avg\.pt does not match"):
        universal.open_foreign(found.folder, ["rng"], World())


def test_a_universal_manifest_cannot_name_files_outside_its_folder() -> None:
    manifest = UniversalManifest(1, 1, 1, 3, "", (), {"../x": FileEntry(1, "0")})
    with pytest.raises(ValueError, match=r"'\.\./x', which lies outside"):
        parse_universal(manifest.to_json())
    inside = replace(manifest, files={"x": FileEntry(1, "0")}, groups=(Group("decay", ("a",)),))
    assert parse_universal(inside.to_json()) == inside
    with pytest.raises(ValueError, match="lacks or does not know a field"):
        parse_universal(seal({"version": 3, "stop": 1, "files": {}, "groups": []}))


def test_universal_forms_of_checkpoints_that_are_gone_are_found_for_pruning(tmp_path: Path) -> None:
    kept = write_checkpoint(tmp_path)
    for name in (kept.name, "step_000000002", "step_000000003", "mine"):
        universal_folder(tmp_path / name).mkdir()
    unfinished_universal_folder(tmp_path / "step_000000003").mkdir()
    assert [path.name for path in find_orphaned_universals(tmp_path)] == [
        "step_000000002.universal",
        "step_000000003.universal",
        "step_000000003.universal-unfinished",
    ]
