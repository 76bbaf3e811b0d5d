"""From a plan to the parts that a loop needs, each opened on every rank."""

import hashlib
import json
import platform
import sys
from collections.abc import Sequence
from typing import Any

import torch

from ds_pretrain.checkpoint.rng import capture_streams, restore_streams, seed_streams
from ds_pretrain.config.deepspeed import resolve_deepspeed, uses_bf16
from ds_pretrain.config.plan import Plan
from ds_pretrain.core.distributed import World, gather_objects, uses_gpu
from ds_pretrain.core.errors import InputError, agreed
from ds_pretrain.core.files import write_atomic
from ds_pretrain.core.text import say
from ds_pretrain.data.loader import Feed
from ds_pretrain.data.validation_set import ValidationSet, make_validation_set
from ds_pretrain.engine.engine import Engine, dtype_of, gather, open_engine, partition
from ds_pretrain.engine.sequence_parallel import SharedSequences, refuse_unlike
from ds_pretrain.models.attention import document_inputs, refuse_leaks, replace_kernel, require_kernel
from ds_pretrain.models.build import build_model
from ds_pretrain.models.flops import flops_per_token, peak_flops
from ds_pretrain.models.init import KindReport
from ds_pretrain.models.param_groups import parameter_groups
from ds_pretrain.models.pretrained import Base
from ds_pretrain.models.rope import restore_rotary
from ds_pretrain.monitor.monitor import Monitor
from ds_pretrain.monitor.wandb import WandbRun
from ds_pretrain.training.curriculum import open_sampler, phase_models
from ds_pretrain.training.preflight import Inputs, build_problems, find_problems, open_inputs, summary
from ds_pretrain.training.record import RunRecord
from ds_pretrain.training.stages import Stages


def prepare_inputs(plan: Plan, world: World) -> Inputs:
    """Open the data on every rank and check all that can be checked without an engine. Collective.

    Raises:
        InputError: on every rank, with every rank's problems.
    """
    problems: list[str] = []
    inputs, seen = Inputs({}, {}), ""
    try:
        inputs = open_inputs(plan)
        seen = _digest(plan, inputs)
        if world.is_main:
            problems = find_problems(plan, inputs, world.size, "the launcher")
            problems += [] if problems else build_problems(plan, inputs.base)
    except InputError as error:
        problems = list(error.problems)
    told = gather_objects(world, (problems, seen, platform.node()))
    everyone = list(dict.fromkeys(p for problems, _, _ in told for p in problems))
    if not everyone:
        others = {node for _, digest, node in told if digest != told[0][1]}
        everyone = [
            f"{node} reads another run file, DeepSpeed JSON, model config or corpus than {told[0][2]} under "
            "the same paths; bring its copies up to date"
            for node in sorted(others)
        ]
    if everyone:
        raise agreed(InputError(everyone))
    return inputs


def _digest(plan: Plan, inputs: Inputs) -> str:
    """What this rank has read: equal only if it would train the same run."""
    data = {**inputs.data, **{name: source.fingerprint() for name, source in inputs.validation.items()}}
    texts = (plan.run_text, plan.deepspeed_text, plan.model_text, *plan.overrides, json.dumps(data))
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def announce(plan: Plan, inputs: Inputs, world: World) -> None:
    """Print the resolved run, and keep what it is made of in the run directory. Collective."""
    hosts = gather_objects(world, f"{platform.node()}:{world.local_rank}")
    if world.is_main:
        for line in summary(plan, inputs, world.size):
            say(sys.stdout, line)
        say(sys.stdout, f"ranks      {world.size}: {', '.join(hosts)}")
        write_atomic(plan.out / "run.toml", plan.run_text)
        write_atomic(plan.out / "model.json", plan.model_text)
        write_atomic(plan.out / "deepspeed_resolved.json", json.dumps(_resolved(plan), indent=1))
        write_atomic(
            plan.out / "ranks.json", json.dumps({"world_size": world.size, "ranks": hosts}, indent=1)
        )


