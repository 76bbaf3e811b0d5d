"""Documents of one row do not see one another: by changing one and looking at the others."""

import importlib.util
import json
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import modeling_flash_attention_utils as flash_utils
from transformers.integrations import flash_attention as flash_layer

from ds_pretrain.core.distributed import World
from ds_pretrain.core.errors import InputError
from ds_pretrain.models.attention import bind_attention_inputs, build_attention_inputs, refuse_leaks
from ds_pretrain.models.build import build_model
from ds_pretrain.models.config_check import check_masking, warn_of_large_masks
from tests.models import tiny

LENGTH = 24
CPU = torch.device("cpu")
KERNELS = {"eager": 0.0, "sdpa": 1e-5}  # the largest difference allowed
EXPERTS = ("mixtral", "qwen3_moe")  # add up what tokens of all documents ask of an expert in one product
WINDOWED: dict[str, dict[str, Any]] = {
    "mistral": tiny.MISTRAL | {"sliding_window": 5},
    "mixtral": tiny.MIXTRAL | {"sliding_window": 5},
    "qwen2": tiny.QWEN2 | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "gemma3": tiny.GEMMA3 | {"sliding_window": 5},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": tiny.LLAMA,
    "qwen3": tiny.QWEN3,
    "gpt2": tiny.GPT2 | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "olmo2": tiny.OLMO2,
    "qwen3_moe": tiny.QWEN3_MOE,
    **WINDOWED,
}
each_kernel = pytest.mark.parametrize("kernel", KERNELS)
IN_EACH_RUN = ("llama", "qwen3", "gpt2", "gemma3", "qwen3_moe")
each_family = pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if f in IN_EACH_RUN else pytest.mark.slow) for f in FAMILIES]
)


def _model(config: dict[str, Any], kernel: str, recompute: bool = False) -> Any:
    model = build_model(
        json.dumps(config), qk_norm=False, recompute=recompute, seed=7, dtype=torch.float32, world=World(),
        partition=nullcontext, gather=lambda parameters: nullcontext(), attention=kernel,
    ).module  # fmt: skip
    with torch.no_grad():  # attention of a new model is nearly even; larger weights show what it reaches
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "embed" not in name:
                parameter.mul_(4)
    return model


def _documents(*rows: list[int]) -> Tensor:
    """Lengths of the documents of each row to [B, LENGTH]."""
    return torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)).int() for row in rows])


def _tokens(num_rows: int, seed: int = 0) -> Tensor:
    return torch.randint(512, (num_rows, LENGTH), generator=torch.Generator().manual_seed(seed))


def _masked(model: Any, documents: Tensor, **inputs: Tensor) -> Tensor:
    given = build_attention_inputs(documents, model.config, torch.float32)
    logits: Tensor = model(**inputs, use_cache=False, **given).logits  # [B, T, V]
    return logits


def _alone(model: Any, ids: Tensor) -> Tensor:
    """A document as its whole row, by Transformers' own causal attention: [T of it, V]."""
    logits: Tensor = model(input_ids=ids[None], use_cache=False).logits[0]
    return logits


DOCUMENTS = _documents([9, 8, 7], [1, 14, 9])


def _seen_of(model: Any, tokens: Tensor, chosen: Tensor) -> list[Tensor]:
    """Logits of a document, gradients of its loss by every weight and by the embeddings of its tokens."""
    model.zero_grad()
    embeddings = model.get_input_embeddings()(tokens).detach().requires_grad_()  # [B, T, width]
    logits = _masked(model, DOCUMENTS, inputs_embeds=embeddings)
    labels = (tokens * 7 + 3) % 512  # its own token's, so that nothing but attention can reach another
    functional.cross_entropy(logits[chosen], labels[chosen], reduction="sum").backward()  # type: ignore[no-untyped-call]
    used = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert len(used) > 10
    assert embeddings.grad is not None
    assert float(embeddings.grad[~chosen].abs().max()) == 0.0
    return [logits[chosen].detach(), embeddings.grad[chosen], *used]


def _largest_change(before: list[Tensor], after: list[Tensor]) -> float:
    """In parts of the largest value of each."""
    return max(
        float((a - b).abs().max() / b.abs().max().clamp(min=1e-30))
        for a, b in zip(after, before, strict=True)
    )


