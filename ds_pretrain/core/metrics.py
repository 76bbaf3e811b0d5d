"""One step's numbers, with their units in their names. The same on every rank."""

from dataclasses import asdict, dataclass
from typing import Any

IGNORED = -100  # the label of a token that is no target: no loss and no number counts it


@dataclass(frozen=True)
class StepRecord:
    """The numbers of one optimizer step, over all ranks and the whole global batch.

    `loss` is the mean cross-entropy in nats per valid token; `z_loss` is the weighted auxiliary term, None
    when off; `grad_norm` is before clipping, None when non-finite; `clip_factor` is what clipping multiplied
    the gradient by (1.0 is "not clipped"), None when the update was skipped or clipping is off.
    """

    step: int  # 1 for the first: the number of optimizer steps that the run has attempted
    phase: str
    loss: float
    loss_max_rank: float  # the highest mean loss of any one rank
    loss_other_ranks: float | None  # over the tokens of all other ranks; None: they have none
    z_loss: float | None
    learning_rate: float
    grad_norm: float | None
    clip_factor: float | None
    update_applied: bool
    num_valid_tokens: int  # over the global batch
    num_valid_tokens_min_rank: int
    tokens: int  # read in all, up to and including this step
    samples: int  # read in all, up to and including this step
    batch_checksum: int  # sum of the samples' CRC-32: the same data gives the same, on any number of ranks
    step_seconds: float
    data_wait_seconds: float  # the longest of any rank

    def to_json(self) -> dict[str, Any]:
        """Plain types, in field order."""
        return asdict(self)


@dataclass(frozen=True)
class Probe:
    """A loss by which a restored model shows that it computes what the saved one did.

    That of the first micro-batch of each rank, of the update after `step` finished steps, with the weights of
    the checkpoint and in training mode. Training computes it anyway, so a save costs nothing more.
    """

    step: int
    loss: float  # mean cross-entropy, in nats a token
    checksum: int  # sum of the samples' CRC-32: other data has another loss
    num_ranks: int
    micro_batch_size: int
