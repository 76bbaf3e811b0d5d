"""Verifies checkpoints, each rank its own files, and fetches missing files to where they are loaded.

Leaders of hosts read manifests and broadcast them; each rank checks its own share of the files. What is
fetched comes under another name and is renamed once its checksum is right.
"""

import contextlib
import hashlib
import itertools
import json
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ds_pretrain.checkpoint.manifest import (
    BROKEN,
    DEEPSPEED,
    EXPIRED,
    MANIFEST,
    PARTIAL,
    REPLACED,
    RUN_STATE,
    Manifest,
    UnknownVersion,
    parse_manifest,
    parse_step,
    step_name,
)
from ds_pretrain.checkpoint.remote import Remote, open_folder_as_remote
from ds_pretrain.checkpoint.reshard import Universal
from ds_pretrain.checkpoint.rng import RNG
from ds_pretrain.checkpoint.storage import ASSEMBLED, StorageLayout, find_file_problem, find_first_problem
from ds_pretrain.core.distributed import World, gather_objects, log, run_on_each_rank, run_on_main
from ds_pretrain.core.errors import InputError, RunError, mark_agreed
from ds_pretrain.core.files import sync_folder, write_atomic, write_point
from ds_pretrain.core.state import RunState

Sight = TypeVar("Sight")


@dataclass(frozen=True)
class Found:
    """A checkpoint that verified on every rank."""

    folder: Path
    manifest: Manifest
    state: RunState
    text: str = ""  # of its manifest
    deepspeed: Mapping[str, Any] | None = None  # the JSON of the save; None: something else saved it
    universal: Universal | None = None  # what is loaded in its place where its shards do not fit this start


@dataclass(frozen=True)
class Problem:
    """The reason why a file was not fetched. One that is not permanent may be gone at the next start."""

    text: str
    is_permanent: bool


@dataclass(frozen=True)
class FolderListing:
    """A manifest where it was looked for: its text and what it says, or the reason why there is none."""

    text: str | None = None
    manifest: Manifest | None = None
    reason: str | None = None


def find_at_step(storage: StorageLayout, step: int, world: World) -> Found | str:
    """The checkpoint of a step, completed from where it was uploaded, or why there is none. Collective."""
    folder = storage.root / step_name(step)
    leads = storage.is_leader(world)
    hosts = look_everywhere(
        folder, world, lambda: read_manifest(folder) if leads and folder.exists() else FolderListing()
    )
    there = look_everywhere(
        folder, world, lambda: _look_at_remote(storage, step) if world.is_main else FolderListing()
    )[0]
    choices = {seen.text: seen.manifest for seen in hosts if seen.text is not None and seen.manifest}
    newest_first = sorted(choices, key=lambda text: choices[text].created, reverse=True)
    if there.text is not None and there.manifest is not None:
        choices[there.text] = there.manifest
        newest_first = [text for text in newest_first if text != there.text] + [there.text]
    reasons = [seen.reason for seen in (*hosts, there) if seen.reason is not None]
    own = hosts[storage.find_leader(world)].text
    for text in newest_first:
        copy = _Copy(folder, choices[text], text, own == text, there.text == text)
        outcome = _judge(copy, storage, world)
        if isinstance(outcome, Found):
            return outcome
        reasons.append(outcome)
    return reasons[0] if reasons else "it is on no host"


def find_in_folder(path: Path, world: World) -> Found | str:
    """The checkpoint in a folder of any name, or why it is none. Collective."""
    seen = look_everywhere(path, world, lambda: read_manifest(path) if world.is_main else FolderListing())[0]
    if seen.text is None or seen.manifest is None:
        return seen.reason or "it has no manifest"
    copy = _Copy(path, seen.manifest, seen.text, is_here=True, is_uploaded=False)
    return _judge(copy, StorageLayout(path.parent, path.parent), world)


def find_damage(folder: Path) -> str | None:
    """Return why a folder is not an intact checkpoint, as this process alone sees it.

    Raises:
        OSError: the disk did not answer, which says nothing about the checkpoint.
        UnknownVersion: a newer program wrote it.
    """
    seen = read_manifest(folder)
    return seen.reason if seen.manifest is None else find_first_problem(folder, seen.manifest.files, "full")


def read_manifest(folder: Path) -> FolderListing:
    """The manifest in a folder, which the folder's step has to fit. Raises as `find_damage`."""
    try:
        return check_manifest((folder / MANIFEST).read_bytes(), parse_step(folder.name))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return FolderListing(reason="it has no manifest")


