"""Learning-rate schedules: pure functions of the step, so there is nothing to save and nothing to restore.

`fraction(step)` is the share of the peak that the update after `step` finished steps uses. All steps are
optimizer steps, whatever the accumulation and the number of ranks.
"""

from dataclasses import dataclass
from math import cos, pi, sqrt
from typing import Literal

Shape = Literal["linear", "cosine", "1-sqrt", "exponential"]


@dataclass(frozen=True)
class Cosine:
    """Linear warmup, then half a cosine down to `floor` (Loshchilov & Hutter, arXiv:1608.03983)."""

    peak: float
    length: int  # steps of the whole run
    warmup: int  # steps
    floor: float  # as a share of the peak

    def fraction(self, step: int) -> float:
        _check_step(step, self.length)
        if step < self.warmup:
            return step / self.warmup
        progress = (step - self.warmup) / max(1, self.length - self.warmup)
        return self.floor + (1.0 - self.floor) * 0.5 * (1.0 + cos(pi * progress))

    def rate(self, step: int) -> float:
        """The learning rate of the update after `step` finished steps."""
        return self.peak * self.fraction(step)

    def corners(self) -> dict[str, int]:
        """The steps at which the schedule changes its nature, by name, in order."""
        return {
            "start": 0,
            "warmup end": self.warmup,
            "middle": (self.warmup + self.length) // 2,
            "last": self.length - 1,
        }


@dataclass(frozen=True)
class Wsd:
    """Warmup, a stable stretch at the peak, then a decay to `floor` (Hu et al., arXiv:2404.06395).

    1-sqrt: Hagele et al., arXiv:2405.18392.
    """

    peak: float
    length: int  # steps of the whole run
    warmup: int  # steps
    decay: int  # steps
    shape: Shape
    floor: float  # as a share of the peak

    @property
    def decay_start(self) -> int:
        """The first step of the decay; the stable stretch is derived, never given."""
        return self.length - self.decay

    def fraction(self, step: int) -> float:
        _check_step(step, self.length)
        if step < self.warmup:
            return step / self.warmup
        if step <= self.decay_start:
            return 1.0
        return _decayed(self.shape, (step - self.decay_start) / self.decay, self.floor)

    def rate(self, step: int) -> float:
        """The learning rate of the update after `step` finished steps."""
        return self.peak * self.fraction(step)

    def corners(self) -> dict[str, int]:
        """The steps at which the schedule changes its nature, by name, in order."""
        return {
            "start": 0,
            "warmup end": self.warmup,
            "middle": (self.warmup + self.decay_start) // 2,
            "decay start": self.decay_start,
            "last": self.length - 1,
        }


Schedule = Cosine | Wsd
RateRule = Literal["none", "linear", "sqrt"]


def rule_factor(rule: RateRule, batch_tokens: int, meant_tokens: int) -> float:
    """What the rate is multiplied by at another batch than the one that the peak is meant for.

    linear: Goyal et al., arXiv:1706.02677. sqrt: for Adam, Malladi et al., arXiv:2205.10287.
    """
    share = batch_tokens / meant_tokens
    return {"none": 1.0, "linear": share, "sqrt": sqrt(share)}[rule]


def _decayed(shape: Shape, progress: float, floor: float) -> float:
    if shape == "exponential":
        return float(floor**progress)
    remaining = {
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + cos(pi * progress)),
        "1-sqrt": 1.0 - sqrt(progress),
    }[shape]
    return floor + (1.0 - floor) * remaining


def _check_step(step: int, length: int) -> None:
    if not 0 <= step <= length:
        raise ValueError(f"the schedule covers steps 0 to {length}; step {step} lies outside it")
