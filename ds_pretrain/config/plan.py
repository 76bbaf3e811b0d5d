"""Everything that is decided before a rank wakes: the run file with what follows from it.

`Plan` holds the texts as they were read (each checkpoint keeps them), the `Run`, and the values derived from
it: the timeline and the schedule. Building one reads three files and nothing else.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from math import lcm
from os.path import abspath
from pathlib import Path
from typing import Any

from ds_pretrain.config.deepspeed import (
    check_deepspeed,
    check_ranks,
    resolve_deepspeed,
    sequence_parallel_size,
    uses_bf16,
    zero_stage,
)
from ds_pretrain.config.loader import parse_sections
from ds_pretrain.config.schedule import lr_scaling_factor
from ds_pretrain.config.schema import CosineSection, PhaseSection, Run, WsdSection
from ds_pretrain.config.timeline import (
    MOST,
    Duration,
    Multiples,
    Segment,
    Timeline,
    Unit,
    build_multiples,
    compute_chunk_lengths,
    convert_to_steps,
    count_micro_batches,
    count_steps,
    list_valid_world_sizes,
)
from ds_pretrain.core.errors import InputError
from ds_pretrain.core.text import format_count_of, join_listed, parse_json, read_text

# What a start may change on purpose, when `accept_changes` names it; "probe": what a restored model computes.
CHANGEABLE = (
    "schedule",
    "sources",
    "model.z_loss",
    "model.activation_checkpointing",
    "model.attention",
    "model.decay_embeddings",
    "probe",
)


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
    schedule: CosineSection | WsdSection  # in steps

    @property
    def resolved_deepspeed(self) -> dict[str, Any]:
        """The DeepSpeed JSON with the values that the run file owns filled in, as the engine takes it."""
        return resolve_deepspeed(
            self.deepspeed, peak=self.run.schedule.peak_lr, micro_batch_size=self.run.batch.micro_batch_size
        )

    @property
    def out(self) -> Path:
        return Path(self.run.out)

    @property
    def checkpoints(self) -> Path:
        """The folder in which a host saves: in the run directory, or in its own local_dir."""
        local = self.run.checkpoint.local_dir
        if local is None:
            return self.out / "checkpoints"
        return Path(local) / f"{self.run.name}-{sha256(str(self.out.absolute()).encode()).hexdigest()[:8]}"

    @property
    def upload_to(self) -> str | None:
        """The location that checkpoints are uploaded to."""
        section = self.run.checkpoint
        default = str(self.out / "checkpoints") if section.local_dir is not None else None
        return section.upload_to or default

    def phase_at(self, step: int) -> PhaseSection:
        """The phase of the update that follows `step` finished steps."""
        return self.run.phase(self.timeline.at(step).phase)

    def micro_batch_size(self, step: int) -> int:
        """Sequences of a micro-batch of that update."""
        return self.run.micro_batch_size(self.timeline.at(step).phase)

    @property
    def sequence_parallel_size(self) -> int:
        """The number of neighboring ranks that share each sequence; it changes no numbers of the run."""
        return sequence_parallel_size(self.deepspeed)

    @property
    def sharing(self) -> dict[str, int]:
        """The same for a record, which is silent where each rank has sequences of its own."""
        size = self.sequence_parallel_size
        return {"sequence_parallel_size": size} if size > 1 else {}

    def lr(self, step: int, num_updates: int) -> float:
        """The learning rate of the update after `step` steps, of which `num_updates` were applied."""
        return self.schedule.lr(num_updates) * self.lr_factor(step)

    def lr_factor(self, step: int) -> float:
        """The factor of `batch.lr_scaling` at that update."""
        batch = self.run.batch
        return lr_scaling_factor(
            batch.lr_scaling, self.timeline.at(step).tokens_per_step, self.lr_reference_tokens
        )

    @property
    def lr_reference_tokens(self) -> int:
        """The batch that the peak of the schedule is meant for."""
        return self.run.batch.lr_reference_tokens or self.run.batch.tokens

    @property
    def chunk_tokens(self) -> dict[str, int]:
        """The chunk size of each source in tokens: declared, or the longest sample of any phase."""
        return compute_chunk_lengths(
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
        return None if every is None else build_multiples(every, self.timeline)

    def may_change(self, path: str) -> bool:
        """True if a start may give the field another value on purpose."""
        return is_covered(CHANGEABLE, path)

    def accepts(self, path: str) -> bool:
        """True if `accept_changes` names the field or its section; loading admits changeable names only."""
        return is_covered(self.run.accept_changes, path)


def parse_run(text: str, overrides: Sequence[str] = (), name: str = "run file") -> Run:
    """The text of a run file and overrides to a `Run`. Raises InputError with every problem."""
    return parse_sections(text, Run, overrides, name, (["sources"], ["validation", "sources"]))


def load_plan(path: str | Path, overrides: Sequence[str] = ()) -> Plan:
    """Read the run file and the two JSON files that it names, and check them against one another.

    Raises:
        InputError: with every problem found.
    """
    run_text = read_text(path, "run file")
    run = parse_run(run_text, overrides, str(path))
    texts, tables, problems = _read_named(run, str(path))
    problems += (f"{path}: {p}" for p in (*find_contradictions(run), *check_curriculum(run)))
    if problems:
        raise InputError(problems)
    timeline = make_timeline(run.phases, run.batch.sizes, run.schedule.length)
    problems += check_deepspeed(
        tables["deepspeed"],
        run.deepspeed,
        peak=run.schedule.peak_lr,
        sizes=[(segment.sequences, run.micro_batch_size(segment.phase)) for segment in timeline.segments],
        accumulation=run.batch.gradient_accumulation_steps,
        run_path=str(path),
    )
    problems += (f"{path}: {p}" for p in check_schedule(run, timeline))
    if problems:
        raise InputError(problems)
    return Plan(
        run_path=str(path),
        run=run,
        overrides=tuple(overrides),
        run_text=run_text,
        deepspeed_text=texts["deepspeed"],
        model_text=texts["model.config"],
        model=tables["model.config"],
        deepspeed=tables["deepspeed"],
        timeline=timeline,
        schedule=run.schedule.in_steps(timeline),
    )


def _read_named(run: Run, path: str) -> tuple[dict[str, str], dict[str, dict[str, Any]], list[str]]:
    """The two JSON files that a run file names, by its keys: texts, tables, and what is wrong with them."""
    texts: dict[str, str] = {}
    tables: dict[str, dict[str, Any]] = {}
    problems: list[str] = []
    for key, file in (("deepspeed", run.deepspeed), ("model.config", run.model.config)):
        try:
            is_of_base = run.model.pretrained is not None and Path(run.model.pretrained) == Path(file).parent
            texts[key] = read_text(file, f"{path}: {'model.pretrained' if is_of_base else key}")
            tables[key] = parse_json(texts[key], file)
        except InputError as error:
            problems += error.problems
    return texts, tables, problems


def check_world(plan: Plan, world_size: int, world_source: str) -> list[str]:
    """Problems of running this plan on `world_size` ranks; the batch arithmetic is printed whole."""
    if world_size < 1:
        return [f"world size {world_size} (from {world_source}): expected 1 or more"]
    sp_size = plan.sequence_parallel_size
    if world_size % sp_size:
        return [
            f"{plan.run.deepspeed}: `sequence_parallel_size` = {sp_size} does not divide {world_size} ranks "
            f"(from {world_source}); set it to a divisor of their number, at best one that keeps each "
            "sequence on one node"
        ]
    groups = f", {sp_size} ranks a sequence" if sp_size > 1 else ""
    alike: dict[tuple[int, int, int], list[Segment]] = {}
    for segment in plan.timeline.segments:
        kind = segment.sequences, segment.seq_len, plan.micro_batch_size(segment.first_step)
        alike.setdefault(kind, []).append(segment)
    problems, other_counts, asked = [], [], plan.run.batch.gradient_accumulation_steps
    for (sequences, seq_len, micro), segments in alike.items():
        count = count_micro_batches(sequences, micro, world_size // sp_size)
        arithmetic = (
            f"{_describe_segments(plan, segments)}global batch {format_count_of(sequences, 'sequence')} "
            f"({sequences * seq_len:,} tokens / seq_len {seq_len:,}), micro-batch {micro}, world size "
            f"{world_size} (from {world_source}){groups}"
        )
        if count is None:
            problems.append(f"{arithmetic} do not multiply out; {_suggest_worlds(sequences, micro, sp_size)}")
        elif asked is not None and asked != count:
            other_counts.append(f"{arithmetic} make accumulation {count}")
    if other_counts:
        problems.append(
            f"{'; '.join(other_counts)}, but batch.gradient_accumulation_steps = {asked}; delete "
            "batch.gradient_accumulation_steps, or change the batch or the number of ranks"
        )
    first = plan.timeline.segments[0]
    count = count_micro_batches(first.sequences, plan.micro_batch_size(0), world_size // sp_size)
    in_json = check_ranks(plan.deepspeed, world_size, asked or count, plan.run_path)
    return [
        *(f"{plan.run_path}: {problem}" for problem in problems),
        *(f"{plan.run.deepspeed}: {problem}" for problem in in_json),
    ]


def check_sequence_parallel(plan: Plan) -> Iterator[str]:
    """Find settings of the run file that do not work with sequence parallelism."""
    num_sharing = plan.sequence_parallel_size
    for phase in plan.run.phases:
        if phase.seq_len % num_sharing:
            yield (
                f"which does not divide phases.{phase.name}.seq_len = {phase.seq_len:,} of {plan.run_path}; "
                "change the one or the other"
            )
    if plan.run.model.mask_documents:
        yield (
            f"and {plan.run_path} sets model.mask_documents = true: sequence-parallel attention takes no "
            f"mask, so documents would attend to each other; set it to false, or delete the key"
        )
    if plan.run.model.attention == "eager":
        yield (
            f'and {plan.run_path} sets model.attention = "eager", which needs a mask; set it to "sdpa" or '
            '"flash_attention_2", or delete the key'
        )


def drop_problems(plan: Plan) -> Iterator[str]:
    """Find why `watchdog.skip_update_sigmas` cannot skip updates exactly, or is not sensible."""
    watchdog, config = plan.run.watchdog, plan.deepspeed
    if watchdog.skip_update_sigmas is None:
        return
    if watchdog.skip_update_sigmas < watchdog.norm_sigmas:
        yield (
            f"{plan.run_path}: watchdog.skip_update_sigmas = {watchdog.skip_update_sigmas:g} is below "
            f"watchdog.norm_sigmas = {watchdog.norm_sigmas:g}, so updates with normal norms would be "
            f"skipped and the sigma would shrink with each; raise skip_update_sigmas or lower norm_sigmas"
        )
    zero = config["zero_optimization"]
    devices = [(zero.get(key) or {}).get("device") for key in ("offload_optimizer", "offload_param")]
    unchecked = uses_bf16(config) and config["bf16"].get("check_grad_overflow") is False
    needs = {
        ("`bf16.check_grad_overflow` = true", "else it applies any update"): (
            unchecked and zero_stage(config) < 3
        ),
        ("no offload to nvme", 'use "cpu" or none'): "nvme" in devices,
        ("`torch_autocast` off", "use bf16"): (config.get("torch_autocast") or {}).get("enabled") is True,
    }
    for (what, why), is_missing in needs.items():
        if is_missing:
            yield (
                f"{plan.run_path}: watchdog.skip_update_sigmas needs {what} in {plan.run.deepspeed}: {why}; "
                "or delete skip_update_sigmas"
            )


def _describe_segments(plan: Plan, segments: Sequence[Segment]) -> str:
    """Steps of a run that is not alike all along."""
    if len(plan.timeline.segments) == 1:
        return ""
    steps = (f"{s.phase} from step {s.first_step:,} to {s.end_step:,}" for s in segments)
    return f"{' and '.join(steps)}: "


def _suggest_worlds(sequences: int, micro: int, sp_size: int) -> str:
    worlds = [sp_size * readers for readers in list_valid_world_sizes(sequences, micro)]
    return f"world sizes that do: {join_listed(worlds)} (or another batch.micro_batch_size)"


def find_contradictions(run: Run) -> Iterator[str]:
    """Find contradictions between the sections of a run file."""
    if problems := list(start_problems(run)):
        yield from problems  # and which batches a phase meets is not known
    else:
        yield from _check_batch(run)
    for phase in run.phases:
        for source in phase.mixture:
            if source not in run.sources:
                yield (
                    f"phases.{phase.name}.mixture names `{source}`, which [sources] does not have "
                    f"(it has: {', '.join(run.sources) or 'none'})"
                )
        if not phase.mixture:
            yield f"phases.{phase.name}.mixture is empty; name at least one source with a weight"
    upload_to, local = run.checkpoint.upload_to, run.checkpoint.local_dir
    taken = {
        abspath(run.out): "the run directory",
        abspath(f"{run.out}/checkpoints"): "where checkpoints are saved",
    }
    if local is not None:
        taken = {abspath(run.out): "the run directory", abspath(local): "checkpoint.local_dir"}
    if upload_to is not None and "://" not in upload_to and abspath(upload_to) in taken:
        yield (
            f'checkpoint.upload_to = "{upload_to}" is {taken[abspath(upload_to)]}; choose another location'
            + ("" if local is not None else ", or give checkpoint.local_dir, a folder of each host's own")
        )
    for path in run.accept_changes:
        if not is_covered(CHANGEABLE, path):
            yield (
                f"accept_changes names `{path}`, which a started run cannot change; what it can: "
                f"{', '.join(CHANGEABLE)}"
            )


def check_curriculum(run: Run) -> Iterator[str]:
    """Find contradictions between phases, batch ramp and decay."""
    names = [phase.name for phase in run.phases]
    for name in dict.fromkeys(name for name in names if names.count(name) > 1):
        yield f"two phases are called {name}; give each a name of its own"
    first = run.phases[0]
    if first.start is not None and first.start.amount != 0:
        yield f'phases.{first.name}.start = "{first.start}": the first phase starts with the run; delete it'
    if run.batch.ramp is not None and run.batch.ramp[-1][1] != run.batch.tokens:
        at, size = run.batch.ramp[-1]
        yield (
            f'batch.ramp ends with {size:,} tokens from "{at}" on, and batch.tokens is {run.batch.tokens:,}; '
            "the last of a ramp is batch.tokens"
        )
    sizes = [size for _, size in run.batch.ramp or ()]
    if sizes != sorted(set(sizes)):
        yield f"batch.ramp = {', '.join(f'{size:,}' for size in sizes)} tokens; a ramp has to rise"
    if run.batch.lr_reference_tokens is not None and run.batch.lr_scaling == "none":
        yield (
            f"batch.lr_reference_tokens = {run.batch.lr_reference_tokens:,} is the batch that "
            f"schedule.peak_lr is meant for, "
            'and without a rule the rate is the same at any: set batch.lr_scaling = "linear" or "sqrt", or '
            "delete batch.lr_reference_tokens"
        )
    decay = run.schedule.decay if isinstance(run.schedule, WsdSection) else None
    if isinstance(decay, str) and decay not in names:
        yield (
            f'schedule.decay = "{decay}" is neither a phase (known: {", ".join(names)}) nor a duration, '
            f'like "10%" or "2000 steps"'
        )


def check_schedule(run: Run, timeline: Timeline) -> Iterator[str]:
    section, length = run.schedule, timeline.last_step
    amounts: dict[Unit, int] = {"steps": length, "tokens": timeline.total_tokens}
    for unit, amount in amounts.items():
        if amount > MOST[unit]:
            yield (
                f'schedule.length = "{section.length}" is {amount:,} {unit} in batches of '
                f"{run.batch.tokens:,} tokens; at most {MOST[unit]:,} can be trained: shorten it"
            )
            return
    resolved = section.in_steps(timeline)
    warmup = resolved.warmup.steps
    decay = length - resolved.decay_start if isinstance(resolved, WsdSection) else 0
    if warmup + decay > length:
        both = f'schedule.warmup = "{section.warmup}" ({format_count_of(warmup, "step")})'
        if isinstance(section, WsdSection):
            both += f' and schedule.decay = "{section.decay}" ({format_count_of(decay, "step")})'
        whole = f'schedule.length = "{section.length}" ({format_count_of(length, "step")})'
        yield f"{both} exceed {whole}; shorten one"
    if isinstance(section, WsdSection) and decay == 0:
        yield f'schedule.decay = "{section.decay}" is zero steps; a WSD schedule ends with a decay'
    if (
        isinstance(section, WsdSection)
        and section.decay_shape == "exponential"
        and section.min_lr_ratio == 0.0
    ):
        yield (
            'schedule.decay_shape = "exponential" cannot reach schedule.min_lr_ratio = 0; set a floor '
            "above 0, like 0.1"
        )


Sizes = Sequence[tuple[Duration, int]]  # from when on a step has how many tokens


@dataclass(frozen=True)
class Layout:
    """The steps at which phases and sizes of the batch begin, and the end of the run; nothing is checked."""

    phases: tuple[int, ...]
    batches: tuple[int, ...]
    end: int

    def stretches(self) -> Iterator[tuple[int, int, int, int]]:
        """Steps in which one phase meets one size, in order: phase, size, first step, end step."""
        for phase, (begin, after) in enumerate(pairwise([*self.phases, self.end])):
            for batch, (first, stop) in enumerate(pairwise([*self.batches, self.end])):
                if max(first, begin) < min(stop, after):
                    yield phase, batch, max(first, begin), min(stop, after)


def lay_out(phases: Sequence[PhaseSection], sizes: Sizes, length: Duration) -> Layout:
    """Durations from the run's beginning, in steps; what has no start, and the first of each, begins at 0."""
    begins = [0]
    for start, _ in sizes[1:]:
        begins.append(_find_step_reaching(start, begins, sizes))
    end = _find_step_reaching(length, begins, sizes)
    starts = [
        0 if phase.start is None else _find_step_reaching(phase.start, begins, sizes, end) for phase in phases
    ]
    return Layout((0, *starts[1:]), tuple(begins), end)


