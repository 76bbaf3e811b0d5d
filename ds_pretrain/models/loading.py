"""The weights of a public model, put into a model of ours parameter by parameter: none is whole for long."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ds_pretrain.core.distributed import World, from_main, gather_objects
from ds_pretrain.core.errors import InputError, agreed
from ds_pretrain.core.text import counted, listed
from ds_pretrain.models.init import Gather, KindReport, check_weights, measured
from ds_pretrain.models.param_groups import is_partitioned, owned_parameters, whole_shape
from ds_pretrain.models.pretrained import Base

# Buffers that older files hold and models compute themselves: causal masks and rotary tables.
_COMPUTED = re.compile(r"(^|\.)(attn\.(masked_)?bias|attention\.(masked_)?bias|rotary_emb\.inv_freq)$")
_KINDS = (
    "F32",
    "BF16",
    "F16",
    "F64",
)  # what a weight may be stored as; other numbers need a scale, or are none
_SHOWN = 5  # names in a message


def load_base(model: Any, base: Base, world: World, gather: Gather) -> tuple[KindReport, ...]:
    """Fill `model` with the weights of `base`, in the model's own type, and measure what arrived. Collective.

    Read on rank 0 where parameters are partitioned, else on every rank; one parameter at a time.

    Raises:
        InputError: on every rank, as `base_problems` has them, or with each tensor that cannot be read or
            holds values that are no numbers.
        UninitializedWeightsError: something did not arrive.
    """
    if problems := base_problems(model, base):
        raise InputError(problems)
    asked, names, wrong = {}, _stored_names(model, base), []
    for name, _, parameter in owned_parameters(model):
        with gather([parameter]):  # on every rank, whatever one of them meets in it
            if world.is_main or not is_partitioned(parameter):
                values = _read(base.tensors[names[name][0]].file, names[name][0], parameter.dtype)
                if isinstance(values, str):
                    wrong.append(values)
                    continue
                parameter.data.copy_(values)
                asked[name] = measured(values)
    if everyone := list(dict.fromkeys(p for found in gather_objects(world, wrong) for p in found)):
        raise agreed(InputError(everyone))
    return check_weights(model, from_main(world, asked), gather)


def _read(file: Path, name: str, dtype: torch.dtype) -> Tensor | str:
    """The values of a tensor, or why it cannot be used."""
    try:
        with safe_open(file, "pt") as opened:
            values: Tensor = opened.get_tensor(name).to(dtype)
    except (OSError, SafetensorError) as error:
        return f"model.from: {file}: {name} cannot be read ({error}); look at that disk, or download it again"
    if num_wrong := int((~values.isfinite()).sum()):
        return (
            f"model.from: {file}: {name} has {num_wrong:,} of {values.numel():,} values that are NaN or "
            f"infinite in {str(dtype).removeprefix('torch.')}; download it again, or take another model"
        )
    return values


def base_problems(model: Any, base: Base) -> list[str]:
    """Parameters that `base` lacks, or has in another shape or as no plain numbers, and surplus tensors.

    Also a tied output head that the file has with other values than the embedding's.
    """
    names = _stored_names(model, base)
    shapes = {name: whole_shape(parameter) for name, _, parameter in owned_parameters(model)}
    missing = [f"{name} {list(shapes[name])}" for name, stored in names.items() if not stored]
    other = [
        f"{key} {list(base.tensors[key].shape)}, expected {list(shapes[name])}"
        for name, stored in names.items()
        for key in stored
        if base.tensors[key].shape != shapes[name]
    ]
    coded = [
        f"{key} ({base.tensors[key].kind})"
        for stored in names.values()
        for key in stored
        if base.tensors[key].kind not in _KINDS
    ]
    used = {key for stored in names.values() for key in stored}
    surplus = [key for key in base.tensors if key not in used and not _is_computed(model, key)]
    problems = [
        f"model.from: {base.folder} {what} {len(found)} of the model's tensors: {listed(found, _SHOWN)}"
        for found, what in ((missing, "lacks"), (other, "has in another shape"))
        if found
    ]
    if coded:
        problems.append(
            f"model.from: {base.folder} has {len(coded)} of the model's tensors as numbers that no weights "
            f"are trained as: {listed(coded, _SHOWN)}; expected {', '.join(_KINDS)}: take the model from "
            "before it was quantized"
        )
    if surplus:
        problems.append(
            f"model.from: {base.folder} has {counted(len(surplus), 'tensor')} that the model of its "
            f"config.json has no place for: {listed(surplus, _SHOWN)}"
        )
    if (missing and surplus) or any("experts" in name for name in missing):
        problems[-1] += "; names have to be those of the model's own code in the installed Transformers"
    return problems or list(_untied(names, base))


def _stored_names(model: Any, base: Base) -> dict[str, list[str]]:
    """For each parameter, by its first name: its keys in `base`, of which a tied one may have several."""
    owned = {id(parameter): name for name, _, parameter in owned_parameters(model)}
    names: dict[str, list[str]] = {name: [] for name in owned.values()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        for key in _spellings(model, name):
            if key in base.tensors and key not in names[owned[id(parameter)]]:
                names[owned[id(parameter)]].append(key)
                break
    return names


def _spellings(model: Any, name: str) -> Iterator[str]:
    """A name as the whole model has it, and as a file of its bare body does."""
    yield name
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    if prefix != "." and name.startswith(prefix):
        yield name.removeprefix(prefix)


def _is_computed(model: nn.Module, key: str) -> bool:
    buffers = {spelling for name, _ in model.named_buffers() for spelling in _spellings(model, name)}
    return key in buffers or _COMPUTED.search(key) is not None


def _untied(names: dict[str, list[str]], base: Base) -> Iterator[str]:
    for first, *others in (stored for stored in names.values() if len(stored) > 1):
        for other in others:
            with (
                safe_open(base.tensors[first].file, "pt") as one,
                safe_open(base.tensors[other].file, "pt") as two,
            ):
                # NaN is no other value than NaN here; that it is none at all is told when it is read
                if not one.get_tensor(first).nan_to_num().equal(two.get_tensor(other).nan_to_num()):
                    yield (
                        f"model.from: {base.folder} has {first} and {other} with different values, and its "
                        'config ties them; set "tie_word_embeddings" to false there'
                    )
