"""The monitor: right numbers to every sink, and nothing that goes wrong in it reaches the loop."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_pretrain.config.plan import make_timeline
from ds_pretrain.config.timeline import Timeline, parse_duration
from ds_pretrain.core.distributed import World
from ds_pretrain.core.jsonl import METRICS, read_metrics
from ds_pretrain.core.metrics import StepRecord
from ds_pretrain.models.flops import peak_flops
from ds_pretrain.monitor.monitor import Monitor
from tests.timelines import phase, single_phase

RECORD = StepRecord(
    step=1,
    phase="main",
    loss=3.0,
    loss_max_rank=3.1,
    loss_other_ranks=2.9,
    z_loss=None,
    learning_rate=1e-3,
    grad_norm=2.0,
    clip_factor=0.5,
    update_applied=True,
    num_valid_tokens=990,
    num_valid_tokens_min_rank=495,
    tokens=1000,
    samples=10,
    step_seconds=2.0,
    data_wait_seconds=0.1,
    batch_checksum=0,
)


def at(step: int, **changed: Any) -> StepRecord:
    return replace(RECORD, step=step, tokens=1000 * step, **changed)


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def lasting(steps: int) -> Timeline:
    """Steps of 1,000 tokens."""
    return single_phase("main", 100, 10, parse_duration(f"{steps} steps"))


def open_monitor(out: Path, **changed: Any) -> Monitor:
    settings: dict[str, Any] = {
        "out": out,
        "every": 10,
        "wandb": None,
        "run_config": {},
        "attempt": 1,
        "timeline": lasting(25),
        "flops_per_token": {},
        "peak_flops_per_rank": None,
        "world": World(),
    }
    return Monitor(**{**settings, **changed})


def metrics(out: Path) -> list[dict[str, Any]]:
    return list(read_metrics(out / METRICS))


def test_a_validation_on_file_says_what_was_found_and_nothing_of_what_was_not_looked_for(
    tmp_path: Path,
) -> None:
    with open_monitor(tmp_path) as monitor:
        monitor.validation(3, {"web": 2.5})
        monitor.validation(4, {"web": 2.5}, {"web": {"1": 3.0}}, {"web": {"64": {"0": 0.5}}})
    first, second = metrics(tmp_path)
    assert first == {"event": "validation", "attempt": 1, "step": 3, "losses": {"web": 2.5}}
    found = {"by_position": {"web": {"1": 3.0}}, "retrieval": {"web": {"64": {"0": 0.5}}}}
    assert second == first | {"step": 4} | found


def test_the_file_gets_every_step_and_the_terminal_the_first_each_tenth_and_the_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_monitor(tmp_path) as monitor:
        for step in range(3, 26):
            monitor.step(at(step))
        monitor.validation(25, {"web": 2.5})
        monitor.event("checkpoint", step=25, seconds=1.0)
    assert [r["step"] for r in metrics(tmp_path) if r["event"] == "step"] == list(range(3, 26))
    shown = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert shown == [
        "step 3/25 12.0%",
        "step 10/25 40.0%",
        "step 20/25 80.0%",
        "step 25/25 100.0%",
        "validation at step 25",
        "checkpoint at step 25",
    ]


def test_a_step_line_holds_the_whole_record_and_its_attempt(tmp_path: Path) -> None:
    with open_monitor(tmp_path, attempt=4) as monitor:
        monitor.step(RECORD)
    (line,) = metrics(tmp_path)
    assert {k: line[k] for k in RECORD.to_json()} == RECORD.to_json()
    assert (line["event"], line["attempt"]) == ("step", 4)


def test_throughput_mfu_and_eta_follow_from_the_recent_steps(tmp_path: Path) -> None:
    with open_monitor(
        tmp_path,
        flops_per_token={"main": 6e9},
        peak_flops_per_rank=1e12,
        world=World(size=4),
        timeline=lasting(1000),
    ) as monitor:
        monitor.step(at(1))
        monitor.step(at(2, step_seconds=2.0))
        monitor.step(at(3, step_seconds=20.0))  # a hiccup: it counts in throughput, not in the ETA
    first, _, third = metrics(tmp_path)
    assert first["tokens_per_second"] == 500.0
    assert first["mfu"] == 500.0 * 6e9 / 4e12
    assert third["tokens_per_second"] == 3000 / 24
    assert third["eta_seconds"] == 2.0 * 997


def test_throughput_and_eta_count_the_batch_of_each_step_also_first_after_a_resume_or_a_rollback(
    tmp_path: Path,
) -> None:
    zero, later, end = (parse_duration(f"{steps} steps") for steps in (0, 10, 20))
    ramp = make_timeline([phase("main", 100)], [(zero, 1000), (later, 4000)], end)
    with open_monitor(tmp_path, timeline=ramp) as monitor:
        monitor.step(at(12))  # a resume behind the change
        monitor.step(at(9, step_seconds=0.5))  # a rollback to before it
    with open_monitor(tmp_path, timeline=ramp) as monitor:
        monitor.step(at(9))
    resumed, rolled_back, before = metrics(tmp_path)
    assert resumed["tokens_per_second"] == 4000 / 2
    assert rolled_back["tokens_per_second"] == 5000 / 2.5
    assert resumed["eta_seconds"] == 2.0 * 8
    assert rolled_back["eta_seconds"] == 0.5 * 41  # one step as this one, ten of four times the tokens
    assert before["eta_seconds"] == 2.0 * 41


def test_mfu_counts_the_work_of_each_step_by_its_phase(tmp_path: Path) -> None:
    flops = {"main": 1e9, "long": 3e9}
    with open_monitor(tmp_path, flops_per_token=flops, peak_flops_per_rank=1e12) as monitor:
        monitor.step(at(1))
        monitor.step(at(2, phase="long"))
        monitor.step(at(3, phase="unknown"))
    assert [r["mfu"] for r in metrics(tmp_path)] == [0.5, 4e12 / 4 / 1e12, None]


def test_goodput_is_the_share_of_time_spent_in_applied_steps(tmp_path: Path) -> None:
    clock = Clock()
    with open_monitor(tmp_path, clock=clock) as monitor:
        clock.seconds += 4
        monitor.step(at(1))
        clock.seconds += 4
        monitor.step(at(2, update_applied=False))
    assert [r["goodput"] for r in metrics(tmp_path)] == [0.5, 0.25]


def test_what_cannot_be_known_is_none(tmp_path: Path) -> None:
    with open_monitor(tmp_path, clock=lambda: 0.0) as monitor:
        monitor.step(at(1, step_seconds=0.0))
    (line,) = metrics(tmp_path)
    assert [line[k] for k in ("tokens_per_second", "mfu", "goodput")] == [None, None, None]


def test_a_report_is_a_line_and_an_event_of_the_same_content(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_monitor(tmp_path) as monitor:
        monitor.report("warning", "look", step=1200)
        monitor.report("outcome", "healed", step=1200, incident=3)
        monitor.report("warning", "odd")
    lines = ["ds_pretrain: step 1,200: look", "ds_pretrain: incident 3: healed", "ds_pretrain: odd"]
    assert capsys.readouterr().err.splitlines() == lines
    assert [(r["event"], r["message"]) for r in metrics(tmp_path)] == [
        ("warning", "look"),
        ("outcome", "healed"),
        ("warning", "odd"),
    ]


def test_other_ranks_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_monitor(tmp_path, world=World(rank=1, size=2)) as monitor:
        monitor.step(at(1))
        monitor.validation(1, {"web": 2.5})
        monitor.report("warning", "look")
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")


def test_attempts_append_to_one_file(tmp_path: Path) -> None:
    for attempt in (1, 2):
        with open_monitor(tmp_path, attempt=attempt) as monitor:
            monitor.event("start", step=0)
    assert [r["attempt"] for r in metrics(tmp_path)] == [1, 2]


def test_a_folder_that_is_gone_is_told_once_and_the_terminal_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_monitor(tmp_path / "missing") as monitor:
        monitor.step(at(1))
    said = capsys.readouterr()
    assert said.err.startswith("monitoring degraded: opening ")
    assert "FileNotFoundError" in said.err
    assert said.out.startswith("step 1/25")


def test_a_full_disk_is_told_once_counted_and_survived(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.symlink("/dev/full", tmp_path / METRICS)
    with open_monitor(tmp_path, timeline=lasting(100)) as monitor:
        for step in range(1, 6):
            monitor.step(at(step))
    said = capsys.readouterr()
    assert said.err.count("No space left on device; training continues without these records") == 1
    assert "monitoring: writing to JsonLines: OSError: 5 times in all" in said.err
    assert said.out.startswith("step 1/100")


def test_a_sink_that_fails_does_not_keep_records_from_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken:
        def write(self, record: Mapping[str, Any]) -> None:
            raise RuntimeError(f"no {record['event']}")

        def close(self) -> None:
            raise RuntimeError("not closed")

    monitor = open_monitor(tmp_path)
    monitor._others.insert(0, Broken())
    monitor.event("start")
    monitor.event("stop")
    monitor.close()
    monitor.close()
    said = capsys.readouterr()
    assert said.out.splitlines() == ["start", "stop"]
    goes_on = "training continues without these records"
    assert said.err.splitlines() == [
        f"monitoring degraded: writing to Broken: RuntimeError: no start; {goes_on}",
        f"monitoring degraded: closing Broken: RuntimeError: not closed; {goes_on}",
        "monitoring: writing to Broken: RuntimeError: 2 times in all",
    ]


def test_a_step_with_a_value_of_the_wrong_type_does_not_stop_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_monitor(tmp_path) as monitor:
        monitor.step(at(1, step_seconds=None))
    assert "monitoring degraded: measuring a step: TypeError" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA B200", 2250e12),
        ("AMD Instinct MI300X", 1307e12),
        ("NVIDIA L40", None),
        ("cpu", None),
    ],
)
def test_peak_throughput_is_known_by_the_name_of_the_device(name: str, flops: float | None) -> None:
    assert peak_flops(name) == flops
