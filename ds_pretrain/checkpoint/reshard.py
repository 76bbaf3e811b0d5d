"""Decides whether a checkpoint's shards fit this start, and converts them to the universal form if not.

The conversion makes a folder in DeepSpeed's universal format beside the checkpoint.

DeepSpeed's own tool merges the shards; then each tensor is compared, bit for bit, with the shards that it
came from, what the tool wrote for one ZeRO stage is made loadable by all, and what the tool leaves out is
added: buffers, frozen parameters, and everything of ours. Runs in one process, without a process group.

    step_000000009.universal/
       zero/NAME/fp32.pt, exp_avg.pt, exp_avg_sq.pt, step.pt   one parameter each, whole
       zero/optimizer_state.pt                                 the options of each parameter group
       *mp_rank_00_model_states.pt                             counters, buffers and frozen parameters
       rest.pt                                                 buffers and frozen parameters; plain types
       run_state.json, rng/, ...                               carried over
       universal.json                                          every file with size and checksum; written last
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_pretrain.checkpoint.manifest import (
    MANIFEST,
    SOURCE_MANIFEST,
    UNIVERSAL_MANIFEST,
    FileEntry,
    UniversalManifest,
    unfinished_universal_folder,
    universal_folder,
)
from ds_pretrain.checkpoint.shards import KINDS, SHARD_ENDINGS, ShardedCheckpoint, open_shards
from ds_pretrain.core.errors import InputError, RunError, mark_agreed
from ds_pretrain.core.files import (
    FileLock,
    available_memory_bytes,
    compute_checksum,
    free_bytes,
    sync_folder,
    write_atomic,
    write_point,
)
from ds_pretrain.core.state import RunState
from ds_pretrain.core.text import format_count_of

_MODEL_STATES = "mp_rank_00_model_states.pt"
_COUNTERS = ("dp_world_size", "mp_world_size", "global_steps", "global_samples", "skipped_steps")
_ALSO_KEPT = ("ds_version", "ds_config", "param_shapes", "shared_params", "buffer_names", "lr_scheduler")
_MEMORY_PER_SHARD = 3  # a worker holds a shard, a fragment of it and what torch.save buffers
_SPACE_FACTOR = 2.2  # DeepSpeed's fragments and the merged files exist at one time
# What decides how an optimizer's state is cut into shards, with the value that stands where nothing is set.
_LAYOUT: dict[tuple[str, ...], Any] = {
    ("zero_optimization", "stage"): None,
    ("zero_optimization", "offload_optimizer", "device"): "none",
    ("zero_optimization", "offload_param", "device"): "none",
    ("zero_optimization", "sub_group_size"): 1_000_000_000,
    ("zero_optimization", "round_robin_gradients"): False,
    ("zero_optimization", "parameter_alignment"): None,
    ("optimizer", "type"): None,
    ("optimizer", "params", "torch_adam"): False,
    ("bf16", "enabled"): False,
    ("data_types", "grad_accum_dtype"): None,
}


@dataclass(frozen=True)
class Universal:
    """A universal checkpoint whose files verified on the ranks, ready to load."""

    folder: Path
    state: RunState
    manifest: UniversalManifest  # without groups and files where something else wrote it


def find_layout_changes(
    saved: Mapping[str, Any], saved_world: int, config: Mapping[str, Any], world_size: int
) -> list[str]:
    """List why saved shards do not fit a DeepSpeed JSON and world ("ranks 2 -> 3"); empty if they do.

    Raises:
        InputError: a change that no conversion bridges.
    """
    changes = [f"ranks {saved_world} -> {world_size}"] if saved_world != world_size else []
    for path, default in _LAYOUT.items():
        before, after = _get_setting(saved, path, default), _get_setting(config, path, default)
        if before != after:
            changes.append(f"{'.'.join(path)} {before} -> {after}")
    if changes:
        _refuse_unbridgeable(saved, config, changes)
    return changes


def _get_setting(config: Mapping[str, Any], path: tuple[str, ...], default: Any) -> Any:
    value: Any = config
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return default if value is None else value


def _refuse_unbridgeable(saved: Mapping[str, Any], config: Mapping[str, Any], changes: list[str]) -> None:
    problems = []
    before, after = (str(_get_setting(c, ("optimizer", "type"), None)) for c in (saved, config))
    if before != after and not {before, after} <= {"Adam", "AdamW"}:
        problems.append(
            f"optimizer.type changed from {before} to {after}, and optimizer states cannot be converted; "
            f"restore the type, or start a new run with another `out`"
        )
    for section in ("offload_optimizer", "offload_param"):
        path = ("zero_optimization", section, "device")
        if "nvme" in (_get_setting(saved, path, "none"), _get_setting(config, path, "none")):
            problems.append(
                f"zero_optimization.{section}.device = nvme: DeepSpeed cannot convert what it swapped out "
                f"({', '.join(changes)}); start with what the checkpoint was saved with"
            )
    if problems:
        raise mark_agreed(InputError(problems))


def convert(folder: Path) -> Path:
    """Convert a checkpoint whose manifest has verified; the folder of the result, published by rename.

    A half-written earlier attempt is thrown away and done again.

    Raises:
        InputError: it cannot be converted, another program does it now, or the disk is too small.
        RunError: DeepSpeed's tool failed (its last words are in the message), or its result is not right.
    """
    cache = universal_folder(folder).name
    busy = f"{folder} is being converted by another program; wait until {cache} is there"
    with FileLock(folder, lambda _: busy):  # a second conversion would throw away the work of the first
        return _convert(folder)


def _convert(folder: Path) -> Path:
    target, workspace = universal_folder(folder), unfinished_universal_folder(folder)
    _check_space(folder)
    source = _open_convertible(folder)
    for leftover in (workspace, target):
        if leftover.exists():
            shutil.rmtree(leftover)
    result = workspace / target.name  # DeepSpeed writes `latest_universal` beside it: into the workspace
    result.mkdir(parents=True)
    write_point("convert_begin")
    _run_tool(folder, result, source)
    write_point("convert_check")
    steps = _read_optimizer_steps(source)
    _finish_parameters(source, result / "zero", steps)
    write_point("convert_global")
    _write_global(source, result, steps)
    _carry_over(source, result)
    write_point("convert_manifest")
    write_atomic(result / UNIVERSAL_MANIFEST, _list_files(result, source, steps).to_json())
    write_point("convert_publish")
    result.rename(target)
    write_point("convert_clean")
    sync_folder(target.parent)
    shutil.rmtree(workspace)
    return target


def _open_convertible(folder: Path) -> ShardedCheckpoint:
    """The shards of a checkpoint that the universal format can hold.

    Raises:
        InputError: it was saved before the first update, or its optimizer keeps no Adam moments.
    """
    source = open_shards(folder)
    states = source.optimizer(0)["state"]
    ranks = format_count_of(len(source.shards), "rank")
    if not states:
        raise InputError(
            f"{folder} was saved before the first applied update: its optimizer is empty, which DeepSpeed "
            f"cannot convert; start it on {ranks} with the same DeepSpeed JSON, or start a new run with "
            f"another `out`"
        )
    missing = [kind for kind in KINDS[1:] if kind not in next(iter(states.values()))]
    if missing:
        raise InputError(
            f"{folder} cannot be converted: its optimizer keeps no {' and no '.join(missing)}, which the "
            f"universal format needs; start it on {ranks} with the same DeepSpeed JSON"
        )
    return source


def _check_space(folder: Path) -> None:
    shards = sum(path.stat().st_size for path in folder.glob("*_optim_states.pt"))
    needed, free = int(shards * _SPACE_FACTOR), free_bytes(folder.parent)
    if needed > free:
        raise InputError(
            f"resharding {folder.name} needs {needed:,} bytes beside it, and {folder.parent} has {free:,} "
            f"free; free disk space"
        )


def _run_tool(folder: Path, result: Path, source: ShardedCheckpoint) -> None:
    largest = max(path.stat().st_size for path in folder.glob("*_optim_states.pt"))
    cores = len(os.sched_getaffinity(0))
    free = available_memory_bytes()
    fitting = max(1, free // (_MEMORY_PER_SHARD * largest))
    biggest = max(prod(shape) for shape in source.names.values()) * 4
    merging = max(1, free // (_MEMORY_PER_SHARD * biggest))
    command = [
        *(sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"),
        *("--input_folder", str(folder), "--output_folder", str(result)),
        *("--num_extract_workers", str(min(cores, fitting, len(source.shards)))),
        *("--num_merge_workers", str(min(cores, merging))),
    ]
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if done.returncode:
        last_words = "\n".join(done.stdout.strip().splitlines()[-15:])
        raise RunError(
            f"DeepSpeed could not convert {folder} (exit code {done.returncode}); the checkpoint is "
            f"intact and can be resumed on {format_count_of(len(source.shards), 'rank')}. DeepSpeed "
            f"said:\n{last_words}"
        )


def _read_optimizer_steps(source: ShardedCheckpoint) -> int:
    """Return the optimizer's update count; all groups must agree, or the checkpoint is damaged."""
    counts = source.steps()
    if len(counts) != 1:
        raise RunError(
            f"{source.folder}: its parameters disagree on how many updates they had: {sorted(counts)}"
        )
    return counts.pop()


