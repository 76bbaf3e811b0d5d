"""Checkpoints in folders of each host's own and at a place they were shipped to: real runs, real ranks."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from ds_pretrain import train as train_module
from ds_pretrain.checkpoint import upload as upload_module
from ds_pretrain.checkpoint.manifest import MANIFEST, parse_manifest
from ds_pretrain.checkpoint.retention import is_uploaded
from ds_pretrain.commands.cli import main
from ds_pretrain.config.plan import Plan
from ds_pretrain.core.distributed import World
from ds_pretrain.core.errors import EXIT_BAD_INPUT, EXIT_CANNOT_SAVE, EXIT_FINISHED, EXIT_PREEMPTED
from ds_pretrain.core.jsonl import read_metrics
from ds_pretrain.training.saver import Uploads
from tests.checkpoint.remotes import BUCKET, SECRET, s3_server, use_s3
from tests.harness import Record, Stop, record_run, start
from tests.ranks import run_ranks
from tests.runs.results import contents, copied, trace
from tests.scenario import LLAMA, deepspeed_json, make_run
from tests.tiers import slow

PLAIN = {**LLAMA, "attention_dropout": 0.0}


def _on_its_own_host(
    world: World, run_file: str, hosts: str, overrides: tuple[str, ...] = (), stop: Stop | None = None
) -> Record:
    """A start where each rank is a host of its own, with a disk of its own."""
    patch = pytest.MonkeyPatch()
    mine = Path(hosts) / f"host_{world.rank}"
    mine.mkdir(parents=True, exist_ok=True)
    patch.setattr(Plan, "checkpoints", property(lambda self: mine / "run"))
    patch.setenv("LOCAL_RANK", "0")
    ended = start(World(world.rank, world.size, 0), run_file, overrides, stop)
    patch.undo()
    return ended


def _local(folder: Path, **options: Any) -> tuple[Path, tuple[str, ...]]:
    run_file = make_run(folder, steps=6, save_every="2 steps", model=PLAIN, **options)
    return run_file, (f"checkpoint.local_dir={folder}/hosts", "checkpoint.keep_last=2")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The steps of a run of 6 that was never stopped."""
    run_file, _ = _local(tmp_path_factory.mktemp("straight"))
    run_ranks(record_run, 2, str(run_file))
    return trace(run_file.parent / "out")


@pytest.fixture(scope="module")
def stopped_hosts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that was stopped after step 4, and the hosts that its ranks saved on."""
    folder = tmp_path_factory.mktemp("stopped_hosts")
    run_file, overrides = _local(folder)
    hosts = str(folder / "hosts")
    stopped = run_ranks(_on_its_own_host, 2, str(run_file), hosts, overrides, Stop("file", 0, 3))
    assert [ended.code for ended in stopped] == [EXIT_PREEMPTED] * 2
    return folder


@pytest.fixture(scope="module")
def stopped_shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that was stopped after step 4, and the vault that all of it was shipped to."""
    folder = tmp_path_factory.mktemp("stopped_shipped")
    run_file = make_run(folder, steps=6, save_every="2 steps", model=PLAIN)
    shipping = (f"checkpoint.upload_to={folder}/vault",)
    run_ranks(start, 2, str(run_file), shipping, Stop("file", 0, 3))
    assert _steps(folder / "vault") == [1, 2, 4]
    return folder


def _with_hosts(stopped_hosts: Path, to: Path) -> tuple[Path, tuple[str, ...]]:
    """A copy of that run; its run file and overrides."""
    return copied(stopped_hosts, to), (f"checkpoint.local_dir={to}/hosts", "checkpoint.keep_last=2")


def _with_vault(stopped_shipped: Path, to: Path) -> tuple[Path, tuple[str, ...]]:
    """A copy of that run; its run file and overrides."""
    return copied(stopped_shipped, to), (f"checkpoint.upload_to={to}/vault",)


def _steps(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in root.glob("step_*") if path.is_dir())


