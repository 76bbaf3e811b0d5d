"""The logbook: what is kept, what the page says of it, and that a bad disk costs only pages."""

import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, get_args

import pytest

from ds_pretrain.config.timeline import parse_duration
from ds_pretrain.core.distributed import World
from ds_pretrain.core.jsonl import read_metrics
from ds_pretrain.core.state import Kind
from ds_pretrain.monitor import logbook
from ds_pretrain.monitor.logbook import INCIDENTS, PAGE, Logbook, describe_worst_rank
from ds_pretrain.monitor.monitor import Monitor
from ds_pretrain.watchdog.replay import Finding
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
    """The number of records of the run at each page made from here on."""
    made: list[int] = []
    real = logbook.render

    def counting(newest: Any, name: str, counts: Any, outcomes: Any) -> str:
        made.append(sum(counts.values()))
        return real(newest, name, counts, outcomes)

    monkeypatch.setattr(logbook, "render", counting)
    return made


def test_only_what_a_person_may_ask_about_is_kept(tmp_path: Path) -> None:
    book = Logbook(tmp_path, "small")
    routine = [event("validation", 5, losses={"web": 1.0}), event("checkpoint", 5), event("upload")]
    noteworthy = (
        "start resume stop finish save_failed warning config_changed watchdog observed rollback "
        "needs_operator "
        "high_loss_samples replay_compared outcome"
    )
    for record in [*routine, event("failed"), *(event(kind, 5, action="ok") for kind in noteworthy.split())]:
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
    for kind in ("needs_operator", "watchdog", "outcome"):
        book.write(event(kind, 500, onset=480, action="roll_back"))
    book.write(event("rollback", 480, onset=470))
    book.close()
    curves = [r.get("curve") for r in kept(tmp_path)]
    whole = [[step, 1 / step] for step in range(380, 501)]
    assert curves == [whole, None, None, [[step, 1 / step] for step in range(370, 481)]]


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


def test_the_samples_of_a_dropped_update_are_counted_and_those_of_a_rollback_are_kept(tmp_path: Path) -> None:
    book = Logbook(tmp_path, "small")
    book.write(event("skipped_update", 3, samples=[["web", 0, n] for n in range(512)]))
    book.write(rollback(4, 3) | {"skipped": SKIPPED})
    book.close()
    dropped, back = kept(tmp_path)
    assert (dropped["num_samples"], "samples" in dropped) == (512, False)
    assert back["skipped"] == SKIPPED


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
    monkeypatch.setattr(logbook, "sync_file", lambda p: synced.append((p, p.stat().st_size)))
    book = Logbook(tmp_path, "small")
    book.write(rollback(5, 4))
    assert synced == [(tmp_path / INCIDENTS, (tmp_path / INCIDENTS).stat().st_size)]
    book.close()


def test_a_storm_of_small_things_makes_few_pages_and_the_last_one_has_them_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, clock = count_pages(monkeypatch), Clock()
    book = Logbook(tmp_path, "small", clock)
    for step in range(1, 5001):
        clock.seconds += 0.1
        book.write(event("skipped_update" if step % 2 else "watchdog", step, action="watch", onset=step))
    assert len(made) == 9  # at once, then one a minute of these 500 seconds
    book.close()
    assert len(made) == 10
    assert made[-1] == 5000
    text = (tmp_path / PAGE).read_text()
    assert "; 2,500 skipped updates, " in text
    assert "What is older is in incidents.jsonl." in text
    assert len(text) < 30_000


def test_a_small_thing_is_in_the_page_a_minute_later_though_nothing_else_happens(tmp_path: Path) -> None:
    clock = Clock()
    book = Logbook(tmp_path, "small", clock)
    book.write(event("start", 0))
    book.write(event("skipped_update", 3))
    steps(book, 4, 4)
    assert "update skipped" not in (tmp_path / PAGE).read_text()
    clock.seconds = 61
    steps(book, 5, 5)
    assert "update skipped" in (tmp_path / PAGE).read_text()
    book.close()


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
    assert text.index("preempted, checkpoint saved;") < text.index(": start")


def test_a_page_that_was_refused_is_made_when_the_logbook_is_closed(tmp_path: Path) -> None:
    (tmp_path / PAGE).mkdir()
    book = Logbook(tmp_path, "small")
    with pytest.raises(OSError, match=PAGE):
        book.write(event("start", 0))
    (tmp_path / PAGE).rmdir()
    book.close()
    assert ": start" in (tmp_path / PAGE).read_text()


