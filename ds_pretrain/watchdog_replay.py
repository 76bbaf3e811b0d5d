"""`ds-pretrain watchdog CURVE.csv|RUN`: what the watchdog would have said of a run that is over, or goes on.

For tuning thresholds on past runs before one trusts them: nothing is changed, anywhere.
"""

import csv
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ds_pretrain.config import WatchdogSection, parse_run, parse_watchdog
from ds_pretrain.errors import InputError
from ds_pretrain.files import write_atomic
from ds_pretrain.monitor.sinks import latest_attempt, read_metrics
from ds_pretrain.plan import load_plan
from ds_pretrain.watchdog import Verdict, judge
from ds_pretrain.watchdog_memory import Memory
from ds_pretrain.watchdog_plot import svg, terminal_plot

_MOST_LINES = 40  # of incidents on the terminal
_MOST_PROBLEMS = 10
_NAN = {"nan", "-nan", "none", "null", "inf", "-inf", "+inf", "infinity"}


@dataclass(frozen=True)
class Point:
    """One recorded step, as the judgement wants it."""

    step: int
    loss: float  # nan if it was
    loss_max_rank: float
    grad_norm: float | None = None
    has_norm: bool = True  # False: not recorded, rather than not finite
    update_applied: bool | None = None  # not recorded in a CSV file
    phase: str = ""


@dataclass(frozen=True)
class Incident:
    """Consecutive verdicts about one onset and one thing, as one line."""

    verdict: Verdict  # the gravest of them, the last of those
    first_step: int
    last_step: int
    num_steps: int


def watchdog_command(words: Any) -> int:
    """Judge a recorded curve, and print and plot the verdicts."""
    points, settings = read_recording(Path(words.curve), words.overrides)
    if settings.mode == "off":
        raise InputError('watchdog.mode is "off"; add watchdog.mode=observe to see what it would have said')
    verdicts = replay(points, settings)
    print(terminal_plot(points, verdicts))
    print("\n".join(report(points, verdicts)))
    if words.svg is not None:
        write_atomic(words.svg, svg(points, verdicts))
        print(f"plot       {words.svg}")
    return 0


def replay(points: Sequence[Point], settings: WatchdogSection) -> list[Verdict]:
    """The verdict of each point; after a roll_back the watchdog starts afresh, as the curve goes on."""
    memory, verdicts = Memory(), []
    for point in points:
        memory, verdict = judge(settings, memory, point, point.has_norm)
        verdicts.append(verdict)
    return verdicts


def report(points: Sequence[Point], verdicts: Sequence[Verdict]) -> Iterator[str]:
    """A line for each roll_back, then the other incidents, as many as fit, and a count of all."""
    found = incidents(points, verdicts)
    grave = [one for one in found if one.verdict.roll_back]
    others = [one for one in found if not one.verdict.roll_back]
    shown = grave + others[: max(0, _MOST_LINES - len(grave))]
    for one in sorted(shown, key=lambda one: one.first_step):
        steps = f"{one.first_step:,}" + (f" to {one.last_step:,}" if one.last_step > one.first_step else "")
        action = "healed" if one.verdict.action == "ok" else one.verdict.action
        yield f"{action:10} {one.verdict.kind}, step {steps}: {one.verdict.message}"
    if len(shown) < len(found):
        yield f"...        and {len(found) - len(shown):,} more that were watched or healed"
    yield f"{len(points):,} steps judged: {len(grave)} roll_back, {len(others):,} watched or healed"


def incidents(points: Sequence[Point], verdicts: Sequence[Verdict]) -> list[Incident]:
    """The verdicts that say something, those of one onset together."""
    found: list[Incident] = []
    for point, verdict in zip(points, verdicts, strict=True):
        if verdict.kind is None:
            continue
        last = found[-1] if found else None
        if last is not None and _same(last.verdict, verdict):
            graver = verdict if verdict.roll_back or not last.verdict.roll_back else last.verdict
            found[-1] = Incident(graver, last.first_step, point.step, last.num_steps + 1)
        else:
            found.append(Incident(verdict, point.step, point.step, 1))
    return found


_OF_THE_LOSS = ("blip", "spike", "lasting_spike")


