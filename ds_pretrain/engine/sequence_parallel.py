"""Sequences that neighboring ranks share: each has a span of the tokens, and in attention some of the heads.

DeepSpeed Ulysses (https://arxiv.org/abs/2309.14509) exchanges tokens for heads before attention and back
behind it. DeepSpeed's own registration is for one micro-batch and once a process; here the exchange is made
for each shape that comes, so validation, probes and phases need no word about it.

Shapes: B sequences of a micro-batch, T tokens of a sequence, n ranks that share it, H heads of which K have
keys and values, D of a head, V vocabulary.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_pretrain.core.distributed import World, gather_rows
from ds_pretrain.core.errors import InputError, mark_agreed

Kernel = Callable[..., Any]  # (attention module, query [B, H, T, D], key and value [B, K, T, D], mask, ...)

_PROBE_TOKENS = 16  # of each rank
# The most that logits may differ from those of whole rows, of the largest; one that attends to its own span
# alone differs by 0.03 to 0.3 in new models of many shapes.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


class SequenceParallel:
    """The group of this rank, and the exchange inside it."""

    def __init__(self, world: World, size: int) -> None:
        """Groups of `size` neighboring ranks. Collective."""
        self.size = size
        self._place = world.rank % size
        self._is_whole = False
        for first in range(0, world.size, size):  # every rank has to make every group
            group = dist.new_group(list(range(first, first + size)))
            if world.rank // size == first // size:
                self._group = group

    def local_shard(self, row: Tensor) -> Tensor:
        """[B, T] to the [B, T / n] that are this rank's: spans in the order of ranks."""
        if self._is_whole:
            return row
        length, rest = divmod(row.shape[1], self.size)
        if rest:
            raise ValueError(f"rows of {row.shape[1]} tokens cannot be divided among {self.size} ranks")
        return row[:, self._place * length : (self._place + 1) * length]

    def distribute(self, kernel: Kernel) -> Kernel:
        """The same attention over rows of which each rank has a span. Its masks are dropped: it is causal."""
        by_shape: dict[tuple[int, ...], Kernel] = {}

        def attend(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **more: Any
        ) -> Any:
            if self._is_whole:
                return kernel(module, query, key, value, mask, **more)
            batch, heads, _, width = query.shape
            shape = (batch, heads, key.shape[1], width)
            if shape not in by_shape:
                by_shape[shape] = self._exchange(kernel, *shape)
            return by_shape[shape](module, query, key, value, None, **more)

        return attend

    def _exchange(self, kernel: Kernel, batch: int, heads: int, pairs: int, width: int) -> Kernel:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # DeepSpeed and what it imports; ours stay errors in tests
            from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
        exchange: Kernel = UlyssesSPAttentionHF(
            attn=kernel,
            batch_size=batch,
            attn_head_count=heads,
            attn_head_size=width,
            kv_head_count=pairs,
            num_hidden_layers=1,  # read by a debugging mode alone
            process_group=self._group,
            seq_length_is_variable=True,
        )
        return exchange

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Inside it, each rank computes whole rows by itself."""
        self._is_whole = True
        try:
            yield
        finally:
            self._is_whole = False


def refuse_unlike(
    logits: Callable[[Tensor], Tensor],
    shared: SequenceParallel,
    vocab_size: int,
    most_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    world: World,
) -> None:
    """Compare shared rows with whole ones on the real model, before any training. Collective.

    `logits` maps [B, T] token ids to [B, T, V], or to those of this rank's tokens; call it without dropout.

    Raises:
        InputError: they differ, or the model's attention cannot be shared at all.
    """
    length = shared.size * min(_PROBE_TOKENS, most_tokens // shared.size)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocab_size, (1, length), generator=generator).to(device)  # [1, T]
    with torch.no_grad():
        with shared.disabled():
            whole = logits(tokens).float()  # [1, T, V]
        try:
            own = logits(tokens).float()  # [1, T / n, V]
        except (torch.OutOfMemoryError, dist.DistError):
            raise  # of one rank, perhaps, and no fault of the model
        except (AssertionError, RuntimeError, ValueError) as error:
            refused = InputError(f"{_describe_refusal(shared)}: {error}; {_REMEDY}")
            # What DeepSpeed says of shapes all ranks are told; anything else may be of one alone.
            raise (refused if isinstance(error, RuntimeError) else mark_agreed(refused)) from error
    off = (own - shared.local_shard(whole)).abs().max() / whole.abs().max()
    most = float(gather_rows(world, [float(off)]).max())
    if not most <= _TOLERANCE[dtype]:
        raise mark_agreed(
            InputError(
                f"{_describe_refusal(shared)}: sequence-parallel logits differ from single-rank logits "
                f"(relative error {most:.1e}, beyond rounding); {_REMEDY}"
            )
        )


_REMEDY = "use a family of plain attention such as llama or qwen3, or delete the key"


def _describe_refusal(shared: SequenceParallel) -> str:
    return f"`sequence_parallel_size` = {shared.size} does not work with this model"
