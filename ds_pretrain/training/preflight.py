"""Everything about a start that can be found without an engine, and what to tell an operator about it.

No torch here: `ds-pretrain check` runs this in seconds on a login node, and each start runs it again.
"""

import hashlib
import json
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from ds_pretrain.checkpoint.manifest import list_published, parse_step
from ds_pretrain.config.deepspeed import check_version, uses_bf16, zero_stage
from ds_pretrain.config.plan import Plan, check_sequence_parallel, check_world, drop_problems
from ds_pretrain.config.schema import HeldOutSection, PhaseSection
from ds_pretrain.config.timeline import (
    Segment,
    check_chunk_lengths,
    count_micro_batches,
    list_valid_world_sizes,
)
from ds_pretrain.core.distributed import World, gather_objects, run_on_each_rank
from ds_pretrain.core.errors import InputError, mark_agreed
from ds_pretrain.core.files import check_folder, write_atomic
from ds_pretrain.core.state import SkipLedger
from ds_pretrain.core.text import draw_plot, format_count_of, join_listed, say
from ds_pretrain.data.filtered import open_section
from ds_pretrain.data.indexed import TokenSource
from ds_pretrain.data.inspect import check_source, describe_source
from ds_pretrain.data.mixture import make_mixture
from ds_pretrain.data.tokenizer import find_tokenizer_problems, find_tokenizer_warnings
from ds_pretrain.data.usage import check_usage, format_forecast, format_usage
from ds_pretrain.data.validation_set import SHORTEST_PROMPT, list_prompt_lengths
from ds_pretrain.models.config_check import (
    QK_NORM_ADDABLE,
    check_masking,
    check_model,
    check_sequence_parallel_attention,
    uses_transformers,
    warn_of_large_masks,
)
from ds_pretrain.models.flops import count_parameters
from ds_pretrain.models.pretrained import Pretrained, read_pretrained
from ds_pretrain.models.rope_config import (
    build_rope_config,
    check_rope_change,
    check_rope_values,
    describe_rope,
    has_rope,
    warn_of_rope_change,
)
from ds_pretrain.training.compatibility import WEIGHTS, check_directory, find_config_differences
from ds_pretrain.training.curriculum import open_sampler, resolve_mixtures, resolve_phase_models
from ds_pretrain.training.record import find_lost_checkpoints, read_known, read_newest_known_run

_PLOT_WIDTH, _PLOT_HEIGHT = 72, 7  # of the learning rate, in characters


@dataclass(frozen=True)
class Inputs:
    """The opened data of a run, and the weights that it begins with."""

    sources: Mapping[str, TokenSource]
    validation: Mapping[str, TokenSource]
    pretrained: Pretrained | None = None

    @cached_property
    def data(self) -> dict[str, str]:
        """Describe the content of each training source and of the weights. Runs remember these very texts."""
        texts = {
            name: f"{source.num_tokens} tokens, {source.num_documents} documents, {source.fingerprint()[:16]}"
            for name, source in self.sources.items()
        }
        return texts if self.pretrained is None else {**texts, WEIGHTS: self.pretrained.fingerprint}


def open_inputs(plan: Plan) -> Inputs:
    """Open all that the run file names to read. Raises InputError with all that cannot be opened."""
    problems: list[str] = []
    sources = _open_all(plan.run.sources, f"{plan.run_path}: sources", problems)
    validation = plan.run.validation.sources if plan.run.validation else {}
    held_out = _open_all(validation, f"{plan.run_path}: validation.sources", problems)
    pretrained, folder = None, plan.run.model.pretrained
    try:
        pretrained = (
            None if folder is None else read_pretrained(Path(folder), f"{plan.run_path}: model.pretrained")
        )
    except InputError as error:
        problems += error.problems
    if problems:
        raise InputError(problems)
    return Inputs(sources, held_out, pretrained)


def _check_locations(plan: Plan) -> list[str]:
    """Folders of this host that checkpoints cannot come from or go to, as far as looking tells."""
    problems, section = [], plan.run.checkpoint
    if plan.run.resume_from is not None:
        problems += _check_origin(Path(plan.run.resume_from), plan.run_path)
    for key, location in (("local_dir", section.local_dir), ("upload_to", section.upload_to)):
        if location is not None and "://" not in location:
            problem = check_folder(Path(location), f"{plan.run_path}: checkpoint.{key}")
            problems += [problem] if problem is not None else []
    return problems


