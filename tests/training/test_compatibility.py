"""Changes of a run that has started: what may change, and what a start says of it."""

import json
import shutil
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_pretrain.config.plan import load_plan
from ds_pretrain.core.state import Rollback, RunState, Skip, SkipLedger
from ds_pretrain.core.text import find_changed_fields
from ds_pretrain.training.compatibility import (
    check_directory,
    claim_run,
    find_past_changes,
    format_with_unit,
    list_ropes_until,
)
from ds_pretrain.training.preflight import open_inputs
from ds_pretrain.training.record import KnownRun, note_saved, read_record
from ds_pretrain.watchdog.rollback_log import write_rollback_log
from tests.scenario import deepspeed_json, make_run, write_corpus
from tests.training.test_record import refusal, start

SCHEDULE = {"length": 1000, "peak_lr": 3e-4, "warmup": 100}
OLD: dict[str, Any] = {
    "name": "a",
    "schedule": {"kind": "wsd", **SCHEDULE, "decay": 200, "decay_shape": "1-sqrt", "min_lr_ratio": 0.0},
    "batch": {
        "tokens": 4096,
        "ramp": [[0, 1024], [300, 4096]],
        "lr_scaling": "none",
        "lr_reference_tokens": None,
    },
    "phases": {
        "main": {"first_step": 0, "seq_len": 16, "mixture": {"web": 1.0}, "rope": None},
        "long": {"first_step": 600, "seq_len": 64, "mixture": {"web": 1.0}, "rope": {"theta": 1e6}},
    },
}
PLAIN = {"tokens": 4096, "ramp": None, "lr_scaling": "none", "lr_reference_tokens": None}
ANNEAL = {"first_step": 800, "seq_len": 64, "mixture": {"math": 1.0}, "rope": None}


def _changed(path: str, value: Any) -> dict[str, Any]:
    new = deepcopy(OLD)
    *keys, last = path.split(".")
    node = new
    for key in keys:
        node = node[key]
    node[last] = value
    return new


@pytest.mark.parametrize(
    ("path", "value", "first_bound"),
    [
        ("name", "b", 0),
        ("schedule.length", 1200, 802),  # the decay would have begun
        ("schedule.decay", 300, 702),
        ("schedule.min_lr_ratio", 0.1, 802),
        ("schedule.peak_lr", 1e-4, 1),
        ("phases.long.first_step", 500, 501),
        ("phases.long.first_step", 700, 601),
        ("phases.long.rope", {"theta": 5e5}, 601),
        ("phases.main.mixture", {"web": 0.5, "math": 0.5}, 1),
        ("phases.anneal", ANNEAL, 801),
        ("batch.ramp", [[0, 1024], [400, 4096]], 301),
        ("batch.ramp", [[0, 2048], [300, 4096]], 1),
        ("batch.lr_scaling", "sqrt", 1),
    ],
)
def test_a_change_is_of_the_past_from_the_step_on_that_it_would_have_altered(
    path: str, value: Any, first_bound: int
) -> None:
    new = _changed(path, value)
    assert find_changed_fields(OLD, new)
    for step in (0, 1, max(0, first_bound - 1), first_bound, 1000):
        assert bool(find_past_changes(OLD, new, step)) == (step >= first_bound), step
    assert find_past_changes(OLD, new, None)


def test_a_ramp_ahead_may_be_added_and_one_that_scales_rates_of_the_past_may_not() -> None:
    plain = {**OLD, "batch": PLAIN}
    ramped = {**OLD, "batch": {**PLAIN, "tokens": 8192, "ramp": [[0, 4096], [300, 8192]]}}
    assert not find_past_changes(plain, ramped, 300)
    assert find_past_changes(plain, ramped, 301)
    linear = {**OLD, "batch": {"tokens": 4096, "ramp": [[0, 1024], [300, 4096]], "lr_scaling": "linear"}}
    larger = {
        **OLD,
        "batch": {**linear["batch"], "tokens": 8192, "ramp": [*linear["batch"]["ramp"], [700, 8192]]},
    }
    for identity, tokens in ((linear, 4096), (larger, 8192)):
        identity["batch"]["lr_reference_tokens"] = tokens
    assert set(find_past_changes(linear, larger, 100)) == {
        "batch.lr_reference_tokens"
    }  # an eighth, not a fourth
    assert not find_past_changes(
        linear, {**larger, "batch": {**larger["batch"], "lr_reference_tokens": 4096}}, 700
    )
    assert not find_past_changes({**OLD, "batch": {**linear["batch"], "lr_scaling": "none"}}, OLD, 100)