def open_run_engine(plan: Plan, world: World, base: Base | None = None) -> Engine:
    """Build the model, with the weights of `base`, and hand it to DeepSpeed. Collective."""
    assert (base is None) == (plan.run.model.base is None)
    config = _resolved(plan)
    seed_streams(plan.run.seed, world.rank)
    model = build_model(
        plan.model_text,
        qk_norm=plan.run.model.qk_norm,
        recompute=plan.run.model.recompute,
        seed=plan.run.seed,
        dtype=dtype_of(config),
        world=world,
        partition=partition(config),
        gather=gather(config),
        attention=plan.run.model.attention,
        base=base,
    )
    groups = parameter_groups(model.module, decay_embeddings=plan.run.model.decay_embeddings)
    masked = plan.run.model.mask_documents
    documents = document_inputs(model.config, dtype_of(config)) if masked else None
    shared = None
    if plan.sequence_parallel_size > 1:
        require_kernel(model.module)  # before ranks meet in groups, which one that has left would break
        shared = SharedSequences(world, plan.sequence_parallel_size)
        replace_kernel(model.module, shared.spread)
    engine = open_engine(model.module, groups, config, documents, shared)
    restore_rotary(model.module)  # the engine casts buffers too, and rounded angles collide far out
    if world.is_main:
        say(sys.stdout, f"built      {model.num_parameters:,} parameters; QK-norm: {model.qk_norm or 'off'}")
        say(sys.stdout, f"weights    {_weights_line(base, model.weights)}")
    if masked:
        streams = capture_streams()
        with engine.evaluating():
            refuse_leaks(
                engine.logits, plan.model["vocab_size"], engine.device, model.config._attn_implementation
            )
        restore_streams(streams)
    if shared is not None:
        shortest = min(phase.seq_len for phase in plan.run.phases)
        size, dtype = plan.model["vocab_size"], dtype_of(config)
        streams = capture_streams()
        with engine.evaluating():
            refuse_unlike(engine.logits, shared, size, shortest, dtype, engine.device, world)
        restore_streams(streams)
    return engine


def _weights_line(base: Base | None, weights: Sequence[KindReport]) -> str:
    if base is not None:
        return f"{len(weights)} kinds loaded from {base.folder} (fingerprint {base.fingerprint})"
    drawn = [kind for kind in weights if kind.asked_std > 0]
    off = max((abs(kind.measured_std / kind.asked_std - 1) for kind in drawn), default=0.0)
    return f"{len(drawn)} kinds drawn, each std within {off:.1%} of what was asked"


def open_stages(plan: Plan, engine: Engine, world: World) -> Stages:
    """What puts the engine's model into the phase of a step."""
    return Stages(plan, engine.module, phase_models(plan), world)


def open_monitor(plan: Plan, record: RunRecord, world: World) -> Monitor:
    """The monitor of this start."""
    section = plan.run.monitor
    wandb = None
    if section.wandb != "off":
        wandb = WandbRun(record.wandb_id, section.wandb_project, plan.run.name, section.wandb)
    device = torch.cuda.get_device_name() if uses_gpu() else None
    return Monitor(
        out=plan.out,
        every=section.every,
        wandb=wandb,
        run_config=plan.run.model_dump(mode="json"),
        attempt=record.attempt,
        timeline=plan.timeline,
        flops_per_token={
            phase.name: flops_per_token(plan.model_text, phase.seq_len, qk_norm=plan.run.model.qk_norm)
            for phase in plan.run.phases
        },
        peak_flops_per_rank=peak_flops(device) if device and uses_bf16(plan.deepspeed) else None,
        world=world,
    )


def open_feed(plan: Plan, inputs: Inputs, world: World) -> Feed:
    """The feed of this rank, which is that of its neighbors where they share sequences."""
    micro = {phase.name: plan.run.micro_sequences(phase.name) for phase in plan.run.phases}
    sampler = open_sampler(plan, inputs.sources)
    readers = world.readers(plan.sequence_parallel_size)
    return Feed(sampler, inputs.sources, readers, micro, plan.run.model.mask_documents)


def validation_sets(plan: Plan, inputs: Inputs) -> dict[int, list[ValidationSet]]:
    """The fixed samples of each validation source, for each sequence length of the run."""
    if plan.run.validation is None:
        return {}
    tokens, masked = plan.run.validation.tokens, plan.run.model.mask_documents
    return {
        seq_len: [
            make_validation_set(name, source, seq_len, tokens, masked)
            for name, source in inputs.validation.items()
        ]
        for seq_len in sorted({phase.seq_len for phase in plan.run.phases})
    }


def _resolved(plan: Plan) -> dict[str, Any]:
    return resolve_deepspeed(
        plan.deepspeed, peak=plan.run.schedule.peak, micro_sequences=plan.run.batch.micro_sequences
    )
