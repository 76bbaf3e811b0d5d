"""A sick run heals itself, or stops for a person: real ranks under ZeRO-3, real faults."""

import platform
from pathlib import Path
from typing import Any

import pytest

from ds_pretrain.config.plan import load_plan
from ds_pretrain.core.errors import EXIT_CANNOT_SAVE, EXIT_NEEDS_OPERATOR
from ds_pretrain.core.jsonl import read_metrics
from ds_pretrain.core.state import RunState, Skip
from ds_pretrain.data.indexed import open_source
from ds_pretrain.data.sampler import make_sampler
from ds_pretrain.watchdog.rollback_log import read_rollback_log
from tests.harness import Fault, Kill, record_run
from tests.ranks import KILLED, run_ranks
from tests.runs.conftest import Trained
from tests.runs.results import trace
from tests.runs.unhealthy import BATCH, CURE_POINTS, POISON, make_unhealthy_run
from tests.tiers import slow

ABSURD = Fault("rate", 22, 1_000, value=30.0, again=True)  # from step 22 on


def _events(out: Path, kind: str) -> list[Any]:
    return [record for record in read_metrics(out / "metrics.jsonl") if record["event"] == kind]


def _final_loss(out: Path) -> float:
    return sum(step["loss"] for step in trace(out)[-5:]) / 5


def test_bad_data_is_replayed_then_skipped_and_the_run_ends_as_if_it_had_never_been_there(
    healthy_run: Trained, healed_run: Trained
) -> None:
    ranks, sick_file = healed_run
    out = sick_file.parent / "out"
    assert [rank.code for rank in ranks] == [0, 0]
    rollbacks = _events(out, "rollback")
    assert [r["response"] for r in rollbacks] == ["replay", "skip"]
    assert [r["onset"] for r in rollbacks] == [21, 21]
    assert rollbacks[1]["to_step"] < rollbacks[0]["to_step"] < 21
    [skip] = read_rollback_log(out).ledger.skips
    assert skip.start <= POISON.first
    assert skip.stop >= POISON.stop
    assert _final_loss(out) == pytest.approx(_final_loss(healthy_run[1].parent / "out"), abs=0.05)
    assert len(trace(out)) == 40
    assert "from known-good checkpoint step" in ranks[0].stderr
    assert len(ranks[0].samples) >= 40
    [compared] = _events(out, "replay_compared")
    assert (compared["finding"], compared["first_difference"]) == ("data_or_state", None)
    outcomes = [(o["incident"], o["outcome"]) for o in _events(out, "outcome")]
    assert outcomes == [(1, "recurred"), (2, "healed")]
    assert (
        "incident 2: 3 healthy steps after step 23: it was the data that are skipped now" in ranks[0].stderr
    )
    poisoned = _samples_of(sick_file, POISON)
    for told in _events(out, "high_loss_samples"):
        found = {(s["source"], s["epoch"], s["sample"]) for s in told["samples"]}
        assert len(found) == 8
        assert found <= poisoned, told["incident"]
        losses = [s["loss"] for s in told["samples"]]
        assert losses == sorted(losses, reverse=True)
        assert all(s["text"] and s["documents"] for s in told["samples"])
    assert "## " in (out / "LOGBOOK.md").read_text()


def _samples_of(run_file: Path, fault: Fault) -> set[tuple[str, int, int]]:
    """What lies at the draws of a fault in the data."""
    plan = load_plan(run_file)
    sources = {name: open_source(section.path) for name, section in plan.run.sources.items()}
    [phase] = plan.run.phases
    sampler = make_sampler(plan.run.seed, plan.timeline, {phase.name: phase.mixture}, sources)
    skip = Skip(phase.name, fault.first, fault.stop, "", 0, 0)
    return set(sampler.skipped(skip).to_list())


