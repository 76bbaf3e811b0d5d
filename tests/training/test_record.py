"""The run directory: whose it is, how often it was started, and what a start may not change."""

import hashlib
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ds_pretrain.checkpoint.manifest import MANIFEST, RUN_STATE, FileEntry, Manifest, step_name
from ds_pretrain.config.plan import load_plan
from ds_pretrain.core.errors import InputError
from ds_pretrain.core.run_files import hold_run_directory, run_lock
from ds_pretrain.core.state import RunState
from ds_pretrain.training.compatibility import check_directory, claim_run
from ds_pretrain.training.record import (
    KnownRun,
    RunRecord,
    note_saved,
    read_known,
    read_newest_known_run,
    read_record,
)
from tests.scenario import make_run


def start(run_file: Path, *overrides: str, found_step: int | None = None) -> RunRecord:
    known = None if found_step is None else KnownRun("step", found_step, 1, None, {})
    plan = load_plan(run_file, overrides)
    lock = run_lock(plan.out)
    hold_run_directory(lock, plan.out, f"{plan.run_path}: out")
    try:
        return claim_run(plan, {}, known)
    finally:
        lock.release()


def refusal(run_file: Path, *overrides: str, found_step: int | None = None) -> str:
    with pytest.raises(InputError) as raised:
        start(run_file, *overrides, found_step=found_step)
    return str(raised.value)


def test_the_first_start_creates_the_directory_and_each_start_is_counted(tmp_path: Path) -> None:
    run_file = make_run(tmp_path)
    assert check_directory(load_plan(run_file), {}) == []
    assert not (tmp_path / "out").exists()
    first = start(run_file)
    assert (first.name, first.attempt, first.saved_step, first.changes) == ("tiny", 1, None, ())
    second = start(run_file)
    assert second == RunRecord("tiny", first.identity, 2, first.wandb_id, None)
    assert read_record(tmp_path / "out") == second
    assert sorted(os.listdir(tmp_path / "out")) == [".run.lock", "run.json"]


def test_a_saved_step_only_grows(tmp_path: Path) -> None:
    out = tmp_path / "out"
    start(make_run(tmp_path))
    for step, remembered in ((3, 3), (6, 6), (4, 6)):
        note_saved(out, step)
        record = read_record(out)
        assert record is not None
        assert record.saved_step == remembered


def test_a_run_whose_checkpoints_are_gone_never_starts_again_at_step_zero(tmp_path: Path) -> None:
    run_file = make_run(tmp_path)
    start(run_file)
    note_saved(tmp_path / "out", 1200)
    before = (tmp_path / "out" / "run.json").read_text()
    message = refusal(run_file, found_step=None)
    assert message.startswith(f"{tmp_path / 'out'} had a checkpoint at step 1,200 and now has none;")
    assert "put the checkpoints back, or give the run file a new `out`" in message
    assert (tmp_path / "out" / "run.json").read_text() == before
    assert start(run_file, found_step=900).attempt == 2


@pytest.mark.parametrize("text", ["", "{", "null", "[]", "{}", '{"name": "tiny"}', '{"changes": [], "x": 1}'])
def test_a_record_that_cannot_be_read_stops_the_start(tmp_path: Path, text: str) -> None:
    run_file = make_run(tmp_path)
    start(run_file)
    record = tmp_path / "out" / "run.json"
    record.write_text(text)
    message = refusal(run_file)
    assert message.startswith(f"{record} cannot be read (")
    assert "put an intact copy back" in message
    assert "or give the run file a new `out`" in message
    assert record.read_text() == text
    assert len(check_directory(load_plan(run_file), {})) == 1


def test_a_torn_record_stops_the_start(tmp_path: Path) -> None:
    run_file = make_run(tmp_path)
    start(run_file)
    record = tmp_path / "out" / "run.json"
    whole = record.read_bytes()
    for cut in range(0, len(whole) - 2, 37):
        record.write_bytes(whole[:cut])
        assert "cannot be read" in refusal(run_file)


def test_a_directory_of_another_run_is_refused(tmp_path: Path) -> None:
    run_file = make_run(tmp_path)
    start(run_file)
    message = refusal(run_file, "name=other")
    expected = f"{tmp_path / 'out'} holds the run 'tiny', and {run_file} is 'other'; give it its own `out`"
    assert message == expected


