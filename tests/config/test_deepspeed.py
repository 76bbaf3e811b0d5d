"""The DeepSpeed JSON: what is refused and how, and whether its keys are DeepSpeed's own."""

import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import BaseModel

from ds_pretrain.config.deepspeed import (
    REFUSED,
    VERSIONS,
    DeepSpeedJson,
    Lion,
    NativeAdam,
    TorchAdam,
    advise_on_non_finite,
    check_deepspeed,
    check_ranks,
    check_version,
    gradient_clipping,
    resolve_deepspeed,
    uses_bf16,
    zero_stage,
)
from ds_pretrain.config.loader import find_errors, find_section_models
from ds_pretrain.core.errors import InputError
from ds_pretrain.core.text import parse_json
from tests.scenario import deepspeed_json
from tests.test_ds_configs import NAMES, Recording, read

ROOT = Path(__file__).parents[2]


def problems_of(config: Mapping[str, Any], accumulation: int | None = None) -> list[str]:
    return check_deepspeed(
        config, "ds.json", peak=3e-4, sizes=[(512, 2)], accumulation=accumulation, run_path="run.toml"
    )


def changed(path: str, value: Any) -> dict[str, Any]:
    """A sound JSON with one value set, at a dotted path."""
    config: dict[str, Any] = json.loads(json.dumps(deepspeed_json()))
    *sections, key = path.split(".")
    node = config
    for section in sections:
        node = node.setdefault(section, {})
    node[key] = value
    return config


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("bf16", [False, True])
def test_a_sound_json_has_no_problem(stage: int, bf16: bool) -> None:
    config = deepspeed_json(stage, bf16)
    assert problems_of(config) == []
    assert (zero_stage(config), uses_bf16(config), gradient_clipping(config)) == (stage, bf16, 1.0)


@pytest.mark.parametrize("name", NAMES)
def test_each_shipped_json_has_no_problem(name: str) -> None:
    assert problems_of(read(name)) == []


