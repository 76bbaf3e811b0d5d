"""Checks before a model is built: keys and values of its config, and limits of sequence parallelism."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassClassValidationError
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ds_pretrain.commands.cli import main
from ds_pretrain.config.plan import load_plan
from ds_pretrain.core.errors import InputError
from ds_pretrain.models.build import build_on_meta
from ds_pretrain.models.config_check import check_model, hide_transformers
from ds_pretrain.models.flops import count_parameters
from ds_pretrain.models.rope_config import check_rope_values
from ds_pretrain.training.preflight import find_problems, format_summary, open_inputs
from tests.models import tiny
from tests.scenario import LLAMA, deepspeed_json, make_run


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
        ({"hidden_size": 66}, '"num_attention_heads" = 4 does not divide "hidden_size" = 66'),
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
    problems = check_model(json.dumps(tiny.LLAMA | change))
    assert any(message in problem for problem in problems), problems


# What to set in a small Llama, and the one message.
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"hidden_act": "silo"}, 'xielu; did you mean "silu"?'),
    (
        {"hidden_act": 3},
        "\"hidden_act\" = 3: refused by LlamaConfig: Field 'hidden_act' expected str, got int",
    ),
    (
        {"initializer_range": "x"},
        '"initializer_range" = "x"; expected a number above 0, at most 1, like 0.02',
    ),
    ({"initializer_range": 0}, '"initializer_range" = 0; expected a number above 0'),
    ({"initializer_range": 1}, '"initializer_range" = 1: refused by LlamaConfig: Field'),
    ({"initializer_range": 2.0}, '"initializer_range" = 2.0; expected a number above 0, at most 1'),
    ({"rms_norm_eps": "1e-5"}, '"rms_norm_eps" = "1e-5"; expected a number of at least 0'),
    ({"rms_norm_eps": -1e-5}, '"rms_norm_eps" = -1e-05; expected a number of at least 0'),
    ({"attention_dropout": 1.5}, '"attention_dropout" = 1.5; expected a number from 0 to below 1'),
    ({"attention_dropout": "x"}, '"attention_dropout" = "x": refused by LlamaConfig: Field'),
    ({"tie_word_embeddings": "false"}, '"tie_word_embeddings" = "false": refused by LlamaConfig: Field'),
    ({"head_dim": 15}, "requires an even rotary dimension, but got `head_dim`=15"),
    ({"hidden_size": 60}, "requires an even rotary dimension, but got `head_dim`=15"),
    ({"rope_parameters": "x"}, '"rope_parameters" = "x": refused by LlamaConfig: Field'),
    (
        {"rope_scaling": {"type": "linear"}},
        "Missing required keys in `rope_parameters` for 'rope_type'='linear'",
    ),
    ({"max_position_embeddings": 0}, '"max_position_embeddings" = 0; expected a whole number of at least 1'),
    (
        {"pad_token_id": 9999},
        '"pad_token_id" = 9999 is outside the vocabulary of 512; set it to null, or to an',
    ),
    ({"hiden_size": 64}, 'LlamaConfig has no key "hiden_size"; did you mean "hidden_size"?'),
    ({"zzz": 64}, 'LlamaConfig has no key "zzz"; remove it'),
    ({"intermediate_size": 1.5}, '"intermediate_size" = 1.5; expected a whole number of at least 1'),
    ({"vocab_size": "512"}, '"vocab_size" is missing or not a positive whole number (found "512")'),
    ({"hidden_size": 66}, '"num_attention_heads" = 4 does not divide "hidden_size" = 66'),
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


def test_all_problems_are_told_at_once() -> None:
    wrong = {
        "attention_bias": "yes",
        "tie_word_embeddings": 3,
        "hiden_size": 64,
        "rms_norm_eps": -1.0,
        "pad_token_id": 9999,
    }
    assert len(check_model(json.dumps(tiny.LLAMA | wrong))) == 5


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
        assert check_model(json.dumps(config)) == []


def test_qk_norm_where_it_cannot_be_done_is_found_without_torch() -> None:
    assert check_model(json.dumps(tiny.LLAMA), qk_norm=True) == []
    (problem,) = check_model(json.dumps(tiny.GPT2), qk_norm=True)
    assert 'not possible for "gpt2"' in problem
    assert "llama" in problem


# Transformers has a causal class for these, and they are no decoder-only models of text.
ENCODERS = frozenset([
    "bart", "bert", "big_bird", "bigbird_pegasus", "blenderbot", "blenderbot-small", "camembert",
    "data2vec-text", "electra", "ernie", "marian", "mbart", "megatron-bert", "moss_transcribe_diarize",
    "musicgen", "musicgen_melody", "mvp", "pegasus", "plbart", "prophetnet", "reformer", "rembert",
    "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "whisper", "xlm", "xlm-roberta",
    "xlm-roberta-xl", "xmod",
])  # fmt: skip
# Their config holds those of several models; the text model's own is taken.
COMPOSITE = frozenset([
    "blt", "dots3_note", "emu3", "fuyu", "gemma3", "gemma3n", "gemma4", "gemma4_unified",
    "gemma4_unified_assistant", "got_ocr2", "llama4", "mllama", "moshi", "qwen3_5", "qwen3_5_moe",
    "qwen4_exp",
])  # fmt: skip
# Their class refuses its own defaults.
NO_DEFAULT = frozenset({"gemma4_assistant"})
# Their defaults leave out sizes that a model needs, so that only a published config can be built.
NO_DEFAULT_MODEL = frozenset([
    "cohere_compass_text", "dbrx", "dots1", "hunyuan_v1_dense", "hunyuan_v1_moe", "lfm2_moe", "ministral",
    "nemotron", "qwen4_exp_text",
])  # fmt: skip
FAMILIES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _saved(family: str, folder: Path) -> str:
    """The config.json that Transformers saves of a family's defaults."""
    CONFIG_MAPPING[family]().save_pretrained(folder)
    return (folder / "config.json").read_text()


