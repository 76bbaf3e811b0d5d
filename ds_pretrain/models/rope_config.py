"""The rotary positions of a phase, put into a model config, and what is wrong with them. No torch.

Transformers reads all that configs have called them into `rope_parameters`: one table with `rope_type`,
`rope_theta` and what the kind takes, or one such table for each kind of layer
(https://huggingface.co/docs/transformers/internal/rope_utils). That is what is changed here, and written.

Of per-layer tables only that of full attention is changed: a sliding window does not get longer with the
sequence. Gemma 3 raised its base from 10,000 to 1,000,000 in the global layers alone (arXiv:2503.19786).
"""

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from math import ceil
from typing import Any

from ds_pretrain.config.schema import RopeSection
from ds_pretrain.core.jsonl import show_value
from ds_pretrain.models.config_check import FOLLOWS_THE_LENGTH, read_config

FULL_ATTENTION = "full_attention"
WITH_ORIGINAL_LENGTH = ("yarn", "llama3", "longrope")  # what these make of a position depends on it
# The factors of Llama 3.1
# (https://github.com/meta-llama/llama-models/blob/main/models/llama3/model.py, apply_scaling).
LLAMA3_LOW_FREQ_FACTOR, LLAMA3_HIGH_FREQ_FACTOR = 1.0, 4.0
# Where tables in fp32 hold what fp64 gives, as a test finds: below, frequencies are nearly one, and the
# rounding of distant angles shows in all; above, the slowest, 1 / (theta factor), has no digits left in fp32.
LEAST_THETA, MOST_THETA, MOST_FACTOR = 2.0, 1e30, 1e6

_ORIGINAL = "original_max_position_embeddings"
_POSITIONS = "max_position_embeddings"
_OLD_KEYS = ("rope_scaling", "rope_theta", "rotary_emb_base")
# What belongs to a scaling; anything else in a table (theta, the rotated share) stays when the scaling goes.
_SCALING_KEYS = frozenset(
    f"rope_type type factor {_ORIGINAL} attention_factor beta_fast beta_slow mscale mscale_all_dim truncate "
    "low_freq_factor high_freq_factor short_factor long_factor".split()
)
_EXTENDS = {  # from the original length to factor times as much: what a phase may name besides kind and theta
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}
_KEYS_OF = {**_EXTENDS, "linear": ("factor",)}
_SCALING_FIELDS = ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor")


@dataclass(frozen=True)
class RopeState:
    """The rotary positions that a config gives, of full attention if layers differ."""

    kind: str
    theta: float
    factor: float | None
    original_max_position_embeddings: int | None  # the length that a scaling extends
    num_positions: int | None  # what the model was made for: max_position_embeddings
    table: Mapping[str, Any]  # as Transformers reads it; as it is written where that is not asked
    others: Mapping[str, Any]  # the tables of other kinds of layers; empty if one table is for all


def build_phase_models(
    model: Mapping[str, Any], phases: Iterable[tuple[str, RopeSection | None, int]]
) -> dict[str, dict[str, Any]]:
    """The config of each phase, by name: that of the phase before, with its own rotary positions and length.

    `phases` have a name, a change of rotary positions, and tokens of a sequence.
    """
    configs, config = {}, dict(model)
    for name, rope, seq_len in phases:
        config = build_rope_config(config, rope, seq_len)
        configs[name] = config
    return configs


def build_rope_config(model: Mapping[str, Any], rope: RopeSection | None, seq_len: int) -> dict[str, Any]:
    """The model config of a phase that has `rope` and sequences of `seq_len`; `model` is the phase's before.

    What `rope` does not name stays as it was. Positions become at least `seq_len`. A scaling keeps the length
    that it extends: what the phase names, else what the config has, else the positions before this change.
    `low_freq_factor` and `high_freq_factor` of llama3 are Llama 3.1's 1 and 4 unless given.
    A family without rotary positions comes back as it is. Expects that `check_rope_change` found none.
    """
    new: dict[str, Any] = deepcopy(dict(model))
    if not has_rope(model):
        return new
    before = read_rope_state(model)
    table = (
        _build_changed_table(before, rope)
        if rope is not None and rope.model_fields_set
        else dict(before.table)
    )
    keeps_length = False
    if before.num_positions is not None and seq_len > before.num_positions:
        new[_POSITIONS] = seq_len
        keeps_length = ((rope and rope.kind) or before.kind) in WITH_ORIGINAL_LENGTH
    if keeps_length:  # its default would be the new number of positions
        table.setdefault(_ORIGINAL, before.original_max_position_embeddings or before.num_positions)
    if keeps_length or table != before.table:
        for key in _OLD_KEYS:
            new.pop(key, None)
        new["rope_parameters"] = {**before.others, FULL_ATTENTION: table} if before.others else table
    return new