def _finish_parameters(source: ShardedCheckpoint, zero: Path, steps: int) -> None:
    """Make every parameter's files loadable by every stage, and compare them with the shards."""
    for path in zero.iterdir():
        if path.is_dir() and path.name not in source.names:
            shutil.rmtree(path)  # buffers and second names of tied weights, which no optimizer owns

    def finish(name: str) -> list[str]:
        found = [_finish(source, zero / name, kind) for kind in KINDS]
        torch.save(torch.tensor(float(steps)), zero / name / "step.pt")
        return [problem for problem in found if problem]

    with ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0)))) as pool:
        problems = [problem for found in pool.map(finish, source.names) for problem in found]
    if problems:
        raise RunError(
            f"DeepSpeed's conversion is wrong, the checkpoint is unharmed: {'; '.join(problems[:10])}"
        )


def _finish(source: ShardedCheckpoint, folder: Path, kind: str) -> str | None:
    """Compare one tensor of a parameter, bit for bit; why it is not that of the shards, if it is not."""
    name, path, position = folder.name, folder / f"{kind}.pt", 0
    if not path.is_file():
        return f"{name} has no {kind}"
    loaded = torch.load(path, map_location="cpu", weights_only=False)
    whole: Tensor = loaded["param"] if isinstance(loaded, dict) else loaded
    shape, flat = source.names[name], whole.reshape(-1)
    for piece in source.fragments[name]:
        mine, theirs = flat[position : position + piece.length], source.piece(piece, kind)
        if not torch.equal(mine.view(torch.uint8), theirs.contiguous().view(torch.uint8)):
            return f"{name}: {kind} differs from rank {piece.rank}'s shard"
        position += piece.length
    if not position == whole.numel() == prod(shape):
        found = f"{whole.numel():,} elements, the shards {position:,}"
        return f"{name}: {kind} has {found}, expected {prod(shape):,}"
    if not isinstance(loaded, dict) or whole.shape != torch.Size(shape):
        torch.save({"param": whole.reshape(shape), "cat_dim": 0}, path)
    return None