@pytest.mark.slow
def test_ruined_moments_are_cured_by_going_back_without_skipping(tmp_path: Path) -> None:
    run_file = make_unhealthy_run(
        tmp_path, micro_batch_size=2
    )  # in one micro-batch its norms overflow for good
    ranks = run_ranks(record_run, 2, str(run_file), faults=[Fault("state", 22, rank=1)])
    assert [rank.code for rank in ranks] == [0, 0]
    assert [r["response"] for r in _events(tmp_path / "out", "rollback")] == ["replay"]
    assert read_rollback_log(tmp_path / "out").ledger.skips == ()


def test_a_fault_that_passes_leaves_the_run_bitwise_as_if_it_had_never_been(
    healthy_run: Trained, tmp_path: Path
) -> None:
    clean, clean_file = healthy_run
    sick = run_ranks(record_run, 2, str(make_unhealthy_run(tmp_path)), faults=[Fault("rate", 22)])
    out = tmp_path / "out"
    assert [r["response"] for r in _events(out, "rollback")] == ["replay"]
    assert [rank.digest for rank in sick] == [rank.digest for rank in clean]
    losses = [[step["loss"] for step in trace(place)] for place in (clean_file.parent / "out", out)]
    assert losses[0] == losses[1]
    [compared] = _events(out, "replay_compared")
    assert (compared["finding"], compared["first_difference"], compared["ranks"]) == ("passing_fault", 23, [])
    assert "so the update of step 22 or the weights after it" in compared["message"]
    assert compared["hosts"] == [platform.node()]
    assert [o["outcome"] for o in _events(out, "outcome")] == ["healed"]


def test_a_fault_of_one_rank_is_pinned_on_it(tmp_path: Path) -> None:
    run_file = make_unhealthy_run(tmp_path)
    ranks = run_ranks(record_run, 2, str(run_file), faults=[Fault("rate", 22), Fault("batch", 22, rank=1)])
    assert [rank.code for rank in ranks] == [0, 0]
    [compared] = _events(tmp_path / "out", "replay_compared")
    assert (compared["finding"], compared["first_difference"], compared["ranks"]) == (
        "passing_fault",
        22,
        [1],
    )
    assert f"only rank 1 ({platform.node()}:1) had another loss" in compared["message"]


def test_an_absurd_rate_ends_in_a_stop_for_a_person_with_the_history(tmp_path: Path) -> None:
    run_file = make_unhealthy_run(tmp_path)
    ranks = run_ranks(record_run, 2, str(run_file), faults=[ABSURD])
    assert [rank.code for rank in ranks] == [EXIT_NEEDS_OPERATOR] * 2
    said = ranks[0].stderr
    assert "recovery policy exhausted: it recurred at the same step after replay, then skip" in said
    assert "replay from step" in said
    out = tmp_path / "out"
    assert [r["response"] for r in _events(out, "rollback")] == ["replay", "skip"]
    assert "The next start resumes from checkpoint step" in said
    [told] = _events(out, "needs_operator")
    assert told["diagnosis"] in said
    assert [r.response for r in read_rollback_log(out).rollbacks] == ["replay", "skip", "stop"]
    where_it_stood = max(record["step"] for record in _events(out, "checkpoint"))
    assert where_it_stood == told["step"]  # kept, to be looked at
    again = run_ranks(record_run, 2, str(run_file))  # a person has mended the rate
    assert [rank.code for rank in again] == [0, 0]
    [resumed] = _events(out, "resume")
    assert resumed["step"] == told["to_step"] < 22
    assert f"checkpoint step {where_it_stood:,} is skipped" in again[0].stderr
    assert len(trace(out)) == 40


