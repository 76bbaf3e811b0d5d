"""Inputs of `prepare` are found, or refused all at once, before anything is written."""

import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest

from ds_pretrain.core.errors import InputError
from ds_pretrain.data import inputs as module
from ds_pretrain.data.indexed import IndexedWriter
from ds_pretrain.data.inputs import DocumentMode, Input, compute_identity, find_inputs, read_documents


def names(inputs: list[Input], folder: Path) -> list[str]:
    return [Path(one.name).relative_to(folder).as_posix() for one in inputs]


def fill(folder: Path, *files: str) -> Path:
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


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


def test_what_prepare_wrote_is_not_text(tmp_path: Path) -> None:
    """Its own outputs, half done and done, other corpora, and tokenizers, inside the folder of the texts."""
    texts = fill(tmp_path / "texts", "a.txt", "b.json", "sub/c.txt")
    own = fill(texts, "out.bin", "out.json", "out.partial/state.json", "tok/tokenizer.json", "tok/notes.txt")
    writer = IndexedWriter(texts / "sub/earlier", 10)
    writer.add([np.array([1, 2])])
    writer.finish({})
    half = IndexedWriter(texts / "half", 10)
    half.close()
    fill(texts, "half.partial/state.json", "bpe/tokenizer.json", "bpe/training.json")
    said: list[str] = []
    written = [own / name for name in ("out.bin", "out.idx", "out.json", "out.partial", "tok")]
    for source in (texts, Path(os.path.relpath(texts))):
        found = find_inputs([str(source)], "file", written, said.append)
        assert names(found, source) == ["a.txt", "b.json", "sub/c.txt"]
    assert f"{texts}: ignored 5 files that prepare writes or takes its tokenizer from (the first: " in said[0]


def test_the_folder_of_a_tokenizer_may_hold_the_texts(tmp_path: Path) -> None:
    texts = fill(tmp_path / "both", "tokenizer.json", "a.txt", "sub/b.txt")
    own = [texts, texts / "tokenizer.json"]
    assert names(find_inputs([str(texts)], "file", own), texts) == ["a.txt", "sub/b.txt"]
    assert names(find_inputs([str(texts / "sub")], "file", own), texts) == ["sub/b.txt"]


def test_naming_what_the_command_writes_is_refused(tmp_path: Path) -> None:
    fill(tmp_path, "x.json")
    (tmp_path / "link.json").symlink_to(tmp_path / "x.json")
    for name in ("x.json", "link.json"):
        with pytest.raises(
            InputError, match=rf"{name}: belongs to the tokenizer, or is what this command writes"
        ):
            find_inputs([str(tmp_path / name)], "file", [tmp_path / "x.json"])


def test_a_file_with_a_nul_byte_is_refused_by_name_and_left_out_and_said_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("text")
    (tmp_path / "a.txt").write_bytes("not UTF-8".encode("utf-16"))
    with pytest.raises(InputError, match=r"a\.txt: holds a NUL byte, so it is not UTF-8 text; convert it"):
        find_inputs([str(tmp_path / "a.txt")], "file")
    said: list[str] = []
    assert names(find_inputs([str(tmp_path)], "file", (), said.append), tmp_path) == ["b.txt"]
    assert said == [f"{tmp_path}: ignored 1 file with a NUL byte, not text (the first: {tmp_path}/a.txt)"]


def test_what_is_given_twice_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_name_problem", lambda name, kind: None)
    fill(tmp_path, "texts/a.txt")
    (tmp_path / "link.txt").symlink_to("texts/a.txt")
    here = os.path.relpath(tmp_path)
    for also in (f"{tmp_path}/texts/a.txt", f"{here}/texts/a.txt", f"{tmp_path}/link.txt", f"{here}/texts"):
        with pytest.raises(InputError, match=r"given twice.* so that it would count twice; leave one out"):
            find_inputs([f"{tmp_path}/texts", also], "file")
    with pytest.raises(InputError, match="owner/set: given twice, so that it would count twice"):
        find_inputs(["owner/set", "owner/set"], "file")


def test_a_link_inside_a_folder_does_not_count_twice(tmp_path: Path) -> None:
    fill(tmp_path, "a.txt", "c.txt")
    (tmp_path / "b.txt").symlink_to("a.txt")
    said: list[str] = []
    assert names(find_inputs([str(tmp_path)], "file", (), said.append), tmp_path) == ["a.txt", "c.txt"]
    assert said == [f"{tmp_path}: ignored 1 file linked to another of it (the first: {tmp_path}/b.txt)"]


