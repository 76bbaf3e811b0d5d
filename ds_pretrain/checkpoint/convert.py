"""One checkpoint to DeepSpeed's universal format: a folder beside it that any number of ranks can load.

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
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_pretrain.checkpoint.layout import MANIFEST, FileEntry, owner, parse_manifest
from ds_pretrain.checkpoint.universal_layout import (
    SOURCE_MANIFEST,
    UNIVERSAL_MANIFEST,
    Group,
    UniversalManifest,
    cache_of,
    workspace_of,
)
from ds_pretrain.errors import InputError, RunError
from ds_pretrain.files import (
    available_memory_bytes,
    checksum,
    free_bytes,
    sync_folder,
    write_atomic,
    write_point,
)

KINDS = ("fp32", "exp_avg", "exp_avg_sq")
_MODEL_STATES = "mp_rank_00_model_states.pt"
_COUNTERS = ("dp_world_size", "mp_world_size", "global_steps", "global_samples", "skipped_steps")
_ALSO_KEPT = ("ds_version", "ds_config", "param_shapes", "shared_params", "buffer_names", "lr_scheduler")
_MEMORY_PER_SHARD = 3  # a worker holds a shard, a fragment of it and what torch.save buffers
_SPACE_FACTOR = 2.2  # DeepSpeed's fragments and the merged files exist at one time


@dataclass(frozen=True)
class _Fragment:
    """Where a piece of a parameter lies in a rank's shard."""

    rank: int
    index: int  # of the flat group in that shard
    start: int
    length: int


@dataclass(frozen=True)
class _Source:
    """The shards of a checkpoint, opened; tensors are mapped from disk, not read."""

    stage: int
    shapes: Sequence[Mapping[str, Any]]  # of each flat group: name to shape, in order
    shards: Sequence[Mapping[str, Any]]  # of each rank: DeepSpeed's optimizer state
    model: Mapping[str, Any]  # rank 0's model states
    model_files: Sequence[Path]

    @property
    def options(self) -> list[dict[str, Any]]:
        return list(_base(self, 0)["param_groups"])

    def names(self) -> dict[str, tuple[int, ...]]:
        """The shape of every trained parameter."""
        return {name: tuple(shape) for shapes in self.shapes for name, shape in shapes.items()}


def convert(folder: Path) -> Path:
    """Convert a checkpoint whose manifest has verified; the folder of the result, published by rename.

    A half-written earlier attempt is thrown away and done again.

    Raises:
        InputError: this checkpoint cannot be converted, or the disk is too small.
        RunError: DeepSpeed's tool failed (its last words are in the message), or its result is not right.
    """
    target, workspace = cache_of(folder), workspace_of(folder)
    _check_space(folder)
    source = open_source(folder)
    for leftover in (workspace, target):
        if leftover.exists():
            shutil.rmtree(leftover)
    result = workspace / target.name  # DeepSpeed writes `latest_universal` beside it: into the workspace
    result.mkdir(parents=True)
    write_point("convert_begin")
    _run_tool(folder, result, source)
    write_point("convert_check")
    steps = _steps(source, folder)
    _finish_parameters(source, result / "zero", steps)
    write_point("convert_global")
    _write_global(source, result)
    _carry_over(folder, result)
    write_point("convert_manifest")
    write_atomic(result / UNIVERSAL_MANIFEST, _sealed(folder, result, source, steps).to_json())
    write_point("convert_publish")
    result.rename(target)
    write_point("convert_clean")
    sync_folder(target.parent)
    shutil.rmtree(workspace)
    return target


def open_source(folder: Path) -> _Source:
    """Open the shards of a checkpoint. They are pickles: the manifest's checksums must have held.

    Raises:
        InputError: it was saved before the first update, or its optimizer keeps no Adam moments.
    """
    optim_files = _in_rank_order(folder, "*_optim_states.pt")
    model_files = _in_rank_order(folder, "*_model_states.pt")
    if not optim_files or not model_files:
        raise InputError(f"{folder} holds no DeepSpeed shards (*_optim_states.pt); name a checkpoint folder")
    shards = [_load(path)["optimizer_state_dict"] for path in optim_files]
    model = _load(model_files[0])
    stage = int(shards[0].get("zero_stage", 1))
    source = _Source(stage, model["param_shapes"], shards, model, model_files)
    states = _base(source, 0)["state"]
    if not states:
        raise InputError(
            f"{folder} was saved before the first applied update: its optimizer is empty, which DeepSpeed "
            f"cannot convert; start it on {len(shards)} ranks with the same DeepSpeed JSON, or start anew "
            "with another `out`"
        )
    missing = [kind for kind in KINDS[1:] if kind not in next(iter(states.values()))]
    if missing:
        raise InputError(
            f"{folder} cannot be converted: its optimizer keeps no {' and no '.join(missing)}, which the "
            f"universal format needs; start it on {len(shards)} ranks with the same DeepSpeed JSON"
        )
    return source


