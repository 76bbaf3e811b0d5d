"""Calls `run` in a process of its own, as the command line does: python -m tests.launch.start JSON OUT."""

import json
import signal
import sys
from pathlib import Path

from ds_pretrain.core.errors import RunError
from ds_pretrain.launch.command import Command, compose
from ds_pretrain.launch.hostfile import Host
from ds_pretrain.launch.run import run

# As in a terminal, whatever started the tests: a job in the background is born with some of them ignored.
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)


def main() -> int:
    given = json.loads(sys.argv[1])
    out = Path(sys.argv[2])
    try:
        if "argv" in given:
            command = Command(tuple(given["argv"]), {}, (Host("localhost", 1),), over_ssh=False)
        else:
            hostfile = Path(given["hostfile"]) if "hostfile" in given else None
            command = compose(
                str(out),
                given["words"],
                ranks=given.get("ranks"),
                hostfile=hostfile,
                module="tests.launch.rank",
            )
        return run(command, out, grace_seconds=given.get("grace_seconds", 2.0))
    except RunError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
