"""Checkpoints on another number of ranks, under another ZeRO stage or offload; what one holds, free of ranks.

DeepSpeed's shards fit one number of ranks, one stage and one way of offloading. Where a start differs, the
checkpoint is converted once to DeepSpeed's universal format, beside it, and that is loaded. Sample ids, rates
and everything else of ours follow from the step alone and do not know of ranks.
"""

import contextlib
import io
import warnings
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

import torch
from torch import Tensor

from ds_pretrain.checkpoint.convert import convert
from ds_pretrain.checkpoint.layout import MANIFEST, RUN_STATE
from ds_pretrain.checkpoint.rng import derive_streams, load_streams, rng_file
from ds_pretrain.checkpoint.universal_layout import (
    UNIVERSAL_MANIFEST,
    UniversalManifest,
    cache_of,
    parse_universal,
)
from ds_pretrain.errors import InputError, RunError, agreed
from ds_pretrain.files import checksum
from ds_pretrain.state import RunState
from ds_pretrain.world import World, from_main, gather_objects

Tell = Callable[[str], None]
POLL_SECONDS = 2.0  # how long other ranks wait in one collective while rank 0 works
PROGRESS_SECONDS = 30.0

# What decides how an optimizer's state is cut into shards, with the value that stands where nothing is set.
_LAYOUT: dict[tuple[str, ...], Any] = {
    ("zero_optimization", "stage"): None,
    ("zero_optimization", "offload_optimizer", "device"): "none",
    ("zero_optimization", "offload_param", "device"): "none",
    ("zero_optimization", "sub_group_size"): 1_000_000_000,
    ("zero_optimization", "round_robin_gradients"): False,
    ("zero_optimization", "parameter_alignment"): None,
    ("optimizer", "type"): None,
    ("optimizer", "params", "torch_adam"): False,
    ("bf16", "enabled"): False,
    ("data_types", "grad_accum_dtype"): None,
}
# What a universal checkpoint that something else wrote may lack, and what is done without it.
MISSING = {
    "manifest": "nothing tells damage from intact files, and DeepSpeed's are pickles, which can run code on "
    "loading: trust their origin",
    "run_state": "the step is DeepSpeed's count, and no data is known to be skipped",
    "rng": "every rank's random streams are derived from the seed, the step and the rank",
}


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


def layout_changes(
    saved: Mapping[str, Any], saved_world: int, config: Mapping[str, Any], world_size: int
) -> list[str]:
    """Why shards of one DeepSpeed JSON and world do not fit another ("ranks 2 -> 3"); empty if they do.

    Raises:
        InputError: a change that no conversion bridges.
    """
    changes = [f"ranks {saved_world} -> {world_size}"] if saved_world != world_size else []
    for path, default in _LAYOUT.items():
        before, after = _setting(saved, path, default), _setting(config, path, default)
        if before != after:
            changes.append(f"{'.'.join(path)} {before} -> {after}")
    if changes:
        _refuse_unbridgeable(saved, config, changes)
    return changes


def prepared(
    folder: Path, changes: list[str], world: World, tell: Tell, poll_seconds: float = POLL_SECONDS
) -> Universal:
    """The universal form of a verified checkpoint: made now if none beside it verifies. Collective.

    Before any model is built. Rank 0 converts; others wait in short collectives, so that no timeout strikes.

    Raises:
        InputError, RunError: on every rank, as `convert` does.
    """
    cache = cache_of(folder)
    reasons = [r for r in gather_objects(world, _unusable_reason(folder, cache, world)) if r is not None]
    if reasons:
        tell(f"{folder.name} was saved otherwise ({', '.join(changes)}): converting it, once ({reasons[0]})")
        _on_main_while_others_wait(
            world, lambda: convert(folder), tell, f"converting {folder.name}", poll_seconds
        )
    else:
        tell(f"{folder.name} was saved otherwise ({', '.join(changes)}): using {cache.name}, which verifies")
    manifest = _read(cache)
    state = RunState.from_json((cache / RUN_STATE).read_text(encoding="utf-8"))
    return Universal(cache, state, manifest.optimizer_steps, manifest)


def opened(folder: Path, accept_missing: Collection[str], world: World, tell: Tell) -> Universal:
    """A universal checkpoint at any place, also one that DeepSpeed's own tool wrote. Collective.

    Args:
        accept_missing: which of `MISSING` the user allows it to lack.

    Raises:
        InputError: it is none, is damaged, or lacks something that was not allowed; all of that at once.
    """
    problems = [
        p for found in gather_objects(world, _foreign_problems(folder, accept_missing, world)) for p in found
    ]
    if problems:
        raise agreed(InputError(dict.fromkeys(problems)))
    lacking = _lacking(folder)
    for name in lacking:
        allowed_by = "--trust-pickle" if name == "manifest" else "accept_missing"
        tell(f"{folder} has no {name}, as {allowed_by} allows: {MISSING[name]}")
    manifest = None if "manifest" in lacking else _read(folder)
    counters = from_main(world, _foreign_counters(folder, manifest) if world.is_main else None)
    step, optimizer_steps = counters
    state = RunState(step=step)
    if "run_state" not in lacking:
        state = RunState.from_json((folder / RUN_STATE).read_text(encoding="utf-8"))
    return Universal(folder, state, optimizer_steps, manifest)


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
        raise RunError(f"{folder} was not restored as it was saved: {'; '.join(wrong[:10])}")
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


def _setting(config: Mapping[str, Any], path: tuple[str, ...], default: Any) -> Any:
    value: Any = config
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return default if value is None else value


