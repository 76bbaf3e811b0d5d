"""Where measurements go: an append-only file of JSON lines, and a terminal.

A record is a mapping of plain values with "event" ("step", "validation", "data", "start", "checkpoint",
"stop", ...), "step" and "attempt" (which start of the run wrote it). metrics.jsonl is the complete history
of a run, thrown-away work included: nothing in it is ever changed. `latest_attempt` reads the history that
counts out of it.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

from ds_pretrain.core.text import counted, counted_epochs, plain_words, say

_BLOCK_BYTES = 1 << 20  # read at once, from the end
_LONGEST = 400  # characters of a text in the terminal
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class Sink(Protocol):
    """Takes records. May raise from `write` whatever its medium raises; the monitor survives it."""

    def write(self, record: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


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
        text = json.dumps(_strict(record), allow_nan=False, ensure_ascii=False, default=str)
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
        yield from _records(file)


def _records(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:  # torn by a kill, a full disk or a power cut
            continue
        if isinstance(record, dict):
            yield _restored(record)


def read_metrics_backwards(path: Path) -> Iterator[dict[str, Any]]:
    """The same, the newest first: what happened last is read without the months before it."""
    with path.open("rb") as file:
        end, rest = file.seek(0, os.SEEK_END), b""
        while end > 0:
            start = max(0, end - _BLOCK_BYTES)
            file.seek(start)
            rest, *lines = (file.read(end - start) + rest).split(b"\n")
            end = start
            yield from _records(reversed(lines))
        yield from _records([rest])


def latest_attempt(records: Iterable[Mapping[str, Any]], event: str = "step") -> list[Mapping[str, Any]]:
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


class Terminal:
    """Writes a line a record; falls silent when nobody reads any more, and leaves the exit code alone."""

    def __init__(self, stream: TextIO, last_step: int) -> None:
        self._stream: TextIO | None = stream
        self._last_step = last_step

    def write(self, record: Mapping[str, Any]) -> None:
        """Print `record`, without colors or carriage returns: a log file reads like the terminal."""
        is_step = record["event"] == "step"
        text = step_line(record, self._last_step) if is_step else event_line(record)
        if self._stream is not None and not say(self._stream, text):
            self._stream = None

    def close(self) -> None:
        """Nothing is held back, so nothing is left to do."""


def step_line(record: Mapping[str, Any], last_step: int) -> str:
    """One training step for people; what is unknown or off is left out."""
    step = record["step"]
    parts = [
        f"step {step:,}/{last_step:,} {100 * step / max(1, last_step):.1f}%",
        f"loss {_fixed(record['loss'], 4)}",
    ]
    if record.get("z_loss") is not None:
        parts.append(f"z {record['z_loss']:.2e}")
    parts.append(f"lr {record['learning_rate']:.2e}")
    norm, clip = record["grad_norm"], record["clip_factor"]
    parts.append("norm non-finite" if norm is None else f"norm {_fixed(norm, 3)}")
    if clip is not None:
        parts.append(f"clip {clip:.2f}")
    if not record["update_applied"]:
        parts.append("UPDATE DROPPED")
    if (rate := record.get("tokens_per_second")) is not None:
        parts.append(f"{count(rate)} tok/s")
    if record["step_seconds"] > 0:
        parts.append(f"data wait {min(1.0, record['data_wait_seconds'] / record['step_seconds']):.0%}")
    if (mfu := record.get("mfu")) is not None:
        parts.append(f"MFU {mfu:.1%}")
    parts.append(f"{count(record['tokens'])} tokens")
    if (eta := record.get("eta_seconds")) is not None:
        parts.append(f"ETA {duration(eta)}")
    return "  ".join(parts)


def event_line(record: Mapping[str, Any]) -> str:
    """A validation or an event for people."""
    kind = record["event"]
    at = f" at step {record['step']:,}" if record.get("step") is not None else ""
    if kind == "validation":
        named = "  ".join(_validated(name, record) for name in record["losses"])
        return f"validation{at}  loss {named}"
    if kind == "data":
        read = "  ".join(_read(name, source) for name, source in record["sources"].items())
        return f"data{at}  {record['phase']}: {read}"
    skip = ("event", "step", "attempt", "time")
    fields = {k: v for k, v in record.items() if k not in skip and v is not None}
    return "  ".join([f"{kind}{at}", *(f"{k} {_plain(k, v)}" for k, v in fields.items())])


def _validated(source: str, record: Mapping[str, Any]) -> str:
    """Its mean loss, those of the last two buckets of positions, and the scores at the longest prompts."""
    text = f"{source} {_fixed(record['losses'][source], 4)}"
    ends = list(record.get("by_position", {}).get(source, {}).items())[-2:]
    if ends:
        text += f" ({', '.join(f'to {int(end):,}: {_fixed(loss, 4)}' for end, loss in ends)})"
    for length, scores in list(record.get("retrieval", {}).get(source, {}).items())[-1:]:
        found = [round(score, 2) + 0.0 for score in sorted(scores.values())]  # never -0.00
        text += f" key at {int(length):,}: {found[0]:.2f} to {found[-1]:.2f}"
    return text


def _read(name: str, source: Mapping[str, Any]) -> str:
    """What was read of a source, and its share of the phase beside the one that it has by weight."""
    text = f"{name} {count(source['tokens'])} tokens, {counted_epochs(source['epochs'])}"
    if source["skipped_tokens"]:
        text += f", {count(source['skipped_tokens'])} skipped"
    share, weight = source["share"], source["weight"]
    return text if share is None or weight is None else f"{text} ({share:.1%} for {weight:.1%})"


def duration(seconds: float) -> str:
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


def count(number: float) -> str:
    """A count with three significant digits: "950", "12.3k", "4.19M", "1.20T"."""
    value = float(number)
    for suffix in ("", "k", "M", "B", "T"):
        if abs(value) < 999.5 or suffix == "T":
            break
        value /= 1000
    digits = 0 if suffix == "" or abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f}{suffix}"


def _fixed(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if abs(value) < 1e4 or not math.isfinite(value) else f"{value:.3e}"


def _plain(name: str, value: Any) -> str:
    if name == "bytes":
        return f"{value / 1e6:,.1f} MB"
    if name.endswith("seconds"):
        return f"{value:.3g}"
    if name == "skipped" and isinstance(value, Mapping):
        draws = f"draws {value.get('start')} to {value.get('stop')}"
        return f"{value.get('phase')} {draws}, {counted(int(value.get('num_samples') or 0), 'sample')}"
    if _is_bulky(value):
        return f"{len(value):,} in metrics.jsonl"
    if isinstance(value, float):
        return f"{value:.6g}"
    text = plain_words(value)
    line = " ".join("".join(c if c.isprintable() else " " for c in text[:_LONGEST]).split())
    return line if len(text) <= _LONGEST else f"{line}... ({len(text):,} characters in metrics.jsonl)"


def _is_bulky(value: Any) -> bool:
    """True for what is told in a file only: anything nested, and a list of more than four."""
    if isinstance(value, Mapping):
        return True
    return isinstance(value, list | tuple) and (
        len(value) > 4 or any(isinstance(item, Mapping | list | tuple) for item in value)
    )


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, Mapping):
        return {str(k): _strict(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(v) for v in value]
    return value


def _restored(value: Any) -> Any:
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {k: _restored(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_restored(v) for v in value]
    return value
