"""Durations laid onto a run: so much after a step, so much before it, and every so much.

Steps count alike everywhere; tokens count by the batches that lie there, which a ramp makes larger. Behind
the end of the run, where a place may lie after it was shortened, they count by its last batch.
"""

from bisect import bisect_right
from dataclasses import dataclass
from math import ceil

from ds_pretrain.config.timeline import Duration, Timeline


def step_after(timeline: Timeline, step: int, duration: Duration) -> int:
    """The first step by which steps or tokens of a duration are done after `step`."""
    if duration.unit == "steps":
        return step + int(duration.amount)
    wanted = _tokens_before(timeline, step) + duration.amount
    if (missing := wanted - timeline.total_tokens) > 0:
        return timeline.last_step + ceil(missing / timeline.segments[-1].tokens_per_step)
    return max(step, timeline.step_at(wanted))


def step_before(timeline: Timeline, step: int, duration: Duration) -> int:
    """The last step from which steps or tokens of a duration were done up to `step`; at least 0."""
    if duration.unit == "steps":
        return max(0, step - int(duration.amount))
    wanted = _tokens_before(timeline, step) - duration.amount
    if wanted <= 0:
        return 0
    if (more := wanted - timeline.total_tokens) > 0:
        return timeline.last_step + int(more // timeline.segments[-1].tokens_per_step)
    first = timeline.step_at(wanted)
    return first - (timeline.tokens_before(first) > wanted)


def _tokens_before(timeline: Timeline, step: int) -> int:
    beyond = max(0, step - timeline.last_step)
    return timeline.tokens_before(step - beyond) + beyond * timeline.segments[-1].tokens_per_step


@dataclass(frozen=True)
class Multiples:
    """The multiples of an amount that a run comes by; plain numbers, so that another process can be told."""

    every: int
    pieces: tuple[tuple[int, int, int], ...]  # from which step on, the amount before it and that of a step

    def before(self, step: int) -> int:
        """How many multiples the first `step` steps reach."""
        first, amount, of_step = self.pieces[bisect_right(self.pieces, step, key=lambda p: p[0]) - 1]
        return (amount + (step - first) * of_step) // self.every


def multiples(every: Duration, timeline: Timeline) -> Multiples:
    """Those of a duration in steps or tokens."""
    if every.unit == "steps":
        return Multiples(int(every.amount), ((0, 0, 1),))
    pieces = ((s.first_step, s.first_token, s.tokens_per_step) for s in timeline.segments)
    return Multiples(int(every.amount), tuple(pieces))
