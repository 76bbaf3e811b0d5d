"""Whether a checkpoint is whole, by each rank's part of it; what is missing comes from where it was shipped.

Leaders of hosts read manifests and tell the others; each rank checks its own share of the files.
"""

import hashlib
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ds_pretrain.checkpoint.manifest import (
    BROKEN,
    DEEPSPEED,
    MANIFEST,
    RUN_STATE,
    Manifest,
    UnknownVersion,
    parse_manifest,
    step_name,
    step_of,
)
from ds_pretrain.checkpoint.storage import (
    Places,
    Problem,
    Tell,
    assembled,
    complete,
    held_here,
    wrong_file,
)
from ds_pretrain.checkpoint.universal import Universal
from ds_pretrain.core.distributed import Failure, World, gather_objects, gather_work
from ds_pretrain.core.errors import InputError, RunError, agreed
from ds_pretrain.core.state import RunState


@dataclass(frozen=True)
class Found:
    """A checkpoint that verified on every rank."""

    folder: Path
    manifest: Manifest
    state: RunState
    text: str = ""  # of its manifest
    deepspeed: Mapping[str, Any] | None = (
        None  # the JSON that it was saved under; None: something else saved it
    )
    universal: Universal | None = None  # what is loaded in its place where its shards do not fit this start


def found_at_step(places: Places, step: int, world: World, tell: Tell) -> Found | str:
    """The checkpoint of a step, completed from where it was shipped, or why there is none. Collective."""
    folder = places.root / step_name(step)
    leads = places.leads(world)
    hosts = agreed_look(folder, world, lambda: _read(folder) if leads and folder.exists() else _Here())
    remote = agreed_look(folder, world, lambda: _shipped(places, step) if world.is_main else _Here())[0]
    choices = {here.text: here.manifest for here in hosts if here.text is not None and here.manifest}
    newest_first = sorted(choices, key=lambda text: choices[text].created, reverse=True)
    if remote.text is not None and remote.manifest is not None:
        choices[remote.text] = remote.manifest
        newest_first = [text for text in newest_first if text != remote.text] + [remote.text]
    reasons = [here.reason for here in (*hosts, remote) if here.reason is not None]
    own = hosts[places.leader(world)].text
    for text in newest_first:
        copy = _Copy(folder, choices[text], text, own == text, remote.text == text)
        outcome = _judged(copy, places, world, tell)
        if isinstance(outcome, Found):
            return outcome
        reasons.append(outcome)
    return reasons[0] if reasons else "it is on no host"


def found_in_folder(path: Path, world: World, tell: Tell) -> Found | str:
    """The checkpoint in a folder of any name, or why it is none. Collective."""
    here: _Here = agreed_look(path, world, lambda: _read(path) if world.is_main else _Here())[0]
    if here.text is None or here.manifest is None:
        return here.reason or "it has no manifest"
    return _judged(
        _Copy(path, here.manifest, here.text, True, False), Places(path.parent, path.parent), world, tell
    )


def broken_reason(folder: Path) -> str | None:
    """Why a folder is no whole checkpoint, as this process alone sees it.

    Raises:
        OSError: the disk did not answer, which says nothing about the checkpoint.
        UnknownVersion: a newer program wrote it.
    """
    here = _read(folder)
    if here.manifest is None:
        return here.reason
    wrong = (wrong_file(folder / name, entry, "full") for name, entry in here.manifest.files.items())
    return next((reason for reason in wrong if reason is not None), None)


def rename_broken(folder: Path) -> Path:
    aside = folder.with_name(folder.name + BROKEN)
    number = 2
    while aside.exists():
        aside = folder.with_name(f"{folder.name}{BROKEN}{number}")
        number += 1
    folder.rename(aside)
    return aside


@dataclass(frozen=True)
class _Here:
    """The manifest in a folder of one host: its text and what it says, or why there is none."""

    text: str | None = None
    manifest: Manifest | None = None
    reason: str | None = None


def _read(folder: Path) -> _Here:
    try:
        text = (folder / MANIFEST).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return _Here(reason="it has no manifest")
    except UnicodeDecodeError as error:
        return _Here(reason=f"its manifest cannot be read: {error}")
    return _parsed(text, step_of(folder.name))


def _parsed(text: str, step: int | None) -> _Here:
    try:
        manifest = parse_manifest(text)
    except UnknownVersion:
        raise
    except ValueError as error:
        return _Here(reason=f"its manifest cannot be read: {error}")
    if step is not None and manifest.step != step:
        return _Here(reason=f"its manifest is of step {manifest.step:,}")
    return _Here(text, manifest)


@dataclass(frozen=True)
class _Copy:
    """One manifest that a checkpoint of a step may have."""

    folder: Path
    manifest: Manifest
    text: str
    is_here: bool  # this host's folder has this manifest
    is_shipped: bool  # so has the remote place


