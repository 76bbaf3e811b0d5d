"""The storage layout of a run's checkpoints, and the check of one file against its manifest entry.

One folder that all hosts share; or a folder of each host's own, which holds the files of its own ranks only;
and, beside either, a place to which checkpoints were uploaded.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ds_pretrain.checkpoint.manifest import FileEntry, Manifest, is_shared_by_ranks, owner_rank
from ds_pretrain.checkpoint.remote import Remote
from ds_pretrain.core.distributed import World
from ds_pretrain.core.files import compute_checksum

Verify = Literal["full", "sizes"]
ASSEMBLED = "assembled"  # in the run directory: checkpoints put together from what the hosts have


@dataclass(frozen=True)
class StorageLayout:
    """The storage layout. The same on every rank, except that `root` may be a folder of each host's own."""

    root: Path  # where this host saves
    out: Path  # the run directory, which all hosts share
    per_host: bool = False  # True if `root` is a folder of each host's own
    remote: Remote | None = None
    verify: Verify = "full"

    def is_leader(self, world: World) -> bool:
        """True on the rank that creates, renames and removes in `root`."""
        return world.is_main or (self.per_host and world.local_rank == 0)

    def find_leader(self, world: World) -> int:
        """The rank that leads in this rank's `root`."""
        return world.rank - world.local_rank if self.per_host else 0

    def assigned_files(self, manifest: Manifest, world: World) -> list[str]:
        """The files that this rank checks, and fetches to its host where they are missing."""
        if not self.per_host:
            return [name for name in manifest.files if owner_rank(name) % world.size == world.rank]
        return [
            name
            for name in manifest.files
            if owner_rank(name) == world.rank or (world.local_rank == 0 and is_shared_by_ranks(name))
        ]


def find_file_problem(folder: Path, name: str, entry: FileEntry, verify: Verify) -> str | None:
    """Return why a checkpoint file differs from its manifest entry; None if it does not.

    Raises:
        OSError: the disk did not answer, which says nothing about the file.
    """
    try:
        size = (folder / name).stat().st_size
        if size != entry.bytes:
            return f"{name} has {size:,} bytes, the manifest says {entry.bytes:,}"
        if verify == "full" and compute_checksum(folder / name) != entry.sha256:
            return f"the checksum of {name} does not match the manifest"
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        return f"{name} is listed and cannot be read ({error.strerror})"
    return None


def find_first_problem(folder: Path, files: Mapping[str, FileEntry], verify: Verify) -> str | None:
    """Return the first file problem of a checkpoint, or None. Raises OSError as `find_file_problem` does."""
    reasons = (find_file_problem(folder, name, entry, verify) for name, entry in files.items())
    return next((reason for reason in reasons if reason is not None), None)
