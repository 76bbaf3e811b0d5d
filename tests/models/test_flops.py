"""Parameters are counted on any model that can be built; FLOPs follow the cited formula."""

import json
from typing import Any

import pytest

from ds_pretrain.models.config_check import hide_transformers
from ds_pretrain.models.flops import count_parameters, flops_per_token
from tests.models import tiny


@pytest.mark.parametrize(
    ("config", "qk_norm"),
    [
        (tiny.LLAMA, True),
        (tiny.LLAMA | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}, False),
        (tiny.MISTRAL, False),
        (tiny.GPT2, False),
        (tiny.GPT2 | {"n_inner": 100, "tie_word_embeddings": False}, False),
        (tiny.QWEN3_MOE, False),
        (tiny.MAMBA, False),
    ],
)
def test_the_count_equals_the_built_model(config: dict[str, Any], qk_norm: bool) -> None:
    built = tiny.built(config, qk_norm=qk_norm)
    count = count_parameters(json.dumps(config), qk_norm=qk_norm)
    assert count is not None
    assert count.total == built.num_parameters == sum(p.numel() for p in built.module.parameters())
    tables = [built.module.get_input_embeddings().weight, built.module.get_output_embeddings().weight]
    tables += [built.module.transformer.wpe.weight] if config["model_type"] == "gpt2" else []
    assert count.non_embedding == count.total - sum(t.numel() for t in {id(t): t for t in tables}.values())
    assert count.matmul == count.non_embedding + tables[1].numel()


def test_flops_follow_palm() -> None:
    llama = json.dumps(tiny.LLAMA)
    count = count_parameters(llama)
    assert count is not None
    assert count.active == count.matmul
    assert flops_per_token(llama, 1024) == 6 * count.matmul + 12 * 2 * 4 * 16 * 1024
    mistral = json.dumps(tiny.MISTRAL)
    assert flops_per_token(mistral, 1024) == flops_per_token(mistral, 8)  # the window is 8
    mixed = json.dumps(
        tiny.GEMMA3 | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    )
    count = count_parameters(mixed)
    assert count is not None
    assert flops_per_token(mixed, 1024) == 6 * count.matmul + 12 * 4 * 16 * (8 + 1024)


def test_a_token_counts_the_experts_that_it_meets() -> None:
    count = count_parameters(json.dumps(tiny.QWEN3_MOE))  # 2 of 4 experts
    assert count is not None
    experts = 2 * 4 * 3 * 64 * 32
    assert count.active == count.matmul - experts / 2


def test_what_is_not_known_is_not_counted() -> None:
    assert flops_per_token(json.dumps(tiny.MAMBA), 1024) is None
    assert count_parameters(json.dumps(tiny.LLAMA | {"hidden_act": "nope"})) is None
    with hide_transformers():
        assert count_parameters(json.dumps(tiny.LLAMA)) is None
        assert flops_per_token(json.dumps(tiny.LLAMA), 1024) is None
