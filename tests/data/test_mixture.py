"""Mixtures: exact quotas, O(1) seeking, epochs that differ."""

import numpy as np
import pytest

from ds_pretrain.core.errors import InputError
from ds_pretrain.data import mixture as module
from ds_pretrain.data.mixture import BLOCK_DRAWS, locate_samples, make_mixture
from ds_pretrain.data.permutation import make_key

WEIGHTS = {"web": 0.85, "code": 0.1, "math": 0.05}


def test_quotas_are_within_one_draw_of_the_weights_and_fill_the_block() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        values = rng.uniform(0.01, 1, rng.integers(1, 12))
        mixture = make_mixture({f"s{i:02}": float(v) for i, v in enumerate(values)}, key=1)
        assert sum(mixture.quotas) == BLOCK_DRAWS
        assert np.abs(np.array(mixture.quotas) - values / values.sum() * BLOCK_DRAWS).max() < 1


def test_every_block_has_the_quotas_and_the_draws_of_a_source_are_numbered_as_they_come() -> None:
    mixture = make_mixture(WEIGHTS, key=9)
    source, number = mixture.locate(np.arange(3 * BLOCK_DRAWS))
    for index, quota in enumerate(mixture.quotas):
        assert (source.reshape(3, -1) == index).sum(axis=1).tolist() == [quota] * 3
        assert number[source == index].tolist() == list(range(3 * quota))


