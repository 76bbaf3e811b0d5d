"""A decoder-only language model from a Hugging Face config, never whole on one rank while it is made."""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from ds_pretrain.core.distributed import World
from ds_pretrain.core.errors import InputError
from ds_pretrain.models.config_check import NAME, check_model, family_problem, parse_model_config
from ds_pretrain.models.init import Gather, KindReport, initialize
from ds_pretrain.models.loading import base_problems, load_base
from ds_pretrain.models.param_groups import owned_parameters, whole_shape
from ds_pretrain.models.pretrained import Base
from ds_pretrain.models.qk_norm import ensure_qk_norm
from ds_pretrain.models.rope import default_dtype, restore_rotary

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
    base: Base | None = None,
) -> BuiltModel:
    """Build any decoder-only model that Transformers knows, its weights drawn from (seed, name). Collective.

    Args:
        config_text: the content of a Hugging Face config.json.
        recompute: keep only layer inputs for the backward pass and compute the rest again.
        dtype: of the weights; `partition` must make weights of the same dtype.
        partition: the context in which modules are constructed, which may partition their parameters.
        gather: makes given parameters whole inside it and keeps what rank 0 writes.
        attention: sdpa, eager, flash_attention_2, ...; None: the best that the family and torch support.
        base: weights to load instead.

    Raises:
        InputError: the config is not one of a decoder-only model, or misspells a key; all problems at once.
    """
    config_json = parse_model_config(config_text)
    config = model_config(config_text, qk_norm=qk_norm)
    with _uninitialized_memory_is_nan(), partition(), default_dtype(dtype), no_init_weights():
        model = _constructed(config, dtype, attention)
        variant = ensure_qk_norm(model, config_json) if qk_norm else None
    model.tie_weights()
    _train_every_embedding(model)
    restore_rotary(model)
    std = getattr(config, "initializer_range", None) or 0.02
    if base is not None:
        weights = load_base(model, base, world, gather)
    else:
        weights = initialize(
            model, seed=seed, std=std, num_layers=config.num_hidden_layers, world=world, gather=gather
        )
    if recompute:
        set_recompute(model, True)
    num_parameters = sum(prod(whole_shape(parameter)) for _, _, parameter in owned_parameters(model))
    return BuiltModel(model.train(), config, num_parameters, weights, variant)


def model_config(config_text: str, *, qk_norm: bool = False, name: str = NAME) -> Any:
    """The Transformers config of a decoder-only model, every key of it understood. `name` is the file's.

    Raises:
        InputError: all problems at once.
    """
    config_json = parse_model_config(config_text, name)
    family = config_json["model_type"]
    others = frozenset(MODEL_FOR_MASKED_LM_MAPPING_NAMES) | frozenset(
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    )
    if problem := family_problem(family, frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), others, name):
        raise InputError(problem)
    problems = check_model(config_text, qk_norm=qk_norm, name=name)
    if CONFIG_MAPPING[family].sub_configs:
        hint = f'use "{family}_text"' if f"{family}_text" in CONFIG_MAPPING else "use a text-only family"
        problems.append(f'{name}: model_type "{family}" is a composite (multimodal) model; {hint}')
    if problems:
        raise InputError(problems)
    given = _without_foreign_tokens(family, config_json)
    try:
        config = AutoConfig.for_model(family, **given)
    except Exception as error:  # each config class raises what it likes
        raise InputError(f"{name}: refused by {CONFIG_MAPPING[family].__name__}: {error}") from error
    config.use_cache = False
    return config


def rehearse_build(
    config_text: str,
    *,
    qk_norm: bool = False,
    attention: str | None = None,
    name: str = NAME,
    base: Base | None = None,
    recompute: bool = False,
) -> None:
    """Construct the model without memory for its weights, to learn early whether it can be.

    Raises:
        InputError: it cannot; all that is wrong with the config, or what the model's own code says, or
            weights in `base` that do not fit it.
    """
    config_json = parse_model_config(config_text, name)
    config = model_config(config_text, qk_norm=qk_norm, name=name)
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
    if base is not None:
        model.tie_weights()
        if problems := base_problems(model, base):
            raise InputError(problems)


def _without_foreign_tokens(family: str, config_json: dict[str, Any]) -> dict[str, Any]:
    """The config's own keys, and no special token that only the class default names and the vocabulary lacks.

    GPT-2's 50256 in a vocabulary of 512 would make Transformers warn on every rank.
    """
    given = {key: value for key, value in config_json.items() if key != "model_type"}
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        default = getattr(CONFIG_MAPPING[family], key, None)
        if key not in given and isinstance(default, int) and default >= config_json["vocab_size"]:
            given[key] = None
    return given


def _constructed(config: Any, dtype: torch.dtype, attention: str | None) -> Any:
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
        raise InputError(f'model.recompute = true: "{family}" does not support it; set recompute = false')
    model.activation_checkpointing_enable({"use_reentrant": False})


@contextmanager
def _uninitialized_memory_is_nan() -> Iterator[None]:
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
