"""The rotary positions of a phase, put into a Hugging Face model config. No torch here.

A config says them in one of two layouts, and keeps the one that it has
(https://huggingface.co/docs/transformers/internal/rope_utils):

* new: `"rope_parameters": {"rope_type": ..., "rope_theta": ..., "factor": ...}`, or one such table for each
  kind of layer;
* old: `"rope_theta"` beside `"rope_scaling": {"rope_type" or "type": ..., "factor": ...}`.

Of per-layer tables only that of full attention is changed: a sliding window does not get longer with the
sequence. Gemma 3 raised its base from 10,000 to 1,000,000 in the global layers alone (arXiv:2503.19786).
"""

import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from math import prod
from typing import Any

from ds_pretrain.config.schema import RopeSection
from ds_pretrain.models.family import Family, read_family

FULL_ATTENTION = "full_attention"
WITH_ORIGINAL_LENGTH = ("yarn", "llama3", "longrope")  # what these make of a position depends on it
FOLLOWS_THE_LENGTH = (
    "dynamic",
    "longrope",
)  # these compute frequencies anew in each forward, from its length
# The factors of Llama 3.1
# (https://github.com/meta-llama/llama-models/blob/main/models/llama3/model.py, apply_scaling).
LLAMA3_LOW_FREQ_FACTOR, LLAMA3_HIGH_FREQ_FACTOR = 1.0, 4.0

_ORIGINAL = "original_max_position_embeddings"
_POSITIONS = "max_position_embeddings"
# What belongs to a scaling; anything else in a table (theta, the rotated share) stays when the scaling goes.
_SCALING_KEYS = frozenset(
    f"rope_type type factor {_ORIGINAL} attention_factor beta_fast beta_slow mscale mscale_all_dim truncate "
    "low_freq_factor high_freq_factor short_factor long_factor".split()
)


@dataclass(frozen=True)
class RopeState:
    """The rotary positions that a config gives, in whichever layout; of full attention if layers differ."""

    kind: str
    theta: float
    factor: float | None
    original_length: int | None  # as given, in the table or beside it
    num_positions: int | None  # what the model was made for: max_position_embeddings
    table: Mapping[str, Any]  # the table as it stands in the config


def with_rope(model: Mapping[str, Any], rope: RopeSection | None, seq_len: int) -> dict[str, Any]:
    """The model config of a phase that has `rope` and sequences of `seq_len`; `model` is the phase's before.

    What `rope` does not name stays as it was. Positions become at least `seq_len`. A scaling keeps the length
    that it extends: what the phase names, else what the config has, else the positions before this change.
    `low_freq_factor` and `high_freq_factor` of llama3 are Llama 3.1's 1 and 4 unless given.
    A family without rotary positions comes back as it is. Expects that `rope_change_problems` found none.
    """
    new: dict[str, Any] = deepcopy(dict(model))
    if not has_rope(model):
        return new
    before = rope_state(model)
    if rope is not None and rope.model_fields_set:
        _put(new, _changed_table(before, rope), rope.theta)
    if before.num_positions is not None and seq_len > before.num_positions:
        _keep_original_length(new, before.num_positions)
        new[_POSITIONS] = seq_len
    return new


def describe_rope(model: Mapping[str, Any]) -> str:
    """One line: kind, theta, factor, the length that is extended, positions."""
    if not has_rope(model):
        return "no rotary positions"
    state = rope_state(model)
    if not states_rope(model):
        return f"rotary parameters that {model['model_type']} fills in itself"
    words = [f"{state.kind}, theta {state.theta:,.10g}"]
    if state.factor is not None:
        base = state.original_length or (state.num_positions if state.kind in WITH_ORIGINAL_LENGTH else None)
        words.append(f"factor {state.factor:g}" + (f" x {base:,} positions" if base else ""))
    if state.num_positions:
        words.append(f"{state.num_positions:,} positions")
    return ", ".join(words) + (" (full attention; other layers unchanged)" if _is_per_layer(model) else "")


