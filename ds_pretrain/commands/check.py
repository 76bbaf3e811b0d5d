"""`ds-pretrain check RUN.toml`: finds what is wrong without an engine, and prints the resolved run."""

import argparse

from ds_pretrain.commands.save_advice import interval_lines
from ds_pretrain.commands.train import world_source
from ds_pretrain.config.plan import load_plan
from ds_pretrain.core.errors import InputError
from ds_pretrain.launch.hostfile import num_ranks, read_hostfile
from ds_pretrain.models.rehearsal import base_findings
from ds_pretrain.training.preflight import find_problems, open_inputs, summary


def check_command(words: argparse.Namespace) -> int:
    """Print what the run file resolves to; an InputError has all that is wrong with it."""
    plan = load_plan(words.run_file, words.overrides)
    world_size = words.world
    if words.hostfile is not None:
        world_size = num_ranks(read_hostfile(words.hostfile))
        if words.world not in (None, world_size):
            raise InputError(
                f"--world {words.world}, but {words.hostfile} has {world_size} slots; leave one of them out"
            )
    inputs = open_inputs(plan)
    problems, weights = find_problems(plan, inputs, world_size, world_source(words)), None
    if not problems:
        problems, weights = base_findings(plan)
    if problems:
        raise InputError(problems)
    for line in filter(None, (*summary(plan, inputs, world_size), weights, *interval_lines(plan))):
        print(line)
    print(f"ok         {words.run_file}")
    return 0
