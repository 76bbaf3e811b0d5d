"""A recorded loss curve, point by point: from a CSV file, or from the step records of a run."""

import csv
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO

from ds_pretrain.core.errors import InputError

_MOST_STEPS = 10**15  # a number that big is no step
_MOST_PROBLEMS = 10
_NAN = {"nan", "-nan", "none", "null", "inf", "-inf", "+inf", "infinity"}
_COLUMNS = ("step", "loss", "grad_norm")  # in any case; others are ignored, a learning rate as well


@dataclass(frozen=True)
class Point:
    """One recorded step, as the judgement wants it."""

    step: int
    loss: float  # nan if it was
    loss_max_rank: float
    grad_norm: float | None = None
    has_norm: bool = True  # False: not recorded, rather than not finite
    update_applied: bool | None = None  # not recorded in a CSV file
    phase: str = ""


def recorded_point(record: Mapping[str, Any]) -> Point | None:
    """A step record of metrics.jsonl; None if its step or its loss is missing or is none."""
    try:
        loss = _recorded(record["loss"])
        norm, applied = record.get("grad_norm"), record.get("update_applied")
        return Point(
            step=_whole(record["step"]),
            loss=loss,
            loss_max_rank=_recorded(record.get("loss_max_rank", loss)),
            grad_norm=None if norm is None else _recorded(norm),
            has_norm="grad_norm" in record,
            update_applied=applied if isinstance(applied, bool) else None,
            phase=sys.intern(str(record.get("phase", ""))),  # one text for all of them
        )
    except (KeyError, ValueError, OverflowError):
        return None


def _recorded(value: Any) -> float:
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(value)
    return float(value)


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MOST_STEPS:
        raise ValueError(value)
    return value


def read_csv(path: Path) -> list[Point]:
    """Columns `step` and `loss`, and `grad_norm` if recorded; others are ignored, blank is not recorded.

    Raises:
        InputError: it is no such file, with the first lines that cannot be read.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            points, problems = _read_rows(path, file)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} cannot be read as CSV: {error}") from error
    if not points and not problems:
        problems = [f"{path} has no rows; expected one for each step"]
    if len(problems) > _MOST_PROBLEMS:
        problems = [*problems[:_MOST_PROBLEMS], f"and {len(problems) - _MOST_PROBLEMS} more lines like these"]
    if problems:
        raise InputError(problems)
    _check_order(path, points)
    return points


def _read_rows(path: Path, file: TextIO) -> tuple[list[Point], list[str]]:
    reader = csv.reader(file)
    places = _places(path, next(reader, []))
    points, problems = [], []
    for row in reader:
        if not row:  # an empty line
            continue
        try:
            points.append(_csv_point(*(row[at] if at < len(row) else "" for at in places)))
        except ValueError as error:
            problems.append(f"{path}, line {reader.line_num}: {error}")
    return points, problems


def _places(path: Path, header: Sequence[str]) -> tuple[int, ...]:
    """Where step, loss and grad_norm stand in a row; beyond its end if there is none."""
    found = {
        name: [at for at, column in enumerate(header) if column.strip().lower() == name] for name in _COLUMNS
    }
    exact = {name: [at for at in found[name] if header[at] == name] or found[name] for name in _COLUMNS}
    if not exact["step"] or not exact["loss"]:
        raise InputError(f"{path} has the columns {list(header)}; expected step, loss and maybe grad_norm")
    if twice := [name for name in _COLUMNS if len(exact[name]) > 1]:
        raise InputError(
            f"{path} has the column {twice[0]} twice ({list(header)}); name one of them otherwise"
        )
    return tuple(exact[name][0] if exact[name] else len(header) for name in _COLUMNS)


def _csv_point(step: str, loss: str, norm: str = "") -> Point:
    value = _number("loss", loss)
    return Point(
        step=int(_number("step", step)),
        loss=value,
        loss_max_rank=value,
        grad_norm=_number("grad_norm", norm) if norm.strip() else None,
        has_norm=bool(norm.strip()),
    )


def _number(name: str, text: str) -> float:
    text = text.strip()
    try:
        value = math.nan if text.lower() in _NAN else float(text)
    except ValueError:
        raise ValueError(f"{name} is {text!r}; expected a number") from None
    if name == "step" and not (math.isfinite(value) and value == int(value) and 0 <= value < _MOST_STEPS):
        raise ValueError(f"step is {text!r}; expected a whole number below 10^15")
    return value


def _check_order(path: Path, points: Sequence[Point]) -> None:
    for before, after in pairwise(points):
        if after.step <= before.step:
            raise InputError(
                f"{path}: step {after.step} stands behind step {before.step}; expected rising steps: "
                "of steps taken again keep the last"
            )
