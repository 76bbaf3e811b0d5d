"""Rotary tables: exact in fp32 under a bf16 engine, changed in a living model, held against fp64."""

import json
import math
from contextlib import nullcontext
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from ds_pretrain.config.schema import RopeSection
from ds_pretrain.core.distributed import World
from ds_pretrain.core.errors import InputError
from ds_pretrain.models.build import build_on_meta
from ds_pretrain.models.rope import apply_rope, check_rotary_tables, restore_rotary
from ds_pretrain.models.rope_config import LEAST_THETA, MOST_FACTOR, MOST_THETA, build_rope_config
from tests.models import tiny
from tests.models.rope_reference import (
    TOLERANCE,
    RopeCheck,
    check_rope,
    reference_frequencies,
    reference_scale,
)
from tests.ranks import run_ranks

SCALED = tiny.LLAMA | {
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    },
    "max_position_embeddings": 512,
}  # fmt: skip


def _reference(theta: float, dim: int) -> torch.Tensor:
    return theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)  # [D / 2]


Tables = dict[str, list[float]]


def _tables(model: nn.Module) -> Tables:
    return {name: table.double().tolist() for name, table in tiny.rotary_tables(model).items()}


def _opened(world: World, stage: int) -> tuple[Tables, Tables, int]:
    """The tables as a bf16 engine leaves them, and restored, after a step; and the number restored."""
    import deepspeed

    options: dict[str, Any] = (
        {} if stage == 3 else {"partition": nullcontext, "gather": lambda _: nullcontext()}
    )
    model = tiny.built_under_zero3(world, tiny.LLAMA, torch.bfloat16, **options).module
    config = tiny.deepspeed_json(torch.bfloat16)
    config["zero_optimization"]["stage"] = stage
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config
    )
    left = _tables(model)
    num_restored = restore_rotary(engine.module)
    engine.backward(engine(torch.randint(0, 512, (1, 32))).logits.float().square().mean())
    engine.step()
    assert all(table.dtype == torch.float32 for table in tiny.rotary_tables(model).values())
    return left, _tables(model), num_restored


def _constructed_partitioned(world: World) -> Tables:
    import deepspeed
    from transformers import LlamaConfig, LlamaForCausalLM

    with deepspeed.zero.Init(config_dict_or_path=tiny.deepspeed_json(torch.bfloat16)):
        return _tables(LlamaForCausalLM(LlamaConfig(**tiny.ROTARY)))


def _error(table: list[float]) -> float:
    return (torch.tensor(table, dtype=torch.float64) / _reference(10_000.0, 16) - 1.0).abs().max().item()


@pytest.mark.parametrize("stage", [1, 3])
def test_frequencies_are_exact_after_a_bf16_engine_was_opened(stage: int) -> None:
    for left, restored, num_restored in run_ranks(_opened, 2, stage):
        assert num_restored == len(restored) == 2
        for name, table in restored.items():
            assert _error(table) < 2e-7
            assert (
                _error(left[name]) < 2e-7
            )  # opening leaves them alone; where it does not, the loop restores


def test_construction_under_zero3_alone_would_round_the_frequencies() -> None:
    (tables,) = run_ranks(_constructed_partitioned, 1)
    assert max(_error(table) for table in tables.values()) > 1e-4


@pytest.mark.parametrize("config", [tiny.GEMMA3, SCALED], ids=["one theta a layer type", "scaled"])
def test_frequencies_of_other_kinds_come_back_to_what_their_family_computes(config: dict[str, Any]) -> None:
    model = tiny.built(config).module
    before = {name: table.clone() for name, table in tiny.rotary_tables(model).items()}
    assert len(before) in (2, 4)
    model.bfloat16()
    assert restore_rotary(model) == len(before)
    for name, table in tiny.rotary_tables(model).items():
        assert torch.equal(table, before[name])


def test_a_changed_theta_takes_effect() -> None:
    model = tiny.built(tiny.LLAMA).module
    model.config.rope_parameters["rope_theta"] = 8e6
    restore_rotary(model)
    table = model.model.rotary_emb.inv_freq
    torch.testing.assert_close(table.double(), _reference(8e6, 16), rtol=2e-7, atol=0)


