"""The logbook of a run: `incidents.jsonl`, what a person may ask about, and the page made of it.

The file is appended to and never rewritten. A start reads it once; `LOGBOOK.md` is made anew, whole and
atomically, from what is then remembered of it, so it heals by itself after a write that failed.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ds_pretrain.core.files import sync_file, write_atomic
from ds_pretrain.monitor.logbook_memory import NOTEWORTHY, Remembered, remembered
from ds_pretrain.monitor.logbook_page import page
from ds_pretrain.monitor.sinks import JsonLines, read_metrics

INCIDENTS = "incidents.jsonl"
PAGE = "LOGBOOK.md"
_REMEMBERED_STEPS = 2000  # long enough for the onset of a slow drift
_MOST_POINTS = 200  # of the curve in a record
_STEPS_BEFORE = 100  # of the onset in a curve, at least: what was usual has to be seen
_PAUSE_SECONDS = 60.0  # between two pages that tell nothing but small things: they may come with each step


class Logbook:
    """A sink that sees every step and event, and writes down the noteworthy ones for people.

    Opening raises OSError when what earlier starts wrote cannot be read, or not be added to.
    `write` and `close` raise OSError when the disk refuses. A record that was refused is missing from the
    file; a page that was refused is made again later.
    """

    def __init__(self, out: Path, run_name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._incidents, self._page, self._name, self._clock = out / INCIDENTS, out / PAGE, run_name, clock
        is_there = self._incidents.is_file()
        self._told = remembered(read_metrics(self._incidents)) if is_there else Remembered()
        self._file = JsonLines(self._incidents)
        self._steps: deque[tuple[int, float, int | None]] = deque(maxlen=_REMEMBERED_STEPS)
        self._page_is_old = self._save_failed = False
        self._tried_at = -float("inf")

    def write(self, record: Mapping[str, Any]) -> None:
        """Remember a step, or write an event down if it is noteworthy."""
        kind = record.get("event")
        if kind == "step":
            self._remember(record)
        if kind in NOTEWORTHY or (kind == "checkpoint" and self._save_failed):  # saves work again
            self._save_failed = kind == "save_failed" or (self._save_failed and kind != "checkpoint")
            completed = self._completed(record)
            self._file.write(completed)
            self._told.take(completed)
            self._page_is_old = True
            if not _is_small(record):
                sync_file(self._incidents)
                self._make_page()
        if self._page_is_old and self._clock() >= self._tried_at + _PAUSE_SECONDS:
            self._make_page()

    def close(self) -> None:
        """Bring the page up to date, flush and close; closing twice is fine."""
        try:
            if self._page_is_old:
                self._make_page()
        finally:
            self._file.close()

    def _remember(self, record: Mapping[str, Any]) -> None:
        step, loss = record["step"], record["loss"]
        while self._steps and self._steps[-1][0] >= step:  # gone back: that branch is left
            self._steps.pop()
        self._steps.append((step, loss, record.get("tokens")))

    def _completed(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """The record with the tokens of its step, and with the curve if a decision was taken by it."""
        done = dict(record)
        if record.get("event") == "dropped":  # there may be thousands of them
            done["num_samples"] = len(done.pop("samples", None) or ())  # metrics.jsonl has their ids
        step = record.get("step")
        if "tokens" not in record:
            known = next((tokens for at, _, tokens in reversed(self._steps) if at == step), None)
            done |= {} if known is None else {"tokens": known}
        if _decides(record) and isinstance(step, int):
            done["curve"] = self._curve(step, record.get("onset"))
        return done

    def _curve(self, step: int, onset: Any) -> list[list[float]]:
        """[step, loss] from well before the onset to `step`; thinned evenly, the last one always there."""
        began = onset if isinstance(onset, int) else step
        first = began - max(_STEPS_BEFORE, step - began)
        points = [[at, loss] for at, loss, _ in self._steps if first <= at <= step]
        every = -(-len(points) // _MOST_POINTS) or 1
        return points[::-1][::every][::-1]

    def _make_page(self) -> None:
        self._tried_at = self._clock()  # first: a disk that refuses is not asked again with each step
        write_atomic(self._page, page(self._told, self._name))
        self._page_is_old = False


def _decides(record: Mapping[str, Any]) -> bool:
    kind = record.get("event")
    return kind in ("rollback", "needs_person") or (
        kind == "watchdog" and record.get("action") == "roll_back"
    )


def _is_small(record: Mapping[str, Any]) -> bool:
    return record.get("event") in ("dropped", "watchdog") and not _decides(record)
