"""Rotary tables in exact fp32, and changed where they lie in a model, perhaps under an open engine.

A bf16 frequency is off by up to 1 part in 512: at position 4,096 that is an angle off by several radians.
`zero.Init` rounds them, since inside it tensors are made in its own dtype; so does whatever casts the module
with its buffers, as `module.bfloat16()` does.
"""

import inspect
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights

from ds_pretrain.core.errors import InputError
from ds_pretrain.models.config_check import FOLLOWS_THE_LENGTH, build_model_config

SUFFIX = "inv_freq"
_CONFIG_KEYS = (
    "rope_parameters", "max_position_embeddings", "original_max_position_embeddings",
    "rope_theta", "rotary_emb_base",
)  # fmt: skip


def restore_rotary(module: nn.Module, device: str | None = None) -> int:
    """Compute every rotary frequency of `module` again, in fp32; the number of tables restored.

    They stay on their device unless one is named.

    Call it after the engine was opened. The tables follow each rotary module's own config, so it also applies
    a changed `rope_parameters`.
    """
    num_restored = 0
    for rotary in find_rotary_modules(module):
        fresh = _rebuild(rotary)
        for name, table in _get_tables(fresh):
            where = device or getattr(rotary, name).device
            setattr(rotary, name, table.to(device=where, dtype=torch.float32))
            num_restored += 1
        for name, value in vars(fresh).items():
            if name.endswith("attention_scaling"):  # one, or one a kind of layer
                setattr(rotary, name, value)
    return num_restored


def check_rotary_tables(module: nn.Module) -> list[str]:
    """Rotary tables of `module` that are not in fp32, or not what its config makes."""
    names = {id(part): name for name, part in module.named_modules()}
    problems = []
    for rotary in find_rotary_modules(module):
        fresh = dict(_get_tables(_rebuild(rotary)))
        for key, table in _get_tables(rotary):
            name = f"{names[id(rotary)]}.{key}"
            if table.dtype != torch.float32:
                problems.append(
                    f"{name} is in {table.dtype}; expected torch.float32: something cast it after it was "
                    "computed"
                )
            elif not torch.equal(table.cpu(), fresh[key].cpu()):
                problems.append(f"{name} is not what its config makes: {rotary.config.rope_parameters}")
    return problems


def find_rotary_modules(module: nn.Module) -> Iterator[Any]:
    """The modules that hold rotary frequencies."""
    return (candidate for candidate in module.modules() if next(_get_tables(candidate), None))


def _get_tables(rotary: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((key, table) for key, table in rotary.named_buffers(recurse=False) if key.endswith(SUFFIX))


def _rebuild(rotary: nn.Module) -> nn.Module:
    kind = type(rotary)
    arguments: dict[str, Any] = {"config": rotary.config}
    if "layer_type" in inspect.signature(kind.__init__).parameters:
        arguments["layer_type"] = getattr(rotary, "layer_type", None)
    with torch.device("cpu"), use_default_dtype(torch.float32):
        fresh: nn.Module = kind(**arguments)
    return fresh


@contextmanager
def use_default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Inside it, newly made floating tensors have `dtype` unless they say otherwise."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def apply_rope(module: nn.Module, config: Mapping[str, Any]) -> int:
    """Give a living model the rotary positions of `config`; the number of tables set, 0 if nothing changes.

    Call it on every rank, between two steps; it does not communicate. Weights and optimizer are not touched.
    What the model then computes is bit for bit what one built from `config` would with these weights.

    Raises:
        InputError: the model has no rotary tables, or of a kind that follows the length of each forward; or
            more than rotary positions would change; or the tables do not follow.
    """
    live: Any = module.config
    new = build_model_config(json.dumps(dict(config)))
    if _get_rope_fields(new) == _get_rope_fields(live):
        return 0
    _refuse_unless_possible(module, new)
    changed, was = deepcopy(live), _get_rotary_state(module)
    changes_rope = live.rope_parameters != new.rope_parameters
    _copy_fields(new, changed)
    before, after = _build_on_meta(live), _build_on_meta(changed)
    _refuse_other_shapes(before, after, new.model_type)
    for own in _find_configs(module):
        _copy_fields(new, own)
    _copy_attributes(before, after, module)
    num_tables = restore_rotary(module)
    if problems := check_rotary_tables(module):
        raise InputError(problems)
    if changes_rope and _get_rotary_state(module) == was:
        raise InputError(
            f'"{new.model_type}" computes the same rotary positions under {new.rope_parameters} as before; '
            "raise theta, or choose another model"
        )
    return num_tables


def _get_rotary_state(module: nn.Module) -> list[Any]:
    """All that rotary modules turn by."""
    return [
        (
            [table.tolist() for _, table in _get_tables(rotary)],
            [value for name, value in vars(rotary).items() if name.endswith("attention_scaling")],
        )
        for rotary in find_rotary_modules(module)
    ]


def _find_configs(module: nn.Module) -> list[Any]:
    """Each config that a part of the model reads, once."""
    found = (getattr(part, "config", None) for part in module.modules())
    return [*{id(config): config for config in found if config is not None}.values()]


def _get_rope_fields(config: Any) -> dict[str, Any]:
    return {key: getattr(config, key) for key in _CONFIG_KEYS if hasattr(config, key)}


def _copy_fields(source: Any, target: Any) -> None:
    for key, value in _get_rope_fields(source).items():
        setattr(target, key, deepcopy(value))


def _refuse_unless_possible(module: Any, new: Any) -> None:
    """No tables, or a kind that cannot change in a run."""
    if next(find_rotary_modules(module), None) is None:
        raise InputError(
            f'"{module.config.model_type}" has no rotary tables; remove rope from the phases, or choose a '
            'family that has them, such as "llama" or "qwen3"'
        )
    parameters = new.rope_parameters or {}
    tables = [item for item in parameters.values() if isinstance(item, Mapping)] or [parameters]
    for table in tables:
        if table.get("rope_type") in FOLLOWS_THE_LENGTH:
            raise InputError(
                f'rotary kind "{table["rope_type"]}" recomputes its frequencies in each forward pass and '
                f'cannot change in a run; set kind = "yarn", "llama3" or "default"'
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


def _build_on_meta(config: Any) -> nn.Module:
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
        was = dict(_list_plain_attributes(olds[name]))
        for key, value in _list_plain_attributes(new):
            if key not in was or was[key] != value:
                setattr(modules[name], key, deepcopy(value))


def _list_plain_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for key, value in vars(module).items():
        if not key.startswith("_") and isinstance(value, int | float | str | dict | list | tuple | None):
            yield key, value
