"""Versions known to spoil gradients, what the JSON comes to, and the advice on norms that are no numbers."""

import importlib.metadata
import json
import re
from pathlib import Path
from typing import Any

import pytest

from ds_pretrain.commands.cli import main
from ds_pretrain.config.known_bad import TABLE, bad_versions, in_effect, installed_versions, non_finite_advice
from ds_pretrain.core.distributed import World
from ds_pretrain.training import preflight
from tests.ranks import run_ranks
from tests.scenario import deepspeed_json, make_run

FOLDER = Path(__file__).parents[2] / "ds_configs"
GOOD = {"deepspeed": "0.19.8", "torch": "2.13.0+cpu"}
ON, OFF = {"overlap_comm": True}, {"overlap_comm": False}


def config(stage: int, bf16: bool = True, **zero: Any) -> dict[str, Any]:
    return {
        **deepspeed_json(stage, bf16),
        "data_types": {},
        "zero_optimization": {"stage": stage, **zero},
    }


def found(config: dict[str, Any], deepspeed: str, torch: str = "2.13.0") -> list[tuple[bool, str]]:
    """What is said, and whether it is certain."""
    versions = {"deepspeed": deepspeed, "torch": torch}
    return [
        (sure, text) for sure in (True, False) for text in bad_versions(config, versions, "J", certain=sure)
    ]


@pytest.mark.parametrize(
    ("config", "deepspeed", "torch", "certain"),
    [
        (config(3), "0.18.7", "2.10.0+cu128", [True]),
        (config(3), "0.18.7", "2.9.1", []),
        (config(3), "0.18.8", "2.10.0", []),
        (config(3, bf16=False), "0.18.7", "2.10.0", []),
        (config(2), "0.18.7", "2.10.0", []),  # overlap is off if nothing is said
        (config(2, **ON), "0.18.9", "2.1.0", [True, False]),
        (config(2, **OFF), "0.18.9", "2.1.0", []),
        (config(1, **ON), "0.16.4", "2.1.0", [True, False]),
        (config(2, **ON), "0.19.0", "2.1.0", [False]),
        (config(2, **ON, contiguous_gradients=False), "0.19.0", "2.1.0", []),
        (config(2, **ON), "0.19.3", "2.1.0", []),
        (config(2, **ON), "0.19.10", "2.1.0", []),
        (config(2, **ON), "0.19.2+abc", "2.1.0", [False]),
        (config(3), "no version", "2.10.0", [True]),
        (config(3), "0.18.7", "no version", []),
    ],
)
def test_p28_known_bad_versions_are_found_by_what_is_in_effect(
    config: dict[str, Any], deepspeed: str, torch: str, certain: list[bool]
) -> None:
    assert [sure for sure, _ in found(config, deepspeed, torch)] == certain


def test_p28_what_is_known_names_versions_settings_effect_remedy_and_source() -> None:
    [(_, first), _] = found(config(2, **ON), "0.18.9")
    assert first == (
        "J: deepspeed 0.18.9, torch 2.13.0 with ZeRO-2 and overlap_comm is known to be bad: gradient buffers "
        "are used again while they are still sent: NaN, a constant norm or loss 0; use deepspeed 0.19.0 or "
        "newer, or set `zero_optimization.overlap_comm` to false "
        "(https://github.com/deepspeedai/DeepSpeed/pull/7965, "
        "https://github.com/deepspeedai/DeepSpeed/issues/7188, "
        "https://github.com/deepspeedai/DeepSpeed/issues/5347)"
    )
    [(_, third)] = found(config(3), "0.18.7")
    assert "use deepspeed 0.18.8 or newer (https" in third  # no switch helps


def test_p28_every_entry_is_cited() -> None:
    for entry in TABLE:
        assert entry.urls
        assert all(re.fullmatch(r"https://github\.com/[\w/-]+/(issues|pull)/\d+", url) for url in entry.urls)


def test_nothing_is_known_of_versions_where_the_library_is_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    assert set(installed_versions()) == {"deepspeed", "torch"}
    monkeypatch.setattr("ds_pretrain.config.known_bad.version", missing)
    assert installed_versions() == {}
    assert list(bad_versions(config(3), {}, "J", certain=True)) == []


SHIPPED = {path.stem: path for path in sorted(FOLDER.glob("*.json"))}


@pytest.mark.parametrize("name", SHIPPED)
def test_p28_the_files_of_this_repository_are_not_known_to_be_bad_with_what_is_installed(name: str) -> None:
    assert _said_of(name, installed_versions()) == []


@pytest.mark.parametrize("name", SHIPPED)
def test_p28_of_the_files_of_this_repository_is_said_what_is_known_of_an_old_version(name: str) -> None:
    """So the test above would notice: what is known applies to these files, and is found in them."""
    said = _said_of(name, {"deepspeed": "0.16.0", "torch": "2.10.0"})
    assert [text.split(" with ")[1].split(" is known")[0] for text in said] == KNOWN_OF_OLD[name]


