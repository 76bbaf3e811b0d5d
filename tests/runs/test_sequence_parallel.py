"""A run whose long phase is shared by ranks: killed, resized and unshared, it is the run that it would be."""

import json
from pathlib import Path
from typing import Any

import pytest

from ds_pretrain.commands.cli import main
from ds_pretrain.core.jsonl import read_metrics
from tests.harness import Fault, record_run
from tests.ranks import KILLED, run_ranks
from tests.runs.results import trace
from tests.runs.unhealthy import make_unhealthy_run
from tests.scenario import LLAMA, deepspeed_json, make_run
from tests.tiers import slow

LONG, LAST = 6, 12
PHASE = f"""
[[phases]]
name = "long"
start = "{LONG} steps"
seq_len = 128
micro_batch_size = 1
activation_checkpointing = true
mixture = {{ text = 0.5, code = 0.5 }}
rope = {{ theta = 8e4 }}
"""


def _make(folder: Path, shared: int, stage: int = 3, dropout: float = 0.0) -> Path:
    """12 steps: 8 sequences of 32, then 2 of 128."""
    model = {**LLAMA, "attention_dropout": dropout}
    longer = {"seq_len = 16": "seq_len = 32", "tokens = 160": "tokens = 640\nretrieval = true"}
    options: dict[str, Any] = {"save_every": "1 steps", "model": model, "extra": PHASE, "replace": longer}
    run_file = make_run(folder, batch_tokens=256, **options)
    _share(run_file, shared, stage)
    return run_file


def _share(run_file: Path, shared: int, stage: int = 3) -> None:
    config = {**deepspeed_json(stage), "sequence_parallel_size": shared}
    run_file.with_name("deepspeed.json").write_text(json.dumps(config))


def _validations(out: Path) -> dict[int, dict[str, Any]]:
    records = read_metrics(out / "metrics.jsonl")
    return {r["step"]: r for r in records if r["event"] == "validation"}


