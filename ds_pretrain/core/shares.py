"""How ZeRO-3 cuts a flattened parameter: equal shares, one a rank, the last ones padded.

Measured on DeepSpeed 0.19.8; the tests of restoring on other numbers of ranks fail when it changes.
"""

from math import ceil
from typing import NamedTuple


class Share(NamedTuple):
    """Elements [start, start + length) of a flattened parameter; `padded` is what they take in a shard."""

    start: int
    length: int  # may be 0
    padded: int


def share_of(num_elements: int, rank: int, num_ranks: int) -> Share:
    """The share of a rank."""
    padded = ceil(num_elements / num_ranks)
    start = min(rank * padded, num_elements)
    return Share(start, min(padded, num_elements - start), padded)
