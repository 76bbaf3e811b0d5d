"""Opens the parts that the loop needs from a plan, each proved on every rank."""

import json
import platform
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch
from torch import nn

from ds_pretrain.checkpoint.manifest import MANIFEST, parse_manifest
from ds_pretrain.checkpoint.remote import Remote, open_remote, reopen_remote
from ds_pretrain.checkpoint.rng import preserve_streams, seed_streams
from ds_pretrain.checkpoint.storage import StorageLayout
from ds_pretrain.config.deepspeed import uses_bf16
from ds_pretrain.config.plan import Plan
from ds_pretrain.core.distributed import (
    World,
    broadcast_from_main,
    gather_objects,
    run_on_each_rank,
    run_on_main,
    uses_gpu,
)
from ds_pretrain.core.errors import InputError, NeedsOperator, mark_agreed
from ds_pretrain.core.files import FileLock, ensure_writable_folder, write_atomic
from ds_pretrain.core.run_files import hold_run_directory
from ds_pretrain.core.text import say
from ds_pretrain.data.indexed import TokenSource
from ds_pretrain.data.loader import BatchLoader
from ds_pretrain.data.validation_set import ValidationSet, make_validation_set
from ds_pretrain.engine.engine import Engine, gather, get_dtype, open_engine, open_partitioning
from ds_pretrain.engine.sequence_parallel import SequenceParallel, refuse_unlike
from ds_pretrain.models.attention import bind_attention_inputs, refuse_leaks, replace_kernel, require_kernel
from ds_pretrain.models.build import build_model, set_recompute
from ds_pretrain.models.flops import flops_per_token, peak_flops
from ds_pretrain.models.init import KindReport
from ds_pretrain.models.param_groups import build_parameter_groups
from ds_pretrain.models.pretrained import Pretrained
from ds_pretrain.models.rope import apply_rope, restore_rotary
from ds_pretrain.models.rope_config import describe_rope
from ds_pretrain.monitor.monitor import Monitor
from ds_pretrain.monitor.wandb import WandbRun
from ds_pretrain.training.curriculum import open_sampler, resolve_phase_models
from ds_pretrain.training.record import RunRecord, read_record
from ds_pretrain.watchdog.rollback_log import RollbackLog, read_rollback_log


def claim_directory(plan: Plan, lock: FileLock, world: World) -> tuple[StorageLayout, RollbackLog]:
    """Take the run directory for this start: lock it, prove every folder and store, read its rollbacks.

    Collective.

    Raises:
        InputError: another start holds it, or a folder or a store cannot be used.
        NeedsOperator: the run died before it could end with this; it does now.
    """
    run_on_main(world, lambda: hold_run_directory(lock, plan.out, f"{plan.run_path}: out"))
    require_shared_folder(plan.out, world)
    storage = open_storage(plan, world)
    rollback_log = run_on_main(world, lambda: read_rollback_log(plan.out))
    if rollback_log.unreported is not None:
        raise mark_agreed(
            NeedsOperator(
                f"{rollback_log.unreported}\n(the run died before it could end with this; it does now)"
            )
        )
    return storage, rollback_log


def require_shared_folder(folder: Path, world: World, patience_seconds: float = 10.0) -> None:
    """Make sure that every rank sees what rank 0 writes in `folder`. Collective.

    Raises:
        InputError: a host has a folder of its own there; its checkpoints would be torn.
    """
    word, token = folder / ".shared", uuid.uuid4().hex
    run_on_main(world, lambda: write_atomic(word, token))
    expected, deadline = broadcast_from_main(world, token), monotonic() + patience_seconds
    while (sees := _can_read(word, expected)) is False and monotonic() < deadline:
        sleep(0.2)  # a network file system may show a new file late
    blind = {node for node, sees in gather_objects(world, (platform.node(), sees)) if not sees}
    if blind:
        raise mark_agreed(
            InputError(
                f"{folder.absolute()} is not the same folder on {', '.join(sorted(blind))}; `out` must lie "
                "on a file system that all hosts share"
            )
        )


def open_storage(plan: Plan, world: World) -> StorageLayout:
    """Open the storage of the run's checkpoints, proved to be usable and to match the run file. Collective.

    Raises:
        InputError: a folder or a store cannot be used, or hosts share what must be each one's own.
    """
    per_host = plan.run.checkpoint.local_dir is not None
    storage = StorageLayout(plan.checkpoints, plan.out, per_host, None, plan.run.checkpoint.verify)
    if per_host:
        _require_own_folders(storage, world)
    if plan.upload_to is None:
        return storage
    location = plan.upload_to
    run_on_main(world, lambda: _prove_location(plan, open_remote(location)))
    run_on_each_rank(world, lambda: reopen_remote(location).location)
    return replace(storage, remote=reopen_remote(location))


