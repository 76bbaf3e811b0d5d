"""The plan: three files read, checked against one another, and what follows from them."""

import json
from pathlib import Path
from typing import Any

import pytest

from ds_pretrain.config.plan import Plan, check_world, load_plan
from ds_pretrain.config.schema import WsdSection
from ds_pretrain.config.timeline import count_micro_batches
from ds_pretrain.core.errors import InputError
from ds_pretrain.core.text import find_changed_fields
from ds_pretrain.training.compatibility import compute_identity, format_with_unit
from tests.scenario import deepspeed_json, make_run
from tests.timelines import cosine, wsd


def problems_of(run_file: Path, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(InputError) as raised:
        load_plan(run_file, overrides)
    return raised.value.problems


def test_a_plan_holds_the_texts_as_they_were_read_and_what_follows(tmp_path: Path) -> None:
    run_file = make_run(tmp_path)
    plan = load_plan(run_file, ["seed=3"])
    assert plan.run_text == run_file.read_text()
    assert plan.deepspeed_text == (tmp_path / "deepspeed.json").read_text()
    assert plan.model_text == (tmp_path / "model.json").read_text()
    assert (plan.overrides, plan.run.seed, plan.last_step) == (("seed=3",), 3, 12)
    assert plan.schedule == wsd(1e-2, 12, 2, 3, "1-sqrt", 0.0)
    assert plan.timeline.total_tokens == 12 * 128
    assert plan.out == tmp_path / "out"
    assert not plan.out.exists()


def test_durations_in_tokens_and_percent_become_steps(tmp_path: Path) -> None:
    run_file = make_run(tmp_path, batch_tokens=128)
    overrides = ["schedule.length=1280 tokens", "schedule.warmup=129 tokens", "schedule.decay=25%"]
    assert load_plan(run_file, overrides).schedule == wsd(1e-2, 10, 2, 3, "1-sqrt", 0.0)


def test_a_cosine_is_resolved_too(tmp_path: Path) -> None:
    run_file = make_run(tmp_path)
    schedule = (
        'schedule={ kind = "cosine", length = "100 steps", peak_lr = 1.0, warmup = "5%", min_lr_ratio = 0.2 }'
    )
    assert load_plan(run_file, [schedule]).schedule == cosine(1.0, 100, 5, 0.2)


# Overrides that contradict, and pieces of the one message.
CONTRADICTIONS: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    (
        ("schedule.warmup=10 steps", "schedule.decay=3 steps"),
        (
            'schedule.warmup = "10 steps" (10 steps) and schedule.decay = "3 steps" (3 steps) exceed',
            'schedule.length = "12 steps" (12 steps); shorten one',
        ),
    ),
    (
        ('schedule={ kind = "cosine", length = "9 steps", peak_lr = 1.0, warmup = "10 steps" }',),
        ('schedule.warmup = "10 steps" (10 steps) exceed schedule.length = "9 steps" (9 steps)',),
    ),
    (("schedule.decay=0%",), ('schedule.decay = "0%" is zero steps; a WSD schedule ends with a decay',)),
    (
        ("schedule.decay_shape=exponential",),
        (
            'schedule.decay_shape = "exponential" cannot reach schedule.min_lr_ratio = 0; set a floor '
            "above 0, like 0.1",
        ),
    ),
    (
        ("batch.tokens=130",),
        (
            "batch.tokens = 130 is not a whole number of sequences of phases.main.seq_len = 16",
            "nearest batch.tokens: 128 or 160",  # also whole micro-batches
        ),
    ),
    (("batch.tokens=10",), ("batch.tokens = 10 is not a whole number", "nearest batch.tokens: 32")),
    (
        ("batch.micro_batch_size=3",),
        (
            "batch.tokens = 128 is 8 sequences of phases.main.seq_len = 16, which no number of ranks divides "
            "into whole micro-batches of batch.micro_batch_size = 3",
            "nearest batch.tokens: 96 or 144",
        ),
    ),
    (("batch.micro_batch_size=9",), ("no number of ranks divides", "nearest batch.tokens: 144")),
    (
        ("phases.0.mixture={ text = 1.0, maths = 1.0 }",),
        ("phases.main.mixture names `maths`, which [sources] does not have (it has: text, code)",),
    ),
    (("phases.0.mixture={}",), ("phases.main.mixture is empty; name at least one source with a weight",)),
    (
        ("schedule.length=1e18 tokens",),
        (
            'schedule.length = "1e18 tokens" is 7,812,500,000,000,000 steps in batches of 128 tokens; '
            "at most 1,000,000,000 can be trained: shorten it",
        ),
    ),
    (
        ("schedule.length=1e9 steps", "batch.tokens=1024M"),
        (
            'schedule.length = "1e9 steps" is 1,073,741,824,000,000,000 tokens in batches of 1,073,741,824 '
            "tokens; at most 1,000,000,000,000,000,000 can be trained: shorten it",
        ),
    ),
    (
        ('accept_changes=["seed"]',),
        ("accept_changes names `seed`, which a started run cannot change; what it can: schedule, ",),
    ),
]


