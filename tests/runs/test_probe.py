"""A loss is stored with each checkpoint, and a restored model has to have it again."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from ds_pretrain.checkpoint.manifest import list_published, parse_manifest
from ds_pretrain.core.distributed import World
from ds_pretrain.core.errors import EXIT_BAD_INPUT, EXIT_FINISHED, EXIT_PREEMPTED
from ds_pretrain.core.jsonl import read_metrics
from ds_pretrain.engine.engine import ZeroEngine
from tests.harness import Record, Stop, record_run, start
from tests.ranks import run_ranks
from tests.runs.results import copied
from tests.scenario import LLAMA, deepspeed_json, make_run
from tests.tiers import slow

PLAIN = {**LLAMA, "attention_dropout": 0.0}


def _probes(out: Path) -> dict[int, Any]:
    folders = list_published(out / "checkpoints")
    manifests = [parse_manifest((folder / "manifest.json").read_text()) for folder in folders]
    return {manifest.step: manifest.probe for manifest in manifests}


def _said(out: Path) -> str:
    return str([r for r in read_metrics(out / "metrics.jsonl") if r["event"] == "resume"][-1]["probe"])


@pytest.mark.parametrize("stage", [slow(1), 3])
def test_p16_every_checkpoint_has_a_probe_and_a_resumed_run_has_its_loss(tmp_path: Path, stage: int) -> None:
    """Of the step after it, or, where none comes, of the batch just trained on; with dropout, bit for bit."""
    run_file = make_run(tmp_path, steps=6, save_every="2 steps", deepspeed=deepspeed_json(stage))
    assert [e.code for e in run_ranks(start, 2, str(run_file), (), Stop("file", 0, 4))] == [
        EXIT_PREEMPTED
    ] * 2
    probes = _probes(tmp_path / "out")
    assert {step: probe.step for step, probe in probes.items()} == {1: 1, 2: 2, 4: 4, 5: 4}

    again = run_ranks(start, 2, str(run_file))
    assert [ended.code for ended in again] == [EXIT_FINISHED] * 2
    assert "at step 5, matches)" in again[0].stdout
    assert (
        f"resume     step 5/6 from {tmp_path}/out/checkpoints/step_000000005 (probe loss "
        f"{probes[5].loss:.6f} " in again[0].stdout
    )
    assert _probes(tmp_path / "out")[6].step == 5


def test_p16_the_probe_of_training_is_the_loss_of_the_restored_model_to_the_last_bit(tmp_path: Path) -> None:
    run_file = make_run(tmp_path, steps=6, save_every="2 steps")
    run_ranks(record_run, 2, str(run_file), kill_after=6, allow_kill=True)
    newest = max(_probes(tmp_path / "out"))
    assert newest in (2, 4)
    losses = run_ranks(_restored_loss, 2, str(run_file))
    assert losses == [_probes(tmp_path / "out")[newest].loss] * 2


def _restored_loss(world: World, run_file: str) -> float:
    from ds_pretrain.training import resume

    losses: list[float] = []
    mean_loss = resume._compute_mean_loss

    def kept(*args: Any) -> Any:
        loss, checksum = mean_loss(*args)
        losses.append(loss)
        return loss, checksum

    patch = pytest.MonkeyPatch()
    patch.setattr(resume, "_compute_mean_loss", kept)
    start(world, run_file)
    patch.undo()
    return losses[0]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on two ranks that was stopped after step 3 of 5."""
    run_file = make_run(tmp_path_factory.mktemp("stopped"), steps=5, save_every="2 steps")
    run_ranks(start, 2, str(run_file), (), Stop("file", 0, 2))
    return run_file.parent


@pytest.mark.parametrize("num_ranks", [1, slow(4)])
def test_p16_the_probe_holds_on_another_number_of_ranks(tmp_path: Path, num_ranks: int) -> None:
    options: dict[str, Any] = {"steps": 5, "save_every": "2 steps", "model": PLAIN, "micro_batch_size": 1}
    run_file = make_run(tmp_path, **options)
    run_ranks(start, 2, str(run_file), (), Stop("file", 0, 2))
    ranks = run_ranks(start, num_ranks, str(run_file), ("batch.micro_batch_size=2",))
    assert [ended.code for ended in ranks] == [EXIT_FINISHED] * num_ranks
    assert "at step 3, matches)" in ranks[0].stdout


def test_dropout_on_other_ranks_is_not_compared_and_said(stopped: Path, tmp_path: Path) -> None:
    run_file = copied(stopped, tmp_path)
    [ended] = run_ranks(start, 1, str(run_file))
    assert ended.code == EXIT_FINISHED
    assert "not compared: another world size, and the model has dropout (attention_dropout = 0.1)" in (
        ended.stdout
    )


