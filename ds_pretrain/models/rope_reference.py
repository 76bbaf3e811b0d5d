"""Rotary frequencies in fp64 from the published definitions, to hold a model's tables against. No torch here.

* default: Su et al., arXiv:2104.09864, section 3.2.2.
* linear: Chen et al., arXiv:2306.15595: positions divided by the factor.
* yarn: Peng et al., arXiv:2309.00071: frequencies that turn more than `beta_fast` times within the original
  length stay, those that turn less than `beta_slow` times are divided by the factor ("NTK-by-parts"), and
  queries and keys are both scaled by 0.1 ln(factor) + 1. In between, the paper's ramp is linear in the number
  of turns; that of its authors' code (https://github.com/jquesnelle/yarn), which Transformers and published
  models follow, is linear in the index of the frequency, from and to whole indices. This is the latter.
* llama3: https://github.com/meta-llama/llama-models/blob/main/models/llama3/model.py (apply_scaling).
"""

from collections.abc import Mapping
from math import ceil, floor, log, pi
from typing import Any

KINDS = ("default", "linear", "yarn", "llama3")


def reference_frequencies(table: Mapping[str, Any], width: int) -> list[float]:
    """The `width / 2` frequencies, in radians a position, of a table of rotary parameters.

    `width` counts the rotated numbers of a head. The table is complete, as Transformers leaves it.
    """
    theta = float(table["rope_theta"])
    plain = [theta ** (-2 * index / width) for index in range(width // 2)]
    match table.get("rope_type", "default"):
        case "default":
            return plain
        case "linear":
            return [frequency / table["factor"] for frequency in plain]
        case "yarn":
            return _yarn(plain, table, theta, width)
        case "llama3":
            return [_llama3(frequency, table) for frequency in plain]
        case other:
            raise ValueError(f"no reference for rotary kind {other!r}; there is one for {', '.join(KINDS)}")


def reference_scale(table: Mapping[str, Any]) -> float:
    """What cosines and sines are multiplied by."""
    if table.get("rope_type") != "yarn":
        return 1.0
    if (given := table.get("attention_factor")) is not None:
        return float(given)
    factor, over, under = float(table["factor"]), table.get("mscale"), table.get("mscale_all_dim")
    if over and under:  # DeepSeek's pair
        return _temperature(factor, over) / _temperature(factor, under)
    return _temperature(factor, 1.0)


def _temperature(factor: float, weight: float) -> float:
    return 0.1 * weight * log(factor) + 1.0 if factor > 1 else 1.0


def _yarn(plain: list[float], table: Mapping[str, Any], theta: float, width: int) -> list[float]:
    length = table["original_max_position_embeddings"]

    def index_of(turns: float) -> float:
        """The index whose frequency turns so often: length * theta ** (-2 i / width) = 2 pi turns."""
        return width / 2 * log(length / (2 * pi * turns), theta)

    first, last = index_of(table.get("beta_fast") or 32), index_of(table.get("beta_slow") or 1)
    if table.get("truncate", True):
        first, last = floor(first), ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    span = (last - first) or 0.001  # the authors' code steps where there is no room for a ramp
    slowed = [min(max((index - first) / span, 0.0), 1.0) for index in range(len(plain))]
    factor = table["factor"]
    return [f * (1 - part) + f / factor * part for f, part in zip(plain, slowed, strict=True)]


def _llama3(frequency: float, table: Mapping[str, Any]) -> float:
    slowed = frequency / float(table["factor"])
    low, high = float(table["low_freq_factor"]), float(table["high_freq_factor"])
    turns = float(table["original_max_position_embeddings"]) * frequency / (2 * pi)
    if turns > high:
        return frequency
    if turns < low:
        return slowed
    kept = (turns - low) / (high - low)
    return (1 - kept) * slowed + kept * frequency
