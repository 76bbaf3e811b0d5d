"""Rotary frequencies in exact fp32, whatever dtype the engine cast the model to.

A bf16 frequency is off by up to 1 part in 512: at position 4,096 that is an angle off by several radians.
`zero.Init` rounds them, since inside it tensors are made in its own dtype; so does whatever casts the module
with its buffers, as `module.bfloat16()` does.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

SUFFIX = "inv_freq"


def restore_rotary(module: nn.Module, device: str | None = None) -> int:
    """Compute every rotary frequency of `module` anew, in fp32; the number of tables restored.

    They stay on their device unless one is named.

    Call it after the engine was opened. The tables follow each rotary module's own config, so it also applies
    a changed `rope_parameters`.
    """
    num_restored = 0
    for rotary in rotary_modules(module):
        fresh = _built_anew(rotary)
        for name, table in fresh.named_buffers(recurse=False):
            if name.endswith(SUFFIX):
                setattr(
                    rotary, name, table.to(device=device or getattr(rotary, name).device, dtype=torch.float32)
                )
                num_restored += 1
        for name, value in vars(fresh).items():
            if name.endswith("attention_scaling"):  # one, or one a kind of layer
                setattr(rotary, name, value)
    return num_restored


def rotary_modules(module: nn.Module) -> Iterator[nn.Module]:
    """The modules that hold rotary frequencies."""
    for candidate in module.modules():
        if any(name.endswith(SUFFIX) for name, _ in candidate.named_buffers(recurse=False)):
            yield candidate


def _built_anew(rotary: nn.Module) -> nn.Module:
    kind = type(rotary)
    arguments: dict[str, Any] = {"config": rotary.config}
    if "layer_type" in inspect.signature(kind.__init__).parameters:
        arguments["layer_type"] = getattr(rotary, "layer_type", None)
    with torch.device("cpu"), default_dtype(torch.float32):
        fresh: nn.Module = kind(**arguments)
    return fresh


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Inside it, newly made floating tensors have `dtype` unless they say otherwise."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