@each_kernel
@each_family
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recompute"])
def test_p38_changing_a_document_leaves_logits_and_gradients_of_every_other_one(
    family: str, kernel: str, recompute: bool
) -> None:
    model = _model(FAMILIES[family], kernel, recompute)
    tokens, other = _tokens(2), _tokens(2, seed=1)
    for row, number in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)):
        chosen = torch.zeros_like(DOCUMENTS, dtype=torch.bool)
        chosen[row] = DOCUMENTS[row] == number
        before = _seen_of(model, tokens, chosen)
        after = _seen_of(model, torch.where(chosen, tokens, other), chosen)
        allowed = 1e-5 if family in EXPERTS else KERNELS[kernel]
        assert _largest_change(before, after) <= allowed


def test_p38_positions_that_restart_under_a_mask_of_ones_do_not_keep_documents_apart() -> None:
    """The trap that the mask is made for; if this fails, Transformers has changed."""
    model = _model(tiny.LLAMA, "sdpa").eval()

    def trapped(ids: Tensor, documents: Tensor) -> Tensor:
        positions = build_attention_inputs(documents, model.config, torch.float32)["position_ids"]
        ones = torch.ones_like(ids)
        logits: Tensor = model(
            input_ids=ids, position_ids=positions, attention_mask=ones, use_cache=False
        ).logits
        return logits

    with pytest.raises(InputError, match='documents see one another under attention "sdpa": changing one'):
        refuse_leaks(trapped, 512, CPU, "sdpa")


@each_kernel
@each_family
def test_each_document_computes_what_it_does_alone(family: str, kernel: str) -> None:
    model = _model(FAMILIES[family], kernel).eval()
    tokens = _tokens(2)
    with torch.no_grad():
        logits = _masked(model, DOCUMENTS, input_ids=tokens)
        for row in (0, 1):
            for number in range(3):
                here = DOCUMENTS[row] == number
                torch.testing.assert_close(
                    logits[row, here], _alone(model, tokens[row, here]), rtol=0, atol=1e-5
                )


@each_kernel
@each_family
def test_a_row_that_is_one_document_is_as_without_a_mask(family: str, kernel: str) -> None:
    model = _model(FAMILIES[family], kernel).eval()
    tokens = _tokens(2)
    with torch.no_grad():
        logits = _masked(model, _documents([LENGTH], [LENGTH]), input_ids=tokens)
        plain = model(input_ids=tokens, use_cache=False).logits
    torch.testing.assert_close(logits, plain, rtol=0, atol=1e-6)


