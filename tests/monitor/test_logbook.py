"""The logbook's sink: what it keeps, that nothing earlier is lost, and that a bad disk costs only pages."""

import math
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ds_pretrain.monitor.logbook_memory import Remembered
from ds_pretrain.monitor.logbook_page import page as page_of

from ds_pretrain.config.timeline import parse_duration
from ds_pretrain.core.distributed import World
from ds_pretrain.core.jsonl import read_metrics
from ds_pretrain.monitor import logbook as logbook_module
from ds_pretrain.monitor.logbook import INCIDENTS, PAGE, Logbook
from ds_pretrain.monitor.monitor import Monitor
from tests.monitor.test_monitor import at
from tests.timelines import single_phase


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def event(kind: str, step: int | None = None, **fields: Any) -> dict[str, Any]:
    at = {} if step is None else {"step": step}
    return {"event": kind, "attempt": 1, **at, **fields, "time": 1_790_000_000.0}


def steps(book: Logbook, first: int, last: int, loss: Callable[[int], float] = float) -> None:
    for step in range(first, last + 1):
        book.write({"event": "step", "attempt": 1, "step": step, "loss": loss(step), "tokens": 1000 * step})


def rollback(step: int, onset: int) -> dict[str, Any]:
    return event("rollback", step, incident=1, onset=onset, trouble="spike", response="replay", to_step=10)


def kept(out: Path) -> list[dict[str, Any]]:
    return list(read_metrics(out / INCIDENTS))


