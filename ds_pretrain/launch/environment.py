"""The environment variables that reach the ranks on other hosts, and how they are quoted on the way.

`deepspeed` builds one shell command line and hands it to pdsh and ssh. On the way a value meets DeepSpeed's
quoting (double quotes around anything unusual, nothing escaped), pdsh (which replaces `%h`, `%n`, `%u`, `%%`)
and the shell of the other host. Here values are written so that they arrive byte for byte; one that cannot be
is refused by name. See deepspeed/launcher/runner.py and multinode_runner.py in DeepSpeed 0.19.8.
"""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from ds_pretrain.core.errors import InputError
from ds_pretrain.core.redact import is_secret

# Variables that ranks elsewhere need and would not have; nothing else leaves this host.
_NAMES = frozenset(
    ["PATH", "LD_LIBRARY_PATH", "CUDA_HOME", "OMP_NUM_THREADS", "DS_ACCELERATOR", "TOKENIZERS_PARALLELISM"]
)
_STORES = ("AWS_", "GOOGLE_", "AZURE_", "FSSPEC_")  # how checkpoints reach an object store; no secrets
_PREFIXES = ("GLOO_", "NCCL_", "TORCH_", "PYTORCH_", "HF_", "WANDB_", *_STORES)
_DEEPSPEED_PREFIXES = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL")  # what `deepspeed` sends whatever we do
_LOCAL_ONLY = re.compile(r"WANDB_SERVICE.*|.*_(?:RUN_DIR|SOCKET)")  # true of one process or host only
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PLAIN_WORD = re.compile(r"[A-Za-z0-9_@%+=:,./-]*")


def select_variables(environment: Mapping[str, str], current: Path) -> tuple[dict[str, str], tuple[str, ...]]:
    """The variables for the other hosts, and the names of those held back as secrets.

    A forwarded value shows in the process list of every host, so a secret is sent only if it is in a
    DeepSpeed environment file. Entries of such files (`DS_ENV_FILE`, by default `.deepspeed_env`, in the home
    folder and in `current`) win over the environment; comments and blank lines in them are fine.

    Raises:
        InputError: an entry cannot be understood or cannot arrive unchanged.
    """
    chosen = {
        name: value
        for name, value in environment.items()
        if (name in _NAMES or name.startswith(_PREFIXES + _DEEPSPEED_PREFIXES))
        and _LOCAL_ONLY.fullmatch(name) is None
    }
    withheld = tuple(sorted(name for name in chosen if is_secret(name)))
    forwarded = {name: value for name, value in chosen.items() if name not in withheld}
    forwarded["PYTHONPATH"] = ":".join(filter(None, [str(current), environment.get("PYTHONPATH", "")]))
    for folder in (Path(environment.get("HOME", "/nonexistent")), current):
        path = folder / environment.get("DS_ENV_FILE", ".deepspeed_env")
        if path.is_file():
            forwarded |= read_environment_file(path)
    problems = [
        f"environment variable {name} cannot be sent to other hosts: {reason}; unset it or change its value"
        for name, value in sorted(forwarded.items())
        if (reason := _find_reason_to_refuse(value))
    ]
    if problems:
        raise InputError(problems)
    return forwarded, tuple(name for name in withheld if name not in forwarded)


def read_environment_file(path: Path) -> dict[str, str]:
    """The `KEY=VALUE` lines of a DeepSpeed environment file; values are literal, `$` and quotes included.

    Raises:
        InputError: lines that are no such thing, by number; values are not shown, they may be secret.
    """
    entries: dict[str, str] = {}
    problems = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, equals, value = line.partition("=")
        if not equals or _VARIABLE.fullmatch(name.strip()) is None:
            problems.append(
                f"{path}, line {number}: expected KEY=VALUE, KEY of letters, digits and underscores"
            )
            continue
        entries[name.strip()] = value.strip()
    if problems:
        raise InputError(problems)
    return entries


def format_environment_file(forwarded: Mapping[str, str]) -> str:
    """The text of the file that `deepspeed` must read so that `forwarded` arrives unchanged."""
    return "".join(f"{name}={_quote_double(value)}\n" for name, value in sorted(forwarded.items()))


def quote_for_remote_shell(word: str) -> str:
    """A command-line word, written so that the training script on another host receives it unchanged.

    DeepSpeed puts words with a space into double quotes and escapes the double quotes in them, and no others.

    Raises:
        InputError: it holds a line break.
    """
    if "\n" in word or "\r" in word or "\0" in word:
        raise InputError(f"{word!r}: a line break cannot be sent to other hosts; take it out")
    if " " in word:
        return _quote_double(word, escape=r"([\\$`])")
    return (word if _PLAIN_WORD.fullmatch(word) and word else shlex.quote(word)).replace("%", "%%")


def is_unsafe_path(path: str) -> bool:
    """True if `deepspeed`, which does not quote it, would break this path on the way."""
    return _PLAIN_WORD.fullmatch(path) is None or "%" in path


def _quote_double(value: str, escape: str = r"([\\$`\"])") -> str:
    return re.sub(escape, r"\\\1", value).replace("%", "%%")


def _find_reason_to_refuse(value: str) -> str | None:
    if any(c in value for c in "\n\r\0"):
        return "it holds a line break"
    if value != value.strip():
        return "it starts or ends with blanks, which DeepSpeed cuts off"
    return None