def test_a_rule_may_come_with_a_ramp_ahead_if_its_rates_are_meant_for_the_batch_of_the_past() -> None:
    """Until then the run had one size, and no word of a rule."""
    plain = {**OLD, "batch": PLAIN}
    ramp = {
        "tokens": 8192,
        "ramp": [[0, 4096], [300, 8192]],
        "lr_scaling": "sqrt",
        "lr_reference_tokens": 8192,
    }
    assert set(find_past_changes(plain, {**OLD, "batch": ramp}, 100)) == {
        "batch.lr_scaling",
        "batch.lr_reference_tokens",
    }
    assert not find_past_changes(plain, {**OLD, "batch": {**ramp, "lr_reference_tokens": 4096}}, 300)


def test_a_phase_name_may_hold_dots() -> None:
    dotted = {**OLD, "phases": {"main": OLD["phases"]["main"], "v1.0": OLD["phases"]["long"]}}
    assert not find_past_changes(OLD, dotted, 600)
    assert set(find_past_changes(OLD, dotted, 601)) == {"phases.long", "phases.v1.0"}
    longer = {**dotted, "phases": {**dotted["phases"], "v1.0": {**OLD["phases"]["long"], "seq_len": 128}}}
    assert set(find_past_changes(dotted, longer, 601)) == {"phases.v1.0.seq_len"}


def test_weights_that_draw_the_same_are_the_same_whatever_their_scale() -> None:
    def mixed(**weights: float) -> dict[str, Any]:
        return _changed("phases.main.mixture", weights)

    old = mixed(web=1.0, math=1.0)
    assert not find_past_changes(old, mixed(web=2.0, math=2.0), 100)
    assert not find_past_changes(old, mixed(web=1.0, math=1.0 + 1e-6), 100)  # not one draw in a block
    assert set(find_past_changes(old, mixed(web=1.0, math=1.01), 100)) == {"phases.main.mixture.math"}
    assert find_past_changes(old, mixed(web=1.0), 100)
    assert not find_past_changes(old, mixed(web=1.0), 0)


def test_both_values_are_told() -> None:
    new = _changed("phases.long.seq_len", 128)
    assert find_past_changes(OLD, new, 700) == {"phases.long.seq_len": (64, 128)}


def test_a_cosine_of_another_length_alters_all_of_its_past() -> None:
    new = {**OLD, "schedule": {"kind": "cosine", **SCHEDULE, "min_lr_ratio": 0.1}}
    longer = {**OLD, "schedule": {"kind": "cosine", **SCHEDULE, "length": 1001, "min_lr_ratio": 0.1}}
    assert not find_past_changes(new, longer, 101)  # the same warmup
    assert find_past_changes(new, longer, 103)
    assert find_past_changes(OLD, new, 103)


def test_of_a_schedule_only_what_alters_past_rates_is_told() -> None:
    """A branch shortens the run on purpose; what it got wrong is the peak."""
    new = deepcopy(OLD)
    new["schedule"] |= {"length": 700, "decay": 100, "peak_lr": 1e-4}
    assert list(find_past_changes(OLD, new, 500)) == ["schedule.peak_lr"]
    new["schedule"]["peak_lr"] = OLD["schedule"]["peak_lr"]
    assert find_past_changes(OLD, new, 601) == {}
    assert set(find_past_changes(OLD, new, 602)) == {
        "schedule.length",
        "schedule.decay",
    }  # the new one has begun