def _check_origin(origin: Path, run_path: str) -> list[str]:
    if not origin.is_dir():
        return [f"{run_path}: resume_from = {origin} is not a folder; name a checkpoint folder"]
    there = [*list_published(origin), *list_published(origin / "checkpoints")]
    if there and parse_step(origin.name) is None:
        return [
            f"{run_path}: resume_from = {origin} is a folder of checkpoints, not a checkpoint; name one, "
            f"like {there[0]}"
        ]
    return []


def find_problems(plan: Plan, inputs: Inputs, world_size: int | None, world_source: str) -> list[str]:
    """All that is wrong with a start; `world_size` is None while nobody knows it."""
    vocab_size = _read_vocab_size(plan)
    problems = check_model(plan.model_text, qk_norm=plan.run.model.qk_norm, name=plan.run.model.config)
    problems += check_rope_values(plan.model, plan.run.model.config) or [
        *check_phases(plan),
        *_check_sequence_parallel(plan),
    ]
    problems += _check_locations(plan)
    problems += _check_mixtures(plan)
    for source, seq_len in _read_at(plan, inputs):
        problems += check_source(source, seq_len, vocab_size) if vocab_size else []
    problems += check_data(plan, inputs.sources)
    problems += _check_tokenizers(inputs)
    problems += _check_pretrained(plan, inputs)
    origin = None if plan.run.resume_from is None else read_known(Path(plan.run.resume_from))
    problems_here = check_directory(plan, inputs.data, read_newest_known_run(plan.checkpoints), origin)
    if not problems_here and plan.upload_to is None:
        problems_here = find_lost_checkpoints(plan.out, plan.checkpoints)
    problems += problems_here
    problems += drop_problems(plan)
    problems += check_version()
    if world_size is not None:
        problems += check_world(plan, world_size, world_source)
    return list(dict.fromkeys(problems))


def _check_sequence_parallel(plan: Plan) -> list[str]:
    """Find why sequence parallelism cannot work in this run (`sequence_parallel_size`)."""
    if (num_sharing := plan.sequence_parallel_size) == 1:
        return []
    longest = max(phase.seq_len for phase in plan.run.phases)
    problems = [
        *check_sequence_parallel(plan),
        *check_sequence_parallel_attention(plan.model, num_sharing, longest),
    ]
    return [f"{plan.run.deepspeed} sets `sequence_parallel_size` = {num_sharing}, {p}" for p in problems]


def build_problems(plan: Plan, pretrained: Pretrained | None) -> list[str]:
    """List why the model cannot be built, load `model.pretrained` or be in a phase. Needs torch."""
    from ds_pretrain.models.build import build_on_meta

    phases = {f"{plan.run_path}: phases.{name}": model for name, model in resolve_phase_models(plan).items()}
    try:
        build_on_meta(
            plan.model_text,
            qk_norm=plan.run.model.qk_norm,
            attention=plan.run.model.attention,
            name=plan.run.model.config,
            pretrained=pretrained,
            recompute=plan.run.model.activation_checkpointing
            or any(phase.activation_checkpointing for phase in plan.run.phases),
            phases=phases,
        )
    except InputError as error:
        return list(error.problems)
    return []


def prepare_inputs(plan: Plan, world: World) -> Inputs:
    """Open the data on every rank and check all that can be checked without an engine. Collective.

    Raises:
        InputError: on every rank, with every rank's problems.
    """
    opened: list[Inputs] = []

    def look() -> tuple[str, str]:
        opened.append(open_inputs(plan))
        if world.is_main:
            problems = find_problems(plan, opened[0], world.size, "the launcher")
            problems += [] if problems else build_problems(plan, opened[0].pretrained)
            if problems:
                raise InputError(problems)
        return _compute_digest(plan, opened[0]), platform.node()

    seen = run_on_each_rank(world, look)
    first_digest, first_node = seen[0]
    if others := {node for digest, node in seen if digest != first_digest}:
        raise mark_agreed(
            InputError(
                f"{node} reads another run file, DeepSpeed JSON, model config or corpus than {first_node} "
                "under the same paths; bring its copies up to date"
                for node in sorted(others)
            )
        )
    return opened[0]


