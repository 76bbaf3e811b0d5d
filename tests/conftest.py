"""Settings of all tests: one thread per process, little garbage collection, and what was collected."""

import gc
import logging
import os
from collections.abc import Iterator

# Set before torch is imported, here and in every process that a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

DEFAULT_TIER = pytest.StashKey[set[str]]()  # what `make test` runs of what was collected, without the cases


@pytest.hookimpl(tryfirst=True)  # before -m and -k leave any out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    quick = [item.nodeid for item in items if item.get_closest_marker("slow") is None]
    config.stash[DEFAULT_TIER] = {node.removeprefix("tests/").partition("[")[0] for node in quick}


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # three thousand tests, torch and Transformers: garbage to no one


@pytest.fixture(autouse=True)
def _log_is_heard() -> Iterator[None]:
    """Undo what a command does to the log of its process: caplog hears what is logged in the next test."""
    yield
    logger = logging.getLogger("ds_pretrain")
    logger.handlers[:], logger.propagate = [], True
