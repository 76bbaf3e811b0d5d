"""Lists and verifies the checkpoints of a run, for operators."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from ds_pretrain.checkpoint.manifest import (
    BROKEN,
    MANIFEST,
    Manifest,
    UnknownVersion,
    list_published,
    parse_step,
    step_name,
)
from ds_pretrain.checkpoint.remote import Remote
from ds_pretrain.checkpoint.retention import KNOWN_GOOD, PINNED, is_uploaded, read_branches, read_mark
from ds_pretrain.checkpoint.storage import find_first_problem
from ds_pretrain.checkpoint.verify import FolderListing, check_manifest, find_damage, read_manifest
from ds_pretrain.core.errors import InputError
from ds_pretrain.core.files import compute_checksum, write_atomic

VERIFIED = "verified"  # a file in a checkpoint's folder: when it was last intact, and with which manifest
_HEADER = ("step", "tokens", "age", "size", "ranks", "ZeRO", "known-good", "pinned", "uploaded", "verified")
_UNCHECKED = "it cannot be checked"  # which says nothing against a checkpoint


@dataclass(frozen=True)
class Entry:
    """A folder that carries a checkpoint's name. `reason` says why it is broken, if it is."""

    folder: Path
    step: int
    manifest: Manifest | None
    reason: str | None
    is_known_good: bool
    is_pinned: bool
    is_uploaded: bool
    verified_at: datetime | None  # while the manifest is still the one that was verified


def list_entries(root: Path) -> Iterator[Entry]:
    """Every published checkpoint, newest first. Reads manifests and sizes, no checksums."""
    for folder in list_published(root):
        seen, mark = _look(folder), read_mark(folder, VERIFIED)
        yield Entry(
            folder,
            parse_step(folder.name) or 0,
            seen.manifest,
            seen.reason,
            is_known_good=(folder / KNOWN_GOOD).exists(),
            is_pinned=(folder / PINNED).exists(),
            is_uploaded=is_uploaded(folder),
            verified_at=datetime.fromisoformat(mark["time"]) if mark is not None else None,
        )


def list_remote_entries(remote: Remote) -> Iterator[Entry]:
    """Every checkpoint at a remote, newest first. Reads manifests only."""
    for step in remote.list_steps():
        seen = _look_there(remote, step)
        is_known_good, is_pinned = (remote.get_size(step, mark) is not None for mark in (KNOWN_GOOD, PINNED))
        yield Entry(
            Path(step_name(step)), step, seen.manifest, seen.reason, is_known_good, is_pinned, True, None
        )


def find_remote_problem(remote: Remote, step: int) -> str | None:
    """Return why a remote checkpoint is broken, or None. Reads every file to its end."""
    seen = _look_there(remote, step)
    if seen.manifest is None:
        return seen.reason
    for name, entry in seen.manifest.files.items():
        found = remote.entry(step, name)
        if found != entry:
            what = "is not there" if found is None else "is not what the manifest lists"
            return f"{name} {what}"
    return None


def format_inventory(root: Path, now: datetime | None = None) -> Iterator[str]:
    """The checkpoints under `root` as a table; then what began from them, and what was renamed."""
    now = now or datetime.now(UTC)
    found = list(list_entries(root))
    yield from format_table(found, now)
    for entry in found:
        for name, out in read_branches((entry.folder / PINNED).read_bytes()) if entry.is_pinned else ():
            yield f"step {entry.step:,} is pinned: {name} ({out}) began from it"
    for folder in sorted(root.glob(f"step_*{BROKEN}*")):
        age = format_age(now.timestamp() - folder.stat().st_mtime)
        yield f"{folder.name}: renamed as broken, last touched {age} ago; no start uses it"


