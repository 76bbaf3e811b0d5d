"""Runs the real loop on a rank and keeps what it restored and trained: whole tensors, options, samples."""

import argparse
import contextlib
import hashlib
import io
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ds_pretrain import train as train_module
from ds_pretrain.checkpoint import reshard as convert
from ds_pretrain.checkpoint import restore as store
from ds_pretrain.checkpoint.storage import Places
from ds_pretrain.config.plan import load_plan
from ds_pretrain.core.distributed import World, gather_objects
from ds_pretrain.core.errors import Preempted
from ds_pretrain.core.run_files import StopSignal, run_lock
from ds_pretrain.data.sampler import Sampler
from ds_pretrain.engine import partitions
from ds_pretrain.training import setup as opening
from ds_pretrain.training.resume import Wish
from ds_pretrain.training.saver import Saver
from tests.checkpoint.saving import save_now
from tests.runs.golden import trace

Whole = dict[str, dict[str, np.ndarray[Any, Any]]]


@dataclass(frozen=True)
class Snapshot:
    """An engine's state, free of how it is cut: the same on every rank, apart from `streams`."""

    tensors: Whole  # parameter -> fp32, weight (as fp32), exp_avg, exp_avg_sq
    options: dict[str, dict[str, Any]]  # group -> its options
    steps: list[int]  # of every state of every rank
    distinct_steps: bool  # no two states share a tensor
    module: dict[str, np.ndarray[Any, Any]]  # buffers and frozen parameters
    streams: str  # digest of this rank's random streams


@dataclass(frozen=True)
class Outcome:
    """What a start did on one rank."""

    restored: Snapshot | None
    saved: dict[int, Snapshot]  # at every save, by step
    finished: Snapshot
    samples: dict[int, Any]
    told: str


def run_elastic(
    world: World,
    run_file: str,
    stop_after: int | None = None,
    overrides: tuple[str, ...] = (),
    alter: Callable[[nn.Module], None] | None = None,
    rate: float | None = None,
    real_tool: bool = False,
) -> Outcome:
    """Train; with `stop_after`, stop as a preempted run does after that step, its checkpoint saved.

    `alter` changes the module before the engine is opened: to freeze a parameter, or add a buffer. `rate` is
    the learning rate of every step in place of the schedule's. DeepSpeed's tool runs in this process, which
    has imported it already, unless `real_tool`.
    """
    engines: list[Any] = []
    restored: list[Snapshot] = []
    saved: dict[int, Snapshot] = {}
    trained: list[int] = []  # the feed reads ahead, so not every sample that was looked up
    samples: dict[int, Any] = {}
    patch = pytest.MonkeyPatch()
    build, restore, ids, measure = opening.build_model, store.restore, Sampler.ids, train_module.measure
    open_engine, save, take_step = train_module.open_run_engine, Saver.save, train_module.take_step

    def built(*args: Any, **options: Any) -> Any:
        model = build(*args, **options)
        if alter is not None:
            alter(model.module)
        return model

    def opened(*args: Any) -> Any:
        engines.append(open_engine(*args))
        return engines[-1]

    def restoring(*args: Any) -> Any:
        state = restore(*args)
        restored.append(snapshot(engines[-1]._engine, world))
        return state

    def saving(self: Saver, state: Any, probe: Any) -> None:
        saved[state.step] = snapshot(engines[-1]._engine, world)
        save(self, state, probe)

    def stepped(engine: Any, batch: Any, scheduled: float, *args: Any) -> Any:
        return take_step(engine, batch, scheduled if rate is None else rate, *args)

    def sampled(self: Sampler, step: int, ledger: Any) -> Any:
        result = ids(self, step, ledger)
        samples[step] = result.listed()
        return result

    def measured(*args: Any) -> Any:
        record, asked = measure(*args)
        trained.append(record.step - 1)
        return record, asked

    if not real_tool:
        patch.setattr(convert, "_run_tool", tool_in_this_process)
    patch.setattr(Saver, "save", saving)
    patch.setattr(train_module, "take_step", stepped)
    patch.setattr(opening, "build_model", built)
    patch.setattr(train_module, "open_run_engine", opened)
    patch.setattr(store, "restore", restoring)
    patch.setattr(Sampler, "ids", sampled)
    patch.setattr(train_module, "measure", measured)
    plan = load_plan(run_file, overrides)
    said = io.StringIO()
    with (
        contextlib.redirect_stderr(said),
        StopSignal(plan.out, world) as stop,
        contextlib.suppress(Preempted),
    ):
        train_module.train(plan, world, stop, run_lock(plan.out), Wish(stop_after))
    patch.undo()
    finished = snapshot(engines[-1]._engine, world)
    return Outcome(
        restored[0] if restored else None, saved, finished, {s: samples[s] for s in trained}, said.getvalue()
    )


