"""What ranks that share sequences (`sequence_parallel_size`) cannot do. No torch here."""

from collections.abc import Iterator, Mapping
from typing import Any

from ds_pretrain.config.plan import Plan
from ds_pretrain.models.config_check import HEADS_KEYS
from ds_pretrain.models.family import Family, read_family
from ds_pretrain.models.masking_check import LAYER_KINDS, OTHER_LAYERS
from ds_pretrain.models.rope_config import FOLLOWS_THE_LENGTH, has_rope, rope_state

_LESS = "take another sequence_parallel_size, or delete it"


def sharing_problems(plan: Plan) -> list[str]:
    """Why the run cannot share its sequences among as many ranks as the DeepSpeed JSON says.

    The exchange of tokens for heads leaves attention causal over whole rows and nothing else: no mask, no
    window. What a family's code says is read from its source; `refuse_unlike` of the engine tries the model.
    """
    shared = plan.sequence_parallel_size
    if shared == 1:
        return []
    family = read_family(str(plan.model.get("model_type")))
    problems = [
        *_run_problems(plan, shared),
        *_head_problems(plan.model, family, shared),
        *(_family_problems(plan, family) if family else ()),
    ]
    return [
        f"{plan.run.deepspeed} sets `sequence_parallel_size` = {shared}, {problem}" for problem in problems
    ]


def _run_problems(plan: Plan, shared: int) -> Iterator[str]:
    """By the run file."""
    run, path = plan.run, plan.run_path
    for phase in run.phases:
        if phase.seq_len % shared:
            yield (
                f"which does not divide phases.{phase.name}.seq_len = {phase.seq_len:,} of {path}; change "
                "the one or the other"
            )
    if run.model.mask_documents:
        yield (
            f"and {path} sets model.mask_documents = true: attention over shared sequences takes no mask, so "
            "documents would see one another; set it to false, or delete the key"
        )
    if run.model.attention == "eager":
        yield (
            f'and {path} sets model.attention = "eager", which needs a mask; set it to "sdpa" or '
            '"flash_attention_2", or delete the key'
        )


def _head_problems(model: Mapping[str, Any], family: Family | None, shared: int) -> Iterator[str]:
    """In attention each rank has whole heads."""

    def size(key: str) -> int | None:
        value = family.value(model, key) if family else model.get(key)
        return value if type(value) is int and value > 0 else None

    key = next((key for key in HEADS_KEYS if key in model), HEADS_KEYS[0])
    heads, pairs = size(key), size("num_key_value_heads")
    if heads and heads % shared:
        yield f'which does not divide "{key}" = {heads} of the model; {_LESS}'
    if pairs and pairs % shared and shared % pairs:
        yield (
            f'which neither divides "num_key_value_heads" = {pairs} of the model nor is divided by it; '
            f"{_LESS}"
        )


def _family_problems(plan: Plan, family: Family) -> Iterator[str]:
    """What lies between the tokens of a row beside causal attention, or follows the length of the input."""
    model, name = plan.model, plan.model["model_type"]
    kinds = {str(kind) for kind in family.value(model, "layer_types") or ()}
    window, longest = family.value(model, "sliding_window"), max(phase.seq_len for phase in plan.run.phases)
    if kinds - set(LAYER_KINDS) or any(code in family.source for code in OTHER_LAYERS):
        yield f'and "{name}" has layers that are not plain attention, which need whole rows; {_LESS}'
    elif "position_ids" not in family.source or family.value(model, "alibi"):
        yield f'and "{name}" takes no positions from outside, which a part of a row needs; {_LESS}'
    elif type(window) is int and window < longest and family.value(model, "use_sliding_window") is not False:
        yield (
            f'and "{name}" attends in a window of {window:,} tokens, shorter than the longest seq_len '
            f'({longest:,}), which would be ignored; set "sliding_window" to null, or {_LESS}'
        )
    if has_rope(model) and (kind := rope_state(model).kind) in FOLLOWS_THE_LENGTH:
        yield (
            f'and rotary positions of kind "{kind}" follow the length of what a rank sees of a row; use '
            f'"yarn", "llama3" or "default", or {_LESS}'
        )