def check_manifest(content: bytes, step: int | None) -> FolderListing:
    """A manifest from its bytes, which has to be that of `step` if one is given. Raises UnknownVersion."""
    try:
        manifest = parse_manifest(text := content.decode())
    except UnknownVersion:
        raise
    except ValueError as error:
        return FolderListing(reason=f"its manifest cannot be read: {error}")
    if step is not None and manifest.step != step:
        return FolderListing(reason=f"its manifest is of step {manifest.step:,}")
    return FolderListing(text, manifest)


def rename_broken(folder: Path) -> Path:
    """Set a broken checkpoint aside, under a name that nothing has yet."""
    numbers = itertools.chain([""], itertools.count(2))
    names = (folder.with_name(f"{folder.name}{BROKEN}{number}") for number in numbers)
    return folder.rename(next(name for name in names if not name.exists()))


def recover(root: Path) -> Iterator[str]:
    """Give whole checkpoints their names back, and name what is unfinished; one line for each.

    When a step is saved again, the old checkpoint gives up its name before the new one gets it: between the
    two, both are whole and neither has it. The manifest is written once all else is on disk.
    """
    partials = sorted(
        root.glob(f"step_*{PARTIAL}"), key=lambda path: (path.name.endswith(REPLACED), path.name)
    )
    for folder in partials:
        if folder.name.endswith(EXPIRED):
            continue
        final = folder.with_name(folder.name.removesuffix(REPLACED).removesuffix(PARTIAL))
        if not (folder / MANIFEST).exists():
            yield (f"{folder.name} is an unfinished save; skipped, and deleted after the next save")
        elif not final.exists() and _is_whole(folder, final.name):
            with contextlib.suppress(OSError):
                folder.rename(final)
                yield f"{final.name} was complete but not renamed when the run died; renamed now"


def _is_whole(folder: Path, name: str) -> bool:
    """Return whether the files here have their listed sizes; a host's own folder has only some of them."""
    try:
        manifest = parse_manifest((folder / MANIFEST).read_text(encoding="utf-8"))
        here = {file: entry for file, entry in manifest.files.items() if (folder / file).exists()}
        return (
            manifest.step == parse_step(name)
            and bool(here)
            and find_first_problem(folder, here, "sizes") is None
        )
    except (OSError, ValueError):
        return False


def assemble(storage: StorageLayout, manifest: Manifest, text: str, world: World) -> Path | Problem:
    """A folder that all hosts share, put together from what they and the remote place have. Collective.

    Or why it cannot be.
    """
    folder = storage.out / ASSEMBLED / step_name(manifest.step)
    building = folder.with_name(folder.name + PARTIAL)
    if run_on_main(world, lambda: list_present_files(folder, manifest, text) == list(manifest.files)):
        return folder
    log.info(f"putting the checkpoint of step {manifest.step:,} together in {folder.parent}")
    mine = _plan_fetches(storage, manifest, text, world)
    return _build(building, folder, mine, manifest, text, world.is_main, world) or folder


def list_present_files(folder: Path, manifest: Manifest, text: str) -> list[str]:
    """The files of a checkpoint that a folder has, by their size, if its manifest is this one."""
    try:
        if (folder / MANIFEST).read_text(encoding="utf-8") != text:
            return []
        return [
            n for n, entry in manifest.files.items() if find_file_problem(folder, n, entry, "sizes") is None
        ]
    except (OSError, ValueError):
        return []


def _look(look: Callable[[], Sight]) -> Sight:
    try:
        return look()
    except UnknownVersion as error:  # trying again cannot help
        raise InputError(str(error)) from error


def look_everywhere(folder: Path, world: World, look: Callable[[], Sight]) -> list[Sight]:
    """Return each rank's view of a checkpoint. Collective.

    Raises:
        InputError, RunError: a rank cannot tell, which says nothing about the checkpoint.
    """
    try:
        return run_on_each_rank(world, lambda: _look(look))
    except RunError as error:
        kind = InputError if isinstance(error, InputError) else RunError
        raise mark_agreed(
            kind(
                f"{folder} cannot be checked ({error}); it is not changed; fix the storage, or use the "
                f"ds_pretrain that wrote it, then start again"
            )
        ) from error


@dataclass(frozen=True)
class _Copy:
    """One manifest that a checkpoint of a step may have."""

    folder: Path
    manifest: Manifest
    text: str
    is_here: bool  # this host's folder has this manifest
    is_uploaded: bool  # the remote has it whole


