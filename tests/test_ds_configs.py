"""The DeepSpeed JSON files: each key is real, explained and the JSON's to set, and each file trains."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ds_pretrain.core.distributed import World
from tests.ranks import run_ranks

FOLDER = Path(__file__).parent.parent / "ds_configs"
NAMES = [
    *("cpu", "zero1_bf16", "zero2_bf16"),
    *("zero3_bf16", "zero3_bf16_no_overlap", "zero3_bf16_offload", "zero3_multinode"),
]


def read(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return config


def keys(section: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """All keys, a dotted path each; a section stands for what is in it."""
    for key, value in section.items():
        if isinstance(value, dict):
            yield from keys(value, f"{prefix}{key}.")
        else:
            yield prefix + key


def test_the_folder_holds_the_files_that_are_tested_here() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.json")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_key_is_explained(name: str) -> None:
    text = (FOLDER / "README.md").read_text()
    assert [key for key in keys(read(name)) if f"| `{key}` |" not in text] == []


def test_the_readme_explains_no_key_that_no_file_has() -> None:
    lines = (FOLDER / "README.md").read_text().split("## Every key")[1].splitlines()
    explained = {line.split("`")[1] for line in lines if line.startswith("| `")}
    used = {key for name in NAMES for key in keys(read(name))}
    sections = {key.rsplit(".", 1)[0] for key in used if "." in key}
    assert explained - used - sections == set()


@pytest.mark.parametrize("name", NAMES)
def test_what_the_run_file_owns_is_not_in_the_json(name: str) -> None:
    config = read(name)
    owned = {"scheduler", "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}
    assert owned & set(config) == set()
    assert "lr" not in config["optimizer"]["params"]
    assert '"auto"' not in json.dumps(config)


class Recording(dict[str, Any]):
    """A mapping that remembers which of its keys were asked for."""

    asked: ClassVar[set[str]] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)


@pytest.mark.parametrize("name", NAMES)
def test_deepspeed_knows_every_key_that_it_would_not_complain_about(name: str) -> None:
    """Unknown keys of "zero_optimization" and "bf16" are errors; elsewhere they are ignored in silence."""
    from deepspeed.runtime.config import DeepSpeedConfig

    config = read(name)
    silent = set(config) | set(config["data_types"]) | set(config["checkpoint"]) | set(config["optimizer"])
    Recording.asked.clear()
    wrapped = {key: Recording(value) if isinstance(value, dict) else value for key, value in config.items()}
    DeepSpeedConfig(Recording({**wrapped, "train_micro_batch_size_per_gpu": 1}))
    assert silent - Recording.asked == set()
    assert "gradient_cliping" not in Recording.asked


def for_cpu(name: str) -> dict[str, Any]:
    """The file, changed only where a CPU cannot follow: fused Adam needs CUDA, or a compiler and minutes."""
    config = copy.deepcopy(read(name))
    config["optimizer"]["params"]["torch_adam"] = True
    return config


def _train(world: World, config: dict[str, Any]) -> dict[str, Any]:
    """Two steps of a tiny model on fixed data, opened as the trainer opens it."""
    import deepspeed
    import torch

    config["train_micro_batch_size_per_gpu"] = 2
    config["gradient_accumulation_steps"] = 1
    config["optimizer"]["params"]["lr"] = 0.01
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=copy.deepcopy(config)
    )
    dtype = torch.bfloat16 if "bf16" in config else torch.float32
    inputs = torch.linspace(-1, 1, 16).reshape(2, 8).to(engine.device, dtype)  # [B, D]
    losses, norms = [], []
    for _ in range(2):
        for _ in range(2):  # two micro-batches, and the window is ours
            loss = (engine(inputs).float() - 100.0).square().mean()
            engine.backward(loss / 2, scale_wrt_gas=False)
        engine.step()
        losses.append(float(loss.detach()))
        norms.append(float(engine.get_global_grad_norm()))
    model_dtype, accumulation_dtype = engine.get_data_types()
    return {
        "losses": losses,
        "norms": norms,
        "applied": engine.global_steps - engine.skipped_steps,
        "stage": int(engine.zero_optimization_stage()),
        "clipping": engine.gradient_clipping(),
        "dtypes": (str(model_dtype), str(accumulation_dtype), str(engine.communication_data_type)),
        "groups": [
            (group["lr"], tuple(group["betas"]), group["eps"], group["weight_decay"])
            for group in engine.optimizer.param_groups
        ],
        "lr_scheduler": engine.lr_scheduler,
        "optimizer": type(engine.optimizer).__name__,
    }


def test_p28_the_file_without_overlap_is_one_switch_away_and_trains_the_same() -> None:
    usual, without = for_cpu("zero3_bf16"), for_cpu("zero3_bf16_no_overlap")
    both = [run_ranks(_train, 2, config) for config in (usual, without)]
    assert both[0] == both[1]
    assert (
        usual["zero_optimization"].pop("overlap_comm"),
        without["zero_optimization"].pop("overlap_comm"),
    ) == (True, False)
    assert usual == without


@pytest.mark.parametrize("name", NAMES)
def test_each_file_opens_an_engine_and_trains(name: str) -> None:
    config = for_cpu(name)
    first, second = run_ranks(_train, 2, config)
    assert first == second
    assert first["losses"][1] < first["losses"][0]
    assert first["norms"][0] > 100  # before clipping
    assert first["applied"] == 2
    assert first["stage"] == int(config["zero_optimization"]["stage"])
    assert first["clipping"] == 1.0
    low = "torch.bfloat16" if "bf16" in config else "torch.float32"
    travel = {"bf16": "torch.bfloat16", "fp32": "torch.float32"}[config["communication_data_type"]]
    assert first["dtypes"] == (low, "torch.float32", travel)
    assert set(first["groups"]) == {(0.01, (0.9, 0.95), 1e-8, 0.1)}
    assert first["lr_scheduler"] is None


def _open(world: World, config: dict[str, Any]) -> str:
    try:
        return str(_train(world, config)["optimizer"])
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_deepspeed_refuses_an_unknown_zero_key_and_ignores_an_unknown_top_level_one() -> None:
    """The README and the trainer's own check rely on both."""
    config = for_cpu("cpu")
    misspelt = {**config, "gradient_cliping": 1.0}
    (opened,) = run_ranks(_open, 1, misspelt)
    assert opened == "DeepSpeedZeroOptimizer_Stage3"
    config["zero_optimization"]["overlap_com"] = True
    (refused,) = run_ranks(_open, 1, config)
    assert "overlap_com" in refused
    assert "Extra inputs are not permitted" in refused


def test_zero_1_with_fp32_accumulation_runs_on_the_optimizer_that_reads_few_keys() -> None:
    """If this changes, zero1_bf16.json needs the other communication keys."""
    (opened,) = run_ranks(_open, 1, for_cpu("zero1_bf16"))
    assert opened == "BF16_Optimizer"
