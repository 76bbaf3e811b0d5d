"""Tells a harmless spike from a sick run: one step's record and a memory in, a verdict and a memory out.

A pure state machine: no clock, no I/O, no randomness. Every rank runs it on the same all-rank record and
comes to the same verdict. A value is judged before it enters the statistics, and enters them only if it was
found usual. What each kind means, and where its numbers come from, is in docs/design/watchdog.md.
"""

from dataclasses import replace
from math import isfinite, log
from statistics import fmean

from ds_pretrain.config.schema import WatchdogSection
from ds_pretrain.core.text import counted
from ds_pretrain.core.watchdog_memory import Memory as Memory
from ds_pretrain.core.watchdog_memory import Stretch
from ds_pretrain.watchdog.norm import ONSET_REACH as ONSET_REACH
from ds_pretrain.watchdog.norm import ONSET_SHARE, judge_norm, judge_same_norm
from ds_pretrain.watchdog.norm import norm_limit as norm_limit
from ds_pretrain.watchdog.stats import Usual, accept, num_last_above, num_recent, score
from ds_pretrain.watchdog.verdict import OK as OK
from ds_pretrain.watchdog.verdict import Action, Judged, StepLike, is_warm, longer
from ds_pretrain.watchdog.verdict import Kind as Kind
from ds_pretrain.watchdog.verdict import Verdict as Verdict

LOSS_FLOOR = 0.002  # least spread of the loss, as a share of it
LOSS_FLOOR_NATS = 0.001  # and in nats, for a run that has learned its data by heart
DRIFT_SPREADS = 1.5  # a drift is at least that many spreads, whatever `drift` allows
HEALED_SHARE = 1 / 2  # of the threshold: it is over below that
CALM_STEPS = 2  # in a row: a noisy loss has single usual values in the midst of a jump
MOST_WINDOWS_FALLEN = 10  # a loss that comes back within so many windows may come back
GUESSING = log(1_000_000)  # nats: guessing evenly from a million tokens, more than any vocabulary has


def judge(settings: WatchdogSection, memory: Memory, record: StepLike, has_norm: bool = True) -> Judged:
    """Judge one step; the memory to judge the next one with, and the verdict.

    `has_norm` is False for a recorded curve that lacks the gradient norm: a missing one is else non-finite.
    After a "roll_back" the memory is that of a run that has just begun, for whoever goes on regardless.
    """
    if settings.mode == "off":
        return memory, OK
    if not _is_finite(record, has_norm):
        return _judge_non_finite(settings, memory, record)
    stride = record.step - memory.step
    if record.phase == memory.phase:
        memory = replace(memory, step=record.step, non_finite=None)
    else:  # level shifts are expected here: what was usual is not any more
        memory = Memory(step=record.step, phase=record.phase)
    memory, guessing = _judge_guessing(settings, memory, record)
    memory, frozen = judge_same_norm(settings, memory, record.grad_norm if has_norm else None)
    memory, loss = _judge_loss(settings, memory, record, stride)
    memory, drift = _judge_drift(settings, memory)
    memory, norm = judge_norm(settings, memory, record, stride) if has_norm else (memory, OK)
    verdict = min((loss, drift, guessing, frozen, norm), key=_severity)  # the first of the gravest
    if verdict.roll_back:
        memory = Memory(step=record.step, phase=record.phase)
    elif has_norm and record.update_applied is False:  # that comes first, and what else was seen behind it
        messages = [norm.message] + [verdict.message] * (verdict is not norm)
        verdict = replace(norm, message="; ".join(messages))
    return memory, verdict


def _severity(verdict: Verdict) -> int:
    return {"roll_back": 0, "watch": 1, "ok": 2 if verdict.kind else 3}[verdict.action]


def _is_finite(record: StepLike, has_norm: bool) -> bool:
    values = (record.loss, record.loss_max_rank, *((record.grad_norm,) if has_norm else ()))
    return all(value is not None and isfinite(value) and value >= 0 for value in values)


