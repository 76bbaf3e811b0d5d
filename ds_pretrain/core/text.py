"""Input files and values, read and shown: text, JSON, a value in a message, a line, a plot."""

import contextlib
import json
import logging
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import isfinite, log
from pathlib import Path
from typing import Any, TextIO

from ds_pretrain.core.errors import InputError
from ds_pretrain.core.jsonl import show_value


def read_text(path: str | Path, what: str) -> str:
    """The text of an input file without its byte order mark.

    Raises:
        InputError: it cannot be read; `what` names the setting that asked for it.
    """
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(
            f"{what}: cannot read {path} ({error.strerror}); check the path (it is taken from the "
            f"folder in which you start: {Path.cwd()})"
        ) from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"{what}: {path} is not UTF-8 text ({error.reason} at byte {error.start})"
        ) from error
    except ValueError as error:  # a null character
        raise InputError(
            f"{what}: {show_value(str(path))} is not a path ({error}); check the path"
        ) from error


def parse_json(text: str, name: str) -> dict[str, Any]:
    """One JSON object. `name` names the file in messages.

    Raises:
        InputError: a syntax error, a key given twice, NaN or Infinity, or something else than an object.
    """
    try:
        data = json.loads(text, object_pairs_hook=_refuse_duplicates, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise InputError(f"{name} is not valid JSON: {error}") from error
    except _WrongJsonError as error:
        raise InputError(f"{name} {error}") from None
    except RecursionError:
        raise InputError(f"{name} is not valid JSON: nested too deeply; expected a few levels") from None
    except ValueError as error:  # a number of thousands of digits
        raise InputError(f"{name} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise InputError(f"{name} must hold one JSON object, found {_name_json_type(data)}")
    return data


def format_count_of(amount: int, one: str, several: str | None = None) -> str:
    """ "1 sequence", "1,200 sequences"; `several` where it is not `one` with an s."""
    return f"{amount:,} {one if amount == 1 else several or f'{one}s'}"


def format_plain(value: Any) -> str:
    """A value of a record as an operator reads it, none of it in Python's spelling."""
    if isinstance(value, str):
        return value
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {format_plain(one)}" for key, one in value.items()) or "nothing"
    if isinstance(value, list | tuple):
        return ", ".join(map(format_plain, value)) or "nothing"
    return str(value)


def format_epochs(epochs: float, beyond: float | None = None) -> str:
    """ "0.37 epochs", "0.0012 epochs"; with so many digits that more than `beyond` reads as more."""
    text = f"{epochs:.2f}" if epochs == 0 or epochs >= 0.1 else f"{epochs:.2g}"
    digits = 3
    while beyond is not None and epochs > beyond >= float(text):
        text, digits = f"{epochs:.{digits}g}", digits + 1
    return f"{text} epochs"


def join_listed(items: Sequence[object], most: int = 16) -> str:
    """The first of them, and a sign that there are more."""
    return ", ".join(map(str, items[:most])) + (", ..." if len(items) > most else "")


def find_changed_fields(
    old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = ""
) -> dict[str, tuple[Any, Any]]:
    """Dotted path to (old, new) of every leaf that differs."""
    changes: dict[str, tuple[Any, Any]] = {}
    for key in dict.fromkeys([*old, *new]):
        path, before, after = f"{prefix}{key}", old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            changes |= find_changed_fields(before, after, f"{path}.")
        elif before != after:
            changes[path] = (before, after)
    return changes


def _name_json_type(value: Any) -> str:
    names = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


class _WrongJsonError(Exception):
    pass


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for key, value in pairs:
        if key in data:
            raise _WrongJsonError(f"gives the key `{key}` twice; keep one")
        data[key] = value
    return data


def _refuse_constant(text: str) -> Any:
    raise _WrongJsonError(f"holds {text}, which is not JSON; write a number")


def format_duration(seconds: float) -> str:
    """Seconds as the two units that matter: "45s", "12m 05s", "3h 20m", "4d 07h"."""
    whole = max(0, round(seconds))
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if whole < 60:
        return f"{whole}s"
    if minutes < 60:
        return f"{minutes}m {whole % 60:02d}s"
    if hours < 24:
        return f"{hours}h {minutes % 60:02d}m"
    return f"{days}d {hours % 24:02d}h"


def format_count(number: float) -> str:
    """A count with three significant digits: "950", "12.3k", "4.19M", "1.20T"."""
    value = float(number)
    for suffix in ("", "k", "M", "B", "T"):
        if abs(value) < 999.5 or suffix == "T":
            break
        value /= 1000
    digits = 0 if suffix == "" or abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f}{suffix}"


def say(stream: TextIO | None, text: str) -> bool:
    """Print a line and flush it; False, and nothing worse, if the stream is closed or its reader is gone."""
    if stream is None:
        return False
    try:
        try:
            stream.write(text + "\n")
        except UnicodeEncodeError:  # LANG=C
            stream.write(text.encode("ascii", "backslashreplace").decode() + "\n")
        stream.flush()
    except (OSError, ValueError):
        discard_unread(stream)
        return False
    return True


def discard_unread(stream: TextIO) -> None:
    """Send what is left in a broken stream's buffer nowhere.

    Otherwise Python fails to flush it at exit and turns the exit code into 120:
    https://docs.python.org/3/library/signal.html#note-on-sigpipe
    """
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)


