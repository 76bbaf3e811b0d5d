"""Work of rank 0 that all ranks wait for, and whose failure is everyone's: nobody is left waiting."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from time import monotonic
from typing import TypeVar, cast

from ds_pretrain.core.distributed import World, from_main
from ds_pretrain.core.errors import InputError, RunError, agreed

PROGRESS_SECONDS = 30.0
Result = TypeVar("Result")


def on_main(world: World, act: Callable[[], Result], failed: str) -> Result:
    """What `act` returns on rank 0, on every rank. Collective.

    Raises:
        InputError, RunError: what it raised, on every rank; anything else becomes a RunError, with `failed`.
    """
    value, error = None, None
    if world.is_main:
        try:
            value = act()
        except Exception as met:  # the others wait for an answer, whatever it is
            error = _as_told(met, failed)
    value, error = from_main(world, (value, error))
    if error is not None:
        raise agreed(error)
    return cast(Result, value)


def while_others_wait(
    world: World, act: Callable[[], object], tell: Callable[[str], None], what: str, poll_seconds: float
) -> None:
    """Do long work on rank 0, in a thread; all meet every `poll_seconds`: no timeout strikes. Collective.

    Raises:
        InputError, RunError: as `on_main` does.
    """
    started = told = monotonic()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(act) if world.is_main else None
        while not on_main(world, lambda: _is_done(future, poll_seconds), f"{what} failed"):
            if monotonic() - told > PROGRESS_SECONDS:
                told = monotonic()
                tell(f"{what}: {told - started:.0f} seconds so far")


def _is_done(future: "Future[object] | None", seconds: float) -> bool:
    """On rank 0: whether it is, after `seconds` at the latest; its error is raised here."""
    assert future is not None
    if not wait([future], seconds).done:
        return False
    future.result()
    return True


def _as_told(error: Exception, failed: str) -> RunError:
    if isinstance(error, InputError):
        return InputError(error.problems)
    if isinstance(error, RunError):
        return RunError(str(error))
    return RunError(f"{failed}: {type(error).__name__}: {error}")
