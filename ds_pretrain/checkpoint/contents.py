"""What a checkpoint holds, free of ranks, ZeRO stage and format: whole tensors, options, random streams.

Nothing large is read on opening; each tensor is read, or put together from shards, when it is asked for.
"""

import contextlib
import io
import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_pretrain.checkpoint.manifest import MANIFEST, RUN_STATE, owner, parse_manifest
from ds_pretrain.checkpoint.shards import open_shards
from ds_pretrain.checkpoint.universal import damage, read_universal
from ds_pretrain.checkpoint.universal_layout import (
    SOURCE_MANIFEST,
    UNIVERSAL_MANIFEST,
    Group,
)
from ds_pretrain.checkpoint.verify import broken_reason
from ds_pretrain.core.distributed import World
from ds_pretrain.core.errors import InputError

WEIGHT = "weight"  # what the model computes with; a checkpoint may leave it out, as it follows from `fp32`
BUFFER, FROZEN = "buffer", "frozen"
_COUNTERS = ("global_steps", "skipped_steps")


@dataclass(frozen=True)
class Contents:
    """A verified checkpoint, opened."""

    folder: Path
    title: str  # "step 1,000, 8 ranks, ZeRO-3"
    tensors: Mapping[tuple[str, str], Callable[[], Tensor]]  # (parameter, kind) to a reader of the whole
    values: Mapping[str, Any]  # nested: optimizer options, counters, run state, settings
    streams: Mapping[int, Mapping[str, str]]  # rank to stream to a hash of its state


def opened(*folders: Path) -> list[Contents]:
    """Open checkpoints, or their universal forms, all of which verify by this process alone.

    Raises:
        InputError: any does not verify; every reason at once, and nothing has been opened.
    """
    reasons = {folder: _reason(folder) for folder in folders}
    if problems := [f"{folder} cannot be opened: {reason}" for folder, reason in reasons.items() if reason]:
        raise InputError(problems)
    said = io.StringIO()  # reading the pickles imports DeepSpeed, which speaks of accelerators
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        return [_of_shards(f) if (f / MANIFEST).is_file() else _of_universal(f) for f in folders]


def _reason(folder: Path) -> str | None:
    try:
        if (folder / MANIFEST).is_file():
            return broken_reason(folder)
        if (folder / UNIVERSAL_MANIFEST).is_file():
            return damage(folder, read_universal(folder), World())
    except (OSError, ValueError) as error:
        return str(error)
    if not folder.is_dir():
        return "there is no such folder"
    return (
        f"it has neither {MANIFEST} nor {UNIVERSAL_MANIFEST}, so nothing proves its files, and DeepSpeed's "
        "are pickles, which can run code when they are read"
    )


def _of_shards(folder: Path) -> Contents:
    source = open_shards(folder)
    tensors: dict[tuple[str, str], Callable[[], Tensor]] = {
        (name, kind): partial(source.whole, name, kind) for name in source.names for kind in source.kinds
    }
    tensors |= {(name, WEIGHT): partial(_same, value) for name, value in source.weights().items()}
    tensors |= {(name, BUFFER): partial(_same, value) for name, value in source.buffers().items()}
    tensors |= {(name, FROZEN): partial(source.whole_frozen, name) for name in source.frozen}
    steps = sorted(source.steps())
    optimizer = {
        "steps": steps[0] if len(steps) == 1 else steps,
        "groups": _group_values(source.options, list(source.groups())),
    }
    counters = {key: source.model.get(key) for key in _COUNTERS}
    manifest = parse_manifest((folder / MANIFEST).read_text(encoding="utf-8"))
    title = f"step {manifest.step:,}, {_ranks(manifest.world_size)}, ZeRO-{source.stage}"
    values = {"optimizer": optimizer, "engine": counters, **_settings(folder, folder / MANIFEST)}
    return Contents(folder, title, tensors, values, _streams(folder))


def _of_universal(folder: Path) -> Contents:
    manifest = read_universal(folder)
    tensors: dict[tuple[str, str], Callable[[], Tensor]] = {
        (path.parent.name, path.stem): partial(_universal_tensor, path)
        for path in sorted((folder / "zero").glob("*/*.pt"))
        if path.stem != "step"
    }
    rest = _load(folder / "rest.pt")
    tensors |= {(name, BUFFER): partial(_same, value) for name, value in rest["buffers"].items()}
    tensors |= {(name, FROZEN): partial(_same, value) for name, value in rest["frozen"].items()}
    options = _load(folder / "zero" / "optimizer_state.pt")["param_groups"]
    model = _load(next(folder.glob("*_model_states.pt")))
    values = {
        "optimizer": {"steps": manifest.optimizer_steps, "groups": _group_values(options, manifest.groups)},
        "engine": {key: model.get(key) for key in _COUNTERS},
        **_settings(folder, folder / SOURCE_MANIFEST),
    }
    title = f"step {manifest.step:,}, universal, of {_ranks(manifest.world_size)}, ZeRO-{manifest.zero_stage}"
    return Contents(folder, title, tensors, values, _streams(folder))


def _ranks(count: int) -> str:
    return f"{count:,} rank{'s' * (count != 1)}"


def _same(value: Tensor) -> Tensor:
    return value


def _universal_tensor(path: Path) -> Tensor:
    loaded = _load(path)
    tensor: Tensor = loaded["param"] if isinstance(loaded, dict) else loaded
    return tensor


def _load(path: Path) -> Any:
    """A file of a universal form that verified: DeepSpeed's tool writes pickles too."""
    return torch.load(path, map_location="cpu", mmap=True, weights_only=False)


def _group_values(options: list[dict[str, Any]], groups: "list[Group] | tuple[Group, ...]") -> dict[str, Any]:
    """Each group's options and the names of its parameters, by the group's name."""
    return {
        group.name: {
            **{key: _plain(value) for key, value in each.items() if key != "params"},
            "parameters": sorted(group.parameters),
        }
        for each, group in zip(options, groups, strict=True)
    }


def _settings(folder: Path, manifest: Path) -> dict[str, Any]:
    """The run's state, its settings as they were read, and what makes the run that run."""
    found = {name: _parsed(folder / name) for name in (RUN_STATE, "run.toml", "deepspeed.json", "model.json")}
    if manifest.is_file():
        saved = parse_manifest(manifest.read_text(encoding="utf-8"))
        found |= {"identity": saved.identity, "overrides": list(saved.overrides)}
    return {name: value for name, value in found.items() if value is not None}


def _parsed(path: Path) -> Any:
    """A file of settings as a tree, or its text where it is none; None if there is no such file."""
    if not path.is_file():
        return None
    text = path.read_text(encoding="utf-8")
    try:
        return tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except ValueError:
        return text


def _streams(folder: Path) -> dict[int, dict[str, str]]:
    return {
        owner(f"rng/{path.name}"): {
            name: sha256(repr(_plain(state)).encode()).hexdigest()
            for name, state in torch.load(path, map_location="cpu", weights_only=True).items()
            if state is not None  # no device
        }
        for path in sorted((folder / "rng").glob("rank_*.pt"))
    }


def _plain(value: Any) -> Any:
    """Numbers, texts, lists and tables, whatever it was: comparable and printable."""
    if torch.is_tensor(value):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value
