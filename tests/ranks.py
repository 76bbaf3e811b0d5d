"""Runs a function on several real ranks: fresh processes of a warm forkserver, gloo between them.

The forkserver imports torch, DeepSpeed and Transformers once (about ten seconds); after that a two-rank test
takes about as long as what it does. A test may pass any picklable function of a module:

    def work(world: World, path: str) -> float: ...
    losses = run_ranks(work, 2, str(tmp_path))
"""

import logging
import multiprocessing
import os
import signal
import socket
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import Any

from ds_pretrain.core.distributed import World, log

PRELOAD = [
    "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.gpt2.modeling_gpt2",
    "ds_pretrain.train",
    "tests.frozen",
]

# Only a deadlock takes so long: on a busy machine a test of seconds may take minutes.
TIMEOUT_SECONDS = 600.0

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOAD)

# Set before the forkserver starts, so that every rank inherits them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")


class RankFailure(AssertionError):
    """A rank raised, died or did not finish in time."""


class Killed:
    """Stands for the result of a rank that ended by SIGKILL."""

    def __repr__(self) -> str:
        return "KILLED"


KILLED = Killed()


def run_ranks(
    function: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    timeout_seconds: float = TIMEOUT_SECONDS,
    allow_kill: bool = False,
    backend: str = "gloo",
    **options: Any,
) -> list[Any]:
    """Call `function(world, *args, **options)` on every rank; the results in rank order.

    With `allow_kill`, ranks that end by SIGKILL give `KILLED`; the others are then killed as well, as the
    loss of a host would. Otherwise a rank that raises, dies or outlives the timeout fails the test.
    """
    with tempfile.TemporaryDirectory(prefix="ranks.") as folder:
        pipes, processes = [], []
        for rank in range(num_ranks):
            receiver, sender = _context.Pipe(duplex=False)
            process = _context.Process(
                target=_rank_main,
                args=(partial(function, **options), args, rank, num_ranks, folder, backend, sender),
                daemon=True,
            )
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            return _collect(pipes, processes, monotonic() + timeout_seconds, allow_kill)
        finally:
            for process in processes:
                process.kill()
                process.join()


def run_ranks_each(
    function: Callable[..., Any],
    num_ranks: int,
    *calls: tuple[Any, ...],
    timeout_seconds: float = TIMEOUT_SECONDS,
    **options: Any,
) -> list[list[Any]]:
    """Call `function(world, *call, **options)` for each call in turn in one group of ranks; their results.

    Starting ranks costs as much as a few steps of a small run, so what kills nobody and patches nothing for
    good may share a start.
    """
    ranks = run_ranks(
        _call_each, num_ranks, partial(function, **options), calls, timeout_seconds=timeout_seconds
    )
    return [list(results) for results in zip(*ranks, strict=True)]


def _call_each(world: World, function: Callable[..., Any], calls: tuple[tuple[Any, ...], ...]) -> list[Any]:
    return [function(world, *call) for call in calls]


def _collect(pipes: list[Connection], processes: list[Any], deadline: float, allow_kill: bool) -> list[Any]:
    results: list[Any] = [None] * len(pipes)
    pending = dict(enumerate(pipes))
    while pending:
        ready = wait(list(pending.values()), timeout=max(0.0, deadline - monotonic()))
        if not ready:
            raise RankFailure(f"ranks {sorted(pending)} did not finish in time")
        for rank in [r for r, pipe in pending.items() if pipe in ready]:
            try:
                kind, value = pending.pop(rank).recv()
            except EOFError:
                processes[rank].join(5)
                if allow_kill and processes[rank].exitcode == -signal.SIGKILL:
                    return [KILLED] * len(pipes)
                raise RankFailure(f"rank {rank} died with exit code {processes[rank].exitcode}") from None
            if kind == "error" and not allow_kill:
                raise RankFailure(f"rank {rank} raised:\n{value}")
            results[rank] = value
    return results


def _rank_main(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    num_ranks: int,
    folder: str,
    backend: str,
    sender: Connection,
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        LOCAL_SIZE=str(num_ranks),
        CROSS_RANK="0",
        CROSS_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29999",
    )
    import deepspeed
    import torch

    from ds_pretrain.core.text import LogToStderr
    from ds_pretrain.engine.engine import silence_deepspeed

    torch.set_num_threads(1)
    silence_deepspeed()
    world = World(rank=rank, size=num_ranks, local_rank=rank)
    LogToStderr(rank).install()
    try:
        deepspeed.init_distributed(
            backend,
            init_method=f"file://{Path(folder) / 'rendezvous'}",
            rank=rank,
            world_size=num_ranks,
            verbose=False,
        )
        value = function(world, *args)
        sender.send(("ok", value))
    except BaseException:
        sender.send(("error", traceback.format_exc()))
    os._exit(0)  # destroying a gloo group can block on a peer that is already gone


@contextmanager
def heard() -> Iterator[list[str]]:
    """What the program logs meanwhile in this process, also on a rank that would not say it."""
    lines: list[str] = []
    handler, level = logging.Handler(), log.level
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def free_port() -> int:
    """A TCP port of the loopback interface that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
