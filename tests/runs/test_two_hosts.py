"""Training over two hosts, through the command that a user types."""

import sys
from pathlib import Path

from ds_pretrain.rank_files import read_exit, read_ranks
from tests.ranks import run_ranks
from tests.runs.golden import run_rank, trace
from tests.scenario import make_run
from tests.two_hosts import two_hosts

REPOSITORY = Path(__file__).parents[2]


def test_zero3_over_two_hosts_gives_the_losses_of_one_host(tmp_path: Path) -> None:
    run_file = make_run(tmp_path / "run")
    run_ranks(run_rank, 2, str(run_file), None, (f"out={tmp_path}/one",))
    out = tmp_path / "two"
    with two_hosts(tmp_path) as hosts:
        words = ["train", str(run_file), "--hostfile", str(hosts.hostfile), f"out={out}"]
        done = hosts.run([sys.executable, "-m", "ds_pretrain", *words], REPOSITORY, timeout=180)
    assert done.returncode == 0, done.stdout
    assert read_exit(out) == 0
    assert [record.host for record in read_ranks(out)] == list(hosts.names)
    assert len(trace(out)) == 12
    assert trace(out) == trace(tmp_path / "one")
