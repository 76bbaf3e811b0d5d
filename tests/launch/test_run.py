"""Starting, stopping, and what is left behind: nothing."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from ds_pretrain.core.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_NO_PROGRESS, EXIT_PREEMPTED, InputError
from ds_pretrain.core.run_files import (
    RankRecord,
    read_process_start_time,
    read_ranks,
    record_exit,
    record_rank,
    stop_file,
)
from ds_pretrain.launch.command import Command
from ds_pretrain.launch.hostfile import Host
from ds_pretrain.launch.processes import end_ranks, list_alive_ranks
from ds_pretrain.launch.run import read_past_hosts, run

REPOSITORY = Path(__file__).parents[2]
RANK = (sys.executable, "-m", "tests.launch.rank")


def launcher(*argv: str) -> Command:
    """A command with `argv` in the place of `deepspeed`."""
    return Command(argv, {}, (Host("localhost", 1),), over_ssh=False)


@contextmanager
def started(given: dict[str, Any], out: Path) -> Iterator[subprocess.Popen[str]]:
    """`run` in a process of its own; what the test leaves of its ranks is killed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.launch.start", json.dumps(given), str(out)],
        cwd=REPOSITORY,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        end_ranks(read_ranks(out), (), grace_seconds=0)
        if process.stderr is not None:
            process.stderr.close()  # not read to its end: a rank that escaped may hold the other one


def wait_for_ranks(out: Path, count: int = 1, seconds: float = 300) -> tuple[RankRecord, ...]:
    deadline = monotonic() + seconds
    while len(ranks := read_ranks(out)) < count:
        assert monotonic() < deadline, "the ranks did not start"
        time.sleep(0.05)
    return ranks


def end_by_signals(process: subprocess.Popen[str]) -> None:
    """SIGTERM, and again if it has not ended long after: two that come before either is seen are one.

    One that comes while the process already leaves would end it with another code.
    """
    while process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=20)


def ended(pid: int) -> bool:
    return read_process_start_time(pid) is None


def test_a_finished_run_ends_with_zero_and_writes_down_what_it_was(tmp_path: Path) -> None:
    command = launcher(*RANK, str(tmp_path), "code=0")
    assert run(command, tmp_path) == 0
    [line] = (tmp_path / "launches.jsonl").read_text().splitlines()
    assert json.loads(line)["command"] == list(command.argv)
    assert read_past_hosts(tmp_path) == (Host("localhost", 1),)
    assert run(command, tmp_path) == 0  # the files of the first start do not stand in the way
    assert len((tmp_path / "launches.jsonl").read_text().splitlines()) == 2


def test_p46_nodes_and_ranks_are_printed_when_a_run_starts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run(launcher(*RANK, str(tmp_path)), tmp_path)
    assert "1 host, 1 rank\n  localhost  rank 0\n" in capfd.readouterr().err


@pytest.mark.parametrize("code", [EXIT_FAILED, EXIT_BAD_INPUT, EXIT_NO_PROGRESS, EXIT_PREEMPTED])
def test_documented_codes_come_back_unchanged(code: int, tmp_path: Path) -> None:
    assert run(launcher(*RANK, str(tmp_path), f"code={code}"), tmp_path) == code
    assert run(launcher(*RANK, str(tmp_path), f"code={code}", "quiet"), tmp_path) == code


def test_rank_zeros_word_wins_over_the_launchers_code(tmp_path: Path) -> None:
    inner = " ".join([*RANK, str(tmp_path), "code=4"])
    assert run(launcher("sh", "-c", f"{inner}; exit 241"), tmp_path) == EXIT_NO_PROGRESS
    assert run(launcher("sh", "-c", f"{inner}; exit 0"), tmp_path) == EXIT_NO_PROGRESS


