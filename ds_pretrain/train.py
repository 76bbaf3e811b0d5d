"""The loop, and the module that the deepspeed launcher starts on every rank.

    deepspeed [--hostfile F] --module ds_pretrain.train RUN.toml [section.key=value ...]

The only file that knows every part. Shapes: B sequences of a micro-batch, T tokens of a sequence, V vocabulary.
"""

import argparse
import json
import platform
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from time import perf_counter
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ds_pretrain.checkpoint import store
from ds_pretrain.checkpoint.layout import Manifest
from ds_pretrain.checkpoint.rng import capture_streams, restore_streams, seed_streams
from ds_pretrain.checkpoint.triggers import WallClock, due_by_count
from ds_pretrain.data.feed import Batch, Feed
from ds_pretrain.data.sampler import make_sampler
from ds_pretrain.data.validation import ValidationSet, make_validation_set, validation_batches
from ds_pretrain.deepspeed_json import resolve_deepspeed, zero_stage
from ds_pretrain.engine import (
    Engine,
    Update,
    dtype_of,
    gather,
    initialize_distributed,
    open_engine,
    partition,
)
from ds_pretrain.errors import EXIT_FAILED, EXIT_FINISHED, InputError, NoProgress, Preempted, RunError
from ds_pretrain.files import write_atomic
from ds_pretrain.models.build import build_model
from ds_pretrain.models.flops import flops_per_token
from ds_pretrain.models.groups import parameter_groups
from ds_pretrain.models.loss import cross_entropy_and_z
from ds_pretrain.models.rope import restore_rotary
from ds_pretrain.monitor.monitor import Monitor
from ds_pretrain.monitor.peak import peak_flops
from ds_pretrain.monitor.sinks import say
from ds_pretrain.monitor.wandb import WandbRun
from ds_pretrain.plan import Plan, load_plan
from ds_pretrain.preflight import Inputs, find_problems, open_inputs, summary
from ds_pretrain.rank_files import record_exit, record_rank
from ds_pretrain.record import StepRecord
from ds_pretrain.run_directory import RunRecord, claim, note_saved
from ds_pretrain.state import RunState
from ds_pretrain.stop import StopSignal
from ds_pretrain.world import World, barrier, from_main, gather_objects, gather_rows

Shared = TypeVar("Shared")


@dataclass(frozen=True)
class Asked:
    """What some rank asked for and all ranks now know."""

    stop: bool
    save: bool


def train(plan: Plan, world: World, stop: StopSignal) -> None:
    """Train to the last step, surviving preemption: the run goes on where its newest checkpoint stands.

    Raises:
        InputError: something that a person has to change; found before the run directory is touched.
        Preempted: asked to stop; everything is saved.
        NoProgress: every update of this start was dropped.
    """
    inputs = prepare_inputs(plan, world)
    found = store.find(plan.out / "checkpoints", world, _tell(world))
    _refuse_past_end(found, plan)
    known = (found.state.step, found.manifest.wandb_id) if found else (None, None)
    record = _shared(world, lambda: claim(plan, *known))
    announce(plan, inputs, world)
    record_rank(plan.out, world.rank)
    engine = open_run_engine(plan, world)
    saver = Saver(plan, record, engine, world)
    num_attempted = num_applied = 0
    with open_monitor(plan, record, world) as monitor, open_feed(plan, inputs, world) as feed:
        state = _resume(found, engine, plan, monitor, world)
        validation = validation_sets(plan, inputs)
        while state.step < plan.last_step:
            started = perf_counter()
            batch = feed.at(state)
            losses, update = take_step(
                engine, batch, plan.schedule.rate(state.step), plan.run.model.z_loss, world
            )
            step, asked = measure(plan, state, batch, losses, update, started, saver, stop, world)
            monitor.step(step)
            state = state.after_step()
            num_attempted, num_applied = num_attempted + 1, num_applied + step.update_applied
            if validation and validation_due(plan, state):
                monitor.validation(state.step, evaluate(engine, plan, validation, world))
            if asked.save or asked.stop or saver.is_due(state):
                saver.save(state, monitor)
            if asked.stop:
                monitor.event("stop", step=state.step)
                raise Preempted(
                    f"stopped after step {state.step:,}, saved; the same command goes on from there"
                )
    if num_attempted and not num_applied:
        raise NoProgress(
            f"{num_attempted} steps were attempted and every update was dropped (non-finite gradients); nothing was "
            "learned since the checkpoint that this start began from: lower schedule.peak, or check the data"
        )


