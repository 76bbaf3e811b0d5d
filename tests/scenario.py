"""Small real runs for tests: real text, a tiny model, a DeepSpeed JSON, and a run file that names them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ds_pretrain.data.indexed import IndexedWriter

LLAMA = {
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "attention_dropout": 0.1,  # so that a wrong random stream shows
}

RUN = """
name = "{name}"
out = "{folder}/out"
seed = 7
deepspeed = "{folder}/deepspeed.json"
[model]
config = "{folder}/model.json"
qk_norm = true
z_loss = 1e-4
[schedule]
kind = "wsd"
length = "{steps} steps"
peak_lr = 1e-2
warmup = "2 steps"
decay = "25%"
[batch]
tokens = {batch_tokens}
micro_batch_size = {micro_batch_size}
[sources]
text = "{folder}/text"
code = "{folder}/code"
[[phases]]
name = "main"
seq_len = 16
mixture = {{ text = 0.7, code = 0.3 }}
[validation]
every = "4 steps"
tokens = 160
sources = {{ held_out = "{folder}/held_out" }}
[checkpoint]
every = "{save_every}"
keep_last = 20
[monitor]
log_every = 1
"""


def deepspeed_json(stage: int = 3, bf16: bool = False, **more: Any) -> dict[str, Any]:
    """A DeepSpeed JSON that CPU ranks can run."""
    return {
        "bf16": {"enabled": bf16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": stage, "overlap_comm": stage == 3, "reduce_bucket_size": 1_000_000},
        "optimizer": {
            "type": "AdamW",
            "params": {"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "torch_adam": True},
        },
        "gradient_clipping": 1.0,
        **more,
    }


def write_corpus(
    prefix: Path,
    seed: int,
    num_documents: int = 120,
    vocab_size: int = 257,
    sidecar: Mapping[str, Any] | None = None,
) -> None:
    """Documents of random words, each ended by EOS (256)."""
    random = np.random.default_rng(seed)
    writer = IndexedWriter(prefix, vocab_size)
    lengths = random.integers(20, 60, num_documents)
    writer.add([np.append(random.integers(32, 127, length), 256) for length in lengths])
    writer.finish({"eos_id": 256, **(sidecar or {})})


def make_run(
    folder: Path,
    *,
    name: str = "tiny",
    steps: int = 12,
    batch_tokens: int = 128,
    micro_batch_size: int = 2,
    save_every: str = "3 steps",
    deepspeed: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
    extra: str = "",
    replace: Mapping[str, str] | None = None,
) -> Path:
    """Write everything a run needs into `folder`; the path of its run file.

    The run file is `RUN` with some texts replaced by others, and with `extra` sections at its end.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for seed, source in enumerate(("text", "code", "held_out")):
        if not (folder / f"{source}.idx").exists():
            write_corpus(folder / source, seed)
    (folder / "model.json").write_text(json.dumps(LLAMA if model is None else model))
    (folder / "deepspeed.json").write_text(json.dumps(deepspeed or deepspeed_json()))
    text = RUN.format(
        name=name,
        folder=folder,
        steps=steps,
        batch_tokens=batch_tokens,
        micro_batch_size=micro_batch_size,
        save_every=save_every,
    )
    for old, new in (replace or {}).items():
        assert old in text, f"the run file has no {old!r}"
        text = text.replace(old, new)
    run_file = folder / "run.toml"
    run_file.write_text(text + extra)
    return run_file
