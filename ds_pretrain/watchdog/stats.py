"""Rolling median and MAD statistics of a series, and its levels long ago; rejected values do not update them.

The median is that of the last few accepted values, so it follows a falling loss. The residuals (each value
minus the median before it) are a series of their own: their median is the trend, and 1.4826 times their MAD
is sigma, the standard deviation of a normal distribution (Rousseeuw & Croux, 1993). A tenth of all values
may be outliers without moving either much. The medians of successive blocks are the long memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import median

import numpy as np
from numpy.typing import NDArray

from ds_pretrain.core.state import RunningStats

FloatArray = NDArray[np.float64]
MOST_BLOCKS = 160  # 20 windows
_MAD_TO_SIGMA = 1.4826
_SIGMA_GROWTH = 1.02  # from one refresh to the next, at most: an oscillation that grows is not usual noise
# A fall stands out from the noise of block medians, and from that of the descent before it, over as many
# blocks as it is known from. A sharp rise is either its end or a fault; a slow one is more often a drift.
_FALL_SIGMAS = {True: 0.8, False: 1.2}  # by whether the rise is sharp
_SLOPE_SIGMAS = {True: 0.3, False: 0.5}
_SLOW_SLACK = {True: 2.4, False: 1.8}  # times the size of a slow fall
_REGAINED_SIGMAS = 1.5  # the highest rise that the noise of block medians shows
_SLACK_SIGMAS = 2.0  # by which a rise may exceed what a fall explains
_SHARP_BLOCKS = 4  # a fall that took longer may be one of the run itself
_SHARP_SLACK = 1.2  # times the size of a sharp one, which is better known
_SLOW_FALL_NATS = 0.4  # the most that the end of a slow fall explains
_NEAR_BLOCKS = 8  # the slope just before a fall, where the descent slows down fast
_STEP_SIGMAS = 3.3  # root of the squared error by which two levels must fit better than a line
_LEAST_OF_STEP = 5  # values on either side of a step


def compute_score(usual: RunningStats, value: float, floor: float) -> float:
    """Return how many sigmas `value` lies above what is expected; a sigma is at least `floor`.

    At most twice as many as it lies above the median: else the mere end of a steep fall would be a rise.
    """
    sigma = max(usual.mad_sigma, floor)
    above_median = (value - usual.median) / sigma
    return min(above_median - usual.trend / sigma, max(0.0, 2 * above_median))


def accept(usual: RunningStats, value: float, window: int, floor: float) -> RunningStats:
    """Append a value that was judged. Trend and sigma cost most: they are refreshed twenty times a window.

    Once a window is known, a sigma above `floor` grows by 2 % a refresh at most.
    """
    num_accepted = usual.num_accepted + 1
    recent = (*usual.recent[-(count_recent(window) - 1) :], value)
    if not usual.recent:
        return replace(usual, recent=recent, num_accepted=num_accepted)
    residuals = (*usual.residuals[-(window - 1) :], value - usual.median)
    block = count_block(window)
    blocks = usual.blocks
    if num_accepted % block == 0:
        blocks = (*blocks[-(MOST_BLOCKS - 1) :], median(recent[-block:]))
    if num_accepted % max(1, window // 20) and num_accepted > window // 2:
        return RunningStats(recent, residuals, num_accepted, usual.trend, usual.mad_sigma, blocks)
    trend, sigma = compute_trend_and_sigma(residuals)
    if num_accepted > window:
        sigma = min(sigma, max(usual.mad_sigma, floor) * _SIGMA_GROWTH)
    return RunningStats(recent, residuals, num_accepted, trend, sigma, blocks)


def set_level(usual: RunningStats, values: Sequence[float], window: int) -> RunningStats:
    """Return the statistics at a new level, that of `values`; the noise is that of before."""
    return replace(usual, recent=tuple(values[-count_recent(window) :]))


def forget_level(usual: RunningStats) -> RunningStats:
    """Return the statistics where a level shift is expected: only the noise is still known."""
    return RunningStats((), usual.residuals, 0, 0.0, usual.mad_sigma)


def count_recent(window: int) -> int:
    """Return the number of values in the median: few enough to follow a falling loss."""
    return max(2, window * 3 // 20)


def count_block(window: int) -> int:
    """Return the number of values in a block."""
    return max(1, window // 8)


def compute_trend_and_sigma(residuals: tuple[float, ...]) -> tuple[float, float]:
    """Median, and 1.4826 times the median absolute deviation from it."""
    middle = median(residuals)
    return middle, _MAD_TO_SIGMA * median([abs(value - middle) for value in residuals])


def count_last_above(usual: RunningStats, sigmas: float, floor: float, most: int) -> int:
    """Count how many of the last `most` accepted values in a row lay `sigmas` sigmas above the expected."""
    limit = usual.trend + sigmas * max(usual.mad_sigma, floor)
    num = 0
    for residual in reversed(usual.residuals[-most:]):
        if residual < limit:
            break
        num += 1
    return num


@dataclass(frozen=True)
class Fall:
    """A fall that the blocks show."""

    start: int  # index of the last block before it
    is_sharp: bool


def explain_rise(
    usual: RunningStats,
    lowest: float,
    level: float,
    ceiling: float | None,
    num_blocks: float,
    floor: float,
    is_sharp: bool,
) -> tuple[RunningStats, float, float | None] | None:
    """Explain a rise from `lowest` to `level` by the end of a fall; None if there was none.

    Also None if the fall was not sharp, as one of the run itself may be, and `level` is above the `ceiling`
    for such. Returns the statistics without what the rise has undone of the fall, the level before the fall,
    and the ceiling from now on.
    """
    lowered = min(lowest + _SLOW_FALL_NATS, inf if ceiling is None else ceiling)
    fall = find_fall(usual, level, lowered, num_blocks, floor, is_sharp)
    if fall is None:
        return None
    before, num = usual.blocks[fall.start], len(usual.blocks) - fall.start
    blocks = list(usual.blocks)
    for after in range(1, num):  # no higher than straight from before the fall to where it is now
        straight = before + (level - before) * after / num
        at = fall.start + after
        blocks[at] = max(blocks[at], min(blocks[at] + level - lowest, straight))
    return replace(usual, blocks=tuple(blocks)), before, ceiling if fall.is_sharp else lowered


def find_fall(
    usual: RunningStats, level: float, ceiling: float, num_blocks: float, floor: float, is_rise_sharp: bool
) -> Fall | None:
    """Find the fall that a rise to `level` is the end of; None if there was no such fall.

    A fall from block s to block e counts by how much it exceeds the descent over as many blocks before s, so
    the ordinary descent, which slows down, has none; and less by what was regained before the lowest block
    since. With some slack it explains the level of that lowest block plus the fall; one that was not sharp,
    up to `ceiling`. If the rise is sharp, such a fall may also be slower than the early descent: the descent
    before s is then taken to go on with the logarithm of the number of blocks that the run has had, by now
    `num_blocks`. Of K levels all K (K - 1) / 2 pairs are looked at.
    """
    levels = np.array([*usual.blocks, usual.median])  # [K]
    if len(levels) < 3:
        return None
    sigma = max(usual.mad_sigma, floor)
    index = np.arange(len(levels))
    lowest, regained = _find_lowest_since(levels)  # [K] each
    regained = np.maximum(0.0, regained - _REGAINED_SIGMAS * sigma)
    starts, ends = index[1:, None], index[None, :]  # [K - 1, 1], [1, K]
    lengths = ends - starts  # [K - 1, K]
    logarithms = np.log(np.maximum(num_blocks - index[::-1], 1.0) + 1e-3 * index)  # [K], rising
    ways = ((index, len(index)), (logarithms, len(index)), (logarithms, _NEAR_BLOCKS))
    for times, most in ways if is_rise_sharp else ways[:1]:
        first = starts - np.clip(lengths, 1, np.minimum(starts, most))  # [K - 1, K]
        ahead = (times[ends] - times[starts]) / (times[starts] - times[first])
        descent = (np.abs(levels[first] - levels[starts]) + _SLOPE_SIGMAS[is_rise_sharp] * sigma) * ahead
        size = levels[starts] - levels[ends] - descent - regained
        is_fall = (lengths > 0) & (size >= _FALL_SIGMAS[is_rise_sharp] * sigma)
        is_sharp = is_fall & (times is index) & (lengths <= _SHARP_BLOCKS) & (size >= descent)
        sharp = lowest + _SHARP_SLACK * size + _SLACK_SIGMAS * sigma
        slow = np.minimum(lowest + _SLOW_SLACK[is_rise_sharp] * size + _SLACK_SIGMAS * sigma, ceiling)
        for highest, which in ((sharp, is_sharp), (slow, is_fall)):
            explained = np.where(which & (highest >= level), highest, -inf).max(axis=1)  # [K - 1]
            if explained.max() > -inf:
                return Fall(int(explained.argmax()) + 1, which is is_sharp)
    return None


def _find_lowest_since(levels: FloatArray) -> tuple[FloatArray, FloatArray]:
    """For each block, the lowest from it on, and the largest rise between it and that lowest: [K] each."""
    lowest, regained = levels.copy(), np.zeros_like(levels)
    highest = levels[-1]
    for at in range(len(levels) - 2, -1, -1):
        if levels[at] <= lowest[at + 1]:
            highest = levels[at]
            continue
        highest = max(highest, levels[at])
        lowest[at] = lowest[at + 1]
        regained[at] = max(regained[at + 1], highest - levels[at])
    return lowest, regained


def is_step(values: Sequence[float], sigma: float) -> bool:
    """True if two levels, one after the other, fit the values clearly better than a straight line."""
    losses, index, least = np.array(values), np.arange(len(values)), _LEAST_OF_STEP
    if len(losses) < 2 * least:
        return False
    of_line = np.var(losses - np.polyval(np.polyfit(index, losses, 1), index)) * len(losses)
    of_levels = min(
        np.var(losses[:at]) * at + np.var(losses[at:]) * (len(losses) - at)
        for at in range(least, len(losses) - least + 1)
    )
    return bool(of_line - of_levels > (_STEP_SIGMAS * sigma) ** 2)
