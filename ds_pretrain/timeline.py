"""How long things take, in the units people use, and where each step stands.

Durations carry their unit ("2000 steps", "10B tokens", "15 min", "10%"). Phases resolve to segments:
stretches of steps with one sequence length and one batch; then steps, samples and tokens convert exactly.

Token amounts are decimal (10B = 10^10). Batch sizes alone read K and M as 2^10 and 2^20, as the field writes
them: a "4M" batch is 1,024 sequences of 4,096 tokens.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from math import ceil, isqrt
from typing import Literal

from ds_pretrain.reading import shown

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


def parse_duration(text: str) -> Duration:
    """Read a duration. Raises ValueError that says what was found and how to write it."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ValueError(f"{shown(text)} is not a duration; write a number with its unit, like {_EXAMPLES}")
    unit, factor = _UNITS[match["unit"]]
    amount = _number(match["number"]) * _DECIMAL[match["scale"]] * factor
    if unit in ("steps", "tokens") and amount.denominator != 1:
        raise ValueError(f"{shown(text)} is not a whole number of {unit}")
    if unit == "percent" and amount > 100:
        raise ValueError(f"{shown(text)} is more than the whole run")
    if amount > MOST[unit]:
        raise ValueError(f"{shown(text)} is more than {MOST[unit]:,} {unit}; write a shorter duration")
    return Duration(amount, unit, text.strip())


def parse_batch_tokens(value: str | int) -> int:
    """Tokens of a global batch: an integer, or text where K and M are binary ("4M" is 4,194,304)."""
    match = None if isinstance(value, bool) else _BATCH.fullmatch(str(value))
    amount = _number(match["number"]) * _BINARY[match["scale"]] if match else Fraction(0)
    if match is None or amount.denominator != 1 or amount == 0:
        raise ValueError(
            f'{shown(value)} is not a batch size in tokens; write it like 524_288, "512K" or "4M"'
        )
    if amount > MOST_BATCH_TOKENS:
        raise ValueError(f"{shown(value)} is more than {MOST_BATCH_TOKENS:,} tokens; write a smaller batch")
    return int(amount)


@dataclass(frozen=True)
class Segment:
    """A stretch of steps [first_step, end_step) that read alike."""

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
            step = segment.first_step + _steps_of_tokens(missing, segment.tokens_per_step)
            if step <= segment.end_step:
                return step
        return self.last_step

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


@dataclass(frozen=True)
class Stage:
    """A phase as a run file gives it. Only the first may begin without a word of when."""

    name: str
    seq_len: int
    start: Duration | None = None


def make_timeline(
    stages: Sequence[Stage], batches: Sequence[tuple[Duration, int]], length: Duration
) -> Timeline:
    """The segments of a run: `batches` says from when on a step has how many tokens, the first from 0.

    A start in tokens is the first step boundary at which so many have been read; percent is of the run's
    steps. A batch must be whole sequences of each phase that it meets.

    Raises:
        ValueError: stages or batches that do not rise, have no step of their own, or lie behind the end.
    """
    pieces = _batch_pieces(batches, length)
    end = pieces[-1][1]
    starts = [0, *(_start_step(stage, pieces, end) for stage in stages[1:])]
    for stage, begin, after in zip(stages, starts, [*starts[1:], end], strict=True):
        if begin >= after:
            raise ValueError(
                f"phase {stage.name} would begin at step {begin:,}, and what follows it at step {after:,}: "
                "it has no steps; phases are listed in their order, each with a later start"
            )
    segments: list[Segment] = []
    samples = tokens = 0
    for stage, begin, after in zip(stages, starts, [*starts[1:], end], strict=True):
        draws = 0
        for first, stop, tokens_per_step in pieces:
            low, high = max(first, begin), min(stop, after)
            if low >= high:
                continue
            sequences = tokens_per_step // stage.seq_len
            segments.append(Segment(stage.name, low, high, stage.seq_len, sequences, samples, tokens, draws))
            samples += (high - low) * sequences
            draws += (high - low) * sequences
            tokens += (high - low) * sequences * stage.seq_len
    return Timeline(tuple(segments))


def _batch_pieces(batches: Sequence[tuple[Duration, int]], length: Duration) -> list[tuple[int, int, int]]:
    """[first_step, end_step) and the tokens of a step there."""
    pieces: list[tuple[int, int, int]] = []
    step = tokens = 0
    for (start, size), (end, _) in zip(batches, [*batches[1:], (length, 0)], strict=True):
        stop = _reached(end, step, tokens, size)
        if stop <= step:
            raise ValueError(f'a batch of {size:,} tokens from "{start}" to "{end}" has no steps')
        pieces.append((step, stop, size))
        step, tokens = stop, tokens + (stop - step) * size
    return pieces


def _reached(duration: Duration, step: int, tokens: int, tokens_per_step: int) -> int:
    """The first step at which so much is done, where `step` steps have read `tokens` tokens."""
    if duration.unit == "tokens":
        return step + _steps_of_tokens(duration.amount - tokens, tokens_per_step)
    return to_steps(duration, tokens_per_step)


def _steps_of_tokens(tokens: Fraction | int, tokens_per_step: int) -> int:
    return max(0, ceil(Fraction(tokens) / tokens_per_step))


def _start_step(stage: Stage, pieces: Sequence[tuple[int, int, int]], end: int) -> int:
    if stage.start is None:
        raise ValueError(f'phase {stage.name} needs a start, like start = "430_000 steps"')
    if stage.start.unit != "tokens":
        return to_steps(stage.start, 1, end)
    tokens = 0
    for first, stop, size in pieces:
        if (step := _reached(stage.start, first, tokens, size)) <= stop:
            return step
        tokens += (stop - first) * size
    return end


def single_phase(phase: str, seq_len: int, sequences: int, length: Duration) -> Timeline:
    """The timeline of a run with one phase and one batch size."""
    batches = [(parse_duration("0 steps"), seq_len * sequences)]
    return make_timeline([Stage(phase, seq_len)], batches, length)


def to_steps(duration: Duration, tokens_per_step: int, of_steps: int | None = None) -> int:
    """A duration in whole steps; a part of a step counts as one. Percent is of the run's `of_steps`."""
    if duration.unit == "steps":
        return int(duration.amount)
    if duration.unit == "tokens":
        return ceil(duration.amount / tokens_per_step)
    if duration.unit == "percent" and of_steps is not None:
        return ceil(of_steps * duration.amount / 100)
    raise ValueError(f'"{duration}" cannot be turned into steps; write steps or tokens')


def accumulation(sequences: int, micro_sequences: int, world_size: int) -> int | None:
    """Micro-batches per rank and step, or None if the world does not divide the batch into whole ones."""
    count, remainder = divmod(sequences, micro_sequences * world_size)
    return count if remainder == 0 else None


def worlds_that_divide(sequences: int, micro_sequences: int) -> list[int]:
    """Every number of ranks that splits the global batch into whole micro-batches, ascending."""
    micro_batches, remainder = divmod(sequences, micro_sequences)
    if remainder:
        return []
    small = [w for w in range(1, isqrt(micro_batches) + 1) if micro_batches % w == 0]
    return sorted({*small, *(micro_batches // w for w in small)})


def _number(text: str) -> Fraction:
    try:
        return Fraction(Decimal(text.replace("_", "").replace(",", "")))
    except InvalidOperation:  # pragma: no cover - the pattern admits numbers only
        raise ValueError(f"{text!r} is not a number") from None
