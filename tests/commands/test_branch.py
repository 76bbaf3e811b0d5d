"""The `branch` command: what it makes, what it refuses, and what is recorded of a branch."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_pretrain.checkpoint.manifest import (
    DEEPSPEED,
    MANIFEST,
    RUN_STATE,
    FileEntry,
    Manifest,
    parse_manifest,
    step_name,
)
from ds_pretrain.checkpoint.remote import Remote
from ds_pretrain.checkpoint.retention import KNOWN_GOOD, PINNED, prune
from ds_pretrain.commands import branch as branch_module
from ds_pretrain.commands.cli import main
from ds_pretrain.config.plan import load_plan
from ds_pretrain.core.files import compute_checksum
from ds_pretrain.core.metrics import Probe
from ds_pretrain.core.state import Rollback, RunState, Skip, SkipLedger
from ds_pretrain.training.compatibility import claim_run, compute_identity
from ds_pretrain.training.preflight import open_inputs
from ds_pretrain.training.record import KnownRun, read_record
from tests.scenario import make_run, write_corpus

SHARD = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
ROLLBACK = Rollback(1, 3, 2, "spike", "replay", 1)


def make_parent(folder: Path, steps: tuple[int, ...] = (4, 8, 11)) -> Path:
    """A run of 12 steps that decays from 9 on, with checkpoints as far as a branch looks at them."""
    run_file = make_run(folder)
    plan = load_plan(run_file)
    identity = compute_identity(plan, open_inputs(plan).data)
    for step in steps:
        save(folder / "out" / "checkpoints" / step_name(step), step, identity)
    return folder / "out"


def save(folder: Path, step: int, identity: dict[str, Any]) -> None:
    folder.mkdir(parents=True)
    state = RunState(step, SkipLedger((Skip("main", 0, 5, "spike", 1, 1),)), rollbacks=(ROLLBACK,))
    (folder / RUN_STATE).write_text(state.to_json())
    (folder / DEEPSPEED).write_text("{}")
    (folder / "rng").mkdir()
    (folder / SHARD).write_bytes(bytes([step]) * 1000)
    (folder / "rng" / "rank_00000.pt").write_bytes(b"streams")
    names = (RUN_STATE, DEEPSPEED, SHARD, "rng/rank_00000.pt")
    files = {n: FileEntry((folder / n).stat().st_size, compute_checksum(folder / n)) for n in names}
    manifest = Manifest(
        step=step,
        tokens=step * 128,
        samples=step * 8,
        world_size=1,
        zero_stage=3,
        versions={},
        created="2026-01-01T00:00:00+00:00",
        attempt=2,
        wandb_id="parent-id",
        overrides=(),
        identity=identity,
        files=files,
        probe=Probe(step, 5.0, 1, 1, 2),
    )
    (folder / MANIFEST).write_text(manifest.to_json())


def words(folder: Path, step: int, *overrides: str) -> list[str]:
    """The command for a branch that cools down over 3 steps."""
    own = ("name=cool", f"out={folder}/cool", f"schedule.length={step + 3} steps", "schedule.decay=3 steps")
    return ["branch", str(folder / "out"), "--at", str(step), str(folder / "run.toml"), *own, *overrides]


def contents(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def refusal(capsys: pytest.CaptureFixture[str], command: list[str]) -> str:
    capsys.readouterr()
    assert main(command) == 2
    return capsys.readouterr().err


def test_the_new_runs_first_checkpoint_is_the_parents_under_its_own_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = make_parent(tmp_path)
    theirs = out / "checkpoints" / step_name(8)
    (theirs / KNOWN_GOOD).touch()
    before = (theirs / MANIFEST).read_bytes()
    assert main(words(tmp_path, 8)) == 0
    said = capsys.readouterr()
    ours = tmp_path / "cool" / "checkpoints" / step_name(8)
    assert f"branched   cool from tiny at step 8: {ours} (linked, no bytes copied)" in said.out
    assert f"next       ds-pretrain train {tmp_path}/run.toml" in said.out
    assert said.err == ""
    assert (theirs / MANIFEST).read_bytes() == before
    assert os.path.samefile(ours / SHARD, theirs / SHARD)
    assert sorted(os.listdir(ours.parent)) == [step_name(8)]
    old, new = (parse_manifest((folder / MANIFEST).read_text()) for folder in (theirs, ours))
    record = read_record(tmp_path / "cool")
    assert record is not None
    changed: dict[str, Any] = {
        "identity": {**old.identity, "name": "cool"},
        "wandb_id": record.wandb_id,
        "attempt": 0,
    }
    assert replace(new, overrides=()) == replace(old, **changed)
    assert record.wandb_id != "parent-id"
    assert (record.name, record.attempt, record.saved_step, record.num_inherited) == ("cool", 0, 8, 1)
    assert (ours / KNOWN_GOOD).exists()
    assert not (ours / PINNED).exists()


def test_the_parents_checkpoint_is_pinned_and_both_lists_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = make_parent(tmp_path)
    root, theirs = out / "checkpoints", out / "checkpoints" / step_name(4)
    assert main(words(tmp_path, 4)) == 0
    assert main([*words(tmp_path, 4), "name=other", f"out={tmp_path}/other"]) == 0
    capsys.readouterr()
    assert main(["checkpoints", str(out)]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert listed[-2:] == [
        f"step 4 is pinned: cool ({tmp_path}/cool) began from it",
        f"step 4 is pinned: other ({tmp_path}/other) began from it",
    ]
    mark = (theirs / PINNED).read_bytes()
    for _ in range(2):  # the second time it is pinned for nobody
        assert main(["checkpoints", str(out), "unpin", "4"]) == 0
    said, again = capsys.readouterr().out.splitlines()
    assert (
        f"applies again; it was pinned because cool ({tmp_path}/cool), other ({tmp_path}/other) began" in said
    )
    assert again == f"unpinned {step_name(4)}: retention applies again"
    (theirs / PINNED).write_bytes(mark)
    prune(root, keep=1, keep_every=None)
    assert sorted(os.listdir(root)) == [step_name(4), step_name(11)]
    line = (
        f"branched from tiny at step 4: {theirs} (run parent-id, manifest "
        f"{compute_checksum(theirs / MANIFEST)[:12]}"
    )
    for gone, where in ((False, "it is there"), (True, "it is no longer there")):
        if gone:
            shutil.rmtree(theirs)
        assert main(["checkpoints", str(tmp_path / "cool")]) == 0
        assert capsys.readouterr().out.splitlines()[0] == f"{line}; {where})"
    assert main(["checkpoints", str(tmp_path / "cool"), "verify"]) == 0  # it does not need the parent


def test_the_first_start_compares_once_more_and_records_what_is_another(tmp_path: Path) -> None:
    make_parent(tmp_path)
    assert main(words(tmp_path, 8)) == 0
    manifest = parse_manifest((tmp_path / "cool/checkpoints" / step_name(8) / MANIFEST).read_text())
    known = KnownRun("step", 8, manifest.attempt, manifest.wandb_id, manifest.identity, 1)
    plan = load_plan(tmp_path / "run.toml", words(tmp_path, 8)[5:])
    data = open_inputs(plan).data
    with pytest.raises(
        Exception, match=r"`seed` is 9, .*set it back: a branch has its parent's past.*step 8"
    ):
        claim_run(load_plan(tmp_path / "run.toml", [*words(tmp_path, 8)[5:], "seed=9"]), data, known)
    record = claim_run(plan, data, known)
    assert (record.attempt, record.num_inherited) == (1, 1)
    changes = {(change["field"], change["old"], change["new"]) for change in record.changes}
    assert changes == {("schedule.length", 12, 11)}
    assert record.lineage is not None
    assert (record.lineage.name, record.lineage.step) == ("tiny", 8)
    (tmp_path / "cool" / "run.json").unlink()  # a lost record is made again from the checkpoint
    assert claim_run(plan, data, known).wandb_id == record.wandb_id


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("seed=9", "`seed` is 9, but the run of {folder} was started with 7; set it back: a branch has"),
        (
            "schedule.peak_lr=3e-3",
            "`schedule.peak_lr` is 0.003, but the run of {folder} was started with 0.01",
        ),
        ("batch.tokens=256", "`batch.tokens` is 256 tokens, but"),
        ("phases.0.mixture={text = 0.5, code = 0.5}", "`phases.main.mixture.text` is 0.5, but"),
        ("model.qk_norm=false", "`model.qk_norm` is false, but"),
        ("phases.0.seq_len=32", "`phases.main.seq_len` is 32, but"),
        ("sources.code={folder}/../../../text", "`sources.code` is"),
    ],
)
def test_p13_what_is_past_and_differs_is_refused_with_both_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, field: str
) -> None:
    folder = make_parent(tmp_path) / "checkpoints" / step_name(8)
    said = refusal(capsys, words(tmp_path, 8, override.replace("{folder}", str(folder))))
    assert field.format(folder=folder) in said
    assert not (tmp_path / "cool").exists()
    assert not (folder / PINNED).exists()


def test_what_lies_ahead_may_differ_sources_too(tmp_path: Path) -> None:
    make_parent(tmp_path)
    write_corpus(tmp_path / "math", seed=5)
    text = (tmp_path / "run.toml").read_text()
    phase = '[[phases]]\nname = "best"\nstart = "8 steps"\nseq_len = 16\nmixture = { math = 1.0 }\n'
    text = text.replace("[[phases]]", f'math = "{tmp_path}/math"\n[[phases]]').replace(
        "[valid", f"{phase}[valid"
    )
    (tmp_path / "run.toml").write_text(text)
    assert main(words(tmp_path, 8, "batch.micro_batch_size=1", "schedule.min_lr_ratio=0.1")) == 0
    manifest = parse_manifest((tmp_path / "cool/checkpoints" / step_name(8) / MANIFEST).read_text())
    assert manifest.probe is not None  # the first start knows whether its model computes the same there


def test_a_past_schedule_may_be_another_on_purpose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_parent(tmp_path)
    peak = "schedule.peak_lr=3e-3"
    assert 'accept it with accept_changes = ["schedule.peak_lr"]' in refusal(capsys, words(tmp_path, 8, peak))
    assert main(words(tmp_path, 8, peak, 'accept_changes=["schedule"]')) == 0


def _break(folder: Path) -> None:
    (folder / "out" / "checkpoints" / step_name(8) / SHARD).write_bytes(b"x" * 1000)


def _tear(folder: Path) -> None:
    (folder / "out" / "checkpoints" / step_name(8) / MANIFEST).write_text("{")


def _fill(folder: Path) -> None:
    (folder / "cool").mkdir()
    (folder / "cool" / "precious.txt").write_text("mine")


def _ship(folder: Path) -> None:
    (folder / "shipped").mkdir()
    (folder / "shipped" / "run.json").write_text('{"name": "tiny"}')


@pytest.mark.parametrize(
    ("prepare", "at", "overrides", "message"),
    [
        (None, 7, (), "has no checkpoint of step 7; it has: 11, 8, 4"),
        (
            _break,
            8,
            (),
            f"is broken: the checksum of {SHARD} does not match the manifest; branch from another",
        ),
        (_tear, 8, (), "is broken: its manifest or run_state.json cannot be read (Expecting"),
        (_fill, 8, (), "cool is not empty (precious.txt); give an empty or a new folder"),
        (
            None,
            8,
            ("out={folder}/out",),
            "out = {folder}/out lies in the parent's run directory ({folder}/out)",
        ),
        (None, 8, ("out={folder}/out/cool",), "out = {folder}/out/cool lies in the parent's run directory"),
        (
            None,
            8,
            ("out={folder}/out/checkpoints",),
            "out = {folder}/out/checkpoints lies in the parent's folder of checkpoints",
        ),
        (
            None,
            8,
            ("out={folder}/out/checkpoints/step_000000004/rng/x",),
            "rng/x lies in a checkpoint ({folder}/out/checkpoints/step_000000004); name a folder outside",
        ),
        (
            None,
            8,
            ("checkpoint.local_dir={folder}/x", "checkpoint.upload_to={folder}/out/checkpoints"),
            "checkpoint.upload_to = {folder}/out/checkpoints lies in the parent's folder of checkpoints",
        ),
        (
            None,
            8,
            ("checkpoint.local_dir={folder}/out/x",),
            "checkpoint.local_dir = {folder}/out/x lies in the parent's run directory",
        ),
        (
            _ship,
            8,
            ("checkpoint.upload_to={folder}/shipped",),
            'upload_to = {folder}/shipped holds the checkpoints of another run ({{"name": "tiny"}}); give '
            "each",
        ),
        (None, 8, ("name=tiny",), "name = 'tiny' is the parent's; give the branch a name of its own"),
        (
            None,
            8,
            ("schedule.length=8 steps",),
            "ends at step 8, and the branch begins at step 8; raise it",
        ),
        (None, 8, ("resume_from={folder}/x",), "x names another beginning than --at; delete it"),
        (
            None,
            8,
            ("checkpoint.local_dir={folder}/fast", "checkpoint.upload_to=memory://x"),
            "checkpoint.local_dir and checkpoint.upload_to = memory://x leave no folder that all hosts share",
        ),
    ],
)
def test_what_cannot_be_branched_is_refused_and_nothing_is_left_behind(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    prepare: Callable[[Path], None] | None,
    at: int,
    overrides: tuple[str, ...],
    message: str,
) -> None:
    make_parent(tmp_path)
    if prepare is not None:
        prepare(tmp_path)
    before = contents(tmp_path)
    own = [override.format(folder=tmp_path) for override in overrides]
    said = refusal(capsys, words(tmp_path, at, *own))
    assert (message.format(folder=tmp_path) if "{folder}" in message else message) in said
    assert contents(tmp_path) == before


def test_where_nothing_is_left_to_train_that_alone_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_parent(tmp_path)
    said = refusal(capsys, words(tmp_path, 8, "schedule.length=8 steps"))
    assert "raise it" in said
    assert "problems:" not in said  # the past differs, too: it had no decay at these steps


def test_check_compares_with_the_newest_checkpoint_where_the_record_is_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a start does, with its own checkpoints, and with those of another run that it begins from."""
    root = make_parent(tmp_path) / "checkpoints"
    run_file = str(tmp_path / "run.toml")
    later = "schedule.decay=2 steps"  # it would have begun at step 10, and began at step 9
    (root / step_name(11) / MANIFEST).write_text("{")  # a start sets it aside
    assert main(["check", run_file, later]) == 0
    said = refusal(capsys, ["check", run_file, "seed=9"])
    assert f"`seed` is 9, but the run in {tmp_path}/out was started with 7; set it back" in said
    other = ["check", run_file, "name=other", f"out={tmp_path}/other", f"resume_from={root / step_name(8)}"]
    assert main(other) == 0
    said = refusal(capsys, [*other, later])
    assert (
        f"`schedule.decay` is 2 steps, but the run of {root / step_name(8)} was started with 3 steps" in said
    )
    said = refusal(capsys, ["audit", str(tmp_path / "out")])
    assert (
        "out has checkpoints, and no run.json that says whose they are: put it back, or start the run" in said
    )


