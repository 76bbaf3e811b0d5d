"""The watchdog at work in the loop: what it sees, what it says, and the way back to an older checkpoint."""

from collections.abc import Callable, Mapping
from typing import Any

from ds_pretrain.checkpoint import store
from ds_pretrain.checkpoint.layout import published, step_of
from ds_pretrain.checkpoint.places import Places
from ds_pretrain.checkpoint.retention import CALM
from ds_pretrain.checkpoint.verdict import Found, found_at_step
from ds_pretrain.cure import write_cure
from ds_pretrain.data.sampler import SampleIds
from ds_pretrain.engine import Engine
from ds_pretrain.errors import NeedsPerson, RunError, agreed
from ds_pretrain.monitor.monitor import Monitor
from ds_pretrain.plan import Plan
from ds_pretrain.record import StepRecord
from ds_pretrain.response import Response, after_rollback, respond
from ds_pretrain.state import Rollback, RunState
from ds_pretrain.watchdog import Verdict, judge
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
        self._plan, self._monitor, self._places, self._world = plan, monitor, places, world
        self._attempt, self._tell = attempt, tell
        self._said: tuple[Any, ...] = ()

    def judge(self, state: RunState, record: StepRecord, ids: SampleIds) -> tuple[RunState, Verdict]:
        """The state after a step, with what the watchdog remembers of it, and its verdict."""
        memory, verdict = judge(self._plan.run.watchdog, state.watchdog, record)
        healthy = verdict.action == "ok" and memory.spike is None  # one usual loss in a spike may be luck
        after = state.after_step(record.update_applied, memory, healthy)
        self._say(record, verdict)
        if not record.update_applied:
            samples = ids.listed()  # of the global batch
            self._monitor.event("dropped", step=record.step, num_dropped=after.num_dropped, samples=samples)
        return after, verdict

    def wants_back(self, verdict: Verdict) -> bool:
        """True if the run has to go back; in mode "observe" it only says so."""
        if not verdict.roll_back:
            return False
        if self._plan.run.watchdog.mode == "act":
            return True
        self._tell(f'the watchdog would roll back ({verdict.message}); watchdog.mode = "observe"')
        return False

    def roll_back(self, state: RunState, verdict: Verdict, engine: Engine, step: int) -> RunState:
        """Go back to an older calm checkpoint, in this process; the state to go on from. Collective.

        What is skipped, and that a rollback was spent, is on disk before the older weights are loaded.

        Raises:
            NeedsPerson: nothing is left to try; a supervisor must not start the run again.
        """
        calm = from_main(self._world, self._calm_steps() if self._world.is_main else [])
        found, response = None, Response("stop", None, "")
        while found is None:
            response = respond(self._plan.ladder, state.rollbacks, verdict, step, calm)
            if response.action == "stop" or response.to_step is None:
                raise NeedsPerson(self._diagnosis(state, verdict, response, step))
            outcome = found_at_step(self._places, response.to_step, self._world, self._tell)
            if isinstance(outcome, Found):
                found = store.fitted(outcome, self._plan.deepspeed, self._places, self._world, self._tell)
            else:
                self._tell(f"the checkpoint of step {response.to_step:,} cannot be gone back to: {outcome}")
                calm = [c for c in calm if c != response.to_step]
        assert verdict.onset is not None
        assert verdict.kind is not None
        assert response.action != "stop"
        rollback = Rollback(
            to_step=found.state.step,
            step=step,
            onset=verdict.onset,
            kind=verdict.kind,
            response=response.action,
            attempt=self._attempt,
        )
        after = after_rollback(state, found.state, response, rollback, self._plan.ladder, self._plan.timeline)
        self._written(after)
        self._tell(f"step {step:,}: {verdict.message}; {response.action}: going on {response.reason}")
        self._monitor.event("rollback", **_fields(rollback, after, verdict))
        store.leave(self._places, after.step, self._world, self._tell)
        store.restore(found, engine, self._plan.run.seed, self._world, self._tell)
        self._said = ()
        return after

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

    def _calm_steps(self) -> list[int]:
        folders = published(self._places.root)
        steps = [step_of(folder.name) for folder in folders if (folder / CALM).exists()]
        return [step for step in steps if step is not None]

    def _say(self, record: StepRecord, verdict: Verdict) -> None:
        """Each trouble once, and once more when it is over."""
        said = (verdict.action, verdict.kind, verdict.onset)
        if said == self._said or (verdict.kind is None and not self._said):
            return
        self._said = said if verdict.kind is not None and verdict.action != "ok" else ()
        if verdict.kind is None:
            return
        self._tell(f"step {record.step:,}: {verdict.message}")
        self._monitor.event(
            "watchdog",
            step=record.step,
            action=verdict.action,
            trouble=verdict.kind,
            onset=verdict.onset,
            message=verdict.message,
        )

    def _diagnosis(self, state: RunState, verdict: Verdict, response: Response, step: int) -> str:
        tried = "".join(
            f"\n  step {r.step:,}: {r.kind} since step {r.onset:,}; {r.response} from step {r.to_step:,}"
            for r in state.rollbacks
        )
        return (
            f"step {step:,}: {verdict.message}; nothing is left to try: {response.reason}. Look at the loss, "
            f"the data around step {verdict.onset or step:,} and schedule.peak, then start again; the calm "
            f"checkpoints are still there{tried}"
        )


def _fields(rollback: Rollback, after: RunState, verdict: Verdict) -> Mapping[str, Any]:
    new = after.ledger.skips[-1] if rollback.response == "skip" else None
    return {
        **{("trouble" if name == "kind" else name): value for name, value in vars(rollback).items()},
        "message": verdict.message,
        "skipped": None if new is None else [new.phase, new.start, new.stop],
    }
