"""Ships, and is killed at a write point, by name or by number.

python -m tests.checkpoint.killed_upload ROOT PLACE POINT
"""

import itertools
import os
import signal
import sys
from pathlib import Path

from ds_pretrain.checkpoint import remote, upload


def main() -> None:
    counted = itertools.count()

    def write_point(name: str) -> None:
        if sys.argv[3] in (name, str(next(counted))):
            os.kill(os.getpid(), signal.SIGKILL)

    remote.write_point = upload.write_point = write_point  # type: ignore[attr-defined]
    rounds = upload.UploadLoop(Path(sys.argv[1]), sys.argv[2], 0, 1, None)
    while rounds.run_once() == 0:
        pass


if __name__ == "__main__":
    main()
