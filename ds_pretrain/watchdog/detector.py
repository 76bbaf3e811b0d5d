"""Tells a harmless spike from an unhealthy run: a step's record and a memory in, a verdict and a memory out.

A pure state machine: no clock, no I/O, no randomness. Every rank runs it on the same all-rank record and
comes to the same verdict. A value is judged before it enters the statistics, and enters them only if it was
found normal. What each kind means, and where its numbers come from, is in docs/design/watchdog.md.
"""

from dataclasses import replace
from math import exp, isfinite, log
from statistics import fmean
from typing import Protocol

from ds_pretrain.config.schema import WatchdogSection
from ds_pretrain.core.state import Action, RunningStats, Streak, Verdict, WatchdogState
from ds_pretrain.core.text import format_count_of
from ds_pretrain.watchdog.stats import accept, compute_score, count_last_above, count_recent

LOSS_FLOOR = 0.002  # least sigma of the loss, as a share of it
LOSS_FLOOR_NATS = 0.001  # and in nats, for a run that has learned its data by heart
DRIFT_SIGMAS = 1.5  # a drift is at least that many sigmas, whatever `drift_threshold` allows
HEALED_SHARE = 1 / 2  # of the threshold: it is over below that
RECOVERY_STEPS = 2  # in a row: a noisy loss has single normal values in the midst of a jump
MOST_WINDOWS_FALLEN = 10  # a loss that comes back within so many windows may come back
GUESSING = log(1_000_000)  # nats: guessing evenly from a million tokens, more than any vocabulary has
NORM_FLOOR = 0.05  # least sigma of the logarithm of the gradient norm: 5 %
SMALLEST_NORM = 1e-30  # stands for 0, which has no logarithm
HIGHEST_LOG = 700.0  # of a limit: e^700 is still a float
ONSET_SHARE = 1 / 6  # of the threshold: trouble began where values without a gap exceed it
ONSET_REACH = 5  # steps before the threshold was passed, at most


class StepLike(Protocol):
    """The fields of a step that are judged; StepRecord and points of recorded curves have them."""

    @property
    def step(self) -> int: ...
    @property
    def phase(self) -> str: ...
    @property
    def loss(self) -> float: ...
    @property
    def loss_max_rank(self) -> float: ...
    @property
    def grad_norm(self) -> float | None: ...
    @property
    def update_applied(self) -> bool | None: ...  # None: not known


OK = Verdict()
Judged = tuple[WatchdogState, Verdict]


def judge(
    settings: WatchdogSection, memory: WatchdogState, record: StepLike, has_norm: bool = True
) -> Judged:
    """Judge one step; the memory to judge the next one with, and the verdict.

    `has_norm` is False for a recorded curve that lacks the gradient norm: a missing one is else non-finite.
    After a "roll_back" the memory is that of a run that has just begun, for whoever continues regardless.
    """
    if settings.mode == "off":
        return memory, OK
    if not _is_finite(record, has_norm):
        return _judge_non_finite(settings, memory, record)
    stride = record.step - memory.step
    if record.phase == memory.phase:
        memory = replace(memory, step=record.step, non_finite=None)
    else:  # level shifts are expected here: what was normal is not any more
        memory = WatchdogState(step=record.step, phase=record.phase)
    memory, guessing = _judge_guessing(settings, memory, record)
    memory, frozen = _judge_same_norm(settings, memory, record.grad_norm if has_norm else None)
    memory, loss = _judge_loss(settings, memory, record, stride)
    memory, drift = _judge_drift(settings, memory)
    memory, norm = _judge_norm(settings, memory, record, stride) if has_norm else (memory, OK)
    verdict = min((loss, drift, guessing, frozen, norm), key=_rank_severity)  # the first of the gravest
    if verdict.roll_back:
        memory = WatchdogState(step=record.step, phase=record.phase)
    elif has_norm and record.update_applied is False:  # that comes first, and what else was seen behind it
        messages = [norm.message] + [verdict.message] * (verdict is not norm)
        verdict = replace(norm, message="; ".join(messages))
    return memory, verdict


def _rank_severity(verdict: Verdict) -> int:
    return {"roll_back": 0, "watch": 1, "ok": 2 if verdict.kind else 3}[verdict.action]


def _is_finite(record: StepLike, has_norm: bool) -> bool:
    values = (record.loss, record.loss_max_rank, *((record.grad_norm,) if has_norm else ()))
    return all(value is not None and isfinite(value) and value >= 0 for value in values)