def test_the_attention_factor_of_each_kind_of_layer_follows_its_config() -> None:
    full, sliding = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}, {"rope_type": "default"}
    layers = {"layer_types": ["sliding_attention", "full_attention"]}
    tables = {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}
    rotary: Any = tiny.built(tiny.GEMMA3 | layers | tables).module.model.rotary_emb
    rotary.config.rope_parameters["full_attention"]["factor"] = 16.0
    restore_rotary(rotary)
    assert rotary.full_attention_attention_scaling == pytest.approx(0.1 * math.log(16.0) + 1.0)
    assert rotary.sliding_attention_attention_scaling == 1.0


def test_a_model_without_rotary_embedding_has_nothing_to_restore() -> None:
    assert restore_rotary(tiny.built(tiny.GPT2).module) == 0


def test_building_in_bf16_keeps_the_frequencies_exact() -> None:
    model = tiny.built(tiny.LLAMA, dtype=torch.bfloat16).module
    assert model.lm_head.weight.dtype == torch.bfloat16
    torch.testing.assert_close(
        model.model.rotary_emb.inv_freq.double(), _reference(10_000.0, 16), rtol=2e-7, atol=0
    )


FAR = 262_144
HEADS = {key: value for key, value in tiny.ROTARY.items() if key != "num_key_value_heads"}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": tiny.LLAMA,
    "qwen3": tiny.QWEN3,
    "phi, half of a head rotated": {"model_type": "phi"} | tiny.ROTARY,
    "gpt_neox, a quarter": {"model_type": "gpt_neox"} | HEADS | {"num_attention_heads": 2},
    "gemma3, full attention alone": tiny.GEMMA3 | {"layer_types": ["sliding_attention", "full_attention"]},
}
CHANGES = {
    "theta": RopeSection(theta=8e6),
    "yarn": RopeSection(kind="yarn", factor=64.0),
    "llama3": RopeSection(kind="llama3", factor=64.0, theta=5e5),
}
CASES = {
    f"{family}, {change}": (FAMILIES[family], CHANGES[change])
    for family, change in product(FAMILIES, CHANGES)
}

DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3", "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 2,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
} | tiny.ROTARY | {"num_key_value_heads": 4}  # fmt: skip


def _made(config: dict[str, Any]) -> Any:
    return tiny.built(config).module


def _state(module: Any) -> tuple[dict[str, list[float]], dict[str, Any], dict[str, dict[str, Any]]]:
    """Tables, config, and what else the rotary modules hold."""
    plain = {
        name: {k: v for k, v in vars(part).items() if not k.startswith("_") and k != "config"}
        for name, part in module.named_modules()
        if "rotary" in name
    }
    tables = {name: table.tolist() for name, table in tiny.rotary_tables(module).items()}
    return tables, module.config.to_dict(), plain


@pytest.mark.parametrize(("family", "rope"), CASES.values(), ids=CASES.keys())
def test_p58_a_live_change_equals_a_fresh_build_bit_for_bit_and_fp64_within_a_thousandth(
    family: dict[str, Any], rope: RopeSection
) -> None:
    before = family | {"max_position_embeddings": 4096}
    after = build_rope_config(before, rope, FAR)
    live, fresh = _made(before), _made(after)
    tokens = torch.randint(0, 512, (2, 48))
    unchanged = live(tokens).logits
    assert apply_rope(live, after) == len(tiny.rotary_tables(live))
    assert _state(live) == _state(fresh)
    assert torch.equal(live(tokens).logits, fresh(tokens).logits)
    assert not torch.equal(live(tokens).logits, unchanged)
    check = check_rope(live)
    assert (check.problems, check.unchecked) == ((), ())
    assert check.num_tables == len(tiny.rotary_tables(live))
    assert check.worst_error < 5e-3  # at position 262,143, where fp32 itself cannot hold an angle better
    near = _made(build_rope_config(before, rope, 8192))
    assert 0 < check_rope(near).worst_error < TOLERANCE