def describe_rope(model: Mapping[str, Any]) -> str:
    """One line: kind, theta, factor, the length that is extended, positions."""
    if not has_rope(model):
        return "no rotary positions"
    state = read_rope_state(model)
    words = [f"{state.kind}, theta {state.theta:,.10g}"]
    if state.factor is not None:
        base = state.original_max_position_embeddings or (
            state.num_positions if state.kind in WITH_ORIGINAL_LENGTH else None
        )
        words.append(f"factor {state.factor:g}" + (f" x {base:,} positions" if base else ""))
    if state.num_positions:
        words.append(f"{state.num_positions:,} positions")
    return ", ".join(words) + (" (full attention; other layers unchanged)" if state.others else "")


def has_rope(model: Mapping[str, Any]) -> bool:
    """True if the family has rotary positions."""
    parsed = read_config(model)
    if parsed is None:
        return any(model.get(key) for key in ("rope_parameters", *_OLD_KEYS))
    return bool(getattr(parsed, "rope_parameters", None))


def read_rope_state(model: Mapping[str, Any]) -> RopeState:
    """The rotary positions that `model` gives, as Transformers reads them."""
    parsed = read_config(model)

    def said(key: str) -> Any:
        return model.get(key) if parsed is None else getattr(parsed, key, None)

    tables = said("rope_parameters") or said("rope_scaling") or {}
    nested = {kind: dict(item) for kind, item in tables.items() if isinstance(item, Mapping)}
    table = dict(nested.get(FULL_ATTENTION, {})) if nested else dict(tables)
    old_theta = (said(key) for key in ("rope_theta", "rotary_emb_base"))
    return RopeState(
        kind=table.get("rope_type") or table.get("type") or "default",
        theta=float(table.get("rope_theta") or next(filter(None, old_theta), 10_000.0)),
        factor=table.get("factor"),
        # Phi-3 and others have it beside the table, where it takes precedence
        original_max_position_embeddings=said(_ORIGINAL) or table.get(_ORIGINAL),
        num_positions=said(_POSITIONS),
        table=table,
        others={kind: item for kind, item in nested.items() if kind != FULL_ATTENTION},
    )


def check_rope_change(
    model: Mapping[str, Any], rope: RopeSection | None, seq_len: int, where: str
) -> list[str]:
    """Find why a phase cannot have this rope and length on this model config; empty if it can.

    `where` names the setting, like "phases.long.rope"; `model` is the config of the phase before.
    """
    if not has_rope(model):
        if rope is None:
            return []
        return [
            f'{where}: "{model.get("model_type")}" has no rotary positions to change; remove it, or choose a '
            'family that has them, such as "llama" or "qwen3"'
        ]
    before = read_rope_state(model)
    if rope is None:
        return [*_check_length(model, rope, seq_len, where)]
    if (problem := _check_layout(model, before)) is not None:
        return [f"{where}: {problem}"]
    kind = rope.kind or before.kind
    problems = [
        *_check_values(rope.theta, rope.factor, f"{where}.theta", f"{where}.factor"),
        *_check_foreign_keys(rope, kind, where),
        *_check_factor(rope, before, kind, seq_len, where),
        *_check_original_length(rope, before, where),
    ]
    return problems or [*_check_length(model, rope, seq_len, where)]


def check_rope_values(model: Mapping[str, Any], name: str) -> list[str]:
    """Rotary parameters of a model config that no fp32 table holds; `name` names the file."""
    if not has_rope(model):
        return []
    try:
        state = read_rope_state(model)
        factor = None if state.factor is None else float(state.factor)
    except (AttributeError, TypeError, ValueError):
        keys = ("rope_theta", "rope_scaling", "rope_parameters")
        found = {key: model[key] for key in keys if key in model}
        return [f"{name}: rotary parameters should be numbers, found {show_value(found)}"]
    problems = [*_check_values(state.theta, factor, f'{name}: "rope_theta"', f'{name}: "factor"')]
    if factor is not None and factor < 1:
        problems.append(f'{name}: "factor" = {factor:g} of rotary positions; expected a number of at least 1')
    return problems


