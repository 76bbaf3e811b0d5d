"""Uploads published checkpoints behind training, whole or not at all, from one host or from several.

Each host's leading rank starts a process (`Uploader`) that polls for published checkpoints which are not
uploaded yet (`UploadLoop`), and uploads them as far as it can (`upload_step`), the newest first. A host
uploads the files that its folder holds, and leaves a marker at the remote that names them.
Host 0 writes the manifest there last, once the markers of all hosts name every file that it lists. Nothing
is kept but what saves requests, so a process may be killed at any moment, and the next one continues, as
another host, too. docs/design/uploads.md says why.
"""

import contextlib
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path

from ds_pretrain.checkpoint.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    list_published,
    parse_manifest,
    parse_step,
)
from ds_pretrain.checkpoint.remote import Remote, hide_secrets, open_remote
from ds_pretrain.checkpoint.retention import (
    KNOWN_GOOD,
    PINNED,
    UPLOADED,
    is_uploaded,
    manifest_checksum,
    select_expired,
)
from ds_pretrain.config.timeline import Multiples
from ds_pretrain.core.errors import InputError, RunError
from ds_pretrain.core.files import FileLock, compute_checksum, write_atomic, write_point

LOCK = ".upload.lock"
ARRIVED = "arrived_"  # how the names of markers begin
IDLE_SECONDS = 1.0  # between looks for something new
_SLOWEST_SECONDS = 60.0  # between tries
_FIRST_WAIT_SECONDS, _SLOWEST_WAIT_SECONDS = 0.1, 4.0  # between looks whether other hosts are done
_CLOSE_SECONDS = 5.0
_REOPEN_AFTER = 5  # failures in a row: credentials may have been renewed
_START = "from ds_pretrain.checkpoint.upload import main; main()"


class Uploader:
    """The leading rank's handle of its host's upload process. Nothing here raises but the constructor."""

    def __init__(self, root: Path, location: str, host: int, keep: int, keep_every: Multiples | None) -> None:
        """Raises InputError if checkpoints would be uploaded to where they are."""
        self._loop = UploadLoop(root.absolute(), location, host, keep, keep_every)
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False
        if "://" not in location and Path(location).resolve() == root.resolve():
            raise InputError(
                f"checkpoint.upload_to = {location}: checkpoints are saved there already; choose another "
                f"location"
            )

    def start(self) -> None:
        """Start the process; it uploads what an earlier one left, too."""
        try:
            self._loop.root.mkdir(parents=True, exist_ok=True)
            # An interpreter of its own: a child of `multiprocessing` would import the main module, and torch.
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
            assert self._process.stdin is not None
            with self._process.stdin as orders:
                pickle.dump((os.getpid(), self._loop), orders)
        except OSError as error:
            say(f"the upload process does not start: {error}; trying again after the next save")

    def revive(self) -> None:
        """Start the process again if it has died, until `close`; a live one looks by itself."""
        if not self._is_closed and (self._process is None or self._process.poll() is not None):
            self.start()

    def list_not_uploaded(self) -> list[int] | None:
        """The steps that are not whole at the remote yet, newest first; None if the disk is silent."""
        try:
            return [parse_step(folder.name) or 0 for folder in list_not_uploaded(self._loop.root)]
        except OSError:
            return None

    def wait(self, seconds: float) -> bool:
        """Wait until everything is uploaded, or for the given time; True if it is."""
        deadline = time.monotonic() + seconds
        if self.list_not_uploaded():
            self.revive()
        while self.list_not_uploaded() != []:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)
        return True

    def close(self) -> None:
        """End the process, whatever it does. What is not uploaded yet is uploaded after the next start."""
        self._is_closed = True
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # it may be stuck in a file system
                process.wait(_CLOSE_SECONDS)


def list_not_uploaded(root: Path) -> list[Path]:
    """The published checkpoints here that are not whole at the remote, newest first."""
    return [f for f in list_published(root) if (f / MANIFEST).is_file() and not is_uploaded(f)]


