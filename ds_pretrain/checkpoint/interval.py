"""The checkpoint interval that costs the least: saves against repeated work (Young, Daly). Pure.

J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974,
https://doi.org/10.1145/361147.361115; J. T. Daly, "A higher order estimate of the optimum checkpoint interval
for restart dumps", FGCS 22(3), 2006, https://doi.org/10.1016/j.future.2004.11.016.

What a save costs is the time that training is blocked for it. That a checkpoint is complete only some time
after it was taken, and that a restore takes its time, adds to what a failure costs, whatever the interval.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt


@dataclass(frozen=True)
class Costs:
    """Costs of saves and failures in seconds: medians of measured values."""

    stall: float  # that training is blocked for a save
    complete: float  # from the begin of a save until its checkpoint is complete
    restore: float  # from the start of a process until it trains again
    mtbf: float  # mean time between failures of the whole cluster, above 0

    @property
    def young_seconds(self) -> float:
        """Young's interval: sqrt(2 stall mtbf)."""
        return sqrt(2 * self.stall * self.mtbf)

    @property
    def daly_seconds(self) -> float:
        """Daly's interval, from one save to the next: training between them, and the stall."""
        if self.stall >= 2 * self.mtbf:
            return self.mtbf + self.stall
        half = self.stall / (2 * self.mtbf)
        return self.young_seconds * (1 + sqrt(half) / 3 + half / 9)

    @property
    def best_seconds(self) -> float:
        """The interval to choose: Daly's, and never shorter than a save takes to be complete."""
        return max(self.daly_seconds, self.complete)

    def lost_fraction(self, interval: float) -> float:
        """Expected share of time lost, to first order: stalls, and half an interval and more a failure."""
        if interval <= 0:
            return 1.0
        repeated = interval / 2 + self.complete + self.restore
        return min(1.0, self.stall / interval + repeated / self.mtbf)


def format_interval_advice(costs: Costs, interval: float | None) -> Iterator[str]:
    """The best interval, then the present one beside it, if that is known."""
    best = costs.best_seconds
    yield (
        f"a save every {format_seconds(best)} loses least: {costs.lost_fraction(best):.2%} of "
        f"the time is expected to be lost (Daly 2006; Young 1974 says {format_seconds(costs.young_seconds)})"
    )
    if interval is not None:
        yield (
            f"checkpoint.every is about {format_seconds(interval)} at present: "
            f"{costs.lost_fraction(interval):.2%} is expected to be lost"
        )


def check_stall(stall_seconds: float, interval_seconds: float, share: float) -> str | None:
    """Return a warning if saves block training for more than `share` of the save interval."""
    if interval_seconds > 0 and stall_seconds <= share * interval_seconds:
        return None
    taken = f"{stall_seconds / interval_seconds:.1%}" if interval_seconds > 0 else "all"
    return (
        f"saves block training for {format_seconds(stall_seconds)} each, {taken} of the "
        f"{format_seconds(interval_seconds)} save interval (checkpoint.max_stall_fraction = {share:.1%}); "
        f"save less often (checkpoint.every), or free host memory for asynchronous saves"
    )


def format_seconds(seconds: float) -> str:
    """Format seconds with two digits in the unit that fits: "0.42 s", "14 min", "2.5 h"."""
    size, unit = next(((n, u) for n, u in ((1, "s"), (60, "min")) if seconds / n < 99.5), (3600, "h"))
    number = seconds / size
    return f"{number:,.0f} {unit}" if number >= 9.95 else f"{number:.2g} {unit}"
