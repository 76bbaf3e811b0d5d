"""SIGTERM at any moment, to anyone: one complete checkpoint, the documented exit code, an exact resume."""

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ds_pretrain import train as train_module
from ds_pretrain.checkpoint import restore as restore_module
from ds_pretrain.checkpoint import snapshot
from ds_pretrain.core.distributed import World
from ds_pretrain.core.errors import EXIT_FINISHED, EXIT_PREEMPTED
from ds_pretrain.core.run_files import RankRecord, StopSignal, read_exit, read_ranks
from ds_pretrain.data.loader import BatchLoader
from ds_pretrain.training import saver as saver_module
from ds_pretrain.training import setup as run_setup
from tests.harness import Record, at_write_points, start
from tests.ranks import run_ranks
from tests.runs.chaos import look
from tests.runs.results import trace
from tests.scenario import make_run
from tests.tiers import slow

SHORT, LONG = 20, 60  # steps of a run that is stopped at few places, at many
COMMAND = [sys.executable, "-m", "ds_pretrain", "train"]


@dataclass(frozen=True)
class Term:
    """SIGTERM to some ranks, by themselves: at a place in the code, or so long after another one."""

    ranks: tuple[int, ...]
    at: str
    seconds: float = 0.0
    again: bool = False  # a second one at every write point from then on


BY_CALL: dict[str, tuple[Any, str]] = {
    "start": (StopSignal, "__enter__"),  # a moment after it: before, a signal ends the process, as it should
    "model build": (run_setup, "build_model"),
    "restore": (restore_module, "restore"),
    "step": (train_module, "take_step"),
    "validation": (train_module, "evaluate"),
    "snapshot": (snapshot.Snapshot, "settle"),
    "memory check": (saver_module, "check_memory"),
    "data wait": (BatchLoader, "at"),
}
BY_WRITE_POINT = {
    "background write": "write .*optim_states.pt",
    "background sync": "sync .*optim_states.pt",
    "manifest": "manifest",
    "publication": "rename",
    "pruning": "prune",
}
# The order matters little: each is the next start of one run.
PLACES = [
    Term((0,), "model build"),
    Term((1,), "step"),
    Term((0, 1), "restore"),
    Term((1,), "validation"),
    Term((0,), "snapshot"),
    Term((1,), "background write"),
    Term((0, 1), "background sync"),
    Term((0,), "publication"),
    Term((1,), "data wait"),
    Term((0,), "pruning"),
    Term((1,), "memory check"),
    Term((0,), "manifest"),
    Term((0, 1), "step", again=True),
    Term((0,), "background write", again=True),
]
SOME = [PLACES[at] for at in (0, 2, 4, 5, 7, 12)]
SEEDED = random.Random(2)
RANKS: tuple[tuple[int, ...], ...] = ((0,), (1,), (0, 1))
MOMENTS = [
    *(Term(SEEDED.choice(RANKS), "start", SEEDED.uniform(0.02, 0.9)) for _ in range(9)),
    *(Term(SEEDED.choice(RANKS), "step", SEEDED.uniform(0.01, 0.3)) for _ in range(16)),
]


def _terminate(again: bool) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    if again:
        at_write_points(lambda name: os.kill(os.getpid(), signal.SIGTERM))


def _once(act: Callable[[], None]) -> Callable[[], None]:
    left = [act]
    return lambda: left.pop()() if left else None


def start_and_terminate(world: World, run_file: str, term: Term | None, overrides: tuple[str, ...]) -> Record:
    """The loop's entry, and the signal. Steps take a while: a fast machine shall not run to the end."""
    if term is not None and world.rank in term.ranks:
        terminate = _once(lambda: _terminate(term.again))
        if term.seconds:
            timer = threading.Timer(term.seconds, terminate)
            timer.daemon = True
            _before(*BY_CALL[term.at], _once(timer.start))
        elif term.at in BY_CALL:
            _before(*BY_CALL[term.at], terminate)
        else:
            pattern = BY_WRITE_POINT[term.at]
            at_write_points(lambda name: terminate() if re.fullmatch(pattern, name) else None)
    if term is not None:
        _before(train_module, "take_step", lambda: time.sleep(0.01))
    if term is not None and term.at == "data wait":
        _before(BatchLoader, "at", lambda: time.sleep(0.2))
    return start(world, run_file, overrides)


def _before(owner: Any, name: str, act: Callable[[], None]) -> None:
    """Call `act` before each call of a function, in a process that ends with the test."""
    function = getattr(owner, name)

    def called(*args: Any, **options: Any) -> Any:
        act()
        return function(*args, **options)

    setattr(owner, name, called)


def _make(folder: Path, steps: int) -> Path:
    return make_run(folder, steps=steps, batch_tokens=32, micro_batch_size=1, save_every="2 steps")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[dict[str, Any]]]:
    """The steps of a run of so many that was never stopped."""

    @cache
    def train(steps: int) -> list[dict[str, Any]]:
        run_file = _make(tmp_path_factory.mktemp("straight"), steps)
        ended = run_ranks(start, 2, str(run_file))
        assert [rank.code for rank in ended] == [EXIT_FINISHED] * 2
        return trace(run_file.parent / "out")

    return train


Straight = Callable[[int], list[dict[str, Any]]]