def _judge_non_finite(settings: WatchdogSection, memory: WatchdogState, record: StepLike) -> Judged:
    """Such values enter no statistics. Told to roll back once a streak: more would say nothing new."""
    streak = _extend_streak(memory.non_finite, record.step)
    memory = replace(memory, step=record.step, non_finite=streak)
    norm = "none" if record.grad_norm is None else f"{record.grad_norm:g}"
    message = (
        f"loss {record.loss:g} (highest rank {record.loss_max_rank:g}), gradient norm {norm}: not finite, "
        f"{streak.num_steps} in a row since step {streak.onset}"
    )
    if record.update_applied:
        message += "; the update was applied, so the weights may be damaged"
    action: Action = "roll_back" if streak.num_steps == settings.max_non_finite_steps else "watch"
    return memory, Verdict(action, "non_finite", streak.onset, message)


def _judge_guessing(settings: WatchdogSection, memory: WatchdogState, record: StepLike) -> Judged:
    if record.loss <= GUESSING:
        return (replace(memory, guessing=None) if memory.guessing else memory), OK
    streak = _extend_streak(memory.guessing, record.step)
    memory = replace(memory, guessing=streak)
    if streak.num_steps < settings.patience:
        return memory, OK  # a start from bad weights looks like this, and is over soon
    message = (
        f"loss {record.loss:.4g} and above ln(1,000,000) = {GUESSING:.1f} since step {streak.onset}: "
        "worse than guessing from any vocabulary"
    )
    return memory, Verdict("roll_back", "worse_than_guessing", streak.onset, message)


def _judge_loss(settings: WatchdogSection, memory: WatchdogState, record: StepLike, stride: int) -> Judged:
    usual = memory.loss
    if not is_warm(settings, usual):
        return replace(memory, loss=accept(usual, record.loss, settings.window)), OK
    floor = _compute_loss_floor(usual)
    sigmas = compute_score(usual, record.loss, floor)
    if memory.spike is not None and sigmas < settings.loss_sigmas * HEALED_SHARE:
        return _judge_recovery(settings, memory, memory.spike, record)
    if memory.spike is not None or sigmas > settings.loss_sigmas:
        num_before = count_last_above(usual, settings.loss_sigmas * ONSET_SHARE, floor, ONSET_REACH)
        spike = _extend_streak(memory.spike, record.step, num_before, stride)
        before = _get_level_before_fall(settings, memory)
        highest = 0.0 if before is None else before + settings.loss_sigmas * max(usual.mad_sigma, floor)
        if spike.num_steps >= settings.patience and record.loss <= highest:
            return _judge_return(memory, record, spike)
        return replace(memory, spike=spike, fall=None), _judge_spike(settings, usual, record, sigmas, spike)
    if sigmas < -settings.loss_sigmas:
        return _judge_fall(settings, memory, record, sigmas)
    return replace(memory, fall=None, loss=accept(usual, record.loss, settings.window)), OK


def _compute_loss_floor(usual: RunningStats) -> float:
    return max(LOSS_FLOOR * usual.median, LOSS_FLOOR_NATS)


def _judge_spike(
    settings: WatchdogSection, usual: RunningStats, record: StepLike, sigmas: float, spike: Streak
) -> Verdict:
    message = (
        f"loss {record.loss:.4g} (highest rank {record.loss_max_rank:.4g}) is {sigmas:.1f} sigmas "
        f"above {usual.median:.4g}, since step {spike.onset}"
    )
    if spike.num_steps >= settings.patience:
        message += f", and did not heal within {format_count_of(settings.patience, 'step')}"
        return Verdict("roll_back", "lasting_spike", spike.onset, message)
    return Verdict("watch", "spike", spike.onset, message)


def _judge_recovery(
    settings: WatchdogSection, memory: WatchdogState, spike: Streak, record: StepLike
) -> Judged:
    """One normal loss in a spike may be luck; two in a row end it."""
    memory = replace(memory, loss=accept(memory.loss, record.loss, settings.window))
    if spike.num_normal + 1 < RECOVERY_STEPS:
        return replace(memory, spike=replace(spike, num_normal=spike.num_normal + 1)), OK
    memory = replace(memory, spike=None)
    if spike.num_steps == 1:
        return memory, Verdict("ok", "blip", spike.onset, f"one-step blip at step {spike.onset}")
    message = f"spike of {spike.num_steps} steps at step {spike.onset} has healed"
    return memory, Verdict("ok", "spike", spike.onset, message)


