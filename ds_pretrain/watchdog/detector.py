"""Tells a harmless spike from an unhealthy run: a step's record and a memory in, a verdict and a memory out.

A pure state machine: no clock, no I/O, no randomness. Every rank runs it on the same all-rank record and
comes to the same verdict. A value is judged before it enters the statistics, and enters them only if it was
found normal. What each kind means, and where its numbers come from, is in docs/design/watchdog.md.
"""

from dataclasses import replace
from math import ceil, exp, isfinite, log
from statistics import fmean, median
from typing import Protocol

from ds_pretrain.config.schema import WatchdogSection
from ds_pretrain.core.state import Action, Kind, RunningStats, Streak, Verdict, WatchdogState
from ds_pretrain.core.text import format_count_of
from ds_pretrain.watchdog.stats import (
    accept,
    compute_score,
    count_block,
    count_last_above,
    count_recent,
    explain_rise,
    forget_level,
    is_step,
    set_level,
)

LOSS_FLOOR = 0.002  # least sigma of the loss, as a share of it
LOSS_FLOOR_NATS = 0.001  # and in nats, for a run that has learned its data by heart
DRIFT_SIGMAS = 1.5  # a drift is at least that many sigmas, whatever `drift_threshold` allows
DRIFT_WATCHED = 0.7  # share of a drift that is watched
DRIFT_OVER = 0.5  # share below which it is over
HEALED_SHARE = 1 / 2  # of the threshold: it is over below that
RECOVERY_STEPS = 2  # in a row: a noisy loss has single normal values in the midst of a jump
RECURRING = 1.5  # times `patience`: so many steps in spikes within a window are not several that heal
LEVEL_STEPS = 5  # a level shift at a change of phase is learned from so many steps
GUESSING = log(1_000_000)  # nats: guessing evenly from a million tokens, more than any vocabulary has
NORM_FLOOR = 0.05  # least sigma of the logarithm of the gradient norm: 5 %
NORM_GROWTH = log(3)  # over its usual level: watched, however slowly it came
SMALLEST_NORM = 1e-30  # stands for 0, which has no logarithm
HIGHEST_LOG = 700.0  # of a limit: e^700 is still a float
ONSET_SHARE = 1 / 6  # of the threshold: trouble began where values without a gap exceed it
ONSET_REACH = 5  # steps before the threshold was passed, at most
NUM_RANKS = 8  # where the loss of the other ranks is not known


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
    def loss_other_ranks(self) -> float | None: ...  # than the highest; None: not known
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
    After a verdict that interrupts the run the memory is that of a run which has just begun, for whoever
    continues regardless.
    """
    if settings.mode == "off":
        return memory, OK
    stride = max(1, record.step - memory.step)
    memory = replace(memory, step=record.step, num_judged=memory.num_judged + 1)
    if not _is_finite(record, has_norm):
        return _judge_non_finite(settings, memory, record)
    if memory.non_finite is not None:
        memory = replace(memory, non_finite=None)
    if record.phase != memory.phase:
        memory = _begin_phase(memory, record.phase)
    memory, guessing = _judge_guessing(settings, memory, record)
    memory, same_loss = _judge_same_loss(settings, memory, record.loss)
    memory, same_norm = _judge_same_norm(settings, memory, record.grad_norm if has_norm else None)
    loss = drift = norm = rank = OK
    if same_loss == OK:  # else it is no loss, and enters no statistics
        memory, rank = _judge_rank(settings, memory, record)
        if memory.outlier_rank is not None:
            memory, loss = _judge_other_ranks(settings, memory, record, stride)
        else:
            memory, loss = _judge_loss(settings, memory, record, stride)
            memory, drift = _judge_drift(settings, memory, record.step / stride)
    if has_norm:
        memory, norm = _judge_norm(settings, memory, record, stride)
    verdicts = (loss, rank, drift, guessing, same_loss, same_norm, norm)
    verdict = min(verdicts, key=_compute_severity)  # the first of the gravest
    if verdict.interrupts:
        memory = WatchdogState(step=record.step, phase=record.phase)
    elif has_norm and record.update_applied is False:  # that comes first, and what else was seen behind it
        messages = [norm.message] + [verdict.message] * (verdict is not norm)
        verdict = replace(norm, message="; ".join(messages))
    return memory, verdict


def _begin_phase(memory: WatchdogState, phase: str) -> WatchdogState:
    """A level shift is expected here; what is known of the noise stays known."""
    return WatchdogState(
        step=memory.step,
        num_judged=memory.num_judged,
        phase=phase,
        loss=forget_level(memory.loss),
        norm=forget_level(memory.norm),
        rank_excess=forget_level(memory.rank_excess),
        non_finite_records=memory.non_finite_records,
    )


def _compute_severity(verdict: Verdict) -> int:
    return {"stop": 0, "roll_back": 1, "watch": 2, "ok": 3 if verdict.kind else 4}[verdict.action]


def _is_finite(record: StepLike, has_norm: bool) -> bool:
    values = (record.loss, record.loss_max_rank, *((record.grad_norm,) if has_norm else ()))
    return all(value is not None and isfinite(value) and value >= 0 for value in values)


def _note_record(records: tuple[int, ...], memory: WatchdogState, most: int) -> tuple[int, ...]:
    """The numbers of the last `most` bad records, with this one."""
    return (*records, memory.num_judged)[-most:]


def _judge_non_finite(settings: WatchdogSection, memory: WatchdogState, record: StepLike) -> Judged:
    """Such values enter no statistics. A rollback once there were too many: more would say nothing new."""
    streak = _extend_streak(memory.non_finite, record.step)
    most = settings.max_non_finite_steps
    records = _note_record(memory.non_finite_records, memory, most + 1)
    memory = replace(memory, non_finite=streak, non_finite_records=records)
    since = memory.num_judged - max(settings.window, 2 * most)
    is_new = len(records) <= most or records[0] <= since
    is_too_often = len(records) >= most and records[-most] > since and is_new
    norm = "none" if record.grad_norm is None else f"{record.grad_norm:g}"
    message = (
        f"loss {record.loss:g} (highest rank {record.loss_max_rank:g}), gradient norm {norm}: not finite, "
        f"{streak.num_steps} in a row since step {streak.onset}"
    )
    if is_too_often and streak.num_steps < most:
        message += f", {most} of the last {memory.num_judged - records[-most] + 1} steps"
    if record.update_applied:
        message += "; the update was applied, so the weights may be damaged"
    return memory, Verdict("roll_back" if is_too_often else "watch", "non_finite", streak.onset, message)


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


def _judge_same_loss(settings: WatchdogSection, memory: WatchdogState, loss: float) -> Judged:
    """The same loss of different batches, to the last bit, is not a loss; nor is 0."""
    if loss not in (memory.last_loss, 0.0):
        return replace(memory, last_loss=loss, same_loss=None), OK
    streak = _extend_streak(memory.same_loss, memory.step)
    memory = replace(memory, last_loss=loss, same_loss=streak)
    if 2 * streak.num_steps < settings.patience and loss > 0:
        return memory, OK
    message = (
        f"the loss has been exactly {loss:g} for {format_count_of(streak.num_steps, 'step')}, since step "
        f"{streak.onset}: it is not computed from the data, or there are no labels"
    )
    action: Action = "stop" if streak.num_steps >= settings.patience else "watch"
    return memory, Verdict(action, "frozen_loss", streak.onset, message)


# -- one rank


def _judge_rank(settings: WatchdogSection, memory: WatchdogState, record: StepLike) -> Judged:
    """A rank whose loss stays high while the mean does not: its host, or what it reads, is at fault."""
    usual, excess, streak = memory.rank_excess, record.loss_max_rank - record.loss, memory.outlier_rank
    floor = max(_compute_loss_floor(record.loss), memory.loss.mad_sigma)
    is_judged = is_warm(settings, usual)
    if not is_judged or compute_score(usual, excess, floor) <= _compute_threshold(settings, streak):
        usual = accept(usual, excess, settings.window, floor)
        return replace(memory, rank_excess=usual, outlier_rank=_note_normal(streak)), OK
    streak = _extend_streak(streak, record.step)
    memory = replace(memory, outlier_rank=streak)
    if 2 * streak.num_steps < settings.patience:
        return memory, OK  # a hard sample is read once
    message = (
        f"the loss of one rank is {record.loss_max_rank:.4g}, {excess:.4g} above the mean "
        f"({usual.median:.4g} is usual), since step {streak.onset}"
    )
    if streak.num_steps >= settings.window and memory.spike is None:  # that is how it is now
        memory = replace(
            memory,
            rank_excess=set_level(usual, (excess,), settings.window),
            outlier_rank=None,
            loss=set_level(memory.loss, (), settings.window),
            slow_level=None,
            lowest_level=None,
        )
    return memory, Verdict("watch", "outlier_rank", streak.onset, message)


def _judge_other_ranks(
    settings: WatchdogSection, memory: WatchdogState, record: StepLike, stride: int
) -> Judged:
    """While one rank's loss is high, the mean of the others is judged, and enters no statistics."""
    usual, loss = memory.loss, record.loss_other_ranks
    if loss is None:
        loss = record.loss - (record.loss_max_rank - record.loss) / (NUM_RANKS - 1)
    if not is_warm(settings, usual):
        return memory, OK
    sigmas = compute_score(usual, loss, _compute_loss_floor(usual.median))
    if sigmas > _compute_threshold(settings, memory.spike):
        return _judge_spike(settings, memory, record, loss, sigmas, stride)
    return _judge_recovery(memory, memory)


