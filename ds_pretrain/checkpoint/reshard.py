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

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from ds_pretrain.checkpoint.manifest import MANIFEST, FileEntry, parse_manifest
from ds_pretrain.checkpoint.shards import KINDS, SHARD_ENDINGS, Fragment, Source, open_shards
from ds_pretrain.checkpoint.universal_layout import (
    SOURCE_MANIFEST,
    UNIVERSAL_MANIFEST,
    UniversalManifest,
    cache_of,
    workspace_of,
)
from ds_pretrain.core.errors import InputError, RunError
from ds_pretrain.core.files import (
    available_memory_bytes,
    checksum,
    free_bytes,
    sync_folder,
    write_atomic,
    write_point,
)
from ds_pretrain.core.text import counted

_MODEL_STATES = "mp_rank_00_model_states.pt"
_COUNTERS = ("dp_world_size", "mp_world_size", "global_steps", "global_samples", "skipped_steps")
_ALSO_KEPT = ("ds_version", "ds_config", "param_shapes", "shared_params", "buffer_names", "lr_scheduler")
_MEMORY_PER_SHARD = 3  # a worker holds a shard, a fragment of it and what torch.save buffers
_SPACE_FACTOR = 2.2  # DeepSpeed's fragments and the merged files exist at one time


def convert(folder: Path) -> Path:
    """Convert a checkpoint whose manifest has verified; the folder of the result, published by rename.

    A half-written earlier attempt is thrown away and done again.

    Raises:
        InputError: it cannot be converted, another program does it now, or the disk is too small.
        RunError: DeepSpeed's tool failed (its last words are in the message), or its result is not right.
    """
    with _alone(folder):
        return _converted(folder)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold a checkpoint against a second conversion, which would throw the first one's work away."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise InputError(
            f"{folder} is being converted by another program; wait until {cache_of(folder).name} is there"
        ) from None
    except OSError:
        pass  # a file system without locks
    try:
        yield
    finally:
        os.close(descriptor)


def _converted(folder: Path) -> Path:
    target, workspace = cache_of(folder), workspace_of(folder)
    _check_space(folder)
    source = _convertible(folder)
    for leftover in (workspace, target):
        if leftover.exists():
            shutil.rmtree(leftover)
    result = workspace / target.name  # DeepSpeed writes `latest_universal` beside it: into the workspace
    result.mkdir(parents=True)
    write_point("convert_begin")
    _run_tool(folder, result, source)
    write_point("convert_check")
    steps = _steps(source)
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


def _convertible(folder: Path) -> Source:
    """The shards of a checkpoint that the universal format can hold.

    Raises:
        InputError: it was saved before the first update, or its optimizer keeps no Adam moments.
    """
    source = open_shards(folder)
    states = source.optimizer(0)["state"]
    ranks = counted(len(source.shards), "rank")
    if not states:
        raise InputError(
            f"{folder} was saved before the first applied update: its optimizer is empty, which DeepSpeed "
            f"cannot convert; start it on {ranks} with the same DeepSpeed JSON, or start anew "
            "with another `out`"
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
            f"converting {folder.name} to another number of ranks needs {needed:,} bytes beside it, and "
            f"{folder.parent} has {free:,} free: make room"
        )


def _run_tool(folder: Path, result: Path, source: Source) -> None:
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
            f"DeepSpeed could not convert {folder} (exit code {done.returncode}); it is unharmed, and can be "
            f"started on {counted(len(source.shards), 'rank')}. DeepSpeed said:\n{last_words}"
        )


def _steps(source: Source) -> int:
    """How many updates the optimizer counts: one number for all, or the checkpoint is damaged."""
    counts = source.steps()
    if len(counts) != 1:
        raise RunError(
            f"{source.folder}: its parameters disagree on how many updates they had: {sorted(counts)}"
        )
    return counts.pop()


def _finish_parameters(source: Source, zero: Path, steps: int) -> None:
    """Make every parameter's files loadable by every stage, and compare them with the shards."""
    shapes, fragments = source.names, source.fragments
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
    source: Source, folder: Path, kind: str, shape: tuple[int, ...], fragments: Sequence[Fragment]
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
        theirs = source.piece(piece, kind)
        if not torch.equal(mine.view(torch.uint8), theirs.contiguous().view(torch.uint8)):
            return f"{folder.name}: {kind} differs from rank {piece.rank}'s shard"
        position += piece.length
    if position != flat.numel():
        return f"{folder.name}: the shards hold {position:,} elements of {kind}, expected {flat.numel():,}"
    if not isinstance(loaded, dict) or whole.shape != torch.Size(shape):
        torch.save({"param": whole.reshape(shape), "cat_dim": 0}, path)
    return None


def _write_global(source: Source, result: Path) -> None:
    options = source.options
    state = {0: {"step": torch.tensor(float(_steps(source)))}}
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


def _carry_over(folder: Path, result: Path) -> None:
    """Copy what is not DeepSpeed's: random streams, the run's state and texts."""
    manifest = folder / MANIFEST
    if manifest.is_file():
        names = [Path(name) for name in parse_manifest(manifest.read_text(encoding="utf-8")).files]
        shutil.copyfile(manifest, result / SOURCE_MANIFEST)
    else:
        names = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
    for name in names:
        if not name.name.endswith(SHARD_ENDINGS):
            (result / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / name, result / name)


def _sealed(folder: Path, result: Path, source: Source, steps: int) -> UniversalManifest:
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
        groups=tuple(source.groups()),
        files=files,
    )
