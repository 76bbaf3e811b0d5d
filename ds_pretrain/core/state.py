"""The state of a run as a value: the same on every rank, and independent of the world size."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ds_pretrain.core.jsonl import read_as

_VERSION = 3


@dataclass(frozen=True)
class Skip:
    """Draws [start, stop) of one phase that are never trained on, and why."""

    phase: str
    start: int
    stop: int
    cause: str
    step: int  # the step at which it was decided
    attempt: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"a skip needs 0 <= start < stop, not [{self.start}, {self.stop})")


@dataclass(frozen=True)
class SkipLedger:
    """Every skipped interval, in the order of decision. Overlaps count once."""

    skips: tuple[Skip, ...] = ()

    def draws(self, phase: str, first: int, count: int) -> npt.NDArray[np.uint64]:
        """The draws of the trained samples [first, first + count) of a phase: [count], ascending.

        Trained sample n is draw n plus all that was skipped before it, so the mapping is arithmetic.
        """
        trained = np.arange(first, first + count, dtype=np.uint64)
        for start, stop in self.merged(phase):
            trained[trained >= np.uint64(start)] += np.uint64(stop - start)
        return trained

    def with_skip(self, skip: Skip) -> "SkipLedger":
        """A ledger that is longer by one interval."""
        return SkipLedger((*self.skips, skip))

    def merged(self, phase: str) -> list[tuple[int, int]]:
        """The skipped draws of a phase as intervals [start, stop) that do not touch, ascending."""
        merged: list[tuple[int, int]] = []
        for start, stop in sorted((s.start, s.stop) for s in self.skips if s.phase == phase):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
            else:
                merged.append((start, stop))
        return merged


Action = Literal["ok", "watch", "roll_back", "stop"]
Kind = Literal[
    "blip",  # the loss was high for one step, and is not any more
    "spike",  # the loss is high, or was for several steps; may still heal
    "lasting_spike",  # it was given `patience` and did not heal
    "recurring_spike",  # it heals, and comes back again and again
    "drift",  # the loss rises slowly, or did
    "fall",  # the loss fell at once, or is back from there: too easy or repeated data, or a change of rate
    "frozen_loss",  # the loss is the same number again and again, or 0
    "outlier_rank",  # the loss of one rank is high, and that of the others is not
    "norm_rise",  # the gradient norm is high: the loss has not moved yet, or the update was skipped for it
    "frozen_norm",  # the gradient norm is the same number again and again
    "non_finite",  # loss or norm is no number, or negative
    "worse_than_guessing",  # the loss is above that of guessing from any vocabulary in use
]


@dataclass(frozen=True)
class Verdict:
    """The watchdog's action for a step, and its reason."""

    action: Action = "ok"
    kind: Kind | None = None  # with "ok": what has just healed
    onset: int | None = None  # the step where it began
    message: str = ""  # for the operator

    @property
    def interrupts(self) -> bool:
        """True if training must not continue from here: it rolls back, or stops for the operator."""
        return self.action in ("roll_back", "stop")


@dataclass(frozen=True)
class Rollback:
    """One time that the run went back to an older checkpoint, and why."""

    to_step: int  # of the checkpoint
    step: int  # at which it was decided
    onset: int  # the step where the trouble began
    kind: str  # of trouble
    response: str  # "replay", "skip" or "stop"
    attempt: int


@dataclass(frozen=True)
class RunningStats:
    """The accepted values of one series, as far as they are remembered (see `watchdog.stats`)."""

    recent: tuple[float, ...] = ()  # the last accepted values, oldest first
    residuals: tuple[float, ...] = ()  # how far each accepted value lay from the centre before it
    num_accepted: int = 0
    trend: float = 0.0  # median of the residuals
    mad_sigma: float = 0.0  # 1.4826 times their median absolute deviation from it
    blocks: tuple[float, ...] = ()  # medians of successive blocks of accepted values, oldest first

    @property
    def median(self) -> float:
        """The median of the recent values. There must be one."""
        return median(self.recent)


