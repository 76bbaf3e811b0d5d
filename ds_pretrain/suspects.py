"""Which samples a calm model finds strangest in the batches where the trouble began.

The weights at the spike find everything strange; those gone back to tell a poisoned sample from its
neighbors. B sequences of a micro-batch · T tokens of each · V vocabulary.
"""

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import torch

from ds_pretrain.checkpoint.rng import capture_streams, restore_streams
from ds_pretrain.data.feed import Feed
from ds_pretrain.data.passages import passages
from ds_pretrain.engine import Engine
from ds_pretrain.models.loss import cross_entropy_and_z
from ds_pretrain.state import SkipLedger
from ds_pretrain.world import World, gather_rows

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
    mine: list[tuple[float, int, int]] = []  # (loss, step, place in the global batch)
    with engine.evaluating():
        for step in steps:
            enter(step - 1)
            batch = feed.read(step - 1, ledger)
            place = world.rank * len(batch.checksums)
            for micro in batch.micro_batches:
                there = micro.on(engine.device)
                logits = engine.logits(there.input_ids, there.documents)  # [B, T, V]
                for row in range(len(micro.labels)):
                    loss = _mean_loss(logits[row], there.labels[row])
                    mine.append((loss, step, place))
                    place += 1
    restore_streams(streams)
    top = sorted(mine, reverse=True)[:NUM_SUSPECTS]
    top += [(-inf, 0, 0)] * (NUM_SUSPECTS - len(top))
    rows = gather_rows(world, [number for suspect in top for number in suspect])  # [W, 3 * NUM_SUSPECTS]
    if not world.is_main:
        return []
    every = [(row[0], int(row[1]), int(row[2])) for row in rows.reshape(-1, 3).tolist() if row[1] > 0]
    return _described(feed, ledger, sorted(every, reverse=True)[:NUM_SUSPECTS])


def _mean_loss(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """Mean cross-entropy of one sample, in nats a token; a loss that is no number is the strangest of all."""
    nll = float(cross_entropy_and_z(logits, labels, None)[0]) / max(1, int((labels >= 0).sum()))
    return nll if nll == nll else inf


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
