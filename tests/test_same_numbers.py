"""The proof that a refactoring changed no numbers sees each kind of change, and that nothing was compared."""

import importlib
import json
import math
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SHARD = "checkpoints/step_{step:09}/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
STEP = {"event": "step", "attempt": 1, "phase": "main", "loss": 8.25, "z_loss": None, "tokens": 2048}
SHOWN = """\
step       7 of attempt 1: 2 samples on 2 ranks, 0 skips in force
--- rank 0, draw 96: stdlib, epoch 0, sample 8874, document 432
x = 1 # the text of it
--- rank 1, draw 97: stdlib, epoch 0, sample {sample}, documents 396, 397
"""


@pytest.fixture
def run_numbers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("run_numbers")


@pytest.fixture
def same_numbers(run_numbers: ModuleType) -> ModuleType:
    return importlib.import_module("same_numbers")


def metrics(*records: dict[str, Any]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def steps(last: int, **changed: Any) -> list[dict[str, Any]]:
    """Steps up to the last, which has the changed fields."""
    records: list[dict[str, Any]] = [STEP | {"step": step, "loss": 8 / step} for step in range(1, last + 1)]
    records[-1] |= changed
    return records


def compared(run_numbers: ModuleType, kind: str, base: str, now: str, **renamed: str) -> Any:
    read = run_numbers.read_records
    first, second = (
        run_numbers.of_records(read(text, names)) for text, names in ((base, renamed), (now, {}))
    )
    return run_numbers.compare(kind, first[kind], second[kind])


def test_the_same_metrics_are_equal_whatever_the_clock_said(run_numbers: ModuleType) -> None:
    first = metrics(*steps(3, step_seconds=0.5, time=1.0, mfu=0.25, tokens_per_second=10.0))
    second = metrics(*steps(3, step_seconds=0.75, time=2.0, mfu=0.5, tokens_per_second=20.0))
    found = compared(run_numbers, "steps", first, second)
    assert (found.num_compared, found.num_different) == (3 * 7, 0)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"loss": math.nextafter(8 / 3, 3)}, "loss: 2.6666666666666665 in base, 2.666666666666667 now"),
        ({"loss": "nan"}, "loss: 2.6666666666666665 in base, nan now"),
        ({"z_loss": 0.5}, "z_loss: null in base, 0.5 now"),
        ({"tokens": "2048"}, "tokens: only in base: 2048"),
        ({"phase": "long"}, "phase: main in base, long now"),
        ({"samples": 8}, "samples: only in now: 8"),
    ],
)
def test_a_changed_field_of_one_step_is_named(
    run_numbers: ModuleType, changed: dict[str, Any], words: str
) -> None:
    found = compared(run_numbers, "steps", metrics(*steps(3)), metrics(*steps(3, **changed)))
    assert (found.num_different, found.named) == (1, (f"step at step 3, take 1: {words}",))


def test_a_missing_step_is_a_difference_and_one_taken_again_too(run_numbers: ModuleType) -> None:
    assert compared(run_numbers, "steps", metrics(*steps(3)), metrics(*steps(2))).num_different == 7
    again = compared(run_numbers, "steps", metrics(*steps(3)), metrics(*steps(3), *steps(1)))
    assert again.num_different == 7
    assert again.named[0].startswith("step at step 1, take 2: event: only in now")


def test_events_and_validations_are_compared_but_for_their_messages(run_numbers: ModuleType) -> None:
    event = {"event": "rollback", "step": 73, "to_step": 65, "response": "replay", "message": "loss 5"}
    losses = {"event": "validation", "step": 6, "losses": {"held_out": 9.5}}
    worded, elsewhere, other = ({"message": "6"}, {"to_step": 60}, {"response": "skip"})
    for more, num_different in ((worded, 0), (elsewhere, 1), (other, 1)):
        found = compared(run_numbers, "other events", metrics(event), metrics(event | more))
        assert found.num_different == num_different
    now = losses | {"losses": {"held_out": 9.25}}
    found = compared(run_numbers, "validation losses", metrics(losses), metrics(now))
    assert found.named == ("validation at step 6, take 1: losses.held_out: 9.5 in base, 9.25 now",)


def test_a_renamed_field_is_followed(run_numbers: ModuleType) -> None:
    now = metrics(*steps(2)).replace('"loss"', '"cross_entropy"')
    assert compared(run_numbers, "steps", metrics(*steps(2)), now).num_different == 4
    assert compared(run_numbers, "steps", metrics(*steps(2)), now, loss="cross_entropy").num_different == 0


