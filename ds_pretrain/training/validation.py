"""Validation: the mean loss of each source, the loss by position, and whether a key is found again.

Shapes: B sequences of a micro-batch, T tokens of a sequence (those of this rank), V vocabulary, K buckets of
positions, G lengths of prompts, C places of a key in a prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from ds_pretrain.checkpoint.rng import preserve_streams
from ds_pretrain.core.distributed import World, gather_rows
from ds_pretrain.core.metrics import IGNORED
from ds_pretrain.data.loader import MicroBatch, read_prompt_batches, read_validation_batches
from ds_pretrain.data.validation_set import (
    NUM_PLACES,
    Prompts,
    ValidationSet,
    list_doublings,
    make_prompts,
    score_prompts,
)
from ds_pretrain.engine.engine import Engine
from ds_pretrain.models.attention import document_positions
from ds_pretrain.training.step import compute_token_losses, sum_losses


@dataclass(frozen=True)
class ValidationResult:
    """The result of a validation, by source. Losses in nats a token."""

    losses: dict[str, float]  # the mean over all tokens
    by_position: dict[str, dict[str, float]]  # by the end of the bucket of positions; no tokens, no entry
    retrieval: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)  # length, depth, score


def evaluate(
    engine: Engine,
    sets: Sequence[ValidationSet],
    micro_batch_size: int,
    world: World,
    retrieval: bool = False,
) -> ValidationResult:
    """Measure the model on fixed samples: one reduction a source. No random stream moves. Collective."""
    readers = world.data_parallel_world(engine.sequence_parallel_size)
    losses, by_position, found = {}, {}, {}
    with preserve_streams(), engine.evaluation_mode():
        for chosen in sets:
            ends = list_doublings(chosen.seq_len)
            prompts = make_prompts(chosen) if retrieval else None
            mine = _measure(engine, chosen, micro_batch_size, readers)  # [2 + 2 K]
            asked = _ask(engine, prompts, micro_batch_size, readers) if prompts else np.zeros(0)  # [G C]
            total = gather_rows(world, [*mine, *asked]).sum(axis=0)  # [2 + 2 K + G C]
            losses[chosen.name] = float(total[0] / total[1])
            nll, count, rest = np.split(total[2:], [len(ends), 2 * len(ends)])  # [K], [K], [G C]
            by_position[chosen.name] = {
                str(end): float(nll[k] / count[k]) for k, end in enumerate(ends) if count[k]
            }
            if prompts:
                found[chosen.name] = score_prompts(prompts, rest)
    return ValidationResult(losses, by_position, found)


def _measure(
    engine: Engine, chosen: ValidationSet, micro_batch_size: int, readers: World
) -> NDArray[np.float64]:
    """This rank's sums: of all losses, of tokens, and both again for each bucket of positions: [2 + 2 K]."""
    ends = list_doublings(chosen.seq_len)
    nll, count = 0.0, 0
    by_bucket = np.zeros((2, len(ends)))
    for micro in read_validation_batches(chosen, readers, micro_batch_size):
        losses, labels = compute_token_losses(engine, micro)  # [B, T] each
        nll += sum_losses(losses)
        valid = (labels != IGNORED).cpu().numpy()  # [B, T]
        count += int(valid.sum())
        place = engine.local_shard(_compute_positions(micro)).numpy()  # [B, T]
        bucket = np.searchsorted(ends, place[valid], side="right")  # [valid]
        by_bucket[0] += np.bincount(bucket, losses.cpu().numpy()[valid], len(ends))  # in fp64
        by_bucket[1] += np.bincount(bucket, minlength=len(ends))
    return np.concatenate([[nll, count], *by_bucket])


def _ask(engine: Engine, prompts: Prompts, micro_batch_size: int, readers: World) -> NDArray[np.float64]:
    """This rank's sums of the losses of hidden keys, by length and place: [G C]."""
    sums = np.zeros((len(prompts.rows), NUM_PLACES))
    for row, length in zip(sums, prompts.rows, strict=True):
        for micro, places in read_prompt_batches(prompts, length, readers, micro_batch_size):
            nll = compute_token_losses(engine, micro)[0].sum(dim=-1, dtype=torch.float64)  # [B]
            row += np.bincount(places, nll.cpu().numpy(), NUM_PLACES)
    return sums.reshape(-1)


def _compute_positions(micro: MicroBatch) -> torch.Tensor:
    """Return each token's position in its row, or in its document where documents are masked: [B, T]."""
    if micro.documents is None:
        return torch.arange(micro.labels.shape[1]).expand(micro.labels.shape)
    return document_positions(micro.documents)
