"""`ds-pretrain watchdog CURVE.csv|RUN`: the verdicts of the watchdog on a recorded curve.

It helps to tune thresholds on past runs, and changes nothing. For a run, the history that counts is judged,
and each abandoned interval as it happened.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_pretrain.config.loader import Section, parse_sections
from ds_pretrain.config.plan import load_plan, parse_run
from ds_pretrain.config.schema import WatchdogSection
from ds_pretrain.core.errors import InputError
from ds_pretrain.core.jsonl import METRICS, read_as, read_metrics
from ds_pretrain.core.state import Verdict
from ds_pretrain.core.text import draw_loss_plot, read_text
from ds_pretrain.watchdog.backtest import (
    Incident,
    Point,
    RecordedCurve,
    RolledBack,
    find_incidents,
    read_csv,
    replay,
)

_MOST_LINES = 40  # of incidents on the terminal
_WIDTH, _HEIGHT = 96, 14  # of the plot, in characters
_MARKS = {"S": "stop", "X": "roll_back", "!": "watch"}  # the gravest first


def execute(words: Any) -> int:
    """Judge a recorded curve, and print and plot the verdicts."""
    run, settings = read_settings(Path(words.curve), words.overrides)
    if settings.mode == "off":
        raise InputError('watchdog.mode is "off"; add watchdog.mode=observe to see its verdicts')
    if run is None:
        points = read_csv(Path(words.curve))
        verdicts, history = replay(points, settings), None
    else:
        history = read_run(run, settings)
        points, verdicts = history.points, history.verdicts
    marks = {action: mark for mark, action in _MARKS.items()}
    curve = [(point.step, point.loss) for point in points]
    print(draw_loss_plot(curve, [marks.get(v.action, " ") for v in verdicts], _MARKS, _WIDTH, _HEIGHT))
    print("\n".join(format_report(points, verdicts, history.taken_back if history else ())))
    if history is not None and history.num_left_out:
        print(f"{history.num_left_out:,} step records have no step or loss and were ignored")
    return 0


def format_report(
    points: Sequence[Point], verdicts: Sequence[Verdict], taken_back: Sequence[RolledBack] = ()
) -> Iterator[str]:
    """A line for each roll_back, then the other incidents, as many as fit, and a count of all."""
    found = find_incidents(points, verdicts)
    grave = [one for one in found if one.verdict.interrupts]
    others = [one for one in found if not one.verdict.interrupts]
    told = (grave + others)[:_MOST_LINES]
    for one in sorted(told, key=lambda one: one.first_step):
        yield _format_incident(one)
    if len(told) < len(found):
        yield f"...        and {len(found) - len(told):,} more"
    yield from (_format_rolled_back(one) for one in taken_back[-_MOST_LINES:])
    if len(taken_back) > _MOST_LINES:
        yield f"...        and {len(taken_back) - _MOST_LINES:,} stretches taken back before these"
    yield f"{len(points):,} steps judged: {len(grave):,} roll_back, {len(others):,} watched or healed"
    if taken_back:
        num_steps = sum(one.num_steps for one in taken_back)
        num_grave = sum(incident.verdict.interrupts for one in taken_back for incident in one.found)
        yield f"{num_steps:,} steps taken back, judged as they happened: {num_grave:,} roll_back"


def _format_incident(one: Incident) -> str:
    steps = f"{one.first_step:,}" + (f" to {one.last_step:,}" if one.last_step > one.first_step else "")
    action = "healed" if one.verdict.action == "ok" else one.verdict.action
    return f"{action:10} {one.verdict.kind}, step {steps}: {one.verdict.message}"


def _format_rolled_back(one: RolledBack) -> str:
    """Format a recorded decision beside what these settings say of the same steps."""
    decision = one.decision
    then, way = ("roll_back", "taken back") if decision["event"] == "rollback" else ("a stop", "given up")
    trouble, onset = decision["trouble"], decision["onset"]
    since = f" since step {onset:,}" if isinstance(onset, int) else ""
    return (
        f"incident {decision['incident']}, {way} from step {decision['step']:,} to {decision['to_step']:,}: "
        f"{then}, {trouble}{since}; with these settings: {_describe_verdict(one.found)}"
    )


def _describe_verdict(found: Sequence[Incident]) -> str:
    grave = [one for one in found if one.verdict.interrupts]
    told = grave[0] if grave else found[-1] if found else None
    if told is None:
        return "nothing"
    action = f"roll_back at step {told.at_step:,}" if grave else "no roll_back, only watched"
    more = f", and {len(found) - 1:,} more" if len(found) > 1 else ""
    since = "" if told.verdict.onset is None else f" since step {told.verdict.onset:,}"
    return f"{action}, {told.verdict.kind}{since}{more}"


class _WatchdogOnly(Section):
    """The part of a run file that is needed."""

    watchdog: WatchdogSection = WatchdogSection()


@dataclass(frozen=True)
class _LastStart:
    """The part of run.json that is needed: the command line at the run's last start."""

    overrides: tuple[str, ...] = ()


def read_settings(path: Path, overrides: Sequence[str]) -> tuple[Path | None, WatchdogSection]:
    """The run directory of a run directory or a run file, None for a CSV file, and what to judge with.

    Raises:
        InputError: with what cannot be read, and how it should look.
    """
    if path.is_file() and path.suffix != ".toml":
        return None, parse_sections("", _WatchdogOnly, overrides).watchdog
    if path.is_file():
        plan = load_plan(path, overrides)
        return plan.out, plan.run.watchdog
    if not (path / METRICS).is_file():
        raise InputError(f"{path} is not a CSV file, a run file, or a run directory with a {METRICS}")
    run_file, record = path / "run.toml", path / "run.json"
    if not run_file.is_file():
        return path, parse_sections("", _WatchdogOnly, overrides).watchdog
    try:
        text = read_text(record, "run record") if record.is_file() else "{}"
        saved = read_as(_LastStart, text, extra="ignore").overrides
    except ValueError as error:
        raise InputError(
            f"{record} cannot be read ({error}): it has the overrides of the last start; put an intact copy "
            "back, or move it away to judge without them"
        ) from None
    run = parse_run(read_text(run_file, "run file"), [*saved, *overrides], str(run_file))
    return path, run.watchdog


def read_run(out: Path, settings: WatchdogSection) -> RecordedCurve:
    """The steps of a run's metrics.jsonl, judged. Raises InputError if it cannot be read or holds none."""
    history, path = RecordedCurve(settings), out / METRICS
    try:
        for record in read_metrics(path):
            history.take(record)
    except OSError as error:
        raise InputError(f"{out} has no {METRICS} that can be read: {error}") from error
    if not history.points:
        left_out = f" ({history.num_left_out:,} records of none)" if history.num_left_out else ""
        raise InputError(f"{path} holds no step{left_out}; expected a run that has trained")
    return history
