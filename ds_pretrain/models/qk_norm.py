"""QK-norm: an RMSNorm per head on queries and keys, before the rotary embedding.

The variant is *per head*: one weight of the head width, shared by all heads (Dehghani et al.,
https://arxiv.org/abs/2302.05442; RMS form as in Qwen3, https://arxiv.org/abs/2505.09388). A Llama with it is
Qwen3, parameter names included. Families with QK-norm of their own keep theirs, maybe of full width (OLMo 2).

B batch · T sequence · H heads · D head width
"""

from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from ds_pretrain.core.errors import InputError
from ds_pretrain.core.text import format_count_of
from ds_pretrain.models.config_check import QK_NORM_ADDABLE, check_qk_norm

_NATIVE_NAMES = ("q_norm", "q_layernorm", "query_layernorm")


def ensure_qk_norm(model: nn.Module, config_json: dict[str, Any]) -> str:
    """Give `model` QK-norm unless it has its own; says which variant it ends up with.

    Call it inside the context in which the model is constructed: the new weights are then partitioned, too.

    Raises:
        InputError: the family cannot have it.
    """
    family = config_json["model_type"]
    if family not in QK_NORM_ADDABLE and (problem := check_qk_norm(config_json)):
        raise InputError(problem)
    if has_qk_norm(model):
        return f"native to {family}"
    num_layers = _add(model) if family in QK_NORM_ADDABLE else 0
    if num_layers == 0:
        raise InputError(
            f'model.qk_norm = true: this "{family}" config built no layer with queries and keys; '
            "set qk_norm = false"
        )
    return f"per-head RMSNorm before the rotary embedding, added to {format_count_of(num_layers, 'layer')}"


def has_qk_norm(model: nn.Module) -> bool:
    """True if some attention of `model` normalizes its queries."""
    return any(name.rpartition(".")[2] in _NATIVE_NAMES for name, _ in model.named_modules())


def _add(model: Any) -> int:
    num_layers = 0
    for attention in list(model.modules()):
        if not (hasattr(attention, "q_proj") and hasattr(attention, "k_proj")):
            continue
        eps, head_dim = attention.config.rms_norm_eps, attention.head_dim
        for letter in "qk":
            norm = Qwen3RMSNorm(head_dim, eps=eps)
            setattr(attention, f"{letter}_norm", norm)
            projection = getattr(attention, f"{letter}_proj")
            # A partial, not a closure: deepcopy of the model then binds the copy's norm.
            projection.register_forward_hook(partial(_normalize_heads, norm, head_dim))
        num_layers += 1
    return num_layers


def _normalize_heads(norm: nn.Module, head_dim: int, module: nn.Module, inputs: Any, flat: Tensor) -> Tensor:
    heads = flat.view(*flat.shape[:-1], -1, head_dim)  # [B, T, H, D]
    normalized: Tensor = norm(heads)
    return normalized.flatten(-2)  # [B, T, H * D]