def _assert_stopped_well(out: Path) -> None:
    left = look(out)
    assert left.torn == ()
    assert left.newest == left.trained > 0  # nothing that was trained is lost
    assert left.under_way == 0
    assert (out / "checkpoints" / "latest").read_text() == f"step_{left.newest:09d}\n"
    assert not (out / "stop").exists()
    assert read_exit(out) == EXIT_PREEMPTED


def _stop_at_each(folder: Path, steps: int, terms: list[Term], straight: list[dict[str, Any]]) -> None:
    """Start a run again and again, stopped each time; where it comes to its end, another is begun."""
    overrides, runs, left = ("checkpoint.keep_last=3",), 0, list(terms)
    while True:
        runs += 1
        run_file = _make(folder / f"run_{runs}", steps)
        out = run_file.parent / "out"
        while left and not (out / "checkpoints" / f"step_{steps:09d}").exists():
            ranks = run_ranks(start_and_terminate, 2, str(run_file), left[0], overrides)
            assert "Traceback" not in ranks[0].stderr + ranks[1].stderr, left[0]
            if [rank.code for rank in ranks] == [EXIT_FINISHED] * 2:
                break  # it came too late for this run
            assert [rank.code for rank in ranks] == [EXIT_PREEMPTED] * 2, left[0]
            _assert_stopped_well(out)
            del left[0]
        if not left:
            ranks = run_ranks(start, 2, str(run_file), overrides)
            assert [rank.code for rank in ranks] == [EXIT_FINISHED] * 2
        assert trace(out) == straight
        if not left:
            return


@pytest.mark.parametrize(("steps", "places"), [(SHORT, SOME), slow(LONG, PLACES)], ids=["some", "all"])
def test_p50_a_signal_at_any_place_of_the_code_saves_and_is_resumed_exactly(
    tmp_path: Path, straight: Straight, steps: int, places: list[Term]
) -> None:
    assert {"start", *(term.at for term in PLACES)} == {*BY_CALL, *BY_WRITE_POINT}
    _stop_at_each(tmp_path, steps, places, straight(steps))


@pytest.mark.slow
def test_p50_a_signal_at_25_random_moments_saves_and_is_resumed_exactly(
    tmp_path: Path, straight: Straight
) -> None:
    assert len(MOMENTS) == 25
    _stop_at_each(tmp_path, LONG, MOMENTS, straight(LONG))


def test_p50_a_signal_in_the_last_save_lets_the_run_finish(tmp_path: Path, straight: Straight) -> None:
    run_file = _make(tmp_path, SHORT)
    ranks = run_ranks(_terminate_at_the_end, 2, str(run_file))
    assert [rank.code for rank in ranks] == [EXIT_FINISHED] * 2
    assert look(tmp_path / "out").newest == SHORT
    assert look(tmp_path / "out").torn == ()
    assert trace(tmp_path / "out") == straight(SHORT)


def _terminate_at_the_end(world: World, run_file: str) -> Record:
    _before(saver_module.Saver, "save_blocking", lambda: _terminate(again=True))
    return start(world, run_file)


def _launch(run_file: Path) -> subprocess.Popen[str]:
    words = [*COMMAND, str(run_file), "--ranks", "2"]
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def _wait_until(process: subprocess.Popen[str], what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 600
    while not what():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "the run did not get going"
        time.sleep(0.02)


def _session(pid: int) -> list[int]:
    """The processes of a session."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == pid:
                found.append(int(entry.name))
    return found


def _to_the_command(process: subprocess.Popen[str], ranks: tuple[RankRecord, ...]) -> None:
    process.terminate()


def _to_one_rank(process: subprocess.Popen[str], ranks: tuple[RankRecord, ...]) -> None:
    os.kill(ranks[1].pid, signal.SIGTERM)


def _to_every_process(process: subprocess.Popen[str], ranks: tuple[RankRecord, ...]) -> None:
    """As a batch system ends a job: the command, DeepSpeed's two launchers and the ranks, at one time."""
    for pid in [process.pid, *_session(os.getsid(ranks[0].pid))]:
        os.kill(pid, signal.SIGTERM)


SENDS = [(_to_the_command, False), (_to_one_rank, True), (_to_every_process, True)]


@pytest.mark.parametrize(
    ("steps", "sends"), [(SHORT, SENDS[:1]), slow(LONG, SENDS)], ids=["to the command", "to each"]
)
def test_p50_signals_through_the_real_command(
    tmp_path: Path, straight: Straight, steps: int, sends: list[Any]
) -> None:
    run_file = _make(tmp_path, steps)
    out, steps_before = tmp_path / "out", 0
    for send, wait_for_a_step in sends:
        process = _launch(run_file)
        try:
            _wait_until(process, lambda: len(read_ranks(out)) == 2)
            while wait_for_a_step and look(out).trained == steps_before:
                _wait_until(process, lambda: True)
                time.sleep(0.02)
            send(process, read_ranks(out))
            output, _ = process.communicate(timeout=600)
        finally:
            process.kill()
        assert process.returncode == EXIT_PREEMPTED, (send.__name__, output)
        assert "Traceback" not in output, (send.__name__, output)
        _assert_stopped_well(out)
        assert not [r for r in read_ranks(out) if Path(f"/proc/{r.pid}").exists()]
        steps_before = look(out).newest
    ranks = run_ranks(start, 2, str(run_file))
    assert [rank.code for rank in ranks] == [EXIT_FINISHED] * 2
    assert trace(out) == straight(steps)