def _start_with_another_model(world: World, run_file: str, overrides: tuple[str, ...]) -> Record:
    """The tensors are right, and what is computed with them is not."""
    patch = pytest.MonkeyPatch()
    logits = ZeroEngine.logits

    def scaled(self: ZeroEngine, *inputs: Tensor | None) -> Tensor:
        return logits(self, *inputs) * 1.01

    patch.setattr(ZeroEngine, "logits", scaled)
    ended = start(world, run_file, overrides)
    patch.undo()
    return ended


def test_p16_a_model_that_computes_something_else_is_stopped_before_its_first_step(
    stopped: Path, tmp_path: Path
) -> None:
    run_file = copied(stopped, tmp_path)
    steps = len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines())
    ranks = run_ranks(_start_with_another_model, 2, str(run_file), ())
    assert [ended.code for ended in ranks] == [EXIT_BAD_INPUT] * 2
    assert "on the first micro-batches of step 3, and had" in ranks[0].stderr
    assert "but they compute something else" in ranks[0].stderr
    assert ranks[1].stderr == ""
    assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) == steps

    ranks = run_ranks(_start_with_another_model, 2, str(run_file), ('accept_changes=["probe"]',))
    assert [ended.code for ended in ranks] == [EXIT_FINISHED] * 2
    assert 'accepted, as accept_changes = ["probe"] says' in _said(tmp_path / "out")


def test_a_checkpoint_of_before_there_were_probes_is_resumed(tmp_path: Path) -> None:
    run_file = make_run(tmp_path, steps=5, save_every="2 steps")
    run_ranks(start, 1, str(run_file), (), Stop("file", 0, 2))
    path = tmp_path / "out" / "checkpoints" / "step_000000003" / "manifest.json"
    from ds_pretrain.checkpoint.manifest import seal

    fields = json.loads(path.read_text())
    del fields["probe"], fields["sha256"]
    path.write_text(seal(fields))
    [ended] = run_ranks(start, 1, str(run_file))
    assert ended.code == EXIT_FINISHED
    assert "no probe loss in the checkpoint" in ended.stdout


LONG = """
[[phases]]
name = "long"
start = "4 steps"
seq_len = 32
micro_batch_size = 1
mixture = { text = 1.0 }
rope = { theta = 5e4 }
"""
SAME = "at step 5, matches"
OTHER_POSITIONS = "it is of step 5, in phase {}, whose rope changed"
OTHER_BATCH = "probe loss not compared: it is of step 5, which now reads fewer sequences"
OTHER_DATA = "probe loss not compared: the data of its step changed"


@pytest.fixture(scope="module")
def before_long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two ranks that died at the end of its first phase; its probe is of the step after that."""
    folder = tmp_path_factory.mktemp("before_long")
    run_file = make_run(folder, steps=6, save_every="2 steps", model=PLAIN)
    text = run_file.read_text().replace("[validation]", f"{LONG}[validation]")
    for name in ("text", "code"):
        path = f'"{folder}/{name}"'
        text = text.replace(f"{name} = {path}", f"{name} = {{ path = {path}, chunk_tokens = 128 }}")
    run_file.write_text(text)
    assert [e.code for e in run_ranks(start, 2, str(run_file))] == [EXIT_FINISHED] * 2
    for step in (5, 6):
        shutil.rmtree(folder / "out" / "checkpoints" / f"step_{step:09d}", ignore_errors=True)
    record = json.loads((folder / "out" / "run.json").read_text())
    (folder / "out" / "run.json").write_text(json.dumps({**record, "saved_step": 4}))
    assert _probes(folder / "out")[4].step == 4
    return folder


@pytest.mark.parametrize(
    ("change", "num_ranks", "said"),
    [
        (("", ""), 2, SAME),
        slow(('name = "long"', 'name = "anneal"'), 1, SAME),
        slow(('start = "4 steps"', 'start = "5 steps"'), 1, OTHER_POSITIONS.format("main")),
        (("theta = 5e4", "theta = 7e4"), 1, OTHER_POSITIONS.format("long")),
        slow(("theta = 5e4", 'kind = "yarn", factor = 4'), 1, OTHER_POSITIONS.format("long")),
        slow(("seq_len = 32", "seq_len = 128"), 1, OTHER_BATCH),
        (("text = 1.0", "text = 0.5, code = 0.5"), 1, OTHER_DATA),
        slow(
            ("[batch]\ntokens = 128", '[batch]\ntokens = 256\nramp = { "0" = "128", "4 steps" = "256" }'),
            1,
            OTHER_DATA,
        ),
    ],
)
def test_what_is_changed_right_behind_a_checkpoint_is_no_fault_of_its_weights(
    before_long: Path, tmp_path: Path, change: tuple[str, str], num_ranks: int, said: str
) -> None:
    """Its loss was taken under the next phase as that was then: compared if that computes the same still."""
    run_file = copied(before_long, tmp_path)
    run_file.write_text(run_file.read_text().replace(*change))
    ranks = run_ranks(start, num_ranks, str(run_file))
    assert [ended.code for ended in ranks] == [EXIT_FINISHED] * num_ranks, ranks[0].stderr
    assert said in _said(tmp_path / "out")
