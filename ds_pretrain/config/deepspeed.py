"""The DeepSpeed JSON: its keys and values, what is refused and why, and what the engine is opened with.

DeepSpeed ignores a misspelled top-level key without a word, takes the learning rate from its own scheduler
when it finds one, and fails minutes into a start for the rest. So everything that can be known from the text
is checked here, without importing DeepSpeed. Keys, types and bounds are those of DeepSpeed 0.19.8
(https://www.deepspeed.ai/docs/config-json/); tests compare them with its source, so that a moved pin is
noticed.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, create_model

from ds_pretrain.config.loader import (
    Fraction01,
    Positive,
    Section,
    explain,
    find_errors,
    to_tuple,
    to_tuple_of_one_or_more,
)

VERSIONS = ((0, 19, 8), (0, 20))  # from the first on, below the second; pyproject.toml says the same


def _to_int(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value  # 5e8, as many write it


def _to_lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


_Whole = Annotated[int, BeforeValidator(_to_int)]
_Size = Annotated[int, BeforeValidator(_to_int), Field(ge=0)]
_Count = Annotated[int, BeforeValidator(_to_int), Field(ge=1)]
_Number = Annotated[float, Field(ge=0)]
_Beta = Annotated[float, Field(ge=0, lt=1)]
_Betas = Annotated[tuple[_Beta, _Beta], BeforeValidator(to_tuple)]
_Texts = Annotated[tuple[str, ...], BeforeValidator(to_tuple)]
_TextOrTexts = Annotated[tuple[str, ...], BeforeValidator(to_tuple_of_one_or_more)]
_Device = Literal["none", "cpu", "nvme"]
_Passes = Annotated[tuple[Literal["z1", "z3", "autosp", "autotp"], ...], BeforeValidator(to_tuple)]
_Dtype = Literal["fp32", "bf16", "float32", "bfloat16", "torch.float32", "torch.bfloat16"]
_Autocast = Literal["bf16", "bfloat16", "torch.bfloat16", "fp16", "float16", "half", "torch.float16"]
_Communication = Annotated[Literal["fp32", "bf16", "fp16"], BeforeValidator(_to_lower)]
_LogLevel = Annotated[Literal["debug", "info", "warning", "error", "critical"], BeforeValidator(_to_lower)]
_TagValidation = Annotated[Literal["warn", "ignore", "fail"], BeforeValidator(_to_lower)]


def _build_section(name: str, *groups: tuple[Any, str], required: tuple[str, ...] = ()) -> type[Section]:
    """A section of the JSON: groups of keys that hold values of one type. Most keys may be left out."""
    fields: dict[str, Any] = {key: (kind, None) for kind, keys in groups for key in keys.split()}
    fields |= {key: (fields[key][0], ...) for key in required}
    return create_model(name, __base__=Section, **fields)


Bf16 = _build_section(
    "Bf16",
    (bool, "enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads"),
    (bool, "bf16_optimizer_states"),
)
OffloadOptimizer = _build_section(
    "OffloadOptimizer",
    (_Device, "device"),
    (str | None, "nvme_path"),
    (_Size, "buffer_count"),
    (bool, "pin_memory pipeline_read pipeline_write fast_init super_offload"),
    (Fraction01, "ratio cpuadam_cores_perc"),
)
OffloadParam = _build_section(
    "OffloadParam",
    (_Device, "device"),
    (str | None, "nvme_path"),
    (_Size, "buffer_count buffer_size max_in_cpu"),
    (bool, "pin_memory"),
)
ZeroOptimization = _build_section(
    "ZeroOptimization",
    (Annotated[int, Field(ge=1, le=3)], "stage"),
    (bool, "contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions"),
    (bool, "stage3_gather_16bit_weights_on_model_save stage3_use_all_reduce_for_fetch_params"),
    (bool, "stage3_allgather_sequential ignore_unused_parameters round_robin_gradients parameter_alignment"),
    (bool, "zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients"),
    (bool, "memory_efficient_linear override_module_apply log_trace_cache_warnings enable_sanity_checks"),
    (_Size, "allgather_bucket_size sub_group_size stage3_prefetch_bucket_size zero_hpz_partition_size"),
    (_Size, "stage3_param_persistence_threshold stage3_model_persistence_threshold"),
    (_Size, "stage3_max_live_parameters stage3_max_reuse_distance"),
    (_Count, "reduce_bucket_size"),
    (_Whole, "stage3_module_granularity_threshold"),
    (bool | None, "overlap_comm"),
    (OffloadParam | None, "offload_param"),
    (OffloadOptimizer | None, "offload_optimizer"),
    (_build_section("LeafModule", (_TextOrTexts, "classes names name_suffixes")) | None, "leaf_module"),
    required=("stage",),
)
_Compile = _build_section(
    "Compile",
    (bool, "deepcompile autoep_non_moe free_activation offload_activation double_buffer debug_log"),
    (bool, "offload_activation_pin_memory offload_opt_states symmetric_memory offload_parameters"),
    (bool, "sync_before_reduce sync_after_reduce sync_before_allgather sync_after_allgather"),
    (bool, "keep_int_input_tensors keep_all_input_tensors"),
    (_Whole, "free_activation_threshold"),
    (_Passes | None, "passes"),
)
_FlopsProfiler = _build_section(
    "FlopsProfiler",
    (bool, "enabled detailed"),
    (_Count, "profile_step top_modules"),
    (_Whole, "module_depth"),
    (_Number, "recompute_fwd_factor"),
    (str | None, "output_file"),
)
_ActivationCheckpointing = _build_section(
    "ActivationCheckpointing",
    (bool, "partition_activations contiguous_memory_optimization cpu_checkpointing profile"),
    (bool, "synchronize_checkpoint_boundary"),
    (_Count | None, "number_checkpoints"),
)
_Aio = _build_section(
    "Aio",
    (_Count, "block_size queue_depth intra_op_parallelism"),
    (bool, "single_submit overlap_events use_gds"),
)
_CommsLogger = _build_section("CommsLogger", (bool, "enabled prof_all verbose debug"), (_Texts, "prof_ops"))
_TorchAutocast = _build_section(
    "TorchAutocast",
    (bool, "enabled"),
    (_Autocast, "dtype"),
    (_Texts | None, "lower_precision_safe_modules"),
)
_Checkpoint = _build_section(
    "Checkpoint",
    (_TagValidation, "tag_validation"),
    (_build_section("ParallelWrite", (bool, "pipeline_stage")), "parallel_write"),
)
# What `optimizer.params` may hold besides `lr`, which the run file owns. An unknown one is an exception in
# the optimizer's constructor, minutes into a start.
_ADAM = (
    (_Betas, "betas"),
    (_Number, "eps weight_decay"),
    (bool, "torch_adam adam_w_mode fp32_optimizer_states"),
)
NativeAdam = _build_section(
    "NativeAdam", *_ADAM, (bool, "bias_correction")
)  # DeepSpeed's own, fused or on the CPU
TorchAdam = _build_section("TorchAdam", *_ADAM, (bool, "amsgrad capturable"), (bool | None, "foreach fused"))
Lion = _build_section("Lion", (_Betas, "betas"), (_Number, "weight_decay"))
_Optimizer = _build_section(
    "Optimizer",
    (Literal["AdamW", "Adam", "Lion"], "type"),
    (dict[str, Any], "params"),
    (bool, "legacy_fusion"),
    required=("type",),
)
# All keys that mean something to a pretraining run. Any other is refused: DeepSpeed would ignore it.
DeepSpeedJson = _build_section(
    "DeepSpeedJson",
    (_ActivationCheckpointing, "activation_checkpointing"),
    (_Aio, "aio"),
    (Bf16, "bf16"),
    (_Checkpoint, "checkpoint"),
    (_CommsLogger, "comms_logger"),
    (_Compile, "compile"),
    (_build_section("DataTypes", (_Dtype | None, "grad_accum_dtype")), "data_types"),
    (_FlopsProfiler, "flops_profiler"),
    (_Optimizer, "optimizer"),
    (
        _build_section(
            "Timers", (_build_section("Throughput", (bool, "enabled synchronized")), "throughput")
        ),
        "timers",
    ),
    (_TorchAutocast, "torch_autocast"),
    (ZeroOptimization, "zero_optimization"),
    (bool, "disable_allgather disable_python_gc dump_state managed_gradient_accumulation memory_breakdown"),
    (bool, "prescale_gradients wall_clock_breakdown zero_allow_untested_optimizer"),
    (bool, "zero_force_ds_cpu_optimizer"),
    (_Count | None, "gradient_accumulation_steps steps_per_print train_batch_size sequence_parallel_size"),
    (_Count | None, "train_micro_batch_size_per_gpu"),
    (_Communication | None, "communication_data_type"),
    (Literal["mean"], "gradient_allreduce_op"),  # for which the loss is normalized over the global batch
    (_Number, "gradient_clipping"),
    (Positive, "gradient_predivide_factor"),
    (_LogLevel | None, "log_level"),
    required=("optimizer", "zero_optimization"),
)

# Keys that DeepSpeed knows and that cannot be used here, each with the reason and the way round.
REFUSED_KEYS = {
    "scheduler": "the rate comes from [schedule] of the run file; delete it",
    "fp16": "train in bf16 or fp32; fp16's loss scaling skips updates, and a resumed run would not be exact",
    "elasticity": "DeepSpeed removed it; a run resumes on another number of ranks by itself",
    "curriculum_learning": "DeepSpeed removed it; sequence lengths come from [[phases]] of the run file",
    "data_efficiency": "the order of the data comes from the run file; delete it",
    "wandb": "Weights & Biases is set by [monitor] wandb in the run file; delete it",
    "tensorboard": "metrics go to metrics.jsonl and Weights & Biases; delete it",
    "csv_monitor": "metrics go to metrics.jsonl and Weights & Biases; delete it",
    "comet": "metrics go to metrics.jsonl and Weights & Biases; delete it",
    "pipeline": "pipeline parallelism is not supported; delete it",
    "tensor_parallel": "tensor parallelism is not supported; delete it",
    "expert_parallel": "expert parallelism is not supported; delete it",
    "hybrid_engine": "it is for reinforcement learning; delete it",
    "autotuning": "it relaunches the job by itself; delete it",
    "nebula": "DeepSpeed removed it; delete it",
    "amp": "DeepSpeed removed it; use bf16",
    "bfloat16": "it is the old name; write bf16",
    "compression_training": "compression is not for pretraining; delete it",
    "quantize_training": "compression is not for pretraining; delete it",
    "weight_quantization": "compression is not for pretraining; delete it",
    "eigenvalue": "compression is not for pretraining; delete it",
    "progressive_layer_drop": "dropping layers by progress is not supported; delete it",
    "sparse_attention": "DeepSpeed removed it; the kernel is [model] attention of the run file",
    "sparse_gradients": "gradients of embeddings are dense here; delete it",
    "graph_harvesting": "DeepSpeed removed it; delete it",
    "datastates_ckpt": "DeepSpeed's other writers cannot load what they save; delete it",
    "dataloader_drop_last": "the order of the data comes from the run file; delete it",
    "seq_parallel_communication_data_type": "sequence parallelism does not use DeepSpeed's groups; delete it",
    "use_data_before_expert_parallelism": "expert parallelism is not supported; delete it",
    "vocabulary_size": "it comes from the model config; delete it",
}
# Keys of `zero_optimization` that cannot be used here, each with the reason and the way round.
REFUSED_ZERO_KEYS = {
    "compute_grad_norm": "the norm is logged and watched; delete it",
    "cpu_offload": "it is deprecated; write offload_optimizer",
    "cpu_offload_param": "it is deprecated; write offload_param",
    "cpu_offload_use_pin_memory": "it is deprecated; write pin_memory in offload_optimizer or offload_param",
    "elastic_checkpoint": "a run resumes on another number of ranks by itself; delete it",
    "legacy_stage1": "DeepSpeed removed it; delete it",
    "load_from_fp32_weights": "a resume loads the fp32 masters; delete it",
    "pipeline_loading_checkpoint": "a resume must be exact; delete it",
    "save_muon_momentum_buffer_in_memory": "Muon is not supported; delete it",
    "stage3_gather_fp16_weights_on_model_save": (
        "it is deprecated; write stage3_gather_16bit_weights_on_model_save"
    ),
    "zenflow": "asynchronous updates cannot be resumed exactly; delete it",
}
REFUSED_CHECKPOINT_KEYS = {
    "load_universal": "resuming converts by itself when it has to; delete it",
    "use_node_local_storage": "a checkpoint is verified as one folder; delete it",
    "writer": "DeepSpeed's other writers cannot load what they save; delete it",
}
REFUSED = {"": REFUSED_KEYS, "zero_optimization": REFUSED_ZERO_KEYS, "checkpoint": REFUSED_CHECKPOINT_KEYS}


def check_deepspeed(
    config: Mapping[str, Any],
    name: str,
    *,
    peak: float,
    sizes: Sequence[tuple[int, int]],
    accumulation: int | None,
    run_path: str,
) -> list[str]:
    """Every problem in the JSON, alone and against the run file; both files and both values are named.

    `sizes` are the sequences of a step and those of a micro-batch, in the order in which the run meets them.
    """
    sound = deepcopy(dict(config))
    problems = [
        *_check_refused(sound),
        *_check_values(sound, DeepSpeedJson),
        *_check_optimizer(sound, peak, run_path),
        *_check_batch(sound, sizes, accumulation, run_path),
        *_check_pairs(sound),
    ]
    return list(dict.fromkeys(f"{name}: {problem}" for problem in problems))


def check_ranks(
    config: Mapping[str, Any], world_size: int, accumulation: int | None, run_path: str
) -> Iterator[str]:
    """Find settings of a checked JSON that do not fit the world size or the first step's accumulation."""
    partition = config["zero_optimization"].get("zero_hpz_partition_size") or 1
    if world_size % partition:
        yield (
            f"`zero_optimization.zero_hpz_partition_size` = {partition} does not divide {world_size} ranks; "
            "set it to the number of GPUs of a node"
        )
    source = "batch.tokens / (seq_len * micro_batch_size * ranks)"
    yield from _check_owned(config, "gradient_accumulation_steps", accumulation, source, run_path)