def test_a_source_is_of_the_past_once_a_phase_has_drawn_from_it() -> None:
    old = {**OLD, "sources": {"web": "a", "math": "b"}}
    new = {**deepcopy(OLD), "sources": {"web": "a", "math": "c", "books": "d"}}
    new["phases"]["anneal"] = ANNEAL
    assert find_past_changes(old, new, 800) == {}
    changed = {**new, "sources": {"web": "x"}}
    assert find_past_changes(old, changed, 1) == {"sources.web": ("a", "x")}
    assert "sources.math" in find_past_changes(old, new, 801)


@pytest.mark.parametrize(
    ("path", "value", "is_bound"),
    [
        ("phases.long.mixture", {"web": 0.5, "math": 0.5}, True),
        ("phases.long.seq_len", 128, True),
        ("phases.long.first_step", 700, True),
        ("phases.long.rope", {"theta": 5e5}, False),
        ("phases.anneal", ANNEAL, False),
        ("schedule.length", 1200, False),
    ],
)
def test_of_a_phase_that_data_is_skipped_of_the_draws_are_fixed_also_before_its_first_step(
    path: str, value: Any, is_bound: bool
) -> None:
    assert not find_past_changes(OLD, _changed(path, value), 600)
    assert bool(find_past_changes(OLD, _changed(path, value), 600, {"long"})) == is_bound


def test_sources_and_chunks_of_a_phase_that_data_is_skipped_of_are_fixed() -> None:
    """Of a source that no step before it has read."""
    mixtures = {"main": {"math": 1.0}, "long": {"web": 1.0}}
    phases = {name: {**phase, "mixture": mixtures[name]} for name, phase in OLD["phases"].items()}
    for section, values in (("sources", ("a", "b")), ("chunk_tokens", (64, 128))):
        old, new = ({**OLD, "phases": phases, section: {"web": value}} for value in values)
        assert not find_past_changes(old, new, 600)
        assert list(find_past_changes(old, new, 600, {"long"})) == [f"{section}.web"]


def test_a_value_is_told_in_words_and_no_dictionary_is() -> None:
    phase = {"first_step": 1200, "seq_len": 4096, "mixture": {"web": 1.5, "code": 1.0}, "rope": None}
    words = "sequences of 4,096 tokens of 1.5 web, 1 code, from step 1,200 on"
    assert format_with_unit("phases.long", phase) == words
    rope = {"kind": "yarn", "theta": 5e5, "factor": 4.0, "low_freq_factor": None}
    assert format_with_unit("phases.long", {**phase, "rope": rope}) == (
        f'{words} (rope kind "yarn", theta 500000, factor 4)'
    )
    assert format_with_unit("batch.ramp", [[0, 512], [300, 1024]]) == (
        "512 tokens from step 0 on, 1,024 tokens from step 300 on"
    )
    assert format_with_unit("chunk_tokens.web", 4096) == "4,096 tokens"
    assert format_with_unit("phases.long.mixture", {}) == "empty"


# An override of the second start, the field that it changes, and whether accept_changes can let it through.
CHANGES = [
    ("seed=8", "seed", False),
    ("model.qk_norm=false", "model.qk_norm", False),
    ("batch.tokens=256", "batch.tokens", False),
    ("phases.0.seq_len=8", "phases.main.seq_len", False),
    ("phases.0.mixture.code=0.4", "phases.main.mixture.code", False),
    ("schedule.peak_lr=0.5", "schedule.peak_lr", True),
    ("schedule.min_lr_ratio=0.5", "schedule.min_lr_ratio", True),
    ("schedule.warmup=1 steps", "schedule.warmup", True),
    ("schedule.decay_shape=linear", "schedule.decay_shape", True),
    ("model.z_loss=off", "model.z_loss", True),
    ("model.activation_checkpointing=true", "model.activation_checkpointing", True),
    ("model.attention=eager", "model.attention", True),
    ("model.decay_embeddings=true", "model.decay_embeddings", True),
]


