"""The DeepSpeed JSON: read, checked against the run file, and resolved for the engine.

DeepSpeed ignores a misspelt top-level key without a word, takes a rate from its own scheduler when it finds
one, and fails minutes into a start for the rest. So everything that can be known from the text is checked
here, without importing DeepSpeed. `deepspeed_keys.py` lists its keys.
"""

import difflib
import json
from collections.abc import Iterator, Mapping
from math import inf
from typing import Any

from ds_pretrain.deepspeed_keys import (
    KNOWN_SUBKEYS,
    LION_PARAMS,
    NATIVE_ADAM_PARAMS,
    OPTIMIZERS,
    REFUSED_CHECKPOINT_KEYS,
    REFUSED_KEYS,
    REFUSED_ZERO_KEYS,
    SECTIONS,
    TOP_LEVEL_KEYS,
    TORCH_ADAM_PARAMS,
    ZERO_KEYS,
)
from ds_pretrain.errors import InputError
from ds_pretrain.timeline import accumulation as accumulation_of_world


def parse_deepspeed(text: str, name: str) -> dict[str, Any]:
    """The JSON as a dict. Raises InputError on a syntax error or a key given twice."""
    try:
        data = json.loads(text, object_pairs_hook=_without_duplicates)
    except json.JSONDecodeError as error:
        raise InputError(f"{name} is not valid JSON: {error}") from error
    except _DuplicateKeyError as error:
        raise InputError(f"{name} gives the key `{error}` twice; keep one") from None
    if not isinstance(data, dict):
        raise InputError(f"{name} must hold one JSON object, found {type(data).__name__}")
    return data


def check_deepspeed(
    config: Mapping[str, Any],
    name: str,
    run_name: str,
    *,
    peak: float,
    sequences: int,
    micro_sequences: int,
    accumulation: int | None = None,
    world_size: int | None = None,
) -> list[str]:
    """Every problem in the JSON, alone and against the run file; both files and both values are named."""
    derived = accumulation_of_world(sequences, micro_sequences, world_size) if world_size else None
    problems = [
        *_auto_values(config, name),
        *_top_level(config, name),
        *_sections(config, name),
        *_batch(config, name, run_name, sequences, micro_sequences, accumulation or derived),
        *_optimizer(config, name, run_name, peak),
        *_zero(config, name, world_size),
        *_pairs(config, name),
    ]
    return list(dict.fromkeys(problems))


def resolve_deepspeed(
    config: Mapping[str, Any], *, peak: float, micro_sequences: int, steps_per_print: int | None = None
) -> dict[str, Any]:
    """The dict that the engine is opened with: the JSON, plus what the run file owns.

    The accumulation window is the caller's (`managed_gradient_accumulation` is false): DeepSpeed is told 1.
    """
    optimizer = config["optimizer"]
    return {
        **{key: value for key, value in config.items() if key != "train_batch_size"},
        "train_micro_batch_size_per_gpu": micro_sequences,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "steps_per_print": steps_per_print,
        "optimizer": {**optimizer, "params": {**optimizer.get("params", {}), "lr": peak}},
    }


def zero_stage(config: Mapping[str, Any]) -> int:
    """The ZeRO stage: 1, 2 or 3."""
    return int(config["zero_optimization"]["stage"])


def uses_bf16(config: Mapping[str, Any]) -> bool:
    """True if parameters and activations are bfloat16, False if they are fp32."""
    return bool(config.get("bf16", {}).get("enabled", False))


def gradient_clipping(config: Mapping[str, Any]) -> float | None:
    """The norm to which gradients are clipped, or None when they are not."""
    return float(config["gradient_clipping"]) if config.get("gradient_clipping") else None


def _auto_values(node: Any, name: str, path: str = "") -> Iterator[str]:
    if node == "auto":
        yield (
            f'{name}: `{path}` is "auto", which only the Hugging Face Trainer fills in; '
            "write a value or delete the key"
        )
    children = (
        node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    )
    for key, value in children:
        yield from _auto_values(value, name, f"{path}.{key}" if path else str(key))