# -- the page

NASTY = "a|b `x` *y* <script>\n# [l](javascript:1)\n```\n \x1b[31m\u202e\ud800 \u2028end"
SKIPPED = {
    "phase": "main",
    "start": 1000,
    "stop": 4000,
    "num_samples": 3000,
    "samples": {"web": {"0": list(range(1500)), "1": list(range(500))}, "code": {"0": list(range(1000))}},
}


def decision(incident: int = 1, **fields: Any) -> dict[str, Any]:
    usual = {
        "to_step": 1000,
        "onset": 1130,
        "trouble": "lasting_spike",
        "response": "skip",
        "reason": "from known-good checkpoint step 1,000",
        "message": "loss 7.0 is 90 sigmas above the usual",
        "tokens": 4_640_000_000,
    }
    return event("rollback", 1160, incident=incident, **{**usual, **fields})


def outcome(incident: int, ended: str = "healed") -> dict[str, Any]:
    return event("outcome", 1260, incident=incident, outcome=ended, message="30 healthy steps after it")


def page(out: Path, records: Iterable[dict[str, Any]]) -> str:
    book = Logbook(out, "small")
    for record in records:
        book.write(record)
    book._page_is_old = True
    book.close()
    return (out / PAGE).read_text()


def now(text: str) -> str:
    return next(line for line in text.splitlines() if line.startswith("**Now: "))


def test_a_run_without_any_record_says_so(tmp_path: Path) -> None:
    text = page(tmp_path, [])
    assert now(text) == "**Now: nothing has happened yet.**"
    assert "0 incidents (0 open); 0 starts; 0 skipped updates, 0 failed saves." in text


def test_an_incident_tells_when_what_was_seen_decided_and_skipped_and_how_it_ended(tmp_path: Path) -> None:
    found = {"source": "we|b", "epoch": 2, "sample": 17, "step": 1130, "documents": [5, 6]}
    replayed = "the same data spiked again"
    book = Logbook(tmp_path, "small")
    steps(book, 1060, 1160, lambda step: 2.5 if step < 1130 else 7.0)
    for record in (
        decision(skipped=SKIPPED, rank_losses={"1131": [2.5, 8.5]}, hosts=["node-a:0", "node-b:3"]),
        event("high_loss_samples", 1160, incident=1, samples=[{**found, "loss": 9.125, "text": NASTY}] * 30),
        event(
            "replay_compared",
            1000,
            incident=1,
            finding="data_or_state",
            message=replayed,
            first_difference=1001,
            ranks=[1],
        ),
        outcome(1),
    ):
        book.write(record)
    book.close()
    text = (tmp_path / PAGE).read_text()
    for said in (
        "## Incident 1",
        "2026-09-21 14:13:20 UTC, step 1,160, 4.64B tokens, attempt 1: a spike of the loss that lasts since "
        "step 1,130; skip. Outcome: **healed**.",
        "Seen: loss 7.0 is 90 sigmas above the usual.",
        "At step 1,131 rank 1 on node-b:3 stood out most of 2 ranks, with a loss of 8.5; "
        "the median of the others was 2.5.",
        "Decided: **skip**, back to step 1,000: from known-good checkpoint step 1,000.",
        "Skipped: 3,000 samples (2,000 of web, 1,000 of code) of phase main, draws 1,000 to 3,999. The exact "
        "ids are in incidents.jsonl; `ds-pretrain audit RUN --skipped` lists them.",
        "High-loss samples: 30 samples of the offending batches with the highest loss",
        "**the data or the state**: the same data spiked again. First difference at step 1,001. Ranks: 1.",
        "Ended (2026-09-21 14:13:20 UTC, step 1,260, attempt 1): healed: 30 healthy steps after it.",
    ):
        assert said in text
    suspects = [line for line in text.splitlines() if line.startswith("    loss 9.125  we|b, documents 5, 6")]
    assert len(suspects) == 20
    assert "sample 17 (epoch 2), step 1,130  a|b `x` *y* <script> # [l](javascript:1) ``` [31m" in suspects[0]
    assert next(line for line in text.splitlines() if line.startswith("    verdict")).endswith("!!!!X")
    text.encode()


