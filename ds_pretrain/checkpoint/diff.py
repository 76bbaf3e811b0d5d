"""Compares two checkpoints bit by bit, whatever their world sizes, ZeRO stages and formats.

Nothing large is read on opening; each tensor is read, or put together from shards, when it is asked for: one
parameter of each checkpoint is in memory at a time.
"""

import contextlib
import io
import json
import math
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_pretrain.checkpoint.manifest import (
    DEEPSPEED,
    MANIFEST,
    RUN_STATE,
    SOURCE_MANIFEST,
    UNIVERSAL_MANIFEST,
    Group,
    Manifest,
    owner_rank,
    parse_manifest,
)
from ds_pretrain.checkpoint.shards import load_pickle, open_shards
from ds_pretrain.checkpoint.universal import find_universal_damage, read_universal
from ds_pretrain.checkpoint.verify import find_damage
from ds_pretrain.core.distributed import World
from ds_pretrain.core.errors import InputError
from ds_pretrain.core.jsonl import show_value
from ds_pretrain.core.text import find_changed_fields, format_count_of

SHOWN_LINES = 20  # of each kind of difference
_CHUNK = 1 << 22  # elements compared at a time, in fp64
_STATE = ("optimizer", "engine", RUN_STATE)  # the state of a run, as against how it was set up
_WEIGHT = "weight"  # what the model computes with; a checkpoint may leave it out, as it follows from `fp32`
_COUNTERS = ("global_steps", "skipped_steps")
_Tensors = dict[tuple[str, str], Callable[[], Tensor]]


@dataclass(frozen=True)
class Contents:
    """A verified checkpoint, opened."""

    title: str  # "step 1,000, 8 ranks, ZeRO-3"
    tensors: _Tensors  # (parameter, kind) to a reader of the whole
    values: Mapping[str, Any]  # nested: optimizer options, counters, run state, settings
    streams: Mapping[int, Mapping[str, str]]  # rank to stream to a hash of its state


@dataclass(frozen=True)
class TensorDifference:
    """A tensor whose bits differ. `unlike` says why its elements have no counterparts."""

    name: str
    kind: str
    num_different: str | None
    largest: float = math.inf  # absolute difference of two elements
    relative: float = math.inf  # ||a - b|| / ||a||

    @property
    def line(self) -> str:
        if self.num_different is not None:
            return f"{self.name}  {self.kind}  {self.num_different}"
        return f"{self.name}  {self.kind}  relative {self.relative:.2e}, largest {self.largest:.2e}"


@dataclass(frozen=True)
class Differences:
    """The differences between two checkpoints, and how much was compared."""

    titles: tuple[str, str]
    tensors: tuple[TensorDifference, ...]  # the furthest apart first
    streams: tuple[str, ...]  # "rank 0: torch"
    values: Mapping[str, tuple[Any, Any]]  # dotted path to both
    num_tensors: int
    num_streams: int
    num_ranks: int

    @property
    def state(self) -> dict[str, tuple[Any, Any]]:
        """The part of `values` that belongs to the state of a run."""
        return {path: both for path, both in self.values.items() if path.startswith(_STATE)}

    @property
    def is_empty(self) -> bool:
        """True if the two are the same in all that was compared."""
        return not (self.tensors or self.streams or self.values)

    @property
    def is_same_state(self) -> bool:
        """True if they are the same but for settings: a run continues alike from both."""
        return not (self.tensors or self.streams or self.state)


def compare_checkpoints(a: Path, b: Path) -> Differences:
    """Compare two checkpoint folders, or universal forms. One parameter of each is in memory at a time.

    Raises:
        InputError: one does not verify; with the reason.
    """
    first, second = _open(a, b)
    names = [
        key
        for key in dict.fromkeys([*first.tensors, *second.tensors])
        if key[1] != _WEIGHT or (key in first.tensors and key in second.tensors)
    ]
    found = [each for key in names if (each := _compare_tensor(key, first, second)) is not None]
    ranks = sorted({*first.streams, *second.streams})
    return Differences(
        titles=(first.title, second.title),
        tensors=tuple(sorted(found, key=lambda each: -each.relative)),
        streams=tuple(line for rank in ranks for line in _compare_streams(rank, first, second)),
        values=find_changed_fields(first.values, second.values),
        num_tensors=len(names),
        num_streams=sum(len({*first.streams.get(r, {}), *second.streams.get(r, {})}) for r in ranks),
        num_ranks=len(ranks),
    )