# -- the loss


def _judge_loss(settings: WatchdogSection, memory: WatchdogState, record: StepLike, stride: int) -> Judged:
    usual = memory.loss
    if not is_warm(settings, usual):
        return _accept_loss(settings, memory, record), OK
    sigmas = compute_score(usual, record.loss, _compute_loss_floor(usual.median))
    if sigmas > _compute_threshold(settings, memory.spike):
        return _judge_spike(settings, memory, record, record.loss, sigmas, stride)
    if sigmas < -_compute_threshold(settings, memory.fall):
        return _judge_fall(settings, memory, record, sigmas)
    return _judge_recovery(memory, _accept_loss(settings, memory, record))


def _compute_threshold(settings: WatchdogSection, streak: Streak | None) -> float:
    """The sigmas that trouble begins above, and does not end above."""
    return settings.loss_sigmas * (1 if streak is None else HEALED_SHARE)


def _compute_loss_floor(loss: float) -> float:
    return max(LOSS_FLOOR * loss, LOSS_FLOOR_NATS)


def _accept_loss(settings: WatchdogSection, memory: WatchdogState, record: StepLike) -> WatchdogState:
    floor = _compute_loss_floor(record.loss)
    return replace(memory, loss=accept(memory.loss, record.loss, settings.window, floor))


