"""A model's rotary tables, and the cosines and sines that come of them, held against fp64.

* default: Su et al., arXiv:2104.09864, section 3.2.2.
* linear: Chen et al., arXiv:2306.15595: positions divided by the factor.
* yarn: Peng et al., arXiv:2309.00071: frequencies that turn more than `beta_fast` times within the original
  length stay, those that turn less than `beta_slow` times are divided by the factor ("NTK-by-parts"), and
  queries and keys are both scaled by 0.1 ln(factor) + 1. In between, the paper's ramp is linear in the number
  of turns; that of its authors' code (https://github.com/jquesnelle/yarn), which Transformers and published
  models follow, is linear in the index of the frequency, from and to whole indices. This is the latter.
* llama3: https://github.com/meta-llama/llama-models/blob/main/models/llama3/model.py (apply_scaling).

Shapes: P positions, F frequencies, D the rotated numbers of a head, 2 F.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, floor, log, pi
from typing import Any

import torch
from torch import Tensor, nn

from ds_pretrain.models.rope import SUFFIX, find_rotary_modules

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
    """Return the factor on cosines and sines."""
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


TOLERANCE = 1e-3  # of a cosine or sine
POSITIONS = (0, 1, 255, 256, 257, 4095, 131_071)  # and the last of the model


@dataclass(frozen=True)
class RopeCheck:
    """A model's rotary tables against fp64."""

    num_tables: int  # that were checked
    worst_error: float  # of a cosine or sine, at any position checked
    problems: tuple[str, ...]
    unchecked: tuple[
        str, ...
    ]  # tables of kinds that have no reference, or that do not give cosines and sines


def check_rope(module: nn.Module) -> RopeCheck:
    """Hold tables, cosines and sines against fp64, at positions up to the model's last.

    Cosines and sines as the model computes them, in fp32; Transformers rounds them to the dtype of the
    activations afterwards. An angle in fp32 is off by some 2^-23 of its size, and the fastest frequency turns
    a radian a position: where that passes the tolerance, from position 8,000 or so on, it is the bound.
    """
    worst, problems, unchecked, num_tables = 0.0, list[str](), list[str](), 0
    names = {id(each): name for name, each in module.named_modules()}
    for rotary in find_rotary_modules(module):
        for key, table in rotary.named_buffers(recurse=False):
            if not key.endswith(SUFFIX):
                continue
            name, parameters = f"{names[id(rotary)]}.{key}", _parameters_of(rotary, key)
            if parameters is None or parameters.get("rope_type") not in KINDS:
                unchecked.append(name)
                continue
            num_tables += 1
            if problem := _table_problem(name, table, parameters):
                problems.append(problem)
            if key.endswith(f"original_{SUFFIX}"):
                continue  # what a length-following kind would go back to
            turned = _turned(rotary, key, table)
            if turned is None:
                unchecked.append(f"cosines and sines of {name}")
                continue
            error, problem = _turned_error(name, turned, _positions(rotary), parameters)
            worst = max(worst, error)
            problems += [problem] if problem else []
    return RopeCheck(num_tables, worst, tuple(problems), tuple(unchecked))


def _table_problem(name: str, table: Tensor, parameters: Mapping[str, Any]) -> str | None:
    if table.dtype != torch.float32:
        return f"{name} is in {table.dtype}; expected torch.float32: something cast it after it was computed"
    exact = torch.tensor(reference_frequencies(parameters, 2 * len(table)), dtype=torch.float64)  # [F]
    error = float((table.detach().cpu().double() / exact - 1).abs().max())
    if error < 1e-5:
        return None
    return f"{name} is off by a factor of up to {1 + error:.6g} from {_in_words(parameters)} in fp64"


def _turned_error(
    name: str, turned: tuple[Tensor, Tensor], positions: list[int], parameters: Mapping[str, Any]
) -> tuple[float, str | None]:
    """The largest error of a cosine or sine, and what is wrong if it is too large."""
    width, scale = 2 * turned[0].shape[-1], reference_scale(parameters)
    exact = torch.tensor(reference_frequencies(parameters, width), dtype=torch.float64)  # [F]
    where = torch.tensor(positions, dtype=torch.float64)  # [P]
    angles = where[:, None] * exact  # [P, F]
    errors = (turned[0] - scale * angles.cos()).abs().maximum((turned[1] - scale * angles.sin()).abs())
    # What fp32 makes of an angle: the rounding of the product, and of the power that is the frequency
    allowed = scale * (angles * (1 - exact.log()).clamp(min=1) * 2.0**-23).clamp(min=TOLERANCE)  # [P, F]
    worst = float(errors.max())
    if bool((errors <= allowed).all()):
        return worst, None
    row = int((errors - allowed).amax(1).argmax())
    return worst, (
        f"{name}: at position {positions[row]:,} a cosine or sine is off by "
        f"{float(errors[row].max()):.3g} from {_in_words(parameters)} in fp64; expected at most {TOLERANCE:g}"
    )


def _turned(rotary: nn.Module, key: str, table: Tensor) -> tuple[Tensor, Tensor] | None:
    """Cosines and sines [P, F] as the module computes them in fp32; None if it gives something else."""
    forward = type(rotary).forward  # past the hooks: an engine's would take it for a step of the model
    named: dict[str, Any] = {
        "position_ids": torch.tensor([_positions(rotary)], device=table.device)  # [1, P]
    }
    if "layer_type" in inspect.signature(forward).parameters:
        named["layer_type"] = key.removesuffix(SUFFIX).rstrip("_") or None
    try:
        with torch.no_grad():
            turned = forward(rotary, torch.zeros(1, device=table.device), **named)
        cosines, sines = (turned.real, turned.imag) if torch.is_tensor(turned) else turned
    except (TypeError, ValueError, IndexError, RuntimeError):
        return None  # positions of several axes, say
    return _by_frequency(cosines, len(table)), _by_frequency(sines, len(table))


def _by_frequency(values: Tensor, num_frequencies: int) -> Tensor:
    """[1, P, D] or [1, P, F] to [P, F]: each frequency stands twice, in halves or side by side."""
    values = values[0].double().cpu()
    if values.shape[-1] == num_frequencies:
        return values
    halves = values[:, :num_frequencies]
    return halves if torch.equal(halves, values[:, num_frequencies:]) else values[:, ::2]


def _positions(rotary: Any) -> list[int]:
    last: int = getattr(rotary.config, "max_position_embeddings", POSITIONS[-1] + 1) - 1
    return sorted({*(position for position in POSITIONS if position < last), last})


def _parameters_of(rotary: Any, key: str) -> dict[str, Any] | None:
    """The rotary parameters that a table was made of."""
    parameters = getattr(rotary.config, "rope_parameters", None) or {}
    if any(isinstance(value, Mapping) for value in parameters.values()):
        layer = key.removesuffix(SUFFIX).removesuffix("original_").rstrip("_")
        parameters = parameters.get(layer or getattr(rotary, "layer_type", None)) or {}
    return dict(parameters) if parameters.get("rope_theta") else None


def _in_words(parameters: Mapping[str, Any]) -> str:
    factor = f", factor {parameters['factor']:g}" if parameters.get("factor") else ""
    return f"{parameters['rope_type']} (theta {parameters['rope_theta']:,.10g}{factor})"
