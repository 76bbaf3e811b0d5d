"""Starts a composed command, stops it without losing a step, and leaves nothing behind.

`deepspeed` never gets a signal from here while its ranks live: on one host SIGTERM ends it and orphans its
ranks, over several it runs a `pkill -f` there that ends every DeepSpeed job of the same Python. The way to
stop is the stop file, which every rank reads; the launcher then ends because its ranks did.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from ds_pretrain.core.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_MEANINGS, InputError
from ds_pretrain.core.files import FileLock, ensure_writable_folder, write_atomic
from ds_pretrain.core.run_files import RankRecord, forget_last_start, read_exit, read_ranks, stop_file
from ds_pretrain.launch.command import Command
from ds_pretrain.launch.environment import format_environment_file
from ds_pretrain.launch.hostfile import Host, describe_hosts
from ds_pretrain.launch.processes import end_ranks, list_alive_ranks, list_session_members

_POLL_SECONDS = 0.2
_HELPERS_SECONDS = 5.0  # for helper processes of ranks (loggers, trackers) to follow them by themselves


def run(command: Command, out: Path, *, grace_seconds: float = 30.0) -> int:
    """Run `command`, whose ranks train the run in `out`, to its end; one of the documented exit codes.

    SIGTERM, SIGINT and SIGHUP ask the ranks to save and stop; each further one ends them, `grace_seconds`
    being the time between SIGTERM and SIGKILL. Call from the main thread.

    Raises:
        InputError: `out` cannot be written, or another start of the same run still lives.
    """
    ensure_writable_folder(out, "out")
    # Held against a second start in the seconds before the ranks have said their pids.
    with FileLock(
        out / ".launch.lock",
        lambda holder: f"{out}: another start of this run is alive ({holder}); stop that first",
    ):
        _refuse_second_start(out)
        forget_last_start(out)
        environment = _prepare(command, out)
        with _stop_requests() as requests:
            # A session of its own: a Ctrl-C in the terminal then reaches this process alone.
            process = subprocess.Popen(command.argv, env=environment, start_new_session=True)
            try:
                _wait(process, requests, command, out, grace_seconds)
            finally:
                _leave_nothing(process, command, out, grace_seconds)
            code = _exit_code(process.wait(), read_exit(out))
            _say(f"exit code {code}: {EXIT_MEANINGS[code]}")
            return code


def read_past_hosts(out: Path) -> tuple[Host, ...]:
    """The hosts of the latest start of the run in `out`; empty if it was never started by this command."""
    try:
        last = json.loads((out / "launches.jsonl").read_text().splitlines()[-1])
        return tuple(Host(str(host["name"]), int(host["slots"])) for host in last["hosts"])
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return ()


def _prepare(command: Command, out: Path) -> dict[str, str]:
    """Write down what is about to run; the environment to start it with."""
    environment = {name: value for name, value in os.environ.items() if name not in command.withheld}
    environment |= command.environment
    if command.over_ssh:
        path = out.absolute() / "deepspeed_env"
        write_atomic(path, "")
        path.chmod(0o600)  # before it has content: a value in it may be a secret
        with path.open("w", encoding="utf-8") as file:
            file.write(format_environment_file(command.forwarded))
        environment["DS_ENV_FILE"] = str(path)
    hosts = [{"name": host.name, "slots": host.slots} for host in command.hosts]
    entry = {"time": time.time(), "command": command.argv, "hosts": hosts}
    with (out / "launches.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")
    if command.hosts:
        _say(describe_hosts(command.hosts))
    if command.withheld:
        _say(
            f"not sent to the hosts, as it would show in their process lists: {', '.join(command.withheld)}; "
            "log in there (`wandb login`, `hf auth login`), or set it in ~/.deepspeed_env to send it anyway"
        )
    return environment


def _wait(
    process: subprocess.Popen[bytes], requests: list[int], command: Command, out: Path, grace_seconds: float
) -> None:
    answered = 0
    while not _has_ended(process):
        if len(requests) > answered:
            answered += 1
            if answered == 1:
                stop_file(out).touch()
                _say("stop requested: saving, then exiting; a second signal ends the ranks without saving")
            else:
                _end_now(process, command, out, grace_seconds)
        time.sleep(_POLL_SECONDS)


def _end_now(process: subprocess.Popen[bytes], command: Command, out: Path, grace_seconds: float) -> None:
    ended = end_ranks(read_ranks(out), command.hosts, grace_seconds=grace_seconds)
    if ended:
        _say(f"ended {len(ended)} rank(s): {_format_pids(ended)}")
    elif command.over_ssh:
        _say("no rank has recorded its pid yet; send the signal again in a few seconds")
    else:  # on this host the launcher's whole session is ours, and its handler ends only its own children
        end_ranks(list_session_members(process.pid), (), grace_seconds=grace_seconds)


def _leave_nothing(
    process: subprocess.Popen[bytes], command: Command, out: Path, grace_seconds: float
) -> None:
    """End what outlived the launcher: ranks anywhere, and everything of its session on this host.

    The launcher, ended but not yet waited for, still holds its pid: its session's number cannot be another's.
    """
    left = end_ranks(read_ranks(out), command.hosts, grace_seconds=grace_seconds)
    patience = time.monotonic() + _HELPERS_SECONDS
    while list_session_members(process.pid) and time.monotonic() < patience:
        time.sleep(_POLL_SECONDS)
    left += end_ranks(list_session_members(process.pid), (), grace_seconds=grace_seconds)
    if left:
        _say(f"outlived the launcher, and were ended: {_format_pids(left)}")


def _exit_code(launcher: int, recorded: int | None) -> int:
    """Return the command's exit code from the launcher's code and the one that rank 0 wrote.

    The launcher passes on one rank's code, with several ranks not always the telling one, and it says 0 when
    its own child died of a signal. Rank 0's word is needed for success and preferred for failure.
    """
    if recorded:
        return recorded if recorded in EXIT_MEANINGS else EXIT_FAILED
    if launcher:
        _say(f"the launcher ended with code {launcher}")
        return launcher if launcher in EXIT_MEANINGS else EXIT_FAILED
    if recorded is None:
        _say("the launcher ended with code 0, but rank 0 did not say that it finished: counted as failed")
        return EXIT_FAILED
    return EXIT_FINISHED


def _refuse_second_start(out: Path) -> None:
    alive = list_alive_ranks(read_ranks(out), read_past_hosts(out))
    if alive:
        raise InputError(
            f"{out}: this run is running already: {_format_pids(alive)}; stop it with `touch "
            f"{stop_file(out)}` and wait, or give another `out`"
        )


@contextmanager
def _stop_requests() -> Iterator[list[int]]:
    """A list that grows by one number for each SIGTERM, SIGINT or SIGHUP that this process gets."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    watched = [
        n for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN
    ]
    before = {number: signal.signal(number, note) for number in watched}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """True once the process has ended; it is left to be waited for, and so keeps its pid."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _format_pids(records: tuple[RankRecord, ...]) -> str:
    return ", ".join(
        f"pid {record.pid} on {record.host}" + (f" (rank {record.rank})" if record.rank >= 0 else "")
        for record in records
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