def warn_of_rope_change(
    model: Mapping[str, Any], rope: RopeSection | None, seq_len: int, where: str
) -> list[str]:
    """Warn of what is allowed and seldom meant: sequences beyond the model's positions without a scaling.

    Also a theta that falls. Raising it alone is a way to extend a context (arXiv:2309.16039) and is not
    warned of.
    """
    if not has_rope(model):
        return []
    before, after = read_rope_state(model), read_rope_state(build_rope_config(model, rope, seq_len))
    if after.theta < before.theta:
        return [
            f"{where}: theta falls from {before.theta:,.10g} to {after.theta:,.10g}: every frequency that "
            "was learned rises, and distant tokens look alike sooner; a longer context takes a higher theta, "
            "and a phase that names none keeps that of the phase before"
        ]
    if not before.num_positions or seq_len <= before.num_positions:
        return []
    extends = after.kind != "default" and (after.kind, after.factor) != (before.kind, before.factor)
    if after.theta > before.theta or extends or _reach(before) >= seq_len:
        return []
    return [
        f"{where}: sequences of {seq_len:,} on a model made for {before.num_positions:,} positions, "
        f"with theta {before.theta:,.10g} as before; a longer context usually needs a higher theta, or "
        'kind = "yarn" or "llama3" with a factor'
    ]


def _build_changed_table(before: RopeState, rope: RopeSection) -> dict[str, Any]:
    """The table after the change: another kind replaces the scaling, the same kind continues with it."""
    kind = rope.kind or before.kind
    kept = () if kind == before.kind else _SCALING_KEYS
    table = {key: value for key, value in before.table.items() if key not in (*kept, "type")}
    table |= {"rope_type": kind, "rope_theta": rope.theta or before.theta}
    if kind == "llama3":
        table.setdefault("low_freq_factor", LLAMA3_LOW_FREQ_FACTOR)
        table.setdefault("high_freq_factor", LLAMA3_HIGH_FREQ_FACTOR)
    for key in ("factor", "low_freq_factor", "high_freq_factor"):
        if (value := getattr(rope, key)) is not None:
            table[key] = value
    if kind in _EXTENDS:
        table[_ORIGINAL] = (
            rope.original_max_position_embeddings
            or before.original_max_position_embeddings
            or before.num_positions
        )
    return table


def _check_layout(model: Mapping[str, Any], read: RopeState) -> str | None:
    """Return why a change cannot be written into this config, or None if it can."""
    if model.get("rope_parameters") and model.get("rope_scaling"):
        return 'the model config has both "rope_parameters" and "rope_scaling"; keep the first alone'
    if read.others and not read.table:
        kinds = ", ".join(f'"{kind}"' for kind in read.others)
        return (
            f'"rope_parameters" has tables for {kinds} and none for "{FULL_ATTENTION}", the only one that a '
            "phase can change; leave its rotary positions as they are"
        )
    written = model.get("rope_scaling") or model.get("rope_parameters") or {}
    written = written.get(FULL_ATTENTION, written)
    said = {
        "rope_type": written.get("rope_type", written.get("type")),
        "rope_theta": written.get("rope_theta", model.get("rope_theta")),
        "factor": written.get("factor"),
    }
    for key, found in (("rope_type", read.kind), ("rope_theta", read.theta), ("factor", read.factor)):
        if said[key] is not None and said[key] != found:
            return (
                f'"{model.get("model_type")}" reads {key} = {found} where {said[key]} is meant; write '
                '"rope_parameters" into the model config, as Transformers does for this family'
            )
    return None


def _check_values(
    theta: float | None, factor: float | None, theta_name: str, factor_name: str
) -> Iterator[str]:
    """A base or a factor for which there are no sound tables."""
    if theta is not None and not LEAST_THETA <= theta <= MOST_THETA:
        yield (
            f"{theta_name} = {theta:g}: expected {LEAST_THETA:g} to {MOST_THETA:g}, where fp32 tables are "
            f"exact; common values are 10,000 to 1e8"
        )
    if factor is not None and factor > MOST_FACTOR:
        yield f"{factor_name} = {factor:g}: expected at most {MOST_FACTOR:g}, how many times longer it gets"


