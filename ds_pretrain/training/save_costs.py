"""What saves cost a run while it trains, and when there is something to say of how often it saves."""

from statistics import median
from time import monotonic

from ds_pretrain.checkpoint.interval import advice, advice_lines, stall_warning
from ds_pretrain.checkpoint.save import Outcome
from ds_pretrain.config.plan import Plan

_MEASURED_SAVES = 3  # before anything is said


class Costs:
    """What saves have cost in this start, and what follows for how often to save."""

    def __init__(self, plan: Plan, restore_seconds: float) -> None:
        self._section, self._restore_seconds = plan.run.checkpoint, restore_seconds
        self._began: float | None = None  # of the last save that was published
        self._stalls: list[float] = []
        self._totals: list[float] = []
        self._intervals: list[float] = []
        self._warned = False

    def note(self, outcome: Outcome) -> list[str]:
        """Take a published save; what there is to say now, each thing once a start."""
        began = monotonic() - outcome.total_seconds
        if self._began is not None:
            self._intervals.append(began - self._began)
        self._began = began
        self._stalls.append(outcome.stall_seconds)
        self._totals.append(outcome.total_seconds)
        if len(self._intervals) < _MEASURED_SAVES:
            return []
        lines = []
        stall, interval = median(self._stalls[1:]), median(self._intervals)  # the first one allocates buffers
        warning = None if self._warned else stall_warning(stall, interval, self._section.stall_share)
        if warning is not None:
            self._warned = True
            lines.append(warning)
        if self._section.mtbf is not None and len(self._intervals) == _MEASURED_SAVES:
            mtbf = self._section.mtbf.seconds
            lines += advice_lines(advice(stall, median(self._totals), self._restore_seconds, mtbf, interval))
        return lines
