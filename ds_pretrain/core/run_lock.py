"""The lock of a run directory: one start at a time."""

import fcntl
import os
import socket
from pathlib import Path
from typing import TextIO

from ds_pretrain.core.errors import InputError
from ds_pretrain.core.files import ensure_writable_folder
from ds_pretrain.core.run_files import stop_file

LOCK = ".run.lock"  # a file in the run directory


class RunLock:
    """Holds the run directory for one start, on rank 0: however it was launched, a second one is refused."""

    def __init__(self, out: Path, setting: str = "out") -> None:
        """`setting` names the key of the run file in messages."""
        self._path, self._setting = out / LOCK, setting
        self._file: TextIO | None = None

    @property
    def is_held(self) -> bool:
        """True if the run directory is this start's to write to."""
        return self._file is not None

    def take(self) -> None:
        """Hold it until `release`, or until this process ends. The directory is created if need be.

        Raises:
            InputError: it cannot be written, or another start of the run lives.
        """
        ensure_writable_folder(self._path.parent, self._setting)
        file = self._path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip()
            file.close()
            raise InputError(
                f"{self._path.parent}: this run is running already ({owner}); stop it with "
                f"`touch {stop_file(self._path.parent)}` and wait, or give another `out`"
            ) from None
        except OSError:
            pass  # a file system without locks
        file.truncate(0)
        file.write(f"pid {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        self._file = file

    def release(self) -> None:
        """Let another start have it."""
        if self._file is not None:
            self._file.close()
            self._file = None