# path, value, and pieces of the one message
ONE_MESSAGE: list[tuple[str, Any, tuple[str, ...]]] = [
    (
        "gradient_cliping",
        1.0,
        ("unknown key `gradient_cliping`", "did you mean `gradient_clipping`?"),
    ),
    ("learning_rate_schedule_of_mine", 1, ("unknown key", "known here: activation_checkpointing, aio,")),
    ("scheduler", {"type": "WarmupLR"}, ("`scheduler` is set", "[schedule] of the run file; delete it")),
    ("fp16", {"enabled": True}, ("`fp16` is set", "train in bf16 or fp32")),
    ("bfloat16", {"enabled": True}, ("`bfloat16` is set", "write bf16")),
    ("wandb", {"enabled": True}, ("`wandb` is set", "[monitor] wandb in the run file; delete it")),
    ("sparse_gradients", True, ("`sparse_gradients` is set", "delete it")),
    ("amp", True, ("`amp` is set", "use bf16")),
    ("sequence_parallel_size", "2", ('`sequence_parallel_size` = "2": expected a valid integer',)),
    ("sequence_parallel_size", 0, ("`sequence_parallel_size` = 0: expected greater than or equal to 1",)),
    ("sequence_parallel_size", True, ("`sequence_parallel_size` = true: expected a valid integer",)),
    ("checkpoint.load_universal", True, ("`checkpoint.load_universal` is set", "delete it")),
    ("checkpoint.tag_validaton", "Fail", ("`checkpoint.tag_validaton`", "did you mean `tag_validation`?")),
    ("data_types.grad_acum_dtype", "fp32", ("`data_types.grad_acum_dtype`", "mean `grad_accum_dtype`?")),
    ("bf16.enable", True, ("unknown key `bf16.enable`", "did you mean `enabled`?")),
    ("bf16", True, ("`bf16` = true: expected a section with keys",)),
    ("zero_optimization.stage", 0, ("`zero_optimization.stage` = 0: expected greater than or equal to 1",)),
    ("zero_optimization.stage", "3", ('`zero_optimization.stage` = "3": expected a valid integer',)),
    ("zero_optimization.overlap_com", True, ("`zero_optimization.overlap_com`", "mean `overlap_comm`?")),
    ("zero_optimization.prefetch_bucket_size", 1, ("did you mean `stage3_prefetch_bucket_size`?",)),
    ("zero_optimization.cpu_offload", True, ("`zero_optimization.cpu_offload`", "write offload_optimizer")),
    ("zero_optimization.stage3_module_granularity_threshold", 5, ("fails in training; delete it",)),
    ("optimizer.type", "SGD", ('`optimizer.type` = "SGD": expected "AdamW", "Adam" or "Lion"',)),
    ("optimizer", {}, ("`optimizer.type` is missing",)),
    ("optimizer.parms", {}, ("unknown key `optimizer.parms`", "did you mean `params`?")),
    (
        "optimizer.params.lr",
        0.001,
        (
            "`optimizer.params.lr` = 0.001, but run.toml sets schedule.peak_lr = 0.0003",
            "delete it from the JSON: the run file owns the rate",
        ),
    ),
    (
        "optimizer.params.weight_decy",
        0.1,
        ("unknown key `optimizer.params.weight_decy`; did you mean `weight_decay`? (TorchAdam)",),
    ),
    (
        "optimizer.params.bias_correction",
        True,
        ("unknown key `optimizer.params.bias_correction`; known here: betas, eps",),
    ),
    ("optimizer.params.max_grad_norm", 1.0, ("is refused by DeepSpeed; use `gradient_clipping`",)),
    ("optimizer.params.betas", [0.9], ("`optimizer.params.betas.1` is missing",)),
    ("optimizer.params.betas", [0.9, 95], ("`optimizer.params.betas.1` = 95: expected less than 1",)),
    ("optimizer.params.eps", "1e-8", ('`optimizer.params.eps` = "1e-8": expected a valid number',)),
    (
        "optimizer.params.weight_decay",
        -0.1,
        ("`optimizer.params.weight_decay` = -0.1: expected greater than or equal to 0",),
    ),
    ("gradient_clipping", "1.0", ('`gradient_clipping` = "1.0": expected a valid number',)),
    ("gradient_clipping", -1, ("`gradient_clipping` = -1: expected greater than or equal to 0",)),
    ("managed_gradient_accumulation", True, ("`managed_gradient_accumulation` = true", "set it to false")),
    ("gradient_allreduce_op", "sum", ('`gradient_allreduce_op` = "sum": expected "mean"',)),
    ("prescale_gradients", True, ("do not work with `zero_optimization.reduce_scatter`",)),
    (
        "train_batch_size",
        256,
        (
            "`train_batch_size` = 256, but run.toml gives 512 (batch.tokens / seq_len)",
            "delete it from the JSON: the run file owns the batch",
        ),
    ),
    (
        "train_micro_batch_size_per_gpu",
        4,
        (
            "`train_micro_batch_size_per_gpu` = 4, but run.toml gives 2 (batch.micro_batch_size)",
            "delete it from the JSON",
        ),
    ),
]