def check_version() -> Iterator[str]:
    """Find why the installed DeepSpeed cannot be used. None may be installed, as on a login node."""
    try:
        found = version("deepspeed")
    except PackageNotFoundError:
        return
    first, end = VERSIONS
    if not first <= tuple(int(number) for number in re.findall(r"\d+", found)[:3]) < end:
        least, below = (".".join(map(str, numbers)) for numbers in VERSIONS)
        yield (
            f"deepspeed {found} is installed; expected >={least},<{below}: older ones spoil gradients in "
            "silence (https://github.com/deepspeedai/DeepSpeed/pull/7965), newer ones are not tested; "
            f'pip install "deepspeed>={least},<{below}"'
        )


def advise_on_non_finite(config: Mapping[str, Any], name: str) -> str:
    """Say what to check first when gradient norms are often non-finite while losses are finite.

    `name` is that of the JSON. Overlap is on in ZeRO-3, and off in ZeRO-1 and 2, where it says nothing.
    """
    overlap = config["zero_optimization"].get("overlap_comm")
    is_on = zero_stage(config) == 3 if overlap is None else overlap
    way_out = "overlap is off already, so look at the data and the hardware of the ranks"
    if is_on:
        way_out = (
            f"to rule it out set `zero_optimization.overlap_comm` to false in {name}, as "
            "ds_configs/zero3_bf16_no_overlap.json has it; any start of a run may change that"
        )
    return (
        "the loss is finite but the gradient norm is not; known cause: communication that overlaps with the "
        "backward pass, overlap_comm (https://github.com/deepspeedai/DeepSpeed/issues/7188); in effect here: "
        f"ZeRO-{zero_stage(config)}, overlap_comm = {'true' if is_on else 'false'}; {way_out}"
    )


