"""What the watchdog remembers from step to step: a small frozen value, to and from JSON without loss."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ds_pretrain.watchdog.stats import Usual


@dataclass(frozen=True)
class Stretch:
    """Consecutive steps of one kind of trouble."""

    onset: int  # the step where it began
    num_steps: int  # so far, up to the last that was bad
    num_calm: int = 0  # steps since then


@dataclass(frozen=True)
class Memory:
    """All that the judgement remembers. Of bounded size, whatever the length of the run."""

    step: int = 0  # of the last record
    phase: str | None = None
    loss: Usual = field(default_factory=Usual)
    norm: Usual = field(default_factory=Usual)  # of the logarithm of the gradient norm
    spike: Stretch | None = None
    fall: Stretch | None = None
    norm_rise: Stretch | None = None
    non_finite: Stretch | None = None
    guessing: Stretch | None = None
    last_norm: float | None = None
    same_norm: Stretch | None = None
    slow_level: float | None = None  # of the loss: a slow mean of accepted values
    lowest_level: float | None = None  # the lowest that it has been
    before_fall: float | None = None  # the level that the loss fell from, when a fall became the new level
    fell_at: int | None = None  # and the step
    drift_halfway: int | None = None  # the step at which the rise above it was half of a drift

    def to_json(self) -> dict[str, Any]:
        """Plain types; floats survive text exactly."""
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Memory":
        """Read `to_json`, also after it was text."""
        usual = {name: _usual_from_json(data[name]) for name in ("loss", "norm")}
        stretches = {name: Stretch(**value) for name, value in data.items() if name in _STRETCHES and value}
        return Memory(**{**data, **usual, **stretches})


def _usual_from_json(data: Mapping[str, Any]) -> Usual:
    series = {name: tuple(data[name]) for name in ("recent", "residuals")}
    return Usual(**{**data, **series})


_STRETCHES = ("spike", "fall", "norm_rise", "non_finite", "guessing", "same_norm")
