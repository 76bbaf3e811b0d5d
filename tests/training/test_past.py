"""What of a plan may change once some of it has happened."""

from copy import deepcopy
from typing import Any

import pytest

from ds_pretrain.core.text import changed_fields
from ds_pretrain.training.past import past_changes, rate_tokens_of_past

SCHEDULE = {"length": 1000, "peak": 3e-4, "warmup": 100}
OLD: dict[str, Any] = {
    "name": "a",
    "schedule": {"kind": "wsd", **SCHEDULE, "decay": 200, "shape": "1-sqrt", "floor": 0.0},
    "batch": {"tokens": 4096, "ramp": [[0, 1024], [300, 4096]], "rate_rule": "none"},
    "phases": {
        "main": {"first_step": 0, "seq_len": 16, "mixture": {"web": 1.0}, "rope": None},
        "long": {"first_step": 600, "seq_len": 64, "mixture": {"web": 1.0}, "rope": {"theta": 1e6}},
    },
}
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
        ("schedule.floor", 0.1, 802),
        ("schedule.peak", 1e-4, 2),  # the first step of a warmup has rate 0 whatever the peak
        ("phases.long.first_step", 500, 501),
        ("phases.long.first_step", 700, 601),
        ("phases.long.rope", {"theta": 5e5}, 601),
        ("phases.main.mixture", {"web": 0.5, "math": 0.5}, 1),
        ("phases.anneal", ANNEAL, 801),
        ("batch.ramp", [[0, 1024], [400, 4096]], 301),
        ("batch.ramp", [[0, 2048], [300, 4096]], 1),
        ("batch.rate_rule", "sqrt", 1),
    ],
)
def test_a_change_is_of_the_past_from_the_step_on_that_it_would_have_altered(
    path: str, value: Any, first_bound: int
) -> None:
    new = _changed(path, value)
    assert changed_fields(OLD, new)
    for step in (0, 1, max(0, first_bound - 1), first_bound, 1000):
        assert bool(past_changes(OLD, new, step)) == (step >= first_bound), step
    assert past_changes(OLD, new, None)


def test_a_ramp_ahead_may_be_added_and_one_that_scales_rates_of_the_past_may_not() -> None:
    plain = {**OLD, "batch": {"tokens": 4096}}
    ramped = {**OLD, "batch": {"tokens": 8192, "ramp": [[0, 4096], [300, 8192]], "rate_rule": "none"}}
    assert not past_changes(plain, ramped, 300)
    assert past_changes(plain, ramped, 301)
    linear = {**OLD, "batch": {"tokens": 4096, "ramp": [[0, 1024], [300, 4096]], "rate_rule": "linear"}}
    larger = {
        **OLD,
        "batch": {**linear["batch"], "tokens": 8192, "ramp": [*linear["batch"]["ramp"], [700, 8192]]},
    }
    for identity, tokens in ((linear, 4096), (larger, 8192)):
        identity["batch"]["rate_tokens"] = tokens
    assert set(past_changes(linear, larger, 100)) == {"batch.rate_tokens"}  # an eighth, not a fourth
    assert rate_tokens_of_past(linear, larger, 100) == 4096
    assert not past_changes(linear, {**larger, "batch": {**larger["batch"], "rate_tokens": 4096}}, 700)
    assert not past_changes({**OLD, "batch": {**linear["batch"], "rate_rule": "none"}}, OLD, 100)


def test_a_rule_may_come_with_a_ramp_ahead_if_its_rates_are_meant_for_the_batch_of_the_past() -> None:
    """Until then the run had one size, and no word of a rule."""
    plain = {**OLD, "batch": {"tokens": 4096}}
    ramp = {"tokens": 8192, "ramp": [[0, 4096], [300, 8192]], "rate_rule": "sqrt", "rate_tokens": 8192}
    assert set(past_changes(plain, {**OLD, "batch": ramp}, 100)) == {"batch.rate_rule"}
    assert rate_tokens_of_past(plain, {**OLD, "batch": ramp}, 100) == 4096
    assert not past_changes(plain, {**OLD, "batch": {**ramp, "rate_tokens": 4096}}, 300)
    assert rate_tokens_of_past(OLD, {**OLD, "batch": {**OLD["batch"], "rate_rule": "sqrt"}}, 301) is None


