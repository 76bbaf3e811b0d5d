"""Counts collectives of torch.distributed by the package that asks for them: ours, DeepSpeed's."""

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

NAMES = [
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce"),
    *("all_to_all", "all_to_all_single", "barrier", "monitored_barrier"),
    *("broadcast", "broadcast_object_list", "gather", "gather_object", "scatter", "scatter_object_list"),
    *("reduce", "reduce_scatter", "reduce_scatter_tensor"),
    *("send", "recv", "isend", "irecv", "batch_isend_irecv"),
]


@contextmanager
def counted() -> Iterator[Counter[tuple[str, str]]]:
    """Inside it, count the calls of each (package, collective) on this rank.

    One that another is made of, inside torch, is not counted beside it.
    """
    counts: Counter[tuple[str, str]] = Counter()

    def counting(name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(collective)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            package = sys._getframe(1).f_globals["__name__"].split(".")[0]
            if package != "torch":
                counts[package, name] += 1
            return collective(*args, **kwargs)

        return wrapper

    with ExitStack() as stack:
        for name in NAMES:
            stack.enter_context(patch.object(dist, name, counting(name, getattr(dist, name))))
        yield counts
