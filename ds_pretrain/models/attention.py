"""Attention of a Transformers model: documents of one row kept apart, and the kernel that attends.

Positions that restart do not stop attention (https://github.com/huggingface/transformers/pull/46634):
Transformers looks for packed sequences in them only where it is given no mask, and flash attention only where
the batch is one row. So the mask, or the lengths, are always given.

Shapes: B rows, T tokens of each, N documents of all rows.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ds_pretrain.core.errors import InputError, mark_agreed
from ds_pretrain.models.config_check import FLASH_KERNELS, LAYER_KINDS, MASK_KERNELS

Kernel = Callable[..., Any]

_PROBE_TOKENS = 24
# Of the change that a document sees in itself. Unmasked, new models of many shapes show 0.03 to 0.3; masked,
# 0, and at most the rounding of bf16 where a kernel orders its sums by the batch.
_MOST_LEAK = 1e-2


def build_attention_inputs(
    documents: Tensor, config: Any, dtype: torch.dtype, device: torch.device | None = None
) -> dict[str, Any]:
    """The keyword arguments under which a model of `config` sees each document of `documents` alone.

    Made once for all layers. eager and sdpa get additive masks of [B, 1, T, T] in `dtype`: sdpa keeps one for
    the backward pass of all layers, where of a boolean one it would make and keep another in each.
    flash_attention_2 gets the bounds of the documents of all rows laid end to end, and no mask.

    Args:
        documents: [B, T], which document of its row each token lies in, rising from the left. Best on the
            host: bounds are then found without waiting for the device.
        config: the model's own; its kernel, its window and its kinds of layers are read.
        dtype: of the activations.
        device: of the model; that of `documents` if None.

    Raises:
        InputError: the kernel takes neither a mask nor bounds.
    """
    device = device or documents.device
    begins = _find_document_begins(documents)  # [B, T]
    given: dict[str, Any] = {"position_ids": _count_positions(begins).to(device, non_blocking=True)}
    kernel = config._attn_implementation
    if kernel in FLASH_KERNELS:
        return given | _build_bounds(begins, device)
    if kernel in MASK_KERNELS:
        return given | {
            "attention_mask": _build_masks(documents.to(device, non_blocking=True), config, dtype)
        }
    raise InputError(
        f'model.mask_documents = true: attention "{kernel}" has not been shown to keep documents '
        f"apart; use one of {', '.join((*MASK_KERNELS, *FLASH_KERNELS))}"
    )


def document_positions(documents: Tensor) -> Tensor:
    """[B, T] int64, the place of each token in its document; `documents` [B, T] as above."""
    return _count_positions(_find_document_begins(documents))


def bind_attention_inputs(
    config: Any, dtype: torch.dtype
) -> Callable[[Tensor, torch.device], Mapping[str, Any]]:
    """`build_attention_inputs` of one model, as the engine takes it."""
    return lambda documents, device: build_attention_inputs(documents, config, dtype, device)


def refuse_leaks(
    logits: Callable[[Tensor, Tensor], Tensor], vocab_size: int, device: torch.device, kernel: str
) -> None:
    """Change a document and see that no other one's logits move, on the real model, before any training.

    `logits` maps [B, T] token ids and documents to [B, T, V]; call it without dropout. Collective.

    Raises:
        InputError: they do, with `kernel` named.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(
        vocab_size, (2, _PROBE_TOKENS), generator=generator
    )  # [2, T]: flash lays two end to end
    documents = torch.zeros(2, _PROBE_TOKENS, dtype=torch.int32)  # [2, T]
    documents[0, 7:], documents[0, 15:], documents[1, 12:] = 1, 2, 1
    changed = documents == 1  # [2, T]: in the middle of a row, and at its end
    other = torch.where(changed, (tokens + 1 + vocab_size // 2) % vocab_size, tokens)
    with torch.no_grad():
        before, after = (
            logits(ids.to(device), documents).float().cpu() for ids in (tokens, other)
        )  # [2, T, V]
    moved = (after - before).abs().amax(-1)  # [2, T]
    inside, outside = float(moved[changed].max()), float(moved[~changed].max())
    if not outside <= _MOST_LEAK * inside:
        raise InputError(
            f'model.mask_documents = true: documents see one another under attention "{kernel}": changing '
            f"one moved its own logits by up to {inside:.1e} and those of another by {outside:.1e}; set "
            'attention to "sdpa" or "eager", or mask_documents = false'
        )


def _find_document_begins(documents: Tensor) -> Tensor:
    """[B, T], true where a document of the row begins; a row begins one."""
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return begins


def _count_positions(begins: Tensor) -> Tensor:
    """[B, T] int64, counted from the beginning of each document."""
    index = torch.arange(begins.shape[1], device=begins.device).expand(begins.shape)  # [B, T]
    return index - torch.where(begins, index, 0).cummax(1).values


def _build_bounds(begins: Tensor, device: torch.device) -> dict[str, Any]:
    """Return the document boundaries of the rows laid end to end, [N + 1] int32, and the longest document."""
    first = begins.flatten().nonzero()[:, 0]  # [N]
    bounds = torch.cat([first, first.new_tensor([begins.numel()])])  # [N + 1]
    longest = int(bounds.diff().max())
    on_device = bounds.to(device, torch.int32, non_blocking=True)
    return {
        "cu_seq_lens_q": on_device,
        "cu_seq_lens_k": on_device,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def _build_masks(documents: Tensor, config: Any, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
    """One mask for all layers, or one for each kind of layer where the family has kinds."""
    window = getattr(config, "sliding_window", None)
    if (kinds := getattr(config, "layer_types", None)) is None:
        return _build_mask(documents, window, dtype)
    if foreign := set(kinds) - set(LAYER_KINDS):
        raise InputError(
            f'model.mask_documents = true: "{config.model_type}" has layers of kind '
            f"{', '.join(sorted(foreign))}; only {' and '.join(LAYER_KINDS)} can keep documents apart"
        )
    windows = {"full_attention": None, "sliding_attention": window}
    return {kind: _build_mask(documents, windows[kind], dtype) for kind in dict.fromkeys(kinds)}


def _build_mask(documents: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """[B, 1, T, T]: 0 where a token sees another, the lowest number of `dtype` where not."""
    index = torch.arange(documents.shape[1], device=documents.device)  # [T]
    hidden = index[:, None] < index  # [T, T]: [query, key]
    if window is not None:
        hidden |= index[:, None] - index >= window
    apart = documents[:, :, None] != documents[:, None, :]  # [B, T, T]
    apart |= hidden
    mask = torch.zeros(apart.shape, dtype=dtype, device=documents.device)  # [B, T, T]
    return mask.masked_fill_(apart, torch.finfo(dtype).min)[:, None]


def require_kernel(module: nn.Module) -> str:
    """The name of a model's kernel in the table. The same on every rank.

    Raises:
        InputError: the kernel is none of the table, as eager is.
    """
    config: Any = module.config
    name: str = config._attn_implementation
    if name not in ALL_ATTENTION_FUNCTIONS:
        raise mark_agreed(
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
