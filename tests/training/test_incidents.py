"""A live run reports each trouble once, and again when it changes or ends."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from ds_pretrain.config.plan import load_plan
from ds_pretrain.core.distributed import World
from ds_pretrain.core.metrics import StepRecord
from ds_pretrain.core.state import RunState, Verdict
from ds_pretrain.monitor.monitor import Monitor
from ds_pretrain.training.incidents import Incidents
from tests.scenario import make_run
from tests.watchdog.curves import BEFORE, DEFAULTS, after, judged, raised


class Reports:
    """Stands for the monitor."""

    def __init__(self) -> None:
        self.said: list[dict[str, Any]] = []

    def report(self, event: str, message: str, **more: Any) -> None:
        self.said.append({"event": event, "message": message, **more})


@pytest.fixture(scope="module")
def reports_and_incidents(tmp_path_factory: pytest.TempPathFactory) -> tuple[Reports, Incidents]:
    plan = load_plan(str(make_run(tmp_path_factory.mktemp("run"))), ())
    reports = Reports()
    return reports, Incidents(plan, cast(Monitor, reports), World())


def say(
    reports_and_incidents: tuple[Reports, Incidents], verdicts: Sequence[tuple[int, Verdict]]
) -> list[dict[str, Any]]:
    """Hand in the verdict of each step; what was reported."""
    reports, incidents = reports_and_incidents
    reports.said.clear()
    state = RunState()
    incidents.begin(state)
    for step, verdict in verdicts:
        healthy = verdict.action == "ok"
        state = replace(state, step=step, num_healthy_steps=state.num_healthy_steps + 1 if healthy else 0)
        record = StepRecord(**dict.fromkeys(StepRecord.__dataclass_fields__, 0) | {"step": step})  # type: ignore[arg-type]
        incidents.note_step(state, record, (1.0,), verdict)
    return list(reports.said)


def test_w09_a_drift_is_said_once_when_it_is_watched_and_once_when_it_is_over(
    reports_and_incidents: tuple[Reports, Incidents],
) -> None:
    rise = [0.13 * min(1.0, t / 100, max(0.0, (400 - t) / 100)) for t in range(600)]
    points = [*BEFORE, *(raised([p], n)[0] for p, n in zip(after(BEFORE, 600), rise, strict=True))]
    verdicts, _ = judged(points)
    said = say(reports_and_incidents, [(p.step, v) for p, v in zip(points, verdicts, strict=True)])
    assert sum(v.kind == "drift" for v in verdicts) > 100
    assert [(one["action"], one["trouble"]) for one in said] == [("watch", "drift"), ("ok", "drift")]


def test_w09_trouble_that_changes_or_comes_again_is_said_again_and_other_trouble_between_does_not_count(
    reports_and_incidents: tuple[Reports, Incidents],
) -> None:
    drift, later = Verdict("watch", "drift", 5, "drift"), Verdict("watch", "drift", 9, "a later drift")
    blip, grave = Verdict("ok", "blip", 7, "blip"), Verdict("roll_back", "drift", 9, "too far")
    verdicts = [drift, drift, blip, drift, later, later, grave]
    said = say(reports_and_incidents, list(enumerate(verdicts, start=10)))
    assert [one["message"] for one in said] == ["drift", "blip", "a later drift", "too far"]
    healthy = [Verdict()] * DEFAULTS.patience
    assert len(say(reports_and_incidents, list(enumerate([drift, *healthy, drift], start=10)))) == 2
