"""The metrics of a run (throughput, MFU, goodput, ETA), sent to every sink. It never stops training.

Every rank holds a Monitor and calls it on the same lines; only rank 0's does something, and nothing here is
collective.
"""

import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Protocol, Self

from ds_pretrain.config.timeline import Timeline
from ds_pretrain.core.distributed import World
from ds_pretrain.core.jsonl import METRICS, JsonLines
from ds_pretrain.core.metrics import StepRecord
from ds_pretrain.core.text import say
from ds_pretrain.monitor.logbook import INCIDENTS, Logbook
from ds_pretrain.monitor.terminal import Terminal
from ds_pretrain.monitor.wandb import Wandb, WandbRun, make_opener

_WINDOW_STEPS = 50  # long enough to be steady, short enough to follow a batch ramp


class Sink(Protocol):
    """Takes records. May raise from `write` whatever its medium raises; the monitor survives it."""

    def write(self, record: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class Monitor:
    """Sends each step to metrics.jsonl; every `every`-th, the first and the last to the terminal and W&B too.

    Validations and events go everywhere at once; the logbook sees all and keeps what is worth it. A sink
    that fails costs its records and one warning for each kind of failure; how often it failed is told at the
    end. No method raises.
    """

    def __init__(
        self,
        *,
        out: Path,
        every: int,
        wandb: WandbRun | None,
        run_config: Mapping[str, Any],
        attempt: int,
        timeline: Timeline,
        flops_per_token: Mapping[str, float | None],
        peak_flops_per_rank: float | None,
        world: World,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._active = world.is_main
        self._every, self._attempt, self._timeline = every, attempt, timeline
        self._flops_per_token = flops_per_token
        self._peak_flops = None if peak_flops_per_rank is None else peak_flops_per_rank * world.size
        self._clock, self._started = clock, clock()
        self._applied_seconds = 0.0
        # Tokens, seconds and FLOPs of a step.
        self._recent: deque[tuple[int, float, float | None]] = deque(maxlen=_WINDOW_STEPS)
        self._failures: Counter[str] = Counter()
        self._files: list[Sink] = []  # these get every step
        self._others: list[Sink] = []
        if self._active:
            self._open(out, wandb, run_config)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def step(self, record: StepRecord) -> None:
        """Take one optimizer step, applied or skipped."""
        if not self._active:
            return
        is_first = not self._recent
        try:
            line = {"event": "step", "attempt": self._attempt, **record.to_json(), **self._speed(record)}
        except Exception as error:
            self._fail("measuring a step", error)
            return
        is_due = is_first or record.step % self._every == 0 or record.step >= self._timeline.last_step
        self._send(line, is_due)

    def validation(
        self,
        step: int,
        losses: Mapping[str, float],
        by_position: Mapping[str, Mapping[str, float]] | None = None,
        retrieval: Mapping[str, Mapping[str, Mapping[str, float]]] | None = None,
    ) -> None:
        """Take what a validation after `step` steps found of each source, in nats a token.

        The mean loss, that of the positions up to each end, and the scores of keys by length and depth.
        """
        line = {"event": "validation", "attempt": self._attempt, "step": step, "losses": dict(losses)}
        more = {"by_position": by_position, "retrieval": retrieval}
        self._send(line | {name: value for name, value in more.items() if value}, True)

    def event(self, kind: str, **fields: Any) -> None:
        """Take something that happened: "start", "resume", "checkpoint", "stop", "warning", ..."""
        self._send({"event": kind, "attempt": self._attempt, **fields, "time": time.time()}, True)

    def report(self, kind: str, message: str, **fields: Any) -> None:
        """Say a line on stderr, and take the same as an event: "incident 3: ...", "step 1,200: ..."."""
        if self._active:
            place = f"step {fields['step']:,}: " if "step" in fields else ""
            place = f"incident {fields['incident']}: " if "incident" in fields else place
            say(sys.stderr, f"ds_pretrain: {place}{message}")
        self.event(kind, **fields, message=message)

    def close(self) -> None:
        """Close every sink, each in bounded time, and say how many records failed. Closing twice is fine."""
        sinks = [*self._others, *self._files]
        self._files, self._others = [], []
        for sink in sinks:
            try:
                sink.close()
            except Exception as error:
                self._fail(f"closing {type(sink).__name__}", error)
        for failure, times in self._failures.items():
            if times > 1:
                say(sys.stderr, f"monitoring: {failure}: {times} times in all")
        self._failures.clear()

    def _open(self, out: Path, wandb: WandbRun | None, run_config: Mapping[str, Any]) -> None:
        first_index = 0
        try:
            file = JsonLines(out / METRICS)
            self._files.append(file)
            first_index = file.bytes_written  # every record takes more than one byte: no index comes twice
        except OSError as error:
            self._fail(f"opening {out / METRICS}", error)
        try:
            self._files.append(Logbook(out, str(run_config.get("name", out.name))))
        except OSError as error:
            self._fail(f"opening {out / INCIDENTS}", error)
        self._others.append(Terminal(sys.stdout, self._timeline.last_step))
        if wandb is not None:
            self._others.append(Wandb(make_opener(wandb, out, run_config), first_index))

    def _speed(self, record: StepRecord) -> dict[str, float | None]:
        tokens = self._timeline.at(record.step - 1).tokens_per_step
        flops_per_token = self._flops_per_token.get(record.phase)
        flops = None if flops_per_token is None else flops_per_token * tokens
        self._recent.append((tokens, record.step_seconds, flops))
        self._applied_seconds += record.step_seconds if record.update_applied else 0.0
        seconds = sum(s for _, s, _ in self._recent)
        rate = sum(t for t, _, _ in self._recent) / seconds if seconds > 0 else None
        elapsed = self._clock() - self._started
        known = [f for _, _, f in self._recent if f is not None]
        mfu = None
        if seconds > 0 and self._peak_flops is not None and len(known) == len(self._recent):
            mfu = sum(known) / seconds / self._peak_flops
        missing = self._timeline.total_tokens - self._timeline.tokens_before(record.step)
        return {
            "tokens_per_second": rate,
            "mfu": mfu,
            "goodput": min(1.0, self._applied_seconds / elapsed) if elapsed > 0 else None,
            "eta_seconds": median(s / t for t, s, _ in self._recent) * missing,
        }

    def _send(self, record: Mapping[str, Any], everywhere: bool) -> None:
        for sink in [*self._files, *(self._others if everywhere else [])]:
            try:
                sink.write(record)
            except Exception as error:
                self._fail(f"writing to {type(sink).__name__}", error)

    def _fail(self, doing: str, error: Exception) -> None:
        failure = f"{doing}: {type(error).__name__}"
        self._failures[failure] += 1
        if self._failures[failure] == 1:
            say(
                sys.stderr,
                f"monitoring degraded: {failure}: {error}; training continues without these records",
            )