def test_a_step_in_the_parents_decay_is_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_parent(tmp_path)
    command = words(tmp_path, 11, "schedule.length=12 steps", "phases.0.micro_batch_size=1")
    assert main(command) == 0
    said = capsys.readouterr().err
    assert "WARNING    step 11 is in the parent's decay, which started at step 9" in said


def test_across_file_systems_the_files_are_copied_and_a_full_disk_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_parent(tmp_path)

    def refuse(*paths: Path) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    with monkeypatch.context() as patch:
        patch.setattr(branch_module, "free_bytes", lambda folder: 100)
        said = refusal(capsys, words(tmp_path, 8))
        assert "cannot be linked there, and a copy takes" in said
        assert "where 100 B are free; free disk space" in said
        assert contents(tmp_path / "cool") == [".run.lock"]
    assert main(words(tmp_path, 8)) == 0
    assert " copied)" in capsys.readouterr().out
    root = tmp_path / "cool" / "checkpoints"
    assert not os.path.samefile(
        root / step_name(8) / SHARD, tmp_path / "out/checkpoints" / step_name(8) / SHARD
    )
    assert main(["checkpoints", str(tmp_path / "cool"), "verify"]) == 0


def _shipped_parent(folder: Path, place: str) -> list[str]:
    """A parent whose checkpoints are at a URL alone, and the command that names its run file."""
    from fsspec.core import url_to_fs

    out = make_parent(folder)
    fs, there = url_to_fs(place)
    for path in (out / "checkpoints").rglob("*"):
        if path.is_file():
            fs.pipe_file(f"{there}/{path.relative_to(out / 'checkpoints')}", path.read_bytes())
    shutil.rmtree(out)
    own = (folder / "run.toml").read_text()
    (folder / "cool.toml").write_text(own)
    (folder / "run.toml").write_text(
        own.replace("keep_last = 20", f'keep_last = 20\nlocal_dir = "{folder}/fast"\nupload_to = "{place}"')
    )
    command = words(folder, 8)
    return [command[0], str(folder / "run.toml"), *command[2:4], str(folder / "cool.toml"), *command[5:]]


