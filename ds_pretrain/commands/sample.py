"""Text from a checkpoint, on one process: the quickest look at what a run has learned."""

import argparse
import json
import math
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_pretrain.checkpoint import restore
from ds_pretrain.checkpoint.manifest import list_published, parse_step
from ds_pretrain.checkpoint.shards import open_shards
from ds_pretrain.config.plan import Plan, load_plan
from ds_pretrain.core.distributed import World, uses_gpu
from ds_pretrain.core.errors import InputError
from ds_pretrain.data.indexed import open_source
from ds_pretrain.data.tokenizer import Tokenizer, open_tokenizer_of
from ds_pretrain.models.build import build_model
from ds_pretrain.training.curriculum import resolve_model_text

MIN_TEMPERATURE = 1e-3  # logits divided by less overflow


def execute(words: argparse.Namespace) -> int:
    """Print what a checkpoint of the run says."""
    plan = load_plan(words.run_file, words.overrides)
    texts = generate_samples(
        plan,
        words.prompt,
        count=words.count,
        max_tokens=words.tokens,
        temperature=words.temperature,
        seed=words.seed,
        step=words.step,
    )
    for name, text in texts:
        print(f"--- {name}\n{text}")
    return 0


def generate_samples(
    plan: Plan, prompt: str, *, count: int, max_tokens: int, temperature: float, seed: int, step: int | None
) -> Iterator[tuple[str, str]]:
    """(checkpoint, text) of `count` continuations of `prompt`; an empty prompt starts a document.

    Raises:
        InputError: a number that cannot be meant, no checkpoint (at that step), or no tokenizer to be had.
    """
    _refuse_words(prompt, count, max_tokens, temperature, seed)
    tokenizer = run_tokenizer(plan)
    start = list(map(int, tokenizer.encode([prompt])[0])) if prompt else []
    folder = restore.find_newest_intact(_find_root(plan), step)
    _refuse_length(_read_model_text(plan, folder), 1 + len(start), max_tokens)
    model = load_trained_model(plan, folder)
    device = "cuda" if uses_gpu() else "cpu"
    model.to(device)
    torch.manual_seed(seed)
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


def load_trained_model(plan: Plan, folder: Path) -> Any:
    """The run's Transformers model with the weights of the checkpoint `folder`, in fp32, on the CPU.

    Raises:
        InputError: the run file's model is not the one that was saved.
    """
    model = build_whole_model(plan, _read_model_text(plan, folder)).eval()
    try:
        model.load_state_dict(open_shards(folder).whole_weights())
    except RuntimeError as error:
        raise InputError(
            f"{folder} does not fit {plan.run.model.config} and [model] of {plan.run_path}: "
            f"{' '.join(str(error).split())}; set the model back to what was trained"
        ) from error
    return model


def build_whole_model(plan: Plan, text: str | None = None) -> nn.Module:
    """The run's fresh model in this process alone, in fp32, on the CPU; of `text`, if a phase changed it."""
    model: nn.Module = build_model(
        text or plan.model_text,
        qk_norm=plan.run.model.qk_norm,
        recompute=False,
        seed=plan.run.seed,
        dtype=torch.float32,
        world=World(),
        partition=nullcontext,
        gather=lambda parameters: nullcontext(),
        attention=plan.run.model.attention,
    ).module
    return model


def run_tokenizer(plan: Plan) -> Tokenizer:
    """The tokenizer that the run's sources were prepared with."""
    for section in plan.run.sources.values():
        if tokenizer := open_tokenizer_of(open_source(section.path)):
            return tokenizer
    raise InputError(
        f"{plan.run_path}: no source says which tokenizer made it, so ids cannot be turned into text; "
        "sources written by `ds-pretrain prepare` do"
    )


def _find_root(plan: Plan) -> Path:
    """Find the folder of complete checkpoints: in the run directory, or this host's local_dir."""
    shared = plan.out / "checkpoints"
    return shared if list_published(shared) else plan.checkpoints


def _refuse_words(prompt: str, count: int, max_tokens: int, temperature: float, seed: int) -> None:
    problems = []
    if prompt != prompt.encode("utf-8", "replace").decode("utf-8"):
        problems.append(f"--prompt {prompt!r}: holds bytes that are not UTF-8; type them as UTF-8")
    if count < 1:
        problems.append(f"--count {count}: expected at least 1")
    if max_tokens < 1:
        problems.append(f"--tokens {max_tokens}: expected at least 1")
    if not (temperature == 0 or MIN_TEMPERATURE <= temperature < math.inf):
        problems.append(
            f"--temperature {temperature:g}: expected at least {MIN_TEMPERATURE:g}, or 0 for the likeliest "
            "token each time"
        )
    if not 0 <= seed < 1 << 63:
        problems.append(f"--seed {seed}: expected 0 to 2**63 - 1")
    if problems:
        raise InputError(problems)


def _read_model_text(plan: Plan, folder: Path) -> str:
    """The config of the phase that a checkpoint was trained in."""
    return resolve_model_text(plan, min(parse_step(folder.name) or 0, plan.last_step))


def _refuse_length(text: str, prompt_tokens: int, max_tokens: int) -> None:
    """Positions beyond those that the model has were never trained, or do not exist."""
    config = json.loads(text)
    limit = config.get("max_position_embeddings", config.get("n_positions"))
    if isinstance(limit, int) and prompt_tokens + max_tokens > limit:
        raise InputError(
            f"{prompt_tokens:,} tokens of prompt (with the start of a document) and --tokens {max_tokens:,} "
            f"are more than the model's {limit:,} positions; "
            + (
                f"--tokens {limit - prompt_tokens:,} is the most"
                if prompt_tokens < limit
                else "shorten the prompt"
            )
        )
