"""When a run saves, what goes into its checkpoints, and what a failed save means."""

import platform
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version

from ds_pretrain.checkpoint.layout import Manifest
from ds_pretrain.checkpoint.retention import prune
from ds_pretrain.checkpoint.saves import Outcome, Saves
from ds_pretrain.checkpoint.triggers import WallClock, due_by_count
from ds_pretrain.deepspeed_json import zero_stage
from ds_pretrain.engine import Engine
from ds_pretrain.errors import CannotSave, InputError
from ds_pretrain.files import available_memory_bytes
from ds_pretrain.monitor.monitor import Monitor
from ds_pretrain.plan import Plan
from ds_pretrain.record import Probe
from ds_pretrain.run_directory import RunRecord, note_saved
from ds_pretrain.state import RunState
from ds_pretrain.world import World, gather_objects

# torch rounds each pinned buffer up to a power of two: up to twice the bytes.
PINNED_ROUNDING = {"cuda": 2}


class Saver:
    """Saves checkpoints of one run when they are due, one at a time, while training goes on."""

    def __init__(
        self,
        plan: Plan,
        record: RunRecord,
        engine: Engine,
        monitor: Monitor,
        world: World,
        tell: Callable[[object], None],
    ) -> None:
        self._plan, self._record, self._engine, self._world = plan, record, engine, world
        self._monitor, self._tell = monitor, tell
        self._clock = WallClock(plan.run.checkpoint.every)
        self._root = plan.out / "checkpoints"
        self._num_failed = 0  # in a row
        self._saved_step: int | None = None  # of the newest checkpoint of this start
        self._behind, expected_bytes = fits_in_memory(engine, world, tell)
        self._saves = Saves(self._root, world, self._published, expected_bytes)

    @property
    def stage(self) -> int:
        """How far this rank's part of the save under way is; for the row of a step."""
        return self._saves.stage

    def is_due(self, state: RunState) -> bool:
        """By steps and tokens, and after the first and the last step: the same on every rank."""
        triggers = self._plan.run.checkpoint.every
        return state.step in (1, self._plan.last_step) or due_by_count(
            triggers, state.step, self._plan.timeline
        )

    def is_due_by_clock(self) -> bool:
        """On rank 0 alone; shared by `measure`."""
        return self._world.is_main and self._clock.is_due()

    def save(self, state: RunState, probe: Callable[[], Probe]) -> None:
        """Snapshot, and write behind; a save under way is waited for first. Collective.

        `probe` computes one, where no step is to come that would.

        Raises:
            CannotSave: too many saves in a row have failed.
        """
        self.finish()
        texts = {
            "run.toml": self._plan.run_text,
            "deepspeed.json": self._plan.deepspeed_text,
            "model.json": self._plan.model_text,
        }
        manifest = self._manifest(state)
        self._note(self._saves.begin(state, manifest, texts, self._engine))
        if not self._behind:
            self._finish_probed(state.step, probe)
        self._clock.restart()

    def save_surely(self, state: RunState, probe: Callable[[], Probe]) -> None:
        """Save, and return only when the checkpoint is published. Collective.

        Raises:
            CannotSave: it failed so often that the run stops.
        """
        while self._saved_step != state.step:
            self.save(state, probe)
            self._finish_probed(state.step, probe)

    def advance(self, stages: Sequence[int], probe: Probe) -> None:
        """Take the save under way as far as every rank's stage allows. Collective."""
        self._saves.probed(probe.step, probe)
        self._note(self._saves.advance(stages))

    def finish(self) -> None:
        """Wait for the save under way. Collective."""
        self._note(self._saves.finish())

    def _finish_probed(self, step: int, probe: Callable[[], Probe]) -> None:
        """Probe while the files are written, then wait for them."""
        if self._saves.is_under_way:
            self._saves.probed(step, probe())
        self.finish()

    def _note(self, outcome: Outcome | None) -> None:
        if outcome is None:
            return
        if outcome.problem is None:
            self._num_failed, self._saved_step = 0, outcome.step
            self._monitor.event(
                "checkpoint",
                step=outcome.step,
                bytes=outcome.bytes,
                stall_seconds=outcome.stall_seconds,
                total_seconds=outcome.total_seconds,
            )
            return
        self._num_failed += 1
        limit = self._plan.run.checkpoint.failures
        told = (
            f"the checkpoint of step {outcome.step:,} was not saved: {outcome.problem}; "
            f"the one before it is intact ({self._num_failed} of {limit} failures in a row that stop the run)"
        )
        self._tell(told)
        self._monitor.event(
            "save_failed", step=outcome.step, problem=outcome.problem, in_a_row=self._num_failed
        )
        if self._num_failed >= limit:
            raise CannotSave(
                f"{limit} saves in a row have failed, the last: {outcome.problem}; make room or mend the disk"
            )

    def _published(self, step: int) -> None:
        """On rank 0's thread, after a checkpoint is complete."""
        section = self._plan.run.checkpoint
        try:
            note_saved(self._plan.out, step)
        except (OSError, InputError) as error:  # the checkpoint is there all the same
            self._tell(f"the checkpoint of step {step:,} could not be noted in {self._plan.out}: {error}")
        prune(self._root, keep=section.keep, keep_every_steps=self._plan.keep_every_steps, tell=self._tell)

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
            identity=self._record.identity,
            files={},
        )


def fits_in_memory(engine: Engine, world: World, tell: Callable[[object], None]) -> tuple[bool, int]:
    """Whether every host can hold its ranks' copies, and the bytes of all of them. Collective."""
    asked = gather_objects(world, (platform.node(), engine.snapshot_bytes(), available_memory_bytes()))
    total = sum(size for _, size, _ in asked)
    for host in dict.fromkeys(host for host, _, _ in asked):
        needed = sum(size for name, size, _ in asked if name == host)
        free = min(free for name, _, free in asked if name == host)
        if needed * PINNED_ROUNDING.get(engine.device.type, 1) > 0.9 * free:
            tell(
                f"{host} has {free:,} bytes of memory free, and copies of its ranks' shards need {needed:,}: "
                "training stands still while checkpoints are written"
            )
            return False, total
    return True, total
