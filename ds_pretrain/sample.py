"""Text from a checkpoint, on one process: the quickest look at what a run has learned."""

from collections.abc import Iterator
from contextlib import nullcontext

import torch

from ds_pretrain.checkpoint import store
from ds_pretrain.checkpoint.universal import whole_weights
from ds_pretrain.data.indexed import open_source
from ds_pretrain.data.tokenizer import Tokenizer, load_tokenizer
from ds_pretrain.errors import InputError, RunError
from ds_pretrain.models.build import build_model
from ds_pretrain.plan import Plan
from ds_pretrain.world import World


def sample(
    plan: Plan, prompt: str, *, count: int, max_tokens: int, temperature: float, seed: int, step: int | None
) -> Iterator[tuple[str, str]]:
    """(checkpoint, text) of `count` continuations of `prompt`; an empty prompt starts a document.

    Raises:
        InputError: there is no checkpoint (at that step), or no source says which tokenizer made it.
    """
    tokenizer = run_tokenizer(plan)
    folder = store.newest_intact(plan.out / "checkpoints", step)
    model = build_model(
        plan.model_text,
        qk_norm=plan.run.model.qk_norm,
        recompute=False,
        seed=plan.run.seed,
        dtype=torch.float32,
        world=World(),
        partition=nullcontext,
        gather=lambda parameters: nullcontext(),
        attention=plan.run.model.attention,
    ).module.eval()
    missing, unexpected = model.load_state_dict(whole_weights(folder), strict=False)
    if missing or unexpected:
        raise RunError(
            f"{folder} does not fit {plan.run.model.config}: missing {missing}, unexpected {unexpected}"
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device)
    torch.manual_seed(seed)
    start = list(map(int, tokenizer.encode([prompt])[0])) if prompt else []
    ids = torch.tensor([[tokenizer.eos_id, *start]], device=device)  # [1, T]
    for _ in range(count):
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=temperature > 0,
            temperature=temperature or None,
            eos_token_id=tokenizer.eos_id,
            pad_token_id=tokenizer.eos_id,
            use_cache=True,
        )  # [1, T + new]
        yield folder.name, tokenizer.decode(out[0].tolist())


def run_tokenizer(plan: Plan) -> Tokenizer:
    """The tokenizer that the run's sources were prepared with."""
    for section in plan.run.sources.values():
        sidecar = open_source(section.path).sidecar
        if sidecar is not None and "tokenizer" in sidecar:
            return load_tokenizer(sidecar["tokenizer"])
    raise InputError(
        f"{plan.run_path}: no source says which tokenizer made it, so ids cannot be turned into text; "
        "sources written by `ds-pretrain prepare` do"
    )
