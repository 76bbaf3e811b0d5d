"""What can never be shipped is said once and waited for by nobody; hosts may come, go and change numbers."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ds_pretrain.checkpoint import shipment
from ds_pretrain.checkpoint import upload as process
from ds_pretrain.checkpoint.manifest import MANIFEST, FileEntry, published, step_name
from ds_pretrain.checkpoint.remote import Remote, open_remote
from ds_pretrain.checkpoint.retention import is_shipped, prune
from ds_pretrain.checkpoint.rounds import Rounds
from ds_pretrain.checkpoint.shipment import NotAsListed, Progress, ship
from ds_pretrain.checkpoint.unshippable import UNSHIPPABLE, awaited, hope_again, unshipped
from ds_pretrain.checkpoint.upload import Shipper
from ds_pretrain.checkpoint.words import UNSHIPPABLE_THERE, arrival
from tests.checkpoint.test_upload import _files as files
from tests.checkpoint.test_upload import _order as order
from tests.checkpoint.test_upload import _problem as problem
from tests.checkpoint.test_upload import _publish as publish
from tests.checkpoint.test_upload import _until_idle as until_idle

NAMES = sorted(files(10))


@pytest.fixture
def place(tmp_path: Path) -> str:
    return str(tmp_path / "vault")


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of all files that are uploaded."""
    names: list[str] = []
    put = Remote.put

    def watched(self: Remote, path: Path, step: int, name: str) -> FileEntry:
        names.append(name)
        return put(self, path, step, name)

    monkeypatch.setattr(Remote, "put", watched)
    return names


def hosts(tmp_path: Path, *names: str, salt: str = "") -> list[Path]:
    """The folders of hosts each of which holds the file that is named of step 10."""

    def only(name: str) -> Callable[[str], bool]:
        return lambda found: found == name

    return [publish(tmp_path / f"of {name[-12:]}", 10, held=only(name), salt=salt) for name in names]