def _look_at_remote(storage: StorageLayout, step: int) -> FolderListing:
    content = None if storage.remote is None else storage.remote.read(step, MANIFEST)
    return FolderListing() if content is None else check_manifest(content, step)


def _judge(copy: _Copy, storage: StorageLayout, world: World) -> Found | str:
    """A checkpoint whose files are where they are needed, or come there; or why not. Collective."""
    manifest = copy.manifest
    reason = None
    if not storage.per_host or manifest.world_size == world.size:
        share = storage.assigned_files(manifest, world)
        told = look_everywhere(copy.folder, world, lambda: _find_wrong_files(copy, share, storage))
        reason = next((reason for found in told for reason in found.values()), None)
        if reason is None:
            return _open(copy, storage, world)
        if copy.is_uploaded:
            return _complete(copy, list(told[world.rank]), reason, storage, world)
    if not storage.per_host:
        return reason or ""
    held = gather_objects(
        world, list_present_files(copy.folder, manifest, copy.text) if storage.is_leader(world) else []
    )
    lacking = manifest.files.keys() - {name for names in held for name in names}
    if lacking and not copy.is_uploaded:
        return reason or f"{min(lacking)} is on none of these hosts"
    outcome = assemble(storage, manifest, copy.text, world)
    if isinstance(outcome, Path):
        return _open(replace(copy, folder=outcome, is_here=True), replace(storage, per_host=False), world)
    _refuse_passing(outcome, copy.folder)
    return f"it cannot be put together: {outcome.text}"


def _find_wrong_files(copy: _Copy, names: Sequence[str], storage: StorageLayout) -> dict[str, str]:
    """The files of this rank's share that are not right here, each with the reason."""
    host = f" on {platform.node()}" if storage.per_host else ""
    if not copy.is_here:
        return dict.fromkeys(names, f"it is not{host or ' here'}")
    reasons = {
        name: find_file_problem(copy.folder, name, copy.manifest.files[name], storage.verify)
        for name in names
    }
    return {name: reason + host for name, reason in reasons.items() if reason is not None}


def _complete(
    copy: _Copy, wrong: Sequence[str], reason: str, storage: StorageLayout, world: World
) -> Found | str:
    """Fetch the missing files into the host's folder, or say why its copy cannot be used. Collective.

    What stands in the place of a file, or of the whole checkpoint, is renamed, not deleted.
    """
    folder, remote, leads = copy.folder, storage.remote, storage.is_leader(world)
    assert remote is not None
    log.warning(f"{folder} is incomplete ({reason}): downloading the missing files from {remote.location}")
    is_stale = leads and not copy.is_here
    look_everywhere(folder, world, lambda: rename_broken(folder) if is_stale and folder.exists() else None)
    building = folder if copy.is_here else folder.with_name(folder.name + PARTIAL)
    mine = {name: [remote] for name in wrong}
    problem = _build(building, folder, mine, copy.manifest, copy.text, leads, world)
    if problem is not None:
        _refuse_passing(problem, folder)
        return f"{reason}, and its copy cannot be used: {problem.text}"
    return _open(replace(copy, is_here=True), storage, world)


def _refuse_passing(problem: Problem, folder: Path) -> None:
    """Raise for a remote or disk that does not answer now: the checkpoint is not replaced by an older one."""
    if not problem.is_permanent:
        raise mark_agreed(RunError(f"{problem.text}; {folder} is unchanged; restart when that is mended"))


def _open(copy: _Copy, storage: StorageLayout, world: World) -> Found | str:
    """Read what every rank has to know, where it is right; or why it is nowhere. Collective."""
    names = [name for name in (RUN_STATE, DEEPSPEED) if name in copy.manifest.files]
    here, folder, remote = copy.is_here and storage.is_leader(world), copy.folder, storage.remote

    def read_here(name: str) -> bytes | None:
        return (folder / name).read_bytes() if (folder / name).is_file() else None

    def look(read: Callable[[str], bytes | None], is_mine: bool) -> list[dict[str, bytes]]:
        return look_everywhere(
            folder, world, lambda: _read_listed(copy.manifest, names, read) if is_mine else {}
        )

    texts = look(read_here, here)
    if copy.is_uploaded and remote is not None and any(all(n not in found for found in texts) for n in names):
        texts += look(partial(remote.read, copy.manifest.step), world.is_main)
    known = {name: text for found in texts for name, text in found.items()}
    for name in names:
        if name not in known:
            return f"{name} is not what the manifest lists"
    try:
        state = RunState.from_json(known[RUN_STATE].decode())
        deepspeed = json.loads(known.get(DEEPSPEED, b"{}"))
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # the same bytes on every rank
        raise mark_agreed(
            InputError(
                f"{copy.folder}: {RUN_STATE} and {DEEPSPEED} match the manifest but cannot be read "
                f"({error}); use the version of ds_pretrain that wrote them, or move the folder away to "
                f"resume from the previous checkpoint"
            )
        ) from error
    return Found(copy.folder, copy.manifest, state, copy.text, deepspeed)