def describe_differences(found: Differences) -> Iterator[str]:
    """Both checkpoints, a line for each difference, a summary."""
    for name, title in zip("ab", found.titles, strict=True):
        yield f"{name}  {title}"
    yield from format_differences(found)
    tensors = format_count_of(found.num_tensors, "tensor")
    streams = (
        f"{format_count_of(found.num_streams, 'random stream')} on {format_count_of(found.num_ranks, 'rank')}"
    )
    if found.is_empty:
        yield f"bitwise equal: {tensors}, {streams}, options, counters and settings"
        return
    yield (
        f"different: {len(found.tensors):,} of {tensors}, {len(found.streams):,} of "
        f"{streams}, {len(found.values):,} values"
    )


def format_differences(found: Differences) -> Iterator[str]:
    """A line for each difference, at most `SHOWN_LINES` of a kind."""
    yield from _cap_lines([each.line for each in found.tensors], "tensors")
    yield from _cap_lines(list(found.streams), "random streams")
    values = [
        f"{path}: {show_value(old)} in a, {show_value(new)} in b" for path, (old, new) in found.values.items()
    ]
    yield from _cap_lines(values, "values")


def _cap_lines(lines: list[str], what: str) -> Iterator[str]:
    yield from lines[:SHOWN_LINES]
    if len(lines) > SHOWN_LINES:
        yield f"... and {len(lines) - SHOWN_LINES:,} more {what}"


def _compare_tensor(key: tuple[str, str], a: Contents, b: Contents) -> TensorDifference | None:
    if key not in a.tensors or key not in b.tensors:
        return TensorDifference(*key, f"only in {'a' if key in a.tensors else 'b'}")
    mine, theirs = a.tensors[key](), b.tensors[key]()
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return TensorDifference(*key, f"{_describe_form(mine)} in a, {_describe_form(theirs)} in b")
    left, right = mine.reshape(-1), theirs.reshape(-1)  # [n] each
    if torch.equal(left.view(torch.uint8), right.view(torch.uint8)):
        return None
    return TensorDifference(*key, None, *_measure_distance(left, right))


def _measure_distance(left: Tensor, right: Tensor) -> tuple[float, float]:
    """Largest absolute difference of two elements, and the norm of all relative to that of `left`.

    What is infinite on both sides alike, or no number on both, is no difference and in no norm.
    """
    largest, apart, norm = 0.0, 0.0, 0.0
    for start in range(0, left.numel(), _CHUNK):
        mine, theirs = (each[start : start + _CHUNK].double() for each in (left, right))
        alike = (mine == theirs) | (mine.isnan() & theirs.isnan())  # [_CHUNK]; also of infinities
        gap = torch.where(alike, 0.0, (mine - theirs).abs())  # [_CHUNK]
        gap = torch.where(gap.isnan(), math.inf, gap)  # a number against NaN
        largest = max(largest, float(gap.max()))
        apart += float(gap.square().sum())
        norm += float(torch.where(mine.isfinite(), mine, 0.0).square().sum())
    if not math.isfinite(apart):
        return largest, math.inf
    return largest, math.sqrt(apart / norm) if norm else math.inf if apart else 0.0


def _describe_form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _compare_streams(rank: int, a: Contents, b: Contents) -> Iterator[str]:
    mine, theirs = a.streams.get(rank), b.streams.get(rank)
    if mine is None or theirs is None:
        yield f"rank {rank}: random streams only in {'b' if mine is None else 'a'}"
        return
    for name in dict.fromkeys([*mine, *theirs]):
        if mine.get(name) != theirs.get(name):
            yield f"rank {rank}: the random stream of {name} differs"


def _open(*folders: Path) -> list[Contents]:
    """Open checkpoints, or their universal forms, all of which verify by this process alone.

    Raises:
        InputError: any does not verify; every reason at once, and nothing has been opened.
    """
    reasons = {folder: _find_mismatch(folder) for folder in folders}
    if problems := [f"{folder} cannot be opened: {reason}" for folder, reason in reasons.items() if reason]:
        raise InputError(problems)
    said = io.StringIO()  # reading the pickles imports DeepSpeed, which speaks of accelerators
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        return [_open_shards(f) if (f / MANIFEST).is_file() else _open_universal(f) for f in folders]


def _find_mismatch(folder: Path) -> str | None:
    try:
        if (folder / MANIFEST).is_file():
            return find_damage(folder)
        if (folder / UNIVERSAL_MANIFEST).is_file():
            return find_universal_damage(folder, read_universal(folder), World())
    except (OSError, ValueError) as error:
        return str(error)
    if not folder.is_dir():
        return "there is no such folder"
    return (
        f"it has neither {MANIFEST} nor {UNIVERSAL_MANIFEST}, so nothing proves its files, and DeepSpeed's "
        "are pickles, which can run code when they are read"
    )


