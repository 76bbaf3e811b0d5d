"""Words, numbers and times for the logbook's page, safe in Markdown whatever the data holds."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from ds_pretrain.core.text import plain_words
from ds_pretrain.monitor.sinks import count

Record = Mapping[str, Any]
# What the records' words mean: a person reads the page, a program incidents.jsonl.
_PLAIN = {
    "blip": "a high loss of one step",
    "spike": "a spike of the loss",
    "lasting_spike": "a spike of the loss that lasts",
    "drift": "a slow rise of the loss",
    "fall": "a sudden fall of the loss",
    "norm_rise": "a high gradient norm",
    "frozen_norm": "a gradient norm that never changes",
    "non_finite": "a loss or gradient norm that is no number",
    "worse_than_guessing": "a loss worse than guessing",
    "wild_norm": "a wild gradient norm",
    "came_back": "the trouble came back",
    "passing_fault": "a passing fault",
    "data_or_state": "the data or the state",
    "other_ranks": "not to be compared, on another number of ranks",
    "unknown": "unknown",
}
_MOST_TOKENS = 1e18  # a plausible count
LONGEST_BLOCK = 8000  # characters
LONGEST_TEXT = 300  # characters of a value that is told in a line
# Everything that could open or close something in Markdown; `_` inside a word cannot.
_MARKUP = re.compile(r"[\\`*\[\]~$#]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": "&#124;"}  # `\|` is not safe in each table


def one_line(value: Any, longest: int = LONGEST_TEXT) -> str:
    """`value` as printable characters in one line, cut after `longest`."""
    text = plain_words(value)
    cut = text[: longest + 1]
    line = " ".join("".join(c if c.isprintable() else " " for c in cut).split())
    return line if len(text) <= longest else line[:longest] + "..."


def escaped(value: Any, longest: int = LONGEST_TEXT) -> str:
    """`value` in one line that Markdown, a table and HTML show as it is."""
    marked = "".join(_ENTITIES.get(c, c) for c in one_line(value, longest))
    return _MARKUP.sub(lambda found: "\\" + found[0], marked).replace("&\\#124;", "&#124;")


def block(text: str) -> str:
    """`text` as a code block that nothing in it can end."""
    text = text[:LONGEST_BLOCK]
    lines = ["".join(c if c.isprintable() else " " for c in line).rstrip() for line in text.splitlines()]
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return "\n".join([fence, *lines, fence])


def plain(value: Any) -> str:
    """A word of the records in those of a person; one of a later version as it is."""
    return _PLAIN.get(value, escaped(value)) if isinstance(value, str) else escaped(value)


def number(value: Any) -> str:
    """A count with its thousands set apart, a measurement with four digits, anything else as text."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return escaped(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def counted(amount: Any, thing: str) -> str:
    """ "1 sample", "1,200 samples"."""
    return f"{number(amount)} {thing}{'' if amount == 1 else 's'}"


def sentence(value: Any) -> str:
    """`value` escaped, with a full stop at its end."""
    text = escaped(value)
    return text if text.endswith((".", "!", "?")) else f"{text}."


def known(record: Record, *fields: str) -> Any:
    """The first of `fields` that the record has, None if it has none."""
    return next((record[field] for field in fields if record.get(field) is not None), None)


def when(record: Record) -> str:
    """The time of a record, UTC, to the second."""
    seconds = record.get("time")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        return "time unknown"
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return "time unknown"


def where(record: Record) -> str:
    """Time, step and tokens of a record, as far as it knows them."""
    parts = [when(record)]
    if (step := record.get("step")) is not None:
        parts.append(f"step {number(step)}")
    if isinstance(tokens := record.get("tokens"), int | float) and abs(tokens) < _MOST_TOKENS:
        parts.append(f"{count(tokens)} tokens")
    if (attempt := record.get("attempt")) is not None:
        parts.append(f"attempt {number(attempt)}")
    return ", ".join(parts)


def ranges(steps: list[int], most: int = 6, more: int = 0) -> str:
    """Steps as ranges: "3 to 7, 12"; after `most` of them only how many steps more, and `more` besides."""
    runs: list[list[int]] = []
    for step in sorted(set(steps)):
        if runs and step == runs[-1][1] + 1:
            runs[-1][1] = step
        else:
            runs.append([step, step])
    shown = ", ".join(f"{a:,}" if a == b else f"{a:,} to {b:,}" for a, b in runs[:most])
    left = sum(b - a + 1 for a, b in runs[most:]) + more
    return f"{shown} and {left:,} more" if left else shown