WRONG_VALUES: list[tuple[str, Any, str]] = [
    ("bf16.enabled", "false", '`bf16.enabled` = "false": expected a valid boolean'),
    ("bf16.enabled", 1, "`bf16.enabled` = 1: expected a valid boolean"),
    ("optimizer.params", [1], "`optimizer.params` = [1]: expected a section with keys"),
    ("optimizer", [1], "`optimizer` = [1]: expected a section with keys"),
    ("optimizer.type", 3, '`optimizer.type` = 3: expected "AdamW", "Adam" or "Lion"'),
    ("optimizer.params.torch_adam", "yes", '`optimizer.params.torch_adam` = "yes": expected a valid boolean'),
    ("optimizer.params.betas", None, "`optimizer.params.betas` = null: expected a list, like [...]"),
    ("zero_optimization.stage", True, "`zero_optimization.stage` = true: expected a valid integer"),
    ("zero_optimization.stage", 3.0, "`zero_optimization.stage` = 3.0: expected a valid integer"),
    ("zero_optimization.stage", [3], "`zero_optimization.stage` = [3]: expected a valid integer"),
    (
        "zero_optimization.reduce_bucket_size",
        "big",
        'bucket_size` = "big": expected a valid integer',
    ),
    ("zero_optimization.reduce_bucket_size", -1, "` = -1: expected greater than or equal to 1"),
    ("zero_optimization.reduce_bucket_size", 0, "` = 0: expected greater than or equal to 1"),
    ("zero_optimization.reduce_bucket_size", 1.5, "` = 1.5: expected a valid integer"),
    ("zero_optimization.sub_group_size", float("inf"), "` = inf: expected a"),
    ("zero_optimization.sub_group_size", None, "` = null: expected a valid integer"),
    ("zero_optimization.zero_hpz_partition_size", "8", '_size` = "8": expected a valid integer'),
    (
        "zero_optimization.overlap_comm",
        "yes",
        '`zero_optimization.overlap_comm` = "yes": expected a valid boolean',
    ),
    (
        "zero_optimization.offload_optimizer",
        "cpu",
        '_optimizer` = "cpu": expected a section with keys',
    ),
    ("zero_optimization.offload_optimizer.device", "mars", '"mars": expected "none", "cpu" or "nvme"'),
    ("zero_optimization.offload_param.pin_memory", "no", '.pin_memory` = "no": expected a valid boolean'),
    ("zero_optimization.offload_param.nvme", "x", "unknown key `zero_optimization.offload_param.nvme`"),
    ("zero_optimization.leaf_module.names", [1], "names.0` = 1: expected a valid string"),
    ("zero_optimization.stage3_module_granularity_threshold", "x", '` = "x": expected a valid integer'),
    ("data_types.grad_accum_dtype", "fp33", '_dtype` = "fp33": expected "fp32", "bf16"'),
    ("communication_data_type", "xx", '`communication_data_type` = "xx": expected "fp32", "bf16" or "fp16"'),
    ("wall_clock_breakdown", "yes", '`wall_clock_breakdown` = "yes": expected a valid boolean'),
    ("prescale_gradients", "yes", '`prescale_gradients` = "yes": expected a valid boolean'),
    ("gradient_predivide_factor", 0, "`gradient_predivide_factor` = 0: expected greater than 0"),
    ("gradient_clipping", None, "`gradient_clipping` = null: expected a valid number"),
    ("gradient_clipping", True, "`gradient_clipping` = true: expected a valid number"),
    ("train_batch_size", "512", '`train_batch_size` = "512": expected a valid integer'),
    ("managed_gradient_accumulation", "no", '= "no": expected a valid boolean'),
    (
        "checkpoint.tag_validation",
        "xx",
        '`checkpoint.tag_validation` = "xx": expected "warn", "ignore" or "fail"',
    ),
    ("checkpoint.parallel_write.pipeline_stage", "x", 'pipeline_stage` = "x": expected a valid boolean'),
    ("torch_autocast.dtype", "fp33", '`torch_autocast.dtype` = "fp33": expected "bf16"'),
    ("flops_profiler.enable", True, "unknown key `flops_profiler.enable`; did you mean `enabled`?"),
    (
        "flops_profiler.profile_step",
        0,
        "`flops_profiler.profile_step` = 0: expected greater than or equal to 1",
    ),
    ("log_level", "loud", '`log_level` = "loud": expected "debug", "info"'),
    ("comms_logger.prof_ops", "all_reduce", "expected a list, like [...]"),
    (
        "compile.passes",
        ["z9"],
        '`compile.passes.0` = "z9": expected "z1", "z3", "autosp" or "autotp"',
    ),
    ("timers", 3, "`timers` = 3: expected a section with keys"),
    ("bf16", None, "`bf16` = null: expected a section with keys"),
    ("zero_optimization", "x", '`zero_optimization` = "x": expected a section with keys'),
    ("bf16.enabled", "x" * 200, "xxx...: expected a valid boolean"),
]


