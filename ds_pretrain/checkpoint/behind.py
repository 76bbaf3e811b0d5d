"""Work behind the training loop: a thread whose state can be asked for, and whose error is kept."""

import threading
from collections.abc import Callable
from enum import IntEnum
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Stage(IntEnum):
    """How far a job is; a number, so that all ranks can share it in the row of a step."""

    RUNNING = 1
    DONE = 2
    FAILED = 3


class Job(Generic[Result]):
    """Runs `act` on a thread of its own, from now on."""

    def __init__(self, act: Callable[[], Result], name: str) -> None:
        self.error: Exception | None = None
        self._result: list[Result] = []
        self._act = act
        self._thread = threading.Thread(target=self._run, name=name)
        self._thread.start()

    @property
    def stage(self) -> Stage:
        """Where it stands; never waits."""
        if self._thread.is_alive():
            return Stage.RUNNING
        return Stage.FAILED if self.error is not None else Stage.DONE

    def wait(self, seconds: float | None = None) -> None:
        """Return when it is done or has failed, or after so many seconds."""
        self._thread.join(seconds)

    def result(self) -> Result:
        """What `act` returned; its error is raised here."""
        self.wait()
        if self.error is not None:
            raise self.error
        return self._result[0]

    def _run(self) -> None:
        try:
            self._result.append(self._act())
        except Exception as error:  # kept for whoever asks: a thread has no caller
            self.error = error
