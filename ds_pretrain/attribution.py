"""What a replay says: the same data from the same checkpoint, against the first time, bit for bit.

Pure. A run is deterministic on the same ranks, so the first step that differs is where a fault passed: in a
rank's forward pass, in the gradients, or in an update. No difference means that data or state did it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan
from typing import Any, Literal

from ds_pretrain.state import Rollback

Finding = Literal["passing_fault", "data_or_state", "other_ranks", "unknown"]


@dataclass(frozen=True)
class Seen:
    """What one step showed, and what each rank's loss was, where that is still known."""

    loss: float
    grad_norm: float | None
    checksum: int
    rank_losses: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Difference:
    """The first step at which two passes differ, in what, and on which ranks, if it was not all of them."""

    step: int
    what: Literal["data", "loss", "norm"]
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Compared:
    """What a replay showed, in one word and in a sentence."""

    finding: Finding
    message: str


@dataclass(frozen=True)
class Replay:
    """A replay under way: what the first pass showed, and where the second first differed from it."""

    incident: int
    rollback: Rollback
    hosts: tuple[str, ...]  # of each rank, at the first pass
    first: Mapping[int, Seen] = field(default_factory=dict)
    difference: Difference | None = None
    num_compared: int = 0

    def after(self, step: int, again: Seen) -> "Replay":
        """With one more step of the second pass."""
        first = self.first.get(step)
        if first is None:
            return self
        difference = self.difference or difference_at(step, first, again)
        return Replay(self.incident, self.rollback, self.hosts, self.first, difference, self.num_compared + 1)


def difference_at(step: int, first: Seen, again: Seen) -> Difference | None:
    """What differs, the cause before its effect."""
    if first.checksum != again.checksum:
        return Difference(step, "data")
    if first.rank_losses is not None and again.rank_losses is not None:
        pairs = zip(first.rank_losses, again.rank_losses, strict=False)
        ranks = tuple(rank for rank, (one, other) in enumerate(pairs) if not _same(one, other))
        if ranks:
            return Difference(step, "loss", () if len(ranks) == len(first.rank_losses) else ranks)
    if not _same(first.loss, again.loss):
        return Difference(step, "loss")
    if not _same(first.grad_norm, again.grad_norm):
        return Difference(step, "norm")
    return None


def conclude(replay: Replay, num_ranks: int, came_back: bool) -> Compared:
    """What a replay shows once it has passed the place, or met the trouble again."""
    if len(replay.hosts) != num_ranks:
        return Compared(
            "other_ranks",
            f"the first time ran on {len(replay.hosts)} ranks and the replay on {num_ranks}: they cannot be "
            "compared bit for bit",
        )
    if not replay.num_compared:
        return Compared("unknown", "metrics.jsonl does not hold the first time, so nothing can be compared")
    difference = replay.difference
    if difference is None:
        return Compared(
            "data_or_state",
            f"all {replay.num_compared:,} losses and norms are the same to the bit as the first time: it "
            "comes from the data, the state or the rate, not from the hardware",
        )
    if difference.what == "data":
        return Compared(
            "unknown",
            f"step {difference.step:,} read other data than the first time: has a source changed?",
        )
    where = _where(replay, difference)
    if came_back:
        return Compared(
            "data_or_state",
            f"it came back, though step {difference.step:,} is not the same to the bit ({where}): the run is "
            "not deterministic, or a fault comes and goes",
        )
    return Compared(
        "passing_fault",
        f"the same data from the same weights is healthy this time; step {difference.step:,} is the first "
        f"that differs: {where}",
    )


def suspect_hosts(replay: Replay) -> Sequence[str]:
    """The hosts of the ranks that computed something else: each once; all if it cannot be told."""
    difference = replay.difference
    ranks = (difference and difference.ranks) or range(len(replay.hosts))
    return list(dict.fromkeys(replay.hosts[rank].rpartition(":")[0] for rank in ranks))


def _where(replay: Replay, difference: Difference) -> str:
    if difference.ranks:
        named = ", ".join(f"{rank} ({replay.hosts[rank]})" for rank in difference.ranks)
        return f"another loss on rank {named} alone, so look there"
    hosts = ", ".join(suspect_hosts(replay))
    if difference.what == "norm":
        return (
            "the same loss on every rank and another gradient norm, so a backward pass or the reduction "
            f"of the gradients, on one of {hosts}"
        )
    return (
        f"another loss on every rank, so the update of step {difference.step - 1:,} or the weights after it, "
        f"on one of {hosts}"
    )


def passes(
    backwards: Iterable[Mapping[str, Any]], incident: int, rollback: Rollback
) -> tuple[Replay, dict[int, Seen]]:
    """The first pass, and what there is of the second, from the records of a run, the newest first."""
    first: dict[int, Seen] = {}
    second: dict[int, Seen] = {}
    hosts: tuple[str, ...] = ()
    rank_losses: Mapping[str, Sequence[float]] = {}
    is_before = False
    for record in backwards:
        if record.get("event") == "rollback" and record.get("incident") == incident:
            is_before = True
            hosts, rank_losses = tuple(record["hosts"]), record["rank_losses"]
        if record.get("event") != "step":
            continue
        step = record["step"]
        if is_before and step <= rollback.to_step:
            break
        ranks = rank_losses.get(str(step)) if is_before else None
        seen = Seen(
            record["loss"],
            record["grad_norm"],
            record["batch_checksum"],
            None if ranks is None else tuple(ranks),
        )
        if is_before and step <= rollback.step:
            first.setdefault(step, seen)
        elif not is_before:
            second.setdefault(step, seen)
    return Replay(incident, rollback, hosts, first), second


def _same(one: float | None, other: float | None) -> bool:
    """To the bit, with NaN as a value like any other."""
    if one is None or other is None:
        return one is other
    return one == other or (isnan(one) and isnan(other))