def _judged(copy: _Copy, places: Places, world: World, tell: Tell) -> Found | str:
    """A checkpoint whose files are where they are needed, or come there; or why not. Collective."""
    manifest = copy.manifest
    reason = None
    if not places.per_host or manifest.world_size == world.size:
        share = places.share(manifest, world)
        told: list[dict[str, str]] = agreed_look(copy.folder, world, lambda: _wrong(copy, share, places))
        reason = next((reason for found in told for reason in found.values()), None)
        if reason is None:
            return _open(copy, places, world)
        if copy.is_shipped:
            return _completed(copy, list(told[world.rank]), reason, places, world, tell)
    if not places.per_host:
        return reason or ""
    held = gather_objects(world, held_here(copy.folder, manifest, copy.text) if places.leads(world) else [])
    lacking = manifest.files.keys() - {name for names in held for name in names}
    if lacking and not copy.is_shipped:
        return reason or f"{min(lacking)} is on none of these hosts"
    outcome = assembled(places, manifest, copy.text, world, tell)
    if isinstance(outcome, Path):
        return _open(replace(copy, folder=outcome, is_here=True), replace(places, per_host=False), world)
    _refuse_passing(outcome, copy.folder)
    return f"it cannot be put together: {outcome.text}"


def _completed(
    copy: _Copy, wrong: Sequence[str], reason: str, places: Places, world: World, tell: Tell
) -> Found | str:
    """What is missing here, fetched; or why its copy cannot be used. Collective."""
    assert places.remote is not None
    tell(f"{copy.folder} is not whole ({reason}): fetching what is missing from {places.remote.place}")
    stale = places.leads(world) and not copy.is_here
    agreed_look(
        copy.folder, world, lambda: rename_broken(copy.folder) if stale and copy.folder.exists() else None
    )
    problem = complete(places, copy.manifest, copy.text, wrong, world)
    if problem is not None:
        _refuse_passing(problem, copy.folder)
        return f"{reason}, and its copy cannot be used: {problem.text}"
    return _open(replace(copy, is_here=True), places, world)


def _refuse_passing(problem: Problem, folder: Path) -> None:
    """A place that does not answer now says nothing of a checkpoint: no older one is taken for that."""
    if not problem.lasts:
        raise agreed(RunError(f"{problem.text}; {folder} is left as it is: start again when that works"))


def _wrong(copy: _Copy, names: Sequence[str], places: Places) -> dict[str, str]:
    """The files of this rank's share that are not right here, each with the reason."""
    host = f" on {platform.node()}" if places.per_host else ""
    if not copy.is_here:
        return dict.fromkeys(names, f"it is not{host or ' here'}")
    found = {}
    for name in names:
        reason = wrong_file(copy.folder / name, copy.manifest.files[name], places.verify)
        if reason is not None:
            found[name] = reason + host
    return found


def _open(copy: _Copy, places: Places, world: World) -> Found | str:
    """Read what every rank has to know, where it is right; or why it is nowhere. Collective."""
    names = [name for name in (RUN_STATE, DEEPSPEED) if name in copy.manifest.files]
    here = copy.is_here and places.leads(world)
    texts: list[dict[str, bytes]] = agreed_look(
        copy.folder, world, lambda: _small_files(copy, names) if here else {}
    )
    if copy.is_shipped and any(all(name not in found for found in texts) for name in names):
        texts += agreed_look(
            copy.folder, world, lambda: _small_there(copy, names, places) if world.is_main else {}
        )
    known = {name: text for found in texts for name, text in found.items()}
    for name in names:
        if name not in known:
            return f"{name} is not what the manifest lists"
    try:
        state = RunState.from_json(known[RUN_STATE].decode())
        deepspeed = json.loads(known.get(DEEPSPEED, b"{}"))
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # the same bytes on every rank
        raise agreed(
            InputError(
                f"{copy.folder}: {RUN_STATE} and {DEEPSPEED} are what its manifest lists, and cannot be "
                f"read ({error}); use the version of ds_pretrain that wrote them, or move the folder "
                "away to go on from the checkpoint before it"
            )
        ) from error
    return Found(copy.folder, copy.manifest, state, copy.text, deepspeed)


def _small_files(copy: _Copy, names: Sequence[str]) -> dict[str, bytes]:
    found = {name: (copy.folder / name).read_bytes() for name in names if (copy.folder / name).is_file()}
    return {name: text for name, text in found.items() if _is_listed(copy, name, text)}


def _small_there(copy: _Copy, names: Sequence[str], places: Places) -> dict[str, bytes]:
    assert places.remote is not None
    found = {name: places.remote.read(copy.manifest.step, name) for name in names}
    return {n: text for n, text in found.items() if text is not None and _is_listed(copy, n, text)}


def _is_listed(copy: _Copy, name: str, text: bytes) -> bool:
    return hashlib.sha256(text).hexdigest() == copy.manifest.files[name].sha256


def _shipped(places: Places, step: int) -> _Here:
    if places.remote is None:
        return _Here()
    data = places.remote.read(step, MANIFEST)
    return _Here() if data is None else _parsed(data.decode(errors="replace"), step)


def agreed_look(folder: Path, world: World, look: Callable[[], Any]) -> list[Any]:
    """What each rank sees. Collective. Raises where a rank cannot tell."""
    seen = gather_work(world, look)
    for doubt in seen:
        if isinstance(doubt, Failure):
            kind = InputError if doubt.is_input else RunError
            raise agreed(
                kind(
                    f"{folder} cannot be checked ({doubt.text}); it is left as it is: mend the disk, or use "
                    "the program that wrote it, and start again"
                )
            )
    return seen
