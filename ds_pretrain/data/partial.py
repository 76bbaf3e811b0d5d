"""Work in progress in OUT.partial/: how far it is, whose it is, and whether it can be continued."""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from ds_pretrain.core.errors import InputError
from ds_pretrain.core.files import write_atomic
from ds_pretrain.core.text import counted
from ds_pretrain.data.indexed import file_of
from ds_pretrain.data.writer import partial_folder


@dataclass(frozen=True)
class Counts:
    """How far the work is: the next document to read, and what was written up to it."""

    input: int = 0
    row: int = 0
    documents: int = 0
    tokens: int = 0
    empty: int = 0
    longest: int = 0
    replaced: int = 0
    max_id: int = -1


def refuse_existing(prefix: Path, overwrite: bool) -> None:
    """Never write over a corpus unasked.

    Raises:
        InputError: there is one at `prefix`, and `overwrite` is False.
    """
    # A .bin without an index, beside a state, is ours: killed between two renames.
    if os.path.exists(partial_folder(prefix) / "state.json") and not os.path.exists(file_of(prefix, "idx")):
        return
    existing = [path for end in ("bin", "idx", "json") if os.path.exists(path := file_of(prefix, end))]
    if existing and not overwrite:
        names = ", ".join(path.name for path in existing)
        raise InputError(f"--out {prefix}: {names} exist already; choose another prefix, or pass --overwrite")


def save_state(prefix: Path, key: str, counts: Counts) -> None:
    """Record how far the work is; what it counts must be synced already."""
    state = {"key": key, "counts": asdict(counts)}
    write_atomic(partial_folder(prefix) / "state.json", json.dumps(state) + "\n")


def resume(prefix: Path, key: str, itemsize: int, say: Callable[[str], None]) -> Counts:
    """Where an interrupted call with the same inputs and tokenizer stopped, or the beginning."""
    path = partial_folder(prefix) / "state.json"
    if not path.exists():
        return Counts()
    state_key, counts = _read_state(path)
    if counts is None:
        say(f"{path}: cannot be read; starting over")
    elif state_key != key:
        say(f"{prefix}: the inputs or the tokenizer changed since the interrupted call; starting over")
    elif not _all_there(prefix, counts, itemsize):
        say(f"{prefix}: what the interrupted call wrote is no longer there; starting over")
    else:
        say(f"{prefix}: continuing after {_size(counts)}")
        return counts
    path.unlink()
    return Counts()


def _size(counts: Counts) -> str:
    return f"{counted(counts.documents, 'document')}, {counted(counts.tokens, 'token')}"


def stopped(prefix: Path) -> str:
    """What to tell a person whose `prepare` was interrupted."""
    _, counts = _read_state(partial_folder(prefix) / "state.json")
    if counts is None:
        return f"{prefix}: interrupted before a document was written; the same command starts over"
    return f"{prefix}: interrupted; {_size(counts)} are kept, and the same command continues after them"


def _read_state(path: Path) -> tuple[str, Counts | None]:
    try:
        state = json.loads(path.read_text())
        return state["key"], Counts(**state["counts"])
    except (OSError, ValueError, KeyError, TypeError):
        return "", None


def _all_there(prefix: Path, counts: Counts, itemsize: int) -> bool:
    tokens, lengths = partial_folder(prefix) / "tokens", partial_folder(prefix) / "lengths"
    if not tokens.exists() and not file_of(prefix, "idx").exists():
        tokens = file_of(prefix, "bin")  # killed between the last renames
    needed = {tokens: counts.tokens * itemsize, lengths: counts.documents * 4}
    return all(path.exists() and path.stat().st_size >= size for path, size in needed.items())


class alone:  # noqa: N801  (reads as a word in a with statement)
    """Holds OUT.partial/ against a second `prepare`; the kernel lets go of it if this process dies."""

    def __init__(self, prefix: Path) -> None:
        self.folder = partial_folder(prefix)
        above = [path for path in self.folder.parents if not os.path.exists(path)]
        self.created = above  # innermost first

    def __enter__(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.descriptor = os.open(self.folder, os.O_RDONLY)
        except OSError as error:
            raise InputError(
                f"--out: cannot write {self.folder} ({error.strerror or error}); choose another prefix"
            ) from error
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self.descriptor)
            raise InputError(
                f"{self.folder}: another prepare is writing there; wait for it, or end it"
            ) from error

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)
        if self.folder.is_dir() and not (self.folder / "state.json").exists():
            shutil.rmtree(self.folder)  # failed before anything was worth keeping
            with contextlib.suppress(OSError):  # as soon as one holds something else
                for path in self.created:
                    path.rmdir()
