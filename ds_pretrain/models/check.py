"""What can be found wrong with a model config without torch or transformers, in milliseconds."""

import ast
import importlib.util
import json
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

from ds_pretrain.errors import InputError

# Families whose attention calls q_proj and k_proj, splits the result into heads and rotates: a per-head norm
# fits in between. A test reads their source and fails if one of them changes.
QK_NORM_ADDABLE = frozenset(
    (
        *("arcee", "cwm", "granite", "granitemoe", "helium", "llama", "ministral", "mistral", "mixtral"),
        *("qwen2", "qwen2_moe", "seed_oss", "smollm3"),
    )
)
# Families that have it natively, some behind a key of their config.
QK_NORM_NATIVE = frozenset(
    (
        *(
            "apertus",
            "dots1",
            "exaone4",
            "flex_olmo",
            "gemma3_text",
            "hunyuan_v1_dense",
            "hunyuan_v1_moe",
            "lfm2",
        ),
        *("lfm2_moe", "minimax_m2", "nanochat", "olmo2", "olmo3", "olmo_hybrid", "olmoe"),
        *("qwen3", "qwen3_moe", "qwen3_next"),
    )
)
QK_NORM_BY_KEY = {
    "cohere": "use_qk_norm",
    "glm4_moe": "use_qk_norm",
    "persimmon": "qk_layernorms",
    "phi": "qk_layernorm",
    "stablelm": "qk_layernorm",
}

# The same quantity under the names that families give it.
WIDTH_KEYS = ("hidden_size", "n_embd", "d_model")
HEADS_KEYS = ("num_attention_heads", "n_head", "n_heads")
LAYERS_KEYS = ("num_hidden_layers", "n_layer", "n_layers")


def parse_model_config(config_text: str) -> dict[str, Any]:
    """The JSON object of a Hugging Face `config.json`, with a `model_type`.

    Raises:
        InputError: not JSON, not an object, or no model_type.
    """
    try:
        config = json.loads(config_text)
    except json.JSONDecodeError as error:
        raise InputError(
            f"model config: not valid JSON at line {error.lineno}, column {error.colno}: {error.msg}; "
            "give the content of a Hugging Face config.json"
        ) from error
    if not isinstance(config, dict):
        raise InputError(f"model config: expected a JSON object, found {type(config).__name__}")
    if not isinstance(config.get("model_type"), str):
        raise InputError(
            f'model config: "model_type" is missing or not a string (found {config.get("model_type")!r}); '
            'name the family, for example "llama", "qwen3" or "gpt2"'
        )
    return config


def check_model(
    config_text: str, *, qk_norm: bool = False, vocab_size_needed: int | None = None
) -> list[str]:
    """All problems of a model config that show without an engine; empty if none.

    `vocab_size_needed` is one more than the largest token id of the data.
    """
    try:
        config = parse_model_config(config_text)
    except InputError as error:
        return list(error.problems)
    problems = [
        *_family_problems(config),
        *_shape_problems(config),
        *_vocabulary_problems(config, vocab_size_needed),
    ]
    if qk_norm and (problem := qk_norm_problem(config)):
        problems.append(problem)
    return problems


def qk_norm_problem(config: dict[str, Any]) -> str | None:
    """Why this family cannot have QK-norm, or None if it can."""
    family = config["model_type"]
    if family in QK_NORM_ADDABLE or family in QK_NORM_NATIVE:
        return None
    if key := QK_NORM_BY_KEY.get(family):
        if config.get(key):
            return None
        return (
            f'model.qk_norm = true: "{family}" has QK-norm of its own; set "{key}": true in the model config'
        )
    addable, native = sorted(QK_NORM_ADDABLE), sorted(QK_NORM_NATIVE | QK_NORM_BY_KEY.keys())
    return (
        f'model.qk_norm = true: not possible for "{family}"; it can be added to '
        f"{', '.join(addable)}, and {', '.join(native)} have their own; "
        "choose one of these or set qk_norm = false"
    )


def family_problem(family: str, causal: frozenset[str], masked: frozenset[str]) -> str | None:
    """Why `family` is not a decoder-only language model, or None if it is one."""
    if family not in causal:
        close = get_close_matches(family, sorted(causal), n=3, cutoff=0.6)
        hint = (
            f"did you mean {', '.join(repr(c) for c in close)}?"
            if close
            else "see the model list of Transformers"
        )
        return f'model config: model_type "{family}" is no causal language model of Transformers; {hint}'
    if family in masked:
        return (
            f'model config: model_type "{family}" is an encoder or encoder-decoder family; '
            'expected a decoder-only one, such as "llama", "qwen3" or "gpt2"'
        )
    return None


@lru_cache(maxsize=1)
def known_families() -> tuple[frozenset[str], frozenset[str]] | None:
    """Causal families, and masked or encoder-decoder ones: from Transformers' source, without its import."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return None
    source = Path(spec.origin).parent / "models" / "auto" / "modeling_auto.py"
    wanted: dict[str, frozenset[str]] = {}
    for node in ast.parse(source.read_text()).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(args=[ast.List(elts=pairs)])):
                wanted[name] = frozenset(filter(None, map(_first_text, pairs)))
    try:
        others = (
            wanted["MODEL_FOR_MASKED_LM_MAPPING_NAMES"]
            | wanted["MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"]
        )
        return wanted["MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"], others
    except KeyError:
        return None


def _first_text(pair: ast.expr) -> str | None:
    match pair:
        case ast.Tuple(elts=[ast.Constant(value=str(text)), *_]):
            return text
    return None


def _family_problems(config: dict[str, Any]) -> list[str]:
    if config.get("is_encoder_decoder"):
        return ['model config: "is_encoder_decoder" is true; expected a decoder-only model']
    families = known_families()
    problem = family_problem(config["model_type"], *families) if families else None
    return [problem] if problem else []


def _shape_problems(config: dict[str, Any]) -> list[str]:
    where = "model config:"
    problems = []
    sizes: dict[str, int] = {}
    shape_keys = (
        *WIDTH_KEYS,
        *HEADS_KEYS,
        *LAYERS_KEYS,
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
    )
    for key in shape_keys:
        value = config.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            problems.append(f'model config: "{key}" = {value!r}; expected a whole number of at least 1')
        else:
            sizes[key] = value
    width_key = next((key for key in WIDTH_KEYS if key in sizes), None)
    heads_key = next((key for key in HEADS_KEYS if key in sizes), None)
    if width_key and heads_key and "head_dim" not in sizes and sizes[width_key] % sizes[heads_key]:
        problems.append(
            f'{where} "{heads_key}" = {sizes[heads_key]} does not divide "{width_key}" = {sizes[width_key]}'
        )
    groups = sizes.get("num_key_value_heads")
    if heads_key and groups and sizes[heads_key] % groups:
        problems.append(
            f'{where} "num_key_value_heads" = {groups} does not divide "{heads_key}" = {sizes[heads_key]}'
        )
    return problems


def _vocabulary_problems(config: dict[str, Any], needed: int | None) -> list[str]:
    size = config.get("vocab_size")
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        return [
            f'model config: "vocab_size" is missing or not a positive whole number (found {size!r}); '
            "give the size of the tokenizer's vocabulary"
        ]
    if needed is not None and size < needed:
        return [
            f'model config: "vocab_size" = {size} is smaller than the tokenizer\'s vocabulary of {needed}; '
            f'set "vocab_size" to at least {needed}'
        ]
    return []
