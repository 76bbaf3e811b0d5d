"""Cross-entropy and z-loss as sums over valid tokens, in fp32, chunk by chunk.

N tokens · V vocabulary · C tokens of a chunk. Labels are the targets: the data has shifted them already.
"""

from typing import Any

import torch
from torch import Tensor

from ds_pretrain.core.metrics import IGNORED

_CHUNK_ELEMENTS = 1 << 24  # 64 MiB of fp32 logits at a time
_CHUNK_ELEMENTS_CPU = 1 << 18  # 1 MiB: stays in a core's cache


def cross_entropy_and_z(
    logits: Tensor, labels: Tensor, z_loss: float | None, *, chunk_rows: int | None = None
) -> tuple[Tensor, Tensor]:
    """Sums over valid tokens of the negative log-likelihood and of z * logsumexp(logits)^2 (fp32 scalars).

    The caller divides by the number of valid tokens of the *global* batch: then the loss does not depend on
    how the batch is split, and a batch without valid tokens gives 0 with zero gradients. z-loss follows PaLM,
    section 5 (https://arxiv.org/abs/2204.02311); None leaves it out exactly.

    Args:
        logits: [..., V], any float dtype; never copied to fp32 as a whole.
        labels: [...], int64; -100 is ignored.

    Raises:
        ValueError: a label is neither -100 nor in [0, V) (on a GPU: a device assertion).
    """
    flat_logits, flat_labels = _flatten(logits, labels)  # [N, V], [N]
    rows = chunk_rows or _choose_chunk_rows(logits)
    nll_sum, z_sum = _CrossEntropyAndZ.apply(flat_logits, flat_labels, z_loss or 0.0, rows)  # type: ignore[no-untyped-call]
    return nll_sum, z_sum


def token_losses(logits: Tensor, labels: Tensor, *, chunk_rows: int | None = None) -> Tensor:
    """The negative log-likelihood of each token, [...] in fp32, 0 where the label is ignored. No gradient.

    Their sum in fp64, rounded to fp32, is that of `cross_entropy_and_z` bit for bit. `logits` [..., V] are
    never copied to fp32 as a whole.

    Raises:
        ValueError: a label is neither -100 nor in [0, V) (on a GPU: a device assertion).
    """
    flat_logits, flat_labels = _flatten(logits, labels)  # [N, V], [N]
    with torch.no_grad():
        nll, _ = _compute_token_losses(
            flat_logits, flat_labels, chunk_rows or _choose_chunk_rows(logits)
        )  # [N]
    return nll.view(labels.shape)


def _flatten(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """[N, V] and [N], checked against each other."""
    if logits.shape[:-1] != labels.shape:
        raise ValueError(f"logits {tuple(logits.shape)} need labels of {tuple(logits.shape[:-1])}, "
                         f"found {tuple(labels.shape)}")  # fmt: skip
    vocabulary = logits.shape[-1]
    flat_labels = labels.reshape(-1)  # [N]
    _refuse_foreign_labels(flat_labels, vocabulary)
    return logits.reshape(-1, vocabulary), flat_labels


def _choose_chunk_rows(logits: Tensor) -> int:
    return max(1, (_CHUNK_ELEMENTS_CPU if logits.is_cpu else _CHUNK_ELEMENTS) // logits.shape[-1])


def _compute_token_losses(logits: Tensor, labels: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Negative log-likelihood and logsumexp of each token: [N] and [N], fp32."""
    lse = torch.empty(len(labels), dtype=torch.float32, device=logits.device)  # [N]
    for start in range(0, len(labels), rows):
        piece = slice(start, start + rows)
        lse[piece] = torch.logsumexp(logits[piece].float(), dim=-1)
    target = logits.gather(-1, labels.clamp(min=0)[:, None])[:, 0].float()  # [N]
    return torch.where(labels != IGNORED, lse - target, 0.0), lse


def _refuse_foreign_labels(labels: Tensor, vocabulary: int) -> None:
    foreign = (labels != IGNORED) & ((labels < 0) | (labels >= vocabulary))  # [N]
    if labels.device.type != "cpu":
        torch._assert_async(
            ~foreign.any(), f"a label is outside [0, {vocabulary})"
        )  # no host synchronization
    elif foreign.any():
        position = int(foreign.nonzero()[0, 0])
        raise ValueError(
            f"label {int(labels[position])} at position {position} is outside the vocabulary "
            f"[0, {vocabulary}) and is not {IGNORED}; the data were tokenized for a larger vocabulary"
        )


class _CrossEntropyAndZ(torch.autograd.Function):
    """Keeps the logits and one logsumexp a token; the gradient makes the softmax again, chunk by chunk.

    d nll / d logits = softmax - onehot;   d (z lse^2) / d logits = 2 z lse softmax.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, z: float, rows: int) -> tuple[Tensor, Tensor]:
        nll, lse = _compute_token_losses(logits, labels, rows)  # [N], [N]
        nll_sum = nll.sum(dtype=torch.float64)
        square_sum = nll_sum.new_zeros(())
        if z:
            square_sum = torch.where(labels != IGNORED, lse.square(), 0.0).sum(dtype=torch.float64)
        ctx.save_for_backward(logits, labels, lse)
        ctx.z, ctx.rows = z, rows
        return nll_sum.float(), (z * square_sum).float()

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, None, None, None]:
        logits, labels, lse = ctx.saved_tensors
        nll_factor, z_factor = outputs
        scale = nll_factor + z_factor * (2.0 * ctx.z) * lse[:, None] if ctx.z else nll_factor  # [N, 1] or []
        ignored, index = labels == IGNORED, labels.clamp(min=0)[:, None]  # [N], [N, 1]
        gradient = torch.empty_like(logits)  # [N, V], in the dtype of the logits
        for start in range(0, len(labels), ctx.rows):
            piece = slice(start, start + ctx.rows)
            wide = gradient[piece]  # [C, V]: written in place where it is fp32 already
            if wide.dtype != torch.float32:
                wide = torch.empty_like(wide, dtype=torch.float32)
            torch.sub(logits[piece].float(), lse[piece, None], out=wide)
            wide.exp_().mul_(scale[piece] if ctx.z else scale)
            wide.scatter_add_(-1, index[piece], (-nll_factor).expand(len(wide), 1))
            _clear_rows(wide, ignored[piece])
            if gradient.dtype != torch.float32:
                gradient[piece] = wide
        return gradient, None, None, None


def _clear_rows(wide: Tensor, chosen: Tensor) -> None:
    """Zero the rows of `wide` that `chosen` ([C], bool) names, whatever nonsense they hold."""
    if not wide.is_cpu:
        wide.masked_fill_(chosen[:, None], 0.0)  # to ask whether there are any would wait for the device
    elif chosen.any():
        wide[chosen] = 0.0  # on a CPU, filling by mask costs as much as all the rest
