"""Files by which the processes of a run talk: rank records, stop and save requests, the exit code.

The ranks and the command that started them share no memory and, over several hosts, no process tree, only
`<out>`: each rank writes `ranks/rank_00000.json` when it starts, anyone may create `stop`, rank 0 writes
`exit_code.json` as its last act.
"""

import json
import os
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from ds_pretrain.core.distributed import World
from ds_pretrain.core.files import FileLock, ensure_writable_folder, write_atomic

LOCK = ".run.lock"  # a file in the run directory
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@dataclass(frozen=True)
class RankRecord:
    """One rank's process. `start_time`, in clock ticks after boot, tells it from a later one with its pid."""

    rank: int
    host: str
    pid: int
    start_time: int


def stop_file(out: Path) -> Path:
    """The file whose existence asks the run in `out` to save and exit with the "preempted" code."""
    return out / "stop"


def save_file(out: Path) -> Path:
    """The file whose appearance asks the run in `out` for a checkpoint now; it is then removed."""
    return out / "save-now"


def ranks_folder(out: Path) -> Path:
    """The folder of the rank records of the run in `out`."""
    return out / "ranks"


def read_process_start_time(pid: int) -> int | None:
    """Start of a process of this host in clock ticks after boot; None if it is gone or a zombie.

    Field 22 of /proc/<pid>/stat (https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html).
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[
        2
    ].split()  # the name before it may hold blanks and brackets; [0] is field 3
    return None if fields[0] in "ZXx" else int(fields[19])


def record_rank(out: Path, rank: int) -> Path:
    """Write down that this process is `rank` of the run in `out`; the file written."""
    start_time = read_process_start_time(os.getpid())
    assert start_time is not None
    record = RankRecord(rank=rank, host=socket.gethostname(), pid=os.getpid(), start_time=start_time)
    ranks_folder(out).mkdir(parents=True, exist_ok=True)
    path = ranks_folder(out) / f"rank_{rank:05d}.json"
    write_atomic(path, json.dumps(asdict(record)) + "\n")
    return path


def read_ranks(out: Path) -> tuple[RankRecord, ...]:
    """Read the rank records of the run in `out`, in rank order; unusable files are left out."""
    records = []
    for path in sorted(ranks_folder(out).glob("rank_*.json")):
        try:
            raw = json.loads(path.read_text())
            records.append(
                RankRecord(int(raw["rank"]), str(raw["host"]), int(raw["pid"]), int(raw["start_time"]))
            )
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return tuple(sorted(records, key=lambda record: record.rank))


def record_exit(out: Path, exit_code: int) -> None:
    """Rank 0: write down how the run in `out` ends, because launchers do not pass every exit code on."""
    write_atomic(out / "exit_code.json", json.dumps({"exit_code": exit_code, "time": time.time()}) + "\n")


def read_exit(out: Path) -> int | None:
    """The exit code that rank 0 wrote down; None if it wrote none."""
    try:
        return int(json.loads((out / "exit_code.json").read_text())["exit_code"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def forget_last_start(out: Path) -> None:
    """Remove the stop request, the rank files and the exit code of an earlier start of the run in `out`."""
    for path in [stop_file(out), out / "exit_code.json", *ranks_folder(out).glob("rank_*.json")]:
        path.unlink(missing_ok=True)


def run_lock(out: Path) -> FileLock:
    """Make the lock of a run directory, for one start at a time, however it was launched. On rank 0."""
    return FileLock(
        out / LOCK,
        lambda holder: (
            f"{out}: this run is running already ({holder}); stop it with `touch {stop_file(out)}` and wait, "
            "or give another `out`"
        ),
    )


def hold_run_directory(lock: FileLock, out: Path, setting: str) -> None:
    """Create a run directory if need be and take its lock. On rank 0.

    Raises:
        InputError: it cannot be written (`setting` names the key), or another start holds it.
    """
    ensure_writable_folder(out, setting)
    lock.take()


class StopSignal:
    """Notes SIGTERM and SIGINT (stop) and SIGUSR1 (save) while it is open.

    The handler does no more: a save is never interrupted.
    """

    def __init__(self, out: Path, world: World) -> None:
        self._file, self._save_file = stop_file(out), save_file(out)
        self._looks = world.is_main  # one rank looks at the file system
        self._signalled = self._save_signalled = False
        self._has_looked = False  # only then is the folder known to be this run's
        self._save_file_stays = False
        self._before: Sequence[Any] = ()

    def __enter__(self) -> "StopSignal":
        self._before = [signal.signal(number, self._note) for number in _SIGNALS]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in zip(_SIGNALS, self._before, strict=True):
            signal.signal(number, handler)
        if self._has_looked:
            self._file.unlink(missing_ok=True)  # it was for this start, not for the next

    def is_asked(self) -> bool:
        """True if this rank was asked. Other ranks may not have been: share it before acting on it."""
        self._has_looked = self._looks
        return self._signalled or (self._looks and _file_exists(self._file))

    def is_save_asked(self) -> bool:
        """True once for each request to save: SIGUSR1 here, or the file `save-now`, which is removed."""
        asked, self._save_signalled = self._save_signalled, False
        if self._looks and not self._save_file_stays and _file_exists(self._save_file):
            asked = True
            try:
                self._save_file.unlink(missing_ok=True)
            except OSError:  # somebody else's: it asks once, not at every step
                self._save_file_stays = True
        return asked

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self._save_signalled = True
        else:
            self._signalled = True


def _file_exists(path: Path) -> bool:
    """Return whether a file is there; a file system that does not answer counts as no."""
    try:
        return path.exists()
    except OSError:
        return False
