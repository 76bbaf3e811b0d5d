"""Durations in the units people use, and the timeline that maps steps to phases, tokens and draws.

Durations carry their unit ("2000 steps", "10B tokens", "15 min", "10%"). Phases resolve to segments:
intervals of steps with one sequence length and one batch; then steps, samples and tokens convert exactly.

Token amounts are decimal (10B = 10^10). Batch sizes alone read K and M as 2^10 and 2^20, as the field writes
them: a "4M" batch is 1,024 sequences of 4,096 tokens.
"""

import re
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from math import ceil, isqrt
from typing import Literal

from ds_pretrain.core.jsonl import show_value

Unit = Literal["steps", "tokens", "seconds", "percent"]

_UNITS: dict[str, tuple[Unit, int]] = {
    "step": ("steps", 1),
    "steps": ("steps", 1),
    "token": ("tokens", 1),
    "tokens": ("tokens", 1),
    "s": ("seconds", 1),
    "sec": ("seconds", 1),
    "min": ("seconds", 60),
    "h": ("seconds", 3600),
    "%": ("percent", 1),
}
_DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_BINARY = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_NUMBER = r"(?P<number>\d[\d_,]*(?:\.\d+)?(?:[eE]\d{1,2})?)"
_DURATION = re.compile(rf"\s*{_NUMBER}\s*(?P<scale>[KMBT]?)\s*(?P<unit>steps?|tokens?|sec|s|min|h|%)\s*")
_BATCH = re.compile(rf"\s*{_NUMBER}\s*(?P<scale>[KMG]?)(?:\s*tokens)?\s*")
# Above these a number is a slip of the pen: no run has been a millionth as long.
MOST: dict[Unit, int] = {"steps": 10**9, "tokens": 10**18, "seconds": 10**9, "percent": 100}
MOST_BATCH_TOKENS = 10**12
_EXAMPLES = '"2000 steps", "10B tokens", "15 min" or "10%"'


@dataclass(frozen=True)
class Duration:
    """An exact amount of steps, tokens, seconds or percent (of the run's length)."""

    amount: Fraction
    unit: Unit
    text: str

    def __str__(self) -> str:
        return self.text

    @property
    def seconds(self) -> float:
        """Seconds of a wall-clock duration."""
        assert self.unit == "seconds"
        return float(self.amount)

    @property
    def steps(self) -> int:
        """Steps of a duration that counts them."""
        assert self.unit == "steps"
        return int(self.amount)


def steps(number: int) -> Duration:
    """So many steps."""
    return Duration(Fraction(number), "steps", f"{number} steps")