def prepare_inputs(plan: Plan, world: World) -> Inputs:
    """Open the data on every rank and check all that can be checked without an engine. Collective.

    Raises:
        InputError: on every rank, with every rank's problems.
    """
    problems: list[str] = []
    inputs = Inputs({}, {})
    try:
        inputs = open_inputs(plan)
        if world.is_main:
            problems = find_problems(plan, inputs, world.size, "the launcher")
    except InputError as error:
        problems = list(error.problems)
    everyone = dict.fromkeys(p for rank in gather_objects(world, problems) for p in rank)
    if everyone:
        raise InputError(everyone)
    return inputs


def announce(plan: Plan, inputs: Inputs, world: World) -> None:
    """Print the resolved run, and keep what it is made of in the run directory."""
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


def open_run_engine(plan: Plan, world: World) -> Engine:
    """Build the model and hand it to DeepSpeed. Collective."""
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
    )
    groups = parameter_groups(model.module, decay_embeddings=plan.run.model.decay_embeddings)
    engine = open_engine(model.module, groups, config)
    restore_rotary(model.module)  # the engine casts buffers too, and rounded angles collide far out
    if world.is_main:
        say(sys.stdout, f"built      {model.num_parameters:,} parameters; QK-norm: {model.qk_norm or 'off'}")
        for kind in model.weights:
            say(
                sys.stdout,
                f"weights    {kind.kind}: std {kind.measured_std:.5f}, asked {kind.asked_std:.5f}, "
                f"{kind.num_weights:,} weights",
            )
    return engine


def take_step(
    engine: Engine, batch: Batch, rate: float, z_loss: float | None, world: World
) -> tuple[Tensor, Update]:
    """One update on this rank's part of the global batch: this rank's sums of cross-entropy and z-loss, [2].

    Each micro-batch adds its sum over valid tokens, divided by the valid tokens of the whole global batch, so the
    gradient does not depend on the split. DeepSpeed averages over ranks; `world.size` makes that a sum. Collective.
    """
    scale = world.size / max(1, batch.num_valid_tokens)
    sums = torch.zeros(2, dtype=torch.float64, device=engine.device)
    for input_ids, labels in batch.micro_batches:
        logits = engine.logits(input_ids.to(engine.device, non_blocking=True))  # [B, T, V]
        nll, z = cross_entropy_and_z(logits, labels.to(engine.device, non_blocking=True), z_loss)
        engine.backward((nll + z) * scale)
        sums += torch.stack([nll.detach(), z.detach()])
    return sums, engine.step(rate)


def measure(
    plan: Plan,
    state: RunState,
    batch: Batch,
    losses: Tensor,
    update: Update,
    started: float,
    saver: "Saver",
    stop: StopSignal,
    world: World,
) -> tuple[StepRecord, Asked]:
    """The step's numbers over all ranks, and what any rank asked for: the one reduction of a step. Collective."""
    nll, z = losses.tolist()
    num_valid = sum(int((m.labels >= 0).sum()) for m in batch.micro_batches)
    row = [nll, z, num_valid, batch.checksum, batch.wait_seconds, perf_counter() - started]
    rows = gather_rows(world, [*row, stop.is_asked(), saver.is_due_by_clock()])  # [W, 8]
    sums, most = rows.sum(axis=0), rows.max(axis=0)
    step = state.step + 1
    record = StepRecord(
        step=step,
        phase=plan.timeline.at(state.step).phase,
        loss=float(sums[0] / max(1, sums[2])),
        loss_max_rank=float((rows[:, 0] / rows[:, 2].clip(min=1)).max()),
        z_loss=None if plan.run.model.z_loss is None else float(sums[1] / max(1, sums[2])),
        learning_rate=plan.schedule.rate(state.step),
        grad_norm=update.grad_norm,
        clip_factor=update.clip_factor,
        update_applied=update.applied,
        num_valid_tokens=int(sums[2]),
        num_valid_tokens_min_rank=int(rows[:, 2].min()),
        tokens=plan.timeline.tokens_before(step),
        samples=plan.timeline.samples_before(step),
        batch_checksum=int(sums[3]),
        step_seconds=float(most[5]),
        data_wait_seconds=float(most[4]),
    )
    return record, Asked(stop=bool(most[6]), save=bool(most[7]))


