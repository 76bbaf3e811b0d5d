"""Everything that is decided before a rank wakes: the run file with what follows from it.

`Plan` holds the texts as they were read (each checkpoint keeps them), the `Run`, and the values derived from
it: the timeline and the schedule. Building one reads three files and nothing else.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from os.path import abspath
from pathlib import Path
from typing import Any

from ds_pretrain.config import CosineSection, Run, WsdSection, parse_run
from ds_pretrain.deepspeed_json import check_deepspeed, parse_deepspeed
from ds_pretrain.errors import InputError
from ds_pretrain.reading import parse_json, read_text, shown
from ds_pretrain.response import Ladder
from ds_pretrain.schedules import Cosine, Schedule, Wsd
from ds_pretrain.timeline import (
    MOST,
    Duration,
    Timeline,
    Unit,
    accumulation,
    single_phase,
    to_steps,
    worlds_that_divide,
)

# What fixes a run's trajectory. Another value in the same run directory is another run.
_IDENTITY = ("name", "seed", "model", "schedule", "batch", "sources", "phases")
# What a start may change on purpose, when `accept_changes` names it; "probe": what a restored model computes.
CHANGEABLE = (
    "schedule",
    "sources",
    "model.z_loss",
    "model.recompute",
    "model.attention",
    "model.decay_embeddings",
    "probe",
)
# What the numbers of an identity count.
_UNITS = {
    **dict.fromkeys(("schedule.length", "schedule.warmup", "schedule.decay"), "steps"),
    "batch.tokens": "tokens",
}


@dataclass(frozen=True)
class Plan:
    """A run, ready to start. `run_path` names the file in messages."""

    run_path: str
    run: Run
    overrides: tuple[str, ...]
    run_text: str
    deepspeed_text: str
    model_text: str
    model: Mapping[str, Any]
    deepspeed: Mapping[str, Any]
    timeline: Timeline
    schedule: Schedule

    @property
    def out(self) -> Path:
        return Path(self.run.out)

    @property
    def checkpoints(self) -> Path:
        """Where a host saves: in the run directory, or in a folder of its own that no other run uses."""
        local = self.run.checkpoint.local
        if local is None:
            return self.out / "checkpoints"
        return Path(local) / f"{self.run.name}-{sha256(str(self.out.absolute()).encode()).hexdigest()[:8]}"

    @property
    def ship_to(self) -> str | None:
        """Where checkpoints are copied to."""
        section = self.run.checkpoint
        shared = str(self.out / "checkpoints") if section.local is not None else None
        return section.ship_to or shared

    @property
    def ladder(self) -> Ladder:
        """How the run answers the watchdog."""
        section = self.run.watchdog
        return Ladder(
            respond=section.respond,
            skip_before=_steps(section.skip_before, self.timeline),
            skip_after=max(1, _steps(section.skip_after, self.timeline)),
            patience=section.patience,
            rollbacks=section.rollbacks,
            stretch=_steps(section.stretch, self.timeline),
        )

    @property
    def last_step(self) -> int:
        return self.timeline.last_step

    @property
    def keep_every_steps(self) -> int | None:
        """Checkpoints of every so many steps stay for good."""
        every = self.run.checkpoint.keep_every
        return None if every is None else _steps(every, self.timeline)

    def identity(self, data: Mapping[str, str]) -> dict[str, Any]:
        """What must not differ between two starts of one run, as plain types.

        `data` describes the content of each source: a corpus may move, and may not change.
        """
        fields = self.run.model_dump(mode="json")
        identity = {key: fields[key] for key in _IDENTITY}
        identity["schedule"] = {"kind": self.run.schedule.kind, **asdict(self.schedule)}  # in steps
        identity["batch"] = {"tokens": fields["batch"]["tokens"]}  # how a rank takes its share may change
        identity["sources"] = dict(data)
        identity["deepspeed"] = _trajectory_of(self.deepspeed)
        identity["model"]["config"] = dict(self.model)  # the content, wherever the file lies
        return identity

    def may_change(self, path: str) -> bool:
        """True if a start may give the field another value on purpose."""
        return _covers(CHANGEABLE, path)

    def accepts(self, path: str) -> bool:
        """True if `accept_changes` names the field or its section; loading admits changeable names only."""
        return _covers(self.run.accept_changes, path)


def load_plan(path: str | Path, overrides: Sequence[str] = ()) -> Plan:
    """Read the run file and the two JSON files that it names, and check them against one another.

    Raises:
        InputError: with every problem found.
    """
    run_text = read_text(path, "run file")
    run = parse_run(run_text, overrides, str(path))
    problems: list[str] = []
    texts: dict[str, str] = {}
    for key, file in (("deepspeed", run.deepspeed), ("model.config", run.model.config)):
        try:
            texts[key] = read_text(file, f"{path}: {key}")
        except InputError as error:
            problems += error.problems
    deepspeed: dict[str, Any] = {}
    model: dict[str, Any] = {}
    try:
        deepspeed = parse_deepspeed(texts["deepspeed"], run.deepspeed) if "deepspeed" in texts else {}
    except InputError as error:
        problems += error.problems
    try:
        model = parse_json(texts["model.config"], run.model.config) if "model.config" in texts else {}
    except InputError as error:
        problems += error.problems
    problems += (f"{path}: {p}" for p in _contradictions(run))
    if problems:
        raise InputError(problems)
    phase = run.phases[0]
    sequences = run.batch.tokens // phase.seq_len
    timeline = single_phase(phase.name, phase.seq_len, sequences, run.schedule.length)
    problems += check_deepspeed(
        deepspeed,
        run.deepspeed,
        str(path),
        peak=run.schedule.peak,
        sequences=sequences,
        micro_sequences=run.batch.micro_sequences,
        accumulation=run.batch.accumulation,
    )
    problems += (f"{path}: {p}" for p in _schedule_problems(run, timeline))
    if problems:
        raise InputError(problems)
    return Plan(
        run_path=str(path),
        run=run,
        overrides=tuple(overrides),
        run_text=run_text,
        deepspeed_text=texts["deepspeed"],
        model_text=texts["model.config"],
        model=model,
        deepspeed=deepspeed,
        timeline=timeline,
        schedule=resolve_schedule(run.schedule, timeline),
    )


def resolve_schedule(section: CosineSection | WsdSection, timeline: Timeline) -> Schedule:
    """The section with its durations in steps."""
    length = timeline.last_step
    warmup = _steps(section.warmup, timeline)
    if isinstance(section, CosineSection):
        return Cosine(section.peak, length, warmup, section.floor)
    return Wsd(section.peak, length, warmup, _steps(section.decay, timeline), section.shape, section.floor)


def check_world(plan: Plan, world_size: int, world_source: str) -> list[str]:
    """Problems of running this plan on `world_size` ranks; the batch arithmetic is printed whole."""
    if world_size < 1:
        return [f"world size {world_size} (from {world_source}): expected 1 or more"]
    problems = []
    for segment in plan.timeline.segments:
        micro = plan.run.batch.micro_sequences
        count = accumulation(segment.sequences, micro, world_size)
        asked = plan.run.batch.accumulation
        arithmetic = (
            f"global batch {segment.sequences} sequences ({segment.tokens_per_step:,} tokens / seq_len "
            f"{segment.seq_len:,}), micro-batch {micro}, world size {world_size} (from {world_source})"
        )
        if count is None:
            problems.append(
                f"{plan.run_path}: {arithmetic} do not multiply out; {_way_out(segment.sequences, micro)}"
            )
        elif asked is not None and asked != count:
            problems.append(
                f"{plan.run_path}: {arithmetic} make accumulation {count}, but batch.accumulation = {asked}; "
                "delete batch.accumulation, or change the batch or the number of ranks"
            )
    return problems


def changed_fields(
    old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = ""
) -> dict[str, tuple[Any, Any]]:
    """Dotted path to (old, new) of every leaf that differs."""
    changes: dict[str, tuple[Any, Any]] = {}
    for key in dict.fromkeys([*old, *new]):
        path, before, after = f"{prefix}{key}", old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            changes |= changed_fields(before, after, f"{path}.")
        elif before != after:
            changes[path] = (before, after)
    return changes


def with_unit(path: str, value: Any) -> str:
    """A value of `Plan.identity` as a person reads it: `200 steps`, not `200`."""
    unit = _UNITS.get(path)
    if unit is None or not isinstance(value, int) or isinstance(value, bool):
        return shown(value)
    return f"{value:,} {unit[:-1] if value == 1 else unit}"


def _way_out(sequences: int, micro: int) -> str:
    worlds = worlds_that_divide(sequences, micro)
    return f"world sizes that do: {_listed(worlds)} (or another batch.micro_sequences)"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:16])) + (", ..." if len(numbers) > 16 else "")


def _trajectory_of(deepspeed: Mapping[str, Any]) -> dict[str, Any]:
    """What of the DeepSpeed JSON fixes where the weights go, apart from how it is computed.

    A load brings the saved options of the optimizer back: another value would be ignored in silence.
    """
    optimizer = deepspeed.get("optimizer", {})
    how = ("torch_adam", "fused")
    params = {key: value for key, value in optimizer.get("params", {}).items() if key not in how}
    return {
        "optimizer": {"type": optimizer.get("type"), "params": params},
        "gradient_clipping": deepspeed.get("gradient_clipping"),
    }


def _covers(sections: Sequence[str], path: str) -> bool:
    return any(path == section or path.startswith(f"{section}.") for section in sections)


def _steps(duration: Duration, timeline: Timeline) -> int:
    return to_steps(duration, timeline.segments[0].tokens_per_step, timeline.last_step)


def _contradictions(run: Run) -> Iterator[str]:
    """What the sections of a run file say against one another."""
    for phase in run.phases:
        whole, rest = divmod(run.batch.tokens, phase.seq_len)
        if rest or not whole:
            lower, upper = whole * phase.seq_len, (whole + 1) * phase.seq_len
            nearest = f"{lower:,} or {upper:,}" if lower else f"{upper:,}"
            yield (
                f"batch.tokens = {run.batch.tokens:,} is not a whole number of sequences of "
                f"phases.{phase.name}.seq_len = {phase.seq_len:,}; nearest: {nearest}"
            )
        elif whole % (micro := run.batch.micro_sequences):
            nearest_counts = [n for n in (whole // micro * micro, (whole // micro + 1) * micro) if n]
            yield (
                f"batch.tokens = {run.batch.tokens:,} is {whole:,} sequences of {phase.seq_len:,}, which no "
                f"number of ranks divides into whole micro-batches of batch.micro_sequences = {micro:,}; "
                f"nearest batch.tokens: {' or '.join(f'{n * phase.seq_len:,}' for n in nearest_counts)}"
            )
        elif run.batch.accumulation is not None and whole // micro % run.batch.accumulation:
            counts = worlds_that_divide(whole, micro)  # a number of ranks and its accumulation trade places
            yield (
                f"batch.accumulation = {run.batch.accumulation:,} does not divide the {whole // micro:,} "
                f"micro-batches of a step, so no number of ranks gives it; what some do: {_listed(counts)}; "
                "or delete it: it is derived"
            )
        for source in phase.mixture:
            if source not in run.sources:
                yield (
                    f"phases.{phase.name}.mixture names `{source}`, which [sources] does not have "
                    f"(it has: {', '.join(run.sources) or 'none'})"
                )
        if not phase.mixture:
            yield f"phases.{phase.name}.mixture is empty; name at least one source with a weight"
    ship_to, local = run.checkpoint.ship_to, run.checkpoint.local
    taken = {
        abspath(run.out): "the run directory",
        abspath(f"{run.out}/checkpoints"): "where checkpoints are saved",
    }
    if local is not None:
        taken = {abspath(run.out): "the run directory", abspath(local): "checkpoint.local"}
    if ship_to is not None and "://" not in ship_to and abspath(ship_to) in taken:
        yield (
            f'checkpoint.ship_to = "{ship_to}" is {taken[abspath(ship_to)]}; name another place'
            + ("" if local is not None else ", or give checkpoint.local, a folder of each host's own")
        )
    for path in run.accept_changes:
        if not _covers(CHANGEABLE, path):
            yield (
                f"accept_changes names `{path}`, which a started run cannot change; what it can: "
                f"{', '.join(CHANGEABLE)}"
            )


def _schedule_problems(run: Run, timeline: Timeline) -> Iterator[str]:
    section, length = run.schedule, timeline.last_step
    amounts: dict[Unit, int] = {"steps": length, "tokens": timeline.total_tokens}
    for unit, amount in amounts.items():
        if amount > MOST[unit]:
            yield (
                f'schedule.length = "{section.length}" is {amount:,} {unit} in batches of '
                f"{run.batch.tokens:,} tokens; at most {MOST[unit]:,} can be trained: shorten it"
            )
            return
    warmup = _steps(section.warmup, timeline)
    decay = _steps(section.decay, timeline) if isinstance(section, WsdSection) else 0
    if warmup + decay > length:
        both = f'schedule.warmup = "{section.warmup}" ({warmup:,} steps)'
        if isinstance(section, WsdSection):
            both += f' and schedule.decay = "{section.decay}" ({decay:,} steps)'
        yield f'{both} do not fit into schedule.length = "{section.length}" ({length:,} steps); shorten one'
    if isinstance(section, WsdSection) and decay == 0:
        yield f'schedule.decay = "{section.decay}" is zero steps; a WSD schedule ends with a decay'
    if isinstance(section, WsdSection) and section.shape == "exponential" and section.floor == 0.0:
        yield 'schedule.shape = "exponential" cannot reach schedule.floor = 0; set a floor above 0, like 0.1'