def test_every_bad_source_is_reported_at_once(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError) as caught:
        find_inputs(["./nothing", str(tmp_path / "empty"), "missing.jsonl", str(tmp_path / "gone")], "file")
    assert len(caught.value.problems) == 4
    assert (
        "./nothing: no such file or folder; expected a file, a folder, or the name of a hub data set"
        in str(caught.value)
    )
    assert "empty: a folder without text, jsonl, parquet or arrow files" in str(caught.value)


@pytest.mark.parametrize("name", ["", "my texts", "a/b/c", "a//b", "a/b/", "~/x", "data/a.csv", "x" * 300])
def test_a_name_that_can_only_be_a_path_is_never_asked_of_the_hub(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    asked: list[str] = []
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: asked.append(name))
    monkeypatch.chdir("/sys")  # a folder where nothing has a name like these
    if len(name) == 300:
        name = f"./{name}"  # longer than a name may be
    with pytest.raises(InputError, match="no such file or folder; expected a file, a folder"):
        find_inputs([name], "file")
    assert asked == []


def test_a_mistyped_folder_says_what_was_meant_and_that_the_hub_was_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    asked = []

    def dataset_info(self: object, name: str, timeout: float) -> None:
        asked.append((name, timeout))
        raise OSError("no route to the hub")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    fill(tmp_path, "my/texts/a.txt")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        InputError,
        match=r"my/texst: no such file or folder \(did you mean my/texts\?\) here, and the hub cannot be "
        r"reached \(no route to the hub\); expected a file, a folder, or the name of a hub data set",
    ):
        find_inputs(["my/texst"], "file")
    ((name, timeout),) = asked
    assert name == "my/texst"
    assert timeout <= 5


def test_a_data_set_that_the_hub_does_not_have_is_refused_before_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import httpx
    import huggingface_hub
    from huggingface_hub.errors import RepositoryNotFoundError

    def dataset_info(self: object, name: str, timeout: float) -> None:
        response = httpx.Response(404, request=httpx.Request("GET", "https://hub"))
        raise RepositoryNotFoundError("404", response=response)  # type: ignore[arg-type]

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    with pytest.raises(
        InputError, match=r"owner/set:en: no such .* here, and the hub has no dataset of that name"
    ):
        find_inputs(["owner/set:en"], "file")


def test_in_offline_mode_the_library_answers_from_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import OfflineModeIsEnabled

    def dataset_info(self: object, name: str, timeout: float) -> None:
        raise OfflineModeIsEnabled("offline")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    assert find_inputs(["owner/set"], "file") == [Input("owner/set", "hub")]


def test_what_is_neither_a_file_nor_a_folder_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(
        InputError, match="pipe: neither a file nor a folder; write what it gives to a file first"
    ):
        find_inputs([str(tmp_path / "pipe")], "file")


def test_a_compressed_file_that_was_cut_short_is_named(tmp_path: Path) -> None:
    import gzip

    whole = gzip.compress(os.urandom(100_000))
    for name, content in (
        ("cut.txt.gz", whole[:20]),
        ("not.txt.gz", b"text"),
        ("bad.txt.gz", whole[:10] + b"x" * 99),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=rf"{name}: cannot be read .*; fix it or leave it out"):
            find_inputs([str(tmp_path / name)], "file")


def test_a_folder_that_cannot_be_read_is_not_left_out_silently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, "a.txt", "closed/b.txt")
    scandir = os.scandir

    def closed(path: str) -> object:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", closed)
    with pytest.raises(InputError, match=r"closed: cannot be read \(Permission denied\)"):
        find_inputs([str(tmp_path)], "file")


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
    monkeypatch.setattr(module, "find_name_problem", lambda name, kind: None)
    (one,) = find_inputs(["owner/set:en"], "file")
    with pytest.raises(
        InputError,
        match=r"owner/set:en: no such file or folder here, and it cannot be read from the hub "
        r"\(no route to the hub\)",
    ):
        list(read_documents(one, "file", "text", "train"))
    assert asked == [(("owner/set", "en"), {"split": "train", "streaming": True})]


def test_the_identity_follows_names_sizes_and_times() -> None:
    one = Input("a", "text", 3, 5)
    others = [
        Input("b", "text", 3, 5),
        Input("a", "json", 3, 5),
        Input("a", "text", 4, 5),
        Input("a", "text", 3, 6),
    ]
    assert (
        len(
            {compute_identity([x]) for x in [one, *others]}
            | {compute_identity([one, one]), compute_identity([])}
        )
        == 7
    )


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