def draw_plot(columns: Sequence[Sequence[float]], height: int, logarithmic: bool = False) -> list[str]:
    """Lines that draw the range of each column's values, with the highest and the lowest in front.

    A logarithmic scale takes values above 0 only.
    """
    values = [value for column in columns for value in column]
    high, low = max(values), min(values)

    def row(value: float) -> int:
        if high == low:
            return 0
        share = log(high / value) / log(high / low) if logarithmic else (high - value) / (high - low)
        return round(share * (height - 1))

    rows = [[" "] * len(columns) for _ in range(height)]
    for x, column in enumerate(columns):
        if column:
            top, bottom = row(max(column)), row(min(column))
            for y in range(top, bottom + 1):
                rows[y][x] = "|" if bottom > top else "-"
    labels = {height - 1: f"{low:9.4g}", 0: f"{high:9.4g}"}
    return [f"{labels.get(y, ''):9} {''.join(line)}".rstrip() for y, line in enumerate(rows)]


def draw_loss_plot(
    curve: Sequence[tuple[int, float]],
    marks: Sequence[str],
    legend: Mapping[str, str],
    width: int,
    height: int,
) -> str:
    """(step, loss) on a logarithmic scale, with a line of marks below: a character for each point.

    A column shows that of its marks which comes first in `legend`, which says what each means.
    """
    width = min(width, len(curve))
    edges = [index * len(curve) // width for index in range(width + 1)] if width else []
    columns = [[loss for _, loss in curve[a:b] if isfinite(loss) and loss > 0] for a, b in pairwise(edges)]
    if not any(columns):
        return "no finite loss to plot"
    line = "".join(next((m for m in legend if m in marks[a:b]), " ") for a, b in pairwise(edges))
    first, last = f"{curve[0][0]:,}", f"{curve[-1][0]:,}"
    steps = f"{first}{last:>{max(len(last) + 1, width - len(first))}}" if width > 1 else first
    meanings = "  ".join(f"{mark} {meaning}" for mark, meaning in legend.items())
    return "\n".join(
        [
            *draw_plot(columns, height, logarithmic=True),
            f"{'verdict':9} {line}".rstrip(),
            f"{'step':9} {steps}   {meanings}",
        ]
    )


class LogToStderr(logging.Handler):
    """Writes the log to stderr: rank 0's records, and those of other ranks that are marked EVERY_RANK.

    A reader that has gone (a closed pipe) costs the lines and never the run.
    """

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self._rank = rank

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record, with its rank where that is not rank 0."""
        every_rank = getattr(record, "every_rank", False)
        if self._rank == 0 or every_rank:
            where = "" if self._rank == 0 else f"rank {self._rank} on {platform.node()}: "
            say(sys.stderr, f"ds_pretrain: {where}{self.format(record)}")

    def install(self) -> None:
        """Take the place of every other handler of our log."""
        logger = logging.getLogger("ds_pretrain")
        logger.handlers[:] = [self]
        logger.setLevel(logging.INFO)
        logger.propagate = False
