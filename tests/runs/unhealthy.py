"""Runs whose watchdog fits forty steps."""

from pathlib import Path
from typing import Any

from tests.harness import Fault
from tests.scenario import LLAMA, make_run

CURE_POINTS = ("rollback log", "rolled back")  # the write points of a rollback
BATCH = 8  # samples of a step, unless a test says otherwise
POISON = Fault("labels", 20 * BATCH, 24 * BATCH)  # what steps 21 to 24 read
OPTIONS: dict[str, Any] = {
    "steps": 40,
    "batch_tokens": 128,
    "micro_batch_size": 4,
    "save_every": "2 steps",
    "model": {**LLAMA, "attention_dropout": 0.0},
}
# A window and a patience that fit a run of forty steps.
WATCHDOG = """
[watchdog]
window = 8
patience = 3
skip_before = "1 steps"
skip_after = "4 steps"
"""


def make_unhealthy_run(folder: Path, watchdog: str = WATCHDOG, **more: Any) -> Path:
    return make_run(folder, **{**OPTIONS, **more}, extra=watchdog)