def resolve_deepspeed(config: Mapping[str, Any], *, peak: float, micro_batch_size: int) -> dict[str, Any]:
    """The dict that the engine is opened with: the JSON, plus what the run file owns.

    The accumulation window is the caller's (`managed_gradient_accumulation` is false): DeepSpeed is told 1.
    Which ranks share a sequence is the caller's too.
    """
    optimizer = config["optimizer"]
    ours = {"train_batch_size", "sequence_parallel_size"}
    return {
        **{key: value for key, value in config.items() if key in DeepSpeedJson.model_fields.keys() - ours},
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "steps_per_print": None,
        "optimizer": {**optimizer, "params": {**optimizer.get("params", {}), "lr": peak}},
    }


def zero_stage(config: Mapping[str, Any]) -> int:
    """The ZeRO stage: 1, 2 or 3."""
    return int(config["zero_optimization"]["stage"])


def sequence_parallel_size(config: Mapping[str, Any]) -> int:
    """The number of neighboring ranks that share each sequence; 1 without sequence parallelism."""
    return int(config.get("sequence_parallel_size") or 1)


def uses_bf16(config: Mapping[str, Any]) -> bool:
    """True if parameters and activations are bfloat16, False if they are fp32."""
    return config.get("bf16", {}).get("enabled") is True


