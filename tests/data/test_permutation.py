"""The keyed permutation: a bijection, a good shuffle, the same for ever."""

import tracemalloc

import numpy as np
import pytest
from scipy import stats

from ds_pretrain.data import permutation as module
from ds_pretrain.data.permutation import Words, derive_keys, make_key, permute


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 10, 64, 100, 1023, 1024, 4096, 5000, 65537])
def test_every_index_is_visited_once(size: int) -> None:
    for seed in range(5):
        order = permute(np.arange(size), size, make_key(seed))
        assert sorted(order.tolist()) == list(range(size))


def unpermute(values: Words, size: int, key: int | Words) -> Words:
    """The inverse of `permute`: each round taken back, from the last, until the value is in the set again."""
    keys = module._mix(np.broadcast_to(np.asarray(key, dtype=np.uint64), values.shape).copy())
    (a, b), values, outside = module._choose_radices(size), values.copy(), np.arange(values.size)
    while outside.size:
        left, right = np.divmod(values[outside], np.uint64(b))
        for number in range(module._choose_num_rounds(size) - 2, -1, -2):
            taken = module._apply_round(left, keys[outside], number + 1, b)
            right = module._add(right, np.uint64(b) - taken, b)
            left = module._add(left, np.uint64(a) - module._apply_round(right, keys[outside], number, a), a)
        values[outside] = left * np.uint64(b) + right
        outside = outside[values[outside] >= np.uint64(size)]
    return values


@pytest.mark.parametrize("size", [1, 2, 3, 10, 4096, 5000, 10**6 + 3, 10**12, 2**61 + 1, 2**62 - 1, 2**62])
def test_unpermute_undoes_permute(size: int) -> None:
    index = np.random.default_rng(0).integers(0, size, 3000)
    keys = derive_keys(5, index)
    for key in (make_key("k", size), keys):
        there = permute(index, size, key)
        assert there.dtype == np.uint64
        assert int(there.max()) < size
        np.testing.assert_array_equal(unpermute(there, size, key), index)


def test_an_array_of_keys_gives_what_each_key_alone_gives() -> None:
    index, keys = np.arange(40_000) % 4096, derive_keys(3, np.arange(40_000) // 4096)
    together = permute(index, 4096, keys)
    for block in range(10):
        part = slice(block * 4096, min((block + 1) * 4096, 40_000))
        np.testing.assert_array_equal(together[part], permute(index[part], 4096, int(keys[block * 4096])))


def test_the_numbers_never_change() -> None:
    # A different list means that every run's data order has moved: that needs a note in the changelog.
    assert make_key(7, "web", 3) == 11094263568409703541
    assert derive_keys(1, np.arange(2)).tolist() == [11385487063155714807, 6652587683579779273]
    assert permute(np.arange(10), 10, 1).tolist() == [3, 6, 8, 2, 5, 1, 9, 7, 0, 4]
    assert permute(np.array([0, 1, 10**12]), 10**13, 1).tolist() == [
        5773149762042,
        5786663496359,
        7254604509396,
    ]


def test_keys_tell_values_and_types_apart() -> None:
    keys = {
        make_key(*parts) for parts in [(1, 2), (12,), ("1", 2), ("1", "2"), ("12",), (1, "2"), (2, 1), ()]
    }
    assert len(keys) == 8


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
def test_all_orders_of_a_tiny_set_are_equally_likely(size: int) -> None:
    keys = derive_keys(11, np.arange(100_000))
    columns = [permute(np.full(keys.size, index), size, keys) for index in range(size)]
    codes = sum(column * np.uint64(size**place) for place, column in enumerate(columns))
    _, counts = np.unique(codes, return_counts=True)
    assert counts.size == {2: 2, 3: 6, 4: 24, 5: 120, 6: 720}[size]
    assert stats.chisquare(counts).pvalue > 1e-3


@pytest.mark.parametrize("size", [4096, 100_003, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_chi_square_of_the_shuffle_passes(size: int) -> None:
    """Place against value, and value against next value, over many keys: the p-values are uniform."""
    bins, p_values = 16, []
    for seed in range(40):
        order = permute(np.arange(size), size, make_key("chi", seed, size)).astype(np.int64)
        for pairs in ((np.arange(size), order), (order[:-1], order[1:])):
            table = np.histogram2d(*pairs, bins=bins, range=[[0, size]] * 2)[0]
            expected = table.sum() / bins**2
            statistic = float(((table - expected) ** 2 / expected).sum())
            p_values.append(stats.chi2.sf(statistic, (bins - 1) ** 2))
    assert min(p_values) > 1e-4
    assert stats.kstest(p_values, "uniform").pvalue > 1e-3


def test_samples_move_far() -> None:
    size = 100_000
    order = permute(np.arange(size), size, make_key("far")).astype(np.int64)
    # Two independent uniform places are a third of the range apart on average.
    assert abs(np.abs(order - np.arange(size)).mean() / size - 1 / 3) < 0.01


def test_neighboring_keys_give_unrelated_orders() -> None:
    size = 1000
    orders = np.stack([permute(np.arange(size), size, key) for key in range(50)]).astype(np.int64)
    agreements = (orders[1:] == orders[:-1]).sum(axis=1)  # 1 expected, as for unrelated orders
    assert agreements.mean() < 1.8
    assert agreements.max() < 10


def test_memory_does_not_grow_with_the_size() -> None:
    index = np.arange(1024)
    tracemalloc.start()
    permute(index, 2**62, 1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


@pytest.mark.parametrize(
    ("index", "size", "message"),
    [
        ([0], 0, "cannot permute 0 elements: the size must be in"),
        ([0], 2**62 + 1, "the size must be in"),
        ([3, 10], 10, r"an index is outside \[0, 10\): they run from 3 to 10"),
        ([-1], 10, r"an index is outside \[0, 10\)"),
    ],
)
def test_what_cannot_be_permuted_is_refused(index: list[int], size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        permute(np.array(index), size, 1)
