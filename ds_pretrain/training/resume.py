"""Decides where a start begins: its own newest checkpoint, another run's, or step 0; then restores it.

The probe of a checkpoint is a loss taken at each save and compared after each restore.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from pathlib import Path
from time import perf_counter
from typing import Any

from ds_pretrain.checkpoint import restore
from ds_pretrain.checkpoint.manifest import Manifest
from ds_pretrain.checkpoint.rng import preserve_streams
from ds_pretrain.checkpoint.storage import StorageLayout
from ds_pretrain.checkpoint.verify import Found
from ds_pretrain.config.deepspeed import uses_bf16
from ds_pretrain.config.plan import Plan
from ds_pretrain.core.distributed import World, gather_rows, log
from ds_pretrain.core.errors import InputError, mark_agreed
from ds_pretrain.core.metrics import IGNORED, Probe
from ds_pretrain.core.state import RunState
from ds_pretrain.core.text import say
from ds_pretrain.data.loader import Batch, BatchLoader, MicroBatch
from ds_pretrain.engine.engine import Engine
from ds_pretrain.monitor.monitor import Monitor
from ds_pretrain.training.compatibility import compute_identity, format_with_unit, list_ropes_until
from ds_pretrain.training.record import KnownRun, RunRecord
from ds_pretrain.training.step import compute_token_losses, sum_losses
from ds_pretrain.watchdog.rollback_log import RollbackLog

# Twenty times the difference that another number of ranks made in measurements: 6e-7 in fp32, 1e-4 in bf16.
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-3}


@dataclass(frozen=True)
class StartOptions:
    """The options of one start, from the command line and in no run file."""

    stop_after: int | None = None  # this step ends the start as a request to stop would
    trust_pickle: bool = False  # open a checkpoint at `resume_from` that has no manifest


DEFAULT_OPTIONS = StartOptions()


def read_known_run(found: Found | None) -> KnownRun | None:
    """Return the run that a checkpoint describes."""
    return None if found is None else KnownRun.of(found.folder, found.manifest, found.state)


def find_start(
    plan: Plan, options: StartOptions, storage: StorageLayout, rollback_log: RollbackLog, world: World
) -> tuple[Found | None, Found | None]:
    """Find where a start begins: the newest checkpoint of the run's own, or else that of another run.

    Collective.

    Raises:
        InputError: the checkpoint does not verify, or the run stands where this start cannot continue.
    """
    is_left = partial(rollback_log.is_abandoned, heeds_stop=plan.run.watchdog.mode == "act")
    own, origin = restore.find_latest(storage, world, is_left), None
    if own is None:
        origin = _find_origin(plan, options, world)
    refuse_step(own or origin, plan, options)
    return own, origin


def _find_origin(plan: Plan, options: StartOptions, world: World) -> Found | None:
    if plan.run.resume_from is None:
        return None
    accepted = (*plan.run.accept_missing, *(("manifest",) if options.trust_pickle else ()))
    return restore.open_external(Path(plan.run.resume_from), accepted, world)


def resume(
    found: Found | None,
    engine: Engine,
    enter_phase: Callable[[int], None],
    loader: BatchLoader,
    plan: Plan,
    monitor: Monitor,
    began: float,
    world: World,
) -> RunState:
    """Load what was found, or begin at step 0; `began` is when this start did. Collective."""
    if found is None:
        monitor.event("start", step=0, world_size=world.size, **plan.sharing)
        return RunState()
    state = restore.restore(found, engine, plan.run.seed, world)
    if found.manifest.probe is not None:
        enter_phase(found.manifest.probe.step)
    probed = check_probe(found.manifest, state, engine, loader, plan, world)
    if world.is_main:
        say(
            sys.stdout,
            f"resume     step {state.step:,}/{plan.last_step:,} from {found.folder} ({probed})",
        )
    monitor.event(
        "resume",
        step=state.step,
        tokens=plan.timeline.tokens_before(state.step),
        world_size=world.size,
        **plan.sharing,
        checkpoint=found.folder.name,
        probe=probed,
        restore_seconds=perf_counter() - began,
    )
    return state


def report_changes(record: RunRecord, monitor: Monitor) -> None:
    """Report the fields that differ from the previous start: accepted, or still ahead."""
    for change in record.changes:
        if change["attempt"] == record.attempt:
            field, old, new = (change[key] for key in ("field", "old", "new"))
            now, before = format_with_unit(field, new), format_with_unit(field, old)
            log.info(f"`{field}` is {now} from this start on; it was {before}")
            monitor.event("config_changed", field=field, old=before, new=now)


def refuse_step(found: Found | None, plan: Plan, options: StartOptions) -> None:
    """Refuse a start that contradicts the step of its checkpoint."""
    stands = 0 if found is None else found.state.step
    if found is not None and stands > plan.last_step:
        raise mark_agreed(
            InputError(
                f"{found.folder} is at step {stands:,}, beyond the schedule ({plan.last_step:,} steps); "
                f"restore schedule.length, or give the run file a new `out`"
            )
        )
    if options.stop_after is not None and not stands < options.stop_after <= plan.last_step:
        raise mark_agreed(
            InputError(
                f"--stop-after {options.stop_after}: the run is at step {stands:,} of {plan.last_step:,}; "
                f"give a later step"
            )
        )


def repeat_probe(engine: Engine, batch: Batch, step: int, world: World) -> Probe:
    """The probe that the weights have on the first micro-batches of a batch already read. Collective.

    For a save after which no step comes. No random stream moves.
    """
    first = batch.micro_batches[0]
    rows = len(first.labels)
    leads = world.rank % engine.sequence_parallel_size == 0  # of those who read the same rows
    loss, checksum = _compute_mean_loss(engine, [first], sum(batch.checksums[:rows]) if leads else 0, world)
    return Probe(step, loss, checksum, world.data_parallel_world(engine.sequence_parallel_size).size, rows)


def check_probe(
    manifest: Manifest, state: RunState, engine: Engine, loader: BatchLoader, plan: Plan, world: World
) -> str:
    """Compare the loss of restored weights with the one that was stored; what came of it. Collective.

    Raises:
        InputError: they differ by more than arithmetic explains, and `accept_changes` does not name "probe".
    """
    saved = manifest.probe
    if saved is None or not isfinite(saved.loss):
        return "no probe loss in the checkpoint"
    there = manifest.world_size, saved.num_ranks
    here = world.size, world.data_parallel_world(plan.sequence_parallel_size).size
    if there != here and (rates := _find_dropout(json.loads(plan.model_text))):
        return f"probe loss not compared: another world size, and the model has dropout ({', '.join(rates)})"
    before, now = (
        list_ropes_until(one, saved.step) for one in (manifest.identity, compute_identity(plan, {}))
    )
    if before != now:
        return (
            f"probe loss not compared: it is of step {saved.step + 1:,}, in phase "
            f"{plan.phase_at(saved.step).name}, whose rope changed"
        )
    if plan.timeline.at(saved.step).sequences // saved.num_ranks < saved.micro_batch_size:
        return f"probe loss not compared: it is of step {saved.step + 1:,}, which now reads fewer sequences"
    then = RunState(saved.step, state.ledger)
    batches, checksum = loader.first_micro_batches(then, saved.num_ranks, saved.micro_batch_size)
    if checksum != saved.checksum:
        return "probe loss not compared: the data of its step changed"
    loss, _ = _compute_mean_loss(engine, batches, 0, world)
    tolerance = TOLERANCE["bf16" if uses_bf16(plan.deepspeed) else "fp32"] * max(1.0, abs(saved.loss))
    if abs(loss - saved.loss) <= tolerance:
        return f"probe loss {loss:.6f} at step {saved.step + 1:,}, matches"
    found = (
        f"the restored model has loss {loss:.6f} on the first micro-batches of step {saved.step + 1:,}, and "
        f"had {saved.loss:.6f} when it was saved"
    )
    if plan.accepts("probe"):
        return f'{found}; accepted, as accept_changes = ["probe"] says'
    raise mark_agreed(
        InputError(
            f"{found}: the tensors are as saved, but they compute something else; check library versions, "
            'attention kernels and hardware, or accept it with accept_changes = ["probe"]'
        )
    )


def _compute_mean_loss(
    engine: Engine, batches: Sequence[MicroBatch], checksum: int, world: World
) -> tuple[float, int]:
    """Mean cross-entropy over the micro-batches of all ranks, in training mode, and the sum of checksums."""
    nll, count = 0.0, 0
    with preserve_streams():
        for micro in batches:
            losses, labels = compute_token_losses(engine, micro)  # [B, T] each
            nll += sum_losses(losses)
            count += int((labels != IGNORED).sum())
    total = gather_rows(world, [nll, count, checksum]).sum(axis=0)
    return float(total[0] / total[1]), int(total[2])


def _find_dropout(config: Mapping[str, Any]) -> list[str]:
    """The rates of dropout that a model config sets, in its own names."""
    return [
        f"{key} = {value}"
        for key, value in config.items()
        if key.endswith(("dropout", "_pdrop")) and isinstance(value, float) and value > 0
    ]
