"""The logbook's page: what a person reads at 3 a.m., whatever the records hold or lack."""

import math
import random
import re
from collections.abc import Iterable
from typing import Any, get_args

import pytest
from ds_pretrain.monitor.logbook_incident import worst_rank
from ds_pretrain.monitor.logbook_memory import remembered
from ds_pretrain.monitor.logbook_page import page as page_of
from ds_pretrain.monitor.logbook_text import block, escaped, plain, ranges
from ds_pretrain.watchdog.verdict import Kind

from ds_pretrain.watchdog.replay import Finding

NASTY = "a|b `x` *y* _z_ <script>\n# [l](javascript:1) \\| ~~~ $m$ &amp; \x1b[31m\u202e\ud800 \u2028end"


def page(records: Iterable[Any], name: str) -> str:
    return page_of(remembered(records), name)


def event(kind: str, step: int | None = None, minute: int = 0, **fields: Any) -> dict[str, Any]:
    at = {} if step is None else {"step": step}
    return {"event": kind, "attempt": 1, **at, **fields, "time": 1_790_000_000.0 + 60 * minute}


def rollback(incident: int = 1, **fields: Any) -> dict[str, Any]:
    usual = {
        "to_step": 1000,
        "onset": 1130,
        "trouble": "lasting_spike",
        "response": "skip",
        "reason": "from the calm checkpoint of step 1,000",
        "message": "loss 7.0 is 90 spreads above the usual",
        "tokens": 4_640_000_000,
    }
    return event("rollback", 1160, 5, incident=incident, **{**usual, **fields})


SKIPPED = {
    "phase": "main",
    "start": 1000,
    "stop": 4000,
    "num_samples": 3000,
    "samples": {"web": {"0": list(range(1500)), "1": list(range(500))}, "code": {"0": list(range(1000))}},
}


def sections(text: str) -> list[str]:
    return re.findall("^## (.*)$", text, re.MULTILINE)


def section(text: str, title: str) -> str:
    return next(part for part in text.split("\n## ") if part.startswith(title))


def now(text: str) -> str:
    return next(line for line in text.splitlines() if line.startswith("**Now: "))


def test_a_run_without_any_record_says_so() -> None:
    text = page([], "small")
    assert now(text) == "**Now: nothing has happened yet.**"
    assert "0 incidents (0 open); 0 starts, none is known; 0 dropped updates, 0 failed saves." in text


def test_the_newest_comes_first() -> None:
    records = [event("start", 0), event("stop", 5), event("resume", 5), rollback(), event("finish", 2000)]
    titles = ["Finished", "Incident 1", "Resume", "Stop on request", "Start"]
    assert sections(page(records, "small")) == titles


def test_an_incident_tells_when_what_was_seen_decided_and_skipped_and_how_it_ended() -> None:
    curve = [[step, 2.5 if step < 1130 else 7.0] for step in range(1060, 1161)]
    losses = {"1129": [9.9, 2.5], "1130": [2.5, 2.75], "1131": [2.5, 8.5]}
    hosts = ["node-a:0", "node-b:3"]
    replayed = "the same data spiked again"
    records = [
        rollback(skipped=SKIPPED, rank_losses=losses, hosts=hosts, curve=curve),
        event(
            "compared",
            incident=1,
            finding="data_or_state",
            message=replayed,
            first_difference=1001,
            ranks=[1],
            hosts=["node-b:3"],
        ),
        event("outcome", 1260, 9, incident=1, outcome="healed", message="30 healthy steps after it"),
    ]
    text = page(records, "small")
    assert sections(text) == ["Incident 1"]
    for said in (
        "**A spike of the loss that lasts since step 1,130.** Outcome: **healed**.",
        "2026-09-21 14:18:20 UTC, step 1,160, 4.64B tokens, attempt 1.",
        "Seen: loss 7.0 is 90 spreads above the usual.",
        "At step 1,131 rank 1 on node-b:3 stood out most of 2 ranks, with a loss of 8.5; "
        "the other rank had 2.5.",
        "Decided: **skip**: from the calm checkpoint of step 1,000.",
        "Skipped: 3,000 samples (2,000 of web, 1,000 of code) of phase main, draws 1,000 to 3,999. The exact "
        "ids are in incidents.jsonl; `ds-pretrain audit RUN --skipped` lists them.",
        "**the data or the state**: the same data spiked again. First difference at step 1,001. Ranks: 1. "
        "Hosts: node-b:3.",
        "step 1,260, attempt 1): healed: 30 healthy steps after it.",
    ):
        assert said in text
    picture = text.split("```")[1].splitlines()
    assert len(picture) == 13  # ten lines of plot, one of marks, one of steps
    assert picture[1].split()[0] == "7"
    assert picture[10].split()[0] == "2.5"
    assert re.search(r"trouble   +!+X$", picture[11])