def _prove_location(plan: Plan, remote: Remote) -> None:
    record = read_record(plan.out)
    _refuse_other_run(remote, plan.run.name, None if record is None else record.wandb_id)


def label_remote(storage: StorageLayout, record: RunRecord) -> None:
    """Say at the remote place whose checkpoints lie there. On rank 0.

    Raises:
        InputError: they are another run's.
    """
    if storage.remote is not None:
        _refuse_other_run(storage.remote, record.name, record.wandb_id)
        if storage.remote.read_label() is None:
            storage.remote.write_label(json.dumps({"name": record.name, "run": record.wandb_id}).encode())


def _refuse_other_run(remote: Remote, name: str, run: str | None) -> None:
    """Raise InputError if the checkpoints at a place are of another name or run; None: no run of ours yet."""
    try:
        found = json.loads(remote.read_label() or b"{}") or _read_newest_owner(remote)
    except (OSError, ValueError):
        return  # whoever reads a checkpoint there says what is wrong
    if not isinstance(found, dict):
        raise InputError(
            f"checkpoint.upload_to = {remote.location} has a label of another program; choose another "
            f"location"
        )
    if found and (found.get("name") != name or run not in (None, found.get("run"))):
        raise InputError(
            f"checkpoint.upload_to = {remote.location} holds the checkpoints of another run "
            f"({json.dumps(found)[:200]}), and this one is {name!r}; give each run its own location"
        )


def _read_newest_owner(remote: Remote) -> dict[str, Any]:
    """Return the owner of the newest checkpoint at a remote without a label."""
    for step in remote.list_steps():
        manifest = parse_manifest((remote.read(step, MANIFEST) or b"").decode())
        return {"name": manifest.identity.get("name"), "run": manifest.wandb_id}
    return {}


def _require_own_folders(storage: StorageLayout, world: World) -> None:
    """Make sure that no two hosts save to one folder, where each has to have its own. Collective."""
    word = f".host_{world.rank:05d}"
    problem, mine = None, uuid.uuid4().hex
    if storage.is_leader(world):
        try:
            ensure_writable_folder(storage.root, "checkpoint.local_dir")
            write_atomic(storage.root / word, mine)
        except (InputError, OSError) as error:
            problem = str(error)
    told = gather_objects(world, (platform.node(), word if storage.is_leader(world) else None, mine, problem))
    problems = [p for _, _, _, p in told if p is not None]
    seen = [
        node
        for node, other, token, _ in told
        if other not in (None, word) and _can_read(storage.root / other, token)
    ]
    for sees in gather_objects(world, (platform.node(), seen) if storage.is_leader(world) else ("", [])):
        problems += [
            f"checkpoint.local_dir = {storage.root.parent} is the same folder on {sees[0]} and on {node}; "
            f"name a folder local to each host, or remove local_dir if all hosts share it"
            for node in sees[1]
        ]
    if problems:
        raise mark_agreed(InputError(list(dict.fromkeys(problems))))


def _can_read(path: Path, expected: str) -> bool:
    try:
        return path.read_text() == expected
    except OSError:
        return False


def open_run_engine(plan: Plan, world: World, pretrained: Pretrained | None = None) -> Engine:
    """Build the model, with the weights of `base`, and hand it to DeepSpeed. Collective."""
    assert (pretrained is None) == (plan.run.model.pretrained is None)
    config = plan.resolved_deepspeed
    seed_streams(plan.run.seed, world.rank)
    model = build_model(
        plan.model_text,
        qk_norm=plan.run.model.qk_norm,
        recompute=plan.run.model.activation_checkpointing,
        seed=plan.run.seed,
        dtype=get_dtype(config),
        world=world,
        partition=open_partitioning(config),
        gather=gather(config),
        attention=plan.run.model.attention,
        pretrained=pretrained,
    )
    groups = build_parameter_groups(model.module, decay_embeddings=plan.run.model.decay_embeddings)
    masked = plan.run.model.mask_documents
    documents = bind_attention_inputs(model.config, get_dtype(config)) if masked else None
    shared = None
    if plan.sequence_parallel_size > 1:
        require_kernel(model.module)  # before ranks meet in groups, which one that has left would break
        shared = SequenceParallel(world, plan.sequence_parallel_size)
        replace_kernel(model.module, shared.distribute)
    engine = open_engine(model.module, groups, config, documents, shared)
    restore_rotary(model.module)  # the engine casts buffers too, and rounded angles collide far out
    if world.is_main:
        say(sys.stdout, f"built      {model.num_parameters:,} parameters; QK-norm: {model.qk_norm or 'off'}")
        say(sys.stdout, f"init       {_format_weights(pretrained, model.weights)}")
    if masked:
        with preserve_streams(), engine.evaluation_mode():
            refuse_leaks(
                engine.logits, plan.model["vocab_size"], engine.device, model.config._attn_implementation
            )
    if shared is not None:
        shortest = min(phase.seq_len for phase in plan.run.phases)
        size, dtype = plan.model["vocab_size"], get_dtype(config)
        with preserve_streams(), engine.evaluation_mode():
            refuse_unlike(engine.logits, shared, size, shortest, dtype, engine.device, world)
    return engine


