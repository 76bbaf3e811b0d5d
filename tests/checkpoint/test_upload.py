"""Shipping is whole or not at all, goes on after anything, and never disturbs training: folder and S3 API."""

import hashlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_pretrain.checkpoint import upload
from ds_pretrain.checkpoint.manifest import FileEntry, list_published, parse_manifest, step_name
from ds_pretrain.checkpoint.remote import Remote, open_remote
from ds_pretrain.checkpoint.retention import KNOWN_GOOD, PINNED, UPLOADED, is_uploaded, prune
from ds_pretrain.checkpoint.upload import (
    NotAsListed,
    Uploader,
    UploadLoop,
    UploadProgress,
    list_not_uploaded,
    marker_name,
    upload_step,
)
from ds_pretrain.config.timeline import Multiples
from ds_pretrain.core.errors import InputError
from tests.checkpoint.remotes import BUCKET, SECRET, BreakingWay, use_s3
from tests.checkpoint.test_manifest import MANIFEST
from tests.ranks import heard

PATIENCE_SECONDS = 60.0
NAMES = ("rng/rank_00000.pt", "rng/rank_00001.pt", "run_state.json")
AGAIN = {"salt": "again", "created": "2026-01-02T00:00:00+00:00"}  # of a later save of the same step
POINTS = (
    *("upload begin", "upload file", "remote copied", "upload arrived", "upload manifest"),
    *("upload prune", "remote delete", "upload mark", "upload forget"),
)
HOLDS = ((NAMES[0], NAMES[2]), (NAMES[1],))  # what each of two hosts has


@pytest.fixture
def folder_place(tmp_path: Path) -> str:
    return str(tmp_path / "vault")


def _files(step: int, salt: str = "") -> dict[str, bytes]:
    return {name: f"{name} of {step}{salt}".encode() * 1000 for name in NAMES}


def _publish(
    root: Path,
    step: int,
    *,
    salt: str = "",
    created: str = "2026-01-01T00:00:00+00:00",
    held: Collection[str] = NAMES,
) -> Path:
    """A published checkpoint of which this host holds some files, and the manifest all."""
    files = _files(step, salt)
    entries = {n: FileEntry(len(c), hashlib.sha256(c).hexdigest()) for n, c in files.items()}
    manifest = replace(MANIFEST, step=step, created=created, files=entries)
    folder = root / step_name(step)
    for name, content in files.items():
        if name in held:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
    (folder / "manifest.json").write_text(manifest.to_json())
    return folder


def _wait_for_message(part: str, capfd: pytest.CaptureFixture[str]) -> str:
    """All that processes have said once this is part of it."""
    told, deadline = "", time.monotonic() + PATIENCE_SECONDS
    while part not in told:
        assert time.monotonic() < deadline, told
        time.sleep(0.05)
        told += capfd.readouterr().err
    return told


