"""The keys of the DeepSpeed JSON: which are known, which are refused and why.

Names are those of DeepSpeed 0.19.8 (https://www.deepspeed.ai/docs/config-json/); tests compare them with its
source, so that a moved pin is noticed.
"""

from ds_pretrain.config.deepspeed_values import VALUES

# Keys that mean something to a pretraining run. Any other is refused: DeepSpeed would ignore it.
TOP_LEVEL_KEYS = frozenset(VALUES[""])
ZERO_KEYS = frozenset(VALUES["zero_optimization"])
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
    "seq_parallel_communication_data_type": "sequence parallelism is not supported; delete it",
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
    "load_universal": "resuming converts by itself when it has to",
    "use_node_local_storage": "a checkpoint is verified as one folder",
    "writer": "DeepSpeed's other writers cannot load what they save",
}
OPTIMIZERS = ("AdamW", "Adam", "Lion")
# Sections whose unknown keys DeepSpeed ignores, or reports only minutes into a start.
KNOWN_SUBKEYS = {
    section: frozenset(known) | (REFUSED_CHECKPOINT_KEYS.keys() if section == "checkpoint" else frozenset())
    for section, known in VALUES.items()
    if section not in ("", "zero_optimization")
}
# What `optimizer.params` may hold besides `lr`, which the run file owns. An unknown one is an exception in
# the optimizer's constructor, minutes into a start.
_ANY_ADAM_PARAMS = frozenset(
    ["betas", "eps", "weight_decay", "torch_adam", "adam_w_mode", "fp32_optimizer_states"]
)
NATIVE_ADAM_PARAMS = _ANY_ADAM_PARAMS | {"bias_correction"}  # DeepSpeed's own, fused or on the CPU
TORCH_ADAM_PARAMS = _ANY_ADAM_PARAMS | {"amsgrad", "foreach", "fused", "capturable"}  # "torch_adam": true
LION_PARAMS = frozenset(["betas", "weight_decay"])
