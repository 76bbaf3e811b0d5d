"""What a run file contradicts itself in, found before anything else is read. Pure."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import lcm
from os.path import abspath

from ds_pretrain.config.schema import PhaseSection, Run, WsdSection
from ds_pretrain.config.timeline import (
    MOST,
    Duration,
    Layout,
    Sizes,
    Stage,
    Timeline,
    Unit,
    lay_out,
    parse_duration,
    to_steps,
    worlds_that_divide,
)
from ds_pretrain.core.text import counted, listed

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


def contradictions(run: Run) -> Iterator[str]:
    """What the sections of a run file say against one another."""
    if problems := list(start_problems(run)):
        yield from problems  # and which batches a phase meets is not known
    else:
        yield from _batch_problems(run)
    for phase in run.phases:
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
        if not covers(CHANGEABLE, path):
            yield (
                f"accept_changes names `{path}`, which a started run cannot change; what it can: "
                f"{', '.join(CHANGEABLE)}"
            )


def curriculum_problems(run: Run) -> Iterator[str]:
    """What phases, ramp and decay say against one another."""
    names = [phase.name for phase in run.phases]
    for name in dict.fromkeys(name for name in names if names.count(name) > 1):
        yield f"two phases are called {name}; give each a name of its own"
    first = run.phases[0]
    if first.start is not None and first.start.amount != 0:
        yield f'phases.{first.name}.start = "{first.start}": the first phase begins with the run; delete it'
    if run.batch.ramp is not None and run.batch.ramp[-1][1] != run.batch.tokens:
        at, size = run.batch.ramp[-1]
        yield (
            f'batch.ramp ends with {size:,} tokens from "{at}" on, and batch.tokens is {run.batch.tokens:,}; '
            "the last of a ramp is batch.tokens"
        )
    sizes = [size for _, size in run.batch.ramp or ()]
    if sizes != sorted(set(sizes)):
        yield f"batch.ramp = {', '.join(f'{size:,}' for size in sizes)} tokens; a ramp has to rise"
    if run.batch.rate_tokens is not None and run.batch.rate_rule == "none":
        yield (
            f"batch.rate_tokens = {run.batch.rate_tokens:,} is the batch that schedule.peak is meant for, "
            'and without a rule the rate is the same at any: set batch.rate_rule = "linear" or "sqrt", or '
            "delete batch.rate_tokens"
        )
    decay = run.schedule.decay if isinstance(run.schedule, WsdSection) else None
    if isinstance(decay, str) and decay not in names:
        yield (
            f'schedule.decay = "{decay}" is no phase (there are: {", ".join(names)}) and no duration, '
            'like "10%" or "2000 steps"'
        )


def schedule_problems(run: Run, timeline: Timeline) -> Iterator[str]:
    section, length = run.schedule, timeline.last_step
    amounts: dict[Unit, int] = {"steps": length, "tokens": timeline.total_tokens}
    for unit, amount in amounts.items():
        if amount > MOST[unit]:
            yield (
                f'schedule.length = "{section.length}" is {amount:,} {unit} in batches of '
                f"{run.batch.tokens:,} tokens; at most {MOST[unit]:,} can be trained: shorten it"
            )
            return
    warmup = first_steps(section.warmup, timeline)
    decay = decay_steps(section, timeline) if isinstance(section, WsdSection) else 0
    if warmup + decay > length:
        both = f'schedule.warmup = "{section.warmup}" ({counted(warmup, "step")})'
        if isinstance(section, WsdSection):
            both += f' and schedule.decay = "{section.decay}" ({counted(decay, "step")})'
        whole = f'schedule.length = "{section.length}" ({counted(length, "step")})'
        yield f"{both} do not fit into {whole}; shorten one"
    if isinstance(section, WsdSection) and decay == 0:
        yield f'schedule.decay = "{section.decay}" is zero steps; a WSD schedule ends with a decay'
    if isinstance(section, WsdSection) and section.shape == "exponential" and section.floor == 0.0:
        yield 'schedule.shape = "exponential" cannot reach schedule.floor = 0; set a floor above 0, like 0.1'


def micro_sequences(run: Run, phase: PhaseSection) -> int:
    """Sequences of a micro-batch in a phase."""
    return phase.micro_sequences or run.batch.micro_sequences


def decay_steps(section: WsdSection, timeline: Timeline) -> int:
    """The steps of a decay, which ends with the run: from a phase's start, or of so many tokens."""
    if isinstance(section.decay, str):
        return timeline.last_step - timeline.phase_start(section.decay)
    if section.decay.unit == "tokens":
        before = timeline.total_tokens - section.decay.amount
        first = timeline.step_at(before)
        return timeline.last_step - first + (timeline.tokens_before(first) > before)  # no fewer tokens
    return to_steps(section.decay, 1, timeline.last_step)


