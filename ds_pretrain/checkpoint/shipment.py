"""How a checkpoint gets to another place, whole or not at all, from one host or from several.

What one host ships of a checkpoint is what its folder holds; the manifest, the same text on every host, says
what all hosts hold together. Each host leaves a word at the place when its files have arrived; host 0 writes
the manifest there last, when all have. Nothing is kept between two calls, so whoever ships may be killed at
any moment and started again. docs/design/shipping.md says why.
"""

import json
import time
from collections.abc import Callable, Collection, Iterable
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path

from ds_pretrain.checkpoint.layout import MANIFEST, Manifest, parse_manifest, published, step_name, step_of
from ds_pretrain.checkpoint.remote import Remote
from ds_pretrain.checkpoint.retention import CALM, PINNED, SHIPPED, doomed, is_shipped, manifest_sum
from ds_pretrain.files import checksum, write_atomic, write_point


class Progress(Enum):
    """How far a checkpoint is on its way."""

    SHIPPED = "it is whole at the other place"
    WAITING = "other hosts, or the host that writes the manifest, are not done"
    SUPERSEDED = "a later save of this step is at the other place"
    GONE = "the folder was pruned, set aside or replaced meanwhile"


class NotAsListed(Exception):
    """A checkpoint here is not what its manifest says."""


def ship(
    folder: Path, remote: Remote, host: int, num_hosts: int, whole: Callable[[], None] = lambda: None
) -> Progress:
    """Take one published checkpoint as far as this host can now; never waits for others.

    `whole` is called once it is whole at the place and before it is marked so here: what has to be done
    there too before anyone believes that nothing is left to do.

    Raises:
        OSError: the store, or the disk here.
        ValueError, NotAsListed: the checkpoint here is broken.
    """
    write_point("ship begin")
    text = _manifest_text(folder)
    if text is None:
        return Progress.GONE
    try:
        return _ship(folder, remote, host, num_hosts, text, whole)
    except Exception:
        if _manifest_text(folder) != text:
            return Progress.GONE
        raise


def _ship(
    folder: Path, remote: Remote, host: int, num_hosts: int, text: bytes, whole: Callable[[], None]
) -> Progress:
    manifest = parse_manifest(text.decode())
    step = manifest.step
    there = remote.read(step, MANIFEST)
    if there is not None and there != text:
        if _created(there) > manifest.created:
            return _mark(folder, remote, host, manifest, text, Progress.SUPERSEDED)
        remote.remove(step, MANIFEST)  # an earlier save of this step: its files are about to change
    if there != text:
        if _arrived(remote, step, host, text) is None:
            _deliver(folder, remote, host, manifest, text)
        if host != 0 or not _complete(remote, num_hosts, manifest, text):
            return Progress.WAITING
        write_point("ship manifest")
        remote.write(step, MANIFEST, text)
        if remote.read(step, MANIFEST) != text:
            raise OSError(f"{remote.place}: the manifest of step {step} reads back as something else")
    whole()
    return _mark(folder, remote, host, manifest, text, Progress.SHIPPED)


def _deliver(folder: Path, remote: Remote, host: int, manifest: Manifest, text: bytes) -> None:
    """Upload what this host holds and is not there, then say that it has arrived."""
    names = [name for name in manifest.files if (folder / name).exists()]
    for name in names:
        entry = manifest.files[name]
        if remote.size(manifest.step, name) == entry.bytes and remote.entry(manifest.step, name) == entry:
            continue
        write_point("ship file")
        if remote.put(folder / name, manifest.step, name) == entry:
            continue
        if checksum(folder / name) != entry.sha256:
            raise NotAsListed(f"{folder / name} is not what its manifest says; the disk here may be failing")
        if remote.put(folder / name, manifest.step, name) != entry:
            raise OSError(f"{remote.place}: {name} of step {manifest.step} arrived damaged twice")
    write_point("ship arrived")
    word = {"manifest": manifest_sum(text), "files": names}
    remote.write(manifest.step, arrival(host), json.dumps(word).encode())


def _complete(remote: Remote, num_hosts: int, manifest: Manifest, text: bytes) -> bool:
    """True if the files of all hosts have arrived, and they are all that the manifest lists."""
    arrived: set[str] = set()
    for host in range(num_hosts):
        names = _arrived(remote, manifest.step, host, text)
        if names is None:
            return False
        arrived |= names
    absent = sorted(manifest.files.keys() - arrived)
    if absent:
        raise NotAsListed(
            f"no host has {absent[0]}" + (f" and {len(absent) - 1} more of its files" if absent[1:] else "")
        )
    return True