def gradient_clipping(config: Mapping[str, Any]) -> float | None:
    """The norm to which gradients are clipped, or None when they are not."""
    return float(config["gradient_clipping"]) if config.get("gradient_clipping") else None


def _check_refused(sound: dict[str, Any]) -> Iterator[str]:
    """Keys that cannot be used. They are taken out of `sound`."""
    for section, reasons in REFUSED.items():
        table = sound.get(section, {}) if section else sound
        for key in [key for key in reasons if key in table] if isinstance(table, dict) else ():
            is_off = _is_off(table.pop(key))
            if not is_off or section == "zero_optimization":  # which DeepSpeed gets as it is
                yield f"`{section and f'{section}.'}{key}` is set: {reasons[key]}"


def _is_off(value: Any) -> bool:
    """True for values that mean "no", and for a size of 1, which is no parallelism."""
    if isinstance(value, Mapping):
        return not value or value.get("enabled") is False
    return value is not True and value in (None, False, 1)


def _check_values(sound: dict[str, Any], section: type[Section], within: str = "") -> Iterator[str]:
    """Unknown keys and values of a wrong kind. They are taken out of `sound`, and rules trust the rest."""
    for error in find_errors(sound, section):
        if error["input"] == "auto" and error["type"] != "extra_forbidden":
            where = within + ".".join(map(str, error["loc"]))
            yield (
                f'`{where}` is "auto", which only the Hugging Face Trainer fills in; '
                "write a value or delete the key"
            )
        else:
            yield explain(error, section, within)
        *path, key = [part for part in error["loc"] if isinstance(part, str)]
        table = sound
        for part in path:
            table = table.get(part, {})
        table.pop(key, None)


