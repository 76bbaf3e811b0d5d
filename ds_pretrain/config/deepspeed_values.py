"""What each key of the DeepSpeed JSON may hold.

Types and bounds are those of the pydantic models of DeepSpeed 0.19.8, and of the code that reads the other
keys (https://github.com/deepspeedai/DeepSpeed); tests compare both. DeepSpeed reads half of them without a
check, and meets a misspelt word minutes into a start.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any


@dataclass(frozen=True)
class Kind:
    """A kind of value: what was expected, in words, and whether a value is that."""

    expected: str
    admits: Callable[[Any], bool]


def is_number(value: Any, least: float = -inf, most: float = inf) -> bool:
    """True for a finite JSON number between two bounds; true and false are none."""
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    return numeric and least <= value <= most and -inf < value < inf


def is_whole(value: Any, least: int) -> bool:
    """True for a whole number, also one that is written as 5e8."""
    return is_number(value, least) and value == int(value)


def _one_of(*words: str, any_case: bool = False) -> Kind:
    def admits(value: Any) -> bool:
        return isinstance(value, str) and (value.lower() if any_case else value) in words

    return Kind(f"one of {', '.join(words)}", admits)


def _or_null(kind: Kind) -> Kind:
    return Kind(f"{kind.expected}, or null", lambda value: value is None or kind.admits(value))


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


BOOLEAN = Kind("true or false, without quotes", lambda value: isinstance(value, bool))
COUNT = Kind("a whole number of at least 1", lambda value: is_whole(value, 1))
SIZE = Kind("a whole number of at least 0", lambda value: is_whole(value, 0))
INTEGER = Kind("a whole number", lambda value: is_whole(value, -(2**63)))
NUMBER = Kind("a number of at least 0", lambda value: is_number(value, 0))
FACTOR = Kind("a number above 0", lambda value: is_number(value, 0) and value > 0)
SHARE = Kind("a number from 0 to 1", lambda value: is_number(value, 0, 1))
BETAS = Kind(
    "two numbers from 0 to below 1",
    lambda value: (
        isinstance(value, list) and len(value) == 2 and all(is_number(b, 0) and b < 1 for b in value)
    ),
)
STAGE = Kind("1, 2 or 3", lambda value: type(value) is int and value in (1, 2, 3))
TEXT = Kind("text", lambda value: isinstance(value, str))
TEXTS = Kind('a list of texts, like ["a"]', _texts)
TEXT_OR_TEXTS = Kind("text, or a list of texts", lambda value: isinstance(value, str) or _texts(value))
PASSES = Kind(
    "a list of z1, z3, autosp, autotp",
    lambda value: _texts(value) and all(item in ("z1", "z3", "autosp", "autotp") for item in value),
)
OBJECT = Kind("an object, like {...}", lambda value: isinstance(value, Mapping))
DTYPE = _one_of("fp32", "bf16", "float32", "bfloat16", "torch.float32", "torch.bfloat16")
AUTOCAST = _one_of("bf16", "bfloat16", "torch.bfloat16", "fp16", "float16", "half", "torch.float16")
COMMUNICATION = _one_of("fp32", "bf16", "fp16", any_case=True)
LOG_LEVEL = _one_of("debug", "info", "warning", "error", "critical", any_case=True)
MEAN = Kind('"mean", for which the loss is normalized over the global batch', lambda value: value == "mean")
DEVICE = _one_of("none", "cpu", "nvme")
TAG_VALIDATION = _one_of("warn", "ignore", "fail", any_case=True)


def _all(kind: Kind, names: str) -> dict[str, Kind]:
    return dict.fromkeys(names.split(), kind)


# Kinds of the optimizer's parameters, whichever optimizer takes them.
OPTIMIZER_PARAMS: dict[str, Kind] = {
    "betas": BETAS,
    "eps": NUMBER,
    "weight_decay": NUMBER,
    **_all(BOOLEAN, "torch_adam adam_w_mode fp32_optimizer_states bias_correction amsgrad capturable"),
    **_all(_or_null(BOOLEAN), "foreach fused"),
}
# Section (a dotted path; "" is the JSON itself) to its keys, all that mean something to a pretraining run.
VALUES: dict[str, dict[str, Kind]] = {
    "": {
        **_all(
            OBJECT,
            "activation_checkpointing aio bf16 checkpoint comms_logger compile data_types flops_profiler "
            "optimizer timers torch_autocast zero_optimization",
        ),
        **_all(BOOLEAN, "disable_allgather disable_python_gc dump_state managed_gradient_accumulation"),
        **_all(BOOLEAN, "memory_breakdown prescale_gradients wall_clock_breakdown"),
        **_all(BOOLEAN, "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer"),
        **_all(
            _or_null(COUNT),
            "gradient_accumulation_steps steps_per_print train_batch_size train_micro_batch_size_per_gpu "
            "sequence_parallel_size",
        ),
        "communication_data_type": _or_null(COMMUNICATION),
        "gradient_allreduce_op": MEAN,
        "gradient_clipping": NUMBER,
        "gradient_predivide_factor": FACTOR,
        "log_level": _or_null(LOG_LEVEL),
    },
    "activation_checkpointing": {
        **_all(BOOLEAN, "partition_activations contiguous_memory_optimization cpu_checkpointing"),
        **_all(BOOLEAN, "profile synchronize_checkpoint_boundary"),
        "number_checkpoints": _or_null(COUNT),
    },
    "aio": {
        **_all(COUNT, "block_size queue_depth intra_op_parallelism"),
        **_all(BOOLEAN, "single_submit overlap_events use_gds"),
    },
    "bf16": _all(
        BOOLEAN,
        "enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads "
        "bf16_optimizer_states",
    ),
    "checkpoint": {"tag_validation": TAG_VALIDATION, "parallel_write": OBJECT},
    "checkpoint.parallel_write": {"pipeline_stage": BOOLEAN},
    "comms_logger": {**_all(BOOLEAN, "enabled prof_all verbose debug"), "prof_ops": TEXTS},
    "compile": {
        **_all(BOOLEAN, "deepcompile autoep_non_moe free_activation offload_activation double_buffer"),
        **_all(BOOLEAN, "offload_activation_pin_memory offload_opt_states symmetric_memory debug_log"),
        **_all(BOOLEAN, "offload_parameters sync_before_reduce sync_after_reduce sync_before_allgather"),
        **_all(BOOLEAN, "sync_after_allgather keep_int_input_tensors keep_all_input_tensors"),
        "free_activation_threshold": INTEGER,
        "passes": _or_null(PASSES),
    },
    "data_types": {"grad_accum_dtype": _or_null(DTYPE)},
    "flops_profiler": {
        **_all(BOOLEAN, "enabled detailed"),
        **_all(COUNT, "profile_step top_modules"),
        "module_depth": INTEGER,
        "recompute_fwd_factor": NUMBER,
        "output_file": _or_null(TEXT),
    },
    "optimizer": {"type": TEXT, "params": OBJECT, "legacy_fusion": BOOLEAN},
    "timers": {"throughput": OBJECT},
    "timers.throughput": _all(BOOLEAN, "enabled synchronized"),
    "torch_autocast": {
        "enabled": BOOLEAN,
        "dtype": AUTOCAST,
        "lower_precision_safe_modules": _or_null(TEXTS),
    },
    "zero_optimization": {
        "stage": STAGE,
        **_all(BOOLEAN, "contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce"),
        **_all(BOOLEAN, "allgather_partitions stage3_gather_16bit_weights_on_model_save"),
        **_all(BOOLEAN, "stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential"),
        **_all(BOOLEAN, "ignore_unused_parameters round_robin_gradients parameter_alignment"),
        **_all(
            BOOLEAN, "zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients"
        ),
        **_all(BOOLEAN, "memory_efficient_linear override_module_apply log_trace_cache_warnings"),
        **_all(BOOLEAN, "enable_sanity_checks"),
        **_all(SIZE, "allgather_bucket_size sub_group_size stage3_prefetch_bucket_size"),
        **_all(SIZE, "stage3_param_persistence_threshold stage3_model_persistence_threshold"),
        **_all(SIZE, "stage3_max_live_parameters stage3_max_reuse_distance zero_hpz_partition_size"),
        "reduce_bucket_size": COUNT,
        "stage3_module_granularity_threshold": INTEGER,
        "overlap_comm": _or_null(BOOLEAN),
        **_all(_or_null(OBJECT), "offload_param offload_optimizer"),
        "leaf_module": _or_null(OBJECT),
    },
    "zero_optimization.leaf_module": _all(TEXT_OR_TEXTS, "classes names name_suffixes"),
    "zero_optimization.offload_optimizer": {
        "device": DEVICE,
        "nvme_path": _or_null(TEXT),
        "buffer_count": SIZE,
        **_all(BOOLEAN, "pin_memory pipeline_read pipeline_write fast_init super_offload"),
        **_all(SHARE, "ratio cpuadam_cores_perc"),
    },
    "zero_optimization.offload_param": {
        "device": DEVICE,
        "nvme_path": _or_null(TEXT),
        **_all(SIZE, "buffer_count buffer_size max_in_cpu"),
        "pin_memory": BOOLEAN,
    },
}
