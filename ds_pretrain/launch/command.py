"""Composes the `deepspeed` command that trains a run file. Starts nothing, writes nothing, imports no torch.

One host:       deepspeed --num_gpus N ... --module ds_pretrain.train RUN.toml key=value ...
Several hosts:  deepspeed --hostfile F ... --module ds_pretrain.train RUN.toml key=value ...
"""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ds_pretrain.core.errors import InputError
from ds_pretrain.launch.environment import is_unsafe_path, quote_for_remote_shell, select_variables
from ds_pretrain.launch.hostfile import Host, count_ranks, read_hostfile

TRAIN_MODULE = "ds_pretrain.train"
DEFAULT_PORT = 29500  # DeepSpeed's and PyTorch's
_IMPLICIT_HOSTFILE = Path("/job/hostfile")  # `deepspeed` takes it without being asked to


@dataclass(frozen=True)
class Command:
    """A composed launch: what to start, what to change in its environment, and where its ranks will be."""

    argv: tuple[str, ...]
    environment: dict[str, str]  # added to the environment of `deepspeed`
    hosts: tuple[Host, ...]  # empty if only `deepspeed` can count this host's devices
    over_ssh: bool
    forwarded: dict[str, str] = field(default_factory=dict, repr=False)  # sent to the hosts; may hold secrets
    withheld: tuple[str, ...] = ()  # names of secrets that stay on this host


def compose(
    run_file: str,
    overrides: Sequence[str] = (),
    *,
    flags: Sequence[str] = (),
    ranks: int | None = None,
    hostfile: Path | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
    ssh_port: int | None = None,
    module: str = TRAIN_MODULE,
    environment: Mapping[str, str] | None = None,
) -> Command:
    """The `deepspeed` command for `run_file`.

    With a hostfile its slots are the ranks, and `ranks`, if given, must equal their number. Without one, all
    GPUs of this host, or one CPU rank where there is none. `environment` stands in for this process's own;
    `flags` are words for every rank's own command line.

    Raises:
        InputError: all that can be seen to be wrong without starting anything.
    """
    environment = os.environ if environment is None else environment
    if ranks is not None and ranks < 1:
        raise InputError(f"--ranks {ranks}: give 1 or more")
    words = [run_file, *overrides, *flags]
    if hostfile is None:
        return _build_local(words, ranks, master_port, module, environment)
    hosts = read_hostfile(hostfile)
    if ranks is not None and ranks != count_ranks(hosts):
        raise InputError(
            f"--ranks {ranks}, but hostfile {hostfile} has {count_ranks(hosts)} slots on {len(hosts)} "
            "host(s); change one, or leave --ranks out"
        )
    if len(hosts) == 1 and hosts[0].is_here:
        return _build_for_one_entry(words, hosts, hostfile, master_port, module, environment)
    return _build_over_ssh(words, hosts, hostfile, (master_addr, master_port, ssh_port), module, environment)


def count_gpus(environment: Mapping[str, str]) -> int | None:
    """GPUs that this host offers to a run, found without torch; None for accelerators not counted here."""
    accelerator = environment.get("DS_ACCELERATOR", "cuda")
    if accelerator == "cpu":
        return 0
    if accelerator != "cuda":
        return None
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len(_parse_visible_devices(visible))
    nodes = [path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()]
    if nodes or shutil.which("nvidia-smi", path=environment.get("PATH")) is None:
        return len(nodes)
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def find_free_port(wanted: int | None, start: int) -> int:
    """`wanted` if it is free on this host, else the first free port from `start` on.

    Raises:
        InputError: `wanted` is in use; the message names a free one.
    """
    if wanted is not None and _is_free(wanted):
        return wanted
    found = next((port for port in range(start, 65536) if _is_free(port)), None)
    if found is None:
        raise InputError(f"no free TCP port from {start} to 65535 on this host")
    if wanted is not None:
        raise InputError(f"master port {wanted} is in use on this host, or not permitted; {found} is free")
    return found


def _build_local(
    words: list[str], ranks: int | None, port: int | None, module: str, environment: Mapping[str, str]
) -> Command:
    if _IMPLICIT_HOSTFILE.is_file():
        raise InputError(
            f"{_IMPLICIT_HOSTFILE} exists, and `deepspeed` would use it unasked; "
            f"give --hostfile {_IMPLICIT_HOSTFILE}, or --hostfile hostfiles/localhost for this host alone"
        )
    gpus = count_gpus(environment)
    if gpus and ranks is not None and ranks > gpus:
        raise InputError(f"--ranks {ranks}, but this host offers {gpus} GPU(s); give at most {gpus}")
    added = _put_own_programs_first(environment)
    if gpus == 0:
        ranks = ranks or 1
        added |= _build_cpu_settings(ranks, environment)
    count = ranks or gpus
    devices: list[str] = ["--num_gpus", str(count)] if count else []
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if (
        gpus and visible
    ):  # with --num_gpus the launcher would ignore it and take the first devices of the host
        devices = ["--include", "localhost:" + ",".join(_parse_visible_devices(visible)[:count])]
    argv = [*_build_launcher(environment), *devices, *_find_local_port(port)]
    hosts = (Host("localhost", count),) if count else ()
    return Command((*argv, "--module", module, *words), added, hosts, over_ssh=False)