def count_pages(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of records in each page made from here on."""
    made: list[int] = []
    real = page_of

    def counting(told: Any, name: str) -> str:
        made.append(told.num_records)
        return real(told, name)

    monkeypatch.setattr(logbook_module, "page", counting)
    return made


def test_only_what_a_person_may_ask_about_is_kept(tmp_path: Path) -> None:
    book = Logbook(tmp_path, "small")
    routine = [event("validation", 5, losses={"web": 1.0}), event("checkpoint", 5), event("shipped")]
    noteworthy = (
        "start resume stop finish save_failed warning changed watchdog observed rollback needs_person "
        "suspects compared outcome"
    )
    for record in [*routine, event("failed"), *(event(kind, 5) for kind in noteworthy.split())]:
        book.write(record)
    steps(book, 1, 3)
    book.close()
    assert [r["event"] for r in kept(tmp_path)] == noteworthy.split()


def test_the_first_checkpoint_after_a_failed_save_is_kept_too(tmp_path: Path) -> None:
    book = Logbook(tmp_path, "small")
    for record in [event("save_failed", 3), event("warning"), event("checkpoint", 4), event("checkpoint", 5)]:
        book.write(record)
    book.close()
    assert [(r["event"], r.get("step")) for r in kept(tmp_path)] == [
        ("save_failed", 3),
        ("warning", None),
        ("checkpoint", 4),
    ]


def test_a_record_gets_the_tokens_of_its_step_unless_it_has_them_or_nobody_knows(tmp_path: Path) -> None:
    book = Logbook(tmp_path, "small")
    steps(book, 1, 20)
    for record in [event("stop", 7), event("stop", 7, tokens=5), event("stop", 21), event("stop")]:
        book.write(record)
    book.close()
    assert [r.get("tokens") for r in kept(tmp_path)] == [7000, 5, None, None]


def test_a_decision_has_the_exact_losses_from_well_before_the_onset(tmp_path: Path) -> None:
    book = Logbook(tmp_path, "small")
    steps(book, 1, 500, lambda step: 1 / step)
    for kind in ("needs_person", "watchdog", "outcome"):
        book.write(event(kind, 500, onset=480, action="roll_back"))
    book.write(event("watchdog", 500, onset=480, action="watch"))
    book.write(event("rollback", 480, onset=470))
    book.close()
    curves = [r.get("curve") for r in kept(tmp_path)]
    whole = [[step, 1 / step] for step in range(380, 501)]
    assert curves == [whole, whole, None, None, [[step, 1 / step] for step in range(370, 481)]]


def test_a_long_curve_is_thinned_evenly_and_ends_at_the_decision(tmp_path: Path) -> None:
    book = Logbook(tmp_path, "small")
    steps(book, 1, 3000)
    book.write(rollback(3000, 2000))
    book.close()
    curve = kept(tmp_path)[0]["curve"]
    assert len(curve) == 200
    assert [step for step, _ in curve] == list(range(1010, 3001, 10))


def test_steps_of_a_branch_that_was_left_are_in_no_curve(tmp_path: Path) -> None:
    book = Logbook(tmp_path, "small")
    steps(book, 1, 60, lambda step: 100.0)
    steps(book, 41, 70)
    book.write(rollback(70, 65))
    book.close()
    curve = kept(tmp_path)[0]["curve"]
    assert [step for step, _ in curve] == list(range(1, 71))
    assert [loss for _, loss in curve] == [100.0] * 40 + [float(step) for step in range(41, 71)]


def test_non_finite_losses_come_back_from_the_file(tmp_path: Path) -> None:
    book = Logbook(tmp_path, "small")
    steps(book, 1, 3, lambda step: [0.0, 1.0, math.inf, math.nan][step])
    book.write(rollback(3, 2))
    book.close()
    curve = kept(tmp_path)[0]["curve"]
    assert curve[:2] == [[1, 1.0], [2, math.inf]]
    assert math.isnan(curve[2][1])


def test_the_samples_of_a_dropped_update_are_counted_and_those_of_a_rollback_are_kept(tmp_path: Path) -> None:
    book = Logbook(tmp_path, "small")
    book.write(event("dropped", 3, samples=[["web", 0, n] for n in range(512)]))
    skipped = {"phase": "main", "samples": {"web": {"0": list(range(512))}}}
    book.write(rollback(4, 3) | {"skipped": skipped})
    book.close()
    dropped, back = kept(tmp_path)
    assert (dropped["num_samples"], "samples" in dropped) == (512, False)
    assert back["skipped"] == skipped


def test_a_later_start_goes_on_in_the_same_file_even_behind_a_torn_line(tmp_path: Path) -> None:
    for attempt in (1, 2):
        book = Logbook(tmp_path, "small")
        book.write(event("start", 0) | {"attempt": attempt})
        book.close()
        with (tmp_path / INCIDENTS).open("ab") as file:
            file.write(b'{"event": "rollb')
    book = Logbook(tmp_path, "small")
    book.write(event("resume", 7) | {"attempt": 3})
    book.close()
    assert [r["attempt"] for r in kept(tmp_path)] == [1, 2, 3]
    assert "3 starts" in (tmp_path / PAGE).read_text()


def test_the_page_is_there_before_write_returns(tmp_path: Path) -> None:
    book = Logbook(tmp_path, "llama-1b")
    book.write(event("start", 0, world_size=2))
    assert (tmp_path / PAGE).read_text().startswith("# Logbook of llama-1b\n")
    book.write(rollback(5, 4))
    assert "## Incident 1" in (tmp_path / PAGE).read_text()
    book.close()
    book.close()


def test_a_record_is_on_the_disk_itself_before_write_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[Path, int]] = []
    monkeypatch.setattr(logbook_module, "sync_file", lambda p: synced.append((p, p.stat().st_size)))
    book = Logbook(tmp_path, "small")
    book.write(rollback(5, 4))
    assert synced == [(tmp_path / INCIDENTS, (tmp_path / INCIDENTS).stat().st_size)]
    book.close()


def test_what_a_person_writes_into_the_page_is_lost_as_its_top_says(tmp_path: Path) -> None:
    book = Logbook(tmp_path, "small")
    book.write(event("start", 0))
    assert "your own notes belong in another file" in (tmp_path / PAGE).read_text()
    (tmp_path / PAGE).write_text("my notes")
    book.write(event("stop", 5))
    book.close()
    assert "my notes" not in (tmp_path / PAGE).read_text()


def test_a_storm_of_small_things_makes_few_pages_and_the_last_one_has_them_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, clock = count_pages(monkeypatch), Clock()
    book = Logbook(tmp_path, "small", clock)
    for step in range(1, 5001):
        clock.seconds += 0.1
        book.write(event("dropped" if step % 2 else "watchdog", step, action="watch", onset=step))
    assert len(made) == 9  # at once, then one a minute of these 500 seconds
    book.close()
    assert len(made) == 10
    assert made[-1] == 5000
    assert "2,500 updates dropped" in (tmp_path / PAGE).read_text()
    assert len((tmp_path / PAGE).read_text()) < 5000


def test_a_small_thing_is_in_the_page_a_minute_later_though_nothing_else_happens(tmp_path: Path) -> None:
    clock = Clock()
    book = Logbook(tmp_path, "small", clock)
    book.write(event("start", 0))
    book.write(event("dropped", 3))
    steps(book, 4, 4)
    assert "update dropped" not in (tmp_path / PAGE).read_text()
    clock.seconds = 61
    steps(book, 5, 5)
    assert "1 update dropped" in (tmp_path / PAGE).read_text()
    book.close()


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Each file of records that a logbook reads from here on."""
    reads: list[Path] = []

    def counting(path: Path) -> Any:
        reads.append(path)
        return read_metrics(path)

    monkeypatch.setattr(logbook_module, "read_metrics", counting)
    return reads


def large_incident(number: int) -> list[dict[str, Any]]:
    """As a run on 1,000 ranks tells of it that skips 20,000 samples."""
    step, losses = 1000 * number, [2.5 + rank / 1000 for rank in range(1000)]
    sick = [*losses[:-1], 9.0]
    skipped = {
        "phase": "main",
        "start": 0,
        "stop": 20_000,
        "num_samples": 20_000,
        "samples": {"web": {"0": list(range(15_000))}, "code": {"0": [7] * 5_000}},
    }
    asked = {"incident": number, "response": "skip", "to_step": step - 200}
    samples = [{"loss": 9.0, "source": "web", "sample": n, "text": "word " * 200} for n in range(50)]
    return [
        event("watchdog", step, action="roll_back", trouble="spike", onset=step - 5),
        event(
            "rollback",
            step,
            **asked,
            onset=step - 5,
            trouble="spike",
            skipped=skipped,
            rank_losses={str(at): sick for at in range(step - 10, step)},
            hosts=[f"node-{rank // 8}:{rank % 8}" for rank in range(1000)],
        ),
        event("suspects", step, incident=number, samples=samples),
        event("outcome", step + 30, incident=number, outcome="healed"),
    ]


def test_pages_of_large_incidents_read_no_file_and_what_is_remembered_of_them_is_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = count_reads(monkeypatch)
    monkeypatch.setattr(logbook_module, "sync_file", lambda path: None)  # the file is gone below
    book = Logbook(tmp_path, "small")
    for number in range(1, 21):
        steps(book, 1000 * number - 300, 1000 * number, lambda step: 2.5)
        for record in large_incident(number):
            book.write(record)
        if number == 1:
            one = len(pickle.dumps(book._told))
    assert (tmp_path / INCIDENTS).stat().st_size > 5e6
    (tmp_path / INCIDENTS).unlink()  # so nothing can be read from it
    book.write(event("stop", 21_000))
    book.close()
    assert reads == []
    assert len(pickle.dumps(book._told)) < 21 * one < 21 * 20_000
    text = (tmp_path / PAGE).read_text()
    assert text.count("Skipped: 20,000 samples (15,000 of web, 5,000 of code) of phase main") == 20
    assert text.count("rank 999 on node-124:7 stood out most of 1,000 ranks, with a loss of 9; ") == 20
    assert text.count("30 more are in incidents.jsonl.") == 20
    assert len(re.findall("^trouble .*X$", text, re.MULTILINE)) == 20


def test_what_is_remembered_is_what_a_later_start_reads_once_from_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page of a start that saw everything is that of one that read it."""
    reads = count_reads(monkeypatch)
    book = Logbook(tmp_path, "small")
    steps(book, 700, 1000, lambda step: math.nan if step == 999 else 2.5)
    for record in [event("start", 0, world_size=2), event("dropped", 3, cause="wild_norm"), event("warning")]:
        book.write(record)
    for record in [*large_incident(1), event("changed", field="a", old=1, new=None), event("save_failed", 7)]:
        book.write(record)
    told = (tmp_path / PAGE).read_text()
    assert reads == []
    book.close()
    (tmp_path / PAGE).unlink()
    again = Logbook(tmp_path, "small")
    again._make_page()
    assert (tmp_path / PAGE).read_text() == told
    again.write(event("resume", 5))
    again.write(event("stop", 9))
    again.close()
    assert len(reads) == 1


def test_months_of_small_things_and_starts_take_no_more_memory_than_a_day(tmp_path: Path) -> None:
    sizes = {}
    memory = Remembered()
    for day in range(200):
        first = 100_000 + 1000 * day
        for step in range(first, first + 510):
            memory.take(event("dropped", step, cause=f"cause {step}"))
        for step in range(first, first + 110):
            memory.take(event("watchdog", step, action="ok", trouble="blip", onset=step, message="m" * 100))
        memory.take(event("resume", first))
        sizes[day] = len(pickle.dumps(memory)) if day in (110, 199) else 0
    assert sizes[199] < 1.01 * sizes[110]
    assert memory.counts["dropped"] == 102_000
    text = page_of(memory, "small")
    assert "510 updates dropped (490 for other, 1 for cause " in text
    assert "steps 299,000 to 299,499 and 10 more. Last: " in text
    assert "Watched, nothing was done: 110 troubles, none grave enough to roll back for; 110 seen" in text
    assert "## Small things, steps 299,000 to 299,509" in text
    assert "0 incidents (0 open); 200 starts, the last " in text
    assert "200 older entries are in incidents.jsonl only." in text


def open_monitor(out: Path, rank: int = 0) -> Monitor:
    return Monitor(
        out=out,
        every=10,
        wandb=None,
        run_config={"name": "small"},
        attempt=1,
        timeline=single_phase("main", 1, 1, parse_duration("10 steps")),
        flops_per_token={},
        peak_flops_per_rank=None,
        world=World(rank=rank, size=2),
    )


def test_the_monitor_keeps_the_logbook_on_rank_0_under_the_name_of_the_run(tmp_path: Path) -> None:
    for rank in (1, 0):
        with open_monitor(tmp_path, rank) as monitor:
            monitor.event("start", step=0)
        assert (tmp_path / INCIDENTS).exists() == (rank == 0)
    assert (tmp_path / PAGE).read_text().startswith("# Logbook of small\n")


def test_the_logbook_sees_also_the_steps_that_the_terminal_does_not_show(tmp_path: Path) -> None:
    with open_monitor(tmp_path) as monitor:
        for step in range(1, 6):
            monitor.step(at(step))
        monitor.event("rollback", incident=1, step=5, onset=4)
    assert [step for step, _ in kept(tmp_path)[0]["curve"]] == [1, 2, 3, 4, 5]


def test_a_full_disk_costs_a_warning_and_the_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.symlink("/dev/full", tmp_path / INCIDENTS)
    with open_monitor(tmp_path) as monitor:
        monitor.event("start", step=0)
        monitor.event("finish", step=10)
    said = capsys.readouterr()
    assert said.out.splitlines() == ["start at step 0", "finish at step 10"]
    assert said.err.count("monitoring degraded: writing to Logbook: OSError") == 1
    assert len(list(read_metrics(tmp_path / "metrics.jsonl"))) == 2


def test_a_logbook_that_cannot_be_opened_costs_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / INCIDENTS).mkdir()
    with open_monitor(tmp_path) as monitor:
        monitor.event("start", step=0)
    said = capsys.readouterr()
    assert f"monitoring degraded: opening {tmp_path / INCIDENTS}: IsADirectoryError" in said.err
    assert said.out == "start at step 0\n"


def test_a_page_that_was_refused_is_made_by_a_later_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / PAGE).mkdir()  # stands for a folder in which nothing can be renamed
    with open_monitor(tmp_path) as monitor:
        monitor.event("start", step=0)
        (tmp_path / PAGE).rmdir()
        monitor.event("stop", step=3)
    assert "monitoring degraded: writing to Logbook: " in capsys.readouterr().err
    text = (tmp_path / PAGE).read_text()
    assert text.index("## Stop on request") < text.index("## Start")


def test_a_page_that_was_refused_is_made_when_the_logbook_is_closed(tmp_path: Path) -> None:
    (tmp_path / PAGE).mkdir()
    book = Logbook(tmp_path, "small")
    with pytest.raises(OSError, match=PAGE):
        book.write(event("start", 0))
    (tmp_path / PAGE).rmdir()
    book.close()
    assert "## Start" in (tmp_path / PAGE).read_text()


def test_the_logbook_needs_no_torch() -> None:
    code = "import sys, ds_pretrain.monitor.logbook; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
