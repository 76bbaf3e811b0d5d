"""Records and reports an incident: each rank's loss, what a replay showed, how it ended.

Nothing here decides anything. Every rank holds the same value of what it knows; only rank 0 reads the record
of the run, and only its monitor writes.
"""

import platform
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import isfinite
from statistics import mode
from typing import Any

from ds_pretrain.config.deepspeed import advise_on_non_finite
from ds_pretrain.config.plan import Plan
from ds_pretrain.core.distributed import World, gather_objects
from ds_pretrain.core.jsonl import METRICS, read_metrics_backwards
from ds_pretrain.core.metrics import StepRecord
from ds_pretrain.core.state import Rollback, RunState, Verdict
from ds_pretrain.data.sampler import SampleIds
from ds_pretrain.monitor.monitor import Monitor
from ds_pretrain.watchdog.detector import ONSET_REACH
from ds_pretrain.watchdog.policy import Response, is_same_onset
from ds_pretrain.watchdog.replay import Replay, ReplayedStep, conclude, find_suspect_hosts, read_passes
from ds_pretrain.watchdog.rollback_log import read_rollback_log

RankLosses = tuple[float, ...]  # the mean loss of each rank at one step
_FEW_NON_FINITE = 3  # so many within a window are no accident
_LOOK_BACK = 10  # times `patience`: rollbacks older than that are not looked for any more
_OUTCOMES = {"replay": "the replay cured it", "skip": "it was the data that are skipped now"}


