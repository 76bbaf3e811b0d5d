"""Writes the table of docs/run-file.md from the schema, so that the page cannot drift.

    python -m tests.run_file_page

Everything outside the two markers of the page is kept.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ds_pretrain.config.loader import find_section_models
from ds_pretrain.config.schema import RopeSection, Run

PAGE = Path(__file__).parent.parent / "docs/run-file.md"
BEGIN, END = "<!-- begin: written by python -m tests.run_file_page -->", "<!-- end -->"


def build_table() -> str:
    """The table of all keys: name, default, meaning."""
    lines = ["| key | default | meaning |", "|---|---|---|"]
    lines += [_row(name, field) for name, field in Run.model_fields.items() if field.description]
    for section, field in Run.model_fields.items():
        models = find_section_models(field.annotation)
        if not models:
            continue
        lines.append(
            f"| **`{'[[phases]]' if section == 'phases' else f'[{section}]'}`** | | {_doc(models)} |"
        )
        if section == "sources":
            lines.append("| `sources.NAME` | required | A path, or a table of the keys below. |")
        lines += _rows("sources.NAME" if section == "sources" else section, models)
    return "\n".join(lines)


def build_page(page: str) -> str:
    """The page with its table replaced."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{build_table()}\n{END}{rest.partition(END)[2]}"


def _rows(section: str, models: list[type[BaseModel]]) -> Iterator[str]:
    fields: dict[str, tuple[FieldInfo, list[type[BaseModel]]]] = {}
    for model in models:
        for name, field in model.model_fields.items():
            fields.setdefault(name, (field, []))[1].append(model)
    for name, (field, owners) in fields.items():
        if len(models) > 1 and name == "kind":
            both = " ".join(_text(m.model_fields["kind"]) for m in models)
            yield f"| `{section}.kind` | required | {both} |"
            continue
        only = (
            f" Only for `{owners[0].__name__.removesuffix('Section').lower()}`."
            if len(owners) < len(models)
            else ""
        )
        defaults: dict[str, list[str]] = {}
        for model in owners:
            kind = model.__name__.removesuffix("Section").lower()
            defaults.setdefault(_default(model.model_fields[name]), []).append(kind)
        shown = [text if len(defaults) == 1 else f"{text} ({', '.join(of)})" for text, of in defaults.items()]
        yield f"| `{section}.{name}` | {', '.join(shown)} | {_text(field)}{only} |"
        if RopeSection in find_section_models(field.annotation):
            yield from _rows(f"{section}.{name}", [RopeSection])


def _row(name: str, field: FieldInfo) -> str:
    return f"| `{name}` | {_default(field)} | {_text(field)} |"


def _default(field: FieldInfo) -> str:
    return "required" if field.is_required() else _show(field.get_default(call_default_factory=True))


def _show(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(_show, value))}]"
    return f"{value}" if isinstance(value, int | float) else f'"{value}"'


def _doc(models: list[type[BaseModel]]) -> str:
    if len(models) > 1:
        return "The learning-rate schedule, by its `kind`."
    optional = any(
        models[0] in find_section_models(field.annotation) and not field.is_required()
        for field in Run.model_fields.values()
    )
    first = (models[0].__doc__ or "").split(". ")[0].split("\n")[0].rstrip(".")
    return f"{first}.{' Optional.' if optional else ''}"


def _text(field: FieldInfo) -> str:
    return " ".join((field.description or "").split())


if __name__ == "__main__":
    PAGE.write_text(build_page(PAGE.read_text()))
