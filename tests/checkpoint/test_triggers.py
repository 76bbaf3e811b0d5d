"""When a checkpoint is due: by steps and tokens on every rank alike, by the clock on one."""

import pytest

from ds_pretrain.checkpoint import triggers
from ds_pretrain.checkpoint.triggers import WallClock, due_by_count, ends_phase
from ds_pretrain.config.timeline import Segment, Timeline, parse_duration
from tests.timelines import single_phase

TIMELINE = single_phase("main", 16, 4, parse_duration("20 steps"))  # 64 tokens a step


def _due(*texts: str) -> list[int]:
    durations = [parse_duration(text) for text in texts]
    return [step for step in range(1, 21) if due_by_count(durations, step, TIMELINE)]


@pytest.mark.parametrize(
    ("texts", "steps"),
    [
        (("6 steps",), [6, 12, 18]),
        (("1 step",), list(range(1, 21))),
        (("320 tokens",), [5, 10, 15, 20]),
        (("300 tokens",), [5, 10, 15, 19]),  # multiples between steps: the step that passes them
        (("10 tokens",), list(range(1, 21))),  # several within a step: one checkpoint
        (("8 steps", "320 tokens"), [5, 8, 10, 15, 16, 20]),
        (("15 min",), []),
        (("100 steps",), []),
    ],
)
def test_checkpoints_by_count_come_at_each_multiple(texts: tuple[str, ...], steps: list[int]) -> None:
    assert _due(*texts) == steps


def test_the_last_step_of_a_phase_is_due_and_that_of_the_run_is_not_for_this() -> None:
    segments = (Segment("main", 0, 4, 16, 4, 0, 0, 0), Segment("main", 4, 8, 16, 8, 16, 256, 16))
    timeline = Timeline((*segments, Segment("anneal", 8, 12, 16, 8, 48, 768, 0)))
    assert [step for step in range(1, 13) if ends_phase(step, timeline)] == [8]


def test_the_clock_counts_from_the_last_save_and_takes_the_shortest_trigger(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr(triggers, "monotonic", lambda: now)
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
    monkeypatch.setattr(triggers, "monotonic", lambda: now)
    clock = WallClock([parse_duration("5 steps"), parse_duration("1M tokens")])
    now = 1e9
    assert not clock.is_due()
