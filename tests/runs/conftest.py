"""Runs that several tests look at and none changes."""

from pathlib import Path
from typing import Any

import pytest

from tests.harness import record_run
from tests.ranks import run_ranks
from tests.runs.unhealthy import POISON, make_unhealthy_run

Trained = tuple[list[Any], Path]  # what each rank returned, and the run file


@pytest.fixture(scope="session")
def healthy_run(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The run that would be sick, without a fault."""
    run_file = make_unhealthy_run(tmp_path_factory.mktemp("healthy"))
    return run_ranks(record_run, 2, str(run_file)), run_file


@pytest.fixture(scope="session")
def healed_run(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The run that met bad data, went back, replayed, skipped them and came to its end."""
    run_file = make_unhealthy_run(tmp_path_factory.mktemp("healed"))
    return run_ranks(record_run, 2, str(run_file), faults=[POISON]), run_file