def test_an_incident_without_an_outcome_is_open() -> None:
    text = page([event("start", 0), rollback(), rollback(2)], "small")
    assert text.count("Outcome: **open**.") == text.count("Outcome") == 2
    assert text.count("Nothing is recorded of how it ended.") == 2
    assert "2 incidents (2 open; [2](#incident-2); [1](#incident-1)); 1 start, the last" in text
    assert now(text).startswith("**Now: recovering from incident 2 (")


def test_an_incident_whose_decision_was_lost_in_a_crash_says_where_it_is() -> None:
    text = page([event("outcome", 9, incident=1, outcome="healed")], "small")
    assert "not recorded: the start ended just then; cure.json has the rollback." in text
    assert "not recorded" not in page([rollback()], "small")


def test_an_incident_that_skipped_nothing_says_so() -> None:
    assert "Skipped: no data." in page([rollback(response="replay", skipped=None)], "small")


def test_what_an_older_version_wrote_of_skips_is_shown_as_it_is() -> None:
    assert "Skipped: main, 5, 9." in page([rollback(skipped=["main", 5, 9])], "small")


def test_a_run_that_needs_a_person_says_so_on_top_with_its_diagnosis() -> None:
    diagnosis = "step 9: nothing is left to try\n  step 5: spike; replay"
    asked = event(
        "needs_person", 9, 7, incident=2, reason="the budget is spent", diagnosis=diagnosis, to_step=5
    )
    text = page([event("start", 0), asked], "small")
    assert now(text).startswith("**Now: NEEDS A PERSON (2026-09-21 14:20:20 UTC, step 9")
    assert text.index(f"```\n{diagnosis}\n```") < text.index("## ")
    decided = (
        "Decided: **a person is needed**: the budget is spent; the next start goes on from step 5 or before."
    )
    assert decided in section(text, "Incident 2")
    assert diagnosis in section(text, "Incident 2")
    again = page([event("start", 0), asked, event("resume", 5, 9)], "small")
    assert now(again) == "**Now: healthy since 2026-09-21 14:22:20 UTC.**"
    assert "```" not in again.split("## ")[0]


def test_a_decision_without_a_number_is_shown_like_an_incident() -> None:
    old = {k: v for k, v in rollback().items() if k != "incident"}
    text = page([old, event("needs_person", 5, diagnosis="look here")], "small")
    assert sections(text) == ["Needs a person", "Rollback"]
    assert "Decided: **skip**: from the calm checkpoint of step 1,000." in text
    assert "look here" in section(text, "Needs a person")


def test_what_the_watchdog_said_before_a_rollback_is_no_entry_of_its_own() -> None:
    said = [
        event("watchdog", 1132, action="watch", trouble="spike", onset=1130),
        event("watchdog", 1160, action="roll_back", trouble="lasting_spike", onset=1130),
    ]
    assert sections(page([*said, rollback()], "small")) == ["Incident 1"]
    for other in (
        event("watchdog", 1100, action="ok", trouble="blip", onset=1100),
        event("watchdog", 1160, action="ok", trouble="blip", onset=1159),
        said[0] | {"attempt": 0},
    ):
        assert len(sections(page([other, *said, rollback()], "small"))) == 2