def _load(path: Path) -> Any:
    return torch.load(path, map_location="cpu", mmap=True, weights_only=False)


def _in_rank_order(folder: Path, pattern: str) -> list[Path]:
    return sorted(folder.glob(pattern), key=lambda path: (owner(path.name), path.name))


def _base(source: _Source, rank: int) -> Any:
    """torch's own optimizer state in a shard: `state` by flat group, `param_groups`."""
    return source.shards[rank]["optimizer_state_dict" if source.stage == 3 else "base_optimizer_state"]


def _flat(source: _Source, rank: int, index: int, kind: str) -> Tensor:
    if kind != "fp32":
        moment: Tensor = _base(source, rank)["state"][index][kind]
        return moment
    key = "fp32_flat_groups" if source.stage == 3 else "single_partition_of_fp32_groups"
    master: Tensor = source.shards[rank][key][index]
    return master


def _check_space(folder: Path) -> None:
    shards = sum(path.stat().st_size for path in folder.glob("*_optim_states.pt"))
    needed, free = int(shards * _SPACE_FACTOR), free_bytes(folder.parent)
    if needed > free:
        raise InputError(
            f"converting {folder.name} to another number of ranks needs {needed:,} bytes beside it, and "
            f"{folder.parent} has {free:,} free: make room"
        )


def _run_tool(folder: Path, result: Path, source: _Source) -> None:
    largest = max(path.stat().st_size for path in folder.glob("*_optim_states.pt"))
    cores = len(os.sched_getaffinity(0))
    free = available_memory_bytes()
    fitting = max(1, free // (_MEMORY_PER_SHARD * largest))
    biggest = max(prod(shape) for shape in source.names().values()) * 4
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
            f"DeepSpeed could not convert {folder} (exit code {done.returncode}); it is unharmed, and can be "
            f"started on {len(source.shards)} ranks. DeepSpeed said:\n{last_words}"
        )


def _steps(source: _Source, folder: Path) -> int:
    """How many updates the optimizer counts: one number for all, or the checkpoint is damaged."""
    counts = {int(s["step"]) for r in range(len(source.shards)) for s in _base(source, r)["state"].values()}
    if len(counts) != 1:
        raise RunError(f"{folder}: its parameters disagree on how many updates they had: {sorted(counts)}")
    return counts.pop()


def _finish_parameters(source: _Source, zero: Path, steps: int) -> None:
    """Make every parameter's files loadable by every stage, and compare them with the shards."""
    shapes, fragments = source.names(), _fragments(source)
    for path in zero.iterdir():
        if path.is_dir() and path.name not in shapes:
            shutil.rmtree(path)  # buffers and second names of tied weights, which no optimizer owns

    def finish(name: str) -> list[str]:
        found = [_finish(source, zero / name, kind, shapes[name], fragments[name]) for kind in KINDS]
        torch.save(torch.tensor(float(steps)), zero / name / "step.pt")
        return [problem for problem in found if problem]

    with ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0)))) as pool:
        problems = [problem for found in pool.map(finish, shapes) for problem in found]
    if problems:
        raise RunError(
            f"DeepSpeed's conversion is wrong, the checkpoint is unharmed: {'; '.join(problems[:10])}"
        )


def _finish(
    source: _Source, folder: Path, kind: str, shape: tuple[int, ...], fragments: Sequence[_Fragment]
) -> str | None:
    path = folder / f"{kind}.pt"
    if not path.is_file():
        return f"{folder.name} has no {kind}"
    loaded = torch.load(path, map_location="cpu", weights_only=False)
    whole: Tensor = loaded["param"] if isinstance(loaded, dict) else loaded
    if whole.numel() != prod(shape):
        return f"{folder.name}: {kind} has {whole.numel():,} elements, expected {prod(shape):,}"
    flat, position = whole.reshape(-1), 0
    for piece in fragments:
        mine = flat[position : position + piece.length]
        theirs = _flat(source, piece.rank, piece.index, kind)[piece.start : piece.start + piece.length]
        if not torch.equal(mine.view(torch.uint8), theirs.contiguous().view(torch.uint8)):
            return f"{folder.name}: {kind} differs from rank {piece.rank}'s shard"
        position += piece.length
    if position != flat.numel():
        return f"{folder.name}: the shards hold {position:,} elements of {kind}, expected {flat.numel():,}"
    if not isinstance(loaded, dict) or whole.shape != torch.Size(shape):
        torch.save({"param": whole.reshape(shape), "cat_dim": 0}, path)
    return None


