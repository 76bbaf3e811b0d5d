"""Ships published checkpoints behind training: a process per host, and its handle in the host's leading rank.

The process is told nothing but folders and numbers, and finds out by itself what is to be shipped; a line on
its standard input makes it look at once. It ends when that input does, so it never outlives the rank that
started it, whatever ends that. Signals meant for the ranks do not end it: they still save then.
"""

import contextlib
import fcntl
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

from ds_pretrain.checkpoint.manifest import step_of
from ds_pretrain.checkpoint.rounds import IDLE_SECONDS, Order, Rounds, say
from ds_pretrain.checkpoint.unshippable import awaited, hope_again
from ds_pretrain.config.spans import Multiples
from ds_pretrain.core.errors import InputError

LOCK = ".ship.lock"
_CLOSE_SECONDS = 5.0


class Shipper:
    """The leading rank's handle of its host's shipping process. Nothing here raises but the constructor."""

    def __init__(
        self, root: Path, place: str, host: int, num_hosts: int, keep: int, keep_every: Multiples | None
    ) -> None:
        """Raises InputError if checkpoints would be shipped to where they are."""
        self._root = root
        self._order = Order(str(root.absolute()), place, host, num_hosts, keep, keep_every)
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False
        if "://" not in place and Path(place).resolve() == root.resolve():
            raise InputError(
                f"checkpoint.ship_to = {place}: checkpoints are saved there already; name another place"
            )

    def start(self) -> None:
        """Start the process; it ships what an earlier one left, too."""
        command = [sys.executable, "-m", "ds_pretrain.checkpoint.upload", self._order.to_json()]
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            say(f"the shipping process does not start: {error}; trying again after the next save")

    def wake(self) -> None:
        """Something was published: look now. A process that died is started again, until `close`."""
        if self._is_closed:
            return
        if self._is_dead():
            self._release()
            self.start()
        elif self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                os.write(self._process.stdin.fileno(), b"\n")

    def unshipped(self) -> list[int]:
        """The steps of the checkpoints that are not whole at the other place yet, newest first.

        Without those of which it was said that they cannot be shipped; none while the disk does not answer.
        """
        return self._awaited() or []

    def wait(self, seconds: float) -> bool:
        """Wait until nothing is unshipped, for so long at most; True if so."""
        deadline = time.monotonic() + seconds
        if self._awaited() and self._is_dead():
            self.wake()  # a live one looks by itself, as often as makes sense
        while self._awaited() != []:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)
        return True

    def _awaited(self) -> list[int] | None:
        """The steps that are worth waiting for; None if the disk does not answer."""
        try:
            return [step for folder in awaited(self._root) if (step := step_of(folder.name)) is not None]
        except OSError:
            return None

    def close(self) -> None:
        """End the process, whatever it does. What is not shipped yet is shipped after the next start."""
        self._is_closed = True
        self._release()

    def _is_dead(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def _release(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        try:
            process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main(order: Order) -> None:
    """Ship until standard input ends."""
    wake = threading.Event()
    _quiet()
    threading.Thread(target=_follow, args=(sys.stdin.fileno(), os.getppid(), wake), daemon=True).start()
    with (Path(order.root) / LOCK).open("w") as lock:
        _alone(lock, order)
        with contextlib.suppress(OSError):
            hope_again(Path(order.root))
        rounds = Rounds(order)
        while True:
            wake.clear()
            wake.wait(rounds.round())


def _quiet() -> None:
    """Keep this process out of the way of training, and libraries from writing what may hold a credential."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    os.nice(10)
    logging.basicConfig(handlers=[logging.NullHandler()])
    sys.excepthook = lambda kind, error, trace: say(f"shipping ends: {kind.__name__}: {error}")
    threading.excepthook = lambda args: say(f"in shipping: {args.exc_type.__name__}: {args.exc_value}")


def _follow(descriptor: int, parent: int, wake: threading.Event) -> None:
    """Pass on wake-ups; end this process when the parent does.

    The input may stay open longer than the parent lives, in a process that it forked.
    """
    while os.getppid() == parent:
        if select.select([descriptor], [], [], IDLE_SECONDS)[0]:
            if not os.read(descriptor, 4096):
                break
            wake.set()
    os._exit(0)


def _alone(lock: IO[str], order: Order) -> None:
    """Wait until no other process ships from this folder."""
    said = False
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not said:
                say(f"another process ships from {order.root}; waiting until it ends")
            said = True
            time.sleep(IDLE_SECONDS)


if __name__ == "__main__":
    main(Order.from_json(sys.argv[1]))
