"""The terminal of a run: one plain line for each record."""

import math
from collections.abc import Mapping
from typing import Any, TextIO

from ds_pretrain.core.text import (
    format_count,
    format_count_of,
    format_duration,
    format_epochs,
    format_plain,
    say,
)

_LONGEST = 400  # characters of a text


class Terminal:
    """Writes a line a record; falls silent when nobody reads any more, and leaves the exit code alone."""

    def __init__(self, stream: TextIO, last_step: int) -> None:
        self._stream: TextIO | None = stream
        self._last_step = last_step

    def write(self, record: Mapping[str, Any]) -> None:
        """Print `record`, without colors or carriage returns: a log file reads like the terminal."""
        is_step = record["event"] == "step"
        text = format_step(record, self._last_step) if is_step else format_event(record)
        if self._stream is not None and not say(self._stream, text):
            self._stream = None

    def close(self) -> None:
        """Do nothing: no record is held back."""


def format_step(record: Mapping[str, Any], last_step: int) -> str:
    """One training step for people; what is unknown or off is left out."""
    step = record["step"]
    parts = [
        f"step {step:,}/{last_step:,} {100 * step / max(1, last_step):.1f}%",
        f"loss {_format_fixed(record['loss'], 4)}",
    ]
    if record.get("z_loss") is not None:
        parts.append(f"z {record['z_loss']:.2e}")
    parts.append(f"lr {record['learning_rate']:.2e}")
    norm, clip = record["grad_norm"], record["clip_factor"]
    parts.append("norm non-finite" if norm is None else f"norm {_format_fixed(norm, 3)}")
    if clip is not None:
        parts.append(f"clip {clip:.2f}")
    if not record["update_applied"]:
        parts.append("UPDATE SKIPPED")
    if (rate := record.get("tokens_per_second")) is not None:
        parts.append(f"{format_count(rate)} tok/s")
    if record["step_seconds"] > 0:
        parts.append(f"data wait {min(1.0, record['data_wait_seconds'] / record['step_seconds']):.0%}")
    if (mfu := record.get("mfu")) is not None:
        parts.append(f"MFU {mfu:.1%}")
    parts.append(f"{format_count(record['tokens'])} tokens")
    if (eta := record.get("eta_seconds")) is not None:
        parts.append(f"ETA {format_duration(eta)}")
    return "  ".join(parts)


def format_event(record: Mapping[str, Any]) -> str:
    """A validation or an event for people."""
    kind = record["event"].replace("_", " ")
    at = f" at step {record['step']:,}" if record.get("step") is not None else ""
    if kind == "validation":
        named = "  ".join(_format_validation(name, record) for name in record["losses"])
        return f"validation{at}  loss {named}"
    if kind == "data":
        read = "  ".join(_read(name, source) for name, source in record["sources"].items())
        return f"data{at}  {record['phase']}: {read}"
    skip = ("event", "step", "attempt", "time")
    fields = {k: v for k, v in record.items() if k not in skip and v is not None}
    words = [(name, _format_field(name, value)) for name, value in fields.items()]
    parts = (text if text.startswith(f"{name} ") else f"{name} {text}" for name, text in words)
    return "  ".join([f"{kind}{at}", *parts])


def _format_validation(source: str, record: Mapping[str, Any]) -> str:
    """Format a source's mean loss, the last two position buckets, and the longest prompts' scores."""
    text = f"{source} {_format_fixed(record['losses'][source], 4)}"
    ends = list(record.get("by_position", {}).get(source, {}).items())[-2:]
    if ends:
        text += f" ({', '.join(f'to {int(end):,}: {_format_fixed(loss, 4)}' for end, loss in ends)})"
    for length, scores in list(record.get("retrieval", {}).get(source, {}).items())[-1:]:
        found = [round(score, 2) + 0.0 for score in sorted(scores.values())]  # never -0.00
        text += f" key at {int(length):,}: {found[0]:.2f} to {found[-1]:.2f}"
    return text


def _read(name: str, source: Mapping[str, Any]) -> str:
    """Format the tokens read from a source, and its share beside its mixture weight."""
    text = f"{name} {format_count(source['tokens'])} tokens, {format_epochs(source['epochs'])}"
    if source["skipped_tokens"]:
        text += f", {format_count(source['skipped_tokens'])} skipped"
    share, weight = source["share"], source["weight"]
    return text if share is None or weight is None else f"{text} ({share:.1%} for {weight:.1%})"


def _format_fixed(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if abs(value) < 1e4 or not math.isfinite(value) else f"{value:.3e}"


def _format_field(name: str, value: Any) -> str:
    if name == "bytes":
        return f"{value / 1e6:,.1f} MB"
    if name.endswith("seconds"):
        return f"{value:.3g}"
    if name == "skipped" and isinstance(value, Mapping):
        draws = f"draws {value.get('start')} to {value.get('stop')}"
        return (
            f"{value.get('phase')} {draws}, {format_count_of(int(value.get('num_samples') or 0), 'sample')}"
        )
    if _is_bulky(value):
        return f"{len(value):,} in metrics.jsonl"
    if isinstance(value, float):
        return f"{value:.6g}"
    text = format_plain(value)
    line = " ".join("".join(c if c.isprintable() else " " for c in text[:_LONGEST]).split())
    return line if len(text) <= _LONGEST else f"{line}... ({len(text):,} characters in metrics.jsonl)"


def _is_bulky(value: Any) -> bool:
    """True for what is told in a file only: anything nested, and a list of more than four."""
    if isinstance(value, Mapping):
        return True
    return isinstance(value, list | tuple) and (
        len(value) > 4 or any(isinstance(item, Mapping | list | tuple) for item in value)
    )