def main() -> None:
    """Upload until the process that started this one ends; it sent its number and the orders by pickle."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # they are meant for the ranks, which still save then
    os.nice(10)
    logging.basicConfig(handlers=[logging.NullHandler()])  # libraries may log what holds a credential
    sys.excepthook = lambda kind, error, trace: say(f"the upload process ends: {kind.__name__}: {error}")
    threading.excepthook = lambda args: say(
        f"in the upload process: {args.exc_type.__name__}: {args.exc_value}"
    )
    parent, loop = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()
    lock = FileLock(loop.root / LOCK, str)
    if not lock.try_take():
        say(f"another process uploads from {loop.root}; waiting until it ends")
        while not lock.try_take():
            time.sleep(IDLE_SECONDS)
    while True:
        time.sleep(loop.run_once())


def _exit_with_parent(parent: int) -> None:
    """End this process, whatever it does, once its parent is another one: whatever ended that."""
    while os.getppid() == parent:
        time.sleep(IDLE_SECONDS / 2)
    os._exit(0)


def say(text: str) -> None:
    """One line, in one piece, without credentials: others write there too."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"ds_pretrain: {' '.join(hide_secrets(text).split())}\n")
        sys.stderr.flush()


@dataclass
class UploadLoop:
    """The upload loop of one host: what it uploads and where to. Other fields only save requests."""

    root: Path
    location: str
    host: int
    keep: int
    keep_every: Multiples | None
    failures: int = 0  # consecutive
    waits: int = 0  # consecutive
    remote: Remote | None = None
    copied: set[tuple[str, str]] = field(default_factory=set)  # folder name and mark
    broken: set[tuple[str, bytes | None]] = field(default_factory=set)  # folder name and manifest; not tried

    def run_once(self) -> float:
        """Upload what is to be uploaded, newest first; the seconds to rest before the next round."""
        rest, waiting = 0.0, False
        for folder in list_not_uploaded(self.root):
            save = folder.name, read_manifest_bytes(folder)
            if save in self.broken:
                continue
            try:
                progress = upload_step(folder, self._opened(), self.host, self._tidy)
            except NotAsListed as error:
                self.broken.add(save)
                say(
                    f"checkpoint step {parse_step(folder.name)} cannot be uploaded to "
                    f"{self.location}: {error}; it is in {folder}"
                )
                continue
            except (OSError, RunError) as error:
                rest = min(IDLE_SECONDS * 2.0 ** min(self.failures, 10), _SLOWEST_SECONDS)
                say(
                    f"checkpoint step {parse_step(folder.name)} is not uploaded to {self.location} "
                    f"yet: {error}; trying again in {rest:g} seconds"
                )
                break
            if progress is UploadProgress.UPLOADED:
                self.failures = self.waits = 0
                return 0.0  # a newer one may have been published meanwhile
            waiting = waiting or progress is UploadProgress.WAITING
        if self.host == 0:
            self._copy_marks()
        self.failures = self.failures + 1 if rest else 0
        self.waits = self.waits + 1 if waiting else 0
        if waiting and not rest:
            return min(_FIRST_WAIT_SECONDS * 2.0 ** min(self.waits, 10), _SLOWEST_WAIT_SECONDS)
        return rest or IDLE_SECONDS

    def _opened(self) -> Remote:
        if self.remote is None or (self.failures and self.failures % _REOPEN_AFTER == 0):
            self.remote = open_remote(self.location)
        return self.remote

    def _tidy(self) -> None:
        """Prune the remote, on host 0, before anyone believes that nothing is left to do."""
        if self.host == 0 and self.remote is not None:
            try:
                tidy(self.root, self.remote, self.keep, self.keep_every)
            except OSError as error:
                say(
                    f"old checkpoints at {self.location} cannot be deleted: {error}; trying after the "
                    f"next one"
                )

    def _copy_marks(self) -> None:
        """Copy what was marked here after it was uploaded."""
        new = [
            (folder, mark)
            for folder in list_published(self.root)
            for mark in (KNOWN_GOOD, PINNED)
            if (folder.name, mark) not in self.copied and (folder / mark).exists() and is_uploaded(folder)
        ]
        if not new:
            return
        try:
            remote = self._opened()
            for folder, mark in new:
                step = parse_step(folder.name) or 0
                if remote.get_size(step, MANIFEST) is not None and remote.get_size(step, mark) is None:
                    remote.write(step, mark, (folder / mark).read_bytes())
                self.copied.add((folder.name, mark))
        except (OSError, RunError) as error:
            say(f"the marks of checkpoints are not at {self.location} yet: {error}; trying again")


