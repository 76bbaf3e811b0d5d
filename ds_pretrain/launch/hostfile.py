"""The hostfile: which hosts a run uses, and how many ranks each of them holds.

The grammar is DeepSpeed's (https://www.deepspeed.ai/getting-started/#resource-configuration-multi-node), read
strictly: whatever is accepted here means the same to DeepSpeed, and what DeepSpeed would guess at is refused.

    # a comment
    node-0 slots=8
    trainer@node-1.cluster   slots=8    # a user name, blanks and a trailing comment are fine
"""

import re
import socket
from dataclasses import dataclass
from pathlib import Path

from ds_pretrain.core.errors import InputError

_ENTRY = re.compile(r"(\S+)[ \t]+slots=([0-9]+)(?:[ \t]+#.*)?")
_NAME = re.compile(r"(?:[A-Za-z0-9._-]+@)?[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_LOOPBACK = re.compile(r"localhost|127(?:\.[0-9]+){3}")
_EXPECTED = "expected `name slots=N`, as in `node-0 slots=8`"


@dataclass(frozen=True)
class Host:
    """One line of a hostfile: `name` is what ssh is given ([user@]host), `slots` its number of ranks."""

    name: str
    slots: int

    @property
    def address(self) -> str:
        """The name without the user."""
        return self.name.rpartition("@")[2]

    @property
    def is_loopback(self) -> bool:
        """True for names that mean "this machine" on every machine."""
        return _LOOPBACK.fullmatch(self.address) is not None

    @property
    def is_here(self) -> bool:
        """True if ranks for this host are started without ssh."""
        own = socket.gethostname()
        return "@" not in self.name and (self.is_loopback or self.name in (own, own.partition(".")[0]))


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """The hosts of a hostfile, in rank order.

    Raises:
        InputError: the file is missing (DeepSpeed itself would train on this host alone), empty or not text,
            or lines are not understood: all of them, each with its number and text.
    """
    try:
        with path.open(encoding="utf-8") as file:  # universal newlines, as DeepSpeed reads it
            lines = file.readlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"hostfile {path}: cannot be read ({_describe_error(error)}); give an existing file with one "
            "line `name slots=N` a host, or leave --hostfile out to train on this host alone"
        ) from error
    hosts, problems = _parse(lines)
    if not hosts and not problems:
        problems = [f"has no host; {_EXPECTED}"]
    if len(hosts) > 1:
        problems += [
            f"{host.name!r} means another machine on each host; give the name by which the others reach it"
            for host in hosts
            if host.is_loopback
        ]
    if problems:
        raise InputError(f"hostfile {path}: {problem}" for problem in problems)
    return tuple(hosts)


def count_ranks(hosts: tuple[Host, ...]) -> int:
    """The world size: one rank a slot."""
    return sum(host.slots for host in hosts)


def find_host_of_rank(hosts: tuple[Host, ...], rank: int) -> Host | None:
    """The host that holds `rank`; None if there is no such rank."""
    for host in hosts:
        if rank < host.slots:
            return host
        rank -= host.slots
    return None


def describe_hosts(hosts: tuple[Host, ...]) -> str:
    """Nodes and their ranks for people: a headline, then one line a host."""
    total = count_ranks(hosts)
    lines = [f"{len(hosts)} host{'s' * (len(hosts) != 1)}, {total} rank{'s' * (total != 1)}"]
    width = max((len(host.name) for host in hosts), default=0)
    first = 0
    for host in hosts:
        last = first + host.slots - 1
        ranks = f"rank {first}" if host.slots == 1 else f"ranks {first}-{last}"
        lines.append(f"  {host.name:<{width}}  {ranks}")
        first = last + 1
    return "\n".join(lines)


def _parse(lines: list[str]) -> tuple[list[Host], list[str]]:
    hosts: list[Host] = []
    problems: list[str] = []
    seen: dict[str, int] = {}
    for number, raw in enumerate(lines, 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        where = f"line {number}: {line!r}:"
        entry = _ENTRY.fullmatch(line)
        if entry is None:
            problems.append(f"{where} not understood; {_EXPECTED}{_guess(line)}")
            continue
        host = Host(entry[1], int(entry[2]))
        if _NAME.fullmatch(host.name) is None:
            problems.append(
                f"{where} {host.name!r} is not a host name; expected [user@]name of letters, digits, "
                "dots, dashes and underscores, one host a line"
            )
        elif host.address in seen:
            problems.append(f"{where} {host.address!r} is already on line {seen[host.address]}; keep one")
        elif host.slots == 0:
            problems.append(f"{where} a host without slots; give slots=1 or more, or remove the line")
        else:
            hosts.append(host)
        seen.setdefault(host.address, number)
    return hosts, problems


def _guess(line: str) -> str:
    """Guess what the writer of a bad line meant."""
    if re.search(r"\s\S+$", line) is None or "=" not in line:
        return "; the number of slots is missing"
    if re.search(r"slots\s*=\s+|slots\s+=", line):
        return "; no blanks around `=`"
    value = re.search(r"\sslots=(\S*)", line)
    if value is None:
        return "; no `slots=` found"
    if not re.fullmatch(r"[0-9]+", value[1]):
        return f"; {value[1]!r} is not a whole number"
    return "; only a comment may follow, after a blank"


def _describe_error(error: OSError | UnicodeDecodeError) -> str:
    return "not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error.strerror or str(error)
