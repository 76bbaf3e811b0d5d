"""Names in and around a checkpoint folder, and the manifests that make a folder a checkpoint."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from ds_pretrain.core.jsonl import read_as
from ds_pretrain.core.metrics import Probe

MANIFEST = "manifest.json"
RUN_STATE = "run_state.json"
DEEPSPEED = "deepspeed.json"
PARTIAL = ".partial"
REPLACED = f".replaced{PARTIAL}"  # a checkpoint whose step was saved again
EXPIRED = f".expired{PARTIAL}"  # a checkpoint that is being deleted
ABANDONED = ".abandoned_"  # and a number: pinned, and of a branch that a rollback has given up
BROKEN = ".broken"
_UNIVERSAL = ".universal"
UNIVERSAL_MANIFEST = "universal.json"
SOURCE_MANIFEST = "source_manifest.json"  # of the checkpoint that a universal one was made of
_WORKSPACE = ".universal-unfinished"
_STEP = re.compile(r"step_(\d{9,})")
_RANK = re.compile(r"(?:zero_pp_rank_|rng/rank_)(\d+)")
_VERSION = 3
Sealed = TypeVar("Sealed", "Manifest", "UniversalManifest")


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint. Written last: a folder is a checkpoint if and only if this verifies."""

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

    def to_json(self) -> str:
        """Text that `parse_manifest` reads; it carries a checksum of itself."""
        return seal({"version": _VERSION, **asdict(self)})

    @property
    def total_bytes(self) -> int:
        return sum(entry.bytes for entry in self.files.values())


def parse_manifest(text: str) -> Manifest:
    """Read a manifest. Raises ValueError if it is not one, or if a name in it would leave the folder."""
    manifest = _read_sealed(Manifest, text, "its manifest")
    if RUN_STATE not in manifest.files:
        raise ValueError(f"its manifest does not list {RUN_STATE}")
    if datetime.fromisoformat(manifest.created).tzinfo is None:
        raise ValueError(f"its manifest was created at {manifest.created!r}, without a time zone")
    return manifest


@dataclass(frozen=True)
class Group:
    """A parameter group: its name and its parameters."""

    name: str
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class UniversalManifest:
    """The content of a universal checkpoint. Written last."""

    step: int
    optimizer_steps: int  # applied updates, as the optimizer counts
    world_size: int  # of the checkpoint that it was made of
    zero_stage: int
    source: str  # checksum of that checkpoint's manifest: another save of the step makes this stale
    groups: tuple[Group, ...]
    files: Mapping[str, FileEntry]

    def to_json(self) -> str:
        """Text that `parse_universal` reads; it carries a checksum of itself."""
        return seal({"version": _VERSION, **asdict(self)})


def parse_universal(text: str) -> UniversalManifest:
    """Read a universal checkpoint's manifest. Raises ValueError if it is none, or names files elsewhere."""
    return _read_sealed(UniversalManifest, text, UNIVERSAL_MANIFEST)


class UnknownVersion(ValueError):
    """Another version of the program wrote it and may know it: not a broken checkpoint."""


def seal(fields: Mapping[str, Any]) -> str:
    """The text of a manifest with these fields, and their checksum."""
    return json.dumps({**fields, "sha256": _compute_digest(fields)}, indent=1)


def _read_sealed(kind: type[Sealed], text: str, what: str) -> Sealed:
    """The value of which `text` is the sealed JSON.

    Raises:
        UnknownVersion, ValueError: it is none, of another version, not as it was written, or names a file
            that would lie outside its folder.
    """
    try:
        data = json.loads(text)
    except RecursionError:
        raise ValueError(f"{what} is nested too deeply") from None
    if not isinstance(data, dict) or "version" not in data:
        raise ValueError(f"{what} has no version")
    if data["version"] != _VERSION:
        raise UnknownVersion(
            f"{what} has format {data['version']}, expected {_VERSION} (format 3 renamed run-file keys, like "
            "schedule.peak to schedule.peak_lr); use the ds_pretrain that wrote it"
        )
    if data.pop("sha256", None) != _compute_digest(data):
        raise ValueError(f"{what} does not match its own checksum")
    del data["version"]
    try:
        value = read_as(kind, json.dumps(data))
    except ValueError as error:
        # It is as it was written, so it is not damaged.
        raise UnknownVersion(f"{what} lacks or does not know a field: {error}") from None
    for name in value.files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\0" in name:
            raise ValueError(f"{what} names {name!r}, which lies outside the folder")
    return value


def _compute_digest(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def step_name(step: int) -> str:
    """The folder of a checkpoint after `step` finished steps."""
    return f"step_{step:09d}"


def parse_step(name: str) -> int | None:
    """The step of a published checkpoint's folder name; None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def universal_folder(folder: Path) -> Path:
    """The folder of the universal form of a checkpoint folder."""
    return folder.with_name(folder.name + _UNIVERSAL)


def unfinished_universal_folder(folder: Path) -> Path:
    """The folder in which a universal form is built."""
    return folder.with_name(folder.name + _WORKSPACE)


def find_orphaned_universals(root: Path) -> list[Path]:
    """Universal forms, finished or not, whose checkpoint is gone: what pruning deletes too."""
    return [
        path
        for suffix in (_UNIVERSAL, _WORKSPACE)
        for path in sorted(root.glob(f"*{suffix}"))
        if parse_step(name := path.name.removesuffix(suffix)) is not None and not (root / name).exists()
    ]


def list_published(root: Path) -> list[Path]:
    """The folders under `root` that carry a checkpoint's name, newest first."""
    if not root.is_dir():
        return []
    steps = {step: path for path in root.iterdir() if (step := parse_step(path.name)) is not None}
    return [steps[step] for step in sorted(steps, reverse=True)]


def is_shared_by_ranks(name: str) -> bool:
    """True for a file that one rank writes and every rank loads: the whole weights of ZeRO-1 and 2."""
    return name.endswith("_model_states.pt") and _RANK.search(name) is None


def owner_rank(name: str) -> int:
    """The rank that writes, syncs and checks a file: the one in its name, or rank 0."""
    match = _RANK.search(name)
    return int(match[1]) if match else 0
