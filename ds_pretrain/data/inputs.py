"""The files and data sets behind the arguments of `prepare`, and the documents in them.

Plain text is read here; everything with columns is read by `datasets`, streaming.
"""

import gzip
import hashlib
import itertools
import os
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from ds_pretrain.core.errors import InputError
from ds_pretrain.core.text import format_count_of
from ds_pretrain.data.indexed import MAGIC
from ds_pretrain.data.tokenizer import find_name_problem, format_first_line

DocumentMode = Literal["file", "line", "paragraph"]
MAX_DOCUMENT_BYTES = 256 << 20  # a text file read as one document is held in memory
_ROWS = 512  # read at once

_COLUMNS = {".jsonl": "json", ".ndjson": "json", ".parquet": "parquet", ".arrow": "arrow"}
_READERS = {**_COLUMNS, ".json": "json"}  # within a folder a .json may be anything


@dataclass(frozen=True)
class Input:
    """One file, or one data set of the hub, that documents are read from."""

    name: str
    reader: str  # "text", "hub", or the `datasets` builder that reads it
    num_bytes: int = 0
    modified_ns: int = 0


def find_inputs(
    sources: Sequence[str],
    document: DocumentMode,
    own: Sequence[Path] = (),
    say: Callable[[str], None] = lambda line: None,
) -> list[Input]:
    """The files behind `sources`, in the order given and, within a folder, of their paths.

    A folder with jsonl, parquet or arrow files is a data set: those are read, and nothing else in it. In any
    other folder each text file is read; hidden files, `__pycache__`, files with a NUL byte and what `prepare`
    wrote are not: `own`, the files and folders that this call writes or takes its tokenizer from, and earlier
    corpora and tokenizers. What is left out is said.

    Raises:
        InputError: a source is not there, holds nothing to read, is given twice, or is too large.
    """
    inputs: list[Input] = []
    problems: list[str] = []
    writes = frozenset(Path(os.path.realpath(path)) for path in own)
    for source in sources:
        try:
            inputs += _find_behind(source, writes, say)
        except InputError as error:
            problems += error.problems
    problems += _find_duplicates(inputs)
    problems += [
        f"{one.name}: {one.num_bytes} bytes are too many for one document (at most {MAX_DOCUMENT_BYTES}); "
        "split it with --document line or --document paragraph"
        for one in inputs
        if one.reader == "text" and document == "file" and one.num_bytes > MAX_DOCUMENT_BYTES
    ]
    if problems:
        raise InputError(problems)
    return inputs


