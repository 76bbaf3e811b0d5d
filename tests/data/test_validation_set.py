"""Validation samples: fixed, spread over the source, each valid on exactly one rank."""

import numpy as np
import pytest
import torch

from ds_pretrain.core.distributed import World
from ds_pretrain.core.metrics import IGNORED
from ds_pretrain.data.loader import MicroBatch
from ds_pretrain.data.validation_set import ValidationSet, make_validation_set, validation_batches
from tests.data.in_memory import SEQ_LEN, source_of


def _rounds(chosen: ValidationSet, size: int, micro_sequences: int) -> list[list[MicroBatch]]:
    """The micro-batches of each rank."""
    return [
        list(validation_batches(chosen, World(rank, size, rank), micro_sequences)) for rank in range(size)
    ]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(20, [0, 20, 40, 60, 80]), (1, [0]), (10**9, list(range(100))), (3 * SEQ_LEN, [0, 33, 66])],
    ids=["spread", "at least one", "at most all", "uneven"],
)
def test_samples_are_spread_evenly_over_the_source(tokens: int, expected: list[int]) -> None:
    assert make_validation_set("held_out", source_of(100), SEQ_LEN, tokens).indices.tolist() == expected


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("micro_sequences", [1, 2, 3])
def test_p43_ranks_have_as_many_batches_when_nothing_divides_the_samples(
    size: int, micro_sequences: int
) -> None:
    source = source_of(7)
    chosen = make_validation_set("held_out", source, SEQ_LEN, 7 * SEQ_LEN)
    ranks = _rounds(chosen, size, micro_sequences)
    assert len({len(batches) for batches in ranks}) == 1
    everything = [micro for batches in ranks for micro in batches]
    assert {tuple(micro.input_ids.shape) for micro in everything} == {(micro_sequences, SEQ_LEN)}
    valid = [
        torch.cat([ids[:1], labels]).tolist()
        for micro in everything
        for ids, labels in zip(micro.input_ids, micro.labels, strict=True)
        if (labels != IGNORED).all()
    ]
    assert sorted(valid) == sorted(source.samples(np.arange(7), SEQ_LEN).tolist())
    assert all((micro.input_ids >= 0).all() for micro in everything)
    num_labels = sum(int((micro.labels != IGNORED).sum()) for micro in everything)
    assert num_labels == 7 * SEQ_LEN  # what fills a batch up counts nowhere


def test_p09_every_pass_reads_the_same_batches() -> None:
    chosen = make_validation_set("held_out", source_of(50), SEQ_LEN, 13 * SEQ_LEN)
    first, second = (
        [
            (micro.input_ids.tolist(), micro.labels.tolist())
            for batches in _rounds(chosen, 2, 3)
            for micro in batches
        ]
        for _ in range(2)
    )
    assert first == second
