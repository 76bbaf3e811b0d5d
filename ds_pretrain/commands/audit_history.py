"""A run to be audited: its plan, data and rollbacks, and the steps that its metrics.jsonl says were trained.

The record is streamed, and a step keeps a few dozen bytes: a run of a million steps fits into any machine.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ds_pretrain.checkpoint.manifest import RUN_STATE, list_published, step_name
from ds_pretrain.config.plan import Plan, load_plan, parse_run
from ds_pretrain.core.errors import InputError
from ds_pretrain.core.jsonl import METRICS, read_metrics
from ds_pretrain.core.state import Rollback, RunState, Skip, SkipLedger, is_abandoned
from ds_pretrain.core.text import format_count_of, join_listed, read_text
from ds_pretrain.data.indexed import TokenSource
from ds_pretrain.data.sampler import Sampler
from ds_pretrain.training.curriculum import open_sampler
from ds_pretrain.training.preflight import open_inputs
from ds_pretrain.training.record import RECORD, RunRecord, read_record
from ds_pretrain.watchdog.rollback_log import ROLLBACKS, read_rollback_log

Span: TypeAlias = tuple[int, int]  # work taken back: steps after the first, up to the second

_MOST_RUNS = 10  # so many runs' samples: a plan may have been longer once
_ROW = np.dtype(
    [
        ("seen", "?"),  # recorded, and not taken back since
        ("applied", "?"),
        ("attempt", "<i4"),
        ("num_rollbacks", "<i4"),  # in force when it was trained
        ("num_skips", "<i4"),  # of the ledger then
        ("tokens", "<i8"),
        ("samples", "<i8"),
        ("checksum", "<i8"),
    ]
)


@dataclass(frozen=True)
class Audited:
    """A run that is looked at."""

    out: Path
    plan: Plan
    record: RunRecord
    sources: Mapping[str, TokenSource]
    sampler: Sampler
    rollbacks: tuple[Rollback, ...]
    ledger: SkipLedger
    saved_step: int  # of the newest checkpoint on the branch that counts; 0 if there is none
    problems: tuple[str, ...]  # of what the run directory says

    def ledger_of(self, num_skips: int) -> SkipLedger:
        """The ledger while it was so long."""
        return SkipLedger(self.ledger.skips[:num_skips])


@contextmanager
def open_audited(place: Path, overrides: Sequence[str] = ()) -> Iterator[Audited]:
    """The run of a run directory or a run file, with its data, in the folder that it was started in.

    Of a run file only `out` counts: a run is audited as it was started.

    Raises:
        InputError: there is no such run, or its data cannot be opened.
    """
    out = place
    if place.is_file():
        out = Path(parse_run(read_text(place, "run file"), overrides, str(place)).out)
    elif not place.is_dir():
        raise InputError(f"{place} is neither a run directory nor a run file; name one")
    out = out.absolute()
    saved, record = out / "run.toml", read_record(out)
    if record is None and list_published(out / "checkpoints"):
        raise InputError(
            f"{out} has checkpoints, and no {RECORD} that says whose they are: put it back, or start the run "
            "once more, which makes it again from its newest checkpoint"
        )
    if record is None or not saved.is_file():
        raise InputError(
            f"{out} is not the directory of a started run; expected a {RECORD} and a run.toml in it"
        )
    if not (out / METRICS).is_file():
        raise InputError(f"{out} has no {METRICS}: nothing says which steps were trained; put it back")
    words = [*record.overrides, *overrides]
    run = parse_run(read_text(saved, "run file"), words, str(saved))
    with chdir(_start_folder(out, Path(run.out))):
        yield _open_audited(out, load_plan(saved, words), record)


def _start_folder(out: Path, said: Path) -> Path:
    """The folder that the relative paths of a run were meant from: `out`, as it was said, lies under it."""
    parts = said.parts
    if said.is_absolute() or out.parts[-len(parts) :] != parts:
        return Path.cwd()
    return Path(*out.parts[: -len(parts)])


def _open_audited(out: Path, plan: Plan, record: RunRecord) -> Audited:
    model = plan.run.model.model_copy(update={"pretrained": None})
    run = plan.run.model_copy(update={"validation": None, "model": model})
    try:  # of what the run file names, its training data alone
        inputs = open_inputs(replace(plan, run=run))
    except InputError as error:
        where = f"; relative paths are taken from {Path.cwd()}, override them with sources.NAME=PATH"
        raise InputError([problem + where for problem in error.problems]) from None
    known = record.identity.get("sources", {})
    problems = [
        f"sources.{name} holds {now}, and the run was started with {known[name]}: it is other data, so what "
        "the steps read cannot be read again"
        for name, now in inputs.data.items()
        if name in known and known[name] != now
    ]
    rollback_log = read_rollback_log(out)
    root = out / "checkpoints" if plan.run.checkpoint.local_dir is None else plan.checkpoints
    newest = _read_newest_state(root, rollback_log.rollbacks)
    rollbacks, ledger = rollback_log.rollbacks, rollback_log.ledger
    if len(newest.rollbacks) > len(rollbacks):
        if len(newest.rollbacks) > record.num_inherited:
            problems.append(_describe_lost_rollback_log(root, len(rollbacks), newest))
        rollbacks, ledger = newest.rollbacks, newest.ledger
    elif newest.step and len(newest.rollbacks) == len(rollbacks) and newest.ledger != ledger:
        problems.append(
            f"{ROLLBACKS} lists {_format_skips(ledger)}, and the checkpoint of step {newest.step:,} "
            f"{_format_skips(newest.ledger)} that are not the same; one of them was changed by hand"
        )
    if wrong := list(_find_ledger_problems(ledger, plan)):
        raise InputError([f"{out / ROLLBACKS}: {one}; put an intact copy back" for one in wrong])
    num_skips = sum(rollback.response == "skip" for rollback in rollbacks)
    if num_skips != len(ledger.skips):
        problems.append(
            f"the ledger has {_format_skips(ledger)}, and {num_skips} of the rollbacks skipped something; "
            f"expected equal numbers: the ledger of each step is unknown"
        )
    sampler = open_sampler(plan, inputs.sources)
    return Audited(
        out, plan, record, inputs.sources, sampler, rollbacks, ledger, newest.step, tuple(problems)
    )


def _describe_lost_rollback_log(root: Path, num_known: int, newest: RunState) -> str:
    """Say that the rollback log lacks rollbacks that the newest checkpoint has; a start uses the latter."""
    return (
        f"{ROLLBACKS} is missing, or lists {num_known} of the {len(newest.rollbacks)} rollbacks that the "
        f"checkpoint of step {newest.step:,} knows; it was deleted, emptied or replaced by an old copy: "
        f'rebuild it from "rollbacks" and "skips" of {root / step_name(newest.step) / RUN_STATE}'
    )


def _read_newest_state(root: Path, rollbacks: Sequence[Rollback]) -> RunState:
    """The newest checkpoint's that can be read and was not left by a rollback; step 0 if there is none."""
    for folder in list_published(root):
        try:
            state = RunState.from_json((folder / RUN_STATE).read_text(encoding="utf-8"))
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            continue
        if not is_abandoned(state, rollbacks):
            return state
    return RunState()


