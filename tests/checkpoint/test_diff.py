"""Two checkpoints compared: what differs is named, with how far it is apart, whoever wrote them."""

import json
import math
import os
import shutil
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_pretrain.checkpoint import reshard as reshard_module
from ds_pretrain.checkpoint.diff import SHOWN_LINES, compare_checkpoints, describe_differences
from ds_pretrain.checkpoint.manifest import (
    MANIFEST,
    RUN_STATE,
    FileEntry,
    list_published,
    parse_manifest,
    step_name,
)
from ds_pretrain.checkpoint.rng import capture_streams, rng_file, seed_streams
from ds_pretrain.checkpoint.shards import ShardedCheckpoint
from ds_pretrain.commands.cli import main
from ds_pretrain.core.errors import InputError
from ds_pretrain.core.files import compute_checksum
from tests import harness
from tests.checkpoint.test_universal import SHAPES, STEP, write_checkpoint
from tests.harness import record_run
from tests.ranks import run_ranks
from tests.scenario import deepspeed_json, make_run

OPTIM, MODEL = "zero_pp_rank_{}_mp_rank_00_optim_states.pt", "zero_pp_rank_{}_mp_rank_00_model_states.pt"
Change = Callable[[dict[str, Any], dict[str, Any]], None]  # of a rank's optimizer and model states


def unchanged(optimizer: dict[str, Any], model: dict[str, Any]) -> None:
    """As it was."""


def seal(folder: Path, **fields: Any) -> Path:
    """A manifest that lists everything in the folder."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST]
    entries = {
        p.relative_to(folder).as_posix(): FileEntry(p.stat().st_size, compute_checksum(p))
        for p in sorted(paths)
    }
    manifest = parse_manifest((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(replace(manifest, files=entries, **fields).to_json())
    return folder


def written(
    root: Path, change: Change = unchanged, on_rank: int = 1, world_size: int = 2, **fields: Any
) -> Path:
    """A small ZeRO-3 checkpoint with a buffer, a frozen parameter and streams; one rank's states changed."""
    folder = write_checkpoint(root, world_size)
    for rank in range(world_size):
        optimizer, model = (torch.load(folder / name.format(rank)) for name in (OPTIM, MODEL))
        model["module"] = {"rope": torch.arange(4.0)}
        model["buffer_names"] = ["rope"]
        model["frozen_param_shapes"] = {"frozen": torch.Size((3,))}
        model["frozen_param_fragments"] = {"frozen": torch.full((2,), float(rank))}
        if rank == on_rank:
            change(optimizer["optimizer_state_dict"], model)
        torch.save(optimizer, folder / OPTIM.format(rank))
        torch.save(model, folder / MODEL.format(rank))
        (folder / "rng").mkdir(exist_ok=True)
        seed_streams(7, rank)
        torch.save(capture_streams(), folder / rng_file(rank))
    (folder / "run.toml").write_text('[checkpoint]\nevery = "5 steps"\n')
    return seal(folder, **fields)


def lines(a: Path, b: Path) -> list[str]:
    """What is said between the two titles and the summary."""
    return list(describe_differences(compare_checkpoints(a, b)))[2:-1]


def test_a_checkpoint_and_its_copy_are_equal(tmp_path: Path) -> None:
    a, b = written(tmp_path / "a"), written(tmp_path / "b")
    found = compare_checkpoints(a, b)
    assert found.is_empty
    assert found.is_same_state
    assert list(describe_differences(found)) == [
        "a  step 5, 2 ranks, ZeRO-3",
        "b  step 5, 2 ranks, ZeRO-3",
        "bitwise equal: 8 tensors, 6 random streams on 2 ranks, options, counters and settings",
    ]


def _moment(optimizer: dict[str, Any], model: dict[str, Any]) -> None:
    optimizer["optimizer_state_dict"]["state"][0]["exp_avg"][0] += 8  # element 8 of a.weight, 18.0


def _sign_of_zero(optimizer: dict[str, Any], model: dict[str, Any]) -> None:
    optimizer["fp32_flat_groups"][0][-2] = -0.0


def _zero(optimizer: dict[str, Any], model: dict[str, Any]) -> None:
    optimizer["fp32_flat_groups"][0][-2] = 0.0


def _nan(optimizer: dict[str, Any], model: dict[str, Any]) -> None:
    optimizer["optimizer_state_dict"]["state"][1]["exp_avg_sq"][0] = torch.nan


def _buffer(optimizer: dict[str, Any], model: dict[str, Any]) -> None:
    model["module"]["rope"][1] = 3.0