@dataclass(frozen=True)
class Streak:
    """Consecutive steps of one kind of trouble."""

    onset: int  # the step where it began
    num_steps: int  # so far, from the first that was seen to be bad to the last
    num_normal: int = 0  # steps since then


@dataclass(frozen=True)
class WatchdogState:
    """All that the watchdog's judgement remembers. Of bounded size, whatever the length of the run."""

    step: int = 0  # of the last record
    num_judged: int = 0  # records so far
    phase: str | None = None
    loss: RunningStats = field(default_factory=RunningStats)
    norm: RunningStats = field(default_factory=RunningStats)  # of the logarithm of the gradient norm
    rank_excess: RunningStats = field(default_factory=RunningStats)  # loss of the highest rank - mean
    spike: Streak | None = None
    fall: Streak | None = None
    outliers: tuple[float, ...] = ()  # the last losses of the open spike or fall
    high_records: tuple[int, ...] = ()  # numbers of the last records in a spike
    non_finite_records: tuple[int, ...] = ()  # numbers of the last records that are not finite
    outlier_rank: Streak | None = None
    norm_rise: Streak | None = None
    non_finite: Streak | None = None
    guessing: Streak | None = None
    last_loss: float | None = None
    same_loss: Streak | None = None
    last_norm: float | None = None
    same_norm: Streak | None = None
    slow_level: float | None = None  # of the loss: a slow mean of accepted values
    lowest_level: float | None = None  # the lowest that it has been
    fall_ceiling: float | None = None  # the highest level that the end of a slow fall explains
    drift_halfway: int | None = None  # the step at which the rise above it was half of a drift
    drift_onset: int | None = None  # the onset of the drift that is watched
    drift_is_step: bool = False  # rather than a slow rise


@dataclass(frozen=True)
class RunState:
    """All that has to be remembered; everything else is computed from it and the run file."""

    step: int = 0  # finished optimizer steps
    ledger: SkipLedger = field(default_factory=SkipLedger)
    num_skipped_updates: int = 0  # of the finished steps, those whose update was skipped
    num_healthy_steps: int = 0  # steps in a row, up to this one, that the watchdog had nothing against
    watchdog: WatchdogState = field(default_factory=WatchdogState)
    rollbacks: tuple[Rollback, ...] = ()

    @property
    def num_updates(self) -> int:
        """Applied updates: what the learning rate follows. A skipped update does not advance the schedule."""
        return self.step - self.num_skipped_updates

    def after_step(
        self, applied: bool = True, memory: WatchdogState | None = None, healthy: bool = True
    ) -> "RunState":
        """The state after one more finished step."""
        return replace(
            self,
            step=self.step + 1,
            num_skipped_updates=self.num_skipped_updates + (not applied),
            num_healthy_steps=self.num_healthy_steps + 1 if healthy else 0,
            watchdog=self.watchdog if memory is None else memory,
        )

    def to_json(self) -> str:
        """Text that `from_json` reads back as an equal value."""
        fields = asdict(self)
        fields["skips"] = fields.pop("ledger")["skips"]
        return json.dumps({"version": _VERSION, **fields}, indent=1)

    @staticmethod
    def from_json(text: str) -> "RunState":
        """Read `to_json`. Raises ValueError for another format, or if it is no run state."""
        data: dict[str, Any] = json.loads(text)
        if (version := data.pop("version", None)) != _VERSION:
            raise ValueError(
                f"run state of format {version}, expected {_VERSION} (format 2 renamed fields: "
                "num_skipped_updates was num_dropped; format 3 has more of the watchdog's memory); "
                "resume with the ds_pretrain that wrote it"
            )
        data["ledger"] = {"skips": data.pop("skips", None)}
        return read_as(RunState, json.dumps(data))


def is_abandoned(state: RunState, rollbacks: Sequence[Rollback], heeds_stop: bool = True) -> bool:
    """True if a later rollback abandoned a checkpoint's state.

    Without `heeds_stop`, a stop abandons nothing: an operator may resume where the run stood.
    """
    later = rollbacks[len(state.rollbacks) :]
    return any(state.step > r.to_step for r in later if heeds_stop or r.response != "stop")
