"""Reports of a start whose plan differs from the previous one."""

from typing import Any

import pytest

from ds_pretrain.training.record import RunRecord
from ds_pretrain.training.resume import report_changes


class Events:
    """A monitor's records."""

    def __init__(self) -> None:
        self.records: list[tuple[str, dict[str, Any]]] = []

    def event(self, kind: str, **fields: Any) -> None:
        self.records.append((kind, fields))


def test_what_is_ahead_and_has_changed_is_told_and_noted_in_words(caplog: pytest.LogCaptureFixture) -> None:
    phase = {"first_step": 8, "seq_len": 32, "mixture": {"web": 1.0}, "rope": None}
    changes = [
        {"attempt": 1, "field": "schedule.peak_lr", "old": 0.1, "new": 0.2},  # told at the start before
        {"attempt": 2, "field": "phases.long", "old": None, "new": phase},
        {"attempt": 2, "field": "schedule.length", "old": 1200, "new": 1},
    ]
    caplog.set_level("INFO", "ds_pretrain")
    events: Any = Events()
    report_changes(RunRecord("a", {}, 2, "id", None, changes=tuple(changes)), events)
    words = "sequences of 32 tokens of 1 web, from step 8 on"
    assert caplog.messages == [
        f"`phases.long` is {words} from this start on; it was not there",
        "`schedule.length` is 1 step from this start on; it was 1,200 steps",
    ]
    assert events.records == [
        ("config_changed", {"field": "phases.long", "old": "not there", "new": words}),
        ("config_changed", {"field": "schedule.length", "old": "1,200 steps", "new": "1 step"}),
    ]
