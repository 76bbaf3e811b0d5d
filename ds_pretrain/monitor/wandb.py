"""Weights & Biases, where it can neither stop, delay nor duplicate a run. The only file that knows `wandb`.

All calls into the client happen on one background thread, behind a bounded queue. When the client fails or
hangs, one message says so, training goes on, and the client is opened again after growing pauses, under the
same run id.
"""

import contextlib
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from time import monotonic
from typing import Any, Literal, Protocol

from ds_pretrain.core.text import counted, say

_LONGEST_TEXT = 1000  # characters of a value
_NESTED = (list, tuple, Mapping)


@dataclass(frozen=True)
class WandbRun:
    """Which W&B run to write to. The caller keeps `id` in the run directory: every restart must find it."""

    id: str
    project: str
    name: str
    mode: Literal["online", "offline"]


@dataclass(frozen=True)
class Patience:
    """How long W&B may take for what, in seconds, and how many records wait for it at most."""

    first_pause: float = 5.0
    longest_pause: float = 300.0
    stalled: float = 60.0
    finish: float = 30.0
    queue: int = 10_000
    tries: int = 3


class Client(Protocol):
    """The part of `wandb.Run` that is used."""

    @property
    def step(self) -> int: ...

    def log(self, data: dict[str, Any], step: int) -> None: ...

    def finish(self) -> None: ...