@pytest.mark.parametrize(("overrides", "pieces"), CONTRADICTIONS, ids=[str(row[0]) for row in CONTRADICTIONS])
def test_a_contradiction_gives_one_message_with_both_sides(
    tmp_path: Path, overrides: tuple[str, ...], pieces: tuple[str, ...]
) -> None:
    run_file = make_run(tmp_path)
    problems = problems_of(run_file, *overrides)
    assert len(problems) == 1, problems
    assert problems[0].startswith(f"{run_file}: ")
    for piece in pieces:
        assert piece in problems[0]


def test_warmup_and_decay_may_fill_the_run_exactly(tmp_path: Path) -> None:
    plan = load_plan(make_run(tmp_path), ["schedule.warmup=9 steps", "schedule.decay=3 steps"])
    assert isinstance(plan.schedule, WsdSection)
    assert plan.schedule.decay_start == plan.schedule.warmup.steps == 9


def test_files_that_are_missing_or_broken_are_all_reported_at_once(tmp_path: Path) -> None:
    run_file = make_run(tmp_path)
    (tmp_path / "deepspeed.json").write_text("{")
    (tmp_path / "model.json").unlink()
    problems = problems_of(run_file, "phases.0.mixture={}")
    assert len(problems) == 3
    assert f"{tmp_path / 'deepspeed.json'} is not valid JSON" in problems[0]
    assert f"{run_file}: model.config: cannot read {tmp_path / 'model.json'}" in problems[1]
    assert "mixture is empty" in problems[2]
    (tmp_path / "model.json").write_text("[]")
    assert f"{tmp_path / 'model.json'} must hold one JSON object, found a list" in problems_of(run_file)


def test_a_missing_run_file_is_refused(tmp_path: Path) -> None:
    (problem,) = problems_of(tmp_path / "none.toml")
    assert problem.startswith(f"run file: cannot read {tmp_path / 'none.toml'} (No such file or directory)")


def test_p12_a_rate_in_the_json_names_both_values_and_both_files(tmp_path: Path) -> None:
    config = deepspeed_json(scheduler={"type": "WarmupLR", "params": {}})
    config["optimizer"]["params"]["lr"] = 5e-7
    run_file = make_run(tmp_path, deepspeed=config)
    problems = problems_of(run_file)
    assert len(problems) == 2
    json_file = tmp_path / "deepspeed.json"
    assert f"{json_file}: `scheduler` is set" in problems[0]
    rates = f"{json_file}: `optimizer.params.lr` = 5e-07, but {run_file} sets schedule.peak_lr = 0.01"
    assert rates in problems[1]


def test_p11_the_rate_at_a_step_is_the_same_for_every_accumulation_and_world(tmp_path: Path) -> None:
    """Twenty optimizer steps at accumulation 1 and 4 on 1 and 2 ranks: one table of rates."""
    run_file = make_run(tmp_path, steps=20, batch_tokens=128)
    tables = set()
    for count, world in ((1, 1), (4, 1), (1, 2), (4, 2)):
        plan = load_plan(run_file, [f"batch.micro_batch_size={8 // (count * world)}"])
        assert check_world(plan, world, "a test") == []
        assert (
            count_micro_batches(plan.timeline.at(0).sequences, plan.run.batch.micro_batch_size, world)
            == count
        )
        tables.add(tuple(plan.schedule.lr(step) for step in range(plan.last_step)))
    (table,) = tables
    assert (len(table), table[0], max(table)) == (20, 0.0, 1e-2)


P30 = [
    # tokens, micro, world, asked accumulation: the accumulation, or a piece of the message
    (8192, 2, 32, None, 8),
    (8192, 2, 32, 8, 8),
    (8192, 2, 1, None, 256),
    (8192, 2, 3, None, "world sizes that do: 1, 2, 4, 8, 16, 32, 64, 128, 256 (or another batch.micro"),
    (8192, 2, 512, None, "world sizes that do: 1, 2, 4"),
    (
        8192,
        2,
        32,
        4,
        "make accumulation 8, but batch.gradient_accumulation_steps = 4; delete "
        "batch.gradient_accumulation_steps, or",
    ),
    (46080, 1, 7, None, "sizes that do: 1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 15, 16, 18, 20, 24, 30, ... ("),
    (8192, 2, 0, None, "world size 0 (from the launcher): expected 1 or more"),
]