@pytest.fixture(scope="module")
def unshared(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The run on one rank: its folder, and the samples of each step."""
    folder = tmp_path_factory.mktemp("unshared")
    [ended] = run_ranks(record_run, 1, str(_make(folder, 1)))
    return folder, ended.samples


def _same_run(out: Path, unshared: Any, rel: float) -> None:
    """It read what the run on one rank did, and learned it."""
    there, here = trace(unshared[0] / "out"), trace(out)
    assert [record["step"] for record in here] == list(range(1, LAST + 1))
    for key in ("batch_checksum", "learning_rate", "tokens", "samples", "phase", "num_valid_tokens"):
        assert [record[key] for record in here] == [record[key] for record in there], key
    for key in ("loss", "z_loss", "grad_norm"):
        assert [record[key] for record in here] == pytest.approx([r[key] for r in there], rel=rel), key


@pytest.mark.parametrize(("num_ranks", "shared", "stage"), [(2, 2, 3), slow(4, 2, 1)])
def test_a_shared_run_reads_learns_and_measures_as_an_unshared_one(
    unshared: Any, tmp_path: Path, num_ranks: int, shared: int, stage: int
) -> None:
    ranks = run_ranks(record_run, num_ranks, str(_make(tmp_path, shared, stage)))
    assert all(ended.samples == unshared[1] for ended in ranks)
    _same_run(tmp_path / "out", unshared, 1e-5)
    here, there = _validations(tmp_path / "out"), _validations(unshared[0] / "out")
    assert list(here) == list(there) == [4, 8, 12]
    for step, record in here.items():
        for key in ("losses", "by_position", "retrieval"):
            found, expected = _flat(record.get(key)), _flat(there[step].get(key))
            assert found == pytest.approx(expected, rel=1e-5, abs=1e-5), (step, key)
    assert len(_flat(here[12]["by_position"])) == 8  # up to 1, 2, 4, ..., 128
    assert len(_flat(here[12]["retrieval"])) == 10  # two lengths, five depths
    assert main(["audit", str(tmp_path / "out"), "--all"]) == 0


def _flat(tree: Any, name: str = "") -> dict[str, float]:
    if not isinstance(tree, dict):
        return {} if tree is None else {name: tree}
    return {path: x for key, part in tree.items() for path, x in _flat(part, f"{name}/{key}").items()}


def test_killed_in_both_phases_a_shared_run_is_bitwise_the_one_that_was_not(tmp_path: Path) -> None:
    """With dropout: each rank's stream is its own."""
    straight, cut = (_make(tmp_path / name, 2, dropout=0.1) for name in ("straight", "cut"))
    whole = run_ranks(record_run, 2, str(straight))
    for step in (LONG - 2, LONG + 3):
        assert run_ranks(record_run, 2, str(cut), kill_after=step, allow_kill=True) == [KILLED] * 2
    ended = run_ranks(record_run, 2, str(cut))
    assert [rank.digest for rank in ended] == [rank.digest for rank in whole]
    assert trace(tmp_path / "cut" / "out") == trace(tmp_path / "straight" / "out")
    probes = [r["probe"] for r in read_metrics(tmp_path / "cut" / "out" / "metrics.jsonl") if "probe" in r]
    assert len(probes) == 2
    assert all("matches" in probe for probe in probes)


@pytest.mark.slow
def test_a_save_on_request_has_a_loss_that_a_start_which_does_not_share_finds_again(tmp_path: Path) -> None:
    run_file = _make(tmp_path, 2)
    run_ranks(record_run, 2, str(run_file), stop_after=LONG + 1)  # no step follows whose loss could be taken
    _share(run_file, 1)
    run_ranks(record_run, 1, str(run_file))
    [probe] = [r["probe"] for r in read_metrics(tmp_path / "out" / "metrics.jsonl") if "probe" in r]
    assert f"at step {LONG + 1}, matches" in probe


@pytest.mark.slow
def test_the_next_start_may_share_among_others_or_not_at_all(unshared: Any, tmp_path: Path) -> None:
    run_file = _make(tmp_path, 1)
    for num_ranks, shared, until in ((2, 1, 4), (2, 2, 7), (2, 1, 8), (1, 1, 9), (4, 4, 10), (4, 2, None)):
        _share(run_file, shared)
        ended = run_ranks(record_run, num_ranks, str(run_file), kill_after=until, allow_kill=True)
        assert (ended == [KILLED] * num_ranks) is (until is not None)
    assert ended[0].samples.items() <= unshared[1].items()
    _same_run(tmp_path / "out", unshared, 2e-4)
    probes = [r["probe"] for r in read_metrics(tmp_path / "out" / "metrics.jsonl") if "probe" in r]
    assert len(probes) == 5
    assert all("matches" in probe for probe in probes)
    assert main(["audit", str(tmp_path / "out"), "--all"]) == 0


@pytest.mark.slow
def test_a_fault_of_one_rank_is_pinned_on_those_that_share_its_sequences(tmp_path: Path) -> None:
    config = {**deepspeed_json(), "sequence_parallel_size": 2}
    run_file = make_unhealthy_run(tmp_path, deepspeed=config)
    ranks = run_ranks(record_run, 4, str(run_file), faults=[Fault("rate", 22), Fault("batch", 22, rank=2)])
    assert [ended.code for ended in ranks] == [0] * 4
    records = list(read_metrics(tmp_path / "out" / "metrics.jsonl"))
    [compared] = [r for r in records if r["event"] == "replay_compared"]
    assert (compared["finding"], compared["first_difference"]) == ("passing_fault", 22)
    assert compared["ranks"] == [2, 3]
    [told] = [r for r in records if r["event"] == "rollback"]
    assert told["sequence_parallel_size"] == 2
    assert all(a == b and c == d for a, b, c, d in told["rank_losses"].values())


@pytest.mark.slow
def test_with_dropout_the_loss_of_a_checkpoint_is_not_compared_by_ranks_that_share_otherwise(
    tmp_path: Path,
) -> None:
    run_file = _make(tmp_path, 2, dropout=0.1)
    assert run_ranks(record_run, 2, str(run_file), kill_after=LAST - 1, allow_kill=True) == [KILLED] * 2
    _share(run_file, 1)
    run_ranks(record_run, 1, str(run_file))  # which reads the same rows
    [probe] = [r["probe"] for r in read_metrics(tmp_path / "out" / "metrics.jsonl") if "probe" in r]
    assert probe.startswith("probe loss not compared: another world size, and the model has dropout")
