"""What comes before an engine: the process group, and the contexts in which modules are born and read."""

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ds_pretrain.config.deepspeed import uses_bf16, zero_stage
from ds_pretrain.core.distributed import World, uses_gpu

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # DeepSpeed and what it imports; ours stay errors in tests
    import deepspeed


def initialize_distributed(world: World) -> None:
    """Join the process group (NCCL on GPUs, gloo on CPUs) of the launcher's variables. Collective."""
    quiet_deepspeed()
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


def quiet_deepspeed() -> None:
    """Keep DeepSpeed from logging what no one acts on, and from compiling a collective at each CPU start.

    On CPUs it builds a shared-memory reduction with the host's C++ compiler: a minute on a fresh machine,
    an error without a compiler, and nothing that gloo does not do.
    """
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # DeepSpeed's calls
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def dtype_of(config: Mapping[str, Any]) -> torch.dtype:
    """The type of parameters and activations that the DeepSpeed JSON asks for."""
    return torch.bfloat16 if uses_bf16(config) else torch.float32


def partition(config: Mapping[str, Any]) -> Callable[[], AbstractContextManager[Any]]:
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
