"""What a checkpoint holds, free of how many ranks wrote it."""

import contextlib
import io
import warnings
from pathlib import Path

from torch import Tensor


def whole_weights(folder: Path) -> dict[str, Tensor]:
    """The fp32 weights of a checkpoint by parameter name, gathered from every rank's shards, on the CPU.

    Tied weights stand under each of their names. Runs on one process and holds the whole model.
    """
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        weights = get_fp32_state_dict_from_zero_checkpoint(str(folder.parent), tag=folder.name)
    return {name: weight.contiguous() for name, weight in weights.items()}
