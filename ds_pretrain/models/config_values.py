"""Values of a model config that its class, or the model built from it, would not take. No torch here."""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from math import inf
from typing import Any, TypeGuard

from ds_pretrain.core.text import shown
from ds_pretrain.models.family import Family, admits, in_words, known_activations, known_rope_types

_ACTIVATION_KEYS = ("hidden_act", "activation_function", "hidden_activation")
_EXPERTS_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")
_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "sliding_window")
# What each rotary scaling reads (https://huggingface.co/docs/transformers/internal/rope_utils).
_ROPE_NEEDS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
_ROPE_TYPE_OF_ALL = "default"


def unknown_keys(config: Mapping[str, Any], family: Family) -> Iterator[str]:
    """Keys that the family's config class would take without using them: most are misspelt."""
    for key in sorted(config.keys() - family.known_keys):
        close = get_close_matches(key, sorted(family.own_keys), n=1, cutoff=0.6)
        hint = f'did you mean "{close[0]}"?' if close else "remove it"
        yield f'{family.class_name} has no key "{key}"; {hint}'


def wrong_types(config: Mapping[str, Any], family: Family) -> dict[str, str]:
    """Key to problem, for each value of another type than its config class declares."""
    return {
        key: _wrong(key, value, in_words(family.types[key]))
        for key, value in config.items()
        if key in family.types and not admits(family.types[key], value)
    }


def wrong_amounts(config: Mapping[str, Any]) -> dict[str, str]:
    """Key to problem, for each value out of its range, or not among the names that there are."""
    checks: dict[str, tuple[bool, str]] = {}
    for key, value in config.items():
        if key in _ACTIVATION_KEYS and known_activations():
            checks[key] = (_is_in(value, known_activations()), _one_of(value, known_activations()))
        elif key == "initializer_range":
            checks[key] = (_is_number(value) and 0 < value <= 1, "a number above 0, at most 1, like 0.02")
        elif ("dropout" in key or "pdrop" in key) and _is_number(value):
            checks[key] = (0 <= value < 1, "a number from 0 to below 1")
        elif key.endswith(("_eps", "_epsilon")):
            checks[key] = (_is_number(value) and 0 <= value < inf, "a number of at least 0")
        elif key == "rope_theta":
            checks[key] = (_is_number(value) and 0 < value < inf, "a number above 0, like 10000.0")
        elif key in _LENGTH_KEYS and value is not None:
            checks[key] = (type(value) is int and value >= 1, "a whole number of at least 1")
    return {key: _wrong(key, config[key], expected) for key, (right, expected) in checks.items() if not right}


def special_token_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """A padding token that the vocabulary does not have: the embedding could not be made."""
    size, pad = config.get("vocab_size"), config.get("pad_token_id")
    if type(size) is int and type(pad) is int and not -size <= pad < size:
        yield (
            f'"pad_token_id" = {pad} is outside the vocabulary of {size}; '
            f"set it to null, or to an id below {size}"
        )


def expert_problems(config: Mapping[str, Any], family: Family) -> Iterator[str]:
    """More experts a token than there are."""
    taken = family.value(config, "num_experts_per_tok")
    for key in _EXPERTS_KEYS:
        there = family.value(config, key)
        if type(taken) is int and type(there) is int and key in family.own_keys and not 1 <= taken <= there:
            yield f'"num_experts_per_tok" = {taken}; expected 1 to "{key}" = {there}'
            return


def rope_problems(config: Mapping[str, Any], family: Family) -> Iterator[str]:
    """Rotary parameters that no rotary embedding can be made of."""
    if "rope_parameters" not in family.own_keys:
        return
    given = [(key, config[key]) for key in ("rope_parameters", "rope_scaling") if config.get(key)]
    tables = [(key, table) for key, value in given for table in _rope_tables(value)]
    for key, table in tables:
        yield from (f'"{key}": {problem}' for problem in _rope_table_problems(table, family))
    yield from _rotated_width_problems(config, [table for _, table in tables] or [{}], family)


def _rope_tables(value: Any) -> list[Mapping[str, Any]]:
    """The tables of rotary parameters: one, or one a kind of layer."""
    if not isinstance(value, Mapping):
        return []
    nested = [item for item in value.values() if isinstance(item, Mapping)]
    return nested or [value]


def _rope_table_problems(table: Mapping[str, Any], family: Family) -> Iterator[str]:
    yield from wrong_amounts({key: value for key, value in table.items() if key == "rope_theta"}).values()
    kind = table.get("rope_type", table.get("type", _ROPE_TYPE_OF_ALL))
    known = known_rope_types() | {_ROPE_TYPE_OF_ALL}
    own = isinstance(kind, str) and f'"{kind}"' in family.source
    if not _is_in(kind, known) and not own and len(known) > 1:
        yield _wrong("rope_type", kind, _one_of(kind, known))
    for key in _ROPE_NEEDS.get(kind, ()) if isinstance(kind, str) else ():
        value = table.get(key)
        if key.endswith(("short_factor", "long_factor")):
            if not (isinstance(value, list) and value and all(_is_number(item) for item in value)):
                yield _wrong(key, value, f'a list of numbers, for rope_type "{kind}"')
        elif not (_is_number(value) and (value >= 1 or key != "factor") and 0 < value < inf):
            least = "of at least 1" if key == "factor" else "above 0"
            yield _wrong(key, value, f'a number {least}, for rope_type "{kind}"')


def _rotated_width_problems(
    config: Mapping[str, Any], tables: list[Mapping[str, Any]], family: Family
) -> Iterator[str]:
    """Rotation turns pairs of a head's numbers, so their number must be even."""
    if "qk_rope_head_dim" in family.own_keys:  # only a part of its own is rotated
        width = family.value(config, "qk_rope_head_dim")
        if type(width) is int and width % 2:
            yield f'"qk_rope_head_dim" = {width} is odd; rotation turns pairs: make it even'
        return
    width = family.value(config, "head_dim")
    words = f'"head_dim" = {width}'
    if width is None:
        size, heads = family.value(config, "hidden_size"), family.value(config, "num_attention_heads")
        if not (type(size) is int and type(heads) is int and heads > 0 and size % heads == 0):
            return
        width, words = size // heads, f'"hidden_size" / "num_attention_heads" = {size // heads}'
    for table in tables:
        share = table.get("partial_rotary_factor", family.value(config, "partial_rotary_factor"))
        if share is None and "partial_rotary_factor" in family.source:
            continue  # the family's own code decides
        rotated = int(width * (1.0 if share is None else share)) if _is_number(share or 1) else 0
        if type(width) is int and rotated % 2:
            part = "" if share is None else f", of which {rotated} are rotated,"
            yield f"{words}{part} is odd; rotation turns pairs: make it even"
            return


def _is_in(value: Any, known: frozenset[str]) -> bool:
    return isinstance(value, str) and value in known


def _one_of(value: Any, known: frozenset[str]) -> str:
    close = get_close_matches(value, sorted(known), n=1) if isinstance(value, str) else []
    return f"one of {', '.join(sorted(known))}" + (f'; did you mean "{close[0]}"?' if close else "")


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _wrong(key: str, value: Any, expected: str) -> str:
    return f'"{key}" = {shown(value)}; expected {expected}'
