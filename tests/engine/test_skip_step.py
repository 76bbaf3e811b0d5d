"""That a DeepSpeed whose norm cannot be limited is found before a run starts, and without importing it."""

import importlib.machinery
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ds_pretrain.config.schema import WatchdogSection
from ds_pretrain.core.errors import RunError
from ds_pretrain.engine import skip_step as veto
from ds_pretrain.engine.skip_step import drop_problems, dropping_above
from tests.scenario import deepspeed_json

NORMS = "from deepspeed.runtime.utils import (combine_grad_norm_groups, get_global_norm_of_tensors)\n"
CASES = {
    "both": (NORMS, "combine_grad_norm_groups and get_global_norm_of_tensors"),
    "neither": ("import os\n# combine_grad_norm_groups\n", "none"),
}


def _install(folder: Path, monkeypatch: pytest.MonkeyPatch, **texts: str) -> None:
    """A DeepSpeed whose modules have these texts."""
    (folder / "runtime/zero").mkdir(parents=True)
    for name, text in texts.items():
        (folder / "runtime" / f"{name.replace('zero_', 'zero/')}.py").write_text(text)
    spec = importlib.machinery.ModuleSpec("deepspeed", None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    monkeypatch.setattr(veto, "find_spec", lambda name: spec)


def _problems(stage: int) -> list[str]:
    return list(drop_problems(WatchdogSection(drop_sigmas=20.0), deepspeed_json(stage), "J", "R"))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("module", ["zero_stage3", "zero_stage_1_and_2", "bf16_optimizer"])
def test_a_deepspeed_that_computes_its_norm_in_another_way_is_refused_where_it_would_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, case: str
) -> None:
    text, found = CASES[case]
    sound = dict.fromkeys(("zero_stage3", "zero_stage_1_and_2", "bf16_optimizer"), "")
    sound = dict.fromkeys(sound, "def combine_grad_norm_groups(norms):\n    pass\n")
    _install(tmp_path, monkeypatch, **{**sound, module: text})
    path = tmp_path / "runtime" / f"{module.replace('zero_', 'zero/')}.py"
    expected = (
        f"R: watchdog.drop_sigmas cannot work with this DeepSpeed: {path} has {found} of "
        "combine_grad_norm_groups, get_global_norm_of_tensors; expected exactly one, by which it computes "
        "the norm that decides on an update; use DeepSpeed 0.19.8, or delete drop_sigmas"
    )
    used = {"zero_stage3": {3}, "zero_stage_1_and_2": {1, 2}, "bf16_optimizer": {1}}[module]
    for stage in (1, 2, 3):
        assert _problems(stage) == ([expected] if stage in used else [])
    assert list(drop_problems(WatchdogSection(), deepspeed_json(3), "J", "R")) == []


def test_where_deepspeed_is_not_installed_or_lies_elsewhere_nothing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install(tmp_path, monkeypatch)
    assert _problems(3) == []
    monkeypatch.setattr(veto, "find_spec", lambda name: None)
    assert _problems(3) == []


def test_the_deepspeed_that_is_installed_is_read_without_importing_it() -> None:
    code = (
        "import sys\n"
        "from ds_pretrain.engine import skip_step\n"
        "read = [skip_step._norm_function(skip_step._names(text), path) for stage in (1, 2, 3)"
        " for path, text in skip_step._installed_modules(stage)]\n"
        "print(len(read), sorted(set(read)), 'deepspeed' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "4 ['combine_grad_norm_groups', 'get_global_norm_of_tensors'] False\n"


def test_an_optimizer_that_cannot_be_limited_is_an_error_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("deepspeed.elsewhere")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    optimizer: Any = type("Optimizer", (), {"__module__": module.__name__})()
    said = r"with this DeepSpeed: deepspeed\.elsewhere has none of"
    with pytest.raises(RunError, match=said), dropping_above(optimizer, 1.0):
        raise AssertionError("not reached")
