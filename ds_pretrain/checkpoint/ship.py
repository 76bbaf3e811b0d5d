"""Ships published checkpoints behind training: a process per host, and its handle in the host's leading rank.

The process is told nothing but folders and numbers, and finds out by itself what is to be shipped; a line on
its standard input makes it look at once. It ends when that input does, so it never outlives the rank that
started it, whatever ends that. Signals meant for the ranks do not end it: they still save then.
"""

import contextlib
import fcntl
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

from ds_pretrain.checkpoint.layout import step_of
from ds_pretrain.checkpoint.remote import Remote, open_remote
from ds_pretrain.checkpoint.shipment import (
    NotAsListed,
    Progress,
    copy_marks,
    forget_words,
    new_marks,
    ship,
    tidy,
    unshipped,
)
from ds_pretrain.credentials import scrubbed
from ds_pretrain.errors import InputError, RunError

__all__ = ["Order", "Rounds", "Shipper", "ship"]

LOCK = ".ship.lock"
IDLE_SECONDS = 1.0  # between looks for something new
_SLOWEST_SECONDS = 60.0  # between tries
_FIRST_WAIT_SECONDS, _SLOWEST_WAIT_SECONDS = 0.1, 4.0  # between looks whether other hosts are done
_REOPEN_AFTER = 5  # failures in a row: credentials may have been renewed
_CLOSE_SECONDS = 5.0


@dataclass(frozen=True)
class Order:
    """What a host ships, where to, and what stays there."""

    root: str
    place: str
    host: int
    num_hosts: int
    keep: int
    keep_every_steps: int | None


@dataclass
class Rounds:
    """The rounds of a host's shipping; what is kept between them only saves requests."""

    order: Order
    failures: int = 0  # rounds in a row
    waits: int = 0  # rounds in a row
    remote: Remote | None = None
    copied: set[tuple[str, str]] = field(default_factory=set)

    def round(self) -> float:
        """Ship what is to be shipped, newest first; the seconds to rest before the next round."""
        root, rest, waiting = Path(self.order.root), 0.0, False
        for folder in unshipped(root):
            try:
                order = self.order
                progress = ship(folder, self._opened(), order.host, order.num_hosts, self._tidied)
            except (NotAsListed, ValueError) as error:  # this one is broken, not the way
                rest = self._later(folder, error)
                continue
            except (OSError, RunError) as error:
                rest = self._later(folder, error)
                break
            if progress is Progress.SHIPPED:
                self.failures = self.waits = 0
                return 0.0  # a newer one may have been published meanwhile
            waiting |= progress is Progress.WAITING
        self._marked()
        self.failures = self.failures + 1 if rest else 0
        self.waits = self.waits + 1 if waiting else 0
        if not waiting:
            return rest or IDLE_SECONDS
        return rest or min(_FIRST_WAIT_SECONDS * 2.0 ** min(self.waits, 10), _SLOWEST_WAIT_SECONDS)

    def _opened(self) -> Remote:
        if self.remote is None or (self.failures and self.failures % _REOPEN_AFTER == 0):
            self.remote = open_remote(self.order.place)
            forget_words(Path(self.order.root), self.remote, self.order.host)
        return self.remote

    def _later(self, folder: Path, error: Exception) -> float:
        rest = min(IDLE_SECONDS * 2.0 ** min(self.failures, 10), _SLOWEST_SECONDS)
        step = step_of(folder.name)
        _say(
            f"the checkpoint of step {step} is not shipped to {self.order.place} yet: {error}; "
            f"trying again in {rest:g} seconds"
        )
        return rest

    def _tidied(self) -> None:
        if self.order.host == 0 and self.remote is not None:
            order = self.order
            try:
                tidy(Path(order.root), self.remote, order.num_hosts, order.keep, order.keep_every_steps)
            except OSError as error:
                _say(
                    f"old checkpoints at {order.place} cannot be deleted: {error}; trying after the next one"
                )

    def _marked(self) -> None:
        root = Path(self.order.root)
        marks = new_marks(root, self.copied) if self.order.host == 0 else []
        if marks:
            try:
                copy_marks(root, self._opened(), marks)
                self.copied.update(marks)
            except (OSError, RunError) as error:
                _say(f"the marks of checkpoints are not at {self.order.place} yet: {error}; trying again")


class Shipper:
    """The leading rank's handle of its host's shipping process. Nothing here raises but the constructor."""

    def __init__(
        self, root: Path, place: str, host: int, num_hosts: int, keep: int, keep_every_steps: int | None
    ) -> None:
        """Raises InputError if checkpoints would be shipped to where they are."""
        self._root = root
        self._order = Order(str(root.absolute()), place, host, num_hosts, keep, keep_every_steps)
        self._process: subprocess.Popen[bytes] | None = None
        if "://" not in place and Path(place).resolve() == root.resolve():
            raise InputError(
                f"checkpoint.ship_to = {place}: checkpoints are saved there already; name another place"
            )

    def start(self) -> None:
        """Start the process; it ships what an earlier one left, too."""
        command = [sys.executable, "-m", "ds_pretrain.checkpoint.ship", json.dumps(asdict(self._order))]
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            _say(f"the shipping process does not start: {error}; trying again after the next save")

    def wake(self) -> None:
        """Something was published: look now. A process that died is started again."""
        if self._is_dead():
            self._release()
            self.start()
        elif self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                os.write(self._process.stdin.fileno(), b"\n")

    def unshipped(self) -> list[int]:
        """The steps of the published checkpoints that are not whole at the other place yet, newest first."""
        return [step for folder in unshipped(self._root) if (step := step_of(folder.name)) is not None]

    def wait(self, seconds: float) -> bool:
        """Wait until nothing is unshipped, for so long at most; True if so."""
        deadline = time.monotonic() + seconds
        if self.unshipped() and self._is_dead():
            self.wake()  # a live one looks by itself, as often as makes sense
        while self.unshipped():
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)
        return True

    def close(self) -> None:
        """End the process, whatever it does. What is not shipped yet is shipped after the next start."""
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
    sys.excepthook = lambda kind, error, trace: _say(f"shipping ends: {kind.__name__}: {error}")
    threading.excepthook = lambda args: _say(f"in shipping: {args.exc_type.__name__}: {args.exc_value}")


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
                _say(f"another process ships from {order.root}; waiting until it ends")
            said = True
            time.sleep(IDLE_SECONDS)


def _say(text: str) -> None:
    """One line, in one piece: others write there too."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"ds_pretrain: {' '.join(scrubbed(text).split())}\n")
        sys.stderr.flush()


if __name__ == "__main__":
    main(Order(**json.loads(sys.argv[1])))