KNOWN_OF_OLD = {
    "cpu": [],
    "zero1_bf16": [],
    "zero2_bf16": ["ZeRO-2 and overlap_comm", "ZeRO-2 and overlap_comm, contiguous_gradients"],
    "zero3_bf16": ["ZeRO-3 and bf16"],
    "zero3_bf16_no_overlap": ["ZeRO-3 and bf16"],
    "zero3_bf16_offload": ["ZeRO-3 and bf16"],
    "zero3_multinode": ["ZeRO-3 and bf16"],
}


def _said_of(name: str, versions: dict[str, str]) -> list[str]:
    text = json.loads(SHIPPED[name].read_text())
    return [said for sure in (True, False) for said in bad_versions(text, versions, "J", certain=sure)]


def _effective(world: World, config: dict[str, Any]) -> dict[str, Any]:
    """What DeepSpeed's optimizer holds."""
    import deepspeed
    import torch

    model = torch.nn.Linear(8, 4)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config={**config, "train_micro_batch_size_per_gpu": 1},
    )
    optimizer = engine.optimizer
    overlap = getattr(optimizer, "overlap_comm", None)
    if int(engine.zero_optimization_stage()) == 3:
        overlap = engine.zero_overlap_comm()
    return {
        "overlap_comm": overlap,
        "contiguous_gradients": getattr(optimizer, "contiguous_gradients", None),
    }


@pytest.mark.parametrize(
    "config",
    [
        config(1),
        config(2),
        config(3),
        config(2, **ON),
        config(3, **OFF, contiguous_gradients=False),
        config(2, contiguous_gradients=False),
        {**config(1), "data_types": {"grad_accum_dtype": "fp32"}},
        {**config(1, bf16=False), "data_types": {"grad_accum_dtype": "fp32"}},
    ],
)
def test_p28_what_is_said_to_be_in_effect_is_what_deepspeed_does(config: dict[str, Any]) -> None:
    config["zero_optimization"]["reduce_bucket_size"] = 1_000_000
    assert run_ranks(_effective, 1, config) == [in_effect(config)]


def test_p28_the_advice_names_what_is_in_effect_and_the_versions_and_the_switch() -> None:
    assert non_finite_advice(config(3), GOOD, "J") == (
        "the losses are numbers and the gradient norms are not, which communication that overlaps with the "
        "backward pass has caused before (https://github.com/deepspeedai/DeepSpeed/issues/7188); in effect "
        "here: ZeRO-3, overlap_comm = true, contiguous_gradients = true; deepspeed 0.19.8, torch 2.13.0+cpu; "
        "to rule it out set `zero_optimization.overlap_comm` to false in J, as "
        "ds_configs/zero3_bf16_no_overlap.json has it; any start of a run may change that"
    )
    assert (FOLDER.parent / "ds_configs/zero3_bf16_no_overlap.json").exists()


def test_p28_the_advice_says_when_overlap_is_not_what_it_is() -> None:
    without = non_finite_advice(config(3, **OFF), {"deepspeed": "0.19.8"}, "J")
    assert (
        "overlap_comm = false, contiguous_gradients = true; deepspeed 0.19.8, torch (not installed)"
        in without
    )
    assert without.endswith("overlap is off already, so look at the data and the hardware of the ranks")
    unread = non_finite_advice({**config(1), "data_types": {"grad_accum_dtype": "fp32"}}, GOOD, "J")
    assert "ZeRO-1, overlap_comm = not read, contiguous_gradients = not read" in unread


def test_p28_the_advice_ends_with_what_is_known_of_the_versions() -> None:
    told = non_finite_advice(config(2, **ON), {"deepspeed": "0.18.9", "torch": "2.10.0"}, "J")
    assert told.count("is known to be bad") == 2


@pytest.mark.parametrize(("installed", "code"), [("0.18.9", 2), ("0.19.2", 0), ("0.19.8", 0)])
def test_p28_check_refuses_what_spoils_gradients_and_warns_of_what_may(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    installed: str,
    code: int,
) -> None:
    zero = {"stage": 2, "overlap_comm": True}
    run_file = make_run(tmp_path, deepspeed={**deepspeed_json(2, bf16=True), "zero_optimization": zero})
    monkeypatch.setattr(preflight, "installed_versions", lambda: {"deepspeed": installed, "torch": "2.13.0"})
    assert main(["check", str(run_file)]) == code
    told = capsys.readouterr()
    assert ("while they are still sent" in told.err) == (code == 2)
    warned = (
        f"warning    {tmp_path}/deepspeed.json: deepspeed 0.19.2, torch 2.13.0 with ZeRO-2 and overlap_comm"
    )
    assert (warned in told.out) == (installed == "0.19.2")