def evaluate(engine: Engine, plan: Plan, sets: Sequence[ValidationSet], world: World) -> dict[str, float]:
    """Mean cross-entropy of each validation source, in nats a token. No random stream moves. Collective."""
    streams = capture_streams()
    losses = {}
    with engine.evaluating():
        for chosen in sets:
            nll, count = 0.0, 0
            for input_ids, labels in validation_batches(chosen, world, plan.run.batch.micro_sequences):
                logits = engine.logits(input_ids.to(engine.device))  # [B, T, V]
                nll += cross_entropy_and_z(logits, labels.to(engine.device), None)[0].item()
                count += int((labels >= 0).sum())
            total = gather_rows(world, [nll, count]).sum(axis=0)
            losses[chosen.name] = float(total[0] / total[1])
    restore_streams(streams)
    return losses


def validation_sets(plan: Plan, inputs: Inputs) -> list[ValidationSet]:
    """The fixed samples of each validation source."""
    if plan.run.validation is None:
        return []
    seq_len, tokens = plan.run.phases[0].seq_len, plan.run.validation.tokens
    return [make_validation_set(name, source, seq_len, tokens) for name, source in inputs.validation.items()]


def validation_due(plan: Plan, state: RunState) -> bool:
    """True at every multiple of `validation.every`, and after the last step."""
    assert plan.run.validation is not None
    due = due_by_count([plan.run.validation.every], state.step, plan.timeline)
    return due or state.step == plan.last_step


class Saver:
    """Saves checkpoints of one run when they are due."""

    def __init__(self, plan: Plan, record: RunRecord, engine: Engine, world: World) -> None:
        self._plan, self._record, self._engine, self._world = plan, record, engine, world
        self._clock = WallClock(plan.run.checkpoint.every)
        self._root = plan.out / "checkpoints"

    def is_due(self, state: RunState) -> bool:
        """By steps and tokens, and after the last step: the same on every rank."""
        triggers = self._plan.run.checkpoint.every
        return state.step == self._plan.last_step or due_by_count(triggers, state.step, self._plan.timeline)

    def is_due_by_clock(self) -> bool:
        """On rank 0 alone; shared by `measure`."""
        return self._world.is_main and self._clock.is_due()

    def save(self, state: RunState, monitor: Monitor) -> None:
        """Save, publish, prune. Collective."""
        started = perf_counter()
        texts = {
            "run.toml": self._plan.run_text,
            "deepspeed.json": self._plan.deepspeed_text,
            "model.json": self._plan.model_text,
        }
        saved = store.save(self._root, state, self._manifest(state), texts, self._engine, self._world)
        if self._world.is_main:
            note_saved(self._plan.out, state.step)
        store.prune(self._root, self._plan.run.checkpoint.keep, self._world, _tell(self._world))
        self._clock.restart()
        seconds = perf_counter() - started
        monitor.event("checkpoint", step=state.step, bytes=saved.total_bytes, seconds=seconds)

    def _manifest(self, state: RunState) -> Manifest:
        timeline = self._plan.timeline
        return Manifest(
            step=state.step,
            tokens=timeline.tokens_before(state.step),
            samples=timeline.samples_before(state.step),
            world_size=self._world.size,
            zero_stage=zero_stage(self._plan.deepspeed),
            versions={name: version(name) for name in ("ds-pretrain", "deepspeed", "torch", "transformers")},
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            attempt=self._record.attempt,
            wandb_id=self._record.wandb_id,
            overrides=self._plan.overrides,
            files={},
        )


