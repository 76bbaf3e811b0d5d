"""Drops an update whose gradient norm is too high, inside DeepSpeed's own step.

Each ZeRO optimizer computes the norm over all ranks once a step, by a function of its module, and leaves out
the update when that is no number: gradients are cleared; weights, moments and the count of Adam's steps stay.
A norm above the limit is shown to it as infinity. So there is no second norm and no other way to skip, and as
the norm (of ZeRO-1 with fp32 accumulation: the gradients) was reduced over all ranks, all decide alike.
Read in DeepSpeed 0.19.8: `runtime/zero/stage3.py`, `runtime/zero/stage_1_and_2.py`,
`runtime/bf16_optimizer.py`. Tests show that nothing is left of such a step.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ds_pretrain.core.errors import RunError

_NORM_FUNCTIONS = ("combine_grad_norm_groups", "get_global_norm_of_tensors")  # a module has one of them


@contextmanager
def skip_updates_above(optimizer: Any, limit: float | None) -> Iterator[list[float]]:
    """Inside it, the ZeRO optimizer skips a step whose norm is above the limit. None: never.

    The list then holds that norm; it stays empty if the update is applied, or was no number by itself.

    Raises:
        RunError: not exactly one function of the optimizer's module computes a global norm.
    """
    if limit is None:
        yield []
        return
    module = sys.modules[type(optimizer).__module__]
    found = [name for name in _NORM_FUNCTIONS if hasattr(module, name)]
    if len(found) != 1:
        raise RunError(
            f"watchdog.skip_update_sigmas cannot work with this DeepSpeed: {module.__name__} has "
            f"{' and '.join(found) or 'none'} of {', '.join(_NORM_FUNCTIONS)}; expected exactly one, by "
            "which it computes the norm that decides on an update; use DeepSpeed 0.19.8, "
            "or delete skip_update_sigmas"
        )
    [name] = found
    global_norm = getattr(module, name)
    dropped: list[float] = []

    def limited(*args: Any, **kwargs: Any) -> Any:
        norm = global_norm(*args, **kwargs)
        value = float(norm)
        if not limit < value < float("inf"):
            return norm
        dropped.append(value)
        return norm.new_full((), float("inf"))

    setattr(module, name, limited)
    try:
        yield dropped
    finally:
        setattr(module, name, global_norm)
