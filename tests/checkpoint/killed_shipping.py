"""Ships, and is killed at its nth write point: python -m tests.checkpoint.killed_shipping ORDER NTH."""

import itertools
import json
import os
import signal
import sys

from ds_pretrain.checkpoint import remote, shipment
from ds_pretrain.checkpoint.rounds import Order, Rounds


def main() -> None:
    nth, counted = int(sys.argv[2]), itertools.count()

    def write_point(name: str) -> None:
        if next(counted) == nth:
            os.kill(os.getpid(), signal.SIGKILL)

    remote.write_point = shipment.write_point = write_point  # type: ignore[attr-defined]
    rounds = Rounds(Order(**json.loads(sys.argv[1])))
    while rounds.round() == 0:
        pass


if __name__ == "__main__":
    main()
