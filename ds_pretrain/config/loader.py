"""Tables of a file as a frozen tree of sections: TOML text and overrides in, every problem in one report."""

import difflib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Annotated, Any, ClassVar, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ds_pretrain.core.errors import InputError
from ds_pretrain.core.jsonl import show_value
from ds_pretrain.core.text import join_listed

Fraction01 = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]

# Where pydantic's text speaks of Python (https://docs.pydantic.dev/latest/errors/validation_errors/).
_WORDS = {
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "expected a section with keys"),
    "tuple_type": "expected a list, like [...]",
    "too_short": "expected one or more",
    "union_tag_not_found": "expected a `kind`",
}


class Section(BaseModel):
    """A table of a file: frozen, strict about types, without unknown keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
    renamed: ClassVar[Mapping[str, str]] = {}  # keys of earlier versions, and what they are called now


def to_tuple(value: Any) -> Any:
    """A list of TOML as what is frozen."""
    return tuple(value) if isinstance(value, list) else value


def to_tuple_of_one_or_more(value: Any) -> Any:
    """A list of TOML, or what stands for a list of one, as what is frozen."""
    return to_tuple(value) if isinstance(value, list | tuple) else (value,)


_Root = TypeVar("_Root", bound=Section)


def parse_sections(
    text: str,
    root: type[_Root],
    overrides: Sequence[str] = (),
    name: str = "run file",
    tables_by_path: Sequence[Sequence[str]] = (),
) -> _Root:
    """TOML text and `a.b=c` overrides to a tree. A table in `tables_by_path` may be its path alone.

    Raises:
        InputError: with every unknown key, wrong type and missing key found.
    """
    try:
        data = tomllib.loads(text)
    except RecursionError:
        raise InputError(f"{name} is not valid TOML: nested too deeply; expected a few levels") from None
    except ValueError as error:  # also a number of thousands of digits
        raise InputError(f"{name} is not valid TOML: {error}") from error
    of_file = {(found["loc"], found["type"]) for found in find_errors(data, root)}
    problems = [problem for override in overrides for problem in _apply(data, override, tables_by_path)]
    for found in find_errors(data, root):
        is_of_file = not overrides or (found["loc"], found["type"]) in of_file
        problems.append(
            f"{name if is_of_file else _blame_override(overrides, found['loc'])}: {explain(found, root)}"
        )
    if problems:
        raise InputError(problems)
    return root.model_validate(data)


def find_errors(data: Mapping[str, Any], root: type[BaseModel]) -> list[Any]:
    """Return pydantic's errors for the tables of a file."""
    try:
        root.model_validate(data)
    except ValidationError as error:
        return list(error.errors())
    return []


def explain(error: Any, root: type[BaseModel], within: str = "") -> str:
    """One error of pydantic's as: where, what was found, what was expected. `within`: where `root` lies."""
    where, section = _locate(error["loc"], root)
    where = within + where
    kind, text = error["type"], error["msg"].removeprefix("Value error, ")
    if kind == "extra_forbidden":
        known = list(section.model_fields)
        key = where.split(".")[-1]
        close = difflib.get_close_matches(key, known, n=1)
        hint = f"did you mean `{close[0]}`?" if close else f"known here: {join_listed(known)}"
        if issubclass(section, Section) and key in section.renamed:
            hint = f"it is now called `{section.renamed[key]}`"
        return f"unknown key `{where}`; {hint}"
    if kind == "missing":
        return f"`{where}` is missing"
    if kind == "value_error":
        return f"`{where}`: {text}"
    expected = _WORDS.get(kind) or text.replace("Input should be", "expected").replace("'", '"')
    return f"`{where}` = {show_value(error['input'])}: {expected}"


def _locate(location: Sequence[Any], root: type[BaseModel]) -> tuple[str, type[BaseModel]]:
    """The dotted place of an error, and the section that it lies in."""
    sections, keys = [root], []
    for part in location:
        several = sections if len(sections) > 1 else []
        kinds = [s for s in several if part in get_args(s.model_fields["kind"].annotation)]
        if kinds or part == "[key]":  # the tag of a union, or the mark that a key is wrong and not its value
            sections = kinds or sections
            continue
        keys.append(str(part))
        fields = sections[0].model_fields
        sections = (find_section_models(fields[part].annotation) if part in fields else []) or sections
    return ".".join(keys), sections[0]


def find_section_models(annotation: Any) -> list[type[BaseModel]]:
    """Every section inside a type annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [m for argument in get_args(annotation) for m in find_section_models(argument)]


def _blame_override(overrides: Sequence[str], location: Sequence[str | int]) -> str:
    """The override that is nearest to what only overrides made wrong; of several the last, which won."""
    keys = [str(key) for key in location]

    def num_shared(override: str) -> int:
        own = override.partition("=")[0].strip().split(".")
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(own, keys, strict=False)))

    key, _, _ = max(reversed(overrides), key=num_shared).partition("=")
    return f"override of {key.strip()}"  # its value may hold what must not be shown


def _apply(data: dict[str, Any], override: str, tables_by_path: Sequence[Sequence[str]]) -> Iterator[str]:
    """Set one `a.b=c` in the parsed TOML; `c` is a TOML value, `none` for nothing, or else text."""
    path, equals, value = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        yield f"override {override!r} is not of the form section.key=value, like schedule.peak_lr=2e-4"
        return
    node: Any = data
    for depth, key in enumerate(keys[:-1]):
        above, node = node, node.setdefault(key, {}) if isinstance(node, dict) else _get_item(node, key)
        if isinstance(node, str) and keys[:depth] in tables_by_path:  # a path alone is short for a table
            node = above[key] = {"path": node}
        if not isinstance(node, dict | list):
            yield f"override {override!r}: {key!r} is not a section of the run file"
            return
    if isinstance(node, list):
        yield f"override {override!r}: name a key of the list's item, like phases.0.seq_len=512"
        return
    new, old = _parse_toml_value(value.strip()), node.get(keys[-1])
    if isinstance(new, str) and isinstance(old, dict) and keys[:-1] in tables_by_path:
        new = {**old, "path": new}  # files that moved keep what is said of them
    node[keys[-1]] = new


def _get_item(node: list[Any], key: str) -> Any:
    return node[int(key)] if key.isdigit() and int(key) < len(node) else None


def _parse_toml_value(text: str) -> Any:
    if text == "none":  # TOML has no word for it, and a run file just leaves the key out
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text