@pytest.mark.parametrize(("override", "field", "acceptable"), CHANGES, ids=[row[0] for row in CHANGES])
def test_a_change_of_what_the_run_is_has_to_be_meant(
    tmp_path: Path, override: str, field: str, acceptable: bool
) -> None:
    run_file = make_run(tmp_path)
    first = start(run_file)
    message = refusal(run_file, override)
    assert message.startswith(f"{run_file}: `{field}` is ")
    assert f"but the run in {tmp_path / 'out'} was started with" in message
    assert read_record(tmp_path / "out") == first
    if not acceptable:
        assert message.endswith("set it back, or start another run with a new `name` and `out`")
        return
    assert message.endswith(f'set it back, or accept it with accept_changes = ["{field}"]')
    record = start(run_file, override, f'accept_changes=["{field}"]')
    (change,) = record.changes
    assert (change["attempt"], change["field"]) == (2, field)
    assert change["old"] != change["new"]
    assert start(run_file, override).changes == record.changes  # it is the run's own value from now on
    assert f"`{field}`" in refusal(run_file)


def test_past_is_what_the_newest_checkpoint_has_though_a_kill_kept_it_from_being_noted(
    tmp_path: Path,
) -> None:
    run_file = make_run(tmp_path)
    start(run_file)
    note_saved(tmp_path / "out", 4)
    changed = ("schedule.decay=6 steps",)  # the decay would have begun at step 6
    known = KnownRun("step", 4, 1, None, {})
    assert check_directory(load_plan(run_file, changed), {}, known) == []
    [problem] = check_directory(load_plan(run_file, changed), {}, replace(known, step=8))
    assert "`schedule.decay` is 6 steps" in problem
    assert "`schedule.decay` is 6 steps" in refusal(run_file, *changed, found_step=8)
    assert start(run_file, *changed, found_step=4).changes[-1]["field"] == "schedule.decay"


AHEAD = "[[phases]]\nname = 'long'\nstart = '8 steps'\nseq_len = 32\nmixture = { text = 1.0 }\n[validation]"


def test_what_lies_ahead_may_change_and_is_noted_and_what_is_past_may_not(tmp_path: Path) -> None:
    """Twelve steps of a WSD schedule, of which the last three decay; seven are done."""
    run_file = make_run(tmp_path)
    plain = run_file.read_text()
    source = f'text = "{tmp_path}/text"'
    text = plain.replace(source, f'text = {{ path = "{tmp_path}/text", chunk_tokens = 32 }}')
    run_file.write_text(text)
    start(run_file)
    note_saved(tmp_path / "out", 7)
    longer = ("schedule.length=20 steps", "schedule.decay=4 steps")
    record = start(run_file, *longer, found_step=7)
    assert {change["field"] for change in record.changes} == {"schedule.length", "schedule.decay"}
    run_file.write_text(text.replace("[validation]", AHEAD))
    assert start(run_file, *longer, found_step=7).changes[-1]["field"] == "phases.long"
    message = refusal(run_file, *longer, "schedule.peak_lr=2e-3", found_step=7)
    assert "`schedule.peak_lr` is 0.002, but the run in" in message
    assert "was started with 0.01" in message
    run_file.write_text(text.replace("[validation]", AHEAD.replace("8 steps", "6 steps")))
    assert "`phases.long.first_step` is 6 steps" in refusal(run_file, *longer, found_step=7)
    run_file.write_text(plain)
    cut = refusal(run_file, *longer, found_step=7)
    assert "sources.text was read in chunks of 32 tokens, and would continue in chunks of 16" in cut
    run_file.write_text(text)
    note_saved(tmp_path / "out", 18)  # the decay has begun: its end is fixed
    assert "`schedule.length` is 30 steps" in refusal(
        run_file, *longer, "schedule.length=30 steps", found_step=18
    )


