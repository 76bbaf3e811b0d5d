"""Changes of rotary positions that would not do what they say, found before a start. No torch here."""

from collections.abc import Iterator, Mapping
from math import ceil
from typing import Any

from ds_pretrain.config.schema import RopeSection
from ds_pretrain.core.text import shown
from ds_pretrain.models.rope_config import (
    FOLLOWS_THE_LENGTH,
    LLAMA3_HIGH_FREQ_FACTOR,
    LLAMA3_LOW_FREQ_FACTOR,
    RopeState,
    has_rope,
    layout_problem,
    reads_scalings,
    rope_state,
    with_rope,
)

_KEYS_OF = {  # what a phase may name besides kind and theta
    "default": (),
    "linear": ("factor",),
    "dynamic": (),
    "longrope": (),
    "yarn": ("factor", "original_length"),
    "llama3": ("factor", "original_length", "low_freq_factor", "high_freq_factor"),
}
_SCALING_FIELDS = ("factor", "original_length", "low_freq_factor", "high_freq_factor")
# Where tables in fp32 hold what fp64 gives (rope_check.py): below, frequencies are nearly one, and the
# rounding of distant angles shows in all; above, the slowest, 1 / (theta factor), has no digits left in fp32.
LEAST_THETA, MOST_THETA, MOST_FACTOR = 2.0, 1e30, 1e6
_EXTENDS = ("yarn", "llama3")  # from the original length to factor times as much


def rope_change_problems(
    model: Mapping[str, Any], rope: RopeSection | None, seq_len: int, where: str
) -> list[str]:
    """Why a phase cannot have this rope and length on this model config; empty if it can.

    `where` names the setting, like "phases.long.rope"; `model` is the config of the phase before.
    """
    if not has_rope(model):
        if rope is None:
            return []
        return [
            f'{where}: "{model.get("model_type")}" has no rotary positions to change; remove it, or choose a '
            'family that has them, such as "llama" or "qwen3"'
        ]
    before = rope_state(model)
    if rope is None:
        return [*_length_problems(model, rope, seq_len, where)]
    if (problem := layout_problem(model)) is not None:
        return [f"{where}: {problem}"]
    kind = rope.kind or before.kind
    problems = [
        *_value_problems(rope.theta, rope.factor, f"{where}.theta", f"{where}.factor"),
        *_foreign_keys(rope, before, kind, where),
        *_unread_kind(model, rope, where),
        *_factor_problems(rope, before, kind, seq_len, where),
        *_original_length_problems(rope, before, where),
    ]
    return problems or [*_length_problems(model, rope, seq_len, where)]


def rope_value_problems(model: Mapping[str, Any], name: str) -> list[str]:
    """Rotary parameters of a model config that no fp32 table holds; `name` names the file."""
    if not has_rope(model):
        return []
    try:
        state = rope_state(model)
        factor = None if state.factor is None else float(state.factor)
    except (TypeError, ValueError):
        keys = ("rope_theta", "rope_scaling", "rope_parameters")
        found = {key: model[key] for key in keys if key in model}
        return [f"{name}: rotary parameters should be numbers, found {shown(found)}"]
    return [*_value_problems(state.theta, factor, f'{name}: "rope_theta"', f'{name}: "factor"')]


def _value_problems(
    theta: float | None, factor: float | None, theta_name: str, factor_name: str
) -> Iterator[str]:
    """A base or a factor for which there are no sound tables."""
    if theta is not None and not LEAST_THETA <= theta <= MOST_THETA:
        yield (
            f"{theta_name} = {theta:g}: expected {LEAST_THETA:g} to {MOST_THETA:g}, where tables in fp32 are "
            "exact; usual are 10,000 to 1e8"
        )
    if factor is not None and factor > MOST_FACTOR:
        yield f"{factor_name} = {factor:g}: expected at most {MOST_FACTOR:g}, how many times longer it gets"


def rope_change_warnings(
    model: Mapping[str, Any], rope: RopeSection | None, seq_len: int, where: str
) -> list[str]:
    """What is allowed and seldom meant: sequences beyond the model's positions with nothing done for them.

    Also a theta that falls. Raising it alone is a way to extend a context (arXiv:2309.16039) and is not
    warned of.
    """
    if not has_rope(model):
        return []
    before, after = rope_state(model), rope_state(with_rope(model, rope, seq_len))
    if after.theta < before.theta:
        return [
            f"{where}: theta falls from {before.theta:,.10g} to {after.theta:,.10g}: every frequency that "
            "was learned rises, and distant tokens look alike sooner; a longer context takes a higher theta, "
            "and a phase that names none keeps that of the phase before"
        ]
    if not before.num_positions or seq_len <= before.num_positions:
        return []
    extends = after.kind != "default" and (after.kind, after.factor) != (before.kind, before.factor)
    if after.theta > before.theta or extends or _reach(before, before.num_positions) >= seq_len:
        return []
    return [
        f"{where}: sequences of {seq_len:,} on a model made for {before.num_positions:,} positions, "
        f"with theta {before.theta:,.10g} as before; a longer context usually needs a higher theta, or "
        'kind = "yarn" or "llama3" with a factor'
    ]