def flip(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    return path


def test_hosts_that_start_again_in_another_order_finish(place: str, tmp_path: Path, sent: list[str]) -> None:
    a, b, c = hosts(tmp_path, *NAMES)
    remote = open_remote(place)
    assert ship(a, remote, 0, 3) is Progress.WAITING
    assert ship(b, remote, 1, 3) is Progress.WAITING
    for host, folder in ((1, a), (2, b)):
        assert ship(folder, remote, host, 3) is Progress.WAITING
    assert ship(c, remote, 0, 3) is Progress.SHIPPED
    assert problem(remote, 10) is None
    assert sent == [NAMES[0], NAMES[1], NAMES[2]]  # each once


def test_a_host_adds_to_the_word_of_the_one_that_had_its_number(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, c = hosts(tmp_path, *NAMES)
    remote, entry = open_remote(place), Remote.entry
    ship(a, remote, 0, 3)
    ship(b, remote, 1, 3)
    read: list[str] = []

    def watched(self: Remote, step: int, name: str) -> FileEntry | None:
        read.append(name)
        return entry(self, step, name)

    monkeypatch.setattr(Remote, "entry", watched)
    assert ship(b, remote, 0, 3) is Progress.WAITING
    assert ship(b, remote, 0, 3) is Progress.WAITING
    assert read == []  # it was read back when it arrived
    ship(c, remote, 1, 3)
    assert ship(b, remote, 0, 3) is Progress.SHIPPED  # without another look of the host that has the first
    assert problem(remote, 10) is None


@pytest.mark.parametrize("num_hosts", [1, 3, 5])
def test_a_host_that_holds_nothing_of_a_checkpoint_does_not_hold_it_back(
    num_hosts: int, place: str, tmp_path: Path
) -> None:
    a, b, c = hosts(tmp_path, *NAMES)
    remote = open_remote(place)
    assert [ship(folder, remote, host, 3) for host, folder in ((1, b), (2, c))] == [Progress.WAITING] * 2
    assert ship(a, remote, 0, num_hosts) is Progress.SHIPPED
    assert problem(remote, 10) is None


def test_words_of_hosts_that_are_no_more_do_not_keep_an_old_checkpoint_there(
    place: str, tmp_path: Path
) -> None:
    remote, rounds = open_remote(place), Rounds(order(tmp_path / "here", place, num_hosts=2, keep=1))
    kept = []
    for step in (10, 20, 30):
        publish(tmp_path / "here", step)
        until_idle(rounds)
        if step == 10:
            remote.write(10, arrival(1), b"{}")  # host 1 is new: it holds nothing of step 10
        kept.append(remote.steps())
    assert kept == [[10], [20, 10], [30]]


def test_a_word_is_taken_back_before_its_files_become_those_of_another_save(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [before] = hosts(tmp_path, NAMES[0])
    remote, seen = open_remote(place), []
    ship(before, remote, 3, 4)
    [again] = hosts(tmp_path / "again", NAMES[0], salt="again")
    monkeypatch.setattr(
        shipment, "write_point", lambda name: seen.append(remote.names(10)) if name == "ship file" else None
    )
    ship(again, remote, 1, 4)
    assert seen == [["rng"]]


def test_a_manifest_that_came_meanwhile_is_not_taken_for_that_of_an_earlier_save(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, late = publish(tmp_path / "a", 10), publish(tmp_path / "late", 10)
    remote, names = open_remote(place), Remote.names

    def meanwhile(self: Remote, step: int) -> list[str]:
        monkeypatch.undo()
        assert ship(a, remote, 0, 2) is Progress.SHIPPED
        return names(self, step)

    monkeypatch.setattr(Remote, "names", meanwhile)
    assert ship(late, remote, 1, 2) is Progress.WAITING
    assert problem(remote, 10) is None
    assert ship(late, remote, 1, 2) is Progress.SHIPPED


def test_a_damaged_file_here_never_replaces_the_good_one_of_another_host(place: str, tmp_path: Path) -> None:
    good, bad = publish(tmp_path / "good", 10), publish(tmp_path / "bad", 10)
    flip(bad / "run_state.json")
    remote = open_remote(place)

    def put(path: Path, step: int, name: str) -> None:
        raise AssertionError(f"{name} was sent")

    remote.write(10, "run_state.json", b"not whole yet")
    for name in ("rng/rank_00000.pt", "rng/rank_00001.pt"):
        remote.put(good / name, 10, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Remote, "put", lambda self, *args: put(*args))
        with pytest.raises(NotAsListed, match=r"run_state\.json is not what its manifest says"):
            ship(bad, remote, 1, 2)
    assert remote.read(10, "run_state.json") == b"not whole yet"


def broken_file(folder: Path) -> str:
    path = flip(folder / "run_state.json")
    return f"{path} is not what its manifest says; the disk here may be failing"


def broken_manifest(folder: Path) -> str:
    (folder / MANIFEST).write_text("{")
    return "its manifest cannot be read: Expecting property name"


def other_step(folder: Path) -> str:
    (folder / MANIFEST).write_bytes((folder.with_name(step_name(10)) / MANIFEST).read_bytes())
    return "its manifest is of step 10"


@pytest.mark.parametrize("harm", [broken_file, broken_manifest, other_step])
def test_a_checkpoint_that_is_broken_here_is_said_once_and_not_tried_or_waited_for(
    harm: Callable[[Path], str],
    place: str,
    tmp_path: Path,
    sent: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    here = tmp_path / "here"
    folders = [publish(here, step) for step in (10, 20)]
    reason = harm(folders[1])
    for rounds in (Rounds(order(here, place)), Rounds(order(here, place))):  # another start, too
        until_idle(rounds)
        assert rounds.round() == 1.0
    remote = open_remote(place)
    assert (remote.steps(), is_shipped(folders[0])) == ([10], True)
    told = capsys.readouterr().err
    assert told.startswith(f"ds_pretrain: the checkpoint of step 20 cannot be shipped to {place}: {reason}")
    assert told.endswith(f"; it stays in {folders[1]}\n")
    assert told.count("\n") == 1
    assert sent.count("run_state.json") == 1
    assert unshipped(here) == []
    shipper = Shipper(here, place, 0, 1, 5, None)
    assert shipper.wait(0)
    assert shipper.unshipped() == []
    prune(here, keep=1, keep_every=None, tell=lambda text: None, only_shipped=True)
    publish(here, 30)
    prune(here, keep=1, keep_every=None, tell=lambda text: None, only_shipped=True)
    assert step_name(20) in [folder.name for folder in published(here)]


def test_a_mark_that_a_checkpoint_is_broken_counts_for_that_save_only(place: str, tmp_path: Path) -> None:
    folder = publish(tmp_path / "here", 10)
    broken_file(folder)
    rounds = Rounds(order(tmp_path / "here", place))
    until_idle(rounds)
    mark = json.loads((folder / UNSHIPPABLE).read_text())
    assert (mark["final"], unshipped(tmp_path / "here")) == (True, [])
    publish(tmp_path / "here", 10, salt="again")
    assert unshipped(tmp_path / "here") == [folder]
    until_idle(rounds)
    assert is_shipped(folder)


def test_a_broken_checkpoint_is_not_tried_again_even_where_the_mark_cannot_be_written(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: object) -> None:
        raise OSError(28, "No space left on device")

    broken_file(publish(tmp_path / "here", 10))
    monkeypatch.setattr("ds_pretrain.checkpoint.rounds.give_up", refuse)
    tried: list[Path] = []

    def watched(
        folder: Path, remote: Remote, host: int, num_hosts: int, whole: Callable[[], None]
    ) -> Progress:
        tried.append(folder)
        return ship(folder, remote, host, num_hosts, whole)

    monkeypatch.setattr("ds_pretrain.checkpoint.rounds.ship", watched)
    rounds = Rounds(order(tmp_path / "here", place))
    assert [rounds.round(), rounds.round()] == [1.0, 1.0]
    assert len(tried) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_folder_without_a_manifest_is_not_waited_for(tmp_path: Path) -> None:
    (publish(tmp_path, 10) / MANIFEST).unlink()
    publish(tmp_path, 20)
    assert [folder.name for folder in unshipped(tmp_path)] == [step_name(20)]
    assert [folder.name for folder in awaited(tmp_path)] == [step_name(20)]


def test_other_hosts_are_told_what_is_broken_and_do_not_wait_for_it(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = hosts(tmp_path, *NAMES)
    flip(folders[1] / NAMES[1])
    rounds = [Rounds(order(folder.parent, place, host, 3)) for host, folder in enumerate(folders)]
    for host in (2, 1, 0, 2, 0, 2):
        rounds[host].round()
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 3
    assert [line.count("cannot be shipped") for line in told] == [1, 1, 1]
    assert sum("another host says: " in line for line in told) == 2
    assert "and is shipped once that changes" in told[-1]
    assert [awaited(folder.parent) for folder in folders] == [[], [], []]
    assert [unshipped(folder.parent) for folder in folders] == [[folders[0]], [], [folders[2]]]
    (folders[1] / NAMES[1]).write_bytes(files(10)[NAMES[1]])
    (folders[1] / UNSHIPPABLE).unlink()  # by who mended it
    rounds[1] = Rounds(order(folders[1].parent, place, 1, 3))
    for host in (1, 0, 2, 1):
        rounds[host].round()
    assert all(map(is_shipped, folders))
    assert sorted(open_remote(place).names(10)) == ["manifest.json", "rng", "run_state.json"]


def test_a_file_that_no_host_has_is_not_waited_for_until_a_host_brings_it(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b, late = hosts(tmp_path, *NAMES)
    rounds = [Rounds(order(folder.parent, place, host, 2)) for host, folder in enumerate((a, b))]
    for host in (1, 0, 1, 0):
        rounds[host].round()
    told = capsys.readouterr().err
    assert told.count("\n") == 2
    assert f"of step 10 cannot be shipped to {place}: no host has {NAMES[2]}; it stays in {a}, and " in told
    assert [awaited(a.parent), awaited(b.parent)] == [[], []]
    remote = open_remote(place)
    remote.remove(10, arrival(1))  # three hosts start, and the last is slow
    rounds = [Rounds(order(f.parent, place, host, 3)) for f, host in ((a, 0), (late, 1), (b, 2))]
    for folder in (a, b):
        hope_again(folder.parent)
    rounds[2].round()
    assert awaited(b.parent) == []  # it still finds what was said before
    rounds[0].round()
    assert awaited(a.parent) == [a]
    assert UNSHIPPABLE_THERE not in remote.names(10)
    rounds[2].round()
    assert awaited(b.parent) == [b]
    for host in (1, 0, 1, 2):
        rounds[host].round()
    assert all(map(is_shipped, (a, b, late)))
    assert problem(remote, 10) is None


def test_hope_is_taken_back_once_a_host_that_was_missed_has_delivered(place: str, tmp_path: Path) -> None:
    [a] = hosts(tmp_path, NAMES[0])
    remote = open_remote(place)
    remote.write(10, arrival(1), (json.dumps({"manifest": "another save", "files": []})).encode())
    host = Rounds(order(a.parent, place, 0, 1))
    host.round()
    assert awaited(a.parent) == []
    host.order = replace(host.order, num_hosts=2)
    host.round()
    assert awaited(a.parent) == [a]


def test_a_manifest_of_a_newer_program_is_left_to_that_program(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = publish(tmp_path / "here", 10)
    (folder / MANIFEST).write_text((folder / MANIFEST).read_text().replace('"version": 1', '"version": 2'))
    rounds = Rounds(order(tmp_path / "here", place))
    rounds.round()
    rounds.round()
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "has a version that this program does not know" in told
    assert (awaited(tmp_path / "here"), unshipped(tmp_path / "here")) == ([], [folder])
    hope_again(tmp_path / "here")  # a start, perhaps of that program
    assert awaited(tmp_path / "here") == [folder]


@pytest.mark.parametrize("word", ["[]", "{", '{"manifest": 1}', '{"files": ["x"]}', "null"])
def test_a_word_that_cannot_be_read_is_none(word: str, place: str, tmp_path: Path) -> None:
    remote, folder = open_remote(place), publish(tmp_path / "here", 10)
    for name in (arrival(0), arrival(1), UNSHIPPABLE_THERE):
        remote.write(10, name, word.encode())
    (folder / UNSHIPPABLE).write_text(word)
    assert awaited(tmp_path / "here") == [folder]
    assert ship(folder, remote, 0, 2) is Progress.SHIPPED


def test_what_killed_uploads_left_is_gone_before_the_manifest_is_there(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, remote = publish(tmp_path / "here", 10), open_remote(place)
    left = [".run_state.json.0123", "rng/.rank_00000.pt.4567", f".{arrival(0)}.x", f".{arrival(1)}.y"]
    for name in left:
        remote.write(10, name, b"half")
    seen = []
    monkeypatch.setattr(
        shipment,
        "write_point",
        lambda name: seen.append(remote.unfinished(10)) if name == "ship manifest" else None,
    )
    assert ship(folder, remote, 0, 2) is Progress.SHIPPED
    assert seen == [[left[3]]]  # host 1 may be about to rename it


def test_marks_that_cannot_be_copied_are_told_and_tried_again(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = publish(tmp_path / "here", 10)
    rounds = Rounds(order(tmp_path / "here", place))
    until_idle(rounds)
    (folder / "pinned").touch()

    def refuse(*args: object) -> None:
        raise OSError("vault: not allowed")

    with monkeypatch.context() as patch:
        patch.setattr(Remote, "write", refuse)
        rounds.round()
    assert capsys.readouterr().err == (
        f"ds_pretrain: the marks of checkpoints are not at {place} yet: vault: not allowed; trying again\n"
    )
    rounds.round()
    assert "pinned" in open_remote(place).names(10)


def test_a_disk_that_does_not_answer_raises_nothing_in_the_rank_that_trains(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(root: Path) -> list[Path]:
        raise OSError(5, "Input/output error")

    shipper = Shipper(tmp_path / "here", place, 0, 1, 5, None)
    monkeypatch.setattr("ds_pretrain.checkpoint.unshippable.published", fails)
    assert shipper.unshipped() == []
    assert not shipper.wait(0)  # nobody knows
    monkeypatch.undo()
    assert shipper.wait(0)


def test_no_process_is_started_after_the_end(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*args: object, **kwargs: object) -> None:
        raise AssertionError("a process was started")

    shipper = Shipper(tmp_path / "here", place, 0, 1, 5, None)
    shipper.close()
    monkeypatch.setattr("subprocess.Popen", start)
    shipper.wake()
    publish(tmp_path / "here", 10)
    assert not shipper.wait(0)


def test_a_start_takes_back_the_marks_of_what_may_work_now(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hoped: list[Path] = []

    class Over(Exception):
        pass

    def over(self: Rounds) -> float:
        raise Over

    monkeypatch.setattr(process, "hope_again", hoped.append)
    monkeypatch.setattr(process, "_quiet", lambda: None)
    monkeypatch.setattr(process, "_follow", lambda *args: None)
    monkeypatch.setattr(Rounds, "round", over)
    tmp_path.joinpath("here").mkdir()
    with (tmp_path / "input").open("w+") as file:
        monkeypatch.setattr("sys.stdin", file)
        with pytest.raises(Over):
            process.main(order(tmp_path / "here", place))
    assert hoped == [tmp_path / "here"]
