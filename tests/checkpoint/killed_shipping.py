"""Ships, and is killed at its nth write point: python -m tests.checkpoint.killed_shipping ROOT PLACE NTH."""

import itertools
import os
import signal
import sys
from pathlib import Path

from ds_pretrain.checkpoint import remote, upload


def main() -> None:
    nth, counted = int(sys.argv[3]), itertools.count()

    def write_point(name: str) -> None:
        if next(counted) == nth:
            os.kill(os.getpid(), signal.SIGKILL)

    remote.write_point = upload.write_point = write_point  # type: ignore[attr-defined]
    rounds = upload.Rounds(Path(sys.argv[1]), sys.argv[2], 0, 1, None)
    while rounds.round() == 0:
        pass


if __name__ == "__main__":
    main()