def _arrived(remote: Remote, step: int, host: int, text: bytes) -> set[str] | None:
    """The files of this very save that a host has delivered; None until it has delivered all its files."""
    word = remote.read(step, arrival(host))
    try:
        told = json.loads(word or b"{}")
    except ValueError:
        return None
    return set(told["files"]) if told.get("manifest") == manifest_sum(text) else None


def _mark(
    folder: Path, remote: Remote, host: int, manifest: Manifest, text: bytes, progress: Progress
) -> Progress:
    """Write down here that this checkpoint need not be kept here, and take back this host's word there."""
    files = [folder / name for name in manifest.files]
    seconds = time.time() - (folder / MANIFEST).stat().st_mtime
    mark = {
        "manifest": manifest_sum(text),
        "place": remote.place,
        "superseded": progress is Progress.SUPERSEDED,
        "bytes": sum(path.stat().st_size for path in files if path.exists()),
        "seconds": round(max(seconds, 0.0), 3),  # from publication to arrival
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    write_point("ship mark")
    write_atomic(folder / SHIPPED, json.dumps(mark))
    write_point("ship forget")
    remote.remove(manifest.step, arrival(host))
    return progress


def arrival(host: int) -> str:
    """The name of a host's word that its files are at the place."""
    return f"arrived_{host:05d}.json"


def unshipped(root: Path) -> list[Path]:
    """The published checkpoints here that are not whole at the other place, newest first."""
    return [folder for folder in published(root) if not is_shipped(folder)]


def tidy(root: Path, remote: Remote, num_hosts: int, keep: int, keep_every_steps: int | None) -> None:
    """Prune the place by the rule that holds here, and what can never become whole. On host 0."""
    here = {step: folder for folder in published(root) if (step := step_of(folder.name)) is not None}
    there = remote.steps()

    def marked(step: int, mark: str) -> bool:
        return (step in here and (here[step] / mark).exists()) or remote.size(step, mark) is not None

    old = doomed(there, keep=keep, keep_every_steps=keep_every_steps, protected=())
    calm = next((step for step in there if marked(step, CALM)), None) if old else None
    unseen = {arrival(host) for host in range(num_hosts)}  # a host that has not seen yet that it is whole
    for step in old:
        if step != calm and not marked(step, PINNED) and not unseen & set(remote.names(step)):
            write_point("ship prune")
            remote.delete(step)
    on_their_way = {step_of(folder.name) for folder in unshipped(root)}
    for step in remote.folders():
        if there and step < there[0] and step not in there and step not in on_their_way:
            remote.delete(step)


def forget_words(root: Path, remote: Remote, host: int) -> None:
    """Take back this host's words in whole checkpoints: they are left if it dies, or loses its disk, before.

    Only for what it does not ship: a word of that is taken back when it sees that all is there.
    """
    shipping = {folder.name for folder in unshipped(root)}
    for step in remote.steps():
        if step_name(step) not in shipping:
            remote.remove(step, arrival(host))


def copy_marks(root: Path, remote: Remote, marks: Iterable[tuple[str, str]]) -> None:
    """Copy marks, as `new_marks` lists them, to the checkpoints that are there. On host 0."""
    for name, mark in marks:
        step = step_of(name)
        assert step is not None, "it lists published checkpoints"
        if remote.size(step, MANIFEST) is not None and remote.size(step, mark) is None:
            remote.write(step, mark, (root / name / mark).read_bytes())


def new_marks(root: Path, copied: Collection[tuple[str, str]]) -> list[tuple[str, str]]:
    """Folder name and mark of what was marked here after it was shipped, less those `copied`."""
    return [
        (folder.name, mark)
        for folder in published(root)
        for mark in (CALM, PINNED)
        if (folder.name, mark) not in copied and (folder / mark).exists() and is_shipped(folder)
    ]


def _manifest_text(folder: Path) -> bytes | None:
    try:
        return (folder / MANIFEST).read_bytes()
    except FileNotFoundError:
        return None


def _created(text: bytes) -> str:
    """When a manifest was made; that of none is older than any."""
    try:
        return parse_manifest(text.decode()).created
    except ValueError:
        return ""
