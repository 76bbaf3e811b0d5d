"""Documents come out of every kind of source, in one order, from any place on."""

import gzip
import json
from pathlib import Path

import pytest

from ds_pretrain.data import documents as module
from ds_pretrain.data.documents import DocumentMode, Input, find_inputs, identity, read_documents
from ds_pretrain.errors import InputError

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


def test_a_folder_gives_its_text_files_by_path_and_leaves_the_rest(tmp_path: Path) -> None:
    for name in ("b.py", "a/z.py", "a/y.json", ".git/x.py", "a/__pycache__/c.py", ".hidden"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "a/image.png").write_bytes(b"\x89PNG\0\0")
    inputs = find_inputs([str(tmp_path)], "file")
    assert [Path(one.name).relative_to(tmp_path).as_posix() for one in inputs] == [
        "a/y.json",
        "a/z.py",
        "b.py",
    ]
    assert {one.reader for one in inputs} == {"text"}


def test_a_folder_with_files_of_rows_is_a_data_set(tmp_path: Path) -> None:
    write_rows(tmp_path / "1.parquet", ROWS[:3])
    write_rows(tmp_path / "0.jsonl", ROWS[3:5])
    (tmp_path / "README.md").write_text("about")
    inputs = find_inputs([str(tmp_path)], "file")
    got = [text for one in inputs for text in read_documents(one, "file", "text", "train")]
    assert got == [*TEXTS[3:5], *TEXTS[:3]]


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


def test_every_bad_source_is_reported_at_once(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError) as caught:
        find_inputs(["./nothing", str(tmp_path / "empty"), "missing.jsonl", str(tmp_path / "gone")], "file")
    assert len(caught.value.problems) == 4
    assert "./nothing: no such file or folder; expected either, or the name of a hub data set" in str(
        caught.value
    )
    assert "empty: a folder without text, jsonl, parquet or arrow files" in str(caught.value)


def test_a_text_too_large_for_one_document_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_DOCUMENT_BYTES", 10)
    (tmp_path / "a.txt").write_text("12345678901")
    with pytest.raises(
        InputError, match=r"11 bytes are too many for one document \(at most 10\).*--document line"
    ):
        find_inputs([str(tmp_path / "a.txt")], "file")
    assert len(find_inputs([str(tmp_path / "a.txt")], "line")) == 1


def test_another_name_is_a_hub_data_set_and_its_failure_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked = []

    def offline(*args: object, **kwargs: object) -> None:
        asked.append((args, kwargs))
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(
        InputError, match=r"owner/set:en: cannot be read from the hub \(no route to the hub\)"
    ):
        read("owner/set:en")
    assert asked == [(("owner/set", "en"), {"split": "train", "streaming": True})]


def test_the_identity_follows_names_sizes_and_times() -> None:
    one = Input("a", "text", 3, 5)
    others = [
        Input("b", "text", 3, 5),
        Input("a", "json", 3, 5),
        Input("a", "text", 4, 5),
        Input("a", "text", 3, 6),
    ]
    assert len({identity([x]) for x in [one, *others]} | {identity([one, one]), identity([])}) == 7
