"""Finds and ends the ranks of a run by what they wrote down: here by pid, on other hosts through ssh.

Nothing is ever chosen by a name or a pattern. A pid counts only together with its start time: a number that
the kernel has given to another process since is left alone.
"""

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ds_pretrain.core.run_files import RankRecord, read_process_start_time
from ds_pretrain.launch.hostfile import Host, find_host_of_rank

_SSH_TIMEOUT_SECONDS = 60
# Prints each pid that is alive with its start time, and sends it the signal (0 sends none). The name in
# /proc/<pid>/stat may hold blanks and brackets, so all up to the last bracket goes; of the rest, the state is
# field 1 and the start time field 20.
_REMOTE = """\
each() {
  stat=$(cat /proc/$1/stat 2>/dev/null) || return
  set -- "$1" "$2" "$3" ${stat##*) }
  case $4 in Z|X) return;; esac
  [ "${23}" = "$2" ] || return
  echo "$1"
  [ "$3" = 0 ] || kill -"$3" "$1"
}
"""


def list_alive_ranks(records: Sequence[RankRecord], hosts: Sequence[Host]) -> tuple[RankRecord, ...]:
    """List the records whose process lives. A silent host counts as gone, and is reported."""
    return _signal(records, hosts, 0)


def end_ranks(
    records: Sequence[RankRecord], hosts: Sequence[Host], *, grace_seconds: float
) -> tuple[RankRecord, ...]:
    """End the processes of `records`: SIGTERM, then SIGKILL. Those that were alive when called."""
    found = alive = _signal(records, hosts, signal.SIGTERM)
    deadline = time.monotonic() + grace_seconds
    while alive and time.monotonic() < deadline:
        time.sleep(min(1.0, grace_seconds / 10))
        alive = list_alive_ranks(alive, hosts)
    killed_until = time.monotonic() + 10
    while alive and time.monotonic() < killed_until:
        alive = _signal(alive, hosts, signal.SIGKILL)
        time.sleep(0.1)
    return found


def list_session_members(session: int) -> tuple[RankRecord, ...]:
    """The processes of this host in a session, its leader excepted; the rank in the records is -1."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == session:
            continue
        pid = int(entry.name)
        try:
            start_time = read_process_start_time(pid)
            if start_time is not None and os.getsid(pid) == session:
                found.append(RankRecord(rank=-1, host=socket.gethostname(), pid=pid, start_time=start_time))
        except ProcessLookupError:
            continue
    return tuple(found)


def _signal(records: Sequence[RankRecord], hosts: Sequence[Host], number: int) -> tuple[RankRecord, ...]:
    """Send a signal (0: none) to the processes that still are who they were; those that were alive."""
    here = [record for record in records if record.host == socket.gethostname()]
    alive = {record for record in here if _signal_here(record, number)}
    elsewhere: dict[str, list[RankRecord]] = defaultdict(list)
    for record in records:
        if record.host != socket.gethostname():
            host = find_host_of_rank(tuple(hosts), record.rank)
            elsewhere[host.name if host is not None else record.host].append(record)
    if elsewhere:
        with ThreadPoolExecutor(max_workers=min(32, len(elsewhere))) as pool:
            for answer in pool.map(lambda name: _signal_there(name, elsewhere[name], number), elsewhere):
                alive.update(answer)
    return tuple(record for record in records if record in alive)


def _signal_here(record: RankRecord, number: int) -> bool:
    try:
        process = os.pidfd_open(record.pid)  # from here on the pid cannot become another process
    except OSError:
        return False
    try:
        if read_process_start_time(record.pid) != record.start_time:
            return False
        if number:
            signal.pidfd_send_signal(process, number)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(process)


def _signal_there(name: str, records: list[RankRecord], number: int) -> list[RankRecord]:
    calls = "".join(f"each {record.pid} {record.start_time} {number}\n" for record in records)
    extra = shlex.split(os.environ.get("PDSH_SSH_ARGS_APPEND", ""))  # what pdsh gives to its ssh
    command = [
        "ssh",
        *extra,
        "-o",
        "BatchMode=yes",
        "-o",
        "ConnectTimeout=10",
        name,
        _REMOTE + calls + "true",
    ]
    try:
        answer = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SSH_TIMEOUT_SECONDS
        )
        failure = answer.stderr.strip() if answer.returncode else ""
        alive = {line for line in answer.stdout.split() if line.isdigit()}
    except (OSError, subprocess.TimeoutExpired) as error:
        failure, alive = str(error), set()
    if failure:
        pids = ", ".join(str(record.pid) for record in records)
        print(
            f"host {name} does not answer; its ranks (pids {pids}) count as gone: {failure}", file=sys.stderr
        )
    return [record for record in records if str(record.pid) in alive]
