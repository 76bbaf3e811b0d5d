"""What makes a run this run: all that fixes where its weights go, with phases, batches and schedule in steps.

Every checkpoint keeps it, and `past.py` compares it with what a start says.
"""

import json
from collections.abc import Mapping
from typing import Any

from ds_pretrain.config.plan import Plan
from ds_pretrain.config.timeline import Duration
from ds_pretrain.core.text import shown

# What fixes a run's trajectory. Another value in the same run directory is another run.
_IDENTITY = ("name", "seed", "model", "schedule", "batch", "sources", "phases")
WEIGHTS = "[model] from"  # among the contents of sources, none of which can be called so
# What the numbers of an identity count.
_UNITS = {
    **dict.fromkeys(("schedule.length", "schedule.warmup", "schedule.decay"), "steps"),
    **dict.fromkeys(("batch.tokens", "batch.rate_tokens"), "tokens"),
}


def identity_of(plan: Plan, data: Mapping[str, str]) -> dict[str, Any]:
    """What must not differ between two starts of one run, as JSON has it.

    `data` describes the content of each source, and of the weights to begin with: they may move, and may not
    change.
    """
    fields = plan.run.model_dump(mode="json")
    identity = {key: fields[key] for key in _IDENTITY}
    identity["schedule"] = {k: v.steps if isinstance(v, Duration) else v for k, v in plan.schedule}
    identity["batch"] = _batches(plan)  # how a rank takes its share may change
    identity["chunk_tokens"] = plan.chunk_tokens
    identity["phases"] = {phase.name: _phase(plan, phase.name) for phase in plan.run.phases}
    identity["sources"] = {name: text for name, text in data.items() if name != WEIGHTS}
    identity["deepspeed"] = _trajectory_of(plan.deepspeed)
    identity["model"]["config"] = dict(plan.model)  # the content, wherever the file lies
    identity["model"]["from"] = data.get(WEIGHTS)
    return dict(json.loads(json.dumps(identity)))


def _batches(plan: Plan) -> dict[str, Any]:
    batch: dict[str, Any] = {"tokens": plan.run.batch.tokens}
    if plan.run.batch.ramp is not None:
        segments = plan.timeline.segments
        sizes = [[s.first_step, s.tokens_per_step] for s in segments]
        batch["ramp"] = [
            one for one, before in zip(sizes, [[0, 0], *sizes], strict=False) if one[1] != before[1]
        ]
    rule = plan.run.batch.rate_rule
    if rule != "none":
        return {**batch, "rate_rule": rule, "rate_tokens": plan.rate_tokens}
    return batch if plan.run.batch.ramp is None else {**batch, "rate_rule": rule}


def _phase(plan: Plan, name: str) -> dict[str, Any]:
    """What fixes the trajectory through a phase, as plain types."""
    [phase] = [phase for phase in plan.run.phases if phase.name == name]
    kept = phase.model_dump(mode="json", include={"seq_len", "mixture", "rope"})
    return {"first_step": plan.timeline.phase_start(name), **kept}


def with_unit(path: str, value: Any) -> str:
    """A value of an identity as a person reads it: `200 steps`, not `200`; never a dictionary."""
    if value is None:
        return "not there"
    if isinstance(value, Mapping):
        if {"first_step", "seq_len", "mixture"} <= value.keys():
            return _phase_words(value)
        given = {key: item for key, item in value.items() if item is not None}
        return (
            ", ".join(f"{key} {with_unit(f'{path}.{key}', item)}" for key, item in given.items()) or "empty"
        )
    if path == "batch.ramp":
        return ", ".join(f"{tokens:,} tokens from step {step:,} on" for step, tokens in value)
    if path.startswith("chunk_tokens.") and isinstance(value, int):
        return f"{value:,} tokens"
    if isinstance(value, float) and "rope." in path:
        return f"{value:.10g}"
    unit = "steps" if path.endswith(".first_step") else _UNITS.get(path)
    if unit is None or not isinstance(value, int) or isinstance(value, bool):
        return shown(value)
    return f"{value:,} {unit[:-1] if value == 1 else unit}"


def _phase_words(phase: Mapping[str, Any]) -> str:
    mixture = ", ".join(f"{weight:g} {name}" for name, weight in phase["mixture"].items())
    words = f"sequences of {phase['seq_len']:,} tokens of {mixture}, from step {phase['first_step']:,} on"
    return f"{words} (rope {with_unit('rope', phase['rope'])})" if phase.get("rope") else words


def _trajectory_of(deepspeed: Mapping[str, Any]) -> dict[str, Any]:
    """What of the DeepSpeed JSON fixes where the weights go, apart from how it is computed.

    A load brings the saved options of the optimizer back: another value would be ignored in silence.
    """
    optimizer = deepspeed.get("optimizer", {})
    how = ("torch_adam", "fused")
    params = {key: value for key, value in optimizer.get("params", {}).items() if key not in how}
    return {
        "optimizer": {"type": optimizer.get("type"), "params": params},
        "gradient_clipping": deepspeed.get("gradient_clipping"),
    }
