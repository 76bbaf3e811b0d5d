"""When a run saves, what goes into its checkpoints, where they are uploaded, and what a failed save means."""

import contextlib
import json
import platform
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import pairwise
from math import isfinite
from statistics import median
from time import monotonic, perf_counter, sleep
from types import TracebackType
from typing import Self

from ds_pretrain.checkpoint.interval import Costs, check_stall, format_interval_advice
from ds_pretrain.checkpoint.manifest import DEEPSPEED, Manifest, list_published, parse_step, step_name
from ds_pretrain.checkpoint.retention import (
    KNOWN_GOOD,
    UPLOADED,
    WallClock,
    is_marked_abandoned,
    is_uploaded,
    prune,
)
from ds_pretrain.checkpoint.save import SaveOutcome, Saves
from ds_pretrain.checkpoint.storage import ASSEMBLED, StorageLayout
from ds_pretrain.checkpoint.upload import Uploader
from ds_pretrain.config.deepspeed import zero_stage
from ds_pretrain.config.plan import Plan
from ds_pretrain.core.distributed import World, gather_objects, log
from ds_pretrain.core.errors import CannotSave, InputError
from ds_pretrain.core.files import available_memory_bytes
from ds_pretrain.core.metrics import Probe
from ds_pretrain.core.state import RunState
from ds_pretrain.engine.engine import Engine
from ds_pretrain.monitor.monitor import Monitor
from ds_pretrain.training.curriculum import resolve_model_text
from ds_pretrain.training.record import RunRecord, note_saved

# torch rounds each pinned buffer up to a power of two: up to twice the bytes.
PINNED_ROUNDING = {"cuda": 2}
_MEASURED_SAVES = 3  # intervals, before anything is said of how often to save
_MOST_MEASURED = 1000  # saves: a run has many, and older ones may be of other hardware
RETRY_SECONDS = 2.0  # before a save that must not fail is tried again
PATIENCE_SECONDS = 900.0  # at the end of a run, for what is not uploaded yet
STOP_PATIENCE_SECONDS = 10.0  # at a stop: whoever asked for it may not wait long
_POLL_SECONDS = 2.0  # how long other ranks wait in one collective


class Uploads:
    """The uploads of one start; each host's leader runs an upload process. Opening is collective."""

    def __init__(self, plan: Plan, storage: StorageLayout, world: World) -> None:
        self._plan, self._storage, self._world = plan, storage, world
        self.is_on = plan.upload_to is not None
        self._uploader: Uploader | None = None
        leads = gather_objects(world, storage.is_leader(world))
        if plan.upload_to is not None and leads[world.rank]:
            host, keep = sum(leads[: world.rank]), plan.run.checkpoint.keep_last
            self._uploader = Uploader(storage.root, plan.upload_to, host, keep, plan.keep_every)

    def __enter__(self) -> Self:
        if self._uploader is not None:
            self._uploader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._uploader is not None:
            self._uploader.close()

    def revive(self) -> None:
        """Make sure that something uploads what was published on this host."""
        if self._uploader is not None:
            self._uploader.revive()

    def finish(self, patience_seconds: float) -> None:
        """Wait until every checkpoint is uploaded, or so long; then say what is not. Collective."""
        if not self.is_on:
            return
        deadline = monotonic() + patience_seconds
        while True:
            rest = min(_POLL_SECONDS, deadline - monotonic())
            done = self._uploader is None or self._uploader.wait(max(0.0, rest)) or rest <= 0
            if all(gather_objects(self._world, done)):
                break
        left = (platform.node(), self._storage.root, self._uploader and self._uploader.list_not_uploaded())
        for node, root, steps in gather_objects(self._world, left):
            if steps:
                listed = ", ".join(f"{step:,}" for step in steps[::-1])
                log.warning(
                    f"not uploaded to {self._plan.upload_to} yet: steps {listed}; they are in {root} on "
                    f"{node}, and the next start uploads them"
                )


