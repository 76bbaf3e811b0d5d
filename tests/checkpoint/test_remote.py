"""A remote returns what was uploaded, in a folder and by an S3 API; no error shows a secret."""

import hashlib
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

from ds_pretrain.checkpoint import remote as module
from ds_pretrain.checkpoint.manifest import FileEntry
from ds_pretrain.checkpoint.remote import Remote, hide_secrets, open_remote
from ds_pretrain.core.errors import InputError
from tests.checkpoint.remotes import BUCKET, SECRET, BreakingWay, use_s3


def _summed(content: bytes) -> FileEntry:
    return FileEntry(len(content), hashlib.sha256(content).hexdigest())


@pytest.mark.parametrize("size", [0, 1, (1 << 24) + 7])
def test_a_file_arrives_byte_for_byte_and_comes_back_so(place: str, size: int, tmp_path: Path) -> None:
    content = bytes(range(256)) * (size // 256 + 1)
    content = content[:size]
    (tmp_path / "shard.pt").write_bytes(content)
    remote = open_remote(place)
    assert remote.location == place
    assert remote.upload(tmp_path / "shard.pt", 7, "rng/rank_00000.pt") == _summed(content)
    assert remote.get_size(7, "rng/rank_00000.pt") == size
    assert open_remote(place).download(7, "rng/rank_00000.pt", tmp_path / "back.pt") == _summed(content)
    assert (tmp_path / "back.pt").read_bytes() == content
    assert remote.entry(7, "rng/rank_00000.pt") == _summed(content)


def test_a_file_of_many_parts_arrives_whole(
    server: tuple[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_s3(monkeypatch, *server, tmp_path)
    content = bytes(range(256)) * (110 << 12)  # 110 MiB: more than s3fs sends at once
    (tmp_path / "shard.pt").write_bytes(content)
    remote = open_remote(f"s3://{BUCKET}/parts")
    assert remote.upload(tmp_path / "shard.pt", 7, "shard.pt") == _summed(content)
    remote.delete(7)


def test_a_folder_without_a_manifest_is_no_checkpoint(place: str) -> None:
    remote = open_remote(place)
    assert (remote.list_steps(), remote.list_folders()) == ([], [])
    for step in (3, 20, 1_000_000_000):
        remote.write(step, "run_state.json", b"{}")
    for step in (3, 1_000_000_000):
        remote.write(step, "manifest.json", b"{}")
    assert remote.list_steps() == [1_000_000_000, 3]
    assert remote.list_folders() == [1_000_000_000, 20, 3]
    assert remote.read(20, "manifest.json") is None
    assert remote.read(20, "run_state.json") == b"{}"
    assert sorted(remote.list_names(3)) == ["manifest.json", "run_state.json"]
    assert (remote.get_size(20, "manifest.json"), remote.list_names(4)) == (None, [])


def test_what_another_host_wrote_is_seen_at_once(place: str) -> None:
    here, there = open_remote(place), open_remote(place)
    assert (here.list_steps(), here.read(5, "manifest.json"), here.list_names(5)) == ([], None, [])
    there.write(5, "manifest.json", b"1")
    assert (here.list_steps(), here.read(5, "manifest.json"), here.list_names(5)) == (
        [5],
        b"1",
        ["manifest.json"],
    )
    there.write(5, "manifest.json", b"22")
    assert (here.read(5, "manifest.json"), here.get_size(5, "manifest.json")) == (b"22", 2)
    there.delete(5)
    assert (here.list_steps(), here.list_folders(), here.list_names(5)) == ([], [], [])


def test_the_manifest_goes_first_when_a_checkpoint_is_deleted(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = open_remote(place)
    for name in ("a.pt", "manifest.json", "rng/rank_00000.pt"):
        remote.write(5, name, b"x")
    seen = []
    monkeypatch.setattr(
        module, "write_point", lambda name: seen.append((remote.list_steps(), remote.list_folders()))
    )
    remote.delete(5)
    assert seen == [([], [5])]
    assert remote.list_folders() == []
    remote.delete(5)  # it is gone: no error
    remote.remove(5, "manifest.json")


def test_what_is_not_there_cannot_be_fetched_and_the_error_names_it(place: str, tmp_path: Path) -> None:
    remote = open_remote(place)
    with pytest.raises(FileNotFoundError, match=r"cannot read shard\.pt of step 5"):
        remote.download(5, "shard.pt", tmp_path / "back.pt")
    assert remote.entry(5, "shard.pt") is None
    with pytest.raises(FileNotFoundError, match=r"cannot upload shard\.pt of step 5"):
        remote.upload(tmp_path / "nothing", 5, "shard.pt")


def test_a_copy_that_fails_leaves_nothing_under_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = open_remote(str(tmp_path / "vault"))
    remote.write(5, "manifest.json", b"{}")
    (tmp_path / "shard.pt").write_bytes(b"x")

    def refuse(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "fsync", refuse)
    with pytest.raises(OSError, match=r"cannot upload shard\.pt of step 5: .*No space left on device"):
        remote.upload(tmp_path / "shard.pt", 5, "shard.pt")
    monkeypatch.undo()
    assert remote.list_names(5) == ["manifest.json"]


def test_opening_leaves_nothing_behind(place: str, tmp_path: Path) -> None:
    remote = open_remote(place)
    assert remote._names(remote._root) == []


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("nowhere://a/b", "nowhere:// is not a protocol that fsspec knows"),
        ("gs://a/b", r"needs the package gcsfs, .* install it on every host \(pip install gcsfs\)"),
        ("abfs://a/b", r"needs the package adlfs"),
        (
            "s3://no-such-bucket/b",
            r"small object cannot be written, .*bucket does not exist.*check that the location exists",
        ),
        ("/proc/nothing", r"small object cannot be written, read and removed there .*/proc/nothing"),
    ],
)
def test_a_place_that_cannot_be_used_is_refused_with_what_to_do(
    place: str, message: str, server: tuple[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_s3(monkeypatch, *server, tmp_path)
    for package in ("gcsfs", "adlfs"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError, match=message) as caught:
        open_remote(place)
    assert str(caught.value).startswith(f"checkpoint.upload_to = {place}: ")


def test_a_place_that_forgets_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.local import LocalFileSystem

    monkeypatch.setattr(LocalFileSystem, "cat_file", lambda self, path: b"other")
    with pytest.raises(InputError, match="reads back as something else"):
        open_remote(str(tmp_path))


def test_a_place_says_whose_it_is_and_an_empty_word_says_nothing(place: str) -> None:
    remote = open_remote(place)
    assert remote.read_label() is None
    remote.write_label(b"")  # as a writer leaves it that is killed at a store which is not atomic
    assert open_remote(place).read_label() is None
    remote.write_label(b'{"name": "mine"}')
    assert open_remote(place).read_label() == b'{"name": "mine"}'


def test_a_kill_while_it_is_said_whose_a_folder_is_leaves_no_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = open_remote(str(tmp_path / "vault"))
    found = []
    fsync = module.os.fsync

    def watched(descriptor: int) -> None:
        found.append(remote.read_label())
        fsync(descriptor)

    monkeypatch.setattr(module.os, "fsync", watched)
    remote.write_label(b"mine")
    assert found == [None, b"mine"]  # before it is synced, and when its name is


def test_unfinished_copies_are_listed_wherever_they_lie(place: str, tmp_path: Path) -> None:
    remote = open_remote(place)
    assert remote.list_unfinished(5) == []
    for name in ("a.pt", ".a.pt.0123", "rng/.b.pt.4567"):
        remote.write(5, name, b"x")
    expected = [".a.pt.0123", "rng/.b.pt.4567"] if remote._is_local else []
    assert remote.list_unfinished(5) == expected


def test_a_store_that_does_not_answer_is_an_error_and_not_an_empty_one(
    server: tuple[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    way = BreakingWay(server)
    use_s3(monkeypatch, "127.0.0.1", way.port, tmp_path)
    remote = open_remote(f"s3://{BUCKET}/quiet")
    remote.write(5, "manifest.json", b"{}")
    way.breaks_after = 0
    for ask in (
        remote.list_steps,
        lambda: remote.read(5, "manifest.json"),
        lambda: remote.get_size(5, "manifest.json"),
    ):
        with pytest.raises(OSError, match=f"s3://{BUCKET}/quiet: cannot "):
            ask()
    way.breaks_after = None
    assert remote.list_steps() == [5]
    way.close()


class LeakyStore:
    """Raises as a careless library would: with all that it knows."""

    def __init__(self) -> None:
        self.protocol = "leaky"
        self.storage_options = {
            "client_kwargs": {"account_key": "from-the-options"},
            "endpoint": "https://here",
        }

    def invalidate_cache(self) -> None: ...

    def ls(self, path: str, detail: bool) -> list[str]:
        return [f"{path}/step_000000005"]

    def __getattr__(self, name: str) -> Any:
        def leak(*args: object, **kwargs: object) -> None:
            raise RuntimeError(
                f"PUT https://user:pass-word@host/x?X-Amz-Signature=abc123&sig=def456 refused: {SECRET}, "
                "from-the-options, Authorization: AWS4-HMAC-SHA256 Credential=ghi789, AKIAIOSFODNN7EXAMPLE"
            )

        return leak


def test_no_error_of_a_store_shows_a_credential(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: tuple[str, int]
) -> None:
    use_s3(monkeypatch, *server, tmp_path)
    remote = Remote("leaky://here", LeakyStore(), "here")
    asked = [
        remote.list_steps,
        lambda: remote.read(5, "x"),
        lambda: remote.write(5, "x", b""),
        lambda: remote.upload(tmp_path, 5, "x"),
        lambda: remote.download(5, "x", tmp_path / "y"),
        lambda: remote.delete(5),
    ]
    for ask in asked:
        with pytest.raises(OSError, match=r"leaky://here: cannot .*RuntimeError: PUT https://") as caught:
            ask()
        told = "".join(traceback.format_exception(caught.value))
        for secret in (SECRET, "from-the-options", "pass-word", "abc123", "def456", "ghi789", "AKIAIO"):
            assert secret not in told


def test_texts_are_freed_of_secrets_and_of_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_SECRET", "a+secret/value")
    monkeypatch.setenv("SOME_TOKEN", "1")
    monkeypatch.setenv("FSSPEC_S3", '{"secret": "in-the-json", "endpoint_url": "http://host"}')
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "AccountName=x;AccountKey=abcd")
    assert hide_secrets("a+secret/value a%2Bsecret%2Fvalue 1 in-the-json http://host AccountKey=efgh; x") == (
        "[hidden] [hidden] 1 [hidden] http://host AccountKey=[hidden]; x"
    )
    assert hide_secrets("at AccountName=x;AccountKey=abcd") == "at [hidden]"
    for plain in (
        "s3://vault/llama-1b: cannot read manifest.json of step 5: Unable to locate credentials",
        "Could not connect to the endpoint URL: http://host:9000/vault/step_000000005/a.pt",
        "the AWS credentials of this host have expired, basic authorization is refused",
    ):
        assert hide_secrets(plain) == plain
