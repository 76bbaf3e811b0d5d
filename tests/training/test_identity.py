"""What runs and checkpoints remember of themselves: later versions read it as it was meant."""

import json
from pathlib import Path

from ds_pretrain.config.plan import load_plan
from ds_pretrain.core.text import changed_fields
from ds_pretrain.training.identity import identity_of
from ds_pretrain.training.meaning import compared
from ds_pretrain.training.past import past_changes
from ds_pretrain.training.preflight import open_inputs
from tests.scenario import LLAMA, deepspeed_json, write_corpus

# Written by an earlier version for the run file below: never written anew.
RECORDED = Path(__file__).parent / "identity_of_0_1.json"
RUN = """
name = "first"
out = "{folder}/out"
deepspeed = "{folder}/deepspeed.json"
[model]
config = "{folder}/model.json"
z_loss = 1e-4
[schedule]
kind = "wsd"
length = "40 steps"
peak = 1e-2
warmup = "2 steps"
decay = "anneal"
[batch]
tokens = 256
micro_sequences = 2
ramp = {{ "0" = "128", "10 steps" = "256" }}
rate_rule = "sqrt"
[sources]
one = "{folder}/one"
text = {{ path = "{folder}/text", chunk_tokens = 64 }}
all = {{ path = "{folder}/text", min_document_tokens = 2 }}
some = {{ path = "{folder}/text", max_document_tokens = 40 }}
[[phases]]
name = "main"
seq_len = 16
mixture = {{ text = 3, one = 1 }}
[[phases]]
name = "long"
start = "20 steps"
seq_len = 32
micro_sequences = 1
mixture = {{ all = 0.5, text = 0.5 }}
rope = {{ kind = "yarn", factor = 4 }}
[[phases]]
name = "anneal"
start = "30 steps"
seq_len = 32
mixture = {{ some = 1 }}
rope = {{ theta = 50000.0 }}
"""


def make(folder: Path) -> Path:
    """A run file of every part of an identity."""
    folder.mkdir(parents=True, exist_ok=True)
    write_corpus(folder / "one", 1, num_documents=1)
    write_corpus(folder / "text", 2)
    (folder / "model.json").write_text(json.dumps(LLAMA))
    (folder / "deepspeed.json").write_text(json.dumps(deepspeed_json()))
    (folder / "run.toml").write_text(RUN.format(folder=folder))
    return folder / "run.toml"


def test_a_run_that_an_earlier_version_began_is_the_run_that_its_file_says(tmp_path: Path) -> None:
    """With nothing changed nothing is told, whether some of it is past, all of it, or none."""
    plan = load_plan(make(tmp_path))
    inputs = open_inputs(plan)
    recorded = json.loads(RECORDED.read_text())
    pair = compared(recorded, identity_of(plan, inputs.data))
    assert changed_fields(*pair) == {}
    for step in (None, 0, 15, 25, 40):
        assert past_changes(*pair, step) == {}
    assert inputs.data == recorded["sources"]
