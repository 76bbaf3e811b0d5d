"""This rank's part of every parameter; loads a checkpoint, and repairs what DeepSpeed's load leaves wrong.

A part is a contiguous piece of the flattened parameter: its fp32 master and its moments, as views of the live
tensors. ZeRO-3 splits every parameter over all ranks; ZeRO-1 and 2 split a group's parameters, end to end.
Shards are mapped from disk and copied straight to where they stay: no second copy of them in memory, and
the optimizer keeps the tensors that it has. `engine` is DeepSpeed's. Loading is collective.
Measured on DeepSpeed 0.19.8; the tests of restoring on other numbers of ranks fail when it changes.
"""

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_pretrain.core.distributed import compute_partition
from ds_pretrain.core.errors import RunError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # DeepSpeed and what it imports; ours stay errors in tests
    import deepspeed

# Where the optimizers keep this rank's fp32 masters: ZeRO-3; ZeRO-1 and 2; ZeRO-1 with fp32 accumulation.
MASTERS = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Part:
    """Elements [start, start + n) of a flattened parameter."""

    name: str
    group: int  # its parameter group
    start: int
    master: Tensor  # [n] fp32
    weight: Tensor  # [n] what the model computes with
    moments: Mapping[str, Tensor]  # each [n]


def get_masters(optimizer: Any) -> Sequence[Tensor]:
    """This rank's flat fp32 masters, in the optimizer's own order."""
    flat: Sequence[Tensor] = next(getattr(optimizer, name) for name in MASTERS if hasattr(optimizer, name))
    return flat


def list_parts(engine: Any) -> Iterator[Part]:
    """Every part that this rank owns, in the optimizer's own order. `engine` is DeepSpeed's."""
    if hasattr(engine.optimizer, MASTERS[0]):
        yield from _list_parts_of_stage_3(engine)
    else:
        yield from _list_parts_of_stages_1_and_2(engine)


def list_group_members(engine: Any) -> list[tuple[str, list[str]]]:
    """The name of each parameter group and the names of its parameters."""
    optimizer = engine.optimizer
    members: list[list[str]] = [[] for _ in optimizer.param_groups]
    for index, parameters in enumerate(_get_groups(optimizer)):
        group = optimizer.sub_group_to_group_id[index] if hasattr(optimizer, MASTERS[0]) else index
        members[group] += [engine.param_names[parameter] for parameter in parameters]
    names = [str(g.get("name", i)) for i, g in enumerate(optimizer.param_groups)]
    return list(zip(names, members, strict=True))


def load(engine: Any, folder: Path, tag: str) -> None:
    """Load `folder/tag`, which this number of ranks saved, then clear what is left of a window that was open.

    Its files are pickles, which can run code: the manifest's checksums must have held.
    """
    with _map_files(engine):
        path, _ = engine.load_checkpoint(str(folder), tag=tag)
    _clear_window(engine, path, folder / tag)


def load_universal(engine: Any, folder: Path, tag: str, optimizer_steps: int) -> list[str]:
    """DeepSpeed's universal load, and the repair of what it gets wrong; what still differs from its files.

    It gives all groups the options of the first and all states one step, and leaves buffers and frozen
    parameters as they were initialized.
    """
    before, log = copy_options(engine), logging.getLogger("DeepSpeed")
    engine._config.load_universal_checkpoint, level = True, log.level
    log.setLevel(logging.ERROR)  # it warns that there is no tensor parallelism
    try:
        path, _ = engine.load_checkpoint(str(folder), tag=tag)
    finally:
        engine._config.load_universal_checkpoint = False
        log.setLevel(level)
    _clear_window(engine, path, folder / tag)
    state = torch.load(folder / tag / "zero" / "optimizer_state.pt", map_location="cpu", weights_only=False)
    repair_options(engine, before, state["param_groups"])
    repair_steps(engine, optimizer_steps)
    return [
        *_restore_rest(engine, folder / tag / "rest.pt"),
        *find_differences(engine, folder / tag, optimizer_steps),
    ]