def format_table(found: Sequence[Entry], now: datetime) -> Iterator[str]:
    """A line for each, under a header; what is broken with the reason."""
    rows = {
        e.step: _format_row(e, e.manifest, now) for e in found if e.manifest is not None and e.reason is None
    }
    widths = [max(map(len, column)) for column in zip(_HEADER, *rows.values(), strict=True)]
    if found:
        yield _align_row(_HEADER, widths)
    for entry in found:
        if entry.step in rows:
            yield _align_row(rows[entry.step], widths)
        else:
            word = "" if (entry.reason or "").startswith(_UNCHECKED) else "BROKEN: "
            yield f"{entry.step:>{widths[0]},}  {word}{entry.reason}"


def choose_folder(root: Path, step: int) -> Path:
    """The folder of a step. Raises InputError that lists the steps there are."""
    folder = root / step_name(step)
    if not folder.is_dir():
        there = ", ".join(f"{entry.step:,}" for entry in list_entries(root)) or "none"
        raise InputError(f"{root} has no checkpoint of step {step:,}; it has: {there}")
    return folder


def verify_folder(folder: Path) -> str | None:
    """Return why a checkpoint is broken, or None. This process alone checks every size and checksum.

    An intact one gets a mark that says when; a broken one loses it.

    Raises:
        InputError: the disk did not answer, or a newer program wrote it.
    """
    mark = folder / VERIFIED
    try:
        reason = find_damage(folder)
    except (OSError, UnknownVersion) as error:
        raise InputError(
            f"{folder} cannot be checked ({error}); fix the storage, or use the ds_pretrain that wrote it"
        ) from None
    with contextlib.suppress(OSError):  # a checkpoint that is not ours to write to is intact all the same
        if reason is not None:
            mark.unlink(missing_ok=True)
        else:
            now = datetime.now(UTC).isoformat(timespec="seconds")
            write_atomic(mark, json.dumps({"time": now, "manifest": compute_checksum(folder / MANIFEST)}))
    return reason


def format_age(seconds: float) -> str:
    """A time span in its largest unit: "40 s", "3 min", "2 h", "5 d"."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{max(0, int(seconds))} s"


def format_bytes(number_of_bytes: float) -> str:
    """Bytes in decimal units: "8.5 kB", "12.3 GB"."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if number_of_bytes < 999.5 or unit == "TB":
            break
        number_of_bytes /= 1000
    return f"{number_of_bytes:,.0f} B" if unit == "B" else f"{number_of_bytes:,.1f} {unit}"


def _look(folder: Path) -> FolderListing:
    """The manifest of a folder, and what is wrong as far as it and the files' sizes tell."""
    try:
        seen = read_manifest(folder)
        files = seen.manifest.files if seen.manifest is not None else {}
        return replace(seen, reason=find_first_problem(folder, files, "sizes") or seen.reason)
    except (OSError, UnknownVersion) as error:
        return FolderListing(reason=f"{_UNCHECKED} ({error})")


def _look_there(remote: Remote, step: int) -> FolderListing:
    try:
        return check_manifest(remote.read(step, MANIFEST) or b"", step)
    except UnknownVersion as error:
        return FolderListing(reason=f"{_UNCHECKED} ({error})")


def _format_row(entry: Entry, manifest: Manifest, now: datetime) -> tuple[str, ...]:
    age = (now - datetime.fromisoformat(manifest.created)).total_seconds()
    marks = (entry.is_known_good, entry.is_pinned, entry.is_uploaded)
    seen = entry.verified_at
    return (
        f"{entry.step:,}",
        f"{manifest.tokens:,}",
        format_age(age),
        format_bytes(manifest.total_bytes),
        f"{manifest.world_size:,}",
        str(manifest.zero_stage),
        *("yes" if on else "-" for on in marks),
        f"{format_age((now - seen).total_seconds())} ago" if seen is not None else "-",
    )


def _align_row(row: Sequence[str], widths: Sequence[int]) -> str:
    """Numbers to the right, marks to the left."""
    numbers = [f"{cell:>{width}}" for cell, width in zip(row[:6], widths[:6], strict=True)]
    marks = [f"{cell:<{width}}" for cell, width in zip(row[6:], widths[6:], strict=True)]
    return "  ".join([*numbers, *marks]).rstrip()
