"""Learning-rate schedules: pure functions, so there is nothing to save and nothing to restore.

Each returns the fraction of the peak learning rate for the update after `step` applied updates. Steps are
optimizer steps, whatever gradient accumulation and world size are; `length`, `warmup` and `decay` count them.
"""

from math import cos, pi, sqrt
from typing import Literal

DecayShape = Literal["linear", "cosine", "1-sqrt", "exponential"]
LrScaling = Literal["none", "linear", "sqrt"]


def cosine_fraction(step: int, length: int, warmup: int, floor: float) -> float:
    """Linear warmup, then half a cosine down to `floor` (Loshchilov & Hutter, arXiv:1608.03983)."""
    _check_step(step, length)
    if step < warmup:
        return step / warmup
    progress = (step - warmup) / max(1, length - warmup)
    return floor + (1.0 - floor) * 0.5 * (1.0 + cos(pi * progress))


def wsd_fraction(step: int, length: int, warmup: int, decay: int, shape: DecayShape, floor: float) -> float:
    """Warmup, a stable part at the peak, then a decay to `floor` (Hu et al., arXiv:2404.06395).

    1-sqrt: Hagele et al., arXiv:2405.18392.
    """
    _check_step(step, length)
    if step < warmup:
        return step / warmup
    if step <= length - decay:
        return 1.0
    progress = (step - (length - decay)) / decay
    if shape == "exponential":
        return float(floor**progress)
    remaining = {
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + cos(pi * progress)),
        "1-sqrt": 1.0 - sqrt(progress),
    }[shape]
    return floor + (1.0 - floor) * remaining


def lr_scaling_factor(rule: LrScaling, batch_tokens: int, meant_tokens: int) -> float:
    """The learning rate's factor at a batch other than the one that peak_lr is meant for.

    linear: Goyal et al., arXiv:1706.02677. sqrt: for Adam, Malladi et al., arXiv:2205.10287.
    """
    share = batch_tokens / meant_tokens
    return {"none": 1.0, "linear": share, "sqrt": sqrt(share)}[rule]


def _check_step(step: int, length: int) -> None:
    if not 0 <= step <= length:
        raise ValueError(f"the schedule covers steps 0 to {length}; step {step} lies outside it")
