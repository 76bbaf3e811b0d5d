"""Each rank's random streams: saved, restored, apart from one another."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from ds_pretrain.checkpoint.rng import (
    capture_streams,
    dump_streams,
    load_streams,
    restore_streams,
    rng_file,
    seed_streams,
)
from ds_pretrain.core.errors import RunError


def _draws() -> list[float]:
    """One number and more from every stream; an odd number of Gaussians, so that a cached one is pending."""
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.random()),  # noqa: NPY002
        float(np.random.normal()),  # noqa: NPY002
        float(torch.rand(())),
        float(torch.randn(())),
    ]


def test_every_stream_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    seed_streams(7, 0)
    _draws()
    (tmp_path / rng_file(0)).parent.mkdir(exist_ok=True)
    (tmp_path / rng_file(0)).write_bytes(dump_streams())
    expected = [_draws() for _ in range(3)]
    seed_streams(8, 0)
    _draws()
    load_streams(tmp_path, 0)
    assert [_draws() for _ in range(3)] == expected


@pytest.mark.parametrize("stream", [0, 2, 4], ids=["python", "numpy", "torch"])
def test_a_stream_that_is_not_restored_would_show(stream: int) -> None:
    seed_streams(7, 0)
    first = _draws()
    seed_streams(7, 1)
    assert _draws()[stream] != first[stream]


def test_the_file_loads_without_running_code(tmp_path: Path) -> None:
    (tmp_path / rng_file(3)).parent.mkdir(exist_ok=True)
    (tmp_path / rng_file(3)).write_bytes(dump_streams())
    streams = torch.load(tmp_path / rng_file(3), weights_only=True)
    assert set(streams) == {"python", "numpy", "torch", "device"}


def test_each_rank_and_each_seed_has_streams_of_its_own(tmp_path: Path) -> None:
    draws = []
    for seed, rank in ((7, 0), (7, 1), (8, 0)):
        seed_streams(seed, rank)
        (tmp_path / rng_file(rank)).parent.mkdir(exist_ok=True)
        (tmp_path / rng_file(rank)).write_bytes(dump_streams())
        draws.append(_draws())
    assert all(len(set(values)) == 3 for values in zip(*draws, strict=True))
    load_streams(tmp_path, 1)
    assert _draws() == draws[1]


def test_capturing_moves_nothing() -> None:
    seed_streams(7, 0)
    before = capture_streams()
    expected = _draws()
    restore_streams(before)
    capture_streams()
    assert _draws() == expected


def test_a_missing_file_is_an_error_and_not_a_fresh_stream(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"rank_00001.*put the file back as it was saved"):
        load_streams(tmp_path, 1)
