"""What the watchdog is told of a step and what it says of it; and when it knows enough to say anything."""

from dataclasses import dataclass, replace
from typing import Literal, Protocol

from ds_pretrain.config.schema import WatchdogSection
from ds_pretrain.core.watchdog_memory import Memory, Stretch
from ds_pretrain.watchdog.stats import Usual

Action = Literal["ok", "watch", "roll_back"]
Kind = Literal[
    "blip",  # the loss was high for one step, and is not any more
    "spike",  # the loss is high, or was for several steps; may still heal
    "lasting_spike",  # it was given `patience` and did not heal
    "drift",  # the loss rises slowly
    "fall",  # the loss fell at once: too easy or repeated data, or a change of rate
    "norm_rise",  # the gradient norm is high: the loss has not moved yet, or the update was dropped for it
    "frozen_norm",  # the gradient norm is the same number again and again
    "non_finite",  # loss or norm is no number, or negative
    "worse_than_guessing",  # the loss is above that of guessing from any vocabulary in use
]


class StepLike(Protocol):
    """What is judged of a step; StepRecord has it, and so has a point of a recorded curve."""

    @property
    def step(self) -> int: ...
    @property
    def phase(self) -> str: ...
    @property
    def loss(self) -> float: ...
    @property
    def loss_max_rank(self) -> float: ...
    @property
    def grad_norm(self) -> float | None: ...
    @property
    def update_applied(self) -> bool | None: ...  # None: not known


@dataclass(frozen=True)
class Verdict:
    """What to do about a step, and why."""

    action: Action = "ok"
    kind: Kind | None = None  # with "ok": what has just healed
    onset: int | None = None  # the step where it began
    message: str = ""  # for a person

    @property
    def roll_back(self) -> bool:
        return self.action == "roll_back"


OK = Verdict()
Judged = tuple[Memory, Verdict]


def is_warm(settings: WatchdogSection, usual: Usual) -> bool:
    """Whether enough is known to judge by: a quarter of the window."""
    return len(usual.residuals) >= max(1, settings.window // 4)


def longer(stretch: Stretch | None, step: int, num_before: int = 0, stride: int = 1) -> Stretch:
    """The stretch with one more step, or a new one that began `num_before` steps earlier."""
    if stretch is None:
        return Stretch(step - num_before * stride, num_before + 1)
    return replace(stretch, num_steps=stretch.num_steps + stretch.num_calm + 1, num_calm=0)
