"""The documents of any source, one after another, from any place on, in bounded memory.

Plain text is read here; everything with columns is read by `datasets`, streaming.
"""

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ds_pretrain.core.errors import InputError
from ds_pretrain.data.inputs import DocumentMode, Input, open_text

_ROWS = 512  # read at once


def read_documents(
    one: Input, document: DocumentMode, text_column: str, split: str, start: int = 0
) -> Iterator[str]:
    """The documents of one input from number `start` on; a missing text (null) is an empty document.

    Raises:
        InputError: it cannot be read, or has no such column.
    """
    try:
        if one.reader == "text":
            yield from itertools.islice(_read_text(Path(one.name), document), start, None)
        else:
            yield from _read_rows(one, text_column, split, start)
    except (InputError, GeneratorExit):
        raise
    except Exception as error:  # each reader of `datasets` has errors of its own
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        where = "from the hub" if one.reader == "hub" else f"as {one.reader}"
        here = "no such file or folder here, and it " if one.reader == "hub" else ""
        raise InputError(
            f"{one.name}: {here}cannot be read {where} ({reason}); fix it or leave it out"
        ) from error


def _read_text(path: Path, document: DocumentMode) -> Iterator[str]:
    """Bytes that are not UTF-8 become U+FFFD: one odd file does not end a long run."""
    with open_text(path) as file:
        if document == "file":
            yield file.read().decode("utf-8", "replace")
            return
        lines = (line.decode("utf-8", "replace").rstrip("\r\n") for line in file)
        if document == "line":
            yield from lines
            return
        yield from _paragraphs(lines)


def _paragraphs(lines: Iterable[str]) -> Iterator[str]:
    for is_text, group in itertools.groupby(lines, key=lambda line: bool(line.strip())):
        if is_text:
            yield "\n".join(group)


def _read_rows(one: Input, text_column: str, split: str, start: int) -> Iterator[str]:
    import datasets

    datasets.disable_progress_bars()
    if one.reader == "hub":
        name, _, config = one.name.partition(":")
        rows: Any = datasets.load_dataset(name, config or None, split=split, streaming=True)
    else:
        rows = datasets.load_dataset(one.reader, data_files=[one.name], split="train", streaming=True)
    for table in rows.with_format("arrow").iter(batch_size=_ROWS):
        if text_column not in table.column_names:
            found = ", ".join(repr(name) for name in table.column_names)
            raise InputError(
                f"{one.name}: no column {text_column!r}; it has {found}: pass one with --text-column"
            )
        skipped = min(start, table.num_rows)
        start -= skipped
        for text in table[text_column][skipped:].to_pylist():
            if text is not None and not isinstance(text, str):
                kind = type(text).__name__
                raise InputError(f"{one.name}: column {text_column!r} holds {kind}, expected text")
            yield text or ""
