"""What checkpoints a run has, for people: listed, verified, pinned."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ds_pretrain.checkpoint.layout import MANIFEST, Manifest, parse_manifest, published, step_name, step_of
from ds_pretrain.checkpoint.retention import CALM, PINNED
from ds_pretrain.checkpoint.store import broken_reason
from ds_pretrain.errors import InputError
from ds_pretrain.world import World


@dataclass(frozen=True)
class Entry:
    """A folder that carries a checkpoint's name. `manifest` is None where it cannot be read."""

    folder: Path
    step: int
    manifest: Manifest | None
    is_pinned: bool
    is_calm: bool


def entries(root: Path) -> Iterator[Entry]:
    """Every published checkpoint, newest first. Reads manifests only."""
    for folder in published(root):
        try:
            manifest = parse_manifest((folder / MANIFEST).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            manifest = None
        step = step_of(folder.name)
        assert step is not None
        yield Entry(folder, step, manifest, (folder / PINNED).exists(), (folder / CALM).exists())


def described(entry: Entry) -> str:
    """One line: step, tokens, age, size, ranks, and what holds of it."""
    if entry.manifest is None:
        return f"step {entry.step:>10,}  BROKEN: its manifest cannot be read"
    manifest = entry.manifest
    age = datetime.now(UTC) - datetime.fromisoformat(manifest.created)
    marks = [word for word, on in (("pinned", entry.is_pinned), ("calm", entry.is_calm)) if on]
    return (
        f"step {entry.step:>10,}  {manifest.tokens:>18,} tokens  {manifest.total_bytes / 1e6:>12,.1f} MB  "
        f"{manifest.world_size:>5} ranks  ZeRO-{manifest.zero_stage}  {int(age.total_seconds()):>8,} s old  "
        + " ".join(marks)
    ).rstrip()


def chosen(root: Path, step: int) -> Path:
    """The folder of a step. Raises InputError that lists the steps there are."""
    folder = root / step_name(step)
    if not folder.is_dir():
        there = ", ".join(f"{entry.step:,}" for entry in entries(root)) or "none"
        raise InputError(f"{root} has no checkpoint of step {step:,}; it has: {there}")
    return folder


def verified(folder: Path) -> str | None:
    """Why a checkpoint is broken, or None: every size and every checksum, read by this process alone."""
    return broken_reason(folder, World())