def _same(one: Verdict, other: Verdict) -> bool:
    if one.kind in _OF_THE_LOSS and other.kind in _OF_THE_LOSS:
        return one.onset == other.onset
    return one.kind == other.kind and (one.kind == "drift" or one.onset == other.onset)


def read_recording(place: Path, overrides: Sequence[str]) -> tuple[list[Point], WatchdogSection]:
    """The points of a CSV file, a run directory or a run file's run, and what to judge them with.

    Raises:
        InputError: with what cannot be read, and how it should look.
    """
    if place.is_file() and place.suffix != ".toml":
        return read_csv(place), parse_watchdog(overrides)
    if place.is_file():
        plan = load_plan(place, overrides)
        return read_run(plan.out), plan.run.watchdog
    if not (place / "metrics.jsonl").is_file():
        raise InputError(f"{place} is no CSV file, no run file, and no run directory with a metrics.jsonl")
    return read_run(place), _saved_settings(place, overrides)


def _saved_settings(out: Path, overrides: Sequence[str]) -> WatchdogSection:
    """The settings of the run's last start, changed by `overrides`."""
    run_file = out / "run.toml"
    if not run_file.is_file():
        return parse_watchdog(overrides)
    saved = json.loads((out / "run.json").read_text(encoding="utf-8")) if (out / "run.json").is_file() else {}
    text = run_file.read_text(encoding="utf-8")
    return parse_run(text, [*saved.get("overrides", ()), *overrides], str(run_file)).watchdog


def read_run(out: Path) -> list[Point]:
    """The steps of a run's metrics.jsonl that count: what was taken again supersedes."""
    try:
        records = latest_attempt(read_metrics(out / "metrics.jsonl"))
    except OSError as error:
        raise InputError(f"{out} has no metrics.jsonl that can be read: {error}") from error
    if not records:
        raise InputError(f"{out / 'metrics.jsonl'} holds no step; expected a run that has trained")
    return [_point(record) for record in records]


def _point(record: Mapping[str, Any]) -> Point:
    loss = math.nan if record["loss"] is None else record["loss"]
    return Point(
        step=record["step"],
        loss=loss,
        loss_max_rank=math.nan if record["loss_max_rank"] is None else record["loss_max_rank"],
        grad_norm=record["grad_norm"],
        update_applied=record["update_applied"],
        phase=record["phase"],
    )


def read_csv(path: Path) -> list[Point]:
    """Columns `step` and `loss`, and `grad_norm` if recorded; others are ignored, blank is not recorded."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            columns = reader.fieldnames or ()
            if not {"step", "loss"} <= set(columns):
                raise InputError(
                    f"{path} has the columns {list(columns)}; expected step, loss and maybe grad_norm"
                )
            rows = [(reader.line_num, row) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} cannot be read as CSV: {error}") from error
    points, problems = [], []
    for line, row in rows:
        try:
            points.append(_csv_point(row))
        except ValueError as error:
            problems.append(f"{path}, line {line}: {error}")
    if not rows:
        problems = [f"{path} has no rows; expected one for each step"]
    if len(problems) > _MOST_PROBLEMS:
        problems = [*problems[:_MOST_PROBLEMS], f"and {len(problems) - _MOST_PROBLEMS} more lines like these"]
    if problems:
        raise InputError(problems)
    _check_order(path, points)
    return points


def _csv_point(row: Mapping[str, str | None]) -> Point:
    step, loss, norm = (row.get(key) or "" for key in ("step", "loss", "grad_norm"))
    value = _number("loss", loss)
    return Point(
        step=int(_number("step", step)),
        loss=value,
        loss_max_rank=value,
        grad_norm=_number("grad_norm", norm) if norm.strip() else None,
        has_norm=bool(norm.strip()),
    )


def _number(name: str, text: str) -> float:
    text = text.strip()
    try:
        value = math.nan if text.lower() in _NAN else float(text)
    except ValueError:
        raise ValueError(f"{name} is {text!r}; expected a number") from None
    if name == "step" and not (math.isfinite(value) and value == int(value) and value >= 0):
        raise ValueError(f"step is {text!r}; expected a whole number")
    return value


def _check_order(path: Path, points: Sequence[Point]) -> None:
    for before, after in pairwise(points):
        if after.step <= before.step:
            raise InputError(
                f"{path}: step {after.step} stands behind step {before.step}; expected rising steps: "
                "of steps taken again keep the last"
            )
