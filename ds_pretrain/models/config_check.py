"""Checks a model config before a model is built: keys, values, masks, sequence parallelism.

Sizes are compared by arithmetic. What a family reads, and what it takes where a config is silent, is asked of
its Transformers config class, which is imported inside functions alone: without Transformers, and inside
`hide_transformers`, arithmetic is all that is done.
"""

import inspect
import json
import logging
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cache, lru_cache
from importlib import import_module
from importlib.util import find_spec
from math import inf
from typing import Any, TypeGuard

from ds_pretrain.core.errors import InputError
from ds_pretrain.core.jsonl import show_value
from ds_pretrain.core.text import parse_json

# Families whose attention calls q_proj and k_proj, splits the result into heads and rotates: a per-head norm
# fits in between. A test reads their source and fails if one of them changes.
QK_NORM_ADDABLE = frozenset([
    "arcee", "cwm", "granite", "granitemoe", "helium", "llama", "ministral", "mistral", "mixtral", "qwen2",
    "qwen2_moe", "seed_oss", "smollm3",
])  # fmt: skip
# Families that have it natively, some behind a key of their config.
QK_NORM_NATIVE = frozenset([
    "apertus", "dots1", "exaone4", "flex_olmo", "gemma3_text", "hunyuan_v1_dense", "hunyuan_v1_moe", "lfm2",
    "lfm2_moe", "minimax_m2", "nanochat", "olmo2", "olmo3", "olmo_hybrid", "olmoe", "qwen3", "qwen3_moe",
    "qwen3_next",
])  # fmt: skip
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
EXPERTS_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")
_SIZE_KEYS = (*WIDTH_KEYS, *HEADS_KEYS, *LAYERS_KEYS, "num_key_value_heads", "head_dim", "intermediate_size")
_ACTIVATION_KEYS = ("hidden_act", "activation_function", "hidden_activation")
_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "sliding_window")

# Keys that config classes do not declare: the code of models reads the first, nothing reads the others.
_UNDECLARED = frozenset([
    "head_dim", "layer_types", "output_router_logits", "router_bias", "tie_word_embeddings",
    "use_bidirectional_attention", "auto_map", "gradient_checkpointing", "_attn_implementation_autoset",
])  # fmt: skip

MASK_KERNELS = ("eager", "sdpa")  # take any mask
FLASH_KERNELS = ("flash_attention_2",)  # take lengths of documents
LAYER_KINDS = ("full_attention", "sliding_attention")
# These compute rotary frequencies again in each forward, from its length.
FOLLOWS_THE_LENGTH = ("dynamic", "longrope")
_BYTES = {"bf16": 2, "fp32": 4}
_MUCH_BYTES = 1 << 30
_OTHER_SIZE = "take another sequence_parallel_size, or delete it"

# How a problem names the config when nobody says which file it is.
NAME = "model config"

_asks_transformers = True


@contextmanager
def hide_transformers() -> Iterator[None]:
    """Inside it, configs are checked as on a machine without Transformers: in milliseconds."""
    global _asks_transformers
    before, _asks_transformers = _asks_transformers, False
    try:
        yield
    finally:
        _asks_transformers = before


def uses_transformers() -> bool:
    """True if Transformers and torch can be imported, and may be."""
    return _asks_transformers and _can_import()


@cache
def _can_import() -> bool:
    try:
        for library in ("transformers", "torch"):
            import_module(library)
    except (ImportError, OSError):  # OSError: a library that torch links is missing
        return False
    return True


def parse_model_config(config_text: str, name: str = NAME) -> dict[str, Any]:
    """The JSON object of a Hugging Face `config.json`, with a `model_type`; `name` is the file's.

    Raises:
        InputError: not JSON, not an object, or no model_type.
    """
    config = parse_json(config_text, name)
    if not isinstance(config.get("model_type"), str):
        raise InputError(
            f'{name}: "model_type" is missing or not a text (found {show_value(config.get("model_type"))}); '
            'name the family, for example "llama", "qwen3" or "gpt2"'
        )
    return config


def build_model_config(config_text: str, *, qk_norm: bool = False, name: str = NAME) -> Any:
    """The Transformers config of a decoder-only model, every key of it understood. `name` is the file's.

    Raises:
        InputError: all problems at once.
    """
    if problems := check_model(config_text, qk_norm=qk_norm, name=name):
        raise InputError(problems)
    config = deepcopy(_read(json.dumps(parse_model_config(config_text, name))).config)
    config.use_cache = False
    return config


