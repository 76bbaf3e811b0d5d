"""Parameters of a model, training FLOPs a token, and the peak of known GPUs: what MFU is made of.

Parameters are counted on a model without memory, so torch is imported when it is asked, and not before.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

from ds_pretrain.core.errors import InputError
from ds_pretrain.models.config_check import EXPERTS_KEYS, uses_transformers

# Peak dense bf16 matrix throughput in FLOP/s, as makers state it (without sparsity):
# https://resources.nvidia.com/en-us-tensor-core and https://www.amd.com/en/products/accelerators/instinct.html.
# NVIDIA prints most numbers with 2:4 sparsity; half of that is here.
# The first key that is part of the device's name counts, so a variant stands before its family.
_PEAK_BF16_FLOPS = {
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "GH200": 989e12,
    "H800": 989e12,
    "GB200": 2500e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "A10G": 70e12,
    "L4": 121e12,
    "MI300X": 1307e12,
    "MI250X": 383e12,
}


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of a model, counted four ways; tied ones once."""

    total: int  # all
    non_embedding: int  # without token embedding, position embedding and output head
    matmul: int  # without look-up tables; a tied embedding counts, since it is the output head
    active: float  # of `matmul`, those that a token meets: the experts by the share that is taken


def count_parameters(config_text: str, *, qk_norm: bool = False) -> ParameterCount | None:
    """Parameters of a model config; None where Transformers is not asked, or the model cannot be built."""
    counted = _count(config_text, qk_norm) if uses_transformers() else None
    return counted and counted[0]


def flops_per_token(config_text: str, seq_len: int, *, qk_norm: bool = False) -> float | None:
    """Training FLOPs a token, forward and backward: 6 N + 12 H D T in each layer; None where that is unknown.

    The formula is of PaLM, appendix B (https://arxiv.org/abs/2204.02311), with `ParameterCount.active` for N,
    H heads of width D, and T tokens of a sequence. Recomputation does not count, so MFU compares across
    settings. A sliding window shorter than the sequence takes its place. Layers that are not attention are
    not known.
    """
    counted = _count(config_text, qk_norm) if uses_transformers() else None
    if counted is None:
        return None
    count, config = counted
    heads, num_layers = (getattr(config, key, None) for key in ("num_attention_heads", "num_hidden_layers"))
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if not isinstance(heads, int) or not isinstance(num_layers, int):
        return None
    attended = {"full_attention": seq_len, "sliding_attention": min(seq_len, window or seq_len)}
    kinds = kinds or [("sliding" if window else "full") + "_attention"] * num_layers
    if not attended.keys() >= set(kinds):
        return None
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    per_layer: float = 12.0 * heads * head_dim
    return 6.0 * count.active + per_layer * sum(attended[kind] for kind in kinds)


@lru_cache(maxsize=8)
def _count(config_text: str, qk_norm: bool) -> tuple[ParameterCount, Any] | None:
    """The count, and the config as Transformers reads it."""
    from torch import nn

    from ds_pretrain.models.build import build_on_meta
    from ds_pretrain.models.param_groups import iterate_parameters

    try:
        model = build_on_meta(config_text, qk_norm=qk_norm)
    except InputError:
        return None
    config, head = model.config, model.get_output_embeddings()
    head_weight = getattr(head, "weight", None)
    total = tables = experts = 0
    for name, module, parameter in iterate_parameters(model):
        size = prod(parameter.shape)
        total += size
        if isinstance(module, nn.Embedding) or parameter is head_weight:
            tables += size
        elif ".experts." in name:
            experts += size
    matmul = total - tables + (prod(head_weight.shape) if head_weight is not None else 0)
    there = next((getattr(config, key) for key in EXPERTS_KEYS if getattr(config, key, None)), 1)
    taken = getattr(config, "num_experts_per_tok", None) or there
    active = matmul - experts * (1 - taken / there)
    return ParameterCount(total, total - tables, matmul, active), config


def peak_flops(device_name: str) -> float | None:
    """Peak bf16 FLOP/s of a GPU by the name that torch gives it; None for one that is not in the table."""
    words = f" {device_name.replace('-', ' ').replace('_', ' ')} ".lower()
    for name, flops in _PEAK_BF16_FLOPS.items():
        if f" {name.lower()} " in words:
            return flops
    return None
