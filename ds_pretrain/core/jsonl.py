"""Append-only files of JSON lines, JSON text read back as a type, and values as JSON writes them.

A record is a mapping of plain values with "event" ("step", "validation", "data", "start", "checkpoint",
"stop", ...), "step" and "attempt" (which start of the run wrote it). metrics.jsonl is the complete history
of a run, abandoned steps included: nothing in it is ever changed. `select_latest_attempt` selects the
history that counts.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

METRICS = "metrics.jsonl"  # of a run directory
_BLOCK_BYTES = 1 << 20  # read at once, from the end
_SHOWN_CHARACTERS = 80
T = TypeVar("T")
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class JsonLines:
    """Appends one strict-JSON object a line, each handed to the operating system before `write` returns.

    A number that JSON cannot hold becomes the string "nan", "inf" or "-inf". A line that a killed process
    or a full disk left torn is ended before the next one starts, so it costs one record and no more.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        size = os.fstat(self._descriptor).st_size
        self._torn = size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n"
        self.bytes_written = size  # grows with every record, whatever the restarts and rollbacks

    def write(self, record: Mapping[str, Any]) -> None:
        """Append `record`. Raises OSError when the disk refuses it."""
        text = json.dumps(_to_strict(record), allow_nan=False, ensure_ascii=False, default=str)
        line = (("\n" if self._torn else "") + text + "\n").encode("utf-8", "backslashreplace")
        self._torn = True  # until all of the line is known to be there
        done = 0
        while done < len(line):
            done += os.write(
                self._descriptor, line[done:]
            )  # unbuffered: a failed line is never tried again later
        self._torn = False
        self.bytes_written += len(line)

    def close(self) -> None:
        """Flush to the disk itself and close; closing twice is fine."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a metrics.jsonl as written, "nan" and "inf" as numbers again, torn lines skipped."""
    with path.open("rb") as file:
        yield from _parse_records(file)


def _parse_records(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):  # torn by a kill, a full disk or a power cut
            continue
        if isinstance(record, dict):
            yield _restore_value(record)


def read_metrics_backwards(path: Path) -> Iterator[dict[str, Any]]:
    """The same, the newest first: what happened last is read without the months before it."""
    with path.open("rb") as file:
        end, rest = file.seek(0, os.SEEK_END), b""
        while end > 0:
            start = max(0, end - _BLOCK_BYTES)
            file.seek(start)
            rest, *lines = (file.read(end - start) + rest).split(b"\n")
            end = start
            yield from _parse_records(reversed(lines))
        yield from _parse_records([rest])


def select_latest_attempt(
    records: Iterable[Mapping[str, Any]], event: str = "step"
) -> list[Mapping[str, Any]]:
    """The `event` records of the history that counts, by rising step.

    A step taken again (after a restart or a rollback) supersedes all that was recorded at it and later.
    """
    kept: dict[int, Mapping[str, Any]] = {}
    newest = -1
    for record in records:
        kind, step = record.get("event"), record.get("step")
        if not isinstance(step, int) or kind not in ("step", event):
            continue
        if kind == "step" and step <= newest:
            kept = {s: r for s, r in kept.items() if s < step}
        if kind == "step":
            newest = step
        if kind == event:
            kept[step] = record
    return [kept[step] for step in sorted(kept)]


def read_as(kind: type[T], text: str | bytes, extra: Literal["forbid", "ignore"] = "forbid") -> T:
    """The value that JSON text holds: a dataclass, or any other type that pydantic knows. Floats stay exact.

    Raises:
        ValueError: the first field that is missing, unknown or of another type, and what was found there.
    """
    try:
        value: T = TypeAdapter(kind).validate_json(text, strict=True, extra=extra)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        found = (
            "" if first["type"] in ("missing", "json_invalid") else f", found {show_value(first['input'])}"
        )
        raise ValueError(f"{f'`{where}`: ' if where else ''}{first['msg']}{found}") from None
    return value


def show_value(value: Any) -> str:
    """A value as JSON and TOML write it, shortened."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except RecursionError:
        text = "something nested too deeply"
    text = {"Infinity": "inf", "-Infinity": "-inf", "NaN": "nan"}.get(text, text)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."


def _to_strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, Mapping):
        return {str(k): _to_strict(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_to_strict(v) for v in value]
    return value


def _restore_value(value: Any) -> Any:
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {k: _restore_value(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_restore_value(v) for v in value]
    return value
