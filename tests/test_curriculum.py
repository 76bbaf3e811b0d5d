"""What is said of the curriculum of a run that goes on."""

from pathlib import Path

from ds_pretrain.curriculum import data_problems, skipped_lines
from ds_pretrain.plan import load_plan
from ds_pretrain.preflight import open_inputs
from ds_pretrain.state import Skip, SkipLedger
from tests.scenario import make_run


def test_the_use_of_the_data_is_told_again_with_what_is_skipped(tmp_path: Path) -> None:
    plan = load_plan(make_run(tmp_path))
    sources = open_inputs(plan).sources
    assert list(skipped_lines(plan, sources, SkipLedger())) == []
    ledger = SkipLedger((Skip("main", 10, 40, "spike", 3, 1), Skip("main", 30, 50, "spike", 5, 2)))
    first, *rest = skipped_lines(plan, sources, ledger)
    assert first == "skipped    40 samples of main; with these left out the data of the run is:"
    assert [line[: line.index(":")] for line in rest] == ["source     code", "source     text"]
    tokens = [int(line.split(" of the draws, ")[1].split()[0].replace(",", "")) for line in rest]
    assert sum(tokens) == (12 * 8 + 40) * 16


def test_a_cap_that_is_passed_because_of_skips_is_a_warning_with_step_and_source(tmp_path: Path) -> None:
    plan = load_plan(make_run(tmp_path), [f'sources.text={{ path = "{tmp_path}/text", max_epochs = 0.5 }}'])
    sources = open_inputs(plan).sources
    assert data_problems(plan, sources) == []
    ledger = SkipLedger((Skip("main", 10, 160, "spike", 3, 1),))
    *_, last = skipped_lines(plan, sources, ledger)
    assert last.startswith(
        "warning    because of what is skipped, sources.text.max_epochs = 0.5 is passed at step "
    )
    assert " of 12 (phase main): " in last
    fewer = SkipLedger((Skip("main", 10, 11, "spike", 3, 1),))
    told = list(skipped_lines(plan, sources, fewer))
    assert told[0].startswith("skipped    1 sample of main;")
    assert not any(line.startswith("warning") for line in told)
