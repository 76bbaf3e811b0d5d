"""The ranks of a run as a value, and the few collectives used.

`World` holds numbers only. Every collective here must be called by all ranks on the same line of code.
With one rank and no process group each of them is the identity, so the same code runs without a launcher.
"""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from threading import Thread
from time import monotonic
from typing import Any, Final, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt

from ds_pretrain.core.errors import InputError, RunError, mark_agreed

Result = TypeVar("Result")
PROGRESS_SECONDS = 30.0
_MOST_SHOWN = 8  # ranks may fail by the thousand, for one reason

log = logging.getLogger("ds_pretrain")
EVERY_RANK: Final = {"every_rank": True}  # `extra` of a record that any rank logs, not rank 0 alone


@dataclass(frozen=True)
class World:
    """The rank of this process and the number of ranks."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def is_main(self) -> bool:
        """True on the one rank that writes what is written once."""
        return self.rank == 0

    def data_parallel_world(self, sequence_parallel_size: int) -> "World":
        """The data-parallel world: neighboring ranks that share their sequences count as one."""
        return World(
            self.rank // sequence_parallel_size, self.size // sequence_parallel_size, self.local_rank
        )

    @staticmethod
    def from_environment() -> "World":
        """Read RANK, WORLD_SIZE and LOCAL_RANK, as every launcher sets them; one rank if they are absent."""
        return World(
            rank=int(os.environ.get("RANK", "0")),
            size=int(os.environ.get("WORLD_SIZE", "1")),
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        )

    def to_environment(self) -> None:
        """Say the same in the variables that libraries read, where no launcher has set them."""
        values = {"RANK": self.rank, "WORLD_SIZE": self.size, "LOCAL_RANK": self.local_rank, "LOCAL_SIZE": 1}
        for name, value in values.items():
            os.environ.setdefault(name, str(value))


def read_environment_values(wanted: Callable[[str], bool]) -> list[str]:
    """The values of the environment variables whose names are `wanted`."""
    return [value for name, value in os.environ.items() if wanted(name)]


def uses_gpu() -> bool:
    """True if the ranks compute on CUDA devices: there are some, and DS_ACCELERATOR allows them."""
    import torch

    return os.environ.get("DS_ACCELERATOR", "cuda") == "cuda" and torch.cuda.is_available()


class Partition(NamedTuple):
    """Elements [start, start + length) of a flattened parameter; `padded` is what they take in a shard."""

    start: int
    length: int  # may be 0
    padded: int


def compute_partition(num_elements: int, rank: int, num_ranks: int) -> Partition:
    """Return the share of a flattened parameter that ZeRO-3 gives to a rank: equal, the last ones padded.

    Measured on DeepSpeed 0.19.8; the tests of restoring on other numbers of ranks fail when it changes.
    """
    padded = ceil(num_elements / num_ranks)
    start = min(rank * padded, num_elements)
    return Partition(start, min(padded, num_elements - start), padded)


def gather_rows(world: World, row: Sequence[float]) -> npt.NDArray[np.float64]:
    """One row of numbers from each rank: [num_ranks, len(row)], the same bits everywhere. Collective."""
    local = np.asarray(row, dtype=np.float64)
    if world.size == 1:
        return local[None, :]
    import torch
    import torch.distributed as dist

    device = _get_collective_device()
    mine = torch.from_numpy(local).to(device)
    rows = list(torch.empty((world.size, len(row)), dtype=torch.float64, device=device))  # W views of [K]
    dist.all_gather(rows, mine)
    return torch.stack(rows).cpu().numpy()


def gather_objects(world: World, value: Any) -> list[Any]:
    """One picklable value from each rank, in rank order. Collective; not for every step."""
    if world.size == 1:
        return [value]
    import torch.distributed as dist

    values: list[Any] = [None] * world.size
    dist.all_gather_object(values, value)
    return values


def broadcast_from_main(world: World, value: Any) -> Any:
    """Rank 0's value on every rank. Collective."""
    if world.size == 1:
        return value
    import torch.distributed as dist

    box = [value]
    dist.broadcast_object_list(box, src=0, device=_get_collective_device())
    return box[0]


def run_on_main(world: World, act: Callable[[], Result]) -> Result:
    """Return what `act` returns on rank 0, on every rank. Collective; for work of a few seconds.

    Raises:
        RunError: what `act` raised on rank 0, whatever it was, on every rank: nobody is left waiting.
    """
    outcome = _try_act(act) if world.is_main else None
    return cast(Result, _unwrap([broadcast_from_main(world, outcome)])[0])


def run_on_each_rank(
    world: World, act: Callable[[], Result], what: str | None = None, poll_seconds: float = 2.0
) -> list[Result]:
    """Return what `act` returns on each rank, in rank order, however long it takes. Collective.

    Each rank works in a thread, and all meet every `poll_seconds`: no timeout of a collective strikes, and
    no rank that fails leaves the others waiting. With `what`, rank 0 logs every 30 s that it still runs.

    Raises:
        RunError: one error on every rank, with what each rank raised; InputError if all were of that kind.
    """
    done: list[_Outcome] = []
    thread = Thread(target=lambda: done.append(_try_act(act)), name="work", daemon=True)
    thread.start()
    started = logged = monotonic()
    while True:
        thread.join(poll_seconds)
        if all(gather_objects(world, bool(done))):
            return cast("list[Result]", _unwrap(gather_objects(world, done[0])))
        if what is not None and monotonic() - logged > PROGRESS_SECONDS:
            logged = monotonic()
            log.info("%s: %.0f seconds so far", what, logged - started)


@dataclass(frozen=True)
class _Outcome:
    """The value that a rank's work returned, or the error that it raised."""

    value: Any = None
    problems: tuple[str, ...] = ()
    is_input: bool = False  # somebody has to change something: trying again cannot help
    error: RunError | None = None  # an error of its own kind and exit code


def _try_act(act: Callable[[], Any]) -> _Outcome:
    try:
        return _Outcome(act())
    except InputError as error:
        return _Outcome(problems=error.problems, is_input=True, error=error)
    except RunError as error:
        return _Outcome(problems=(str(error),), error=error)
    except OSError as error:
        return _Outcome(problems=(str(error) or repr(error),))
    except BaseException as error:  # the other ranks wait for an answer, whatever it is
        log.exception("unexpected error", extra=EVERY_RANK)
        return _Outcome(problems=(f"{type(error).__name__}: {error}",))


def _unwrap(outcomes: Sequence[_Outcome]) -> list[Any]:
    """The values of all ranks, or one error for all of theirs."""
    failed = [outcome for outcome in outcomes if outcome.problems]
    if not failed:
        return [outcome.value for outcome in outcomes]
    if len(outcomes) == 1 and failed[0].error is not None:
        raise mark_agreed(failed[0].error)
    problems = list(
        dict.fromkeys(
            problem if outcome.is_input or len(outcomes) == 1 else f"rank {rank}: {problem}"
            for rank, outcome in enumerate(outcomes)
            for problem in outcome.problems
        )
    )
    if all(outcome.is_input for outcome in failed):
        raise mark_agreed(InputError(problems))
    more = [f"{len(problems) - _MOST_SHOWN} more like these"] if len(problems) > _MOST_SHOWN else []
    raise mark_agreed(RunError("; ".join([*problems[:_MOST_SHOWN], *more])))


def barrier(world: World) -> None:
    """Wait until every rank is here. Collective."""
    gather_rows(world, [0.0])


def _get_collective_device() -> Any:
    import torch
    import torch.distributed as dist

    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
