"""How often a block of draws reads each source: what weights of a mixture come to in whole draws."""

from collections.abc import Mapping

import numpy as np

BLOCK_DRAWS = 4096


def block_quotas(weights: Mapping[str, float]) -> dict[str, int]:
    """Draws of each source in a block, by name in order, for positive finite weights of any scale.

    By largest remainder: rounded down, plus one for the largest remainders, so that they add up to a block.
    """
    names = sorted(weights)  # the order of keys in a run file must not move the data
    values = np.array([weights[name] for name in names], dtype=np.float64)
    values /= values.max()  # a sum of huge weights would overflow
    exact = values / values.sum() * BLOCK_DRAWS
    quotas = np.floor(exact).astype(np.int64)
    order = np.argsort(-(exact - quotas), kind="stable")
    quotas[order[: BLOCK_DRAWS - int(quotas.sum())]] += 1
    return dict(zip(names, quotas.tolist(), strict=True))
