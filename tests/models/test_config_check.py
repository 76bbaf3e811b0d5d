"""Checks that need no torch: `ds-pretrain check` has three seconds."""

import ast
import json
import subprocess
import sys
from dataclasses import fields
from typing import Any

import pytest
from ds_pretrain.models.config_values import expert_problems, rope_problems, wrong_amounts, wrong_types
from ds_pretrain.models.family import known_activations, known_rope_types, read_family
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import GenerationConfig
from transformers.activations import ACT2CLS
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ds_pretrain.models.config_check import check_model, known_families
from tests.models import tiny


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model_type": ', "model config is not valid JSON: Expecting value: line 1 column 16"),
        ("[1]", "model config must hold one JSON object, found a list"),
        ("{}", '"model_type" is missing or not a text (found null)'),
        ('{"model_type": 3, "vocab_size": 9}', "(found 3)"),
    ],
)
def test_text_that_is_no_config_is_told_so(text: str, message: str) -> None:
    (problem,) = check_model(text)
    assert message in problem


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": None}, '"vocab_size" is missing'),
        ({"vocab_size": 99}, '"vocab_size" = 99 is smaller than the tokenizer\'s vocabulary of 100; set'),
        ({"num_attention_heads": 7}, '"num_attention_heads" = 7 does not divide "hidden_size" = 64'),
        ({"num_key_value_heads": 3}, '"num_key_value_heads" = 3 does not divide "num_attention_heads" = 4'),
        ({"num_hidden_layers": 0}, '"num_hidden_layers" = 0; expected a whole number of at least 1'),
        ({"hidden_size": True}, '"hidden_size" = true; expected a whole number of at least 1'),
        ({"is_encoder_decoder": True}, "expected a decoder-only model"),
        ({"model_type": "qwen33"}, "did you mean"),
        ({"model_type": "xqzzzz"}, "see the model list of Transformers"),
        ({"model_type": "roberta"}, "encoder"),
    ],
)
def test_each_problem_of_a_config_is_found(change: dict[str, Any], message: str) -> None:
    problems = check_model(json.dumps(tiny.LLAMA | change), vocab_size_needed=100)
    assert any(message in problem for problem in problems), problems


# What to set in a small Llama, and the one message.
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"hidden_act": "nope"}, '"hidden_act" = "nope"; expected one of gelu, '),
    ({"hidden_act": "silo"}, 'xielu; did you mean "silu"?'),
    ({"hidden_act": 3}, '"hidden_act" = 3; expected one of gelu, '),
    ({"hidden_act": ["silu"]}, '"hidden_act" = ["silu"]; expected one of gelu, '),
    (
        {"initializer_range": "x"},
        '"initializer_range" = "x"; expected a number above 0, at most 1, like 0.02',
    ),
    ({"initializer_range": 0}, '"initializer_range" = 0; expected a number above 0'),
    ({"initializer_range": -1}, '"initializer_range" = -1; expected a number above 0'),
    (
        {"initializer_range": 1},
        '"initializer_range" = 1; expected a number with a decimal point or an exponent',
    ),
    ({"initializer_range": 2.0}, '"initializer_range" = 2.0; expected a number above 0, at most 1'),
    ({"rms_norm_eps": "1e-5"}, '"rms_norm_eps" = "1e-5"; expected a number of at least 0'),
    ({"rms_norm_eps": -1e-5}, '"rms_norm_eps" = -1e-05; expected a number of at least 0'),
    ({"attention_dropout": 1.5}, '"attention_dropout" = 1.5; expected a number from 0 to below 1'),
    ({"attention_dropout": "x"}, '"attention_dropout" = "x"; expected a number or null'),
    ({"attention_bias": "yes"}, '"attention_bias" = "yes"; expected true or false'),
    ({"attention_bias": 1}, '"attention_bias" = 1; expected true or false'),
    ({"tie_word_embeddings": "false"}, '"tie_word_embeddings" = "false"; expected true or false'),
    ({"head_dim": 15}, '"head_dim" = 15 is odd; rotation turns pairs: make it even'),
    ({"hidden_size": 60}, '"hidden_size" / "num_attention_heads" = 15 is odd'),
    (
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.32}},
        '"num_attention_heads" = 16, of which 5 are rotated, is odd; rotation turns pairs',
    ),
    ({"rope_theta": "x"}, '"rope_theta" = "x"; expected a number above 0, like 10000.0'),
    ({"rope_theta": 0}, '"rope_theta" = 0; expected a number above 0'),
    (
        {"rope_parameters": {"rope_theta": "x"}},
        '"rope_parameters": "rope_theta" = "x"; expected a number above',
    ),
    ({"rope_parameters": "x"}, '"rope_parameters" = "x"; expected an object or null'),
    (
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarm", "factor": 2.0}},
        '"rope_parameters": "rope_type" = "yarm"; expected one of default, dynamic',
    ),
    (
        {"rope_scaling": {"type": "linear"}},
        '"rope_scaling": "factor" = null; expected a number of at least 1, for',
    ),
    ({"rope_scaling": {"type": "linear", "factor": 0.5}}, '"factor" = 0.5; expected a number of at least 1'),
    (
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": 2.0}},
        '"long_factor" = 2.0; expected a list of numbers, for rope_type "longrope"',
    ),
    ({"max_position_embeddings": 0}, '"max_position_embeddings" = 0; expected a whole number of at least 1'),
    (
        {"pad_token_id": 9999},
        '"pad_token_id" = 9999 is outside the vocabulary of 512; set it to null, or to an',
    ),
    ({"eos_token_id": "x"}, '"eos_token_id" = "x"; expected a whole number or a list or null'),
    ({"hiden_size": 64}, 'LlamaConfig has no key "hiden_size"; did you mean "hidden_size"?'),
    ({"zzz": 64}, 'LlamaConfig has no key "zzz"; remove it'),
    ({"intermediate_size": 1.5}, '"intermediate_size" = 1.5; expected a whole number of at least 1'),
    ({"vocab_size": "512"}, '"vocab_size" is missing or not a positive whole number (found "512")'),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[str(row[0])[:60] for row in WRONG])