def copy_options(engine: Any) -> list[dict[str, Any]]:
    """A copy of each parameter group's options."""
    groups = engine.optimizer.param_groups
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def repair_options(engine: Any, before: Sequence[Options], saved: Sequence[Options]) -> None:
    """Give every group its own saved options: a universal load under ZeRO-3 gives all those of the first.

    Args:
        before: `copy_options` from before the load; what this optimizer does not know is not taken over.
        saved: the options in the checkpoint, matched by the groups' names, or by place where they have none.
    """
    by_name = {str(group.get("name", index)): group for index, group in enumerate(saved)}
    for index, (group, own) in enumerate(zip(engine.optimizer.param_groups, before, strict=True)):
        old = by_name.get(str(own.get("name", index)), saved[index] if index < len(saved) else {})
        for key in group.keys() - own.keys() - {"params"}:
            del group[key]  # of another optimizer: the load copies all that was saved
        group.update(own)
        group.update({key: value for key, value in old.items() if key in own and key != "name"})


def repair_steps(engine: Any, step: int) -> None:
    """Give every state its own count of steps: a universal load lets all share one, which counts for each."""
    inner = engine.optimizer.optimizer
    counts_in_tensors = type(inner).__module__.startswith("torch.")
    for master, state in inner.state.items():
        if not any(torch.is_tensor(value) and value.shape == master.shape for value in state.values()):
            continue
        if not counts_in_tensors:
            state["step"] = step
            continue
        group = engine.optimizer.param_groups[0]
        on_device = group.get("capturable") or group.get("fused")
        device = master.device if on_device else torch.device("cpu")
        state["step"] = torch.tensor(float(step), dtype=torch.float32, device=device)


def find_differences(engine: Any, folder: Path, step: int) -> list[str]:
    """Return where this rank differs bitwise from the universal checkpoint in `folder`; empty if nowhere."""
    found = []
    for part in list_parts(engine):
        for key, mine in {"fp32": part.master, **part.moments}.items():
            path = folder / "zero" / part.name / f"{key}.pt"
            if not path.is_file():
                found.append(f"{part.name}: the checkpoint has no {key}")
                continue
            whole = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            whole = (whole["param"] if isinstance(whole, dict) else whole).reshape(-1)
            theirs = whole[part.start : part.start + mine.numel()]
            if not is_bitwise_equal(mine.detach().cpu(), theirs):
                found.append(f"{part.name}: {key} was loaded with other values than were saved")
        if not is_bitwise_equal(part.weight.cpu(), part.master.detach().cpu().to(part.weight.dtype)):
            found.append(f"{part.name}: the model computes with other values than its master's")
        if not part.moments:
            found.append(f"{part.name}: no moments were loaded")
    counts = {int(s["step"]) for s in engine.optimizer.optimizer.state.values() if "step" in s}
    if counts - {step}:
        found.append(f"the optimizer counts {sorted(counts)} steps, the checkpoint {step}")
    return found


def is_bitwise_equal(a: Tensor, b: Tensor) -> bool:
    """True if two tensors have one type, one number of elements and the same bits; a NaN equals itself."""
    if a.dtype != b.dtype or a.numel() != b.numel():
        return False
    first, second = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(first, second)


def _list_parts_of_stage_3(engine: Any) -> Iterator[Part]:
    optimizer = engine.optimizer
    rank, size = _find_place(optimizer)
    for index, parameters in enumerate(optimizer.fp16_groups):
        flat = optimizer.fp32_partitioned_groups_flat[index]
        moments = _get_moments(optimizer, flat)
        offset = 0
        for parameter in parameters:
            start, length, padded = compute_partition(parameter.ds_numel, rank, size)
            yield Part(
                engine.param_names[parameter],
                optimizer.sub_group_to_group_id[index],
                start,
                flat.narrow(0, offset, length),
                parameter.ds_tensor.detach().reshape(-1).narrow(0, 0, length),
                {key: moment.narrow(0, offset, length) for key, moment in moments.items()},
            )
            offset += padded


def _list_parts_of_stages_1_and_2(engine: Any) -> Iterator[Part]:
    optimizer = engine.optimizer
    for index, parameters in enumerate(_get_groups(optimizer)):
        flat = get_masters(optimizer)[index]
        moments = _get_moments(optimizer, flat)
        for parameter in parameters:
            mapping = parameter._hp_mapping
            if mapping is None:  # other ranks own all of it
                continue
            here, place = mapping.hp_fragment_address, mapping.lp_fragment_address
            yield Part(
                engine.param_names[parameter],
                index,
                place.start,
                flat.narrow(0, here.start, here.numel),
                parameter.detach().reshape(-1).narrow(0, place.start, place.numel),
                {key: moment.narrow(0, here.start, here.numel) for key, moment in moments.items()},
            )