def parse_duration(text: str) -> Duration:
    """Read a duration. Raises ValueError that says what was found and how to write it."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{show_value(text)} is not a duration; write a number with its unit, like {_EXAMPLES}"
        )
    unit, factor = _UNITS[match["unit"]]
    amount = _parse_number(match["number"]) * _DECIMAL[match["scale"]] * factor
    if unit in ("steps", "tokens") and amount.denominator != 1:
        raise ValueError(f"{show_value(text)} is not a whole number of {unit}")
    if unit == "percent" and amount > 100:
        raise ValueError(f"{show_value(text)} is more than the whole run")
    if amount > MOST[unit]:
        raise ValueError(f"{show_value(text)} is more than {MOST[unit]:,} {unit}; write a shorter duration")
    return Duration(amount, unit, text.strip())


def parse_batch_tokens(value: str | int) -> int:
    """Tokens of a global batch: an integer, or text where K and M are binary ("4M" is 4,194,304)."""
    match = None if isinstance(value, bool) else _BATCH.fullmatch(str(value))
    amount = _parse_number(match["number"]) * _BINARY[match["scale"]] if match else Fraction(0)
    if match is None or amount.denominator != 1 or amount == 0:
        raise ValueError(
            f'{show_value(value)} is not a batch size in tokens; write it like 524_288, "512K" or "4M"'
        )
    if amount > MOST_BATCH_TOKENS:
        raise ValueError(
            f"{show_value(value)} is more than {MOST_BATCH_TOKENS:,} tokens; write a smaller batch"
        )
    return int(amount)


@dataclass(frozen=True)
class Segment:
    """An interval of steps [first_step, end_step) that read alike."""

    phase: str
    first_step: int
    end_step: int
    seq_len: int
    sequences: int  # per step, over all ranks
    first_sample: int  # samples of the run read before it
    first_token: int  # tokens of the run read before it
    first_draw: int  # samples of the same phase read before it

    @property
    def tokens_per_step(self) -> int:
        return self.sequences * self.seq_len


@dataclass(frozen=True)
class Timeline:
    """The whole run in segments, in order, without gaps."""

    segments: tuple[Segment, ...]

    @property
    def last_step(self) -> int:
        """The number of optimizer steps of the whole run."""
        return self.segments[-1].end_step

    @property
    def total_tokens(self) -> int:
        return self.tokens_before(self.last_step)

    def at(self, step: int) -> Segment:
        """The segment of the update that follows `step` finished steps."""
        for segment in self.segments:
            if segment.first_step <= step < segment.end_step:
                return segment
        raise ValueError(f"step {step} lies outside the run's {self.last_step} steps")

    def samples_before(self, step: int) -> int:
        """Samples that the first `step` steps read."""
        segment = self._touching(step)
        return segment.first_sample + (step - segment.first_step) * segment.sequences

    def tokens_before(self, step: int) -> int:
        """Tokens that the first `step` steps read."""
        segment = self._touching(step)
        return segment.first_token + (step - segment.first_step) * segment.tokens_per_step

    def step_at(self, tokens: Fraction | int) -> int:
        """The first step boundary at which so many tokens have been read; the last one if there is none."""
        for segment in self.segments:
            missing = tokens - segment.first_token
            step = segment.first_step + count_steps(missing, segment.tokens_per_step)
            if step <= segment.end_step:
                return step
        return self.last_step

    def steps_of(self, duration: Duration) -> int:
        """A duration from the run's beginning, in steps."""
        if duration.unit == "tokens":
            return self.step_at(duration.amount)
        return convert_to_steps(duration, 1, self.last_step)

    def ends_phase(self, step: int) -> bool:
        """True if the step after `step` finished ones is the first of another phase."""
        return step < self.last_step and self.at(step).phase != self.at(step - 1).phase

    def phase_start(self, phase: str) -> int:
        """The first step of a phase. There must be one of that name."""
        return next(s.first_step for s in self.segments if s.phase == phase)

    def seq_len_of(self, phase: str) -> int:
        """Tokens of a sample of a phase. There must be one of that name."""
        return next(s.seq_len for s in self.segments if s.phase == phase)

    def trained_draws_before(self, step: int) -> int:
        """Samples of the current phase that the steps before `step` trained on."""
        segment = self.at(step)
        return segment.first_draw + (step - segment.first_step) * segment.sequences

    def trained_by_phase(self, step: int) -> dict[str, int]:
        """Samples of each phase begun so far that the first `step` steps trained on."""
        trained: dict[str, int] = {}
        for segment in self.segments:
            steps = min(step, segment.end_step) - segment.first_step
            if steps >= 0:
                trained[segment.phase] = segment.first_draw + steps * segment.sequences
        return trained

    def _touching(self, step: int) -> Segment:
        return self.segments[-1] if step == self.last_step else self.at(step)


def count_steps(tokens: Fraction | int, tokens_per_step: int) -> int:
    """Steps that read so many tokens; a part of a step counts as one."""
    return max(0, ceil(Fraction(tokens) / tokens_per_step))


def convert_to_steps(duration: Duration, tokens_per_step: int, of_steps: int | None = None) -> int:
    """A duration in whole steps; a part of a step counts as one. Percent is of the run's `of_steps`."""
    if duration.unit == "steps":
        return int(duration.amount)
    if duration.unit == "tokens":
        return ceil(duration.amount / tokens_per_step)
    if duration.unit == "percent" and of_steps is not None:
        return ceil(of_steps * duration.amount / 100)
    raise ValueError(f'"{duration}" cannot be turned into steps; write steps or tokens')


def count_micro_batches(sequences: int, micro_batch_size: int, world_size: int) -> int | None:
    """Micro-batches per rank and step, or None if the world does not divide the batch into whole ones."""
    count, remainder = divmod(sequences, micro_batch_size * world_size)
    return count if remainder == 0 else None


