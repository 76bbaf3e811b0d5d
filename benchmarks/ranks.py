"""Starts a benchmark's own file once a rank, as a launcher would."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ds_pretrain.launch.command import find_free_port


def start_ranks(file: str, run_file: Path, ranks: int, words: Sequence[str] = ()) -> int:
    """Run `file --run-file RUN_FILE [words]` once a rank; the highest exit code."""
    port = str(find_free_port(None, 29500))
    environments = [
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks)}
        | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "DS_ACCELERATOR": "cpu"}
        for rank in range(ranks)
    ]
    command = [sys.executable, file, "--run-file", str(run_file), *words]
    processes = [subprocess.Popen(command, env={**os.environ, **more}) for more in environments]
    return max(abs(process.wait()) for process in processes)