def tool_in_this_process(source: Path, result: Path, _: Any) -> None:
    """DeepSpeed's tool called here: a process of its own takes seconds to start."""
    from deepspeed.checkpoint import ds_to_universal

    words = {"input_folder": str(source), "output_folder": str(result), "keep_temp_folder": False}
    words |= {"num_extract_workers": 1, "num_merge_workers": 1, "strict": True, "inject_missing_state": True}
    ds_to_universal.main(argparse.Namespace(**words))


def convert_here(world: World, folder: str) -> None:
    """Convert a checkpoint offline."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert, "_run_tool", tool_in_this_process)
        convert.convert(Path(folder))


def restore_and_save(world: World, run_file: str) -> Snapshot:
    """Restore a run and save it again at once, as if it had been stopped before its first step."""
    plan = load_plan(run_file)
    root = plan.out / "checkpoints"
    found = store.find(Places(root, root), world)
    assert found is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert, "_run_tool", tool_in_this_process)
        found = store.fitted(found, plan.deepspeed, Places(root, root), world)
    engine = opening.open_run_engine(plan, world)
    state = store.restore(found, engine, plan.run.seed, world)
    texts = {"deepspeed.json": plan.deepspeed_text}
    manifest = replace(found.manifest, world_size=world.size, files={})
    save_now(root, state, manifest, texts, engine, world)
    return snapshot(engine._engine, world)


def snapshot(engine: Any, world: World) -> Snapshot:
    """All of an engine's state, whole. Collective."""
    mine = [
        (
            part.name,
            part.start,
            {
                "fp32": _array(part.master),
                "weight": _array(part.weight.float()),
                **{kind: _array(moment) for kind, moment in part.moments.items()},
            },
        )
        for part in partitions.parts(engine)
        if part.master.numel()  # not padding alone
    ]
    pieces = sorted(
        (piece for rank in gather_objects(world, mine) for piece in rank), key=lambda piece: piece[:2]
    )
    tensors: Whole = {}
    for name, start, kinds in pieces:
        for kind, values in kinds.items():
            before = tensors.setdefault(name, {}).get(kind, np.empty(0, values.dtype))
            assert len(before) == start
            tensors[name][kind] = np.concatenate([before, values])
    states = [s for s in engine.optimizer.optimizer.state.values() if "step" in s]
    steps = gather_objects(world, [int(state["step"]) for state in states])
    addresses = [state["step"].data_ptr() for state in states if torch.is_tensor(state["step"])]
    options = {str(group["name"]): dict(group) for group in partitions.live_options(engine)}
    return Snapshot(
        tensors,
        options,
        [step for rank in steps for step in rank],
        len(set(addresses)) == len(addresses),
        _rest(engine),
        streams_digest(),
    )


def streams_digest() -> str:
    """A hash of this process's random streams."""
    return hashlib.sha256(repr((torch.get_rng_state().tolist(), random.getstate())).encode()).hexdigest()


def losses(run_file: Path) -> dict[int, float]:
    """The loss of every step."""
    return {record["step"]: record["loss"] for record in trace(run_file.parent / "out")}


def same(a: Whole, b: Whole) -> bool:
    """True if two snapshots hold the same parameters with the same bits."""
    return a.keys() == b.keys() and all(
        a[name].keys() == b[name].keys()
        and all(a[name][kind].tobytes() == b[name][kind].tobytes() for kind in a[name])
        for name in a
    )


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return tensor.detach().cpu().clone().numpy()


def _rest(engine: Any) -> dict[str, np.ndarray[Any, Any]]:
    import deepspeed

    frozen = {name: p for name, p in engine.module.named_parameters() if not p.requires_grad}
    with deepspeed.zero.GatheredParameters(list(frozen.values())):
        found = {name: _array(p.float()) for name, p in frozen.items()}
    persistent = set(engine._get_buffer_names())
    return found | {
        name: _array(b.float()) for name, b in engine.module.named_buffers() if name in persistent
    }
