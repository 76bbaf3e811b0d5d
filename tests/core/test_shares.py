"""Shares tile a parameter, whatever its size and the number of ranks."""

import pytest

from ds_pretrain.core.shares import share_of


@pytest.mark.parametrize("num_elements", [1, 2, 3, 7, 12, 1000])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5, 8])
def test_the_shares_of_all_ranks_are_the_parameter_in_order_with_the_rest_as_padding(
    num_elements: int, num_ranks: int
) -> None:
    shares = [share_of(num_elements, rank, num_ranks) for rank in range(num_ranks)]
    elements = [e for share in shares for e in range(share.start, share.start + share.length)]
    assert elements == list(range(num_elements))
    [padded] = {share.padded for share in shares}
    assert padded * num_ranks - num_elements in range(num_ranks)
    assert all(share.length == padded for share in shares[: num_elements // padded])
