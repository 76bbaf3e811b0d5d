"""Durations with their units, and exact conversion between steps, samples and tokens."""

from fractions import Fraction

import pytest

from ds_pretrain.config.plan import make_timeline
from ds_pretrain.config.schema import CheckpointSection
from ds_pretrain.config.timeline import (
    Multiples,
    Segment,
    Timeline,
    Unit,
    build_multiples,
    convert_to_steps,
    count_micro_batches,
    find_step_after,
    find_step_before,
    list_valid_world_sizes,
    parse_batch_tokens,
    parse_duration,
)
from tests.timelines import phase, single_phase

DURATIONS: dict[str, tuple[Fraction | int, Unit]] = {
    "1 step": (1, "steps"),
    "2000 steps": (2000, "steps"),
    "480_000 steps": (480_000, "steps"),
    "480,000 steps": (480_000, "steps"),
    "480K steps": (480_000, "steps"),
    "0 steps": (0, "steps"),
    "2e3 steps": (2000, "steps"),
    "1 token": (1, "tokens"),
    "10B tokens": (10**10, "tokens"),
    "0.5 M tokens": (500_000, "tokens"),
    "1.4T tokens": (14 * 10**11, "tokens"),
    "15T tokens": (15 * 10**12, "tokens"),
    "2.5K tokens": (2500, "tokens"),
    "90 s": (90, "seconds"),
    "90sec": (90, "seconds"),
    "15 min": (900, "seconds"),
    "1.5 h": (5400, "seconds"),
    "10%": (10, "percent"),
    "12.5 %": (Fraction(25, 2), "percent"),
    "100%": (100, "percent"),
    "  3 steps ": (3, "steps"),
}


@pytest.mark.parametrize(("text", "expected"), DURATIONS.items(), ids=DURATIONS)
def test_a_duration_is_read_exactly(text: str, expected: tuple[Fraction | int, Unit]) -> None:
    duration = parse_duration(text)
    assert (duration.amount, duration.unit) == expected
    assert str(duration) == text.strip()


BAD_DURATIONS = {
    "": "is not a duration; write a number with its unit, like",
    "2000": "is not a duration; write a number with its unit, like",
    "steps": "is not a duration",
    "2000 epochs": "is not a duration",
    "-1 steps": "is not a duration",
    "1e400 steps": "is not a duration",
    "10G tokens": "is not a duration",
    "10b tokens": "is not a duration",
    "nan steps": "is not a duration",
    "1.5 steps": '"1.5 steps" is not a whole number of steps',
    "0.0001K tokens": "is not a whole number of tokens",
    "1000000001 steps": '"1000000001 steps" is more than 1,000,000,000 steps; write a shorter duration',
    "1000001T tokens": "is more than 1,000,000,000,000,000,000 tokens; write a shorter duration",
    "1e99 h": "is more than 1,000,000,000 seconds; write a shorter duration",
    "101%": '"101%" is more than the whole run',
}


@pytest.mark.parametrize(("text", "message"), BAD_DURATIONS.items(), ids=BAD_DURATIONS)
def test_what_is_no_duration_is_refused_with_an_example(text: str, message: str) -> None:
    with pytest.raises(ValueError) as raised:
        parse_duration(text)
    assert message in str(raised.value)


def test_wall_clock_durations_are_seconds() -> None:
    assert parse_duration("1.5 min").seconds == 90.0


BATCHES = {
    "524_288": 524_288,
    "512K": 524_288,
    "4M": 4_194_304,
    "0.5M": 524_288,
    "1G": 1 << 30,
    "4M tokens": 4_194_304,
    "1": 1,
}


@pytest.mark.parametrize(("text", "tokens"), BATCHES.items())
def test_batch_sizes_are_binary(text: str, tokens: int) -> None:
    assert parse_batch_tokens(text) == tokens
    assert parse_batch_tokens(tokens) == tokens


@pytest.mark.parametrize("value", ["", "0", 0, -4, "4T", "4MB", "1.5", "many", "512 sequences", True, [4]])
def test_what_is_no_batch_size_is_refused_with_an_example(value: object) -> None:
    with pytest.raises(
        ValueError, match='is not a batch size in tokens; write it like 524_288, "512K" or "4M"'
    ):
        parse_batch_tokens(value)  # type: ignore[arg-type]


def test_a_batch_beyond_all_reason_is_refused() -> None:
    assert parse_batch_tokens(10**12) == 10**12
    with pytest.raises(ValueError, match=r"is more than 1,000,000,000,000 tokens; write a smaller batch"):
        parse_batch_tokens("1e99")