def test_a_wrong_value_gives_one_message_with_the_name_of_the_file(
    change: dict[str, Any], message: str
) -> None:
    (problem,) = check_model(json.dumps(tiny.LLAMA | change), name="conf/model.json")
    assert problem.startswith("conf/model.json: ")
    assert message in problem


def test_more_experts_a_token_than_there_are_is_refused() -> None:
    (problem,) = check_model(json.dumps(tiny.MIXTRAL | {"num_experts_per_tok": 5}))
    assert problem == 'model config: "num_experts_per_tok" = 5; expected 1 to "num_local_experts" = 4'
    (problem,) = check_model(json.dumps(tiny.MIXTRAL | {"num_local_experts": 1}))  # two a token by default
    assert '"num_experts_per_tok" = 2; expected 1 to "num_local_experts" = 1' in problem


def test_only_what_is_rotated_must_be_even() -> None:
    latent = {"model_type": "deepseek_v3"} | tiny.ROTARY | {"qk_rope_head_dim": 15}
    (problem,) = check_model(json.dumps(latent))
    assert problem.endswith('"qk_rope_head_dim" = 15 is odd; rotation turns pairs: make it even')
    assert check_model(json.dumps(latent | {"qk_rope_head_dim": 16, "hidden_size": 60})) == []
    # Phi rotates a share that its own code knows.
    assert check_model(json.dumps({"model_type": "phi"} | tiny.ROTARY | {"hidden_size": 60})) == []


def test_a_rotary_scaling_that_only_one_family_knows_passes_there() -> None:
    scaling = {"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0]}}
    assert check_model(json.dumps({"model_type": "phi3", "pad_token_id": None} | tiny.ROTARY | scaling)) == []
    (problem,) = check_model(json.dumps(tiny.LLAMA | scaling))
    assert '"rope_type" = "su"; expected one of default, ' in problem


def test_the_other_name_of_a_key_has_the_same_type() -> None:
    assert check_model(json.dumps(tiny.GPT2 | {"max_position_embeddings": "x"})) != []
    (problem,) = check_model(json.dumps(tiny.MIXTRAL | {"num_experts": "x"}))
    assert problem.endswith('"num_experts" = "x"; expected a whole number or null')


GOOD: list[dict[str, Any]] = [
    {"rope_theta": 500000, "rope_scaling": None, "head_dim": None, "torch_dtype": "bfloat16"},
    {
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    },
    {"rope_scaling": {"type": "yarn", "factor": 2}, "eos_token_id": [1, 2], "attention_dropout": 0},
    {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}},
    {"architectures": ["LlamaForCausalLM"], "transformers_version": "4.30.0", "pretraining_tp": 1},
]  # fmt: skip


