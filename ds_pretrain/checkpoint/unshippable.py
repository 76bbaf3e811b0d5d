"""Which checkpoints here are to be shipped, and which are given up: a mark in the folder says so."""

import json
from dataclasses import dataclass
from pathlib import Path

from ds_pretrain.checkpoint.manifest import MANIFEST, published
from ds_pretrain.checkpoint.retention import is_shipped, manifest_sum
from ds_pretrain.core.files import write_atomic

UNSHIPPABLE = "unshippable"  # a file in a checkpoint's folder: why this very one is not shipped


@dataclass(frozen=True)
class GivenUp:
    """Why a save is not shipped; if final, no later try can ship it."""

    reason: str
    is_final: bool


def giving_up(this_save: str, reason: str, is_final: bool) -> str:
    """A text that `given_up` reads."""
    return json.dumps({"manifest": this_save, "reason": reason, "final": is_final})


def given_up(told: bytes | None, this_save: str) -> GivenUp | None:
    """What such a text says of a save; it may be of another."""
    try:
        mark = json.loads(told or b"{}")
        return GivenUp(str(mark["reason"]), bool(mark["final"])) if mark["manifest"] == this_save else None
    except (ValueError, TypeError, KeyError):
        return None


def unshipped(root: Path) -> list[Path]:
    """The published checkpoints here that are to be shipped and not whole at the other place, newest first.

    Without those that are broken here, as far as `give_up` has said so, and those without a manifest.
    """
    return [folder for folder in not_shipped(root) if not (mark := _marked(folder)) or not mark.is_final]


def awaited(root: Path) -> list[Path]:
    """Those of `unshipped` that are worth waiting for."""
    return [folder for folder in not_shipped(root) if not _marked(folder)]


def give_up(folder: Path, this_save: str, reason: str, is_final: bool) -> None:
    """Mark a checkpoint here: nobody should wait until it is shipped, and if that is final, nobody try.

    It counts for this very save only. Raises OSError where it cannot be written.
    """
    write_atomic(folder / UNSHIPPABLE, giving_up(this_save, reason, is_final))


def take_back(folder: Path) -> None:
    """Remove the mark that `give_up` left."""
    (folder / UNSHIPPABLE).unlink(missing_ok=True)


def hope_again(root: Path) -> None:
    """Take back the marks that are not final: the hosts, or the program, may be others now."""
    for folder in published(root):
        if (mark := _marked(folder)) and not mark.is_final:
            take_back(folder)


def _marked(folder: Path) -> GivenUp | None:
    """What the mark in a folder says of the manifest there."""
    try:
        return given_up((folder / UNSHIPPABLE).read_bytes(), manifest_sum((folder / MANIFEST).read_bytes()))
    except OSError:
        return None


def not_shipped(root: Path) -> list[Path]:
    """The published checkpoints here that are not whole at the other place, broken or not, newest first."""
    return [f for f in published(root) if (f / MANIFEST).is_file() and not is_shipped(f)]
