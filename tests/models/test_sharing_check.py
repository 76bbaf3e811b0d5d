"""What ranks that share sequences cannot do is said before a rank wakes."""

import json
from pathlib import Path
from typing import Any

import pytest

from ds_pretrain.commands.cli import main
from ds_pretrain.config.plan import load_plan
from ds_pretrain.training.preflight import find_problems, open_inputs, summary
from tests.scenario import LLAMA, deepspeed_json, make_run

LESS = "take another sequence_parallel_size, or delete it"
GPT2 = {
    "model_type": "gpt2", "vocab_size": 257, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 128,
}  # fmt: skip


def _problems(
    folder: Path, shared: Any, overrides: tuple[str, ...] = (), world_size: int | None = None, **model: Any
) -> list[str]:
    """Of a start; the paths of its files are left out."""
    config = {**deepspeed_json(), "sequence_parallel_size": shared}
    whole = model if "model_type" in model else {**LLAMA, **model}
    plan = load_plan(make_run(folder, deepspeed=config, model=whole, batch_tokens=16 * 12), overrides)
    found = find_problems(plan, open_inputs(plan), world_size, "a test")
    return [problem.replace(f"{folder}/", "") for problem in found]


@pytest.mark.parametrize("shared", [2, 4, 2.0])
@pytest.mark.parametrize("world_size", [None, 4])
def test_what_can_be_shared_is_not_refused(tmp_path: Path, shared: float, world_size: int | None) -> None:
    assert _problems(tmp_path, shared, (), world_size) == []
    assert _problems(tmp_path, shared, ("model.qk_norm=false",), world_size, **GPT2) == []


@pytest.mark.parametrize(
    ("shared", "overrides", "model", "reason"),
    [
        (
            32,
            (),
            {"num_attention_heads": 32, "num_key_value_heads": 32},
            "which does not divide phases.main.seq_len = 16 of run.toml; change the one or the other",
        ),
        (8, (), {}, f'which does not divide "num_attention_heads" = 4 of the model; {LESS}'),
        (8, (), GPT2, f'which does not divide "n_head" = 4 of the model; {LESS}'),
        (
            2,
            (),
            {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48},
            'which neither divides "num_key_value_heads" = 3 of the model nor is divided by it; ' + LESS,
        ),
        (
            2,
            ("model.mask_documents=true",),
            {},
            "and run.toml sets model.mask_documents = true: attention over shared sequences takes no mask, "
            "so documents would see one another; set it to false, or delete the key",
        ),
        (
            2,
            ("model.attention=eager",),
            {},
            'and run.toml sets model.attention = "eager", which needs a mask; set it to "sdpa" or '
            '"flash_attention_2", or delete the key',
        ),
        (
            2,
            (),
            {**LLAMA, "model_type": "mistral", "sliding_window": 8},
            'and "mistral" attends in a window of 8 tokens, shorter than the longest seq_len (16), which '
            f'would be ignored; set "sliding_window" to null, or {LESS}',
        ),
        (
            2,
            ("model.qk_norm=false",),
            {"model_type": "bloom", "vocab_size": 257, "hidden_size": 32, "n_head": 4, "n_layer": 2},
            f'and "bloom" takes no positions from outside, which a part of a row needs; {LESS}',
        ),
        (
            2,
            ("model.qk_norm=false",),
            {"model_type": "qwen3_next", "vocab_size": 257, "hidden_size": 32, "num_attention_heads": 4},
            f'and "qwen3_next" has layers that are not plain attention, which need whole rows; {LESS}',
        ),
        (
            2,
            (),
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            'and rotary positions of kind "dynamic" follow the length of what a rank sees of a row; use '
            f'"yarn", "llama3" or "default", or {LESS}',
        ),
    ],
    ids=["seq_len", "heads", "heads of gpt2", "key-value heads", "documents", "eager", "window", "positions",
         "layers", "rope"],
)  # fmt: skip
def test_what_cannot_be_shared_is_refused(
    tmp_path: Path, shared: int, overrides: tuple[str, ...], model: dict[str, Any], reason: str
) -> None:
    found = _problems(tmp_path, shared, overrides, **model)
    assert f"deepspeed.json sets `sequence_parallel_size` = {shared}, {reason}" in found


def test_a_window_that_no_sequence_fills_is_none(tmp_path: Path) -> None:
    model = {**LLAMA, "model_type": "mistral", "sliding_window": 16}
    assert _problems(tmp_path, 2, **model) == []


def test_prompts_that_cannot_be_shared_are_refused(tmp_path: Path) -> None:
    more = (
        "phases=[{name='main',seq_len=96,mixture={text=1.0}}]",
        "validation.retrieval=true",
        "batch.tokens=576",
    )
    model = {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 48}
    assert _problems(tmp_path, 3, more, **model) == [
        "run.toml: validation.retrieval = true asks in prompts of 64 tokens, which sequence_parallel_size = "
        "3 of deepspeed.json does not divide; set it to false, or take a power of two"
    ]
    assert _problems(tmp_path, 2, more, **model) == []


def test_the_number_of_ranks_has_to_be_one_of_whole_groups(tmp_path: Path) -> None:
    assert _problems(tmp_path, 2, (), 3) == [
        "deepspeed.json: `sequence_parallel_size` = 2 does not divide 3 ranks (from a test); set it to a "
        "divisor of their number, at best one that keeps each sequence on one node"
    ]


def test_batches_are_divided_among_groups(tmp_path: Path) -> None:
    [problem] = _problems(tmp_path, 2, (), 8)
    assert problem == (
        "run.toml: global batch 12 sequences (192 tokens / seq_len 16), micro-batch 2, world size 8 (from a "
        "test), 2 ranks a sequence do not multiply out; world sizes that do: 2, 4, 6, 12 (or another "
        "batch.micro_sequences)"
    )
    plan = load_plan(tmp_path / "run.toml")
    for world_size, line in (
        (None, "micro-batches of 2; world sizes that divide it: 2, 4, 6, 12"),
        (2, "1 group of 2 ranks x 2 sequences x accumulation 6 = 12 sequences"),
        (4, "2 groups of 2 ranks x 2 sequences x accumulation 3 = 12 sequences"),
    ):
        lines = list(summary(plan, open_inputs(plan), world_size))
        assert f"batch      {line}" in lines
        assert any(line.endswith("ZeRO-3, fp32, 2 ranks share each sequence") for line in lines)


def test_an_accumulation_in_the_json_is_compared_by_groups(tmp_path: Path) -> None:
    _problems(tmp_path, 2)
    file = tmp_path / "deepspeed.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "gradient_accumulation_steps": 3}))
    plan = load_plan(tmp_path / "run.toml")
    assert find_problems(plan, open_inputs(plan), 4, "a test") == []
    assert len(find_problems(plan, open_inputs(plan), 2, "a test")) == 1


def test_check_says_it_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _problems(tmp_path, 2)
    assert main(["check", str(tmp_path / "run.toml"), "--world", "3"]) == 2
    assert "`sequence_parallel_size` = 2 does not divide 3 ranks" in capsys.readouterr().err