def test_a_parent_at_a_url_is_fetched_and_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = f"memory://{tmp_path.name}/parent"
    command = _shipped_parent(tmp_path, place)
    assert main(command) == 0
    assert " fetched)" in capsys.readouterr().out
    ours = tmp_path / "cool" / "checkpoints" / step_name(8)
    assert (ours / SHARD).read_bytes() == bytes([8]) * 1000
    assert main(["checkpoints", str(tmp_path / "cool"), "verify"]) == 0
    record = read_record(tmp_path / "cool")
    assert record is not None
    assert record.lineage is not None
    assert record.lineage.directory == place
    assert main(["checkpoints", str(tmp_path / "cool")]) == 0
    assert f"at step 8: {place}/{step_name(8)} (run parent-id, manifest" in capsys.readouterr().out
    kept = main(["checkpoints", str(tmp_path / "run.toml"), "--uploaded"])
    assert (kept, "pinned" in capsys.readouterr().out) == (0, True)
    assert main(["checkpoints", str(tmp_path / "run.toml"), "unpin", "8", "--uploaded"]) == 0
    assert f"it was pinned because cool ({tmp_path}/cool) began from it" in capsys.readouterr().out
    # The place itself may be named, and is the parent's alone.
    other = [command[0], place, *command[2:], "name=other", f"out={tmp_path}/other"]
    assert main(other) == 0
    said = refusal(capsys, [*other, f"out={tmp_path}/more", f"checkpoint.upload_to={place}"])
    assert f"checkpoint.upload_to = {place} holds the parent's checkpoints" in said


