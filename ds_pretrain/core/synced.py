"""Folders and copies of large files that survive a power cut."""

import os
import uuid
from pathlib import Path

from ds_pretrain.core.files import sync_folder

_CHUNK_BYTES = 1 << 24


def copied_beside(source: Path, target: Path) -> Path:
    """Copy in chunks to a name beside `target` that begins with a dot, synced; to be renamed."""
    unfinished = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        with source.open("rb") as here, unfinished.open("wb") as there:
            while chunk := here.read(_CHUNK_BYTES):
                there.write(chunk)
            there.flush()
            os.fsync(there.fileno())
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    return unfinished


def make_synced(folder: Path) -> None:
    """A folder, and those above it, whose names survive a power cut."""
    if not folder.is_dir():
        make_synced(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)
