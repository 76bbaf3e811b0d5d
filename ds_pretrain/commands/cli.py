"""The `ds-pretrain` command: parsing, and one call each."""

import argparse
import os
import select
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO, TypeAlias

from ds_pretrain import __version__
from ds_pretrain.commands.checkpoints import add_arguments as add_checkpoint_arguments
from ds_pretrain.commands.commands import (
    audit_command,
    branch_command,
    check_command,
    prepare_command,
    sample_command,
    train_command,
    verify_resume_command,
    watchdog_command,
)
from ds_pretrain.core.errors import EXIT_FAILED, RunError

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command; the exit code of the process (errors.py has the table).

    Where nobody reads on, as behind `| head`, it ends in silence, with the code of a process that died of it.
    """
    words = _parse(argv)
    try:
        code: int = words.call(words)
        sys.stdout.flush()
    except RunError as error:
        _tell(error)
        return error.exit_code
    except OSError as error:  # of a disk or a store; what a program of ours says of it is a RunError
        if isinstance(error, BrokenPipeError) and _is_unread(sys.stdout):
            return 128 + signal.SIGPIPE
        _tell(error)
        return EXIT_FAILED
    except KeyboardInterrupt:
        _tell("interrupted")
        return 128 + signal.SIGINT
    return code


def _tell(what: object) -> None:
    try:
        print(f"ds-pretrain: {what}", file=sys.stderr)
    except BrokenPipeError:
        _is_unread(sys.stderr)


def _is_unread(stream: TextIO) -> bool:
    """True if the reader of a stream has gone: what is left in it then goes nowhere, also at the exit."""
    try:
        watched = select.poll()
        watched.register(stream.fileno(), 0)
    except (OSError, ValueError):  # no file at all
        return False
    if not any(state & select.POLLERR for _, state in watched.poll(0)):
        return False
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
    return True


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Overrides may stand anywhere; argparse alone wants them beside the run file."""
    parser = _parser()
    words, rest = parser.parse_known_args(argv)
    if rest and (not hasattr(words, "overrides") or not all(_is_override(word) for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(word for word in rest if not _is_override(word))}")
    if rest:
        words.overrides = [*words.overrides, *rest]
    return words


def _is_override(word: str) -> bool:
    return "=" in word and not word.startswith("-")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ds-pretrain", description="Pretrain language models with DeepSpeed."
    )
    parser.add_argument("--version", action="version", version=f"ds_pretrain {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (
        _add_train,
        _add_check,
        _add_prepare,
        _add_checkpoints,
        _add_branch,
        _add_verify_resume,
        _add_sample,
        _add_watchdog,
        _add_audit,
    ):
        add(commands)
    return parser


def _add_train(commands: Commands) -> None:
    parser = commands.add_parser("train", help="train a run file: composes and runs the `deepspeed` command")
    _add_run(parser)
    _add_launch(parser)
    parser.add_argument(
        "--stop-after", type=int, metavar="STEP", help="end this start after that step, saved, with code 75"
    )
    parser.add_argument(
        "--trust-pickle",
        action="store_true",
        help="open a checkpoint at `resume_from` that has no manifest: its pickles can run code",
    )
    parser.set_defaults(call=train_command)


def _add_verify_resume(commands: Commands) -> None:
    parser = commands.add_parser(
        "verify-resume",
        help="prove in two short launches that a resumed run is bitwise the uninterrupted one",
    )
    _add_run(parser)
    _add_launch(parser)
    parser.add_argument(
        "--steps", type=int, default=3, metavar="K", help="before the resume, and after it (default: 3)"
    )
    parser.add_argument(
        "--from",
        type=int,
        dest="begin",
        metavar="STEP",
        help="begin at the run's checkpoint of that step, to prove a resume in another phase or batch, or "
        "right on a change, K steps later (default: its first steps, which prove its first phase only)",
    )
    parser.set_defaults(call=verify_resume_command)


def _add_launch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="ranks on this host (default: its GPUs, or one)"
    )
    parser.add_argument(
        "--hostfile", type=Path, metavar="F", help="hosts and slots, one `name slots=N` a line"
    )
    parser.add_argument("--master-addr", metavar="A", help="address of the first host that the others reach")
    parser.add_argument(
        "--master-port", type=int, metavar="P", help="port there (default: the first free one)"
    )
    parser.add_argument("--ssh-port", type=int, metavar="P", help="of the hosts' sshd")


