"""Weights from (seed, name): the same bits at any world size and in any ZeRO stage; then checked.

Embeddings and projections are normal with the config's `initializer_range`; the projections that end a
residual branch are smaller by sqrt(2 layers) (GPT-2, section 2.3); biases are zero; norms and whatever else
a family has (decay rates, routers, ...) are what the family's own `_init_weights` makes of them. Parameters
are drawn one by one, in fp32 on the CPU: on rank 0 if partitioned, else on every rank, to the same bits.
"""

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ds_pretrain.core.distributed import World, broadcast_from_main
from ds_pretrain.core.errors import RunError
from ds_pretrain.models.param_groups import get_whole_shape, is_norm, is_partitioned, iterate_parameters

Gather = Callable[[Sequence[nn.Parameter]], AbstractContextManager[Any]]

# Last projection of attention and feed-forward, as families name it.
_RESIDUAL_OUTPUTS = frozenset(
    (
        *("o_proj", "out_proj", "down_proj", "c_proj", "dense", "dense_4h_to_h", "fc2", "fc_out", "w2", "wo"),
        "output_linear",
    )
)
_EXPERT_PROJECTIONS = frozenset(("gate_up_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"))
_SIGMAS = 6.0  # of a normal sample: a right draw fails once in 10^9
_ROUNDING = 1e-3  # of the std: what bf16 may move mean and std by
_CHUNK_ELEMENTS = 1 << 24


class UninitializedWeightsError(RunError):
    """Some weights are not what was asked: the run would train from garbage."""


@dataclass(frozen=True)
class KindReport:
    """Asked and measured statistics of one kind of weight, over all layers."""

    kind: str  # the parameter's name with layer and expert numbers replaced by *
    asked_std: float
    measured_mean: float
    measured_std: float
    num_weights: int
    num_parameters: int


@dataclass(frozen=True)
class _Moments:
    count: int
    total: float
    squares: float

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else math.nan

    @property
    def std(self) -> float:
        return math.sqrt(max(0.0, self.squares / self.count - self.mean**2)) if self.count else math.nan


@dataclass(frozen=True)
class _Asked:
    mean: float
    std: float
    sampled: bool  # statistics of a distribution, met up to chance; otherwise of the very values


def initialize(
    model: Any, *, seed: int, std: float, num_layers: int, world: World, gather: Gather
) -> tuple[KindReport, ...]:
    """Draw every weight of `model`, then measure what has arrived. Collective.

    `gather` makes parameters whole inside it and keeps what rank 0 writes.

    Raises:
        UninitializedWeightsError: on all ranks, naming every kind whose mean or std is not as asked.
    """
    asked: dict[str, _Asked] = {}
    for name, module, parameter in iterate_parameters(model):
        wanted = _get_standard_std(name, module, parameter, std, num_layers)
        if wanted is None:
            continue
        with gather([parameter]):
            if world.is_main or not is_partitioned(parameter):
                _write(parameter, _draw_values(seed, name, get_whole_shape(parameter), wanted))
                asked[name] = _Asked(0.0, wanted, sampled=wanted > 0)
    for prefix, module in _find_modules_with_own_rule(model, std, num_layers):
        subtree = [(f"{prefix}.{n}" if prefix else n, m, p) for n, m, p in iterate_parameters(module)]
        with gather([parameter for _, _, parameter in subtree]):
            if world.is_main or not any(is_partitioned(parameter) for _, _, parameter in subtree):
                asked |= _initialize_by_family(model, module, subtree, f"{seed}:{prefix}")
    return check_weights(model, broadcast_from_main(world, asked), gather)


def check_weights(model: nn.Module, asked: dict[str, _Asked], gather: Gather) -> tuple[KindReport, ...]:
    """Measure the weights as they lie, and compare each parameter with what was asked. Collective.

    Raises:
        UninitializedWeightsError: naming every kind that is off, with both values.
    """
    found: dict[str, list[tuple[_Asked, _Moments]]] = {}
    problems: dict[str, str] = {}
    for name, _, parameter in iterate_parameters(model):
        kind = get_kind(name)
        with gather([parameter]):
            moments = _measure(parameter.data)
        wanted = asked.get(name, _Asked(math.nan, math.nan, sampled=False))
        if problem := _find_problem(moments, wanted, math.prod(get_whole_shape(parameter))):
            problems.setdefault(kind, f"{kind} (first: {name}): {problem}")
        found.setdefault(kind, []).append((wanted, moments))
    if problems:
        raise UninitializedWeightsError(
            "initialization check failed, nothing was trained:\n  " + "\n  ".join(problems.values())
        )
    return tuple(_report(kind, parts) for kind, parts in found.items())


def expect_values(values: Tensor) -> _Asked:
    """Expect weights to be these very values, where they were not drawn."""
    moments = _measure(values)
    return _Asked(moments.mean, moments.std, sampled=False)