class UploadProgress(Enum):
    """The progress of the upload of one checkpoint."""

    UPLOADED = "it, or a later save of this step, is complete at the remote"
    WAITING = "other hosts, or the host that writes the manifest, are not done"
    GONE = "the folder was pruned, renamed or replaced meanwhile"


class NotAsListed(Exception):
    """A checkpoint here is not what its manifest says: no later try can upload it."""


def upload_step(
    folder: Path, remote: Remote, host: int, whole: Callable[[], None] = lambda: None
) -> UploadProgress:
    """Take one published checkpoint as far as this host can now; never waits for others.

    `whole` is called once it is whole at the remote, before it is marked so here.

    Raises:
        OSError: the store, or the disk here.
        NotAsListed: the checkpoint here is broken.
    """
    write_point("upload begin")
    text = read_manifest_bytes(folder)
    if text is None:
        return UploadProgress.GONE
    try:
        return _upload_step(folder, remote, host, text, whole)
    except Exception:
        if read_manifest_bytes(folder) != text:
            return UploadProgress.GONE
        raise


def _upload_step(
    folder: Path, remote: Remote, host: int, text: bytes, whole: Callable[[], None]
) -> UploadProgress:
    try:
        manifest = parse_manifest(text.decode())
    except ValueError as error:
        raise NotAsListed(f"its manifest cannot be read: {error}") from None
    step = manifest.step
    if step != parse_step(folder.name):
        raise NotAsListed(f"its manifest is of step {step:,}")
    markers = _read_markers(remote, step)  # first: they are taken back once the manifest is there
    there = remote.read(step, MANIFEST)
    is_later = there is not None and _parse_creation(there) > (manifest.attempt, manifest.created)
    if there != text and not is_later:
        if there is not None:
            remote.remove(step, MANIFEST)  # of an earlier save of this step: its files are about to change
        _deliver(folder, remote, host, manifest, text, markers)
        if host != 0 or not manifest.files.keys() <= _list_arrived(_read_markers(remote, step), text):
            return UploadProgress.WAITING
        _publish(remote, step, text)
    whole()
    _mark(folder, manifest, text, remote.location)
    write_point("upload forget")
    remote.remove(step, marker_name(host))
    return UploadProgress.UPLOADED


def _deliver(
    folder: Path,
    remote: Remote,
    host: int,
    manifest: Manifest,
    text: bytes,
    markers: Mapping[str, list[str]],
) -> None:
    """Upload what is held here and was not delivered by whatever host; then say that it has arrived."""
    step, arrived = manifest.step, _list_arrived(markers, text)
    held = [name for name in manifest.files if (folder / name).exists()]
    lacking = [name for name in held if name not in arrived]
    for name, (save, *files) in markers.items():
        if save != manifest_checksum(text) and not set(files).isdisjoint(lacking):
            remote.remove(step, name)  # it will not be true any more
    for name in lacking:
        _upload(folder / name, remote, step, name, manifest.files[name])
    save, *known = markers.get(marker_name(host), [""])
    known = known if save == manifest_checksum(text) else []  # of whatever host had this number
    if save != manifest_checksum(text) or not set(known).issuperset(held):
        write_point("upload arrived")
        lines = [manifest_checksum(text), *sorted({*known, *held})]
        remote.write(step, marker_name(host), "".join(f"{line}\n" for line in lines).encode())


def _upload(path: Path, remote: Remote, step: int, name: str, entry: FileEntry) -> None:
    if remote.get_size(step, name) == entry.bytes and remote.entry(step, name) == entry:
        return
    # Before the upload: another host may hold this file too, and have delivered it meanwhile.
    if compute_checksum(path) != entry.sha256:
        raise NotAsListed(f"{path} is not what its manifest says; the disk here may be failing")
    write_point("upload file")
    if remote.upload(path, step, name) != entry and remote.upload(path, step, name) != entry:
        raise OSError(f"{remote.location}: {name} of step {step} arrived damaged twice")


