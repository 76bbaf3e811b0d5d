"""Files that survive a crash: written whole or not at all, synced, checked, and locked against others."""

import fcntl
import hashlib
import os
import socket
import tempfile
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from ds_pretrain.core.errors import InputError

# Takes what a file would hold, and its path. What it returns waits until nothing of that is needed any more.
Capture = Callable[[Any, Path], Callable[[], None]]
_CHUNK_BYTES = 1 << 20  # small enough to be summed while it lies in a core's cache
_COPY_CHUNK_BYTES = 1 << 24


def write_point(name: str) -> None:
    """A moment at which a crash must lose nothing. It does nothing; tests put a SIGKILL or a fault here."""


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` (created, renamed, removed) survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Make the bytes of `path` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace `path` by `content`: a reader, or a crash, meets the old bytes or the new ones, never a mix."""
    data = content.encode() if isinstance(content, str) else content
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(
            temporary, 0o666 & ~_read_umask()
        )  # mkstemp makes 0600; a shared run folder follows the umask
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def copy_beside(source: Path, target: Path) -> Path:
    """Copy in chunks to a name beside `target` that begins with a dot, synced; to be renamed."""
    unfinished = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        with source.open("rb") as here, unfinished.open("wb") as there:
            while chunk := here.read(_COPY_CHUNK_BYTES):
                there.write(chunk)
            there.flush()
            os.fsync(there.fileno())
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    return unfinished


def make_synced(folder: Path) -> None:
    """Create a folder, and those above it, so that their names survive a power cut."""
    if not folder.is_dir():
        make_synced(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


class FileLock:
    """An advisory lock on a file or an existing folder, held until `release` or the end of this process.

    A file that is locked holds "pid N on HOST" of its holder. A file system without locks (some network
    mounts) counts as free: the lock guards against accidents, not against malice.
    """

    def __init__(self, path: Path, busy: Callable[[str], str]) -> None:
        """`busy` makes the message of the error from the text in the file, which names the holder."""
        self._path, self._busy = path, busy
        self._descriptor: int | None = None

    @property
    def is_held(self) -> bool:
        """True while this process holds the lock through this object."""
        return self._descriptor is not None

    def take(self) -> None:
        """Take the lock.

        Raises:
            InputError: another process holds it.
            OSError: the file cannot be opened.
        """
        if not self.try_take():
            raise InputError(self._busy("" if self._path.is_dir() else self._path.read_text().strip()))

    def try_take(self) -> bool:
        """Take the lock if nobody holds it; return whether this process holds it now."""
        is_folder = self._path.is_dir()
        descriptor = os.open(self._path, os.O_RDONLY if is_folder else os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        except OSError:
            pass  # a file system without locks
        self._descriptor = descriptor
        if not is_folder:
            with suppress(OSError):  # a full disk: the holder's name is a courtesy
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"pid {os.getpid()} on {socket.gethostname()}\n".encode())
        return True

    def release(self) -> None:
        """Let another process have it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Self:
        self.take()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def compute_checksum(path: Path) -> str:
    """SHA-256 of a file, as hexadecimal, read in chunks."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)  # the kernel reads further ahead
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def check_folder(folder: Path, what: str) -> str | None:
    """Return why `folder` cannot be written or created, as far as looking tells; None if it seems it can."""
    existing = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
    if not existing.is_dir():
        reason = f"{existing} is not a folder"
    elif not os.access(existing, os.W_OK | os.X_OK):
        reason = f"{existing} is not writable for you"
    else:
        return None
    return f"{what} = {folder}: cannot write there ({reason}); choose another folder"


def ensure_writable_folder(folder: Path, what: str) -> None:
    """Create `folder` if need be and prove that a file can be written there.

    Raises:
        InputError: it cannot; `what` names the setting that asked for the folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, probe = tempfile.mkstemp(prefix=".writable.", dir=folder)
        os.close(descriptor)
        os.unlink(probe)
    except OSError as error:
        raise InputError(
            f"{what} = {folder}: cannot write there ({error.strerror or error}); choose another folder"
        ) from error


def free_bytes(folder: Path) -> int:
    """Bytes that a user without privileges can still write to the file system of `folder`."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _read_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def available_memory_bytes() -> int:
    """Host memory that can be had without swapping (MemAvailable of /proc/meminfo)."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable")
