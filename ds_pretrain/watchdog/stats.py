"""Rolling median and MAD statistics of a series; rejected values do not update them.

The median is that of the last few accepted values, so it follows a falling loss. The residuals (each value
minus the median before it) are a series of their own: their median is the trend, and 1.4826 times their MAD
is sigma, the standard deviation of a normal distribution (Rousseeuw & Croux, 1993). A tenth of all values
may be outliers without moving either much.
"""

from dataclasses import replace
from statistics import median

from ds_pretrain.core.state import RunningStats

_MAD_TO_SIGMA = 1.4826


def compute_score(usual: RunningStats, value: float, floor: float) -> float:
    """Return how many sigmas `value` lies above what is expected; a sigma is at least `floor`.

    At most twice as many as it lies above the median: else the mere end of a steep fall would be a rise.
    """
    sigma = max(usual.mad_sigma, floor)
    above_median = (value - usual.median) / sigma
    return min(above_median - usual.trend / sigma, max(0.0, 2 * above_median))


def accept(usual: RunningStats, value: float, window: int) -> RunningStats:
    """Append a value that was judged. Trend and sigma cost most: they are refreshed twenty times a window."""
    num_accepted = usual.num_accepted + 1
    recent = (*usual.recent[-(count_recent(window) - 1) :], value)
    if not usual.recent:
        return replace(usual, recent=recent, num_accepted=num_accepted)
    residuals = (*usual.residuals[-(window - 1) :], value - usual.median)
    if num_accepted % max(1, window // 20) and num_accepted > window // 2:
        return RunningStats(recent, residuals, num_accepted, usual.trend, usual.mad_sigma)
    trend, sigma = compute_trend_and_sigma(residuals)
    return RunningStats(recent, residuals, num_accepted, trend, sigma)


def count_recent(window: int) -> int:
    """Return the number of values in the median: few enough to follow a falling loss."""
    return max(2, window * 3 // 20)


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