def test_a_verdict_without_a_response_is_an_entry_with_its_curve() -> None:
    curve = [[step, 3.0] for step in range(1, 10)]
    said = event(
        "watchdog", 9, action="roll_back", trouble="drift", onset=3, message="it drifts", curve=curve
    )
    text = page([event("start", 0), said], "small")
    assert sections(text) == ["A slow rise of the loss, no response", "Start"]
    assert "Nothing was done: the mode was observe, or the start ended right here." in text
    assert "!!!!!!X" in text
    assert "it would have rolled back for it drifts." in now(text)


def test_spikes_that_healed_and_dropped_updates_are_one_entry_until_something_else_happens() -> None:
    records = [
        event("watchdog", 5, action="watch", trouble="spike", onset=4, message="loss 9"),
        event("dropped", 7, cause="non_finite"),
        event("watchdog", 9, action="ok", trouble="spike", onset=4, message="healed after 5 steps"),
        *(event("dropped", step, cause="wild_norm") for step in (8, 9, 12)),
        event("watchdog", 20, action="watch", trouble="norm_rise", onset=20, message="norm 8"),
        event("stop", 25),
        event("dropped", 26),
    ]
    text = page(records, "small")
    titles = ["Small things, steps 26 to 26", "Stop on request", "Small things, steps 5 to 20"]
    assert sections(text) == titles
    small = section(text, titles[-1])
    assert "4 updates dropped (3 for a wild gradient norm, 1 for a loss or gradient norm that is " in small
    assert "no number): steps 7 to 9, 12. Last: " in small
    assert (
        "Watched, nothing was done: 2 troubles, none grave enough to roll back for; 1 seen to heal" in small
    )
    assert "a spike of the loss, healed: healed after 5 steps." in small
    assert "loss 9" not in small
    assert "a high gradient norm, watched: norm 8." in small
    assert "1 update dropped (1 for cause not recorded): steps 26." in text


def test_a_resume_tells_how_many_ranks_there_are_and_were_and_how_the_start_before_ended() -> None:
    records = [
        event("start", 0, world_size=2),
        event("stop", 5),
        event("resume", 5, world_size=2, checkpoint="step_000000005"),
        event("resume", 5, world_size=1),
        event("resume", 5),
    ]
    last, third, second, first = (
        t for t in page(records, "s").split("\n## ") if t.startswith(("Res", "Start"))
    )
    killed = "The start before left no word of its end: it was killed, or it failed."
    assert ", 2 ranks." in first
    assert ", 2 ranks, from step_000000005." in second
    assert "changed" not in second
    assert killed not in second
    assert ", 1 rank. The number of ranks changed: 2 -> 1. " + killed in third
    assert "changed" not in last


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([event("start", 0, 3)], "healthy since 2026-09-21 14:16:20 UTC."),
        ([event("start", 0), event("dropped", 5, 3)], "healthy since 2026-09-21 14:16:20 UTC."),
        ([event("start", 0), event("finish", 9)], "finished (2026-09-21 14:13:20 UTC, step 9, attempt 1)."),
        ([event("start", 0), event("stop", 9)], "stopped on request ("),
        ([event("start", 0), event("save_failed", 9, problem="no room")], "SAVES FAIL ("),
        ([event("start", 0), event("save_failed", 9), event("checkpoint", 9)], "healthy since "),
        ([event("start", 0), event("watchdog", 9, action="watch", message="loss 9")], "loss 9."),
        ([event("start", 0), event("watchdog", 9, action="ok", message="healed")], "healthy since "),
        ([event("start", 0), rollback(), event("outcome", incident=1, outcome="healed")], "healthy since "),
        ([event("warning", 5)], "nothing known of a start, 2026-09-21 14:13:20 UTC."),
    ],
)
def test_the_top_tells_where_the_run_stood_last(records: list[dict[str, Any]], said: str) -> None:
    assert said in now(page(records, "small"))


def test_a_failed_save_tells_its_problem_and_how_many_there_were_in_a_row() -> None:
    text = page([event("save_failed", 9, problem="no room", in_a_row=2), event("checkpoint", 12)], "small")
    assert "step 9, attempt 1: no room. It is number 2 in a row." in text
    assert sections(text) == ["Saves work again", "Failed save"]