def _judge_fall(settings: WatchdogSection, memory: WatchdogState, record: StepLike, sigmas: float) -> Judged:
    """A lower loss does no harm, but may mean that the data are not what they should be."""
    fall = _extend_streak(memory.fall, record.step)
    message = (
        f"loss {record.loss:.4g} is {-sigmas:.1f} sigmas below {memory.loss.median:.4g}, since step "
        f"{fall.onset}: too easy or repeated data, or a change of rate?"
    )
    verdict = Verdict("watch", "fall", fall.onset, message)
    if fall.num_steps < settings.patience:
        return replace(memory, fall=fall), verdict
    # This is the new level.
    before = memory.loss.median
    return WatchdogState(record.step, memory.phase, before_fall=before, fall_step=fall.onset), verdict


def _get_level_before_fall(settings: WatchdogSection, memory: WatchdogState) -> float | None:
    """The level from which the loss fell not long ago: if it returns there, no harm was done."""
    is_recent = memory.loss.num_accepted <= MOST_WINDOWS_FALLEN * settings.window
    return memory.before_fall if is_recent else None


def _judge_return(memory: WatchdogState, record: StepLike, spike: Streak) -> Judged:
    message = (
        f"loss {record.loss:.4g} is back at the {memory.before_fall:.4g} from which it fell at step "
        f"{memory.fall_step}: what was too easy is over"
    )
    return WatchdogState(step=record.step, phase=record.phase), Verdict("watch", "fall", spike.onset, message)


