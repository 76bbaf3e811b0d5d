"""The DeepSpeed JSON: read, checked against the run file, and resolved for the engine.

DeepSpeed ignores a misspelt top-level key without a word, takes a rate from its own scheduler when it finds
one, and fails minutes into a start for the rest. So everything that can be known from the text is checked
here, without importing DeepSpeed. `deepspeed_keys.py` lists its keys,
`deepspeed_values.py` what each may hold.
"""

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from ds_pretrain.config.deepspeed_keys import (
    KNOWN_SUBKEYS,
    LION_PARAMS,
    NATIVE_ADAM_PARAMS,
    OPTIMIZERS,
    REFUSED_CHECKPOINT_KEYS,
    REFUSED_KEYS,
    REFUSED_ZERO_KEYS,
    TOP_LEVEL_KEYS,
    TORCH_ADAM_PARAMS,
    ZERO_KEYS,
)
from ds_pretrain.config.deepspeed_values import (
    COUNT,
    FACTOR,
    INTEGER,
    OPTIMIZER_PARAMS,
    SHARE,
    STAGE,
    VALUES,
    Kind,
)
from ds_pretrain.config.timeline import accumulation as accumulation_of_world
from ds_pretrain.core.text import parse_json, shown


def parse_deepspeed(text: str, name: str) -> dict[str, Any]:
    """The JSON as a dict. Raises InputError on a syntax error or a key given twice."""
    return parse_json(text, name)


