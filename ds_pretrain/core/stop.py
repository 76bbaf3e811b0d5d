"""Requests to stop or to save: signals, or files in the run folder. Asking is local; acting is agreed."""

import signal
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from ds_pretrain.core.distributed import World
from ds_pretrain.core.run_files import save_file, stop_file

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


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
        return self._signalled or (self._looks and _exists(self._file))

    def is_save_asked(self) -> bool:
        """True once for each request to save: SIGUSR1 here, or the file `save-now`, which is removed."""
        asked, self._save_signalled = self._save_signalled, False
        if self._looks and not self._save_file_stays and _exists(self._save_file):
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


def _exists(path: Path) -> bool:
    """Whether a file is there; a file system that does not answer asks for nothing."""
    try:
        return path.exists()
    except OSError:
        return False