def _top_level(config: Mapping[str, Any], name: str) -> Iterator[str]:
    for key, value in config.items():
        if key in REFUSED_KEYS and not _switched_off(value):
            yield f"{name} sets `{key}`: {REFUSED_KEYS[key]}"
        elif key not in TOP_LEVEL_KEYS and key not in REFUSED_KEYS:
            yield f"{name}: unknown key `{key}`, which DeepSpeed would ignore; {_hint(key, TOP_LEVEL_KEYS)}"


def _sections(config: Mapping[str, Any], name: str) -> Iterator[str]:
    for section in SECTIONS:
        if section in config and config[section] != "auto" and not isinstance(config[section], Mapping):
            yield f"{name}: `{section}` = {config[section]!r}; expected an object, like {{...}}"
    for section, known in KNOWN_SUBKEYS.items():
        for key in _table(config, section):
            if key not in known:
                yield f"{name}: unknown key `{section}.{key}`; {_hint(key, known)}"
    for key, value in _table(config, "checkpoint").items():
        if key in REFUSED_CHECKPOINT_KEYS and value:
            yield f"{name} sets `checkpoint.{key}`: {REFUSED_CHECKPOINT_KEYS[key]}; delete it"
    clipping = config.get("gradient_clipping", 0.0)
    if clipping not in (None, "auto") and not _is_number(clipping, 0.0):
        yield f"{name}: `gradient_clipping` = {clipping!r}; expected a number, 0 or more (0: off)"


def _batch(
    config: Mapping[str, Any], name: str, run_name: str, sequences: int, micro: int, accumulation: int | None
) -> Iterator[str]:
    owned = (
        ("train_batch_size", sequences, "batch.tokens / seq_len"),
        ("train_micro_batch_size_per_gpu", micro, "batch.micro_sequences"),
        ("gradient_accumulation_steps", accumulation, "batch.tokens / (seq_len * micro_sequences * ranks)"),
    )
    for key, expected, source in owned:
        found = config.get(key)
        if found not in (None, "auto") and expected is not None and found != expected:
            yield (
                f"{name} sets `{key}` = {found}, but {run_name} gives {expected} ({source}); "
                f"delete it from the JSON: the run file owns the batch"
            )
    if config.get("managed_gradient_accumulation", False) is not False:
        yield (
            f"{name} sets `managed_gradient_accumulation` = {config['managed_gradient_accumulation']}; "
            "set it to false: the trainer owns the accumulation window"
        )


def _optimizer(config: Mapping[str, Any], name: str, run_name: str, peak: float) -> Iterator[str]:
    optimizer = config.get("optimizer")
    if not isinstance(optimizer, Mapping) or "type" not in optimizer:
        yield (
            f"{name} has no `optimizer.type`; add one, like "
            '"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.95], "weight_decay": 0.1}}'
        )
        return
    if optimizer["type"] not in OPTIMIZERS and optimizer["type"] != "auto":
        yield f"{name}: `optimizer.type` = {optimizer['type']!r}; expected one of {', '.join(OPTIMIZERS)}"
    params = _table(optimizer, "params")
    if "lr" in params and params["lr"] != "auto":
        yield (
            f"{name} sets `optimizer.params.lr` = {params['lr']}, but {run_name} sets schedule.peak = "
            f"{peak}; delete it from the JSON: the run file owns the rate"
        )
    if "max_grad_norm" in params:
        yield f"{name}: `optimizer.params.max_grad_norm` is refused by DeepSpeed; use `gradient_clipping`"
    yield from _optimizer_params(optimizer["type"], params, name)