def has_rope(model: Mapping[str, Any]) -> bool:
    """True if the family reads rotary parameters from its config."""
    family = _family(model)
    if family is None:
        return any(model.get(key) for key in ("rope_parameters", "rope_scaling", "rope_theta"))
    return "rope_parameters" in family.own_keys


def states_rope(model: Mapping[str, Any]) -> bool:
    """False if the config says nothing and the family's class then fills in more than a default theta."""
    family = _family(model)
    if family is None or model.get("rope_parameters") or model.get("rope_scaling"):
        return True
    marks = ("if self.rope_parameters is None:", "_rope_type_labels = ")
    return not any(mark in family.source for mark in marks)


def reads_scalings(model: Mapping[str, Any]) -> bool:
    """True if the family's code has the scalings of Transformers."""
    family = _family(model)
    return family is None or "ROPE_INIT_FUNCTIONS" in family.source


def rope_state(model: Mapping[str, Any]) -> RopeState:
    """The rotary positions that `model` gives, as Transformers reads them."""
    family, table = _family(model), _table(model)
    theta = table.get("rope_theta") or model.get(_theta_key(family)) or _default_theta(family)
    # Phi-3 and others have it beside the table, where it takes precedence
    original = model.get(_ORIGINAL) or table.get(_ORIGINAL)
    return RopeState(
        kind=table.get("rope_type") or table.get("type") or "default",
        theta=float(theta),
        factor=table.get("factor"),
        original_length=original,
        num_positions=model.get(_POSITIONS) or _default_positions(family),
        table=table,
    )


def layout_problem(model: Mapping[str, Any]) -> str | None:
    """Why a change cannot be put into this config, or None if it can."""
    if model.get("rope_parameters") and model.get("rope_scaling"):
        return 'the model config has both "rope_parameters" and "rope_scaling"; keep the first alone'
    family, tables = _family(model), model.get("rope_parameters")
    if isinstance(tables, Mapping) and _nested(tables):
        if isinstance(tables.get(FULL_ATTENTION), Mapping):
            return None
        kinds = ", ".join(f'"{kind}"' for kind in tables)
        return (
            f'"rope_parameters" has tables for {kinds} and none for "{FULL_ATTENTION}", the only one that a '
            "phase can change; leave its rotary positions as they are"
        )
    if family is None:
        return None
    if not states_rope(model):
        return (
            f'"{model.get("model_type")}" fills in rotary parameters of its own; write them into the model '
            'config as "rope_parameters", so that a phase can change them'
        )
    if not _has_tables_per_layer(family):
        return None
    if (scaling := model.get("rope_scaling")) and isinstance(scaling, Mapping) and "rope_type" not in scaling:
        return f'"{model.get("model_type")}" does not read "type" in "rope_scaling"; write "rope_type"'
    if tables or not _reads_old_layout(family):
        return (
            f'"{model.get("model_type")}" has rotary parameters for each kind of layer; write them so into '
            f'the model config: "rope_parameters": {{"{FULL_ATTENTION}": {{...}}, '
            '"sliding_attention": {...}}'
        )
    return None


def _changed_table(before: RopeState, rope: RopeSection) -> dict[str, Any]:
    """The table after the change: another kind replaces the scaling, the same kind goes on with it."""
    kind = rope.kind or before.kind
    table = dict(before.table)
    if kind != before.kind:
        table = {key: value for key, value in table.items() if key not in _SCALING_KEYS} | {"rope_type": kind}
    if kind == "llama3":
        table.setdefault("low_freq_factor", LLAMA3_LOW_FREQ_FACTOR)
        table.setdefault("high_freq_factor", LLAMA3_HIGH_FREQ_FACTOR)
    for key in ("factor", "low_freq_factor", "high_freq_factor"):
        if (value := getattr(rope, key)) is not None:
            table[key] = value
    if kind in ("yarn", "llama3"):
        table[_ORIGINAL] = rope.original_length or before.original_length or before.num_positions
    return table