def _compute_digest(plan: Plan, inputs: Inputs) -> str:
    """Hash this rank's inputs: equal hashes train the same run."""
    data = {**inputs.data, **{name: source.fingerprint() for name, source in inputs.validation.items()}}
    texts = (plan.run_text, plan.deepspeed_text, plan.model_text, *plan.overrides, json.dumps(data))
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def announce(plan: Plan, inputs: Inputs, world: World) -> None:
    """Print the resolved run, and keep what it is made of in the run directory. Collective."""
    hosts = gather_objects(world, f"{platform.node()}:{world.local_rank}")
    if world.is_main:
        for line in format_summary(plan, inputs, world.size):
            say(sys.stdout, line)
        say(sys.stdout, f"ranks      {world.size}: {', '.join(hosts)}")
        write_atomic(plan.out / "run.toml", plan.run_text)
        write_atomic(plan.out / "model.json", plan.model_text)
        write_atomic(plan.out / "deepspeed_resolved.json", json.dumps(plan.resolved_deepspeed, indent=1))
        write_atomic(
            plan.out / "ranks.json", json.dumps({"world_size": world.size, "ranks": hosts}, indent=1)
        )


def format_summary(plan: Plan, inputs: Inputs, world_size: int | None) -> Iterator[str]:
    """The resolved run, a line a fact: first the schedule, then timeline, batch, model, data."""
    yield from format_lr_summary(plan)
    for segment in plan.timeline.segments:
        yield (
            f"timeline   {segment.phase}: steps {segment.first_step:,} to {segment.end_step:,}, "
            f"{format_count_of(segment.sequences, 'sequence')} of {segment.seq_len:,} = "
            f"{format_count_of(segment.tokens_per_step, 'token')} a step, "
            f"{plan.timeline.tokens_before(segment.end_step):,} tokens at its end"
        )
        yield f"batch      {_format_batch(plan, segment, world_size)}"
    together = plan.sequence_parallel_size
    sp_size = f", sequence parallel over {together} ranks" if together > 1 else ""
    precision = "bf16" if uses_bf16(plan.deepspeed) else "fp32"
    yield f"engine     {plan.run.deepspeed}: ZeRO-{zero_stage(plan.deepspeed)}, {precision}{sp_size}"
    yield f"model      {_format_model(plan)}"
    yield from _format_sources(plan, inputs)
    yield from _format_unused(plan)
    yield from _format_masks(plan, precision)
    if inputs.pretrained is not None:
        warnings = find_tokenizer_warnings(inputs.pretrained.folder, _list_sources(inputs))
        yield from (f"warning    {warning}" for warning in warnings)


def _open_all(
    sections: Mapping[str, HeldOutSection], where: str, problems: list[str]
) -> dict[str, TokenSource]:
    opened = {}
    for name, section in sections.items():
        try:
            opened[name] = open_section(section)
        except InputError as error:
            problems += (f"{where}.{name}: {problem}" for problem in error.problems)
    return opened


def _read_at(plan: Plan, inputs: Inputs) -> Iterator[tuple[TokenSource, int]]:
    """Every source with each sequence length that it is read at."""
    for name, source in inputs.sources.items():
        lengths = {phase.seq_len for phase in plan.run.phases if name in phase.mixture}
        yield from ((source, seq_len) for seq_len in sorted(lengths or {plan.run.phases[0].seq_len}))
    lengths = {phase.seq_len for phase in plan.run.phases}
    yield from ((source, n) for source in inputs.validation.values() for n in sorted(lengths))


def _list_sources(inputs: Inputs) -> list[TokenSource]:
    return [*inputs.sources.values(), *inputs.validation.values()]


def _read_vocab_size(plan: Plan) -> int | None:
    size = plan.model.get("vocab_size")
    return size if type(size) is int and size > 0 else None


def _check_mixtures(plan: Plan) -> list[str]:
    problems: list[str] = []
    for phase in plan.run.phases:
        try:
            make_mixture(phase.mixture, key=0)
        except InputError as error:
            problems += (f"{plan.run_path}: phases.{phase.name}: {problem}" for problem in error.problems)
    return problems


def _check_tokenizers(inputs: Inputs) -> Iterator[str]:
    """Sources of one run must have been written by one tokenizer, as far as they say which."""
    by_hash: dict[str, list[str]] = {}
    for source in _list_sources(inputs):
        if source.sidecar is not None and source.sidecar.get("tokenizer_hash"):
            by_hash.setdefault(source.sidecar["tokenizer_hash"], []).append(str(source.prefix))
    if len(by_hash) > 1:
        groups = " / ".join(", ".join(prefixes) for prefixes in by_hash.values())
        yield (
            f"the sources were prepared with {len(by_hash)} different tokenizers: {groups}; "
            "prepare them with one"
        )


