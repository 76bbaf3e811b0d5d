"""Drops an update whose gradient norm is too high, inside DeepSpeed's own step, and says where that is exact.

Each ZeRO optimizer computes the norm over all ranks once a step, by a function of its module, and leaves out
the update when that is no number: gradients are cleared; weights, moments and the count of Adam's steps stay.
A norm above the limit is shown to it as infinity. So there is no second norm and no other way to skip, and as
the norm (of ZeRO-1 with fp32 accumulation: the gradients) was reduced over all ranks, all decide alike.
Read in DeepSpeed 0.19.8: `runtime/zero/stage3.py`, `runtime/zero/stage_1_and_2.py`,
`runtime/bf16_optimizer.py`. Tests show that nothing is left of such a step.
"""

import ast
import sys
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ds_pretrain.config.deepspeed import uses_bf16, zero_stage
from ds_pretrain.config.schema import WatchdogSection
from ds_pretrain.core.errors import RunError

_NORM_FUNCTIONS = ("combine_grad_norm_groups", "get_global_norm_of_tensors")  # a module has one of them
_MODULES = {  # with the ZeRO optimizer of each stage
    1: ("runtime/zero/stage_1_and_2.py", "runtime/bf16_optimizer.py"),
    2: ("runtime/zero/stage_1_and_2.py",),
    3: ("runtime/zero/stage3.py",),
}


@contextmanager
def dropping_above(optimizer: Any, limit: float | None) -> Iterator[list[float]]:
    """While open, a step of this ZeRO optimizer is left out if its norm is above the limit. None: never.

    The list then holds that norm; it stays empty if the update is applied, or was no number by itself.

    Raises:
        RunError: the optimizer's module is not as `drop_problems` expects it.
    """
    if limit is None:
        yield []
        return
    module = sys.modules[type(optimizer).__module__]
    name = _norm_function(vars(module), module.__name__)
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


def drop_problems(
    watchdog: WatchdogSection, config: Mapping[str, Any], name: str, run_name: str
) -> Iterator[str]:
    """Why an update could not be dropped exactly, or not sensibly. `config` is a DeepSpeed JSON."""
    if watchdog.drop_sigmas is None:
        return
    if watchdog.drop_sigmas < watchdog.norm_sigmas:
        yield (
            f"{run_name}: watchdog.drop_sigmas = {watchdog.drop_sigmas:g} is below watchdog.norm_sigmas = "
            f"{watchdog.norm_sigmas:g}, so norms that count as usual would be dropped, and the spread would "
            "shrink with each; raise the one or lower the other"
        )
    zero = config["zero_optimization"]
    devices = [(zero.get(key) or {}).get("device") for key in ("offload_optimizer", "offload_param")]
    unchecked = uses_bf16(config) and config["bf16"].get("check_grad_overflow") is False
    if unchecked and zero_stage(config) < 3:
        yield _needs("`bf16.check_grad_overflow` = true", name, run_name, "else it applies any update")
    if "nvme" in devices:
        yield _needs("no offload to nvme", name, run_name, 'use "cpu" or none')
    if (config.get("torch_autocast") or {}).get("enabled") is True:
        yield _needs("`torch_autocast` off", name, run_name, "use bf16")
    for path, text in _installed_modules(zero_stage(config)):
        try:
            _norm_function(_names(text), path)
        except RunError as error:
            yield f"{run_name}: {error}"


def _norm_function(names: Container[str], module: str) -> str:
    """The function that computes the global norm in a module that has these names."""
    found = [name for name in _NORM_FUNCTIONS if name in names]
    if len(found) != 1:
        raise RunError(
            f"watchdog.drop_sigmas cannot work with this DeepSpeed: {module} has "
            f"{' and '.join(found) or 'none'} of {', '.join(_NORM_FUNCTIONS)}; expected exactly one, by "
            "which it computes the norm that decides on an update; use DeepSpeed 0.19.8, "
            "or delete drop_sigmas"
        )
    return found[0]


def _installed_modules(stage: int) -> Iterator[tuple[str, str]]:
    """Path and text of the modules that may hold the optimizer, where there are any. Nothing is imported."""
    package = find_spec("deepspeed")
    for folder in (package and package.submodule_search_locations) or ():
        for path in (Path(folder) / name for name in _MODULES.get(stage, ())):
            if path.is_file():
                yield str(path), path.read_text(encoding="utf-8")


def _names(text: str) -> set[str]:
    """What a module's text imports or defines at its top."""
    names = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom):
            names |= {one.asname or one.name for one in node.names}
        elif isinstance(node, ast.FunctionDef):
            names.add(node.name)
    return names


def _needs(what: str, name: str, run_name: str, why: str) -> str:
    return f"{run_name}: watchdog.drop_sigmas needs {what} in {name}: {why}; or delete drop_sigmas"
