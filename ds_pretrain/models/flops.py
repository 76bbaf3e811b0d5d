"""Parameters and training FLOPs by arithmetic, from the config alone: no torch, no model.

L layers · H heads · K key-value heads · D head width · E model width · V vocabulary · T sequence
"""

from dataclasses import dataclass
from typing import Any

# What Transformers fills in where a config is silent; a test compares each value with its config classes.
_ROTARY_DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "tie_word_embeddings": False,
}  # fmt: skip
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _ROTARY_DEFAULTS
    | {"vocab_size": 32000, "intermediate_size": 11008, "num_key_value_heads": None, "head_dim": None,
       "attention_bias": False, "mlp_bias": False},
    "mistral": _ROTARY_DEFAULTS
    | {"vocab_size": 32000, "intermediate_size": 14336, "num_key_value_heads": 8, "head_dim": None,
       "sliding_window": 4096},
    "qwen2": _ROTARY_DEFAULTS,
    "qwen3": _ROTARY_DEFAULTS | {"head_dim": 128, "attention_bias": False},
    "gpt2": {
        "vocab_size": 50257, "n_embd": 768, "n_inner": None, "n_layer": 12, "n_head": 12, "n_positions": 1024,
        "tie_word_embeddings": True,
    },
}  # fmt: skip
_GPT2_NAMES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of a model, counted three ways; tied ones once."""

    total: int  # all
    non_embedding: int  # without token embedding, position embedding and output head
    matmul: int  # without look-up tables; a tied embedding counts, since it is the output head


@dataclass(frozen=True)
class _Shape:
    num_layers: int
    num_heads: int
    head_dim: int
    window: int | None


def count_parameters(config: dict[str, Any], *, qk_norm: bool = False) -> ParameterCount | None:
    """Parameters of a Llama, Mistral, Qwen2, Qwen3 or GPT-2 config; None for a family not known here."""
    known = _with_defaults(config)
    if known is None:
        return None
    family = config["model_type"]
    block = _gpt2_block(known) if family == "gpt2" else _rotary_block(family, known, _shape(known), qk_norm)
    width = known["n_embd"] if family == "gpt2" else known["hidden_size"]
    num_layers = _shape(known).num_layers
    final_norm = 2 * width if family == "gpt2" else width
    body = num_layers * block + final_norm
    table = known["vocab_size"] * width
    positions = known["n_positions"] * width if family == "gpt2" else 0
    tables = table if known["tie_word_embeddings"] else 2 * table
    return ParameterCount(total=body + tables + positions, non_embedding=body, matmul=body + table)


def flops_per_token(config: dict[str, Any], seq_len: int, *, qk_norm: bool = False) -> float | None:
    """Training FLOPs a token, forward and backward: 6 N + 12 L H D T; None for a family not known here.

    The formula is of PaLM, appendix B (https://arxiv.org/abs/2204.02311), with `ParameterCount.matmul` for N.
    Recomputation does not count, so MFU compares across settings. A sliding window shorter than the sequence
    takes its place.
    """
    count, known = count_parameters(config, qk_norm=qk_norm), _with_defaults(config)
    if count is None or known is None:
        return None
    shape = _shape(known)
    attended = min(seq_len, shape.window) if shape.window else seq_len
    return 6.0 * count.matmul + 12.0 * shape.num_layers * shape.num_heads * shape.head_dim * attended


def _with_defaults(config: dict[str, Any]) -> dict[str, Any] | None:
    defaults = DEFAULTS.get(config.get("model_type", ""))
    if defaults is None:
        return None
    names = _GPT2_NAMES if config["model_type"] == "gpt2" else {}
    given = {names.get(key, key): value for key, value in config.items()}
    return defaults | given


def _shape(known: dict[str, Any]) -> _Shape:
    if "n_embd" in known:
        return _Shape(known["n_layer"], known["n_head"], known["n_embd"] // known["n_head"], None)
    heads = known["num_attention_heads"]
    head_dim = known.get("head_dim") or known["hidden_size"] // heads
    windowed = known["model_type"] == "mistral"
    return _Shape(known["num_hidden_layers"], heads, head_dim, known["sliding_window"] if windowed else None)


def _gpt2_block(known: dict[str, Any]) -> int:
    width = known["n_embd"]
    inner = known["n_inner"] or 4 * width
    attention: int = 4 * width * width + 4 * width  # c_attn [E, 3E], c_proj [E, E], biases
    feed_forward: int = 2 * width * inner + inner + width
    norms: int = 4 * width
    return attention + feed_forward + norms  # two LayerNorms, weight and bias


def _rotary_block(family: str, known: dict[str, Any], shape: _Shape, qk_norm: bool) -> int:
    width, inner = known["hidden_size"], known["intermediate_size"]
    queries = shape.num_heads * shape.head_dim  # H * D
    keys = (known["num_key_value_heads"] or shape.num_heads) * shape.head_dim  # K * D
    attention: int = 2 * width * queries + 2 * width * keys
    if family == "qwen2":
        attention += queries + 2 * keys
    elif known.get("attention_bias"):
        attention += queries + 2 * keys + width
    if family == "qwen3" or qk_norm:
        attention += 2 * shape.head_dim
    feed_forward: int = 3 * width * inner + (2 * inner + width if known.get("mlp_bias") else 0)
    norms: int = 2 * width
    return attention + feed_forward + norms
