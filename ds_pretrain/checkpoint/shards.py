"""DeepSpeed's shards of a checkpoint, read: where each parameter lies in them, and each tensor whole.

Tensors are mapped from disk: opening reads the pickles' structure, and a tensor is read when it is looked at.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_pretrain.checkpoint.manifest import MANIFEST, Group, Manifest, owner_rank, parse_manifest
from ds_pretrain.core.distributed import compute_partition
from ds_pretrain.core.errors import InputError

KINDS = ("fp32", "exp_avg", "exp_avg_sq")
SHARD_ENDINGS = ("_model_states.pt", "_optim_states.pt")


@dataclass(frozen=True)
class Fragment:
    """The position of a piece of a parameter in a rank's shard."""

    rank: int
    index: int  # of the flat group in that shard
    start: int
    length: int


@dataclass(frozen=True)
class ShardedCheckpoint:
    """The shards of a checkpoint, opened."""

    folder: Path
    manifest: Manifest
    stage: int
    shapes: Sequence[Mapping[str, Any]]  # of each flat group: name to shape, in order
    shards: Sequence[Mapping[str, Any]]  # of each rank: DeepSpeed's optimizer state
    model: Mapping[str, Any]  # rank 0's model states
    model_files: Sequence[Path]

    @property
    def options(self) -> list[dict[str, Any]]:
        """The options of each parameter group; `params` are indices of flat groups."""
        return list(self.optimizer(0)["param_groups"])

    @cached_property
    def names(self) -> dict[str, tuple[int, ...]]:
        """The shape of every trained parameter."""
        return {name: tuple(shape) for shapes in self.shapes for name, shape in shapes.items()}

    @cached_property
    def fragments(self) -> dict[str, list[Fragment]]:
        """The pieces of every parameter over the ranks' shards, in the order of its elements."""
        found: dict[str, list[Fragment]] = {name: [] for name in self.names}
        for rank in range(len(self.shards)):
            for name, piece in _read_fragments_of_rank(self, rank):
                found[name].append(piece)
        return found

    @property
    def kinds(self) -> tuple[str, ...]:
        """`fp32`, and what the optimizer remembers of each element: nothing before its first update."""
        states = self.optimizer(0)["state"].values()
        moments = (k for s in states for k, v in s.items() if torch.is_tensor(v) and v.dim())
        return ("fp32", *dict.fromkeys(kind for kind in moments if kind != "step"))

    def optimizer(self, rank: int) -> Any:
        """torch's own optimizer state in a shard: `state` by flat group, `param_groups`."""
        return self.shards[rank]["optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"]

    def flat(self, rank: int, index: int, kind: str) -> Tensor:
        """A rank's part of a flat group: its fp32 master, or one of its moments. [n]"""
        if kind != "fp32":
            moment: Tensor = self.optimizer(rank)["state"][index][kind]
            return moment
        key = "fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"
        master: Tensor = self.shards[rank][key][index]
        return master

    def piece(self, fragment: Fragment, kind: str) -> Tensor:
        """Return a rank's piece of a parameter. [fragment.length]"""
        flat = self.flat(fragment.rank, fragment.index, kind)
        return flat[fragment.start : fragment.start + fragment.length]

    def whole(self, name: str, kind: str) -> Tensor:
        """A parameter's master or moment, put together from all ranks' shards, in the parameter's shape.

        Raises:
            InputError: the shards do not hold all of it.
        """
        try:
            flat = torch.cat([self.piece(fragment, kind).reshape(-1) for fragment in self.fragments[name]])
        except (KeyError, IndexError, RuntimeError):
            flat = torch.empty(0)
        if flat.numel() != prod(self.names[name]):
            raise InputError(
                f"{self.folder}: its shards hold {flat.numel():,} elements of {name} ({kind}), expected "
                f"{prod(self.names[name]):,}; optimizer states offloaded to NVMe cannot be read from them"
            )
        return flat.reshape(self.names[name])

    def steps(self) -> set[int]:
        """Return the optimizer's update counts over all ranks and groups; one number if all is well."""
        return {
            int(state["step"])
            for rank in range(len(self.shards))
            for state in self.optimizer(rank)["state"].values()
            if "step" in state
        }

    def groups(self) -> Iterator[Group]:
        """The name of each parameter group and its parameters."""
        for index, options in enumerate(self.options):
            names = [name for index in options["params"] for name in self.shapes[index]]
            yield Group(str(options.get("name", index)), tuple(names))

    def buffers(self) -> dict[str, Tensor]:
        """Every persistent buffer."""
        return {name: self.model["module"][name] for name in self.model.get("buffer_names") or ()}

    @property
    def frozen(self) -> list[str]:
        """The parameters that no optimizer owns."""
        if self.stage == 3:
            return list(self.model.get("frozen_param_shapes") or {})
        others = {*self.names, *self.buffers(), *(self.model.get("shared_params") or {})}
        return [name for name in self.model["module"] if name not in others]

    def whole_frozen(self, name: str) -> Tensor:
        """A frozen parameter, in its shape."""
        if self.stage < 3:
            value: Tensor = self.model["module"][name]
            return value
        shape = self.model["frozen_param_shapes"][name]
        pieces = [model["frozen_param_fragments"][name].reshape(-1) for model in self._models]
        return torch.cat(pieces)[: prod(shape)].reshape(shape)

    def whole_weights(self) -> dict[str, Tensor]:
        """Every parameter and buffer by name, on the CPU; tied weights stand under each of their names."""
        found = self.buffers() | {name: self.whole(name, "fp32") for name in self.names}
        found |= {name: self.whole_frozen(name) for name in self.frozen}
        tied = self.model.get("shared_params") or {}
        return found | {name: found[other] for name, other in tied.items() if other in found}

    @cached_property
    def _models(self) -> list[Any]:
        return [load_pickle(path) for path in self.model_files]

    def weights(self) -> dict[str, Tensor]:
        """Return the model's weights where shards hold them apart from the masters (ZeRO-1 and 2)."""
        module = self.model["module"] if self.stage < 3 else {}
        return {name: module[name] for name in self.names if name in module}


