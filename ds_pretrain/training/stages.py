"""Puts a living model into the phase that a step belongs to, whichever it was in: also after a rollback."""

import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

from ds_pretrain.config.plan import Plan
from ds_pretrain.core.distributed import World
from ds_pretrain.core.text import say
from ds_pretrain.models.build import set_recompute
from ds_pretrain.models.rope import apply_rope
from ds_pretrain.models.rope_config import describe_rope


class Stages:
    """The model of a run, and the phase that it is in."""

    def __init__(
        self, plan: Plan, module: nn.Module, models: Mapping[str, Mapping[str, Any]], world: World
    ) -> None:
        """`module` was built from the run's model config; `models` has that of each phase."""
        self._plan, self._module, self._models, self._world = plan, module, models, world
        self._phase: str | None = None

    def enter(self, step: int) -> None:
        """Be in the phase of the update that follows `step` finished steps: rotary positions, recomputation.

        On every rank, between two steps; nothing is communicated. Weights and optimizer are not touched.
        """
        phase = self._plan.phase_at(step)
        if phase.name == self._phase:
            return
        model = self._models[phase.name]
        num_tables = apply_rope(self._module, model)
        recompute = self._plan.run.model.recompute if phase.recompute is None else phase.recompute
        set_recompute(self._module, recompute)
        if self._world.is_main and (self._phase is not None or num_tables):
            start = self._plan.timeline.phase_start(phase.name)
            begun = f"from step {start:,}" if step == start else f"at step {step:,}, begun at step {start:,}"
            say(sys.stdout, f"phase      {phase.name} {begun}: {describe_rope(model)}")
        self._phase = phase.name
