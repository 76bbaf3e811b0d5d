"""What a checkpoint remembers of its run: enough to go on where `run.json` was lost. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_pretrain.checkpoint.manifest import Manifest
from ds_pretrain.core.state import RunState


@dataclass(frozen=True)
class KnownRun:
    """A run, as one of its checkpoints knows it."""

    folder: str
    step: int
    attempt: int
    wandb_id: str | None
    identity: Mapping[str, Any]
    num_rollbacks: int = 0

    @property
    def name(self) -> str:
        """The run's own."""
        return str(self.identity.get("name"))

    @staticmethod
    def of(folder: Path, manifest: Manifest, state: RunState) -> "KnownRun":
        """What the checkpoint in a folder says."""
        return KnownRun(
            str(folder.absolute()),
            manifest.step,
            manifest.attempt,
            manifest.wandb_id,
            manifest.identity,
            len(state.rollbacks),
        )
