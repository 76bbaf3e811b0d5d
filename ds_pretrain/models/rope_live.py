"""Rotary positions of a model that is already built, changed where it lies, perhaps under an open engine."""

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights

from ds_pretrain.core.errors import InputError
from ds_pretrain.models.build import model_config
from ds_pretrain.models.rope import restore_rotary, rotary_modules
from ds_pretrain.models.rope_check import RopeCheck, check_rope
from ds_pretrain.models.rope_config import FOLLOWS_THE_LENGTH, FULL_ATTENTION, rope_state, states_rope

_CONFIG_KEYS = (
    "rope_parameters", "max_position_embeddings", "original_max_position_embeddings",
    "rope_theta", "rotary_emb_base",
)  # fmt: skip


def apply_rope(module: nn.Module, config: Mapping[str, Any]) -> int:
    """Give a living model the rotary positions of `config`; the number of tables set, 0 if nothing changes.

    Call it on every rank, between two steps; it does not communicate. Weights and optimizer are not touched.
    What the model then computes is bit for bit what one built from `config` would with these weights.

    Raises:
        InputError: the model has no rotary tables, or of a kind that follows the length of each forward; or
            more than rotary positions would change; or the tables do not agree with fp64.
    """
    new = _parsed(config)
    live: Any = module.config
    if _rope_fields(new) == _rope_fields(live):
        return 0
    _refuse_unless_possible(module, new)
    before = _on_meta(live)
    changed = deepcopy(live)
    _copy_fields(new, changed)
    after = _on_meta(changed)
    _refuse_other_shapes(before, after, new.model_type)
    for own in _configs(module):
        _copy_fields(new, own)
    _copy_attributes(before, after, module)
    num_tables = restore_rotary(module)
    if problems := check_rope(module).problems:
        raise InputError(list(problems))
    return num_tables


def rehearse_rope(config: Mapping[str, Any], name: str = "model config") -> RopeCheck:
    """Make the rotary tables of a model config without its weights, and hold them against fp64.

    Raises:
        InputError: Transformers makes something else of the config than it says, or cannot read it.
    """
    model = _on_meta(_parsed(config, name))
    _refuse_without_tables(model)
    restore_rotary(model, "cpu")
    check = check_rope(model)
    if check.problems:
        raise InputError([f"{name}: {problem}" for problem in check.problems])
    return check


def _parsed(config: Mapping[str, Any], name: str = "model config") -> Any:
    """The config as Transformers reads it, which must be what it says: what it does not read it ignores."""
    parsed = model_config(json.dumps(dict(config)), name=name)
    table = getattr(parsed, "rope_parameters", None) or {}
    if any(isinstance(item, Mapping) for item in table.values()):
        table = table.get(FULL_ATTENTION) or {}
    if not states_rope(config):
        return parsed
    asked = rope_state(config)
    for key, value in (
        ("rope_type", asked.kind), ("rope_theta", asked.theta), ("factor", asked.factor),
        ("original_max_position_embeddings", asked.original_length),
    ):  # fmt: skip
        if table and value is not None and table.get(key) != value:
            raise InputError(
                f'{name}: "{parsed.model_type}" reads {key} = {table.get(key)} where {value} is meant; write '
                '"rope_parameters" into the model config, as Transformers does for this family'
            )
    return parsed


def _configs(module: nn.Module) -> list[Any]:
    """Each config that a part of the model reads, once."""
    found = (getattr(part, "config", None) for part in module.modules())
    return [*{id(config): config for config in found if config is not None}.values()]


def _rope_fields(config: Any) -> dict[str, Any]:
    return {key: getattr(config, key) for key in _CONFIG_KEYS if hasattr(config, key)}


def _copy_fields(source: Any, target: Any) -> None:
    for key, value in _rope_fields(source).items():
        setattr(target, key, deepcopy(value))


def _refuse_unless_possible(module: nn.Module, new: Any) -> None:
    """No tables, or a kind that cannot change in a run."""
    _refuse_without_tables(module)
    parameters = new.rope_parameters or {}
    tables = [item for item in parameters.values() if isinstance(item, Mapping)] or [parameters]
    for table in tables:
        if table.get("rope_type") in FOLLOWS_THE_LENGTH:
            raise InputError(
                f'rotary kind "{table["rope_type"]}" computes its frequencies anew in each forward, from the '
                'length of its sequences, and cannot change in a run; set kind = "yarn", "llama3" or '
                '"default"'
            )


def _refuse_without_tables(module: Any) -> None:
    if next(rotary_modules(module), None) is None:
        raise InputError(
            f'"{module.config.model_type}" has no rotary tables; remove rope from the phases, or choose a '
            'family that has them, such as "llama" or "qwen3"'
        )


def _refuse_other_shapes(before: nn.Module, after: nn.Module, family: str) -> None:
    """Weights and tables that have a row a position cannot grow under an open engine."""
    for name, tensor in (*before.named_parameters(), *before.named_buffers()):
        other = after.get_parameter(name) if isinstance(tensor, nn.Parameter) else after.get_buffer(name)
        if other.shape != tensor.shape:
            raise InputError(
                f'"{family}" has a table "{name}" of {list(tensor.shape)} that would become '
                f'{list(other.shape)}; a run cannot change it: set "max_position_embeddings" to the longest '
                "phase in the model config"
            )


def _on_meta(config: Any) -> nn.Module:
    """The model without memory, for what its constructors make of a config."""
    try:
        with torch.device("meta"), no_init_weights():
            model: nn.Module = AutoModelForCausalLM.from_config(deepcopy(config))
    except Exception as error:  # each family's code raises what it likes
        raise InputError(
            f'model config: "{config.model_type}" cannot be built with rotary parameters '
            f"{config.rope_parameters}: {type(error).__name__}: {error}"
        ) from error
    return model


def _copy_attributes(before: nn.Module, after: nn.Module, live: nn.Module) -> None:
    """Set what constructors compute from rotary parameters: lengths, kinds, DeepSeek's scale of attention."""
    modules = dict(live.named_modules())
    olds = dict(before.named_modules())
    for name, new in after.named_modules():
        was = dict(_plain_attributes(olds[name]))
        for key, value in _plain_attributes(new):
            if key not in was or was[key] != value:
                setattr(modules[name], key, deepcopy(value))


def _plain_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for key, value in vars(module).items():
        if not key.startswith("_") and isinstance(value, int | float | str | dict | list | tuple | None):
            yield key, value
