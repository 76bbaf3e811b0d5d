"""`ds-pretrain check RUN.toml`: finds what is wrong without an engine, and prints the resolved run."""

import argparse
from collections.abc import Iterator
from contextlib import nullcontext

from ds_pretrain.commands.save_advice import interval_lines
from ds_pretrain.commands.train import world_source
from ds_pretrain.config.plan import load_plan
from ds_pretrain.core.errors import InputError
from ds_pretrain.launch.hostfile import num_ranks, read_hostfile
from ds_pretrain.models.config_check import asks_transformers, without_transformers
from ds_pretrain.models.pretrained import Base
from ds_pretrain.training.preflight import build_problems, find_problems, open_inputs, summary


def check_command(words: argparse.Namespace) -> int:
    """Print what the run file resolves to; an InputError has all that is wrong with it."""
    with without_transformers() if words.quick else nullcontext():
        return _check(words)


def _check(words: argparse.Namespace) -> int:
    plan = load_plan(words.run_file, words.overrides)
    world_size = words.world
    if words.hostfile is not None:
        world_size = num_ranks(read_hostfile(words.hostfile))
        if words.world not in (None, world_size):
            raise InputError(
                f"--world {words.world}, but {words.hostfile} has {world_size} slots; leave one of them out"
            )
    inputs = open_inputs(plan)
    problems = find_problems(plan, inputs, world_size, world_source(words))
    if not problems and asks_transformers():
        problems = build_problems(plan, inputs.base)
    if problems:
        raise InputError(problems)
    for line in (
        *summary(plan, inputs, world_size),
        *_model_lines(inputs.base, words.quick),
        *interval_lines(plan),
    ):
        print(line)
    print(f"ok         {words.run_file}")
    return 0


def _model_lines(base: Base | None, quick: bool) -> Iterator[str]:
    """What was looked at in the model's own code, or that it was not."""
    if not asks_transformers():
        why = "--quick" if quick else "transformers or torch cannot be imported here"
        weights = f", and whether the tensors of {base.folder} fit it" if base else ""
        yield (
            f"not checked ({why}): keys and types of the model config, how the model is built{weights}, its "
            "parameters, rotary positions of the phases, and what its layers do to mask_documents and "
            "sequence_parallel_size; train checks them before it opens an engine"
        )
    elif base is not None:
        yield (
            f"weights    {base.folder}: names and shapes of {len(base.tensors):,} tensors are those of the "
            f"model (fingerprint {base.fingerprint})"
        )
