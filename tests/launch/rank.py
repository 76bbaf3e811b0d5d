"""Stands in for the training module: a rank that says who it is, and then does what it is told.

    python -m tests.launch.rank [--local_rank=N] OUT WORD...

`train` waits for the stop file, and then ends as a preempted run does; `deaf` waits for SIGKILL; `code=N`
ends with N; `quiet` does not write its exit code down; `child` leaves a child; `reduce` sums the ranks'
numbers over all hosts; `show` writes down what environment and words arrived.
"""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

from ds_pretrain.core.errors import EXIT_PREEMPTED
from ds_pretrain.core.run_files import record_exit, record_rank, stop_file


def main() -> int:
    out, *words = (word for word in sys.argv[1:] if not word.startswith("--local_rank"))
    folder, rank = Path(out), int(os.environ.get("RANK", "0"))
    code = int(next((word.removeprefix("code=") for word in words if word.startswith("code=")), 0))
    if "show" in words:
        seen = {"words": words, "environment": dict(os.environ), "host": socket.gethostname()}
        (folder / f"seen_{rank}.json").write_text(json.dumps(seen))
    if "deaf" in words:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "child" in words and os.fork() == 0:
        time.sleep(600)
    record_rank(folder, rank)
    if "reduce" in words:
        (folder / f"sum_{rank}").write_text(str(sum_of_ranks()))
    while "train" in words or "deaf" in words:
        time.sleep(0.05)
        if stop_file(folder).exists() and "deaf" not in words:
            code = EXIT_PREEMPTED
            break
    if rank == 0 and "quiet" not in words:
        record_exit(folder, code)
    return code


def sum_of_ranks() -> float:
    """1 + 2 + ... over the ranks, by DeepSpeed's own process group."""
    import deepspeed
    import torch

    from ds_pretrain.engine.engine import silence_deepspeed

    silence_deepspeed()  # or it compiles a collective, and waits for whoever was killed while compiling
    deepspeed.init_distributed("gloo")
    value = torch.tensor([float(os.environ["RANK"]) + 1])  # [1]
    deepspeed.comm.all_reduce(value)
    return float(value.item())


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    os._exit(exit_code)  # as train does: threads that gloo leaves behind can abort the interpreter's own end