@pytest.mark.parametrize(("tokens", "micro", "world", "asked", "expected"), P30)
def test_p30_the_batch_is_solved_for_or_refused_with_all_its_factors(
    tmp_path: Path, tokens: int, micro: int, world: int, asked: int | None, expected: int | str
) -> None:
    run_file = make_run(tmp_path, batch_tokens=tokens, micro_batch_size=micro)
    plan = load_plan(run_file, [] if asked is None else [f"batch.gradient_accumulation_steps={asked}"])
    problems = check_world(plan, world, "the launcher")
    if isinstance(expected, int):
        assert problems == []
        assert (
            count_micro_batches(plan.timeline.at(0).sequences, plan.run.batch.micro_batch_size, world)
            == expected
        )
        return
    (problem,) = problems
    assert expected in problem
    if world > 0:
        assert (
            f"{run_file}: global batch {tokens // 16:,} sequences ({tokens:,} tokens / seq_len 16), "
            f"micro-batch {micro}, world size {world} (from the launcher)" in problem
        )


def test_changed_fields_are_found_at_their_leaves() -> None:
    old = {"a": {"b": 1, "c": {"d": 2}}, "e": [1, 2], "gone": 1}
    new = {"a": {"b": 1, "c": {"d": 3}}, "e": [1, 3], "fresh": None}
    assert find_changed_fields(old, new) == {"a.c.d": (2, 3), "e": ([1, 2], [1, 3]), "gone": (1, None)}
    assert find_changed_fields(old, old) == {}


def test_numbers_of_an_identity_are_shown_with_their_unit() -> None:
    assert format_with_unit("schedule.length", 2000) == "2,000 steps"
    assert format_with_unit("schedule.warmup", 1) == "1 step"
    assert format_with_unit("batch.tokens", 524288) == "524,288 tokens"
    assert format_with_unit("seed", 2000) == "2000"
    assert format_with_unit("schedule.peak_lr", 0.5) == "0.5"
    assert format_with_unit("schedule.length", None) == "not there"
    assert format_with_unit("model.qk_norm", True) == "true"


@pytest.mark.parametrize("name", ["deepspeed.json", "model.json"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a":' * 100_000, "is not valid JSON: nested too deeply"),
        ('{"a": 1, "a": 2}', "gives the key `a` twice; keep one"),
        ('{"a": Infinity}', "holds Infinity, which is not JSON; write a number"),
        ('{"a": ' + "9" * 5000 + "}", "is not valid JSON: Exceeds the limit"),
        ('"x"', "must hold one JSON object, found a text"),
        ("3", "must hold one JSON object, found a number"),
    ],
    ids=["deep", "twice", "infinity", "long", "text", "number"],
)
def test_both_json_files_are_read_alike(tmp_path: Path, name: str, text: str, message: str) -> None:
    run_file = make_run(tmp_path)
    (tmp_path / name).write_text(text)
    (problem,) = problems_of(run_file)
    assert problem.startswith(f"{tmp_path / name} {message}")


def test_files_with_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    run_file = make_run(tmp_path)
    plain = load_plan(run_file)
    for name in ("run.toml", "deepspeed.json", "model.json"):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + (tmp_path / name).read_bytes())
    assert load_plan(run_file) == plain


def identity_changes(folder: Path, *overrides: str) -> set[str]:
    def identity(plan: Plan) -> dict[str, Any]:
        value: dict[str, Any] = compute_identity(plan, {})
        return value

    run_file = make_run(folder)
    return set(find_changed_fields(identity(load_plan(run_file)), identity(load_plan(run_file, overrides))))


@pytest.mark.parametrize(
    ("override", "changed"),
    [
        ("batch.micro_batch_size=4", set()),
        ("batch.gradient_accumulation_steps=4", set()),
        ("monitor.log_every=7", set()),
        ("checkpoint.every=7 steps", set()),
        ("schedule.length=12_0 steps", {"schedule.length", "schedule.decay"}),  # the decay is a share of it
        ("schedule.length=1536 tokens", set()),  # the same number of steps
        ("schedule.warmup=1.6e1%", set()),
        ("schedule.peak_lr=0.5", {"schedule.peak_lr"}),
        ("seed=8", {"seed"}),
        ("batch.tokens=256", {"batch.tokens"}),
        ("phases.0.seq_len=8", {"phases.main.seq_len", "chunk_tokens.text", "chunk_tokens.code"}),
        ("model.z_loss=off", {"model.z_loss"}),
        ("sources.code=elsewhere", set()),
    ],
)
def test_the_identity_is_what_fixes_the_trajectory(tmp_path: Path, override: str, changed: set[str]) -> None:
    assert identity_changes(tmp_path, override) == changed


def test_a_model_config_counts_by_its_content(tmp_path: Path) -> None:
    (tmp_path / "copy.json").write_text(json.dumps({"model_type": "llama"}))
    changes = identity_changes(tmp_path, f"model.config={tmp_path / 'copy.json'}")
    assert "model.config.vocab_size" in changes
    make_run(tmp_path)
    (tmp_path / "copy.json").write_text((tmp_path / "model.json").read_text())
    assert identity_changes(tmp_path, f"model.config={tmp_path / 'copy.json'}") == set()
