"""Validation of models whose window is known."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ds_pretrain.core.distributed import World
from ds_pretrain.data.indexed import TokenSource
from ds_pretrain.data.validation_set import make_validation_set
from ds_pretrain.training.validation import ValidationResult, evaluate

VOCABULARY, SURE = 400, 30.0


def _copier(window: int) -> Any:
    """A model that repeats what followed the last time it saw the two newest tokens, up to `window` back."""

    def logits(input_ids: Tensor, documents: Tensor | None = None) -> Tensor:
        out = torch.zeros(*input_ids.shape, VOCABULARY)  # [B, T, V]
        for row, ids in enumerate(input_ids.tolist()):
            for at in range(1, len(ids)):
                for before in range(at - 1, max(0, at - window), -1):
                    if ids[before - 1 : before + 1] == ids[at - 1 : at + 1]:
                        out[row, at, ids[before + 1]] = SURE
                        break
        return out

    @contextmanager
    def evaluation_mode() -> Iterator[None]:
        yield

    return SimpleNamespace(
        device=torch.device("cpu"),
        sequence_parallel_size=1,
        local_shard=lambda row: row,
        logits=logits,
        evaluation_mode=evaluation_mode,
    )


def _look(engine: Any, seq_len: int = 256, period: int = 0) -> ValidationResult:
    """At noise, or at noise that repeats itself."""
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, 4 * seq_len + 1)
    if period:
        tokens = np.resize(tokens[:period], len(tokens))
    lengths, bounds = np.array([len(tokens)], np.int32), np.array([0, 1], np.int64)
    source = TokenSource(Path("noise"), tokens.astype("<i4"), lengths, bounds, None)
    return evaluate(engine, [make_validation_set("noise", source, seq_len, 4 * seq_len)], 3, World(), True)


def test_a_key_is_found_as_far_back_as_the_window_reaches_and_no_farther() -> None:
    found = _look(_copier(window=100)).retrieval["noise"]
    assert {length: [round(score, 2) for score in depths.values()] for length, depths in found.items()} == {
        "64": [1.0] * 5,
        "128": [0.0, 1.0, 1.0, 1.0, 1.0],
        "256": [0.0, 0.0, 0.0, 1.0, 1.0],
    }
    everywhere = _look(_copier(window=256)).retrieval["noise"]
    assert all(score > 0.99 for depths in everywhere.values() for score in depths.values())


def test_the_loss_by_position_falls_where_the_text_repeats_within_the_window() -> None:
    """Noise that repeats after 60 tokens: from position 61 on a copier knows what comes."""
    found = _look(_copier(window=100), period=60).by_position["noise"]
    chance = pytest.approx(np.log(VOCABULARY), rel=1e-3)
    assert [found[end] for end in ("1", "2", "4", "8", "16", "32")] == [chance] * 6
    assert found["64"] > 4
    assert found["128"] == found["256"] == pytest.approx(0, abs=1e-6)
    short = _look(_copier(window=40), period=60).by_position["noise"]
    assert list(short.values()) == [chance] * 9
