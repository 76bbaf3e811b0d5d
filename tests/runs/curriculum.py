"""A run of every kind of change: a ramp, longer sequences with another theta, long documents, an anneal."""

from pathlib import Path
from typing import Any

import numpy as np

from ds_pretrain.data.indexed import IndexedWriter
from tests.scenario import LLAMA, make_run

# What it has besides what every small run has.
REPLACE = {
    'decay = "25%"': 'decay = "anneal"',
    "tokens = 2048\n": 'tokens = "2K"\nramp = { "0" = "1K", "4K tokens" = "2K" }\nlr_scaling = "sqrt"\n',
    "text = 0.7, code = 0.3": "web = 0.8, math = 0.2",
    "seq_len = 16": "seq_len = 256",
    'every = "4 steps"\ntokens = 160': 'every = "6 steps"\ntokens = 2048',
    "keep_last = 20": "keep_last = 3",
}
PHASES = """
[[phases]]
name = "long"
start = "8 steps"
seq_len = 1024
micro_batch_size = 1
activation_checkpointing = true
mixture = { web = 0.4, books = 0.6 }
rope = { theta = 8e4 }
[[phases]]
name = "anneal"
start = "13 steps"
seq_len = 1024
micro_batch_size = 1
mixture = { web = 0.4, books = 0.2, math = 0.4 }
"""
RAMP, LONG, ANNEAL, LAST = 4, 8, 13, 18  # steps at which something changes


def make_curriculum(folder: Path, dropout: float = 0.0) -> Path:
    """Write everything that the run needs into `folder`; the path of its run file."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (name, least, most) in enumerate(
        [("web", 20, 400), ("books", 100, 2000), ("math", 50, 200), ("held_out", 20, 400)]
    ):
        random = np.random.default_rng(seed)
        writer = IndexedWriter(folder / name, 257)
        lengths = random.integers(least, most, 40_000 // most * 2)
        writer.add([np.append(random.integers(32, 127, length), 256) for length in lengths])
        writer.finish({"eos_id": 256})
    model = {**LLAMA, "max_position_embeddings": 256, "attention_dropout": dropout}
    sources = {
        f'text = "{folder}/text"': f'web = "{folder}/web"\nmath = "{folder}/math"',
        f'code = "{folder}/code"': f'books = {{ path = "{folder}/books", min_document_tokens = 600 }}',
    }
    options: dict[str, Any] = {"model": model, "extra": PHASES, "replace": {**REPLACE, **sources}}
    return make_run(folder, steps=LAST, batch_tokens=2048, save_every="1 steps", **options)
