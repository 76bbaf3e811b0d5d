"""`ds-pretrain watchdog CURVE.csv|RUN`: what the watchdog would have said of a run that is over, or goes on.

For tuning thresholds on past runs before one trusts them: nothing is changed, anywhere. Of a run the history
that counts is judged, and each stretch that was taken back as it happened.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ds_pretrain.config.loader import parse_run, parse_watchdog
from ds_pretrain.config.plan import load_plan
from ds_pretrain.config.schema import WatchdogSection
from ds_pretrain.core.errors import InputError
from ds_pretrain.core.files import write_atomic
from ds_pretrain.core.text import parse_json, read_text, shown
from ds_pretrain.monitor.plots import svg, terminal_plot
from ds_pretrain.monitor.sinks import read_metrics
from ds_pretrain.watchdog.backtest import History, Incident, TakenBack, folded
from ds_pretrain.watchdog.backtest import incidents as incidents
from ds_pretrain.watchdog.backtest import replay as replay
from ds_pretrain.watchdog.curves import Point as Point
from ds_pretrain.watchdog.curves import read_csv as read_csv
from ds_pretrain.watchdog.verdict import Verdict

_MOST_LINES = 40  # of incidents on the terminal
_SIGN_OF_LIFE = 100_000  # steps: some ten seconds
Thing = TypeVar("Thing")


def watchdog_command(words: Any) -> int:
    """Judge a recorded curve, and print and plot the verdicts."""
    run, settings = read_settings(Path(words.curve), words.overrides)
    if settings.mode == "off":
        raise InputError('watchdog.mode is "off"; add watchdog.mode=observe to see what it would have said')
    if words.svg is not None and not words.svg.parent.is_dir():
        raise InputError(
            f"--svg {words.svg}: there is no folder {words.svg.parent}; create it, or name another"
        )
    if run is None:
        points, history = read_csv(Path(words.curve)), None
        verdicts = replay(_with_signs_of_life(points), settings)
    else:
        history = read_run(run, settings)
        points, verdicts = history.points, history.verdicts
    print(terminal_plot(points, verdicts))
    print("\n".join(report(points, verdicts, history.taken_back if history else ())))
    if history is not None and history.num_left_out:
        print(f"{history.num_left_out:,} step records hold no step and loss, and were left out")
    if words.svg is not None:
        _write_svg(words.svg, svg(points, verdicts))
    return 0


def _write_svg(path: Path, text: str) -> None:
    try:
        write_atomic(path, text)
    except OSError as error:
        raise InputError(f"--svg {path} cannot be written ({error.strerror}); name another file") from error
    print(f"plot       {path}")


def _with_signs_of_life(things: Iterable[Thing]) -> Iterator[Thing]:
    for number, thing in enumerate(things, start=1):
        if number % _SIGN_OF_LIFE == 0:
            print(f"{number:,} read and judged", file=sys.stderr, flush=True)
        yield thing


def report(
    points: Sequence[Point], verdicts: Sequence[Verdict], taken_back: Sequence[TakenBack] = ()
) -> Iterator[str]:
    """A line for each roll_back, then the other incidents, as many as fit, and a count of all."""
    found = folded(incidents(points, verdicts))
    grave = [one for one in found if one.verdict.roll_back]
    others = [one for one in found if not one.verdict.roll_back]
    told = grave + others[: max(0, _MOST_LINES - len(grave))]
    for one in sorted(told, key=lambda one: one.first_step):
        yield _line(one)
    if len(told) < len(found):
        yield f"...        and {len(found) - len(told):,} more that were watched or healed"
    yield from (_taken_back_line(one) for one in taken_back[-_MOST_LINES:])
    if len(taken_back) > _MOST_LINES:
        yield f"...        and {len(taken_back) - _MOST_LINES:,} stretches taken back before these"
    num_grave = sum(one.times for one in grave)
    yield f"{len(points):,} steps judged: {num_grave:,} roll_back, {len(others):,} watched or healed"
    if taken_back:
        num_steps = sum(one.num_steps for one in taken_back)
        num_grave = sum(incident.verdict.roll_back for one in taken_back for incident in one.found)
        yield f"{num_steps:,} steps taken back, judged as they happened: {num_grave:,} roll_back"


def _line(one: Incident) -> str:
    steps = f"{one.first_step:,}" + (f" to {one.last_step:,}" if one.last_step > one.first_step else "")
    action = "healed" if one.verdict.action == "ok" else one.verdict.action
    again = f", {one.times:,} times, at last" if one.times > 1 else ""
    return f"{action:10} {one.verdict.kind}, step {steps}{again}: {one.verdict.message}"


def _taken_back_line(one: TakenBack) -> str:
    """What was decided then, and what these settings say of the same steps."""
    decision = one.decision
    then, way = ("roll_back", "taken back") if decision["event"] == "rollback" else ("a stop", "given up")
    trouble, onset = decision["trouble"], decision["onset"]
    since = f" since step {onset:,}" if isinstance(onset, int) else ""
    return (
        f"incident {decision['incident']}, {way} from step {decision['step']:,} to {decision['to_step']:,}: "
        f"{then}, {trouble}{since}; with these settings: {_said(one.found)}"
    )


def _said(found: Sequence[Incident]) -> str:
    grave = [one for one in found if one.verdict.roll_back]
    told = grave[0] if grave else found[-1] if found else None
    if told is None:
        return "nothing"
    action = f"roll_back at step {told.at_step:,}" if grave else "no roll_back, only watched"
    more = f", and {len(found) - 1:,} more" if len(found) > 1 else ""
    since = "" if told.verdict.onset is None else f" since step {told.verdict.onset:,}"
    return f"{action}, {told.verdict.kind}{since}{more}"


def read_settings(place: Path, overrides: Sequence[str]) -> tuple[Path | None, WatchdogSection]:
    """The run directory of a run directory or a run file, None for a CSV file, and what to judge with.

    Raises:
        InputError: with what cannot be read, and how it should look.
    """
    names = {word: f"override {word!r}" for word in overrides}
    if place.is_file() and place.suffix != ".toml":
        return None, parse_watchdog(overrides)
    if place.is_file():
        plan = _blaming(lambda words: load_plan(place, words), overrides, names, str(place))
        return plan.out, plan.run.watchdog
    if not (place / "metrics.jsonl").is_file():
        raise InputError(f"{place} is no CSV file, no run file, and no run directory with a metrics.jsonl")
    run_file = place / "run.toml"
    if not run_file.is_file():
        return place, parse_watchdog(overrides)
    text, record = read_text(run_file, "run file"), place / "run.json"
    saved = _saved_overrides(record)
    names = {word: f"override {word!r} of {record}, from the last start" for word in saved} | names
    run = _blaming(
        lambda words: parse_run(text, words, str(run_file)), [*saved, *overrides], names, str(run_file)
    )
    return place, run.watchdog


def _saved_overrides(record: Path) -> list[str]:
    """Of the command line at the run's last start."""
    if not record.is_file():
        return []
    try:
        saved = parse_json(read_text(record, "run record"), str(record)).get("overrides", [])
        if not isinstance(saved, list) or not all(isinstance(word, str) for word in saved):
            raise InputError(f"{record}: `overrides` = {shown(saved)}: expected a list of texts")
    except InputError as error:
        advice = (
            "it has the overrides of the last start; put an intact copy back, or move it away to judge "
            "without them"
        )
        raise InputError([f"{problem}; {advice}" for problem in error.problems]) from None
    return saved


