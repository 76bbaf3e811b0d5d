"""The data order and the model positions of each phase. No torch."""

import json
from collections.abc import Mapping
from typing import Any

from ds_pretrain.config.plan import Plan
from ds_pretrain.data.indexed import TokenSource
from ds_pretrain.data.sampler import Sampler, make_sampler
from ds_pretrain.models import rope_config


def resolve_phase_models(plan: Plan) -> dict[str, dict[str, Any]]:
    """The model config of each phase: that of the phase before, with its own rotary positions and length."""
    return rope_config.build_phase_models(
        plan.model, ((phase.name, phase.rope, phase.seq_len) for phase in plan.run.phases)
    )


def resolve_model_text(plan: Plan, step: int) -> str:
    """The model config of what `step` finished steps have trained: the file, if no phase changed it."""
    model = resolve_phase_models(plan)[plan.timeline.at(max(0, step - 1)).phase]
    return plan.model_text if model == plan.model else json.dumps(model, indent=2) + "\n"


def open_sampler(plan: Plan, sources: Mapping[str, TokenSource]) -> Sampler:
    """Open the order of a run's data."""
    return make_sampler(plan.run.seed, plan.timeline, resolve_mixtures(plan), sources, plan.chunk_tokens)


def resolve_mixtures(plan: Plan) -> dict[str, dict[str, float]]:
    """The weights of each phase."""
    return {phase.name: dict(phase.mixture) for phase in plan.run.phases}
