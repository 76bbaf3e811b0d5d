"""The curriculum lines of a resumed run."""

from pathlib import Path

from ds_pretrain.config.plan import load_plan
from ds_pretrain.core.state import Skip, SkipLedger
from ds_pretrain.training.preflight import check_data, format_skips, format_summary, open_inputs
from tests.scenario import make_run


def test_the_use_of_the_data_is_told_again_with_what_is_skipped(tmp_path: Path) -> None:
    plan = load_plan(make_run(tmp_path))
    sources = open_inputs(plan).sources
    assert list(format_skips(plan, sources, SkipLedger())) == []
    ledger = SkipLedger((Skip("main", 10, 40, "spike", 3, 1), Skip("main", 30, 50, "spike", 5, 2)))
    first, *rest = format_skips(plan, sources, ledger)
    assert first == "skipped    40 samples of main; without them the run's data is:"
    assert [line[: line.index(":")] for line in rest] == ["source     code", "source     text"]
    tokens = [int(line.split(" of the draws, ")[1].split()[0].replace(",", "")) for line in rest]
    assert sum(tokens) == (12 * 8 + 40) * 16


def test_a_cap_that_is_passed_because_of_skips_is_a_warning_with_step_and_source(tmp_path: Path) -> None:
    plan = load_plan(make_run(tmp_path), [f'sources.text={{ path = "{tmp_path}/text", max_epochs = 0.5 }}'])
    sources = open_inputs(plan).sources
    assert check_data(plan, sources) == []
    ledger = SkipLedger((Skip("main", 10, 160, "spike", 3, 1),))
    *_, last = format_skips(plan, sources, ledger)
    assert last.startswith(
        "warning    because of what is skipped, sources.text.max_epochs = 0.5 is passed at step "
    )
    assert " of 12 (phase main): " in last
    fewer = SkipLedger((Skip("main", 10, 11, "spike", 3, 1),))
    told = list(format_skips(plan, sources, fewer))
    assert told[0].startswith("skipped    1 sample of main;")
    assert not any(line.startswith("warning") for line in told)


def test_prompts_that_no_phase_has_room_for_are_refused_with_the_shortest_that_works(tmp_path: Path) -> None:
    asked = ["validation.retrieval=true"]
    plan = load_plan(make_run(tmp_path), asked)
    assert check_data(plan, open_inputs(plan).sources) == [
        f"{plan.run_path}: validation.retrieval = true hides keys in prompts of at least 48 tokens, and no "
        "phase has samples as long: phases.main.seq_len = 16; make one at least 48, or set "
        "validation.retrieval = false"
    ]
    for fine in ([], [*asked, "phases.0.seq_len=48", "batch.tokens=96"]):
        plan = load_plan(plan.run_path, fine)
        assert check_data(plan, open_inputs(plan).sources) == []


def test_a_phase_too_short_for_prompts_is_told_where_another_has_room(tmp_path: Path) -> None:
    run_file = make_run(tmp_path)
    long = (
        '[[phases]]\nname = "long"\nstart = "6 steps"\nseq_len = 64\nmixture = { text = 1.0 }\n[validation]'
    )
    run_file.write_text(run_file.read_text().replace("[validation]", f"{long}\nretrieval = true", 1))
    plan = load_plan(run_file)
    inputs = open_inputs(plan)
    assert check_data(plan, inputs.sources) == []
    told = "validation no key is asked for in phases.main.seq_len = 16: a prompt has at least 48 tokens"
    assert told in list(format_summary(plan, inputs, 1))
    plan = load_plan(run_file, ["validation.retrieval=false"])
    assert not any("no key" in line for line in format_summary(plan, inputs, 1))


def test_a_chunk_that_its_source_does_not_hold_is_refused_and_names_the_key(tmp_path: Path) -> None:
    chunk = f'sources.text={{ path = "{tmp_path}/text", chunk_tokens = 1_048_576 }}'
    plan = load_plan(make_run(tmp_path), [chunk])
    inputs = open_inputs(plan)
    assert check_data(plan, inputs.sources) == [
        f"{plan.run_path}: sources.text.chunk_tokens = 1,048,576: it has "
        f"{inputs.sources['text'].num_tokens:,} tokens, fewer than one chunk of 1,048,576 + 1; lower "
        "chunk_tokens or prepare more text"
    ]
