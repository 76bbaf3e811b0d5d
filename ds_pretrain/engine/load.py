"""Loads a checkpoint into DeepSpeed's engine, and clears or repairs what its own load leaves wrong.

Shards are mapped from disk and copied straight to where they stay: no second copy of them in memory, and
the optimizer keeps the tensors that it has. `engine` is DeepSpeed's. Everything here is collective.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_pretrain.core.errors import RunError
from ds_pretrain.engine import partitions

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # DeepSpeed and what it imports; ours stay errors in tests
    import deepspeed


def load(engine: Any, folder: Path, tag: str) -> None:
    """Load `folder/tag`, which this number of ranks saved, then clear what is left of a window that was open.

    Its files are pickles, which can run code: the manifest's checksums must have held.
    """
    with _mapped(engine):
        path, _ = engine.load_checkpoint(str(folder), tag=tag)
    _clear_window(engine, path, folder / tag)


def load_universal(engine: Any, folder: Path, tag: str, optimizer_steps: int) -> list[str]:
    """DeepSpeed's universal load, and the repair of what it gets wrong; what still differs from its files.

    It gives all groups the options of the first and all states one step, and leaves buffers and frozen
    parameters as they were initialized.
    """
    before, log = partitions.live_options(engine), logging.getLogger("DeepSpeed")
    engine._config.load_universal_checkpoint, level = True, log.level
    log.setLevel(logging.ERROR)  # it warns that there is no tensor parallelism
    try:
        path, _ = engine.load_checkpoint(str(folder), tag=tag)
    finally:
        engine._config.load_universal_checkpoint = False
        log.setLevel(level)
    _clear_window(engine, path, folder / tag)
    state = torch.load(folder / tag / "zero" / "optimizer_state.pt", map_location="cpu", weights_only=False)
    partitions.repair_options(engine, before, state["param_groups"])
    partitions.repair_steps(engine, optimizer_steps)
    return [
        *_restore_rest(engine, folder / tag / "rest.pt"),
        *partitions.differences(engine, folder / tag, optimizer_steps),
    ]


@contextmanager
def _mapped(engine: Any) -> Iterator[None]:
    """While it lasts, DeepSpeed maps files where it would read them, and no mapping outlives it."""
    reader, inner = engine.checkpoint_engine, engine.optimizer.optimizer
    take_over = inner.load_state_dict

    def load_own(state_dict: Any) -> None:
        before = {master: dict(state) for master, state in inner.state.items()}
        take_over(state_dict)  # torch keeps the very tensors that it is given, if their device is right
        for master, state in inner.state.items():
            state.update(_own(before.get(master, {}), state))

    vars(reader)["load"] = lambda path, map_location=None: torch.load(
        path, map_location="cpu", mmap=True, weights_only=False
    )
    vars(inner)["load_state_dict"] = load_own
    try:
        yield
    finally:
        del vars(reader)["load"], vars(inner)["load_state_dict"]


def _own(before: dict[str, Any], loaded: dict[str, Any]) -> dict[str, Any]:
    """The tensors of `loaded` that lie in host memory, copied: into those of `before` where these fit."""
    copies = {}
    for key, value in loaded.items():
        if not torch.is_tensor(value) or value.device.type != "cpu":
            continue
        mine = before.get(key)
        if torch.is_tensor(mine) and value.dim() and _form(mine) == _form(value):
            copies[key] = mine.copy_(value)
        else:  # also a count of steps: states that shared one would go on sharing it
            copies[key] = value.clone()
    return copies


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def _restore_rest(engine: Any, path: Path) -> list[str]:
    """Buffers and frozen parameters; what the file lacks of them."""
    rest = torch.load(path, map_location="cpu", weights_only=True) if path.is_file() else {}
    buffers, frozen = rest.get("buffers", {}), rest.get("frozen", {})
    persistent = set(engine._get_buffer_names())
    own = {name: buffer for name, buffer in engine.module.named_buffers() if name in persistent}
    fixed = {name: p for name, p in engine.module.named_parameters() if not p.requires_grad}
    for name in own.keys() & buffers.keys():
        own[name].copy_(buffers[name])
    with torch.no_grad(), deepspeed.zero.GatheredParameters(list(fixed.values()), modifier_rank=0):
        for name in fixed.keys() & frozen.keys():
            if fixed[name].numel() == frozen[name].numel():  # whole on rank 0, and everywhere below ZeRO-3
                fixed[name].copy_(frozen[name])
    missing = sorted((own.keys() - buffers.keys()) | (fixed.keys() - frozen.keys()))
    return [f"{name}: the checkpoint does not hold it" for name in missing]


def _clear_window(engine: Any, path: str | None, folder: Path) -> None:
    if path is None:
        raise RunError(f"DeepSpeed found no checkpoint in {folder}, though its manifest verified")
    optimizer = engine.optimizer
    optimizer.zero_grad()
    optimizer.averaged_gradients = {}
    if hasattr(optimizer, "all_grad_tensors"):  # ZeRO-1 and 2: zero_grad leaves what has been accumulated
        optimizer.all_grad_tensors = {}
        optimizer.micro_step_id = -1
    engine.micro_steps = engine.global_steps