@pytest.mark.parametrize(
    ("path", "value", "message"), WRONG_VALUES, ids=[str(r[:2])[:60] for r in WRONG_VALUES]
)
def test_a_value_of_the_wrong_kind_is_refused_with_what_was_expected(
    path: str, value: Any, message: str
) -> None:
    problems = [p for p in problems_of(changed(path, value)) if "is missing" not in p]
    assert len(problems) == 1, problems
    assert problems[0].startswith("ds.json: ")
    assert message in problems[0]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("zero_optimization.reduce_bucket_size", 5e8),  # as many JSON files write it
        ("zero_optimization.overlap_comm", None),
        ("zero_optimization.offload_optimizer", None),
        ("zero_optimization.leaf_module", {"classes": "a.B", "names": ["x"]}),
        ("communication_data_type", "FP32"),
        ("data_types.grad_accum_dtype", None),
        ("checkpoint.tag_validation", "Fail"),
        ("optimizer.params.foreach", None),
        ("steps_per_print", None),
        ("train_batch_size", None),
        ("gradient_clipping", 0),
    ],
)
def test_other_spellings_that_deepspeed_reads_are_no_problem(path: str, value: Any) -> None:
    assert problems_of(changed(path, value)) == []


def test_a_json_without_a_stage_is_told_so() -> None:
    config = changed("zero_optimization", {})
    assert problems_of(config) == ["ds.json: `zero_optimization.stage` is missing"]


@pytest.mark.parametrize(("path", "value", "pieces"), ONE_MESSAGE, ids=[str(row[:2]) for row in ONE_MESSAGE])
def test_what_cannot_work_is_refused_with_one_message(path: str, value: Any, pieces: tuple[str, ...]) -> None:
    problems = problems_of(changed(path, value))
    assert len(problems) == 1, problems
    assert problems[0].startswith("ds.json")
    for piece in pieces:
        assert piece in problems[0]


EACH_REFUSED = [(section, key) for section, reasons in REFUSED.items() for key in reasons]


@pytest.mark.parametrize(("section", "key"), EACH_REFUSED, ids=map(".".join, EACH_REFUSED))
def test_each_refused_key_says_why_unless_it_is_off(section: str, key: str) -> None:
    path = f"{section}.{key}".strip(".")
    assert problems_of(changed(path, {"enabled": True, "type": "x"})) == [
        f"ds.json: `{path}` is set: {REFUSED[section][key]}"
    ]
    for off in (None, False, {}, {"enabled": False}):
        assert len(problems_of(changed(path, off))) == (section == "zero_optimization")


def test_pairs_that_do_not_work_are_refused() -> None:
    overlapping = deepspeed_json(1)
    overlapping["zero_optimization"]["overlap_comm"] = True
    assert ["does not work with stage 1" in p for p in problems_of(overlapping)] == [True]
    offloading = deepspeed_json(2)
    offloading["zero_optimization"]["offload_param"] = {"device": "cpu"}
    assert ["needs stage 3, found stage 2" in p for p in problems_of(offloading)] == [True]
    twice = deepspeed_json(3, bf16=True, torch_autocast={"enabled": True})
    assert ["are both enabled; keep one" in p for p in problems_of(twice)] == [True]


def test_options_that_need_another_one_are_refused_without_it() -> None:
    swapping = changed("zero_optimization.offload_optimizer", {"device": "nvme"})
    assert ['.device` = "nvme" needs `nvme_path`' in p for p in problems_of(swapping)] == [True]
    swapping["zero_optimization"]["offload_optimizer"]["nvme_path"] = "/nvme"
    assert problems_of(swapping) == []
    partly = deepspeed_json(2)
    partly["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "ratio": 0.5}
    assert [".ratio` < 1 needs stage 3, found stage 2" in p for p in problems_of(partly)] == [True]
    states = changed("bf16.bf16_optimizer_states", True)
    assert ["needs `bf16.bf16_master_weights_and_grads` = true" in p for p in problems_of(states)] == [True]
    states["bf16"]["bf16_master_weights_and_grads"] = True
    assert problems_of(states) == []


def test_only_a_real_true_turns_bf16_on() -> None:
    assert uses_bf16({"bf16": {"enabled": True}})
    for other in ("false", "true", 1, None):
        assert not uses_bf16({"bf16": {"enabled": other}})


def test_what_is_refused_unless_off_does_not_reach_deepspeed_when_it_is_off() -> None:
    """DeepSpeed raises on the mere presence of features that it removed."""
    off = deepspeed_json(sparse_gradients=False, fp16=None, amp={"enabled": False})
    assert problems_of(off) == []
    resolved = resolve_deepspeed(off, peak=3e-4, micro_batch_size=2)
    assert resolved.keys() & {"sparse_gradients", "fp16", "amp"} == set()


def test_deepspeeds_own_adam_and_lion_know_their_own_parameters() -> None:
    native = changed("optimizer.params", {"betas": [0.9, 0.95], "bias_correction": True})
    assert problems_of(native) == []
    native["optimizer"]["params"]["foreach"] = True
    assert ["`optimizer.params.foreach`; known here" in p for p in problems_of(native)] == [True]
    lion = changed("optimizer", {"type": "Lion", "params": {"betas": [0.9, 0.95], "weight_decay": 0.1}})
    assert problems_of(lion) == []
    lion["optimizer"]["params"]["eps"] = 1e-8
    assert ["`optimizer.params.eps`; known here: betas, weight_decay (Lion)" in p for p in problems_of(lion)]


def test_p12_two_sources_of_the_rate_are_refused_with_both_values() -> None:
    config = changed("scheduler", {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3}})
    config["optimizer"]["params"]["lr"] = 1e-3
    problems = problems_of(config)
    assert len(problems) == 2
    assert "`scheduler`" in problems[0]
    assert "`optimizer.params.lr` = 0.001, but run.toml sets schedule.peak_lr = 0.0003" in problems[1]