def _find_ledger_problems(ledger: SkipLedger, plan: Plan) -> Iterator[str]:
    """Skips that cannot be of this run: of a phase that it lacks, or of draws that it never comes to."""
    phases = [phase.name for phase in plan.run.phases]
    samples = plan.timeline.samples_before(plan.last_step)
    room = _MOST_RUNS * samples
    for number, skip in enumerate(ledger.skips, 1):
        if skip.phase not in phases:
            yield f"skip {number} is of phase {skip.phase!r}; expected one of {', '.join(phases)}"
        elif skip.stop > room:
            yield (
                f"skip {number} ends with draw {skip.stop:,}; expected one that the run comes to, which has "
                f"{samples:,} samples in all"
            )
        else:
            room += skip.stop - skip.start


def _format_skips(ledger: SkipLedger) -> str:
    return format_count_of(len(ledger.skips), "skip")


def skip_words(skip: Skip) -> str:
    """The interval of a skip."""
    return f"{skip.phase} draws [{skip.start}, {skip.stop})"


def describe_changes(run: Audited) -> str:
    """Say what changed since the steps were trained, which may change what they read; empty if nothing."""
    sections = ("batch", "phases", "sources", "chunk_tokens")
    changes = [one for one in run.record.changes if one["field"].split(".")[0] in sections]
    if not changes:
        return ""
    fields = join_listed(
        list(dict.fromkeys(f"`{one['field']}` at start {one['attempt']}" for one in changes)), 4
    )
    return f"the run file was changed, {fields}: steps from before can have read otherwise than it says now"


