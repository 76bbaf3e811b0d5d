"""When a checkpoint is due by the clock, which one rank asks."""

import pytest

from ds_pretrain.checkpoint import retention
from ds_pretrain.checkpoint.retention import WallClock
from ds_pretrain.config.timeline import parse_duration


def test_the_clock_counts_from_the_last_save_and_takes_the_shortest_trigger(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr(retention, "monotonic", lambda: now)
    clock = WallClock([parse_duration("1 h"), parse_duration("2 min"), parse_duration("1 step")])
    now = 1119.0
    assert not clock.is_due()
    now = 1120.0
    assert clock.is_due()
    clock.restart()
    assert not clock.is_due()
    now = 1241.0
    assert clock.is_due()


def test_without_a_trigger_in_time_the_clock_is_never_due(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(retention, "monotonic", lambda: now)
    clock = WallClock([parse_duration("5 steps"), parse_duration("1M tokens")])
    now = 1e9
    assert not clock.is_due()