def compute_identity(inputs: Sequence[Input]) -> str:
    """A hash of names, sizes and times: another one means that the documents may have changed."""
    text = "\n".join(f"{one.name}\t{one.reader}\t{one.num_bytes}\t{one.modified_ns}" for one in inputs)
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def open_text(path: Path) -> BinaryIO:
    """The bytes of a text file; a `.gz` is unpacked on the way."""
    return cast(BinaryIO, gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def _find_behind(source: str, own: frozenset[Path], say: Callable[[str], None]) -> list[Input]:
    if os.path.isdir(source) and source:
        return _list_folder(Path(source), own, say)
    if os.path.isfile(source):
        return [_build_single_file(Path(source), own)]
    if os.path.exists(source):
        raise InputError(f"{source}: neither a file nor a folder; write what it gives to a file first")
    if problem := find_name_problem(source, "dataset"):
        raise InputError(
            f"{source or repr(source)}: {problem}; expected a file, a folder, or the name of a hub data set"
        )
    return [Input(source, "hub")]


def _build_single_file(path: Path, own: frozenset[Path]) -> Input:
    reader = _READERS.get(_get_ending(path), "text")
    if Path(os.path.realpath(path)) in own:
        raise InputError(
            f"{path}: belongs to the tokenizer, or is what this command writes; name the text, or choose "
            "another --out"
        )
    if reader == "text" and not _is_text(path):
        raise InputError(f"{path}: holds a NUL byte, so it is not UTF-8 text; convert it, or leave it out")
    return _build_file(path, reader)


def _list_folder(folder: Path, own: frozenset[Path], say: Callable[[str], None]) -> list[Input]:
    root = Path(os.path.realpath(folder))
    inside = frozenset(path for path in own if root in path.parents)
    # By name as text, so that the order is the same on every file system.
    paths = sorted(filter(Path.is_file, _walk(folder, inside)), key=Path.as_posix)
    columns = [path for path in paths if _get_ending(path) in _COLUMNS]
    kept: dict[str, Path] = {}  # by what a link leads to
    left_out: dict[str, list[Path]] = defaultdict(list)  # by the reason
    for path in columns or paths:
        real = os.path.realpath(path)
        if not columns and (Path(real) in own or _is_of_corpus(path)):
            left_out["that prepare writes or takes its tokenizer from"].append(path)
        elif real in kept:
            left_out["linked to another of it"].append(path)
        elif not columns and not _is_text(path):
            left_out["with a NUL byte, not text"].append(path)
        else:
            kept[real] = path
    for why, found in left_out.items():
        say(f"{folder}: ignored {format_count_of(len(found), 'file')} {why} (the first: {found[0]})")
    if not kept:
        raise InputError(f"{folder}: a folder without text, jsonl, parquet or arrow files")
    return [_build_file(path, _COLUMNS[_get_ending(path)] if columns else "text") for path in kept.values()]


def _walk(folder: Path, own: frozenset[Path]) -> Iterator[Path]:
    """All that is in a folder and below, without what is hidden and folders that `prepare` wrote."""

    def refuse(error: OSError) -> None:
        raise InputError(f"{error.filename}: cannot be read ({error.strerror}); fix it or leave it out")

    for where, folders, files in os.walk(folder, followlinks=True, onerror=refuse):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".")
            and name != "__pycache__"
            and Path(os.path.realpath(Path(where) / name)) not in own
            and not _is_written(Path(where) / name)
        )
        yield from (Path(where) / name for name in files if not name.startswith("."))


def _is_written(folder: Path) -> bool:
    """A corpus half done, or a tokenizer that --train-tokenizer wrote."""
    half_done = folder.suffix == ".partial" and (folder / "lengths").is_file()
    return half_done or ((folder / "tokenizer.json").is_file() and (folder / "training.json").is_file())


def _is_of_corpus(path: Path) -> bool:
    """One of PREFIX.bin, .idx and .json that belong together."""
    index = path.with_suffix(".idx")
    if path.suffix not in (".bin", ".idx", ".json") or not index.is_file():
        return False
    with index.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def _find_duplicates(inputs: Sequence[Input]) -> Iterator[str]:
    seen: dict[str, str] = {}
    for one in inputs:
        key = one.name if one.reader == "hub" else os.path.realpath(one.name)
        if key in seen:
            also = "" if seen[key] == one.name else f" (also as {seen[key]})"
            yield f"{one.name}: given twice{also}, so that it would count twice; leave one out"
        seen.setdefault(key, one.name)


def _build_file(path: Path, reader: str) -> Input:
    status = path.stat()
    return Input(str(path), reader, status.st_size, status.st_mtime_ns)


def _get_ending(path: Path) -> str:
    """`.jsonl` for `a.jsonl` and `a.jsonl.gz`."""
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


def _is_text(path: Path) -> bool:
    """No NUL byte at its beginning, the rule of git and grep; compressed text counts."""
    try:
        with open_text(path) as file:
            return b"\0" not in file.read(8192)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path}: cannot be read ({reason}); fix it or leave it out") from error


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
        where = "from the hub" if one.reader == "hub" else f"as {one.reader}"
        here = "no such file or folder here, and it " if one.reader == "hub" else ""
        raise InputError(
            f"{one.name}: {here}cannot be read {where} ({format_first_line(error)}); fix it or leave it out"
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
        yield from _split_paragraphs(lines)


def _split_paragraphs(lines: Iterable[str]) -> Iterator[str]:
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