def open_monitor(plan: Plan, record: RunRecord, world: World) -> Monitor:
    """The monitor of this start."""
    section, segment = plan.run.monitor, plan.timeline.segments[0]
    wandb = None
    if section.wandb != "off":
        wandb = WandbRun(record.wandb_id, section.wandb_project, plan.run.name, section.wandb)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return Monitor(
        out=plan.out,
        every=section.every,
        wandb=wandb,
        run_config=plan.run.model_dump(mode="json"),
        attempt=record.attempt,
        last_step=plan.last_step,
        tokens_per_step=segment.tokens_per_step,
        flops_per_token=flops_per_token(
            json.loads(plan.model_text), segment.seq_len, qk_norm=plan.run.model.qk_norm
        ),
        peak_flops_per_rank=peak_flops(device) if device else None,
        world=world,
    )


def open_feed(plan: Plan, inputs: Inputs, world: World) -> Feed:
    """The feed of this rank."""
    weights = {phase.name: phase.mixture for phase in plan.run.phases}
    sampler = make_sampler(plan.run.seed, plan.timeline, weights, inputs.sources)
    return Feed(sampler, inputs.sources, world, plan.run.batch.micro_sequences)


def main(argv: Sequence[str] | None = None) -> int:
    """Train the run file named on the command line; the exit code of this rank."""
    parser = argparse.ArgumentParser(prog="python -m ds_pretrain.train")
    parser.add_argument("run_file", metavar="RUN.toml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument(
        "--local_rank", help=argparse.SUPPRESS
    )  # the launcher adds it; LOCAL_RANK says the same
    words = parser.parse_intermixed_args(argv)
    world = World.from_environment()
    try:
        plan = load_plan(words.run_file, words.overrides)
    except InputError as error:
        _tell(world)(error)
        return error.exit_code
    with StopSignal(plan.out, world) as stop:
        try:
            initialize_distributed(world)
            train(plan, world, stop)
            code = EXIT_FINISHED
        except RunError as error:
            _tell(world)(error)
            code = error.exit_code
        except Exception:
            traceback.print_exc()
            code = EXIT_FAILED
        if world.is_main and plan.out.is_dir():
            record_exit(
                plan.out, code
            )  # while SIGTERM is only noted: the launcher ends us when a peer has ended
    if code == EXIT_FINISHED:
        barrier(world)
        dist.destroy_process_group()
    return code


def _resume(
    found: store.Found | None, engine: Engine, plan: Plan, monitor: Monitor, world: World
) -> RunState:
    if found is None:
        monitor.event("start", step=0, world_size=world.size)
        return RunState()
    state = store.restore(found, engine, world)
    if world.is_main:
        say(sys.stdout, f"resumed    {found.folder}: {state.step:,} of {plan.last_step:,} steps done")
    monitor.event("resume", step=state.step, world_size=world.size, checkpoint=found.folder.name)
    return state


def _resolved(plan: Plan) -> dict[str, Any]:
    return resolve_deepspeed(
        plan.deepspeed, peak=plan.run.schedule.peak, micro_sequences=plan.run.batch.micro_sequences
    )


def _refuse_past_end(found: store.Found | None, plan: Plan) -> None:
    if found is not None and found.state.step > plan.last_step:
        raise InputError(
            f"{found.folder} stands at step {found.state.step:,}, past the end of the schedule "
            f"({plan.last_step:,} steps); set schedule.length back, or give the run file a new `out`"
        )


def _shared(world: World, act: Callable[[], Shared]) -> Shared:
    """What rank 0 gets from `act`, or the InputError that it met, on every rank. Collective."""
    value, problems = None, None
    if world.is_main:
        try:
            value = act()
        except InputError as error:
            problems = error.problems
    value, problems = from_main(world, (value, problems))
    if problems is not None:
        raise InputError(problems)
    return cast(Shared, value)


def _tell(world: World) -> Callable[[object], None]:
    """A way to say something to a person, once: rank 0 speaks."""

    def tell(message: object) -> None:
        if world.is_main:
            say(sys.stderr, f"ds_pretrain: {message}")

    return tell


if __name__ == "__main__":
    sys.exit(main())