def _foreign_keys(rope: RopeSection, before: RopeState, kind: str, where: str) -> Iterator[str]:
    """Keys that the kind does not read."""
    given = [key for key in _SCALING_FIELDS if getattr(rope, key) is not None]
    for key in given:
        if key in _KEYS_OF.get(kind, ()):
            continue
        takers = [f'"{name}"' for name, keys in _KEYS_OF.items() if key in keys and name in _EXTENDS]
        whose = f'kind = "{kind}"' if rope.kind else f'the model\'s scaling ("{kind}")'
        yield f"{where}.{key} does not belong to {whose}; remove it, or set kind = {' or '.join(takers)}"


def _unread_kind(model: Mapping[str, Any], rope: RopeSection, where: str) -> Iterator[str]:
    """A scaling on a family whose code computes plain frequencies whatever the config says."""
    if rope.kind in _EXTENDS and not reads_scalings(model):
        yield (
            f'{where}.kind = "{rope.kind}": "{model.get("model_type")}" has no rotary scalings; raise theta, '
            "or choose another model"
        )


def _factor_problems(
    rope: RopeSection, before: RopeState, kind: str, seq_len: int, where: str
) -> Iterator[str]:
    """A scaling without its numbers, or with numbers that contradict one another."""
    if kind in _EXTENDS and rope.factor is None and (kind != before.kind or before.factor is None):
        base = rope.original_length or before.original_length or before.num_positions
        yield (
            f'{where}: kind = "{kind}" needs a factor'
            + (f"; the smallest for seq_len {seq_len:,} is {_smallest(seq_len, base)}" if base else "")
        )
    if kind in _EXTENDS and not (rope.original_length or before.original_length or before.num_positions):
        yield (
            f'{where}: kind = "{kind}" needs original_length, the positions before; the model config has none'
        )
    if kind == "llama3":
        same = before.table if before.kind == kind else {}
        low = rope.low_freq_factor or same.get("low_freq_factor", LLAMA3_LOW_FREQ_FACTOR)
        high = rope.high_freq_factor or same.get("high_freq_factor", LLAMA3_HIGH_FREQ_FACTOR)
        if low >= high:
            yield (
                f"{where}: low_freq_factor = {low:g} is not below high_freq_factor = {high:g}; Llama 3.1 has "
                f"{LLAMA3_LOW_FREQ_FACTOR:g} and {LLAMA3_HIGH_FREQ_FACTOR:g}"
            )


def _original_length_problems(rope: RopeSection, before: RopeState, where: str) -> Iterator[str]:
    """A scaling that starts from another length than the model had."""
    had = before.original_length or before.num_positions
    if rope.original_length is None or had is None or rope.original_length == had:
        return
    key = "original_max_position_embeddings" if before.original_length else "max_position_embeddings"
    yield (
        f"{where}.original_length = {rope.original_length:,}, but the model had {had:,} positions before it "
        f'was extended ("{key}"); remove original_length, or correct "{key}" in the model config'
    )


def _length_problems(
    model: Mapping[str, Any], rope: RopeSection | None, seq_len: int, where: str
) -> Iterator[str]:
    """A scaling that does not reach the length, or that another number of positions would change."""
    before = rope_state(model)
    after = rope_state(with_rope(model, rope, seq_len))
    longer = before.num_positions is not None and seq_len > before.num_positions
    if after.kind in FOLLOWS_THE_LENGTH and (longer or (rope and rope.model_fields_set)):
        yield (
            f'{where}: the model\'s scaling "{after.kind}" computes its frequencies anew in each forward, '
            'from the length of its sequences, and cannot change in a run; set kind = "yarn", "llama3" or '
            '"default"'
        )
        return
    scaling = (after.kind, after.factor, after.original_length)
    if not longer and scaling == (before.kind, before.factor, before.original_length):
        return  # Llama 3.1 has twice the positions that its factor says
    if after.kind in _EXTENDS and after.factor and after.original_length:
        reach = _reach(after, 0)
        if reach < seq_len:
            yield (
                f"{where}: factor {after.factor:g} x {after.original_length:,} original positions = "
                f"{reach:,.10g} are fewer than seq_len = {seq_len:,}; the smallest factor that does is "
                f"{_smallest(seq_len, after.original_length)}"
            )


def _reach(state: RopeState, default: int) -> float:
    """Positions that a scaling was made for."""
    base = state.original_length or state.num_positions
    return state.factor * base if state.kind in _EXTENDS and state.factor and base else default


def _smallest(seq_len: int, original_length: int) -> str:
    """The smallest factor that reaches `seq_len`, rounded up to a thousandth."""
    return f"{ceil(seq_len / original_length * 1000 - 1e-9) / 1000:.10g}"