def test_a_kind_of_a_later_version_is_shown_plainly() -> None:
    text = page([event("moon_landed", 9, crew=["a", "b"], mass=1.5)], "small")
    assert "## moon_landed\n\nmoon_landed: 2026-09-21 14:13:20 UTC, step 9, attempt 1. crew" in text
    assert "mass 1.5" in text


def test_suspects_are_a_table_that_their_text_cannot_break() -> None:
    one = {"loss": 9.125, "source": "we|b", "epoch": 2, "sample": 17, "step": 1130, "documents": [5, 6]}
    samples = [one | {"text": NASTY + "z" * 500}, {}, *([one] * 30)]
    text = page([rollback(), event("suspects", 1160, incident=1, samples=samples)], "small")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 20
    assert {row.count("|") for row in rows} == {7}
    assert (
        "| 9.125 | we&#124;b | 5, 6 | 17 (epoch 2) | 1,130 | a&#124;b \\`x\\` \\*y\\* \\_z\\_ &lt;script&gt; "
        in rows[2]
    )
    assert "z..." in rows[2]
    assert len(rows[2]) < 250
    assert "12 more are in incidents.jsonl." in text
    assert "32 samples" in text


def test_text_is_escaped_to_one_line_without_markup_and_control_characters() -> None:
    text = escaped(NASTY)
    assert text == (
        "a&#124;b \\`x\\` \\*y\\* \\_z\\_ &lt;script&gt; \\# \\[l\\](javascript:1) \\\\&#124; \\~\\~\\~ "
        "\\$m\\$ &amp;amp; \\[31m end"
    )
    assert escaped("step_000001") == "step_000001"
    assert escaped({"theta": 1e6, "kind": None, "on": True}) == "theta 1000000.0, kind none, on true"
    assert escaped([None, False]) == "none, false"


def test_a_code_block_cannot_be_ended_from_inside() -> None:
    assert block("a\n```\n# b\x1b") == "````\na\n```\n# b\n````"


def test_a_curve_with_non_finite_losses_is_drawn_and_says_where_they_are() -> None:
    curve = [[1, 2.0], [2, math.nan], [3, math.inf], [4, 2.5], [5, 3.0]]
    assert "trouble    NN!X" in page([rollback(curve=curve, onset=2) | {"step": 5}], "small")
    hopeless = page([rollback(curve=[[1, math.nan]]), rollback(2, curve=[])], "small")
    assert hopeless.count("no finite loss to plot") == 1


def test_the_worst_rank_is_the_first_without_a_finite_loss_else_the_one_furthest_from_the_others() -> None:
    assert worst_rank({"rank_losses": {"3": [2.0]}}) is None  # one rank has no others
    assert worst_rank({}) is None
    assert worst_rank({"rank_losses": {"3": [2.0, 9.0]}, "onset": 4}) is None
    gap = worst_rank({"rank_losses": {"9": [8.0, 7.0, 8.5], "10": [2.0, 6.0, 2.5]}})
    assert gap is not None
    assert gap.startswith(
        "At step 10 rank 1 stood out most of 3 ranks, with a loss of 6; the median of the others was"
    )
    alike = worst_rank({"rank_losses": {"9": [9.03, 9.034]}})
    assert alike == (
        "The 2 ranks were alike: the highest loss furthest from the others was 9.034 at step 9, of rank 1; "
        "the other rank had 9.03."
    )
    late = worst_rank({"rank_losses": {"9": [1.0, 9.0], "10": [1.0, math.nan]}})
    assert late is not None
    assert late.startswith("At step 10 rank 1 ")
    bad = {"9": [1.0, math.nan, 9.0], "10": [math.inf, math.nan, math.inf]}
    assert worst_rank({"rank_losses": bad, "hosts": ["a:0"]}) == (
        "At step 9 rank 1 stood out most of 3 ranks, with a loss of nan; the median of the others was 5."
    )
    assert worst_rank({"rank_losses": {"10": [math.inf, math.nan]}, "hosts": ["a:0"]}) == (
        "At step 10 rank 0 on a:0 stood out most of 2 ranks, with a loss of inf; no other is finite."
    )