class Saver:
    """Saves checkpoints of one run when they are due, one at a time, while training continues."""

    def __init__(
        self,
        plan: Plan,
        record: RunRecord,
        engine: Engine,
        monitor: Monitor,
        storage: StorageLayout,
        uploads: Uploads,
        restore_seconds: float,
        world: World,
    ) -> None:
        self._plan, self._record, self._engine, self._world = plan, record, engine, world
        self._monitor, self._storage = monitor, storage
        self._clock = WallClock(plan.run.checkpoint.every)
        self._num_failed = 0  # in a row
        # Of the save under way, beside its own copies: for the save before it, and for its own end.
        self._waited_seconds = self._finished_seconds = 0.0
        self._saved_step: int | None = None  # of the newest checkpoint of this start
        self._behind, expected_bytes = check_memory(engine, world, storage.per_host)
        self._saves = Saves(storage, world, self._published, expected_bytes)
        self._uploads = uploads
        self._seen_uploaded = {folder for folder in list_published(storage.root) if is_uploaded(folder)}
        self._restore_seconds = restore_seconds
        # When the newest published saves began, how long each stalled training, and took in all.
        self._measured: deque[tuple[float, float, float]] = deque(maxlen=_MOST_MEASURED)
        self._warned = False  # of saves that stall training for too long
        self._not_yet_known_good = {f for f in list_published(storage.root) if not (f / KNOWN_GOOD).exists()}

    @property
    def progress(self) -> int:
        """The progress of this rank's part of the current save, for the row of a step."""
        return self._saves.progress

    def is_due(self, state: RunState) -> bool:
        """Return whether a save is due by steps or tokens, at a phase's end, or at the first or last step."""
        step, timeline = state.step, self._plan.timeline
        if step in (1, self._plan.last_step) or timeline.ends_phase(step):
            return True
        return self._plan.run.checkpoint.is_due(step, timeline)

    def is_due_by_clock(self) -> bool:
        """On rank 0 alone; shared by `measure`."""
        return self._world.is_main and self._clock.is_due()

    def save(self, state: RunState, probe: Callable[[], Probe]) -> None:
        """Snapshot, and write behind; a save under way is waited for first. Collective.

        `probe` computes one, where no step is to come that would.

        Raises:
            CannotSave: too many saves in a row have failed.
        """
        began = perf_counter()
        self.finish()
        waited = perf_counter() - began
        self._note_uploads()
        texts = {
            "run.toml": self._plan.run_text,
            DEEPSPEED: self._plan.deepspeed_text,
            "model.json": resolve_model_text(self._plan, state.step),
        }
        manifest = self._manifest(state)
        self._waited_seconds, self._finished_seconds = waited, 0.0
        self._note(self._saves.begin(state, manifest, texts, self._engine))
        if not self._behind:
            self._finish_probed(state.step, probe)
        self._clock.restart()

    def save_blocking(self, state: RunState, probe: Callable[[], Probe]) -> None:
        """Save, and return only when the checkpoint is published. Collective.

        Raises:
            CannotSave: it failed so often that the run stops.
        """
        while True:
            self.save(state, probe)
            self._finish_probed(state.step, probe)
            if self._saved_step == state.step:
                return
            sleep(RETRY_SECONDS)

    def save_for_operator(self, state: RunState, probe: Callable[[], Probe]) -> None:
        """Save and upload the state of a run that stops for its operator, for inspection. Collective.

        The next start resumes from an older checkpoint.
        """
        with contextlib.suppress(CannotSave):  # logged already; the reason for the stop matters more
            self.save_blocking(state, probe)
        self.finish_uploads(STOP_PATIENCE_SECONDS)

    def note_health(self, state: RunState) -> None:
        """Mark as known good what enough healthy steps came after: only that may be restored."""
        patience = self._plan.run.watchdog.patience
        if state.num_healthy_steps < patience or not self._not_yet_known_good:
            return
        known_good = {
            f for f in self._not_yet_known_good if (parse_step(f.name) or 0) + patience <= state.step
        }
        self._not_yet_known_good -= known_good
        for folder in known_good if self._storage.is_leader(self._world) else ():
            if is_marked_abandoned(folder, state.rollbacks):  # pinned, and of before a rollback
                continue
            with contextlib.suppress(OSError):  # it was pruned, or renamed
                (folder / KNOWN_GOOD).touch()

    def on_rollback(self, state: RunState) -> None:
        """The run resumes from an older checkpoint: what was saved after it will never be known good."""
        self._not_yet_known_good = {
            f for f in self._not_yet_known_good if (parse_step(f.name) or 0) <= state.step
        }
        self._saved_step = None
        self._clock.restart()

    def advance(self, progress: Sequence[int], probe: Probe | None) -> None:
        """Take the save under way as far as every rank's progress allows. Collective.

        `probe` is None if the step's loss is not to be trusted: it says nothing of the weights before it.
        """
        if probe is not None:
            self._saves.record_probe(probe.step, probe)
        self._note(self._saves.advance(progress))

    def finish(self) -> None:
        """Wait for the save under way. Collective."""
        self._note(self._saves.finish())

    def finish_uploads(self, patience_seconds: float) -> None:
        """Wait so long for what is not uploaded yet; then delete here what need not stay. Collective."""
        self._uploads.finish(patience_seconds)
        self._note_uploads()
        if self._storage.is_leader(self._world) and self._uploads.is_on:
            self._prune()

    def _finish_probed(self, step: int, probe: Callable[[], Probe]) -> None:
        """Probe while the files are written, then wait for them: training is blocked for all of it."""
        began = perf_counter()
        if self._saves.is_under_way:
            found = probe()
            if isfinite(found.loss):
                self._saves.record_probe(step, found)
        outcome = self._saves.finish()
        self._finished_seconds = perf_counter() - began
        self._note(outcome)

    def _note(self, outcome: SaveOutcome | None) -> None:
        if outcome is None:
            return
        stall_seconds = outcome.stall_seconds + self._waited_seconds + self._finished_seconds
        total_seconds = max(stall_seconds, outcome.total_seconds + self._waited_seconds)
        outcome = replace(outcome, stall_seconds=stall_seconds, total_seconds=total_seconds)
        if outcome.problem is None:
            self._num_failed, self._saved_step = 0, outcome.step
            self._not_yet_known_good.add(self._storage.root / step_name(outcome.step))
            self._monitor.event(
                "checkpoint",
                step=outcome.step,
                bytes=outcome.bytes,
                stall_seconds=outcome.stall_seconds,
                total_seconds=outcome.total_seconds,
            )
            for line in self._cost_lines(outcome):
                log.warning(line)
            return
        self._num_failed += 1
        limit = self._plan.run.checkpoint.max_consecutive_failures
        told = (
            f"checkpoint step {outcome.step:,} was not saved: {outcome.problem}; the previous one is "
            f"intact ({self._num_failed} of {limit} consecutive failures)"
        )
        log.warning(told)
        self._monitor.event(
            "save_failed", step=outcome.step, problem=outcome.problem, num_consecutive=self._num_failed
        )
        if self._num_failed >= limit:
            raise CannotSave(
                f"{limit} consecutive checkpoint saves failed (last: {outcome.problem}); free disk space "
                f"or fix the storage"
            )

    def _cost_lines(self, outcome: SaveOutcome) -> Iterator[str]:
        """Take the costs of a published save; what follows for how often to save, each thing once a start."""
        section = self._plan.run.checkpoint
        stall_seconds, total_seconds = outcome.stall_seconds, outcome.total_seconds
        self._measured.append((monotonic() - total_seconds, stall_seconds, total_seconds))
        begins = [began for began, _, _ in self._measured]
        intervals = [later - earlier for earlier, later in pairwise(begins)]
        if len(intervals) < _MEASURED_SAVES:
            return
        stall = median(stalled for _, stalled, _ in [*self._measured][1:])  # the first allocates buffers
        warning = None if self._warned else check_stall(stall, median(intervals), section.max_stall_fraction)
        if warning is not None:
            self._warned = True
            yield warning
        if section.mtbf is not None and len(intervals) == _MEASURED_SAVES:
            complete = median(total for _, _, total in self._measured)
            costs = Costs(stall, complete, self._restore_seconds, section.mtbf.seconds)
            yield from format_interval_advice(costs, median(intervals))

    def _note_uploads(self) -> None:
        """Record what has been uploaded from rank 0's host since the last look."""
        if not self._world.is_main or not self._uploads.is_on:
            return
        uploaded = {
            f for f in list_published(self._storage.root) if f not in self._seen_uploaded and is_uploaded(f)
        }
        for folder in sorted(uploaded):
            with contextlib.suppress(OSError, ValueError, KeyError):  # it was pruned meanwhile
                mark = json.loads((folder / UPLOADED).read_text())
                told = {"checkpoint": folder.name, "bytes": mark["bytes"], "seconds": mark["seconds"]}
                self._monitor.event("upload", **told)
        self._seen_uploaded |= uploaded

    def _published(self, step: int) -> None:
        """On a leader's thread, after a checkpoint is complete."""
        if self._world.is_main:
            try:
                note_saved(self._plan.out, step)
            except (OSError, InputError) as error:  # the checkpoint is there all the same
                log.warning(
                    f"the checkpoint of step {step:,} could not be noted in {self._plan.out}: {error}"
                )
            shutil.rmtree(self._plan.out / ASSEMBLED, ignore_errors=True)  # it was loaded long ago
        self._uploads.revive()
        self._prune()

    def _prune(self) -> None:
        """Delete what need not stay in this host's folder. On its leader."""
        section = self._plan.run.checkpoint
        prune(
            self._storage.root,
            keep=section.keep_last,
            keep_every=self._plan.keep_every,
            only_uploaded=self._uploads.is_on,
            num_known_good=1 + len(self._plan.run.watchdog.policy),
        )

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


def check_memory(engine: Engine, world: World, per_host: bool) -> tuple[bool, int]:
    """Return whether every host can hold its ranks' copies, and the bytes per folder. Collective."""
    asked = gather_objects(world, (platform.node(), engine.snapshot_bytes(), available_memory_bytes()))
    total = sum(size for name, size, _ in asked if not per_host or name == platform.node())
    for host in dict.fromkeys(host for host, _, _ in asked):
        needed = sum(size for name, size, _ in asked if name == host)
        free = min(free for name, _, free in asked if name == host)
        if needed * PINNED_ROUNDING.get(engine.device.type, 1) > 0.9 * free:
            log.warning(
                f"{host} has {free:,} bytes of memory free, and copies of its ranks' shards need "
                f"{needed:,}: saves block training while they write"
            )
            return False, total
    return True, total