def test_p12_even_the_same_rate_in_two_places_is_refused() -> None:
    assert len(problems_of(changed("optimizer.params.lr", 3e-4))) == 1


AUTO = [
    "bf16.enabled",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "optimizer.params.betas",
    "optimizer.params.eps",
    "optimizer.params.weight_decay",
    "optimizer.type",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_module_granularity_threshold",
    "zero_optimization.stage3_param_persistence_threshold",
    "zero_optimization.stage3_prefetch_bucket_size",
]


@pytest.mark.parametrize("path", AUTO)
def test_p30_auto_is_refused_wherever_it_stands(path: str) -> None:
    problems = problems_of(changed(path, "auto"))
    assert problems == [
        f'ds.json: `{path}` is "auto", which only the Hugging Face Trainer fills in; '
        "write a value or delete the key"
    ]


def test_p30_auto_inside_a_list_is_refused_with_its_place() -> None:
    problems = problems_of(changed("optimizer.params.betas", ["auto", 0.95]))
    assert any('`optimizer.params.betas.0` is "auto"' in problem for problem in problems)


def test_p30_what_the_engine_gets_holds_no_auto_and_the_runs_own_batch_and_rate() -> None:
    config = deepspeed_json(train_batch_size=512, steps_per_print=7)
    resolved = resolve_deepspeed(config, peak=3e-4, micro_batch_size=2)
    assert '"auto"' not in json.dumps(resolved)
    assert "train_batch_size" not in resolved
    assert resolved["train_micro_batch_size_per_gpu"] == 2
    assert resolved["gradient_accumulation_steps"] == 1
    assert resolved["managed_gradient_accumulation"] is False
    assert resolved["optimizer"]["params"] == {**config["optimizer"]["params"], "lr": 3e-4}
    assert resolved["zero_optimization"] == config["zero_optimization"]
    assert "lr" not in config["optimizer"]["params"], "the JSON that was read is left as it is"


def test_p30_an_accumulation_in_the_json_must_be_the_one_that_follows() -> None:
    config = changed("gradient_accumulation_steps", 3)
    assert problems_of(config) == list(check_ranks(config, 7, None, "run.toml")) == []  # nobody knows it
    [problem] = problems_of(config, accumulation=4)
    [derived] = check_ranks(config, 64, 4, "run.toml")
    for text in (problem, derived):
        assert "`gradient_accumulation_steps` = 3, but run.toml gives 4 (batch." in text
    config["gradient_accumulation_steps"] = 4
    assert problems_of(config, accumulation=4) == list(check_ranks(config, 64, 4, "run.toml")) == []


def test_a_partition_that_does_not_divide_the_ranks_is_refused() -> None:
    config = changed("zero_optimization.zero_hpz_partition_size", 8)
    assert problems_of(config) == list(check_ranks(config, 16, None, "run.toml")) == []
    [problem] = check_ranks(config, 12, None, "run.toml")
    assert "`zero_optimization.zero_hpz_partition_size` = 8 does not divide 12 ranks; set it to" in problem