def _format_weights(pretrained: Pretrained | None, weights: Sequence[KindReport]) -> str:
    if pretrained is not None:
        return (
            f"{len(weights)} weight kinds loaded from {pretrained.folder} (fingerprint "
            f"{pretrained.fingerprint})"
        )
    drawn = [kind for kind in weights if kind.asked_std > 0]
    off = max((abs(kind.measured_std / kind.asked_std - 1) for kind in drawn), default=0.0)
    return f"{len(drawn)} weight kinds, std within {off:.1%} of target"


class PhaseSwitch:
    """The model of a run, and the phase that it is in."""

    def __init__(
        self, plan: Plan, module: nn.Module, models: Mapping[str, Mapping[str, Any]], world: World
    ) -> None:
        """`module` was built from the run's model config; `models` has that of each phase."""
        self._plan, self._module, self._models, self._world = plan, module, models, world
        self._phase: str | None = None

    def enter(self, step: int) -> None:
        """Be in the phase of the update that follows `step` finished steps: rotary positions, recomputation.

        On every rank, between two steps; nothing is communicated. Weights and optimizer are not touched.
        """
        phase = self._plan.phase_at(step)
        if phase.name == self._phase:
            return
        model = self._models[phase.name]
        num_tables = apply_rope(self._module, model)
        recompute = (
            self._plan.run.model.activation_checkpointing
            if phase.activation_checkpointing is None
            else phase.activation_checkpointing
        )
        set_recompute(self._module, recompute)
        if self._world.is_main and (self._phase is not None or num_tables):
            start = self._plan.timeline.phase_start(phase.name)
            begun = f"from step {start:,}" if step == start else f"at step {step:,}, begun at step {start:,}"
            say(sys.stdout, f"phase      {phase.name} {begun}: {describe_rope(model)}")
        self._phase = phase.name


def open_phases(plan: Plan, engine: Engine, world: World) -> PhaseSwitch:
    """Open what puts the engine's model into the phase of a step."""
    return PhaseSwitch(plan, engine.module, resolve_phase_models(plan), world)


def open_monitor(plan: Plan, record: RunRecord, world: World) -> Monitor:
    """The monitor of this start."""
    section = plan.run.monitor
    wandb = None
    if section.wandb != "off":
        wandb = WandbRun(record.wandb_id, section.wandb_project, plan.run.name, section.wandb)
    device = torch.cuda.get_device_name() if uses_gpu() else None
    return Monitor(
        out=plan.out,
        every=section.log_every,
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


def open_loader(plan: Plan, sources: Mapping[str, TokenSource], world: World) -> BatchLoader:
    """The loader of this rank, which is that of its neighbors where they share sequences."""
    micro = {phase.name: plan.run.micro_batch_size(phase.name) for phase in plan.run.phases}
    sampler = open_sampler(plan, sources)
    readers = world.data_parallel_world(plan.sequence_parallel_size)
    return BatchLoader(sampler, sources, readers, micro, plan.run.model.mask_documents)


def open_validation_sets(plan: Plan, held_out: Mapping[str, TokenSource]) -> dict[int, list[ValidationSet]]:
    """The fixed samples of each validation source, for each sequence length of the run."""
    if plan.run.validation is None:
        return {}
    tokens, masked = plan.run.validation.tokens, plan.run.model.mask_documents
    return {
        seq_len: [
            make_validation_set(name, source, seq_len, tokens, masked) for name, source in held_out.items()
        ]
        for seq_len in sorted({phase.seq_len for phase in plan.run.phases})
    }