def _blaming(
    load: Callable[[Sequence[str]], Thing], overrides: Sequence[str], names: Mapping[str, str], file: str
) -> Thing:
    """`load(overrides)`; what the file alone does not suffer from is said of the override that makes it."""
    try:
        return load(overrides)
    except InputError as error:
        of_file = _problems(load)
        problems = [p if p in of_file else _blame(p, overrides, names, file) for p in error.problems]
        raise InputError(problems) from None


def _problems(load: Callable[[Sequence[str]], Any]) -> tuple[str, ...]:
    try:
        load(())
    except InputError as error:
        return error.problems
    return ()


def _blame(problem: str, overrides: Sequence[str], names: Mapping[str, str], file: str) -> str:
    for word in overrides:
        own = f"override {word!r}"
        if problem.startswith(own):  # it says so itself
            return names[word] + problem.removeprefix(own)
    for word in reversed(overrides):  # the last of a key is the one that counts
        own = f"override of {word.partition('=')[0].strip()}: "
        if problem.startswith(own):
            return f"{names[word]}: {problem.removeprefix(own)}"
    makers = [word for word in overrides if f"`{word.partition('=')[0].strip()}`" in problem] or overrides
    return f"{', '.join(names[word] for word in makers)}: {problem.removeprefix(f'{file}: ')}"


def read_run(out: Path, settings: WatchdogSection) -> History:
    """The steps of a run's metrics.jsonl, judged. Raises InputError if it cannot be read or holds none."""
    history, path = History(settings), out / "metrics.jsonl"
    try:
        for record in _with_signs_of_life(read_metrics(path)):
            history.take(record)
    except OSError as error:
        raise InputError(f"{out} has no metrics.jsonl that can be read: {error}") from error
    except RecursionError:
        raise InputError(f"{path} holds a line that is nested too deeply; take that line out") from None
    if not history.points:
        left_out = f" ({history.num_left_out:,} records of none)" if history.num_left_out else ""
        raise InputError(f"{path} holds no step{left_out}; expected a run that has trained")
    return history
