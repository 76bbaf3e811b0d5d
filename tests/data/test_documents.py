"""Documents come out of every kind of source, in one order, from any place on."""

import gzip
import json
from pathlib import Path

import pytest

from ds_pretrain.core.errors import InputError
from ds_pretrain.data.documents import read_documents
from ds_pretrain.data.inputs import DocumentMode, find_inputs

ROWS = [{"text": f"row {n}", "other": n} for n in range(1200)]
TEXTS = [str(row["text"]) for row in ROWS]


def read(
    source: Path | str, document: DocumentMode = "file", start: int = 0, column: str = "text"
) -> list[str]:
    (one,) = find_inputs([str(source)], document)
    return list(read_documents(one, document, column, "train", start))


def write_rows(path: Path, rows: list[dict[str, object]]) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines))
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=100)
    elif path.suffix == ".arrow":
        table = pa.Table.from_pylist(rows)
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    else:
        path.write_bytes(lines)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.parquet", "a.arrow"])
def test_files_with_columns_give_their_rows_from_any_row_on(tmp_path: Path, name: str) -> None:
    path = write_rows(tmp_path / name, ROWS)
    for start in (0, 1, 511, 512, 700, 1199, 1200):
        assert read(path, start=start) == TEXTS[start:]


def test_a_text_file_is_one_document_or_its_lines_or_its_paragraphs(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\r\ntwo\n\n \nthree\n\n")
    assert read(path) == ["one\r\ntwo\n\n \nthree\n\n"]
    assert read(path, "line") == ["one", "two", "", " ", "three", ""]
    assert read(path, "paragraph") == ["one\ntwo", "three"]
    assert read(path, "paragraph", start=1) == ["three"]
    path.with_suffix(".txt.gz").write_bytes(gzip.compress(b"packed"))
    assert read(f"{path}.gz") == ["packed"]


def test_bytes_that_are_not_utf8_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    assert read(tmp_path / "a.txt") == ["caf\ufffd"]


def test_a_missing_text_is_an_empty_document(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"text": "x"}, {"text": None}, {"text": ""}])
    assert read(path) == ["x", "", ""]


def test_an_unknown_column_is_refused_with_those_there_are(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.parquet", ROWS)
    with pytest.raises(
        InputError, match=r"no column 'body'; it has 'text', 'other': pass one with --text-column"
    ):
        read(path, column="body")


def test_a_column_of_numbers_is_refused(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(InputError, match="column 'other' holds int, expected text"):
        read(path, column="other")


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.arrow", "a.jsonl.gz"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x00garbage\xff" * 20)
    with pytest.raises(InputError, match=rf"{name}: cannot be read as .*fix it or leave it out"):
        read(tmp_path / name)
