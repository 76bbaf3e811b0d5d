"""What configs and identities mean, however they are written: those that compute the same compare equal."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ds_pretrain.config.plan import Plan
from ds_pretrain.config.schema import RopeSection
from ds_pretrain.core.text import changed_fields, parse_json, read_text, shown
from ds_pretrain.models.config_check import FOLLOWS_THE_LENGTH, read_config
from ds_pretrain.models.pretrained import Base
from ds_pretrain.models.rope_config import WITH_ORIGINAL_LENGTH, has_rope, phase_models, rope_state
from ds_pretrain.training.past import Changes

# What a saved config says of how it was made or is run, and no weight or activation of training depends on.
_ASIDE = frozenset(
    (
        *("transformers_version", "use_cache", "torch_dtype", "dtype", "architectures", "auto_map"),
        *("name_or_path", "_name_or_path", "_commit_hash", "_attn_implementation_autoset"),
    )
)
_ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta", "rotary_emb_base", "partial_rotary_factor")
_ORIGINAL = "original_max_position_embeddings"
_READ_FIRST = ("rope_type", "type", "rope_theta", "factor", _ORIGINAL)  # into the fields of a RopeState


def positions_of(model: Mapping[str, Any]) -> dict[str, Any]:
    """What a config makes of positions, in the words of a phase's `rope`; empty without rotary positions."""
    if not has_rope(model):
        return {}
    state = rope_state(model)
    said: dict[str, Any] = {"kind": state.kind, "theta": state.theta}
    said["partial_rotary_factor"] = state.table.get(
        "partial_rotary_factor", model.get("partial_rotary_factor")
    )
    if state.kind != "default":
        said["factor"] = state.factor
        said |= {key: value for key, value in state.table.items() if key not in (*_READ_FIRST, *said)}
    if state.kind in WITH_ORIGINAL_LENGTH:
        said["original_length"] = state.original_length or state.num_positions
    if state.kind in FOLLOWS_THE_LENGTH:
        said["max_position_embeddings"] = state.num_positions
    said |= state.others
    return {key: value for key, value in said.items() if value is not None}


def positions_by_phase(identity: Mapping[str, Any]) -> dict[str, dict[str, Any]] | None:
    """What each phase of an identity makes of positions, in their order; None if it does not say."""
    try:
        phases = [(name, _rope(phase["rope"]), phase["seq_len"]) for name, phase in _in_order(identity)]
        configs = phase_models(identity["model"]["config"], phases)
    except (AttributeError, KeyError, TypeError, ValueError):  # of another version, or of another program
        return None
    return {name: positions_of(config) for name, config in configs.items()}


def positions_at(identity: Mapping[str, Any], step: int) -> dict[str, Any] | None:
    """Those of the update after `step` finished steps, whatever its phase is called; None if unsaid."""
    positions = positions_by_phase(identity)
    begun = [name for name, phase in _in_order(identity) if phase["first_step"] <= step] if positions else []
    return positions[begun[-1]] if positions and begun else None


def config_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Changes:
    """Dotted path to (old, new) of what two configs of a model say otherwise, and mean so."""
    return changed_fields(*_meanings(old, new))


def compared(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two identities with what they mean in place of what is written, so that changes are those of meaning.

    The rope of a phase is what it makes of positions; of what phases inherit, a change is left in the first
    alone. A phase that is only called otherwise stands under its old name, and has both as its `name`. What
    an identity does not say of its batch, as older ones do not, is what a run file means by default.
    """
    pair = tuple({**identity, "phases": _with_positions(identity)} for identity in (old, new))
    try:
        for identity in pair:
            batch = identity["batch"]
            meant = {} if batch.get("rate_rule", "none") == "none" else {"rate_tokens": batch["tokens"]}
            identity["batch"] = {"rate_rule": "none", **meant, **batch}
        configs = [dict(identity["model"]["config"]) for identity in pair]
        for identity, meaning in zip(pair, _meanings(*configs), strict=True):
            identity["model"] = {**identity["model"], "config": meaning}
        _name_alike(*(identity["phases"] for identity in pair))
        _leave_out_inherited(*(identity["phases"] for identity in pair), *map(positions_of, configs))
    except (AttributeError, KeyError, TypeError, ValueError):  # of another version, or of another program
        pass
    return pair[0], pair[1]


def other_config_problems(plan: Plan, base: Base) -> Iterator[str]:
    """What a config of one's own says of a loaded model that its own does not: the weights would not fit."""
    if (own := base.folder / "config.json") == Path(plan.run.model.config):
        return
    theirs = parse_json(read_text(own, f"{plan.run_path}: model.from"), str(own))
    for key, (before, now) in config_changes(theirs, plan.model).items():
        yield (
            f"{plan.run_path}: model.config = {plan.run.model.config} says {key} = {shown(now)}, and {own} "
            f"says {shown(before)}; leave model.config out, or make them equal"
        )


def _meanings(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    keys = [key for key in dict.fromkeys([*old, *new]) if key not in (*_ASIDE, *_ROPE_KEYS)]
    before, now = (
        {key: value for key in keys if (value := _value(config, key)) is not None}
        | ({"rope": positions} if (positions := positions_of(config)) else {})
        for config in (old, new)
    )
    return before, now


def _value(config: Mapping[str, Any], key: str) -> Any:
    """What a model is made with: as given, or the default of its family."""
    parsed = read_config(config)
    value = config.get(key) if parsed is None else getattr(parsed, key, None)
    if value is None and key == "num_key_value_heads":
        return config.get("num_attention_heads")
    if value is None and key == "head_dim":
        size, heads = config.get("hidden_size"), config.get("num_attention_heads")
        return size // heads if isinstance(size, int) and isinstance(heads, int) and heads else None
    return value


def _with_positions(identity: Mapping[str, Any]) -> dict[str, Any]:
    """The phases of an identity, each with what it makes of positions as its rope."""
    positions = positions_by_phase(identity) or {}
    phases = {name: dict(phase) for name, phase in _in_order(identity)}
    for name, rope in positions.items():
        if rope:
            phases[name]["rope"] = rope
    return phases


def _name_alike(old: dict[str, Any], new: dict[str, Any]) -> None:
    """Put what has only another name under its old one."""
    for name in [name for name in old if name not in new]:
        for other in [other for other in new if other not in old]:
            if old[name] == new[other]:
                old[name] = {**old[name], "name": name}
                new[name] = {**new.pop(other), "name": other}
                break


def _leave_out_inherited(
    old: dict[str, Any], new: dict[str, Any], old_before: dict[str, Any], new_before: dict[str, Any]
) -> None:
    """Take out of a phase's positions what differs as in the phase before, or in the model's config."""
    for name in sorted(new, key=lambda name: new[name]["first_step"]):
        was, now = old.get(name, {}).get("rope") or {}, new[name].get("rope") or {}
        inherited = [
            key
            for key in {*was, *now}
            if was.get(key) != now.get(key)
            and (was.get(key), now.get(key)) == (old_before.get(key), new_before.get(key))
        ]
        old_before, new_before = was, now
        for phases, rope in ((old, was), (new, now)):
            if inherited:
                phases[name]["rope"] = {key: value for key, value in rope.items() if key not in inherited}


def _in_order(identity: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    return sorted(identity["phases"].items(), key=lambda item: item[1]["first_step"])


def _rope(given: Mapping[str, Any] | None) -> RopeSection | None:
    named = {key: value for key, value in (given or {}).items() if value is not None}
    return RopeSection(**named) if named else None
