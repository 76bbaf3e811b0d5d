"""How often to save: the interval that loses least between saving too often and repeating too much. Pure.

J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974,
https://doi.org/10.1145/361147.361115; J. T. Daly, "A higher order estimate of the optimum checkpoint interval
for restart dumps", FGCS 22(3), 2006, https://doi.org/10.1016/j.future.2004.11.016.

What a save costs is the time that training stands still for it. That a checkpoint is complete only some time
after it was taken, and that a restore takes its time, adds to what a failure costs, whatever the interval.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt


@dataclass(frozen=True)
class Advice:
    """The interval to choose, in seconds from one save to the next, and what is lost at it."""

    seconds: float  # Daly's, and never shorter than a save takes to be complete
    young_seconds: float  # the first-order one, as it is
    lost: float  # expected share of all time, 0 to 1
    interval_seconds: float | None  # the present one, if it is known
    lost_now: float | None  # at the present one


def advice(
    stall_seconds: float,
    complete_seconds: float,
    restore_seconds: float,
    mtbf_seconds: float,
    interval_seconds: float | None = None,
) -> Advice:
    """What to choose, from medians of what was measured.

    Args:
        stall_seconds: that training stands still for a save.
        complete_seconds: from the begin of a save until its checkpoint is complete.
        restore_seconds: from the start of a process until it trains again.
        mtbf_seconds: mean time between failures of the whole cluster, above 0.
        interval_seconds: between saves at present, None if that is not known yet.
    """
    best = max(daly_seconds(stall_seconds, mtbf_seconds), complete_seconds)
    costs = (stall_seconds, complete_seconds, restore_seconds, mtbf_seconds)
    return Advice(
        seconds=best,
        young_seconds=young_seconds(stall_seconds, mtbf_seconds),
        lost=lost_share(best, *costs),
        interval_seconds=interval_seconds,
        lost_now=None if interval_seconds is None else lost_share(interval_seconds, *costs),
    )


def young_seconds(stall_seconds: float, mtbf_seconds: float) -> float:
    """Young's interval: sqrt(2 stall mtbf)."""
    return sqrt(2 * stall_seconds * mtbf_seconds)


def daly_seconds(stall_seconds: float, mtbf_seconds: float) -> float:
    """Daly's interval, from one save to the next: training between them, and the stall."""
    if stall_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds + stall_seconds
    half = stall_seconds / (2 * mtbf_seconds)
    return young_seconds(stall_seconds, mtbf_seconds) * (1 + sqrt(half) / 3 + half / 9)


def lost_share(
    interval_seconds: float,
    stall_seconds: float,
    complete_seconds: float,
    restore_seconds: float,
    mtbf_seconds: float,
) -> float:
    """Expected share of time lost, to first order: stalls, and at each failure half an interval and more."""
    if interval_seconds <= 0:
        return 1.0
    repeated = interval_seconds / 2 + complete_seconds + restore_seconds
    return min(1.0, stall_seconds / interval_seconds + repeated / mtbf_seconds)


def advice_lines(found: Advice) -> Iterator[str]:
    """The advice for people: the best interval, then the present one beside it."""
    yield (
        f"a save every {spoken(found.seconds)} loses least: {found.lost:.2%} of the time is expected to be "
        f"lost (Daly 2006; Young 1974 says {spoken(found.young_seconds)})"
    )
    if found.interval_seconds is not None and found.lost_now is not None:
        yield (
            f"checkpoint.every is about {spoken(found.interval_seconds)} at present: {found.lost_now:.2%} is "
            "expected to be lost"
        )


def stall_warning(stall_seconds: float, interval_seconds: float, share: float) -> str | None:
    """What to tell if training stands still for saves longer than `share` of the time between them."""
    if interval_seconds > 0 and stall_seconds <= share * interval_seconds:
        return None
    taken = f"{stall_seconds / interval_seconds:.1%}" if interval_seconds > 0 else "all"
    return (
        f"training stands still for {spoken(stall_seconds)} at a save, {taken} of the "
        f"{spoken(interval_seconds)} between saves, and checkpoint.stall_share allows {share:.1%}: save less "
        "often (checkpoint.every), or give the hosts more free memory, so that saves are written behind"
    )


def spoken(seconds: float) -> str:
    """Two digits in the unit that fits: "0.42 s", "14 min", "2.5 h"."""
    for unit, size, most in (("s", 1, 99.5), ("min", 60, 99.5)):
        if seconds / size < most:
            return f"{_two_digits(seconds / size)} {unit}"
    return f"{_two_digits(seconds / 3600)} h"


def _two_digits(number: float) -> str:
    return f"{number:,.0f}" if number >= 9.95 else f"{number:.2g}"