def _put(new: dict[str, Any], table: dict[str, Any], theta: float | None) -> None:
    """Write the changed table and theta into the config, in its layout."""
    key = _theta_key(_family(new))
    is_old = _is_old(new)
    if theta is not None:
        if not is_old or "rope_theta" in table:
            table["rope_theta"] = theta
        if is_old or key in new:
            new[key] = theta
    if is_old:
        if table.keys() - {"rope_type", "type"} or "default" not in (
            table.get("rope_type"),
            table.get("type"),
        ):
            if table:
                new["rope_scaling"] = table
        else:
            new["rope_scaling"] = None
    elif _nested(new.get("rope_parameters")):
        new["rope_parameters"] = {**new["rope_parameters"], FULL_ATTENTION: table}
    else:
        new["rope_parameters"] = {"rope_type": "default"} | table if "type" not in table else table


def _keep_original_length(new: dict[str, Any], num_positions: int) -> None:
    """Write down the length that a scaling extends before the positions, its default, are raised."""
    state = rope_state(new)
    if state.kind in WITH_ORIGINAL_LENGTH and state.original_length is None:
        _put(new, {**state.table, _ORIGINAL: num_positions}, None)


def _table(model: Mapping[str, Any]) -> dict[str, Any]:
    given = model.get("rope_scaling") or model.get("rope_parameters")
    if isinstance(given, Mapping) and _nested(given):
        given = given.get(FULL_ATTENTION)
    return dict(given) if isinstance(given, Mapping) else {}


def _nested(tables: Any) -> bool:
    return isinstance(tables, Mapping) and any(isinstance(item, Mapping) for item in tables.values())


def _is_old(model: Mapping[str, Any]) -> bool:
    """True for the old layout, and where nothing is said and the new one would need every layer."""
    if model.get("rope_parameters"):
        return False
    family = _family(model)
    has_old_keys = bool(model.get("rope_scaling")) or _theta_key(family) in model or "rope_scaling" in model
    return has_old_keys or (family is not None and _has_tables_per_layer(family))


def _is_per_layer(model: Mapping[str, Any]) -> bool:
    family = _family(model)
    return _nested(model.get("rope_parameters")) or (family is not None and _has_tables_per_layer(family))


def _has_tables_per_layer(family: Family) -> bool:
    return f'"{FULL_ATTENTION}": {{' in family.source


def _reads_old_layout(family: Family) -> bool:
    """True if a flat `rope_scaling` reaches the full-attention layers, and these alone."""
    reached = set(re.findall(r'rope_parameters\["(\w+)"\]\.update\(rope_scaling\)', family.source))
    return reached == {FULL_ATTENTION}


def _theta_key(family: Family | None) -> str:
    """GPT-NeoX calls it rotary_emb_base."""
    found = family and re.search(r'kwargs\.pop\("(\w+)", self\.default_theta\b', family.source)
    return found[1] if found else "rope_theta"


def _default_theta(family: Family | None) -> float:
    found = family and re.search(
        rf'default_theta = (?:\{{"(?:global|{FULL_ATTENTION})": )?([\d_.e]+)', family.source
    )
    return float(found[1]) if found else 10_000.0


def _default_positions(family: Family | None) -> int | None:
    """As its class declares them, perhaps as a product like 4096 * 32."""
    declared = family and re.search(
        rf"{_POSITIONS}: int(?: \| None)? = ([\d_]+(?: \* [\d_]+)*)", family.source
    )
    return prod(int(factor) for factor in declared[1].split(" * ")) if declared else None


def _family(model: Mapping[str, Any]) -> Family | None:
    name = model.get("model_type")
    return read_family(name) if isinstance(name, str) else None