def test_of_ranks_that_share_sequences_their_group_is_told() -> None:
    losses = {"rank_losses": {"9": [2.0, 2.0, 5.0, 5.0, 2.5, 2.5]}, "sequence_parallel_size": 2}
    hosts = ["a:0", "a:1", "b:0", "b:1", "c:0", "c:1"]
    assert worst_rank({**losses, "hosts": hosts}) == (
        "At step 9 the group of ranks 2 to 3 on b:0, b:1 stood out most of 3 groups of 2 ranks, with a loss "
        "of 5; the median of the others was 2.25."
    )
    two = worst_rank({"rank_losses": {"9": [2.0, 2.0, 5.0, 5.0]}, "sequence_parallel_size": 2})
    assert two is not None
    assert two.endswith("with a loss of 5; the other group had 2.")
    assert worst_rank({"rank_losses": {"9": []}, "sequence_parallel_size": 2}) is None  # all share all


def test_steps_are_told_as_ranges_and_many_are_counted() -> None:
    assert ranges([5, 3, 4, 9, 9]) == "3 to 5, 9"
    assert ranges([1, 3, 5, 7, 8], 2) == "1, 3 and 3 more"


@pytest.mark.parametrize("field", [*rollback(), "skipped", "curve", "rank_losses", "hosts"])
@pytest.mark.parametrize(
    "value",
    [None, math.nan, "x", [], [1], {}, {"a": 1}, -1, 10**400, True, NASTY],
    ids=lambda value: repr(value)[:9],
)
def test_a_field_that_is_lacking_or_wrong_costs_no_more_than_its_entry(field: str, value: Any) -> None:
    record = rollback(skipped=SKIPPED, curve=[[1, 2.0]], rank_losses={"1": [1.0, 2.0]}, hosts=["a", "b"])
    lacking = {k: v for k, v in record.items() if k != field}
    for records in ([lacking], [record | {field: value}]):
        text = page([event("start", 0), *records, event("finish", 9)], "small")
        assert len(sections(text)) == 3
        assert now(text).startswith("**Now: finished")
        text.encode()