def test_a_phase_name_may_hold_dots() -> None:
    dotted = {**OLD, "phases": {"main": OLD["phases"]["main"], "v1.0": OLD["phases"]["long"]}}
    assert not past_changes(OLD, dotted, 600)
    assert set(past_changes(OLD, dotted, 601)) == {"phases.long", "phases.v1.0"}
    longer = {**dotted, "phases": {**dotted["phases"], "v1.0": {**OLD["phases"]["long"], "seq_len": 128}}}
    assert set(past_changes(dotted, longer, 601)) == {"phases.v1.0.seq_len"}


def test_weights_that_draw_the_same_are_the_same_whatever_their_scale() -> None:
    def mixed(**weights: float) -> dict[str, Any]:
        return _changed("phases.main.mixture", weights)

    old = mixed(web=1.0, math=1.0)
    assert not past_changes(old, mixed(web=2.0, math=2.0), 100)
    assert not past_changes(old, mixed(web=1.0, math=1.0 + 1e-6), 100)  # not one draw in a block
    assert set(past_changes(old, mixed(web=1.0, math=1.01), 100)) == {"phases.main.mixture.math"}
    assert past_changes(old, mixed(web=1.0), 100)
    assert not past_changes(old, mixed(web=1.0), 0)


def test_both_values_are_told() -> None:
    new = _changed("phases.long.seq_len", 128)
    assert past_changes(OLD, new, 700) == {"phases.long.seq_len": (64, 128)}


def test_a_cosine_of_another_length_alters_all_of_its_past() -> None:
    new = {**OLD, "schedule": {"kind": "cosine", **SCHEDULE, "floor": 0.1}}
    longer = {**OLD, "schedule": {"kind": "cosine", **SCHEDULE, "length": 1001, "floor": 0.1}}
    assert not past_changes(new, longer, 101)  # the same warmup
    assert past_changes(new, longer, 103)
    assert past_changes(OLD, new, 103)
    assert past_changes({**OLD, "schedule": {"kind": "old"}}, OLD, 1)  # what nobody knows any more


def test_of_a_schedule_only_what_alters_past_rates_is_told() -> None:
    """A branch shortens the run on purpose; what it got wrong is the peak."""
    new = deepcopy(OLD)
    new["schedule"] |= {"length": 700, "decay": 100, "peak": 1e-4}
    assert list(past_changes(OLD, new, 500)) == ["schedule.peak"]
    new["schedule"]["peak"] = OLD["schedule"]["peak"]
    assert past_changes(OLD, new, 601) == {}
    assert set(past_changes(OLD, new, 602)) == {"schedule.length"}  # the new decay has begun


def test_a_source_is_of_the_past_once_a_phase_has_drawn_from_it() -> None:
    old = {**OLD, "sources": {"web": "a", "math": "b"}}
    new = {**deepcopy(OLD), "sources": {"web": "a", "math": "c", "books": "d"}}
    new["phases"]["anneal"] = ANNEAL
    assert past_changes(old, new, 800) == {}
    changed = {**new, "sources": {"web": "x"}}
    assert past_changes(old, changed, 1) == {"sources.web": ("a", "x")}
    assert "sources.math" in past_changes(old, new, 801)


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
    assert not past_changes(OLD, _changed(path, value), 600)
    assert bool(past_changes(OLD, _changed(path, value), 600, {"long"})) == is_bound


def test_sources_and_chunks_of_a_phase_that_data_is_skipped_of_are_fixed() -> None:
    """Of a source that no step before it has read."""
    mixtures = {"main": {"math": 1.0}, "long": {"web": 1.0}}
    phases = {name: {**phase, "mixture": mixtures[name]} for name, phase in OLD["phases"].items()}
    for section, values in (("sources", ("a", "b")), ("chunk_tokens", (64, 128))):
        old, new = ({**OLD, "phases": phases, section: {"web": value}} for value in values)
        assert not past_changes(old, new, 600)
        assert list(past_changes(old, new, 600, {"long"})) == [f"{section}.web"]
