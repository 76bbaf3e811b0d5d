"""Initialization: the std asked, the same bits everywhere, and a check that fires (P-35)."""

import hashlib
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ds_pretrain.core.distributed import World
from ds_pretrain.models.init import UninitializedWeightsError, get_kind
from ds_pretrain.models.param_groups import build_parameter_groups, get_whole_shape, iterate_parameters
from tests.models import tiny
from tests.ranks import run_ranks

FAMILIES = {"llama": tiny.LLAMA, "qwen3": tiny.QWEN3, "gpt2": tiny.GPT2, "mixtral": tiny.MIXTRAL}
WIDE = {
    "llama": tiny.LLAMA | {"vocab_size": 1024, "hidden_size": 128, "intermediate_size": 352},
    "qwen3": tiny.QWEN3 | {"vocab_size": 1024, "hidden_size": 128, "intermediate_size": 352, "head_dim": 32},
    "gpt2": tiny.GPT2 | {"vocab_size": 1024, "n_embd": 128, "n_positions": 256},
}


def _digest(model: nn.Module, gather: Any) -> str:
    digest = hashlib.sha256()
    for name, _, parameter in sorted(iterate_parameters(model), key=lambda owned: owned[0]):
        with gather([parameter]):
            digest.update(name.encode())
            digest.update(parameter.data.float().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _zero3_digest(world: World, config: dict[str, Any], bf16: bool, qk_norm: bool) -> tuple[str, float]:
    import deepspeed

    dtype = torch.bfloat16 if bf16 else torch.float32
    model = tiny.built_under_zero3(world, config, dtype, qk_norm=qk_norm).module
    whole = sum(math.prod(get_whole_shape(p)) for p in model.parameters())
    held = sum(p.ds_tensor.numel() for p in model.parameters()) / whole
    return _digest(model, lambda ps: deepspeed.zero.GatheredParameters(ps)), held


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_bitwise_the_same_at_worlds_1_2_3_and_without_zero(family: str) -> None:
    config, qk_norm = FAMILIES[family], family in ("llama", "mixtral")
    plain = _digest(tiny.built(config, qk_norm=qk_norm).module, lambda ps: nullcontext())
    for num_ranks in (1, 2, 3):
        for digest, held in run_ranks(_zero3_digest, num_ranks, config, False, qk_norm):
            assert digest == plain
            assert held <= 1.1 / num_ranks  # each rank holds its share only


def test_bf16_weights_are_the_same_bits_under_zero3_as_without() -> None:
    plain = _digest(tiny.built(tiny.LLAMA, dtype=torch.bfloat16).module, lambda ps: nullcontext())
    assert [digest for digest, _ in run_ranks(_zero3_digest, 2, tiny.LLAMA, True, False)] == [plain] * 2


def test_another_seed_gives_other_weights_and_layers_differ() -> None:
    first, second = tiny.built(tiny.LLAMA).module, tiny.built(tiny.LLAMA, seed=8).module
    assert not torch.equal(first.lm_head.weight, second.lm_head.weight)
    layers = first.model.layers
    assert not torch.equal(layers[0].self_attn.q_proj.weight, layers[1].self_attn.q_proj.weight)


@pytest.mark.parametrize("family", WIDE)
def test_std_of_every_kind_of_weight_is_within_2_percent_of_asked(family: str) -> None:
    model = tiny.built(WIDE[family] | {"initializer_range": 0.03}).module
    values: dict[str, list[torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        values.setdefault(get_kind(name), []).append(parameter.data.flatten())
    num_scaled = 0
    for kind, parts in values.items():
        measured = torch.cat(parts)
        if "norm" in kind or ".ln_" in kind or kind.endswith("bias"):
            assert measured.unique().tolist() == [0.0 if kind.endswith("bias") else 1.0]
            continue
        residual = any(name in kind for name in ("o_proj", "down_proj", "c_proj"))
        num_scaled += residual
        asked = 0.03 / math.sqrt(2 * 2) if residual else 0.03
        assert measured.std().item() == pytest.approx(asked, rel=0.02)
        assert abs(measured.mean().item()) < 0.02 * asked
    assert num_scaled == 2


def test_the_report_states_asked_and_measured_of_each_kind() -> None:
    report = {kind.kind: kind for kind in tiny.built(tiny.LLAMA).weights}
    o_proj = report["model.layers.*.self_attn.o_proj.weight"]
    assert (o_proj.asked_std, o_proj.num_parameters, o_proj.num_weights) == (0.01, 2, 2 * 64 * 64)
    assert o_proj.measured_std == pytest.approx(0.01, rel=0.05)
    assert report["model.norm.weight"].measured_mean == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", WIDE)
def test_the_first_loss_is_that_of_a_uniform_guess(family: str, dtype: torch.dtype) -> None:
    model = tiny.built(WIDE[family], dtype=dtype).module.eval()
    tokens = torch.randint(0, 1024, (8, 65), generator=torch.Generator().manual_seed(1))  # [B, T + 1]
    with torch.no_grad():
        logits = model(tokens[:, :-1]).logits  # [B, T, V]
    loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()).item()
    assert loss == pytest.approx(math.log(1024), abs=0.1)


def test_tied_embeddings_are_one_weight_drawn_once() -> None:
    model = tiny.built(tiny.LLAMA | {"tie_word_embeddings": True}).module
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.02)


def _tied_under_zero3(world: World) -> tuple[bool, str]:
    import deepspeed

    model = tiny.built_under_zero3(world, tiny.LLAMA | {"tie_word_embeddings": True}, torch.float32).module
    digest = _digest(model, lambda ps: deepspeed.zero.GatheredParameters(ps))
    return model.lm_head.weight is model.model.embed_tokens.weight, digest


def test_tied_embeddings_stay_tied_under_zero3() -> None:
    plain = tiny.built(tiny.LLAMA | {"tie_word_embeddings": True}).module
    expected = (True, _digest(plain, lambda ps: nullcontext()))
    assert run_ranks(_tied_under_zero3, 2) == [expected] * 2


@pytest.mark.parametrize(
    "config",
    [tiny.MIXTRAL, tiny.QWEN3_MOE, tiny.GEMMA, tiny.GEMMA3, tiny.OLMO2, tiny.MAMBA],
    ids=lambda c: c["model_type"],
)
def test_other_families_are_initialized_too(config: dict[str, Any]) -> None:
    model = tiny.built(config).module.eval()
    tokens = torch.randint(0, 512, (2, 33), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model(tokens[:, :-1]).logits
    loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()).item()
    assert loss == pytest.approx(math.log(512), abs=0.2)


def test_expert_output_projections_are_scaled_like_dense_ones() -> None:
    experts = tiny.built(tiny.MIXTRAL).module.model.layers[0].mlp.experts
    assert experts.down_proj.std().item() == pytest.approx(0.01, rel=0.02)
    assert experts.gate_up_proj.std().item() == pytest.approx(0.02, rel=0.02)


def test_norms_that_are_centered_on_zero_start_at_zero() -> None:
    assert tiny.built(tiny.GEMMA3).module.model.norm.weight.abs().max().item() == 0.0


def test_unusual_weights_are_what_their_family_makes_of_them() -> None:
    mixer = tiny.built(tiny.MAMBA).module.backbone.layers[0].mixer
    torch.testing.assert_close(mixer.A_log[0], torch.arange(1, 9).float().log())
    assert mixer.D.unique().tolist() == [1.0]
    assert mixer.dt_proj.bias.std().item() > 0  # set by the mixer, not zero like other biases


def test_a_padding_token_does_not_freeze_its_embedding() -> None:
    model = tiny.built(tiny.OLMO2).module
    tokens = torch.ones(1, 8, dtype=torch.long)
    model(tokens).logits.square().sum().backward()
    assert model.model.embed_tokens.weight.grad[1].abs().sum() > 0
    assert model.model.embed_tokens.weight[1].std().item() > 0.01


def _build_with(world: World, how: str) -> str:
    import deepspeed

    gathers = {
        "never gathered": lambda ps: nullcontext(),
        "writes lost": lambda ps: deepspeed.zero.GatheredParameters(ps),
    }
    try:
        tiny.built_under_zero3(world, tiny.LLAMA, torch.float32, qk_norm=True, gather=gathers[how])
    except UninitializedWeightsError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("how", "found"),
    [("never gathered", "expected 4096 weights, found 0"), ("writes lost", "expected mean 0, std 0.02")],
)
def test_p35_weights_never_initialized_under_zero3_stop_the_run_on_every_rank(how: str, found: str) -> None:
    messages = run_ranks(_build_with, 2, how)
    assert messages[0] == messages[1]
    assert (
        f"model.layers.*.self_attn.q_proj.weight (first: model.layers.0.self_attn.q_proj.weight): {found}"
        in messages[0]
    )


