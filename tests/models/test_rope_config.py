"""Rotary positions of a phase in a model config: what is read, what stays, and what is refused. No torch."""

import json
from typing import Any

import pytest

from ds_pretrain.config.schema import RopeSection
from ds_pretrain.models.config_check import check_model, hide_transformers
from ds_pretrain.models.rope_config import (
    build_rope_config,
    check_rope_change,
    check_rope_values,
    describe_rope,
    read_rope_state,
    warn_of_rope_change,
)
from tests.models import tiny

WHERE = "long.rope"
BASE = tiny.LLAMA | {"max_position_embeddings": 4096}
OLD = BASE | {"rope_theta": 20_000.0, "rope_scaling": None}
OLD_YARN = OLD | {"rope_scaling": {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 1024}}
NEW = BASE | {"rope_parameters": {"rope_type": "default", "rope_theta": 20_000.0}}
NEW_YARN = BASE | {
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 20_000.0, "factor": 16.0, "beta_fast": 24,
        "original_max_position_embeddings": 1024,
    }
}  # fmt: skip
LLAMA31 = tiny.LLAMA | {
    "max_position_embeddings": 131_072,
    "rope_theta": 5e5,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
GEMMA3 = tiny.GEMMA3 | {
    "max_position_embeddings": 4096,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
YARN = RopeSection(kind="yarn", factor=4.0)
YARN_TABLE = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 1024}


def _problems(model: dict[str, Any], rope: RopeSection | None, seq_len: int) -> list[str]:
    return check_rope_change(model, rope, seq_len, WHERE)


def _same_elsewhere(new: dict[str, Any], old: dict[str, Any]) -> bool:
    rope = {"rope_parameters", "rope_scaling", "rope_theta", "max_position_embeddings"}
    return {k: v for k, v in new.items() if k not in rope} == {k: v for k, v in old.items() if k not in rope}


@pytest.mark.parametrize(
    ("model", "rope", "expected"),
    [
        (OLD, RopeSection(theta=8e6), {"rope_parameters": {"rope_type": "default", "rope_theta": 8e6}}),
        (
            OLD_YARN,
            RopeSection(factor=64.0),
            {"rope_parameters": YARN_TABLE | {"rope_theta": 20_000.0, "factor": 64.0}},
        ),
        (
            OLD_YARN,
            RopeSection(kind="default"),
            {"rope_parameters": {"rope_type": "default", "rope_theta": 20_000.0}},
        ),
        (
            OLD,
            YARN,
            {
                "rope_parameters": {
                    "rope_type": "yarn", "rope_theta": 20_000.0, "factor": 4.0,
                    "original_max_position_embeddings": 4096,
                },
            },
        ),
        (NEW, RopeSection(theta=8e6), {"rope_parameters": {"rope_type": "default", "rope_theta": 8e6}}),
        (
            NEW_YARN,
            RopeSection(theta=8e6, factor=64.0),
            {"rope_parameters": NEW_YARN["rope_parameters"] | {"rope_theta": 8e6, "factor": 64.0}},
        ),
        (
            NEW_YARN,
            RopeSection(kind="default"),
            {"rope_parameters": {"rope_type": "default", "rope_theta": 20_000.0}},
        ),
        (
            NEW_YARN,  # what it extended before is what it goes on to extend; YaRN's own beta goes
            RopeSection(kind="llama3", factor=16.0),
            {
                "rope_parameters": {
                    "rope_type": "llama3", "rope_theta": 20_000.0, "factor": 16.0, "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0, "original_max_position_embeddings": 1024,
                }
            },
        ),
        (BASE, RopeSection(theta=8e6), {"rope_parameters": {"rope_type": "default", "rope_theta": 8e6}}),
        (
            GEMMA3,
            RopeSection(theta=8e6),
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 8e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                }
            },
        ),
    ],
)  # fmt: skip
def test_a_change_keeps_all_that_it_does_not_name(
    model: dict[str, Any], rope: RopeSection, expected: dict[str, Any]
) -> None:
    before = json.dumps(model)
    assert (
        _problems(model, rope, 8192 if rope.theta or rope.kind == "default" else 16_384) == [] or rope.theta
    )
    new = build_rope_config(model, rope, 16_384)
    assert {key: new[key] for key in expected} == expected
    assert new["max_position_embeddings"] == 16_384
    assert not {"rope_theta", "rope_scaling"} & new.keys()
    assert _same_elsewhere(new, model)
    assert check_model(json.dumps(new)) == []
    assert json.dumps(model) == before