def test_all_problems_are_found_at_once() -> None:
    config = changed("gradient_cliping", 1.0) | {"train_batch_size": 3, "scheduler": {"type": "x"}}
    assert len(problems_of(config)) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "ds.json is not valid JSON: "),
        ("[1]", "ds.json must hold one JSON object, found a list"),
        ('{"bf16": {"enabled": true, "enabled": false}}', "ds.json gives the key `enabled` twice; keep one"),
        ('{"a":' * 100_000, "ds.json is not valid JSON: nested too deeply"),
        ('{"a": NaN}', "ds.json holds NaN, which is not JSON; write a number"),
        ('{"a": ' + "9" * 5000 + "}", "ds.json is not valid JSON: Exceeds the limit"),
    ],
)
def test_text_that_is_no_json_object_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError) as raised:
        parse_json(text, "ds.json")
    assert message in str(raised.value)


def test_clipping_is_off_when_absent_or_zero() -> None:
    assert gradient_clipping({}) is None
    assert gradient_clipping({"gradient_clipping": 0.0}) is None


def test_p28_the_pin_is_that_of_the_package_and_another_deepspeed_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pin = ",".join(f"{sign}{'.'.join(map(str, v))}" for sign, v in zip((">=", "<"), VERSIONS, strict=True))
    assert f'"deepspeed{pin}"' in (ROOT / "pyproject.toml").read_text()
    assert list(check_version()) == []
    for installed, is_refused in {"0.19.8": 0, "0.19.10+x": 0, "0.19.7": 1, "0.20.0": 1, "0.9": 1}.items():
        monkeypatch.setattr("ds_pretrain.config.deepspeed.version", lambda name, v=installed: v)
        assert len(list(check_version())) == is_refused, installed
    [problem] = check_version()
    assert problem.startswith("deepspeed 0.9 is installed; expected >=0.19.8,<0.20: older ones spoil")

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("ds_pretrain.config.deepspeed.version", missing)
    assert list(check_version()) == []


@pytest.mark.parametrize(
    ("stage", "overlap", "is_on"), [(3, None, True), (3, False, False), (2, None, False), (2, True, True)]
)
def test_p28_the_advice_names_what_is_in_effect_and_the_switch(
    stage: int, overlap: bool | None, is_on: bool
) -> None:
    config = {"zero_optimization": {"stage": stage, "overlap_comm": overlap}}
    advice = advise_on_non_finite(config, "J")
    assert "the loss is finite but the gradient norm is not; known cause: communication that over" in advice
    assert f"ZeRO-{stage}, overlap_comm = {'true' if is_on else 'false'}; " in advice
    assert ("to false in J, as ds_configs/zero3_bf16_no_overlap.json has it" in advice) == is_on
    assert ("overlap is off already, so look at the data and the hardware" in advice) == (not is_on)
    assert (ROOT / "ds_configs/zero3_bf16_no_overlap.json").exists()


# Whether our tables of keys are still those of DeepSpeed.