def test_p35_empty_or_unknown_weights_are_named() -> None:
    from ds_pretrain.models.init import check_weights

    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[0].weight.data = torch.empty(0)
    with pytest.raises(UninitializedWeightsError) as caught:
        check_weights(model, {}, lambda ps: nullcontext())
    assert "found 0" in str(caught.value)
    model[0].weight.data = torch.zeros(4, 4)
    with pytest.raises(UninitializedWeightsError, match="no rule has initialized it"):
        check_weights(model, {}, lambda ps: nullcontext())


def test_p35_one_bad_layer_among_good_ones_is_found() -> None:
    from ds_pretrain.models import init

    model = tiny.built(tiny.LLAMA | {"num_hidden_layers": 12, "hidden_size": 64}).module
    asked = {name: init._Asked(p.mean().item(), p.std().item(), True) for name, p in model.named_parameters()}
    init.check_weights(model, asked, lambda ps: nullcontext())
    with torch.no_grad():
        model.model.layers[7].mlp.up_proj.weight.mul_(1.1)
    with pytest.raises(UninitializedWeightsError, match=r"layers\.7\.mlp\.up_proj"):
        init.check_weights(model, asked, lambda ps: nullcontext())


def _group_names(model: nn.Module, **options: bool) -> dict[str, list[str]]:
    names = {id(p): name for name, p in model.named_parameters()}
    return {g["name"]: [names[id(p)] for p in g["params"]] for g in build_parameter_groups(model, **options)}