def test_without_a_change_only_the_positions_grow_and_never_shrink() -> None:
    for rope in (None, RopeSection()):
        assert build_rope_config(OLD, rope, 8192) == OLD | {"max_position_embeddings": 8192}
        assert build_rope_config(OLD, rope, 512) == OLD


def test_p58_a_scaling_keeps_the_length_that_it_extends_when_the_positions_grow() -> None:
    """Transformers would take the new number of positions for it."""
    table = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    new = build_rope_config(BASE | {"rope_parameters": table}, None, 16_384)
    assert new["rope_parameters"] == table | {"original_max_position_embeddings": 4096}
    old = BASE | {"rope_scaling": {"type": "yarn", "factor": 4.0}}
    assert build_rope_config(old, RopeSection(theta=1e6), 16_384)["rope_parameters"] == table | {
        "rope_theta": 1e6, "original_max_position_embeddings": 4096,
    }  # fmt: skip


def test_a_kind_that_follows_the_length_keeps_its_theta() -> None:
    dynamic = BASE | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}
    (problem,) = _problems(dynamic, RopeSection(theta=1e6), 4096)
    assert "cannot change in a run" in problem
    assert _problems(dynamic, None, 4096) == []


def test_changes_of_several_phases_add_up() -> None:
    longer = build_rope_config(NEW, RopeSection(theta=1e6), 8192)
    scaled = build_rope_config(longer, RopeSection(kind="yarn", factor=4.0), 32_768)
    widest = build_rope_config(scaled, RopeSection(factor=16.0), 131_072)
    assert widest["rope_parameters"] == {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    assert widest["max_position_embeddings"] == 131_072
    assert _problems(scaled, RopeSection(factor=16.0), 131_072) == []


def test_the_names_of_other_families_are_used() -> None:
    neox = {"model_type": "gpt_neox", "rotary_emb_base": 20_000, "rotary_pct": 0.25}
    assert read_rope_state(neox).theta == 20_000
    assert build_rope_config(neox, RopeSection(theta=1e6), 4096) == {
        "model_type": "gpt_neox", "rotary_pct": 0.25, "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    }  # fmt: skip


def test_p58_a_length_beside_the_table_is_the_one_that_counts() -> None:
    """Phi-3 and others have it there; Transformers prefers it to the table's."""
    beside = BASE | {"original_max_position_embeddings": 2048}
    new = build_rope_config(beside, RopeSection(kind="yarn", factor=8.0), 16_384)
    assert (
        read_rope_state(new).original_max_position_embeddings
        == new["original_max_position_embeddings"]
        == 2048
    )
    assert new["rope_parameters"]["original_max_position_embeddings"] == 2048
    both = NEW_YARN | {"original_max_position_embeddings": 2048}
    assert read_rope_state(both).original_max_position_embeddings == 2048
    assert build_rope_config(both, RopeSection(factor=32.0), 16_384)["rope_parameters"] == {
        **NEW_YARN["rope_parameters"], "factor": 32.0, "original_max_position_embeddings": 2048,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (BASE, (10_000.0, 4096)),
        (tiny.MISTRAL, (10_000.0, 131_072)),  # declared as a product
        (tiny.MIXTRAL, (1_000_000.0, 131_072)),
        (tiny.GEMMA3, (1_000_000.0, 131_072)),
        ({"model_type": "gpt_neox"}, (10_000.0, 2048)),
        (LLAMA31, (500_000.0, 131_072)),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else None,
)
def test_what_a_config_does_not_say_is_what_its_class_declares(
    model: dict[str, Any], expected: tuple[float, int]
) -> None:
    from transformers import AutoConfig

    state = read_rope_state(model)
    assert (state.theta, state.num_positions) == expected
    made = AutoConfig.for_model(**json.loads(json.dumps(model)))
    table = made.rope_parameters.get("full_attention", made.rope_parameters)
    assert (table["rope_theta"], made.max_position_embeddings) == expected


def test_without_transformers_positions_are_read_as_they_are_written() -> None:
    with hide_transformers():
        assert read_rope_state(OLD_YARN).theta == read_rope_state(NEW).theta == 20_000.0
        assert read_rope_state(GEMMA3).theta == 1e6
        assert read_rope_state(OLD_YARN).factor == 16.0
        assert read_rope_state(BASE | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}).theta == 1e4


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (BASE, "default, theta 10,000, 4,096 positions"),
        (NEW_YARN, "yarn, theta 20,000, factor 16 x 1,024 positions, 4,096 positions"),
        (LLAMA31, "llama3, theta 500,000, factor 8 x 8,192 positions, 131,072 positions"),
        (GEMMA3, "default, theta 1,000,000, 4,096 positions (full attention; other layers unchanged)"),
        (tiny.GPT2, "no rotary positions"),
        ({"model_type": "gpt_oss"}, "yarn, theta 150,000, factor 32 x 4,096 positions, 131,072 positions"),
    ],
)
def test_one_line_describes_the_positions(model: dict[str, Any], words: str) -> None:
    assert describe_rope(model) == words


