"""Compares a replay with the first pass, bit for bit: the same data from the same checkpoint.

Pure. A run is deterministic on the same ranks, so the first step that differs is where a fault passed: in a
rank's forward pass, in the gradients, or in an update. No difference means that data or state did it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isnan
from typing import Any, Literal

from ds_pretrain.core.state import Rollback
from ds_pretrain.core.text import format_count_of

Finding = Literal["passing_fault", "data_or_state", "other_ranks", "unknown"]


@dataclass(frozen=True)
class ReplayedStep:
    """One step of a pass: its loss, norm, data checksum and, where known, each rank's loss."""

    loss: float
    grad_norm: float | None
    checksum: int
    num_ranks: int | None  # that it ran on; None: not known
    rank_losses: tuple[float, ...] | None = None  # of a group of ranks where these share sequences
    sequence_parallel_size: int = 1  # ranks a sequence


@dataclass(frozen=True)
class Difference:
    """The first step at which two passes differ, in what, and on which ranks."""

    step: int
    what: Literal["data", "loss", "norm"]
    ranks: tuple[int, ...] | None = None  # () is all of them, None that it is not known


@dataclass(frozen=True)
class Comparison:
    """The finding of a replay, as a word and as a sentence."""

    finding: Finding
    message: str


@dataclass(frozen=True)
class Replay:
    """A replay under way: what the first pass showed, and where the second first differed from it."""

    incident: int
    rollback: Rollback
    hosts: tuple[str, ...]  # of each rank, at the first pass
    first: Mapping[int, ReplayedStep] = field(default_factory=dict)
    difference: Difference | None = None
    num_compared: int = 0
    num_other_ranks: int = 0  # steps that ran on another number of ranks the first time

    def after(self, step: int, again: ReplayedStep) -> "Replay":
        """Return the replay with one more step of the second pass."""
        first = self.first.get(step)
        if first is None:
            return self
        if (first.num_ranks, first.sequence_parallel_size) != (
            again.num_ranks,
            again.sequence_parallel_size,
        ):  # the last bits differ then, and mean nothing
            return replace(self, num_other_ranks=self.num_other_ranks + 1)
        difference = self.difference or find_difference(step, first, again)
        return replace(self, difference=difference, num_compared=self.num_compared + 1)


def find_difference(step: int, first: ReplayedStep, again: ReplayedStep) -> Difference | None:
    """Return the first difference, causes before effects."""
    if first.checksum != again.checksum:
        return Difference(step, "data")
    if first.rank_losses is not None and again.rank_losses is not None:
        pairs = zip(first.rank_losses, again.rank_losses, strict=False)
        ranks = tuple(rank for rank, (one, other) in enumerate(pairs) if not _is_same(one, other))
        if ranks:
            return Difference(step, "loss", () if len(ranks) == len(first.rank_losses) else ranks)
    if not _is_same(first.loss, again.loss):
        return Difference(step, "loss")
    if not _is_same(first.grad_norm, again.grad_norm):
        known = first.rank_losses is not None and again.rank_losses is not None
        return Difference(step, "norm", () if known else None)
    return None


def conclude(replay: Replay, recurred: bool) -> Comparison:
    """Conclude what a replay showed once it passed the onset, or met the same trouble again."""
    if replay.num_other_ranks:
        return Comparison(
            "other_ranks",
            f"{format_count_of(replay.num_other_ranks, 'step')} ran on another number of ranks, or of ranks "
            "a sequence, the first time, and cannot be compared bit for bit",
        )
    if not replay.num_compared:
        return Comparison("unknown", "metrics.jsonl lacks the first pass, so the replay cannot be compared")
    difference = replay.difference
    if difference is None:
        return Comparison(
            "data_or_state",
            f"all {replay.num_compared:,} losses and norms are the same to the bit as the first time: it "
            "comes from the data, the state or the rate, not from the hardware",
        )
    if difference.what == "data":
        return Comparison(
            "unknown",
            f"step {difference.step:,} read other data than the first time: has a source changed?",
        )
    where = _describe_location(replay, difference)
    if recurred:
        return Comparison(
            "data_or_state",
            f"it came back, though step {difference.step:,} is not the same to the bit ({where}): the run is "
            "not deterministic, or a fault comes and goes",
        )
    return Comparison(
        "passing_fault",
        f"the same data from the same weights is healthy this time; step {difference.step:,} is the first "
        f"that differs: {where}",
    )