class Incidents:
    """Follows each rollback to its outcome, and reports it."""

    def __init__(self, plan: Plan, monitor: Monitor, world: World) -> None:
        """Collective."""
        self._plan, self._monitor, self._world = plan, monitor, world
        self._hosts = gather_objects(world, f"{platform.node()}:{world.local_rank}")
        self._patience = plan.run.watchdog.patience
        self._recent: deque[tuple[int, RankLosses]] = deque(maxlen=self._patience + 2 * ONSET_REACH)
        self._replay: Replay | None = None  # on rank 0
        self._concluded: set[int] = set()  # numbers of those whose outcome has been reported
        self._open: dict[int, Rollback] = {}  # what has been rolled back for and is not passed yet, by number
        self._said: dict[str, tuple[str, int | None]] = {}  # action and onset, by the kind of trouble
        # The last steps whose norm was no number while the loss was one.
        self._non_finite: deque[int] = deque(maxlen=_FEW_NON_FINITE)
        self._has_advised = False
        self._observed: str | None = None  # the kind of trouble that mode "observe" has last told

    def list_unreported(self, state: RunState) -> tuple[str, ...]:
        """List the events of the newest, still open rollback that a crash kept from being reported."""
        number = len(state.rollbacks)
        if number > len(
            read_rollback_log(self._plan.out).rollbacks
        ):  # another run's, from which this one began
            return ()
        told = {event for event, incident in self._told(state) if incident == number}
        if number not in self._open_ones(state):
            return ()
        return tuple(event for event in ("rollback", "high_loss_samples") if event not in told)

    def _told(self, state: RunState) -> set[tuple[Any, Any]]:
        """(event, incident) of what has been reported of the rollbacks that may be open. On rank 0."""
        told: set[tuple[Any, Any]] = set()
        numbers = self._open_ones(state)
        if numbers:
            with suppress(OSError):
                for record in read_metrics_backwards(self._plan.out / METRICS):
                    if "incident" in record:
                        told.add((record.get("event"), record["incident"]))
                    if ("rollback", min(numbers)) in told:
                        break
        self._concluded = {incident for event, incident in told if event == "outcome"}
        return told

    def begin(self, state: RunState) -> None:
        """Take up the rollbacks whose outcome is still to come: after one, and where a start begins."""
        self._said.clear()
        self._recent.clear()
        self._open = self._open_ones(state)
        self._replay = self._read_replay(state)

    def _open_ones(self, state: RunState) -> dict[int, Rollback]:
        """The rollbacks, by number, that are not passed yet and whose trouble has not come back."""
        patience = self._patience
        healthy_since = state.step - state.num_healthy_steps
        return {
            number: rollback
            for number, rollback in enumerate(state.rollbacks, start=1)
            if rollback.response != "stop" and number not in self._concluded
            if state.step < max(rollback.step, healthy_since) + patience  # else it was passed in health
            if state.step < rollback.step + _LOOK_BACK * patience
            if not any(self._is_same_onset(rollback, later.onset) for later in state.rollbacks[number:])
        }

    def _is_same_onset(self, rollback: Rollback, onset: int) -> bool:
        return is_same_onset(self._plan.run.watchdog, self._plan.timeline, rollback, onset)

    def note_step(
        self, state: RunState, record: StepRecord, rank_losses: RankLosses, verdict: Verdict
    ) -> None:
        """Take one step; `state` is the one after it."""
        self._recent.append((record.step, rank_losses))
        self._say(record, verdict, state.num_healthy_steps)
        if self._replay is not None:
            ranks, sp_size = self._world.size, self._plan.sequence_parallel_size
            seen = ReplayedStep(
                record.loss, record.grad_norm, record.batch_checksum, ranks, rank_losses, sp_size
            )
            self._replay = self._replay.after(record.step, seen)
        if state.num_healthy_steps >= self._patience:
            self._observed = None
            self._close_passed(state)

    def record_skipped_update(self, record: StepRecord, ids: SampleIds, num_skipped_updates: int) -> None:
        """An update was not applied: its samples were read and not learned from."""
        if not self._world.is_main:
            return
        if record.grad_norm is None and isfinite(record.loss):
            self._non_finite.append(record.step)
            is_often = len(self._non_finite) == _FEW_NON_FINITE
            if is_often and record.step - self._non_finite[0] < self._plan.run.watchdog.window:
                self._advise(record.step)
        self._monitor.event(
            "skipped_update",
            step=record.step,
            num_skipped_updates=num_skipped_updates,
            cause="non_finite" if record.grad_norm is None else "outlier_norm",
            grad_norm=record.grad_norm,
            samples=ids.to_list(),  # of the global batch
        )

    def _advise(self, step: int) -> None:
        """Losses are finite and norms are not, again and again: it may be how gradients are reduced."""
        if not self._has_advised:
            advice = advise_on_non_finite(self._plan.deepspeed, self._plan.run.deepspeed)
            self._monitor.report("warning", advice, step=step)
        self._has_advised = True

    def record_recurrence(self, onset: int, step: int) -> None:
        """Trouble that began at `onset`: that of which rollback is it again?"""
        for number in [n for n, r in self._open.items() if self._is_same_onset(r, onset)]:
            rollback = self._open.pop(number)
            self._conclude(number, step, recurred=True)
            message = f"the trouble of step {rollback.onset:,} recurred at step {onset:,}"
            self._monitor.event("outcome", incident=number, step=step, outcome="recurred", message=message)

    def record_decision(
        self, kind: str, number: int, rollback: Rollback, verdict: Verdict, reason: str, **more: Any
    ) -> None:
        """A rollback or a stop: what was seen, and what is done about it."""
        around = range(rollback.onset - ONSET_REACH, rollback.onset + ONSET_REACH + 1)
        known = [(at, losses) for at, losses in self._recent if at in around] or list(self._recent)[-1:]
        self._monitor.event(
            kind,
            incident=number,
            step=rollback.step,
            onset=rollback.onset,
            trouble=rollback.kind,
            response=rollback.response,
            reason=reason,
            message=verdict.message,
            **more,
            rank_losses={str(at): list(losses) for at, losses in known},
            hosts=list(self._hosts),
            **self._plan.sharing,
        )

    def record_observation(self, step: int, verdict: Verdict, response: Response) -> None:
        """Report what the watchdog would do in mode "act": once for each streak. On rank 0."""
        if self._observed == verdict.kind:
            return
        self._observed = verdict.kind
        what = f"{response.action}{':' if response.action == 'stop' else ','} {response.reason}"
        self._monitor.report(
            "observed",
            f'{verdict.message}; the watchdog would {what}; watchdog.mode = "observe"',
            step=step,
            response=response.action,
            to_step=response.to_step,
            reason=response.reason,
        )

    def record_high_loss_samples(
        self, number: int, rollback: Rollback, samples: Sequence[Mapping[str, Any]]
    ) -> None:
        """The samples that the weights restored give the highest loss."""
        self._monitor.event("high_loss_samples", incident=number, step=rollback.step, samples=list(samples))

    def _say(self, record: StepRecord, verdict: Verdict, num_healthy_steps: int) -> None:
        """Each trouble once, and once more when it changes or is over; others may come and go in between."""
        kind = verdict.kind
        if kind is None:
            if num_healthy_steps >= self._patience:
                self._said.clear()
            return
        goes_on = verdict.interrupts and self._plan.run.watchdog.mode != "act"  # found every `patience` steps
        said = verdict.action, None if goes_on else verdict.onset
        if self._said.get(kind) == said:
            return
        self._said[kind] = said
        message = verdict.message + (self._name_outlier_rank() if kind == "outlier_rank" else "")
        self._monitor.report(
            "watchdog",
            message,
            step=record.step,
            action=verdict.action,
            trouble=kind,
            onset=verdict.onset,
        )

    def _name_outlier_rank(self) -> str:
        """Name the rank whose loss was the highest at most of the last steps, and its host."""
        highest = [losses.index(max(losses)) for _, losses in self._recent if losses]
        if not highest:
            return ""  # all ranks share their sequences
        rank = mode(highest[-self._patience // 2 :])
        return f"; rank {rank} on {self._hosts[rank]}: check that host and the data that it reads"

    def _read_replay(self, state: RunState) -> Replay | None:
        """The replay that a state stands in, with what of it was done before this start. On rank 0."""
        number = len(state.rollbacks)
        if not self._world.is_main or number not in self._open:
            return None
        rollback = state.rollbacks[-1]
        if rollback.response != "replay":
            return None
        try:
            replay, second = read_passes(read_metrics_backwards(self._plan.out / METRICS), number, rollback)
        except (OSError, LookupError, TypeError) as error:
            said = f"{self._plan.out / METRICS} cannot be read, so the replay is not compared: {error}"
            self._monitor.report("warning", said, step=state.step)
            return None
        for step in sorted(step for step in second if step <= state.step):
            replay = replay.after(step, second[step])
        return replay

    def _close_passed(self, state: RunState) -> None:
        """Report the outcome of each rollback whose place has been passed in health."""
        for number in [n for n, r in self._open.items() if state.step >= r.step + self._patience]:
            rollback = self._open.pop(number)
            self._conclude(number, state.step, recurred=False)
            message = (
                f"{self._patience} healthy steps after step {rollback.step:,}: {_OUTCOMES[rollback.response]}"
            )
            self._monitor.report("outcome", message, incident=number, step=state.step, outcome="healed")

    def _conclude(self, number: int, step: int, recurred: bool) -> None:
        """Report what a replay showed, once."""
        self._concluded.add(number)
        replay = self._replay
        if replay is None or replay.incident != number:
            return
        self._replay = None
        compared = conclude(replay, recurred)
        difference = replay.difference
        self._monitor.report(
            "replay_compared",
            compared.message,
            incident=number,
            step=step,
            finding=compared.finding,
            first_difference=difference and difference.step,
            ranks=list(difference.ranks or ()) if difference else [],
            hosts=list(find_suspect_hosts(replay)) if compared.finding == "passing_fault" else [],
        )