def test_a_second_start_is_refused_while_the_first_lives_however_it_was_launched(tmp_path: Path) -> None:
    plan = load_plan(make_run(tmp_path))
    first, second = run_lock(plan.out), run_lock(plan.out)
    hold_run_directory(first, plan.out, "out")
    with pytest.raises(InputError, match=rf"running already \(pid {os.getpid()} on .*touch .*out/stop"):
        second.take()
    assert first.is_held
    assert not second.is_held
    first.release()
    second.take()
    assert second.is_held
    second.release()


def test_a_folder_with_other_files_is_no_run_directory(tmp_path: Path) -> None:
    run_file = make_run(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "stop").touch()  # what a launch leaves is no reason
    assert check_directory(load_plan(run_file), {}) == []
    (tmp_path / "out" / "precious.txt").write_text("mine")
    [problem] = check_directory(load_plan(run_file), {})
    assert "holds files that are not of a run (precious.txt); give an empty or a new folder" in problem


def test_a_lost_record_is_made_again_from_the_checkpoint_and_compared(tmp_path: Path) -> None:
    """Without run.json the checkpoint says which run it is: another one may not go on from it."""
    run_file = make_run(tmp_path)
    first = start(run_file)
    known = KnownRun("step", 40, 3, first.wandb_id, first.identity)
    (tmp_path / "out" / "run.json").unlink()
    (tmp_path / "out" / "checkpoints").mkdir()
    with pytest.raises(InputError, match=r"holds the run 'tiny', and .* is 'other'"):
        claim_run(load_plan(run_file, ["name=other"]), {}, known)
    with pytest.raises(InputError, match="`seed` is 8"):
        claim_run(load_plan(run_file, ["seed=8"]), {}, known)
    record = claim_run(load_plan(run_file), {}, known)
    assert (record.attempt, record.wandb_id, record.saved_step) == (4, first.wandb_id, 40)


def test_a_run_that_goes_on_elsewhere_from_its_own_checkpoint_is_compared_up_to_there(tmp_path: Path) -> None:
    """That is none of this directory, which a later start must not miss. Of another run, all is compared."""
    run_file = make_run(tmp_path)
    first = start(run_file)
    origin = KnownRun("/a/step_000000004", 4, 3, first.wandb_id, first.identity, num_rollbacks=2)
    plan = load_plan(run_file, [f"out={tmp_path}/new", "schedule.length=20 steps", "schedule.decay=3 steps"])
    assert check_directory(plan, {}, None, origin) == []
    [problem] = check_directory(plan, {}, None, replace(origin, step=11))
    assert "`schedule.length` is 20 steps, but the run of /a/step_000000004 was started with 12" in problem
    other = load_plan(run_file, ["name=other", *plan.overrides])
    assert "`schedule.length` is 20 steps" in "".join(check_directory(other, {}, None, origin))
    other_seed = load_plan(run_file, ["seed=8", *plan.overrides])
    assert "`seed` is 8" in "".join(check_directory(other_seed, {}, None, origin))
    plan.out.mkdir()
    record = claim_run(plan, {}, None, origin)
    assert (record.attempt, record.saved_step, record.origin) == (1, None, origin.folder)
    assert [change["field"] for change in record.changes] == ["schedule.length"]
    assert record.wandb_id != first.wandb_id
    assert claim_run(plan, {}, None, origin).attempt == 2  # it died before it saved


BROKEN: dict[str, dict[str, str]] = {
    "a state that is a list": {RUN_STATE: "[]"},
    "a state without fields": {RUN_STATE: '{"version": 2}'},
    "a state of another version": {RUN_STATE: '{"version": 9}'},
    "a state that nests too deeply": {RUN_STATE: "[" * 100_000},
    "a state whose memory is a list": {
        RUN_STATE: '{"version": 2, "step": 8, "skips": [], "watchdog": []}',
    },
    "a state that is no text": {RUN_STATE: "\udcff"},
    "a torn state": {RUN_STATE: '{"version": 2, "st'},
    "a manifest that is a list": {MANIFEST: "[]"},
    "a manifest that nests too deeply": {MANIFEST: '{"version":' * 100_000},
    "a manifest that is no text": {MANIFEST: "\udcff"},
}


