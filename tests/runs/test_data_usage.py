"""The data events of a real run: at every validation, at each phase's end and at its own."""

from pathlib import Path
from typing import Any

from ds_pretrain.core.jsonl import read_metrics
from tests.harness import start
from tests.ranks import run_ranks
from tests.scenario import make_run

LONG = '[[phases]]\nname = "long"\nstart = "5 steps"\nseq_len = 32\nmixture = { text = 1.0 }\n[validation]'


def _told(folder: Path, *overrides: str) -> tuple[list[dict[str, Any]], str]:
    """The events "data" of a run of 8 steps in two phases, and what it printed."""
    run_file = make_run(folder, steps=8)
    run_file.write_text(run_file.read_text().replace("[validation]", LONG))
    [ended] = run_ranks(start, 1, str(run_file), overrides)
    assert ended.code == 0, ended.stderr
    records = read_metrics(folder / "out" / "metrics.jsonl")
    return [record for record in records if record["event"] == "data"], ended.stdout


def test_a_run_without_validation_tells_what_it_read_at_the_end_of_each_phase_and_of_the_run(
    tmp_path: Path,
) -> None:
    told, printed = _told(tmp_path, "validation=none")
    assert [(record["step"], record["phase"]) for record in told] == [(5, "main"), (8, "long")]
    main, end = (record["sources"] for record in told)
    assert main["text"]["tokens"] + main["code"]["tokens"] == 5 * 128
    assert main["text"]["share"] + main["code"]["share"] == 1
    assert round(main["text"]["weight"], 2) == 0.7
    assert end["text"]["tokens"] == main["text"]["tokens"] + 3 * 128
    assert end["code"] == main["code"] | {"share": None, "weight": None}
    assert "data at step 5  main: " in printed
    assert " (100.0% for 100.0%)" in printed


def test_a_run_with_validation_tells_it_at_each_one_too(tmp_path: Path) -> None:
    told, _ = _told(tmp_path)
    assert [record["step"] for record in told] == [4, 5, 8]