def test_a_ramp_that_goes_on_keeps_past_rates_with_the_batch_that_they_were_meant_for(tmp_path: Path) -> None:
    run_file = make_run(tmp_path)
    ramp = ['batch.ramp={ "0" = 64, "3 steps" = 128 }', "batch.lr_scaling=sqrt"]
    start(run_file, *ramp)
    note_saved(tmp_path / "out", 6)
    longer = ['batch.ramp={ "0" = 64, "3 steps" = 128, "8 steps" = 256 }', "batch.lr_scaling=sqrt"]
    longer.append("batch.tokens=256")
    assert refusal(run_file, *longer, found_step=6) == (
        f"{run_file}: `batch.lr_reference_tokens` is 256 tokens, but the run in {tmp_path / 'out'} was "
        f"started with "
        "128 tokens; set it back, or start another run with a new `name` and `out`"
    )
    linear = refusal(run_file, *ramp, "batch.lr_scaling=linear", found_step=6)
    assert '`batch.lr_scaling` is "linear", but the run in' in linear
    record = start(run_file, *longer, "batch.lr_reference_tokens=128", found_step=6)
    assert {change["field"] for change in record.changes} == {"batch.ramp", "batch.tokens"}


def test_a_phase_that_a_rollback_left_and_skips_of_may_not_change_what_it_draws(tmp_path: Path) -> None:
    """It begins at the checkpoint that was gone back to, and the run died before it saved again."""
    run_file = make_run(tmp_path)
    text = run_file.read_text().replace("[validation]", AHEAD)
    run_file.write_text(text)
    start(run_file)
    note_saved(tmp_path / "out", 8)
    rollback = Rollback(8, 11, 10, "lasting_spike", "skip", 1)
    ledger = SkipLedger((Skip("long", 8, 24, "lasting_spike", 11, 1),))
    write_rollback_log(tmp_path / "out", RunState(8, ledger, rollbacks=(rollback,)))
    run_file.write_text(text.replace("text = 1.0", "text = 0.5, code = 0.5"))
    assert "`phases.long.mixture.text` is 0.5, but the run in" in refusal(run_file, found_step=8)
    run_file.write_text(text.replace("name = 'long'", "name = 'raised'"))
    assert "`phases.long` is no longer there, but the run in" in refusal(run_file, found_step=8)
    run_file.write_text(text + "[watchdog]\npatience = 40\n")
    start(run_file, found_step=8)


def test_a_phase_that_is_past_and_gone_or_new_is_told_so(tmp_path: Path) -> None:
    run_file = make_run(tmp_path)
    plain = run_file.read_text()
    ahead = plain.replace("[validation]", AHEAD)
    for name, first, second, words in (
        ("gone", ahead, plain, "`phases.long` is no longer there, but the run in"),
        ("new", plain, ahead, "new was started without it; set it back"),
    ):
        folder = tmp_path / name
        own = [text.replace(f'out = "{tmp_path}/out"', f'out = "{folder}"') for text in (first, second)]
        run_file.write_text(own[0])
        start(run_file)
        note_saved(folder, 9)
        run_file.write_text(own[1])
        said = refusal(run_file, found_step=9)
        assert words in said
        assert "sequences of 32 tokens of 1 text, from step 8 on" in said
        for unreadable in ("null", "None", "{", "first_step"):
            assert unreadable not in said


LONG = AHEAD.replace(
    "[validation]", "ROPE\n[[phases]]\nname = 'last'\nstart = '10 steps'\nseq_len = 32\n"
) + ("mixture = { text = 1.0 }\n[validation]")


@pytest.mark.parametrize(
    ("before", "after", "fields"),
    [
        ("rope = { theta = 1e4 }", "rope = { theta = 10_000 }", ()),
        ("rope = { theta = 1e4 }", "rope = { theta = 1e5 }", ("rope.theta` is 100000, {with 10000;",)),
        ("", "rope = { theta = 1e5 }", ("rope.theta` is 100000, {without it;",)),
        (
            "",
            "rope = { kind = 'yarn', factor = 2 }",
            ('rope.kind` is "yarn", {without it;', "rope.factor` is 2, {without it;"),
        ),
    ],
)
def test_a_past_rope_may_not_change_and_only_what_differs_is_told(
    tmp_path: Path, before: str, after: str, fields: tuple[str, ...]
) -> None:
    run_file = make_run(tmp_path)
    text = run_file.read_text()
    first, second = (text.replace("[validation]", LONG.replace("ROPE", rope)) for rope in (before, after))
    run_file.write_text(first)
    start(run_file)
    note_saved(tmp_path / "out", 12)
    run_file.write_text(second)
    if not fields:
        assert start(run_file, found_step=12).changes == ()
        return
    said = refusal(run_file, found_step=12)
    assert said.count("` is ") == len(fields)
    for field in fields:
        assert f"`phases.long.{field.replace('{', f'but the run in {tmp_path}/out was started ')}" in said


