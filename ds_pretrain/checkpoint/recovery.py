"""What a kill in the middle of a publication leaves, and what of it is a checkpoint."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from ds_pretrain.checkpoint.manifest import DOOMED, MANIFEST, PARTIAL, REPLACED, parse_manifest, step_of
from ds_pretrain.checkpoint.storage import wrong_file


def recover(root: Path) -> Iterator[str]:
    """Give whole checkpoints their names back, and name what is unfinished; one line for each.

    When a step is saved again, the old checkpoint gives up its name before the new one gets it: between the
    two, both are whole and neither has it. The manifest is written once all else is on disk.
    """
    partials = sorted(root.glob(f"step_*{PARTIAL}"), key=lambda path: path.name.endswith(REPLACED))
    for folder in partials:
        if folder.name.endswith(DOOMED):
            continue
        final = folder.with_name(folder.name.removesuffix(REPLACED).removesuffix(PARTIAL))
        if not (folder / MANIFEST).exists():
            yield (
                f"{folder.name} was not finished when it was saved; passed over, deleted after the next save"
            )
        elif not final.exists() and _is_whole(folder, final.name):
            with contextlib.suppress(OSError):
                folder.rename(final)
                yield f"{final.name} was whole and had not got its name when it was saved: it has it now"


def _is_whole(folder: Path, name: str) -> bool:
    """By its manifest and the sizes of the files that are here; a host of its own has only some of them."""
    try:
        manifest = parse_manifest((folder / MANIFEST).read_text(encoding="utf-8"))
        here = {file: entry for file, entry in manifest.files.items() if (folder / file).exists()}
        return (
            manifest.step == step_of(name)
            and bool(here)
            and all(wrong_file(folder / file, entry, "sizes") is None for file, entry in here.items())
        )
    except (OSError, ValueError):
        return False
