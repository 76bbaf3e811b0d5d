"""Tiny model configs, and the two contexts that the engine passes to the model builder."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ds_pretrain.core.distributed import World
from ds_pretrain.models.build import BuiltModel, build_model
from ds_pretrain.models.rope import SUFFIX

ROTARY = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
LLAMA: dict[str, Any] = {"model_type": "llama"} | ROTARY
MISTRAL: dict[str, Any] = {"model_type": "mistral", "sliding_window": 8} | ROTARY
QWEN2: dict[str, Any] = {"model_type": "qwen2"} | ROTARY
QWEN3: dict[str, Any] = {"model_type": "qwen3", "head_dim": 16} | ROTARY
GPT2: dict[str, Any] = {
    "model_type": "gpt2", "vocab_size": 512, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64,
}  # fmt: skip
MIXTRAL: dict[str, Any] = {"model_type": "mixtral", "num_local_experts": 4} | ROTARY
QWEN3_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "head_dim": 16,
} | ROTARY  # fmt: skip
GEMMA: dict[str, Any] = {"model_type": "gemma", "head_dim": 16} | ROTARY
GEMMA3: dict[str, Any] = {"model_type": "gemma3_text", "head_dim": 16} | ROTARY
OLMO2: dict[str, Any] = {"model_type": "olmo2", "pad_token_id": 1, "eos_token_id": 1} | ROTARY
MAMBA: dict[str, Any] = {
    "model_type": "mamba", "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8,
    "initializer_range": 0.02,
}  # fmt: skip


def built(
    config: dict[str, Any],
    *,
    qk_norm: bool = False,
    recompute: bool = False,
    seed: int = 7,
    dtype: torch.dtype = torch.float32,
    world: World = World(),  # noqa: B008
    partition: Callable[[], AbstractContextManager[Any]] = nullcontext,
    gather: Callable[..., AbstractContextManager[Any]] = lambda parameters: nullcontext(),
) -> BuiltModel:
    """A model of `config`; in memory unless the contexts partition it."""
    return build_model(
        json.dumps(config), qk_norm=qk_norm, recompute=recompute, seed=seed, dtype=dtype,
        world=world, partition=partition, gather=gather,
    )  # fmt: skip


def deepspeed_json(dtype: torch.dtype) -> dict[str, Any]:
    """A minimal ZeRO-3 configuration for CPU ranks; everything is partitioned, however small."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_allow_untested_optimizer": True,
    }


def built_under_zero3(world: World, config: dict[str, Any], dtype: torch.dtype, **options: Any) -> BuiltModel:
    """The same, its parameters partitioned from birth. Collective."""
    import deepspeed

    def partition() -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = deepspeed.zero.Init(config_dict_or_path=deepspeed_json(dtype))
        return context

    def gather(parameters: Any) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(parameters, modifier_rank=0)
        return context

    options = {"partition": partition, "gather": gather} | options
    return built(config, dtype=dtype, world=world, **options)


def rotary_tables(module: nn.Module) -> dict[str, Tensor]:
    """The rotary frequencies of `module` by name."""
    return {name: table for name, table in module.named_buffers() if name.endswith(SUFFIX)}