def _judge_spike(
    settings: WatchdogSection,
    memory: WatchdogState,
    record: StepLike,
    loss: float,
    sigmas: float,
    stride: int,
) -> Judged:
    """`loss` is that of all ranks, or of all but the one whose loss is high."""
    usual, floor = memory.loss, _compute_loss_floor(memory.loss.median)
    spike = memory.spike
    if spike is None:
        before = count_last_above(usual, settings.loss_sigmas * ONSET_SHARE, floor, ONSET_REACH)
        spike, memory = Streak(record.step - before * stride, 0), replace(memory, fall=None, outliers=())
    had_normal = spike.num_normal > 0
    spike = _extend_streak(spike, record.step)
    num_recurring = ceil(RECURRING * settings.patience)
    memory = replace(
        memory,
        spike=spike,
        outliers=(*memory.outliers, loss)[-count_recent(settings.window) :],
        high_records=_note_record(memory.high_records, memory, num_recurring),
    )
    expected = loss - sigmas * max(usual.mad_sigma, floor)
    message = (
        f"loss {loss:.4g} (highest rank {record.loss_max_rank:.4g}) is {sigmas:.1f} sigmas "
        f"above the expected {expected:.4g}, since step {spike.onset}"
    )
    records = memory.high_records
    num_records = memory.num_judged - records[0] + 1
    is_lasting = spike.num_steps >= settings.patience and not had_normal
    if not is_lasting and (len(records) < num_recurring or num_records > settings.window):
        return memory, Verdict("watch", "spike", spike.onset, message)
    fallen = _judge_return(settings, memory, record, stride)
    if fallen is not None:
        return fallen
    if is_lasting:
        message += f", and did not heal within {format_count_of(settings.patience, 'step')}"
    else:
        message += f": {len(records)} of the last {num_records} steps are so high"
    kind: Kind = "lasting_spike" if is_lasting else "recurring_spike"
    return memory, Verdict("roll_back", kind, spike.onset, message)