def _rounds(root: Path, place: str, host: int = 0, keep: int = 10) -> UploadLoop:
    return UploadLoop(root, place, host, keep, None)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of all files that are uploaded."""
    names: list[str] = []
    put = Remote.upload

    def watched(self: Remote, path: Path, step: int, name: str) -> FileEntry:
        names.append(name)
        return put(self, path, step, name)

    monkeypatch.setattr(Remote, "upload", watched)
    return names


def _hosts(tmp_path: Path, *names: str, salt: str = "") -> list[Path]:
    """The folders of hosts each of which holds the file that is named of step 10."""
    return [_publish(tmp_path / f"of {name[-12:]}", 10, held=[name], salt=salt) for name in names]


def _flip(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    return path


def _until_idle(rounds: UploadLoop) -> None:
    while rounds.run_once() == 0:
        pass


def _problem(remote: Remote, step: int) -> str | None:
    """Why there is no whole checkpoint of a step; None if there is one."""
    text = remote.read(step, "manifest.json")
    if text is None:
        return "no manifest"
    for name, entry in parse_manifest(text.decode()).files.items():
        if remote.entry(step, name) != entry:
            return f"{name} is wrong"
    return None


def _failing(text: str) -> Callable[..., Any]:
    def fail(*args: object) -> None:
        raise OSError(text)

    return fail


def _wait_for(true: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not true():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.05)


def test_what_is_published_arrives_whole_and_is_marked_here(place: str, tmp_path: Path) -> None:
    folders = [_publish(tmp_path / "here", step) for step in (10, 20)]
    _until_idle(_rounds(tmp_path / "here", place))
    remote = open_remote(place)
    assert [(step, _problem(remote, step)) for step in remote.list_steps()] == [(20, None), (10, None)]
    assert sorted(remote.list_names(10)) == ["manifest.json", "rng", "run_state.json"]
    assert all(map(is_uploaded, folders))
    mark = json.loads((folders[0] / UPLOADED).read_text())
    size = sum(map(len, _files(10).values()))
    assert (mark["location"], mark["bytes"]) == (place, size)
    assert 0 <= mark["seconds"] < 600
    assert mark["time"].endswith("+00:00")


def test_the_newest_is_shipped_first_and_one_published_meanwhile_before_older_ones(
    folder_place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (10, 20):
        _publish(tmp_path / "here", step)
    order: list[str] = []

    def shipped(folder: Path, *rest: object) -> UploadProgress:
        if not order:
            _publish(tmp_path / "here", 30)
        order.append(folder.name)
        return upload_step(folder, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(upload, "upload_step", shipped)
    _until_idle(_rounds(tmp_path / "here", folder_place))
    assert order == [step_name(20), step_name(30), step_name(10)]


@pytest.mark.parametrize(
    ("place", "kills"),
    [
        ("folder", POINTS),
        pytest.param("folder", range(99), marks=pytest.mark.slow),
        pytest.param("s3", range(0, 99, 3), marks=pytest.mark.slow),  # the same points, each slower
    ],
    indirect=["place"],
)
def test_killed_at_every_write_point_nothing_torn_is_left_and_the_next_one_finishes(
    place: str, kills: Sequence[str | int], tmp_path: Path
) -> None:
    for nth, kill in enumerate(kills):
        root, there = tmp_path / f"here{nth}", f"{place}/{nth}"
        _publish(root, 10)
        if kill in POINTS or nth % 2 == 0:  # half of the time over an earlier save of the same step
            _until_idle(_rounds(root, there, keep=1))
            _publish(root, 10, **AGAIN)
        _publish(root, 20)
        command = [sys.executable, "-m", "tests.checkpoint.killed_upload", str(root), there, str(kill)]
        done = subprocess.run(command, check=False, timeout=PATIENCE_SECONDS)
        remote = open_remote(there)
        for step in remote.list_steps():
            assert _problem(remote, step) is None, (kill, step)
        for folder in list_published(root):
            if is_uploaded(folder) and folder.name == step_name(20):
                assert remote.list_steps()[0] == 20, kill
        _until_idle(_rounds(root, there, keep=1))
        assert (remote.list_steps()[0], _problem(remote, 20), list_not_uploaded(root)) == (20, None, []), kill
        left = {marker_name(0)}  # by a kill before the very last point, and no harm
        assert sorted({*remote.list_names(20)} - left) == ["manifest.json", "rng", "run_state.json"]
        assert remote.list_unfinished(20) == []
        _publish(root, 30)
        _until_idle(_rounds(root, there, keep=1))
        assert (remote.list_folders(), _problem(remote, 30)) == ([30], None), kill
        if done.returncode == 0:  # two checkpoints of three files, and one of them deleted there
            assert isinstance(kill, int)
            assert kill >= (20 if remote._is_local else 14)
            return
        assert done.returncode == -signal.SIGKILL
    assert kills is POINTS


def test_a_step_saved_again_replaces_the_one_there_whose_manifest_goes_before_its_files_change(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds, remote, steps = _rounds(tmp_path / "here", place), open_remote(place), []
    folder = _publish(tmp_path / "here", 10)
    _until_idle(rounds)
    _publish(tmp_path / "here", 10, **AGAIN)
    assert not is_uploaded(folder)  # the mark is of the save before
    monkeypatch.setattr(
        upload,
        "write_point",
        lambda name: steps.append(remote.list_steps()) if name == "upload file" else None,
    )
    _until_idle(rounds)
    assert steps == [[], [], []]
    assert is_uploaded(folder)
    assert remote.read(10, "run_state.json") == _files(10, "again")["run_state.json"]
    assert _problem(remote, 10) is None


def test_an_old_save_that_was_left_here_never_replaces_a_later_one_there(
    folder_place: str, tmp_path: Path
) -> None:
    _publish(tmp_path / "others", 10, salt="later", created="2026-01-02T00:00:00+00:00")
    _until_idle(_rounds(tmp_path / "others", folder_place))
    folder = _publish(tmp_path / "here", 10)
    remote = open_remote(folder_place)
    assert upload_step(folder, remote, 0) is UploadProgress.UPLOADED
    assert remote.read(10, "run_state.json") == _files(10, "later")["run_state.json"]
    assert (_problem(remote, 10), is_uploaded(folder)) == (None, True)


def test_what_has_arrived_is_not_sent_again_after_it_was_read_back(
    place: str, tmp_path: Path, sent: list[str]
) -> None:
    folder, remote = _publish(tmp_path / "here", 10), open_remote(place)
    remote.write(10, "rng/rank_00000.pt", _files(10)["rng/rank_00000.pt"])
    remote.write(10, "rng/rank_00001.pt", b"x" * len(_files(10)["rng/rank_00001.pt"]))  # as long, but wrong
    assert upload_step(folder, remote, 0) is UploadProgress.UPLOADED
    assert sent == ["rng/rank_00001.pt", "run_state.json"]
    assert _problem(remote, 10) is None


def test_a_file_that_arrives_damaged_is_sent_once_more(
    folder_place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, remote = _publish(tmp_path / "here", 10), open_remote(folder_place)
    damages = iter([True, False, False, False])
    put = Remote.upload
    wrong = FileEntry(1, "00")
    monkeypatch.setattr(Remote, "upload", lambda *args: wrong if next(damages) else put(*args))
    assert upload_step(folder, remote, 0) is UploadProgress.UPLOADED
    assert _problem(remote, 10) is None
    folder = _publish(tmp_path / "here", 20)
    monkeypatch.setattr(Remote, "upload", lambda *args: wrong)
    with pytest.raises(OSError, match=r"rank_00000\.pt of step 20 arrived damaged twice"):
        upload_step(folder, remote, 0)
    assert remote.read(20, "manifest.json") is None


def test_a_manifest_that_arrives_damaged_is_not_taken_for_a_checkpoint_that_is_there(
    folder_place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, remote = _publish(tmp_path / "here", 10), open_remote(folder_place)
    write = Remote.write

    def cut(self: Remote, step: int, name: str, content: bytes) -> None:
        write(self, step, name, content[:-1] if name == "manifest.json" else content)

    monkeypatch.setattr(Remote, "write", cut)
    with pytest.raises(OSError, match="the manifest of step 10 reads back as something else"):
        upload_step(folder, remote, 0)
    assert not is_uploaded(folder)
    monkeypatch.undo()
    assert upload_step(folder, remote, 0) is UploadProgress.UPLOADED


@pytest.mark.parametrize(
    "point", ["upload begin", "upload file", "upload arrived", "upload manifest", "upload mark"]
)
def test_a_checkpoint_that_goes_away_or_is_replaced_meanwhile_is_no_error_and_not_taken_for_shipped(
    point: str, folder_place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote, folder = open_remote(folder_place), _publish(tmp_path / "here", 10)

    def at_point(act: Callable[[], object]) -> UploadProgress:
        with monkeypatch.context() as patch:
            patch.setattr(upload, "write_point", lambda name: act() if name == point else None)
            return upload_step(folder, remote, 0)

    assert at_point(lambda: folder.rename(tmp_path / "aside")) is UploadProgress.GONE
    assert upload_step(folder, remote, 0) is UploadProgress.GONE
    folder = _publish(tmp_path / "here", 20)
    at_point(lambda: _publish(tmp_path / "here", 20, **AGAIN))
    assert is_uploaded(folder) == (point == "upload begin")  # that one shipped the later save
    assert upload_step(folder, remote, 0) is UploadProgress.UPLOADED
    assert remote.read(20, "run_state.json") == _files(20, "again")["run_state.json"]
    assert _problem(remote, 20) is None


@pytest.mark.parametrize(("place", "first"), [("folder", 0), ("s3", 1)], indirect=["place"])
def test_two_hosts_ship_what_each_holds_and_the_manifest_comes_after_both(
    place: str, first: int, tmp_path: Path
) -> None:
    remote = open_remote(place)
    roots = [tmp_path / f"host{host}" for host in (0, 1)]
    folders = [_publish(root, 10, held=HOLDS[host]) for host, root in enumerate(roots)]
    shippers = [Uploader(root, place, host, 10, None) for host, root in enumerate(roots)]
    with closing(shippers[0]), closing(shippers[1]):
        shippers[first].start()
        _wait_for(lambda: remote.read(10, marker_name(first)), "the first host's files")
        assert not shippers[first].wait(1.5)
        assert (remote.list_steps(), shippers[first].list_not_uploaded()) == ([], [10])
        shippers[1 - first].start()
        assert all(shipper.wait(PATIENCE_SECONDS) for shipper in shippers)
    assert _problem(remote, 10) is None
    assert all(map(is_uploaded, folders))


def test_a_word_that_files_have_arrived_counts_for_its_own_save_only(
    folder_place: str, tmp_path: Path
) -> None:
    remote = open_remote(folder_place)
    roots = [tmp_path / f"host{host}" for host in (0, 1)]
    for host, root in enumerate(roots):
        _publish(root, 10, held=HOLDS[host])
    assert upload_step(roots[1] / step_name(10), remote, 1) is UploadProgress.WAITING
    _publish(roots[0], 10, held=HOLDS[0], **AGAIN)
    assert upload_step(roots[0] / step_name(10), remote, 0) is UploadProgress.WAITING
    assert remote.list_steps() == []
    _publish(roots[1], 10, held=HOLDS[1], **AGAIN)
    assert upload_step(roots[1] / step_name(10), remote, 1) is UploadProgress.WAITING
    assert upload_step(roots[0] / step_name(10), remote, 0) is UploadProgress.UPLOADED
    assert upload_step(roots[1] / step_name(10), remote, 1) is UploadProgress.UPLOADED
    assert _problem(remote, 10) is None
    assert sorted(remote.list_names(10)) == ["manifest.json", "rng", "run_state.json"]


def test_a_checkpoint_stays_there_until_every_host_has_seen_that_it_is_whole(
    folder_place: str, tmp_path: Path
) -> None:
    remote = open_remote(folder_place)
    roots = [tmp_path / f"host{host}" for host in (0, 1)]
    rounds = [_rounds(root, folder_place, host, keep=1) for host, root in enumerate(roots)]
    for step in (10, 20):
        for host, root in enumerate(roots):
            _publish(root, step, held=HOLDS[host])
    rounds[1].run_once()
    _until_idle(rounds[0])
    assert remote.list_steps() == [20, 10]  # host 1 would look for the older one in vain
    _until_idle(rounds[1])
    assert not list_not_uploaded(roots[1])
    for host, root in enumerate(roots):
        _publish(root, 30, held=HOLDS[host])
    for host in (1, 0, 1):
        _until_idle(rounds[host])
    assert remote.list_steps() == [30]
    assert not list_not_uploaded(roots[1])


def test_retention_there_is_the_rule_that_holds_here(place: str, tmp_path: Path) -> None:
    remote, here = open_remote(place), tmp_path / "here"
    rounds = UploadLoop(here, place, 0, 2, keep_every=Multiples(40, ((0, 0, 1),)))
    for step in (10, 20, 30, 40, 50, 60):
        _publish(here, step)
        _until_idle(rounds)
        if step == 10:
            (here / step_name(10) / PINNED).touch()
        if step == 20:
            remote.write(20, PINNED, b"")
        if step == 30:
            (here / step_name(30) / KNOWN_GOOD).touch()
    assert remote.list_steps() == [60, 50, 40, 30, 20, 10]
    _publish(here, 70)
    (here / step_name(50) / KNOWN_GOOD).touch()
    _until_idle(rounds)
    assert remote.list_steps() == [70, 60, 50, 40, 20, 10]
    assert [step for step in remote.list_steps() if remote.get_size(step, KNOWN_GOOD) is not None] == [50]
    assert [step for step in remote.list_steps() if remote.get_size(step, PINNED) is not None] == [20, 10]


def test_marks_are_not_copied_to_what_is_no_longer_there(folder_place: str, tmp_path: Path) -> None:
    folder, remote = _publish(tmp_path / "here", 10), open_remote(folder_place)
    rounds = _rounds(tmp_path / "here", folder_place)
    _until_idle(rounds)
    remote.delete(10)
    (folder / KNOWN_GOOD).touch()
    rounds.run_once()
    assert remote.list_folders() == []


def test_what_can_never_become_whole_is_deleted_there_and_nothing_else(
    folder_place: str, tmp_path: Path
) -> None:
    remote = open_remote(folder_place)
    _publish(tmp_path / "here", 20)
    (_publish(tmp_path / "here", 10) / "manifest.json").write_text("{")  # broken here, but still here
    for step in (5, 10, 30):
        remote.write(step, "run_state.json", b"{}")
    remote._fs.pipe_file(f"{remote._root}/latest", b"not ours to judge")
    _rounds(tmp_path / "here", folder_place).run_once()
    assert remote.list_folders() == [30, 20, 10]
    assert (Path(folder_place) / "latest").exists()


def test_a_checkpoint_that_is_not_shipped_stays_here_until_twice_as_many_newer_ones_as_are_kept_do(
    tmp_path: Path,
) -> None:
    root, told, remote = tmp_path / "here", list[str](), open_remote(str(tmp_path / "vault"))

    def kept(**options: bool) -> list[int]:
        with heard() as lines:
            prune(root, keep=2, keep_every=None, **options)
        told.extend(lines)
        return [int(folder.name[5:]) for folder in list_published(root)]

    for step in (10, 20, 30, 40):
        _publish(root, step)
    upload_step(root / step_name(10), remote, 0)
    assert kept(only_uploaded=True) == [40, 30, 20]
    upload_step(root / step_name(20), remote, 0)
    _publish(root, 20, salt="again")  # its mark is now of another save
    assert kept(only_uploaded=True) == [40, 30, 20]
    assert told == []
    for step in (50, 60):  # the place does not answer: it must not fill the disk
        _publish(root, step)
    assert kept(only_uploaded=True) == [60, 50, 40, 30]
    assert told == [
        "checkpoint step 20 is deleted without having been uploaded: 4 newer ones exist; fix the remote, "
        "save less often, or raise checkpoint.keep_last"
    ]
    assert kept() == [60, 50]
    assert len(told) == 1


def test_failures_are_told_and_tried_again_ever_more_slowly_and_for_ever(
    folder_place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (10, 20):
        _publish(tmp_path / "here", step)
    refuse = _failing("vault: the line is dead")
    monkeypatch.setattr(upload, "upload_step", refuse)
    rounds = _rounds(tmp_path / "here", folder_place)
    assert [rounds.run_once() for _ in range(9)] == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 9  # one a round, not one a checkpoint
    assert lines[1] == (
        f"ds_pretrain: checkpoint step 20 is not uploaded to {folder_place} yet: vault: the line "
        f"is dead; trying again in 2 seconds"
    )
    monkeypatch.undo()
    assert rounds.run_once() == 0
    monkeypatch.setattr(upload, "upload_step", refuse)
    assert rounds.run_once() == 1


def test_after_several_failures_the_place_is_opened_anew_with_credentials_that_may_be_new(
    folder_place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []
    monkeypatch.setattr(upload, "upload_step", _failing("vault: the token has expired"))
    monkeypatch.setattr(upload, "open_remote", lambda place: (opened.append(1), open_remote(place))[1])
    _publish(tmp_path / "here", 10)
    rounds = _rounds(tmp_path / "here", folder_place)
    counts = [(rounds.run_once(), len(opened))[1] for _ in range(12)]
    assert counts == [1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3]


def test_old_copies_that_cannot_be_deleted_are_told_and_shipping_goes_on(
    folder_place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Remote, "delete", _failing("vault: not allowed"))
    for step in (10, 20):
        _publish(tmp_path / "here", step)
    _until_idle(_rounds(tmp_path / "here", folder_place, keep=1))
    assert open_remote(folder_place).list_steps() == [20, 10]
    assert capsys.readouterr().err == (
        f"ds_pretrain: old checkpoints at {folder_place} cannot be deleted: vault: not allowed; "
        "trying after the next one\n"
    )


def test_a_connection_cut_in_an_upload_leaves_no_checkpoint_and_is_gone_on_with_later(
    server: tuple[str, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    way = BreakingWay(server)
    way.breaks_after = 20_000  # bytes: the probe passes, a file of 26 kB does not
    use_s3(monkeypatch, *server, tmp_path)
    place = f"s3://{BUCKET}/cut"
    remote = open_remote(place)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{way.port}")
    _publish(tmp_path / "here", 10)
    with closing(way), closing(Uploader(tmp_path / "here", place, 0, 10, None)) as shipper:
        shipper.start()
        told = _wait_for_message("trying again", capfd)
        assert (remote.list_steps(), remote.list_names(10).count(marker_name(0))) == ([], 0)
        assert way.num_breaks > 0
        way.breaks_after = None
        assert shipper.wait(PATIENCE_SECONDS)
    assert _problem(remote, 10) is None
    assert f"checkpoint step 10 is not uploaded to {place} yet: {place}: cannot upload " in told
    assert SECRET not in told


def test_no_message_of_the_process_shows_a_credential(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    use_s3(monkeypatch, "127.0.0.1", 1, tmp_path)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")  # nobody listens
    monkeypatch.setenv("MY_PASSWORD", "127.0.0.1:1")  # a value that the library's own message holds
    _publish(tmp_path / "here", 10)
    with closing(Uploader(tmp_path / "here", f"s3://{BUCKET}/x", 0, 10, None)) as shipper:
        shipper.start()
        told = _wait_for_message("trying again", capfd)
    assert "http://[hidden]/" in told, told
    for secret in ("127.0.0.1:1", SECRET, "AKIAIO"):
        assert secret not in told
    assert told.count("\n") == 1


def test_not_even_an_error_that_nobody_foresaw_shows_a_credential_or_a_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_PASSWORD", "open sesame")
    orders = pickle.dumps((os.getpid(), _rounds(tmp_path / "open sesame", "nowhere")))
    command = [sys.executable, "-c", upload._START]
    done = subprocess.run(command, input=orders, capture_output=True, check=False)
    assert done.stderr.decode() == (
        f"ds_pretrain: the upload process ends: FileNotFoundError: [Errno 2] No such file or directory: "
        f"'{tmp_path}/[hidden]/.upload.lock'\n"
    )
    assert (done.returncode, done.stdout) == (1, b"")


def test_one_process_at_a_time_ships_from_a_folder(
    folder_place: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first, second = (Uploader(tmp_path / "here", folder_place, 0, 10, None) for _ in range(2))
    with closing(first), closing(second):
        first.start()
        _publish(tmp_path / "here", 10)
        assert first.wait(PATIENCE_SECONDS)
        second.start()
        said = f"ds_pretrain: another process uploads from {tmp_path / 'here'}; waiting until it ends\n"
        assert _wait_for_message(said, capfd) == said
        first.close()
        _publish(tmp_path / "here", 20)
        assert second.wait(PATIENCE_SECONDS)


def test_signals_for_the_ranks_do_not_end_it_and_a_killed_one_is_started_again(
    folder_place: str, tmp_path: Path
) -> None:
    with closing(Uploader(tmp_path / "here", folder_place, 0, 10, None)) as shipper:
        shipper.start()
        _publish(tmp_path / "here", 10)
        assert shipper.wait(PATIENCE_SECONDS)
        child = shipper._process
        assert child is not None
        assert os.getpgid(child.pid) != os.getpgid(0)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            child.send_signal(number)
        _publish(tmp_path / "here", 20)
        assert shipper.wait(PATIENCE_SECONDS)
        assert child.poll() is None
        child.kill()
        child.wait()
        _publish(tmp_path / "here", 30)
        assert shipper.wait(PATIENCE_SECONDS)
    assert shipper._process is None
    assert open_remote(folder_place).list_steps() == [30, 20, 10]
    assert shipper.wait(0)


PARENT = """
import os, sys, time
from pathlib import Path
from ds_pretrain.checkpoint.upload import Uploader
shipper = Uploader(Path(sys.argv[1]), sys.argv[2], 0, 10, None)
shipper.start()
worker = os.fork()
if worker == 0:  # it lives on, as a data loader's may
    time.sleep(600)
    os._exit(0)