def find_suspect_hosts(replay: Replay) -> Sequence[str]:
    """The hosts of the ranks that computed something else: each once; all if it cannot be told."""
    difference = replay.difference
    ranks = (difference and difference.ranks) or range(len(replay.hosts))
    return list(dict.fromkeys(replay.hosts[rank].rpartition(":")[0] for rank in ranks))


def _describe_location(replay: Replay, difference: Difference) -> str:
    if difference.what == "loss" and difference.ranks is None:
        return (
            f"another loss; each rank's is not on record there, so one of "
            f"{', '.join(find_suspect_hosts(replay))}"
        )
    if difference.ranks:
        named = ", ".join(f"{rank} ({replay.hosts[rank]})" for rank in difference.ranks)
        return f"only rank {named} had another loss; check that host"
    hosts = ", ".join(find_suspect_hosts(replay))
    if difference.what == "norm":
        return (
            "the same loss on every rank and another gradient norm, so a backward pass or the reduction "
            f"of the gradients, on one of {hosts}"
        )
    return (
        f"another loss on every rank, so the update of step {difference.step - 1:,} or the weights after it, "
        f"on one of {hosts}"
    )


def read_passes(
    backwards: Iterable[Mapping[str, Any]], incident: int, rollback: Rollback
) -> tuple[Replay, dict[int, ReplayedStep]]:
    """The first pass, and what there is of the second, from the records of a run, the newest first."""
    first: dict[int, Mapping[str, Any]] = {}
    second: dict[int, Mapping[str, Any]] = {}
    num_ranks: dict[int, tuple[int, int]] = {}  # of an attempt, and of each sequence of it
    told: Mapping[str, Any] | None = None
    is_done = False
    for record in backwards:
        kind, step = record.get("event"), record.get("step")
        if kind in ("start", "resume"):
            ranks = record["world_size"], record.get("sequence_parallel_size", 1)
            num_ranks[record["attempt"]] = ranks
        if is_done and {seen["attempt"] for seen in (*first.values(), *second.values())} <= num_ranks.keys():
            break
        if kind == "rollback" and record.get("incident") == incident:
            told = record
        if kind != "step" or is_done or step is None:
            continue
        is_done = told is not None and step <= rollback.to_step
        if told is None:
            second.setdefault(step, record)
        elif rollback.to_step < step <= rollback.step:
            first.setdefault(step, record)
    rank_losses = {} if told is None else told["rank_losses"]
    return (
        Replay(
            incident,
            rollback,
            () if told is None else tuple(told["hosts"]),
            {s: _read_seen(record, num_ranks, rank_losses.get(str(s))) for s, record in first.items()},
        ),
        {s: _read_seen(record, num_ranks, None) for s, record in second.items()},
    )


def _read_seen(
    record: Mapping[str, Any],
    num_ranks: Mapping[int, tuple[int, int]],
    rank_losses: Sequence[float] | None,
) -> ReplayedStep:
    ranks, sp_size = num_ranks.get(record["attempt"], (None, 1))
    return ReplayedStep(
        loss=record["loss"],
        grad_norm=record["grad_norm"],
        checksum=record["batch_checksum"],
        num_ranks=ranks,
        rank_losses=None if rank_losses is None else tuple(rank_losses),
        sequence_parallel_size=sp_size,
    )


def _is_same(one: float | None, other: float | None) -> bool:
    """To the bit, with NaN as a value like any other."""
    if one is None or other is None:
        return one is other
    return one == other or (isnan(one) and isnan(other))