def _judge_return(
    settings: WatchdogSection, memory: WatchdogState, record: StepLike, stride: int
) -> Judged | None:
    """The verdict on a loss that is back at the level from which it fell; None if it did not fall."""
    assert memory.spike is not None
    usual, onset = memory.loss, memory.spike.onset
    level = median(memory.outliers[-(len(memory.outliers) + 1) // 2 :])
    explained = _explain_rise(settings, memory, usual.median, level, record.step / stride, True)
    if explained is None:
        return None
    memory, before = explained
    memory = replace(
        memory,
        spike=None,
        outliers=(),
        high_records=(),
        loss=set_level(memory.loss, memory.outliers, settings.window),
    )
    message = (
        f"loss {record.loss:.4g} is back near the {before:.4g} that it had before a fall: "
        "what was too easy is over"
    )
    return memory, Verdict("watch", "fall", onset, message)


def _explain_rise(
    settings: WatchdogSection,
    memory: WatchdogState,
    lowest: float,
    level: float,
    num_steps: float,
    is_sharp: bool,
) -> tuple[WatchdogState, float] | None:
    """The memory with `level` as the usual one if a fall explains the rise to it, and the level before."""
    floor, num_blocks = _compute_loss_floor(memory.loss.median), num_steps / count_block(settings.window)
    explained = explain_rise(memory.loss, lowest, level, memory.fall_ceiling, num_blocks, floor, is_sharp)
    if explained is None:
        return None
    usual, before, ceiling = explained
    return replace(memory, loss=usual, slow_level=level, lowest_level=level, fall_ceiling=ceiling), before


def _judge_recovery(memory: WatchdogState, after: WatchdogState) -> Judged:
    """One normal loss in a spike may be luck; two in a row end it. So with a fall."""
    if memory.spike is None and memory.fall is None:
        return after, OK
    spike, fall = _note_normal(memory.spike), _note_normal(memory.fall)
    after = replace(after, spike=spike, fall=fall)
    if memory.spike is None or spike is not None:
        return after, OK
    spike = memory.spike
    if spike.num_steps == 1:
        return after, Verdict("ok", "blip", spike.onset, f"one-step blip at step {spike.onset}")
    message = f"spike of {spike.num_steps} steps at step {spike.onset} has healed"
    return after, Verdict("ok", "spike", spike.onset, message)


def _judge_fall(settings: WatchdogSection, memory: WatchdogState, record: StepLike, sigmas: float) -> Judged:
    """A lower loss does no harm, but may mean that the data are not what they should be."""
    usual = memory.loss
    if memory.fall is None:
        memory = replace(memory, spike=None, outliers=())
    fall = _extend_streak(memory.fall, record.step)
    outliers = (*memory.outliers, record.loss)[-count_recent(settings.window) :]
    memory = replace(memory, fall=fall, outliers=outliers)
    expected = record.loss - sigmas * max(usual.mad_sigma, _compute_loss_floor(usual.median))
    message = (
        f"loss {record.loss:.4g} is {-sigmas:.1f} sigmas below the expected {expected:.4g}, since step "
        f"{fall.onset}: too easy or repeated data, or a change of rate?"
    )
    if fall.num_steps >= settings.patience:  # this is the new level
        level = set_level(usual, outliers, settings.window)
        memory = replace(memory, fall=None, outliers=(), loss=level, slow_level=None)
    return memory, Verdict("watch", "fall", fall.onset, message)


def _judge_drift(settings: WatchdogSection, memory: WatchdogState, num_steps: float) -> Judged:
    """A rise of the mean of recent losses above the lowest level so far, as a fraction and in sigmas."""
    usual = memory.loss
    is_open = memory.spike is not None or memory.fall is not None  # then nothing was accepted
    if is_open or usual.num_accepted < settings.window or len(usual.recent) < count_recent(settings.window):
        return memory, OK  # the noise of a new phase is not known at once
    slow = _update_slow_level(settings, memory)
    lowest = slow if memory.lowest_level is None else min(slow, memory.lowest_level)
    memory = replace(memory, slow_level=slow, lowest_level=lowest)
    # A high interval that is over, and was accepted in the warm-up, is no rise: the later half counts too.
    level = min(fmean(usual.recent), fmean(usual.recent[len(usual.recent) // 2 :]), usual.median)
    drift = _compute_drift(settings, usual, lowest, level)
    if drift >= DRIFT_OVER and not memory.drift_is_step and is_step(usual.recent, usual.mad_sigma):
        memory = replace(memory, drift_is_step=True)
    if drift >= 1:
        risen = max(level, fmean(usual.recent[len(usual.recent) // 2 :]))
        explained = _explain_rise(settings, memory, lowest, risen, num_steps, memory.drift_is_step)
        if explained is not None:  # it is only the end of a fall
            memory, drift = explained[0], 0.0
    if drift < DRIFT_OVER:
        onset = memory.drift_onset
        if memory.drift_halfway is not None or memory.drift_is_step:
            memory = replace(memory, drift_halfway=None, drift_onset=None, drift_is_step=False)
        if onset is None:
            return memory, OK
        return memory, Verdict("ok", "drift", onset, f"the rise of the loss since step {onset} is over")
    halfway = memory.drift_halfway or memory.step
    onset = memory.drift_onset
    if onset is None and drift >= DRIFT_WATCHED:
        onset = max(1, 2 * halfway - memory.step)  # as much before half the rise as this is after it
    memory = replace(memory, drift_halfway=halfway, drift_onset=onset)
    if onset is None:
        return memory, OK
    if drift >= 1:
        onset = max(1, 2 * halfway - memory.step)
    sigma = max(usual.mad_sigma, _compute_loss_floor(usual.median))
    message = (
        f"the mean of the last {len(usual.recent)} losses rose from {lowest:.4g} to "
        f"{level:.4g} ({(level - lowest) / sigma:.1f} sigmas), since about step {onset}"
    )
    return memory, Verdict("roll_back" if drift >= 1 else "watch", "drift", onset, message)


def _compute_drift(settings: WatchdogSection, usual: RunningStats, lowest: float, level: float) -> float:
    """The rise from `lowest` to `level` as a share of the one that is rolled back."""
    sigma = max(usual.mad_sigma, _compute_loss_floor(usual.median))
    rise = level - lowest
    return min(
        rise / (settings.drift_threshold * max(lowest, LOSS_FLOOR_NATS)), rise / (DRIFT_SIGMAS * sigma)
    )


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
    num = format_count_of(streak.num_steps, "step")
    message = f"the gradient norm has been exactly {norm:g} for {num}, since step {streak.onset}"
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
    if not is_warm(settings, usual) or not _is_norm_high(settings, usual, value):
        usual = accept(usual, value, settings.window, NORM_FLOOR)
        return replace(memory, norm_rise=None, norm=usual), OK
    memory, rise = _extend_norm_rise(settings, memory, stride)
    message = (
        f"gradient norm {norm:.4g} is high ({exp(usual.median):.4g} is usual), since "
        f"step {rise.onset}; the loss has not moved"
    )
    return memory, Verdict("watch", "norm_rise", rise.onset, message)


def _is_norm_high(settings: WatchdogSection, usual: RunningStats, value: float) -> bool:
    """At once, or slowly: against the median of blocks, which a slow growth does not take with it."""
    if compute_score(usual, value, NORM_FLOOR) > settings.norm_sigmas:
        return True
    if len(usual.blocks) < 8:
        return False
    recent = median((*usual.recent[-4:], value))
    return min(recent, value) - median(usual.blocks[-40:]) > max(
        NORM_GROWTH, settings.norm_sigmas * max(usual.mad_sigma, NORM_FLOOR)
    )


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
    return replace(memory, norm_rise=None, norm=forget_level(memory.norm)), rise


def is_warm(settings: WatchdogSection, usual: RunningStats) -> bool:
    """Return whether enough values are known to judge: a quarter of the window, and a few of this level."""
    num_recent = min(LEVEL_STEPS, count_recent(settings.window))
    return len(usual.residuals) >= max(1, settings.window // 4) and len(usual.recent) >= num_recent


def _note_normal(streak: Streak | None) -> Streak | None:
    """The streak with one normal step more; None once there were enough of them."""
    if streak is None or streak.num_normal + 1 >= RECOVERY_STEPS:
        return None
    return replace(streak, num_normal=streak.num_normal + 1)


def _extend_streak(streak: Streak | None, step: int, num_before: int = 0, stride: int = 1) -> Streak:
    """The streak with one more step, or a new one that began `num_before` steps earlier."""
    if streak is None:
        return Streak(step - num_before * stride, num_before + 1)
    return replace(streak, num_steps=streak.num_steps + streak.num_normal + 1, num_normal=0)
