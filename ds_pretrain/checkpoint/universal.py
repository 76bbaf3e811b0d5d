"""Checkpoints in DeepSpeed's universal format, which any ranks, ZeRO stage and offload can load.

DeepSpeed's shards fit one number of ranks, one stage and one way of offloading. Where a start differs, the
checkpoint is converted once, beside it, and that is loaded. Sample ids, rates and everything else of ours
follow from the step alone and do not know of ranks. A run may also begin from a universal checkpoint at any
place, also one of DeepSpeed's own tool, with or without our files.
"""

import contextlib
import os
from collections.abc import Callable, Collection
from pathlib import Path
from time import monotonic, sleep
from typing import Protocol, TypeVar

from ds_pretrain.checkpoint.manifest import (
    MANIFEST,
    RUN_STATE,
    UNIVERSAL_MANIFEST,
    UniversalManifest,
    parse_universal,
    universal_folder,
)
from ds_pretrain.checkpoint.reshard import Universal, convert
from ds_pretrain.checkpoint.rng import derive_streams, load_streams, rng_file
from ds_pretrain.checkpoint.shards import load_pickle
from ds_pretrain.checkpoint.storage import find_first_problem
from ds_pretrain.core.distributed import World, gather_objects, log, run_on_each_rank, run_on_main
from ds_pretrain.core.errors import InputError, RunError, mark_agreed
from ds_pretrain.core.files import compute_checksum
from ds_pretrain.core.state import RunState

Result = TypeVar("Result")
POLL_SECONDS = 2.0  # how long other ranks wait in one collective while rank 0 works
SIGHT_SECONDS = 120.0  # twice what NFS remembers of a folder by default
# What a universal checkpoint that something else wrote may lack, and what is done without it.
MISSING = {
    "manifest": "it has no checksums, and DeepSpeed's files are pickles, which can run code when loaded; "
    "use it only if you trust its origin",
    "run_state": "the step is DeepSpeed's count, and no data is known to be skipped",
    "rng": "every rank's random streams are derived from the seed, the step and the rank",
}


class UniversalShards(Protocol):
    """The part of an engine that a universal checkpoint needs. Collective."""

    def load_universal(self, folder: Path, tag: str, optimizer_steps: int) -> list[str]:
        """Load `folder/tag`; what on this rank is then not bit for bit what its files hold."""
        ...

    def group_members(self) -> list[tuple[str, list[str]]]:
        """The name of each parameter group and the names of its parameters."""
        ...


def prepare_universal(
    folder: Path, changes: list[str], world: World, poll_seconds: float = POLL_SECONDS
) -> Universal:
    """The universal form of a verified checkpoint: made now if none beside it verifies. Collective.

    Before any model is built. Rank 0 converts; others wait in short collectives, so that no timeout strikes.
    Rank 0 alone reads what it wrote, and broadcasts it: other hosts may not see the files yet.

    Raises:
        InputError, RunError: on every rank, as `convert` does, or because one never sees the files.
    """
    cache = universal_folder(folder)
    form, reason = run_on_main(world, lambda: _find_usable(folder, cache))
    if form is not None:
        _await_sight(form, world, poll_seconds)
        manifest = form.manifest
        found = run_on_each_rank(
            world, lambda: find_universal_damage(cache, manifest, world), poll_seconds=poll_seconds
        )
        reason = next((each for each in found if each is not None), None)
    changed = f"resharding {folder.name} ({', '.join(changes)})"
    if form is not None and reason is None:
        log.info(f"{changed}: using {cache.name}, which verifies")
        return form
    log.info(f"{changed}: converting once ({reason})")
    doing = f"converting {folder.name}"

    def convert_once() -> None:
        if world.is_main:
            _name_failure(lambda: convert(folder), f"{doing} failed")

    run_on_each_rank(world, convert_once, doing, poll_seconds)
    form = run_on_main(world, lambda: _name_failure(lambda: _read(cache), f"{cache} cannot be read"))
    _await_sight(form, world, poll_seconds)
    return form