@dataclass(frozen=True)
class Taken:
    """One time that a step was taken."""

    attempt: int
    num_skips: int
    world_size: int | None  # None: the record of that start is lost
    checksum: int
    sequence_parallel_size: int  # neighboring ranks that read the same


def read_history(run: Audited, wanted: int | None = None) -> "History":
    """Stream metrics.jsonl; with `wanted`, each time that this step was taken is kept too.

    Raises:
        InputError: it holds no step.
    """
    history = History(run, wanted)
    try:
        for record in read_metrics(run.out / METRICS):
            history.take(record)
    except OSError as error:
        raise InputError(f"{run.out / METRICS} cannot be read: {error}") from error
    if not history.rows["seen"].any():
        raise InputError(f"{run.out / METRICS} has no step record; expected a run that has trained")
    history.rows = history.rows[: history.newest + 1]
    return history


class History:
    """The steps that count, and under which skip ledger each was taken."""

    def __init__(self, run: Audited, wanted: int | None) -> None:
        self.rows = np.zeros(1024, _ROW)  # of each step that counts, [newest + 1] of _ROW
        self.first_step = 0  # the record begins after it: not 0 in a run that began from another's checkpoint
        self.newest = 0
        self.worlds: dict[int, int | None] = {}  # number of ranks of each attempt
        self.rolled_back: list[Span] = []  # by rollbacks
        self.restarted: list[Span] = []  # by starts from an older checkpoint
        self.taken: list[Taken] = []  # each time that the step asked for was taken
        self.problems: list[str] = []
        self._run, self._wanted = run, wanted
        self._attempt, self._sp_size = 0, 1
        self._num_rollbacks = run.record.num_inherited  # in force
        skipped = (rollback.response == "skip" for rollback in run.rollbacks)
        self._num_skips = list(accumulate(skipped, initial=0))  # of so many rollbacks

    def take(self, record: Mapping[str, Any]) -> None:
        """The next record of metrics.jsonl."""
        kind, step, attempt = record.get("event"), record.get("step"), record.get("attempt")
        if not isinstance(step, int) or not isinstance(attempt, int):
            return
        if attempt != self._attempt:
            self._begin(attempt)
        if kind in ("start", "resume"):
            self._start(step, record)
        elif kind == "rollback":
            self._roll_back(step, record)
        elif kind == "step":
            self._step(step, record)

    def _begin(self, attempt: int) -> None:
        """A start knows of every rollback before it, also of one that a crash kept out of the record."""
        self._attempt, self._sp_size = attempt, 1
        inherited = self._run.record.num_inherited
        own = self._run.rollbacks[inherited:]
        self._know(inherited + sum(rollback.attempt < attempt for rollback in own))
        self.worlds.setdefault(attempt, None)

    def _know(self, num_rollbacks: Any) -> None:
        if isinstance(num_rollbacks, int):
            self._num_rollbacks = max(self._num_rollbacks, min(num_rollbacks, len(self._run.rollbacks)))

    def _start(self, step: int, record: Mapping[str, Any]) -> None:
        size, sp_size = record.get("world_size"), record.get("sequence_parallel_size")
        self.worlds[self._attempt] = size if isinstance(size, int) and size > 0 else None
        self._sp_size = sp_size if isinstance(sp_size, int) and sp_size > 0 else 1
        if step < 0:
            self.problems.append(
                f"attempt {self._attempt} is recorded to begin after step {step:,}; expected 0 or more"
            )
        step = max(0, min(step, self._run.plan.last_step))
        if not self.first_step and self.newest == 0 and self._run.record.origin is not None:
            self.first_step = step
        if step < self.newest:
            self.restarted.append((step, self.newest))
        self._go_to(step)

    def _roll_back(self, step: int, record: Mapping[str, Any]) -> None:
        incident, to_step = record.get("incident"), record.get("to_step")
        self._know(incident)
        known = self._run.rollbacks
        if not (isinstance(incident, int) and isinstance(to_step, int) and 1 <= incident <= len(known)):
            self.problems.append(
                f"{METRICS} records rollback {incident} at step {step:,}, and {ROLLBACKS} and the "
                f"checkpoints know {len(known)}; put {ROLLBACKS} back: the data skipped since then is unknown"
            )
        else:
            noted, response = known[incident - 1], record.get("response")
            if (step, to_step, response) != (noted.step, noted.to_step, noted.response):
                self.problems.append(
                    f"rollback {incident} is a {response} at step {step:,} to step {to_step:,} in {METRICS}, "
                    f"and a {noted.response} at step {noted.step:,} to step {noted.to_step:,} in "
                    f"{ROLLBACKS}; expected the same"
                )
            self._compare_skip(incident, record.get("skipped"))
        if record.get("retold") is True:
            return  # after a crash: the starts since then have taken back what was, and trained on from there
        if isinstance(to_step, int) and 0 <= to_step < self.newest:
            self.rolled_back.append((to_step, self.newest))
            self._go_to(to_step)

    def _compare_skip(self, incident: int, told: Any) -> None:
        place = self._num_skips[incident] - 1
        if not isinstance(told, Mapping) or not 0 <= place < len(self._run.ledger.skips):
            return
        noted = self._run.ledger.skips[place]
        if (told.get("phase"), told.get("start"), told.get("stop")) != (noted.phase, noted.start, noted.stop):
            self.problems.append(
                f"rollback {incident} skipped {told.get('phase')} draws [{told.get('start')}, "
                f"{told.get('stop')}) in {METRICS}, and {skip_words(noted)} in the ledger; expected the same"
            )
            return
        samples = self._run.sampler.skipped(noted, self._run.ledger_of(place + 1)).group_by_source()
        if told.get("samples", samples) != samples:
            self.problems.append(
                f"rollback {incident} lists other samples in {METRICS} than {skip_words(noted)} are by the "
                "run file and the data; expected the same: one of the three was changed"
            )

    def _step(self, step: int, record: Mapping[str, Any]) -> None:
        if not 1 <= step <= self._run.plan.last_step:
            self.problems.append(
                f"step {step:,} of attempt {self._attempt} is recorded; expected steps 1 to "
                f"{self._run.plan.last_step:,}, as schedule.length says"
            )
            return
        if step <= self.newest:
            self._taken_again(step)
        num_skips = self._num_skips[self._num_rollbacks]
        try:
            numbers = [int(record[name]) for name in ("tokens", "samples", "batch_checksum")]
            flags = (True, bool(record["update_applied"]))
            row = np.array((*flags, self._attempt, self._num_rollbacks, num_skips, *numbers), _ROW)
        except (KeyError, TypeError, ValueError, OverflowError):
            return  # the step is then missing, and named
        self._go_to(step)
        self.rows[step] = row
        if step == self._wanted:
            world_size = self.worlds.get(self._attempt)
            self.taken.append(Taken(self._attempt, num_skips, world_size, numbers[-1], self._sp_size))

    def _taken_again(self, step: int) -> None:
        """Back without a word: by a rollback whose record is lost, or not as training does."""
        lost = self._run.rollbacks[self._num_rollbacks : self._num_rollbacks + 1]
        if lost and (lost[0].attempt, lost[0].to_step) == (self._attempt, step - 1):
            self._know(self._num_rollbacks + 1)
            self.rolled_back.append((step - 1, self.newest))
        else:
            self.problems.append(
                f"step {step:,} of attempt {self._attempt} is recorded again, with no rollback and no start "
                "before it; expected each step once: a line was copied, or one of what happened is lost"
            )
        self._go_to(step - 1)

    def _go_to(self, step: int) -> None:
        """Discard the history after `step`."""
        while step >= len(self.rows):
            self.rows = np.concatenate([self.rows, np.zeros_like(self.rows)])
        self.rows["seen"][step + 1 : self.newest + 1] = False
        self.newest = step