def test_what_cannot_be_fetched_whole_is_refused_and_nothing_is_left_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsspec.core import url_to_fs

    place = f"memory://{tmp_path.name}/torn"
    command = _shipped_parent(tmp_path, place)
    said = refusal(capsys, [*command[:3], "7", *command[4:]])
    assert f"{place} has no checkpoint of step 7; it has: 11, 8, 4" in said
    with monkeypatch.context() as patch:
        patch.setattr(branch_module, "free_bytes", lambda folder: 100)
        assert "where 100 B are free; free disk space, or put `out` on a larger disk" in refusal(
            capsys, command
        )
    fs, there = url_to_fs(place)
    fs.pipe_file(f"{there}/{step_name(8)}/{SHARD}", b"x" * 1000)
    assert f"is broken: {SHARD} is not what its manifest says; branch from another" in refusal(
        capsys, command
    )
    assert contents(tmp_path / "cool") == [".run.lock"]
    secret = refusal(capsys, [command[0], "s3://key:hush@bucket/x", *command[2:]])
    assert "holds a user, a password or a query" in secret
    assert "hush" not in secret


def test_a_run_directory_whose_checkpoints_are_elsewhere_says_what_to_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = make_parent(tmp_path)
    (out / "checkpoints").rename(tmp_path / "shipped")
    (out / "run.toml").touch()
    said = refusal(capsys, words(tmp_path, 8))
    assert "out has no checkpoint; give the run file, whose checkpoint.upload_to names the remote" in said
    command = words(tmp_path, 8)
    assert main([command[0], str(tmp_path / "shipped"), *command[2:]]) == 0


def test_a_copy_that_reads_back_as_something_else_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_parent(tmp_path)

    def refuse(*paths: Path) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    fetch = Remote.download

    def flipped(self: Remote, step: int, name: str, path: Path) -> FileEntry:
        entry = fetch(self, step, name, path)
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        return entry

    monkeypatch.setattr(Remote, "download", flipped)
    said = refusal(capsys, words(tmp_path, 8))
    assert "was copied and reads back wrong (the checksum of run_state.json does not match" in said
    assert contents(tmp_path / "cool") == [".run.lock"]


def test_a_parent_that_cannot_be_written_to_is_branched_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_parent(tmp_path)

    def refuse(*words: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Remote, "write", refuse)
    assert main(words(tmp_path, 8)) == 0
    assert "could not be pinned (Permission denied): its run may prune it" in capsys.readouterr().err
