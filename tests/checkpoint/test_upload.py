"""Shipping is whole or not at all, goes on after anything, and never disturbs training: folder and S3 API."""

import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from ds_pretrain.checkpoint import rounds as process
from ds_pretrain.checkpoint import shipment
from ds_pretrain.checkpoint.manifest import FileEntry, parse_manifest, published, step_name
from ds_pretrain.checkpoint.remote import Remote, open_remote
from ds_pretrain.checkpoint.retention import CALM, PINNED, SHIPPED, is_shipped, prune
from ds_pretrain.checkpoint.rounds import Order, Rounds
from ds_pretrain.checkpoint.shipment import Progress, ship
from ds_pretrain.checkpoint.upload import Shipper
from ds_pretrain.checkpoint.words import Stuck, arrival
from ds_pretrain.config.spans import Multiples
from ds_pretrain.core.errors import InputError
from tests.checkpoint.places import BUCKET, SECRET, BreakingWay, s3_server, use_s3
from tests.checkpoint.test_manifest import MANIFEST

PATIENCE_SECONDS = 60.0


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, int]]:
    with s3_server() as address:
        yield address


@pytest.fixture(params=["folder", "s3"])
def place(
    request: pytest.FixtureRequest, server: tuple[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    use_s3(monkeypatch, *server, tmp_path)
    return str(tmp_path / "vault") if request.param == "folder" else f"s3://{BUCKET}/{tmp_path.name}"


@pytest.fixture
def folder_place(tmp_path: Path) -> str:
    return str(tmp_path / "vault")


def _files(step: int, salt: str = "") -> dict[str, bytes]:
    return {
        name: f"{name} of {step}{salt}".encode() * 1000
        for name in ("rng/rank_00000.pt", "rng/rank_00001.pt", "run_state.json")
    }


def _publish(
    root: Path,
    step: int,
    *,
    salt: str = "",
    created: str = "2026-01-01T00:00:00+00:00",
    held: Callable[[str], bool] = lambda name: True,
) -> Path:
    """A published checkpoint of which this host holds some files, and the manifest all."""
    files = _files(step, salt)
    entries = {n: FileEntry(len(c), hashlib.sha256(c).hexdigest()) for n, c in files.items()}
    manifest = replace(MANIFEST, step=step, created=created, files=entries)
    folder = root / step_name(step)
    for name, content in files.items():
        if held(name):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
    (folder / "manifest.json").write_text(manifest.to_json())
    return folder


def _order(root: Path, place: str, host: int = 0, num_hosts: int = 1, keep: int = 10) -> Order:
    return Order(str(root), place, host, num_hosts, keep, None)


def _until_idle(rounds: Rounds) -> None:
    while rounds.round() == 0:
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


def _wait_for(true: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not true():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.05)


def test_what_is_published_arrives_whole_and_is_marked_here(place: str, tmp_path: Path) -> None:
    folders = [_publish(tmp_path / "here", step) for step in (10, 20)]
    _until_idle(Rounds(_order(tmp_path / "here", place)))
    remote = open_remote(place)
    assert [(step, _problem(remote, step)) for step in remote.steps()] == [(20, None), (10, None)]
    assert sorted(remote.names(10)) == ["manifest.json", "rng", "run_state.json"]
    assert all(map(is_shipped, folders))
    mark = json.loads((folders[0] / SHIPPED).read_text())
    size = sum(map(len, _files(10).values()))
    assert (mark["place"], mark["bytes"], mark["superseded"]) == (place, size, False)
    assert 0 <= mark["seconds"] < 600
    assert mark["time"].endswith("+00:00")


def test_the_newest_is_shipped_first_and_one_published_meanwhile_before_older_ones(
    folder_place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (10, 20):
        _publish(tmp_path / "here", step)
    order: list[str] = []

    def shipped(folder: Path, *rest: object) -> Progress:
        if not order:
            _publish(tmp_path / "here", 30)
        order.append(folder.name)
        return ship(folder, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(process, "ship", shipped)
    _until_idle(Rounds(_order(tmp_path / "here", folder_place)))
    assert order == [step_name(20), step_name(30), step_name(10)]


def test_killed_at_every_write_point_nothing_torn_is_left_and_the_next_one_finishes(
    place: str, tmp_path: Path
) -> None:
    every = 3 if place.startswith("s3://") else 1  # the same points as in a folder, each slower
    for nth in itertools.count(0, every):
        root, there = tmp_path / f"here{nth}", f"{place}/{nth}"
        _publish(root, 10)
        if nth % 2 == 0:  # half of the time over an earlier save of the same step
            _until_idle(Rounds(_order(root, there, keep=1)))
            _publish(root, 10, salt="again", created="2026-01-02T00:00:00+00:00")
        _publish(root, 20)
        order = _order(root, there, keep=1)
        command = [
            sys.executable,
            "-m",
            "tests.checkpoint.killed_shipping",
            order.to_json(),
            str(nth),
        ]
        done = subprocess.run(command, check=False, timeout=PATIENCE_SECONDS)
        remote = open_remote(there)
        for step in remote.steps():
            assert _problem(remote, step) is None, (nth, step)
        for folder in published(root):
            if is_shipped(folder) and folder.name == step_name(20):
                assert remote.steps()[0] == 20, nth
        _until_idle(Rounds(order))
        assert (remote.steps()[0], _problem(remote, 20), process.unshipped(root)) == (20, None, []), nth
        assert sorted(remote.names(20)) == ["manifest.json", "rng", "run_state.json"]
        assert remote.unfinished(20) == []
        _publish(root, 30)
        _until_idle(Rounds(order))
        assert (remote.folders(), _problem(remote, 30)) == ([30], None), nth
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL
    assert nth >= (
        20 if remote._is_local else 14
    )  # two checkpoints of three files, and one of them deleted there


def test_a_step_saved_again_replaces_the_one_that_is_there(place: str, tmp_path: Path) -> None:
    rounds, remote = Rounds(_order(tmp_path / "here", place)), open_remote(place)
    folder = _publish(tmp_path / "here", 10)
    _until_idle(rounds)
    _publish(tmp_path / "here", 10, salt="again", created="2026-01-02T00:00:00+00:00")
    assert not is_shipped(folder)  # the mark is of the save before
    _until_idle(rounds)
    assert is_shipped(folder)
    assert remote.read(10, "run_state.json") == _files(10, "again")["run_state.json"]
    assert _problem(remote, 10) is None


def test_the_manifest_of_an_earlier_save_goes_before_its_files_change(
    folder_place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds, remote = Rounds(_order(tmp_path / "here", folder_place)), open_remote(folder_place)
    _publish(tmp_path / "here", 10)
    _until_idle(rounds)
    _publish(tmp_path / "here", 10, salt="again", created="2026-01-02T00:00:00+00:00")
    steps = []
    monkeypatch.setattr(
        shipment, "write_point", lambda name: steps.append(remote.steps()) if name == "ship file" else None
    )
    _until_idle(rounds)
    assert steps == [[], [], []]


def test_an_old_save_that_was_left_here_never_replaces_a_later_one_there(
    folder_place: str, tmp_path: Path
) -> None:
    _publish(tmp_path / "others", 10, salt="later", created="2026-01-02T00:00:00+00:00")
    _until_idle(Rounds(_order(tmp_path / "others", folder_place)))
    folder = _publish(tmp_path / "here", 10)
    remote = open_remote(folder_place)
    assert ship(folder, remote, 0, 1) is Progress.SUPERSEDED
    assert remote.read(10, "run_state.json") == _files(10, "later")["run_state.json"]
    assert json.loads((folder / SHIPPED).read_text())["superseded"] is True


def test_what_has_arrived_is_not_sent_again_after_it_was_read_back(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, remote = _publish(tmp_path / "here", 10), open_remote(place)
    remote.write(10, "rng/rank_00000.pt", _files(10)["rng/rank_00000.pt"])
    remote.write(10, "rng/rank_00001.pt", b"x" * len(_files(10)["rng/rank_00001.pt"]))  # as long, but wrong
    sent: list[str] = []
    put = Remote.put
    monkeypatch.setattr(Remote, "put", lambda *args: (sent.append(args[3]), put(*args))[1])
    assert ship(folder, remote, 0, 1) is Progress.SHIPPED
    assert sent == ["rng/rank_00001.pt", "run_state.json"]
    assert _problem(remote, 10) is None


def test_a_file_that_arrives_damaged_is_sent_once_more(
    folder_place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, remote = _publish(tmp_path / "here", 10), open_remote(folder_place)
    damages = iter([True, False, False, False])
    put = Remote.put
    wrong = FileEntry(1, "00")
    monkeypatch.setattr(Remote, "put", lambda *args: wrong if next(damages) else put(*args))
    assert ship(folder, remote, 0, 1) is Progress.SHIPPED
    assert _problem(remote, 10) is None
    folder = _publish(tmp_path / "here", 20)
    monkeypatch.setattr(Remote, "put", lambda *args: wrong)
    with pytest.raises(OSError, match=r"rank_00000\.pt of step 20 arrived damaged twice"):
        ship(folder, remote, 0, 1)
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
        ship(folder, remote, 0, 1)
    assert not is_shipped(folder)
    monkeypatch.undo()
    assert ship(folder, remote, 0, 1) is Progress.SHIPPED


def test_a_checkpoint_that_goes_away_meanwhile_is_no_error(
    folder_place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = open_remote(folder_place)
    for step, point in enumerate(
        ("ship begin", "ship file", "ship arrived", "ship manifest", "ship mark"), 1
    ):
        folder = _publish(tmp_path / "here", step)

        def set_aside(name: str, folder: Path = folder, point: str = point) -> None:
            if name == point and folder.exists():
                folder.rename(folder.with_name(f"{folder.name}.broken"))

        monkeypatch.setattr(shipment, "write_point", set_aside)
        assert ship(folder, remote, 0, 1) is Progress.GONE, point
        assert not folder.exists()
    assert ship(tmp_path / "here" / step_name(99), remote, 0, 1) is Progress.GONE


def test_a_checkpoint_that_is_replaced_meanwhile_is_not_taken_for_shipped(
    folder_place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = open_remote(folder_place)
    for step, point in enumerate(("ship file", "ship arrived", "ship manifest", "ship mark"), 1):
        folder = _publish(tmp_path / "here", step)

        def replace_it(name: str, step: int = step, point: str = point) -> None:
            if name == point:
                _publish(tmp_path / "here", step, salt="again", created="2026-01-02T00:00:00+00:00")

        monkeypatch.setattr(shipment, "write_point", replace_it)
        ship(folder, remote, 0, 1)
        monkeypatch.setattr(shipment, "write_point", lambda name: None)
        assert not is_shipped(folder), point
        assert ship(folder, remote, 0, 1) is Progress.SHIPPED
        assert remote.read(step, "run_state.json") == _files(step, "again")["run_state.json"]
        assert _problem(remote, step) is None


HOLDS: Mapping[int, Callable[[str], bool]] = {
    0: lambda name: name != "rng/rank_00001.pt",
    1: lambda name: name == "rng/rank_00001.pt",
}


@pytest.mark.parametrize("first", [0, 1])
def test_two_hosts_ship_what_each_holds_and_the_manifest_comes_after_both(
    place: str, first: int, tmp_path: Path
) -> None:
    remote = open_remote(place)
    roots = [tmp_path / f"host{host}" for host in (0, 1)]
    folders = [_publish(root, 10, held=HOLDS[host]) for host, root in enumerate(roots)]
    shippers = [Shipper(root, place, host, 2, 10, None) for host, root in enumerate(roots)]
    try:
        shippers[first].start()
        _wait_for(lambda: remote.read(10, arrival(first)), "the first host's files")
        assert not shippers[first].wait(1.5)
        assert (remote.steps(), shippers[first].unshipped()) == ([], [10])
        shippers[1 - first].start()
        assert all(shipper.wait(PATIENCE_SECONDS) for shipper in shippers)
    finally:
        for shipper in shippers:
            shipper.close()
    assert _problem(remote, 10) is None
    assert all(map(is_shipped, folders))


def test_a_word_that_files_have_arrived_counts_for_its_own_save_only(
    folder_place: str, tmp_path: Path
) -> None:
    remote = open_remote(folder_place)
    roots = [tmp_path / f"host{host}" for host in (0, 1)]
    for host, root in enumerate(roots):
        _publish(root, 10, held=HOLDS[host])
    assert ship(roots[1] / step_name(10), remote, 1, 2) is Progress.WAITING
    again = {"salt": "again", "created": "2026-01-02T00:00:00+00:00"}
    _publish(roots[0], 10, held=HOLDS[0], **again)
    assert ship(roots[0] / step_name(10), remote, 0, 2) is Progress.WAITING
    assert remote.steps() == []
    _publish(roots[1], 10, held=HOLDS[1], **again)
    assert ship(roots[1] / step_name(10), remote, 1, 2) is Progress.WAITING
    assert ship(roots[0] / step_name(10), remote, 0, 2) is Progress.SHIPPED
    assert ship(roots[1] / step_name(10), remote, 1, 2) is Progress.SHIPPED
    assert _problem(remote, 10) is None
    assert sorted(remote.names(10)) == ["manifest.json", "rng", "run_state.json"]


def test_a_file_that_no_host_has_keeps_the_manifest_back(folder_place: str, tmp_path: Path) -> None:
    remote, folder = open_remote(folder_place), _publish(tmp_path / "here", 10, held=HOLDS[0])
    with pytest.raises(Stuck, match=r"no host has rng/rank_00001\.pt"):
        ship(folder, remote, 0, 1)
    assert remote.steps() == []


def test_a_checkpoint_stays_there_until_every_host_has_seen_that_it_is_whole(
    folder_place: str, tmp_path: Path
) -> None:
    remote = open_remote(folder_place)
    roots = [tmp_path / f"host{host}" for host in (0, 1)]
    rounds = [Rounds(_order(root, folder_place, host, 2, keep=1)) for host, root in enumerate(roots)]
    for step in (10, 20):
        for host, root in enumerate(roots):
            _publish(root, step, held=HOLDS[host])
    rounds[1].round()
    _until_idle(rounds[0])
    assert remote.steps() == [20, 10]  # host 1 would look for the older one in vain
    _until_idle(rounds[1])
    assert not process.unshipped(roots[1])
    for host, root in enumerate(roots):
        _publish(root, 30, held=HOLDS[host])
    for host in (1, 0, 1):
        _until_idle(rounds[host])
    assert remote.steps() == [30]
    assert not process.unshipped(roots[1])


def test_the_word_of_a_host_that_lost_its_disk_does_not_keep_a_checkpoint_there_for_good(
    folder_place: str, tmp_path: Path
) -> None:
    remote = open_remote(folder_place)
    _publish(tmp_path / "here", 10)
    _until_idle(Rounds(_order(tmp_path / "here", folder_place)))
    remote.write(10, arrival(1), b"{}")
    _publish(tmp_path / "fresh", 20)
    Rounds(_order(tmp_path / "fresh", folder_place, 1, 2)).round()
    assert arrival(1) not in remote.names(10)
    assert arrival(1) in remote.names(20)


def test_retention_there_is_the_rule_that_holds_here(place: str, tmp_path: Path) -> None:
    remote, here = open_remote(place), tmp_path / "here"
    order = replace(_order(here, place, keep=2), keep_every=Multiples(40, ((0, 0, 1),)))
    rounds = Rounds(order)
    for step in (10, 20, 30, 40, 50, 60):
        _publish(here, step)
        _until_idle(rounds)
        if step == 10:
            (here / step_name(10) / PINNED).touch()
        if step == 20:
            remote.write(20, PINNED, b"")
        if step == 30:
            (here / step_name(30) / CALM).touch()
    assert remote.steps() == [60, 50, 40, 30, 20, 10]
    _publish(here, 70)
    (here / step_name(50) / CALM).touch()
    _until_idle(rounds)
    assert remote.steps() == [70, 60, 50, 40, 20, 10]
    assert [step for step in remote.steps() if remote.size(step, CALM) is not None] == [50]
    assert [step for step in remote.steps() if remote.size(step, PINNED) is not None] == [20, 10]


def test_marks_are_not_copied_to_what_is_no_longer_there(folder_place: str, tmp_path: Path) -> None:
    folder, remote = _publish(tmp_path / "here", 10), open_remote(folder_place)
    rounds = Rounds(_order(tmp_path / "here", folder_place))
    _until_idle(rounds)
    remote.delete(10)
    (folder / CALM).touch()
    rounds.round()
    assert remote.folders() == []


def test_what_can_never_become_whole_is_deleted_there_and_nothing_else(
    folder_place: str, tmp_path: Path
) -> None:
    remote = open_remote(folder_place)
    _publish(tmp_path / "here", 20)
    (_publish(tmp_path / "here", 10) / "manifest.json").write_text("{")  # broken here, but still here
    for step in (5, 10, 30):
        remote.write(step, "run_state.json", b"{}")
    remote._fs.pipe_file(f"{remote._root}/latest", b"not ours to judge")
    Rounds(_order(tmp_path / "here", folder_place)).round()
    assert remote.folders() == [30, 20, 10]
    assert (Path(folder_place) / "latest").exists()


def test_a_checkpoint_that_is_not_shipped_is_never_pruned_here(tmp_path: Path) -> None:
    root, told = tmp_path / "here", list[str]()
    for step in (10, 20, 30):
        _publish(root, step)
    ship(root / step_name(10), open_remote(str(tmp_path / "vault")), 0, 1)
    prune(root, keep=1, keep_every=None, tell=told.append, only_shipped=True)
    assert [folder.name for folder in published(root)] == [step_name(30), step_name(20)]
    ship(root / step_name(20), open_remote(str(tmp_path / "vault")), 0, 1)
    _publish(root, 20, salt="again")  # its mark is now of another save
    prune(root, keep=1, keep_every=None, tell=told.append, only_shipped=True)
    assert [folder.name for folder in published(root)] == [step_name(30), step_name(20)]
    prune(root, keep=1, keep_every=None, tell=told.append)
    assert [folder.name for folder in published(root)] == [step_name(30)]
    assert told == []


def test_failures_are_told_and_tried_again_ever_more_slowly_and_for_ever(
    folder_place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (10, 20):
        _publish(tmp_path / "here", step)

    def refuse(*args: object) -> Progress:
        raise OSError("vault: the line is dead")

    monkeypatch.setattr(process, "ship", refuse)
    rounds = Rounds(_order(tmp_path / "here", folder_place))
    assert [rounds.round() for _ in range(9)] == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 9  # one a round, not one a checkpoint
    assert lines[1] == (
        f"ds_pretrain: the checkpoint of step 20 is not shipped to {folder_place} yet: vault: the line is "
        "dead; trying again in 2 seconds"
    )
    monkeypatch.undo()
    assert rounds.round() == 0
    monkeypatch.setattr(process, "ship", refuse)
    assert rounds.round() == 1


def test_after_several_failures_the_place_is_opened_anew_with_credentials_that_may_be_new(
    folder_place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []

    def refuse(*args: object) -> Progress:
        raise OSError("vault: the token has expired")

    monkeypatch.setattr(process, "ship", refuse)
    monkeypatch.setattr(process, "open_remote", lambda place: (opened.append(1), open_remote(place))[1])
    _publish(tmp_path / "here", 10)
    rounds = Rounds(_order(tmp_path / "here", folder_place))
    counts = [(rounds.round(), len(opened))[1] for _ in range(12)]
    assert counts == [1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3]


def test_old_copies_that_cannot_be_deleted_are_told_and_shipping_goes_on(
    folder_place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: object) -> None:
        raise OSError("vault: not allowed")

    monkeypatch.setattr(Remote, "delete", refuse)
    for step in (10, 20):
        _publish(tmp_path / "here", step)
    _until_idle(Rounds(_order(tmp_path / "here", folder_place, keep=1)))
    assert open_remote(folder_place).steps() == [20, 10]
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
    shipper = Shipper(tmp_path / "here", place, 0, 1, 10, None)
    told = ""
    try:
        shipper.start()

        def is_told() -> bool:
            nonlocal told
            told += capfd.readouterr().err
            assert (remote.steps(), remote.names(10).count(arrival(0))) == ([], 0)
            return "trying again" in told

        _wait_for(is_told, "a message")
        assert way.num_breaks > 0
        way.breaks_after = None
        assert shipper.wait(PATIENCE_SECONDS)
    finally:
        shipper.close()
        way.close()
    assert _problem(remote, 10) is None
    assert f"the checkpoint of step 10 is not shipped to {place} yet: {place}: cannot upload " in told
    assert SECRET not in told


def test_no_message_of_the_process_shows_a_credential(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    use_s3(monkeypatch, "127.0.0.1", 1, tmp_path)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")  # nobody listens
    monkeypatch.setenv("MY_PASSWORD", "127.0.0.1:1")  # a value that the library's own message holds
    _publish(tmp_path / "here", 10)
    shipper = Shipper(tmp_path / "here", f"s3://{BUCKET}/x", 0, 1, 10, None)
    told = ""

    def is_told() -> bool:
        nonlocal told
        told += capfd.readouterr().err
        return "trying again" in told

    try:
        shipper.start()
        _wait_for(is_told, "a message")
    finally:
        shipper.close()
    assert "http://[hidden]/" in told, told
    for secret in ("127.0.0.1:1", SECRET, "AKIAIO"):
        assert secret not in told
    assert told.count("\n") == 1


def test_not_even_an_error_that_nobody_foresaw_shows_a_credential_or_a_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MY_PASSWORD", "open sesame")

    def leak(*args: object) -> Progress:
        raise ValueError("it said\n  open sesame")

    monkeypatch.setattr(process, "ship", leak)
    _publish(tmp_path / "here", 10)
    Rounds(_order(tmp_path / "here", str(tmp_path))).round()
    assert "yet: it said [hidden]; trying again" in capsys.readouterr().err
    order = _order(tmp_path / "open sesame", "nowhere").to_json()
    command = [sys.executable, "-m", "ds_pretrain.checkpoint.upload", order]
    stdin, kept_open = os.pipe()
    done = subprocess.run(command, stdin=stdin, capture_output=True, text=True, check=False)
    os.close(stdin)
    os.close(kept_open)
    assert done.stderr == (
        "ds_pretrain: shipping ends: FileNotFoundError: [Errno 2] No such file or directory: "
        f"'{tmp_path}/[hidden]/.ship.lock'\n"
    )
    assert (done.returncode, done.stdout) == (1, "")


def test_one_process_at_a_time_ships_from_a_folder(
    folder_place: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first, second = (Shipper(tmp_path / "here", folder_place, 0, 1, 10, None) for _ in range(2))
    try:
        first.start()
        _publish(tmp_path / "here", 10)
        assert first.wait(PATIENCE_SECONDS)
        second.start()
        said = f"ds_pretrain: another process ships from {tmp_path / 'here'}; waiting until it ends\n"
        _wait_for(lambda: said in capfd.readouterr().err, "a message")
        first.close()
        _publish(tmp_path / "here", 20)
        assert second.wait(PATIENCE_SECONDS)
    finally:
        first.close()
        second.close()


def test_signals_for_the_ranks_do_not_end_it_and_a_killed_one_is_started_again(
    folder_place: str, tmp_path: Path
) -> None:
    shipper = Shipper(tmp_path / "here", folder_place, 0, 1, 10, None)
    try:
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
    finally:
        shipper.close()
    assert shipper._process is None
    assert open_remote(folder_place).steps() == [30, 20, 10]
    assert shipper.wait(0)


PARENT = """
import os, sys, time
from pathlib import Path
from ds_pretrain.checkpoint.upload import Shipper
shipper = Shipper(Path(sys.argv[1]), sys.argv[2], 0, 1, 10, None)
shipper.start()
worker = os.fork()
if worker == 0:  # it holds the input of the process open
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
            _wait_for(lambda: not process.unshipped(tmp_path / "here"), "the process at work")
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
    with pytest.raises(InputError, match="checkpoints are saved there already; name another place"):
        Shipper(tmp_path / "here", str(tmp_path / "x" / ".." / "here"), 0, 1, 5, None)


def test_a_process_that_cannot_start_is_told_and_training_goes_on(
    folder_place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    shipper = Shipper(tmp_path / "here", folder_place, 0, 1, 5, None)
    shipper.start()
    assert "ds_pretrain: the shipping process does not start: " in capsys.readouterr().err
    monkeypatch.undo()
    _publish(tmp_path / "here", 10)
    assert shipper.wait(PATIENCE_SECONDS)
    shipper.close()
