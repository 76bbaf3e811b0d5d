"""Checkpoints on another number of ranks, under another ZeRO stage or offload; what one holds, free of ranks.

DeepSpeed's shards fit one number of ranks, one stage and one way of offloading. Where a start differs, the
checkpoint is converted once to DeepSpeed's universal format, beside it, and that is loaded. Sample ids, rates
and everything else of ours follow from the step alone and do not know of ranks.
"""

import contextlib
import io
import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Protocol

from torch import Tensor

from ds_pretrain.checkpoint.manifest import MANIFEST, RUN_STATE
from ds_pretrain.checkpoint.reshard import convert
from ds_pretrain.checkpoint.rng import derive_streams, load_streams, rng_file
from ds_pretrain.checkpoint.storage import Tell, Verify, wrong_file
from ds_pretrain.checkpoint.universal_layout import (
    UNIVERSAL_MANIFEST,
    UniversalManifest,
    cache_of,
    parse_universal,
)
from ds_pretrain.core.distributed import World, from_main, gather_objects
from ds_pretrain.core.errors import InputError, RunError, agreed
from ds_pretrain.core.files import checksum
from ds_pretrain.core.on_main import on_main, while_others_wait
from ds_pretrain.core.state import RunState

POLL_SECONDS = 2.0  # how long other ranks wait in one collective while rank 0 works
SIGHT_SECONDS = 120.0  # twice what NFS remembers of a folder by default


class UniversalShards(Protocol):
    """What a universal checkpoint needs of an engine. Collective."""

    def load_universal(self, folder: Path, tag: str, optimizer_steps: int) -> list[str]:
        """Load `folder/tag`; what on this rank is then not bit for bit what its files hold."""
        ...

    def group_members(self) -> list[tuple[str, list[str]]]:
        """The name of each parameter group and the names of its parameters."""
        ...


@dataclass(frozen=True)
class Universal:
    """A universal checkpoint whose files verified on the ranks, ready to load."""

    folder: Path
    state: RunState
    optimizer_steps: int
    manifest: UniversalManifest | None  # None: something else wrote it


def prepared(
    folder: Path, changes: list[str], world: World, tell: Tell, poll_seconds: float = POLL_SECONDS
) -> Universal:
    """The universal form of a verified checkpoint: made now if none beside it verifies. Collective.

    Before any model is built. Rank 0 converts; others wait in short collectives, so that no timeout strikes.
    What it wrote is read by rank 0 alone and told to the others: they may not see it yet.

    Raises:
        InputError, RunError: on every rank, as `convert` does, or because one never sees the files.
    """
    cache = cache_of(folder)
    form, reason = on_main(world, lambda: _usable(folder, cache), f"{cache} cannot be read")
    if form is not None:
        _await_sight(form, world, poll_seconds)
        reason = _first(gather_objects(world, damage(cache, _manifest(form), world)))
    changed = f"{folder.name} was saved otherwise ({', '.join(changes)})"
    if form is not None and reason is None:
        tell(f"{changed}: using {cache.name}, which verifies")
        return form
    tell(f"{changed}: converting it, once ({reason})")
    while_others_wait(world, lambda: convert(folder), tell, f"converting {folder.name}", poll_seconds)
    form = on_main(world, lambda: _read(cache), f"{cache} cannot be read")
    _await_sight(form, world, poll_seconds)
    return form


def load(universal: Universal, shards: UniversalShards, seed: int, world: World, tell: Tell) -> RunState:
    """Load weights, optimizer state and random streams; prove them bitwise what the files hold. Collective.

    Raises:
        InputError: the parameter groups of this start are not those of the checkpoint.
        RunError: something was not loaded as it was saved, on any rank; training must not go on.
    """
    if universal.manifest is not None:
        _refuse_other_groups(universal.manifest, shards.group_members(), universal.folder)
    folder = universal.folder
    found = shards.load_universal(folder.parent, folder.name, universal.optimizer_steps)
    wrong = [f"rank {r}: {p}" for r, problems in enumerate(gather_objects(world, found)) for p in problems]
    if wrong:
        raise agreed(RunError(f"{folder} was not restored as it was saved: {'; '.join(wrong[:10])}"))
    _restore_streams(universal, seed, world, tell)
    return universal.state