def _get_groups(optimizer: Any) -> Sequence[Sequence[Any]]:
    names = ("fp16_groups", "bit16_groups", "bf16_groups")
    groups: Sequence[Sequence[Any]] = next(getattr(optimizer, n) for n in names if hasattr(optimizer, n))
    return groups


def _get_moments(optimizer: Any, flat: Tensor) -> dict[str, Tensor]:
    state = optimizer.optimizer.state.get(flat, {})
    return {
        key: v for key, v in state.items() if torch.is_tensor(v) and v.shape == flat.shape and v.dim() > 0
    }


def _find_place(optimizer: Any) -> tuple[int, int]:
    group = optimizer.dp_process_group
    return dist.get_rank(group), dist.get_world_size(group)


@contextmanager
def _map_files(engine: Any) -> Iterator[None]:
    """Inside it, DeepSpeed maps files instead of reading them; no mapping outlives it."""
    reader, inner = engine.checkpoint_engine, engine.optimizer.optimizer
    take_over = inner.load_state_dict

    def load_own(state_dict: Any) -> None:
        before = {master: dict(state) for master, state in inner.state.items()}
        take_over(state_dict)  # torch keeps the very tensors that it is given, if their device is right
        for master, state in inner.state.items():
            state.update(_copy_into(before.get(master, {}), state))

    vars(reader)["load"] = lambda path, map_location=None: torch.load(
        path, map_location="cpu", mmap=True, weights_only=False
    )
    vars(inner)["load_state_dict"] = load_own
    try:
        yield
    finally:
        del vars(reader)["load"], vars(inner)["load_state_dict"]


def _copy_into(before: dict[str, Any], loaded: dict[str, Any]) -> dict[str, Any]:
    """The tensors of `loaded` that lie in host memory, copied: into those of `before` where these fit."""
    copies = {}
    for key, value in loaded.items():
        if not torch.is_tensor(value) or value.device.type != "cpu":
            continue
        mine = before.get(key)
        if torch.is_tensor(mine) and value.dim() and _describe_form(mine) == _describe_form(value):
            copies[key] = mine.copy_(value)
        else:  # also a count of steps: states that shared one would continue sharing it
            copies[key] = value.clone()
    return copies


def _describe_form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def _restore_rest(engine: Any, path: Path) -> list[str]:
    """Buffers and frozen parameters; what the file lacks of them."""
    rest = torch.load(path, map_location="cpu", weights_only=True) if path.is_file() else {}
    buffers, frozen = rest.get("buffers", {}), rest.get("frozen", {})
    persistent = set(engine._get_buffer_names())
    own = {name: buffer for name, buffer in engine.module.named_buffers() if name in persistent}
    fixed = {name: p for name, p in engine.module.named_parameters() if not p.requires_grad}
    for name in own.keys() & buffers.keys():
        own[name].copy_(buffers[name])
    with torch.no_grad(), deepspeed.zero.GatheredParameters(list(fixed.values()), modifier_rank=0):
        for name in fixed.keys() & frozen.keys():
            if fixed[name].numel() == frozen[name].numel():  # whole on rank 0, and everywhere below ZeRO-3
                fixed[name].copy_(frozen[name])
    missing = sorted((own.keys() - buffers.keys()) | (fixed.keys() - frozen.keys()))
    return [f"{name}: the checkpoint does not hold it" for name in missing]


def _clear_window(engine: Any, path: str | None, folder: Path) -> None:
    if path is None:
        raise RunError(f"DeepSpeed found no checkpoint in {folder}, though its manifest verified")
    optimizer = engine.optimizer
    optimizer.zero_grad()
    optimizer.averaged_gradients = {}
    if hasattr(optimizer, "all_grad_tensors"):  # ZeRO-1 and 2: zero_grad leaves what has been accumulated
        optimizer.all_grad_tensors = {}
        optimizer.micro_step_id = -1
    engine.micro_steps = engine.global_steps
