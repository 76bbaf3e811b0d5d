"""Which samples a calm model finds strangest in the batches where the trouble began.

The weights at the spike find everything strange; those gone back to tell a poisoned sample from its
neighbors. B sequences of a micro-batch · T tokens of each · V vocabulary.
"""

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ds_pretrain.checkpoint.rng import capture_streams, restore_streams
from ds_pretrain.core.distributed import World, gather_rows
from ds_pretrain.core.state import SkipLedger
from ds_pretrain.data.loader import Feed
from ds_pretrain.data.passages import passages
from ds_pretrain.engine.engine import Engine
from ds_pretrain.models.loss import cross_entropy_and_z

NUM_SUSPECTS = 8
STEPS_BEFORE = 1  # an update is seen in the loss of the step after it
STEPS_AFTER = 4  # an onset may be told up to five steps too early
_MOST_CHARACTERS = 2000  # of a sample's text


def offending_steps(onset: int, to_step: int, step: int) -> range:
    """The steps to look at: those around the onset that lie between the checkpoint and the decision."""
    return range(max(to_step + 1, onset - STEPS_BEFORE), min(step, onset + STEPS_AFTER) + 1)


def find_suspects(
    engine: Engine,
    feed: Feed,
    enter: Callable[[int], None],
    steps: Sequence[int],
    ledger: SkipLedger,
    world: World,
) -> list[dict[str, Any]]:
    """The samples of `steps` (1 for the first) with the highest loss under the engine's weights, that first.

    `enter` puts the model into the phase of a step. Empty on all ranks but rank 0. No random stream moves.
    Collective.
    """
    streams = capture_streams()
    found: list[tuple[float, int, int]] = []  # (loss, step, place in the global batch)
    with engine.evaluating():
        for step in steps:
            enter(step - 1)
            batch = feed.read(step - 1, ledger)
            sums: list[tuple[float, int]] = []  # of each sample that this rank reads
            for micro in batch.micro_batches:
                there = micro.on(engine.device)
                logits = engine.logits(there.input_ids, there.documents)  # [B, T, V]
                labels = engine.own_tokens(there.labels)  # [B, T]
                sums += [_loss_and_count(logits[row], labels[row]) for row in range(len(labels))]
            rows = gather_rows(world, [number for sample in sums for number in sample])  # [W, 2 * samples]
            losses = _mean_losses(rows, engine.ranks_a_sequence)
            found += [(loss, step, place) for place, loss in enumerate(losses)]
    restore_streams(streams)
    if not world.is_main:
        return []
    return _described(feed, ledger, sorted(found, reverse=True)[:NUM_SUSPECTS])


def _loss_and_count(logits: torch.Tensor, labels: torch.Tensor) -> tuple[float, int]:
    """The sum of the cross-entropy of one sample, and over how many tokens."""
    return float(cross_entropy_and_z(logits, labels, None)[0]), int((labels >= 0).sum())


def _mean_losses(rows: NDArray[np.float64], shared: int) -> list[float]:
    """In nats a token, of each sample of a global batch; one that is no number is the strangest of all.

    `rows` [W, 2 * samples of a rank] are sums and counts; ranks that share their samples are neighbors.
    """
    of_readers = rows.reshape(-1, shared, rows.shape[1]).sum(axis=1)  # [R, 2 * samples]
    sums, counts = of_readers.reshape(-1, 2).T  # [samples], [samples]
    means = sums / counts.clip(min=1)
    return [float(mean) for mean in np.where(np.isnan(means), inf, means)]


def _described(
    feed: Feed, ledger: SkipLedger, suspects: Sequence[tuple[float, int, int]]
) -> list[dict[str, Any]]:
    """Suspects with their text. What cannot be shown costs its text, and never the run."""
    told: dict[tuple[int, int], dict[str, Any]] = {}
    for step in sorted({step for _, step, _ in suspects}):
        ids, places = feed.sampler.ids(step - 1, ledger), [p for _, at, p in suspects if at == step]
        listed = ids.listed()
        for place in places:
            source, epoch, sample = listed[place]
            told[step, place] = {
                "source": source,
                "epoch": epoch,
                "sample": sample,
                "documents": [],
                "text": "",
            }
        try:
            for place, passage in zip(places, passages(ids, places, feed.sources), strict=True):
                shown = {"documents": list(passage.documents), "text": passage.text[:_MOST_CHARACTERS]}
                told[step, place] |= shown
        except Exception as error:  # a tokenizer may raise what it likes, and this is on one rank
            for place in places:
                told[step, place]["text"] = f"[cannot be shown: {type(error).__name__}: {error}]"
    return [{"step": step, "loss": loss, **told[step, place]} for loss, step, place in suspects]
