"""A decoder-only language model from a Hugging Face config, never whole on one rank while it is made."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights

from ds_pretrain.core.distributed import World
from ds_pretrain.core.errors import InputError
from ds_pretrain.models.config_check import NAME, build_model_config, parse_model_config
from ds_pretrain.models.init import Gather, KindReport, initialize
from ds_pretrain.models.param_groups import get_whole_shape, iterate_parameters
from ds_pretrain.models.pretrained import Pretrained, check_pretrained, load_pretrained
from ds_pretrain.models.qk_norm import ensure_qk_norm
from ds_pretrain.models.rope import apply_rope, restore_rotary, use_default_dtype

Partition = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class BuiltModel:
    """A model with its weights drawn and checked."""

    module: Any  # a transformers PreTrainedModel, in training mode
    config: Any  # its PreTrainedConfig
    num_parameters: int  # of the whole model, tied ones once
    weights: tuple[KindReport, ...]
    qk_norm: str | None  # which variant, in words


def build_model(
    config_text: str,
    *,
    qk_norm: bool,
    recompute: bool,
    seed: int,
    dtype: torch.dtype,
    world: World,
    partition: Partition,
    gather: Gather,
    attention: str | None = None,
    pretrained: Pretrained | None = None,
) -> BuiltModel:
    """Build any decoder-only model that Transformers knows, its weights drawn from (seed, name). Collective.

    Args:
        config_text: the content of a Hugging Face config.json.
        activation_checkpointing: keep only layer inputs for the backward pass and compute the rest again.
        dtype: of the weights; `partition` must make weights of the same dtype.
        partition: the context in which modules are constructed, which may partition their parameters.
        gather: makes given parameters whole inside it and keeps what rank 0 writes.
        attention: sdpa, eager, flash_attention_2, ...; None: the best that the family and torch support.
        base: weights to load instead.

    Raises:
        InputError: the config is not one of a decoder-only model, or misspells a key; all problems at once.
    """
    config_json = parse_model_config(config_text)
    config = build_model_config(config_text, qk_norm=qk_norm)
    with _fill_uninitialized_with_nan(), partition(), use_default_dtype(dtype), no_init_weights():
        model = _construct(config, dtype, attention)
        variant = ensure_qk_norm(model, config_json) if qk_norm else None
    model.tie_weights()
    _train_every_embedding(model)
    restore_rotary(model)
    std = getattr(config, "initializer_range", None) or 0.02
    if pretrained is not None:
        weights = load_pretrained(model, pretrained, world, gather)
    else:
        weights = initialize(
            model, seed=seed, std=std, num_layers=config.num_hidden_layers, world=world, gather=gather
        )
    if recompute:
        set_recompute(model, True)
    num_parameters = sum(prod(get_whole_shape(parameter)) for _, _, parameter in iterate_parameters(model))
    return BuiltModel(model.train(), config, num_parameters, weights, variant)


def build_on_meta(
    config_text: str,
    *,
    qk_norm: bool = False,
    attention: str | None = None,
    name: str = NAME,
    pretrained: Pretrained | None = None,
    recompute: bool = False,
    phases: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> Any:
    """Construct the model without memory for its weights, to learn early whether it can be; the model.

    `phases` are configs whose rotary positions it takes one after the other, by the name that messages have.

    Raises:
        InputError: all that is wrong with the config, or what the model's own code says, or weights in `base`
            that do not fit it, or rotary positions that cannot change so.
    """
    config_json = parse_model_config(config_text, name)
    config = build_model_config(config_text, qk_norm=qk_norm, name=name)
    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"), no_init_weights():
                model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
                if qk_norm:
                    ensure_qk_norm(model, config_json)
                set_recompute(model, recompute)
        except InputError:
            raise
        except Exception as error:  # nothing but the config can be the cause here
            raise InputError(
                f'{name}: "{config.model_type}" cannot be built (attention {attention or "automatic"}): '
                f"{type(error).__name__}: {error}"
            ) from error
        model.tie_weights()
        if pretrained is not None and (problems := check_pretrained(model, pretrained)):
            raise InputError(problems)
        if phases:
            restore_rotary(model, "cpu")
        for phase, phase_config in phases.items():
            try:
                apply_rope(model, phase_config)
            except InputError as error:
                raise InputError([f"{phase}: {problem}" for problem in error.problems]) from error
    return model


def _construct(config: Any, dtype: torch.dtype, attention: str | None) -> Any:
    try:
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    except (ImportError, ValueError, AssertionError) as error:
        chosen = attention or "automatic"
        raise InputError(
            f'model config: "{config.model_type}" cannot be built (attention {chosen}): {error}'
        ) from error


def _train_every_embedding(model: nn.Module) -> None:
    """Let every row of the embeddings learn: a `pad_token_id` would freeze its row, often that of EOS."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None


def set_recompute(model: Any, on: bool) -> None:
    """Keep only layer inputs for the backward pass, or everything. Also of a model that is training.

    Raises:
        InputError: the family cannot.
    """
    if on == model.is_activation_checkpointing:
        return
    if not on:
        model.activation_checkpointing_disable()
        return
    if not model.supports_gradient_checkpointing:
        family = model.config.model_type
        raise InputError(
            f'model.activation_checkpointing = true: "{family}" does not support it; set it to false'
        )
    model.activation_checkpointing_enable({"use_reentrant": False})


@contextmanager
def _fill_uninitialized_with_nan() -> Iterator[None]:
    """Fill what constructors leave uninitialized with NaN: a weight that nothing initializes then shows."""
    before, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    library_log = logging.getLogger("transformers.modeling_utils")
    level = library_log.level
    torch.use_deterministic_algorithms(True, warn_only=True)
    library_log.setLevel(logging.ERROR)  # it says once more, on every rank, which dtype it was given
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        library_log.setLevel(level)