def _fragments(source: _Source) -> dict[str, list[_Fragment]]:
    """The pieces of every parameter over the ranks' shards, in the order of its elements."""
    found: dict[str, list[_Fragment]] = {name: [] for name in source.names()}
    for rank in range(len(source.shards)):
        for name, piece in _fragments_of_rank(source, rank):
            found[name].append(piece)
    return found


def _fragments_of_rank(source: _Source, rank: int) -> Iterator[tuple[str, _Fragment]]:
    if source.stage < 3:  # parameters of a group lie one behind the other, cut anywhere
        for index, addresses in enumerate(source.shards[rank]["param_slice_mappings"]):
            for name, address in addresses.items():
                yield name, _Fragment(rank, index, address.start, address.numel)
        return
    for index, shapes in enumerate(source.shapes):  # every parameter is cut into equal shares
        start = 0
        for name, shape in shapes.items():
            share = ceil(prod(shape) / len(source.shards))
            length = max(0, min(share, prod(shape) - rank * share))
            yield name, _Fragment(rank, index, start, length)
            start += share


def _write_global(source: _Source, result: Path) -> None:
    options = source.options
    state = {0: {"step": torch.tensor(float(_steps(source, result)))}}
    torch.save(
        {
            "zero_stage": source.stage,
            "ds_version": source.model["ds_version"],
            "param_groups": options,  # where ZeRO-1 and 2 look
            "optimizer_state_dict": {"state": state, "param_groups": options},  # where ZeRO-3 does
        },
        result / "zero" / "optimizer_state.pt",
    )
    rest = {"buffers": _buffers(source), "frozen": _frozen(source)}
    torch.save(rest, result / "rest.pt")
    kept = {key: source.model.get(key) for key in (*_COUNTERS, *_ALSO_KEPT)}
    for path in result.glob("*_model_states.pt"):
        path.unlink()
    for prefix in ("", "zero_pp_rank_0_"):  # the names under which ZeRO-1 and 2, and ZeRO-3, look
        torch.save(
            {**kept, "module": {**rest["buffers"], **rest["frozen"]}}, result / f"{prefix}{_MODEL_STATES}"
        )


def _buffers(source: _Source) -> dict[str, Tensor]:
    return {name: source.model["module"][name].clone() for name in source.model.get("buffer_names") or ()}


def _frozen(source: _Source) -> dict[str, Tensor]:
    """Every parameter that no optimizer owns, whole."""
    if source.stage < 3:
        module, shared = source.model["module"], source.model.get("shared_params") or {}
        others = {*source.names(), *_buffers(source), *shared}
        return {name: value.clone() for name, value in module.items() if name not in others}
    shapes = source.model.get("frozen_param_shapes") or {}
    if not shapes:
        return {}
    models = [_load(path) for path in source.model_files]
    return {
        name: torch.cat([m["frozen_param_fragments"][name].reshape(-1) for m in models])[
            : prod(shape)
        ].reshape(shape)
        for name, shape in shapes.items()
    }


def _carry_over(folder: Path, result: Path) -> None:
    """Copy what is not DeepSpeed's: random streams, the run's state and texts."""
    manifest = folder / MANIFEST
    if manifest.is_file():
        names = [Path(name) for name in parse_manifest(manifest.read_text(encoding="utf-8")).files]
        shutil.copyfile(manifest, result / SOURCE_MANIFEST)
    else:
        names = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
    for name in names:
        if not name.name.endswith(("_model_states.pt", "_optim_states.pt")):
            (result / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / name, result / name)


def _sealed(folder: Path, result: Path, source: _Source, steps: int) -> UniversalManifest:
    paths = sorted(path for path in result.rglob("*") if path.is_file())
    with ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0)))) as pool:
        sums = list(pool.map(checksum, paths))
    files = {
        path.relative_to(result).as_posix(): FileEntry(path.stat().st_size, digest)
        for path, digest in zip(paths, sums, strict=True)
    }
    manifest = folder / MANIFEST
    step = (
        parse_manifest(manifest.read_text(encoding="utf-8")).step
        if manifest.is_file()
        else source.model["global_steps"]
    )
    return UniversalManifest(
        step=step,
        optimizer_steps=steps,
        world_size=len(source.shards),
        zero_stage=source.stage,
        source=checksum(manifest) if manifest.is_file() else None,
        groups=tuple(_groups(source)),
        files=files,
    )


def _groups(source: _Source) -> Iterator[Group]:
    """The name of each parameter group and its parameters."""
    for place, options in enumerate(source.options):
        names = [name for index in options["params"] for name in source.shapes[index]]
        yield Group(str(options.get("name", place)), tuple(names))
