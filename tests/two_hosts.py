"""Two hosts on one machine: a network, process and host-name namespace with an sshd each, joined by a cable.

They share the file system, all but a disk of their own each, and nothing else, so a launcher meets what it
meets on a cluster: other pids, another host name, an environment that does not come along, ssh between.
Nothing is named in a place that two runs of the tests share, and all of it ends with the process that made
it, however that one ends.

    with two_hosts(tmp_path) as hosts:
        done = hosts.run([sys.executable, "-m", "ds_pretrain", ...], cwd=folder, timeout=600)
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import pytest

SSHD = "/usr/sbin/sshd"
NAMES = ("alpha", "beta")
ADDRESSES = ("10.77.0.1", "10.77.0.2")  # of the two namespaces alone: the machine never sees them
NETWORK_DEVICE = "eth0"
_PROGRAMS = ("unshare", "nsenter", "setpriv", "ip", "ssh", "ssh-keygen", "pdsh")


@dataclass(frozen=True)
class TwoHosts:
    """Two hosts that are up; `hostfile` gives one slot to each, `names` are what it calls them."""

    hostfile: Path
    names: tuple[str, str]
    folder: Path
    first_process: tuple[int, int]  # each host's process 1, as the machine counts

    @property
    def disk(self) -> Path:
        """A path under which each host sees a folder of its own."""
        return self.folder / "disk"

    def disk_of(self, host: int) -> Path:
        """What a host sees there, as the machine sees it."""
        return self.folder / f"disk_of_{NAMES[host]}"

    def command(self, argv: Sequence[str], cwd: Path, host: int = 0) -> list[str]:
        """What to start on this machine so that `argv` runs on a host, in `cwd`."""
        enter = ["nsenter", "-t", str(self.first_process[host]), "-n", "-u", "-p", "-m"]
        return [*enter, "sh", "-c", 'cd "$0" && exec "$@"', str(cwd), *argv]

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment of a person who is logged in on the first host."""
        return {
            **os.environ,
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "HOME": str(self.folder / "home"),
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": NETWORK_DEVICE,
            **(extra or {}),
        }

    def run(
        self,
        argv: Sequence[str],
        cwd: Path,
        timeout: float,
        environment: Mapping[str, str] | None = None,
        host: int = 0,
    ) -> subprocess.CompletedProcess[str]:
        """Run `argv` on a host and wait; both its streams are in `stdout`."""
        process = self.start(argv, cwd, environment, host)
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            self.end_all(0)
            self.end_all(1)
            output, _ = process.communicate()
            raise AssertionError(f"not done after {timeout} s:\n{output}") from None
        return subprocess.CompletedProcess(argv, process.returncode, output, "")

    def start(
        self, argv: Sequence[str], cwd: Path, environment: Mapping[str, str] | None = None, host: int = 0
    ) -> subprocess.Popen[str]:
        """Start `argv` on a host; signals must go to what it starts there (`pids`), not to this process."""
        return subprocess.Popen(
            self.command(argv, cwd, host),
            env=self.environment(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def pids(self, host: int, containing: str = "") -> dict[int, list[str]]:
        """The processes of a host (pids as this machine counts) and their command lines."""
        space = os.readlink(f"/proc/{self.first_process[host]}/ns/pid")
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and os.readlink(entry / "ns/pid") == space:
                    words = (entry / "cmdline").read_text().split("\0")[:-1]
                    if words and containing in " ".join(words):  # a zombie has no words
                        found[int(entry.name)] = words
            except OSError:
                continue
        return found

    def end_all(self, host: int) -> None:
        """Kill what runs on a host, except the sshd that listens."""
        for pid in self.pids(host):
            if pid != self.first_process[host]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@contextmanager
def two_hosts(folder: Path) -> Iterator[TwoHosts]:
    """Two hosts, up while the block runs; skips the test where they cannot be, but fails it in CI."""
    if missing := _missing():
        reason = f"two hosts need {missing}"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    folder = folder / "two_hosts"
    _write_files(folder)
    with ExitStack() as stack:
        first = tuple(stack.enter_context(_host(folder, index)) for index in range(2))
        _connect(first)
        hosts = TwoHosts(folder / "hostfile", NAMES, folder, (first[0], first[1]))
        _wait_for_ssh(hosts)
        yield hosts


def _missing() -> str | None:
    if os.geteuid() != 0:
        return "root"
    absent = [name for name in _PROGRAMS if shutil.which(name) is None]
    absent += [] if Path(SSHD).exists() else ["sshd"]
    if absent:
        return f"{', '.join(absent)} (packages pdsh, openssh-server, iproute2, util-linux)"
    allowed = subprocess.run(["unshare", "-n", "-u", "-p", "-f", "--mount-proc", "true"], capture_output=True)
    return None if allowed.returncode == 0 else "the right to make namespaces"


def _write_files(folder: Path) -> None:
    """Keys, settings of ssh and sshd, a hostfile, and programs that stand before the system's on PATH."""
    (folder / "bin").mkdir(parents=True)
    for name in ("home", "disk", *(f"disk_of_{name}" for name in NAMES)):
        (folder / name).mkdir()
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd does not start without it
    for key in ("key", "hostkey"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
    (folder / "ssh_config").write_text(
        f"IdentityFile {folder / 'key'}\nIdentitiesOnly yes\nStrictHostKeyChecking no\n"
        "UserKnownHostsFile /dev/null\nLogLevel ERROR\nBatchMode yes\n"
    )
    for address in ADDRESSES:
        (folder / f"sshd_{address}.conf").write_text(
            f"ListenAddress {address}\nHostKey {folder / 'hostkey'}\nPidFile none\n"
            f"AuthorizedKeysFile {folder / 'key.pub'}\nStrictModes no\nUsePAM no\nPasswordAuthentication no\n"
            f"PermitRootLogin prohibit-password\nMaxStartups 100\nPrintMotd no\n"
            f"SetEnv PATH={folder / 'bin'}:/usr/bin:/bin:/usr/sbin\n"
        )
    _script(folder / "bin/ssh", f'exec {shutil.which("ssh")} -F {folder / "ssh_config"} "$@"')
    # DeepSpeed's runner answers SIGTERM with a `pkill -f` by a pattern; here it may end nothing.
    _script(folder / "bin/pkill", f'echo "$@" >> {folder / "pkill_calls"}')
    # Name look-ups are answered from here; without it each would wait for a server that cannot be reached.
    table = "".join(f"{address} {name}\n" for address, name in zip(ADDRESSES, NAMES, strict=True))
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{table}")
    (folder / "resolv.conf").write_text("")
    (folder / "hostfile").write_text("# two hosts\n\n" + "".join(f"{n} slots=1\n" for n in NAMES))


def _script(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


@contextmanager
def _host(folder: Path, index: int) -> Iterator[int]:
    """One host: its process 1 is the sshd; the machine's pid of it. Killing that ends all processes of it."""
    wait_for_cable = (
        f"until ip addr show dev {NETWORK_DEVICE} 2>/dev/null | grep -q inet; do sleep 0.05; done"
    )
    inside = f"mount --bind {folder}/hosts /etc/hosts; mount --bind {folder}/resolv.conf /etc/resolv.conf; "
    inside += f"mount --bind {folder}/disk_of_{NAMES[index]} {folder}/disk; "
    inside += f"hostname {NAMES[index]}; ip link set lo up; {wait_for_cable}; "
    inside += f"exec {SSHD} -D -e -f {folder}/sshd_{ADDRESSES[index]}.conf"
    unshare = ["unshare", "-n", "-u", "-p", "--fork", "--kill-child", "--mount-proc", "sh", "-c", inside]
    with (folder / f"sshd_{index}.log").open("w") as log:
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *unshare], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        yield _only_child(process.pid)
    finally:
        process.kill()  # --kill-child: process 1 of the namespace goes with it, and with that all the others
        process.wait()


def _only_child(pid: int) -> int:
    deadline = monotonic() + 120
    while monotonic() < deadline:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if children and os.readlink(f"/proc/{children[0]}/ns/net") != os.readlink("/proc/self/ns/net"):
            return int(children[0])
        time.sleep(0.02)
    raise AssertionError("no namespace came up")


def _connect(first: tuple[int, ...]) -> None:
    a, b = (str(pid) for pid in first)
    ends = ["type", "veth", "peer", "name", NETWORK_DEVICE, "netns", b]
    _ip(["link", "add", NETWORK_DEVICE, "netns", a, *ends])
    for pid, address in zip(first, ADDRESSES, strict=True):
        enter = ["nsenter", "-t", str(pid), "-n", "ip"]
        subprocess.run([*enter, "link", "set", NETWORK_DEVICE, "up"], check=True)
        subprocess.run([*enter, "addr", "add", f"{address}/24", "dev", NETWORK_DEVICE], check=True)


def _ip(words: list[str]) -> None:
    subprocess.run(["ip", *words], check=True)


def _wait_for_ssh(hosts: TwoHosts) -> None:
    deadline = monotonic() + 120
    for address in NAMES:
        while (answer := hosts.run(["ssh", address, "true"], hosts.folder, timeout=60)).returncode:
            if monotonic() > deadline:
                logs = "".join((hosts.folder / f"sshd_{i}.log").read_text() for i in range(2))
                raise AssertionError(f"no ssh to {address}: {answer.stdout}\n{logs}")
            time.sleep(0.1)
