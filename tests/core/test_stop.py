"""The request to stop: by signal or by file, and what is left of it."""

import os
import signal
from pathlib import Path

import pytest

from ds_pretrain.core.distributed import World
from ds_pretrain.core.run_files import StopSignal

MAIN, OTHER = World(rank=0, size=2), World(rank=1, size=2)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("world", [MAIN, OTHER])
def test_a_signal_asks_the_rank_that_gets_it_and_interrupts_nothing(
    tmp_path: Path, number: int, world: World
) -> None:
    before = signal.getsignal(number)
    with StopSignal(tmp_path, world) as stop:
        assert not stop.is_asked()
        os.kill(os.getpid(), number)
        assert stop.is_asked()
        assert stop.is_asked()  # until the end
    assert signal.getsignal(number) is before


def test_a_stop_file_asks_rank_zero_alone_and_goes_with_the_start_that_it_was_for(tmp_path: Path) -> None:
    (tmp_path / "stop").touch()
    with StopSignal(tmp_path, OTHER) as stop:
        assert not stop.is_asked()
    with StopSignal(tmp_path, MAIN) as stop:
        assert stop.is_asked()
        assert (tmp_path / "stop").exists()
    assert not (tmp_path / "stop").exists()


def test_a_stop_file_that_came_too_late_does_not_stop_the_next_start(tmp_path: Path) -> None:
    with StopSignal(tmp_path, MAIN) as stop:
        assert not stop.is_asked()
        (tmp_path / "stop").touch()
    assert not (tmp_path / "stop").exists()


def test_a_start_that_never_came_to_train_leaves_the_stop_file(tmp_path: Path) -> None:
    """The folder may be another run's."""
    (tmp_path / "stop").touch()
    with StopSignal(tmp_path, MAIN):
        pass
    assert (tmp_path / "stop").exists()


def test_a_folder_that_cannot_be_is_left_to_the_message_about_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with StopSignal(tmp_path / "file" / "out", MAIN):
        pass
