"""A run to be audited: as it was last started, with its data and its skip ledger."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ds_pretrain.checkpoint.manifest import RUN_STATE, published, step_name
from ds_pretrain.commands.audit_checked import is_typed, ledger_problems, record_problems
from ds_pretrain.config.loader import parse_run
from ds_pretrain.config.plan import Plan, load_plan
from ds_pretrain.core.errors import InputError
from ds_pretrain.core.jsonl import METRICS
from ds_pretrain.core.state import Rollback, RunState, Skip, SkipLedger, is_abandoned
from ds_pretrain.core.text import listed, read_text
from ds_pretrain.data.filtered import open_section
from ds_pretrain.data.indexed import TokenSource
from ds_pretrain.data.sampler import Sampler
from ds_pretrain.training.curriculum import open_sampler
from ds_pretrain.training.preflight import Inputs
from ds_pretrain.training.record import RunRecord, read_record
from ds_pretrain.watchdog.rollback_log import read_cure


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
    num_inherited: int  # of the rollbacks, those of the run that this one began from
    saved_step: int  # of the newest checkpoint on the branch that counts; 0 if there is none
    problems: tuple[str, ...]  # of what the run directory says

    def ledger_of(self, num_skips: int) -> SkipLedger:
        """The ledger while it was so long."""
        return SkipLedger(self.ledger.skips[:num_skips])


@contextmanager
def opened(place: Path, overrides: Sequence[str] = ()) -> Iterator[Audited]:
    """The run of a run directory or a run file, with its data, standing in the folder that it was started in.

    Of a run file only `out` counts: a run is audited as it was started.

    Raises:
        InputError: there is no such run, or its data cannot be opened.
    """
    out = _directory(place, overrides).absolute()
    saved, record = out / "run.toml", read_record(out)
    if record is None and published(out / "checkpoints"):
        raise InputError(
            f"{out} has checkpoints, and no run.json that says whose they are: put it back, or start the run "
            "once more, which makes it again from its newest checkpoint"
        )
    if record is None or not saved.is_file():
        raise InputError(f"{out} holds no run that was started: expected a run.json and a run.toml in it")
    if not (out / METRICS).is_file():
        raise InputError(f"{out} has no {METRICS}: nothing says which steps were trained; put it back")
    if problems := list(record_problems(record)):
        raise InputError([f"{out / 'run.json'}: {problem}; put an intact copy back" for problem in problems])
    words = [*record.overrides, *overrides]
    run = parse_run(read_text(saved, "run file"), words, str(saved))
    with chdir(_standing(out, Path(run.out))):
        yield _audited(out, load_plan(saved, words), record)


def _directory(place: Path, overrides: Sequence[str]) -> Path:
    if place.is_dir():
        return place
    if not place.is_file():
        raise InputError(f"{place} is no run directory and no run file; name one of the two")
    return Path(parse_run(read_text(place, "run file"), overrides, str(place)).out)


def _standing(out: Path, said: Path) -> Path:
    """The folder that the relative paths of a run were meant from: `out`, as it was said, lies under it."""
    parts = said.parts
    if said.is_absolute() or out.parts[-len(parts) :] != parts:
        return Path.cwd()
    return Path(*out.parts[: -len(parts)])


def _audited(out: Path, plan: Plan, record: RunRecord) -> Audited:
    sources = _open_sources(plan)
    cure = read_cure(out)
    rollbacks, ledger, problems = cure.rollbacks, cure.ledger, list(_data_problems(record, sources))
    root = out / "checkpoints" if plan.run.checkpoint.local is None else plan.checkpoints
    newest = _newest_state(root, rollbacks)
    if newest is not None and len(newest.rollbacks) > len(rollbacks):
        if len(newest.rollbacks) > record.num_inherited:
            problems.append(_lost_cure(root, len(rollbacks), newest))
        rollbacks, ledger = newest.rollbacks, newest.ledger
    elif newest is not None and len(newest.rollbacks) == len(rollbacks) and newest.ledger != ledger:
        problems.append(
            f"cure.json lists {_skips(ledger)}, and the checkpoint of step {newest.step:,} "
            f"{_skips(newest.ledger)} that are not the same; one of them was changed by hand"
        )
    if wrong := list(ledger_problems(ledger, plan.timeline)):
        raise InputError([f"{out / 'cure.json'}: {one}; put an intact copy back" for one in wrong])
    num_skips = sum(rollback.response == "skip" for rollback in rollbacks)
    if num_skips != len(ledger.skips):
        problems.append(
            f"the ledger has {_skips(ledger)}, and {num_skips} of the rollbacks skipped something; "
            "expected as many: which ledger a step was trained under cannot be told"
        )
    return Audited(
        out=out,
        plan=plan,
        record=record,
        sources=sources,
        sampler=open_sampler(plan, sources),
        rollbacks=rollbacks,
        ledger=ledger,
        num_inherited=record.num_inherited,
        saved_step=0 if newest is None else newest.step,
        problems=tuple(problems),
    )


def _lost_cure(root: Path, num_known: int, newest: RunState) -> str:
    """The next start goes on as the checkpoint knows it; but whoever reads cure.json reads something else."""
    return (
        f"cure.json is missing, or lists {num_known} of the {len(newest.rollbacks)} rollbacks that the "
        f"checkpoint of step {newest.step:,} knows; it was deleted, emptied or replaced by an old copy: "
        f'make it anew from "rollbacks" and "skips" of {root / step_name(newest.step) / RUN_STATE}, '
        "which are the same"
    )


def _open_sources(plan: Plan) -> dict[str, TokenSource]:
    sources, problems = {}, []
    for name, section in plan.run.sources.items():
        try:
            sources[name] = open_section(section)
        except InputError as error:
            problems += [f"sources.{name}: {problem}" for problem in error.problems]
    if problems:
        where = f"; relative paths are taken from {Path.cwd()}, another place is sources.NAME=PATH"
        raise InputError([problem + where for problem in problems])
    return sources


def _data_problems(record: RunRecord, sources: Mapping[str, TokenSource]) -> Iterator[str]:
    known = record.identity.get("sources", {})
    for name, now in Inputs(sources, {}).data.items():
        if name in known and known[name] != now:
            yield (
                f"sources.{name} holds {now}, and the run was started with {known[name]}: it is other data, "
                "so what the steps read cannot be read again"
            )


def _newest_state(root: Path, rollbacks: Sequence[Rollback]) -> RunState | None:
    """Of the newest checkpoint that can be read and was not left by a rollback."""
    for folder in published(root):
        state = _state_of(folder)
        if state is not None and is_typed(state) and not is_abandoned(state, rollbacks):
            return state
    return None


def _state_of(folder: Path) -> RunState | None:
    try:
        return RunState.from_json((folder / RUN_STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _skips(ledger: SkipLedger) -> str:
    return "1 skip" if len(ledger.skips) == 1 else f"{len(ledger.skips):,} skips"


def skip_words(skip: Skip) -> str:
    """The interval of a skip."""
    return f"{skip.phase} draws [{skip.start}, {skip.stop})"


def changed_words(run: Audited) -> str:
    """Why what was read before may not be what the plan says now; empty if nothing of it was changed."""
    sections = ("batch", "phases", "sources", "chunk_tokens")
    changes = [one for one in run.record.changes if one["field"].split(".")[0] in sections]
    if not changes:
        return ""
    fields = listed(list(dict.fromkeys(f"`{one['field']}` at start {one['attempt']}" for one in changes)), 4)
    return f"the run file was changed, {fields}: steps from before can have read otherwise than it says now"