def _check_optimizer(sound: Mapping[str, Any], peak: float, run_path: str) -> Iterator[str]:
    optimizer = sound.get("optimizer", {})
    params = optimizer.get("params", {})
    if (rate := params.pop("lr", None)) is not None:
        yield (
            f"`optimizer.params.lr` = {rate}, but {run_path} sets schedule.peak_lr = {peak}; "
            "delete it from the JSON: the run file owns the rate"
        )
    if params.pop("max_grad_norm", None) is not None:
        yield "`optimizer.params.max_grad_norm` is refused by DeepSpeed; use `gradient_clipping`"
    known = Lion if optimizer.get("type") == "Lion" else TorchAdam if params.get("torch_adam") else NativeAdam
    for problem in _check_values(params, known, "optimizer.params."):
        yield f"{problem} ({known.__name__})" if problem.startswith("unknown") else problem


def _check_batch(
    sound: Mapping[str, Any], sizes: Sequence[tuple[int, int]], accumulation: int | None, run_path: str
) -> Iterator[str]:
    (sequences, micro), first = sizes[0], ""
    if len(set(sizes)) > 1:
        first = " in the first step, and others later: no number fits them all"
    yield from _check_owned(sound, "train_batch_size", sequences, f"batch.tokens / seq_len{first}", run_path)
    yield from _check_owned(
        sound, "train_micro_batch_size_per_gpu", micro, f"batch.micro_batch_size{first}", run_path
    )
    yield from _check_owned(
        sound,
        "gradient_accumulation_steps",
        accumulation,
        f"batch.gradient_accumulation_steps{first}",
        run_path,
    )
    if sound.get("managed_gradient_accumulation") is True:
        yield (
            "`managed_gradient_accumulation` = true; set it to false: the trainer owns the accumulation "
            "window"
        )


