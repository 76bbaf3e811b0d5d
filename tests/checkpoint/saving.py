"""A checkpoint, saved while the test waits."""

from collections.abc import Mapping
from pathlib import Path

from ds_pretrain.checkpoint.manifest import Manifest
from ds_pretrain.checkpoint.save import Saveable, SaveOutcome, Saves
from ds_pretrain.checkpoint.storage import StorageLayout
from ds_pretrain.core.distributed import World
from ds_pretrain.core.state import RunState


def save_now(
    root: Path, state: RunState, manifest: Manifest, texts: Mapping[str, str], engine: Saveable, world: World
) -> SaveOutcome:
    """Save one checkpoint and wait for it. Collective."""
    saves = Saves(StorageLayout(root, root), world, lambda step: None)
    outcome = saves.begin(state, manifest, texts, engine) or saves.finish()
    assert outcome is not None
    return outcome
