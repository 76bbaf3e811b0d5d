"""The ladder: which checkpoint is gone back to, with which data, and when a person is asked for."""

from dataclasses import replace
from pathlib import Path

import pytest

from ds_pretrain.config.plan import make_timeline
from ds_pretrain.config.schema import WatchdogSection
from ds_pretrain.config.timeline import parse_duration
from ds_pretrain.core.errors import InputError
from ds_pretrain.core.state import Rollback, RunState, Skip, SkipLedger, Verdict, is_abandoned
from ds_pretrain.watchdog.policy import (
    Response,
    apply_rollback,
    build_skip,
    is_same_onset,
    respond,
)
from ds_pretrain.watchdog.rollback_log import RollbackLog, read_rollback_log, write_rollback_log
from tests.timelines import phase, single_phase

CALM = [100, 150, 180, 190]
SICK = Verdict("roll_back", "lasting_spike", 200, "the loss is high")
FIRST = Rollback(190, 203, 200, "lasting_spike", "replay", 1)
TIMELINE = single_phase("main", seq_len=16, sequences=8, length=parse_duration("2000 steps"))
SECTION = WatchdogSection(
    policy=("replay", "skip"),
    skip_before=parse_duration("5 steps"),
    skip_after=parse_duration("10 steps"),
    patience=3,
    max_rollbacks=4,
    rollback_window=parse_duration("1000 steps"),
)


def test_the_first_answer_is_the_newest_calm_checkpoint_before_the_onset_and_the_same_data() -> None:
    assert respond(SECTION, TIMELINE, (), SICK, 203, [*CALM, 200, 202]) == Response(
        "replay", 190, "from known-good checkpoint step 190, the same data again"
    )


def test_the_same_place_again_takes_the_next_rung_and_an_older_checkpoint() -> None:
    """Also if newer ones have become calm since."""
    response = respond(SECTION, TIMELINE, (FIRST,), replace(SICK, onset=201), 204, [*CALM, 195])
    assert (response.action, response.to_step) == ("skip", 180)
    second = replace(FIRST, to_step=180, response="skip")
    last = respond(SECTION, TIMELINE, (FIRST, second), SICK, 203, CALM)
    assert last == Response("stop", 190, "it recurred at the same step after replay, then skip")


def test_another_place_begins_the_ladder_anew_until_the_budget_of_a_stretch_is_spent() -> None:
    far = replace(SICK, onset=260)
    assert respond(SECTION, TIMELINE, (FIRST,), far, 263, [*CALM, 250]).action == "replay"
    spent = tuple(replace(FIRST, onset=200 + 50 * i, step=203 + 50 * i) for i in range(4))
    response = respond(SECTION, TIMELINE, spent, replace(SICK, onset=500), 503, [*CALM, 450])
    assert (response.action, response.reason) == (
        "stop",
        "4 rollbacks in 1000 steps are all that is allowed",
    )
    assert respond(SECTION, TIMELINE, spent, replace(SICK, onset=1400), 1403, CALM).action == "replay"


def test_a_person_who_was_asked_for_gives_the_ladder_and_the_budget_back() -> None:
    stopped = (FIRST, replace(FIRST, response="skip"), replace(FIRST, response="stop"))
    assert respond(SECTION, TIMELINE, stopped, SICK, 203, CALM).action == "replay"
    again = respond(SECTION, TIMELINE, (*stopped, FIRST), SICK, 203, CALM)
    assert (again.action, again.to_step) == ("skip", 180)
    spent = tuple(replace(FIRST, onset=200 + 50 * i, step=203 + 50 * i) for i in range(4))
    assert (
        respond(SECTION, TIMELINE, (*spent, stopped[-1]), replace(SICK, onset=450), 453, [*CALM, 420]).action
        == "replay"
    )


def test_without_a_calm_checkpoint_or_a_rung_a_person_is_asked_for() -> None:
    assert respond(SECTION, TIMELINE, (), SICK, 203, [200, 201]).reason == (
        "no known-good checkpoint is older than step 200, where it began"
    )
    assert respond(SECTION.model_copy(update={"policy": ()}), TIMELINE, (), SICK, 203, CALM).action == "stop"


def test_w08_a_verdict_to_stop_asks_for_a_person_at_once_and_names_a_checkpoint_before_it() -> None:
    verdict = replace(SICK, action="stop")
    assert respond(SECTION, TIMELINE, (), verdict, 203, CALM) == Response(
        "stop", 190, "no rollback can mend that"
    )


def test_the_oldest_calm_checkpoint_serves_again_where_there_is_no_older_one() -> None:
    only = replace(FIRST, to_step=100)
    assert respond(SECTION, TIMELINE, (only,), SICK, 203, [100]).to_step == 100


def _skipped(base_step: int, onset: int, ledger: SkipLedger = SkipLedger()) -> tuple[int, int]:  # noqa: B008
    rollback = Rollback(base_step, onset + 3, onset, "spike", "skip", 1)
    base = RunState(step=base_step)
    response = Response("skip", base_step, "")
    after = apply_rollback(RunState(onset + 3, ledger), base, response, rollback, SECTION, TIMELINE)
    assert after.step == base_step
    skip = after.ledger.skips[-1]
    return skip.start, skip.stop


def test_a_skip_is_the_draws_around_the_onset_and_none_that_stays_trained() -> None:
    assert _skipped(100, 200) == ((199 - 5) * 8, (199 + 10) * 8)
    assert _skipped(197, 200)[0] == 197 * 8  # what came before the checkpoint stays trained
    assert _skipped(100, 1998)[1] == 2000 * 8  # the run ends there


