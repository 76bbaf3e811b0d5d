"""Building: what a config may say, and what a wrong one is told."""

import json
import re
from typing import Any

import pytest
import torch

from ds_pretrain.core.errors import InputError
from ds_pretrain.models.build import build_model, build_on_meta
from ds_pretrain.models.config_check import build_model_config
from tests.models import tiny


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model_type": "lama"},
            "model_type \"lama\" is not a causal language model of Transformers; did you mean 'llama'",
        ),
        ({"model_type": "bert"}, 'model_type "bert" is an encoder or encoder-decoder family'),
        ({"model_type": "bart"}, "is an encoder or encoder-decoder family"),
        ({"model_type": "t5"}, 'model_type "t5" is not a causal language model'),
        (
            {"num_hiden_layers": 3},
            'LlamaConfig has no key "num_hiden_layers"; did you mean "num_hidden_layers"?',
        ),
        ({"zzz": 3}, 'LlamaConfig has no key "zzz"; remove it'),
        ({"is_encoder_decoder": True}, '"is_encoder_decoder" is true; expected a decoder-only model'),
        ({"attention_bias": "yes"}, '"attention_bias" = "yes": refused by LlamaConfig: Field'),
        ({"hidden_size": 66, "head_dim": 16}, "refused by LlamaConfig"),
        ({"hidden_size": "64"}, '"hidden_size" = "64"; expected a whole number of at least 1'),
        ({"pad_token_id": 9999}, '"pad_token_id" = 9999 is outside the vocabulary of 512'),
    ],
)
def test_a_wrong_config_is_an_input_error_that_says_what_to_do(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        tiny.built(tiny.LLAMA | change)


def test_a_multimodal_family_is_pointed_to_its_text_part() -> None:
    with pytest.raises(InputError, match=r'composite .* use "gemma3_text"'):
        tiny.built(tiny.LLAMA | {"model_type": "gemma3"})


def test_all_problems_of_a_config_are_told_at_once() -> None:
    with pytest.raises(InputError) as caught:
        tiny.built(tiny.LLAMA | {"num_attention_heads": 5, "hiden_size": 3, "vocab_size": None})
    assert len(caught.value.problems) == 4


@pytest.mark.parametrize("config", [tiny.LLAMA, tiny.QWEN3, tiny.GPT2, tiny.MIXTRAL, tiny.MAMBA])
def test_a_dry_build_passes_for_what_can_be_built(config: dict[str, Any]) -> None:
    build_on_meta(json.dumps(config), qk_norm=config is tiny.LLAMA)


def test_a_dry_build_needs_no_memory_for_the_weights() -> None:
    huge = {"hidden_size": 1 << 20, "intermediate_size": 1 << 22, "vocab_size": 1 << 20}
    build_on_meta(json.dumps(tiny.LLAMA | huge))  # 100 TB


@pytest.mark.parametrize(
    ("change", "attention", "message"),
    [
        (
            {"hiden_size": 3},
            None,
            'conf.json: LlamaConfig has no key "hiden_size"; did you mean "hidden_size"?',
        ),
        ({"hidden_size": 66, "head_dim": 16}, None, "conf.json: refused by LlamaConfig: "),
        ({}, "flash_attention_9", 'conf.json: "llama" cannot be built (attention flash_attention_9): '),
        ({"model_type": "lama"}, None, 'conf.json: model_type "lama" is not a causal language model'),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarm", "factor": 2.0}},
            None,
            'conf.json: "llama" cannot be built (attention automatic): KeyError: ',
        ),
    ],
)
def test_a_dry_build_says_what_is_wrong_and_in_which_file(
    change: dict[str, Any], attention: str | None, message: str
) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        build_on_meta(json.dumps(tiny.LLAMA | change), attention=attention, name="conf.json")


def test_a_dry_build_reports_whatever_the_models_own_code_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise KeyError("nope")

    monkeypatch.setattr("ds_pretrain.models.build.AutoModelForCausalLM.from_config", refuse)
    with pytest.raises(
        InputError, match=r"\"llama\" cannot be built \(attention automatic\): KeyError: 'nope'"
    ):
        build_on_meta(json.dumps(tiny.LLAMA))


def test_an_attention_that_is_not_there_is_an_input_error() -> None:
    with pytest.raises(InputError, match="cannot be built \\(attention flash_attention_9\\)"):
        build_model(
            json.dumps(tiny.LLAMA), qk_norm=False, recompute=False, seed=1, dtype=torch.float32,
            attention="flash_attention_9", world=tiny.World(), partition=tiny.nullcontext,
            gather=lambda parameters: tiny.nullcontext(),
        )  # fmt: skip


@pytest.mark.parametrize(
    "extra",
    [
        {
            "rope_theta": 5e5,
            "rope_scaling": None,
            "torch_dtype": "bfloat16",
            "architectures": ["LlamaForCausalLM"],
        },
        {"transformers_version": "4.30.0", "pretraining_tp": 1, "_name_or_path": "x", "use_cache": True},
        {"num_labels": 2, "do_sample": True, "bos_token_id": 1, "eos_token_id": [2, 3]},
    ],
)
def test_keys_of_published_configs_are_accepted(extra: dict[str, Any]) -> None:
    assert build_model_config(json.dumps(tiny.LLAMA | extra)).use_cache is False


def test_optional_keys_that_only_the_model_code_reads_are_accepted() -> None:
    assert build_model_config(json.dumps(tiny.QWEN3_MOE)).head_dim == 16  # Qwen3MoeConfig does not declare it


def test_gpt2_with_a_small_vocabulary_has_no_special_token_outside_of_it() -> None:
    config = build_model_config(json.dumps(tiny.GPT2))
    assert (config.bos_token_id, config.eos_token_id) == (None, None)
    assert build_model_config(json.dumps(tiny.GPT2 | {"vocab_size": 50257})).eos_token_id == 50256


@pytest.mark.parametrize("config", [tiny.LLAMA, tiny.QWEN3, tiny.GPT2], ids=lambda c: c["model_type"])
def test_no_position_sees_a_later_token(config: dict[str, Any]) -> None:
    model = tiny.built(config, qk_norm=config is tiny.LLAMA).module.eval()
    tokens = torch.arange(40)[None]
    changed = tokens.clone()
    changed[0, 20] = 300
    with torch.no_grad():
        before, after = model(tokens).logits, model(changed).logits
    assert torch.equal(before[:, :20], after[:, :20])
    assert not torch.allclose(before[:, 20:], after[:, 20:])


@pytest.mark.parametrize("config", [tiny.LLAMA, tiny.GPT2], ids=lambda c: c["model_type"])
def test_recomputation_changes_no_gradient(config: dict[str, Any]) -> None:
    config = config | (
        {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if config is tiny.GPT2 else {}
    )
    gradients = []
    for recompute in (False, True):
        model = tiny.built(config, recompute=recompute).module
        assert model.training
        assert model.is_gradient_checkpointing == recompute
        model(torch.arange(40)[None]).logits.square().mean().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.equal(plain, recomputed)
