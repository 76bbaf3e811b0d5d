"""The multi-rank harness itself: it must report what ranks do, above all when they fail."""

import os
import signal
import time

import pytest

from ds_pretrain.core.distributed import World, barrier, broadcast_from_main, gather_objects, gather_rows
from tests.ranks import KILLED, RankFailure, run_ranks


def _collectives(world: World) -> tuple[list[list[float]], list[str], str]:
    barrier(world)
    rows = gather_rows(world, [world.rank, 0.1 * world.rank])
    return (
        rows.tolist(),
        gather_objects(world, f"r{world.rank}"),
        broadcast_from_main(world, f"from {world.rank}"),
    )


def _raise_on_rank_1(world: World) -> None:
    if world.rank == 1:
        raise ValueError("the reason")


def _die_on_rank_1(world: World) -> None:
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(30)


def test_every_rank_gets_every_row_in_rank_order() -> None:
    for rows, names, main in run_ranks(_collectives, 3):
        assert rows == [[0.0, 0.0], [1.0, 0.1], [2.0, 0.2]]
        assert names == ["r0", "r1", "r2"]
        assert main == "from 0"


def test_a_rank_that_raises_fails_the_test_with_its_reason() -> None:
    with pytest.raises(RankFailure, match="the reason"):
        run_ranks(_raise_on_rank_1, 2)


def test_a_killed_rank_takes_the_others_with_it() -> None:
    assert run_ranks(_die_on_rank_1, 2, allow_kill=True) == [KILLED, KILLED]
    with pytest.raises(RankFailure, match="-9"):
        run_ranks(_die_on_rank_1, 2)