def test_w08_a_loss_of_zero_is_watched_and_then_stops_for_the_operator(tmp_path: Path) -> None:
    run_file = make_unhealthy_run(tmp_path)
    [rank] = run_ranks(record_run, 1, str(run_file), faults=[Fault("loss", 22, 1_000, value=0.0, again=True)])
    assert rank.code == EXIT_NEEDS_OPERATOR
    assert (
        "step 24: the loss has been exactly 0 for 3 steps, since step 22: it is not computed from the data, "
        "or there are no labels; no rollback can mend that. Look at "
    ) in rank.stderr
    assert [(v[0], v[1], v[2]) for v in rank.verdicts if v[2] == "frozen_loss"] == [
        (22, "watch", "frozen_loss"),
        (23, "watch", "frozen_loss"),
        (24, "stop", "frozen_loss"),
    ]
    [stop] = read_rollback_log(tmp_path / "out").rollbacks
    assert stop.response == "stop"
    assert stop.to_step < 22


@pytest.mark.slow
def test_where_a_run_stood_when_it_stopped_is_gone_on_from_if_a_person_says_so(tmp_path: Path) -> None:
    run_file = make_unhealthy_run(tmp_path)
    stops = (str(run_file), ("watchdog.policy=[]",))
    killed: dict[str, Any] = {"kill": Kill(None, "person"), "allow_kill": True}
    assert run_ranks(record_run, 2, *stops, faults=[ABSURD], **killed) == [KILLED] * 2
    silent = run_ranks(record_run, 2, *stops, faults=[ABSURD])  # a supervisor would start again what had died
    assert [rank.code for rank in silent] == [EXIT_NEEDS_OPERATOR] * 2
    assert "the run died before it could end with this; it does now" in silent[0].stderr
    newest_step = max(record["step"] for record in _events(tmp_path / "out", "checkpoint"))
    ranks = run_ranks(record_run, 2, str(run_file), ('watchdog.mode="observe"',))
    assert [rank.code for rank in ranks] == [0, 0]
    assert [r["step"] for r in _events(tmp_path / "out", "resume")] == [newest_step]
    saved = tmp_path / "out" / "checkpoints" / "step_000000040" / "run_state.json"
    newest = RunState.from_json(saved.read_text())
    assert not read_rollback_log(tmp_path / "out").is_abandoned(newest)  # it knows of the stop


def test_a_disk_that_takes_no_rollback_ends_the_run_with_the_code_of_what_is_wrong(tmp_path: Path) -> None:
    run_file = make_unhealthy_run(tmp_path)
    for overrides, code, words in (
        (
            (),
            EXIT_CANNOT_SAVE,
            "rollbacks.json cannot be written: [Errno 28] No space left on device; free disk space",
        ),
        (("watchdog.policy=[]",), EXIT_NEEDS_OPERATOR, "recovery policy exhausted: watchdog.policy is empty"),
    ):
        faults = [POISON, Fault("full_disk")]
        [ended] = run_ranks(record_run, 1, str(run_file), overrides, faults=faults)
        assert (ended.code, words in ended.stderr) == (code, True), ended.stderr


@pytest.mark.slow
def test_a_run_that_ends_in_a_spike_says_so(tmp_path: Path) -> None:
    run_file = make_unhealthy_run(tmp_path)
    bad_end = Fault("labels", 38 * BATCH, 40 * BATCH)
    [ended] = run_ranks(record_run, 1, str(run_file), faults=[bad_end])
    assert ended.code == 0
    [warning] = _events(tmp_path / "out", "warning")
    assert "the run ends in an unhealed spike that began at step 39" in warning["message"]
    assert "newest known-good checkpoint: step 3" in warning["message"]
    assert warning["message"] in ended.stderr


def test_p26_a_gradient_that_is_no_number_on_one_rank_is_dropped_on_all_and_nothing_else_happens(
    tmp_path: Path,
) -> None:
    run_file = make_unhealthy_run(tmp_path)
    ranks = run_ranks(record_run, 2, str(run_file), faults=[Fault("gradient", 22, rank=1)])
    assert [rank.code for rank in ranks] == [0, 0]
    assert _events(tmp_path / "out", "rollback") == []
    [dropped] = _events(tmp_path / "out", "skipped_update")
    assert dropped["step"] == 22
    assert [tuple(sample) for sample in dropped["samples"]] == ranks[0].samples[21]
    steps = {step["step"]: step for step in trace(tmp_path / "out")}
    assert not steps[22]["update_applied"]
    assert steps[23]["learning_rate"] == steps[22]["learning_rate"]  # a dropped update moves no schedule


