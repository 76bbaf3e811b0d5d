"""W&B: one run whatever the restarts, no point lost, and no failure of it that training could notice."""

import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_pretrain.config.timeline import parse_duration
from ds_pretrain.core.distributed import World
from ds_pretrain.monitor.wandb import Wandb, WandbRun, build_points, make_opener
from tests.monitor.wandb_files import offline_runs
from tests.ranks import run_ranks
from tests.timelines import single_phase

QUICK: dict[str, Any] = {"stalled_seconds": 0.05, "finish_seconds": 0.3, "most_waiting": 5}
RUN = WandbRun(id="run-id-1", project="tests", name="small", mode="offline")


class FakeClient:
    """Refuses points whose step does not rise, as W&B does, and fails as told."""

    def __init__(self, on_log: Callable[[dict[str, Any]], None] = lambda data: None, step: int = 0) -> None:
        self.logged: list[dict[str, Any]] = []
        self.finished = 0
        self.step = step
        self._on_log = on_log

    def log(self, data: dict[str, Any], step: int) -> None:
        self._on_log(data)
        if step >= self.step:
            self.logged.append(data)
            self.step = step + 1

    def finish(self) -> None:
        self.finished += 1


def record(step: int, attempt: int = 1) -> dict[str, Any]:
    return {"event": "step", "step": step, "attempt": attempt, "loss": 10.0 - step}


def steps(client: FakeClient) -> list[int]:
    return [data["train/step"] for data in client.logged]


