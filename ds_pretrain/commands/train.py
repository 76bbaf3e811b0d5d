"""`ds-pretrain train RUN.toml`: composes and runs the `deepspeed` command of a run file."""

import argparse
from collections.abc import Sequence

from ds_pretrain.config.plan import load_plan
from ds_pretrain.core.errors import InputError
from ds_pretrain.launch.command import compose
from ds_pretrain.launch.hostfile import count_ranks
from ds_pretrain.launch.run import run
from ds_pretrain.training.preflight import find_problems, open_inputs


def execute(words: argparse.Namespace) -> int:
    """Launch the run; its exit code."""
    flags = ["--trust-pickle"] if words.trust_pickle else []
    if words.stop_after is not None:
        last_step = load_plan(words.run_file, words.overrides).last_step
        if not 1 <= words.stop_after <= last_step:
            raise InputError(f"--stop-after {words.stop_after}: the run has steps 1 to {last_step:,}")
        flags += ["--stop-after", str(words.stop_after)]
    return launch(words, words.overrides, flags)


def launch(words: argparse.Namespace, overrides: Sequence[str], flags: Sequence[str]) -> int:
    """Run the `deepspeed` command with these overrides and flags, once no problem is found here."""
    plan = load_plan(words.run_file, overrides)
    command = compose(
        words.run_file,
        overrides,
        flags=flags,
        ranks=words.ranks,
        hostfile=words.hostfile,
        master_addr=words.master_addr,
        master_port=words.master_port,
        ssh_port=words.ssh_port,
    )
    world_size = count_ranks(command.hosts) or None
    if problems := find_problems(plan, open_inputs(plan), world_size, describe_world_source(words)):
        raise InputError(problems)
    print(" ".join(command.argv), flush=True)
    return run(command, plan.out)


def describe_world_source(words: argparse.Namespace) -> str:
    """Name the source of the number of ranks, for messages."""
    if words.hostfile is not None:
        return f"--hostfile {words.hostfile}"
    given = (option for option in ("ranks", "world") if getattr(words, option, None) is not None)
    return next((f"--{option}" for option in given), "this host")