def test_p58_tables_equal_fp64_at_each_position_that_is_known_to_fail_in_bf16() -> None:
    model = _made(build_rope_config(tiny.LLAMA, RopeSection(theta=5e5), FAR))
    rotary: Any = model.model.rotary_emb
    positions = [0, 1, 255, 256, 257, 4095, 131_071, FAR - 1]
    cosines, sines = rotary(torch.zeros(1), torch.tensor([positions]))  # [1, P, D]
    assert cosines.dtype == torch.float32
    for row, position in enumerate(positions):
        for index in range(8):
            angle = position * 5e5 ** (-2 * index / 16)
            off = max(
                abs(cosines[0, row, index] - math.cos(angle)), abs(sines[0, row, index] - math.sin(angle))
            )
            assert off < (TOLERANCE if position < 100_000 else 5e-3)


@pytest.mark.parametrize("name", ["inv_freq", "original_inv_freq"])
def test_p58_a_bf16_table_is_found(name: str) -> None:
    model = _made(tiny.LLAMA)
    assert check_rotary_tables(model) == []
    rotary: Any = model.model.rotary_emb
    setattr(rotary, name, getattr(rotary, name).bfloat16())
    assert check_rotary_tables(model) == [
        f"model.rotary_emb.{name} is in torch.bfloat16; expected torch.float32: something cast it after it "
        "was computed"
    ]
    setattr(rotary, name, getattr(rotary, name).float())
    [problem] = check_rotary_tables(model)
    assert problem == (
        f"model.rotary_emb.{name} is not what its config makes: "
        "{'rope_theta': 10000.0, 'rope_type': 'default'}"
    )
    assert len(check_rope(model).problems) == (2 if name == "inv_freq" else 1)


def test_p58_a_config_that_is_changed_and_not_applied_is_found() -> None:
    model = _made(tiny.LLAMA)
    model.config.rope_parameters["rope_theta"] = 8e6
    assert len(check_rotary_tables(model)) == 2
    yarn = _made(build_rope_config(tiny.LLAMA, RopeSection(kind="yarn", factor=4.0), 8192))
    assert check_rope(yarn).problems == ()
    yarn.model.rotary_emb.attention_scaling = 1.0
    (problem,) = check_rope(yarn).problems
    assert "from yarn (theta 10,000, factor 4)" in problem


def test_yarns_attention_factor_is_the_papers_unless_the_config_has_one() -> None:
    table = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 2048}
    assert reference_scale(table) == pytest.approx(0.1 * math.log(4.0) + 1.0, abs=1e-15)
    assert reference_scale(table | {"factor": 1.0}) == 1.0
    given = tiny.LLAMA | {"rope_parameters": table | {"attention_factor": 1.25}}
    after = build_rope_config(given, RopeSection(factor=16.0), FAR // 8)
    live = _made(given)
    assert check_rope(live).problems == ()
    apply_rope(live, after)
    assert live.model.rotary_emb.attention_scaling == 1.25
    assert live.model.rotary_emb.rope_type == "yarn"
    deepseek = tiny.LLAMA | {"rope_parameters": table | {"mscale": 1.0, "mscale_all_dim": 0.5}}
    assert check_rope(_made(deepseek)).problems == ()


def test_yarn_keeps_what_turns_often_and_slows_what_does_not_turn_once() -> None:
    """Peng et al., arXiv:2309.00071, with alpha 1 and beta 32."""
    table = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 4096}
    plain = reference_frequencies({"rope_theta": 1e4}, 128)
    scaled = reference_frequencies(table, 128)
    turns = [4096 * frequency / (2 * math.pi) for frequency in plain]
    kinds = set()
    for frequency, other, turned in zip(plain, scaled, turns, strict=True):
        if turned > 32 * 1.16:  # the ramp begins and ends at whole indices
            assert other == frequency
            kinds.add("kept")
        elif turned < 1 / 1.16:
            assert other == pytest.approx(frequency / 8, rel=1e-12)
            kinds.add("slowed")
        else:
            assert frequency / 8 <= other <= frequency
            kinds.add("between")
    assert kinds == {"kept", "slowed", "between"}