def test_a_changed_sample_id_is_named(run_numbers: ModuleType) -> None:
    base, now = (run_numbers.of_shown_step(7, SHOWN.format(sample=sample)) for sample in (7200, 7201))
    found = run_numbers.compare("sample ids", base, now)
    assert (found.num_compared, found.num_different) == (10, 1)
    assert found.named == ("step 7, its sample 2: sample: 7200 in base, 7201 now",)


def test_audit_counts_and_skipped_samples_are_read(run_numbers: ModuleType) -> None:
    counts = run_numbers.of_audit("samples    1,792 trained, each exactly once\nok         /tmp/7/run\n")
    assert counts == {"samples line 1, number 1": "1792"}
    table = "skip\tphase\tdraw\tsource\tepoch\tsample\n1\tmain\t1088\tstdlib\t0\t51570\n"
    assert list(run_numbers.of_skipped(table).values()) == ["1", "1088", "0", "51570"]


def save(out: Path, step: int, masters: list[float], rank: int = 0) -> None:
    """An optimizer shard as DeepSpeed lays it out, with an object that is not of torch."""
    path = out / SHARD.format(step=step, rank=rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    moments = {"step": torch.tensor(2.0), "exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3)}
    state = {"optimizer_state_dict": {"state": {0: moments}}, "loss_scaler": Fraction(1, 2)}
    torch.save({"optimizer_state_dict": state | {"fp32_flat_groups": [torch.tensor(masters)]}}, path)


@pytest.mark.parametrize(
    ("masters", "num_different"), [([1.0, 0.0, 3.0], 0), ([1.0, -0.0, 3.0000002], 2), ([1.0, 0.0], 3)]
)
def test_a_changed_master_of_the_newest_checkpoint_is_counted(
    run_numbers: ModuleType, tmp_path: Path, masters: list[float], num_different: int
) -> None:
    save(tmp_path / "base", 2, [1.0, 0.0, 3.0])
    save(tmp_path / "now", 2, masters)
    save(tmp_path / "now", 1, [9.0, 9.0, 9.0])
    (base, num_ranks), (now, _) = (
        run_numbers.of_last_checkpoint(tmp_path / name) for name in ("base", "now")
    )
    assert num_ranks == 1
    found = run_numbers.compare("fp32 masters", base["fp32 masters"], now["fp32 masters"])
    assert (found.num_compared, found.num_different) == (3, num_different)
    assert len(found.named) == (num_different > 0)
    assert run_numbers.compare("Adam moments", base["Adam moments"], now["Adam moments"]).num_compared == 6


def test_a_rank_whose_shard_is_missing_is_a_difference(run_numbers: ModuleType, tmp_path: Path) -> None:
    for name, ranks in (("base", (0, 1)), ("now", (0,))):
        for rank in ranks:
            save(tmp_path / name, 2, [1.0, 2.0], rank)
    (base, _), (now, num_ranks) = (
        run_numbers.of_last_checkpoint(tmp_path / name) for name in ("base", "now")
    )
    found = run_numbers.compare("fp32 masters", base["fp32 masters"], now["fp32 masters"])
    assert (num_ranks, found.num_compared, found.num_different) == (1, 2, 2)


def test_a_comparison_of_nothing_misses_the_bar(
    same_numbers: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    [demo] = [example for example in same_numbers.EXAMPLES if example.name == "demo"]
    num_different, missing = same_numbers.report(demo, {}, {})
    assert num_different == 0
    assert len(missing) == len(demo.kinds)
    assert "demo: 0 fp32 masters compared, expected 5,048,832 or more" in missing
    assert "0 compared  0 different" in capsys.readouterr().out
    lost = same_numbers.missing_records([{"event": "step", "step": "1"}], demo)
    assert lost[0] == "23 of 24 steps are not recorded, the first 2"
    assert "0 `resume` records, expected 1 or more" in lost


def test_every_example_can_be_shortened_and_one_that_cannot_is_told(same_numbers: ModuleType) -> None:
    for example in same_numbers.EXAMPLES:
        text = (BENCHMARKS.parent / example.run_file).read_text()
        assert f'"{example.last_step} steps"' in same_numbers.shortened(text, example.durations)
    with pytest.raises(ValueError, match="it has no 50 steps"):
        same_numbers.shortened('length = "60 steps"', {"50 steps": "24 steps", "60 steps": "30 steps"})


def test_nothing_of_the_trainer_is_imported_to_compare() -> None:
    code = "import same_numbers, sys; print({'ds_pretrain', 'deepspeed'} & set(sys.modules), end='')"
    done = subprocess.run([sys.executable, "-c", code], cwd=BENCHMARKS, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("set()", "")