def _groups_under_zero3(world: World) -> dict[str, list[str]]:
    return _group_names(tiny.built_under_zero3(world, tiny.LLAMA, torch.float32, qk_norm=True).module)


def test_norms_biases_and_embeddings_do_not_decay_unless_asked() -> None:
    llama = _group_names(tiny.built(tiny.LLAMA, qk_norm=True).module)
    assert all("proj" in name or "lm_head" in name for name in llama["decay"])
    assert len(llama["decay"]) == 2 * 7 + 1
    assert "model.embed_tokens.weight" in llama["no_decay"]
    assert "model.layers.1.self_attn.k_norm.weight" in llama["no_decay"]
    gpt2 = _group_names(tiny.built(tiny.GPT2).module)
    assert all(".c_" in name and name.endswith("weight") for name in gpt2["decay"])
    assert {"transformer.wte.weight", "transformer.wpe.weight"} <= set(gpt2["no_decay"])
    asked = _group_names(tiny.built(tiny.GPT2).module, decay_embeddings=True)
    assert {"transformer.wte.weight", "transformer.wpe.weight"} <= set(asked["decay"])
    assert "transformer.ln_f.weight" in asked["no_decay"]
    assert run_ranks(_groups_under_zero3, 2) == [llama] * 2


def test_the_decaying_group_leaves_the_amount_to_the_optimizer() -> None:
    decay, no_decay = build_parameter_groups(tiny.built(tiny.LLAMA).module)
    assert "weight_decay" not in decay
    assert no_decay["weight_decay"] == 0.0
    assert [g["name"] for g in build_parameter_groups(nn.LayerNorm(4))] == ["no_decay"]
