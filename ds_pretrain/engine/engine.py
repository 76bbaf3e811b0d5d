"""The training engine behind one Protocol, and DeepSpeed behind that.

The facts that this file relies on were measured on DeepSpeed 0.19.8 and have tests of ours that fail when
they change: the caller owns the accumulation window, rates are set on the live parameter groups, a non-finite
gradient drops the update on all ranks, and a load leaves things behind that have to be cleared.

Shapes: B sequences of a micro-batch, T tokens of a sequence, V vocabulary.
"""

import hashlib
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_pretrain.config.deepspeed import gradient_clipping, uses_bf16, zero_stage
from ds_pretrain.core.distributed import World, uses_gpu
from ds_pretrain.core.files import Capture
from ds_pretrain.engine import partitions
from ds_pretrain.engine.sequence_parallel import SequenceParallel
from ds_pretrain.engine.skip_step import skip_updates_above

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # DeepSpeed and what it imports; ours stay errors in tests
    import deepspeed

ParameterGroups = Sequence[Mapping[str, Any]]
DocumentInputs = Callable[[Tensor, torch.device], Mapping[str, Any]]


@dataclass(frozen=True)
class Update:
    """The outcome of one optimizer step. The same on every rank."""

    applied: bool
    grad_norm: float | None  # over the window and all ranks, before clipping; None when not finite. A number
    # where the update was not applied is one that was above the limit.
    clip_factor: float | None  # what clipping multiplied the gradient by; None when dropped or not clipping


class Engine(Protocol):
    """A model with its sharded optimizer. All but `rates`, `digest` and `snapshot_bytes` are collective."""

    device: torch.device
    sequence_parallel_size: (
        int  # neighboring ranks that read the same rows, each having a span of their tokens
    )

    @property
    def module(self) -> nn.Module:
        """The model itself; its parameters may be partitioned."""
        ...

    def logits(self, input_ids: Tensor, documents: Tensor | None = None) -> Tensor:
        """[B, T] token ids to [B, T, V] logits; of `own_tokens` alone where ranks share sequences.

        With `documents` [B, T], each token sees its own document of its row alone, from position 0 on.
        """
        ...

    def local_shard(self, row: Tensor) -> Tensor:
        """[B, T] of whole rows to what this rank's logits are of: all of it, or [B, T / n] of n ranks."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a scalar to the window. Ranks are averaged: the caller scales for it."""
        ...

    def step(self, rate: float, norm_limit: float | None = None) -> Update:
        """Close the window: clip, update at this learning rate, clear the gradients.

        An update whose norm is above the limit is skipped on all ranks, as one that is no number always is.
        """
        ...

    def evaluation_mode(self) -> AbstractContextManager[None]:
        """No dropout, no gradients; training mode comes back at the end."""
        ...

    def learning_rates(self) -> list[float]:
        """The learning rates in the optimizer's groups now."""
        ...

    def snapshot_bytes(self) -> int:
        """Host memory that a copy of this rank's shards takes, about."""
        ...

    def save(self, folder: Path, tag: str, capture: Capture | None = None) -> Exception | None:
        """Write this rank's shards to `folder/tag`, or hand each of its files to `capture` instead.

        Why this rank could not, if it could not; every rank has then done its part all the same.
        """
        ...

    def load(self, folder: Path, tag: str) -> None:
        """Load a checkpoint saved by this number of ranks; nothing remains of an open accumulation window."""
        ...

    def load_universal(self, folder: Path, tag: str, optimizer_steps: int) -> list[str]:
        """Read `folder/tag`, a universal checkpoint; what is then not bit for bit what its files hold."""
        ...

    def group_members(self) -> list[tuple[str, list[str]]]:
        """The parameter groups and their members, as the optimizer holds them."""
        ...

    def digest(self) -> str:
        """A hash of this rank's fp32 masters and optimizer state: equal only if every bit is."""
        ...


def initialize_distributed(world: World) -> None:
    """Join the process group (NCCL on GPUs, gloo on CPUs) of the launcher's variables. Collective."""
    silence_deepspeed()
    if uses_gpu():
        torch.cuda.set_device(world.local_rank)
    if dist.is_initialized():
        return
    backend = "nccl" if uses_gpu() else "gloo"
    if world.size > 1:
        deepspeed.init_distributed(backend, verbose=False)
    else:  # perhaps without a launcher; a group of one may take any port
        world.to_environment()
        deepspeed.init_distributed(
            backend,
            auto_mpi_discovery=False,
            verbose=False,
            init_method="tcp://127.0.0.1:0",
            rank=0,
            world_size=1,
        )


