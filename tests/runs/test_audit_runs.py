"""An audit of runs that were really trained, on two ranks, and healed themselves."""

from pathlib import Path
from typing import Any

import pytest

from ds_pretrain.commands.cli import main
from ds_pretrain.core.jsonl import read_metrics
from tests.harness import Fault, record_run
from tests.ranks import run_ranks
from tests.runs.conftest import Trained
from tests.runs.unhealthy import BATCH, make_unhealthy_run


def _audit(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    code = main(["audit", *map(str, words)])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def _events(out: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in read_metrics(out / "metrics.jsonl") if record["event"] == kind]


def test_p55_what_a_healed_run_never_trained_is_exactly_what_its_ranks_never_read(
    healed_run: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks, run_file = healed_run
    assert [ended.code for ended in ranks] == [0, 0]
    out = run_file.parent / "out"
    code, said = _audit(capsys, run_file, "--all")
    assert code == 0, said
    assert "steps      40 trained, each exactly once: 1 to 40" in said
    assert "rollbacks  2 (replay, skip)" in said
    [_, rollback] = _events(out, "rollback")
    code, said = _audit(capsys, out, "--skipped")
    rows = [line.split("\t") for line in said.splitlines()[1:]]
    skipped = {(source, int(epoch), int(sample)) for _, _, _, source, epoch, sample in rows}
    read_last: dict[int, list[Any]] = ranks[0].samples  # of each step, as it was read the last time
    trained = {tuple(sample) for step in range(40) for sample in read_last[step]}
    assert len(trained) == 40 * BATCH
    assert not skipped & trained
    assert len(skipped) == rollback["skipped"]["num_samples"]
    # A step of before the skip, and the same step after it, as the ranks read them.
    shown = _audit(capsys, out, "--step", 22)[1]
    heads = [line for line in shown.splitlines() if line.startswith("--- ")]
    for head, (source, epoch, sample) in zip(heads, read_last[21], strict=True):
        assert f": {source}, epoch {epoch}, sample {sample}, document" in head
    assert "checksum   as recorded" in shown
    assert shown.count("0 skips in force, other samples") == 2


def test_an_update_that_was_dropped_is_counted_as_read_and_not_learned_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file = make_unhealthy_run(tmp_path, steps=8)
    ranks = run_ranks(record_run, 2, str(run_file), faults=[Fault("gradient", 5, rank=1)])
    assert [ended.code for ended in ranks] == [0, 0]
    code, said = _audit(capsys, run_file)
    assert code == 0, said
    assert "skipped    updates of step 5: 8 samples read, updates not applied" in said
    assert "untrained  8 samples: 0 skipped, 8 in skipped updates" in said