def _optimizer_params(kind: Any, params: Mapping[str, Any], name: str) -> Iterator[str]:
    """Parameters that the optimizer's constructor would raise on, and values that it would."""
    if kind == "Lion":
        known, who = LION_PARAMS, "Lion"
    elif params.get("torch_adam"):
        known, who = TORCH_ADAM_PARAMS, "torch's Adam"
    else:
        known, who = NATIVE_ADAM_PARAMS, "DeepSpeed's Adam"
    for key in params:
        if key not in known and key not in ("lr", "max_grad_norm"):
            yield f"{name}: `optimizer.params.{key}` is unknown to {who}; {_hint(key, known)}"
    betas = params.get("betas", [0.9, 0.95])
    pair = isinstance(betas, list) and len(betas) == 2 and all(_is_number(b, 0.0) and b < 1 for b in betas)
    if betas != "auto" and not pair:
        yield f"{name}: `optimizer.params.betas` = {betas!r}; expected two numbers from 0 to below 1"
    for key in ("eps", "weight_decay"):
        if key in params and params[key] != "auto" and not _is_number(params[key], 0.0):
            yield f"{name}: `optimizer.params.{key}` = {params[key]!r}; expected a number, 0 or more"


def _zero(config: Mapping[str, Any], name: str, world_size: int | None) -> Iterator[str]:
    zero = _table(config, "zero_optimization")
    if zero.get("stage") not in (1, 2, 3):
        yield f"{name}: `zero_optimization.stage` = {zero.get('stage')!r}; expected 1, 2 or 3"
    for key in zero:
        if key in REFUSED_ZERO_KEYS:
            yield f"{name} sets `zero_optimization.{key}`: {REFUSED_ZERO_KEYS[key]}"
        elif key not in ZERO_KEYS:
            yield f"{name}: unknown key `zero_optimization.{key}`; {_hint(key, ZERO_KEYS)}"
    partition = zero.get("zero_hpz_partition_size", 1)
    if world_size is not None and isinstance(partition, int) and partition > 0 and world_size % partition:
        yield (
            f"{name}: `zero_optimization.zero_hpz_partition_size` = {partition} does not divide {world_size} "
            "ranks; set it to the number of GPUs of a node"
        )


def _pairs(config: Mapping[str, Any], name: str) -> Iterator[str]:
    """Options that do not work together in DeepSpeed 0.19.8."""
    zero = _table(config, "zero_optimization")
    stage = zero.get("stage")
    if stage == 1 and zero.get("overlap_comm"):
        yield (
            f"{name}: `zero_optimization.overlap_comm` = true does not work with stage 1 and an accumulation "
            "window that the trainer owns; set it to false, or use stage 2 or 3"
        )
    if stage in (1, 2) and zero.get("offload_param"):
        yield f"{name}: `zero_optimization.offload_param` needs stage 3, found stage {stage}"
    scaled = config.get("prescale_gradients") or config.get("gradient_predivide_factor", 1.0) != 1.0
    if scaled and zero.get("reduce_scatter", True):
        yield (
            f"{name}: `prescale_gradients` and `gradient_predivide_factor` do not work with "
            "`zero_optimization.reduce_scatter`; delete them or set reduce_scatter to false"
        )
    if _table(config, "bf16").get("enabled") and _table(config, "torch_autocast").get("enabled"):
        yield f"{name}: `bf16` and `torch_autocast` are both enabled; keep one"
    if zero.get("stage3_module_granularity_threshold", 0) not in (0, "auto"):
        key = "zero_optimization.stage3_module_granularity_threshold"
        yield f"{name}: `{key}` > 0 fails in training; delete it"
    if config.get("gradient_allreduce_op", "mean") != "mean":
        yield (
            f'{name}: `gradient_allreduce_op` = {config["gradient_allreduce_op"]!r}; expected "mean", for '
            "which the loss is normalized over the global batch; delete it"
        )


def _table(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key)
    return value if isinstance(value, Mapping) else {}


def _switched_off(value: Any) -> bool:
    """True for values that mean "no", and for a size of 1, which is no parallelism."""
    if isinstance(value, Mapping):
        return not value or value.get("enabled") is False
    return value is not True and value in (None, False, 1)


def _is_number(value: Any, least: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value < inf


def _hint(key: str, known: frozenset[str]) -> str:
    close = difflib.get_close_matches(key, sorted(known), n=1)
    return f"did you mean `{close[0]}`?" if close else "delete it"


class _DuplicateKeyError(Exception):
    pass


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for key, value in pairs:
        if key in data:
            raise _DuplicateKeyError(key)
        data[key] = value
    return data