def _refuse_unbridgeable(saved: Mapping[str, Any], config: Mapping[str, Any], changes: list[str]) -> None:
    problems = []
    before, after = (str(_setting(c, ("optimizer", "type"), None)) for c in (saved, config))
    if before != after and not {before, after} <= {"Adam", "AdamW"}:
        problems.append(
            f"optimizer.type changed from {before} to {after}: what one remembers means nothing to the "
            "other; set it back, or start anew with another `out`"
        )
    for section in ("offload_optimizer", "offload_param"):
        path = ("zero_optimization", section, "device")
        if "nvme" in (_setting(saved, path, "none"), _setting(config, path, "none")):
            problems.append(
                f"zero_optimization.{section}.device = nvme: DeepSpeed cannot convert what it swapped out "
                f"({', '.join(changes)}); start with what the checkpoint was saved with"
            )
    if problems:
        raise InputError(problems)


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
        raise InputError(problems)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (", ".join(names[:3]) or "none") + more


def _read(folder: Path) -> UniversalManifest:
    return parse_universal((folder / UNIVERSAL_MANIFEST).read_text(encoding="utf-8"))


def _unusable_reason(folder: Path, cache: Path, world: World) -> str | None:
    """Why the universal form beside a checkpoint cannot be used, as far as this rank looks."""
    if not (cache / UNIVERSAL_MANIFEST).is_file():
        return "there is no universal form yet"
    try:
        manifest = _read(cache)
        if manifest.source != checksum(folder / MANIFEST):
            return f"{cache.name} was made of another save of that step"
    except (OSError, ValueError) as error:
        return f"{cache.name}: {error}"
    return _damage(cache, manifest, world)


def _damage(folder: Path, manifest: UniversalManifest, world: World) -> str | None:
    """All sizes, and the checksums of this rank's share of the files."""
    try:
        for place, (name, entry) in enumerate(manifest.files.items()):
            size = (folder / name).stat().st_size
            if size != entry.bytes:
                return f"{folder.name}: {name} has {size:,} bytes, its manifest says {entry.bytes:,}"
            if place % world.size == world.rank and checksum(folder / name) != entry.sha256:
                return f"{folder.name}: the checksum of {name} does not match its manifest"
    except OSError as error:
        return f"{folder.name}: {error}"
    return None


def _lacking(folder: Path) -> list[str]:
    present = {
        "manifest": folder / UNIVERSAL_MANIFEST,
        "run_state": folder / RUN_STATE,
        "rng": folder / rng_file(0),
    }
    return [name for name, path in present.items() if not path.is_file()]


def _foreign_problems(folder: Path, accept_missing: Collection[str], world: World) -> list[str]:
    if unknown := sorted(set(accept_missing) - set(MISSING)):
        return [f"accept_missing names {', '.join(unknown)}; expected some of {', '.join(MISSING)}"]
    if not (folder / "zero" / "optimizer_state.pt").is_file() or not list(folder.glob("*_model_states.pt")):
        return [
            f"{folder} is neither a checkpoint of ours (a {MANIFEST}) nor a universal one "
            "(zero/optimizer_state.pt and a *_model_states.pt): name the folder of one, or make one with "
            "`python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state`"
        ]
    problems = [
        f"{folder} has no {name}: {MISSING[name]}; if that is right, {_allowing(name)}"
        for name in _lacking(folder)
        if name not in accept_missing
    ]
    if "manifest" not in _lacking(folder):
        try:
            problems += filter(None, [_damage(folder, _read(folder), world)])
        except (OSError, ValueError) as error:
            problems.append(f"{folder}: {error}")
    return problems


def _allowing(name: str) -> str:
    return "start with --trust-pickle" if name == "manifest" else f"add {name!r} to accept_missing"


def _foreign_counters(folder: Path, manifest: UniversalManifest | None) -> tuple[int, int]:
    """Finished steps and applied updates."""
    if manifest is not None:
        return manifest.step, manifest.optimizer_steps
    model = torch.load(
        sorted(folder.glob("*_model_states.pt"))[0], map_location="cpu", mmap=True, weights_only=False
    )
    step = int(model["global_steps"])
    for path in sorted((folder / "zero").rglob("step.pt")):
        return step, int(torch.load(path, map_location="cpu", weights_only=False))
    optimizer = torch.load(folder / "zero" / "optimizer_state.pt", map_location="cpu", weights_only=False)
    states = optimizer.get("optimizer_state_dict", {}).get("state", {})
    counts = [int(state["step"]) for state in states.values() if "step" in state]
    return step, counts[0] if counts else step - int(model.get("skipped_steps", 0))


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


def _on_main_while_others_wait(
    world: World, act: Callable[[], object], tell: Tell, what: str, poll_seconds: float
) -> None:
    """Do long work on rank 0, in a thread; all meet every `poll_seconds`, and all raise if it failed."""
    started = told = monotonic()
    with ThreadPoolExecutor(1) as pool:
        future: Future[object] | None = pool.submit(act) if world.is_main else None
        while (outcome := from_main(world, _outcome(future, poll_seconds))) is None:
            if monotonic() - told > PROGRESS_SECONDS:
                told = monotonic()
                tell(f"{what}: {told - started:.0f} seconds so far")
    if outcome:
        kind, problems = outcome
        raise InputError(problems) if kind == "input" else RunError(*problems)


def _outcome(
    future: "Future[object] | None", seconds: float
) -> tuple[str, tuple[str, ...]] | tuple[()] | None:
    """On rank 0: None while it works, () when it is done, or what went wrong."""
    if future is None:
        return None
    try:
        future.result(timeout=seconds)
    except NotYet:
        return None
    except InputError as error:
        return "input", error.problems
    except (RunError, OSError, RuntimeError, ValueError, KeyError) as error:
        return "run", (f"conversion failed: {error}" if not isinstance(error, RunError) else str(error),)
    return ()