def load(universal: Universal, shards: UniversalShards, seed: int, world: World) -> RunState:
    """Load weights, optimizer state and random streams; prove them bitwise what the files hold. Collective.

    Raises:
        InputError: the parameter groups of this start are not those of the checkpoint.
        RunError: something was not loaded as it was saved, on any rank; training must not continue.
    """
    folder, manifest = universal.folder, universal.manifest
    if manifest.groups:
        _refuse_other_groups(manifest, shards.group_members(), folder)
    wrong = shards.load_universal(folder.parent, folder.name, manifest.optimizer_steps)
    run_on_each_rank(world, lambda: _refuse_wrong(wrong, folder))
    _restore_streams(universal, seed, world)
    return universal.state


def open_foreign(folder: Path, accept_missing: Collection[str], world: World) -> Universal:
    """A universal checkpoint at any place, also one that DeepSpeed's own tool wrote. Collective.

    Args:
        accept_missing: which of `MISSING` the user allows it to lack.

    Raises:
        InputError: it is none, is damaged, or lacks something that was not allowed; all of that at once.
    """
    run_on_each_rank(world, lambda: _refuse_foreign(folder, accept_missing, world))
    lacking = run_on_main(world, lambda: _find_missing(folder))
    for name in lacking:
        allowed_by = "--trust-pickle" if name == "manifest" else "accept_missing"
        log.warning(f"{folder} has no {name}, as {allowed_by} allows: {MISSING[name]}")
    return run_on_main(
        world, lambda: _name_failure(lambda: _read(folder, lacking), f"{folder} cannot be read")
    )


def read_universal(folder: Path) -> UniversalManifest:
    """The manifest in a universal checkpoint. Raises OSError or ValueError."""
    return parse_universal((folder / UNIVERSAL_MANIFEST).read_text(encoding="utf-8"))


def find_universal_damage(
    folder: Path, manifest: UniversalManifest, world: World | None = None
) -> str | None:
    """Return why a universal checkpoint differs from its manifest: any size, or a checksum of this rank's."""
    try:
        reason = find_first_problem(folder, manifest.files, "sizes")
        if reason is None and world is not None:
            share = list(manifest.files.items())[world.rank :: world.size]
            reason = find_first_problem(folder, dict(share), "full")
    except OSError as error:
        reason = str(error)
    return None if reason is None else f"{folder.name}: {reason}"


def _find_usable(folder: Path, cache: Path) -> tuple[Universal | None, str | None]:
    """The universal form beside a checkpoint, or why it cannot be used, by sizes. On rank 0."""
    if not (cache / UNIVERSAL_MANIFEST).is_file():
        return None, "there is no universal checkpoint yet"
    try:
        form = _read(cache)
        if form.manifest.source != compute_checksum(folder / MANIFEST):
            return None, f"{cache.name} was made of another save of that step"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return None, f"{cache.name}: {error}"
    reason = find_universal_damage(cache, form.manifest)
    return (form, None) if reason is None else (None, reason)


def _read(folder: Path, lacking: Collection[str] = ()) -> Universal:
    """Read the metadata of a universal checkpoint, without those of `MISSING` that it lacks."""
    manifest = _read_deepspeed_counts(folder) if "manifest" in lacking else read_universal(folder)
    if "run_state" in lacking:
        return Universal(folder, RunState(step=manifest.step), manifest)
    return Universal(folder, RunState.from_json((folder / RUN_STATE).read_text(encoding="utf-8")), manifest)


def _name_failure(act: Callable[[], Result], failed: str) -> Result:
    """Return what `act` returns; an error that does not say what failed becomes one that does."""
    try:
        return act()
    except RunError:
        raise
    except Exception as error:
        raise RunError(f"{failed}: {type(error).__name__}: {error}") from error


def _await_sight(form: Universal, world: World, poll_seconds: float) -> None:
    """Return when every rank sees what rank 0 does: NFS remembers for a while what was missing. Collective.

    Raises:
        RunError: a rank does not, for long.
    """
    deadline = monotonic() + SIGHT_SECONDS

    def look() -> None:
        while (
            reason := find_universal_damage(form.folder, form.manifest)
        ) is not None and monotonic() < deadline:
            sleep(poll_seconds)
            for folder in (form.folder.parent, form.folder):  # NFS looks again at a folder that is opened
                with contextlib.suppress(OSError):
                    os.close(os.open(folder, os.O_RDONLY))
        if reason is not None:
            raise RunError(
                f"{form.folder} is complete on rank 0, and {SIGHT_SECONDS:.0f} seconds later not here "
                f"({reason}): let all ranks see the same folder, and start again"
            )

    run_on_each_rank(world, look, poll_seconds=poll_seconds)


