"""Names around a universal checkpoint, and its manifest."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ds_pretrain.checkpoint.manifest import FileEntry, refuse_outside, seal, step_of, unseal

UNIVERSAL = ".universal"
UNIVERSAL_MANIFEST = "universal.json"
SOURCE_MANIFEST = "source_manifest.json"  # of the checkpoint that a universal one was made of
_WORKSPACE = ".universal-unfinished"
_VERSION = 1


@dataclass(frozen=True)
class Group:
    """A parameter group: its name and its parameters."""

    name: str
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class UniversalManifest:
    """What a universal checkpoint holds. Written last."""

    step: int
    optimizer_steps: int  # applied updates, as the optimizer counts
    world_size: int  # of the checkpoint that it was made of
    zero_stage: int
    source: (
        str | None
    )  # checksum of that checkpoint's manifest: another save of the step makes this one stale
    groups: tuple[Group, ...]
    files: Mapping[str, FileEntry]

    def to_json(self) -> str:
        """Text that `parse_universal` reads; it carries a checksum of itself."""
        return seal({"version": _VERSION, **asdict(self)})


def parse_universal(text: str) -> UniversalManifest:
    """Read a universal checkpoint's manifest. Raises ValueError if it is none, or names files elsewhere."""
    data = unseal(text, _VERSION, UNIVERSAL_MANIFEST)
    try:
        files = {name: FileEntry(**entry) for name, entry in data.pop("files").items()}
        groups = tuple(Group(g["name"], tuple(g["parameters"])) for g in data.pop("groups"))
        manifest = UniversalManifest(**data, files=files, groups=groups)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{UNIVERSAL_MANIFEST} lacks or does not know a field ({error})") from None
    refuse_outside(files, UNIVERSAL_MANIFEST)
    return manifest


def cache_of(folder: Path) -> Path:
    """Where the universal form of a checkpoint folder lies."""
    return folder.with_name(folder.name + UNIVERSAL)


def workspace_of(folder: Path) -> Path:
    """Where it is while it is made."""
    return folder.with_name(folder.name + _WORKSPACE)


def orphans(root: Path) -> list[Path]:
    """Universal forms, finished or not, whose checkpoint is gone: what pruning deletes too."""
    found = []
    for suffix in (UNIVERSAL, _WORKSPACE):
        for path in sorted(root.glob(f"*{suffix}")):
            name = path.name.removesuffix(suffix)
            if step_of(name) is not None and not (root / name).exists():
                found.append(path)
    return found
