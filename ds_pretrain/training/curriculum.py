"""What changes from phase to phase: the order of the data, the positions of the model. No torch."""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from ds_pretrain.config.plan import Plan
from ds_pretrain.config.schema import PhaseSection
from ds_pretrain.config.timeline import chunk_problems
from ds_pretrain.core.errors import InputError
from ds_pretrain.core.state import SkipLedger
from ds_pretrain.core.text import counted
from ds_pretrain.data.indexed import TokenSource
from ds_pretrain.data.sampler import Sampler, make_sampler
from ds_pretrain.data.usage import forecast_lines, usage_lines, usage_problems
from ds_pretrain.data.validation_set import SHORTEST_PROMPT, prompt_lengths
from ds_pretrain.models import rope_config
from ds_pretrain.models.config_check import asks_transformers, masking_problems
from ds_pretrain.models.rope_config import (
    describe_rope,
    has_rope,
    rope_change_problems,
    rope_change_warnings,
    with_rope,
)


def phase_models(plan: Plan) -> dict[str, dict[str, Any]]:
    """The model config of each phase: that of the phase before, with its own rotary positions and length."""
    return rope_config.phase_models(
        plan.model, ((phase.name, phase.rope, phase.seq_len) for phase in plan.run.phases)
    )


def model_text(plan: Plan, step: int) -> str:
    """The model config of what `step` finished steps have trained: the file, if no phase changed it."""
    model = phase_models(plan)[plan.timeline.at(max(0, step - 1)).phase]
    return plan.model_text if model == plan.model else json.dumps(model, indent=2) + "\n"


def open_sampler(plan: Plan, sources: Mapping[str, TokenSource]) -> Sampler:
    """The order of a run's data."""
    return make_sampler(plan.run.seed, plan.timeline, mixtures(plan), sources, plan.chunk_tokens)


def mixtures(plan: Plan) -> dict[str, dict[str, float]]:
    """The weights of each phase."""
    return {phase.name: dict(phase.mixture) for phase in plan.run.phases}


def model_problems(plan: Plan) -> Iterator[str]:
    """Phases that the model cannot have: lengths, rotary positions, documents kept apart.

    Where Transformers is not asked, its defaults are not known, and a change of positions is not judged.
    """
    model: dict[str, Any] = dict(plan.model)
    for index, phase in enumerate(plan.run.phases):
        where = f"{plan.run_path}: phases.{phase.name}"
        if not asks_transformers():
            yield from _length_problems(plan, phase, where) if index == 0 and phase.rope is None else ()
            continue
        if (index == 0 and phase.rope is None) or not has_rope(plan.model):
            yield from _length_problems(plan, phase, where)
            if phase.rope is not None:
                yield from rope_change_problems(model, phase.rope, phase.seq_len, f"{where}.rope")
        elif problems := rope_change_problems(model, phase.rope, phase.seq_len, f"{where}.rope"):
            yield from problems
            return
        model = with_rope(model, phase.rope, phase.seq_len)
    if plan.run.model.mask_documents:
        yield from (f"{plan.run_path}: {p}" for p in masking_problems(plan.model, plan.run.model.attention))


def data_problems(plan: Plan, sources: Mapping[str, TokenSource]) -> list[str]:
    """Phases that the sources cannot feed, or validation cannot ask: lengths, or too many epochs."""
    lengths = {phase.name: phase.seq_len for phase in plan.run.phases}
    problems = chunk_problems(lengths, mixtures(plan), plan.chunk_tokens)
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
            problems = usage_problems(open_sampler(plan, sources), _max_epochs(plan))
    return [f"{plan.run_path}: {problem}" for problem in (*problems, *_retrieval_problems(plan))]


