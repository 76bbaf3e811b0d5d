"""The documents of any source, one after another, from any place on, in bounded memory.

Plain text is read here; everything with columns is read by `datasets`, streaming.
"""

import gzip
import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from ds_pretrain.errors import InputError

DocumentMode = Literal["file", "line", "paragraph"]
MAX_DOCUMENT_BYTES = 256 << 20  # a text file read as one document is held in memory

_COLUMNS = {".jsonl": "json", ".ndjson": "json", ".parquet": "parquet", ".arrow": "arrow"}
_READERS = {**_COLUMNS, ".json": "json"}  # within a folder a .json may be anything
_ROWS = 512  # read at once


@dataclass(frozen=True)
class Input:
    """One file, or one data set of the hub, that documents are read from."""

    name: str
    reader: str  # "text", "hub", or the `datasets` builder that reads it
    num_bytes: int = 0
    modified_ns: int = 0


def find_inputs(sources: Sequence[str], document: DocumentMode) -> list[Input]:
    """The files behind `sources`, in the order given and, within a folder, of their paths.

    A folder with jsonl, parquet or arrow files is a data set: those are read, and nothing else in it. In any
    other folder each text file is read; hidden files, `__pycache__` and files with a NUL byte are not.

    Raises:
        InputError: a source is not there, holds nothing to read, or is too large for one document.
    """
    inputs, problems = [], []
    for source in sources:
        path = Path(source)
        if path.is_dir():
            found = _in_folder(path)
            if not found:
                problems.append(f"{source}: a folder without text, jsonl, parquet or arrow files")
        elif path.is_file():
            found = [_file(path, _READERS.get(_ending(path), "text"))]
        elif path.is_absolute() or source.startswith(".") or _ending(path) in {*_READERS, ".txt"}:
            problems.append(
                f"{source}: no such file or folder; expected either, or the name of a hub data set"
            )
            continue
        else:
            found = [Input(source, "hub")]
        inputs += found
    problems += [
        f"{one.name}: {one.num_bytes} bytes are too many for one document (at most {MAX_DOCUMENT_BYTES}); "
        "split it with --document line or --document paragraph"
        for one in inputs
        if one.reader == "text" and document == "file" and one.num_bytes > MAX_DOCUMENT_BYTES
    ]
    if problems:
        raise InputError(problems)
    return inputs


def identity(inputs: Sequence[Input]) -> str:
    """A hash of names, sizes and times: another one means that the documents may have changed."""
    text = "\n".join(f"{one.name}\t{one.reader}\t{one.num_bytes}\t{one.modified_ns}" for one in inputs)
    return hashlib.sha256(text.encode()).hexdigest()


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
        where = " from the hub" if one.reader == "hub" else f" as {one.reader}"
        raise InputError(f"{one.name}: cannot be read{where} ({reason}); fix it or leave it out") from error


def _in_folder(folder: Path) -> list[Input]:
    paths = []
    for where, folders, files in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
        paths += [Path(where) / name for name in files if not name.startswith(".")]
    # As text, so that the order is the same on every file system.
    paths = sorted((path for path in paths if path.is_file()), key=lambda path: path.as_posix())
    columns = [path for path in paths if _ending(path) in _COLUMNS]
    if columns:
        return [_file(path, _READERS[_ending(path)]) for path in columns]
    return [_file(path, "text") for path in paths if _is_text(path)]


def _file(path: Path, reader: str) -> Input:
    status = path.stat()
    return Input(str(path), reader, status.st_size, status.st_mtime_ns)


def _ending(path: Path) -> str:
    """`.jsonl` for `a.jsonl` and `a.jsonl.gz`."""
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


def _is_text(path: Path) -> bool:
    """No NUL byte at its beginning, the rule of git and grep; compressed text counts."""
    try:
        with _open(path) as file:
            return b"\0" not in file.read(8192)
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read ({error.strerror or error}); fix it or leave it out"
        ) from error


def _open(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def _read_text(path: Path, document: DocumentMode) -> Iterator[str]:
    """Bytes that are not UTF-8 become U+FFFD: one odd file does not end a long run."""
    with _open(path) as file:
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