def list_valid_world_sizes(sequences: int, micro_batch_size: int) -> list[int]:
    """Every number of ranks that splits the global batch into whole micro-batches, ascending."""
    micro_batches, remainder = divmod(sequences, micro_batch_size)
    if remainder:
        return []
    small = [w for w in range(1, isqrt(micro_batches) + 1) if micro_batches % w == 0]
    return sorted({*small, *(micro_batches // w for w in small)})


# Durations laid onto a run. Behind its end, where a step of a shortened run may lie, its last batch counts.


def find_step_after(timeline: Timeline, step: int, duration: Duration) -> int:
    """The first step by which steps or tokens of a duration are done after `step`."""
    if duration.unit == "steps":
        return step + int(duration.amount)
    wanted = _count_tokens_before(timeline, step) + duration.amount
    if (missing := wanted - timeline.total_tokens) > 0:
        return timeline.last_step + ceil(missing / timeline.segments[-1].tokens_per_step)
    return max(step, timeline.step_at(wanted))


def find_step_before(timeline: Timeline, step: int, duration: Duration) -> int:
    """The last step from which steps or tokens of a duration were done up to `step`; at least 0."""
    if duration.unit == "steps":
        return max(0, step - int(duration.amount))
    wanted = _count_tokens_before(timeline, step) - duration.amount
    if wanted <= 0:
        return 0
    if (more := wanted - timeline.total_tokens) > 0:
        return timeline.last_step + int(more // timeline.segments[-1].tokens_per_step)
    first = timeline.step_at(wanted)
    return first - (timeline.tokens_before(first) > wanted)


def _count_tokens_before(timeline: Timeline, step: int) -> int:
    beyond = max(0, step - timeline.last_step)
    return timeline.tokens_before(step - beyond) + beyond * timeline.segments[-1].tokens_per_step


def is_passed(every: Duration, step: int, timeline: Timeline) -> bool:
    """True if `step` finished steps, or the tokens they read, pass a multiple of a duration."""
    done = timeline.tokens_before if every.unit == "tokens" else int
    return done(step) // every.amount > done(step - 1) // every.amount


@dataclass(frozen=True)
class Multiples:
    """The multiples of an amount that a run comes by; plain numbers, so that another process can be told."""

    every: int
    pieces: tuple[tuple[int, int, int], ...]  # from which step on, the amount before it and that of a step

    def before(self, step: int) -> int:
        """The number of multiples that the first `step` steps reach."""
        first, amount, of_step = self.pieces[bisect_right(self.pieces, step, key=lambda p: p[0]) - 1]
        return (amount + (step - first) * of_step) // self.every


def build_multiples(every: Duration, timeline: Timeline) -> Multiples:
    """Build the multiples of a duration in steps or tokens."""
    if every.unit == "steps":
        return Multiples(int(every.amount), ((0, 0, 1),))
    pieces = ((s.first_step, s.first_token, s.tokens_per_step) for s in timeline.segments)
    return Multiples(int(every.amount), tuple(pieces))


# What a source is cut into, so that phases of any sequence length read it on.


def compute_chunk_lengths(
    seq_lens: Mapping[str, int],
    weights: Mapping[str, Mapping[str, float]],
    declared: Mapping[str, int | None],
) -> dict[str, int]:
    """Tokens of a chunk of each source that a phase draws from: as declared, or its longest samples.

    `seq_lens` and `weights` are by phase.
    """
    longest: dict[str, int] = {}
    for phase, seq_len in seq_lens.items():
        for name in weights[phase]:
            longest[name] = max(seq_len, longest.get(name, 0))
    return {name: declared.get(name) or length for name, length in longest.items()}


def check_chunk_lengths(
    seq_lens: Mapping[str, int],
    weights: Mapping[str, Mapping[str, float]],
    chunk_tokens: Mapping[str, int],
) -> list[str]:
    """Phases whose sequences do not cut a source's chunks into whole pieces."""
    problems = []
    for name, longest in compute_chunk_lengths(seq_lens, weights, {}).items():
        used = {phase: length for phase, length in seq_lens.items() if name in weights[phase]}
        chunk = chunk_tokens[name]
        bad = [f"phases.{phase}.seq_len = {length:,}" for phase, length in used.items() if chunk % length]
        if not bad:
            continue
        declared = "" if chunk == longest else f"sources.{name}.chunk_tokens = {chunk:,} and "
        taken = ", ".join(f"{phase} {length:,}" for phase, length in used.items())
        problems.append(
            f"{declared}{' and '.join(bad)}: sources.{name} is read in chunks of {chunk:,} tokens (its "
            f"phases take {taken}), which sequences of every phase must divide; choose lengths "
            "that divide one another, or give the phase a source of another name with the same path, which "
            "has an order of its own and repeats what was read under the first name"
        )
    return problems


def find_changed_chunks(old: Mapping[str, int], new: Mapping[str, int | None]) -> list[str]:
    """Find why a run cannot resume with other chunks; `old` holds the sources that were read already.

    One that no phase draws from any more is not cut into anything: its mixtures tell what has changed.
    """
    return [
        f"sources.{name} was read in chunks of {old[name]:,} tokens, and would continue in chunks of "
        f"{tokens:,}: some tokens would be read twice and others never; set sources.{name}.chunk_tokens = "
        f"{old[name]}"
        + (
            ""
            if tokens < old[name]
            else ", and give the phase with longer sequences a source of another name with the same path"
        )
        for name, tokens in new.items()
        if tokens is not None and name in old and tokens != old[name]
    ]


def _parse_number(text: str) -> Fraction:
    try:
        return Fraction(Decimal(text.replace("_", "").replace(",", "")))
    except InvalidOperation:  # pragma: no cover - the pattern admits numbers only
        raise ValueError(f"{text!r} is not a number") from None