def _judge_drift(settings: WatchdogSection, memory: WatchdogState) -> Judged:
    """A rise of the mean of recent losses above the lowest level so far, as a fraction and in sigmas."""
    usual = memory.loss
    is_open = memory.spike is not None or memory.fall is not None  # then nothing was accepted
    if is_open or not is_warm(settings, usual) or len(usual.recent) < count_recent(settings.window):
        return memory, OK
    slow = _update_slow_level(settings, memory)
    lowest = slow if memory.lowest_level is None else min(slow, memory.lowest_level)
    # A high interval that is over, and was accepted in the warm-up, is no rise: the later half counts too.
    level = min(fmean(usual.recent), fmean(usual.recent[len(usual.recent) // 2 :]))
    usual_level = max(lowest, _get_level_before_fall(settings, memory) or 0.0)
    sigma = max(usual.mad_sigma, _compute_loss_floor(usual))
    rise = level - usual_level
    drift = min(
        rise / (settings.drift_threshold * max(usual_level, LOSS_FLOOR_NATS)), rise / (DRIFT_SIGMAS * sigma)
    )
    halfway = None if drift < 0.5 else memory.drift_halfway or memory.step
    memory = replace(memory, slow_level=slow, lowest_level=lowest, drift_halfway=halfway)
    if halfway is None:
        return memory, OK
    onset = max(1, 2 * halfway - memory.step)  # as much before half the rise as this is after it
    message = (
        f"the mean of the last {len(usual.recent)} losses rose from {usual_level:.4g} to "
        f"{level:.4g} ({rise / sigma:.1f} sigmas), since about step {onset}"
    )
    return memory, Verdict("roll_back" if drift >= 1 else "watch", "drift", onset, message)


def _update_slow_level(settings: WatchdogSection, memory: WatchdogState) -> float:
    """A mean that forgets in a quarter of a window: its lowest is not that of noise."""
    usual = memory.loss
    if memory.slow_level is None:
        return usual.median
    return memory.slow_level + (usual.recent[-1] - memory.slow_level) * min(1.0, 4 / settings.window)


def norm_limit(settings: WatchdogSection, memory: WatchdogState, phase: str) -> float | None:
    """The gradient norm above which the next update, in `phase`, is skipped; None: no limit.

    `stats.compute_score` equals `skip_update_sigmas` there. Also None while too little is known, and once the
    norm was high for half of `patience`: its level has changed then, and training must continue. A spike
    of the loss needs the other half to heal, which it cannot while all updates are skipped.
    """
    usual, rise = memory.norm, memory.norm_rise
    if settings.skip_update_sigmas is None or settings.mode != "act" or phase != memory.phase:
        return None
    if not is_warm(settings, usual) or (rise is not None and 2 * rise.num_steps >= settings.patience):
        return None
    above = settings.skip_update_sigmas * max(usual.mad_sigma, NORM_FLOOR)
    return exp(min(usual.median + max(usual.trend + above, above / 2), HIGHEST_LOG))


def _judge_same_norm(settings: WatchdogSection, memory: WatchdogState, norm: float | None) -> Judged:
    """The same norm of different batches, to the last bit, is not a norm of their gradients."""
    if norm is None and memory.last_norm is None:
        return memory, OK
    if norm is None or norm != memory.last_norm:
        return replace(memory, last_norm=norm, same_norm=None), OK
    streak = _extend_streak(memory.same_norm, memory.step)
    memory = replace(memory, same_norm=streak)
    if 2 * streak.num_steps < settings.patience:
        return memory, OK
    more = format_count_of(streak.num_steps, "more step")
    message = f"the gradient norm is {norm:g} at {more} since step {streak.onset}"
    action: Action = "roll_back" if streak.num_steps >= settings.patience else "watch"
    return memory, Verdict(action, "frozen_norm", streak.onset, message)


def _judge_norm(settings: WatchdogSection, memory: WatchdogState, record: StepLike, stride: int) -> Judged:
    """A high norm alone is watched, never rolled back: many bursts leave no trace in the loss."""
    usual, norm = memory.norm, record.grad_norm
    if norm is None:
        return memory, OK
    value = log(max(norm, SMALLEST_NORM))
    if record.update_applied is False:
        return _judge_skipped_update(settings, memory, norm, value, stride)
    if memory.spike is not None or memory.fall is not None:
        return memory, OK
    if (
        not is_warm(settings, usual)
        or (sigmas := compute_score(usual, value, NORM_FLOOR)) <= settings.norm_sigmas
    ):
        return replace(memory, norm_rise=None, norm=accept(usual, value, settings.window)), OK
    memory, rise = _extend_norm_rise(settings, memory, stride)
    message = (
        f"gradient norm {norm:.4g} is {sigmas:.1f} sigmas above the median, since step "
        f"{rise.onset}; the loss has not moved"
    )
    return memory, Verdict("watch", "norm_rise", rise.onset, message)


def _judge_skipped_update(
    settings: WatchdogSection, memory: WatchdogState, norm: float, value: float, stride: int
) -> Judged:
    """The weights are clean, and the norm enters no statistics, whatever it was. Also in an open spike."""
    message = f"update skipped: gradient norm {norm:.4g}"
    if is_warm(settings, memory.norm):
        sigmas = compute_score(memory.norm, value, NORM_FLOOR)
        message += f", {sigmas:.1f} sigmas above the median {exp(memory.norm.median):.4g}"
    memory, rise = _extend_norm_rise(settings, memory, stride)
    limit = (
        ""
        if settings.skip_update_sigmas is None
        else f" (watchdog.skip_update_sigmas = {settings.skip_update_sigmas:g})"
    )
    message += f"{limit}; high since step {rise.onset}; weights and optimizer state are unchanged"
    return memory, Verdict("watch", "norm_rise", rise.onset, message)


def _extend_norm_rise(
    settings: WatchdogSection, memory: WatchdogState, stride: int
) -> tuple[WatchdogState, Streak]:
    """One more step with a high norm; after a window of them that is the new level, to be learned again."""
    above = settings.norm_sigmas * ONSET_SHARE
    num_before = count_last_above(memory.norm, above, NORM_FLOOR, ONSET_REACH)
    rise = _extend_streak(memory.norm_rise, memory.step, num_before, stride)
    if rise.num_steps < settings.window:
        return replace(memory, norm_rise=rise), rise
    return replace(memory, norm_rise=None, norm=RunningStats()), rise


def is_warm(settings: WatchdogSection, usual: RunningStats) -> bool:
    """Return whether enough values are known to judge: a quarter of the window."""
    return len(usual.residuals) >= max(1, settings.window // 4)


def _extend_streak(streak: Streak | None, step: int, num_before: int = 0, stride: int = 1) -> Streak:
    """The streak with one more step, or a new one that began `num_before` steps earlier."""
    if streak is None:
        return Streak(step - num_before * stride, num_before + 1)
    return replace(streak, num_steps=streak.num_steps + streak.num_normal + 1, num_normal=0)