def read_config(config: Mapping[str, Any]) -> Any | None:
    """A config as Transformers reads it, with all that it takes by default; it is shared: do not change it.

    None where its class refuses it, or where Transformers is not asked.
    """
    if not uses_transformers() or not isinstance(config.get("model_type"), str):
        return None
    return _read(json.dumps(config)).config


def check_model(config_text: str, *, qk_norm: bool = False, name: str = NAME) -> list[str]:
    """All problems of a model config that show without a build. `name` names the file in messages."""
    try:
        config = parse_model_config(config_text, name)
    except InputError as error:
        return list(error.problems)
    if config.get("is_encoder_decoder"):
        return [f'{name}: "is_encoder_decoder" is true; expected a decoder-only model']
    reading = _read(json.dumps(config)) if uses_transformers() else _Reading(None, {}, (), ())
    if reading.family_problems:
        return [f"{name}: {problem}" for problem in reading.family_problems]
    by_key = reading.by_key | _find_wrong_amounts(config)
    found = [
        *_check_divisions(config, by_key.keys(), reading.config),
        *_check_vocabulary(config),
    ]
    by_key.pop("vocab_size", None)  # told with what it has to be
    found = [*by_key.values(), *found, *_check_special_tokens(config), *_check_experts(reading.config)]
    found += [
        problem for key, problem in reading.problems if key or not found
    ]  # a refusal repeats what is found
    problems = [f"{name}: {problem}" for problem in dict.fromkeys(found)]
    if qk_norm and (problem := check_qk_norm(config)):
        problems.append(problem)
    return problems


def check_qk_norm(config: Mapping[str, Any]) -> str | None:
    """Return why this family cannot have QK-norm, or None if it can."""
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


@dataclass(frozen=True)
class _Reading:
    """A model config as the family's config class reads it."""

    config: Any  # None if it is refused
    by_key: dict[str, str]  # key to problem, for values of another type than declared
    problems: tuple[tuple[str | None, str], ...]  # unknown keys by name; None: refused as a whole
    family_problems: tuple[str, ...]  # no model of ours is made of such a family


@lru_cache(maxsize=64)
def _read(config_text: str) -> _Reading:
    """Construct the config with its class; leave out one by one the keys whose types it refuses."""
    from huggingface_hub.errors import StrictDataclassFieldValidationError

    config = json.loads(config_text, object_hook=_decode_item)
    if problem := _check_family(config["model_type"]):
        return _Reading(None, {}, (), (problem,))
    kind = _get_config_class(config["model_type"])
    given = _drop_foreign_tokens(kind, config)
    by_key = dict(_find_unknown_activations(config))
    problems: list[tuple[str | None, str]] = [*_find_unknown_keys(given, kind)]
    parsed, refusal = None, None
    while parsed is None and refusal is None:
        try:
            with _silence_transformers():
                parsed = kind(**deepcopy(given))
        except Exception as error:  # each config class raises what it likes
            keys = _find_keys(kind, str(error)) & given.keys()
            if not isinstance(error, StrictDataclassFieldValidationError) or not keys:
                refusal = f"refused by {kind.__name__}: {error}"
                problems.append((None, refusal))
            for key in keys if refusal is None else ():
                reason = str(error).rpartition("TypeError: ")[2].partition(". Errors: ")[0]
                by_key[key] = f'"{key}" = {show_value(given.pop(key))}: refused by {kind.__name__}: {reason}'
    return _Reading(None if by_key else parsed, by_key, tuple(problems), ())


def _decode_item(item: dict[str, Any]) -> Any:
    """Transformers writes an infinite number as `{"__float__": "Infinity"}`."""
    return float(item["__float__"]) if item.keys() == {"__float__"} else item


def _find_keys(kind: Any, message: str) -> set[str]:
    """The names of the field that a message is about."""
    found = re.search(r"field '(\w+)'", message)
    return (
        {found[1], *(key for key, name in kind.attribute_map.items() if name == found[1])} if found else set()
    )