@pytest.mark.parametrize("change", GOOD, ids=lambda change: next(iter(change)))
def test_keys_of_published_configs_have_no_problem(change: dict[str, Any]) -> None:
    assert check_model(json.dumps(tiny.LLAMA | change)) == []


def test_a_good_config_has_no_problems() -> None:
    for config in (tiny.LLAMA, tiny.QWEN3, tiny.GPT2, tiny.MIXTRAL, tiny.GEMMA3, tiny.MAMBA):
        assert check_model(json.dumps(config), vocab_size_needed=512) == []


def test_qk_norm_where_it_cannot_be_done_is_found_without_torch() -> None:
    assert check_model(json.dumps(tiny.LLAMA), qk_norm=True) == []
    (problem,) = check_model(json.dumps(tiny.GPT2), qk_norm=True)
    assert 'not possible for "gpt2"' in problem
    assert "llama" in problem


def test_the_families_read_from_source_are_those_of_the_import() -> None:
    families = known_families()
    assert families is not None
    assert families[0] == frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert {"bert", "t5", "bart"} <= families[1]
    assert not {"llama", "qwen3", "gpt2", "gemma3_text"} & families[1]


def test_what_is_read_of_each_family_is_what_its_imported_class_says() -> None:
    """Every family that can be trained: its class, its keys by all names, and the types of those keys."""
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        kind, read = CONFIG_MAPPING[name], read_family(name)
        assert read is not None, name
        assert read.class_name == kind.__name__
        declared = {field.name for field in fields(kind)}
        assert read.own_keys == declared | kind.attribute_map.keys()
        assert read.known_keys >= read.own_keys
        assert set(GenerationConfig._get_default_generation_params()) <= read.known_keys


def test_the_default_of_every_family_has_no_problem_but_its_size() -> None:
    """A check that is stricter than Transformers would refuse models that train."""
    for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        read = read_family(name)
        assert read is not None
        plain = {
            key: value for key, value in read.defaults.items() if key in read.types and value is not None
        }
        assert wrong_types(plain, read) == {}, name
        assert wrong_amounts(plain) == {}, name
        assert list(rope_problems(plain, read)) == [], name
        assert list(expert_problems(plain, read)) == [], name


VALUES: list[Any] = [None, True, 0, 3, -1, 0.5, "x", "silu", [], [1], ["x"], {}, {"a": 1}]


@pytest.mark.parametrize("config", [tiny.LLAMA, tiny.QWEN3, tiny.GPT2, tiny.MIXTRAL, tiny.GEMMA3, tiny.OLMO2])
def test_a_type_that_we_refuse_is_one_that_the_config_class_refuses_and_the_other_way_round(
    config: dict[str, Any],
) -> None:
    read, kind = read_family(config["model_type"]), CONFIG_MAPPING[config["model_type"]]
    assert read is not None
    compared = 0
    for key in sorted(read.own_keys - kind.attribute_map.keys()):  # the class checks no other name of a key
        if not isinstance(read.types.get(key), ast.Name | ast.BinOp) or "rope" in key:
            continue
        for value in VALUES:
            try:
                kind(**{**{k: v for k, v in config.items() if k != "model_type"}, key: value})
                refused = False
            except StrictDataclassFieldValidationError as error:
                refused = "TypeError" in str(error)
            except Exception:  # of a value, or of a computation with it: not about the type
                continue
            assert refused == bool(wrong_types({key: value}, read)), (key, value)
            compared += 1
    assert compared > 200


def test_the_names_read_from_source_are_those_of_the_import() -> None:
    assert known_activations() == ACT2CLS.keys()
    assert known_rope_types() == ROPE_INIT_FUNCTIONS.keys()


def test_without_transformers_what_needs_its_source_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A login node may not have it; the ranks check again."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for cached in (known_families, read_family, known_activations, known_rope_types):
        cached.cache_clear()
    try:
        assert check_model(json.dumps(tiny.LLAMA | {"hidden_act": "nope", "hiden_size": 3})) == []
        assert len(check_model(json.dumps(tiny.LLAMA | {"initializer_range": 0}))) == 1
    finally:
        for cached in (known_families, read_family, known_activations, known_rope_types):
            cached.cache_clear()


def test_neither_torch_nor_transformers_is_imported() -> None:
    code = (
        "import sys; from ds_pretrain.models import check, flops; "
        f"config = {tiny.LLAMA!r}; "
        f"print(check.check_model({json.dumps(tiny.LLAMA)!r}), flops.count_parameters(config).total); "
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.splitlines()[0].startswith("[] ")
    assert printed.splitlines()[1] == "[]"
