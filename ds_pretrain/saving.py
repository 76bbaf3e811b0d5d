"""When a run saves, and what goes into its checkpoints."""

from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from time import perf_counter

from ds_pretrain.checkpoint import store
from ds_pretrain.checkpoint.layout import Manifest
from ds_pretrain.checkpoint.triggers import WallClock, due_by_count
from ds_pretrain.deepspeed_json import zero_stage
from ds_pretrain.engine import Engine
from ds_pretrain.monitor.monitor import Monitor
from ds_pretrain.plan import Plan
from ds_pretrain.run_directory import RunRecord, note_saved
from ds_pretrain.state import RunState
from ds_pretrain.world import World


class Saver:
    """Saves checkpoints of one run when they are due."""

    def __init__(
        self, plan: Plan, record: RunRecord, engine: Engine, world: World, tell: Callable[[object], None]
    ) -> None:
        self._plan, self._record, self._engine, self._world, self._tell = plan, record, engine, world, tell
        self._clock = WallClock(plan.run.checkpoint.every)
        self._root = plan.out / "checkpoints"

    def is_due(self, state: RunState) -> bool:
        """By steps and tokens, and after the last step: the same on every rank."""
        triggers = self._plan.run.checkpoint.every
        return state.step == self._plan.last_step or due_by_count(triggers, state.step, self._plan.timeline)

    def is_due_by_clock(self) -> bool:
        """On rank 0 alone; shared by `measure`."""
        return self._world.is_main and self._clock.is_due()

    def save(self, state: RunState, monitor: Monitor) -> None:
        """Save, publish, prune. Collective."""
        started = perf_counter()
        texts = {
            "run.toml": self._plan.run_text,
            "deepspeed.json": self._plan.deepspeed_text,
            "model.json": self._plan.model_text,
        }
        saved = store.save(self._root, state, self._manifest(state), texts, self._engine, self._world)
        if self._world.is_main:
            note_saved(self._plan.out, state.step)
        store.prune(self._root, self._plan.run.checkpoint.keep, self._world, self._tell)
        self._clock.restart()
        seconds = perf_counter() - started
        monitor.event("checkpoint", step=state.step, bytes=saved.total_bytes, seconds=seconds)

    def _manifest(self, state: RunState) -> Manifest:
        timeline = self._plan.timeline
        return Manifest(
            step=state.step,
            tokens=timeline.tokens_before(state.step),
            samples=timeline.samples_before(state.step),
            world_size=self._world.size,
            zero_stage=zero_stage(self._plan.deepspeed),
            versions={name: version(name) for name in ("ds-pretrain", "deepspeed", "torch", "transformers")},
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            attempt=self._record.attempt,
            wandb_id=self._record.wandb_id,
            overrides=self._plan.overrides,
            files={},
        )