class Wandb:
    """A sink for one W&B run: `write` never blocks or raises, `close` takes at most `patience.finish`.

    `first_index` must be above every index that an earlier start of this run used. W&B drops points whose
    own step does not rise (https://github.com/wandb/wandb/issues/4482), so that step only counts;
    "train/step" is the axis.
    """

    def __init__(
        self, open_client: Callable[[], Client], first_index: int = 0, patience: Patience | None = None
    ) -> None:
        self._open = open_client
        self._index = first_index
        self._patience = patience or Patience()
        self._records: deque[tuple[int, dict[str, Any]]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._busy_since: float | None = None
        self._warned = False
        self.degraded: str | None = None  # why points are not arriving now; None is healthy
        self.num_lost = 0
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        self._thread.start()

    def write(self, record: Mapping[str, Any]) -> None:
        """Queue `record`; the oldest waiting one is lost when the queue is full."""
        stalled_since = self._busy_since
        if stalled_since is not None and monotonic() - stalled_since > self._patience.stalled:
            self._degrade(f"a call has not returned for {self._patience.stalled:g} s")
        with self._wake:
            if len(self._records) >= self._patience.queue:
                self._records.popleft()
                self.num_lost += 1
            self._records.append((self._index, points(record)))
            self._index += 1
            self._wake.notify()

    def close(self) -> None:
        """Send what waits and finish the run, for as long as patience allows."""
        with self._wake:
            if self._closing:
                return
            self._closing = True
            self._wake.notify()
        self._thread.join(self._patience.finish)
        num_unsent = len(self._records) + self.num_lost
        if self._thread.is_alive():
            self._degrade(f"it did not finish within {self._patience.finish:g} s")
            _end_service()
        if num_unsent:
            say(sys.stderr, f"W&B did not get {counted(num_unsent, 'record')}; metrics.jsonl has everything")

    def _work(self) -> None:
        pause = self._patience.first_pause
        tries = 0  # failures of the record at the head of the queue
        while True:
            client = None
            try:
                client = self._timed(self._open)
                while (head := self._next()) is not None:
                    index, data = head
                    self._timed(partial(_log, client, data, index))
                    with self._wake:
                        if self._records and self._records[0] is head:
                            self._records.popleft()
                    pause, tries = self._patience.first_pause, 0
                    self._recover()
                self._timed(client.finish)
                return
            except Exception as error:  # whatever the client throws, training must not notice
                self._degrade(f"{type(error).__name__}: {error}")
                tries += client is not None
                if tries >= self._patience.tries:
                    self._drop_head()
                    tries = 0
            if client is not None:
                with contextlib.suppress(Exception):
                    self._timed(client.finish)
            with self._wake:
                if self._closing or self._wake.wait_for(lambda: self._closing, timeout=pause):
                    return
            pause = min(2 * pause, self._patience.longest_pause)

    def _next(self) -> tuple[int, dict[str, Any]] | None:
        with self._wake:
            self._wake.wait_for(lambda: self._records or self._closing)
            return self._records[0] if self._records else None

    def _drop_head(self) -> None:
        with self._wake:
            if self._records:
                self._records.popleft()
                self.num_lost += 1

    def _timed(self, call: Callable[[], Any]) -> Any:
        self._busy_since = monotonic()
        try:
            return call()
        finally:
            self._busy_since = None

    def _degrade(self, reason: str) -> None:
        self.degraded = reason
        if not self._warned:
            self._warned = True
            say(
                sys.stderr,
                f"monitoring degraded: W&B: {reason}; training goes on; metrics.jsonl has everything",
            )

    def _recover(self) -> None:
        if self.degraded is not None:
            self.degraded, self._warned = None, False
            say(sys.stderr, f"monitoring recovered: W&B takes records again; {self.num_lost} were lost to it")


def points(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record as W&B keys: "train/loss", "validation/web", "checkpoint/seconds", its step and attempt.

    Of a validation also "validation/web/to_1024" and "validation/web/key_1024", the mean over depths. Of what
    was read "data/web/tokens" and "data/web/epochs".

    Lists and nested values stay in metrics.jsonl, and so does the rest of a long text.
    """
    kind = record["event"]
    nested = {"validation": _validated, "data": _read}.get(kind, dict[str, Any])
    values = nested(record)
    prefix = "train" if kind == "step" else kind
    data = {
        f"{prefix}/{k}": v[:_LONGEST_TEXT] if isinstance(v, str) else v
        for k, v in values.items()
        if v is not None and k not in ("event", "step", "attempt") and not isinstance(v, _NESTED)
    }
    if kind not in ("step", "validation", "data"):
        data["event"] = kind
    if record.get("step") is not None:
        data["train/step"] = record["step"]
    data["attempt"] = record["attempt"]
    return data


def _validated(record: Mapping[str, Any]) -> dict[str, float]:
    values = dict(record.get("losses", {}))
    for name, ends in record.get("by_position", {}).items():
        values |= {f"{name}/to_{end}": loss for end, loss in ends.items()}
    for name, lengths in record.get("retrieval", {}).items():
        values |= {f"{name}/key_{length}": fmean(found.values()) for length, found in lengths.items()}
    return values


def _read(record: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{name}/{k}": v for name, read in record["sources"].items() for k, v in read.items()}


class Opened:
    """A real `wandb` run that leaves no service process behind, however it ended."""

    def __init__(self, wandb: Any, run: Any) -> None:
        self._wandb, self._run = wandb, run

    @property
    def step(self) -> int:
        return int(self._run.step)

    def log(self, data: dict[str, Any], step: int) -> None:
        self._run.log(data, step=step)

    def finish(self) -> None:
        """Finish the run and end the service; a broken one is forgotten, to be opened afresh."""
        try:
            self._run.finish()
        finally:
            self._wandb.teardown()


def opener(
    run: WandbRun, out: Path, run_config: Mapping[str, Any], finish_seconds: float
) -> Callable[[], Client]:
    """A function that opens `run` with the real client, and imports it only then. WANDB_* variables apply."""

    def open_run() -> Client:
        import wandb

        try:
            opened = wandb.init(
                id=run.id,
                resume="allow",
                project=run.project,
                name=run.name,
                mode=run.mode,
                dir=str(out),
                config=dict(run_config),
                allow_val_change=True,  # a resumed run may have a changed run file
                settings=_settings(wandb, finish_seconds),
            )
            opened.define_metric("train/step")
            opened.define_metric("*", step_metric="train/step")
        except BaseException:
            with contextlib.suppress(Exception):
                wandb.teardown()
            raise
        return Opened(wandb, opened)

    return open_run


def _log(client: Client, data: dict[str, Any], index: int) -> None:
    client.log(data, step=max(index, client.step))


def _end_service() -> None:
    """Kill a service process that does not answer; otherwise wandb's exit hook waits for it for ever."""
    with contextlib.suppress(AttributeError, KeyError):  # it was never started
        sys.modules["wandb"].sdk.wandb_setup._singleton._connection._proc._process.kill()


def _settings(wandb: Any, finish_seconds: float) -> Any:
    return wandb.Settings(
        console="off",  # the launcher owns stdout
        silent=True,
        disable_git=True,
        disable_code=True,
        save_code=False,
        init_timeout=60,
        finish_timeout=finish_seconds,
        stop_fn=_ignore_stop,
        reinit="create_new",  # a client that failed may still be there when it is opened again
    )


def _ignore_stop() -> None:
    """The default sends SIGINT to rank 0 alone, which leaves the other ranks hanging in a collective."""
    say(sys.stderr, "W&B: the stop button was pressed; it stops nothing here: use the stop file of the run")