def _check_owned(
    config: Mapping[str, Any], key: str, expected: int | None, source: str, run_path: str
) -> Iterator[str]:
    found = config.get(key)
    if found is not None and expected is not None and found != expected:
        yield (
            f"`{key}` = {found}, but {run_path} gives {expected} ({source}); "
            "delete it from the JSON: the run file owns the batch"
        )


def _check_pairs(sound: Mapping[str, Any]) -> Iterator[str]:
    """Options that do not work together in DeepSpeed 0.19.8."""
    zero, bf16 = sound.get("zero_optimization", {}), sound.get("bf16", {})
    stage = zero.get("stage")
    if stage == 1 and zero.get("overlap_comm"):
        yield (
            "`zero_optimization.overlap_comm` = true does not work with stage 1 and an accumulation "
            "window that the trainer owns; set it to false, or use stage 2 or 3"
        )
    if stage in (1, 2) and zero.get("offload_param"):
        yield f"`zero_optimization.offload_param` needs stage 3, found stage {stage}"
    for key in ("offload_optimizer", "offload_param"):
        offload = zero.get(key) or {}
        if offload.get("device") == "nvme" and not offload.get("nvme_path"):
            yield f'`zero_optimization.{key}.device` = "nvme" needs `nvme_path`; add the folder'
    if stage in (1, 2) and (zero.get("offload_optimizer") or {}).get("ratio", 1.0) < 1.0:
        yield f"`zero_optimization.offload_optimizer.ratio` < 1 needs stage 3, found stage {stage}"
    if bf16.get("bf16_optimizer_states") and not bf16.get("bf16_master_weights_and_grads"):
        yield "`bf16.bf16_optimizer_states` needs `bf16.bf16_master_weights_and_grads` = true"
    scaled = sound.get("prescale_gradients") or sound.get("gradient_predivide_factor", 1.0) != 1.0
    if scaled and zero.get("reduce_scatter", True):
        yield (
            "`prescale_gradients` and `gradient_predivide_factor` do not work with "
            "`zero_optimization.reduce_scatter`; delete them or set reduce_scatter to false"
        )
    if uses_bf16(sound) and sound.get("torch_autocast", {}).get("enabled"):
        yield "`bf16` and `torch_autocast` are both enabled; keep one"
    if threshold := zero.get(key := "stage3_module_granularity_threshold"):
        yield f"`zero_optimization.{key}` = {threshold} fails in training; delete it"