def _build_for_one_entry(
    words: list[str],
    hosts: tuple[Host, ...],
    hostfile: Path,
    port: int | None,
    module: str,
    environment: Mapping[str, str],
) -> Command:
    """A hostfile that names this host alone: no ssh, which the launcher would otherwise try on itself."""
    gpus = count_gpus(environment)
    if gpus and hosts[0].slots > gpus:
        raise InputError(f"hostfile {hostfile}: slots={hosts[0].slots}, but this host offers {gpus} GPU(s)")
    added = _put_own_programs_first(environment)
    added |= _build_cpu_settings(hosts[0].slots, environment) if gpus == 0 else {}
    argv = [
        *_build_launcher(environment),
        "--hostfile",
        str(hostfile),
        "--no_ssh_check",
        "--master_addr",
        "127.0.0.1",
    ]
    argv += _find_local_port(port)
    return Command((*argv, "--module", module, *words), added, hosts, over_ssh=False)


def _build_over_ssh(
    words: list[str],
    hosts: tuple[Host, ...],
    hostfile: Path,
    network: tuple[str | None, int | None, int | None],
    module: str,
    environment: Mapping[str, str],
) -> Command:
    master_addr, master_port, ssh_port = network
    problems = [
        f"{what} {path!r}: the launcher cannot take this to other hosts; use letters, digits and -_./ only"
        for what, path in (("current folder", str(Path.cwd())), ("python", sys.executable))
        if is_unsafe_path(path)
    ]
    if master_addr is not None and Host(master_addr, 1).is_loopback:
        problems.append(
            f"master address {master_addr}: other hosts cannot reach it; give the first host's own"
        )
    if shutil.which("pdsh", path=environment.get("PATH")) is None:
        problems.append("pdsh is not installed on this host, and the launcher starts other hosts with it")
    if problems:
        raise InputError(problems)
    environment = {**environment, **_put_own_programs_first(environment)}
    if environment.get("DS_ACCELERATOR") == "cpu":  # said, not guessed: this host need not be like the others
        environment |= _build_cpu_settings(max(host.slots for host in hosts), environment)
    forwarded, withheld = select_variables(environment, Path.cwd())
    argv = [*_build_launcher(environment), "--hostfile", str(hostfile)]
    argv += ["--force_multi"] if len(hosts) == 1 else []  # or the launcher would train here instead of there
    argv += ["--master_addr", master_addr] if master_addr is not None else []
    argv += ["--master_port", str(DEFAULT_PORT if master_port is None else master_port)]
    argv += ["--ssh_port", str(ssh_port)] if ssh_port is not None else []
    argv += ["--module", module, *map(quote_for_remote_shell, words)]
    return Command(tuple(argv), {}, hosts, over_ssh=True, forwarded=forwarded, withheld=withheld)


def _build_launcher(environment: Mapping[str, str]) -> list[str]:
    """`deepspeed`, quiet: at its usual level it prints every variable that it sends, secrets included."""
    beside = Path(sys.executable).parent / "deepspeed"  # the one of this Python, even if PATH has another
    found = str(beside) if beside.is_file() else shutil.which("deepspeed", path=environment.get("PATH"))
    if found is None:
        raise InputError(
            f"`deepspeed` is neither beside {sys.executable} nor on PATH; install it: pip install deepspeed"
        )
    return [found, "--log_level", "critical"]  # it calls every end but 0 an error, also a wanted one


def _put_own_programs_first(environment: Mapping[str, str]) -> dict[str, str]:
    """PATH as in an activated virtual environment, for the tools with which DeepSpeed builds its operators.

    Two versions of ninja in turn, one from here and one of the system, would build them again each time.
    """
    own = str(Path(sys.executable).parent)
    folders = environment.get("PATH", os.defpath).split(os.pathsep)
    return {} if folders[0] == own else {"PATH": os.pathsep.join([own, *folders])}


def _build_cpu_settings(ranks: int, environment: Mapping[str, str]) -> dict[str, str]:
    cores = len(os.sched_getaffinity(0))
    defaults = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": str(max(1, cores // ranks))}
    return {name: value for name, value in defaults.items() if name not in environment}


def _find_local_port(wanted: int | None) -> list[str]:
    """A port of this process's own region, so that two launches at the same moment do not choose the same."""
    return ["--master_port", str(find_free_port(wanted, DEFAULT_PORT + os.getpid() % 2000))]


def _parse_visible_devices(value: str) -> list[str]:
    devices = [device.strip() for device in value.split(",") if device.strip() not in ("", "-1")]
    if bad := [device for device in devices if not device.isdigit()]:
        raise InputError(
            f"CUDA_VISIBLE_DEVICES={value}: the launcher takes device numbers only, not {bad[0]!r}; "
            "give numbers as in CUDA_VISIBLE_DEVICES=0,1"
        )
    return devices


def _is_free(port: int) -> bool:
    try:
        with socket.create_server(("", port)):
            return True
    except (OSError, OverflowError):
        return False
