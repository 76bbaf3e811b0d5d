"""Checks that need no torch: `ds-pretrain check` has three seconds."""

import json
import subprocess
import sys
from typing import Any

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ds_pretrain.models.check import check_model, known_families
from tests.models import tiny


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model_type": ', "not valid JSON at line 1, column 16"),
        ("[1]", "expected a JSON object, found list"),
        ("{}", '"model_type" is missing or not a string (found None)'),
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
        ({"hidden_size": True}, '"hidden_size" = True'),
        ({"is_encoder_decoder": True}, "expected a decoder-only model"),
        ({"model_type": "qwen33"}, "did you mean"),
        ({"model_type": "xqzzzz"}, "see the model list of Transformers"),
        ({"model_type": "roberta"}, "encoder"),
    ],
)
def test_each_problem_of_a_config_is_found(change: dict[str, Any], message: str) -> None:
    problems = check_model(json.dumps(tiny.LLAMA | change), vocab_size_needed=100)
    assert any(message in problem for problem in problems), problems


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
