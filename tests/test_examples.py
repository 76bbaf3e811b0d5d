"""The example run files are what a start takes, and the branch among them goes with its parent."""

from pathlib import Path

import numpy as np
import pytest

from ds_pretrain.commands.cli import main
from ds_pretrain.config.plan import load_plan
from ds_pretrain.data.indexed import IndexedWriter
from ds_pretrain.training.compatibility import compute_identity, find_past_changes

ROOT = Path(__file__).parents[1]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the examples in it, and text as `make demo` prepares it, of short and long documents."""
    for folder in ("examples", "ds_configs"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    data = tmp_path / "runs/demo/data"
    data.mkdir(parents=True)
    random = np.random.default_rng(0)
    for name, lengths in (("train", [900] * 400 + [9000] * 40), ("validation", [3000] * 10)):
        writer = IndexedWriter(data / name, 4096)
        writer.add([np.append(random.integers(1, 4096, length), 0) for length in lengths])
        writer.finish({"eos_id": 0})
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["curriculum", "cooldown", "demo"])
def test_an_example_is_found_to_be_in_order(
    place: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", f"examples/{name}.toml", "--world", "2"]) == 0
    said = capsys.readouterr().out
    assert "warning" not in said
    assert f"ok         examples/{name}.toml" in said


def test_the_curriculum_shows_what_a_run_file_can_say() -> None:
    run = load_plan(ROOT / "examples/curriculum.toml", _at_home("examples/llama_5m.json")).run
    assert [phase.name for phase in run.phases] == ["main", "long", "anneal"]
    assert run.phases[1].rope is not None
    assert run.batch.ramp is not None
    assert run.schedule.kind == "wsd"
    assert run.schedule.decay == "anneal"
    assert run.validation is not None


def test_the_cooldown_says_the_same_as_its_parent_up_to_where_it_begins() -> None:
    plans = [
        load_plan(ROOT / f"examples/{name}.toml", _at_home("examples/llama_5m.json"))
        for name in ("curriculum", "cooldown")
    ]
    parent, branch = (compute_identity(plan, {}) | {"name": "one"} for plan in plans)
    assert find_past_changes(parent, branch, 60) == {}
    assert find_past_changes(parent, branch, 61)
    assert plans[0].keep_every is not None


def _at_home(model: str) -> list[str]:
    return [f"model.config={ROOT / model}", f"deepspeed={ROOT}/ds_configs/cpu.json"]
