"""The `ds-pretrain` command: parsing, and one call each. Sub-commands are imported when they are called."""

import argparse
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TypeAlias

from ds_pretrain import __version__
from ds_pretrain.commands.checkpoints import add_arguments as add_checkpoint_arguments
from ds_pretrain.core.errors import EXIT_FAILED, RunError
from ds_pretrain.core.text import LogToStderr, discard_unread, say

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command; the exit code of the process (errors.py has the table).

    Where nobody reads on, as behind `| head`, it ends in silence, with the code of a process that died of it.
    """
    words = _parse(argv)
    LogToStderr().install()
    try:
        module = import_module(f"ds_pretrain.commands.{words.module}")
        code: int = module.execute(words)
        sys.stdout.flush()
    except BrokenPipeError:
        discard_unread(sys.stdout)
        return 128 + signal.SIGPIPE
    except RunError as error:
        say(sys.stderr, f"ds-pretrain: {error}")
        return error.exit_code
    except OSError as error:  # of a disk or a store; what a program of ours says of it is a RunError
        say(sys.stderr, f"ds-pretrain: {error}")
        return EXIT_FAILED
    except KeyboardInterrupt:
        say(sys.stderr, "ds-pretrain: interrupted")
        return 128 + signal.SIGINT
    return code


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Overrides may stand anywhere; argparse alone wants them beside the run file."""
    parser = _build_parser()
    words, rest = parser.parse_known_args(argv)
    if rest and (not hasattr(words, "overrides") or not all(_is_override(word) for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(word for word in rest if not _is_override(word))}")
    if rest:
        words.overrides = [*words.overrides, *rest]
    return words


def _is_override(word: str) -> bool:
    return "=" in word and not word.startswith("-")


def _build_parser() -> argparse.ArgumentParser:
    """Each sub-command is `execute` of the module of its name."""
    parser = argparse.ArgumentParser(
        prog="ds-pretrain", description="Pretrain language models with DeepSpeed."
    )
    parser.add_argument("--version", action="version", version=f"ds_pretrain {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_train(commands)
    _add_check(commands)
    _add_prepare(commands)
    add_checkpoint_arguments(
        _add(commands, "checkpoints", "list, verify, compare, pin or convert a run's checkpoints")
    )
    _add_branch(commands)
    _add_verify_resume(commands)
    _add_sample(commands)
    _add_watchdog(commands)
    _add_audit(commands)
    return parser


def _add(commands: Commands, name: str, about: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=about)
    parser.set_defaults(module=name.replace("-", "_"))
    return parser


def _add_train(commands: Commands) -> None:
    parser = _add(commands, "train", "train a run file: composes and runs the `deepspeed` command")
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


def _add_verify_resume(commands: Commands) -> None:
    about = "prove in two short launches that a resumed run is bitwise the uninterrupted one"
    parser = _add(commands, "verify-resume", about)
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
    parser = _add(commands, "check", "find what is wrong with a run file, and print what it resolves to")
    _add_run(parser)
    parser.add_argument("--world", type=int, metavar="N", help="number of ranks to check the batch against")
    parser.add_argument("--hostfile", type=Path, metavar="F", help="take the number of ranks from it")
    parser.add_argument(
        "--quick", action="store_true", help="arithmetic and files alone, without Transformers: seconds less"
    )


def _add_prepare(commands: Commands) -> None:
    parser = _add(commands, "prepare", "tokenize text into a .bin/.idx pair")
    add = parser.add_argument
    add("sources", nargs="+", metavar="SOURCE", help="files, folders, or a data set's hub name")
    add("--tokenizer", required=True, metavar="T", help="path or hub name, or `bytes`")
    add("--out", required=True, metavar="PREFIX", help="writes PREFIX.bin, .idx, .json")
    bpe = "first train a byte-level BPE of N entries and save it as T"
    add("--train-tokenizer", type=int, metavar="N", help=bpe)
    add("--workers", type=int, metavar="N", help="threads (default: the cores of this process)")
    kinds = ("file", "paragraph", "line")
    add("--document", choices=kinds, default="file", help="what of a text file is a document")
    add("--text-column", default="text", metavar="NAME", help="of jsonl, parquet and arrow")
    add("--split", default="train", metavar="NAME", help="of a data set on the hub")
    add("--eos-token", metavar="TOKEN", help="if the tokenizer does not say which it is")
    add("--overwrite", action="store_true", help="overwrite an existing PREFIX")
    add("--quiet", action="store_true", help="no progress bar")


def _add_branch(commands: Commands) -> None:
    about = "start a new run from a checkpoint of another, with its own plan from there on"
    parser = _add(commands, "branch", about)
    parser.add_argument(
        "parent",
        metavar="RUN",
        help="a run directory, a run file, its checkpoints, or the URL that they were uploaded to",
    )
    parser.add_argument("--at", type=int, required=True, metavar="STEP", help="of the checkpoint")
    _add_run(parser, "NEW.toml")


def _add_sample(commands: Commands) -> None:
    parser = _add(commands, "sample", "print text from a run's newest checkpoint")
    _add_run(parser)
    add = parser.add_argument
    add("--prompt", default="", help="text to continue (default: the start of a document)")
    add("--count", type=int, default=1, metavar="N", help="how many")
    add("--tokens", type=int, default=100, metavar="N", help="tokens of each, at most")
    add("--temperature", type=float, default=0.8, help="0 takes the likeliest token")
    add("--seed", type=int, default=0)
    add("--step", type=int, metavar="N", help="the checkpoint of this step")


def _add_watchdog(commands: Commands) -> None:
    parser = _add(commands, "watchdog", "judge a recorded loss curve, and plot the verdicts")
    parser.add_argument(
        "curve",
        metavar="CURVE.csv|RUN",
        help="columns step, loss and optionally grad_norm (others are ignored); or a run's directory or "
        "file, whose rollbacks are judged again too",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="watchdog.key=value", help="judges with another value"
    )


def _add_audit(commands: Commands) -> None:
    parser = _add(commands, "audit", "prove which samples a run was trained on, or show those of a step")
    add = parser.add_argument
    add("run", metavar="RUN", help="a run directory or a run file")
    moved = "as `sources.web=PATH`, for data that moved"
    add("overrides", nargs="*", metavar="section.key=value", help=moved)
    add("--step", type=int, metavar="N", help="show the text that step N read")
    add("--rank", type=int, metavar="R", help="with --step: the full samples of this rank")
    start = "of --step: as it was taken in that start (default: the last)"
    add("--attempt", type=int, metavar="A", help=start)
    add("--skipped", action="store_true", help="list every sample that was skipped, one a line")
    every = "read every step again (default: 1,000), and count every sample"
    add("--all", action="store_true", help=every)


def _add_run(parser: argparse.ArgumentParser, name: str = "RUN.toml") -> None:
    parser.add_argument("run_file", metavar=name)
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="replaces a value of the run file"
    )