def make_timeline(phases: Sequence[PhaseSection], batches: Sizes, length: Duration) -> Timeline:
    """The segments of a run: `batches` says from when on a step has how many tokens, the first from 0.

    A start in tokens is the first step boundary at which so many have been read; percent is of the run's
    steps. `find_contradictions` has found each phase and each batch steps of its own, and whole sequences.
    """
    segments: list[Segment] = []
    samples = tokens = 0
    draws = [0] * len(phases)
    for number, batch, first, stop in lay_out(phases, batches, length).stretches():
        phase, (_, size) = phases[number], batches[batch]
        sequences = size // phase.seq_len
        assert sequences * phase.seq_len == size > 0, (size, phase)
        before = samples, tokens, draws[number]
        segments.append(Segment(phase.name, first, stop, phase.seq_len, sequences, *before))
        samples += (stop - first) * sequences
        draws[number] += (stop - first) * sequences
        tokens += (stop - first) * size
    return Timeline(tuple(segments))


def _find_step_reaching(
    duration: Duration, begins: Sequence[int], sizes: Sizes, end: int | None = None
) -> int:
    """The first step at which so much is done; size n holds from step `begins[n]` on, the last for ever."""
    if duration.unit != "tokens":
        return convert_to_steps(duration, 1, end)
    step = tokens = 0
    for (_, size), first, stop in zip(sizes, begins, [*begins[1:], None], strict=False):
        step = first + count_steps(duration.amount - tokens, size)
        if stop is None or step <= stop:
            break
        tokens += (stop - first) * size
    return step


