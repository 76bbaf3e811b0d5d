"""What each sub-command of `ds-pretrain` does with its words, and its exit code (errors.py has the table)."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial

from ds_pretrain.commands.checkpoints import parent_place
from ds_pretrain.commands.save_advice import interval_lines
from ds_pretrain.config.plan import load_plan
from ds_pretrain.core.errors import InputError
from ds_pretrain.core.text import counted
from ds_pretrain.launch.command import compose
from ds_pretrain.launch.hostfile import num_ranks, read_hostfile
from ds_pretrain.launch.run import run
from ds_pretrain.models.config_check import asks_transformers, without_transformers
from ds_pretrain.models.pretrained import Base
from ds_pretrain.training.preflight import build_problems, find_problems, open_inputs, summary


def train_command(words: argparse.Namespace) -> int:
    """Compose and run the `deepspeed` command of a run file."""
    flags = ["--trust-pickle"] if words.trust_pickle else []
    if words.stop_after is not None:
        last_step = load_plan(words.run_file, words.overrides).last_step
        if not 1 <= words.stop_after <= last_step:
            raise InputError(f"--stop-after {words.stop_after}: the run has steps 1 to {last_step:,}")
        flags += ["--stop-after", str(words.stop_after)]
    return _launch(words, words.overrides, flags)


def verify_resume_command(words: argparse.Namespace) -> int:
    """Prove that a resumed run is bitwise the uninterrupted one, or name what differs first."""
    from ds_pretrain.commands.verify_resume import verify_resume

    start = partial(_launch, words)
    return verify_resume(words.run_file, words.overrides, words.steps, start, words.begin)


def _launch(words: argparse.Namespace, overrides: Sequence[str], flags: Sequence[str]) -> int:
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
    world_size = num_ranks(command.hosts) or None
    problems = find_problems(plan, open_inputs(plan), world_size, _world_source(words))
    if problems:
        raise InputError(problems)
    print(" ".join(command.argv), flush=True)
    return run(command, plan.out)


def check_command(words: argparse.Namespace) -> int:
    """Find everything that can be found without an engine, and print the resolved run."""
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
    problems = find_problems(plan, inputs, world_size, _world_source(words))
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


def prepare_command(words: argparse.Namespace) -> int:
    """Tokenize text into a source."""
    from ds_pretrain.data.prepare import PrepareOptions, prepare

    options = PrepareOptions(
        words.sources,
        words.tokenizer,
        words.out,
        words.workers,
        train_tokenizer_size=words.train_tokenizer,
        text_column=words.text_column,
        split=words.split,
        document=words.document,
        eos_token=words.eos_token,
        overwrite=words.overwrite,
        progress=not words.quiet,
    )
    done = prepare(options)
    size = f"{counted(done.documents, 'document')}, {counted(done.tokens, 'token')}"
    print(
        f"{done.prefix}: {size} ({done.dtype}, vocabulary "
        f"{done.vocab_size:,}), longest {done.longest:,}, {done.empty_dropped:,} empty ones dropped, "
        f"{done.tokens_per_second:,.0f} tokens/s"
    )
    if done.replaced:
        print(
            f"WARNING    {counted(done.replaced, 'document')} with U+FFFD, which stands for bytes that are "
            "not UTF-8; `grep -axv '.*' FILE` shows such lines of a file, and `iconv` converts it",
            file=sys.stderr,
        )
    return 0


def sample_command(words: argparse.Namespace) -> int:
    """Print what a run's newest checkpoint says."""
    from ds_pretrain.commands.sample import sample

    plan = load_plan(words.run_file, words.overrides)
    texts = sample(
        plan,
        words.prompt,
        count=words.count,
        max_tokens=words.tokens,
        temperature=words.temperature,
        seed=words.seed,
        step=words.step,
    )
    for name, text in texts:
        print(f"--- {name}\n{text}")
    return 0


def watchdog_command(words: argparse.Namespace) -> int:
    """What the watchdog says of a recorded curve."""
    from ds_pretrain.commands.watchdog import watchdog_command as judge_recording

    return judge_recording(words)


def branch_command(words: argparse.Namespace) -> int:
    """Make a run that begins from a checkpoint of another."""
    from ds_pretrain.commands.branch import branch

    plan = load_plan(words.run_file, words.overrides)
    branch(parent_place(words.parent), words.at, plan)
    return 0


def audit_command(words: argparse.Namespace) -> int:
    """Prove which samples a run was trained on, or show them."""
    from ds_pretrain.commands.audit import audit_command as audit

    return audit(words)


def _world_source(words: argparse.Namespace) -> str:
    if words.hostfile is not None:
        return f"--hostfile {words.hostfile}"
    given = (option for option in ("ranks", "world") if getattr(words, option, None) is not None)
    return next((f"--{option}" for option in given), "this host")