def until(condition: Callable[[], object]) -> None:
    """Wait for another thread; the deadline only keeps a failure from hanging."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.001)


def test_each_kind_of_record_has_its_own_keys_and_the_same_axis() -> None:
    step = {"event": "step", "step": 3, "attempt": 2, "loss": 1.5, "z_loss": None, "phase": "main"}
    assert build_points(step) == {"train/loss": 1.5, "train/phase": "main", "train/step": 3, "attempt": 2}
    validation = {"event": "validation", "step": 3, "attempt": 2, "losses": {"web": 1.0}}
    assert build_points(validation) == {"validation/web": 1.0, "train/step": 3, "attempt": 2}
    by_position, retrieval = {"web": {"512": 1.5, "1024": 0.5}}, {"web": {"1024": {"0": 0.25, "50": 0.75}}}
    assert build_points(validation | {"by_position": by_position, "retrieval": retrieval}) == {
        "validation/web": 1.0,
        "validation/web/to_512": 1.5,
        "validation/web/to_1024": 0.5,
        "validation/web/key_1024": 0.5,
        "train/step": 3,
        "attempt": 2,
    }
    checkpoint = {"event": "checkpoint", "step": 3, "attempt": 2, "seconds": 4.0}
    assert build_points(checkpoint) == {
        "event": "checkpoint",
        "checkpoint/seconds": 4.0,
        "train/step": 3,
        "attempt": 2,
    }
    read = {"tokens": 96, "skipped_tokens": 0, "epochs": 0.5, "share": None, "weight": None}
    data = {"event": "data", "step": 3, "attempt": 2, "phase": "main", "sources": {"web": read}, "time": 1.0}
    assert build_points(data) == {
        "data/web/tokens": 96,
        "data/web/skipped_tokens": 0,
        "data/web/epochs": 0.5,
        "train/step": 3,
        "attempt": 2,
    }
    assert build_points({"event": "stop", "attempt": 2}) == {"event": "stop", "attempt": 2}


def test_nested_values_and_the_rest_of_long_texts_stay_in_the_file() -> None:
    record = {"event": "rollback", "step": 3, "attempt": 1, "message": "x" * 5000, "to_step": 1}
    record |= {"skipped": {"samples": {"web": {"0": [1]}}}, "rank_losses": {"3": [1.0]}, "hosts": ["a:0"]}
    assert build_points(record) == {
        "event": "rollback",
        "rollback/message": "x" * 1000,
        "rollback/to_step": 1,
        "train/step": 3,
        "attempt": 1,
    }


def test_a_healthy_client_gets_everything_in_order_and_is_finished_once() -> None:
    client = FakeClient()
    sink = Wandb(lambda: client, **QUICK)
    for step in range(1, 4):
        sink.write(record(step))
    sink.close()
    sink.close()
    assert steps(client) == [1, 2, 3]
    assert (client.finished, sink.degraded, sink.num_lost) == (1, None, 0)


def test_p51_a_rollback_loses_no_point_although_the_client_wants_rising_steps() -> None:
    client = FakeClient(step=70)  # an online run that is resumed stands where the server left it
    sink = Wandb(lambda: client, first_index=20)
    for step in [1, 2, 3, 4, 2, 3]:
        sink.write(record(step))
    sink.close()
    assert steps(client) == [1, 2, 3, 4, 2, 3]


def test_p53_a_client_that_never_starts_costs_its_records_and_nothing_else(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def open_client() -> FakeClient:
        raise OSError("unreachable")

    sink = Wandb(open_client, **QUICK)
    for step in range(12):
        sink.write(record(step))
    sink.close()
    assert capsys.readouterr().err.splitlines() == [
        "monitoring degraded: W&B: OSError: unreachable; training continues; metrics.jsonl has everything",
        "W&B did not get 12 records; metrics.jsonl has everything",
    ]


def test_p53_a_client_that_raises_at_step_3_costs_that_record_and_one_message(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse_3(data: dict[str, Any]) -> None:
        if data["train/step"] == 3:
            raise BrokenPipeError("the client died")

    client = FakeClient(refuse_3)
    sink = Wandb(lambda: client)
    for step in range(1, 6):
        sink.write(record(step))
    sink.close()
    assert (steps(client), client.finished, sink.num_lost) == ([1, 2, 4, 5], 1, 1)
    assert capsys.readouterr().err.splitlines() == [
        "monitoring degraded: W&B: BrokenPipeError: the client died; training continues; metrics.jsonl "
        "has everything",
        "W&B did not get 1 record; metrics.jsonl has everything",
    ]


def test_p53_a_call_that_never_returns_delays_neither_steps_nor_the_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    forever, inside = threading.Event(), threading.Event()

    def hang(data: dict[str, Any]) -> None:
        inside.set()
        forever.wait()

    sink = Wandb(lambda: FakeClient(hang), **QUICK)
    sink.write(record(1))
    assert inside.wait(20)

    def writes_return() -> object:
        sink.write(record(2))
        return sink.degraded

    until(writes_return)
    for step in range(20):
        sink.write(record(step))
    sink.close()
    errors = capsys.readouterr().err
    forever.set()
    sink._thread.join()
    assert (
        errors.count("monitoring degraded: W&B: a call has not returned for 0.05 s; training continues") == 1
    )
    assert "records; metrics.jsonl has everything" in errors
    assert sink.num_lost > 0


def _train_three_times(world: World, out: str) -> int:
    """What the loop does at each start; only rank 0 has a sink. Returns how many runs this rank opened."""
    from ds_pretrain.monitor.monitor import Monitor

    opened = 0
    for attempt in (1, 2, 3):
        before = threading.active_count()
        monitor = Monitor(
            out=Path(out),
            every=1,
            wandb=RUN,
            run_config={"seed": 7, "schedule": {"peak_lr": 3e-4}},
            attempt=attempt,
            timeline=single_phase("main", 10, 1, parse_duration("100 steps")),
            flops_per_token={},
            peak_flops_per_rank=None,
            world=world,
        )
        opened += threading.active_count() > before
        monitor.event("start", step=attempt - 1)
        monitor.validation(attempt, {"web": float(attempt), "bad": math.nan})
        monitor.event("stop", step=attempt)
        monitor.close()
    return opened


def test_p52_two_ranks_and_three_restarts_make_one_run_opened_by_rank_0_alone(tmp_path: Path) -> None:
    assert run_ranks(_train_three_times, 2, str(tmp_path)) == [3, 0]
    runs = offline_runs(tmp_path)
    assert [(run.id, run.project) for run in runs] == [("run-id-1", "tests")] * 3
    assert runs[0].config["schedule"] == {"peak_lr": 3e-4}
    points_of_all = [point for run in runs for point in run.history]
    assert [point["attempt"] for point in points_of_all] == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert [point["train/step"] for point in points_of_all] == [0, 1, 1, 1, 2, 2, 2, 3, 3]
    assert [point["validation/web"] for point in points_of_all if "validation/web" in point] == [
        1.0,
        2.0,
        3.0,
    ]
    own_steps = [point["_step"] for point in points_of_all]
    assert own_steps == sorted(set(own_steps)), (
        "W&B drops points whose own step does not rise over all restarts"
    )


def _lose_the_service(world: World, out: str, how: int) -> tuple[list[str], float]:
    """Log, hit the client's own process with a signal, log on; what was said, and the seconds close took."""
    import contextlib
    import io

    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        sink = Wandb(make_opener(RUN, Path(out), {}), finish_seconds=3.0)
        sink.write(record(1))
        until(lambda: sink._waiting.empty() and sink._busy_since is None)
        listing = subprocess.run(
            ["ps", "--ppid", str(os.getpid()), "-o", "pid=,comm="], capture_output=True, text=True, check=True
        )
        services = [int(line.split()[0]) for line in listing.stdout.splitlines() if "wandb-core" in line]
        assert len(services) == 1
        os.kill(services[0], how)
        if how == signal.SIGKILL:
            until(lambda: sink.write(record(2)) or sink.degraded)
        else:
            sink.write(record(2))
        started = time.monotonic()
        sink.close()
        seconds = time.monotonic() - started
        sink._thread.join(20)
        assert not sink._thread.is_alive()
    return said.getvalue().splitlines(), seconds


@pytest.mark.slow
def test_p53_a_killed_client_process_costs_its_records_and_not_the_run(tmp_path: Path) -> None:
    ((said, seconds),) = run_ranks(_lose_the_service, 1, str(tmp_path), signal.SIGKILL)
    assert said[0].startswith("monitoring degraded: W&B: ")
    assert seconds < 20


def test_p53_a_frozen_client_process_does_not_keep_the_run_from_ending(tmp_path: Path) -> None:
    ((said, seconds),) = run_ranks(_lose_the_service, 1, str(tmp_path), signal.SIGSTOP)
    assert said[0] == (
        "monitoring degraded: W&B: it did not finish within 3 s; training continues; metrics.jsonl has "
        "everything"
    )
    assert seconds < 20  # 3 plus what a busy machine adds; without the limit it would be for ever
