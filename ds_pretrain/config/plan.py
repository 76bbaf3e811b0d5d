"""Everything that is decided before a rank wakes: the run file with what follows from it.

`Plan` holds the texts as they were read (each checkpoint keeps them), the `Run`, and the values derived from
it: the timeline and the schedule. Building one reads three files and nothing else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from ds_pretrain.config.chunk_rule import chunk_lengths
from ds_pretrain.config.deepspeed import check_deepspeed, parse_deepspeed, sequence_parallel_size
from ds_pretrain.config.loader import parse_run
from ds_pretrain.config.run_problems import CHANGEABLE as CHANGEABLE
from ds_pretrain.config.run_problems import (
    contradictions,
    covers,
    curriculum_problems,
    decay_steps,
    first_steps,
    layout,
    micro_sequences,
    schedule_problems,
)
from ds_pretrain.config.schedule import Cosine, Schedule, Wsd, rule_factor
from ds_pretrain.config.schema import CosineSection, PhaseSection, Run, WsdSection
from ds_pretrain.config.spans import Multiples, multiples
from ds_pretrain.config.timeline import (
    Segment,
    Timeline,
    accumulation,
    make_timeline,
    worlds_that_divide,
)
from ds_pretrain.core.errors import InputError
from ds_pretrain.core.text import counted, listed, parse_json, read_text
from ds_pretrain.models.pretrained import Base, read_base
from ds_pretrain.watchdog.policy import Ladder


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
    base: Base | None = None  # weights to begin with

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
            skip_before=section.skip_before,
            skip_after=section.skip_after,
            patience=section.patience,
            rollbacks=section.rollbacks,
            stretch=section.stretch,
            timeline=self.timeline,
        )

    def phase_at(self, step: int) -> PhaseSection:
        """The phase of the update that follows `step` finished steps."""
        name = self.timeline.at(step).phase
        return next(phase for phase in self.run.phases if phase.name == name)

    def micro_sequences(self, step: int) -> int:
        """Sequences of a micro-batch of that update."""
        return micro_sequences(self.run, self.phase_at(step))

    @property
    def sequence_parallel_size(self) -> int:
        """How many neighboring ranks share each sequence: how, and not what, this start trains."""
        return sequence_parallel_size(self.deepspeed)

    @property
    def sharing(self) -> dict[str, int]:
        """The same for a record, which is silent where each rank has sequences of its own."""
        size = self.sequence_parallel_size
        return {"sequence_parallel_size": size} if size > 1 else {}

    def rate(self, step: int, num_updates: int) -> float:
        """Of the update that follows `step` finished steps, of which `num_updates` were applied."""
        return self.schedule.rate(num_updates) * self.rate_factor(step)

    def rate_factor(self, step: int) -> float:
        """What `batch.rate_rule` multiplies the rate of that update by."""
        batch = self.run.batch
        return rule_factor(batch.rate_rule, self.timeline.at(step).tokens_per_step, self.rate_tokens)

    @property
    def rate_tokens(self) -> int:
        """The batch that the peak of the schedule is meant for."""
        return self.run.batch.rate_tokens or self.run.batch.tokens

    @property
    def chunk_tokens(self) -> dict[str, int]:
        """What each source that is read is cut into: declared, or the longest samples that a phase takes."""
        return chunk_lengths(
            {phase.name: phase.seq_len for phase in self.run.phases},
            {phase.name: phase.mixture for phase in self.run.phases},
            {name: section.chunk_tokens for name, section in self.run.sources.items()},
        )

    @property
    def last_step(self) -> int:
        return self.timeline.last_step

    @property
    def keep_every(self) -> Multiples | None:
        """The first checkpoint at or after each of these stays for good."""
        every = self.run.checkpoint.keep_every
        return None if every is None else multiples(every, self.timeline)

    def may_change(self, path: str) -> bool:
        """True if a start may give the field another value on purpose."""
        return covers(CHANGEABLE, path)

    def accepts(self, path: str) -> bool:
        """True if `accept_changes` names the field or its section; loading admits changeable names only."""
        return covers(self.run.accept_changes, path)


def load_plan(path: str | Path, overrides: Sequence[str] = ()) -> Plan:
    """Read the run file and the two JSON files that it names, and check them against one another.

    Raises:
        InputError: with every problem found.
    """
    run_text = read_text(path, "run file")
    run = parse_run(run_text, overrides, str(path))
    texts, deepspeed, model, base, problems = _read_named(run, str(path))
    problems += (f"{path}: {p}" for p in (*contradictions(run), *curriculum_problems(run)))
    if problems:
        raise InputError(problems)
    stages, sizes, _ = layout(run)
    timeline = make_timeline(stages, sizes, run.schedule.length)
    problems += check_deepspeed(
        deepspeed,
        run.deepspeed,
        str(path),
        peak=run.schedule.peak,
        sequences=timeline.segments[0].sequences,
        micro_sequences=micro_sequences(run, run.phases[0]),
        accumulation=run.batch.accumulation,
        varies=varies(run, timeline),
    )
    problems += (f"{path}: {p}" for p in schedule_problems(run, timeline))
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
        base=base,
    )


def _read_named(
    run: Run, path: str
) -> tuple[dict[str, str], dict[str, Any], dict[str, Any], Base | None, list[str]]:
    """The files that a run file names: texts, DeepSpeed JSON, model config, base; what is wrong with them."""
    texts: dict[str, str] = {}
    deepspeed: dict[str, Any] = {}
    model: dict[str, Any] = {}
    problems: list[str] = []
    base = None
    try:
        texts["deepspeed"] = read_text(run.deepspeed, f"{path}: deepspeed")
        deepspeed = parse_deepspeed(texts["deepspeed"], run.deepspeed)
    except InputError as error:
        problems += error.problems
    try:
        texts["model.config"] = read_text(run.model.config, f"{path}: model.config")
        model = parse_json(texts["model.config"], run.model.config)
    except InputError as error:
        problems += error.problems
    try:
        if run.model.base is not None:
            base = read_base(Path(run.model.base), f"{path}: model.from")
    except InputError as error:
        problems += error.problems
    return texts, deepspeed, model, base, problems


def resolve_schedule(section: CosineSection | WsdSection, timeline: Timeline) -> Schedule:
    """The section with its durations in steps."""
    length = timeline.last_step
    warmup = first_steps(section.warmup, timeline)
    if isinstance(section, CosineSection):
        return Cosine(section.peak, length, warmup, section.floor)
    return Wsd(section.peak, length, warmup, decay_steps(section, timeline), section.shape, section.floor)


def varies(run: Run, timeline: Timeline) -> bool:
    """True if steps, or their micro-batches, are not all of one size."""
    micro = {phase.name: micro_sequences(run, phase) for phase in run.phases}
    return len({(segment.sequences, micro[segment.phase]) for segment in timeline.segments}) > 1


def check_world(plan: Plan, world_size: int, world_source: str) -> list[str]:
    """Problems of running this plan on `world_size` ranks; the batch arithmetic is printed whole."""
    if world_size < 1:
        return [f"world size {world_size} (from {world_source}): expected 1 or more"]
    shared = plan.sequence_parallel_size
    if world_size % shared:
        return [
            f"{plan.run.deepspeed}: `sequence_parallel_size` = {shared} does not divide {world_size} ranks "
            f"(from {world_source}); set it to a divisor of their number, at best one that keeps each "
            "sequence on one node"
        ]
    groups = f", {shared} ranks a sequence" if shared > 1 else ""
    alike: dict[tuple[int, int, int], list[Segment]] = {}
    for segment in plan.timeline.segments:
        kind = segment.sequences, segment.seq_len, plan.micro_sequences(segment.first_step)
        alike.setdefault(kind, []).append(segment)
    problems, other_counts, asked = [], [], plan.run.batch.accumulation
    for (sequences, seq_len, micro), segments in alike.items():
        count = accumulation(sequences, micro, world_size // shared)
        arithmetic = (
            f"{_where(plan, segments)}global batch {counted(sequences, 'sequence')} "
            f"({sequences * seq_len:,} tokens / seq_len {seq_len:,}), micro-batch {micro}, world size "
            f"{world_size} (from {world_source}){groups}"
        )
        if count is None:
            problems.append(f"{arithmetic} do not multiply out; {_way_out(sequences, micro, shared)}")
        elif asked is not None and asked != count:
            other_counts.append(f"{arithmetic} make accumulation {count}")
    if other_counts:
        problems.append(
            f"{'; '.join(other_counts)}, but batch.accumulation = {asked}; delete batch.accumulation, or "
            "change the batch or the number of ranks"
        )
    return [f"{plan.run_path}: {problem}" for problem in problems]


def _where(plan: Plan, segments: Sequence[Segment]) -> str:
    """Steps of a run that is not alike all along."""
    if len(plan.timeline.segments) == 1:
        return ""
    steps = (f"{s.phase} from step {s.first_step:,} to {s.end_step:,}" for s in segments)
    return f"{' and '.join(steps)}: "


def _way_out(sequences: int, micro: int, shared: int) -> str:
    worlds = [shared * readers for readers in worlds_that_divide(sequences, micro)]
    return f"world sizes that do: {listed(worlds)} (or another batch.micro_sequences)"