def test_what_transformers_saves_is_right_for_every_causal_family(tmp_path: Path) -> None:
    """A key that it wrote is no misspelt one, and a misspelt one beside it is still found."""
    for family in FAMILIES:
        if family in NO_DEFAULT:
            with pytest.raises(StrictDataclassClassValidationError):
                _saved(family, tmp_path)
            continue
        text = _saved(family, tmp_path)
        problems = [*check_model(text), *check_rope_values(json.loads(text), family)]
        if family in ENCODERS:
            assert "expected a decoder-only" in problems[0], family
        elif family in COMPOSITE:
            assert "is a composite (multimodal) model; use" in problems[0], family
        else:
            assert problems == [], family
            (problem,) = check_model(json.dumps({**json.loads(text), "vocab_sise": 512}))
            assert problem.endswith('has no key "vocab_sise"; did you mean "vocab_size"?'), family


@pytest.mark.slow
def test_every_causal_family_is_built_without_memory_from_what_was_saved(tmp_path: Path) -> None:
    for family in FAMILIES:
        if family in ENCODERS | COMPOSITE | NO_DEFAULT:
            continue
        text = _saved(family, tmp_path)
        if family in NO_DEFAULT_MODEL:
            with pytest.raises(InputError, match="cannot be built"):
                build_on_meta(text)
            continue
        count = count_parameters(text)
        assert count is not None, family
        assert 0 < count.active <= count.matmul <= count.total, family


def test_without_transformers_arithmetic_is_all() -> None:
    with hide_transformers():
        assert check_model(json.dumps(tiny.LLAMA | {"hidden_act": 3, "hiden_size": 3})) == []
        assert len(check_model(json.dumps(tiny.LLAMA | {"initializer_range": 0}))) == 1
        assert len(check_model(json.dumps(tiny.LLAMA | {"hidden_size": 66}))) == 1
    assert len(check_model(json.dumps(tiny.LLAMA | {"hidden_act": 3, "hiden_size": 3}))) == 2