def test_a_skip_after_a_skip_is_of_the_draws_that_were_read() -> None:
    earlier = SkipLedger((Skip("main", 80, 160, "spike", 1, 1),))
    assert _skipped(100, 200, earlier) == ((199 - 5) * 8 + 80, (199 + 10) * 8 + 80)


def test_a_replay_skips_nothing_and_both_remember() -> None:
    state = RunState(203, SkipLedger((Skip("main", 0, 8, "spike", 1, 1),)), num_skipped_updates=3)
    base = RunState(190, num_skipped_updates=2, num_healthy_steps=9)
    after = apply_rollback(state, base, Response("replay", 190, ""), FIRST, SECTION, TIMELINE)
    assert after == replace(base, ledger=state.ledger, rollbacks=(FIRST,))


def test_a_checkpoint_is_on_a_branch_that_was_left_if_any_rollback_since_went_behind_it() -> None:
    second = replace(FIRST, to_step=195)
    assert not is_abandoned(RunState(190), (FIRST,))
    assert is_abandoned(RunState(191), (FIRST,))
    assert is_abandoned(RunState(192), (FIRST, second))  # of before the first, and newer than what that took
    assert not is_abandoned(RunState(195, rollbacks=(FIRST,)), (FIRST, second))
    assert is_abandoned(RunState(196, rollbacks=(FIRST,)), (FIRST, second))
    assert not is_abandoned(RunState(400, rollbacks=(FIRST, second)), (FIRST, second))
    stop = replace(FIRST, response="stop")
    assert is_abandoned(RunState(203), (stop,))
    assert not is_abandoned(RunState(203), (stop,), heeds_stop=False)
    assert is_abandoned(RunState(203), (FIRST, stop), heeds_stop=False)


@pytest.mark.parametrize(
    "wrong", ['"to_step": "190"', '"to_step": 190.0', '"to_step": true', '"to_steps": 190']
)
def test_a_cure_of_other_types_is_refused_with_what_is_wrong(tmp_path: Path, wrong: str) -> None:
    write_rollback_log(tmp_path, RunState(190, rollbacks=(FIRST,)))
    text = (tmp_path / "rollbacks.json").read_text()
    (tmp_path / "rollbacks.json").write_text(text.replace('"to_step": 190', wrong))
    with pytest.raises(InputError, match=r"rollbacks\.json cannot be read \(.*to_step"):
        read_rollback_log(tmp_path)


def test_a_cure_comes_back_from_disk_and_is_applied_to_what_does_not_know_of_it(tmp_path: Path) -> None:
    assert read_rollback_log(tmp_path) == RollbackLog()
    ledger = SkipLedger((Skip("main", 80, 160, "spike", 1, 1),))
    state = RunState(190, ledger, rollbacks=(FIRST,))
    write_rollback_log(tmp_path, state)
    cure = read_rollback_log(tmp_path)
    assert cure.is_abandoned(RunState(203))
    assert cure.apply_to(RunState(190, num_healthy_steps=9)) == replace(state, num_healthy_steps=9)
    later = RunState(250, SkipLedger(), rollbacks=(FIRST, FIRST))
    assert cure.apply_to(later) is later


def test_a_cure_that_cannot_be_read_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "rollbacks.json").write_text("{")
    with pytest.raises(InputError, match="it records which data was skipped; put an intact copy back"):
        read_rollback_log(tmp_path)


def test_a_skip_in_tokens_counts_the_batches_around_the_onset_and_not_those_of_the_runs_beginning() -> None:
    """Eight times the batch from step 100 on: 1,024 tokens are eight steps before it, and one after it."""
    batches = [(parse_duration("0 steps"), 128), (parse_duration("100 steps"), 1024)]
    timeline = make_timeline([phase("main", 16)], batches, parse_duration("400 steps"))
    thousand = parse_duration("1024 tokens")
    section = SECTION.model_copy(
        update=dict.fromkeys(("skip_before", "skip_after", "rollback_window"), thousand)
    )

    def steps(onset: int) -> tuple[int, int]:
        rollback = Rollback(10, onset + 3, onset, "spike", "skip", 1)
        skip = build_skip(SkipLedger(), 10, rollback, section, timeline)
        return skip.start, skip.stop

    assert steps(51) == ((50 - 8) * 8, (50 + 8) * 8)
    assert steps(201) == ((100 * 8) + 99 * 64, (100 * 8) + 101 * 64)
    assert steps(101) == ((100 - 8) * 8, (100 * 8) + 64)
    here = replace(FIRST, onset=201)
    assert [is_same_onset(section, timeline, here, onset) for onset in (205, 206)] == [
        True,
        False,
    ]  # 3 of patience, 1
    spent = tuple(replace(FIRST, onset=200 + 50 * i, step=300) for i in range(4))
    far = replace(SICK, onset=390)
    assert respond(section, timeline, spent, far, 300, CALM).reason == (
        "4 rollbacks in 1024 tokens are all that is allowed"
    )
    assert respond(section, timeline, spent, far, 301, CALM).action == "replay"


@pytest.mark.parametrize("skip_after", ["180 steps", "23_040 tokens"])
def test_a_place_is_as_large_at_the_end_of_a_run_and_behind_the_end_of_one_that_was_shortened(
    skip_after: str,
) -> None:
    section = SECTION.model_copy(update={"patience": 0, "skip_after": parse_duration(skip_after)})
    for onset in (1000, 1995, 2000, 2500):
        here = replace(FIRST, onset=onset)
        near = [is_same_onset(section, TIMELINE, here, onset - back) for back in (45, 180, 181)]
        assert near == [True, True, False]
