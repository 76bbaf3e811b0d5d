"""Parameters by arithmetic equal those of the built model; FLOPs follow the cited formula."""

from typing import Any

import pytest
from transformers import AutoConfig

from ds_pretrain.models.flops import DEFAULTS, count_parameters, flops_per_token
from tests.models import tiny


@pytest.mark.parametrize(
    ("config", "qk_norm"),
    [
        (tiny.LLAMA, False),
        (tiny.LLAMA, True),
        (tiny.LLAMA | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}, False),
        (tiny.LLAMA | {"head_dim": 24, "num_key_value_heads": None}, True),
        (tiny.MISTRAL, True),
        (tiny.QWEN2, False),
        (tiny.QWEN2, True),
        (tiny.QWEN3, False),
        (tiny.QWEN3, True),
        (tiny.QWEN3 | {"head_dim": 32, "attention_bias": True, "tie_word_embeddings": True}, False),
        (tiny.GPT2, False),
        (tiny.GPT2 | {"n_inner": 100, "tie_word_embeddings": False}, False),
        (
            {"model_type": "gpt2", "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 1, "n_head": 2},
            False,
        ),
    ],
)
def test_the_count_equals_the_built_model(config: dict[str, Any], qk_norm: bool) -> None:
    built = tiny.built(config, qk_norm=qk_norm)
    count = count_parameters(config, qk_norm=qk_norm)
    assert count is not None
    assert count.total == built.num_parameters == sum(p.numel() for p in built.module.parameters())
    tables = [built.module.get_input_embeddings().weight, built.module.get_output_embeddings().weight]
    tables += [built.module.transformer.wpe.weight] if config["model_type"] == "gpt2" else []
    assert count.non_embedding == count.total - sum(t.numel() for t in {id(t): t for t in tables}.values())
    assert count.matmul == count.non_embedding + tables[1].numel()


@pytest.mark.parametrize("family", DEFAULTS)
def test_defaults_cannot_drift_from_those_of_transformers(family: str) -> None:
    fields = AutoConfig.for_model(family).__class__.__dataclass_fields__
    for key, value in DEFAULTS[family].items():
        assert fields[key].default == value, key


def test_flops_follow_palm() -> None:
    count = count_parameters(tiny.LLAMA)
    assert count is not None
    assert flops_per_token(tiny.LLAMA, 1024) == 6 * count.matmul + 12 * 2 * 4 * 16 * 1024
    windowed, whole = flops_per_token(tiny.MISTRAL, 1024), flops_per_token(tiny.MISTRAL, 8)
    assert windowed == whole  # the window is 8


def test_a_family_not_known_has_no_count() -> None:
    assert count_parameters(tiny.MIXTRAL) is None
    assert flops_per_token(tiny.MIXTRAL, 1024) is None