def curriculum_lines(plan: Plan, sources: Mapping[str, TokenSource]) -> Iterator[str]:
    """What a person is told of it."""
    model: dict[str, Any] = dict(plan.model)
    for phase in plan.run.phases if asks_transformers() else ():
        warnings = rope_change_warnings(model, phase.rope, phase.seq_len, f"phases.{phase.name}")
        model = with_rope(model, phase.rope, phase.seq_len)
        if len(plan.run.phases) > 1 or phase.rope is not None:
            yield f"positions  {phase.name}: {describe_rope(model)}"
        yield from (f"warning    {warning}" for warning in warnings)
    yield from usage_lines(open_sampler(plan, sources), sources)
    if short := _too_short_for_prompts(plan):
        yield (
            f"validation no key is asked for in {', '.join(short)}: a prompt has at least {SHORTEST_PROMPT} "
            "tokens"
        )


def skipped_lines(plan: Plan, sources: Mapping[str, TokenSource], ledger: SkipLedger) -> Iterator[str]:
    """What the skips of a run that goes on have changed in the use of its data; nothing without skips.

    A `max_epochs` that is passed because of them is a warning: it was kept when the run was started.
    """
    if not ledger.skips:
        return
    sampler = open_sampler(plan, sources)
    phases = {phase: sum(stop - start for start, stop in ledger.merged(phase)) for phase in sampler.mixtures}
    left_out = ", ".join(f"{counted(n, 'sample')} of {phase}" for phase, n in phases.items() if n)
    yield f"skipped    {left_out}; with these left out the data of the run is:"
    yield from forecast_lines(sampler, sources, ledger)
    for problem in usage_problems(sampler, _max_epochs(plan), ledger):
        yield f"warning    because of what is skipped, {problem}"


def _asks_for_keys(plan: Plan) -> bool:
    return plan.run.validation is not None and plan.run.validation.retrieval


def _too_short_for_prompts(plan: Plan) -> list[str]:
    """Phases whose samples hold no prompt, where prompts are asked for."""
    short = (phase for phase in plan.run.phases if _asks_for_keys(plan) and phase.seq_len < SHORTEST_PROMPT)
    return [f"phases.{phase.name}.seq_len = {phase.seq_len}" for phase in short]


def _retrieval_problems(plan: Plan) -> Iterator[str]:
    short = _too_short_for_prompts(plan)
    if len(short) == len(plan.run.phases):
        yield (
            f"validation.retrieval = true hides keys in prompts of at least {SHORTEST_PROMPT} tokens, and no "
            f"phase has samples as long: {', '.join(short)}; make one at least {SHORTEST_PROMPT}, or set "
            "validation.retrieval = false"
        )
    shared = plan.sequence_parallel_size
    prompts = {
        n for phase in plan.run.phases for n in prompt_lengths(phase.seq_len) if phase.seq_len % shared == 0
    }
    if _asks_for_keys(plan) and (odd := sorted(n for n in prompts if n % shared)):
        yield (
            f"validation.retrieval = true asks in prompts of {', '.join(map(str, odd))} tokens, which "
            f"sequence_parallel_size = {shared} of {plan.run.deepspeed} does not divide; set it to false, or "
            "take a power of two"
        )


def _max_epochs(plan: Plan) -> dict[str, float | None]:
    return {name: section.max_epochs for name, section in plan.run.sources.items()}


def _length_problems(plan: Plan, phase: PhaseSection, where: str) -> Iterator[str]:
    """The first phase, and each of a model with learned positions, has to fit into the model as it is."""
    key = "max_position_embeddings" if "max_position_embeddings" in plan.model else "n_positions"
    limit, seq_len = plan.model.get(key), phase.seq_len
    if isinstance(limit, int) and seq_len > limit:
        ways = "raise the one or lower the other"
        if has_rope(plan.model):
            ways += f", or extend the model with phases.{phase.name}.rope (a theta, or a kind with a factor)"
        length = f"{where}.seq_len = {seq_len:,}"
        yield f"{length} is longer than {key} = {limit:,} in {plan.run.model.config}; {ways}"
