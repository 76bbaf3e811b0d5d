"""What a host's shipping process does again and again: look what is to be shipped, and ship it."""

import contextlib
import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ds_pretrain.checkpoint.manifest import step_of
from ds_pretrain.checkpoint.remote import Remote, open_remote
from ds_pretrain.checkpoint.retention import manifest_sum
from ds_pretrain.checkpoint.shipment import (
    NotAsListed,
    Progress,
    copy_marks,
    forget_words,
    manifest_text,
    new_marks,
    ship,
    tidy,
)
from ds_pretrain.checkpoint.unshippable import give_up, take_back, unshipped
from ds_pretrain.checkpoint.words import Stuck, tell_others
from ds_pretrain.config.spans import Multiples
from ds_pretrain.core.errors import RunError
from ds_pretrain.core.redact import scrubbed

IDLE_SECONDS = 1.0  # between looks for something new
_SLOWEST_SECONDS = 60.0  # between tries
_FIRST_WAIT_SECONDS, _SLOWEST_WAIT_SECONDS = 0.1, 4.0  # between looks whether other hosts are done
_REOPEN_AFTER = 5  # failures in a row: credentials may have been renewed


@dataclass(frozen=True)
class Order:
    """What a host ships, where to, and what stays there."""

    root: str
    place: str
    host: int
    num_hosts: int
    keep: int
    keep_every: Multiples | None

    def to_json(self) -> str:
        """For the command line of a process."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "Order":
        """What `to_json` made."""
        words = json.loads(text)
        every = words.pop("keep_every")
        pieces = every and tuple(tuple(piece) for piece in every["pieces"])
        return Order(**words, keep_every=every and Multiples(every["every"], pieces))


@dataclass
class Rounds:
    """The rounds of a host's shipping; what is kept between them only saves requests."""

    order: Order
    failures: int = 0  # rounds in a row
    waits: int = 0  # rounds in a row
    remote: Remote | None = None
    copied: set[tuple[str, str]] = field(default_factory=set)
    broken: set[tuple[str, str]] = field(default_factory=set)  # folder name and manifest sum; no longer tried
    stuck: set[tuple[str, str]] = field(default_factory=set)  # the same; tried on, and said once

    def round(self) -> float:
        """Ship what is to be shipped, newest first; the seconds to rest before the next round."""
        root, rest, waiting = Path(self.order.root), 0.0, False
        for folder in unshipped(root):
            save = _save(folder)
            if save in self.broken:
                continue
            try:
                order = self.order
                progress = ship(folder, self._opened(), order.host, order.num_hosts, self._tidied)
            except NotAsListed as error:
                self._give_up(folder, save, error)
                continue
            except Stuck as error:  # others may get it going again
                self._give_up(folder, save, error)
                waiting = True
                continue
            except ValueError as error:  # this one cannot be shipped, the way is free
                rest = self._later(folder, error)
                continue
            except (OSError, RunError) as error:
                rest = self._later(folder, error)
                break
            if progress is Progress.SHIPPED:
                self.failures = self.waits = 0
                return 0.0  # a newer one may have been published meanwhile
            if progress is Progress.WAITING:
                waiting = True
                self._hope(folder, save)
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
        say(
            f"the checkpoint of step {step} is not shipped to {self.order.place} yet: {error}; "
            f"trying again in {rest:g} seconds"
        )
        return rest

    def _give_up(self, folder: Path, save: tuple[str, str], error: NotAsListed | Stuck) -> None:
        """Say once that a checkpoint is not shipped: to people, the waiting rank and other hosts."""
        is_final = isinstance(error, NotAsListed)
        known = self.broken if is_final else self.stuck
        if save in known:
            return
        known.add(save)
        reason, step = scrubbed(str(error)), step_of(folder.name)
        say(
            f"the checkpoint of step {step} cannot be shipped to {self.order.place}: {reason}; it stays in "
            f"{folder}" + ("" if is_final else ", and is shipped once that changes")
        )
        with contextlib.suppress(OSError):
            give_up(folder, save[1], reason, is_final)
        if is_final and self.order.num_hosts > 1 and self.remote is not None and step is not None:
            with contextlib.suppress(OSError):
                tell_others(self.remote, step, save[1], reason, is_final)

    def _hope(self, folder: Path, save: tuple[str, str]) -> None:
        """It is worth waiting for again."""
        if save in self.stuck:
            self.stuck.discard(save)
            with contextlib.suppress(OSError):
                take_back(folder)

    def _tidied(self) -> None:
        if self.order.host == 0 and self.remote is not None:
            order = self.order
            try:
                tidy(Path(order.root), self.remote, order.num_hosts, order.keep, order.keep_every)
            except OSError as error:
                say(f"old checkpoints at {order.place} cannot be deleted: {error}; trying after the next one")

    def _marked(self) -> None:
        root = Path(self.order.root)
        marks = new_marks(root, self.copied) if self.order.host == 0 else []
        if marks:
            try:
                copy_marks(root, self._opened(), marks)
                self.copied.update(marks)
            except (OSError, RunError) as error:
                say(f"the marks of checkpoints are not at {self.order.place} yet: {error}; trying again")


def _save(folder: Path) -> tuple[str, str]:
    """What names a save: a step may be saved again in the same folder."""
    with contextlib.suppress(OSError):
        return folder.name, manifest_sum(manifest_text(folder) or b"")
    return folder.name, ""  # what it is will be found out, and said, by whoever ships it


def say(text: str) -> None:
    """One line, in one piece: others write there too."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"ds_pretrain: {' '.join(scrubbed(text).split())}\n")
        sys.stderr.flush()
