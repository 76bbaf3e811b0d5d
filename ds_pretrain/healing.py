"""The watchdog at work in the loop: what it sees, and the way back to an older checkpoint."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ds_pretrain.checkpoint import store
from ds_pretrain.checkpoint.layout import RUN_STATE, published, step_of
from ds_pretrain.checkpoint.places import Places
from ds_pretrain.checkpoint.retention import CALM
from ds_pretrain.checkpoint.verdict import Found, found_at_step
from ds_pretrain.cure import write_cure
from ds_pretrain.data.feed import Feed
from ds_pretrain.data.sampler import SampleIds
from ds_pretrain.engine import Engine
from ds_pretrain.errors import NeedsPerson, RunError, agreed
from ds_pretrain.incidents import Incidents, RankLosses
from ds_pretrain.monitor.monitor import Monitor
from ds_pretrain.plan import Plan
from ds_pretrain.record import StepRecord
from ds_pretrain.response import Response, after_rollback, is_abandoned, respond
from ds_pretrain.state import Rollback, RunState, SkipLedger
from ds_pretrain.suspects import find_suspects, offending_steps
from ds_pretrain.watchdog import Verdict, judge, norm_limit
from ds_pretrain.world import World, from_main


class Watchdog:
    """Judges each step, on every rank alike, and takes the run back where that is the verdict."""

    def __init__(
        self,
        plan: Plan,
        monitor: Monitor,
        places: Places,
        attempt: int,
        world: World,
        tell: Callable[[str], None],
    ) -> None:
        """Collective."""
        self._plan, self._places, self._world = plan, places, world
        self._attempt, self._tell = attempt, tell
        self._incidents = Incidents(plan, monitor, world, tell)

    def take_up(self, state: RunState, engine: Engine, feed: Feed) -> None:
        """Begin with the state of a start; tell what a crash kept from being told. Collective."""
        lacking = from_main(self._world, self._incidents.lacking(state) if self._world.is_main else ())
        if lacking:
            rollback, ledger = state.rollbacks[-1], state.ledger
            if rollback.response == "skip":  # what it met was read under the ledger before it
                ledger = SkipLedger(ledger.skips[:-1])
            if "rollback" in lacking:
                seen = "what was seen is in the log: the process died before it was written down here"
                self._told(
                    state, feed, Verdict("roll_back", None, rollback.onset, seen), "as decided before a crash"
                )
            if state.step == rollback.to_step:
                self._look_for_suspects(state, engine, feed, ledger)
        self._incidents.begin(state)

    def norm_limit(self, state: RunState) -> float | None:
        """The gradient norm above which the update after `state` is dropped; None: none is."""
        phase = self._plan.timeline.at(state.step).phase
        return norm_limit(self._plan.run.watchdog, state.watchdog, phase)

    def judge(
        self, state: RunState, record: StepRecord, rank_losses: RankLosses, ids: SampleIds
    ) -> tuple[RunState, Verdict]:
        """The state after a step, with what the watchdog remembers of it, and its verdict."""
        memory, verdict = judge(self._plan.run.watchdog, state.watchdog, record)
        healthy = verdict.action == "ok" and memory.spike is None  # one usual loss in a spike may be luck
        after = state.after_step(record.update_applied, memory, healthy)
        self._incidents.note(after, record, rank_losses, verdict)
        if not record.update_applied:
            self._incidents.dropped(record, ids, after.num_dropped)
        return after, verdict

    def wants_back(self, verdict: Verdict) -> bool:
        """True if the run has to go back; in mode "observe" it only says so."""
        if not verdict.roll_back:
            return False
        if self._plan.run.watchdog.mode == "act":
            return True
        self._tell(f'the watchdog would roll back ({verdict.message}); watchdog.mode = "observe"')
        return False

    def roll_back(self, state: RunState, verdict: Verdict, engine: Engine, feed: Feed, step: int) -> RunState:
        """Go back to an older calm checkpoint, in this process; the state to go on from. Collective.

        What is skipped, and that a rollback was spent, is on disk before the older weights are loaded.

        Raises:
            NeedsPerson: nothing is left to try; a supervisor must not start the run again.
        """
        assert verdict.onset is not None
        self._incidents.met_again(verdict.onset, step)
        found, response = self._way_back(state, verdict, step)
        rollback = self._decided(verdict, response, found.state.step, step)
        after = after_rollback(state, found.state, response, rollback, self._plan.ladder, self._plan.timeline)
        self._written(after)
        self._tell(f"step {step:,}: {verdict.message}; {response.action}: going on {response.reason}")
        self._told(after, feed, verdict, response.reason)
        store.leave(self._places, after.step, self._world, self._tell)
        store.restore(found, engine, self._plan.run.seed, self._world, self._tell)
        self._look_for_suspects(after, engine, feed, state.ledger)
        self._incidents.begin(after)
        return after

    def _told(self, after: RunState, feed: Feed, verdict: Verdict, reason: str) -> None:
        """The newest rollback of `after`, and what it skips."""
        rollback = after.rollbacks[-1]
        self._incidents.decided(
            "rollback",
            len(after.rollbacks),
            rollback,
            verdict,
            reason,
            to_step=rollback.to_step,
            skipped=_skipped(feed, after) if rollback.response == "skip" else None,
        )

    def _look_for_suspects(self, after: RunState, engine: Engine, feed: Feed, ledger: SkipLedger) -> None:
        """In what was read under `ledger`, by the weights that were gone back to. Collective."""
        rollback = after.rollbacks[-1]
        steps = offending_steps(rollback.onset, rollback.to_step, rollback.step)
        found = find_suspects(engine, feed, steps, ledger, self._world)
        self._incidents.suspects(len(after.rollbacks), rollback, found)

    def _way_back(self, state: RunState, verdict: Verdict, step: int) -> tuple[Found, Response]:
        """The checkpoint to go back to, verified and ready to load. Collective."""
        calm = from_main(self._world, calm_steps(self._places, state) if self._world.is_main else [])
        while True:
            response = respond(self._plan.ladder, state.rollbacks, verdict, step, calm)
            if response.action == "stop" or response.to_step is None:
                raise self._needs_person(state, verdict, response, step)
            outcome = found_at_step(self._places, response.to_step, self._world, self._tell)
            if isinstance(outcome, Found):
                deepspeed = self._plan.deepspeed
                return store.fitted(outcome, deepspeed, self._places, self._world, self._tell), response
            self._tell(f"the checkpoint of step {response.to_step:,} cannot be gone back to: {outcome}")
            calm = [c for c in calm if c != response.to_step]

    def _decided(self, verdict: Verdict, response: Response, to_step: int, step: int) -> Rollback:
        assert verdict.onset is not None
        assert verdict.kind is not None
        return Rollback(to_step, step, verdict.onset, verdict.kind, response.action, self._attempt)

    def _written(self, after: RunState) -> None:
        problem = None
        if self._world.is_main:
            try:
                write_cure(self._plan.out, after)
            except OSError as error:
                problem = str(error)
        problem = from_main(self._world, problem)
        if problem is not None:
            raise agreed(RunError(f"the rollback cannot be written down, so it is not made: {problem}"))

    def _needs_person(self, state: RunState, verdict: Verdict, response: Response, step: int) -> NeedsPerson:
        """Write down where the next start goes on, and say all that is known. Collective."""
        stop = self._decided(verdict, response, response.to_step or 0, step)
        stopped = replace(state, rollbacks=(*state.rollbacks, stop))
        diagnosis = self._diagnosis(state, verdict, response, step)
        if response.to_step is not None:
            self._written(stopped)
        self._incidents.decided(
            "needs_person",
            len(stopped.rollbacks),
            stop,
            verdict,
            response.reason,
            to_step=response.to_step,
            diagnosis=diagnosis,
        )
        return NeedsPerson(diagnosis)

    def _diagnosis(self, state: RunState, verdict: Verdict, response: Response, step: int) -> str:
        tried = "".join(
            f"\n  step {r.step:,}: {r.kind} since step {r.onset:,}; {r.response} from step {r.to_step:,}"
            for r in state.rollbacks
        )
        next_start = (
            f"The next start goes on from the calm checkpoint of step {response.to_step:,}, and gives up "
            'later ones that are not pinned; with watchdog.mode="observe" it goes on from the newest'
            if response.to_step is not None
            else "The next start goes on from the newest checkpoint: move away those from after the onset"
        )
        return (
            f"step {step:,}: {verdict.message}; nothing is left to try: {response.reason}. Look at "
            f"{self._plan.out}/LOGBOOK.md, the data around step {verdict.onset or step:,} and schedule.peak, "
            f"then start again. {next_start}{tried}"
        )


def calm_steps(places: Places, state: RunState) -> list[int]:
    """The checkpoints that a run may go back to: none, though pinned, of a branch that it has left."""
    steps = []
    for folder in published(places.root):
        step = step_of(folder.name)
        if step is None or not (folder / CALM).exists():
            continue
        with suppress(OSError, ValueError, KeyError, TypeError):  # it would not verify either
            saved = RunState.from_json((folder / RUN_STATE).read_text(encoding="utf-8"))
            steps += [] if is_abandoned(saved, state.rollbacks) else [step]
    return steps


def _skipped(feed: Feed, state: RunState) -> Mapping[str, Any]:
    """The newest entry of the ledger, with its samples."""
    skip = state.ledger.skips[-1]
    samples: dict[str, dict[str, list[int]]] = {}
    for source, epoch, sample in feed.sampler.skipped(skip).listed():
        samples.setdefault(source, {}).setdefault(str(epoch), []).append(sample)
    size = {"num_samples": skip.stop - skip.start}
    return {"phase": skip.phase, "start": skip.start, "stop": skip.stop, **size, "samples": samples}
