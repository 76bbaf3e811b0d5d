"""Files that are written whole or not at all, and what is said when they cannot be."""

import fcntl
import os
from pathlib import Path

import pytest

from ds_pretrain.core.errors import InputError
from ds_pretrain.core.files import (
    FileLock,
    check_folder,
    compute_checksum,
    ensure_writable_folder,
    free_bytes,
    write_atomic,
)


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_atomic(path, "old")
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["state.json"]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.json"
    write_atomic(path, "old")

    def fail(source: object, target: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space left"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["state.json"]


def test_what_is_written_is_synced_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def note_sync(descriptor: int) -> None:
        events.append("sync folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "sync file")
        fsync(descriptor)

    def note_replace(source: str, target: str) -> None:
        events.append("name")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_replace)
    write_atomic(tmp_path / "state.json", "text")
    assert events == ["sync file", "name", "sync folder"]


def test_a_written_file_has_the_rights_that_the_umask_gives(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_atomic(tmp_path / "a", "text")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640


def test_the_checksum_is_sha256(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert (
        compute_checksum(tmp_path / "a") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    )


def test_a_folder_is_created_and_left_empty(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    assert check_folder(folder, "out") is None
    assert not folder.exists()
    ensure_writable_folder(folder, "out")
    assert os.listdir(folder) == []
    assert check_folder(folder, "out") is None


def test_a_folder_below_a_file_is_refused_with_its_setting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "out"
    with pytest.raises(InputError) as raised:
        ensure_writable_folder(folder, "run.toml: out")
    message = f"run.toml: out = {folder}: cannot write there"
    assert str(raised.value).startswith(message)
    assert "choose another folder" in str(raised.value)
    problem = check_folder(folder, "run.toml: out")
    assert problem is not None
    assert problem.startswith(f"{message} ({tmp_path / 'file'} is not a folder)")


def test_a_folder_without_the_right_to_write_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    problem = check_folder(tmp_path / "out", "out")
    assert problem is not None
    assert f"{tmp_path} is not writable for you" in problem


def test_free_bytes_are_those_of_the_file_system(tmp_path: Path) -> None:
    status = os.statvfs(tmp_path)
    assert 0 < free_bytes(tmp_path) <= status.f_blocks * status.f_frsize


def test_a_lock_refuses_a_second_holder_and_names_the_first(tmp_path: Path) -> None:
    for path in (tmp_path / "a.lock", tmp_path):  # a file, or a folder itself
        first, second = (FileLock(path, lambda owner: f"taken by {owner or 'somebody'}") for _ in range(2))
        with first:
            assert first.is_held
            with pytest.raises(InputError, match=r"taken by (pid|somebody)"):
                second.take()
            assert not second.try_take()
        assert second.try_take()
        second.release()


def test_a_file_system_without_locks_counts_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with FileLock(tmp_path / "a.lock", str) as lock:
        assert lock.is_held
