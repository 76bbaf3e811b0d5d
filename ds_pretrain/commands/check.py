"""`ds-pretrain check RUN.toml`: finds what is wrong without an engine, and prints the resolved run."""

import argparse
import json
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from statistics import median
from typing import Any

from ds_pretrain.checkpoint.interval import Costs, check_stall, format_interval_advice, format_seconds
from ds_pretrain.commands.train import describe_world_source
from ds_pretrain.config.plan import Plan, load_plan
from ds_pretrain.config.timeline import convert_to_steps
from ds_pretrain.core.errors import InputError
from ds_pretrain.core.jsonl import METRICS
from ds_pretrain.launch.hostfile import count_ranks, read_hostfile
from ds_pretrain.models.config_check import hide_transformers, uses_transformers
from ds_pretrain.models.pretrained import Pretrained
from ds_pretrain.training.preflight import build_problems, find_problems, format_summary, open_inputs

_NEWEST = 1000  # measurements of each kind: an older one may be of other hardware


def execute(words: argparse.Namespace) -> int:
    """Print what the run file resolves to; an InputError has all that is wrong with it."""
    with hide_transformers() if words.quick else nullcontext():
        return _check(words)


def _check(words: argparse.Namespace) -> int:
    plan = load_plan(words.run_file, words.overrides)
    world_size = words.world
    if words.hostfile is not None:
        world_size = count_ranks(read_hostfile(words.hostfile))
        if words.world not in (None, world_size):
            raise InputError(
                f"--world {words.world}, but {words.hostfile} has {world_size} slots; leave one of them out"
            )
    inputs = open_inputs(plan)
    problems = find_problems(plan, inputs, world_size, describe_world_source(words))
    if not problems and uses_transformers():
        problems = build_problems(plan, inputs.pretrained)
    if problems:
        raise InputError(problems)
    for line in (
        *format_summary(plan, inputs, world_size),
        *_format_model(inputs.pretrained, words.quick),
        *format_interval(plan),
    ):
        print(line)
    print(f"ok         {words.run_file}")
    return 0


def _format_model(pretrained: Pretrained | None, quick: bool) -> Iterator[str]:
    """Say what was checked in the model's own code, or that it was not."""
    if not uses_transformers():
        why = "--quick" if quick else "transformers or torch cannot be imported here"
        weights = f", and whether the tensors of {pretrained.folder} fit it" if pretrained else ""
        yield (
            f"not checked ({why}): keys and types of the model config, how the model is built{weights}, its "
            "parameters, rotary positions of the phases, and what its layers do to mask_documents and "
            "sequence_parallel_size; train checks them before it opens an engine"
        )
    elif pretrained is not None:
        yield (
            f"weights    {pretrained.folder}: names and shapes of {len(pretrained.tensors):,} tensors are "
            f"those of the model (fingerprint {pretrained.fingerprint})"
        )


def format_interval(plan: Plan) -> Iterator[str]:
    """Format the advice on the save interval from this run's measured costs, or what is missing for it."""
    section = plan.run.checkpoint
    saves = _read_newest_records(plan.out, "checkpoint")
    stall, complete = _compute_median(saves, "stall_seconds"), _compute_median(saves, "total_seconds")
    if section.mtbf is None or stall is None or complete is None:
        mtbf = 'checkpoint.mtbf, the mean time between failures here (like "8 h")'
        save = "a first save of this run, to be measured"
        needed = [words for words, lacks in ((mtbf, section.mtbf is None), (save, stall is None)) if lacks]
        yield f"saves      advice on checkpoint.every needs {' and '.join(needed)}"
        return
    restore = _compute_median(_read_newest_records(plan.out, "resume"), "restore_seconds")
    interval = _estimate_interval(plan)
    yield (
        f"saves      measured: a save blocks training for {format_seconds(stall)}, a checkpoint is complete "
        f"after {format_seconds(complete)}, a restore takes "
        f"{'an unknown time' if restore is None else format_seconds(restore)}"
    )
    costs = Costs(stall, complete, restore or 0.0, section.mtbf.seconds)
    yield from (f"           {line}" for line in format_interval_advice(costs, interval))
    warning = None if interval is None else check_stall(stall, interval, section.max_stall_fraction)
    if warning is not None:
        yield f"warning    {warning}"


def _estimate_interval(plan: Plan) -> float | None:
    """Seconds between saves by `checkpoint.every` at the newest step: those of its shortest interval."""
    steps = _read_newest_records(plan.out, "step")
    step_seconds = _compute_median(steps, "step_seconds")
    seconds = [d.seconds for d in plan.run.checkpoint.every if d.unit == "seconds"]
    if step_seconds is not None:
        segment = plan.timeline.at(min(steps[-1]["step"], plan.last_step) - 1)
        seconds += (
            convert_to_steps(duration, segment.tokens_per_step) * step_seconds
            for duration in plan.run.checkpoint.every
            if duration.unit != "seconds"
        )
    return min(seconds, default=None)


def _read_newest_records(out: Path, event: str) -> list[dict[str, Any]]:
    """The newest records of an event, however many steps the run has; torn lines are skipped."""
    mark = f'"event": "{event}"'.encode()  # only what is kept is taken apart
    lines: deque[bytes] = deque(maxlen=_NEWEST)
    with suppress(OSError), (out / METRICS).open("rb") as file:
        lines.extend(line for line in file if mark in line)
    records = []
    for line in lines:
        with suppress(ValueError):
            records.append(json.loads(line))
    return records


def _compute_median(records: list[dict[str, Any]], field: str) -> float | None:
    values = [value for record in records if isinstance(value := record.get(field), int | float)]
    return median(values) if values else None