def get_kind(name: str) -> str:
    """`model.layers.17.mlp.up_proj.weight` -> `model.layers.*.mlp.up_proj.weight`."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def _get_standard_std(
    name: str, module: nn.Module, parameter: nn.Parameter, std: float, num_layers: int
) -> float | None:
    """The std of a parameter that every family has, 0 for biases; None: the family's own rule applies."""
    if isinstance(module, nn.Embedding):
        return std
    path, _, leaf = name.rpartition(".")
    scaled = std / math.sqrt(2 * num_layers)
    if isinstance(module, nn.Linear | Conv1D):
        if leaf == "bias":
            return 0.0
        inside_layer = "*" in get_kind(name)
        return scaled if inside_layer and path.rpartition(".")[2] in _RESIDUAL_OUTPUTS else std
    if leaf in _EXPERT_PROJECTIONS and len(get_whole_shape(parameter)) == 3:
        return scaled if leaf in _RESIDUAL_OUTPUTS else std
    return None


def _draw_values(seed: int, name: str, shape: tuple[int, ...], std: float) -> Tensor:
    if std == 0.0:
        return torch.zeros(shape, dtype=torch.float32)
    generator = torch.Generator(device="cpu").manual_seed(_hash_text(f"{seed}:{name}"))
    return torch.empty(shape, dtype=torch.float32, device="cpu").normal_(0.0, std, generator=generator)


def _write(parameter: nn.Parameter, values: Tensor) -> None:
    """Set the values; skip a parameter that is not whole here, since only the check fails on all ranks."""
    if parameter.shape == values.shape:
        parameter.data.copy_(values)


def _hash_text(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _find_modules_with_own_rule(
    model: nn.Module, std: float, num_layers: int
) -> Iterator[tuple[str, nn.Module]]:
    for prefix, module in model.named_modules():
        own = module.named_parameters(prefix=prefix, recurse=False)
        if any(
            _get_standard_std(name, module, parameter, std, num_layers) is None for name, parameter in own
        ):
            yield prefix, module


def _initialize_by_family(
    model: Any, module: nn.Module, subtree: list[tuple[str, nn.Module, nn.Parameter]], seed_text: str
) -> dict[str, _Asked]:
    """Let the family's `_init_weights` fill `module`; what it leaves alone keeps its constructor's value.

    It may also reach into children (Mamba sets the bias of its time-step projection): those values win too,
    except over the scaled output projections.
    """
    asked: dict[str, _Asked] = {}
    with (
        _hold_on_cpu_as_nan([parameter for _, _, parameter in subtree]) as constructed,
        torch.random.fork_rng(devices=[]),
    ):
        torch.default_generator.manual_seed(_hash_text(seed_text))
        with torch.no_grad():
            model._init_weights(module)
        drawn = [parameter.data for _, _, parameter in subtree]
    for (name, owner, parameter), values, before in zip(subtree, drawn, constructed, strict=True):
        direct = owner is module
        touched = not bool(values.isnan().all())
        if direct or (touched and name.split(".")[-2] not in _RESIDUAL_OUTPUTS and not is_norm(owner)):
            _write(parameter, values if touched else before)
            moments = _measure(parameter.data)
            asked[name] = _Asked(moments.mean, moments.std, sampled=False)
    return asked


@contextmanager
def _hold_on_cpu_as_nan(parameters: Sequence[nn.Parameter]) -> Iterator[list[Tensor]]:
    """Inside it the parameters are fp32, on the CPU, and NaN, so draws depend on no device or dtype."""
    constructed = [parameter.data for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.data = torch.full(parameter.shape, math.nan, dtype=torch.float32, device="cpu")
        yield constructed
    finally:
        for parameter, before in zip(parameters, constructed, strict=True):
            parameter.data = before


def _measure(values: Tensor) -> _Moments:
    total = squares = 0.0
    for piece in values.detach().reshape(-1).split(_CHUNK_ELEMENTS):  # type: ignore[no-untyped-call]
        wide = piece.double()
        total += wide.sum().item()
        squares += wide.square().sum().item()
    return _Moments(values.numel(), total, squares)


def _find_problem(found: _Moments, asked: _Asked, num_weights: int) -> str | None:
    if found.count != num_weights or num_weights == 0:
        return f"expected {num_weights} weights, found {found.count} (partitioned and never gathered?)"
    if math.isnan(asked.mean):
        return "no rule has initialized it"
    # Standard errors of a normal sample of n: std/sqrt(n) of the mean, std/sqrt(2n) of the std.
    chance = _SIGMAS / math.sqrt(num_weights) if asked.sampled else 0.0
    scale = max(asked.std, 1e-3 * abs(asked.mean), 1e-12)
    mean_off = abs(found.mean - asked.mean) / scale > chance + _ROUNDING
    std_off = abs(found.std - asked.std) / scale > chance / math.sqrt(2) + _ROUNDING
    if mean_off or std_off or math.isnan(found.mean):
        wanted = f"expected mean {asked.mean:.3g}, std {asked.std:.3g}"
        return f"{wanted}; found mean {found.mean:.3g}, std {found.std:.3g}"
    return None


def _report(kind: str, parts: list[tuple[_Asked, _Moments]]) -> KindReport:
    pooled = _Moments(
        sum(m.count for _, m in parts), sum(m.total for _, m in parts), sum(m.squares for _, m in parts)
    )
    return KindReport(kind, parts[0][0].std, pooled.mean, pooled.std, pooled.count, len(parts))