def _judge_non_finite(settings: WatchdogSection, memory: Memory, record: StepLike) -> Judged:
    """Such values enter no statistics. Told to roll back once a streak: more would say nothing new."""
    streak = longer(memory.non_finite, record.step)
    memory = replace(memory, step=record.step, non_finite=streak)
    norm = "none" if record.grad_norm is None else f"{record.grad_norm:g}"
    message = (
        f"loss {record.loss:g} (highest rank {record.loss_max_rank:g}), gradient norm {norm}: not finite, "
        f"{streak.num_steps} in a row since step {streak.onset}"
    )
    if record.update_applied:
        message += "; the update was applied, so the weights may be damaged"
    action: Action = "roll_back" if streak.num_steps == settings.non_finite else "watch"
    return memory, Verdict(action, "non_finite", streak.onset, message)


def _judge_guessing(settings: WatchdogSection, memory: Memory, record: StepLike) -> Judged:
    if record.loss <= GUESSING:
        return (replace(memory, guessing=None) if memory.guessing else memory), OK
    stretch = longer(memory.guessing, record.step)
    memory = replace(memory, guessing=stretch)
    if stretch.num_steps < settings.patience:
        return memory, OK  # a start from bad weights looks like this, and is over soon
    message = (
        f"loss {record.loss:.4g} and above ln(1,000,000) = {GUESSING:.1f} since step {stretch.onset}: "
        "worse than guessing from any vocabulary"
    )
    return memory, Verdict("roll_back", "worse_than_guessing", stretch.onset, message)


def _judge_loss(settings: WatchdogSection, memory: Memory, record: StepLike, stride: int) -> Judged:
    usual = memory.loss
    if not is_warm(settings, usual):
        return replace(memory, loss=accept(usual, record.loss, settings.window)), OK
    floor = _loss_floor(usual)
    sigmas = score(usual, record.loss, floor)
    if memory.spike is not None and sigmas < settings.loss_sigmas * HEALED_SHARE:
        return _calmer(settings, memory, memory.spike, record)
    if memory.spike is not None or sigmas > settings.loss_sigmas:
        num_before = num_last_above(usual, settings.loss_sigmas * ONSET_SHARE, floor, ONSET_REACH)
        spike = longer(memory.spike, record.step, num_before, stride)
        before = _level_before_fall(settings, memory)
        highest = 0.0 if before is None else before + settings.loss_sigmas * max(usual.spread, floor)
        if spike.num_steps >= settings.patience and record.loss <= highest:
            return _returned(memory, record, spike)
        return replace(memory, spike=spike, fall=None), _spike_verdict(settings, usual, record, sigmas, spike)
    if sigmas < -settings.loss_sigmas:
        return _judge_fall(settings, memory, record, sigmas)
    return replace(memory, fall=None, loss=accept(usual, record.loss, settings.window)), OK


def _loss_floor(usual: Usual) -> float:
    return max(LOSS_FLOOR * usual.centre, LOSS_FLOOR_NATS)


def _spike_verdict(
    settings: WatchdogSection, usual: Usual, record: StepLike, sigmas: float, spike: Stretch
) -> Verdict:
    message = (
        f"loss {record.loss:.4g} (highest rank {record.loss_max_rank:.4g}) is {sigmas:.1f} spreads above "
        f"{usual.centre:.4g}, since step {spike.onset}"
    )
    if spike.num_steps >= settings.patience:
        message += f", and did not heal within {counted(settings.patience, 'step')}"
        return Verdict("roll_back", "lasting_spike", spike.onset, message)
    return Verdict("watch", "spike", spike.onset, message)


