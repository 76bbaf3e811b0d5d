"""Names in a checkpoint folder, and the manifest that makes a folder a checkpoint."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ds_pretrain.core.metrics import Probe

MANIFEST = "manifest.json"
RUN_STATE = "run_state.json"
DEEPSPEED = "deepspeed.json"
PARTIAL = ".partial"
REPLACED = f".replaced{PARTIAL}"  # a checkpoint whose step was saved again
DOOMED = f".doomed{PARTIAL}"  # a checkpoint that is being deleted
LEFT = ".left_"  # and a number: pinned, and of a branch that a rollback has given up
BROKEN = ".broken"
_STEP = re.compile(r"step_(\d{9,})")
_RANK = re.compile(r"(?:zero_pp_rank_|rng/rank_)(\d+)")
_VERSION = 1


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds. Written last: a folder is a checkpoint if and only if this verifies."""

    step: int
    tokens: int
    samples: int
    world_size: int
    zero_stage: int
    versions: Mapping[str, str]
    created: str  # ISO 8601, UTC
    attempt: int
    wandb_id: str | None
    overrides: tuple[str, ...]
    identity: Mapping[str, Any]  # of the run: what another start must agree with
    files: Mapping[str, FileEntry]
    probe: Probe | None = None
    draws: int | None = None  # of the order of the data: trained and skipped; None: not counted then

    def to_json(self) -> str:
        """Text that `parse_manifest` reads; it carries a checksum of itself."""
        return seal({"version": _VERSION, **asdict(self)})

    @property
    def total_bytes(self) -> int:
        return sum(entry.bytes for entry in self.files.values())


def parse_manifest(text: str) -> Manifest:
    """Read a manifest. Raises ValueError if it is not one, or if a name in it would leave the folder."""
    data = unseal(text, _VERSION, "its manifest")
    try:
        manifest: Manifest = TypeAdapter(Manifest).validate_json(
            json.dumps(data), strict=True, extra="forbid"
        )
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise ValueError(f"its manifest lacks or does not know a field ({where})") from None
    refuse_outside(manifest.files, "its manifest")
    if RUN_STATE not in manifest.files:
        raise ValueError(f"its manifest does not list {RUN_STATE}")
    if datetime.fromisoformat(manifest.created).tzinfo is None:
        raise ValueError(f"its manifest was created at {manifest.created!r}, without a time zone")
    return manifest


class UnknownVersion(ValueError):
    """A newer program may know it: not a broken checkpoint."""


def seal(fields: Mapping[str, Any]) -> str:
    """The text of a manifest with these fields, and their checksum."""
    return json.dumps({**fields, "sha256": _digest(fields)}, indent=1)


def unseal(text: str, version: int, what: str) -> dict[str, Any]:
    """The fields in the text of a manifest, which holds their checksum, but for its version.

    Raises:
        UnknownVersion, ValueError: it is none, of another version, or not as it was written.
    """
    try:
        data = json.loads(text)
    except RecursionError:
        raise ValueError(f"{what} is nested too deeply") from None
    if not isinstance(data, dict) or "version" not in data:
        raise ValueError(f"{what} has no version")
    if data["version"] != version:
        raise UnknownVersion(f"{what} has a version that this program does not know")
    if data.pop("sha256", None) != _digest(data):
        raise ValueError(f"{what} does not match its own checksum")
    del data["version"]
    return data


def refuse_outside(names: Iterable[str], what: str) -> None:
    """Raise ValueError if a name that a manifest lists would leave the manifest's folder."""
    for name in names:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\0" in name:
            raise ValueError(f"{what} names {name!r}, which lies outside the folder")


def _digest(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def step_name(step: int) -> str:
    """The folder of a checkpoint after `step` finished steps."""
    return f"step_{step:09d}"


def step_of(name: str) -> int | None:
    """The step of a published checkpoint's folder name; None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def published(root: Path) -> list[Path]:
    """The folders under `root` that carry a checkpoint's name, newest first."""
    if not root.is_dir():
        return []
    steps = {step: path for path in root.iterdir() if (step := step_of(path.name)) is not None}
    return [steps[step] for step in sorted(steps, reverse=True)]


def is_shared_by_ranks(name: str) -> bool:
    """True for a file that one rank writes and every rank loads: the whole weights of ZeRO-1 and 2."""
    return name.endswith("_model_states.pt") and _RANK.search(name) is None


def owner(name: str) -> int:
    """The rank that writes, syncs and checks a file: the one in its name, or rank 0."""
    match = _RANK.search(name)
    return int(match[1]) if match else 0