def test_llama_3_slows_wavelengths_beyond_its_original_length_and_keeps_those_below_a_quarter() -> None:
    table = {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    plain = reference_frequencies({"rope_theta": 5e5}, 128)
    for frequency, other in zip(plain, reference_frequencies(table, 128), strict=True):
        length = 2 * math.pi / frequency
        if length < 8192 / 4:
            assert other == frequency
        elif length > 8192:
            assert other == frequency / 8
        else:
            assert frequency / 8 < other < frequency


def test_a_linear_scaling_is_checked_and_a_kind_without_reference_is_named() -> None:
    linear = tiny.LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    assert check_rope(_made(linear)).problems == ()
    longest = tiny.LLAMA | {
        "rope_scaling": {
            "rope_type": "longrope", "factor": 2.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
        }
    }  # fmt: skip
    names = ("model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq")
    assert check_rope(_made(longest)) == RopeCheck(0, 0.0, (), names)
    with pytest.raises(ValueError, match="no reference for rotary kind 'longrope'"):
        reference_frequencies({"rope_type": "longrope", "rope_theta": 1e4}, 16)


def test_each_part_that_has_a_config_of_its_own_follows() -> None:
    model = _made(tiny.LLAMA)
    model.model.rotary_emb.config = deepcopy(model.config)
    after = build_rope_config(tiny.LLAMA, CHANGES["theta"], 4096)
    apply_rope(model, after)
    assert _state(model) == _state(_made(after))


def test_a_weight_that_has_a_row_a_position_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "ds_pretrain.models.rope._build_on_meta",
        lambda config: nn.Embedding(config.max_position_embeddings, 2),
    )
    with pytest.raises(InputError) as refused:
        apply_rope(_made(tiny.LLAMA), build_rope_config(tiny.LLAMA, None, 4096))
    assert refused.value.problems == (
        '"llama" has a table "weight" of [2048, 2] that would become [4096, 2]; a run cannot change it: set '
        '"max_position_embeddings" to the longest phase in the model config',
    )


@pytest.mark.parametrize("rope", CHANGES.values(), ids=CHANGES.keys())
def test_p58_what_transformers_saves_and_loads_again_has_the_same_tables(
    rope: RopeSection, tmp_path: Path
) -> None:
    live = _made(tiny.LLAMA)
    apply_rope(live, build_rope_config(tiny.LLAMA, rope, 131_072))
    live.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert _state(loaded)[0] == _state(live)[0]
    assert check_rope(loaded).problems == ()
    tokens = torch.randint(0, 512, (1, 32))
    assert torch.equal(loaded.train()(tokens).logits, live(tokens).logits)


def test_tables_in_complex_numbers_are_checked() -> None:
    model = _made(DEEPSEEK | {"model_type": "deepseek_v2"})
    check = check_rope(model)
    assert (check.num_tables, check.problems, check.unchecked) == (2, (), ())
    assert 0 < check.worst_error < TOLERANCE
    model.model.rotary_emb.attention_scaling = 1.1
    assert len(check_rope(model).problems) == 1


def test_p58_a_change_that_does_not_reach_the_tables_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_pretrain.models.rope.restore_rotary", lambda module: 2)
    with pytest.raises(InputError, match=r"model.rotary_emb.inv_freq is not what its config makes: .*'yarn'"):
        apply_rope(_made(tiny.LLAMA), build_rope_config(tiny.LLAMA, CHANGES["yarn"], 8192))


@pytest.mark.parametrize(
    "more",
    [
        {"truncate": False},
        {"beta_fast": 8, "beta_slow": 2},
        {"factor": 1.0},
        {"original_max_position_embeddings": 8},  # no room for a ramp
        {"attention_factor": 0.5},
        {"mscale": 1.0, "mscale_all_dim": 0.5},
    ],
    ids=str,
)
def test_every_setting_of_yarn_agrees_with_what_transformers_computes(more: dict[str, Any]) -> None:
    table = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 2048}
    assert check_rope(_made(tiny.LLAMA | {"rope_parameters": table | more})).problems == ()
    assert reference_frequencies(table | more, 16) != reference_frequencies(table, 16) or reference_scale(
        table | more
    ) != reference_scale(table)


def test_frequencies_that_stand_side_by_side_are_checked() -> None:
    check = check_rope(_made({"model_type": "cohere"} | tiny.ROTARY))
    assert (check.num_tables, check.unchecked) == (2, ())
    assert 0 < check.worst_error < TOLERANCE