def silence_deepspeed() -> None:
    """Keep DeepSpeed from logging what no one acts on, and from compiling a collective at each CPU start.

    On CPUs it builds a shared-memory reduction with the host's C++ compiler: a minute on a fresh machine,
    an error without a compiler, and nothing that gloo does not do.
    """
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # DeepSpeed's calls
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def get_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """The type of parameters and activations that the DeepSpeed JSON asks for."""
    return torch.bfloat16 if uses_bf16(config) else torch.float32


def open_partitioning(config: Mapping[str, Any]) -> Callable[[], AbstractContextManager[Any]]:
    """The context in which modules are constructed: under ZeRO-3 each parameter is sharded as it is born.

    The type of the parameters is the JSON's. DeepSpeed 0.19.8 makes any `dtype` that it is given bfloat16
    where the accelerator has no fp16 arithmetic, as most CPUs.
    """
    if zero_stage(config) < 3:
        return nullcontext
    return lambda: deepspeed.zero.Init(config_dict_or_path=dict(config))


def gather(config: Mapping[str, Any]) -> Callable[[Sequence[nn.Parameter]], AbstractContextManager[Any]]:
    """The context in which sharded parameters are whole; what rank 0 writes is kept on all. Collective."""
    if zero_stage(config) < 3:
        return lambda parameters: nullcontext()
    return lambda parameters: deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=0)


