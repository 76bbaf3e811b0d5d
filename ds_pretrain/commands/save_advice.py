"""What `check` says of how often to save, from what the run has measured."""

from collections.abc import Iterator

from ds_pretrain.checkpoint.interval import advice, advice_lines, spoken, stall_warning
from ds_pretrain.config.plan import Plan
from ds_pretrain.config.timeline import to_steps
from ds_pretrain.monitor.timings import Timings, read_timings


def interval_lines(plan: Plan) -> Iterator[str]:
    """How often to save, from what this run has measured; or the one line of what is needed to say it."""
    timings, section = read_timings(plan.out), plan.run.checkpoint
    stall, complete, restore = timings.stall_seconds, timings.complete_seconds, timings.restore_seconds
    if section.mtbf is None or stall is None or complete is None:
        mtbf = 'checkpoint.mtbf, the mean time between failures here (like "8 h")'
        save = "a first save of this run, to be measured"
        needed = [words for words, lacks in ((mtbf, section.mtbf is None), (save, stall is None)) if lacks]
        yield f"saves      advice on checkpoint.every needs {' and '.join(needed)}"
        return
    interval = _interval_seconds(plan, timings)
    yield (
        f"saves      measured: training stands still for {spoken(stall)}, a checkpoint is complete after "
        f"{spoken(complete)}, a restore takes {'an unknown time' if restore is None else spoken(restore)}"
    )
    found = advice(stall, complete, restore or 0.0, section.mtbf.seconds, interval)
    yield from (f"           {line}" for line in advice_lines(found))
    warning = None if interval is None else stall_warning(stall, interval, section.stall_share)
    if warning is not None:
        yield f"warning    {warning}"


def _interval_seconds(plan: Plan, timings: Timings) -> float | None:
    """Seconds between saves as `checkpoint.every` has them where a run stands: the first one to come."""
    seconds = [d.seconds for d in plan.run.checkpoint.every if d.unit == "seconds"]
    if timings.step_seconds is not None and timings.step is not None:
        segment = plan.timeline.at(min(timings.step, plan.last_step) - 1)
        seconds += (
            to_steps(duration, segment.tokens_per_step) * timings.step_seconds
            for duration in plan.run.checkpoint.every
            if duration.unit != "seconds"
        )
    return min(seconds, default=None)