def test_success_needs_rank_zeros_word(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    record_exit(tmp_path, 0)  # of an earlier start: does not count
    assert run(launcher("true"), tmp_path) == EXIT_FAILED
    assert "rank 0 did not say that it finished: counted as failed" in capfd.readouterr().err


def test_a_launcher_killed_or_ended_with_a_strange_code_is_a_failure(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(launcher("sh", "-c", "kill -9 $$"), tmp_path) == EXIT_FAILED
    assert run(launcher("sh", "-c", "exit 247"), tmp_path) == EXIT_FAILED
    error = capfd.readouterr().err
    assert "the launcher ended with code -9" in error
    assert "the launcher ended with code 247" in error


def test_an_old_stop_request_does_not_stop_the_next_start(tmp_path: Path) -> None:
    stop_file(tmp_path).touch()
    run(launcher("sh", "-c", f"test ! -e {stop_file(tmp_path)} && exit 75"), tmp_path)
    assert not stop_file(tmp_path).exists()


def test_an_unwritable_folder_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"out = .*file/run: cannot write there"):
        run(launcher("touch", str(tmp_path / "started")), tmp_path / "file/run")
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_asks_the_ranks_to_stop_and_the_launcher_gets_none(number: int, tmp_path: Path) -> None:
    inner = " ".join([*RANK, str(tmp_path), "train"])
    script = f"trap 'touch {tmp_path}/signalled' TERM INT HUP; {inner}; exit $?"
    with started({"argv": ["sh", "-c", script]}, tmp_path) as process:
        wait_for_ranks(tmp_path)
        process.send_signal(number)
        _, error = process.communicate(timeout=300)
    assert process.returncode == EXIT_PREEMPTED
    assert "stop requested: saving, then exiting" in error
    assert not (tmp_path / "signalled").exists()


def test_a_second_signal_ends_ranks_that_do_not_listen(tmp_path: Path) -> None:
    with started({"argv": [*RANK, str(tmp_path), "deaf"]}, tmp_path) as process:
        [rank] = wait_for_ranks(tmp_path)
        process.terminate()
        time.sleep(1)
        assert process.poll() is None
        assert not ended(rank.pid)
        end_by_signals(process)
        _, error = process.communicate(timeout=300)
    assert process.returncode == EXIT_FAILED
    assert ended(rank.pid)
    assert f"ended 1 rank(s): pid {rank.pid}" in error


def test_a_second_signal_ends_a_launch_whose_ranks_have_not_started(tmp_path: Path) -> None:
    with started({"argv": ["sh", "-c", f"touch {tmp_path}/up; sleep 600; exit 9"]}, tmp_path) as process:
        while not (tmp_path / "up").exists():
            time.sleep(0.05)
        end_by_signals(process)
        process.communicate(timeout=300)
    assert process.returncode == EXIT_FAILED


def test_p49_ranks_and_their_children_that_outlive_the_launcher_are_ended(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    inner = " ".join([*RANK, str(tmp_path), "deaf", "child"])
    script = f"{inner} & while [ ! -e {tmp_path}/ranks/rank_00000.json ]; do sleep 0.1; done; exit 9"
    assert run(launcher("sh", "-c", script), tmp_path, grace_seconds=0.5) == EXIT_FAILED
    [rank] = read_ranks(tmp_path)
    assert ended(rank.pid)
    error = capfd.readouterr().err
    pids = [int(word) for word in error.replace(",", " ").split() if word.isdigit() and int(word) > 9]
    assert rank.pid in pids
    assert len(pids) == 2, error  # the rank and its child
    assert all(map(ended, pids))


def test_a_run_that_lives_is_not_started_a_second_time(tmp_path: Path) -> None:
    with started({"argv": [*RANK, str(tmp_path), "train"]}, tmp_path) as first:
        [rank] = wait_for_ranks(tmp_path)
        with pytest.raises(
            InputError, match=rf"another start of this run is alive \(pid {first.pid} on .*\)"
        ):
            run(launcher("true"), tmp_path)
        first.kill()  # the ranks train on, with nobody who waits for them
        first.wait()
        with pytest.raises(
            InputError, match=rf"running already: pid {rank.pid} on .* \(rank 0\); stop it with"
        ):
            run(launcher("true"), tmp_path)
        stop_file(tmp_path).touch()  # what the message says to do
        deadline = monotonic() + 120
        while not ended(rank.pid):
            assert monotonic() < deadline
            time.sleep(0.1)
        assert run(launcher("sh", "-c", "exit 75"), tmp_path) == EXIT_PREEMPTED


def test_a_process_that_only_has_the_pid_of_a_rank_is_left_alone(tmp_path: Path) -> None:
    sleeper = subprocess.Popen(["sleep", "600"])
    try:
        start = read_process_start_time(sleeper.pid)
        assert start is not None
        record = RankRecord(0, os.uname().nodename, sleeper.pid, start)
        other = RankRecord(0, os.uname().nodename, sleeper.pid, start + 1)
        assert end_ranks([other], (), grace_seconds=0.2) == ()
        assert list_alive_ranks([record, other], ()) == (record,)
        assert end_ranks([record], (), grace_seconds=60) == (record,)
        assert sleeper.wait(60) == -signal.SIGTERM
    finally:
        sleeper.kill()


def test_a_host_that_does_not_answer_counts_as_gone_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\necho "$@" > ' + f"{tmp_path}/called\n" + "echo unreachable >&2; exit 255\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PDSH_SSH_ARGS_APPEND", "-p 2222")
    assert list_alive_ranks([RankRecord(1, "far-away", 77, 1)], (Host("a", 1), Host("x@b", 1))) == ()
    assert (tmp_path / "called").read_text().startswith("-p 2222 -o BatchMode=yes -o ConnectTimeout=10 x@b ")
    assert (
        "host x@b does not answer; its ranks (pids 77) count as gone: unreachable" in capsys.readouterr().err
    )


def test_a_rank_says_who_it_is_and_half_written_files_are_passed_over(tmp_path: Path) -> None:
    record_rank(tmp_path, 3)
    (tmp_path / "ranks/rank_00004.json").write_text('{"rank": 4')
    [record] = read_ranks(tmp_path)
    assert record == RankRecord(
        3, os.uname().nodename, os.getpid(), read_process_start_time(os.getpid()) or -1
    )


def test_the_real_launcher_passes_the_preempted_code_on_and_leaves_nothing(tmp_path: Path) -> None:
    with started({"words": ["train"], "ranks": 2}, tmp_path) as process:
        ranks = wait_for_ranks(tmp_path, 2)
        process.terminate()
        process.communicate(timeout=300)
    assert process.returncode == EXIT_PREEMPTED
    assert all(ended(rank.pid) for rank in ranks)


def test_p49_a_launcher_killed_in_the_middle_takes_its_ranks_along(tmp_path: Path) -> None:
    with started({"words": ["train"], "ranks": 2}, tmp_path) as process:
        ranks = wait_for_ranks(tmp_path, 2)
        launch = int(Path(f"/proc/{ranks[0].pid}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(launch, signal.SIGKILL)  # `deepspeed` then ends with 0, and the ranks train on
        _, error = process.communicate(timeout=300)
    assert process.returncode == EXIT_FAILED
    assert all(ended(rank.pid) for rank in ranks)
    assert "outlived the launcher, and were ended" in error