def _calmer(settings: WatchdogSection, memory: Memory, spike: Stretch, record: StepLike) -> Judged:
    """One usual loss in a spike may be luck; two in a row end it."""
    memory = replace(memory, loss=accept(memory.loss, record.loss, settings.window))
    if spike.num_calm + 1 < CALM_STEPS:
        return replace(memory, spike=replace(spike, num_calm=spike.num_calm + 1)), OK
    memory = replace(memory, spike=None)
    if spike.num_steps == 1:
        return memory, Verdict("ok", "blip", spike.onset, f"one-step blip at step {spike.onset}")
    message = f"spike of {spike.num_steps} steps at step {spike.onset} has healed"
    return memory, Verdict("ok", "spike", spike.onset, message)


def _judge_fall(settings: WatchdogSection, memory: Memory, record: StepLike, sigmas: float) -> Judged:
    """A lower loss does no harm, but may mean that the data are not what they should be."""
    fall = longer(memory.fall, record.step)
    message = (
        f"loss {record.loss:.4g} is {-sigmas:.1f} spreads below {memory.loss.centre:.4g}, since step "
        f"{fall.onset}: too easy or repeated data, or a change of rate?"
    )
    verdict = Verdict("watch", "fall", fall.onset, message)
    if fall.num_steps < settings.patience:
        return replace(memory, fall=fall), verdict
    # This is the new level.
    before = memory.loss.centre
    return Memory(record.step, memory.phase, before_fall=before, fell_at=fall.onset), verdict


def _level_before_fall(settings: WatchdogSection, memory: Memory) -> float | None:
    """The level from which the loss fell not long ago: if it returns there, no harm was done."""
    is_recent = memory.loss.num_accepted <= MOST_WINDOWS_FALLEN * settings.window
    return memory.before_fall if is_recent else None


def _returned(memory: Memory, record: StepLike, spike: Stretch) -> Judged:
    message = (
        f"loss {record.loss:.4g} is back at the {memory.before_fall:.4g} from which it fell at step "
        f"{memory.fell_at}: what was too easy is over"
    )
    return Memory(step=record.step, phase=record.phase), Verdict("watch", "fall", spike.onset, message)


def _judge_drift(settings: WatchdogSection, memory: Memory) -> Judged:
    """A rise of the mean of recent losses above the lowest level so far, in share and in spreads."""
    usual = memory.loss
    is_open = memory.spike is not None or memory.fall is not None  # then nothing was accepted
    if is_open or not is_warm(settings, usual) or len(usual.recent) < num_recent(settings.window):
        return memory, OK
    slow = _slow_level(settings, memory)
    lowest = slow if memory.lowest_level is None else min(slow, memory.lowest_level)
    # A high stretch that is over, and was accepted in the warm-up, is no rise: the later half counts too.
    level = min(fmean(usual.recent), fmean(usual.recent[len(usual.recent) // 2 :]))
    usual_level = max(lowest, _level_before_fall(settings, memory) or 0.0)
    spread = max(usual.spread, _loss_floor(usual))
    rise = level - usual_level
    drift = min(rise / (settings.drift * max(usual_level, LOSS_FLOOR_NATS)), rise / (DRIFT_SPREADS * spread))
    halfway = None if drift < 0.5 else memory.drift_halfway or memory.step
    memory = replace(memory, slow_level=slow, lowest_level=lowest, drift_halfway=halfway)
    if halfway is None:
        return memory, OK
    onset = max(1, 2 * halfway - memory.step)  # as much before half the rise as this is after it
    message = (
        f"the mean of the last {len(usual.recent)} losses rose from {usual_level:.4g} to {level:.4g} "
        f"({rise / spread:.1f} spreads), since about step {onset}"
    )
    return memory, Verdict("roll_back" if drift >= 1 else "watch", "drift", onset, message)


def _slow_level(settings: WatchdogSection, memory: Memory) -> float:
    """A mean that forgets in a quarter of a window: its lowest is not that of noise."""
    usual = memory.loss
    if memory.slow_level is None:
        return usual.centre
    return memory.slow_level + (usual.recent[-1] - memory.slow_level) * min(1.0, 4 / settings.window)
