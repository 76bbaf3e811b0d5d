"""The watchdog at work in the loop: what it sees, and the way back to an older checkpoint."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds_pretrain.checkpoint import restore
from ds_pretrain.checkpoint.manifest import list_published, parse_step
from ds_pretrain.checkpoint.retention import KNOWN_GOOD, is_marked_abandoned
from ds_pretrain.checkpoint.rng import preserve_streams
from ds_pretrain.checkpoint.storage import StorageLayout
from ds_pretrain.checkpoint.verify import Found, find_at_step
from ds_pretrain.config.plan import Plan
from ds_pretrain.core.distributed import World, gather_rows, log, run_on_each_rank, run_on_main
from ds_pretrain.core.errors import CannotSave, NeedsOperator, RunError, mark_agreed
from ds_pretrain.core.metrics import IGNORED, StepRecord
from ds_pretrain.core.state import Rollback, RunState, SkipLedger, Verdict
from ds_pretrain.core.text import format_count_of
from ds_pretrain.data.inspect import read_passages
from ds_pretrain.data.loader import BatchLoader
from ds_pretrain.data.sampler import SampleIds
from ds_pretrain.engine.engine import Engine
from ds_pretrain.monitor.monitor import Monitor
from ds_pretrain.training.incidents import Incidents, RankLosses
from ds_pretrain.training.step import compute_token_losses, sum_losses
from ds_pretrain.watchdog.detector import is_warm, judge, norm_limit
from ds_pretrain.watchdog.policy import Response, apply_rollback, respond
from ds_pretrain.watchdog.rollback_log import ROLLBACKS, write_rollback_log

# The samples with the highest loss under the weights that were restored, around the onset of the trouble:
# the weights at the spike give every sample a high loss, these tell a poisoned sample from its neighbors.
NUM_HIGH_LOSS_SAMPLES = 8
STEPS_BEFORE = 1  # an update is seen in the loss of the step after it
STEPS_AFTER = 4  # an onset may be told up to five steps too early
_MOST_CHARACTERS = 2000  # of a sample's text


class Watchdog:
    """Judges each step, on every rank alike, and takes the run back where that is the verdict."""

    def __init__(
        self,
        plan: Plan,
        monitor: Monitor,
        storage: StorageLayout,
        attempt: int,
        enter: Callable[[int], None],
        world: World,
    ) -> None:
        """`enter` puts the model into the phase of the update after so many steps. Collective."""
        self._plan, self._storage, self._world = plan, storage, world
        self._attempt, self._enter = attempt, enter
        self._monitor, self._incidents = monitor, Incidents(plan, monitor, world)
        self._unknown = False  # whether what is normal has to be learned again after a verdict

    def resume(self, state: RunState, engine: Engine, loader: BatchLoader) -> None:
        """Begin with the state of a start; tell what a crash kept from being reported. Collective."""
        lacking = run_on_main(self._world, lambda: self._incidents.list_unreported(state))
        if lacking:
            rollback, ledger = state.rollbacks[-1], state.ledger
            if rollback.response == "skip":  # what it met was read under the ledger before it
                ledger = SkipLedger(ledger.skips[:-1])
            if "rollback" in lacking:
                seen = "what was seen is in the log: the process died before it was written down here"
                told = Verdict("roll_back", None, rollback.onset, seen)
                self._told(state, loader, told, "as decided before a crash", retold=True)
            if state.step == rollback.to_step:
                self._find_high_loss_samples(state, engine, loader, ledger)
        self._incidents.begin(state)

    def norm_limit(self, state: RunState) -> float | None:
        """The gradient norm above which the update after `state` is skipped; None: none is."""
        phase = self._plan.timeline.at(state.step).phase
        return norm_limit(self._plan.run.watchdog, state.watchdog, phase)

    def judge(
        self, state: RunState, record: StepRecord, rank_losses: RankLosses, ids: SampleIds
    ) -> tuple[RunState, Verdict]:
        """The state after a step, with what the watchdog remembers of it, and its verdict."""
        memory, verdict = judge(self._plan.run.watchdog, state.watchdog, record)
        if verdict.interrupts:  # the memory is blank now, if the run continues regardless
            self._unknown = self._plan.run.watchdog.mode == "observe"
        elif is_warm(self._plan.run.watchdog, memory.loss):
            self._unknown = False
        # One normal loss in a spike may be luck; who does not judge cannot call anything healthy.
        is_judged = self._plan.run.watchdog.mode != "off" and not self._unknown
        healthy = is_judged and verdict.action == "ok" and memory.spike is None
        after = state.after_step(record.update_applied, memory, healthy)
        self._incidents.note_step(after, record, rank_losses, verdict)
        if not record.update_applied:
            self._incidents.record_skipped_update(record, ids, after.num_skipped_updates)
        return after, verdict

    def should_roll_back(self, state: RunState, verdict: Verdict) -> bool:
        """True if the run has to go back; in mode "observe" it only says what it would do."""
        if not verdict.interrupts:
            return False
        if self._plan.run.watchdog.mode == "act":
            return True
        if self._world.is_main:
            known_good = list_saved_steps(self._storage.root, state.rollbacks, known_good=True)
            response = self._respond(state, verdict, state.step, known_good)
            self._incidents.record_observation(state.step, verdict, response)
        return False

    def _respond(self, state: RunState, verdict: Verdict, step: int, known_good: Sequence[int]) -> Response:
        section, timeline = self._plan.run.watchdog, self._plan.timeline
        return respond(section, timeline, state.rollbacks, verdict, step, known_good)

    def roll_back(
        self, state: RunState, verdict: Verdict, engine: Engine, loader: BatchLoader, step: int
    ) -> RunState:
        """Roll back to an older known-good checkpoint, in this process; the state to resume from. Collective.

        What is skipped, and that a rollback was spent, is on disk before the older weights are loaded.

        Raises:
            NeedsOperator: no response is left, or none would help; a supervisor must not restart the run.
        """
        assert verdict.onset is not None
        self._incidents.record_recurrence(verdict.onset, step)
        found, response = self._way_back(state, verdict, step)
        rollback = self._decided(verdict, response, found.state.step, step)
        after = apply_rollback(
            state, found.state, response, rollback, self._plan.run.watchdog, self._plan.timeline
        )
        self._written(after)
        log.warning(f"step {step:,}: {verdict.message}; {response.action} {response.reason}")
        self._told(after, loader, verdict, response.reason)
        restore.discard_after(self._storage, after.step, self._world)
        restore.restore(found, engine, self._plan.run.seed, self._world)
        self._find_high_loss_samples(after, engine, loader, state.ledger)
        self._incidents.begin(after)
        return after

    def _told(self, after: RunState, loader: BatchLoader, verdict: Verdict, reason: str, **more: Any) -> None:
        """The newest rollback of `after`, and what it skips."""
        rollback = after.rollbacks[-1]
        self._incidents.record_decision(
            "rollback",
            len(after.rollbacks),
            rollback,
            verdict,
            reason,
            to_step=rollback.to_step,
            skipped=_describe_skip(loader, after) if rollback.response == "skip" else None,
            **more,
        )

    def _find_high_loss_samples(
        self, after: RunState, engine: Engine, loader: BatchLoader, ledger: SkipLedger
    ) -> None:
        """Find high-loss samples among those read under `ledger`, by the restored weights. Collective."""
        rollback = after.rollbacks[-1]
        steps = find_offending_steps(rollback.onset, rollback.to_step, rollback.step)
        found = find_high_loss_samples(engine, loader, self._enter, steps, ledger, self._world)
        self._incidents.record_high_loss_samples(len(after.rollbacks), rollback, found)

    def finish(self, state: RunState) -> None:
        """Say it loudly if the last steps of the run were not healthy: too late for a verdict."""
        patience = self._plan.run.watchdog.patience
        if state.watchdog.spike is None or self._plan.run.watchdog.mode == "off":
            return
        if self._world.is_main:
            known_good = list_saved_steps(self._storage.root, state.rollbacks, known_good=True)
            newest = f"step {max(known_good):,}" if known_good else "none"
            onset = state.watchdog.spike.onset
            self._monitor.report(
                "warning",
                f"the run ends in an unhealed spike that began at step {onset:,}, less than "
                f"{format_count_of(patience, 'step')} before the end, too late for a rollback; newest "
                f"known-good checkpoint: {newest}",
                step=state.step,
            )

    def _way_back(self, state: RunState, verdict: Verdict, step: int) -> tuple[Found, Response]:
        """The checkpoint to roll back to, verified and ready to load. Collective."""
        known_good = self._saved_steps(state, known_good=True)
        while True:
            response = self._respond(state, verdict, step, known_good)
            if response.action == "stop" or response.to_step is None:
                raise self._needs_operator(state, verdict, response, step)
            outcome = find_at_step(self._storage, response.to_step, self._world)
            if isinstance(outcome, Found):
                deepspeed = self._plan.deepspeed
                return restore.reshard_if_needed(outcome, deepspeed, self._storage, self._world), response
            log.warning(f"the checkpoint of step {response.to_step:,} cannot be restored: {outcome}")
            known_good = [c for c in known_good if c != response.to_step]

    def _saved_steps(self, state: RunState, known_good: bool) -> list[int]:
        """The steps of the checkpoints that any host has, or that were uploaded. Collective."""
        root, leads = self._storage.root, self._storage.is_leader(self._world)
        here = run_on_each_rank(
            self._world, lambda: list_saved_steps(root, state.rollbacks, known_good) if leads else []
        )
        uploaded = run_on_main(self._world, lambda: list_uploaded_steps(self._storage, known_good))
        return sorted({*(step for steps in here for step in steps), *uploaded})

    def _decided(self, verdict: Verdict, response: Response, to_step: int, step: int) -> Rollback:
        assert verdict.onset is not None
        assert verdict.kind is not None
        return Rollback(to_step, step, verdict.onset, verdict.kind, response.action, self._attempt)

    def _written(self, after: RunState, unreported: str | None = None) -> None:
        try:
            run_on_main(self._world, lambda: write_rollback_log(self._plan.out, after, unreported))
        except RunError as problem:
            if unreported is not None:
                log.warning(f"cannot record that operator action is required: {problem}")
                return
            path = self._plan.out / ROLLBACKS
            raise mark_agreed(
                CannotSave(f"cannot roll back: {path} cannot be written: {problem}; free disk space")
            ) from None

    def _needs_operator(
        self, state: RunState, verdict: Verdict, response: Response, step: int
    ) -> NeedsOperator:
        """Write down where the next start continues, and say all that is known. Collective."""
        if response.to_step is None:  # none is known good: the newest that is older than the trouble
            assert verdict.onset is not None
            older = [at for at in self._saved_steps(state, known_good=False) if at < verdict.onset]
            response = replace(response, to_step=max(older, default=0))
        assert response.to_step is not None
        stop = self._decided(verdict, response, response.to_step, step)
        stopped = replace(state, rollbacks=(*state.rollbacks, stop))
        diagnosis = self._diagnosis(state, verdict, response, step)
        self._written(stopped, unreported=diagnosis)
        self._incidents.record_decision(
            "needs_operator",
            len(stopped.rollbacks),
            stop,
            verdict,
            response.reason,
            to_step=response.to_step,
            diagnosis=diagnosis,
        )
        return NeedsOperator(diagnosis)

    def _diagnosis(self, state: RunState, verdict: Verdict, response: Response, step: int) -> str:
        tried = "".join(
            f"\n  step {r.step:,}: {r.kind} since step {r.onset:,}; {r.response} from step {r.to_step:,}"
            for r in state.rollbacks
        )
        next_start = (
            f"The next start resumes from checkpoint step {response.to_step:,} and abandons later ones; "
            'with watchdog.mode="observe" it resumes from the newest'
            if response.to_step
            else "No checkpoint is older: start a new run with another `out`, or resume from the newest "
            'with watchdog.mode="observe"'
        )
        why = "" if verdict.action == "stop" else "recovery policy exhausted: "
        return (
            f"step {step:,}: {verdict.message}; {why}{response.reason}. Look at "
            f"{self._plan.out}/LOGBOOK.md, the data around step {verdict.onset or step:,} and "
            f"schedule.peak_lr, then restart. {next_start}{tried}"
        )


def list_saved_steps(root: Path, rollbacks: Sequence[Rollback], known_good: bool) -> list[int]:
    """List the steps in a folder that a run may roll back to; abandoned ones never, even if pinned."""
    folders = [folder for folder in list_published(root) if not known_good or (folder / KNOWN_GOOD).exists()]
    return [parse_step(f.name) or 0 for f in folders if not is_marked_abandoned(f, rollbacks)]


def list_uploaded_steps(storage: StorageLayout, known_good: bool) -> list[int]:
    """List the known steps at the remote, without abandoned ones; empty if the remote does not answer."""
    if storage.remote is None:
        return []
    try:
        steps = storage.remote.list_steps()
        return [
            step for step in steps if not known_good or storage.remote.get_size(step, KNOWN_GOOD) is not None
        ]
    except OSError as error:
        log.warning(f"which checkpoints {storage.remote.location} has is not known: {error}")
        return []


def _describe_skip(loader: BatchLoader, state: RunState) -> Mapping[str, Any]:
    """The newest entry of the ledger, with its samples."""
    skip = state.ledger.skips[-1]
    return {
        "phase": skip.phase,
        "start": skip.start,
        "stop": skip.stop,
        "num_samples": skip.stop - skip.start,
        "samples": loader.sampler.skipped(skip, state.ledger).group_by_source(),
    }


def find_offending_steps(onset: int, to_step: int, step: int) -> range:
    """The steps to look at: those around the onset that lie between the checkpoint and the decision."""
    return range(max(to_step + 1, onset - STEPS_BEFORE), min(step, onset + STEPS_AFTER) + 1)


def find_high_loss_samples(
    engine: Engine,
    loader: BatchLoader,
    enter: Callable[[int], None],
    steps: Sequence[int],
    ledger: SkipLedger,
    world: World,
) -> list[dict[str, Any]]:
    """The samples of `steps` (1 for the first) with the highest loss under the engine's weights, that first.

    `enter` puts the model into the phase of a step. Empty on all ranks but rank 0. No random stream moves.
    Collective.
    """
    found: list[tuple[float, int, int]] = []  # (loss, step, place in the global batch)
    with preserve_streams(), engine.evaluation_mode():
        for step in steps:
            enter(step - 1)
            batch = loader.read(step - 1, ledger)
            sums: list[tuple[float, int]] = []  # of each sample that this rank reads
            for micro in batch.micro_batches:
                losses, labels = compute_token_losses(engine, micro)  # [B, T] each
                counts = (labels != IGNORED).sum(dim=-1).tolist()  # [B]
                sums += zip(map(sum_losses, losses), counts, strict=True)
            rows = gather_rows(world, [number for sample in sums for number in sample])  # [W, 2 * samples]
            means = _compute_mean_losses(rows, engine.sequence_parallel_size)
            found += [(loss, step, index) for index, loss in enumerate(means)]
    if not world.is_main:
        return []
    return _describe_samples(loader, ledger, sorted(found, reverse=True)[:NUM_HIGH_LOSS_SAMPLES])


def _compute_mean_losses(rows: NDArray[np.float64], sp_size: int) -> list[float]:
    """Return the mean loss of each sample of a global batch, in nats a token; NaN counts as highest.

    `rows` [W, 2 * samples of a rank] are sums and counts; ranks that share their samples are neighbors.
    """
    of_readers = rows.reshape(-1, sp_size, rows.shape[1]).sum(axis=1)  # [R, 2 * samples]
    sums, counts = of_readers.reshape(-1, 2).T  # [samples], [samples]
    means = sums / counts.clip(min=1)
    return [float(mean) for mean in np.where(np.isnan(means), inf, means)]


def _describe_samples(
    loader: BatchLoader, ledger: SkipLedger, suspects: Sequence[tuple[float, int, int]]
) -> list[dict[str, Any]]:
    """High-loss samples with their text. What cannot be shown costs its text, and never the run."""
    described: dict[tuple[int, int], dict[str, Any]] = {}
    for step in sorted({step for _, step, _ in suspects}):
        ids, indices = loader.sampler.ids(step - 1, ledger), [p for _, at, p in suspects if at == step]
        listed = ids.to_list()
        for index in indices:
            source, epoch, sample = listed[index]
            described[step, index] = {
                "source": source,
                "epoch": epoch,
                "sample": sample,
                "documents": [],
                "text": "",
            }
        try:
            for index, passage in zip(indices, read_passages(ids, indices, loader.sources), strict=True):
                shown = {"documents": list(passage.documents), "text": passage.text[:_MOST_CHARACTERS]}
                described[step, index] |= shown
        except Exception as error:  # a tokenizer may raise what it likes, and this is on one rank
            for index in indices:
                described[step, index]["text"] = f"[cannot be shown: {type(error).__name__}: {error}]"
    return [{"step": step, "loss": loss, **described[step, index]} for loss, step, index in suspects]