@pytest.mark.parametrize("texts", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("is_listed", [True, False])
def test_a_checkpoint_that_is_broken_is_passed_over_before_a_start_has_set_it_aside(
    tmp_path: Path, texts: dict[str, str], is_listed: bool
) -> None:
    """Also one whose manifest lists what its state says, as a program with a fault would write it."""
    plan = load_plan(make_run(tmp_path))
    intact, broken = (write_checkpoint(plan.checkpoints / step_name(step), step) for step in (4, 8))
    known = read_newest_known_run(plan.checkpoints)
    assert known is not None
    assert known.step == 8
    write_checkpoint(broken, 8, texts.get(RUN_STATE) if is_listed else None)
    for name, text in texts.items():
        (broken / name).write_bytes(text.encode(errors="surrogateescape"))
    known = read_newest_known_run(plan.checkpoints)
    assert known is not None
    assert known.folder == str(intact)
    assert read_known(broken) is None


@pytest.mark.parametrize("name", [MANIFEST, RUN_STATE])
def test_a_file_of_a_checkpoint_that_is_a_folder_or_gone_is_passed_over(tmp_path: Path, name: str) -> None:
    plan = load_plan(make_run(tmp_path))
    folder = write_checkpoint(plan.checkpoints / step_name(8), 8)
    (folder / name).unlink()
    assert read_newest_known_run(plan.checkpoints) is None
    (folder / name).mkdir()
    assert read_newest_known_run(plan.checkpoints) is None
    shutil.rmtree(folder)
    folder.touch()
    assert read_newest_known_run(plan.checkpoints) is None


def test_a_state_that_is_not_the_one_that_was_saved_and_a_manifest_of_another_step_say_nothing(
    tmp_path: Path,
) -> None:
    """A start sets both aside: what they say must not be what it is compared with."""
    plan = load_plan(make_run(tmp_path))
    folder = write_checkpoint(plan.checkpoints / step_name(8), 8)
    (folder / RUN_STATE).write_text(RunState(9).to_json())
    assert read_newest_known_run(plan.checkpoints) is None
    write_checkpoint(folder, 8)
    folder.rename(folder.with_name(step_name(12)))
    assert read_newest_known_run(plan.checkpoints) is None
    moved = folder.with_name("copy of 8")  # any name will do to begin from
    folder.with_name(step_name(12)).rename(moved)
    origin = read_known(moved)
    assert origin is not None
    assert origin.step == 8


def write_checkpoint(folder: Path, step: int, state: str | None = None) -> Path:
    """A checkpoint as far as anything without torch looks at it."""
    folder.mkdir(parents=True, exist_ok=True)
    text = RunState(step).to_json() if state is None else state
    content = text.encode(errors="surrogateescape")
    (folder / RUN_STATE).write_bytes(content)
    manifest = Manifest(
        step=step,
        tokens=0,
        samples=0,
        world_size=1,
        zero_stage=3,
        versions={},
        created="2026-01-01T00:00:00+00:00",
        attempt=1,
        wandb_id="id",
        overrides=(),
        identity={"name": "tiny"},
        files={RUN_STATE: FileEntry(len(content), hashlib.sha256(content).hexdigest())},
    )
    (folder / MANIFEST).write_text(manifest.to_json())
    return folder


def test_an_out_that_cannot_be_a_folder_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    run_file = make_run(tmp_path)
    (tmp_path / "file").touch()
    before = sorted(os.listdir(tmp_path))
    message = refusal(run_file, f"out={tmp_path / 'file' / 'out'}")
    assert message.startswith(f"{run_file}: out = {tmp_path / 'file' / 'out'}: cannot write there")
    assert sorted(os.listdir(tmp_path)) == before


def test_an_out_that_turns_out_unwritable_is_refused(tmp_path: Path) -> None:
    message = refusal(make_run(tmp_path), "out=/proc/ds_pretrain_out")
    assert "out = /proc/ds_pretrain_out: cannot write there (" in message
    assert "choose another folder" in message