def _open_shards(folder: Path) -> Contents:
    source = open_shards(folder)
    tensors: _Tensors = {
        (name, kind): partial(source.whole, name, kind) for name in source.names for kind in source.kinds
    }
    tensors |= _wrap_tensors(_WEIGHT, source.weights()) | _wrap_tensors("buffer", source.buffers())
    tensors |= {(name, "frozen"): partial(source.whole_frozen, name) for name in source.frozen}
    steps = sorted(source.steps())
    optimizer = {
        "steps": steps[0] if len(steps) == 1 else steps,
        "groups": _collect_group_values(source.options, source.groups()),
    }
    counters = {key: source.model.get(key) for key in _COUNTERS}
    ranks = format_count_of(source.manifest.world_size, "rank")
    title = f"step {source.manifest.step:,}, {ranks}, ZeRO-{source.stage}"
    values = {"optimizer": optimizer, "engine": counters, **_read_settings(folder, source.manifest)}
    return Contents(title, tensors, values, _read_streams(folder))


def _open_universal(folder: Path) -> Contents:
    manifest = read_universal(folder)
    saved = parse_manifest((folder / SOURCE_MANIFEST).read_text(encoding="utf-8"))
    tensors: _Tensors = {
        (path.parent.name, path.stem): partial(_load_universal_tensor, path)
        for path in sorted((folder / "zero").glob("*/*.pt"))
        if path.stem != "step"
    }
    rest = load_pickle(folder / "rest.pt")
    tensors |= _wrap_tensors("buffer", rest["buffers"]) | _wrap_tensors("frozen", rest["frozen"])
    options = load_pickle(folder / "zero" / "optimizer_state.pt")["param_groups"]
    model = load_pickle(next(folder.glob("*_model_states.pt")))
    values = {
        "optimizer": {
            "steps": manifest.optimizer_steps,
            "groups": _collect_group_values(options, manifest.groups),
        },
        "engine": {key: model.get(key) for key in _COUNTERS},
        **_read_settings(folder, saved),
    }
    ranks = format_count_of(manifest.world_size, "rank")
    title = f"step {manifest.step:,}, universal, of {ranks}, ZeRO-{manifest.zero_stage}"
    return Contents(title, tensors, values, _read_streams(folder))


def _wrap_tensors(kind: str, tensors: Mapping[str, Tensor]) -> _Tensors:
    """Tensors that are mapped from a file already."""
    return {(name, kind): partial(_keep_tensor, value) for name, value in tensors.items()}


def _keep_tensor(value: Tensor) -> Tensor:
    return value


def _load_universal_tensor(path: Path) -> Tensor:
    tensor: Tensor = load_pickle(path)["param"]
    return tensor


def _collect_group_values(options: list[dict[str, Any]], groups: Iterable[Group]) -> dict[str, Any]:
    """Each group's options and the names of its parameters, by the group's name."""
    return {
        group.name: {
            **{key: _to_plain(value) for key, value in each.items() if key != "params"},
            "parameters": sorted(group.parameters),
        }
        for each, group in zip(options, groups, strict=True)
    }


def _read_settings(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """The run's state, its settings as they were read, and what makes the run that run."""
    found = {
        name: _parse_settings_file(folder / name) for name in (RUN_STATE, "run.toml", DEEPSPEED, "model.json")
    }
    found |= {"identity": manifest.identity, "overrides": list(manifest.overrides)}
    return {name: value for name, value in found.items() if value is not None}


def _parse_settings_file(path: Path) -> Any:
    """A file of settings as a tree, or its text where it is none; None if there is no such file."""
    if not path.is_file():
        return None
    text = path.read_text(encoding="utf-8")
    try:
        return tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except ValueError:
        return text


def _read_streams(folder: Path) -> dict[int, dict[str, str]]:
    return {
        owner_rank(f"rng/{path.name}"): {
            name: sha256(repr(_to_plain(state)).encode()).hexdigest()
            for name, state in torch.load(path, map_location="cpu", weights_only=True).items()
            if state is not None  # no device
        }
        for path in sorted((folder / "rng").glob("rank_*.pt"))
    }


def _to_plain(value: Any) -> Any:
    """Numbers, texts, lists and tables, whatever it was: comparable and printable."""
    if torch.is_tensor(value):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: _to_plain(each) for key, each in value.items()}
    return [_to_plain(each) for each in value] if isinstance(value, list | tuple) else value
