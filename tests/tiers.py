"""The two tiers of a parametrization: `make test` runs a few of its cases, `make test-slow` the others."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """All cases in their order, marked slow unless they are among `quick`."""
    listed = list(cases)
    assert all(case in listed for case in quick), "a quick case is one of the cases"
    return [
        case if case in quick else slow(*(case if isinstance(case, tuple) else (case,))) for case in listed
    ]


def slow(*values: Any, id: str | None = None) -> Any:
    """A case of the slow tier."""
    return pytest.param(*values, marks=pytest.mark.slow, id=id)