def _write_global(source: ShardedCheckpoint, result: Path, steps: int) -> None:
    options = source.options
    state = {0: {"step": torch.tensor(float(steps))}}
    torch.save(
        {
            "zero_stage": source.stage,
            "ds_version": source.model["ds_version"],
            "param_groups": options,  # where ZeRO-1 and 2 look
            "optimizer_state_dict": {"state": state, "param_groups": options},  # where ZeRO-3 does
        },
        result / "zero" / "optimizer_state.pt",
    )
    rest = {  # copies: a tensor mapped from a file would be saved with all of that file
        "buffers": {name: value.clone() for name, value in source.buffers().items()},
        "frozen": {name: source.whole_frozen(name).clone() for name in source.frozen},
    }
    torch.save(rest, result / "rest.pt")
    kept = {key: source.model.get(key) for key in (*_COUNTERS, *_ALSO_KEPT)}
    for path in result.glob("*_model_states.pt"):
        path.unlink()
    for prefix in ("", "zero_pp_rank_0_"):  # the names under which ZeRO-1 and 2, and ZeRO-3, look
        torch.save(
            {**kept, "module": {**rest["buffers"], **rest["frozen"]}}, result / f"{prefix}{_MODEL_STATES}"
        )


def _carry_over(source: ShardedCheckpoint, result: Path) -> None:
    """Copy what is not DeepSpeed's: random streams, the run's state and texts."""
    shutil.copyfile(source.folder / MANIFEST, result / SOURCE_MANIFEST)
    for name in source.manifest.files:
        if not name.endswith(SHARD_ENDINGS):
            (result / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source.folder / name, result / name)


def _list_files(result: Path, source: ShardedCheckpoint, steps: int) -> UniversalManifest:
    paths = sorted(path for path in result.rglob("*") if path.is_file())
    with ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0)))) as pool:
        sums = list(pool.map(compute_checksum, paths))
    return UniversalManifest(
        step=source.manifest.step,
        optimizer_steps=steps,
        world_size=len(source.shards),
        zero_stage=source.stage,
        source=compute_checksum(source.folder / MANIFEST),
        groups=tuple(source.groups()),
        files={
            path.relative_to(result).as_posix(): FileEntry(path.stat().st_size, digest)
            for path, digest in zip(paths, sums, strict=True)
        },
    )