def check_deepspeed(
    config: Mapping[str, Any],
    name: str,
    run_name: str,
    *,
    peak: float,
    sequences: int,
    micro_sequences: int,
    accumulation: int | None = None,
    varies: bool = False,
    world_size: int | None = None,
) -> list[str]:
    """Every problem in the JSON, alone and against the run file; both files and both values are named.

    `sequences` and `micro_sequences` are those of the first step; `varies`: other steps have others.
    """
    readers = (world_size or 0) // sequence_parallel_size(config)
    derived = accumulation_of_world(sequences, micro_sequences, readers) if readers else None
    problems = [
        *_auto_values(config, name),
        *_top_level(config, name),
        *_unknown_subkeys(config, name),
        *_wrong_values(config, name),
        *_batch(config, name, run_name, sequences, micro_sequences, accumulation or derived, varies),
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
    Which ranks share a sequence is the caller's too.
    """
    optimizer = config["optimizer"]
    ours = {"train_batch_size", "sequence_parallel_size"}
    return {
        **{key: value for key, value in config.items() if key in TOP_LEVEL_KEYS - ours},
        "train_micro_batch_size_per_gpu": micro_sequences,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "steps_per_print": steps_per_print,
        "optimizer": {**optimizer, "params": {**optimizer.get("params", {}), "lr": peak}},
    }


def zero_stage(config: Mapping[str, Any]) -> int:
    """The ZeRO stage: 1, 2 or 3."""
    return int(config["zero_optimization"]["stage"])


def sequence_parallel_size(config: Mapping[str, Any]) -> int:
    """How many neighboring ranks share each sequence; 1 where each has its own."""
    size: Any = config.get("sequence_parallel_size")
    return int(size) if COUNT.admits(size) else 1


def uses_bf16(config: Mapping[str, Any]) -> bool:
    """True if parameters and activations are bfloat16, False if they are fp32."""
    return _table(config, "bf16").get("enabled") is True


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


def _unknown_subkeys(config: Mapping[str, Any], name: str) -> Iterator[str]:
    for section, known in KNOWN_SUBKEYS.items():
        for key in _table(config, section):
            if key not in known:
                yield f"{name}: unknown key `{section}.{key}`; {_hint(key, known)}"
    for key, value in _table(config, "checkpoint").items():
        if key in REFUSED_CHECKPOINT_KEYS and value:
            yield f"{name} sets `checkpoint.{key}`: {REFUSED_CHECKPOINT_KEYS[key]}; delete it"


def _wrong_values(config: Mapping[str, Any], name: str) -> Iterator[str]:
    """Values that are not what their key holds."""
    for section, kinds in (*VALUES.items(), ("optimizer.params", OPTIMIZER_PARAMS)):
        for key, value in _table(config, section).items():
            if (kind := kinds.get(key)) and not _is_auto(value) and not kind.admits(value):
                yield _complaint(name, f"{section}.{key}" if section else key, value, kind)
    if "stage" not in _table(config, "zero_optimization"):
        yield f"{name} has no `zero_optimization.stage`; expected 1, 2 or 3"


def _complaint(name: str, key: str, value: Any, kind: Kind) -> str:
    return f"{name}: `{key}` = {shown(value)}; expected {kind.expected}"


def _batch(
    config: Mapping[str, Any],
    name: str,
    run_name: str,
    sequences: int,
    micro: int,
    accumulation: int | None,
    varies: bool,
) -> Iterator[str]:
    owned = (
        ("train_batch_size", sequences, "batch.tokens / seq_len"),
        ("train_micro_batch_size_per_gpu", micro, "batch.micro_sequences"),
        ("gradient_accumulation_steps", accumulation, "batch.tokens / (seq_len * micro_sequences * ranks)"),
    )
    first = " in the first step, and others later: no number fits them all" if varies else ""
    for key, expected, source in owned:
        found = config.get(key)
        if COUNT.admits(found) and expected is not None and found != expected:
            yield (
                f"{name} sets `{key}` = {found}, but {run_name} gives {expected} ({source}{first}); "
                f"delete it from the JSON: the run file owns the batch"
            )
    if config.get("managed_gradient_accumulation") is True:
        yield (
            f"{name} sets `managed_gradient_accumulation` = true; set it to false: the trainer owns the "
            "accumulation window"
        )


def _optimizer(config: Mapping[str, Any], name: str, run_name: str, peak: float) -> Iterator[str]:
    optimizer = config.get("optimizer")
    if optimizer is not None and not isinstance(optimizer, Mapping):
        return  # reported as a value of the wrong kind
    if optimizer is None or "type" not in optimizer:
        yield (
            f"{name} has no `optimizer.type`; add one, like "
            '"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.95], "weight_decay": 0.1}}'
        )
        return
    kind = optimizer["type"]
    if isinstance(kind, str) and kind not in (*OPTIMIZERS, "auto"):
        yield f"{name}: `optimizer.type` = {shown(kind)}; expected one of {', '.join(OPTIMIZERS)}"
    params = _table(optimizer, "params")
    if "lr" in params and params["lr"] != "auto":
        yield (
            f"{name} sets `optimizer.params.lr` = {params['lr']}, but {run_name} sets schedule.peak = "
            f"{peak}; delete it from the JSON: the run file owns the rate"
        )
    if "max_grad_norm" in params:
        yield f"{name}: `optimizer.params.max_grad_norm` is refused by DeepSpeed; use `gradient_clipping`"
    yield from _optimizer_params(kind, params, name)


def _optimizer_params(kind: Any, params: Mapping[str, Any], name: str) -> Iterator[str]:
    """Parameters that the optimizer's constructor would raise on."""
    if kind == "Lion":
        known, who = LION_PARAMS, "Lion"
    elif params.get("torch_adam"):
        known, who = TORCH_ADAM_PARAMS, "torch's Adam"
    else:
        known, who = NATIVE_ADAM_PARAMS, "DeepSpeed's Adam"
    for key in params:
        if key not in known and key not in ("lr", "max_grad_norm"):
            yield f"{name}: `optimizer.params.{key}` is unknown to {who}; {_hint(key, known)}"


def _zero(config: Mapping[str, Any], name: str, world_size: int | None) -> Iterator[str]:
    zero = _table(config, "zero_optimization")
    for key in zero:
        if key in REFUSED_ZERO_KEYS:
            yield f"{name} sets `zero_optimization.{key}`: {REFUSED_ZERO_KEYS[key]}"
        elif key not in ZERO_KEYS:
            yield f"{name}: unknown key `zero_optimization.{key}`; {_hint(key, ZERO_KEYS)}"
    partition = zero.get("zero_hpz_partition_size", 1)
    if world_size is not None and COUNT.admits(partition) and world_size % partition:
        yield (
            f"{name}: `zero_optimization.zero_hpz_partition_size` = {partition} does not divide {world_size} "
            "ranks; set it to the number of GPUs of a node"
        )


def _pairs(config: Mapping[str, Any], name: str) -> Iterator[str]:
    """Options that do not work together in DeepSpeed 0.19.8."""
    zero = _table(config, "zero_optimization")
    stage = zero.get("stage") if STAGE.admits(zero.get("stage")) else None
    if stage == 1 and zero.get("overlap_comm") is True:
        yield (
            f"{name}: `zero_optimization.overlap_comm` = true does not work with stage 1 and an accumulation "
            "window that the trainer owns; set it to false, or use stage 2 or 3"
        )
    if stage in (1, 2) and zero.get("offload_param"):
        yield f"{name}: `zero_optimization.offload_param` needs stage 3, found stage {stage}"
    for key in ("offload_optimizer", "offload_param"):
        offload = _table(zero, key)
        if offload.get("device") == "nvme" and not offload.get("nvme_path"):
            yield f'{name}: `zero_optimization.{key}.device` = "nvme" needs `nvme_path`; add the folder'
    ratio = _table(zero, "offload_optimizer").get("ratio", 1.0)
    if stage in (1, 2) and SHARE.admits(ratio) and ratio < 1.0:
        yield f"{name}: `zero_optimization.offload_optimizer.ratio` < 1 needs stage 3, found stage {stage}"
    bf16 = _table(config, "bf16")
    if bf16.get("bf16_optimizer_states") is True and bf16.get("bf16_master_weights_and_grads") is not True:
        yield f"{name}: `bf16.bf16_optimizer_states` needs `bf16.bf16_master_weights_and_grads` = true"
    divided = config.get("gradient_predivide_factor", 1.0)
    scaled = config.get("prescale_gradients") is True or (FACTOR.admits(divided) and divided != 1.0)
    if scaled and zero.get("reduce_scatter", True) is True:
        yield (
            f"{name}: `prescale_gradients` and `gradient_predivide_factor` do not work with "
            "`zero_optimization.reduce_scatter`; delete them or set reduce_scatter to false"
        )
    if uses_bf16(config) and _table(config, "torch_autocast").get("enabled") is True:
        yield f"{name}: `bf16` and `torch_autocast` are both enabled; keep one"
    key = "stage3_module_granularity_threshold"
    if INTEGER.admits(zero.get(key)) and zero[key] != 0:
        yield f"{name}: `zero_optimization.{key}` = {zero[key]} fails in training; delete it"


def _table(config: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """The object at a dotted path ("": the whole), empty if there is none."""
    node: Any = config
    for key in path.split(".") if path else ():
        node = node.get(key)
        if not isinstance(node, Mapping):
            return {}
    table: Mapping[str, Any] = node
    return table


def _is_auto(value: Any) -> bool:
    """True if an "auto" stands in it, which is reported by its place."""
    return value == "auto" or (isinstance(value, list) and "auto" in value)


def _switched_off(value: Any) -> bool:
    """True for values that mean "no", and for a size of 1, which is no parallelism."""
    if isinstance(value, Mapping):
        return not value or value.get("enabled") is False
    return value is not True and value in (None, False, 1)


def _hint(key: str, known: frozenset[str]) -> str:
    close = difflib.get_close_matches(key, sorted(known), n=1)
    return f"did you mean `{close[0]}`?" if close else "delete it"
