"""A run of every kind of change: a ramp, longer sequences with another theta, long documents, an anneal."""

import json
from pathlib import Path

import numpy as np

from ds_pretrain.data.indexed import IndexedWriter
from tests.scenario import LLAMA, deepspeed_json

RUN = """
name = "curriculum"
out = "{folder}/out"
seed = 7
deepspeed = "{folder}/deepspeed.json"
[model]
config = "{folder}/model.json"
qk_norm = true
z_loss = 1e-4
[schedule]
kind = "wsd"
length = "18 steps"
peak = 1e-2
warmup = "2 steps"
decay = "anneal"
[batch]
tokens = "2K"
micro_sequences = 2
ramp = {{ "0" = "1K", "4K tokens" = "2K" }}
rate_rule = "sqrt"
[sources]
web = "{folder}/web"
books = {{ path = "{folder}/books", min_document_tokens = 600 }}
math = "{folder}/math"
[[phases]]
name = "main"
seq_len = 256
mixture = {{ web = 0.8, math = 0.2 }}
[[phases]]
name = "long"
start = "8 steps"
seq_len = 1024
micro_sequences = 1
recompute = true
mixture = {{ web = 0.4, books = 0.6 }}
rope = {{ theta = 8e4 }}
[[phases]]
name = "anneal"
start = "13 steps"
seq_len = 1024
micro_sequences = 1
mixture = {{ web = 0.4, books = 0.2, math = 0.4 }}
[validation]
every = "6 steps"
tokens = 2048
sources = {{ held_out = "{folder}/held_out" }}
[checkpoint]
every = "1 steps"
keep = 3
[monitor]
every = 1
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
    (folder / "model.json").write_text(json.dumps(model))
    (folder / "deepspeed.json").write_text(json.dumps(deepspeed_json()))
    run_file = folder / "run.toml"
    run_file.write_text(RUN.format(folder=folder))
    return run_file