def test_only_the_newest_incidents_are_told_in_full_and_older_ones_take_a_line(tmp_path: Path) -> None:
    records = [decision(number, rank_losses={"1131": [2.5] * 1000}) for number in range(1, 16)]
    text = page(tmp_path, [*records, outcome(1), outcome(7, "recurred")])
    assert text.count("## Incident ") == 10
    assert text.index("## Incident 15") < text.index("## Incident 8") < text.index("## Older incidents")
    assert "15 incidents (13 open); " in text
    older = text.split("## Older incidents")[1].strip().splitlines()
    assert len(older) == 5
    assert older[-1].endswith("a spike of the loss that lasts since step 1,130; skip; healed")


def test_the_page_and_the_time_for_it_are_bounded_however_long_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 20,000 records the newest 2,000 are read, and a later start counts all of them."""
    monkeypatch.setattr(logbook, "sync_file", lambda path: None)
    monkeypatch.setattr(logbook.Logbook, "_make_page", lambda book: None)
    book = Logbook(tmp_path, "small")
    for step in range(5_000):
        for record in (
            event("skipped_update", step, cause="outlier_norm"),
            event("watchdog", step, action="watch", trouble="drift", onset=3, message="rose"),
            event("warning", step, message="m" * 100),
            event("resume", step),
        ):
            book.write(record)
    book.close()
    monkeypatch.undo()
    read: list[int] = []
    real = logbook.islice

    def counting(records: Any, most: int) -> Any:
        for record in real(records, most):
            read.append(1)
            yield record

    monkeypatch.setattr(logbook, "islice", counting)
    text = page(tmp_path, [])
    assert "; 5,000 starts; 5,000 skipped updates, " in text
    assert len(read) == 2_000
    assert len(text) < 60_000


def test_a_run_that_needs_a_person_says_so_on_top_with_its_diagnosis(tmp_path: Path) -> None:
    diagnosis = "step 9: nothing is left to try\n  step 5: spike; replay"
    asked = event(
        "needs_operator", 9, incident=2, reason="the budget is spent", diagnosis=diagnosis, to_step=5, onset=7
    )
    text = page(tmp_path, [event("start", 0), asked])
    assert now(text).startswith("**Now: OPERATOR ACTION REQUIRED (2026-09-21 14:13:20 UTC, step 9")
    block = "    step 9: nothing is left to try\n      step 5: spike; replay"
    assert text.index(block) < text.index("## ")
    assert (
        "Decided: **operator action required**: the budget is spent; the next start resumes from step 5."
        in text
    )
    assert now(page(tmp_path, [event("resume", 5)])) == "**Now: healthy since 2026-09-21 14:13:20 UTC.**"


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([event("start", 0)], "healthy since 2026-09-21 14:13:20 UTC."),
        ([event("start", 0), event("finish", 9)], "finished (2026-09-21 14:13:20 UTC, step 9, attempt 1)."),
        ([event("start", 0), event("stop", 9)], "stopped on request ("),
        ([event("start", 0), event("save_failed", 9, problem="no room", num_consecutive=2)], "SAVES FAIL ("),
        ([event("start", 0), event("save_failed", 9), event("checkpoint", 9)], "healthy since "),
        ([event("start", 0), event("watchdog", 9, action="watch", message="loss 9")], "loss 9"),
        ([event("start", 0), event("watchdog", 9, action="ok", message="healed")], "healthy since "),
        ([event("start", 0), decision(2)], "recovering from incident 2."),
        ([event("start", 0), decision(1), outcome(1)], "healthy since "),
        ([event("warning", 5)], "running, 2026-09-21 14:13:20 UTC."),
    ],
)
def test_the_top_tells_where_the_run_stood_last(
    records: list[dict[str, Any]], said: str, tmp_path: Path
) -> None:
    assert said in now(page(tmp_path, records))


def test_events_are_a_line_each_the_newest_first_and_small_things_of_one_kind_share_one(
    tmp_path: Path,
) -> None:
    drifts = [
        event("watchdog", s, action="watch", trouble="drift", onset=s - 9, message=f"rose {s}")
        for s in (40, 60, 80)
    ]
    records = [
        event("start", 0, world_size=2),
        event("skipped_update", 3, cause="outlier_norm"),
        event("skipped_update", 4, cause="outlier_norm"),
        event("skipped_update", 9, cause="non_finite"),
        *drifts,
        event("watchdog", 90, action="ok", trouble="drift", onset=31, message="healed"),
        event("save_failed", 91, problem="no room", num_consecutive=2),
        event("checkpoint", 92),
        event("observed", 95, message="the watchdog would skip"),
        event("stop", 95),
        event("config_changed", field="schedule.peak_lr", old="0.1", new="*8M*"),
        event("resume", 95, world_size=2, checkpoint="step_000000095"),
        event("resume", 95, world_size=1),
        event("moon_landed", 96),
        event("finish", 100),
    ]
    lines = page(tmp_path, records).split("## Events\n\n")[1].splitlines()
    told = [line.split("attempt 1: ")[1] for line in lines]
    assert told == [
        "finished",
        "resume, 1 rank (before: 2); the start before left no word of its end: killed, or failed",
        "resume, 2 ranks, from step_000000095",
        "schedule.peak_lr changed: 0.1 before, *8M* from this start on",
        "preempted, checkpoint saved; rerun the same command to resume",
        "observed: the watchdog would skip",
        "saves work again",
        "SAVE FAILED, number 2 in a row: no room",
        "a slow rise of the loss, healed: healed",
        "3 times since step 40, a slow rise of the loss, watched: rose 80",
        "update skipped for a non-finite loss or gradient norm",
        "2 times since step 3, update skipped for an outlier gradient norm",
        "start, 2 ranks",
    ]


def test_a_curve_with_non_finite_losses_is_drawn_and_says_where_they_are(tmp_path: Path) -> None:
    book = Logbook(tmp_path, "small")
    steps(book, 1, 5, lambda step: [0.0, 2.0, math.nan, math.inf, 2.5, 3.0][step])
    book.write(rollback(5, 2))
    book.close()
    assert "    verdict    NN!X" in (tmp_path / PAGE).read_text()


def test_the_worst_rank_is_the_first_without_a_finite_loss_else_the_one_furthest_from_the_others() -> None:
    assert describe_worst_rank({"rank_losses": {"3": [2.0]}}) is None  # one rank has no others
    assert describe_worst_rank({}) is None
    assert describe_worst_rank({"rank_losses": {"3": [2.0, 9.0]}, "onset": 4}) is None
    assert describe_worst_rank({"rank_losses": {"9": [8.0, 7.0, 8.5], "10": [2.0, 6.0, 2.5]}}) == (
        "At step 10 rank 1 stood out most of 3 ranks, with a loss of 6; the median of the others was 2.25."
    )
    assert describe_worst_rank({"rank_losses": {"9": [9.03, 9.034]}}) == (
        "The 2 ranks had about the same loss at step 9: 9.032."
    )
    bad = {"9": [1.0, math.nan, 9.0], "10": [math.inf, math.nan, math.inf]}
    assert describe_worst_rank({"rank_losses": bad, "hosts": ["a:0"]}) == (
        "At step 9 rank 1 stood out most of 3 ranks, with a loss of nan; the median of the others was 5."
    )
    assert describe_worst_rank({"rank_losses": {"10": [math.inf, math.nan]}, "hosts": ["a:0"]}) == (
        "At step 10 rank 0 on a:0 stood out most of 2 ranks, with a loss of inf; no other is finite."
    )


def test_of_ranks_that_share_sequences_their_group_is_told() -> None:
    losses = {"rank_losses": {"9": [2.0, 2.0, 5.0, 5.0, 2.5, 2.5]}, "sequence_parallel_size": 2}
    hosts = ["a:0", "a:1", "b:0", "b:1", "c:0", "c:1"]
    assert describe_worst_rank({**losses, "hosts": hosts}) == (
        "At step 9 the group of ranks 2 to 3 on b:0, b:1 stood out most of 3 groups of 2 ranks, with a loss "
        "of 5; the median of the others was 2.25."
    )
    assert (
        describe_worst_rank({"rank_losses": {"9": []}, "sequence_parallel_size": 2}) is None
    )  # all share all


def test_no_word_of_the_records_is_left_for_a_person_to_read() -> None:
    words = [*get_args(Kind), *get_args(Finding), "recurred", "outlier_norm"]
    assert not [word for word in words if "_" in logbook._format_plain(word)]


def test_a_record_that_cannot_be_understood_costs_a_warning_and_the_page_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_monitor(tmp_path) as monitor:
        monitor.event("rollback", incident=1, step=5, onset="five")
        monitor.event("stop", step=6)
    assert capsys.readouterr().err.count("monitoring degraded: writing to Logbook: TypeError") == 1
    assert [r["event"] for r in kept(tmp_path)] == ["stop"]