def whole_weights(folder: Path) -> dict[str, Tensor]:
    """The fp32 weights of a checkpoint by parameter name, gathered from every rank's shards, on the CPU.

    Tied weights stand under each of their names. Runs on one process and holds the whole model.
    """
    said = io.StringIO()  # progress bars of the conversion
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
    ):
        warnings.simplefilter("ignore")
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        weights = get_fp32_state_dict_from_zero_checkpoint(str(folder.parent), tag=folder.name)
    return {name: weight.contiguous() for name, weight in weights.items()}


def read_universal(folder: Path) -> UniversalManifest:
    """The manifest in a universal checkpoint. Raises OSError or ValueError."""
    return parse_universal((folder / UNIVERSAL_MANIFEST).read_text(encoding="utf-8"))


def damage(folder: Path, manifest: UniversalManifest, world: World) -> str | None:
    """All sizes, and the checksums of this rank's share of the files."""
    place = {name: at % world.size for at, name in enumerate(manifest.files)}
    return _unlike(folder, manifest, lambda name: "full" if place[name] == world.rank else "sizes")


def _unlike(folder: Path, manifest: UniversalManifest, verify: Callable[[str], Verify]) -> str | None:
    """The first file that is not the one listed, as this rank sees the folder now."""
    try:
        for name, entry in manifest.files.items():
            reason = wrong_file(folder / name, entry, verify(name))
            if reason is not None:
                return f"{folder.name}, {name}: {reason}"
    except OSError as error:
        return f"{folder.name}: {error}"
    return None


def _usable(folder: Path, cache: Path) -> tuple[Universal | None, str | None]:
    """The universal form beside a checkpoint, or why it cannot be used, by sizes. On rank 0."""
    if not (cache / UNIVERSAL_MANIFEST).is_file():
        return None, "there is no universal form yet"
    try:
        form = _read(cache)
        if _manifest(form).source != checksum(folder / MANIFEST):
            return None, f"{cache.name} was made of another save of that step"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return None, f"{cache.name}: {error}"
    reason = _unlike(cache, _manifest(form), lambda name: "sizes")
    return (form, None) if reason is None else (None, reason)


def _read(cache: Path) -> Universal:
    manifest = read_universal(cache)
    state = RunState.from_json((cache / RUN_STATE).read_text(encoding="utf-8"))
    return Universal(cache, state, manifest.optimizer_steps, manifest)


def _manifest(form: Universal) -> UniversalManifest:
    assert form.manifest is not None, "what we converted has one"
    return form.manifest


def _await_sight(form: Universal, world: World, poll_seconds: float) -> None:
    """Return when every rank sees what rank 0 does: NFS remembers for a while what was missing. Collective.

    Raises:
        RunError: a rank does not, for long.
    """
    began = monotonic()
    while (unseen := _first(gather_objects(world, _unseen(form, world)))) is not None:
        if from_main(world, monotonic() - began > SIGHT_SECONDS):
            raise agreed(
                RunError(
                    f"{form.folder} is complete on rank 0, and {SIGHT_SECONDS:.0f} seconds later {unseen}: "
                    "let all ranks see the same folder, and start again"
                )
            )
        sleep(poll_seconds)


def _unseen(form: Universal, world: World) -> str | None:
    for folder in (form.folder.parent, form.folder):  # a folder that is opened is looked at anew by NFS
        with contextlib.suppress(OSError):
            os.close(os.open(folder, os.O_RDONLY))
    reason = _unlike(form.folder, _manifest(form), lambda name: "sizes")
    return None if reason is None else f"not on rank {world.rank} ({reason})"


def _first(reasons: Iterable[str | None]) -> str | None:
    return next((reason for reason in reasons if reason is not None), None)


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
                f"parameter group {name!r} is not that of {folder.name}: without {_listed(gone)}, with "
                f"{_listed(come)} that it did not have; set the model and its options (decay_embeddings, "
                "qk_norm) back"
            )
    if problems:
        raise agreed(InputError(problems))


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (", ".join(names[:3]) or "none") + more


def _restore_streams(universal: Universal, seed: int, world: World, tell: Tell) -> None:
    """Each rank's own streams; derived ones for a rank that the save did not have."""
    folder, step = universal.folder, universal.state.step
    own = (folder / rng_file(world.rank)).is_file()
    if own:
        load_streams(folder, world.rank)
    else:
        derive_streams(seed, step, world.rank)
    derived = [rank for rank, has in enumerate(gather_objects(world, own)) if not has]
    if derived:
        tell(
            f"random streams of ranks {', '.join(map(str, derived))}, which {folder.name} does not have, are "
            f"derived from (seed {seed}, step {step}, rank)"
        )