def test_the_ropes_up_to_a_step_are_those_of_the_phases_begun_in_their_order() -> None:
    late, early = {"first_step": 8, "rope": {"theta": 2.0}}, {"first_step": 4, "rope": {"theta": 1.0}}
    identity = {"phases": {"late": late, "early": early, "main": {"first_step": 0, "rope": {}}}}
    assert list_ropes_until(identity, 7) == [{"theta": 1.0}]
    assert list_ropes_until(identity, 8) == [{"theta": 1.0}, {"theta": 2.0}]
    assert list_ropes_until({}, 8) == []


def test_a_rope_ahead_is_noted_by_what_differs(tmp_path: Path) -> None:
    run_file = make_run(tmp_path)
    text = run_file.read_text()
    run_file.write_text(text.replace("[validation]", LONG.replace("ROPE", "")))
    start(run_file)
    note_saved(tmp_path / "out", 4)
    run_file.write_text(text.replace("[validation]", LONG.replace("ROPE", "rope = { theta = 1e5 }")))
    [change] = start(run_file, found_step=4).changes
    assert (change["field"], change["old"], change["new"]) == ("phases.long.rope.theta", None, 1e5)


def test_a_phase_of_another_name_is_another_phase_which_the_past_may_not_have(tmp_path: Path) -> None:
    run_file = make_run(tmp_path)
    text = run_file.read_text().replace("[validation]", LONG.replace("ROPE", ""))
    run_file.write_text(text)
    start(run_file)
    note_saved(tmp_path / "out", 9)
    run_file.write_text(text.replace("name = 'last'", "name = 'anneal'"))
    changes = start(run_file, found_step=9).changes
    assert [change["field"] for change in changes] == ["phases.last", "phases.anneal"]
    run_file.write_text(text.replace("name = 'long'", "name = 'longer'").replace("'last'", "'anneal'"))
    said = refusal(run_file, found_step=9)
    assert f"`phases.long` is no longer there, but the run in {tmp_path}/out was started with seq" in said
    assert "`phases.longer` is sequences of 32 tokens of 1 text, from step 8 on" in said


def test_a_source_that_was_drawn_from_and_is_in_no_mixture_any_more_is_told_by_the_mixture(
    tmp_path: Path,
) -> None:
    run_file = make_run(tmp_path)
    text = run_file.read_text()
    start(run_file)
    note_saved(tmp_path / "out", 4)
    run_file.write_text(text.replace("{ text = 0.7, code = 0.3 }", "{ text = 0.7 }"))
    message = refusal(run_file, found_step=4)
    assert "`phases.main.mixture.code` is no longer there, but the run in" in message
    assert "was started with 0.3; set it back" in message
    assert "chunk" not in message


def test_of_a_model_config_counts_what_a_model_is_made_of(tmp_path: Path) -> None:
    run_file = make_run(tmp_path)
    start(run_file)
    config = json.loads((tmp_path / "model.json").read_text())
    aside = {"use_cache": False, "torch_dtype": "bfloat16", "architectures": ["X"], "pad_token_id": None}
    make_run(tmp_path, model={**config, **aside})
    assert start(run_file).changes == ()
    make_run(tmp_path, model={**config, "rope_theta": 5e5, "hidden_act": "gelu"})
    message = refusal(run_file)
    assert "`model.config.rope_theta` is 500000.0, but the run in" in message
    assert '`model.config.hidden_act` is "gelu", but the run in' in message
    assert "2 problems" in message


