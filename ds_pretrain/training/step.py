"""One optimizer step and what it measured. B sequences · T tokens of each · V vocabulary."""

from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds_pretrain.config.plan import Plan
from ds_pretrain.core.distributed import World, gather_rows
from ds_pretrain.core.metrics import Probe, StepRecord
from ds_pretrain.core.state import RunState
from ds_pretrain.data.loader import Batch, MicroBatch
from ds_pretrain.engine.engine import Engine, Update
from ds_pretrain.models.loss import cross_entropy_and_z, token_losses


@dataclass(frozen=True)
class RankSignals:
    """The requests of one rank, and the progress of its part of the current save."""

    stop: bool
    save: bool
    save_progress: int


@dataclass(frozen=True)
class ReducedSignals:
    """The requests of all ranks, reduced, with what they know of the previous step."""

    stop: bool
    save: bool
    save_progress: tuple[int, ...]  # of each rank's part of the save under way
    rank_losses: tuple[float, ...]  # the mean loss of each rank, or of the group that it shares sequences in;
    # empty where all share them, which tells no rank from another
    probe: Probe  # of the weights before the step


def take_step(
    engine: Engine,
    batch: Batch,
    rate: float,
    z_loss: float | None,
    world: World,
    norm_limit: float | None = None,
) -> tuple[Tensor, Update]:
    """One update on this rank's part of the global batch, skipped if its gradient norm is above the limit.

    This rank's sums of cross-entropy and z-loss, and of the cross-entropy of the first micro-batch: [3].

    Each micro-batch adds its sum over valid tokens, divided by the valid tokens of the whole global batch, so
    the gradient does not depend on the split, be it of rows or of tokens. DeepSpeed averages over ranks;
    `world.size` makes that a sum.
    Collective.
    """
    scale = world.size / max(1, batch.num_valid_tokens)
    sums = torch.zeros(3, dtype=torch.float64, device=engine.device)
    for index, micro in enumerate(batch.micro_batches):
        there = micro.to(engine.device)
        logits = engine.logits(there.input_ids, there.documents)  # [B, T, V]
        nll, z = cross_entropy_and_z(logits, engine.local_shard(there.labels), z_loss)
        engine.backward((nll + z) * scale)
        first = nll.detach() if index == 0 else torch.zeros_like(nll)
        sums += torch.stack([nll.detach(), z.detach(), first])
    return sums, engine.step(rate, norm_limit)


def compute_token_losses(engine: Engine, micro: MicroBatch) -> tuple[Tensor, Tensor]:
    """The losses of this rank's tokens without a gradient, 0 where ignored, and their labels: [B, T] each."""
    there = micro.to(engine.device)
    with torch.no_grad():
        logits = engine.logits(there.input_ids, there.documents)  # [B, T, V]
    labels = engine.local_shard(there.labels)  # [B, T]
    return token_losses(logits, labels), labels


def sum_losses(losses: Tensor) -> float:
    """Sum token losses as training does: in fp64, rounded to fp32."""
    return losses.sum(dtype=torch.float64).float().item()


def measure(
    plan: Plan,
    state: RunState,
    batch: Batch,
    rate: float,
    losses: Tensor,
    update: Update,
    started: float,
    signals: RankSignals,
    world: World,
) -> tuple[StepRecord, ReducedSignals]:
    """The step's numbers over all ranks, and what any rank asked for: its one reduction. Collective."""
    nll, z, first_nll = losses.tolist()
    num_valid = sum(int((m.labels >= 0).sum()) for m in batch.micro_batches)
    row = [nll, z, num_valid, sum(batch.checksums), batch.wait_seconds, perf_counter() - started]
    asked = [signals.stop, signals.save, signals.save_progress]
    first = batch.micro_batches[0].labels
    probed = [first_nll, int((first >= 0).sum()), sum(batch.checksums[: len(first)])]
    rows = gather_rows(world, [*row, *asked, *probed])  # [W, 12]
    read = group_by_data_parallel_rank(rows, plan.sequence_parallel_size)  # [R, 12]
    sums, most = read.sum(axis=0), rows.max(axis=0)
    losses_read = read[:, 0] / read[:, 2].clip(min=1)  # [R]
    others = sums - read[losses_read.argmax()]
    step = state.step + 1
    record = StepRecord(
        step=step,
        phase=plan.timeline.at(state.step).phase,
        loss=float(sums[0] / max(1, sums[2])),
        loss_max_rank=float(losses_read.max()),
        loss_other_ranks=float(others[0] / others[2]) if others[2] else None,
        z_loss=None if plan.run.model.z_loss is None else float(sums[1] / max(1, sums[2])),
        learning_rate=rate,
        grad_norm=update.grad_norm,
        clip_factor=update.clip_factor,
        update_applied=update.applied,
        num_valid_tokens=int(sums[2]),
        num_valid_tokens_min_rank=int(read[:, 2].min()),
        tokens=plan.timeline.tokens_before(step),
        samples=plan.timeline.samples_before(step),
        batch_checksum=int(sums[3]),
        step_seconds=float(most[5]),
        data_wait_seconds=float(most[4]),
    )
    save_progress = tuple(int(progress) for progress in rows[:, 8])
    probe = Probe(state.step, float(sums[9] / sums[10]), int(sums[11]), len(read), len(first))
    return record, ReducedSignals(
        stop=bool(most[6]),
        save=bool(most[7]),
        save_progress=save_progress,
        rank_losses=_compute_rank_losses(losses_read, world),
        probe=probe,
    )


# Columns of a row that each rank sums over its own tokens. The others are of whole rows, or of the rank.
_OF_OWN_TOKENS = [0, 1, 9]


def group_by_data_parallel_rank(rows: NDArray[np.float64], sp_size: int) -> NDArray[np.float64]:
    """[W, K] rows of ranks to [W / shared, K] of groups that read the same: they are compared, not spans."""
    groups = rows.reshape(-1, sp_size, rows.shape[1])
    read = groups[:, 0].copy()
    read[:, _OF_OWN_TOKENS] = groups[:, :, _OF_OWN_TOKENS].sum(axis=1)
    return read


def _compute_rank_losses(losses: NDArray[np.float64], world: World) -> tuple[float, ...]:
    """Expand the losses of R data-parallel ranks to one for each rank."""
    if len(losses) == 1 and world.size > 1:
        return ()
    return tuple(losses.repeat(world.size // len(losses)).tolist())