@pytest.mark.parametrize("stage", [slow(2), 3])
def test_each_host_saves_its_own_shards_and_the_run_directory_gets_whole_copies(
    tmp_path: Path, stage: int
) -> None:
    run_file, overrides = _local(tmp_path / "run", deepspeed=deepspeed_json(stage))
    hosts, out = tmp_path / "hosts", tmp_path / "run" / "out"
    ranks = run_ranks(_on_its_own_host, 2, str(run_file), str(hosts), overrides)
    assert [ended.code for ended in ranks] == [EXIT_FINISHED] * 2

    manifest = parse_manifest((out / "checkpoints" / "step_000000006" / MANIFEST).read_text())
    for rank in (0, 1):
        folder = hosts / f"host_{rank}" / "run" / "step_000000006"
        held = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
        assert f"rng/rank_{rank:05d}.pt" in held
        assert f"rng/rank_{1 - rank:05d}.pt" not in held
        assert is_uploaded(folder)
        assert _steps(folder.parent) == [4, 6]  # and of the older ones only what was shipped is gone
    copies = out / "checkpoints" / "step_000000006"
    assert {p.relative_to(copies).as_posix() for p in copies.rglob("*") if p.is_file()} >= set(manifest.files)
    assert _steps(out / "checkpoints")[-2:] == [4, 6]  # older ones go once every host has seen them whole
    events = [r for r in read_metrics(out / "metrics.jsonl") if r["event"] == "upload"]
    assert {event["checkpoint"] for event in events} >= {"step_000000004", "step_000000006"}


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        slow("nothing", ""),
        ("a host", "it is not on"),
        slow("a file", "cannot be read"),
        ("a bit", "the checksum of"),
    ],
)
def test_p22_a_restore_takes_what_the_hosts_have_and_fetches_the_rest(
    straight: list[dict[str, Any]], stopped_hosts: Path, tmp_path: Path, lost: str, said: str
) -> None:
    run_file, overrides = _with_hosts(stopped_hosts, tmp_path)
    hosts = tmp_path / "hosts"
    if lost == "a host":
        shutil.rmtree(hosts / "host_1")
    shard = next((hosts / "host_1" / "run" / "step_000000004").glob("*optim_states.pt"), Path())
    if lost == "a file":
        shard.unlink()
    if lost == "a bit":
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 1
        shard.write_bytes(bytes(data))
    ranks = run_ranks(_on_its_own_host, 2, str(run_file), str(hosts), overrides)
    assert [ended.code for ended in ranks] == [EXIT_FINISHED] * 2
    assert said in ranks[0].stderr
    assert ("downloading the missing files from" in ranks[0].stderr) == (lost != "nothing")
    assert "resume     step 4/6 from " in ranks[0].stdout
    assert trace(tmp_path / "out") == straight
    if lost == "a bit":  # what was wrong is still there to look at
        assert list((hosts / "host_1" / "run").rglob("*.broken")) != []


def test_without_a_whole_copy_the_checkpoint_before_it_is_used(stopped_hosts: Path, tmp_path: Path) -> None:
    """The newest was never shipped, and a host is gone."""
    run_file, overrides = _with_hosts(stopped_hosts, tmp_path)
    hosts, out = tmp_path / "hosts", tmp_path / "out"
    shutil.rmtree(hosts / "host_1" / "run" / "step_000000004")
    shutil.rmtree(out / "checkpoints" / "step_000000004")
    ranks = run_ranks(_on_its_own_host, 2, str(run_file), str(hosts), overrides)
    assert [ended.code for ended in ranks] == [EXIT_FINISHED] * 2
    assert "step_000000004 is broken: it is not on" in ranks[0].stderr
    assert "renamed to step_000000004.broken" in ranks[0].stderr
    assert "resume     step 2/6 from " in ranks[0].stdout