def test_a_section_in_accept_changes_lets_each_of_its_fields_through(tmp_path: Path) -> None:
    run_file = make_run(tmp_path)
    start(run_file)
    record = start(
        run_file, "schedule.peak_lr=0.5", "schedule.min_lr_ratio=0.1", 'accept_changes=["schedule"]'
    )
    assert [change["field"] for change in record.changes] == ["schedule.peak_lr", "schedule.min_lr_ratio"]
    assert "`model.z_loss`" in refusal(
        run_file,
        "schedule.peak_lr=0.5",
        "schedule.min_lr_ratio=0.1",
        "model.z_loss=off",
        'accept_changes=["schedule"]',
    )


def test_all_changes_are_reported_at_once(tmp_path: Path) -> None:
    run_file = make_run(tmp_path)
    start(run_file)
    problems = check_directory(
        load_plan(run_file, ["seed=8", "schedule.peak_lr=0.5", "model.qk_norm=false"]), {}
    )
    assert len(problems) == 3


@pytest.mark.parametrize(
    "override", ["batch.micro_batch_size=4", "monitor.log_every=9", "checkpoint.keep_last=1"]
)
def test_what_leaves_the_trajectory_alone_may_change(tmp_path: Path, override: str) -> None:
    run_file = make_run(tmp_path)
    start(run_file)
    assert start(run_file, override).changes == ()


def test_a_changed_model_config_is_refused_by_its_own_key(tmp_path: Path) -> None:
    run_file = make_run(tmp_path)
    start(run_file)
    config = json.loads((tmp_path / "model.json").read_text())
    make_run(tmp_path, model={**config, "num_hidden_layers": 3})
    message = refusal(run_file)
    assert f"{run_file}: `model.config.num_hidden_layers` is 3, but" in message
    assert "was started with 2;" in message


def test_p05_data_that_changed_is_refused_and_a_corpus_that_moved_is_not(tmp_path: Path) -> None:
    """A source is its content: other tokens need a word, the same tokens elsewhere do not."""
    run_file = make_run(tmp_path)
    plan = load_plan(run_file)
    data = open_inputs(plan).data
    plan.out.mkdir()
    claim_run(plan, data, None)

    for ending in ("bin", "idx", "json"):
        shutil.copy(tmp_path / f"code.{ending}", tmp_path / f"moved.{ending}")
    moved = load_plan(run_file, [f"sources.code={tmp_path}/moved"])
    assert check_directory(moved, open_inputs(moved).data) == []

    write_corpus(tmp_path / "code", seed=99)
    changed = open_inputs(plan).data
    [problem] = check_directory(plan, changed)
    assert "`sources.code` is" in problem
    assert changed["code"] in problem
    assert data["code"] in problem
    assert 'accept_changes = ["sources.code"]' in problem
    accepting = load_plan(run_file, ['accept_changes=["sources.code"]'])
    record = claim_run(accepting, changed, None)
    assert record.changes == (
        {"attempt": 2, "field": "sources.code", "old": data["code"], "new": changed["code"]},
    )


def test_an_option_of_the_optimizer_that_a_load_would_override_is_refused(tmp_path: Path) -> None:
    run_file = make_run(tmp_path)
    start(run_file)
    changed = deepspeed_json()
    changed["optimizer"]["params"] |= {"weight_decay": 0.2, "torch_adam": False}
    (tmp_path / "deepspeed.json").write_text(json.dumps(changed))
    problems = check_directory(load_plan(run_file), {})
    assert len(problems) == 1  # how Adam is computed may change
    assert "`deepspeed.optimizer.params.weight_decay` is 0.2" in problems[0]


@pytest.mark.parametrize(
    "damage", [{"phases": None}, {"batch": {"tokens": 128, "ramp": "x"}}, {"schedule": 3}]
)
def test_an_identity_that_cannot_be_read_says_where_an_intact_one_is(tmp_path: Path, damage: object) -> None:
    run_file = make_run(tmp_path)
    start(run_file)
    note_saved(tmp_path / "out", 4)
    path = tmp_path / "out" / "run.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "identity": {**record["identity"], **damage}}))  # type: ignore[dict-item]
    said = refusal(run_file, found_step=4)
    assert f"the run in {tmp_path / 'out'} has an identity that cannot be read (" in said
    assert said.endswith(
        "put an intact run.json back: the manifest of each checkpoint has the same `identity`"
    )
