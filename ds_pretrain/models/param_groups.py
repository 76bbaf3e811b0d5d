"""Optimizer parameter groups: projections decay; norms, biases and embeddings do not unless asked."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def get_whole_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """The shape of a parameter as a whole, also where ZeRO-3 has emptied it on this rank."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def is_partitioned(parameter: nn.Parameter) -> bool:
    """True if ZeRO-3 holds the parameter in parts, so that it is whole only while gathered."""
    return hasattr(parameter, "ds_shape")


def iterate_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """Every parameter once: its name (the first one, if it is tied), the module that owns it, and it."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield (f"{prefix}.{leaf}" if prefix else leaf), module, parameter


def is_norm(module: nn.Module) -> bool:
    """True for LayerNorm, RMSNorm and the norms that model families define under such names."""
    return "norm" in type(module).__name__.lower() and not any(True for _ in module.children())


def has_no_weight_decay(
    name: str, module: nn.Module, parameter: nn.Parameter, *, decay_embeddings: bool = False
) -> bool:
    """True for parameters that must not shrink: norms, biases, other vectors, and embeddings unless asked."""
    if isinstance(module, nn.Embedding):
        return not decay_embeddings
    return is_norm(module) or name.endswith("bias") or len(get_whole_shape(parameter)) < 2


def build_parameter_groups(model: nn.Module, *, decay_embeddings: bool = False) -> list[dict[str, Any]]:
    """Optimizer groups "decay" and "no_decay" of the trainable parameters; an empty one is left out.

    "decay" leaves its weight decay to the optimizer's own setting. A tied output head counts as embedding.
    """
    decay: list[torch.nn.Parameter] = []
    no_decay: list[torch.nn.Parameter] = []
    for name, module, parameter in iterate_parameters(model):
        if parameter.requires_grad:
            exempt = has_no_weight_decay(name, module, parameter, decay_embeddings=decay_embeddings)
            (no_decay if exempt else decay).append(parameter)
    groups: list[dict[str, Any]] = [
        {"name": "decay", "params": decay},
        {"name": "no_decay", "params": no_decay, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