REFUSED: dict[str, tuple[dict[str, Any], RopeSection | None, int, str]] = {
    "a family without": (
        tiny.GPT2, RopeSection(theta=1e6), 64,
        'long.rope: "gpt2" has no rotary positions to change; remove it, or choose a family that has '
        'them, such as "llama" or "qwen3"',
    ),
    "two layouts": (
        NEW | {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, RopeSection(theta=1e6), 4096,
        'long.rope: the model config has both "rope_parameters" and "rope_scaling"; keep the first alone',
    ),
    "layers without full attention": (
        {"model_type": "deepseek_v4"},
        RopeSection(theta=1e6), 4096,
        'long.rope: "rope_parameters" has tables for "main", "compress" and none for "full_attention", '
        "the only one that a phase can change; leave its rotary positions as they are",
    ),
    "one table where each kind of layer has one": (
        tiny.GEMMA3 | {"rope_parameters": {"rope_theta": 1e4}}, RopeSection(theta=1e6), 4096,
        'long.rope: "gemma3_text" reads rope_theta = 1000000.0 where 10000.0 is meant; write '
        '"rope_parameters" into the model config, as Transformers does for this family',
    ),
    "a name that a family does not read": (
        tiny.GEMMA3 | {"rope_scaling": {"type": "linear", "factor": 2.0}}, RopeSection(theta=1e6), 4096,
        'long.rope: "gemma3_text" reads rope_type = default where linear is meant; write '
        '"rope_parameters" into the model config, as Transformers does for this family',
    ),
    "a key of another kind": (
        NEW, RopeSection(kind="yarn", factor=4.0, low_freq_factor=1.0), 8192,
        'long.rope.low_freq_factor does not belong to kind = "yarn"; remove it, or set kind = "llama3"',
    ),
    "a factor without a scaling": (
        NEW, RopeSection(factor=4.0), 8192,
        'long.rope.factor does not belong to the model\'s scaling ("default"); remove it, or set '
        'kind = "yarn" or "llama3"',
    ),
    "a scaling without a factor": (
        NEW, RopeSection(kind="yarn"), 16_000,
        'long.rope: kind = "yarn" needs a factor; the smallest for seq_len 16,000 is 3.907',
    ),
    "factors the wrong way round": (
        NEW, RopeSection(kind="llama3", factor=4.0, low_freq_factor=4.0), 8192,
        "long.rope: low_freq_factor = 4 is not below high_freq_factor = 4; Llama 3.1 has 1 and 4",
    ),
    "a kind that follows the length": (
        BASE | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, None, 8192,
        'long.rope: the model\'s scaling "dynamic" recomputes its frequencies in each forward pass and '
        'cannot change in a run; set kind = "yarn", "llama3" or "default"',
    ),
    "no length to extend": (
        {"model_type": "jamba_like_unknown", "rope_theta": 1e4}, RopeSection(kind="yarn", factor=4.0), 8192,
        'long.rope: kind = "yarn" needs original_max_position_embeddings, the positions before; the model '
        'config has none',
    ),
}  # fmt: skip


@pytest.mark.parametrize(("model", "rope", "seq_len", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_change_that_would_not_do_what_it_says_is_refused(
    model: dict[str, Any], rope: RopeSection | None, seq_len: int, message: str
) -> None:
    assert _problems(model, rope, seq_len) == [message]


def test_p58_a_scaling_that_does_not_reach_the_sequence_length_is_refused() -> None:
    too_short = (
        "long.rope: factor 4 x 4,096 original positions = 16,384 are fewer than seq_len = 16,385; the "
        "smallest factor that does is 4.001"
    )
    assert _problems(NEW, YARN, 16_385) == [too_short]
    assert _problems(OLD, YARN, 16_384) == []
    assert _problems(NEW, RopeSection(kind="yarn", factor=4.001), 16_385) == []
    assert _problems(NEW_YARN, None, 16_385) == [
        too_short.replace("factor 4 x 4,096", "factor 16 x 1,024").replace("4.001", "16.001")
    ]


def test_a_loaded_model_may_use_all_the_positions_that_it_says_it_has() -> None:
    """Llama 3.1 was trained on 131,072 positions with factor 8 on 8,192."""
    assert _problems(LLAMA31, None, 131_072) == _problems(LLAMA31, RopeSection(theta=1e6), 131_072) == []
    assert warn_of_rope_change(LLAMA31, None, 131_072, WHERE) == []
    assert _problems(LLAMA31, None, 131_073) == [
        "long.rope: factor 8 x 8,192 original positions = 65,536 are fewer than seq_len = 131,073; the "
        "smallest factor that does is 16.001"
    ]


def test_p58_a_scaling_must_start_from_the_length_before_the_extension() -> None:
    def asked(model: dict[str, Any], length: int) -> list[str]:
        return _problems(
            model, RopeSection(kind="yarn", factor=16.0, original_max_position_embeddings=length), 16_384
        )

    assert asked(NEW, 4096) == asked(NEW_YARN, 1024) == []
    assert asked(NEW, 2048) == [
        "long.rope.original_max_position_embeddings = 2,048, but the model had 4,096 positions before it "
        "was extended "
        '("max_position_embeddings"); remove original_max_position_embeddings, or correct '
        '"max_position_embeddings" in the '
        "model config"
    ]
    assert "had 1,024 positions" in asked(NEW_YARN, 4096)[0]


def test_several_problems_are_told_at_once() -> None:
    rope = RopeSection(kind="yarn", high_freq_factor=4.0, original_max_position_embeddings=99)
    assert len(_problems(NEW, rope, 8192)) == 3


@pytest.mark.parametrize("theta", [1e-300, 0.5, 1.0, 1.5, 1e31, 1e300])
@pytest.mark.parametrize("kind", ["default", "yarn", "llama3"])
def test_p58_a_theta_without_sound_tables_is_refused(kind: Any, theta: float) -> None:
    """At 1 YaRN divides by zero, and beyond 1e30 the slowest frequencies are no numbers in fp32."""
    factor = None if kind == "default" else 4.0
    [problem] = _problems(tiny.LLAMA, RopeSection(kind=kind, theta=theta, factor=factor), 64)
    assert problem == (
        f"long.rope.theta = {theta:g}: expected 2 to 1e+30, where fp32 tables are exact; common values "
        f"are 10,000 to 1e8"
    )


def test_p58_a_factor_without_sound_tables_is_refused_and_so_are_values_of_the_config() -> None:
    [problem] = _problems(tiny.LLAMA, RopeSection(kind="yarn", factor=1e300), 64)
    assert problem.startswith("long.rope.factor = 1e+300: expected at most 1e+06, how many times")
    old = tiny.LLAMA | {"rope_theta": 1.0, "rope_scaling": {"rope_type": "linear", "factor": 1e9}}
    theta, factor = check_rope_values(old, "m.json")
    assert theta.startswith('m.json: "rope_theta" = 1: expected 2 to')
    assert factor.startswith('m.json: "factor" = 1e+09: expected at most')
    half = tiny.LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 0.5}}
    assert check_rope_values(half, "m.json") == [
        'm.json: "factor" = 0.5 of rotary positions; expected a number of at least 1'
    ]
    [words] = check_rope_values(tiny.LLAMA | {"rope_theta": "many"}, "m.json")
    assert words == 'm.json: rotary parameters should be numbers, found {"rope_theta": "many"}'
    assert check_rope_values(tiny.LLAMA, "m.json") == check_rope_values(tiny.GPT2, "m.json") == []


def test_longer_sequences_with_nothing_done_for_them_are_warned_of() -> None:
    def warned(model: dict[str, Any], rope: RopeSection | None, seq_len: int = 8192) -> list[str]:
        assert _problems(model, rope, seq_len) == []
        return warn_of_rope_change(model, rope, seq_len, WHERE)

    assert warned(NEW, None) == [
        "long.rope: sequences of 8,192 on a model made for 4,096 positions, with theta 20,000 as before; "
        'a longer context usually needs a higher theta, or kind = "yarn" or "llama3" with a factor'
    ]
    assert len(warned(NEW, RopeSection(theta=20_000.0))) == 1
    assert warned(NEW, None, 4096) == warned(tiny.GPT2, None, 4096) == []
    [fallen] = warned(NEW, RopeSection(theta=10_000.0), 4096)
    assert fallen.startswith("long.rope: theta falls from 20,000 to 10,000: every frequency that was learned")
    assert warned(NEW, RopeSection(theta=20_000.0), 4096) == []
    assert warned(NEW, RopeSection(theta=1e6)) == warned(NEW, YARN) == []
    assert warned(NEW_YARN, None, 16_384) == []  # its scaling was made for more than it was trained on
