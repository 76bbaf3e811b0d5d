"""Costs of saves and resumes: memory and bytes by the shards of a rank, and each save on record."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_pretrain.checkpoint import restore as restore_module
from ds_pretrain.checkpoint.manifest import owner_rank, parse_manifest
from ds_pretrain.checkpoint.storage import StorageLayout
from ds_pretrain.config.plan import load_plan
from ds_pretrain.core.distributed import World, barrier
from ds_pretrain.core.errors import EXIT_FINISHED
from ds_pretrain.core.jsonl import read_metrics
from ds_pretrain.core.state import RunState
from ds_pretrain.training.setup import open_run_engine
from tests.checkpoint.saving import save_now
from tests.checkpoint.test_manifest import MANIFEST
from tests.engine.small import step_on, uneven_batch
from tests.harness import start
from tests.ranks import run_ranks
from tests.scenario import LLAMA, deepspeed_json, make_run
from tests.tiers import slow

# 4.2M parameters: 25 MB of masters and moments a rank, far above what else moves in a process.
WIDE = {**LLAMA, "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 64, "num_hidden_layers": 1}


def _save(world: World, run_file: str) -> None:
    plan = load_plan(run_file)
    engine = open_run_engine(plan, world)
    step_on(engine, plan, uneven_batch(2), 1, 1e-3, world)
    manifest = replace(MANIFEST, world_size=world.size, files={})
    save_now(plan.out, RunState(3), manifest, {"deepspeed.json": "{}"}, engine, world)


def _resume(world: World, run_file: str) -> tuple[float, float]:
    """At a resume, over the bytes of this rank's own files: memory at its peak, and what was read."""
    plan = load_plan(run_file)
    engine = open_run_engine(plan, world)
    mapped = []
    from_file, patch = torch.UntypedStorage.from_file, pytest.MonkeyPatch()

    def counted(name: str, shared: bool, size: int) -> Any:
        mapped.append(size)
        return from_file(name, shared, size)

    patch.setattr(torch.UntypedStorage, "from_file", counted)
    barrier(world)
    Path("/proc/self/clear_refs").write_text("5")  # the peak of resident memory starts anew
    memory, read = _status("VmHWM"), _read_bytes()
    found = restore_module.find_latest(StorageLayout(plan.out, plan.out), world)
    assert found is not None
    restore_module.restore(found, engine, 7, world)
    memory, read = _status("VmHWM") - memory, _read_bytes() - read + sum(mapped)
    patch.undo()
    own = sum(e.bytes for name, e in found.manifest.files.items() if owner_rank(name) == world.rank)
    return memory / own, read / own


def _status(name: str) -> int:
    [line] = [t for t in Path("/proc/self/status").read_text().splitlines() if t.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


def _read_bytes() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.parametrize("stage", [3, slow(1)])
def test_p24_a_resume_reads_and_holds_the_shards_of_a_rank_and_not_those_of_all(
    tmp_path: Path, stage: int
) -> None:
    """Files are read to verify them, and once more to load. Below ZeRO-3 all load the weights of rank 0."""
    run_file = make_run(tmp_path, model=WIDE, deepspeed=deepspeed_json(stage))
    run_ranks(_save, 2, str(run_file))
    for memory, read in run_ranks(_resume, 2, str(run_file)):
        weights = 0 if stage == 3 else 2 / 3
        assert memory < 1.7 + weights  # two ranks' shards would be 2
        assert 1.9 < read < 2.1 + 2 * weights  # DeepSpeed opens the weights twice


def test_p24_each_save_is_on_record_and_one_that_stalls_above_its_share_is_warned_of(tmp_path: Path) -> None:
    run_file = make_run(tmp_path, steps=6, batch_tokens=64, save_every="1 steps")
    endings = run_ranks(start, 2, str(run_file), ("checkpoint.max_stall_fraction=1e-6",))
    assert [ended.code for ended in endings] == [EXIT_FINISHED] * 2
    saves = [r for r in read_metrics(tmp_path / "out" / "metrics.jsonl") if r["event"] == "checkpoint"]
    assert [save["step"] for save in saves] == [1, 2, 3, 4, 5, 6]
    for save in saves:
        folder = tmp_path / "out" / "checkpoints" / f"step_{save['step']:09d}"
        assert save["bytes"] == parse_manifest((folder / "manifest.json").read_text()).total_bytes
        assert 0 < save["stall_seconds"] <= save["total_seconds"]
    assert endings[0].stderr.count("checkpoint.max_stall_fraction =") == 1


def test_the_log_says_how_often_to_save_once_it_is_measured(tmp_path: Path) -> None:
    run_file = make_run(tmp_path, steps=6, batch_tokens=64, save_every="1 steps")
    [ended] = run_ranks(start, 1, str(run_file), ('checkpoint.mtbf="8 h"',))
    assert ended.stderr.count("loses least") == 1
    assert ended.stderr.count("checkpoint.every is about") == 1
    [ended] = run_ranks(start, 1, str(run_file), ("out=" + str(tmp_path / "other"),))
    assert "loses least" not in ended.stderr
