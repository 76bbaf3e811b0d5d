"""Transformers' table of attention kernels, and how one model gets another kernel than it names."""

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ds_pretrain.core.errors import InputError, agreed

Kernel = Callable[..., Any]


def require_kernel(module: nn.Module) -> str:
    """The name of a model's kernel in the table. The same on every rank.

    Raises:
        InputError: the kernel is none of the table, as eager is.
    """
    config: Any = module.config
    name: str = config._attn_implementation
    if name not in ALL_ATTENTION_FUNCTIONS:
        raise agreed(
            InputError(
                f'`sequence_parallel_size`: "{config.model_type}" attends by "{name}", which ranks cannot '
                "share; use a family that has sdpa or flash_attention_2, or delete the key"
            )
        )
    return name


def replace_kernel(module: nn.Module, change: Callable[[Kernel], Kernel]) -> None:
    """Let a model attend with what `change` makes of its kernel; other models keep theirs.

    Its name stays, for what Transformers decides by it: whether there is a mask, and of which form.
    """
    name, config = require_kernel(module), module.config
    plain: Kernel = ALL_ATTENTION_FUNCTIONS[name]
    changed = change(plain)

    def attend(attention: nn.Module, *inputs: Any, **more: Any) -> Any:
        chosen = changed if getattr(attention, "config", None) is config else plain
        return chosen(attention, *inputs, **more)

    ALL_ATTENTION_FUNCTIONS[name] = attend
