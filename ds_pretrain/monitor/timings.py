"""What a run's metrics.jsonl says of how long things take: medians of the newest measurements."""

import json
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ds_pretrain.core.jsonl import METRICS

_NEWEST = 1000  # of each kind: an older one may be of other hardware


@dataclass(frozen=True)
class Timings:
    """Medians, in seconds; None where nothing was measured."""

    step_seconds: float | None = None
    stall_seconds: float | None = None  # that training stands still for a save
    complete_seconds: float | None = None  # of a save, from its begin to a complete checkpoint
    restore_seconds: float | None = None
    step: int | None = None  # the newest that was measured


def read_timings(out: Path) -> Timings:
    """Of the run in `out`, however long it is; torn lines are skipped, and a missing file says nothing."""
    # Most lines are steps, and a long run has many: only the newest of each kind are taken apart.
    newest: dict[bytes, deque[bytes]] = {
        f'"event": "{kind}"'.encode(): deque(maxlen=_NEWEST) for kind in ("step", "checkpoint", "resume")
    }
    try:
        with (out / METRICS).open("rb") as file:
            for line in file:
                for mark, lines in newest.items():
                    if mark in line:
                        lines.append(line)
    except OSError:
        return Timings()
    steps, saves, resumes = newest.values()
    numbers = (_field(line, "step") for line in reversed(steps))
    return Timings(
        _median(steps, "step_seconds"),
        _median(saves, "stall_seconds"),
        _median(saves, "total_seconds"),
        _median(resumes, "restore_seconds"),
        next((number for number in numbers if isinstance(number, int) and number > 0), None),
    )


def _median(lines: Iterable[bytes], field: str) -> float | None:
    values = [value for line in lines if isinstance(value := _field(line, field), int | float)]
    return median(values) if values else None


def _field(line: bytes, field: str) -> Any:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record.get(field) if isinstance(record, dict) else None
