"""JSON lines that keep everything, and JSON text read back as a type."""

import json
import math
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ds_pretrain.core.jsonl import JsonLines, read_as, read_metrics, select_latest_attempt


def step(step: int, attempt: int) -> dict[str, Any]:
    return {"event": "step", "attempt": attempt, "step": step}


def write_all(path: Path, *records: dict[str, Any]) -> None:
    lines = JsonLines(path)
    for record in records:
        lines.write(record)
    lines.close()


def test_every_record_comes_back_with_the_same_bits(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    values = {"event": "step", "step": 1, "loss": 0.1 + 0.2, "tiny": 5e-324, "name": "Zürich 数", "z": None}
    write_all(path, values)
    write_all(path, {"event": "stop", "where": Path("a/b"), "nested": {"list": [1.5, (2,)]}})
    assert list(read_metrics(path)) == [
        values,
        {"event": "stop", "where": "a/b", "nested": {"list": [1.5, [2]]}},
    ]


def test_a_record_is_in_the_file_before_write_returns(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "m.jsonl")
    lines.write({"step": 1})
    assert list(read_metrics(tmp_path / "m.jsonl")) == [{"step": 1}]
    assert lines.bytes_written == (tmp_path / "m.jsonl").stat().st_size
    lines.close()
    lines.close()


def test_non_finite_numbers_are_strict_json_on_disk_and_numbers_again_when_read(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write_all(path, {"a": math.nan, "losses": {"b": math.inf}, "c": [-math.inf]})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    assert json.loads(path.read_text(), parse_constant=refuse) == {
        "a": "nan",
        "losses": {"b": "inf"},
        "c": ["-inf"],
    }
    (record,) = read_metrics(path)
    assert math.isnan(record["a"])
    assert record["losses"] == {"b": math.inf}
    assert record["c"] == [-math.inf]


@pytest.mark.parametrize("torn", [b'{"step": 2, "lo', b"\x00\x00\x00", b'{"step": 2, "name": "\xc3', b"17"])
def test_a_torn_last_line_costs_that_record_alone(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "m.jsonl"
    write_all(path, {"step": 1})
    with path.open("ab") as file:
        file.write(torn)
    assert list(read_metrics(path)) == [{"step": 1}]
    write_all(path, {"step": 2}, {"step": 3})
    assert list(read_metrics(path)) == [{"step": 1}, {"step": 2}, {"step": 3}]


def test_a_line_torn_by_a_full_disk_costs_that_record_alone(tmp_path: Path) -> None:
    """A limit on the size of files stands for the full disk: the kernel writes a part, then refuses."""
    code = f"""
import resource, signal
from pathlib import Path
from ds_pretrain.core.jsonl import JsonLines
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
lines = JsonLines(Path({str(tmp_path / "m.jsonl")!r}))
lines.write({{"step": 1}})
resource.setrlimit(resource.RLIMIT_FSIZE, (20, resource.RLIM_INFINITY))
try:
    lines.write({{"step": 2, "text": "x" * 50}})
except OSError:
    print("refused")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
lines.write({{"step": 3}})
"""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    assert limit[1] == resource.RLIM_INFINITY, "this test needs to lower a limit and raise it again"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "refused\n"
    assert (tmp_path / "m.jsonl").read_bytes().count(b"\n") == 3  # the torn line was really there, and ended
    assert list(read_metrics(tmp_path / "m.jsonl")) == [{"step": 1}, {"step": 3}]


def test_p51_the_latest_attempt_supersedes_all_steps_from_where_it_starts_again() -> None:
    history = [
        {"event": "start", "step": 0, "attempt": 1},
        *(step(s, 1) for s in range(1, 11)),
        {"event": "validation", "step": 4, "attempt": 1, "losses": {"web": 1.0}},
        {"event": "validation", "step": 6, "attempt": 1, "losses": {"web": 1.5}},
        {"event": "validation", "step": 10, "attempt": 1, "losses": {"web": 2.0}},
        {"event": "resume", "step": 5, "attempt": 2},
        *(step(s, 2) for s in range(6, 8)),
        {"event": "warning", "attempt": 2},
    ]
    kept = select_latest_attempt(history)
    assert [(r["step"], r["attempt"]) for r in kept] == [
        (1, 1),
        (2, 1),
        (3, 1),
        (4, 1),
        (5, 1),
        (6, 2),
        (7, 2),
    ]
    assert [r["losses"]["web"] for r in select_latest_attempt(history, "validation")] == [1.0]
    twice = [*history, *(step(s, 3) for s in range(4, 10))]
    assert [r["attempt"] for r in select_latest_attempt(twice)] == [1, 1, 1, 3, 3, 3, 3, 3, 3]


def test_a_validation_repeated_after_a_resume_counts_once() -> None:
    history = [
        step(1, 1),
        step(2, 1),
        {"event": "validation", "step": 2, "attempt": 1, "losses": {"web": 1.0}},
    ]
    history.append({"event": "validation", "step": 2, "attempt": 2, "losses": {"web": 1.5}})
    assert [r["attempt"] for r in select_latest_attempt(history, "validation")] == [2]


@dataclass(frozen=True)
class Pair:
    numbers: tuple[float, ...]
    name: str | None = None


def test_json_text_is_read_as_a_type_with_the_same_bits() -> None:
    numbers = (0.1 + 0.2, 5e-324, 1.7976931348623157e308, 3.0)
    assert read_as(Pair, json.dumps({"numbers": numbers})) == Pair(numbers)
    assert read_as(Pair, b'{"numbers": [], "more": 1}', extra="ignore") == Pair(())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "Invalid JSON: EOF while parsing"),
        ("[" * 10_000, "Invalid JSON: recursion limit exceeded"),
        ('{"name": "a"}', "`numbers`: "),
        ('{"numbers": [1, true]}', "`numbers.1`: Input should be a valid number, found true"),
        ('{"numbers": [], "name": 3}', "`name`: Input should be a valid string, found 3"),
        ('{"numbers": [], "nam": "a"}', "`nam`: Unexpected keyword argument"),
    ],
)
def test_text_that_is_not_of_the_type_is_said_with_the_field_and_what_was_found(text: str, said: str) -> None:
    with pytest.raises(ValueError) as error:
        read_as(Pair, text)
    assert str(error.value).startswith(said)
