"""The real launcher, pdsh and ssh between two hosts."""

import json
import os
import signal
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from ds_pretrain.core.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_NO_PROGRESS, EXIT_PREEMPTED
from ds_pretrain.core.run_files import read_ranks
from tests.launch.test_environment import HARD
from tests.two_hosts import NAMES, TwoHosts, two_hosts

pytestmark = pytest.mark.slow  # tests/runs/test_two_hosts.py has the one that every run of the tests makes
REPOSITORY = Path(__file__).parents[2]
SECRETS = {"WANDB_API_KEY": "secret-of-the-environment", "MLFLOW_TRACKING_PASSWORD": "secret-password"}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    with two_hosts(tmp_path_factory.mktemp("hosts")) as hosts:
        yield hosts


@pytest.fixture
def hosts(both: TwoHosts) -> Iterator[TwoHosts]:
    """Two hosts with nothing running on them, before the test and after it."""
    yield both
    both.end_all(0)
    both.end_all(1)
    assert not (both.folder / "pkill_calls").exists(), "the launcher was signalled: it ends others' jobs then"


def start(hosts: TwoHosts, out: Path, *words: str) -> list[str]:
    given = {"hostfile": str(hosts.hostfile), "words": words, "grace_seconds": 1.0}
    return [sys.executable, "-m", "tests.launch.start", json.dumps(given), str(out)]


def wait_for_ranks(out: Path) -> None:
    deadline = monotonic() + 300
    while len(read_ranks(out)) < 2:
        assert monotonic() < deadline, "the ranks did not start"
        time.sleep(0.1)


def ranks_on(hosts: TwoHosts) -> list[list[str]]:
    return [words for host in (0, 1) for words in hosts.pids(host, "tests.launch.rank").values()]


def send(hosts: TwoHosts, number: int) -> None:
    [pid] = hosts.pids(0, "tests.launch.start")
    os.kill(pid, number)


def test_ranks_on_both_hosts_meet_and_words_and_environment_arrive_unchanged(
    hosts: TwoHosts, tmp_path: Path
) -> None:
    words = [f"key={value}" for value in HARD]
    variables = {f"HF_HARD_{i}": value for i, value in enumerate(HARD)}
    own = "\n# a person's own\n\nCLUSTER_TOKEN=secret but sent\n"
    (hosts.folder / "home/.deepspeed_env").write_text(own)
    done = hosts.run(
        start(hosts, tmp_path, "reduce", "show", *words), REPOSITORY, 600, {**variables, **SECRETS}
    )
    assert done.returncode == 0, done.stdout
    assert "2 hosts, 2 ranks\n  alpha  rank 0\n  beta   rank 1\n" in done.stdout
    assert [(tmp_path / f"sum_{rank}").read_text() for rank in (0, 1)] == ["3.0", "3.0"]
    for rank in (0, 1):
        seen: dict[str, Any] = json.loads((tmp_path / f"seen_{rank}.json").read_text())
        assert seen["host"] == NAMES[rank]
        assert seen["words"] == ["reduce", "show", *words]
        arrived = seen["environment"]
        assert {name: arrived.get(name) for name in variables} == variables
        assert (arrived["GLOO_SOCKET_IFNAME"], arrived["OMP_NUM_THREADS"]) == ("eth0", "1")
        assert arrived["CLUSTER_TOKEN"] == "secret but sent"
        assert arrived["PYTHONPATH"].split(":")[0] == str(REPOSITORY)
        assert not SECRETS.keys() & arrived.keys()
    assert [record.host for record in read_ranks(tmp_path)] == list(NAMES)
    assert "MLFLOW_TRACKING_PASSWORD, WANDB_API_KEY; log in there" in done.stdout
    assert "secret" not in done.stdout
    assert stat.S_IMODE((tmp_path / "deepspeed_env").stat().st_mode) == 0o600
    (hosts.folder / "home/.deepspeed_env").unlink()


def test_an_exit_code_comes_back_over_ssh(hosts: TwoHosts, tmp_path: Path) -> None:
    done = hosts.run(start(hosts, tmp_path, f"code={EXIT_NO_PROGRESS}"), REPOSITORY, 600)
    assert done.returncode == EXIT_NO_PROGRESS, done.stdout


def test_a_signal_stops_the_ranks_of_both_hosts_through_the_stop_file(
    hosts: TwoHosts, tmp_path: Path
) -> None:
    process = hosts.start(start(hosts, tmp_path, "train"), REPOSITORY)
    wait_for_ranks(tmp_path)
    assert len(ranks_on(hosts)) >= 2
    send(hosts, signal.SIGTERM)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == EXIT_PREEMPTED, output
    assert ranks_on(hosts) == []


def test_p49_a_second_signal_ends_deaf_ranks_on_both_hosts(hosts: TwoHosts, tmp_path: Path) -> None:
    process = hosts.start(start(hosts, tmp_path, "deaf"), REPOSITORY)
    wait_for_ranks(tmp_path)
    send(hosts, signal.SIGTERM)
    time.sleep(1)
    assert len(ranks_on(hosts)) >= 2
    while process.poll() is None:  # two signals that come before either is seen are one
        with suppress(ValueError):  # it has ended
            send(hosts, signal.SIGTERM)
        time.sleep(1)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == EXIT_FAILED, output
    assert "ended 2 rank(s)" in output
    assert ranks_on(hosts) == []


def test_a_run_that_lives_on_another_host_is_not_started_a_second_time(
    hosts: TwoHosts, tmp_path: Path
) -> None:
    process = hosts.start(start(hosts, tmp_path, "train"), REPOSITORY)
    wait_for_ranks(tmp_path)
    hosts.end_all(0)  # the launching host loses everything
    process.communicate(timeout=600)
    done = hosts.run(start(hosts, tmp_path, "train"), REPOSITORY, 600)
    assert done.returncode == EXIT_BAD_INPUT, done.stdout
    [rank] = [record for record in read_ranks(tmp_path) if record.host == NAMES[1]]
    assert f"running already: pid {rank.pid} on beta (rank 1); stop it with" in done.stdout
