"""Whether the shards of a checkpoint fit the ranks, the ZeRO stage and the offload of this start."""

from collections.abc import Mapping
from typing import Any

from ds_pretrain.core.errors import InputError, agreed

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


def layout_changes(
    saved: Mapping[str, Any], saved_world: int, config: Mapping[str, Any], world_size: int
) -> list[str]:
    """Why shards of one DeepSpeed JSON and world do not fit another ("ranks 2 -> 3"); empty if they do.

    Raises:
        InputError: a change that no conversion bridges.
    """
    changes = [f"ranks {saved_world} -> {world_size}"] if saved_world != world_size else []
    for path, default in _LAYOUT.items():
        before, after = _setting(saved, path, default), _setting(config, path, default)
        if before != after:
            changes.append(f"{'.'.join(path)} {before} -> {after}")
    if changes:
        _refuse_unbridgeable(saved, config, changes)
    return changes


def _setting(config: Mapping[str, Any], path: tuple[str, ...], default: Any) -> Any:
    value: Any = config
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return default if value is None else value


def _refuse_unbridgeable(saved: Mapping[str, Any], config: Mapping[str, Any], changes: list[str]) -> None:
    problems = []
    before, after = (str(_setting(c, ("optimizer", "type"), None)) for c in (saved, config))
    if before != after and not {before, after} <= {"Adam", "AdamW"}:
        problems.append(
            f"optimizer.type changed from {before} to {after}: what one remembers means nothing to the "
            "other; set it back, or start anew with another `out`"
        )
    for section in ("offload_optimizer", "offload_param"):
        path = ("zero_optimization", section, "device")
        if "nvme" in (_setting(saved, path, "none"), _setting(config, path, "none")):
            problems.append(
                f"zero_optimization.{section}.device = nvme: DeepSpeed cannot convert what it swapped out "
                f"({', '.join(changes)}); start with what the checkpoint was saved with"
            )
    if problems:
        raise agreed(InputError(problems))