def _read_listed(
    manifest: Manifest, names: Sequence[str], read: Callable[[str], bytes | None]
) -> dict[str, bytes]:
    """Read those small files that match their manifest entries."""
    found = {name: content for name in names if (content := read(name)) is not None}
    return {n: c for n, c in found.items() if hashlib.sha256(c).hexdigest() == manifest.files[n].sha256}


def _plan_fetches(
    storage: StorageLayout, manifest: Manifest, text: str, world: World
) -> dict[str, list[Remote]]:
    """The files that this rank brings, and where it may take each from. Collective."""
    root = storage.root / step_name(manifest.step)
    held = gather_objects(
        world, set(list_present_files(root, manifest, text)) if storage.is_leader(world) else set()
    )
    leaders = gather_objects(world, storage.find_leader(world))
    mine = {}
    for index, name in enumerate(manifest.files):
        holders = [rank for rank, leader in enumerate(leaders) if name in held[leader]]
        ranks = holders or range(world.size)
        if ranks[index % len(ranks)] == world.rank:
            here = [open_folder_as_remote(storage.root)] if holders else []
            mine[name] = [*here, *([storage.remote] if storage.remote is not None else [])]
    return mine


def _build(
    building: Path,
    folder: Path,
    mine: Mapping[str, Sequence[Remote]],
    manifest: Manifest,
    text: str,
    leads: bool,
    world: World,
) -> Problem | None:
    """Fetch each rank's files into `building` and publish that as `folder`; why not, if not. Collective.

    `folder` itself may be what is built in: then it is published already.
    """

    def begin() -> None:
        if leads:
            _begin(building, manifest)

    def fetch() -> Problem | None:
        problems = (_fetch(ways, manifest, name, building) for name, ways in mine.items())
        return next((problem for problem in problems if problem is not None), None)

    def publish() -> None:
        if leads and building != folder:
            _publish(building, folder, text)

    try:
        run_on_each_rank(world, begin)
        for problem in run_on_each_rank(world, fetch):
            if problem is not None:
                return problem
        run_on_each_rank(world, publish)
    except InputError:
        raise
    except RunError as error:
        return Problem(str(error), is_permanent=False)
    return None


def _begin(building: Path, manifest: Manifest) -> None:
    """A folder to build in, without what a save that was killed has left there."""
    (building / RNG).mkdir(parents=True, exist_ok=True)
    for path in [*building.iterdir(), *(building / RNG).iterdir()]:
        name = path.relative_to(building).as_posix()
        if path.is_file() and name.endswith((PARTIAL, "_states.pt")) and name not in manifest.files:
            path.unlink()


def _fetch(ways: Sequence[Remote], manifest: Manifest, name: str, folder: Path) -> Problem | None:
    """Copy one file into `folder` from the first of `ways` that has it right; why none has.

    Raises:
        OSError: a disk or a place does not answer.
    """
    path, entry = folder / name, manifest.files[name]
    arriving = path.with_name(f"{path.name}{PARTIAL}")
    problem = Problem(f"{name} is on no host", is_permanent=True)
    if find_file_problem(folder, name, entry, "full") is None:
        return None  # an earlier try got so far
    for remote in (way for way in ways for _ in range(2)):  # what arrives wrong may arrive right
        write_point(f"fetch {path.name}")
        try:
            found = remote.download(manifest.step, name, arriving)
        except FileNotFoundError:
            found = None
        if found == entry:
            if path.exists():
                path.rename(path.with_name(f"{path.name}{BROKEN}"))
            write_point(f"fetched {path.name}")
            arriving.rename(path)
            return None
        arriving.unlink(missing_ok=True)
        what = "is not there" if found is None else "is not what the manifest lists"
        problem = Problem(f"{remote.location}: {name} of step {manifest.step} {what}", is_permanent=True)
    return problem


def _publish(building: Path, folder: Path, text: str) -> None:
    for part in (building / RNG, building):
        sync_folder(part)
    write_atomic(building / MANIFEST, text)
    write_point("publish fetched")
    building.rename(folder)
    sync_folder(folder.parent)
