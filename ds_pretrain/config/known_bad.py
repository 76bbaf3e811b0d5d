"""Library versions known to spoil gradients, and what to say when norms are no numbers again and again.

Only what public threads report is listed, each cited. Where they do not name the release with the fix, it was
looked up in the sources of the releases around it.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from ds_pretrain.config.deepspeed import uses_bf16, zero_stage

Condition = Literal["bf16", "overlap_comm", "contiguous_gradients"]
LIBRARIES = ("deepspeed", "torch")
WITHOUT_OVERLAP = "ds_configs/zero3_bf16_no_overlap.json"


@dataclass(frozen=True)
class KnownBad:
    """Versions and settings that spoil gradients together."""

    fixed_in: tuple[int, ...]  # the DeepSpeed release
    torch_from: tuple[int, ...]  # older ones do not show it; () is any
    stages: frozenset[int]
    conditions: tuple[Condition, ...]  # all of them, in effect
    happens: str
    urls: tuple[str, ...]
    certain: bool  # True: refused. False: a warning, since it takes what the JSON alone does not show.


TABLE = (
    KnownBad(
        fixed_in=(0, 18, 8),
        torch_from=(2, 10),
        stages=frozenset({3}),
        conditions=("bf16",),
        happens="NaN in the weights after an update, on random ranks and in random layers",
        urls=("https://github.com/deepspeedai/DeepSpeed/pull/7898",),
        certain=True,
    ),
    KnownBad(
        fixed_in=(0, 19, 0),
        torch_from=(),
        stages=frozenset({1, 2}),
        conditions=("overlap_comm",),
        happens="gradient buffers are used again while they are still sent: NaN, a constant norm or loss 0",
        urls=(
            "https://github.com/deepspeedai/DeepSpeed/pull/7965",
            "https://github.com/deepspeedai/DeepSpeed/issues/7188",
            "https://github.com/deepspeedai/DeepSpeed/issues/5347",
        ),
        certain=True,
    ),
    KnownBad(
        fixed_in=(0, 19, 3),
        torch_from=(),
        stages=frozenset({1, 2}),
        conditions=("overlap_comm", "contiguous_gradients"),
        happens="with torch.compile, gradients are sent before they are complete: NaN from the first steps",
        urls=(
            "https://github.com/deepspeedai/DeepSpeed/issues/8061",
            "https://github.com/deepspeedai/DeepSpeed/pull/8080",
        ),
        certain=False,
    ),
)


def installed_versions() -> dict[str, str]:
    """Of the libraries that matter here, which are not imported; those that are missing are left out."""
    found = {}
    for library in LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            continue
    return found


def in_effect(config: Mapping[str, Any]) -> dict[str, bool | None]:
    """What `overlap_comm` and `contiguous_gradients` come to in this JSON; None where nothing reads the key.

    As DeepSpeed 0.19.8 has it: if nothing is said, overlap is on in ZeRO-3 and off in ZeRO-1 and 2, gradients
    are contiguous; ZeRO-1 in bf16 with fp32 accumulation reads neither key.
    """
    zero, stage = config["zero_optimization"], zero_stage(config)
    accumulation = (config.get("data_types") or {}).get("grad_accum_dtype")
    if stage == 1 and uses_bf16(config) and accumulation == "fp32" and not zero.get("offload_optimizer"):
        return {"overlap_comm": None, "contiguous_gradients": None}
    overlap = zero.get("overlap_comm")
    return {
        "overlap_comm": stage == 3 if overlap is None else overlap,
        "contiguous_gradients": zero.get("contiguous_gradients", True),
    }


def bad_versions(
    config: Mapping[str, Any], versions: Mapping[str, str], name: str, *, certain: bool
) -> Iterator[str]:
    """What is known of these versions with this JSON: what is `certain`, or else what may be.

    `name` is the JSON's.
    """
    if "deepspeed" not in versions:
        return  # not installed where this is asked, so nothing is known
    for entry in TABLE:
        if entry.certain == certain and _applies(entry, config, versions):
            fix = f"use deepspeed {'.'.join(map(str, entry.fixed_in))} or newer"
            if "overlap_comm" in entry.conditions:
                fix += ", or set `zero_optimization.overlap_comm` to false"
            yield (
                f"{name}: {_spoken(versions)} with {_settings(entry, config)} is known to be bad: "
                f"{entry.happens}; {fix} ({', '.join(entry.urls)})"
            )


def non_finite_advice(config: Mapping[str, Any], versions: Mapping[str, str], name: str) -> str:
    """For when gradient norms are no numbers again and again while the losses are: what to look at first.

    `name` is that of the DeepSpeed JSON.
    """
    effect = in_effect(config)
    shown = ", ".join(f"{key} = {_word(value)}" for key, value in effect.items())
    told = [
        "the losses are numbers and the gradient norms are not, which communication that overlaps with the "
        "backward pass has caused before (https://github.com/deepspeedai/DeepSpeed/issues/7188)",
        f"in effect here: ZeRO-{zero_stage(config)}, {shown}; {_spoken(versions)}",
    ]
    if effect["overlap_comm"]:
        told.append(
            f"to rule it out set `zero_optimization.overlap_comm` to false in {name}, as "
            f"{WITHOUT_OVERLAP} has it; any start of a run may change that"
        )
    else:
        told.append("overlap is off already, so look at the data and the hardware of the ranks")
    told += [bad for sure in (True, False) for bad in bad_versions(config, versions, name, certain=sure)]
    return "; ".join(told)


def _applies(entry: KnownBad, config: Mapping[str, Any], versions: Mapping[str, str]) -> bool:
    holds = {**in_effect(config), "bf16": uses_bf16(config)}
    return (
        zero_stage(config) in entry.stages
        and all(holds[condition] for condition in entry.conditions)
        and _numbers(versions["deepspeed"]) < entry.fixed_in
        and (not entry.torch_from or _numbers(versions.get("torch", "")) >= entry.torch_from)
    )


def _numbers(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: (2, 10, 0) of 2.10.0+cu128. Empty, so below any, without one."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def _settings(entry: KnownBad, config: Mapping[str, Any]) -> str:
    return f"ZeRO-{zero_stage(config)} and {', '.join(entry.conditions)}"


def _spoken(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{library} {versions.get(library, '(not installed)')}" for library in LIBRARIES)


def _word(value: bool | None) -> str:
    return {True: "true", False: "false", None: "not read"}[value]