def _refuse_wrong(wrong: list[str], folder: Path) -> None:
    if wrong:
        raise RunError(f"{folder} was not restored as it was saved: {'; '.join(wrong[:10])}")


def _refuse_other_groups(
    manifest: UniversalManifest, members: list[tuple[str, list[str]]], folder: Path
) -> None:
    saved = {group.name: set(group.parameters) for group in manifest.groups}
    live = {name: set(parameters) for name, parameters in members}
    problems = []
    for name in dict.fromkeys((*saved, *live)):
        before, after = saved.get(name, set()), live.get(name, set())
        gone, come = sorted(before - after), sorted(after - before)
        if gone or come:
            problems.append(
                f"parameter group {name!r} is not that of {folder.name}: without {_list_names(gone)}, with "
                f"{_list_names(come)} that it did not have; set the model and its options (decay_embeddings, "
                "qk_norm) back"
            )
    if problems:
        raise mark_agreed(InputError(problems))


def _list_names(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (", ".join(names[:3]) or "none") + more


def _restore_streams(universal: Universal, seed: int, world: World) -> None:
    """Each rank's own streams; derived ones for a rank that the save did not have."""
    folder, step = universal.folder, universal.state.step
    own = (folder / rng_file(world.rank)).is_file()
    if own:
        load_streams(folder, world.rank)
    else:
        derive_streams(seed, step, world.rank)
    derived = [rank for rank, has in enumerate(gather_objects(world, own)) if not has]
    if derived:
        log.warning(
            f"random streams of ranks {', '.join(map(str, derived))}, which {folder.name} does not have, are "
            f"derived from (seed {seed}, step {step}, rank)"
        )


def _find_missing(folder: Path) -> list[str]:
    present = {
        "manifest": folder / UNIVERSAL_MANIFEST,
        "run_state": folder / RUN_STATE,
        "rng": folder / rng_file(0),
    }
    return [name for name, path in present.items() if not path.is_file()]


def _refuse_foreign(folder: Path, accept_missing: Collection[str], world: World) -> None:
    if not (folder / "zero" / "optimizer_state.pt").is_file() or not list(folder.glob("*_model_states.pt")):
        raise InputError(
            f"{folder} is neither a checkpoint of ours (a {MANIFEST}) nor a universal one "
            "(zero/optimizer_state.pt and a *_model_states.pt): name the folder of one, or make one with "
            "`python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state`"
        )
    problems = []
    for name in _find_missing(folder):
        allow = "start with --trust-pickle" if name == "manifest" else f"add {name!r} to accept_missing"
        if name not in accept_missing:
            problems.append(f"{folder} has no {name}: {MISSING[name]}; if that is right, {allow}")
    if "manifest" not in _find_missing(folder):
        try:
            problems += filter(None, [find_universal_damage(folder, read_universal(folder), world)])
        except (OSError, ValueError) as error:
            problems.append(f"{folder}: {error}")
    if problems:
        raise InputError(problems)


def _read_deepspeed_counts(folder: Path) -> UniversalManifest:
    """All that is known without a manifest: finished steps and applied updates, in DeepSpeed's files."""
    model = load_pickle(sorted(folder.glob("*_model_states.pt"))[0])
    step = int(model["global_steps"])
    optimizer = load_pickle(folder / "zero" / "optimizer_state.pt").get("optimizer_state_dict", {})
    counts = [int(load_pickle(path)) for path in sorted((folder / "zero").rglob("step.pt"))[:1]]
    counts += [int(state["step"]) for state in optimizer.get("state", {}).values() if "step" in state]
    counts.append(step - int(model.get("skipped_steps", 0)))
    return UniversalManifest(step, counts[0], world_size=0, zero_stage=0, source="", groups=(), files={})
