"""QK-norm: a Llama with it is Qwen3; native ones keep theirs; elsewhere it is refused (P-34)."""

import copy
import inspect
import json
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from ds_pretrain.core.distributed import World
from ds_pretrain.core.errors import InputError
from ds_pretrain.models.config_check import QK_NORM_ADDABLE, QK_NORM_BY_KEY, QK_NORM_NATIVE
from ds_pretrain.models.qk_norm import has_qk_norm
from tests.models import tiny
from tests.ranks import run_ranks


def _logits(model: nn.Module, width: int = 32) -> Tensor:
    tokens = torch.randint(0, 512, (2, width), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        logits: Tensor = model.eval()(tokens).logits
    return logits


def _disturb_norms(model: nn.Module) -> None:
    """Weights of ones would hide a norm that is applied to the wrong head or not at all."""
    generator = torch.Generator().manual_seed(4)
    for name, parameter in model.named_parameters():
        if "q_norm" in name or "k_norm" in name:
            parameter.data = 1.0 + 0.5 * torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("heads_keys", [(4, 4), (4, 2), (4, 1)])
def test_p34_a_llama_with_qk_norm_is_qwen3_names_included(heads_keys: tuple[int, int]) -> None:
    shape = {"num_attention_heads": heads_keys[0], "num_key_value_heads": heads_keys[1]}
    model = tiny.built(tiny.LLAMA | shape | {"head_dim": 24}, qk_norm=True).module
    _disturb_norms(model)
    qwen3 = Qwen3ForCausalLM(Qwen3Config(**(tiny.ROTARY | shape | {"head_dim": 24})))
    qwen3.load_state_dict(model.state_dict(), strict=True)
    torch.testing.assert_close(_logits(model), _logits(qwen3), rtol=0, atol=1e-6)
    attention = model.model.layers[0].self_attn
    assert attention.q_norm.weight.shape == attention.k_norm.weight.shape == (24,)


def test_p34_gradients_are_those_of_qwen3() -> None:
    model = tiny.built(tiny.LLAMA, qk_norm=True, recompute=True).module
    _disturb_norms(model)
    qwen3 = Qwen3ForCausalLM(Qwen3Config(**(tiny.ROTARY | {"head_dim": 16})))
    qwen3.load_state_dict(model.state_dict())
    tokens = torch.arange(40)[None]
    for each in (model, qwen3.train()):
        each(tokens).logits.square().mean().backward()
    theirs = dict(qwen3.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-4, atol=1e-7)


def test_p34_attention_equals_one_written_by_hand() -> None:
    model = tiny.built(tiny.LLAMA, qk_norm=True).module
    _disturb_norms(model)
    attention = model.model.layers[0].self_attn
    x = torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(6))  # [B, T, E]
    position_embeddings = model.model.rotary_emb(x, torch.arange(6)[None])
    with torch.no_grad():
        ours = attention.eval()(
            hidden_states=x, position_embeddings=position_embeddings, attention_mask=None
        )[0]
        expected = _attention_by_hand(attention, x[0])
    torch.testing.assert_close(ours[0], expected, rtol=1e-5, atol=1e-7)


