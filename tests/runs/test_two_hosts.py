"""Training over two hosts, through the command that a user types."""

import shutil
import sys
from pathlib import Path

import pytest

from ds_pretrain.core.errors import EXIT_PREEMPTED
from ds_pretrain.core.run_files import read_exit, read_ranks
from tests.harness import record_run
from tests.ranks import run_ranks
from tests.runs.results import trace
from tests.scenario import make_run
from tests.two_hosts import two_hosts

REPOSITORY = Path(__file__).parents[2]


def test_zero3_over_two_hosts_gives_the_losses_of_one_host(tmp_path: Path) -> None:
    run_file = make_run(tmp_path / "run")
    run_ranks(record_run, 2, str(run_file), (f"out={tmp_path}/one",))
    out = tmp_path / "two"
    with two_hosts(tmp_path) as hosts:
        words = ["train", str(run_file), "--hostfile", str(hosts.hostfile), f"out={out}"]
        done = hosts.run([sys.executable, "-m", "ds_pretrain", *words], REPOSITORY, timeout=600)
    assert done.returncode == 0, done.stdout
    assert read_exit(out) == 0
    assert [record.host for record in read_ranks(out)] == list(hosts.names)
    assert len(trace(out)) == 12
    assert trace(out) == trace(tmp_path / "one")


@pytest.mark.slow
def test_p22_a_host_that_lost_its_disk_fetches_its_shards_and_the_run_is_bitwise_the_uninterrupted_one(
    tmp_path: Path,
) -> None:
    """Each host saves to a disk of its own; the copies in the run directory bring them together."""
    run_file = make_run(tmp_path / "run")
    run_ranks(record_run, 2, str(run_file), (f"out={tmp_path}/one",))
    out = tmp_path / "two"
    with two_hosts(tmp_path) as hosts:
        words = ["train", str(run_file), "--hostfile", str(hosts.hostfile), f"out={out}"]
        words += [f"checkpoint.local_dir={hosts.disk}"]
        command = [sys.executable, "-m", "ds_pretrain", *words]
        stopped = hosts.run([*command, "--stop-after", "6"], REPOSITORY, timeout=600)
        assert stopped.returncode == EXIT_PREEMPTED, stopped.stdout
        [root] = hosts.disk_of(1).iterdir()
        mine = {path.name for path in (root / "step_000000006").rglob("*_states.pt")}
        assert {name[: len("zero_pp_rank_1")] for name in mine} == {"zero_pp_rank_1"}
        shutil.rmtree(root)
        done = hosts.run(command, REPOSITORY, timeout=600)
    assert done.returncode == 0, done.stdout
    assert "it is not on beta" in done.stdout
    assert "resume     step 6/12 from " in done.stdout
    assert trace(out) == trace(tmp_path / "one")
    assert (out / "checkpoints" / "step_000000012" / "manifest.json").exists()