def open_shards(folder: Path) -> ShardedCheckpoint:
    """Open the shards that a checkpoint's manifest lists. They are pickles: its checksums must have held.

    Raises:
        InputError: it lists none.
        ValueError: the manifest is none.
    """
    manifest = parse_manifest((folder / MANIFEST).read_text(encoding="utf-8"))
    names = sorted(manifest.files, key=lambda name: (owner_rank(name), name))  # in the order of their ranks
    model_files, optim_files = (
        [folder / name for name in names if name.endswith(ending)] for ending in SHARD_ENDINGS
    )
    if not optim_files or not model_files:
        raise InputError(f"{folder} has no DeepSpeed shards (*_optim_states.pt); name a checkpoint folder")
    shards = [load_pickle(path)["optimizer_state_dict"] for path in optim_files]
    model = load_pickle(model_files[0])
    stage = int(shards[0].get("zero_stage", 1))
    return ShardedCheckpoint(folder, manifest, stage, model["param_shapes"], shards, model, model_files)


def load_pickle(path: Path) -> Any:
    """Load a DeepSpeed file with its tensors mapped from disk. It can run code: verify it first."""
    return torch.load(path, map_location="cpu", mmap=True, weights_only=False)


def _read_fragments_of_rank(source: ShardedCheckpoint, rank: int) -> Iterator[tuple[str, Fragment]]:
    if source.stage < 3:  # parameters of a group lie one behind the other, cut anywhere
        for index, addresses in enumerate(source.shards[rank]["param_slice_mappings"]):
            for name, address in addresses.items():
                yield name, Fragment(rank, index, address.start, address.numel)
        return
    for index, shapes in enumerate(source.shapes):  # every parameter is cut into equal shares
        start = 0
        for name, shape in shapes.items():
            share = compute_partition(prod(shape), rank, len(source.shards))
            yield name, Fragment(rank, index, start, share.length)
            start += share.padded