def test_p28_norms_that_are_not_finite_again_and_again_name_what_overlaps(tmp_path: Path) -> None:
    run_file = make_unhealthy_run(tmp_path, steps=12)
    [ended] = run_ranks(record_run, 1, str(run_file), faults=[Fault("gradient", 5, 9)])
    assert ended.code == 0
    assert len(_events(tmp_path / "out", "skipped_update")) == 4
    [warning] = _events(tmp_path / "out", "warning")  # once, and after the third
    assert warning["step"] == 7
    assert warning["message"] in ended.stderr
    assert "ZeRO-3, overlap_comm = true; to rule it out set" in warning["message"]


@pytest.mark.slow
def test_the_budget_of_rollbacks_and_observing(tmp_path: Path) -> None:
    spent = make_unhealthy_run(tmp_path / "spent")
    ranks = run_ranks(record_run, 2, str(spent), ("watchdog.max_rollbacks=1",), faults=[POISON])
    assert [rank.code for rank in ranks] == [EXIT_NEEDS_OPERATOR] * 2
    assert "1 rollback in 5000 steps is all that is allowed" in ranks[0].stderr

    observed = make_unhealthy_run(tmp_path / "observed")
    ranks = run_ranks(record_run, 2, str(observed), ('watchdog.mode="observe"',), faults=[POISON])
    assert [rank.code for rank in ranks] == [0, 0]
    out = tmp_path / "observed" / "out"
    [told] = _events(out, "observed")
    [back] = _events(tmp_path / "spent" / "out", "rollback")  # what the other one did
    assert (told["response"], told["to_step"], told["reason"]) == (
        *("replay", back["to_step"], back["reason"]),
    )
    assert f"the watchdog would replay, {told['reason']}" in ranks[0].stderr
    assert _events(out, "rollback") == []


@pytest.mark.parametrize("kills", [CURE_POINTS, slow((*CURE_POINTS, "leave", "load"))], ids=["some", "all"])
def test_kills_in_the_cure_are_survived_and_nothing_is_skipped_twice(
    healed_run: Trained, tmp_path: Path, kills: tuple[str, ...]
) -> None:
    """Before the replay is written down, after it, and as the skip begins to load: bitwise all the same."""
    whole, whole_file = healed_run
    cut_file = make_unhealthy_run(tmp_path)
    for kill_at in kills:
        ended = run_ranks(
            record_run, 2, str(cut_file), faults=[POISON], kill=Kill(None, kill_at), allow_kill=True
        )
        assert ended == [KILLED] * 2, kill_at
    cut = run_ranks(record_run, 2, str(cut_file), faults=[POISON])
    assert [rank.code for rank in cut] == [0, 0]
    out = tmp_path / "out"
    assert len(read_rollback_log(out).ledger.skips) == 1
    assert [r.response for r in read_rollback_log(out).rollbacks] == ["replay", "skip"]
    assert [rank.digest for rank in cut] == [rank.digest for rank in whole]
    assert trace(out)[-10:] == trace(whole_file.parent / "out")[-10:]
    for kind in ("rollback", "high_loss_samples"):  # told at the next start where the process died before it
        assert [told["incident"] for told in _events(out, kind)] == [1, 2], kind
    told, whole_told = (
        _events(out, "high_loss_samples"),
        _events(whole_file.parent / "out", "high_loss_samples"),
    )
    assert [one["samples"] for one in told] == [one["samples"] for one in whole_told]
    assert [one["finding"] for one in _events(out, "replay_compared")] == ["data_or_state"]