def test_neither_torch_nor_transformers_is_imported() -> None:
    code = (
        "import sys; from ds_pretrain.models import config_check, flops, rope_config, pretrained; "
        "sys.modules['transformers'] = None; "
        f"print(config_check.check_model({json.dumps(tiny.LLAMA)!r}), config_check.uses_transformers()); "
        "print([m for m in ('torch', 'transformers') if sys.modules.get(m)])"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == ["[] False", "[]"]


LESS = "take another sequence_parallel_size, or delete it"
GPT2 = {
    "model_type": "gpt2", "vocab_size": 257, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 128,
}  # fmt: skip


def _problems(
    folder: Path, shared: Any, overrides: tuple[str, ...] = (), world_size: int | None = None, **model: Any
) -> list[str]:
    """Return the problems that a start finds, without the paths of files."""
    config = {**deepspeed_json(), "sequence_parallel_size": shared}
    whole = model if "model_type" in model else {**LLAMA, **model}
    plan = load_plan(make_run(folder, deepspeed=config, model=whole, batch_tokens=16 * 12), overrides)
    found = find_problems(plan, open_inputs(plan), world_size, "a test")
    return [problem.replace(f"{folder}/", "") for problem in found]


@pytest.mark.parametrize("shared", [2, 4, 2.0])
@pytest.mark.parametrize("world_size", [None, 4])
def test_what_can_be_shared_is_not_refused(tmp_path: Path, shared: float, world_size: int | None) -> None:
    assert _problems(tmp_path, shared, (), world_size) == []
    assert _problems(tmp_path, shared, ("model.qk_norm=false",), world_size, **GPT2) == []


@pytest.mark.parametrize(
    ("shared", "overrides", "model", "reason"),
    [
        (
            32,
            (),
            {"num_attention_heads": 32, "num_key_value_heads": 32},
            "which does not divide phases.main.seq_len = 16 of run.toml; change the one or the other",
        ),
        (8, (), {}, f'which does not divide "num_attention_heads" = 4 of the model; {LESS}'),
        (8, (), GPT2, f'which does not divide "n_head" = 4 of the model; {LESS}'),
        (
            2,
            (),
            {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48},
            'which neither divides "num_key_value_heads" = 3 of the model nor is divided by it; ' + LESS,
        ),
        (
            2,
            ("model.mask_documents=true",),
            {},
            "and run.toml sets model.mask_documents = true: sequence-parallel attention takes no mask, so "
            "documents would attend to each other; set it to false, or delete the key",
        ),
        (
            2,
            ("model.attention=eager",),
            {},
            'and run.toml sets model.attention = "eager", which needs a mask; set it to "sdpa" or '
            '"flash_attention_2", or delete the key',
        ),
        (
            2,
            (),
            {**LLAMA, "model_type": "mistral", "sliding_window": 8},
            'and "mistral" attends in a window of 8 tokens, shorter than the longest seq_len (16), which '
            f'would be ignored; set "sliding_window" to null, or {LESS}',
        ),
        (
            2,
            ("model.qk_norm=false",),
            {"model_type": "bloom", "vocab_size": 257, "hidden_size": 32, "n_head": 4, "n_layer": 2},
            f'and "bloom" does not accept position_ids, which sequence parallelism needs; {LESS}',
        ),
        (
            2,
            ("model.qk_norm=false",),
            {"model_type": "qwen3_next", "vocab_size": 257, "hidden_size": 32, "num_attention_heads": 4},
            f'and "qwen3_next" has layers other than attention, which need whole sequences; {LESS}',
        ),
        (
            2,
            (),
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            'and rotary positions of kind "dynamic" follow the length of what a rank sees of a row; use '
            f'"yarn", "llama3" or "default", or {LESS}',
        ),
    ],
    ids=["seq_len", "heads", "heads of gpt2", "key-value heads", "documents", "eager", "window", "positions",
         "layers", "rope"],
)  # fmt: skip
def test_what_cannot_be_shared_is_refused(
    tmp_path: Path, shared: int, overrides: tuple[str, ...], model: dict[str, Any], reason: str
) -> None:
    found = _problems(tmp_path, shared, overrides, **model)
    assert f"deepspeed.json sets `sequence_parallel_size` = {shared}, {reason}" in found


def test_a_window_that_no_sequence_fills_is_none(tmp_path: Path) -> None:
    model = {**LLAMA, "model_type": "mistral", "sliding_window": 16}
    assert _problems(tmp_path, 2, **model) == []


def test_prompts_that_cannot_be_shared_are_refused(tmp_path: Path) -> None:
    more = (
        "phases=[{name='main',seq_len=96,mixture={text=1.0}}]",
        "validation.retrieval=true",
        "batch.tokens=576",
    )
    model = {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 48}
    assert _problems(tmp_path, 3, more, **model) == [
        "run.toml: validation.retrieval = true asks in prompts of 64 tokens, which sequence_parallel_size = "
        "3 of deepspeed.json does not divide; set it to false, or take a power of two"
    ]
    assert _problems(tmp_path, 2, more, **model) == []


def test_the_number_of_ranks_has_to_be_one_of_whole_groups(tmp_path: Path) -> None:
    assert _problems(tmp_path, 2, (), 3) == [
        "deepspeed.json: `sequence_parallel_size` = 2 does not divide 3 ranks (from a test); set it to a "
        "divisor of their number, at best one that keeps each sequence on one node"
    ]


def test_batches_are_divided_among_groups(tmp_path: Path) -> None:
    [problem] = _problems(tmp_path, 2, (), 8)
    assert problem == (
        "run.toml: global batch 12 sequences (192 tokens / seq_len 16), micro-batch 2, world size 8 (from a "
        "test), 2 ranks a sequence do not multiply out; world sizes that do: 2, 4, 6, 12 (or another "
        "batch.micro_batch_size)"
    )
    plan = load_plan(tmp_path / "run.toml")
    for world_size, line in (
        (None, "micro-batches of 2; world sizes that divide it: 2, 4, 6, 12"),
        (2, "1 group of 2 ranks x 2 sequences x accumulation 6 = 12 sequences"),
        (4, "2 groups of 2 ranks x 2 sequences x accumulation 3 = 12 sequences"),
    ):
        lines = list(format_summary(plan, open_inputs(plan), world_size))
        assert f"batch      {line}" in lines
        assert any(line.endswith("ZeRO-3, fp32, sequence parallel over 2 ranks") for line in lines)


def test_an_accumulation_in_the_json_is_compared_by_groups(tmp_path: Path) -> None:
    _problems(tmp_path, 2)
    file = tmp_path / "deepspeed.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "gradient_accumulation_steps": 3}))
    plan = load_plan(tmp_path / "run.toml")
    assert find_problems(plan, open_inputs(plan), 4, "a test") == []
    assert len(find_problems(plan, open_inputs(plan), 2, "a test")) == 1


def test_check_says_it_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _problems(tmp_path, 2)
    assert main(["check", str(tmp_path / "run.toml"), "--world", "3"]) == 2
    assert "`sequence_parallel_size` = 2 does not divide 3 ranks" in capsys.readouterr().err
