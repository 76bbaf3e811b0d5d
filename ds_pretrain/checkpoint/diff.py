"""Two checkpoints compared bit by bit, whatever ranks and ZeRO stages wrote them, a parameter at a time."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_pretrain.checkpoint.contents import WEIGHT, Contents, opened
from ds_pretrain.core.text import changed_fields, counted, shown

SHOWN_LINES = 20  # of each kind of difference
_CHUNK = 1 << 22  # elements compared at a time, in fp64
_STATE = ("optimizer", "engine", "run_state.json")  # where a run stands, as against how it was set up


@dataclass(frozen=True)
class TensorDifference:
    """A tensor whose bits differ. `unlike` says why its elements have no counterparts."""

    name: str
    kind: str
    unlike: str | None
    largest: float = math.inf  # absolute difference of two elements
    relative: float = math.inf  # ||a - b|| / ||a||

    @property
    def line(self) -> str:
        if self.unlike is not None:
            return f"{self.name}  {self.kind}  {self.unlike}"
        return f"{self.name}  {self.kind}  relative {self.relative:.2e}, largest {self.largest:.2e}"


@dataclass(frozen=True)
class Differences:
    """What differs between two checkpoints, and how much was compared."""

    titles: tuple[str, str]
    tensors: tuple[TensorDifference, ...]  # the furthest apart first
    streams: tuple[str, ...]  # "rank 0: torch"
    values: Mapping[str, tuple[Any, Any]]  # dotted path to both
    num_tensors: int
    num_streams: int
    num_ranks: int

    @property
    def state(self) -> dict[str, tuple[Any, Any]]:
        """The values of `values` that say where a run stands."""
        return {path: both for path, both in self.values.items() if path.startswith(_STATE)}

    @property
    def none(self) -> bool:
        """True if the two are the same in all that was compared."""
        return not (self.tensors or self.streams or self.values)

    @property
    def same_state(self) -> bool:
        """True if they are the same but for settings: a run goes on alike from both."""
        return not (self.tensors or self.streams or self.state)


def differences(a: Path, b: Path) -> Differences:
    """Compare two checkpoint folders, or universal forms. One parameter of each is in memory at a time.

    Raises:
        InputError: one does not verify; with the reason.
    """
    first, second = opened(a, b)
    names = [
        key
        for key in dict.fromkeys([*first.tensors, *second.tensors])
        if key[1] != WEIGHT or (key in first.tensors and key in second.tensors)
    ]
    found = [each for key in names if (each := _tensor_difference(key, first, second)) is not None]
    ranks = sorted({*first.streams, *second.streams})
    return Differences(
        titles=(first.title, second.title),
        tensors=tuple(sorted(found, key=lambda each: -each.relative)),
        streams=tuple(line for rank in ranks for line in _stream_lines(rank, first, second)),
        values=changed_fields(first.values, second.values),
        num_tensors=len(names),
        num_streams=sum(len({*first.streams.get(r, {}), *second.streams.get(r, {})}) for r in ranks),
        num_ranks=len(ranks),
    )


def described(found: Differences) -> Iterator[str]:
    """Both checkpoints, a line for each difference, a summary."""
    for name, title in zip("ab", found.titles, strict=True):
        yield f"{name}  {title}"
    yield from difference_lines(found)
    tensors = counted(found.num_tensors, "tensor")
    streams = f"{counted(found.num_streams, 'random stream')} on {counted(found.num_ranks, 'rank')}"
    if found.none:
        yield f"bitwise equal: {tensors}, {streams}, options, counters and settings"
        return
    yield (
        f"different: {len(found.tensors):,} of {tensors}, {len(found.streams):,} of "
        f"{streams}, {len(found.values):,} values"
    )


def difference_lines(found: Differences) -> Iterator[str]:
    """A line for each difference, at most `SHOWN_LINES` of a kind."""
    yield from _capped([each.line for each in found.tensors], "tensors")
    yield from _capped(list(found.streams), "random streams")
    values = [f"{path}: {shown(old)} in a, {shown(new)} in b" for path, (old, new) in found.values.items()]
    yield from _capped(values, "values")


def _capped(lines: list[str], what: str) -> Iterator[str]:
    yield from lines[:SHOWN_LINES]
    if len(lines) > SHOWN_LINES:
        yield f"... and {len(lines) - SHOWN_LINES:,} more {what}"


def _tensor_difference(key: tuple[str, str], a: Contents, b: Contents) -> TensorDifference | None:
    if key not in a.tensors or key not in b.tensors:
        return TensorDifference(*key, f"only in {'a' if key in a.tensors else 'b'}")
    mine, theirs = a.tensors[key](), b.tensors[key]()
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return TensorDifference(*key, f"{_form(mine)} in a, {_form(theirs)} in b")
    left, right = mine.reshape(-1), theirs.reshape(-1)  # [n] each
    if torch.equal(left.view(torch.uint8), right.view(torch.uint8)):
        return None
    return TensorDifference(*key, None, *_distance(left, right))


def _distance(left: Tensor, right: Tensor) -> tuple[float, float]:
    """Largest absolute difference of two elements, and the norm of all relative to that of `left`.

    What is infinite on both sides alike, or no number on both, is no difference and in no norm.
    """
    largest, apart, norm = 0.0, 0.0, 0.0
    for start in range(0, left.numel(), _CHUNK):
        mine, theirs = (each[start : start + _CHUNK].double() for each in (left, right))
        alike = (mine == theirs) | (mine.isnan() & theirs.isnan())  # [_CHUNK]; also of infinities
        gap = torch.where(alike, 0.0, (mine - theirs).abs())  # [_CHUNK]
        gap = torch.where(gap.isnan(), math.inf, gap)  # a number against NaN
        largest = max(largest, float(gap.max()))
        apart += float(gap.square().sum())
        norm += float(torch.where(mine.isfinite(), mine, 0.0).square().sum())
    if not math.isfinite(apart):
        return largest, math.inf
    return largest, math.sqrt(apart / norm) if norm else math.inf if apart else 0.0


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _stream_lines(rank: int, a: Contents, b: Contents) -> Iterator[str]:
    mine, theirs = a.streams.get(rank), b.streams.get(rank)
    if mine is None or theirs is None:
        yield f"rank {rank}: random streams only in {'b' if mine is None else 'a'}"
        return
    for name in dict.fromkeys([*mine, *theirs]):
        if mine.get(name) != theirs.get(name):
            yield f"rank {rank}: the random stream of {name} differs"
