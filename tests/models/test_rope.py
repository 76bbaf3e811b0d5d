"""Rotary frequencies after a bf16 ZeRO-3 engine was opened: exact in fp32, against fp64."""

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from ds_pretrain.core.distributed import World
from ds_pretrain.models.rope import restore_rotary
from tests.models import tiny
from tests.ranks import run_ranks

SCALED = tiny.LLAMA | {
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    },
    "max_position_embeddings": 512,
}  # fmt: skip


def _reference(theta: float, dim: int) -> torch.Tensor:
    return theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)  # [D / 2]


Tables = dict[str, list[float]]


def _tables(model: nn.Module) -> Tables:
    return {name: table.double().tolist() for name, table in tiny.rotary_tables(model).items()}


def _opened(world: World, stage: int) -> tuple[Tables, Tables, int]:
    """The tables as a bf16 engine leaves them, and restored, after a step; and the number restored."""
    import deepspeed

    options: dict[str, Any] = (
        {} if stage == 3 else {"partition": nullcontext, "gather": lambda _: nullcontext()}
    )
    model = tiny.built_under_zero3(world, tiny.LLAMA, torch.bfloat16, **options).module
    config = tiny.deepspeed_json(torch.bfloat16)
    config["zero_optimization"]["stage"] = stage
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config
    )
    left = _tables(model)
    num_restored = restore_rotary(engine.module)
    engine.backward(engine(torch.randint(0, 512, (1, 32))).logits.float().square().mean())
    engine.step()
    assert all(table.dtype == torch.float32 for table in tiny.rotary_tables(model).values())
    return left, _tables(model), num_restored


def _constructed_partitioned(world: World) -> Tables:
    import deepspeed
    from transformers import LlamaConfig, LlamaForCausalLM

    with deepspeed.zero.Init(config_dict_or_path=tiny.deepspeed_json(torch.bfloat16)):
        return _tables(LlamaForCausalLM(LlamaConfig(**tiny.ROTARY)))


def _error(table: list[float]) -> float:
    return (torch.tensor(table, dtype=torch.float64) / _reference(10_000.0, 16) - 1.0).abs().max().item()


@pytest.mark.parametrize("stage", [1, 3])
def test_frequencies_are_exact_after_a_bf16_engine_was_opened(stage: int) -> None:
    for left, restored, num_restored in run_ranks(_opened, 2, stage):
        assert num_restored == len(restored) == 2
        for name, table in restored.items():
            assert _error(table) < 2e-7
            assert (
                _error(left[name]) < 2e-7
            )  # opening leaves them alone; where it does not, the loop restores


def test_construction_under_zero3_alone_would_round_the_frequencies() -> None:
    (tables,) = run_ranks(_constructed_partitioned, 1)
    assert max(_error(table) for table in tables.values()) > 1e-4


@pytest.mark.parametrize("config", [tiny.GEMMA3, SCALED], ids=["one theta a layer type", "scaled"])
def test_frequencies_of_other_kinds_come_back_to_what_their_family_computes(config: dict[str, Any]) -> None:
    model = tiny.built(config).module
    before = {name: table.clone() for name, table in tiny.rotary_tables(model).items()}
    assert len(before) in (2, 4)
    model.bfloat16()
    assert restore_rotary(model) == len(before)
    for name, table in tiny.rotary_tables(model).items():
        assert torch.equal(table, before[name])


def test_a_changed_theta_takes_effect() -> None:
    model = tiny.built(tiny.LLAMA).module
    model.config.rope_parameters["rope_theta"] = 8e6
    restore_rotary(model)
    table = model.model.rotary_emb.inv_freq
    torch.testing.assert_close(table.double(), _reference(8e6, 16), rtol=2e-7, atol=0)


def test_the_attention_factor_of_each_kind_of_layer_follows_its_config() -> None:
    full, sliding = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}, {"rope_type": "default"}
    layers = {"layer_types": ["sliding_attention", "full_attention"]}
    tables = {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}
    rotary: Any = tiny.built(tiny.GEMMA3 | layers | tables).module.model.rotary_emb
    rotary.config.rope_parameters["full_attention"]["factor"] = 16.0
    restore_rotary(rotary)
    assert rotary.full_attention_attention_scaling == pytest.approx(0.1 * math.log(16.0) + 1.0)
    assert rotary.sliding_attention_attention_scaling == 1.0


def test_a_model_without_rotary_embedding_has_nothing_to_restore() -> None:
    assert restore_rotary(tiny.built(tiny.GPT2).module) == 0


def test_building_in_bf16_keeps_the_frequencies_exact() -> None:
    model = tiny.built(tiny.LLAMA, dtype=torch.bfloat16).module
    assert model.lm_head.weight.dtype == torch.bfloat16
    torch.testing.assert_close(
        model.model.rotary_emb.inv_freq.double(), _reference(10_000.0, 16), rtol=2e-7, atol=0
    )
