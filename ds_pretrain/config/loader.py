"""From the text of a run file and the overrides of a command line to the tree of `config.py`."""

import tomllib
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

from pydantic import ValidationError

from ds_pretrain.config.complaints import explain
from ds_pretrain.config.schema import Run, Section, WatchdogSection
from ds_pretrain.core.errors import InputError

_SOURCES = (["sources"], ["validation", "sources"])


class _WatchdogOnly(Section):
    watchdog: WatchdogSection = WatchdogSection()


def parse_watchdog(overrides: Sequence[str]) -> WatchdogSection:
    """The defaults, with `watchdog.key=value` overrides. Raises InputError with every problem."""
    data: dict[str, Any] = {}
    problems = [problem for override in overrides for problem in _apply(data, override)]
    try:
        section = _WatchdogOnly.model_validate(data).watchdog
    except ValidationError as error:
        raise InputError(problems + [explain(e, _WatchdogOnly) for e in error.errors()]) from None
    if problems:
        raise InputError(problems)
    return section


def parse_run(text: str, overrides: Sequence[str] = (), name: str = "run file") -> Run:
    """TOML text and `a.b=c` overrides to a `Run`.

    Raises:
        InputError: with every unknown key, wrong type and missing key found.
    """
    try:
        data = tomllib.loads(text)
    except RecursionError:
        raise InputError(f"{name} is not valid TOML: nested too deeply; expected a few levels") from None
    except ValueError as error:  # also a number of thousands of digits
        raise InputError(f"{name} is not valid TOML: {error}") from error
    problems = [problem for override in overrides for problem in _apply(data, override)]
    try:
        run = Run.model_validate(data)
    except ValidationError as error:
        of_file = {(e["loc"], e["type"]) for e in _errors(tomllib.loads(text))} if overrides else set()
        problems += [
            f"{name if not overrides or (e['loc'], e['type']) in of_file else _blamed(overrides, e['loc'])}: "
            f"{explain(e, Run)}"
            for e in error.errors()
        ]
        raise InputError(problems) from None
    if problems:
        raise InputError(problems)
    return run


def _errors(data: dict[str, Any]) -> list[Any]:
    """What is wrong with the tables of a run file."""
    try:
        Run.model_validate(data)
    except ValidationError as error:
        return list(error.errors())
    return []


def _blamed(overrides: Sequence[str], location: Sequence[str | int]) -> str:
    """The override that is nearest to what only overrides made wrong; of several the last, which won."""
    keys = [str(key) for key in location]

    def num_shared(override: str) -> int:
        own = override.partition("=")[0].strip().split(".")
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(own, keys, strict=False)))

    key, _, _ = max(reversed(overrides), key=num_shared).partition("=")
    return f"override of {key.strip()}"  # its value may hold what must not be shown


def _apply(data: dict[str, Any], override: str) -> Iterator[str]:
    """Set one `a.b=c` in the parsed TOML; `c` is a TOML value, `none` for nothing, or else text."""
    path, equals, value = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        yield f"override {override!r} is not of the form section.key=value, like schedule.peak=2e-4"
        return
    node: Any = data
    for depth, key in enumerate(keys[:-1]):
        above, node = node, node.setdefault(key, {}) if isinstance(node, dict) else _item(node, key)
        if isinstance(node, str) and keys[:depth] in _SOURCES:  # a path alone is short for a table
            node = above[key] = {"path": node}
        if not isinstance(node, dict | list):
            yield f"override {override!r}: {key!r} is not a section of the run file"
            return
    if isinstance(node, list):
        yield f"override {override!r}: name a key of the list's item, like phases.0.seq_len=512"
        return
    new, old = _toml_value(value.strip()), node.get(keys[-1])
    if isinstance(new, str) and isinstance(old, dict) and keys[:-1] in _SOURCES:
        new = {**old, "path": new}  # files that moved keep what is said of them
    node[keys[-1]] = new


def _item(node: list[Any], key: str) -> Any:
    return node[int(key)] if key.isdigit() and int(key) < len(node) else None


def _toml_value(text: str) -> Any:
    if text == "none":  # TOML has no word for it, and a run file just leaves the key out
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text