def _buffer_dtype(optimizer: dict[str, Any], model: dict[str, Any]) -> None:
    model["module"]["rope"] = model["module"]["rope"].double()


def _buffer_shape(optimizer: dict[str, Any], model: dict[str, Any]) -> None:
    model["module"]["rope"] = model["module"]["rope"].reshape(2, 2)


def _no_buffer(optimizer: dict[str, Any], model: dict[str, Any]) -> None:
    model["buffer_names"] = []


def _frozen(optimizer: dict[str, Any], model: dict[str, Any]) -> None:
    model["frozen_param_fragments"]["frozen"][0] = 2.0


def _option(optimizer: dict[str, Any], model: dict[str, Any]) -> None:
    optimizer["optimizer_state_dict"]["param_groups"][1]["weight_decay"] = 0.1


def _optimizer_step(optimizer: dict[str, Any], model: dict[str, Any]) -> None:
    for state in optimizer["optimizer_state_dict"]["state"].values():
        state["step"] = torch.tensor(6.0)


def _global_step(optimizer: dict[str, Any], model: dict[str, Any]) -> None:
    model["global_steps"] = 6


# A change on a rank, and the line about it. ||exp_avg of a.weight|| = 2 sqrt(1 + 4 + ... + 225) = 70.43.
CHANGES: dict[str, tuple[Change, int, str]] = {
    "a moment": (_moment, 1, "a.weight  exp_avg  relative 1.14e-01, largest 8.00e+00"),
    "not a number": (_nan, 1, "a.bias  exp_avg_sq  relative inf, largest inf"),
    "a buffer": (_buffer, 0, "rope  buffer  relative 5.35e-01, largest 2.00e+00"),
    "a buffer's type": (_buffer_dtype, 0, "rope  buffer  float32 [4] in a, float64 [4] in b"),
    "a buffer's shape": (_buffer_shape, 0, "rope  buffer  float32 [4] in a, float32 [2, 2] in b"),
    "no buffer": (_no_buffer, 0, "rope  buffer  only in a"),
    "a frozen parameter": (_frozen, 1, "frozen  frozen  relative 1.00e+00, largest 1.00e+00"),
    "an option": (_option, 0, "optimizer.groups.no_decay.weight_decay: 0.0 in a, 0.1 in b"),
    "a count of updates": (_optimizer_step, 1, "optimizer.steps: 5 in a, [5, 6] in b"),
    "a counter": (_global_step, 0, "engine.global_steps: 5 in a, 6 in b"),
}


@pytest.mark.parametrize(("change", "rank", "line"), CHANGES.values(), ids=CHANGES)
def test_one_change_gives_one_line_that_names_it(
    change: Change, rank: int, line: str, tmp_path: Path
) -> None:
    a, b = written(tmp_path / "a"), written(tmp_path / "b", change, rank)
    assert lines(a, b) == [line]
    assert not compare_checkpoints(a, b).is_same_state


def test_bits_are_compared_not_values(tmp_path: Path) -> None:
    a, b = written(tmp_path / "a", _zero), written(tmp_path / "b", _sign_of_zero)
    assert lines(a, b) == ["a.weight  fp32  relative 0.00e+00, largest 0.00e+00"]


def test_what_is_infinite_or_no_number_on_both_sides_is_no_distance(tmp_path: Path) -> None:
    """||b - a|| = 3, ||a|| = 5 over the finite elements."""

    def buffer(*values: float) -> Change:
        def change(optimizer: dict[str, Any], model: dict[str, Any]) -> None:
            model["module"]["rope"] = torch.tensor(values)

        return change

    a = written(tmp_path / "a", buffer(math.inf, -math.inf, math.nan, 3.0, 4.0), 0)
    b = written(tmp_path / "b", buffer(math.inf, -math.inf, math.nan, 3.0, 7.0), 0)
    assert lines(a, b) == ["rope  buffer  relative 6.00e-01, largest 3.00e+00"]
    other_sign = written(tmp_path / "c", buffer(-math.inf, -math.inf, math.nan, 3.0, 4.0), 0)
    assert lines(a, other_sign) == ["rope  buffer  relative inf, largest inf"]
    number = written(tmp_path / "d", buffer(math.inf, -math.inf, 0.0, 3.0, 4.0), 0)
    assert lines(a, number) == ["rope  buffer  relative inf, largest inf"]


def test_a_shard_that_the_manifest_does_not_list_is_not_read(tmp_path: Path) -> None:
    """It is left of another world, or somebody put it there."""

    class Trap:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return os.mkdir, (str(tmp_path / "sprung"),)

    a, b = written(tmp_path / "a"), written(tmp_path / "b")
    for name in (OPTIM, MODEL):
        torch.save({"optimizer_state_dict": Trap()}, b / name.format(2))
    assert compare_checkpoints(a, b).is_empty
    assert not (tmp_path / "sprung").exists()