def _get_config_class(family: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[family]


@contextmanager
def _silence_transformers() -> Iterator[None]:
    """Keep Transformers from saying on every rank, and at every look, what is a problem here or is none."""
    log = logging.getLogger("transformers")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def _check_family(family: str) -> str | None:
    """Return why `family` is not a decoder-only language model of text, or None if it is one."""
    from transformers.models.auto import modeling_auto as auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, AutoConfig

    causal = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if family not in causal:
        close = get_close_matches(family, sorted(causal), n=3, cutoff=0.6)
        hint = (
            f"did you mean {', '.join(map(repr, close))}?" if close else "see the model list of Transformers"
        )
        return f'model_type "{family}" is not a causal language model of Transformers; {hint}'
    if family in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES or family in (
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    ):
        return (
            f'model_type "{family}" is an encoder or encoder-decoder family; '
            'expected a decoder-only one, such as "llama", "qwen3" or "gpt2"'
        )
    parts = [getattr(part, "config_class", part) for part in CONFIG_MAPPING[family].sub_configs.values()]
    if any(part is AutoConfig or hasattr(part, "vocab_size") for part in parts):  # others: dbrx, mpt
        hint = f'use "{family}_text"' if f"{family}_text" in CONFIG_MAPPING else "use a text-only family"
        return f'model_type "{family}" is a composite (multimodal) model; {hint}'
    return None


def _drop_foreign_tokens(kind: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """The config's own keys, and no special token that only the class default names and the vocabulary lacks.

    GPT-2's 50256 in a vocabulary of 512 would make Transformers warn on every rank.
    """
    given = {key: value for key, value in config.items() if key != "model_type"}
    size = config.get("vocab_size")
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        default = getattr(kind, key, None)
        if key not in given and _is_size(size) and isinstance(default, int) and default >= size:
            given[key] = None
    return given


def _find_unknown_keys(given: Mapping[str, Any], kind: Any) -> Iterator[tuple[str, str]]:
    """Keys that a config class takes without using them: most are misspelled.

    Such a key is left as an attribute, which is neither declared, nor read by a method, nor there without it.
    """
    own = {field.name for field in fields(kind)} | kind.attribute_map.keys()
    methods = (
        method for base in kind.__mro__ for method in vars(base).values() if inspect.isfunction(method)
    )
    read = {word for method in methods for word in inspect.unwrap(method).__code__.co_consts}
    odd = {key: value for key, value in given.items() if key not in own | read | _UNDECLARED}
    try:
        with _silence_transformers():
            left, without = (vars(kind(**odd)), kind()) if odd else ({}, None)
    except Exception:  # a class that needs some key, or reads one of these after all
        return
    for key in sorted(odd.keys() & left):
        if not hasattr(without, key):
            close = get_close_matches(key, sorted(own), n=1, cutoff=0.6)
            hint = f'did you mean "{close[0]}"?' if close else "remove it"
            yield key, f'{kind.__name__} has no key "{key}"; {hint}'


def _find_unknown_activations(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    from transformers.activations import ACT2CLS

    for key in _ACTIVATION_KEYS:
        name = config.get(key)
        if isinstance(name, str) and name not in ACT2CLS:
            close = get_close_matches(name, sorted(ACT2CLS), n=1)
            hint = f'; did you mean "{close[0]}"?' if close else ""
            yield key, f'"{key}" = {show_value(name)}; expected one of {", ".join(sorted(ACT2CLS))}{hint}'


def _find_wrong_amounts(config: Mapping[str, Any]) -> dict[str, str]:
    """Key to problem, for each value that is out of its range."""
    checks: dict[str, tuple[bool, str]] = {}
    for key, value in config.items():
        if key in _SIZE_KEYS and value is not None:
            checks[key] = (_is_size(value) or isinstance(value, list), "a whole number of at least 1")
        elif key == "initializer_range":
            checks[key] = (_is_number(value) and 0 < value <= 1, "a number above 0, at most 1, like 0.02")
        elif ("dropout" in key or "pdrop" in key) and _is_number(value):
            checks[key] = (0 <= value < 1, "a number from 0 to below 1")
        elif key.endswith(("_eps", "_epsilon")):
            checks[key] = (
                value is None or (_is_number(value) and 0 <= value < inf),
                "a number of at least 0",
            )
        elif key == "sliding_window" and config.get("use_sliding_window") is False:
            continue
        elif key in _LENGTH_KEYS and value is not None:
            checks[key] = (_is_size(value), "a whole number of at least 1")
    return {
        key: f'"{key}" = {show_value(config[key])}; expected {expected}'
        for key, (right, expected) in checks.items()
        if not right
    }


def _check_divisions(config: Mapping[str, Any], wrong: Collection[str], parsed: Any) -> Iterator[str]:
    """Sizes that must divide one another, as far as both are sizes.

    Families with heads of another width than width / heads say so to Transformers, which then accepts them.
    """
    sizes = {key: value for key, value in config.items() if _is_size(value) and key not in wrong}
    width_key = next((key for key in WIDTH_KEYS if key in sizes), None)
    heads_key = next((key for key in HEADS_KEYS if key in sizes), None)
    divides = parsed is not None or "head_dim" in sizes
    if width_key and heads_key and not divides and sizes[width_key] % sizes[heads_key]:
        yield f'"{heads_key}" = {sizes[heads_key]} does not divide "{width_key}" = {sizes[width_key]}'
    groups = sizes.get("num_key_value_heads")
    if heads_key and groups and sizes[heads_key] % groups:
        yield f'"num_key_value_heads" = {groups} does not divide "{heads_key}" = {sizes[heads_key]}'


def _check_vocabulary(config: Mapping[str, Any]) -> Iterator[str]:
    size = config.get("vocab_size")
    if not _is_size(size):
        yield (
            f'"vocab_size" is missing or not a positive whole number (found {show_value(size)}); '
            "give the size of the tokenizer's vocabulary"
        )


def _check_special_tokens(config: Mapping[str, Any]) -> Iterator[str]:
    """A padding token that the vocabulary does not have: the embedding could not be made."""
    size, pad = config.get("vocab_size"), config.get("pad_token_id")
    if type(size) is int and type(pad) is int and not -size <= pad < size:
        yield (
            f'"pad_token_id" = {pad} is outside the vocabulary of {size}; '
            f"set it to null, or to an id below {size}"
        )


def _check_experts(parsed: Any) -> Iterator[str]:
    """More experts a token than there are."""
    taken = getattr(parsed, "num_experts_per_tok", None)
    key = next((key for key in EXPERTS_KEYS if _is_size(getattr(parsed, key, None))), None)
    if key and type(taken) is int and not 1 <= taken <= getattr(parsed, key):
        yield f'"num_experts_per_tok" = {taken}; expected 1 to "{key}" = {getattr(parsed, key)}'


def check_masking(config: Mapping[str, Any], attention: str | None) -> list[str]:
    """Find why `model.mask_documents` would not hold for a model config and a kernel.

    `refuse_leaks` of `attention` tries the real model.
    """
    found = [*_check_kernel(attention), *_check_mixing(config)]
    return [f"model.mask_documents = true: {problem}" for problem in found]


def warn_of_large_masks(
    config: Mapping[str, Any], attention: str | None, rows: int, seq_len: int, dtype: str, where: str
) -> list[str]:
    """Warn if the masks of a micro-batch of `rows` sequences take much memory, at T x T entries each.

    `dtype` is that of the activations, "bf16" or "fp32".
    """
    if attention in FLASH_KERNELS:
        return []
    num_masks = len(set(_list_layer_kinds(read_config(config)))) or 1
    num_bytes = num_masks * rows * seq_len**2 * _BYTES[dtype]
    if num_bytes < _MUCH_BYTES:
        return []
    masks = "masks" if num_masks > 1 else "a mask"
    return [
        f"{where}: model.mask_documents = true holds {masks} of {num_masks} x {rows:,} x {seq_len:,} x "
        f"{seq_len:,} in {dtype}, {num_bytes / 2**30:,.1f} GiB a micro-batch; "
        'model.attention = "flash_attention_2" holds none'
    ]


def _list_layer_kinds(parsed: Any) -> list[str]:
    """The kind of each layer, by Transformers' names; empty if all are alike."""
    return list(getattr(parsed, "layer_types", None) or ())


def _describe_foreign_kinds(parsed: Any) -> str:
    """The kinds of layers that are not plain attention, in words."""
    return ", ".join(sorted({str(kind) for kind in _list_layer_kinds(parsed)} - set(LAYER_KINDS)))


def _accepts_positions(parsed: Any) -> bool:
    """True if the family's model takes positions and a mask from outside."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    forward = MODEL_FOR_CAUSAL_LM_MAPPING[type(parsed)].forward
    return {"position_ids", "attention_mask"} <= inspect.signature(forward).parameters.keys()


def _check_kernel(attention: str | None) -> Iterator[str]:
    if attention in FLASH_KERNELS and find_spec("flash_attn") is None:
        yield (
            f'attention = "{attention}" needs the package flash-attn, which is not installed; install it, or '
            'set attention = "sdpa" (which holds a mask of seq_len x seq_len)'
        )
    elif attention is not None and attention not in (*MASK_KERNELS, *FLASH_KERNELS):
        known = ", ".join(f'"{kernel}"' for kernel in (*MASK_KERNELS, *FLASH_KERNELS))
        yield f'attention = "{attention}" has not been shown to keep documents apart; use one of {known}'


def _check_mixing(config: Mapping[str, Any]) -> Iterator[str]:
    """Find layers that mix tokens other than by masked attention, or place them by something else."""
    if (parsed := read_config(config)) is None:
        return
    family = parsed.model_type
    remedy = "use a family of plain attention such as llama, qwen3 or gpt2, or set mask_documents = false"
    if kinds := _describe_foreign_kinds(parsed):
        yield f'"{family}" has layers of kind {kinds}, through which documents see one another; {remedy}'
    elif not _accepts_positions(parsed):
        yield f'"{family}" does not accept position_ids or an attention mask; {remedy}'
    elif getattr(parsed, "alibi", False):
        yield f'"{family}" with "alibi" counts distances from the mask, not from positions; {remedy}'


def check_sequence_parallel_attention(config: Mapping[str, Any], num_sharing: int, longest: int) -> list[str]:
    """Find why `num_sharing` ranks cannot share a model's sequences of up to `longest` tokens.

    The exchange of tokens for heads leaves attention causal over whole rows and nothing else: no mask, no
    window. `refuse_unlike` of the engine tries the model.
    """
    parsed = read_config(config)
    windows = _check_windows(longest, parsed) if parsed is not None else ()
    return [*_check_heads(config, parsed, num_sharing), *windows]


def _check_heads(config: Mapping[str, Any], parsed: Any, num_sharing: int) -> Iterator[str]:
    """Check that the ranks can divide the attention heads."""
    key = next((key for key in HEADS_KEYS if key in config), HEADS_KEYS[0])
    heads, pairs = (getattr(parsed, k, config.get(k)) for k in (key, "num_key_value_heads"))
    if _is_size(heads) and heads % num_sharing:
        yield f'which does not divide "{key}" = {heads} of the model; {_OTHER_SIZE}'
    if _is_size(pairs) and pairs % num_sharing and num_sharing % pairs:
        yield (
            f'which neither divides "num_key_value_heads" = {pairs} of the model nor is divided by it; '
            f"{_OTHER_SIZE}"
        )


def _check_windows(longest: int, parsed: Any) -> Iterator[str]:
    """Find layers that mix tokens other than by causal attention, or depend on the input's length."""
    family, window = parsed.model_type, getattr(parsed, "sliding_window", None)
    if _describe_foreign_kinds(parsed):
        yield f'and "{family}" has layers other than attention, which need whole sequences; {_OTHER_SIZE}'
    elif not _accepts_positions(parsed) or getattr(parsed, "alibi", False):
        yield f'and "{family}" does not accept position_ids, which sequence parallelism needs; {_OTHER_SIZE}'
    elif type(window) is int and window < longest and getattr(parsed, "use_sliding_window", True):
        yield (
            f'and "{family}" attends in a window of {window:,} tokens, shorter than the longest seq_len '
            f'({longest:,}), which would be ignored; set "sliding_window" to null, or {_OTHER_SIZE}'
        )
    tables = getattr(parsed, "rope_parameters", None) or {}
    for table in [table for table in tables.values() if isinstance(table, Mapping)] or [tables]:
        if (kind := table.get("rope_type")) in FOLLOWS_THE_LENGTH:
            yield (
                f'and rotary positions of kind "{kind}" follow the length of what a rank sees of a row; use '
                f'"yarn", "llama3" or "default", or {_OTHER_SIZE}'
            )


def _is_size(value: Any) -> TypeGuard[int]:
    return type(value) is int and value >= 1


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
