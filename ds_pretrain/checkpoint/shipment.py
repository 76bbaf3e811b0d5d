"""How a checkpoint gets to another place, whole or not at all, from one host or from several.

What one host ships of a checkpoint is what its folder holds; the manifest, the same text on every host, says
what all hosts hold together. Each host leaves a word at the place when its files have arrived; host 0 writes
the manifest there last, when the words name all that it lists, whoever left them. Nothing is kept between two
calls, so whoever ships may be killed at any moment and started again, as another host, too.
docs/design/shipping.md says why.
"""

import json
import time
from collections.abc import Callable, Collection, Iterable
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path

from ds_pretrain.checkpoint.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    UnknownVersion,
    parse_manifest,
    published,
    step_name,
    step_of,
)
from ds_pretrain.checkpoint.remote import Remote
from ds_pretrain.checkpoint.retention import CALM, PINNED, SHIPPED, doomed, is_shipped, manifest_sum
from ds_pretrain.checkpoint.unshippable import not_shipped, unshipped
from ds_pretrain.checkpoint.words import (
    ARRIVED,
    UNSHIPPABLE_THERE,
    Stuck,
    arrival,
    ask_others,
    tell_others,
    told_of,
    word_of,
    words_of,
)
from ds_pretrain.config.spans import Multiples
from ds_pretrain.core.files import checksum, write_atomic, write_point

__all__ = ["NotAsListed", "Progress", "Stuck", "arrival", "ship", "unshipped"]


class Progress(Enum):
    """How far a checkpoint is on its way."""

    SHIPPED = "it is whole at the other place"
    WAITING = "other hosts, or the host that writes the manifest, are not done"
    SUPERSEDED = "a later save of this step is at the other place"
    GONE = "the folder was pruned, set aside or replaced meanwhile"


class NotAsListed(Exception):
    """A checkpoint here is not what its manifest says: no later try can ship it."""


def ship(
    folder: Path, remote: Remote, host: int, num_hosts: int, whole: Callable[[], None] = lambda: None
) -> Progress:
    """Take one published checkpoint as far as this host can now; never waits for others.

    `whole` is called once it is whole at the place and before it is marked so here: what has to be done
    there too before anyone believes that nothing is left to do.

    Raises:
        OSError: the store, or the disk here.
        NotAsListed: the checkpoint here is broken.
        Stuck: a part of it is on no host, or broken on another; or a newer program wrote it.
    """
    write_point("ship begin")
    text = manifest_text(folder)
    if text is None:
        return Progress.GONE
    try:
        return _ship(folder, remote, host, num_hosts, text, whole)
    except Exception:
        if manifest_text(folder) != text:
            return Progress.GONE
        raise


def _ship(
    folder: Path, remote: Remote, host: int, num_hosts: int, text: bytes, whole: Callable[[], None]
) -> Progress:
    manifest = _listed(folder, text)
    there = remote.read(manifest.step, MANIFEST)
    if there is not None and there != text and _made(there) > (manifest.attempt, manifest.created):
        return _mark(folder, remote, host, manifest, text, Progress.SUPERSEDED)
    if there != text:
        _deliver(folder, remote, host, manifest, text)
        if host != 0:
            ask_others(remote, manifest.step, manifest_sum(text))
            return Progress.WAITING
        if not _complete(remote, num_hosts, manifest, text):
            return Progress.WAITING
        _publish(remote, manifest, text)
    whole()
    return _mark(folder, remote, host, manifest, text, Progress.SHIPPED)


def _listed(folder: Path, text: bytes) -> Manifest:
    try:
        manifest = parse_manifest(text.decode())
    except UnknownVersion as error:
        raise Stuck(str(error)) from None
    except ValueError as error:
        raise NotAsListed(f"its manifest cannot be read: {error}") from None
    if manifest.step != step_of(folder.name):
        raise NotAsListed(f"its manifest is of step {manifest.step:,}")
    return manifest


def _deliver(folder: Path, remote: Remote, host: int, manifest: Manifest, text: bytes) -> None:
    """Upload what is held here and was not delivered by whatever host; then say that it has arrived."""
    step, this_save = manifest.step, manifest_sum(text)
    held = [name for name in manifest.files if (folder / name).exists()]
    own = word_of(remote, step, arrival(host))
    known = own.files if own is not None and own.manifest == this_save else frozenset()
    if own is not None and own.manifest == this_save and known.issuperset(held):
        return
    words = words_of(remote, step)
    arrived = {name for word in words.values() if word.manifest == this_save for name in word.files}
    lacking = [name for name in held if name not in arrived]
    there = remote.read(step, MANIFEST) if lacking else None
    if there == text:
        return  # it has just become whole, and other hosts have taken back their words
    if there is not None:
        remote.remove(step, MANIFEST)  # of an earlier save of this step: its files are about to change
    for name, word in words.items():
        if word.manifest != this_save and not word.files.isdisjoint(lacking):
            remote.remove(step, name)  # it will not be true any more
    for name in lacking:
        _upload(folder / name, remote, step, name, manifest.files[name])
    write_point("ship arrived")
    told = {"manifest": this_save, "files": sorted({*known, *held})}
    remote.write(step, arrival(host), json.dumps(told).encode())