def test_a_checkpoint_without_shards_is_refused(tmp_path: Path) -> None:
    a, b = written(tmp_path / "a"), written(tmp_path / "b")
    for rank in (0, 1):
        (b / OPTIM.format(rank)).unlink()
    with pytest.raises(InputError, match=r"b.*has no DeepSpeed shards \(\*_optim_states\.pt\); name a"):
        compare_checkpoints(a, seal(b))


def test_the_furthest_apart_come_first_and_the_rest_are_counted(tmp_path: Path) -> None:
    def grown(optimizer: dict[str, Any], model: dict[str, Any]) -> None:
        model["buffer_names"] = [f"b{n}" for n in range(30)]
        model["module"] = {name: torch.tensor([1.0 + int(name[1:])]) for name in model["buffer_names"]}

    def plain(optimizer: dict[str, Any], model: dict[str, Any]) -> None:
        model["buffer_names"] = [f"b{n}" for n in range(30)]
        model["module"] = {name: torch.tensor([1.0]) for name in model["buffer_names"]}

    a, b = written(tmp_path / "a", plain, on_rank=0), written(tmp_path / "b", grown, on_rank=0)
    *_, summary = describe_differences(compare_checkpoints(a, b))
    assert summary == "different: 29 of 37 tensors, 0 of 6 random streams on 2 ranks, 0 values"
    said = lines(a, b)
    assert len(said) == SHOWN_LINES + 1
    assert [line.split()[0] for line in said[:3]] == ["b29", "b28", "b27"]
    assert said[-1] == "... and 9 more tensors"


def test_each_random_stream_is_named_with_its_rank(tmp_path: Path) -> None:
    a, b, more = written(tmp_path / "a"), written(tmp_path / "b"), written(tmp_path / "c", world_size=3)
    streams = torch.load(b / rng_file(1), weights_only=True)
    streams["numpy"]["position"] += 1
    streams["device"] = torch.zeros(4, dtype=torch.uint8)
    torch.save(streams, b / rng_file(1))
    seal(b)
    found = compare_checkpoints(a, b)
    assert found.streams == (
        "rank 1: the random stream of numpy differs",
        "rank 1: the random stream of device differs",
    )
    assert (found.num_streams, found.num_ranks) == (7, 2)
    assert compare_checkpoints(a, more).streams == ("rank 2: random streams only in b",)


