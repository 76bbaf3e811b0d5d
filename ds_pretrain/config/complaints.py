"""What is wrong with a value of the run file, in words of the run file and not of Python."""

import difflib
from collections.abc import Sequence
from typing import Any, get_args

from pydantic import BaseModel

from ds_pretrain.core.text import shown

# The type of a validation error of pydantic (https://docs.pydantic.dev/latest/errors/validation_errors/) to
# what was expected.
_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text, in quotes",
    "tuple_type": "a list, like [...]",
    "dict_type": "a table, like {{ name = ... }}",
    "model_type": "a table, like [{where}]",
    "model_attributes_type": "a table, like [{where}]",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "literal_error": "{expected}",
    "string_pattern_mismatch": "letters, digits, dots, dashes and underscores, not a dot or dash first",
    "string_too_short": "text that is not empty",
}
_LISTS_OF_TABLES = {"phases": "[[phases]] with a name, a seq_len and a mixture"}
_SOURCE = 'like web = "data/web"'
_UNION_TAGS = ("cosine", "wsd")


def explain(error: Any, root: type[BaseModel]) -> str:
    """One validation error of pydantic's as: where, what was found, what was expected."""
    keys = [str(key) for key in error["loc"] if key not in (*_UNION_TAGS, "[key]")]
    where, kind, found = ".".join(keys), error["type"], error.get("input")
    if kind == "extra_forbidden":
        known = _known_keys(keys[:-1], error["loc"], root)
        close = difflib.get_close_matches(keys[-1], known, n=1)
        hint = f"did you mean `{close[0]}`?" if close else f"known here: {', '.join(known)}"
        return f"unknown key `{where}`; {hint}"
    if kind == "missing":
        return f"`{where}` is missing"
    if kind == "union_tag_not_found":
        return f'`{where}.kind` is missing; expected "cosine" or "wsd"'
    if kind == "union_tag_invalid":
        return f'`{where}.kind` is {shown(error["ctx"]["tag"])}; expected "cosine" or "wsd"'
    if kind == "too_short":
        return f"`{where}` is empty; add one {_LISTS_OF_TABLES.get(where, _SOURCE)}"
    if kind == "value_error":
        return f"`{where}`: {error['msg'].removeprefix('Value error, ')}"
    return f"`{where}` = {shown(found)}: {_expected(error, where)}"


def _expected(error: Any, where: str) -> str:
    if where in _LISTS_OF_TABLES and error["type"] == "tuple_type":
        return f"expected a list of tables: {_LISTS_OF_TABLES[where]}"
    if _is_source(where) and error["type"] == "model_type":
        return 'expected a path in quotes, like "data/web"'
    template = _EXPECTED.get(error["type"])
    if template is None:
        return str(error["msg"])
    context = error.get("ctx", {})
    words = template.format(where=where, **context).replace("'", '"')
    return f"expected {words}"


def _is_source(where: str) -> bool:
    return "sources" in where.split(".")[:-1]


def _known_keys(path: Sequence[str], location: Sequence[Any], root: type[BaseModel]) -> list[str]:
    """The keys of the section at `path`, for "did you mean"."""
    section = root
    for key in path:
        if key.isdigit():
            continue
        field = section.model_fields.get(key)
        candidates = section_models(field.annotation) if field else []
        if any(tag in location for tag in _UNION_TAGS):
            candidates = [
                m for m in candidates if get_args(m.model_fields["kind"].annotation)[0] in location
            ] or candidates
        if not candidates:  # a name of the user's, like sources.web: stay at what the values are
            continue
        section = candidates[0]
    return [field.alias or name for name, field in section.model_fields.items()]


def section_models(annotation: Any) -> list[type[BaseModel]]:
    """Every section inside a type annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [m for argument in get_args(annotation) for m in section_models(argument)]