def marker_name(host: int) -> str:
    """The name of a host's marker at the remote, which lists its uploaded files of a save."""
    return f"{ARRIVED}{host:05d}"


def _read_markers(remote: Remote, step: int) -> dict[str, list[str]]:
    """The lines of all markers of a step, by their names; one that a kill cut short names less."""
    names = [name for name in remote.list_names(step) if name.startswith(ARRIVED)]
    texts = {name: (remote.read(step, name) or b"").decode(errors="replace") for name in names}
    return {name: text.split("\n")[:-1] or [""] for name, text in texts.items()}


def _list_arrived(markers: Mapping[str, list[str]], text: bytes) -> set[str]:
    """The files that have arrived of the save with this manifest, whoever brought them."""
    return {file for save, *files in markers.values() if save == manifest_checksum(text) for file in files}


def _publish(remote: Remote, step: int, text: bytes) -> None:
    """Write the manifest at the remote, once nothing is beside the files but the markers of other hosts."""
    for name in remote.list_unfinished(step):
        if name.startswith(f".{marker_name(0)}") or not name.startswith(
            f".{ARRIVED}"
        ):  # others write theirs now
            remote.remove(step, name)
    write_point("upload manifest")
    remote.write(step, MANIFEST, text)
    if remote.read(step, MANIFEST) != text:
        raise OSError(f"{remote.location}: the manifest of step {step} reads back as something else")


def _mark(folder: Path, manifest: Manifest, text: bytes, location: str) -> None:
    """Write down here that this checkpoint need not be kept here."""
    files = [folder / name for name in manifest.files]
    seconds = time.time() - (folder / MANIFEST).stat().st_mtime
    mark = {
        "manifest": manifest_checksum(text),
        "location": location,
        "bytes": sum(path.stat().st_size for path in files if path.exists()),
        "seconds": round(max(seconds, 0.0), 3),  # from publication to arrival
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    write_point("upload mark")
    write_atomic(folder / UPLOADED, json.dumps(mark))


def tidy(root: Path, remote: Remote, keep: int, keep_every: Multiples | None) -> None:
    """Prune the remote by the rule that holds here, and what can never become whole. On host 0."""
    here = {step: folder for folder in list_published(root) if (step := parse_step(folder.name)) is not None}
    there = remote.list_steps()

    def marked(step: int, mark: str) -> bool:
        return (step in here and (here[step] / mark).exists()) or remote.get_size(step, mark) is not None

    old = select_expired(there, keep=keep, keep_every=keep_every, protected=())
    # Each newer one had to wait for all hosts: one that still has not seen an old one is no more.
    abandoned = select_expired(there, keep=2 * keep, keep_every=keep_every, protected=())
    known_good = next((step for step in there if marked(step, KNOWN_GOOD)), None) if old else None
    for step in old:
        if step == known_good or marked(step, PINNED):
            continue
        unseen = [
            name for name in remote.list_names(step) if name.startswith(ARRIVED) and name != marker_name(0)
        ]
        if step in abandoned or not unseen:
            write_point("upload prune")
            remote.delete(step)
    on_their_way = {parse_step(folder.name) for folder in list_not_uploaded(root)}
    for step in remote.list_folders():
        if there and step < there[0] and step not in there and step not in on_their_way:
            remote.delete(step)


def read_manifest_bytes(folder: Path) -> bytes | None:
    """The bytes of the manifest here; None if there is none."""
    try:
        return (folder / MANIFEST).read_bytes()
    except FileNotFoundError:
        return None


def _parse_creation(text: bytes) -> tuple[int, str]:
    """At which start of the run a manifest was made, and when in that; that of none is older than any.

    A clock may go back between two starts; their number does not.
    """
    try:
        manifest = parse_manifest(text.decode())
        return manifest.attempt, manifest.created
    except ValueError:
        return (0, "")