def _check_foreign_keys(rope: RopeSection, kind: str, where: str) -> Iterator[str]:
    """Keys that the kind does not read."""
    for key in _SCALING_FIELDS:
        if getattr(rope, key) is not None and key not in _KEYS_OF.get(kind, ()):
            takers = [f'"{name}"' for name, keys in _EXTENDS.items() if key in keys]
            whose = f'kind = "{kind}"' if rope.kind else f'the model\'s scaling ("{kind}")'
            yield f"{where}.{key} does not belong to {whose}; remove it, or set kind = {' or '.join(takers)}"


def _check_factor(rope: RopeSection, before: RopeState, kind: str, seq_len: int, where: str) -> Iterator[str]:
    """A scaling without its numbers, or with numbers that contradict one another."""
    base = (
        rope.original_max_position_embeddings
        or before.original_max_position_embeddings
        or before.num_positions
    )
    if kind in _EXTENDS and rope.factor is None and (kind != before.kind or before.factor is None):
        yield (
            f'{where}: kind = "{kind}" needs a factor'
            + (
                f"; the smallest for seq_len {seq_len:,} is {_format_smallest_factor(seq_len, base)}"
                if base
                else ""
            )
        )
    if kind in _EXTENDS and not base:
        yield (
            f'{where}: kind = "{kind}" needs original_max_position_embeddings, the positions before; the '
            f"model config has none"
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


def _check_original_length(rope: RopeSection, before: RopeState, where: str) -> Iterator[str]:
    """A scaling that starts from another length than the model had."""
    had = before.original_max_position_embeddings or before.num_positions
    if (
        rope.original_max_position_embeddings is None
        or had is None
        or rope.original_max_position_embeddings == had
    ):
        return
    key = _ORIGINAL if before.original_max_position_embeddings else _POSITIONS
    yield (
        f"{where}.original_max_position_embeddings = {rope.original_max_position_embeddings:,}, but the "
        f"model had {had:,} positions before it "
        f'was extended ("{key}"); remove original_max_position_embeddings, or correct "{key}" in the '
        f"model config"
    )


def _check_length(
    model: Mapping[str, Any], rope: RopeSection | None, seq_len: int, where: str
) -> Iterator[str]:
    """A scaling that does not reach the length, or that another number of positions would change."""
    before = read_rope_state(model)
    after = read_rope_state(build_rope_config(model, rope, seq_len))
    longer = before.num_positions is not None and seq_len > before.num_positions
    if after.kind in FOLLOWS_THE_LENGTH and (longer or (rope and rope.model_fields_set)):
        yield (
            f'{where}: the model\'s scaling "{after.kind}" recomputes its frequencies in each forward '
            f'pass and cannot change in a run; set kind = "yarn", "llama3" or "default"'
        )
        return
    scaling = (after.kind, after.factor, after.original_max_position_embeddings)
    if not longer and scaling == (before.kind, before.factor, before.original_max_position_embeddings):
        return  # Llama 3.1 has twice the positions that its factor says
    reach = _reach(after)
    if 0 < reach < seq_len and after.original_max_position_embeddings:
        yield (
            f"{where}: factor {after.factor:g} x {after.original_max_position_embeddings:,} original "
            f"positions = {reach:,.10g} are fewer than seq_len = {seq_len:,}; the smallest factor that does "
            f"is {_format_smallest_factor(seq_len, after.original_max_position_embeddings)}"
        )


def _reach(state: RopeState) -> float:
    """Positions that a scaling was made for; 0 if there is none."""
    base = state.original_max_position_embeddings or state.num_positions
    return state.factor * base if state.kind in _EXTENDS and state.factor and base else 0


def _format_smallest_factor(seq_len: int, original_max_position_embeddings: int) -> str:
    """The smallest factor that reaches `seq_len`, rounded up to a thousandth."""
    return f"{ceil(seq_len / original_max_position_embeddings * 1000 - 1e-9) / 1000:.10g}"