def _upload(path: Path, remote: Remote, step: int, name: str, entry: FileEntry) -> None:
    if remote.size(step, name) == entry.bytes and remote.entry(step, name) == entry:
        return
    # Before the upload: another host may hold this file too, and have delivered it meanwhile.
    if checksum(path) != entry.sha256:
        raise NotAsListed(f"{path} is not what its manifest says; the disk here may be failing")
    write_point("ship file")
    if remote.put(path, step, name) != entry and remote.put(path, step, name) != entry:
        raise OSError(f"{remote.place}: {name} of step {step} arrived damaged twice")


def _complete(remote: Remote, num_hosts: int, manifest: Manifest, text: bytes) -> bool:
    """True if all that the manifest lists has arrived. Words may be of hosts that had another number.

    Raises:
        Stuck: every host has delivered, and that is not all.
    """
    this_save = manifest_sum(text)
    words = {n: word for n, word in words_of(remote, manifest.step).items() if word.manifest == this_save}
    absent = sorted(manifest.files.keys() - {name for word in words.values() for name in word.files})
    if not absent:
        return True
    if all(arrival(host) in words for host in range(num_hosts)):
        more = f" and {len(absent) - 1} more of its files" if absent[1:] else ""
        reason = f"no host has {absent[0]}{more}"
        tell_others(remote, manifest.step, this_save, reason, is_final=False)
        raise Stuck(reason)
    told = told_of(remote, manifest.step, this_save)
    if told is not None and told.is_final:
        raise Stuck(f"another host says: {told.reason}")
    if told is not None:
        remote.remove(manifest.step, UNSHIPPABLE_THERE)  # there are more hosts now
    return False


def _publish(remote: Remote, manifest: Manifest, text: bytes) -> None:
    """Write the manifest at the place, once nothing is beside the files but the words of other hosts."""
    step = manifest.step
    for name in remote.unfinished(step):
        if name.startswith(f".{arrival(0)}") or not name.startswith(f".{ARRIVED}"):  # others write theirs now
            remote.remove(step, name)
    remote.remove(step, UNSHIPPABLE_THERE)
    write_point("ship manifest")
    remote.write(step, MANIFEST, text)
    if remote.read(step, MANIFEST) != text:
        raise OSError(f"{remote.place}: the manifest of step {step} reads back as something else")


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


def tidy(root: Path, remote: Remote, num_hosts: int, keep: int, keep_every: Multiples | None) -> None:
    """Prune the place by the rule that holds here, and what can never become whole. On host 0."""
    here = {step: folder for folder in published(root) if (step := step_of(folder.name)) is not None}
    there = remote.steps()

    def marked(step: int, mark: str) -> bool:
        return (step in here and (here[step] / mark).exists()) or remote.size(step, mark) is not None

    old = doomed(there, keep=keep, keep_every=keep_every, protected=())
    calm = next((step for step in there if marked(step, CALM)), None) if old else None
    unseen = {arrival(host) for host in range(1, num_hosts)}  # who has not seen yet that it is whole
    # Each newer one had to wait for all hosts: one that still has not seen an old one is no more.
    long_since = doomed(there, keep=2 * keep, keep_every=keep_every, protected=())
    for step in old:
        if step == calm or marked(step, PINNED):
            continue
        if step in long_since or not unseen & set(remote.names(step)):
            write_point("ship prune")
            remote.delete(step)
    on_their_way = {step_of(folder.name) for folder in not_shipped(root)}
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


def manifest_text(folder: Path) -> bytes | None:
    """The bytes of the manifest here; None if there is none."""
    try:
        return (folder / MANIFEST).read_bytes()
    except FileNotFoundError:
        return None


def _made(text: bytes) -> tuple[int, str]:
    """At which start of the run a manifest was made, and when in that; that of none is older than any.

    A clock may go back between two starts; their number does not.
    """
    try:
        manifest = parse_manifest(text.decode())
        return manifest.attempt, manifest.created
    except ValueError:
        return (0, "")
