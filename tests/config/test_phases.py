"""Phases and ramps of a run file: the segments they come to, the rates, and what is refused."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds_pretrain.config.plan import Plan, check_world, load_plan, make_timeline
from ds_pretrain.config.schedule import lr_scaling_factor
from ds_pretrain.config.schema import BatchSection, WsdSection
from ds_pretrain.config.timeline import Segment, parse_duration
from ds_pretrain.core.errors import InputError
from ds_pretrain.training.preflight import draw_lr, find_problems, format_lr_summary, open_inputs
from tests.scenario import deepspeed_json, make_run, write_corpus
from tests.timelines import phase

PHASES = """
[[phases]]
name = "long"
start = "{start}"
seq_len = 32
mixture = {{ text = 1.0 }}
[validation]"""


def _plan(folder: Path, *changes: tuple[str, str], start: str = "8 steps", **options: Any) -> Plan:
    run_file = make_run(folder, **options)
    text = run_file.read_text().replace("[validation]", PHASES.format(start=start), 1)
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    run_file.write_text(text)
    return load_plan(run_file)


def _problems(folder: Path, *changes: tuple[str, str], start: str = "8 steps") -> str:
    with pytest.raises(InputError) as raised:
        _plan(folder, *changes, start=start)
    [problem] = raised.value.problems
    return problem.removeprefix(f"{folder / 'run.toml'}: ")


def test_a_ramp_and_phases_in_tokens_resolve_to_segments_that_follow_one_another() -> None:
    """1,024 tokens a step until 4,096 are read, then 2,048; the second phase from 10,000 tokens on."""
    zero, later = parse_duration("0 steps"), parse_duration("4096 tokens")
    stages = [phase("main", 16), phase("long", 64, parse_duration("10_000 tokens"))]
    timeline = make_timeline(stages, [(zero, 1024), (later, 2048)], parse_duration("20_000 tokens"))
    assert timeline.segments == (
        Segment("main", 0, 4, 16, 64, 0, 0, 0),
        Segment("main", 4, 7, 16, 128, 256, 4096, 256),
        Segment("long", 7, 12, 64, 32, 640, 10240, 0),
    )
    assert timeline.last_step == 12
    assert timeline.total_tokens == 20480
    assert [timeline.step_at(tokens) for tokens in (0, 1, 1024, 4097, 10_000, 10**9)] == [0, 1, 1, 5, 7, 12]
    assert timeline.step_at(Fraction(1, 2)) == 1


@pytest.mark.parametrize("seed", range(40))
def test_steps_tokens_and_samples_convert_as_a_walk_from_the_start_does(seed: int) -> None:
    random = np.random.default_rng(seed)
    sizes = np.cumsum(random.integers(1, 5, random.integers(1, 4))) * 64
    length = int(random.integers(60, 90))
    marks = np.sort(random.choice(np.arange(1, 50), 5, replace=False))
    ramp = [(parse_duration(f"{0 if i == 0 else marks[i - 1]} steps"), int(s)) for i, s in enumerate(sizes)]
    stages = [phase("a", 16), phase("b", 32, parse_duration(f"{marks[3]} steps"))]
    if seed % 2:
        stages.append(phase("c", 64, parse_duration(f"{marks[4]} steps")))
    timeline = make_timeline(stages, ramp, parse_duration(f"{length} steps"))
    tokens = samples = 0
    draws = {"a": 0, "b": 0, "c": 0}
    for step in range(length):
        segment = timeline.at(step)
        begun = [stage for stage in stages if stage.start is None or stage.start.amount <= step]
        size = [size for start, size in ramp if start.amount <= step][-1]
        assert (segment.phase, segment.seq_len) == (begun[-1].name, begun[-1].seq_len)
        assert segment.tokens_per_step == size
        assert (timeline.tokens_before(step), timeline.samples_before(step)) == (tokens, samples)
        assert timeline.trained_draws_before(step) == draws[segment.phase]
        assert timeline.step_at(tokens) == step
        tokens, samples = tokens + size, samples + size // segment.seq_len
        draws[segment.phase] += size // segment.seq_len
    assert (timeline.total_tokens, timeline.samples_before(length)) == (tokens, samples)


def test_p14_a_decay_may_be_tied_to_a_phase_or_given_in_tokens_under_a_ramp(tmp_path: Path) -> None:
    tied = _plan(tmp_path / "tied", ('decay = "25%"', 'decay = "long"'))
    assert isinstance(tied.schedule, WsdSection)
    assert (tied.schedule.decay_start, tied.schedule.length.steps) == (8, 12)
    ramp = ("[batch]\ntokens = 128", '[batch]\nramp = { "0" = 64, "6 steps" = 128 }\ntokens = 128')
    given = _plan(tmp_path / "given", ramp, ('decay = "25%"', 'decay = "300 tokens"'))
    assert isinstance(given.schedule, WsdSection)
    assert given.last_step - given.schedule.decay_start == 3  # 300 of the last 384 tokens, and no fewer
    warm = _plan(tmp_path / "warm", ramp, ('warmup = "2 steps"', 'warmup = "400 tokens"'))
    assert warm.schedule.warmup.steps == 7  # six steps of 64, and one of 128


@pytest.mark.parametrize(("rule", "factor"), [("none", 1.0), ("linear", 0.5), ("sqrt", 0.5**0.5)])
def test_the_rate_of_a_smaller_batch_follows_the_rule(tmp_path: Path, rule: Any, factor: float) -> None:
    assert lr_scaling_factor(rule, 64, 128) == pytest.approx(factor, rel=1e-12)
    ramp = f'[batch]\nlr_scaling = "{rule}"\nramp = {{ "0" = 64, "5 steps" = 128 }}\ntokens = 128'
    plan = _plan(tmp_path, ("[batch]\ntokens = 128", ramp))
    assert plan.lr(4, 4) == pytest.approx(1e-2 * factor, rel=1e-12)
    assert plan.lr(5, 5) == 1e-2


def test_a_phase_may_have_micro_batches_of_its_own_and_each_world_is_checked_in_each(tmp_path: Path) -> None:
    plan = _plan(tmp_path, ("seq_len = 32", "seq_len = 32\nmicro_batch_size = 1"))
    assert [plan.micro_batch_size(step) for step in (0, 7, 8, 11)] == [2, 2, 1, 1]
    assert check_world(plan, 4, "here") == []
    wide = _plan(tmp_path / "wide")  # 4 sequences of 32 are two micro-batches of 2: too few for four ranks
    [problem] = check_world(wide, 4, "here")
    assert "global batch 4 sequences (128 tokens / seq_len 32), micro-batch 2, world size 4" in problem


def test_what_is_wrong_with_a_world_is_said_once_with_the_steps_that_it_concerns(tmp_path: Path) -> None:
    ramp = ("tokens = 128", 'ramp = { "0" = 64, "4 steps" = 128 }\ntokens = 128')
    third = (
        '[[phases]]\nname = "late"\nstart = "10 steps"\nseq_len = 16\nmixture = { text = 1.0 }\n[validation]'
    )
    late = ("[validation]", third)
    plan = _plan(tmp_path, ramp, late)
    two, four = check_world(plan, 4, "here")  # main 4 then 8 sequences, long 4, late 8
    assert two.startswith(f"{plan.run_path}: main from step 0 to 4: global batch 4 sequences (64 tokens / ")
    assert four.startswith(f"{plan.run_path}: long from step 8 to 10: global batch 4 sequences (128 tokens /")
    six = check_world(plan, 3, "here")[1]
    assert "main from step 4 to 8 and late from step 10 to 12: global batch 8 sequences (128 tokens" in six
    alike = ("seq_len = 32", "seq_len = 32\nmicro_batch_size = 1")  # four micro-batches, as the other phases
    asked = _plan(
        tmp_path / "asked", ("tokens = 128", "gradient_accumulation_steps = 2\ntokens = 128"), late, alike
    )
    [problem] = check_world(asked, 1, "here")
    assert problem.count("batch.gradient_accumulation_steps = 2") == 1
    assert "main from step 0 to 8 and late from step 10 to 12: global batch 8 sequences" in problem
    assert problem.count("make accumulation 4") == 2
    one = _plan(tmp_path / "one", ("seq_len = 32", "seq_len = 128\nmicro_batch_size = 1"))
    assert "long from step 8 to 12: global batch 1 sequence (128 tokens" in check_world(one, 2, "here")[0]


REFUSED = [
    (
        (("seq_len = 32", "seq_len = 32\nmicro_batch_size = 3"),),
        "8 steps",
        "batch.tokens = 128 is 4 sequences of phases.long.seq_len = 32, which no number of ranks divides "
        "into whole micro-batches of phases.long.micro_batch_size = 3; nearest batch.tokens: 96 or 192",
    ),
    ((('name = "long"', 'name = "main"'),), "8 steps", "two phases are called main; give each a name"),
    (
        (('name = "main"\n', 'name = "main"\nstart = "2 steps"\n'),),
        "8 steps",
        'phases.main.start = "2 steps": the first phase starts with the run; delete it',
    ),
    (
        (('start = "8 steps"\n', ""),),
        "8 steps",
        'phases.long needs a start, like start = "430_000 steps"',
    ),
    (
        (),
        "12 steps",
        'phases.long.start = "12 steps" is step 12, and schedule.length = "12 steps" ends the run at step '
        "12: it has no steps; start it earlier, or extend the run",
    ),
    ((), "2_000 tokens", 'phases.long.start = "2_000 tokens" is step 16, and schedule.length = "12 steps"'),
    (
        (),
        "0 steps",
        'phases.long.start = "0 steps" is step 0, and phases.main, which is listed before it, begins at step '
        "0: the earlier one has no steps; list them in their order, each with a later start",
    ),
    (
        (("tokens = 128", 'ramp = { "0" = 64, "3 steps" = 192 }\ntokens = 128'),),
        "8 steps",
        'batch.ramp ends with 192 tokens from "3 steps" on, and batch.tokens is 128; the last of a ramp',
    ),
    (
        (("tokens = 128", 'ramp = { "0" = 256, "3 steps" = 128 }\ntokens = 128'),),
        "8 steps",
        "batch.ramp = 256, 128 tokens; a ramp has to rise",
    ),
    (
        (("tokens = 128", 'ramp = { "0" = 64, "20 steps" = 128 }\ntokens = 128'),),
        "8 steps",
        'batch.ramp."20 steps" is step 20, and schedule.length = "12 steps" ends the run at step 12: it has '
        "no steps; start it earlier, or extend the run",
    ),
    (
        (("tokens = 128", 'ramp = { "0" = 32, "5 steps" = 64, "100 tokens" = 128 }\ntokens = 128'),),
        "8 steps",
        'batch.ramp."100 tokens" is step 4, and batch.ramp."5 steps", which is listed before it, begins at '
        "step 5: the earlier one has no steps; list them in their order",
    ),
    (
        (
            ("tokens = 128", 'ramp = { "0" = 48, "9 steps" = 128 }\ntokens = 128'),
            ("micro_batch_size = 2", "micro_batch_size = 1"),
        ),
        "8 steps",
        'batch.ramp."0" = 48 is not a whole number of sequences of phases.long.seq_len = 32; nearest '
        'batch.ramp."0": 32 or 64',
    ),
    (
        (('decay = "25%"', 'decay = "aneal"'),),
        "8 steps",
        'schedule.decay = "aneal" is neither a phase (known: main, long) nor a duration, like "10%"',
    ),
]


@pytest.mark.parametrize(("changes", "start", "message"), REFUSED, ids=[row[2][:40] for row in REFUSED])
def test_what_phases_and_ramps_contradict_is_said_with_what_to_do(
    tmp_path: Path, changes: tuple[tuple[str, str], ...], start: str, message: str
) -> None:
    assert _problems(tmp_path, *changes, start=start).startswith(message)


def test_a_size_of_the_ramp_has_to_fit_only_the_phases_that_it_meets(tmp_path: Path) -> None:
    ramp = 'ramp = { "0" = 32, "8 steps" = 128 }\ntokens = 128'  # 32 are one sequence of `long`
    plan = _plan(tmp_path, ("tokens = 128", ramp))
    assert [(s.phase, s.sequences) for s in plan.timeline.segments] == [("main", 2), ("long", 4)]
    met = ("tokens = 128", ramp.replace("8 steps", "9 steps"))
    assert _problems(tmp_path / "met", met).startswith(
        'batch.ramp."0" = 32 is 1 sequence of phases.long.seq_len = 32, which no number of ranks divides '
        'into whole micro-batches of batch.micro_batch_size = 2; nearest batch.ramp."0": 64'
    )


def test_the_nearest_size_fits_every_phase_that_meets_it(tmp_path: Path) -> None:
    long = ("seq_len = 32", "seq_len = 24\nmicro_batch_size = 3")
    with pytest.raises(InputError) as raised:
        _plan(tmp_path, long)
    [problem] = raised.value.problems
    assert problem.endswith("nearest batch.tokens: 288")  # 9 micro-batches of 2 x 16, 4 of 3 x 24
    assert _plan(tmp_path / "fits", long, batch_tokens=288).last_step == 12


def test_all_starts_that_are_wrong_are_told_at_once(tmp_path: Path) -> None:
    third = '[[phases]]\nname = "late"\nseq_len = 16\nmixture = { text = 1.0 }\n[validation]'
    ramp = ("tokens = 128", 'ramp = { "0" = 32, "20 steps" = 128 }\ntokens = 128')
    with pytest.raises(InputError) as raised:
        _plan(tmp_path, ramp, ("[validation]", third), start="0 steps")
    keys = [
        "phases.late needs a start",
        'phases.long.start = "0 steps" is',
        'batch.ramp."20 steps" is step 20',
    ]
    assert len(raised.value.problems) == 3
    for key, problem in zip(keys, raised.value.problems, strict=True):
        assert key in problem


def test_a_timeline_counts_the_tokens_of_each_size() -> None:
    zero, later, length = (parse_duration(f"{steps} steps") for steps in (0, 4, 10))
    stages = [phase("main", 16), phase("long", 64, later)]
    assert make_timeline(stages, [(zero, 32), (later, 64)], length).total_tokens == 4 * 32 + 6 * 64


@pytest.mark.parametrize(
    ("ramp", "message"),
    [
        ("4M", '"4M" is not a ramp; expected { "0" = "1M", "10B tokens" = "2M" }'),
        ({}, "is not a ramp"),
        ({"0": "1K", "5 min": "2K"}, '"5 min" is in seconds; expected steps or tokens'),
        ({"0": "1K", "50%": "2K"}, '"50%" is in percent; expected steps or tokens'),
        ({"5 steps": "1K"}, 'a ramp begins with "0"; its first key is "5 steps"'),
        ({"0": "1K", "soon": "2K"}, '"soon" is not a duration'),
        ({"0": "many"}, '"many" is not a batch size'),
    ],
)
def test_a_ramp_that_cannot_be_read_is_refused(ramp: Any, message: str) -> None:
    with pytest.raises(ValueError) as raised:
        BatchSection.model_validate({"tokens": "4K", "micro_batch_size": 1, "ramp": ramp})
    assert message in str(raised.value)


@pytest.mark.parametrize(("rule", "factor"), [("linear", 0.5), ("sqrt", 0.707)])
def test_the_rate_of_the_summary_is_that_of_the_ramps_rule_with_its_factor_at_each_change(
    tmp_path: Path, rule: str, factor: float
) -> None:
    ramp = f'lr_scaling = "{rule}"\nramp = {{ "0" = 64, "4 steps" = 128 }}\ntokens = 128'
    plan = _plan(tmp_path, ("tokens = 128", ramp))
    corners, words, *_ = format_lr_summary(plan)
    assert corners.startswith(f"lr         start 0: 0, warmup end 2: {1e-2 * factor:.3g}, middle 5: 0.01, ")
    assert words == (
        f"           batch.lr_scaling {rule}: x {factor:.3g} from step 0 (64 tokens per step, lr 0), x 1 "
        f"from "
        "step 4 (128 tokens per step, lr 0.01)"
    )


def test_the_peak_may_be_meant_for_another_batch_than_the_last(tmp_path: Path) -> None:
    """So that a ramp that is extended while the run goes on leaves the rates of the past as they were."""
    ramp = 'lr_scaling = "sqrt"\nlr_reference_tokens = 64\nramp = { "0" = 64, "4 steps" = 128 }\ntokens = 128'
    plan = _plan(tmp_path, ("tokens = 128", ramp))
    assert [plan.lr(step, 3) for step in (3, 4)] == [1e-2, 1e-2 * 2**0.5]
    assert list(format_lr_summary(plan))[1] == (
        "           batch.lr_scaling sqrt to 64 tokens: x 1 from step 0 (64 tokens per step, lr 0), x 1.41 "
        "from step 4 (128 tokens per step, lr 0.0141)"
    )
    whole = _plan(
        tmp_path / "whole", ("tokens = 128", 'lr_scaling = "linear"\nlr_reference_tokens = 64\ntokens = 128')
    )
    assert whole.lr(3, 3) == 2e-2
    assert "x 2 from step 0 (128 tokens per step, lr 0)" in list(format_lr_summary(whole))[1]
    assert _problems(tmp_path / "no", ("tokens = 128", "lr_reference_tokens = 64\ntokens = 128")) == (
        "batch.lr_reference_tokens = 64 is the batch that schedule.peak_lr is meant for, and without a "
        "rule the rate is "
        'the same at any: set batch.lr_scaling = "linear" or "sqrt", or delete batch.lr_reference_tokens'
    )


def test_a_ramp_without_a_rule_changes_no_rate_and_a_warmup_may_fill_the_run(tmp_path: Path) -> None:
    ramp = 'ramp = { "0" = 64, "4 steps" = 128 }\ntokens = 128'
    lines = list(format_lr_summary(_plan(tmp_path, ("tokens = 128", ramp))))
    assert "warmup end 2: 0.01" in lines[0]
    assert not any("lr_scaling" in line for line in lines)
    whole = [
        'schedule={ kind = "cosine", length = "12 steps", peak_lr = 1.0, warmup = "100%" }',
        "batch.lr_scaling=sqrt",
    ]
    first = next(format_lr_summary(load_plan(make_run(tmp_path / "whole"), whole)))
    assert first == "lr         start 0: 0, warmup end 12: 1, middle 12: 1, last 11: 0.917"


def test_the_rate_is_drawn_with_the_phases_below_it(tmp_path: Path) -> None:
    plan = _plan(tmp_path, ('decay = "25%"', 'decay = "long"'), start="300 steps", steps=400)
    lines = draw_lr(plan)
    assert lines[0].startswith("     0.01 ")
    assert lines[0].count("-") > 40
    assert lines[-2].startswith("        0 -")
    assert lines[-1].index("|long") > lines[-1].index("|main") + 50
    assert draw_lr(load_plan(make_run(tmp_path / "one")))[-1].strip() == "|main-------"


def test_learned_positions_must_reach_every_phase_and_held_out_text_too(tmp_path: Path) -> None:
    gpt2 = {
        "model_type": "gpt2",
        "vocab_size": 257,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 16,
    }
    plan = _plan(tmp_path, ("qk_norm = true\n", ""), model=gpt2)
    [problem] = find_problems(plan, open_inputs(plan), 1, "here")
    assert "phases.long.seq_len = 32 is longer than n_positions = 16" in problem
    (tmp_path / "run" / "short").mkdir(parents=True)
    write_corpus(tmp_path / "run" / "short" / "held_out", 2, num_documents=1)
    short = ('held_out" }', 'short/held_out" }')
    plan = _plan(tmp_path / "run", short, ("seq_len = 32", "seq_len = 64"))
    assert any(
        "fewer than one sample of 64 + 1" in p for p in find_problems(plan, open_inputs(plan), 1, "here")
    )


def test_p30_no_size_of_the_json_fits_what_a_ramp_is_not(tmp_path: Path) -> None:
    """Steps have 8 sequences, and 4 in the second phase."""
    plan = _plan(tmp_path, deepspeed=deepspeed_json(train_batch_size=8))
    assert find_problems(plan, open_inputs(plan), 1, "here") == []
    with pytest.raises(InputError) as raised:
        _plan(tmp_path / "other", deepspeed=deepspeed_json(train_batch_size=4))
    assert "`train_batch_size` = 4, but" in str(raised.value)
    assert (
        "gives 8 (batch.tokens / seq_len in the first step, and others later: no number fits them all); "
        "delete it from the JSON: the run file owns the batch"
    ) in str(raised.value)


def test_p30_a_size_of_the_json_is_held_against_the_first_step_whatever_batch_the_first_phase_meets(
    tmp_path: Path,
) -> None:
    """The ramp reaches batch.tokens in the second phase: the first has 4 sequences of 16 throughout."""
    ramp = ("tokens = 128", 'ramp = { "0" = 64, "8 steps" = 128 }\ntokens = 128')
    plan = _plan(tmp_path, ramp, deepspeed=deepspeed_json(train_batch_size=4))
    assert find_problems(plan, open_inputs(plan), 1, "here") == []
    with pytest.raises(InputError, match="gives 4 "):
        _plan(tmp_path / "other", ramp, deepspeed=deepspeed_json(train_batch_size=8))
