"""Configs of a model that mean the same, however they are written."""

from typing import Any

import pytest

from ds_pretrain.training.identity import with_unit
from ds_pretrain.training.meaning import compared, config_changes, positions_at, positions_of
from tests.scenario import LLAMA

YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            {},
            {"transformers_version": "5.1", "use_cache": False, "architectures": ["X"], "dtype": "bfloat16"},
        ),
        ({"torch_dtype": "float32"}, {"_name_or_path": "a/b"}),
        ({}, {"hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False, "pad_token_id": None}),
        ({}, {"head_dim": 8, "num_key_value_heads": 2}),
        ({}, {"rope_theta": 10_000.0, "rope_scaling": None}),
        ({}, {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000}}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", "factor": 4.0}},
            {"rope_parameters": {**YARN, "original_max_position_embeddings": 128}},
        ),
    ],
)
def test_what_changes_no_model_is_no_change(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert config_changes({**LLAMA, **old}, {**LLAMA, **new}) == {}
    assert config_changes({**LLAMA, **new}, {**LLAMA, **old}) == {}


@pytest.mark.parametrize(
    ("old", "new", "changes"),
    [
        ({}, {"hidden_act": "gelu"}, {"hidden_act": ("silu", "gelu")}),
        ({}, {"head_dim": 16}, {"head_dim": (8, 16)}),
        ({}, {"rope_theta": 5e5}, {"rope.theta": (1e4, 5e5)}),
        ({}, {"tie_word_embeddings": True}, {"tie_word_embeddings": (False, True)}),
        (
            {"rope_parameters": YARN},
            {"rope_parameters": {**YARN, "factor": 8.0}},
            {"rope.factor": (4.0, 8.0)},
        ),
        (
            {"rope_parameters": YARN},
            {"rope_parameters": {**YARN, "attention_factor": 1.0}},
            {"rope.attention_factor": (None, 1.0)},
        ),
    ],
)
def test_what_changes_a_model_is_told_with_what_both_make_of_it(
    old: dict[str, Any], new: dict[str, Any], changes: dict[str, Any]
) -> None:
    assert config_changes({**LLAMA, **old}, {**LLAMA, **new}) == changes


def test_the_positions_of_each_kind_of_layer_and_what_follows_the_length_count() -> None:
    layers = {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    gemma = {"model_type": "gemma3_text", "rope_parameters": layers, "max_position_embeddings": 128}
    other = {**gemma, "rope_parameters": {**layers, "sliding_attention": {"rope_theta": 2e4}}}
    assert positions_of(gemma)["theta"] == 5e5
    assert "rope.sliding_attention.rope_theta" in config_changes(gemma, other)
    dynamic = {**LLAMA, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    assert "max_position_embeddings" in positions_of(dynamic)
    assert positions_of({"model_type": "gpt2", "n_positions": 128}) == {}


def test_a_share_that_is_rotated_counts_wherever_it_is_written() -> None:
    phi = {"model_type": "phi", "hidden_size": 64, "num_attention_heads": 4}
    half = {**phi, "partial_rotary_factor": 0.5}
    table = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    assert config_changes(half, {**phi, "rope_parameters": table}) == {}
    quarter = {**half, "partial_rotary_factor": 0.25}
    assert config_changes(half, quarter) == {"rope.partial_rotary_factor": (0.5, 0.25)}


def test_an_identity_of_another_program_is_compared_as_it_is_written() -> None:
    odd: dict[str, Any] = {"name": "a", "phases": {"main": {"first_step": 0, "rope": {"theta": 1e4}}}}
    assert compared(odd, odd) == (odd, odd)
    assert positions_at(odd, 3) is None


def test_a_value_is_told_in_words_and_no_dictionary_is() -> None:
    phase = {"first_step": 1200, "seq_len": 4096, "mixture": {"web": 1.5, "code": 1.0}, "rope": None}
    words = "sequences of 4,096 tokens of 1.5 web, 1 code, from step 1,200 on"
    assert with_unit("phases.long", phase) == words
    rope = {"kind": "yarn", "theta": 5e5, "factor": 4.0, "low_freq_factor": None}
    assert with_unit("phases.long", {**phase, "rope": rope}) == (
        f'{words} (rope kind "yarn", theta 500000, factor 4)'
    )
    assert with_unit("batch.ramp", [[0, 512], [300, 1024]]) == (
        "512 tokens from step 0 on, 1,024 tokens from step 300 on"
    )
    assert with_unit("chunk_tokens.web", 4096) == "4,096 tokens"
    assert with_unit("phases.long.mixture", {}) == "empty"