class _Asked(Recording):
    """A JSON that notes each top-level key that DeepSpeed looks for, also by `in config.keys()`."""

    asked: ClassVar[set[str]] = set()

    def keys(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> "_Asked":
        return self


def test_our_top_level_keys_are_those_that_deepspeed_looks_for() -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    _Asked.asked.clear()
    optimizer = {"type": "AdamW", "params": {}}
    DeepSpeedConfig(_Asked({"train_micro_batch_size_per_gpu": 1, "optimizer": optimizer}))
    read_elsewhere = {"sequence_parallel_size"}  # only when it is there
    assert _Asked.asked | read_elsewhere == set(DeepSpeedJson.model_fields) | set(REFUSED[""])
    assert DeepSpeedJson.model_fields.keys() & REFUSED[""].keys() == set()


def _models() -> dict[str, Any]:
    """Section to the pydantic model with which DeepSpeed reads it."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    return {
        "bf16": DeepSpeedBF16Config,
        "comms_logger": CommsLoggerConfig,
        "compile": CompileConfig,
        "timers.throughput": DeepSpeedThroughputTimerConfig,
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.leaf_module": DeepSpeedZeroLeafModuleConfig,
        "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
    }


def ours(section: str) -> type[BaseModel]:
    """Our model of the section at a dotted path."""
    model: type[BaseModel] = DeepSpeedJson
    for key in section.split("."):
        [model] = find_section_models(model.model_fields[key].annotation)
    return model


def test_our_section_keys_are_those_of_deepspeeds_own_models() -> None:
    for section, model in _models().items():
        names = {field.alias or name for name, field in model.model_fields.items()}
        refused = set(REFUSED.get(section, ()))
        assert names == ours(section).model_fields.keys() | refused, section
    zero = ours("zero_optimization").model_fields
    assert zero.keys() & REFUSED["zero_optimization"].keys() == set()


# A value a kind. What DeepSpeed's model refuses, ours must refuse; ours may refuse more: "yes" for true.
SAMPLES: list[Any] = [
    *(True, False, None, 0, 1, 3, 8, -1, 0.5, 1.5, -0.5, 5e8, float("inf")),
    *("big", "yes", "cpu", "mars", [], ["a"], [1], {}, {"device": "mars"}),
]


@pytest.mark.parametrize("section", _models())
def test_no_value_passes_our_check_that_deepspeeds_own_model_refuses(section: str) -> None:
    model = _models()[section]
    accepted, given = 0, {"stage": 3} if section == "zero_optimization" else {}
    for key in ours(section).model_fields:
        for value in SAMPLES:
            more = {"offload_optimizer": {"stage": 3}}.get(key, {})
            if find_errors({**given, key: value}, ours(section)) == [] and value != {
                "device": "mars"
            }:  # that one is refused one level below
                model(**{**more, key: value})
                accepted += 1
    assert accepted >= len(ours(section).model_fields)


@pytest.mark.parametrize("section", _models())
def test_our_kinds_admit_deepspeeds_own_defaults(section: str) -> None:
    """A table that asks for another type than DeepSpeed would refuse what everyone writes."""
    given = {"stage": 1} if section == "zero_optimization" else {}
    model = _models()[section](**given)
    for name, field in type(model).model_fields.items():
        key, default = field.alias or name, getattr(model, name)
        if key in ours(section).model_fields and not hasattr(default, "model_fields"):
            plain = getattr(default, "value", default) if key != "stage" else int(default)
            assert find_errors({**given, key: plain}, ours(section)) == [], (key, plain)


@pytest.mark.parametrize("section", ["activation_checkpointing", "aio", "flops_profiler", "torch_autocast"])
def test_our_keys_of_a_section_that_deepspeed_reads_by_hand_are_those_that_it_looks_for(section: str) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    _Asked.asked.clear()
    optimizer = {"type": "AdamW", "params": {}}
    present = {"dtype": "bf16", "lower_precision_safe_modules": []} if section == "torch_autocast" else {}
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": optimizer, section: _Asked(present)}
    DeepSpeedConfig(config)
    assert _Asked.asked == ours(section).model_fields.keys()


def test_our_optimizer_parameters_are_those_of_the_constructors() -> None:
    import inspect

    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion

    def parameters(kind: Any) -> set[str]:
        return set(inspect.signature(kind.__init__).parameters)

    taken_by_deepspeed = {"torch_adam", "adam_w_mode", "fp32_optimizer_states"}
    native = parameters(FusedAdam) & parameters(DeepSpeedCPUAdam) | taken_by_deepspeed
    in_torch = parameters(torch.optim.AdamW) & parameters(torch.optim.Adam) | taken_by_deepspeed
    assert native >= NativeAdam.model_fields.keys()
    assert in_torch >= TorchAdam.model_fields.keys()
    assert parameters(FusedLion) & parameters(DeepSpeedCPULion) >= Lion.model_fields.keys()


def test_deepspeed_takes_those_parameters_out_before_the_constructor_sees_them() -> None:
    import deepspeed

    source = Path(deepspeed.__path__[0], "runtime", "engine.py").read_text()
    for taken in (
        "TORCH_ADAM_PARAM, False",
        "ADAM_W_MODE, ADAM_W_MODE_DEFAULT",
        "'fp32_optimizer_states', None",
    ):
        assert f"optimizer_parameters.pop({taken})" in source