def test_the_same_config_changes_nothing() -> None:
    model = _made(tiny.LLAMA)
    assert apply_rope(model, tiny.LLAMA) == 0
    assert apply_rope(model, build_rope_config(tiny.LLAMA, None, 64)) == 0


def test_several_changes_one_after_the_other_equal_the_last() -> None:
    model, config = _made(tiny.LLAMA), tiny.LLAMA
    for rope, length in (
        (CHANGES["theta"], 4096),
        (CHANGES["yarn"], 8192),
        (RopeSection(kind="default"), 8192),
    ):
        config = build_rope_config(config, rope, length)
        apply_rope(model, config)
        assert _state(model) == _state(_made(config))


def test_what_attention_takes_from_the_rotary_parameters_changes_as_well() -> None:
    """DeepSeek scales its attention by the factor, when it is constructed."""
    after = build_rope_config(DEEPSEEK, RopeSection(factor=64.0), FAR)
    live, fresh = _made(DEEPSEEK), _made(after)
    old = live.model.layers[1].self_attn.scaling
    apply_rope(live, after)
    assert live.model.layers[1].self_attn.scaling == fresh.model.layers[1].self_attn.scaling != old
    tokens = torch.randint(0, 512, (1, 32))
    assert torch.equal(live(tokens).logits, fresh(tokens).logits)


def test_p58_a_model_without_rotary_tables_is_refused() -> None:
    refusal = '"gpt2" has no rotary tables; remove rope from the phases, or choose a family that has them'
    model = _made(tiny.GPT2)
    with pytest.raises(InputError, match=refusal):
        apply_rope(model, tiny.GPT2 | {"n_positions": 128})


def test_a_kind_that_follows_the_length_of_each_forward_is_refused() -> None:
    config = tiny.LLAMA | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    with pytest.raises(
        InputError, match='rotary kind "dynamic" recomputes its frequencies in each forward pass'
    ):
        apply_rope(_made(tiny.LLAMA), config)
    live = _made(config)  # away from it is possible
    after = build_rope_config(config, RopeSection(kind="yarn", factor=4.0), 8192)
    apply_rope(live, after)
    assert _state(live) == _state(_made(after))


def test_a_dry_build_takes_each_phase_without_weights_and_names_the_one_that_cannot_be() -> None:
    huge = tiny.LLAMA | {"hidden_size": 16_384, "num_attention_heads": 128, "num_hidden_layers": 3}
    longer = build_rope_config(huge, CHANGES["theta"], 8192)
    phases = {"a": huge, "b": longer, "c": build_rope_config(longer, CHANGES["yarn"], FAR)}
    model = build_on_meta(json.dumps(huge), phases=phases)
    assert check_rope(model).problems == ()
    assert model.config.rope_parameters["rope_type"] == "yarn"
    dynamic = tiny.LLAMA | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    with pytest.raises(InputError, match=r'^phases\.b: rotary kind "dynamic" recomputes'):
        build_on_meta(json.dumps(tiny.LLAMA), phases={"phases.a": tiny.LLAMA, "phases.b": dynamic})


def test_p58_a_change_that_turns_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A family whose code does not read a scaling would go on as before."""
    monkeypatch.setattr("ds_pretrain.models.rope._get_rotary_state", lambda module: [])
    with pytest.raises(
        InputError, match=r"computes the same rotary positions under .*yarn.* as before; raise"
    ):
        apply_rope(_made(tiny.LLAMA), build_rope_config(tiny.LLAMA, CHANGES["yarn"], 8192))


@pytest.mark.parametrize("theta", [LEAST_THETA, MOST_THETA])
@pytest.mark.parametrize("factor", [1.0, MOST_FACTOR])
def test_p58_tables_are_sound_at_the_bounds_of_what_a_phase_may_name(theta: float, factor: float) -> None:
    for kind in ("default", "yarn", "llama3"):
        rope = RopeSection(kind=kind, theta=theta, factor=None if kind == "default" else factor)  # type: ignore[arg-type]
        model = build_rope_config(tiny.LLAMA | {"head_dim": 128, "max_position_embeddings": 64}, rope, 64)
        assert check_rope(_made(model)).problems == (), kind