def test_settings_are_compared_by_their_dotted_paths(tmp_path: Path) -> None:
    a, b = written(tmp_path / "a"), written(tmp_path / "b", overrides=("seed=9",), identity={"seed": 9})
    (b / "run.toml").write_text('[checkpoint]\nevery = "9 steps"\n')
    (b / "deepspeed.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    state = json.loads((b / RUN_STATE).read_text())
    (b / RUN_STATE).write_text(json.dumps({**state, "step": 6}))
    seal(b)
    found = compare_checkpoints(a, b)
    assert found.values["run.toml.checkpoint.every"] == ("5 steps", "9 steps")
    assert found.values["deepspeed.json"] == (None, {"zero_optimization": {"stage": 3}})
    assert found.values["overrides"][1] == ["seed=9"]
    assert found.values["identity.seed"][1] == 9
    assert found.state == {"run_state.json.step": (STEP, 6)}


def test_other_ranks_stages_and_formats_of_the_same_state_are_bitwise_equal(tmp_path: Path) -> None:
    """Two ranks of ZeRO-2; the same state on three of ZeRO-3 in small sub-groups; and the universal form."""
    options: dict[str, Any] = {"steps": 6, "batch_tokens": 16 * 12, "micro_batch_size": 1}
    run_file = make_run(tmp_path / "two", deepspeed=deepspeed_json(2), **options)
    other = make_run(
        tmp_path / "three",
        deepspeed=deepspeed_json(3, zero_optimization={"stage": 3, "sub_group_size": 2_000}),
        **options,
    )
    run_ranks(record_run, 2, str(run_file))
    [two] = [path for path in list_published(tmp_path / "two/out/checkpoints") if path.name == step_name(3)]
    shutil.copytree(two, tmp_path / "three/out/checkpoints" / two.name)
    run_ranks(harness.restore_and_save, 3, str(other))
    three = tmp_path / "three/out/checkpoints" / two.name

    found = compare_checkpoints(two, three)
    assert found.titles == ("step 3, 2 ranks, ZeRO-2", "step 3, 3 ranks, ZeRO-3")
    assert found.tensors == ()
    assert found.num_tensors == 75
    assert found.streams == ("rank 2: random streams only in b",)
    assert found.state == {}

    run_ranks(harness.convert_here, 1, str(two))
    form = two.with_name(f"{two.name}.universal")
    found = compare_checkpoints(two, form)
    assert found.is_empty
    assert found.titles[1] == "step 3, universal, of 2 ranks, ZeRO-2"

    last = two.with_name(step_name(6))
    assert len(compare_checkpoints(form, last).tensors) == 75
    assert len(compare_checkpoints(last, two).tensors) == 75 + 25  # also what the model computes with


def test_one_parameter_of_each_is_in_memory_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = written(tmp_path / "a"), written(tmp_path / "b", _moment)
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0
    whole = ShardedCheckpoint.whole

    def watched(self: ShardedCheckpoint, name: str, kind: str) -> torch.Tensor:
        nonlocal most
        tensor = whole(self, name, kind)
        alive.append(weakref.ref(tensor))
        most = max(most, sum(ref() is not None for ref in alive))
        return tensor

    monkeypatch.setattr(ShardedCheckpoint, "whole", watched)
    compare_checkpoints(a, b)
    assert (len(alive), most) == (12, 2)


def test_nothing_is_unpickled_of_a_checkpoint_that_does_not_verify(tmp_path: Path) -> None:
    """Both reasons are said, and code in a shard does not run."""

    class Trap:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return os.mkdir, (str(tmp_path / "sprung"),)

    a, b, c = written(tmp_path / "a"), written(tmp_path / "b"), written(tmp_path / "c")
    torch.save({"optimizer_state_dict": Trap()}, a / OPTIM.format(0))
    torch.save({"optimizer_state_dict": Trap()}, b / OPTIM.format(0))
    (b / MANIFEST).unlink()
    with pytest.raises(InputError) as raised:
        compare_checkpoints(a, b)
    first, second = raised.value.problems
    assert first.startswith(f"{a} cannot be opened: {OPTIM.format(0)} has ")
    assert "neither manifest.json nor universal.json" in second
    assert "pickles, which can run code" in second
    with pytest.raises(InputError, match="there is no such folder"):
        compare_checkpoints(c, tmp_path / "nowhere")
    assert not (tmp_path / "sprung").exists()


def test_a_damaged_universal_form_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reshard_module, "_run_tool", harness.tool_in_this_process)
    a = written(tmp_path / "a")
    form = reshard_module.convert(a)
    assert compare_checkpoints(a, form).is_empty
    path = form / "zero" / "a.bias" / "fp32.pt"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"the checksum of zero/a.bias/fp32.pt does not match"):
        compare_checkpoints(a, form)


def test_shards_that_lack_elements_are_refused(tmp_path: Path) -> None:
    def shorter(optimizer: dict[str, Any], model: dict[str, Any]) -> None:
        optimizer["fp32_flat_groups"][1] = torch.empty(0)

    a, b = written(tmp_path / "a"), written(tmp_path / "b", shorter)
    with pytest.raises(InputError, match=r"its shards hold 3 elements of a.bias \(fp32\), expected 5"):
        compare_checkpoints(a, b)


def test_a_checkpoint_before_the_first_update_has_masters_only(tmp_path: Path) -> None:
    def empty(optimizer: dict[str, Any], model: dict[str, Any]) -> None:
        optimizer["optimizer_state_dict"]["state"] = {}

    a = written(tmp_path / "a", empty, on_rank=0)
    assert [line.split("  ")[1:] for line in lines(a, written(tmp_path / "b"))[:4]] == [
        [kind, "only in b"] for _ in SHAPES for kind in ("exp_avg", "exp_avg_sq")
    ]


def test_the_command_ends_as_diff_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = written(tmp_path / "out/checkpoints"), written(tmp_path / "b", _moment)
    out = str(tmp_path / "out")
    assert main(["checkpoints", out, "diff", "5", str(a)]) == 0
    assert "bitwise equal: 8 tensors" in capsys.readouterr().out
    assert main(["checkpoints", out, "diff", "5", str(b)]) == 1
    assert "different: 1 of 8 tensors" in capsys.readouterr().out
    assert main(["checkpoints", out, "diff", "5", "6"]) == 2
    assert "has no checkpoint of step 6; it has: 5" in capsys.readouterr().err
    assert main(["checkpoints", out, "diff", "5", str(tmp_path)]) == 2
    assert "nothing proves its files" in capsys.readouterr().err