def open_engine(
    module: nn.Module,
    groups: ParameterGroups,
    config: Mapping[str, Any],
    document_inputs: DocumentInputs | None = None,
    shared: SequenceParallel | None = None,
) -> "ZeroEngine":
    """Hand the model to DeepSpeed. `config` is the resolved JSON. Collective.

    `document_inputs` makes of documents [B, T] and a device what the module is told to keep them apart.
    `shared` says which ranks share their sequences; the module's attention must have been told too.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine, *_ = deepspeed.initialize(model=module, model_parameters=list(groups), config=dict(config))
    return ZeroEngine(engine, gradient_clipping(config), document_inputs, shared)


class ZeroEngine:
    """DeepSpeed's engine as an `Engine`."""

    def __init__(
        self,
        engine: Any,
        clip: float | None,
        document_inputs: DocumentInputs | None = None,
        shared: SequenceParallel | None = None,
    ) -> None:
        self._engine = engine
        self._clip = clip
        self._document_inputs = document_inputs
        self._shared = shared
        self.sequence_parallel_size = 1 if shared is None else shared.size
        self._captured: list[Callable[[], None]] = []  # wait until copies of a save are made
        self.device: torch.device = torch.device(engine.device)

    @property
    def module(self) -> nn.Module:
        """The model itself; its parameters may be partitioned."""
        module: nn.Module = self._engine.module
        return module

    def logits(self, input_ids: Tensor, documents: Tensor | None = None) -> Tensor:
        """[B, T] token ids to [B, T, V] logits, of `own_tokens` alone; `documents` may lie on the host.

        Raises:
            ValueError: documents to an engine that was opened without the way to tell them apart.
        """
        given: Mapping[str, Any] = {}
        if self._shared is not None:  # a rank's tokens do not say where they lie in their row
            positions = torch.arange(input_ids.shape[1], device=input_ids.device)  # [T]
            given = {"position_ids": self.local_shard(positions.expand_as(input_ids))}  # [B, T / n]
        if documents is not None:
            if self._document_inputs is None:
                raise ValueError("documents given to an engine that was opened without document_inputs")
            given = self._document_inputs(documents, self.device)
        own = self.local_shard(input_ids)  # [B, T], or [B, T / n]
        logits: Tensor = self._engine(input_ids=own, use_cache=False, **given).logits  # [B, T, V]
        return logits

    def local_shard(self, row: Tensor) -> Tensor:
        """This rank's span of whole rows."""
        return row if self._shared is None else self._shared.local_shard(row)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a scalar to the window; scaling by the window is the caller's."""
        self._engine.backward(loss, scale_wrt_gas=False)

    def step(self, rate: float, norm_limit: float | None = None) -> Update:
        """Set the rate on the live groups, then step: no scheduler object that could disagree."""
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_scale", 1.0)
        self._await_copies()
        with skip_updates_above(self._engine.optimizer, norm_limit) as dropped:
            self._engine.step()
        applied = bool(self._engine.was_step_applied())
        norm = dropped[0] if dropped else _to_finite(self._engine.get_global_grad_norm())
        return Update(applied, norm, _clip_factor(norm, self._clip) if applied else None)

    @contextmanager
    def evaluation_mode(self) -> Iterator[None]:
        """No dropout, no gradients."""
        self._engine.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self._engine.train()

    def learning_rates(self) -> list[float]:
        """The learning rates in the optimizer's groups now."""
        return [float(group["lr"]) for group in self._engine.optimizer.param_groups]

    def snapshot_bytes(self) -> int:
        """Masters and two moments in fp32, and the weights that this rank saves."""
        masters = sum(master.numel() for master in partitions.get_masters(self._engine.optimizer))
        saves_weights = self._engine.zero_optimization_stage() == 3 or self._engine.global_rank == 0
        weights = sum(
            (p.ds_tensor if hasattr(p, "ds_tensor") else p).nbytes
            for p in self._engine.module.parameters()
            if saves_weights
        )
        return int(3 * 4 * masters + weights)

    def save(self, folder: Path, tag: str, capture: Capture | None = None) -> Exception | None:
        """DeepSpeed's own shards. It may not write `latest`: that could name a torn checkpoint after a kill.

        A rank that cannot write continues to DeepSpeed's last barrier: nobody waits for it forever. So
        DeepSpeed may not copy its recovery scripts either, which it does on one rank before that barrier.
        """
        writer = self._engine.checkpoint_engine
        failures: list[Exception] = []
        write = writer.save

        def try_to_write(state_dict: Any, path: str) -> None:
            try:
                if capture is None:
                    write(state_dict, path)
                else:
                    self._captured.append(capture(state_dict, Path(path)))
            except Exception as error:  # told by the return value, once every rank is through
                failures.append(error)

        writer.save = try_to_write
        self._engine._copy_recovery_script = lambda folder: None
        try:
            self._engine.save_checkpoint(str(folder), tag=tag, save_latest=False)
        finally:
            writer.save = write
            del self._engine._copy_recovery_script
        return failures[0] if failures else None

    def load(self, folder: Path, tag: str) -> None:
        """Load a checkpoint saved by this number of ranks; nothing remains of an open accumulation window."""
        self._await_copies()
        partitions.load(self._engine, folder, tag)

    def load_universal(self, folder: Path, tag: str, optimizer_steps: int) -> list[str]:
        """DeepSpeed's universal load, and the repair of what it gets wrong."""
        self._await_copies()
        return partitions.load_universal(self._engine, folder, tag, optimizer_steps)

    def group_members(self) -> list[tuple[str, list[str]]]:
        """The parameter groups and their members, as the optimizer holds them."""
        return partitions.list_group_members(self._engine)

    def _await_copies(self) -> None:
        """Before anything changes that a save still copies."""
        while self._captured:
            self._captured.pop()()

    def digest(self) -> str:
        """SHA-256 over this rank's partitions, in the optimizer's own order."""
        digest = hashlib.sha256()
        optimizer = self._engine.optimizer
        for master in partitions.get_masters(optimizer):
            _hash_tensor(digest, master)
            state = optimizer.optimizer.state.get(master, {})
            for name in sorted(state):
                digest.update(name.encode())
                value = state[name]
                _hash_tensor(digest, value if torch.is_tensor(value) else torch.tensor(value))
        return digest.hexdigest()


def _hash_tensor(digest: "hashlib._Hash", tensor: Tensor) -> None:
    digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def _to_finite(norm: Any) -> float | None:
    """DeepSpeed gives a tensor, inf on a dropped step, and -1 or None where it has no norm."""
    value = math.nan if norm is None else float(norm)
    return value if math.isfinite(value) and value >= 0 else None


def _clip_factor(norm: float | None, clip: float | None) -> float | None:
    """DeepSpeed divides by (norm + 1e-6) / clip where that is above 1."""
    if norm is None or clip is None:
        return None
    return min(1.0, clip / (norm + 1e-6))