@pytest.mark.parametrize(("before", "after"), [slow(2, 1), (2, 3)])
def test_another_number_of_ranks_puts_the_hosts_pieces_together(
    tmp_path: Path, before: int, after: int
) -> None:
    options: dict[str, Any] = {"batch_tokens": 16 * 6, "micro_batch_size": 1}
    straight_file, _ = _local(tmp_path / "straight", **options)
    run_ranks(record_run, before, str(straight_file))
    run_file, overrides = _local(tmp_path / "run", **options)
    hosts, out = tmp_path / "hosts", tmp_path / "run" / "out"
    run_ranks(_on_its_own_host, before, str(run_file), str(hosts), overrides, Stop("file", 0, 3))
    if before == 2:  # never shipped: only the hosts have it
        shutil.rmtree(out / "checkpoints" / "step_000000004")
        if after == 1:
            shutil.move(
                next((hosts / "host_1" / "run" / "step_000000004").glob("*optim_states.pt")),
                tmp_path / "gone",
            )
            (hosts / "host_1" / "run" / "step_000000004" / MANIFEST).unlink()
            ranks = run_ranks(
                _on_its_own_host, after, str(run_file), str(hosts), overrides, Stop("file", 0, 2)
            )
            assert "is on none of these hosts" in ranks[0].stderr  # one host is left, with half of it
            assert "resume     step 2/6 from " in ranks[0].stdout
            return
    ranks = run_ranks(_on_its_own_host, after, str(run_file), str(hosts), overrides)
    assert [ended.code for ended in ranks] == [EXIT_FINISHED] * after
    assert "putting the checkpoint of step 4 together" in ranks[0].stderr
    assert f"ranks {before} -> {after}" in ranks[0].stderr
    losses = [
        [step["loss"] for step in trace(folder / "out")]
        for folder in (tmp_path / "run", tmp_path / "straight")
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    assert not (out / "assembled").exists()  # once a newer one is saved


def test_hosts_that_share_what_should_be_their_own_are_told_so(tmp_path: Path) -> None:
    run_file, overrides = _local(tmp_path / "run")
    ranks = run_ranks(_on_one_disk, 2, str(run_file), overrides)
    assert [ended.code for ended in ranks] == [EXIT_BAD_INPUT] * 2
    assert f"checkpoint.local_dir = {tmp_path}/run/hosts is the same folder on" in ranks[0].stderr


def _on_one_disk(world: World, run_file: str, overrides: tuple[str, ...]) -> Record:
    patch = pytest.MonkeyPatch()
    patch.setenv("LOCAL_RANK", "0")
    ended = start(world, run_file, overrides)
    patch.undo()
    return ended


def test_ranks_of_one_host_share_its_local_folder(tmp_path: Path) -> None:
    """As the launcher starts them: one leads, and nothing is fetched."""
    run_file, overrides = _local(tmp_path / "run")
    assert [e.code for e in run_ranks(start, 2, str(run_file), overrides, Stop("file", 0, 3))] == [
        EXIT_PREEMPTED
    ] * 2
    ranks = run_ranks(start, 2, str(run_file), overrides)
    assert [ended.code for ended in ranks] == [EXIT_FINISHED] * 2
    assert "fetching" not in ranks[0].stderr
    [root] = (tmp_path / "run" / "hosts").iterdir()
    assert _steps(root) == [4, 6]
    assert _steps(tmp_path / "run" / "out" / "checkpoints") == [4, 6]


def test_a_run_directory_that_is_lost_comes_back_from_where_it_was_shipped(
    straight: list[dict[str, Any]], stopped_shipped: Path, tmp_path: Path
) -> None:
    run_file, overrides = _with_vault(stopped_shipped, tmp_path)
    shutil.rmtree(tmp_path / "out")
    ranks = run_ranks(start, 2, str(run_file), overrides)
    assert [ended.code for ended in ranks] == [EXIT_FINISHED] * 2
    assert "downloading the missing files from" in ranks[0].stderr
    assert "resume     step 4/6 from " in ranks[0].stdout
    assert trace(tmp_path / "out")[-2:] == straight[-2:]


def test_a_broken_checkpoint_is_mended_from_its_copy_and_a_broken_copy_is_not_used(
    stopped_shipped: Path, tmp_path: Path
) -> None:
    run_file, overrides = _with_vault(stopped_shipped, tmp_path)
    here = tmp_path / "out" / "checkpoints" / "step_000000004"
    shard = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    (here / shard).write_bytes(b"")
    ranks = run_ranks(start, 2, str(run_file), overrides, Stop("file", 0, 4))
    assert f"{shard} has 0 bytes" in ranks[0].stderr
    assert "resume     step 4/6 from " in ranks[0].stdout
    assert (here / f"{shard}.broken").read_bytes() == b""


def test_a_copy_that_is_broken_too_is_not_used(stopped_shipped: Path, tmp_path: Path) -> None:
    run_file, overrides = _with_vault(stopped_shipped, tmp_path)
    shard = "step_000000004/zero_pp_rank_1_mp_rank_00_optim_states.pt"
    for root in (tmp_path / "out" / "checkpoints", tmp_path / "vault"):
        (root / shard).write_bytes((root / shard).read_bytes()[:-1] + b"?")
    ranks = run_ranks(start, 2, str(run_file), overrides)
    assert "and its copy cannot be used" in ranks[0].stderr
    assert "is not what the manifest lists" in ranks[0].stderr
    assert "resume     step 2/6 from " in ranks[0].stdout


def test_a_place_that_does_not_answer_ends_the_start_and_moves_nothing(
    stopped_shipped: Path, tmp_path: Path
) -> None:
    """It may answer at the next start: no older checkpoint is taken for that."""
    run_file, overrides = _with_vault(stopped_shipped, tmp_path)
    root = tmp_path / "out" / "checkpoints"
    (root / "step_000000004" / "rng" / "rank_00001.pt").unlink()
    names = sorted(path.name for path in root.iterdir())
    ranks = run_ranks(_with_a_dead_place, 2, str(run_file), overrides)
    assert [ended.code for ended in ranks] == [1, 1]
    assert "restart when that is mended" in ranks[0].stderr
    assert sorted(path.name for path in root.iterdir()) == names
    assert "Traceback" not in ranks[0].stderr


def _with_a_dead_place(world: World, run_file: str, overrides: tuple[str, ...]) -> Record:
    from ds_pretrain.checkpoint.remote import Remote

    def dead(self: Remote, step: int, name: str, path: Path) -> Any:
        raise ConnectionError(f"{self.location}: cannot read {name} of step {step}: the host is down")

    patch = pytest.MonkeyPatch()
    patch.setattr(Remote, "download", dead)
    ended = start(world, run_file, overrides)
    patch.undo()
    return ended


def test_what_could_not_be_shipped_is_said_at_the_end_and_shipped_by_the_next_start(tmp_path: Path) -> None:
    run_file = make_run(tmp_path / "run", steps=4, save_every="2 steps")
    overrides = (f"checkpoint.upload_to={tmp_path}/vault",)
    [ended] = run_ranks(_with_no_patience, 1, str(run_file), overrides)
    assert ended.code == EXIT_FINISHED
    assert f"not uploaded to {tmp_path}/vault yet: steps 1, 2, 4; they are in" in ended.stderr
    [ended] = run_ranks(start, 1, str(run_file), (*overrides, "schedule.length=4 steps"))
    assert "all 4 steps done" in ended.stdout
    assert _steps(tmp_path / "vault") == [1, 2, 4]


def _with_no_patience(world: World, run_file: str, overrides: tuple[str, ...]) -> Record:
    patch = pytest.MonkeyPatch()
    patch.setattr(train_module, "UPLOAD_PATIENCE_SECONDS", 0.0)
    patch.setattr(upload_module.Uploader, "start", lambda self: None)
    patch.setattr(upload_module.Uploader, "revive", lambda self: None)
    ended = start(world, run_file, overrides)
    patch.undo()
    return ended


def _with_s3(
    world: World,
    run_file: str,
    hosts: str,
    server: tuple[str, int],
    overrides: tuple[str, ...],
    stop: Stop | None,
) -> Record:
    patch = pytest.MonkeyPatch()
    use_s3(patch, *server, Path(run_file).parent)
    ended = _on_its_own_host(world, run_file, hosts, overrides, stop)
    patch.undo()
    return ended


def test_hosts_that_lost_everything_go_on_from_an_object_store_and_no_secret_shows(
    straight: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_file, overrides = _local(tmp_path / "run")
    place = f"s3://{BUCKET}/run"
    run_file.write_text(run_file.read_text().replace("[checkpoint]", f'[checkpoint]\nupload_to = "{place}"'))
    hosts, out = tmp_path / "hosts", tmp_path / "run" / "out"
    with s3_server() as server:
        first = run_ranks(_with_s3, 2, str(run_file), str(hosts), server, overrides, Stop("file", 0, 3))
        assert [ended.code for ended in first] == [EXIT_PREEMPTED] * 2
        shutil.rmtree(hosts)
        shutil.rmtree(out)
        second = run_ranks(_with_s3, 2, str(run_file), str(hosts), server, overrides, None)
        assert [ended.code for ended in second] == [EXIT_FINISHED] * 2
        assert f"downloading the missing files from {place}" in second[0].stderr
        assert "resume     step 4/6 from " in second[0].stdout

        use_s3(monkeypatch, *server, tmp_path)
        assert main(["checkpoints", str(run_file), "--uploaded"]) == 0
        assert main(["checkpoints", str(run_file), "verify", "--uploaded"]) == 0
        assert main(["checkpoints", str(run_file), "pin", "4", "--uploaded"]) == 0
        said = capsys.readouterr().out
        assert [line.split()[0] for line in said.splitlines()[:3]] == ["step", "6", "4"]
        assert "step_000000006  intact\nstep_000000004  intact\npinned step_000000004" in said
        assert main(["checkpoints", str(run_file), "verify", "5", "--uploaded"]) == EXIT_BAD_INPUT
        assert main(["checkpoints", str(run_file), "diff", "4", "6", "--uploaded"]) == EXIT_BAD_INPUT
    assert trace(out)[-2:] == straight[-2:]
    written = [p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()]
    spoken = [text.encode() for ended in (*first, *second) for text in (ended.stdout, ended.stderr)]
    assert not any(SECRET.encode() in text for text in (*written, *spoken))


@pytest.mark.parametrize("stage", [slow(2), 3])
def test_what_was_never_shipped_is_put_together_from_the_hosts_that_have_it(
    tmp_path: Path, stage: int
) -> None:
    """Under ZeRO-2 one rank alone writes the weights, and the ranks of every host load them."""
    run_file, overrides = _local(tmp_path / "run", deepspeed=deepspeed_json(stage))
    hosts, out = tmp_path / "hosts", tmp_path / "run" / "out"
    run_ranks(_shipping_nothing, 2, str(run_file), str(hosts), overrides, Stop("file", 0, 3))
    assert not list((out / "checkpoints").glob("step_*"))
    ranks = run_ranks(_on_its_own_host, 2, str(run_file), str(hosts), overrides)
    assert [ended.code for ended in ranks] == [EXIT_FINISHED] * 2
    assert "resume     step 4/6 from " in ranks[0].stdout
    assert ("putting the checkpoint of step 4 together" in ranks[0].stderr) == (stage == 2)
    assert not list(hosts.rglob("*.broken"))


def _shipping_nothing(
    world: World, run_file: str, hosts: str, overrides: tuple[str, ...], stop: Stop | None
) -> Record:
    patch = pytest.MonkeyPatch()
    patch.setattr(upload_module.Uploader, "start", lambda self: None)
    patch.setattr(upload_module.Uploader, "revive", lambda self: None)
    patch.setattr(train_module, "UPLOAD_PATIENCE_SECONDS", 0.0)
    patch.setattr(train_module, "STOP_PATIENCE_SECONDS", 0.0)
    ended = _on_its_own_host(world, run_file, hosts, overrides, stop)
    patch.undo()
    return ended


def test_a_finished_run_on_fewer_hosts_loses_nothing_and_names_what_is_not_shipped(
    tmp_path: Path,
) -> None:
    run_file, overrides = _local(tmp_path / "run")
    hosts = tmp_path / "hosts"
    run_ranks(_shipping_nothing, 2, str(run_file), str(hosts), overrides, None)
    [ended] = run_ranks(_on_its_own_host, 1, str(run_file), str(hosts), overrides)  # one host with half of it
    assert ended.code == EXIT_BAD_INPUT
    assert "is on none of these hosts" in ended.stderr
    for rank in (0, 1):
        shutil.rmtree(hosts / f"host_{rank}")
    out = f"{tmp_path}/again"
    elsewhere = (*overrides, f"out={out}")
    run_ranks(_shipping_nothing, 2, str(run_file), str(hosts), elsewhere, None)
    shutil.rmtree(hosts / "host_1" / "run" / "step_000000004")  # an older one lost its half
    ranks = run_ranks(_until_6_is_shipped, 2, str(run_file), str(hosts), out, elsewhere)
    assert [ended.code for ended in ranks] == [EXIT_FINISHED] * 2
    assert "all 6 steps done" in ranks[0].stdout
    assert f"not uploaded to {tmp_path}/again/checkpoints yet: steps " in ranks[0].stderr
    assert 6 in _steps(tmp_path / "again" / "checkpoints")


def _until_6_is_shipped(
    world: World, run_file: str, hosts: str, out: str, overrides: tuple[str, ...]
) -> Record:
    """A start that waits for this one checkpoint and no longer."""
    patch = pytest.MonkeyPatch()
    finish, arrived = Uploads.finish, Path(out) / "checkpoints" / "step_000000006" / MANIFEST

    def waited(self: Uploads, patience_seconds: float) -> None:
        while not arrived.exists():
            time.sleep(0.05)
        finish(self, 0.0)

    patch.setattr(Uploads, "finish", waited)
    ended = _on_its_own_host(world, run_file, hosts, overrides)
    patch.undo()
    return ended


def _with_a_failing_host(
    world: World, run_file: str, hosts: str, overrides: tuple[str, ...], at: str
) -> Record:
    from ds_pretrain.checkpoint import save as save_module

    patch = pytest.MonkeyPatch()
    failed: list[str] = []

    def point(name: str) -> None:
        if world.rank == 1 and name == at and len(failed) < 1:
            failed.append(name)
            raise OSError(28, "No space left on device")

    patch.setattr(save_module, "write_point", point)
    ended = _on_its_own_host(world, run_file, hosts, overrides)
    patch.undo()
    return ended


@pytest.mark.parametrize("at", ["manifest", slow("sync the folder")])
def test_a_publication_that_one_host_cannot_make_is_made_by_none(tmp_path: Path, at: str) -> None:
    run_file, overrides = _local(tmp_path / "run")
    hosts, out = tmp_path / "hosts", tmp_path / "run" / "out"
    stopping = (*overrides, "checkpoint.max_consecutive_failures=1")
    ranks = run_ranks(_with_a_failing_host, 2, str(run_file), str(hosts), stopping, at)
    assert {ended.code for ended in ranks} == {EXIT_CANNOT_SAVE}
    assert "rank 1: [Errno 28] No space left on device" in ranks[0].stderr
    assert not list(hosts.rglob("manifest.json"))
    assert json.loads((out / "run.json").read_text())["saved_step"] is None
    ranks = run_ranks(_on_its_own_host, 2, str(run_file), str(hosts), overrides)
    assert [ended.code for ended in ranks] == [EXIT_FINISHED] * 2


def test_a_place_of_another_run_is_refused_before_anything_is_fetched(tmp_path: Path) -> None:
    overrides = (f"checkpoint.upload_to={tmp_path}/vault",)
    one, other = (make_run(tmp_path / name, name=name, steps=4) for name in ("one", "other"))
    assert [e.code for e in run_ranks(start, 1, str(one), overrides)] == [EXIT_FINISHED]
    [ended] = run_ranks(start, 1, str(other), overrides)
    assert ended.code == EXIT_BAD_INPUT
    assert f"checkpoint.upload_to = {tmp_path}/vault holds the checkpoints of another run" in ended.stderr
    assert not list((tmp_path / "other" / "out").rglob("step_*"))
    [ended] = run_ranks(start, 1, str(other))  # with the key corrected
    assert ended.code == EXIT_FINISHED


def test_shipping_to_where_checkpoints_are_saved_is_refused(tmp_path: Path) -> None:
    run_file = make_run(tmp_path / "run", steps=4)
    [ended] = run_ranks(start, 1, str(run_file), (f"checkpoint.upload_to={tmp_path}/run/out/checkpoints",))
    assert ended.code == EXIT_BAD_INPUT
    assert "is where checkpoints are saved; choose another location" in ended.stderr


@pytest.mark.parametrize("step", [slow(0), 2, slow(99)])
def test_a_step_to_stop_after_has_to_be_still_to_come(tmp_path: Path, step: int) -> None:
    run_file = make_run(tmp_path / "run", steps=6, save_every="2 steps")
    run_ranks(start, 1, str(run_file), (), Stop("file", 0, 2))
    [ended] = run_ranks(start, 1, str(run_file), ("--stop-after", str(step)))
    assert ended.code == EXIT_BAD_INPUT
    assert f"--stop-after {step}: the run is at step 3 of 6; give a later step" in ended.stderr


def test_a_checkpoint_of_another_run_in_the_run_directory_is_refused_by_name(tmp_path: Path) -> None:
    one, other = (
        make_run(tmp_path / name, name=name, steps=6, save_every="2 steps") for name in ("one", "other")
    )
    for run_file, step in ((one, 1), (other, 3)):
        run_ranks(start, 1, str(run_file), (), Stop("file", 0, step))
    theirs = tmp_path / "other" / "out" / "checkpoints" / "step_000000004"
    shutil.copytree(theirs, tmp_path / "one" / "out" / "checkpoints" / theirs.name)
    [ended] = run_ranks(start, 1, str(one))
    assert ended.code == EXIT_BAD_INPUT
    assert "step_000000004 is a checkpoint of another run ('other'," in ended.stderr
    assert "move it out of there" in ended.stderr


def test_a_place_with_another_runs_checkpoints_and_no_label_is_refused_and_nothing_there_is_touched(
    tmp_path: Path,
) -> None:
    victim, run_file = (
        make_run(tmp_path / name, name=name, steps=6, save_every="2 steps") for name in ("a", "b")
    )
    for name in (victim, run_file):
        run_ranks(start, 1, str(name), (), Stop("file", 0, 3))
    theirs = tmp_path / "a" / "out" / "checkpoints"
    before = contents(theirs)
    [ended] = run_ranks(start, 1, str(run_file), (f"checkpoint.upload_to={theirs}",))
    assert ended.code == EXIT_BAD_INPUT
    assert f"checkpoint.upload_to = {theirs} holds the checkpoints of another run" in ended.stderr
    assert contents(theirs) == before


def test_a_file_with_a_checkpoints_name_at_the_place_stops_nobody(tmp_path: Path) -> None:
    run_file = make_run(tmp_path / "run", steps=6, save_every="2 steps")
    overrides = (f"checkpoint.upload_to={tmp_path}/vault",)
    run_ranks(start, 1, str(run_file), overrides, Stop("file", 0, 3))
    (tmp_path / "vault" / "step_000000009").write_text("hello")
    [ended] = run_ranks(start, 1, str(run_file), overrides)
    assert ended.code == EXIT_FINISHED


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("resume_from=nope", "resume_from = nope is not a folder; name a checkpoint folder"),
        ("resume_from={file}_s", "is a folder of checkpoints, not a checkpoint; name one, like"),
        ("checkpoint.upload_to={out}", "is the run directory; choose another location"),
        ("checkpoint.upload_to={file}", "is not a folder"),
        ("checkpoint.local_dir={file}", "is not a folder"),
        ("checkpoint.local_dir=s3://vault", "is not a path on this host; write one like"),
    ],
)
def test_check_finds_places_that_cannot_be(
    tmp_path: Path, override: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file = make_run(tmp_path / "run", steps=6)
    (tmp_path / "file").write_text("")
    (tmp_path / "file_s" / "checkpoints" / "step_000000004").mkdir(parents=True)
    given = override.format(out=tmp_path / "run" / "out", file=tmp_path / "file")
    assert main(["check", str(run_file), given]) == EXIT_BAD_INPUT
    assert words in capsys.readouterr().err