def _attention_by_hand(attention: Any, x: Tensor) -> Tensor:
    def heads_of(projection: nn.Linear, norm: nn.Module | None) -> list[Tensor]:
        heads = (x @ projection.weight.T).split(16, dim=-1)  # H of [T, D]
        if norm is None:
            return list(heads)
        return [rotated(h / (h.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight) for h in heads]

    def rotated(head: Tensor) -> Tensor:
        angles = torch.arange(6.0)[:, None] * 10_000.0 ** (-torch.arange(0, 16, 2.0) / 16)  # [T, D / 2]
        first, second = head.split(8, dim=-1)
        return torch.cat(
            [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1
        )

    queries, keys = heads_of(attention.q_proj, attention.q_norm), heads_of(attention.k_proj, attention.k_norm)
    values = heads_of(attention.v_proj, None)
    causal = torch.ones(6, 6).tril().log()
    mixed = [
        ((q @ keys[i // 2].T / 4.0) + causal).softmax(-1) @ values[i // 2] for i, q in enumerate(queries)
    ]
    return torch.cat(mixed, -1) @ attention.o_proj.weight.T


def test_p34_what_was_saved_is_a_qwen3_and_loads_as_one(tmp_path: Any) -> None:
    for config in (tiny.LLAMA, tiny.MISTRAL):
        model = tiny.built(config, qk_norm=True).module
        _disturb_norms(model)
        folder = tmp_path / config["model_type"]
        model.save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps(_as_qwen3(config), default=str))
        reloaded = AutoModelForCausalLM.from_pretrained(folder)
        assert type(reloaded).__name__ == "Qwen3ForCausalLM"
        torch.testing.assert_close(_logits(reloaded), _logits(model), rtol=0, atol=1e-6)


def _as_qwen3(config: dict[str, Any]) -> dict[str, Any]:
    """The Qwen3 config that computes what a Llama or Mistral with added QK-norm does, names included."""
    known = AutoConfig.for_model(**config).to_dict()
    window = known.get("sliding_window") if config["model_type"] == "mistral" else None
    dropped = {"mlp_bias", "pretraining_tp", "sliding_window", "layer_types"}
    kept = {key: value for key, value in known.items() if key not in dropped}
    windowed = (
        {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0} if window else {}
    )
    return kept | windowed | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}


def test_p34_the_variant_is_stated() -> None:
    assert tiny.built(tiny.LLAMA, qk_norm=True).qk_norm == (
        "per-head RMSNorm before the rotary embedding, added to 2 layers"
    )
    assert tiny.built(tiny.LLAMA).qk_norm is None


def test_a_copy_of_the_model_uses_its_own_norms() -> None:
    model = tiny.built(tiny.LLAMA, qk_norm=True).module
    clone = copy.deepcopy(model)
    before = _logits(clone)
    _disturb_norms(model)
    assert torch.equal(_logits(clone), before)
    assert not torch.equal(_logits(model), before)


@pytest.mark.parametrize(
    "config", [tiny.QWEN3, tiny.QWEN3_MOE, tiny.GEMMA3, tiny.OLMO2], ids=lambda c: c["model_type"]
)
def test_models_that_have_it_natively_use_theirs(config: dict[str, Any]) -> None:
    asked, plain = tiny.built(config, qk_norm=True), tiny.built(config)
    assert asked.qk_norm == f"native to {config['model_type']}"
    assert asked.num_parameters == plain.num_parameters
    assert torch.equal(_logits(asked.module), _logits(plain.module))


@pytest.mark.parametrize("config", [tiny.GPT2, tiny.GEMMA, tiny.MAMBA], ids=lambda c: c["model_type"])
def test_asking_for_it_where_it_cannot_be_done_is_an_error(config: dict[str, Any]) -> None:
    with pytest.raises(
        InputError, match=rf'not possible for "{config["model_type"]}"; it can be added to arcee'
    ):
        tiny.built(config, qk_norm=True)


def test_a_family_with_a_key_for_it_says_which() -> None:
    config = {"model_type": "stablelm"} | tiny.ROTARY
    with pytest.raises(InputError, match='set "qk_layernorm": true'):
        tiny.built(config, qk_norm=True)
    assert tiny.built(config | {"qk_layernorm": True}, qk_norm=True).qk_norm == "native to stablelm"


def _module_source(family: str) -> str:
    folder = family.removesuffix("_text")
    return inspect.getsource(import_module(f"transformers.models.{folder}.modeling_{folder}"))


def test_families_are_what_the_tables_say() -> None:
    for family in QK_NORM_ADDABLE:
        source = _module_source(family)
        assert "self.q_proj(hidden_states).view(hidden_shape).transpose(1, 2)" in source, family
        assert "self.k_proj(hidden_states).view(hidden_shape).transpose(1, 2)" in source, family
        assert "apply_rotary_pos_emb(query_states, key_states" in source, family
        assert "rms_norm_eps" in source, family
    for family in QK_NORM_NATIVE | QK_NORM_BY_KEY.keys():
        source = _module_source(family)
        assert any(f"self.{name} = " in source for name in ("q_norm", "q_layernorm", "query_layernorm")), (
            family
        )


def _one_step(world: World) -> list[float]:
    import deepspeed

    model = tiny.built_under_zero3(world, tiny.LLAMA, torch.float32, qk_norm=True).module
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config=tiny.deepspeed_json(torch.float32),
    )
    tokens = torch.randint(0, 512, (1, 32), generator=torch.Generator().manual_seed(2))
    losses = []
    for _ in range(2):
        loss = engine(tokens).logits.square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    with deepspeed.zero.GatheredParameters(model.model.layers[0].self_attn.q_norm.weight):
        losses.append(model.model.layers[0].self_attn.q_norm.weight.sum().item())
    return losses


def test_p34_it_trains_partitioned_as_it_does_whole() -> None:
    model = tiny.built(tiny.LLAMA, qk_norm=True).module
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(0, 512, (1, 32), generator=torch.Generator().manual_seed(2))
    expected = []
    for _ in range(2):
        loss = model(tokens).logits.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    expected.append(model.model.layers[0].self_attn.q_norm.weight.sum().item())
    for measured in run_ranks(_one_step, 2):
        assert measured == pytest.approx(expected, rel=1e-5)
    assert has_qk_norm(model)
