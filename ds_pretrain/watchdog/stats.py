"""What is usual for a series, and how far from it a value lies: robust, bounded, blind to what was rejected.

The centre is the median of the last few accepted values, which follows a falling loss; how far values lie
from that centre, one step ahead, is a series of its own, with a median (the lag behind a trend) and a spread
(1.4826 MAD, the standard deviation of a normal distribution: Rousseeuw & Croux, 1993). A tenth of all values
may be wild without moving either much.
"""

from bisect import bisect_left
from dataclasses import dataclass, replace

_MAD_TO_SIGMA = 1.4826


@dataclass(frozen=True)
class Usual:
    """The accepted values of one series, as far as they are remembered."""

    recent: tuple[float, ...] = ()  # the last accepted values, oldest first
    residuals: tuple[float, ...] = ()  # how far each accepted value lay from the centre before it
    num_accepted: int = 0
    lag: float = 0.0  # median of the residuals
    spread: float = 0.0  # 1.4826 times their median absolute deviation from it

    @property
    def centre(self) -> float:
        """The median of the recent values. There must be one."""
        return median(sorted(self.recent))

    def level(self, num_last: int) -> float:
        """The median of the last `num_last` accepted values."""
        return median(sorted(self.recent[-num_last:]))


def score(usual: Usual, value: float, floor: float) -> float:
    """How many spreads `value` lies above what is expected; a spread counts as at least `floor`.

    At most twice as many as it lies above the centre: else the mere end of a steep fall would be a rise.
    """
    spread = max(usual.spread, floor)
    above_centre = (value - usual.centre) / spread
    return min(above_centre - usual.lag / spread, max(0.0, 2 * above_centre))


def accept(usual: Usual, value: float, window: int) -> Usual:
    """Append a value that was judged. Lag and spread cost most: refreshed twenty a window."""
    num_accepted = usual.num_accepted + 1
    recent = (*usual.recent[-(num_recent(window) - 1) :], value)
    if not usual.recent:
        return replace(usual, recent=recent, num_accepted=num_accepted)
    residuals = (*usual.residuals[-(window - 1) :], value - usual.centre)
    if num_accepted % max(1, window // 20) and num_accepted > window // 2:
        return Usual(recent, residuals, num_accepted, usual.lag, usual.spread)
    lag, spread = lag_and_spread(residuals)
    return Usual(recent, residuals, num_accepted, lag, spread)


def num_recent(window: int) -> int:
    """How many values the centre is taken over: few enough to follow a falling loss."""
    return max(2, window * 3 // 20)


def lag_and_spread(residuals: tuple[float, ...]) -> tuple[float, float]:
    """Median, and 1.4826 times the median absolute deviation from it."""
    ordered = sorted(residuals)
    middle = median(ordered)
    # Two ascending runs (the deviations below, turned round, and those above): sorting them is one merge.
    split = bisect_left(ordered, middle)
    below = [middle - value for value in reversed(ordered[:split])]
    deviations = sorted(below + [value - middle for value in ordered[split:]])
    return middle, _MAD_TO_SIGMA * median(deviations)


def num_last_above(usual: Usual, sigmas: float, floor: float, most: int) -> int:
    """How many of the last `most` accepted values, without a gap, lay `sigmas` spreads above the expected."""
    limit = usual.lag + sigmas * max(usual.spread, floor)
    num = 0
    for residual in reversed(usual.residuals[-most:]):
        if residual < limit:
            break
        num += 1
    return num


def median(ordered: list[float]) -> float:
    """Of ascending values."""
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else 0.5 * (ordered[middle - 1] + ordered[middle])
