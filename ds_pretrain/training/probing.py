"""The probe of a checkpoint: a loss taken at each save and compared after each restore.

B sequences of a micro-batch · T tokens of each.
"""

import json
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

import torch

from ds_pretrain.checkpoint.manifest import Manifest
from ds_pretrain.checkpoint.rng import capture_streams, restore_streams
from ds_pretrain.config.deepspeed import uses_bf16
from ds_pretrain.config.plan import Plan
from ds_pretrain.core.distributed import World, gather_rows
from ds_pretrain.core.errors import InputError, agreed
from ds_pretrain.core.metrics import Probe
from ds_pretrain.core.state import RunState
from ds_pretrain.data.loader import Batch, Feed, MicroBatch
from ds_pretrain.engine.engine import Engine
from ds_pretrain.models.loss import cross_entropy_and_z
from ds_pretrain.training.identity import identity_of
from ds_pretrain.training.meaning import positions_at

# Twenty times the difference that another number of ranks made in measurements: 6e-7 in fp32, 1e-4 in bf16.
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-3}


def probe_again(engine: Engine, batch: Batch, step: int, world: World) -> Probe:
    """The probe that the weights have on the first micro-batches of a batch already read. Collective.

    For a save after which no step comes. No random stream moves.
    """
    first = batch.micro_batches[0]
    rows = len(first.labels)
    leads = world.rank % engine.ranks_a_sequence == 0  # of those who read the same rows
    loss, checksum = _mean_loss(engine, [first], sum(batch.checksums[:rows]) if leads else 0, world)
    return Probe(step, loss, checksum, world.readers(engine.ranks_a_sequence).size, rows)


def check_probe(
    manifest: Manifest, state: RunState, engine: Engine, feed: Feed, plan: Plan, world: World
) -> str:
    """Compare the loss of restored weights with the one that was stored; what came of it. Collective.

    Raises:
        InputError: they differ by more than arithmetic explains, and `accept_changes` does not name "probe".
    """
    saved = manifest.probe
    if saved is None or not isfinite(saved.loss):
        return "no loss was stored with it to compare"
    there = manifest.world_size, saved.num_ranks
    here = world.size, world.readers(plan.sequence_parallel_size).size
    if there != here and (rates := _dropout(json.loads(plan.model_text))):
        return (
            f"its loss cannot be compared on other ranks: the model drops out at random ({', '.join(rates)})"
        )
    before = positions_at(manifest.identity, saved.step)
    now = positions_at(identity_of(plan, {}), saved.step)
    if before is not None and before != now:
        return (
            f"its loss cannot be compared: it is of step {saved.step + 1:,}, in phase "
            f"{plan.phase_at(saved.step).name}, whose rotary positions are others now"
        )
    if plan.timeline.at(saved.step).sequences // saved.num_ranks < saved.micro_sequences:
        return (
            f"its loss cannot be compared: it is of step {saved.step + 1:,}, which reads fewer sequences now"
        )
    then = RunState(saved.step, state.ledger)
    batches, checksum = feed.first_micro_batches(then, saved.num_ranks, saved.micro_sequences)
    if checksum != saved.checksum:
        return "its loss cannot be compared: the data there is not what it was"
    loss, _ = _mean_loss(engine, batches, 0, world)
    tolerance = TOLERANCE["bf16" if uses_bf16(plan.deepspeed) else "fp32"] * max(1.0, abs(saved.loss))
    if abs(loss - saved.loss) <= tolerance:
        return f"its loss on the first micro-batches of step {saved.step + 1:,} is what it was ({loss:.6f})"
    found = (
        f"the restored model has loss {loss:.6f} on the first micro-batches of step {saved.step + 1:,}, and "
        f"had {saved.loss:.6f} when it was saved"
    )
    if plan.accepts("probe"):
        return f'{found}; accepted, as accept_changes = ["probe"] says'
    raise agreed(
        InputError(
            f"{found}: its tensors are those that were saved, and it does not compute what they did; look "
            "for another version of a library, other attention kernels or sick hardware, or accept it with "
            'accept_changes = ["probe"]'
        )
    )


def _mean_loss(
    engine: Engine, batches: Sequence[MicroBatch], checksum: int, world: World
) -> tuple[float, int]:
    """Mean cross-entropy over the micro-batches of all ranks, in training mode, and the sum of checksums."""
    streams = capture_streams()
    nll, count = 0.0, 0
    with torch.no_grad():
        for micro in batches:
            there = micro.on(engine.device)
            logits = engine.logits(there.input_ids, there.documents)  # [B, T, V]
            nll += cross_entropy_and_z(logits, engine.own_tokens(there.labels), None)[0].item()
            count += int((engine.own_tokens(micro.labels) >= 0).sum())
    restore_streams(streams)
    total = gather_rows(world, [nll, count, checksum]).sum(axis=0)
    return float(total[0] / total[1]), int(total[2])


def _dropout(config: Mapping[str, Any]) -> list[str]:
    """The rates of dropout that a model config sets, in its own names."""
    return [
        f"{key} = {value}"
        for key, value in config.items()
        if key.endswith(("dropout", "_pdrop")) and isinstance(value, float) and value > 0
    ]
