"""Work of one rank or of each: its result, or one error, on every rank."""

from pathlib import Path

import pytest

from ds_pretrain.core.distributed import (
    World,
    _Outcome,
    _unwrap,
    compute_partition,
    run_on_each_rank,
    run_on_main,
)
from ds_pretrain.core.errors import CannotSave, InputError, RunError
from tests.ranks import run_ranks


def test_shares_are_equal_and_the_last_ones_are_padded() -> None:
    assert [tuple(compute_partition(10, rank, 4)) for rank in range(4)] == [
        (0, 3, 3),
        (3, 3, 3),
        (6, 3, 3),
        (9, 1, 3),
    ]
    assert [tuple(compute_partition(2, rank, 4)) for rank in range(4)] == [
        (0, 1, 1),
        (1, 1, 1),
        (2, 0, 1),
        (2, 0, 1),
    ]
    assert tuple(compute_partition(8, 1, 2)) == (4, 4, 4)


def _raise(error: Exception | None) -> str:
    if error is not None:
        raise error
    return "fine"


def _outcome(collective: object, world: World, error: Exception | None) -> tuple[str, str, bool]:
    try:
        value = collective(world, lambda: _raise(error))  # type: ignore[operator]
    except RunError as met:
        return type(met).__name__, str(met), met.agreed
    return "ok", str(value), False


def _work(world: World) -> list[tuple[str, str, bool]]:
    mine = world.rank == 0
    on_one = [
        _outcome(run_on_main, world, error if mine else AssertionError("not called"))
        for error in (None, InputError(["a", "b"]), CannotSave("full"), KeyError("x"), OSError(5, "io"))
    ]
    on_each = [
        _outcome(run_on_each_rank, world, None),
        _outcome(run_on_each_rank, world, InputError("no file")),
        _outcome(run_on_each_rank, world, InputError("no file") if mine else KeyError("x")),
        _outcome(run_on_each_rank, world, None if mine else ZeroDivisionError("by 0")),
    ]
    return on_one + on_each


def test_a_failure_of_any_kind_on_one_rank_is_one_error_on_every_rank(tmp_path: Path) -> None:
    first, second = run_ranks(_work, 2)
    assert first == second
    assert first == [
        ("ok", "fine", False),
        ("InputError", "2 problems:\n  - a\n  - b", True),
        ("CannotSave", "full", True),
        ("RunError", "KeyError: 'x'", True),
        ("RunError", "[Errno 5] io", True),
        ("ok", "['fine', 'fine']", False),
        ("InputError", "no file", True),
        ("RunError", "no file; rank 1: KeyError: 'x'", True),
        ("RunError", "rank 1: ZeroDivisionError: by 0", True),
    ]


def test_one_rank_alone_gets_its_own_error() -> None:
    with pytest.raises(CannotSave, match="full"):
        run_on_each_rank(World(), lambda: _raise(CannotSave("full")))


def test_ranks_that_fail_by_the_thousand_are_told_in_a_few() -> None:
    with pytest.raises(RunError, match=r"^rank 0: no disk 0; .*; rank 7: no disk 7; 992 more like these$"):
        _unwrap([_Outcome(problems=(f"no disk {rank}",)) for rank in range(1000)])