print(shipper._process.pid, worker, flush=True)
time.sleep(600)
"""


def test_it_does_not_outlive_a_killed_parent(folder_place: str, tmp_path: Path) -> None:
    _publish(tmp_path / "here", 10)
    command = [sys.executable, "-W", "ignore", "-c", PARENT, str(tmp_path / "here"), folder_place]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child, worker = map(int, parent.stdout.readline().split())
        try:
            _wait_for(lambda: not list_not_uploaded(tmp_path / "here"), "the process at work")
            parent.kill()
            _wait_for(lambda: not _is_alive(child), "the end of the process")
        finally:
            parent.kill()
            os.kill(worker, signal.SIGKILL)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_shipping_to_where_checkpoints_are_saved_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="checkpoints are saved there already; choose another location"):
        Uploader(tmp_path / "here", str(tmp_path / "x" / ".." / "here"), 0, 5, None)


def test_a_process_that_cannot_start_is_told_and_training_goes_on(
    folder_place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    shipper = Uploader(tmp_path / "here", folder_place, 0, 5, None)
    shipper.start()
    assert "ds_pretrain: the upload process does not start: " in capsys.readouterr().err
    monkeypatch.undo()
    _publish(tmp_path / "here", 10)
    assert shipper.wait(PATIENCE_SECONDS)
    shipper.close()


def test_hosts_that_start_again_in_another_order_finish(
    folder_place: str, tmp_path: Path, sent: list[str]
) -> None:
    a, b, c = _hosts(tmp_path, *NAMES)
    remote = open_remote(folder_place)
    assert upload_step(a, remote, 0) is UploadProgress.WAITING
    assert upload_step(b, remote, 1) is UploadProgress.WAITING
    for host, folder in ((1, a), (2, b)):
        assert upload_step(folder, remote, host) is UploadProgress.WAITING
    assert upload_step(c, remote, 0) is UploadProgress.UPLOADED
    assert _problem(remote, 10) is None
    assert sent == list(NAMES)  # each once


def test_a_host_adds_to_the_word_of_the_one_that_had_its_number(
    folder_place: str, tmp_path: Path, sent: list[str]
) -> None:
    a, b, c = _hosts(tmp_path, *NAMES)
    remote = open_remote(folder_place)
    upload_step(a, remote, 0)
    upload_step(b, remote, 1)
    assert upload_step(b, remote, 0) is UploadProgress.WAITING
    upload_step(c, remote, 1)
    assert (
        upload_step(b, remote, 0) is UploadProgress.UPLOADED
    )  # without another look of the host that has the first
    assert _problem(remote, 10) is None
    assert sent == list(NAMES)


def test_words_of_hosts_that_are_no_more_do_not_keep_an_old_checkpoint_there(
    folder_place: str, tmp_path: Path
) -> None:
    remote, rounds = open_remote(folder_place), _rounds(tmp_path / "here", folder_place, keep=1)
    kept = []
    for step in (10, 20, 30):
        _publish(tmp_path / "here", step)
        _until_idle(rounds)
        if step == 10:
            remote.write(10, marker_name(1), b"{}")  # host 1 is new: it holds nothing of step 10
        kept.append(remote.list_steps())
    assert kept == [[10], [20, 10], [30]]


def test_a_word_is_taken_back_before_its_files_become_those_of_another_save(
    folder_place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [before] = _hosts(tmp_path, NAMES[0])
    remote, seen = open_remote(folder_place), []
    upload_step(before, remote, 3)
    [again] = _hosts(tmp_path / "again", NAMES[0], salt="again")
    monkeypatch.setattr(
        upload,
        "write_point",
        lambda name: seen.append(remote.list_names(10)) if name == "upload file" else None,
    )
    upload_step(again, remote, 1)
    assert seen == [["rng"]]


def test_a_manifest_that_came_meanwhile_is_not_taken_for_that_of_an_earlier_save(
    folder_place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, late = _publish(tmp_path / "a", 10), _publish(tmp_path / "late", 10)
    remote, names = open_remote(folder_place), Remote.list_names

    def meanwhile(self: Remote, step: int) -> list[str]:
        monkeypatch.undo()
        assert upload_step(a, remote, 0) is UploadProgress.UPLOADED
        return names(self, step)

    monkeypatch.setattr(Remote, "list_names", meanwhile)
    assert upload_step(late, remote, 1) is UploadProgress.UPLOADED
    assert _problem(remote, 10) is None


def test_a_damaged_file_here_never_replaces_the_good_one_of_another_host(
    folder_place: str, tmp_path: Path
) -> None:
    good, bad = _publish(tmp_path / "good", 10), _publish(tmp_path / "bad", 10)
    _flip(bad / "run_state.json")
    remote = open_remote(folder_place)

    def put(path: Path, step: int, name: str) -> None:
        raise AssertionError(f"{name} was sent")

    remote.write(10, "run_state.json", b"not whole yet")
    for name in ("rng/rank_00000.pt", "rng/rank_00001.pt"):
        remote.upload(good / name, 10, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Remote, "upload", lambda self, *args: put(*args))
        with pytest.raises(NotAsListed, match=r"run_state\.json is not what its manifest says"):
            upload_step(bad, remote, 1)
    assert remote.read(10, "run_state.json") == b"not whole yet"


def _break_file(folder: Path) -> str:
    path = _flip(folder / "run_state.json")
    return f"{path} is not what its manifest says; the disk here may be failing"


def _break_manifest(folder: Path) -> str:
    (folder / "manifest.json").write_text("{")
    return "its manifest cannot be read: Expecting property name"


def _write_newer_version(folder: Path) -> str:
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"version": 3', '"version": 4'))
    return "its manifest cannot be read: its manifest has format 4, expected 3"


def _take_other_step(folder: Path) -> str:
    (folder / "manifest.json").write_bytes((folder.with_name(step_name(10)) / "manifest.json").read_bytes())
    return "its manifest is of step 10"


@pytest.mark.parametrize("harm", [_break_file, _break_manifest, _write_newer_version, _take_other_step])
def test_a_checkpoint_that_is_broken_here_is_said_once_and_holds_up_no_other(
    harm: Callable[[Path], str],
    folder_place: str,
    tmp_path: Path,
    sent: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    here = tmp_path / "here"
    folders = [_publish(here, step) for step in (10, 20)]
    reason, rounds = harm(folders[1]), _rounds(here, folder_place)
    _until_idle(rounds)
    assert rounds.run_once() == 1.0
    assert (open_remote(folder_place).list_steps(), is_uploaded(folders[0])) == ([10], True)
    told = capsys.readouterr().err
    assert told.startswith(f"ds_pretrain: checkpoint step 20 cannot be uploaded to {folder_place}: {reason}")
    assert told.endswith(f"; it is in {folders[1]}\n")
    assert told.count("\n") == 1
    assert sent.count("run_state.json") == 1
    assert Uploader(here, folder_place, 0, 5, None).list_not_uploaded() == [20]
    _publish(here, 20, salt="again")
    _until_idle(rounds)
    assert is_uploaded(folders[1])


def test_a_file_that_no_host_has_holds_up_no_other_checkpoint_until_a_host_brings_it(
    folder_place: str, tmp_path: Path
) -> None:
    remote = open_remote(folder_place)
    a, b, late = _hosts(tmp_path, *NAMES)
    newer = _publish(a.parent, 20)
    rounds = [_rounds(folder.parent, folder_place, host) for host, folder in enumerate((a, b, late))]
    for _ in range(2):
        rests = [rounds[host].run_once() for host in (1, 0)]
    assert rests == [0.4, 0.2]  # it is looked at ever more rarely, and nothing is said
    assert (remote.list_steps(), is_uploaded(newer), is_uploaded(a)) == ([20], True, False)
    for host in (2, 0, 1, 2):
        rounds[host].run_once()
    assert all(map(is_uploaded, (a, b, late)))
    assert sorted(remote.list_names(10)) == ["manifest.json", "rng", "run_state.json"]


@pytest.mark.parametrize("end", [0, 40, 64, 65, -2])
def test_a_marker_that_a_kill_cut_short_counts_for_what_it_names(
    end: int, folder_place: str, tmp_path: Path
) -> None:
    remote, (first, second) = open_remote(folder_place), _hosts(tmp_path, NAMES[0], NAMES[2])
    _publish(second.parent, 10, held=NAMES[1:])
    upload_step(first, remote, 1)
    whole = remote.read(10, marker_name(1)) or b""
    remote.write(10, marker_name(1), whole[:end])
    assert upload_step(second, remote, 0) is UploadProgress.WAITING
    upload_step(first, remote, 1)
    assert upload_step(second, remote, 0) is UploadProgress.UPLOADED


def test_what_killed_uploads_left_is_gone_before_the_manifest_is_there(
    folder_place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, remote = _publish(tmp_path / "here", 10), open_remote(folder_place)
    left = [".run_state.json.0123", "rng/.rank_00000.pt.4567", f".{marker_name(0)}.x", f".{marker_name(1)}.y"]
    for name in left:
        remote.write(10, name, b"half")
    seen = []
    monkeypatch.setattr(
        upload,
        "write_point",
        lambda name: seen.append(remote.list_unfinished(10)) if name == "upload manifest" else None,
    )
    assert upload_step(folder, remote, 0) is UploadProgress.UPLOADED
    assert seen == [[left[3]]]  # host 1 may be about to rename it


def test_marks_that_cannot_be_copied_are_told_and_tried_again(
    folder_place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _publish(tmp_path / "here", 10)
    rounds = _rounds(tmp_path / "here", folder_place)
    _until_idle(rounds)
    (folder / "pinned").touch()
    with monkeypatch.context() as patch:
        patch.setattr(Remote, "write", _failing("vault: not allowed"))
        rounds.run_once()
    assert capsys.readouterr().err == (
        f"ds_pretrain: the marks of checkpoints are not at {folder_place} yet: vault: not allowed; trying "
        "again\n"
    )
    rounds.run_once()
    assert "pinned" in open_remote(folder_place).list_names(10)


def test_a_disk_that_does_not_answer_raises_nothing_in_the_rank_that_trains(
    folder_place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipper = Uploader(tmp_path / "here", folder_place, 0, 5, None)
    monkeypatch.setattr(upload, "list_published", _failing("Input/output error"))
    assert shipper.list_not_uploaded() is None
    assert not shipper.wait(0)  # nobody knows
    monkeypatch.undo()
    assert shipper.wait(0)


def test_no_process_is_started_after_the_end(
    folder_place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipper = Uploader(tmp_path / "here", folder_place, 0, 5, None)
    shipper.close()
    monkeypatch.setattr(Uploader, "start", _failing("a process was started"))
    shipper.revive()
    _publish(tmp_path / "here", 10)
    assert not shipper.wait(0)
