"""Universal checkpoints at any place, also those of DeepSpeed's own tool, with or without our files."""

from collections.abc import Collection
from pathlib import Path

import torch

from ds_pretrain.checkpoint.manifest import MANIFEST, RUN_STATE
from ds_pretrain.checkpoint.rng import rng_file
from ds_pretrain.checkpoint.storage import Tell
from ds_pretrain.checkpoint.universal import Universal, damage, read_universal
from ds_pretrain.checkpoint.universal_layout import UNIVERSAL_MANIFEST, UniversalManifest
from ds_pretrain.core.distributed import World, from_main, gather_objects
from ds_pretrain.core.errors import InputError, agreed
from ds_pretrain.core.on_main import on_main
from ds_pretrain.core.state import RunState

# What a universal checkpoint that something else wrote may lack, and what is done without it.
MISSING = {
    "manifest": "nothing tells damage from intact files, and DeepSpeed's are pickles, which can run code on "
    "loading: trust their origin",
    "run_state": "the step is DeepSpeed's count, and no data is known to be skipped",
    "rng": "every rank's random streams are derived from the seed, the step and the rank",
}


def opened(folder: Path, accept_missing: Collection[str], world: World, tell: Tell) -> Universal:
    """A universal checkpoint at any place, also one that DeepSpeed's own tool wrote. Collective.

    Args:
        accept_missing: which of `MISSING` the user allows it to lack.

    Raises:
        InputError: it is none, is damaged, or lacks something that was not allowed; all of that at once.
    """
    problems = [p for found in gather_objects(world, _problems(folder, accept_missing, world)) for p in found]
    if problems:
        raise agreed(InputError(dict.fromkeys(problems)))
    lacking = from_main(world, _lacking(folder))
    for name in lacking:
        allowed_by = "--trust-pickle" if name == "manifest" else "accept_missing"
        tell(f"{folder} has no {name}, as {allowed_by} allows: {MISSING[name]}")
    return on_main(world, lambda: _read(folder, lacking), f"{folder} cannot be read")


def _read(folder: Path, lacking: Collection[str]) -> Universal:
    manifest = None if "manifest" in lacking else read_universal(folder)
    step, optimizer_steps = _counters(folder, manifest)
    state = RunState(step=step)
    if "run_state" not in lacking:
        state = RunState.from_json((folder / RUN_STATE).read_text(encoding="utf-8"))
    return Universal(folder, state, optimizer_steps, manifest)


def _lacking(folder: Path) -> list[str]:
    present = {
        "manifest": folder / UNIVERSAL_MANIFEST,
        "run_state": folder / RUN_STATE,
        "rng": folder / rng_file(0),
    }
    return [name for name, path in present.items() if not path.is_file()]


def _problems(folder: Path, accept_missing: Collection[str], world: World) -> list[str]:
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
            problems += filter(None, [damage(folder, read_universal(folder), world)])
        except (OSError, ValueError) as error:
            problems.append(f"{folder}: {error}")
    return problems


def _allowing(name: str) -> str:
    return "start with --trust-pickle" if name == "manifest" else f"add {name!r} to accept_missing"


def _counters(folder: Path, manifest: UniversalManifest | None) -> tuple[int, int]:
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
