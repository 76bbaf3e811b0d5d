"""What can be found wrong with a model config without torch or transformers, in milliseconds."""

import ast
from collections.abc import Collection, Iterator
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, TypeGuard

from ds_pretrain.core.errors import InputError
from ds_pretrain.core.text import parse_json, shown
from ds_pretrain.models.config_values import (
    expert_problems,
    rope_problems,
    special_token_problems,
    unknown_keys,
    wrong_amounts,
    wrong_types,
)
from ds_pretrain.models.family import read_family, transformers_folder

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


# How a problem names the config when nobody says which file it is.
NAME = "model config"


def parse_model_config(config_text: str, name: str = NAME) -> dict[str, Any]:
    """The JSON object of a Hugging Face `config.json`, with a `model_type`; `name` is the file's.

    Raises:
        InputError: not JSON, not an object, or no model_type.
    """
    config = parse_json(config_text, name)
    if not isinstance(config.get("model_type"), str):
        raise InputError(
            f'{name}: "model_type" is missing or not a text (found {shown(config.get("model_type"))}); '
            'name the family, for example "llama", "qwen3" or "gpt2"'
        )
    return config


def check_model(
    config_text: str, *, qk_norm: bool = False, vocab_size_needed: int | None = None, name: str = NAME
) -> list[str]:
    """All problems of a model config that show without an engine; empty if none.

    `vocab_size_needed` is one more than the largest token id of the data; `name` names the file in messages.
    """
    try:
        config = parse_model_config(config_text, name)
    except InputError as error:
        return list(error.problems)
    if problems := _family_problems(config, name):
        return problems
    by_key = _shape_problems(config) | wrong_amounts(config)
    found = [*_division_problems(config, by_key.keys()), *_vocabulary_problems(config, vocab_size_needed)]
    if family := read_family(config["model_type"]):
        by_key = wrong_types(config, family) | by_key
        found += [*unknown_keys(config, family), *expert_problems(config, family)]
        found += rope_problems(config, family)
    by_key.pop("vocab_size", None)  # told with what it has to be
    found = [*by_key.values(), *found, *special_token_problems(config)]
    problems = [f"{name}: {problem}" for problem in dict.fromkeys(found)]
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


def family_problem(
    family: str, causal: frozenset[str], masked: frozenset[str], name: str = NAME
) -> str | None:
    """Why `family` is not a decoder-only language model, or None if it is one."""
    if family not in causal:
        close = get_close_matches(family, sorted(causal), n=3, cutoff=0.6)
        hint = (
            f"did you mean {', '.join(repr(c) for c in close)}?"
            if close
            else "see the model list of Transformers"
        )
        return f'{name}: model_type "{family}" is no causal language model of Transformers; {hint}'
    if family in masked:
        return (
            f'{name}: model_type "{family}" is an encoder or encoder-decoder family; '
            'expected a decoder-only one, such as "llama", "qwen3" or "gpt2"'
        )
    return None


@lru_cache(maxsize=1)
def known_families() -> tuple[frozenset[str], frozenset[str]] | None:
    """Causal families, and masked or encoder-decoder ones: from Transformers' source, without its import."""
    folder = transformers_folder()
    if folder is None:
        return None
    source = folder / "models" / "auto" / "modeling_auto.py"
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


def _family_problems(config: dict[str, Any], name: str) -> list[str]:
    if config.get("is_encoder_decoder"):
        return [f'{name}: "is_encoder_decoder" is true; expected a decoder-only model']
    families = known_families()
    problem = family_problem(config["model_type"], *families, name) if families else None
    return [problem] if problem else []


def _shape_problems(config: dict[str, Any]) -> dict[str, str]:
    """Key to problem, for each size that is no size."""
    sizes = (*WIDTH_KEYS, *HEADS_KEYS, *LAYERS_KEYS, "num_key_value_heads", "head_dim", "intermediate_size")
    return {
        key: f'"{key}" = {shown(config[key])}; expected a whole number of at least 1'
        for key in sizes
        if config.get(key) is not None and not _is_size(config[key])
    }


def _division_problems(config: dict[str, Any], wrong: Collection[str]) -> Iterator[str]:
    """Sizes that must divide one another, as far as both are sizes."""
    sizes = {key: value for key, value in config.items() if _is_size(value) and key not in wrong}
    width_key = next((key for key in WIDTH_KEYS if key in sizes), None)
    heads_key = next((key for key in HEADS_KEYS if key in sizes), None)
    if width_key and heads_key and "head_dim" not in sizes and sizes[width_key] % sizes[heads_key]:
        yield f'"{heads_key}" = {sizes[heads_key]} does not divide "{width_key}" = {sizes[width_key]}'
    groups = sizes.get("num_key_value_heads")
    if heads_key and groups and sizes[heads_key] % groups:
        yield f'"num_key_value_heads" = {groups} does not divide "{heads_key}" = {sizes[heads_key]}'


def _vocabulary_problems(config: dict[str, Any], needed: int | None) -> Iterator[str]:
    size = config.get("vocab_size")
    if not _is_size(size):
        yield (
            f'"vocab_size" is missing or not a positive whole number (found {shown(size)}); '
            "give the size of the tokenizer's vocabulary"
        )
    elif needed is not None and size < needed:
        yield (
            f'"vocab_size" = {size} is smaller than the tokenizer\'s vocabulary of {needed}; '
            f'set "vocab_size" to at least {needed}'
        )


def _is_size(value: Any) -> TypeGuard[int]:
    return type(value) is int and value >= 1