def _check_pretrained(plan: Plan, inputs: Inputs) -> list[str]:
    """Find what does not fit the pretrained weights."""
    if (pretrained := inputs.pretrained) is None:
        return []
    problems = [
        *find_config_differences(plan, pretrained),
        *find_tokenizer_problems(pretrained.folder, _list_sources(inputs)),
    ]
    has_norms = any(name.split(".")[-2:-1] == ["q_norm"] for name in pretrained.tensors)
    if plan.run.model.qk_norm and plan.model.get("model_type") in QK_NORM_ADDABLE and not has_norms:
        problems.append(
            f"{plan.run_path}: model.qk_norm = true adds norms to a model that was trained without them "
            f"({pretrained.folder}): it would compute something else than it learned; set it to false"
        )
    return problems


def _format_batch(plan: Plan, segment: Segment, world_size: int | None) -> str:
    sequences, micro = segment.sequences, plan.micro_batch_size(segment.first_step)
    sp_size = plan.sequence_parallel_size
    if world_size is None:
        worlds = [sp_size * readers for readers in list_valid_world_sizes(sequences, micro)]
        return f"micro-batches of {micro}; world sizes that divide it: {join_listed(worlds)}"
    count = count_micro_batches(sequences, micro, world_size // sp_size)
    ranks, each = format_count_of(world_size, "rank"), format_count_of(micro, "sequence")
    if sp_size > 1:
        ranks = f"{format_count_of(world_size // sp_size, 'group')} of {sp_size} ranks"
    return f"{ranks} x {each} x accumulation {count} = {format_count_of(sequences, 'sequence')}"


def _format_model(plan: Plan) -> str:
    extras = [
        name
        for name, on in (
            ("QK-norm", plan.run.model.qk_norm),
            ("activation checkpointing", plan.run.model.activation_checkpointing),
        )
        if on
    ]
    if plan.run.model.z_loss is not None:
        extras.append(f"z-loss {plan.run.model.z_loss:g}")
    count = count_parameters(plan.model_text, qk_norm=plan.run.model.qk_norm)
    size = "parameters not counted"
    if count is not None:
        size = (
            f"{count.total:,} parameters ({count.non_embedding:,} without embeddings), "
            f"{plan.timeline.total_tokens / count.total:.3g} tokens/param"
        )
    return ", ".join([f"{plan.model.get('model_type')}: {size}", *extras])


def _format_sources(plan: Plan, inputs: Inputs) -> Iterator[str]:
    yield from format_curriculum(plan, inputs.sources)
    warnings: list[str] = []
    for name in plan.chunk_tokens:
        words, odd = _describe_separators(inputs.sources[name])
        yield f"data       {name}: {words or 'not counted'}"
        warnings += odd
    for name, source in inputs.validation.items():
        words, odd = _describe_separators(source)
        yield f"validation {name}: {format_count_of(source.num_tokens, 'token')}{words and f', {words}'}"
        warnings += odd
    yield from (f"warning    {warning}" for warning in dict.fromkeys(warnings))


def _format_unused(plan: Plan) -> Iterator[str]:
    """Sources that no mixture draws from: often a name that was forgotten there."""
    used = {name for phase in plan.run.phases for name in phase.mixture}
    for name in plan.run.sources:
        if name not in used:
            yield f"warning    sources.{name} is in no mixture, so nothing of it is trained on"


def _format_masks(plan: Plan, precision: str) -> Iterator[str]:
    """Phases whose sequences are too long for masks."""
    if not plan.run.model.mask_documents:
        return
    for phase in plan.run.phases:
        micro = plan.micro_batch_size(plan.timeline.phase_start(phase.name))
        where = f"phases.{phase.name}"
        warnings = warn_of_large_masks(
            plan.model, plan.run.model.attention, micro, phase.seq_len, precision, where
        )
        yield from (f"warning    {warning}" for warning in warnings)


def _describe_separators(source: TokenSource) -> tuple[str, tuple[str, ...]]:
    """Say how often a document ends in a source, if known, and warn if it is odd."""
    report = describe_source(source)
    rate = report.eos_per_million
    return ("" if rate is None else f"{rate:,.0f} EOS per 1M tokens"), report.warnings


def format_lr_summary(plan: Plan) -> Iterator[str]:
    """Format the learning rate at the corners of the schedule and of the batch ramp, then draw it."""
    corners = (
        f"{name} {step:,}: {_compute_lr(plan, step):.3g}" for name, step in plan.schedule.corners().items()
    )
    yield f"lr         {', '.join(corners)}"
    segments, batch = plan.timeline.segments, plan.run.batch
    changes = [b for a, b in pairwise(segments) if b.tokens_per_step != a.tokens_per_step]
    if batch.lr_scaling != "none" and (changes or plan.lr_factor(0) != 1):
        words = (
            f"x {plan.lr_factor(s.first_step):.3g} from step {s.first_step:,} "
            f"({format_count_of(s.tokens_per_step, 'token')} per step, lr "
            f"{_compute_lr(plan, s.first_step):.3g})"
            for s in (segments[0], *changes)
        )
        meant = f" to {plan.lr_reference_tokens:,} tokens" if batch.lr_reference_tokens is not None else ""
        yield f"           batch.lr_scaling {batch.lr_scaling}{meant}: {', '.join(words)}"
    yield from (f"           {line}" for line in draw_lr(plan))


def _compute_lr(plan: Plan, step: int) -> float:
    """Return the lr of a run without skipped updates; a schedule may have a corner at its very end."""
    return plan.lr(min(step, plan.last_step - 1), step)


def draw_lr(plan: Plan) -> list[str]:
    """Draw the learning rate, one column per interval of steps; below it the phases, each where it begins."""
    width = min(_PLOT_WIDTH, plan.last_step)
    steps = [column * (plan.last_step - 1) // max(1, width - 1) for column in range(width)]
    phases = ["-"] * width
    for phase in plan.run.phases:
        begin = plan.timeline.phase_start(phase.name)
        first = next((column for column, step in enumerate(steps) if step >= begin), width)
        name = f"|{phase.name}"[: width - first]  # as far as there is room
        phases[first : first + len(name)] = name
    rates = [[plan.lr(step, step)] for step in steps]
    return [*draw_plot(rates, _PLOT_HEIGHT), f"{'':9} {''.join(phases)}"]


def check_phases(plan: Plan) -> Iterator[str]:
    """Phases that the model cannot have: lengths, rotary positions, documents kept apart.

    Where Transformers is not asked, its defaults are not known, and a change of positions is not judged.
    """
    model: dict[str, Any] = dict(plan.model)
    for index, phase in enumerate(plan.run.phases):
        where = f"{plan.run_path}: phases.{phase.name}"
        if not uses_transformers():
            yield from _check_lengths(plan, phase, where) if index == 0 and phase.rope is None else ()
            continue
        if (index == 0 and phase.rope is None) or not has_rope(plan.model):
            yield from _check_lengths(plan, phase, where)
            if phase.rope is not None:
                yield from check_rope_change(model, phase.rope, phase.seq_len, f"{where}.rope")
        elif problems := check_rope_change(model, phase.rope, phase.seq_len, f"{where}.rope"):
            yield from problems
            return
        model = build_rope_config(model, phase.rope, phase.seq_len)
    if plan.run.model.mask_documents:
        yield from (f"{plan.run_path}: {p}" for p in check_masking(plan.model, plan.run.model.attention))


def check_data(plan: Plan, sources: Mapping[str, TokenSource]) -> list[str]:
    """Phases that the sources cannot feed, or validation cannot ask: lengths, or too many epochs."""
    lengths = {phase.name: phase.seq_len for phase in plan.run.phases}
    problems = check_chunk_lengths(lengths, resolve_mixtures(plan), plan.chunk_tokens)
    short = {
        name: tokens
        for name, tokens in plan.chunk_tokens.items()
        if name in sources and not sources[name].num_samples(tokens)
    }
    problems += (
        f"sources.{name}.chunk_tokens = {tokens:,}: it has {sources[name].num_tokens:,} tokens, fewer than "
        f"one chunk of {tokens:,} + 1; lower chunk_tokens or prepare more text"
        for name, tokens in short.items()
        if plan.run.sources[name].chunk_tokens is not None
    )
    if not problems and not short:
        with suppress(InputError):  # of a mixture, which is told by itself
            problems = check_usage(open_sampler(plan, sources), _get_max_epochs(plan))
    return [f"{plan.run_path}: {problem}" for problem in (*problems, *_check_retrieval(plan))]


def format_curriculum(plan: Plan, sources: Mapping[str, TokenSource]) -> Iterator[str]:
    """Format the phases for the start summary."""
    model: dict[str, Any] = dict(plan.model)
    for phase in plan.run.phases if uses_transformers() else ():
        warnings = warn_of_rope_change(model, phase.rope, phase.seq_len, f"phases.{phase.name}")
        model = build_rope_config(model, phase.rope, phase.seq_len)
        if len(plan.run.phases) > 1 or phase.rope is not None:
            yield f"positions  {phase.name}: {describe_rope(model)}"
        yield from (f"warning    {warning}" for warning in warnings)
    yield from format_usage(open_sampler(plan, sources), sources)
    if short := _check_prompt_lengths(plan):
        yield (
            f"validation no key is asked for in {', '.join(short)}: a prompt has at least {SHORTEST_PROMPT} "
            "tokens"
        )


def format_skips(plan: Plan, sources: Mapping[str, TokenSource], ledger: SkipLedger) -> Iterator[str]:
    """Format how a resumed run's skips changed the use of its data; nothing without skips.

    A `max_epochs` that is passed because of them is a warning: it was kept when the run was started.
    """
    if not ledger.skips:
        return
    sampler = open_sampler(plan, sources)
    phases = {phase: sum(stop - start for start, stop in ledger.merged(phase)) for phase in sampler.mixtures}
    left_out = ", ".join(f"{format_count_of(n, 'sample')} of {phase}" for phase, n in phases.items() if n)
    yield f"skipped    {left_out}; without them the run's data is:"
    yield from format_forecast(sampler, sources, ledger)
    for problem in check_usage(sampler, _get_max_epochs(plan), ledger):
        yield f"warning    because of what is skipped, {problem}"


def _uses_retrieval(plan: Plan) -> bool:
    return plan.run.validation is not None and plan.run.validation.retrieval


def _check_prompt_lengths(plan: Plan) -> list[str]:
    """Phases whose samples hold no prompt, where prompts are asked for."""
    short = (phase for phase in plan.run.phases if _uses_retrieval(plan) and phase.seq_len < SHORTEST_PROMPT)
    return [f"phases.{phase.name}.seq_len = {phase.seq_len}" for phase in short]


def _check_retrieval(plan: Plan) -> Iterator[str]:
    short = _check_prompt_lengths(plan)
    if len(short) == len(plan.run.phases):
        yield (
            f"validation.retrieval = true hides keys in prompts of at least {SHORTEST_PROMPT} tokens, and no "
            f"phase has samples as long: {', '.join(short)}; make one at least {SHORTEST_PROMPT}, or set "
            "validation.retrieval = false"
        )
    sp_size = plan.sequence_parallel_size
    prompts = {
        n
        for phase in plan.run.phases
        for n in list_prompt_lengths(phase.seq_len)
        if phase.seq_len % sp_size == 0
    }
    if _uses_retrieval(plan) and (odd := sorted(n for n in prompts if n % sp_size)):
        yield (
            f"validation.retrieval = true asks in prompts of {', '.join(map(str, odd))} tokens, which "
            f"sequence_parallel_size = {sp_size} of {plan.run.deepspeed} does not divide; set it to false, "
            "or take a power of two"
        )


def _get_max_epochs(plan: Plan) -> dict[str, float | None]:
    return {name: section.max_epochs for name, section in plan.run.sources.items()}


def _check_lengths(plan: Plan, phase: PhaseSection, where: str) -> Iterator[str]:
    """The first phase, and each of a model with learned positions, has to fit into the model as it is."""
    key = "max_position_embeddings" if "max_position_embeddings" in plan.model else "n_positions"
    limit, seq_len = plan.model.get(key), phase.seq_len
    if isinstance(limit, int) and seq_len > limit:
        ways = "raise the one or lower the other"
        if has_rope(plan.model):
            ways += f", or extend the model with phases.{phase.name}.rope (a theta, or a kind with a factor)"
        length = f"{where}.seq_len = {seq_len:,}"
        yield f"{length} is longer than {key} = {limit:,} in {plan.run.model.config}; {ways}"
