"""The part of the watchdog that looks at the gradient norm: high, dropped for being high, or frozen."""

from dataclasses import replace
from math import exp, log

from ds_pretrain.config.schema import WatchdogSection
from ds_pretrain.core.text import counted
from ds_pretrain.core.watchdog_memory import Memory, Stretch
from ds_pretrain.watchdog.stats import Usual, accept, num_last_above, score
from ds_pretrain.watchdog.verdict import OK, Action, Judged, StepLike, Verdict, is_warm, longer

NORM_FLOOR = 0.05  # least spread of the logarithm of the gradient norm: 5 %
SMALLEST_NORM = 1e-30  # stands for 0, which has no logarithm
HIGHEST_LOG = 700.0  # of a limit: e^700 is still a float
ONSET_SHARE = 1 / 6  # of the threshold: trouble began where values without a gap exceed it
ONSET_REACH = 5  # steps before the threshold was passed, at most


def norm_limit(settings: WatchdogSection, memory: Memory, phase: str) -> float | None:
    """The gradient norm above which the update to come, in `phase`, is dropped; None: none is.

    It is where `robust.score` is `drop_sigmas`. None also while too little is known (a start, a new phase),
    and once the norm was high for half of `patience`: then its level has changed and training must go on. The
    other half is left for a spike of the loss to heal in, which it cannot while the weights stand still.
    """
    usual, rise = memory.norm, memory.norm_rise
    if settings.drop_sigmas is None or settings.mode != "act" or phase != memory.phase:
        return None
    if not is_warm(settings, usual) or (rise is not None and 2 * rise.num_steps >= settings.patience):
        return None
    above = settings.drop_sigmas * max(usual.spread, NORM_FLOOR)
    return exp(min(usual.centre + max(usual.lag + above, above / 2), HIGHEST_LOG))


def judge_same_norm(settings: WatchdogSection, memory: Memory, norm: float | None) -> Judged:
    """The same norm of different batches, to the last bit, is not a norm of their gradients."""
    if norm is None and memory.last_norm is None:
        return memory, OK
    if norm is None or norm != memory.last_norm:
        return replace(memory, last_norm=norm, same_norm=None), OK
    stretch = longer(memory.same_norm, memory.step)
    memory = replace(memory, same_norm=stretch)
    if 2 * stretch.num_steps < settings.patience:
        return memory, OK
    more = counted(stretch.num_steps, "more step")
    message = f"the gradient norm is {norm:g} at {more} since step {stretch.onset}"
    action: Action = "roll_back" if stretch.num_steps >= settings.patience else "watch"
    return memory, Verdict(action, "frozen_norm", stretch.onset, message)


def judge_norm(settings: WatchdogSection, memory: Memory, record: StepLike, stride: int) -> Judged:
    """A high norm alone is watched, never rolled back: many bursts leave no trace in the loss."""
    usual, norm = memory.norm, record.grad_norm
    if norm is None:
        return memory, OK
    value = log(max(norm, SMALLEST_NORM))
    if record.update_applied is False:
        return _judge_dropped(settings, memory, norm, value, stride)
    if memory.spike is not None or memory.fall is not None:
        return memory, OK
    if not is_warm(settings, usual) or (sigmas := score(usual, value, NORM_FLOOR)) <= settings.norm_sigmas:
        return replace(memory, norm_rise=None, norm=accept(usual, value, settings.window)), OK
    memory, rise = _risen(settings, memory, stride)
    message = (
        f"gradient norm {norm:.4g} is {sigmas:.1f} spreads above the usual, since step {rise.onset}; "
        "the loss has not moved"
    )
    return memory, Verdict("watch", "norm_rise", rise.onset, message)


def _judge_dropped(
    settings: WatchdogSection, memory: Memory, norm: float, value: float, stride: int
) -> Judged:
    """The weights are clean, and the norm enters no statistics, whatever it was. Also in an open spike."""
    message = f"update dropped for its gradient norm of {norm:.4g}"
    if is_warm(settings, memory.norm):
        sigmas = score(memory.norm, value, NORM_FLOOR)
        message += f", {sigmas:.1f} spreads above the usual {exp(memory.norm.centre):.4g}"
    memory, rise = _risen(settings, memory, stride)
    limit = "" if settings.drop_sigmas is None else f" (watchdog.drop_sigmas = {settings.drop_sigmas:g})"
    message += f"{limit}; high since step {rise.onset}; weights and moments are as they were"
    return memory, Verdict("watch", "norm_rise", rise.onset, message)


def _risen(settings: WatchdogSection, memory: Memory, stride: int) -> tuple[Memory, Stretch]:
    """One more step with a high norm; after a window of them that is the new level, to be learned anew."""
    above = settings.norm_sigmas * ONSET_SHARE
    num_before = num_last_above(memory.norm, above, NORM_FLOOR, ONSET_REACH)
    rise = longer(memory.norm_rise, memory.step, num_before, stride)
    if rise.num_steps < settings.window:
        return replace(memory, norm_rise=rise), rise
    return replace(memory, norm_rise=None, norm=Usual()), rise
