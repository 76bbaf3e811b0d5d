"""Durations laid onto a run whose batch grows: whole batches, and never less than what was asked for."""

import pytest

from ds_pretrain.config.timeline import (
    Multiples,
    Stage,
    Timeline,
    make_timeline,
    multiples,
    parse_duration,
    step_after,
    step_before,
)

# Steps of 64 tokens, from step 10 on of 128, from step 20 on (another phase) of 128 in longer sequences.
BATCHES = [(parse_duration("0 steps"), 64), (parse_duration("10 steps"), 128)]
STAGES = [Stage("main", 16), Stage("long", 64, parse_duration("20 steps"))]
TIMELINE: Timeline = make_timeline(STAGES, BATCHES, parse_duration("40 steps"))


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
    assert step_after(TIMELINE, step, parse_duration(duration)) == after
    assert step_before(TIMELINE, step, parse_duration(duration)) == before


def test_a_span_holds_what_was_asked_for_and_less_than_a_step_more() -> None:
    for step in range(41):
        for tokens in range(0, 1300, 37):
            wanted, now = parse_duration(f"{tokens} tokens"), TIMELINE.tokens_before(step)
            end, start = step_after(TIMELINE, step, wanted), step_before(TIMELINE, step, wanted)
            if end <= 40:
                assert TIMELINE.tokens_before(end) - now >= tokens
                assert end == step or TIMELINE.tokens_before(end - 1) - now < tokens
            else:
                assert 128 * (end - 41) < now + tokens - TIMELINE.total_tokens <= 128 * (end - 40)
            assert start == 0 or now - TIMELINE.tokens_before(start) >= tokens
            assert start == step or now - TIMELINE.tokens_before(start + 1) < tokens


@pytest.mark.parametrize("every", ["7 steps", "100 tokens", "640 tokens", "5000 tokens"])
def test_multiples_are_counted_over_every_batch_that_there_was(every: str) -> None:
    duration = parse_duration(every)
    counted = multiples(duration, TIMELINE)
    for step in range(41):
        done = step if duration.unit == "steps" else TIMELINE.tokens_before(step)
        assert counted.before(step) == done // int(duration.amount)


def test_multiples_of_steps_need_no_timeline() -> None:
    assert multiples(parse_duration("20 steps"), TIMELINE) == Multiples(20, ((0, 0, 1),))
