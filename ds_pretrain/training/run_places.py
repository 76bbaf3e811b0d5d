"""The folders and stores that a run uses, proved before it trains: shared, or each host's own."""

import json
import platform
import uuid
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from ds_pretrain.checkpoint.manifest import MANIFEST, parse_manifest
from ds_pretrain.checkpoint.remote import Remote, open_remote, remote_at
from ds_pretrain.checkpoint.storage import Places
from ds_pretrain.config.plan import Plan
from ds_pretrain.core.distributed import World, from_main, gather_objects
from ds_pretrain.core.errors import InputError, agreed
from ds_pretrain.core.files import ensure_writable_folder, write_atomic
from ds_pretrain.training.record import RunRecord, read_record


def require_shared_folder(folder: Path, world: World, patience_seconds: float = 10.0) -> None:
    """Make sure that every rank sees what rank 0 writes in `folder`. Collective.

    Raises:
        InputError: a host has a folder of its own there; its checkpoints would be torn.
    """
    word = folder / ".shared"
    if world.is_main:
        write_atomic(word, uuid.uuid4().hex)
    expected, deadline = (
        from_main(world, word.read_text() if world.is_main else ""),
        monotonic() + patience_seconds,
    )
    while (sees := _reads(word, expected)) is False and monotonic() < deadline:
        sleep(0.2)  # a network file system may show a new file late
    blind = {node for node, sees in gather_objects(world, (platform.node(), sees)) if not sees}
    if blind:
        raise agreed(
            InputError(
                f"{folder.absolute()} is not the same folder on {', '.join(sorted(blind))}; `out` must lie "
                "on a file system that all hosts share"
            )
        )


def open_places(plan: Plan, world: World) -> Places:
    """Where this run's checkpoints are, proved to be there and to be what the run file says. Collective.

    Raises:
        InputError: a folder or a store cannot be used, or hosts share what must be each one's own.
    """
    per_host = plan.run.checkpoint.local is not None
    places = Places(plan.checkpoints, plan.out, per_host, None, plan.run.checkpoint.verify)
    if per_host:
        _require_own_folders(places, world)
    if plan.ship_to is None:
        return places
    remote, problems = None, []
    try:
        if world.is_main:
            remote = open_remote(plan.ship_to)  # proves it, once
            record = read_record(plan.out)
            _refuse_other_run(remote, plan.run.name, None if record is None else record.wandb_id)
        remote = remote or remote_at(plan.ship_to)
    except InputError as error:
        problems = list(error.problems)
    if everyone := list(dict.fromkeys(p for found in gather_objects(world, problems) for p in found)):
        raise agreed(InputError(everyone))
    return replace(places, remote=remote)


def label_place(places: Places, record: RunRecord) -> None:
    """Say at the remote place whose checkpoints lie there. On rank 0.

    Raises:
        InputError: they are another run's.
    """
    if places.remote is not None:
        _refuse_other_run(places.remote, record.name, record.wandb_id)
        if places.remote.label() is None:
            places.remote.set_label(json.dumps({"name": record.name, "run": record.wandb_id}).encode())


def _refuse_other_run(remote: Remote, name: str, run: str | None) -> None:
    """Raise InputError if the checkpoints at a place are of another name or run; None: no run of ours yet."""
    try:
        found = json.loads(remote.label() or b"{}") or _newest_owner(remote)
    except (OSError, ValueError):
        return  # whoever reads a checkpoint there says what is wrong
    if found and (found.get("name") != name or run not in (None, found.get("run"))):
        raise InputError(
            f"checkpoint.ship_to = {remote.place} holds the checkpoints of another run "
            f"({json.dumps(found)[:200]}), and this one is {name!r}; give each run a place of its own"
        )


def _newest_owner(remote: Remote) -> dict[str, Any]:
    """Whose the newest checkpoint is at a place without a label."""
    for step in remote.steps():
        manifest = parse_manifest((remote.read(step, MANIFEST) or b"").decode())
        return {"name": manifest.identity.get("name"), "run": manifest.wandb_id}
    return {}


def _require_own_folders(places: Places, world: World) -> None:
    """Make sure that no two hosts save to one folder, where each has to have its own. Collective."""
    word = f".host_{world.rank:05d}"
    problem, mine = None, uuid.uuid4().hex
    if places.leads(world):
        try:
            ensure_writable_folder(places.root, "checkpoint.local")
            write_atomic(places.root / word, mine)
        except (InputError, OSError) as error:
            problem = str(error)
    told = gather_objects(world, (platform.node(), word if places.leads(world) else None, mine, problem))
    problems = [p for _, _, _, p in told if p is not None]
    seen = [
        node
        for node, other, token, _ in told
        if other not in (None, word) and _reads(places.root / other, token)
    ]
    for sees in gather_objects(world, (platform.node(), seen) if places.leads(world) else ("", [])):
        problems += [
            f"checkpoint.local = {places.root.parent} is one folder on {sees[0]} and on {node}; name one of "
            "each host's own, or leave it out if all hosts share it"
            for node in sees[1]
        ]
    if problems:
        raise agreed(InputError(list(dict.fromkeys(problems))))


def _reads(path: Path, expected: str) -> bool:
    try:
        return path.read_text() == expected
    except OSError:
        return False
