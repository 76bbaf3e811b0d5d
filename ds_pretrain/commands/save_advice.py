"""What `check` says of how often to save, from what the run has measured."""

import json
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from ds_pretrain.checkpoint.interval import Costs, advice_lines, spoken, stall_warning
from ds_pretrain.config.plan import Plan
from ds_pretrain.config.timeline import to_steps
from ds_pretrain.core.jsonl import METRICS

_NEWEST = 1000  # records of each kind: an older one may be of other hardware


def interval_lines(plan: Plan) -> Iterator[str]:
    """How often to save, from what this run has measured; or the one line of what is needed to say it."""
    section = plan.run.checkpoint
    saves = _newest_records(plan.out, "checkpoint")
    stall, complete = _median(saves, "stall_seconds"), _median(saves, "total_seconds")
    if section.mtbf is None or stall is None or complete is None:
        mtbf = 'checkpoint.mtbf, the mean time between failures here (like "8 h")'
        save = "a first save of this run, to be measured"
        needed = [words for words, lacks in ((mtbf, section.mtbf is None), (save, stall is None)) if lacks]
        yield f"saves      advice on checkpoint.every needs {' and '.join(needed)}"
        return
    restore = _median(_newest_records(plan.out, "resume"), "restore_seconds")
    interval = _interval_seconds(plan)
    yield (
        f"saves      measured: training stands still for {spoken(stall)}, a checkpoint is complete after "
        f"{spoken(complete)}, a restore takes {'an unknown time' if restore is None else spoken(restore)}"
    )
    costs = Costs(stall, complete, restore or 0.0, section.mtbf.seconds)
    yield from (f"           {line}" for line in advice_lines(costs, interval))
    warning = None if interval is None else stall_warning(stall, interval, section.stall_share)
    if warning is not None:
        yield f"warning    {warning}"


def _interval_seconds(plan: Plan) -> float | None:
    """Seconds between saves as `checkpoint.every` has them where a run stands: the first one to come."""
    steps = _newest_records(plan.out, "step")
    step_seconds = _median(steps, "step_seconds")
    seconds = [d.seconds for d in plan.run.checkpoint.every if d.unit == "seconds"]
    if step_seconds is not None:
        segment = plan.timeline.at(min(steps[-1]["step"], plan.last_step) - 1)
        seconds += (
            to_steps(duration, segment.tokens_per_step) * step_seconds
            for duration in plan.run.checkpoint.every
            if duration.unit != "seconds"
        )
    return min(seconds, default=None)


def _newest_records(out: Path, event: str) -> list[dict[str, Any]]:
    """The newest records of an event, however many steps the run has; torn lines are skipped."""
    mark = f'"event": "{event}"'.encode()  # only what is kept is taken apart
    lines: deque[bytes] = deque(maxlen=_NEWEST)
    with suppress(OSError), (out / METRICS).open("rb") as file:
        lines.extend(line for line in file if mark in line)
    records = []
    for line in lines:
        with suppress(ValueError):
            records.append(json.loads(line))
    return records


def _median(records: list[dict[str, Any]], field: str) -> float | None:
    values = [value for record in records if isinstance(value := record.get(field), int | float)]
    return median(values) if values else None
