"""Input files and values, read and shown: text, JSON, and a value in a message."""

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from ds_pretrain.core.errors import InputError

_SHOWN_CHARACTERS = 80


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
        raise InputError(f"{what}: {shown(str(path))} is no path ({error}); check the path") from error


def parse_json(text: str, name: str) -> dict[str, Any]:
    """One JSON object. `name` names the file in messages.

    Raises:
        InputError: a syntax error, a key given twice, NaN or Infinity, or something else than an object.
    """
    try:
        data = json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise InputError(f"{name} is not valid JSON: {error}") from error
    except _WrongJsonError as error:
        raise InputError(f"{name} {error}") from None
    except RecursionError:
        raise InputError(f"{name} is not valid JSON: nested too deeply; expected a few levels") from None
    except ValueError as error:  # a number of thousands of digits
        raise InputError(f"{name} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise InputError(f"{name} must hold one JSON object, found {_json_name(data)}")
    return data


def shown(value: Any) -> str:
    """A value as JSON and TOML write it, shortened."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except RecursionError:
        text = "something nested too deeply"
    text = {"Infinity": "inf", "-Infinity": "-inf", "NaN": "nan"}.get(text, text)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."


def counted(amount: int, one: str, several: str | None = None) -> str:
    """ "1 sequence", "1,200 sequences"; `several` where it is not `one` with an s."""
    return f"{amount:,} {one if amount == 1 else several or f'{one}s'}"


def plain_words(value: Any) -> str:
    """A value of a record as a person reads it, none of it in Python's spelling."""
    if isinstance(value, str):
        return value
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {plain_words(one)}" for key, one in value.items()) or "nothing"
    if isinstance(value, list | tuple):
        return ", ".join(map(plain_words, value)) or "nothing"
    return str(value)


def counted_epochs(epochs: float, beyond: float | None = None) -> str:
    """ "0.37 epochs", "0.0012 epochs"; with so many digits that more than `beyond` reads as more."""
    text = f"{epochs:.2f}" if epochs == 0 or epochs >= 0.1 else f"{epochs:.2g}"
    digits = 3
    while beyond is not None and epochs > beyond >= float(text):
        text, digits = f"{epochs:.{digits}g}", digits + 1
    return f"{text} epochs"


def listed(items: Sequence[object], most: int = 16) -> str:
    """The first of them, and a sign that there are more."""
    return ", ".join(map(str, items[:most])) + (", ..." if len(items) > most else "")


def changed_fields(
    old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = ""
) -> dict[str, tuple[Any, Any]]:
    """Dotted path to (old, new) of every leaf that differs."""
    changes: dict[str, tuple[Any, Any]] = {}
    for key in dict.fromkeys([*old, *new]):
        path, before, after = f"{prefix}{key}", old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            changes |= changed_fields(before, after, f"{path}.")
        elif before != after:
            changes[path] = (before, after)
    return changes


def say(stream: TextIO, text: str) -> bool:
    """Print a line and flush it; False, and nothing worse, if the stream is closed or its reader is gone."""
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


def _json_name(value: Any) -> str:
    names = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


class _WrongJsonError(Exception):
    pass


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for key, value in pairs:
        if key in data:
            raise _WrongJsonError(f"gives the key `{key}` twice; keep one")
        data[key] = value
    return data


def _refuse_constant(text: str) -> Any:
    raise _WrongJsonError(f"holds {text}, which is no JSON; write a number")