def _add_check(commands: Commands) -> None:
    parser = commands.add_parser(
        "check", help="find what is wrong with a run file, and print what it resolves to"
    )
    _add_run(parser)
    parser.add_argument("--world", type=int, metavar="N", help="number of ranks to check the batch against")
    parser.add_argument("--hostfile", type=Path, metavar="F", help="take the number of ranks from it")
    parser.add_argument(
        "--quick", action="store_true", help="arithmetic and files alone, without Transformers: seconds less"
    )
    parser.set_defaults(call=check_command)


def _add_prepare(commands: Commands) -> None:
    parser = commands.add_parser("prepare", help="tokenize text into a .bin/.idx pair")
    parser.add_argument(
        "sources", nargs="+", metavar="SOURCE", help="files, folders, or a data set's hub name"
    )
    parser.add_argument("--tokenizer", required=True, metavar="T", help="path or hub name, or `bytes`")
    parser.add_argument("--out", required=True, metavar="PREFIX", help="writes PREFIX.bin, .idx, .json")
    parser.add_argument(
        "--train-tokenizer",
        type=int,
        metavar="N",
        help="first train a byte-level BPE of N entries and save it as T",
    )
    parser.add_argument(
        "--workers", type=int, metavar="N", help="threads (default: the cores of this process)"
    )
    parser.add_argument(
        "--document",
        choices=("file", "paragraph", "line"),
        default="file",
        help="what of a text file is a document",
    )
    parser.add_argument("--text-column", default="text", metavar="NAME", help="of jsonl, parquet and arrow")
    parser.add_argument("--split", default="train", metavar="NAME", help="of a data set on the hub")
    parser.add_argument("--eos-token", metavar="TOKEN", help="if the tokenizer does not say which it is")
    parser.add_argument("--overwrite", action="store_true", help="replace what stands at PREFIX")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(call=prepare_command)


def _add_checkpoints(commands: Commands) -> None:
    add_checkpoint_arguments(
        commands.add_parser("checkpoints", help="list, verify, compare, pin or convert a run's checkpoints")
    )


def _add_branch(commands: Commands) -> None:
    parser = commands.add_parser(
        "branch", help="make a run that begins from a checkpoint of another, with another plan from there on"
    )
    parser.add_argument(
        "parent",
        metavar="RUN",
        help="a run directory, a run file, its checkpoints, or the URL of a place that they were shipped to",
    )
    parser.add_argument("--at", type=int, required=True, metavar="STEP", help="of the checkpoint")
    _add_run(parser, "NEW.toml")
    parser.set_defaults(call=branch_command)


def _add_sample(commands: Commands) -> None:
    parser = commands.add_parser("sample", help="print text from a run's newest checkpoint")
    _add_run(parser)
    parser.add_argument("--prompt", default="", help="text to continue (default: the start of a document)")
    parser.add_argument("--count", type=int, default=1, metavar="N", help="how many")
    parser.add_argument("--tokens", type=int, default=100, metavar="N", help="tokens of each, at most")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step", type=int, metavar="N", help="the checkpoint of this step")
    parser.set_defaults(call=sample_command)


def _add_watchdog(commands: Commands) -> None:
    parser = commands.add_parser("watchdog", help="judge a recorded loss curve, and plot the verdicts")
    parser.add_argument(
        "curve",
        metavar="CURVE.csv|RUN",
        help="columns step, loss and maybe grad_norm (others, as a learning rate, are read by nobody)"
        "; or a run's directory or file, whose rollbacks are judged again too",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="watchdog.key=value", help="judges with another value"
    )
    parser.set_defaults(call=watchdog_command)


def _add_audit(commands: Commands) -> None:
    parser = commands.add_parser(
        "audit", help="prove which samples a run was trained on, or show those of a step"
    )
    parser.add_argument("run", metavar="RUN", help="a run directory or a run file")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="as `sources.web=PATH`, for data that moved"
    )
    parser.add_argument("--step", type=int, metavar="N", help="show the text that step N read")
    parser.add_argument("--rank", type=int, metavar="R", help="of --step: what this rank read, whole")
    parser.add_argument(
        "--attempt",
        type=int,
        metavar="A",
        help="of --step: as it was taken in that start (default: the last)",
    )
    parser.add_argument(
        "--skipped", action="store_true", help="list every sample that was skipped, one a line"
    )
    parser.add_argument(
        "--all", action="store_true", help="read every step again (default: 1,000), and count every sample"
    )
    parser.set_defaults(call=audit_command)


def _add_run(parser: argparse.ArgumentParser, name: str = "RUN.toml") -> None:
    parser.add_argument("run_file", metavar=name)
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="replaces a value of the run file"
    )