@pytest.mark.parametrize("weights", [{"a": 1.0}, {"a": 0.7, "b": 0.3}, {"a": 1.0, "b": 4095.0}])
@pytest.mark.parametrize("num_samples", [1, 7, 1000, 2867, 2868, 5000])  # around the quota of 0.7
def test_p39_the_first_draws_of_a_source_are_each_of_its_samples_once(
    weights: dict[str, float], num_samples: int
) -> None:
    mixture = make_mixture(weights, key=2)
    draws = np.arange(-(-2 * num_samples // mixture.quotas[0]) * BLOCK_DRAWS)
    source, number = mixture.locate(draws)
    epoch, sample = locate_samples(number[source == 0], num_samples, make_key(0, "a", 8))
    assert epoch.tolist() == [draw // num_samples for draw in range(epoch.size)]  # one after another
    for first in (0, num_samples):
        assert sorted(sample[first : first + num_samples].tolist()) == list(range(num_samples))


def test_p03_a_resume_at_any_draw_continues_the_numbers() -> None:
    mixture = make_mixture(WEIGHTS, key=9)
    straight = mixture.locate(np.arange(3 * BLOCK_DRAWS))
    for start in (1, 24, BLOCK_DRAWS - 1, BLOCK_DRAWS, BLOCK_DRAWS + 500, 2 * BLOCK_DRAWS + 4000):
        module._build_layout.cache_clear()  # a new process
        before = mixture.draws_of_source_before(start)
        source, number = mixture.locate(np.arange(start, 3 * BLOCK_DRAWS))
        assert source.tolist() == straight[0][start:].tolist()
        assert number.tolist() == straight[1][start:].tolist()
        assert [int(number[source == index][0]) for index in range(3)] == list(before)


def test_the_order_is_pinned() -> None:
    """Another number here means that no checkpoint continues the run that it came from."""
    source, number = make_mixture(WEIGHTS, key=9).locate(
        np.arange(10 * BLOCK_DRAWS - 6, 10 * BLOCK_DRAWS + 6)
    )
    assert source.tolist() == [2, 2, 2, 2, 2, 2, 2, 0, 2, 2, 2, 2]
    assert number.tolist() == [
        34804,
        34805,
        34806,
        34807,
        34808,
        34809,
        34810,
        4100,
        34811,
        34812,
        34813,
        34814,
    ]


def test_blocks_are_shuffled_differently_and_sources_are_spread() -> None:
    mixture = make_mixture(WEIGHTS, key=9)
    source, _ = mixture.locate(np.arange(2 * BLOCK_DRAWS))
    first, second = source[:BLOCK_DRAWS], source[BLOCK_DRAWS:]
    assert (first != second).mean() > 0.1
    web = mixture.names.index("web")
    shares = (first.reshape(16, -1) == web).mean(axis=1)  # of 256 draws each
    assert np.abs(shares - 0.85).max() < 0.1


def test_every_place_of_a_block_is_as_likely_to_read_a_source() -> None:
    mixture = make_mixture({"a": 0.5, "b": 0.5}, key=3)
    layouts = np.stack([module._build_layout(mixture.quotas, mixture.key, block)[0] for block in range(2000)])
    deviations = (layouts.mean(axis=0) - 0.5) / (0.5 / np.sqrt(2000))  # of each place, in standard errors
    assert np.abs(deviations).max() < 5
    assert 0.9 < deviations.std() < 1.1
    neighbors = (layouts[:, 1:] == layouts[:, :-1]).mean()
    assert abs(neighbors - 0.5) < 0.001


def test_a_draw_is_located_alike_alone_in_any_batch_and_far_away() -> None:
    mixture = make_mixture(WEIGHTS, key=9)
    draws = np.random.default_rng(1).integers(0, 2**50, 500)
    source, number = mixture.locate(draws)
    for at in range(0, 500, 50):
        one_source, one_number = mixture.locate(draws[at : at + 1])
        assert (one_source[0], one_number[0]) == (source[at], number[at])


def test_the_order_of_keys_in_a_run_file_does_not_move_the_data() -> None:
    assert make_mixture(WEIGHTS, 1) == make_mixture(dict(reversed(WEIGHTS.items())), 1)
    assert make_mixture(WEIGHTS, 1) == make_mixture({name: 20 * w for name, w in WEIGHTS.items()}, 1)


def test_draws_of_a_source_before_any_draw_are_counted_exactly() -> None:
    mixture = make_mixture(WEIGHTS, key=4)
    source, _ = mixture.locate(np.arange(3 * BLOCK_DRAWS))
    for draw in (0, 1, 100, BLOCK_DRAWS - 1, BLOCK_DRAWS, BLOCK_DRAWS + 1, 2 * BLOCK_DRAWS + 777):
        assert mixture.draws_of_source_before(draw) == tuple(np.bincount(source[:draw], minlength=3))
    assert mixture.draws_of_source_before(10**12 * BLOCK_DRAWS) == tuple(q * 10**12 for q in mixture.quotas)


def test_p39_epochs_differ_and_depend_on_seed_and_epoch_only() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        got, sample = locate_samples(np.arange(epoch * 10, epoch * 10 + 10), 10, make_key(seed, "web", 8))
        assert set(got.tolist()) == {epoch}
        return sample.tolist()  # type: ignore[no-any-return]

    orders = [tuple(order(7, epoch)) for epoch in range(6)]
    assert all(sorted(o) == list(range(10)) for o in orders)
    assert len(set(orders)) == 6
    # Whatever is read before, after or together, an epoch has one order.
    together = locate_samples(np.arange(60)[::-1], 10, make_key(7, "web", 8))[1][::-1]
    assert [tuple(o) for o in together.reshape(6, 10).tolist()] == orders
    assert order(8, 0) != order(7, 0)
    # The slices of three ranks are disjoint and complete in each epoch.
    for o in orders:
        assert sorted(sample for rank in range(3) for sample in o[rank::3]) == list(range(10))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({}, "the mixture is empty; give at least one source a positive weight"),
        ({"a": 1.0, "b": 0.0}, r"mixture weight of 'b' is 0.0; expected a positive number"),
        ({"a": float("nan")}, "mixture weight of 'a' is nan"),
        (
            {"a": 1.0, "b": 1e-5},
            "mixture weight of 'b' is 1e-05, 1e-05 of the total, less than one draw in 4096.*0.000244",
        ),
    ],
)
def test_a_weight_that_cannot_be_drawn_is_refused(weights: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_mixture(weights, 1)


def test_all_bad_weights_are_reported_at_once() -> None:
    with pytest.raises(InputError) as caught:
        make_mixture({"a": 1.0, "b": -1.0, "c": float("inf")}, 1)
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize("weight", [1e308, 5e-324])
def test_weights_of_any_size_count_by_their_ratio(weight: float) -> None:
    assert make_mixture({"a": weight, "b": weight}, 1).quotas == (BLOCK_DRAWS // 2, BLOCK_DRAWS // 2)


def test_one_source_alone_is_read_in_its_own_order() -> None:
    draws = np.array([0, 5, BLOCK_DRAWS + 3, 10**15])
    source, number = make_mixture({"only": 3}, key=1).locate(draws)
    assert not source.any()
    assert number.tolist() == draws.tolist()
    assert make_mixture({"only": 3}, key=1).draws_of_source_before(10**15 + 7) == (10**15 + 7,)


def test_no_draws_are_located_as_none() -> None:
    for weights in (WEIGHTS, {"only": 1.0}):
        source, number = make_mixture(weights, key=1).locate(np.arange(0))
        assert (source.size, number.size) == (0, 0)


def test_a_million_draws_lay_each_block_out_once() -> None:
    """What they cost (the time of it: benchmarks/data_order.py)."""
    mixture = make_mixture({"a": 5, "b": 3, "c": 1}, key=12)
    module._build_layout.cache_clear()
    mixture.locate(np.arange(1_000_000, dtype=np.uint64))
    assert module._build_layout.cache_info().misses == -(-1_000_000 // BLOCK_DRAWS)
