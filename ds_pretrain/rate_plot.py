"""The learning rate of a run over its phases, drawn in a terminal."""

from ds_pretrain.plan import Plan

_WIDTH, _HEIGHT = 72, 7  # characters


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