def first_steps(duration: Duration, timeline: Timeline) -> int:
    """A duration from the run's beginning, in steps."""
    if duration.unit == "tokens":
        return timeline.step_at(duration.amount)
    return to_steps(duration, 1, timeline.last_step)


def layout(run: Run) -> tuple[list[Stage], Sizes, Layout]:
    """Phases, sizes of the batch, and the steps at which each begins."""
    stages = [Stage(phase.name, phase.seq_len, phase.start) for phase in run.phases]
    sizes = run.batch.ramp or ((parse_duration("0 steps"), run.batch.tokens),)
    return stages, sizes, lay_out(stages, sizes, run.schedule.length)


def start_problems(run: Run) -> Iterator[str]:
    """Phases and sizes of the batch that have no steps, or no start."""
    stages, sizes, laid = layout(run)
    phases = [(f"phases.{run.phases[0].name}", 0)]
    for stage, step in zip(stages[1:], laid.stages[1:], strict=True):
        if stage.start is None:
            yield f'phases.{stage.name} needs a start, like start = "430_000 steps"'
        else:
            phases.append((f'phases.{stage.name}.start = "{stage.start}"', step))
    ramp = [(f'batch.ramp."{start}"', step) for (start, _), step in zip(sizes, laid.batches, strict=True)]
    for marks in (phases, ramp):
        for (before, earlier), (name, step) in pairwise(marks):
            if step >= laid.end:
                yield (
                    f'{name} is step {step:,}, and schedule.length = "{run.schedule.length}" ends the run at '
                    f"step {laid.end:,}: it has no steps; begin it earlier, or make the run longer"
                )
            elif step <= earlier:
                yield (
                    f"{name} is step {step:,}, and {before}, which is listed before it, begins at step "
                    f"{earlier:,}: the earlier one has no steps; list them in their order, each with a later "
                    "start than the one before"
                )


def _batch_problems(run: Run) -> Iterator[str]:
    """Sizes of the batch that do not fit a phase in which a step has them. All starts must have steps."""
    _, sizes, laid = layout(run)
    met = dict.fromkeys((batch, stage) for stage, batch, _, _ in laid.stretches())
    for index, (start, tokens) in enumerate(sizes):
        phases = [run.phases[stage] for batch, stage in met if batch == index]
        name = "batch.tokens" if tokens == run.batch.tokens else f'batch.ramp."{start}"'
        unit = lcm(*(phase.seq_len * micro_sequences(run, phase) for phase in phases))
        nearest = " or ".join(f"{n:,}" for n in (tokens // unit * unit, (tokens // unit + 1) * unit) if n)
        for phase in phases:
            whole, rest = divmod(tokens, phase.seq_len)
            micro, length = micro_sequences(run, phase), f"phases.{phase.name}.seq_len = {phase.seq_len:,}"
            if rest or not whole:
                yield (
                    f"{name} = {tokens:,} is not a whole number of sequences of {length}; "
                    f"nearest {name}: {nearest}"
                )
            elif whole % micro:
                own = phase.micro_sequences is not None
                key = f"phases.{phase.name}.micro_sequences" if own else "batch.micro_sequences"
                yield (
                    f"{name} = {tokens:,} is {counted(whole, 'sequence')} of {length}, which no number of "
                    f"ranks divides into whole micro-batches of {key} = {micro:,}; nearest {name}: {nearest}"
                )
    yield from _accumulation_problems(run, [(sizes[batch][1], run.phases[stage]) for batch, stage in met])


def _accumulation_problems(run: Run, met: Sequence[tuple[int, PhaseSection]]) -> Iterator[str]:
    """Where no number of ranks gives the accumulation that is asked for, by the micro-batches of a step."""
    asked = run.batch.accumulation
    where: dict[int, list[str]] = {}
    if asked is None:
        return
    for tokens, phase in met:
        count, rest = divmod(tokens, phase.seq_len * micro_sequences(run, phase))
        if not rest:
            where.setdefault(count, []).append(f"{tokens:,} tokens in phase {phase.name}")
    if len(where) > 1:
        each = "; ".join(f"{count:,} ({'; '.join(steps)})" for count, steps in where.items())
        yield (
            f"batch.accumulation = {asked:,}, and the micro-batches of a step are {each}: no number of ranks "
            "gives it in each of these; delete it: it is derived"
        )
        return
    for count in (count for count in where if count % asked):
        possible = listed(worlds_that_divide(count, 1))  # a number of ranks and its accumulation trade places
        yield (
            f"batch.accumulation = {asked:,} does not divide the "
            f"{counted(count, 'micro-batch', 'micro-batches')} of a step, so no number of ranks gives it; "
            f"what some do: {possible}; or delete it: it is derived"
        )


def covers(sections: Sequence[str], path: str) -> bool:
    return any(path == section or path.startswith(f"{section}.") for section in sections)