def start_problems(run: Run) -> Iterator[str]:
    """Phases and sizes of the batch that have no steps, or no start."""
    sizes, laid = run.batch.sizes, lay_out(run.phases, run.batch.sizes, run.schedule.length)
    phases = [(f"phases.{run.phases[0].name}", 0)]
    for phase, step in zip(run.phases[1:], laid.phases[1:], strict=True):
        if phase.start is None:
            yield f'phases.{phase.name} needs a start, like start = "430_000 steps"'
        else:
            phases.append((f'phases.{phase.name}.start = "{phase.start}"', step))
    ramp = [(f'batch.ramp."{start}"', step) for (start, _), step in zip(sizes, laid.batches, strict=True)]
    for marks in (phases, ramp):
        for (before, earlier), (name, step) in pairwise(marks):
            if step >= laid.end:
                yield (
                    f'{name} is step {step:,}, and schedule.length = "{run.schedule.length}" ends the run at '
                    f"step {laid.end:,}: it has no steps; start it earlier, or extend the run"
                )
            elif step <= earlier:
                yield (
                    f"{name} is step {step:,}, and {before}, which is listed before it, begins at step "
                    f"{earlier:,}: the earlier one has no steps; list them in their order, each with a later "
                    "start than the one before"
                )


def _check_batch(run: Run) -> Iterator[str]:
    """Sizes of the batch that do not fit a phase in which a step has them. All starts must have steps."""
    sizes, laid = run.batch.sizes, lay_out(run.phases, run.batch.sizes, run.schedule.length)
    met = dict.fromkeys((batch, phase) for phase, batch, _, _ in laid.stretches())
    for index, (start, tokens) in enumerate(sizes):
        phases = [run.phases[phase] for batch, phase in met if batch == index]
        name = "batch.tokens" if tokens == run.batch.tokens else f'batch.ramp."{start}"'
        unit = lcm(*(phase.seq_len * run.micro_batch_size(phase.name) for phase in phases))
        nearest = " or ".join(f"{n:,}" for n in (tokens // unit * unit, (tokens // unit + 1) * unit) if n)
        for phase in phases:
            whole, rest = divmod(tokens, phase.seq_len)
            micro = run.micro_batch_size(phase.name)
            length = f"phases.{phase.name}.seq_len = {phase.seq_len:,}"
            if rest or not whole:
                yield (
                    f"{name} = {tokens:,} is not a whole number of sequences of {length}; "
                    f"nearest {name}: {nearest}"
                )
            elif whole % micro:
                own = phase.micro_batch_size is not None
                key = f"phases.{phase.name}.micro_batch_size" if own else "batch.micro_batch_size"
                yield (
                    f"{name} = {tokens:,} is {format_count_of(whole, 'sequence')} of {length}, which no "
                    f"number of ranks divides into whole micro-batches of {key} = {micro:,}; nearest {name}: "
                    f"{nearest}"
                )


def is_covered(sections: Sequence[str], path: str) -> bool:
    return any(path == section or path.startswith(f"{section}.") for section in sections)
