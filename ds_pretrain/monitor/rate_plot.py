"""The learning rate of a run over its phases, in words and drawn in a terminal."""

from collections.abc import Iterator
from itertools import pairwise

from ds_pretrain.config.plan import Plan
from ds_pretrain.core.text import counted

_WIDTH, _HEIGHT = 72, 7  # characters


def rate_summary(plan: Plan) -> Iterator[str]:
    """The rate where the schedule changes its nature, and where the ramp's rule changes it; then drawn."""
    corners = (f"{name} {step:,}: {_rate(plan, step):.3g}" for name, step in plan.schedule.corners().items())
    yield f"rate       {', '.join(corners)}"
    segments, batch = plan.timeline.segments, plan.run.batch
    changes = [b for a, b in pairwise(segments) if b.tokens_per_step != a.tokens_per_step]
    if batch.rate_rule != "none" and (changes or plan.rate_factor(0) != 1):
        words = (
            f"x {plan.rate_factor(s.first_step):.3g} from step {s.first_step:,} "
            f"({counted(s.tokens_per_step, 'token')} a step, rate {_rate(plan, s.first_step):.3g})"
            for s in (segments[0], *changes)
        )
        meant = f" to {plan.rate_tokens:,} tokens" if batch.rate_tokens is not None else ""
        yield f"           batch.rate_rule {batch.rate_rule}{meant}: {', '.join(words)}"
    yield from (f"           {line}" for line in rate_lines(plan))


def _rate(plan: Plan, step: int) -> float:
    """Of a run in which no update is dropped; a schedule may have a corner at its very end."""
    return plan.rate(min(step, plan.last_step - 1), step)


def rate_lines(plan: Plan) -> list[str]:
    """The rate on a linear scale, a column a stretch of steps; below it the phases and where each begins."""
    width = min(_WIDTH, plan.last_step)
    steps = [column * (plan.last_step - 1) // max(1, width - 1) for column in range(width)]
    rates = [plan.rate(step, step) for step in steps]
    highest = max(rates) or 1.0
    heights = [round(rate / highest * (_HEIGHT - 1)) for rate in rates]
    rows = []
    for level in reversed(range(_HEIGHT)):
        label = f"{highest * level / (_HEIGHT - 1):9.3g}" if level in (0, _HEIGHT - 1) else " " * 9
        rows.append(f"{label} {''.join('*' if height == level else ' ' for height in heights)}".rstrip())
    rows.append(" " * 10 + _phases(plan, steps))
    return rows


def _phases(plan: Plan, steps: list[int]) -> str:
    """Each phase's name where it begins, as far as there is room before the next."""
    line = ["-"] * len(steps)
    for phase in plan.run.phases:
        begin = plan.timeline.phase_start(phase.name)
        first = next((column for column, step in enumerate(steps) if step >= begin), len(steps))
        for offset, letter in enumerate(f"|{phase.name}"):
            if first + offset < len(line):
                line[first + offset] = letter
    return "".join(line)
