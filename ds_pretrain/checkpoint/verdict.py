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

from ds_pretrain.checkpoint.layout import (
    BROKEN,
    MANIFEST,
    RUN_STATE,
    Manifest,
    UnknownVersion,
    parse_manifest,
    step_name,
    step_of,
)
from ds_pretrain.checkpoint.places import Places, Tell, Verify, complete, held_here, wrong_file
from ds_pretrain.checkpoint.universal import Universal
from ds_pretrain.errors import RunError, agreed
from ds_pretrain.state import RunState
from ds_pretrain.world import World, from_main, gather_objects


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
    exists = places.leads(world) and folder.exists()
    hosts = _agreed(folder, world, lambda: _read(folder) if exists else _Here())
    remote = _agreed(folder, world, lambda: _shipped(places, step) if world.is_main else _Here())[0]
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
    here: _Here = _agreed(path, world, lambda: _read(path) if world.is_main else _Here())[0]
    if here.text is None or here.manifest is None:
        return here.reason or "it has no manifest"
    return _judged(
        _Copy(path, here.manifest, here.text, True, False), Places(path.parent, path.parent), world, tell
    )


def broken_reason(folder: Path, verify: Verify = "full") -> str | None:
    """Why a folder is no whole checkpoint, as this process alone sees it.

    Raises:
        OSError: the disk did not answer, which says nothing about the checkpoint.
        UnknownVersion: a newer program wrote it.
    """
    here = _read(folder)
    if here.manifest is None:
        return here.reason
    wrong = (wrong_file(folder / name, entry, verify) for name, entry in here.manifest.files.items())
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
    """A checkpoint whose files are where they are needed, or can be put together; or why not. Collective."""
    manifest = copy.manifest
    if places.per_host and manifest.world_size != world.size:
        held = gather_objects(world, held_here(places, manifest, copy.text) if places.leads(world) else [])
        lacking = manifest.files.keys() - {name for names in held for name in names}
        if lacking and not copy.is_shipped:
            return f"{min(lacking)} is on none of these hosts"
        return _open(copy, places, world)
    share = places.share(manifest, world)
    told: list[dict[str, str]] = _agreed(copy.folder, world, lambda: _wrong(copy, share, places))
    wrong = told[world.rank]
    reason = next((reason for found in told for reason in found.values()), None)
    if reason is None:
        return _open(copy, places, world)
    if not copy.is_shipped:
        return reason
    assert places.remote is not None
    tell(f"{copy.folder} is not whole ({reason}): fetching what is missing from {places.remote.place}")
    if places.leads(world) and not copy.is_here and copy.folder.exists():
        rename_broken(copy.folder)
    problem = complete(places, manifest, copy.text, list(wrong), world)
    if problem is not None and not problem.lasts:
        raise agreed(RunError(f"{problem.text}; {copy.folder} is left as it is: start again when that works"))
    if problem is not None:
        return f"{reason}, and its copy cannot be used: {problem.text}"
    return _open(replace(copy, is_here=True), places, world)


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


def _open(copy: _Copy, places: Places, world: World) -> Found:
    """Read what every rank has to know, on a host that has it. Collective."""
    names = [name for name in (RUN_STATE, "deepspeed.json") if name in copy.manifest.files]
    here = copy.is_here and places.leads(world)
    texts = gather_objects(world, _small_files(copy, names) if here else {})
    known = {name: text for found in texts for name, text in found.items()}
    if any(name not in known for name in names):
        remote = places.remote
        known = from_main(
            world, {n: remote.read(copy.manifest.step, n) for n in names} if world.is_main and remote else {}
        )
    for name in names:
        data = known.get(name) or b""
        if hashlib.sha256(data).hexdigest() != copy.manifest.files[name].sha256:
            raise agreed(RunError(f"{copy.folder}: {name} changed while it was read; start again"))
    state = RunState.from_json(known[RUN_STATE].decode())
    return Found(copy.folder, copy.manifest, state, copy.text, json.loads(known.get("deepspeed.json", b"{}")))


def _small_files(copy: _Copy, names: Sequence[str]) -> dict[str, bytes]:
    return {name: (copy.folder / name).read_bytes() for name in names if (copy.folder / name).is_file()}


def _shipped(places: Places, step: int) -> _Here:
    if places.remote is None:
        return _Here()
    data = places.remote.read(step, MANIFEST)
    return _Here() if data is None else _parsed(data.decode(errors="replace"), step)


def _agreed(folder: Path, world: World, look: Callable[[], Any]) -> list[Any]:
    """What each rank sees. Collective. Raises where a rank cannot tell."""
    seen = unclear = None
    try:
        seen = look()
    except (OSError, UnknownVersion) as error:
        unclear = f"rank {world.rank}: {error}"
    told = gather_objects(world, (seen, unclear))
    if doubts := [doubt for _, doubt in told if doubt is not None]:
        raise agreed(
            RunError(
                f"{folder} cannot be checked ({doubts[0]}); it is left as it is: mend the disk, or use "
                "the program that wrote it, and start again"
            )
        )
    return [seen for seen, _ in told]