def test_conversions_are_exact_at_fifteen_trillion_tokens() -> None:
    timeline = single_phase("main", 4096, 1023, parse_duration("15T tokens"))
    per_step = 4096 * 1023
    assert timeline.last_step == -(-15 * 10**12 // per_step)
    assert timeline.total_tokens == timeline.last_step * per_step
    assert 0 <= timeline.total_tokens - 15 * 10**12 < per_step
    for step in (0, 1, 1_000_003, timeline.last_step - 1, timeline.last_step):
        assert timeline.tokens_before(step) == step * per_step
        assert timeline.samples_before(step) == step * 1023
    assert timeline.trained_draws_before(1_000_003) == 1_000_003 * 1023


def test_a_fraction_of_a_step_counts_as_one() -> None:
    assert convert_to_steps(parse_duration("1000 tokens"), 1000) == 1
    assert convert_to_steps(parse_duration("1001 tokens"), 1000) == 2
    assert convert_to_steps(parse_duration("10%"), 1000, of_steps=101) == 11
    assert convert_to_steps(parse_duration("12.5%"), 1000, of_steps=80) == 10
    assert convert_to_steps(parse_duration("0%"), 1000, of_steps=80) == 0


@pytest.mark.parametrize("text", ["10 min", "10%"])
def test_what_cannot_be_steps_says_so(text: str) -> None:
    with pytest.raises(ValueError, match="cannot be turned into steps; write steps or tokens"):
        convert_to_steps(parse_duration(text), 1000)


TWO_BATCHES = Timeline(
    (
        Segment("main", 0, 10, seq_len=4, sequences=2, first_sample=0, first_token=0, first_draw=0),
        Segment("main", 10, 15, seq_len=4, sequences=6, first_sample=20, first_token=80, first_draw=20),
        Segment("long", 15, 17, seq_len=8, sequences=3, first_sample=50, first_token=200, first_draw=0),
    )
)


def test_segments_add_up_to_what_a_walk_over_the_steps_gives() -> None:
    samples = tokens = 0
    draws = {"main": 0, "long": 0}
    for step in range(TWO_BATCHES.last_step):
        segment = TWO_BATCHES.at(step)
        assert segment.first_step <= step < segment.end_step
        assert TWO_BATCHES.samples_before(step) == samples
        assert TWO_BATCHES.tokens_before(step) == tokens
        assert TWO_BATCHES.trained_draws_before(step) == draws[segment.phase]
        samples += segment.sequences
        tokens += segment.tokens_per_step
        draws[segment.phase] += segment.sequences
    assert (TWO_BATCHES.samples_before(17), TWO_BATCHES.total_tokens) == (samples, tokens)


@pytest.mark.parametrize("step", [-1, 17, 1000])
def test_steps_outside_the_run_are_refused(step: int) -> None:
    with pytest.raises(ValueError, match=f"step {step} lies outside the run's 17 steps"):
        TWO_BATCHES.at(step)


def test_no_tokens_are_known_past_the_end() -> None:
    with pytest.raises(ValueError, match="lies outside"):
        TWO_BATCHES.tokens_before(18)


@pytest.mark.parametrize(
    ("sequences", "micro", "world", "expected"),
    [
        (512, 2, 32, 8),
        (8, 8, 1, 1),
        (8, 1, 8, 1),
        (8, 4, 4, None),  # 16 sequences a round are more than the batch
        (12, 2, 4, None),
        (9, 2, 1, None),
        (1024, 4, 3, None),
    ],
)
def test_p30_accumulation_is_solved_for_or_there_is_none(
    sequences: int, micro: int, world: int, expected: int | None
) -> None:
    assert count_micro_batches(sequences, micro, world) == expected


def test_p30_the_worlds_that_divide_a_batch_are_those_with_an_accumulation() -> None:
    for sequences in range(1, 40):
        for micro in range(1, 8):
            solvable = [w for w in range(1, 41) if count_micro_batches(sequences, micro, w) is not None]
            assert list_valid_world_sizes(sequences, micro) == solvable


def test_p30_the_worlds_of_the_largest_batch_are_found_without_trying_each_number() -> None:
    worlds = list_valid_world_sizes(10**12, 1)
    assert len(worlds) == 13 * 13  # 2^a 5^b, a and b from 0 to 12
    assert worlds == sorted(w for w in (2**a * 5**b for a in range(13) for b in range(13)))


# Steps of 64 tokens, from step 10 on of 128, from step 20 on (another phase) of 128 in longer sequences.
BATCHES = [(parse_duration("0 steps"), 64), (parse_duration("10 steps"), 128)]
PHASES = [phase("main", 16), phase("long", 64, parse_duration("20 steps"))]
GROWING = make_timeline(PHASES, BATCHES, parse_duration("40 steps"))


@pytest.mark.parametrize(
    ("step", "duration", "after", "before"),
    [
        (10, "3 steps", 13, 7),
        (10, "256 tokens", 12, 6),
        (10, "257 tokens", 13, 5),
        (9, "192 tokens", 11, 6),  # one step of 64 and one of 128
        (11, "192 tokens", 13, 9),
        (20, "0 steps", 20, 20),
        (20, "0 tokens", 20, 20),
        (1, "9 steps", 10, 0),
        (1, "1000 tokens", 14, 0),
        (39, "9 steps", 48, 30),
        (39, "1000 tokens", 47, 31),
        (45, "9 steps", 54, 36),  # behind the end, as in a run that was shortened
        (45, "256 tokens", 47, 43),
        (45, "0 tokens", 45, 45),
        (45, "900 tokens", 53, 37),
    ],
)
def test_a_span_counts_the_batches_that_lie_there(step: int, duration: str, after: int, before: int) -> None:
    assert find_step_after(GROWING, step, parse_duration(duration)) == after
    assert find_step_before(GROWING, step, parse_duration(duration)) == before


def test_a_span_holds_what_was_asked_for_and_less_than_a_step_more() -> None:
    for step in range(41):
        for tokens in range(0, 1300, 37):
            wanted, now = parse_duration(f"{tokens} tokens"), GROWING.tokens_before(step)
            end, start = find_step_after(GROWING, step, wanted), find_step_before(GROWING, step, wanted)
            if end <= 40:
                assert GROWING.tokens_before(end) - now >= tokens
                assert end == step or GROWING.tokens_before(end - 1) - now < tokens
            else:
                assert 128 * (end - 41) < now + tokens - GROWING.total_tokens <= 128 * (end - 40)
            assert start == 0 or now - GROWING.tokens_before(start) >= tokens
            assert start == step or now - GROWING.tokens_before(start + 1) < tokens


@pytest.mark.parametrize("every", ["7 steps", "100 tokens", "640 tokens", "5000 tokens"])
def test_multiples_are_counted_over_every_batch_that_there_was(every: str) -> None:
    duration = parse_duration(every)
    counted = build_multiples(duration, GROWING)
    for step in range(41):
        done = step if duration.unit == "steps" else GROWING.tokens_before(step)
        assert counted.before(step) == done // int(duration.amount)


def test_multiples_of_steps_need_no_timeline() -> None:
    assert build_multiples(parse_duration("20 steps"), GROWING) == Multiples(20, ((0, 0, 1),))


ALIKE = single_phase("main", 16, 4, parse_duration("20 steps"))  # 64 tokens a step


def _due(*texts: str) -> list[int]:
    section = CheckpointSection(every=tuple(map(parse_duration, texts)))
    return [step for step in range(1, 21) if section.is_due(step, ALIKE)]


@pytest.mark.parametrize(
    ("texts", "steps"),
    [
        (("6 steps",), [6, 12, 18]),
        (("1 step",), list(range(1, 21))),
        (("320 tokens",), [5, 10, 15, 20]),
        (("300 tokens",), [5, 10, 15, 19]),  # multiples between steps: the step that passes them
        (("10 tokens",), list(range(1, 21))),  # several within a step: one checkpoint
        (("8 steps", "320 tokens"), [5, 8, 10, 15, 16, 20]),
        (("15 min",), []),
        (("100 steps",), []),
    ],
)
def test_checkpoints_by_count_come_at_each_multiple(texts: tuple[str, ...], steps: list[int]) -> None:
    assert _due(*texts) == steps


def test_the_last_step_of_a_phase_is_due_and_that_of_the_run_is_not_for_this() -> None:
    segments = (Segment("main", 0, 4, 16, 4, 0, 0, 0), Segment("main", 4, 8, 16, 8, 16, 256, 16))
    timeline = Timeline((*segments, Segment("anneal", 8, 12, 16, 8, 48, 768, 0)))
    assert [step for step in range(1, 13) if timeline.ends_phase(step)] == [8]