def test_records_of_noise_never_break_the_page() -> None:
    rng = random.Random(5)
    kinds = ["start", "resume", "stop", "finish", "save_failed", "watchdog", "dropped", "rollback"]
    kinds += ["needs_person", "suspects", "compared", "outcome"]
    fields = "step time attempt incident onset trouble action message samples skipped rank_losses hosts curve"
    fields += " tokens world_size reason diagnosis ranks outcome problem"
    values = [
        None,
        0,
        5,
        -1,
        2.5,
        math.nan,
        math.inf,
        "x",
        NASTY,
        [],
        [1, [2]],
        {"a": [1]},
        {"3": [1, "b"]},
        True,
    ]
    for _ in range(500):
        records: list[dict[str, Any]] = [
            {"event": rng.choice([*kinds, "other", None, 3, []])}
            | {name: rng.choice(values) for name in rng.sample(fields.split(), rng.randrange(8))}
            for _ in range(rng.randrange(1, 12))
        ]
        text = page(records, "small")
        text.encode()
        outside_code = re.sub(r"^(`{3,})\n.*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL)
        assert "<script" not in outside_code
        assert all(c.isprintable() or c == "\n" for c in text)


def test_a_page_of_many_thousand_records_stays_short() -> None:
    records = [event("resume", step) for step in range(5000)]
    text = page(records, "small")
    assert len(sections(text)) == 200
    assert text.endswith("4,800 older entries are in incidents.jsonl only.\n")
    assert len(text) < 100_000


def test_an_open_incident_outlives_newer_entries_and_an_older_one_is_still_counted() -> None:
    records = [rollback(1), event("outcome", 2, incident=1, outcome="healed"), rollback(2)]
    records += [event("resume", step) for step in range(300)]
    text = page(records, "small")
    assert sections(text)[-1] == "Incident 2"
    assert "2 incidents (1 open; [2](#incident-2)); 300 starts" in text
    late = [
        event("outcome", 3, incident=1, outcome="came_back"),
        event("outcome", 3, incident=2, outcome="healed"),
    ]
    text = page([*records, *late], "small")
    assert "2 incidents (0 open; [2](#incident-2)); 300 starts" in text
    assert "Outcome: **healed**." in section(text, "Incident 2")
    many = [rollback(number) for number in range(1, 303)]
    text = page([*many, event("outcome", 3, incident=1, outcome="healed")], "small")
    assert "302 incidents (301 open; [302](#incident-302); " in text
    assert len(sections(text)) == 200


def test_what_of_the_plan_changed_is_one_entry_for_a_start_with_a_line_each() -> None:
    changes = [
        event("changed", field="schedule.peak", old="0.1", new="0.2"),
        event("changed", field="batch.tokens", old="*4M*", new="8M"),
    ]
    later = event("changed", field="seed", old="1", new="2") | {"attempt": 2}
    text = page([*changes, later, event("resume", 5) | {"attempt": 2}], "small")
    assert sections(text) == ["Resume", "Changed for a start", "Changed for a start"]
    assert (
        "2026-09-21 14:13:20 UTC, attempt 1:\n\n- schedule.peak: 0.1 before, 0.2 from then on\n"
        "- batch.tokens: \\*4M\\* before, 8M from then on\n"
    ) in text
    assert "- seed: 1 before, 2 from then on" in text


def test_what_mode_observe_would_have_done_stands_with_the_verdict() -> None:
    said = event("watchdog", 9, action="roll_back", trouble="drift", onset=3, message="it drifts")
    would = event("observed", 9, response="skip", to_step=1000, reason="from a calm one")
    text = page([said, would], "small")
    assert sections(text) == ["A slow rise of the loss, no response"]
    assert "Nothing was done: the mode is observe." in text
    done = "In mode act: **skip**, back to the checkpoint of step 1,000: from a calm one."
    assert done in text
    other = page([would | {"reason": "it is so"}], "small")
    assert "In mode act: **skip**, back to the checkpoint of step 1,000: it is so." in other
    alone = page([would | {"step": 12}, said], "small")
    assert sections(alone) == ["A slow rise of the loss, no response", "Only observed"]
    assert f"step 12, attempt 1. {done}" in alone
    stop = page([event("observed", 9, response="stop", to_step=None, reason="nothing is left")], "small")
    assert "In mode act: **a person would have been asked**: nothing is left." in stop
    back = page([event("observed", 9, response="stop", to_step=5, reason="it")], "small")
    assert "**a person would have been asked**; the next start would go on from step 5: it." in back


def test_a_trouble_that_comes_and_goes_is_one_line_and_nothing_that_is_there_still() -> None:
    drifts = [
        event("watchdog", s, action="watch", trouble="drift", onset=s - 9, message=f"rose {s}")
        for s in (40, 60, 80)
    ]
    high = event("watchdog", 90, action="watch", trouble="norm_rise", onset=90, message="norm 8")
    text = page([*drifts, high, event("finish", 100)], "small")
    small = section(text, "Small things, steps 40 to 90")
    assert (
        "Watched, nothing was done: 4 troubles, none grave enough to roll back for; 0 seen to heal" in small
    )
    lines = [line for line in small.splitlines() if line.startswith("- ")]
    assert len(lines) == 2
    assert lines[1].endswith("a slow rise of the loss, watched, 3 times since step 40: rose 80.")


def test_no_word_of_the_records_is_left_for_a_person_to_read() -> None:
    kinds = get_args(Kind)
    records = [
        event("watchdog", 10 * n, action="watch", trouble=k, onset=n) for n, k in enumerate(kinds, start=1)
    ]
    records += [rollback(n, trouble=k) for n, k in enumerate(kinds, start=1)]
    findings = get_args(Finding)
    records += [event("compared", incident=n, finding=f) for n, f in enumerate(findings, start=1)]
    records += [event("outcome", 2000, incident=n, outcome="came_back") for n in range(1, len(kinds) + 1)]
    text = page([*records, *(event("dropped", 3000, cause=c) for c in ("non_finite", "wild_norm"))], "small")
    assert not [
        word for word in (*kinds, *findings, "came_back", "wild_norm") if "_" in word and word in text
    ]
    assert text.count("Outcome: **the trouble came back**.") == len(kinds)
    assert plain("of_a_later_version") == "of_a_later_version"
