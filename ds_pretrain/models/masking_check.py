"""Which families and kernels can keep documents of one row apart. No torch here."""

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from ds_pretrain.core.errors import InputError
from ds_pretrain.models.config_check import NAME, parse_model_config
from ds_pretrain.models.family import Family, read_family

MASK_KERNELS = ("eager", "sdpa")  # take any mask
FLASH_KERNELS = ("flash_attention_2",)  # take lengths of documents
_BYTES = {"bf16": 2, "fp32": 4}
_MUCH_BYTES = 1 << 30
LAYER_KINDS = ("full_attention", "sliding_attention")
# How the code of a family says that it takes a mask for each kind of layer, and takes a mask at all.
_TAKES_MASKS_BY_KIND = "attention_mask, dict)"
OTHER_LAYERS = ("create_recurrent_attention_mask", "create_chunked_causal_mask")
_TAKES_MASK = ("create_causal_mask(", "create_causal_mask if ")


def masking_problems(config_text: str, attention: str | None, name: str = NAME) -> list[str]:
    """Why `model.mask_documents` would not hold for a model config and a kernel; empty if nothing is known.

    What a family's code says is read from its source. `refuse_leaks` of `documents` tries the real model.
    """
    try:
        config = parse_model_config(config_text, name)
    except InputError as error:
        return list(error.problems)
    family = read_family(config["model_type"])
    found = [*_kernel_problems(attention), *(_family_problems(config, family) if family else ())]
    return [f"model.mask_documents = true: {problem}" for problem in found]


def mask_warnings(
    config: Mapping[str, Any], attention: str | None, rows: int, seq_len: int, dtype: str, where: str
) -> list[str]:
    """That the masks of a micro-batch of `rows` sequences take much memory, at T x T entries each.

    `dtype` is that of the activations, "bf16" or "fp32".
    """
    if attention in FLASH_KERNELS:
        return []
    num_masks = _num_masks(config)
    num_bytes = num_masks * rows * seq_len**2 * _BYTES[dtype]
    if num_bytes < _MUCH_BYTES:
        return []
    masks = "masks" if num_masks > 1 else "a mask"
    return [
        f"{where}: model.mask_documents = true holds {masks} of {num_masks} x {rows:,} x {seq_len:,} x "
        f"{seq_len:,} in {dtype}, {num_bytes / 2**30:,.1f} GiB a micro-batch; "
        'model.attention = "flash_attention_2" holds none'
    ]


def _num_masks(config: Mapping[str, Any]) -> int:
    """One, or one for each kind of layer."""
    family = read_family(str(config.get("model_type")))
    if family is None or _TAKES_MASKS_BY_KIND not in family.source:
        return 1
    if kinds := family.value(config, "layer_types"):
        return len(set(kinds))
    return 1 if family.value(config, "sliding_window") is None else len(LAYER_KINDS)


def takes_masks_by_kind(model_type: str) -> bool:
    """True if the family takes a table of masks, one for each kind of layer."""
    family = read_family(model_type)
    return family is not None and _TAKES_MASKS_BY_KIND in family.source


def _kernel_problems(attention: str | None) -> Iterator[str]:
    if attention in FLASH_KERNELS and find_spec("flash_attn") is None:
        yield (
            f'attention = "{attention}" needs the package flash-attn, which is not installed; install it, or '
            'set attention = "sdpa" (which holds a mask of seq_len x seq_len)'
        )
    elif attention is not None and attention not in (*MASK_KERNELS, *FLASH_KERNELS):
        known = ", ".join(f'"{kernel}"' for kernel in (*MASK_KERNELS, *FLASH_KERNELS))
        yield f'attention = "{attention}" has not been shown to keep documents apart; use one of {known}'


def _family_problems(config: Mapping[str, Any], family: Family) -> Iterator[str]:
    """What lies between tokens of a family beside masked attention, or is placed by something else."""
    model_type = config["model_type"]
    remedy = "use a family of plain attention such as llama, qwen3 or gpt2, or set mask_documents = false"
    kinds = family.value(config, "layer_types") or []
    foreign = sorted({str(kind) for kind in kinds} - set(LAYER_KINDS))
    if foreign or any(code in family.source for code in OTHER_LAYERS):
        what = f"layers of kind {', '.join(foreign)}" if foreign else "layers that are not plain attention"
        yield f'"{model_type}" has {what}, through which documents see one another; {remedy}'
    elif "position_ids" not in family.source or not any(code in family.source for code in _TAKES_MASK):
        yield f'"{model_type}" takes no positions or no mask from outside; {remedy}'
    elif family.value(config, "alibi"):
        yield f'"{model_type}" with "alibi" counts distances from the mask, not from positions; {remedy}'
