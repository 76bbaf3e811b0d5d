"""Maps a rollback verdict to a response: which checkpoint, which data, or a stop for the operator.

Pure. A step is named by its number, 1 for the first; a checkpoint by the steps finished when it was saved.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ds_pretrain.config.schema import WatchdogSection
from ds_pretrain.config.timeline import Timeline, find_step_after, find_step_before
from ds_pretrain.core.state import Rollback, RunState, Skip, SkipLedger, Verdict
from ds_pretrain.core.text import format_count_of

Action = Literal["replay", "skip", "stop"]


@dataclass(frozen=True)
class Response:
    """The response to a verdict, and its reason.

    `to_step` is the checkpoint to roll back to; after a "stop" the next start does, if there is one.
    """

    action: Action
    to_step: int | None
    reason: str


def respond(
    section: WatchdogSection,
    timeline: Timeline,
    history: Sequence[Rollback],
    verdict: Verdict,
    step: int,
    known_good_steps: Sequence[int],
) -> Response:
    """Choose the next response to a verdict, at `step`, that training must not go on.

    The same onset again (within reach of an earlier one) takes the next response, and a checkpoint older than
    that of the response before. After a stop, the operator has acted: the policy and the budget start afresh.
    """
    assert verdict.onset is not None
    onset = verdict.onset
    history = select_since_stop(history)
    older = [known_good for known_good in known_good_steps if known_good < onset]
    newest = max(older, default=None)
    if verdict.action == "stop":
        return Response("stop", newest, "no rollback can mend that")
    since = find_step_before(timeline, step, section.rollback_window)
    recent = [rollback for rollback in history if rollback.step > since]
    if len(recent) >= section.max_rollbacks:
        are = "is" if len(recent) == 1 else "are"
        words = (
            f"{format_count_of(len(recent), 'rollback')} in {section.rollback_window} {are} all that "
            f"is allowed"
        )
        return Response("stop", newest, words)
    here = [rollback for rollback in history if is_same_onset(section, timeline, rollback, onset)]
    if len(here) >= len(section.policy):
        tried = ", then ".join(rollback.response for rollback in here)
        reason = f"it recurred at the same step after {tried}" if here else "watchdog.policy is empty"
        return Response("stop", newest, reason)
    before = [known_good for known_good in older if all(known_good < rollback.to_step for rollback in here)]
    if not older:
        return Response(
            "stop", None, f"no known-good checkpoint is older than step {onset:,}, where it began"
        )
    to_step = max(before) if before else min(older)
    what = {"replay": "the same data again", "skip": "without the data around it"}[section.policy[len(here)]]
    return Response(
        section.policy[len(here)], to_step, f"from known-good checkpoint step {to_step:,}, {what}"
    )


def select_since_stop(history: Sequence[Rollback]) -> Sequence[Rollback]:
    """The rollbacks since an operator was last asked for."""
    stops = [index for index, rollback in enumerate(history) if rollback.response == "stop"]
    return history[stops[-1] + 1 :] if stops else history


def is_same_onset(section: WatchdogSection, timeline: Timeline, rollback: Rollback, onset: int) -> bool:
    """True if trouble that began at `onset` is that of the rollback again."""
    place = rollback.onset - 1
    return (
        abs(rollback.onset - onset) <= section.patience + _find_end_of_skip(section, timeline, place) - place
    )


def apply_rollback(
    state: RunState,
    base: RunState,
    response: Response,
    rollback: Rollback,
    section: WatchdogSection,
    timeline: Timeline,
) -> RunState:
    """The state to resume from: that of the older checkpoint `base`, with what `state` knows of skips."""
    ledger = state.ledger
    if response.action == "skip":
        ledger = ledger.with_skip(build_skip(ledger, base.step, rollback, section, timeline))
    return RunState(
        step=base.step,
        ledger=ledger,
        num_skipped_updates=base.num_skipped_updates,
        num_healthy_steps=base.num_healthy_steps,
        watchdog=base.watchdog,
        rollbacks=(*state.rollbacks, rollback),
    )


def build_skip(
    ledger: SkipLedger, base_step: int, rollback: Rollback, section: WatchdogSection, timeline: Timeline
) -> Skip:
    """The draws that steps around an onset read under `ledger`: of its phase, and none that stays trained."""
    place = rollback.onset - 1  # finished steps before it
    segments = [s for s in timeline.segments if s.phase == timeline.at(place).phase]
    before = find_step_before(timeline, place, section.skip_before)
    first = max(before, base_step, segments[0].first_step)
    last = min(_find_end_of_skip(section, timeline, place), segments[-1].end_step) - 1
    ends = []
    for step in (first, last):
        segment = timeline.at(step)
        draws = ledger.draws(segment.phase, timeline.trained_draws_before(step), segment.sequences)
        ends.append((int(draws[0]), int(draws[-1]) + 1))
    return Skip(
        phase=timeline.at(place).phase,
        start=ends[0][0],
        stop=ends[1][1],
        cause=rollback.kind,
        step=rollback.step,
        attempt=rollback.attempt,
    )


def _find_end_of_skip(section: WatchdogSection, timeline: Timeline, place: int) -> int:
    """The step that a skip around `place` ends at: one at least is skipped."""
    return max(place + 1, find_step_after(timeline, place, section.skip_after))