@each_kernel
@each_family
def test_documents_of_one_token_see_nothing_but_themselves(family: str, kernel: str) -> None:
    model = _model(FAMILIES[family], kernel).eval()
    tokens = _tokens(1)
    with torch.no_grad():
        logits = _masked(model, _documents([1] * LENGTH), input_ids=tokens)[0]
        alone = torch.cat([_alone(model, tokens[0, t : t + 1]) for t in range(LENGTH)])
    torch.testing.assert_close(logits, alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_inside_a_document_a_token_sees_what_precedes_it_and_nothing_that_follows(family: str) -> None:
    model = _model(FAMILIES[family], "eager").eval()
    tokens, other = _tokens(1), _tokens(1, seed=1)
    documents = _documents([9, 15])
    with torch.no_grad():
        before = _masked(model, documents, input_ids=tokens)[0]
        for at in (9, 12, 20):
            changed = tokens.clone()
            changed[0, at] = (other[0, at] + 1) % 512
            moved = (_masked(model, documents, input_ids=changed)[0] - before).abs().amax(-1)  # [T]
            assert (moved[:at] <= 1e-5).all()
            assert (moved[at : at + 4] > 1e-3).all()


@pytest.mark.parametrize("family", WINDOWED)
def test_the_window_of_a_family_is_kept(family: str) -> None:
    """In the middle of a document a token sees five, itself among them."""
    config = WINDOWED[family]
    model = _model(config, "eager").eval()
    given = build_attention_inputs(DOCUMENTS, model.config, torch.float32)["attention_mask"]
    windowed = given["sliding_attention"] if isinstance(given, dict) else given
    seen = (windowed == 0).squeeze(1)  # [B, T, T]
    assert seen[0].sum(-1).tolist() == [min(5, place + 1) for length in (9, 8, 7) for place in range(length)]
    if isinstance(given, dict) and "full_attention" in given:
        everything = (given["full_attention"] == 0).squeeze(1)
        assert everything[0].sum(-1).tolist() == [
            place + 1 for length in (9, 8, 7) for place in range(length)
        ]


def test_all_layers_keep_the_same_mask_for_the_backward_pass() -> None:
    """A mask of T x T in each layer is what runs out of memory first."""
    model = _model(tiny.LLAMA, "sdpa")
    masks = set()

    def note(kept: Tensor) -> Tensor:
        if kept.shape[-2:] == (LENGTH, LENGTH):
            masks.add(kept.untyped_storage().data_ptr())
        return kept

    with torch.autograd.graph.saved_tensors_hooks(note, lambda kept: kept):
        logits = _masked(model, DOCUMENTS, input_ids=_tokens(2))
    assert len(masks) == 1
    assert logits.requires_grad


def test_positions_restart_at_each_document() -> None:
    config = _model(tiny.LLAMA, "sdpa").config
    positions = build_attention_inputs(DOCUMENTS, config, torch.float32)["position_ids"]
    assert positions.dtype == torch.int64
    assert positions.tolist() == [
        [*range(9), *range(8), *range(7)],
        [0, *range(14), *range(9)],
    ]


def _flash(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Stand-ins for the functions of flash-attn, by their documented arguments; the calls that they got."""
    calls: list[dict[str, Any]] = []

    def varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, **options: Any) -> Tensor:
        calls.append({"q": q.shape, "cu_seqlens_q": cu_seqlens_q, **options})
        out = torch.empty_like(q)  # [tokens, heads, width]
        for start, stop in zip(cu_seqlens_q.tolist(), cu_seqlens_q.tolist()[1:], strict=False):
            part = [x[start:stop].transpose(0, 1) for x in (q, k, v)]
            out[start:stop] = functional.scaled_dot_product_attention(
                part[0], part[1], part[2], is_causal=True, enable_gqa=True
            ).transpose(0, 1)
        return out

    def dense(*args: Any, **options: Any) -> Tensor:
        raise AssertionError("documents were not told apart")

    def options(**given: Any) -> dict[str, Any]:
        return {name: given[name] for name in ("max_seqlen_q", "max_seqlen_k") if name in given}

    loaded = (dense, varlen, None, None, None), (options, None)
    monkeypatch.setattr(flash_utils, "lazy_import_flash_attention", lambda *args, **kwargs: loaded)
    monkeypatch.setattr(flash_layer, "get_target_dtype", lambda *args: None)  # stay in fp32
    return calls


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recompute"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_p38_flash_attention_is_given_the_bounds_of_the_documents_of_all_rows(
    family: str, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _model(FAMILIES[family], "eager", recompute)
    tokens = _tokens(2)
    expected = _masked(model, DOCUMENTS, input_ids=tokens)
    calls = _flash(monkeypatch)
    model.config._attn_implementation = "flash_attention_2"  # as if the package had been there
    logits = _masked(model, DOCUMENTS, input_ids=tokens)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    assert len(calls) == 2  # layers
    for call in calls:
        assert call["q"][0] == 2 * LENGTH
        assert call["cu_seqlens_q"].tolist() == [0, 9, 17, 24, 25, 39, 48]
        assert call["cu_seqlens_q"].dtype == torch.int32
        assert (call["max_seqlen_q"], call["max_seqlen_k"]) == (14, 14)
    logits.sum().backward()  # type: ignore[no-untyped-call]
    assert len(calls) == (4 if recompute else 2)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_keeps_documents_apart_is_accepted(kernel: str, dtype: torch.dtype) -> None:
    model = _model(tiny.QWEN3, kernel).to(dtype).eval()
    tell_apart = bind_attention_inputs(model.config, dtype)

    def logits(ids: Tensor, documents: Tensor) -> Tensor:
        found: Tensor = model(input_ids=ids, use_cache=False, **tell_apart(documents, CPU)).logits
        return found

    refuse_leaks(logits, 512, CPU, kernel)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_new_model_that_does_not_is_refused(family: str, dtype: torch.dtype) -> None:
    model = tiny.built(FAMILIES[family], dtype=dtype).module.eval()
    plain: Callable[[Tensor, Tensor], Tensor] = lambda ids, _: model(input_ids=ids, use_cache=False).logits  # noqa: E731
    with pytest.raises(InputError, match="documents see one another"):
        refuse_leaks(plain, 512, CPU, "sdpa")


def test_a_kernel_that_takes_neither_mask_nor_bounds_is_refused() -> None:
    config = _model(tiny.LLAMA, "sdpa").config
    config._attn_implementation = "flex_attention"
    with pytest.raises(
        InputError, match=r'attention "flex_attention" has not been shown .* use one of eager, '
    ):
        build_attention_inputs(DOCUMENTS, config, torch.float32)


def test_a_kind_of_layer_that_cannot_is_refused_when_masks_are_made() -> None:
    config = _model(tiny.QWEN3, "sdpa").config
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(InputError, match='"qwen3" has layers of kind linear_attention; only full_attention'):
        build_attention_inputs(DOCUMENTS, config, torch.float32)


@pytest.mark.parametrize(
    ("config", "attention", "message"),
    [
        ({"model_type": "llama"}, "flex_attention", 'attention = "flex_attention" has not been shown'),
        ({"model_type": "mamba"}, None, '"mamba" has layers of kind linear_attention, through which'),
        ({"model_type": "rwkv"}, None, '"rwkv" does not accept position_ids or an attention mask'),
        ({"model_type": "bloom"}, None, '"bloom" does not accept position_ids or an attention mask'),
        ({"model_type": "falcon", "alibi": True}, None, '"falcon" with "alibi" counts distances'),
        ({"model_type": "qwen3_next"}, None, '"qwen3_next" has layers of kind linear_attention, through'),
        ({"model_type": "llama4_text"}, None, '"llama4_text" has layers of kind chunked_attention'),
        (
            {"model_type": "qwen3", "num_hidden_layers": 2, "layer_types": ["full_attention", "conv"]},
            None,
            '"qwen3" has layers of kind conv, through which documents see one another; use a family',
        ),
    ],
)
def test_p38_what_cannot_keep_documents_apart_is_refused_at_start(
    config: dict[str, Any], attention: str | None, message: str
) -> None:
    [problem] = check_masking(config, attention)
    assert message in problem


def test_p38_flash_attention_is_refused_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec("json")
    for installed, expected in ((None, 1), (found, 0)):
        monkeypatch.setattr("ds_pretrain.models.config_check.find_spec", lambda name, it=installed: it)
        problems = check_masking(tiny.LLAMA, "flash_attention_2")
        assert len(problems) == expected
    monkeypatch.setattr("ds_pretrain.models.config_check.find_spec", lambda name: None)
    [problem] = check_masking(tiny.LLAMA, "flash_attention_2")
    assert (
        'needs the package flash-attn, which is not installed; install it, or set attention = "sdpa"'
        in problem
    )


@pytest.mark.parametrize("kernel", [None, *KERNELS])
@each_family
def test_families_that_are_tested_here_are_not_refused(family: str, kernel: str | None) -> None:
    assert check_masking(FAMILIES[family], kernel) == []


def test_masks_that_take_much_memory_are_warned_of_with_their_bytes() -> None:
    def warned(family: dict[str, Any], seq_len: int, rows: int = 2, dtype: str = "bf16") -> list[str]:
        return warn_of_large_masks(family, None, rows, seq_len, dtype, "phases.long")

    assert warned(tiny.LLAMA, 32_768) == [
        "phases.long: model.mask_documents = true holds a mask of 1 x 2 x 32,768 x 32,768 in bf16, 4.0 GiB a "
        'micro-batch; model.attention = "flash_attention_2" holds none'
    ]
    assert "8.0 GiB" in warned(tiny.LLAMA, 32_768, dtype="fp32")[0]
    for kinds, num_bytes in (
        (["full_attention"], "4.0 GiB"),
        (["full_attention", "sliding_attention"], "masks of 2 x 2 x 32,768 x 32,768 in bf16, 8.0 GiB"),
    ):
        [line] = warned(tiny.GEMMA3 | {"layer_types": (kinds * 2)[:2]}, 32_768)
        assert num_bytes in line
    assert warned(tiny.LLAMA, 16_384) != []  # 1 GiB
    assert warned(tiny.LLAMA, 16_384, rows=1) == []
    assert warn_of_large_masks(tiny.LLAMA, "flash_attention_2", 2, 32_768, "bf16", "phases.long") == []
