"""Weights & Biases, where it can neither stop, delay nor duplicate a run. The only file that knows `wandb`.

All calls into the client happen on one background thread, behind a bounded queue. When the client fails or
hangs, one message says so and training continues. W&B's own service resends what the network lost, and the
next start opens the same run again.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from statistics import fmean
from time import monotonic
from typing import Any, Literal, Protocol

from ds_pretrain.core.text import format_count_of, say

FINISH_SECONDS = 30.0  # that the end of a start waits for W&B, at most
_LONGEST_TEXT = 1000  # characters of a value
_NESTED = (list, tuple, Mapping)


@dataclass(frozen=True)
class WandbRun:
    """The W&B run to write to. The caller keeps `id` in the run directory: every restart must find it."""

    id: str
    project: str
    name: str
    mode: Literal["online", "offline"]


class Client(Protocol):
    """The part of `wandb.Run` that is used."""

    @property
    def step(self) -> int: ...

    def log(self, data: dict[str, Any], step: int) -> None: ...

    def finish(self) -> None: ...


class Wandb:
    """A sink for one W&B run: `write` never blocks or raises, `close` takes at most `finish_seconds`.

    `first_index` must be above every index that an earlier start of this run used. W&B drops points whose
    own step does not rise (https://github.com/wandb/wandb/issues/4482), so that step only counts;
    "train/step" is the axis.
    """

    def __init__(
        self,
        open_client: Callable[[], Client],
        first_index: int = 0,
        *,
        stalled_seconds: float = 60.0,
        finish_seconds: float = FINISH_SECONDS,
        most_waiting: int = 10_000,
    ) -> None:
        self._open, self._index = open_client, first_index
        self._stalled_seconds, self._finish_seconds = stalled_seconds, finish_seconds
        self._most_waiting = most_waiting
        self._waiting: SimpleQueue[tuple[int, dict[str, Any]] | None] = SimpleQueue()
        self._busy_since: float | None = None
        self._is_closed = False
        self.degraded: str | None = None  # why points do not arrive, the first reason; None is healthy
        self.num_lost = 0
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        self._thread.start()

    def write(self, record: Mapping[str, Any]) -> None:
        """Queue `record`; it is lost when the queue is full."""
        busy_since = self._busy_since
        if busy_since is not None and monotonic() - busy_since > self._stalled_seconds:
            self._degrade(f"a call has not returned for {self._stalled_seconds:g} s")
        if self._waiting.qsize() >= self._most_waiting:
            self.num_lost += 1
            return
        self._waiting.put((self._index, build_points(record)))
        self._index += 1

    def close(self) -> None:
        """Send what waits and finish the run, for as long as patience allows; closing twice is fine."""
        if self._is_closed:
            return
        self._is_closed = True
        self._waiting.put(None)
        self._thread.join(self._finish_seconds)
        if self._thread.is_alive():
            self._degrade(f"it did not finish within {self._finish_seconds:g} s")
            _kill_service()
        if num_lost := self.num_lost + max(0, self._waiting.qsize() - 1):
            say(
                sys.stderr,
                f"W&B did not get {format_count_of(num_lost, 'record')}; metrics.jsonl has everything",
            )

    def _work(self) -> None:
        try:
            client = self._timed(self._open)
            while (head := self._waiting.get()) is not None:
                index, data = head
                try:
                    self._timed(partial(_log, client, data, index))
                except Exception as error:  # whatever the client throws, training must not notice
                    self.num_lost += 1
                    self._degrade(f"{type(error).__name__}: {error}")
            self._timed(client.finish)
        except Exception as error:
            self._degrade(f"{type(error).__name__}: {error}")

    def _timed(self, call: Callable[[], Any]) -> Any:
        self._busy_since = monotonic()
        try:
            return call()
        finally:
            self._busy_since = None

    def _degrade(self, reason: str) -> None:
        """Say the first reason."""
        if self.degraded is None:
            self.degraded = reason
            say(
                sys.stderr,
                f"monitoring degraded: W&B: {reason}; training continues; metrics.jsonl has everything",
            )


def build_points(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record as W&B keys: "train/loss", "validation/web", "checkpoint/seconds", its step and attempt.

    Of a validation also "validation/web/to_1024" and "validation/web/key_1024", the mean over depths. Of what
    was read "data/web/tokens" and "data/web/epochs".

    Lists and nested values stay in metrics.jsonl, and so does the rest of a long text.
    """
    kind = record["event"]
    nested = {"validation": _build_validation_points, "data": _read}.get(kind, dict[str, Any])
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


def _build_validation_points(record: Mapping[str, Any]) -> dict[str, float]:
    values = dict(record.get("losses", {}))
    for name, ends in record.get("by_position", {}).items():
        values |= {f"{name}/to_{end}": loss for end, loss in ends.items()}
    for name, lengths in record.get("retrieval", {}).items():
        values |= {f"{name}/key_{length}": fmean(found.values()) for length, found in lengths.items()}
    return values


def _read(record: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{name}/{k}": v for name, read in record["sources"].items() for k, v in read.items()}


class _Run:
    """A real `wandb` run that leaves no service process behind, however it ended."""

    def __init__(self, wandb: Any, run: Any) -> None:
        self._wandb, self._run = wandb, run

    @property
    def step(self) -> int:
        return int(self._run.step)

    def log(self, data: dict[str, Any], step: int) -> None:
        self._run.log(data, step=step)

    def finish(self) -> None:
        try:
            self._run.finish()
        finally:
            self._wandb.teardown()


def make_opener(run: WandbRun, out: Path, run_config: Mapping[str, Any]) -> Callable[[], Client]:
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
                settings=wandb.Settings(
                    console="off",  # the launcher owns stdout
                    silent=True,
                    disable_git=True,
                    disable_code=True,
                    save_code=False,
                    init_timeout=60,
                    finish_timeout=FINISH_SECONDS / 2,
                    stop_fn=_ignore_stop,
                ),
            )
            opened.define_metric("train/step")
            opened.define_metric("*", step_metric="train/step")
        except BaseException:
            wandb.teardown()  # here, where a service that hangs is noticed, and not in the exit hook
            raise
        return _Run(wandb, opened)

    return open_run


def _log(client: Client, data: dict[str, Any], index: int) -> None:
    client.log(data, step=max(index, client.step))


def _kill_service() -> None:
    """Kill a service process that does not answer; otherwise wandb's exit hook waits for it for ever."""
    with contextlib.suppress(OSError):
        for children in Path("/proc/self/task").glob("*/children"):
            for pid in children.read_text().split():
                if Path(f"/proc/{pid}/comm").read_text().strip() == "wandb-core":
                    os.kill(int(pid), signal.SIGKILL)


def _ignore_stop() -> None:
    """The default sends SIGINT to rank 0 alone, which leaves the other ranks hanging in a collective."""
    say(sys.stderr, "W&B: the stop button was pressed; it stops nothing here: use the stop file of the run")
