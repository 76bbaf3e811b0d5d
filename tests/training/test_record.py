"""The run directory: whose it is, how often it was started, and what a start may not change."""

import hashlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ds_pretrain.checkpoint.manifest import MANIFEST, RUN_STATE, FileEntry, Manifest, step_name
from ds_pretrain.config.plan import load_plan
from ds_pretrain.core.errors import InputError
from ds_pretrain.core.run_lock import RunLock
from ds_pretrain.core.state import Rollback, RunState, Skip, SkipLedger
from ds_pretrain.training.known_run import KnownRun
from ds_pretrain.training.preflight import open_inputs
from ds_pretrain.training.record import (
    RunRecord,
    claim,
    directory_problems,
    note_saved,
    read_record,
)
from ds_pretrain.training.standing import newest_here, origin_here
from ds_pretrain.watchdog.rollback_log import write_cure
from tests.scenario import deepspeed_json, make_run, write_corpus


def start(run_file: Path, *overrides: str, found_step: int | None = None) -> RunRecord:
    known = None if found_step is None else KnownRun("step", found_step, 1, None, {})
    plan = load_plan(run_file, overrides)
    lock = RunLock(plan)
    lock.take()
    try:
        return claim(plan, {}, known)
    finally:
        lock.release()


def refusal(run_file: Path, *overrides: str, found_step: int | None = None) -> str:
    with pytest.raises(InputError) as raised:
        start(run_file, *overrides, found_step=found_step)
    return str(raised.value)


def test_the_first_start_creates_the_directory_and_each_start_is_counted(tmp_path: Path) -> None:
    run_file = make_run(tmp_path)
    assert directory_problems(load_plan(run_file), {}) == []
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
    assert len(directory_problems(load_plan(run_file), {})) == 1


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
    expected = (
        f"{tmp_path / 'out'} holds the run 'tiny', and {run_file} is 'other'; give it an `out` of its own"
    )
    assert message == expected


def test_a_second_start_is_refused_while_the_first_lives_however_it_was_launched(tmp_path: Path) -> None:
    plan = load_plan(make_run(tmp_path))
    first, second = RunLock(plan), RunLock(plan)
    first.take()
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
    assert directory_problems(load_plan(run_file), {}) == []
    (tmp_path / "out" / "precious.txt").write_text("mine")
    [problem] = directory_problems(load_plan(run_file), {})
    assert "holds files that are not of a run (precious.txt); give an empty or a new folder" in problem


def test_a_lost_record_is_made_again_from_the_checkpoint_and_compared(tmp_path: Path) -> None:
    """Without run.json the checkpoint says which run it is: another one may not go on from it."""
    run_file = make_run(tmp_path)
    first = start(run_file)
    known = KnownRun("step", 40, 3, first.wandb_id, first.identity)
    (tmp_path / "out" / "run.json").unlink()
    (tmp_path / "out" / "checkpoints").mkdir()
    with pytest.raises(InputError, match=r"holds the run 'tiny', and .* is 'other'"):
        claim(load_plan(run_file, ["name=other"]), {}, known)
    with pytest.raises(InputError, match="`seed` is 8"):
        claim(load_plan(run_file, ["seed=8"]), {}, known)
    record = claim(load_plan(run_file), {}, known)
    assert (record.attempt, record.wandb_id, record.saved_step) == (4, first.wandb_id, 40)


def test_a_run_that_goes_on_elsewhere_from_its_own_checkpoint_is_compared_up_to_there(tmp_path: Path) -> None:
    """That is none of this directory, which a later start must not miss. Of another run, all is compared."""
    run_file = make_run(tmp_path)
    first = start(run_file)
    origin = KnownRun("/a/step_000000004", 4, 3, first.wandb_id, first.identity, num_rollbacks=2)
    plan = load_plan(run_file, [f"out={tmp_path}/new", "schedule.length=20 steps", "schedule.decay=3 steps"])
    assert directory_problems(plan, {}, None, origin) == []
    [problem] = directory_problems(plan, {}, None, replace(origin, step=11))
    assert "`schedule.length` is 20 steps, but the run of /a/step_000000004 was started with 12" in problem
    other = load_plan(run_file, ["name=other", *plan.overrides])
    assert "`schedule.length` is 20 steps" in "".join(directory_problems(other, {}, None, origin))
    other_seed = load_plan(run_file, ["seed=8", *plan.overrides])
    assert "`seed` is 8" in "".join(directory_problems(other_seed, {}, None, origin))
    plan.out.mkdir()
    record = claim(plan, {}, None, origin)
    assert (record.attempt, record.saved_step, record.origin) == (1, None, origin.folder)
    assert [change["field"] for change in record.changes] == ["schedule.length"]
    assert record.wandb_id != first.wandb_id
    assert claim(plan, {}, None, origin).attempt == 2  # it died before it saved


BROKEN: dict[str, dict[str, str]] = {
    "a state that is a list": {RUN_STATE: "[]"},
    "a state without fields": {RUN_STATE: '{"version": 1}'},
    "a state of another version": {RUN_STATE: '{"version": 9}'},
    "a state that nests too deeply": {RUN_STATE: "[" * 100_000},
    "a state whose memory is a list": {
        RUN_STATE: '{"version": 1, "step": 8, "skips": [], "watchdog": []}',
    },
    "a state that is no text": {RUN_STATE: "\udcff"},
    "a torn state": {RUN_STATE: '{"version": 1, "st'},
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
    known = newest_here(plan)
    assert known is not None
    assert known.step == 8
    write_checkpoint(broken, 8, texts.get(RUN_STATE) if is_listed else None)
    for name, text in texts.items():
        (broken / name).write_bytes(text.encode(errors="surrogateescape"))
    known = newest_here(plan)
    assert known is not None
    assert known.folder == str(intact)
    assert origin_here(load_plan(plan.run_path, [f"resume_from={broken}"])) is None


@pytest.mark.parametrize("name", [MANIFEST, RUN_STATE])
def test_a_file_of_a_checkpoint_that_is_a_folder_or_gone_is_passed_over(tmp_path: Path, name: str) -> None:
    plan = load_plan(make_run(tmp_path))
    folder = write_checkpoint(plan.checkpoints / step_name(8), 8)
    (folder / name).unlink()
    assert newest_here(plan) is None
    (folder / name).mkdir()
    assert newest_here(plan) is None
    shutil.rmtree(folder)
    folder.touch()
    assert newest_here(plan) is None


def test_a_state_that_is_not_the_one_that_was_saved_and_a_manifest_of_another_step_say_nothing(
    tmp_path: Path,
) -> None:
    """A start sets both aside: what they say must not be what it is compared with."""
    plan = load_plan(make_run(tmp_path))
    folder = write_checkpoint(plan.checkpoints / step_name(8), 8)
    (folder / RUN_STATE).write_text(RunState(9).to_json())
    assert newest_here(plan) is None
    write_checkpoint(folder, 8)
    folder.rename(folder.with_name(step_name(12)))
    assert newest_here(plan) is None
    moved = folder.with_name("copy of 8")  # any name will do to begin from
    folder.with_name(step_name(12)).rename(moved)
    origin = origin_here(load_plan(plan.run_path, [f"resume_from={moved}"]))
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


# An override of the second start, the field that it changes, and whether accept_changes can let it through.
CHANGES = [
    ("seed=8", "seed", False),
    ("model.qk_norm=false", "model.qk_norm", False),
    ("batch.tokens=256", "batch.tokens", False),
    ("phases.0.seq_len=8", "phases.main.seq_len", False),
    ("phases.0.mixture.code=0.4", "phases.main.mixture.code", False),
    ("schedule.peak=0.5", "schedule.peak", True),
    ("schedule.floor=0.5", "schedule.floor", True),
    ("schedule.warmup=1 steps", "schedule.warmup", True),
    ("schedule.shape=linear", "schedule.shape", True),
    ("model.z_loss=off", "model.z_loss", True),
    ("model.recompute=true", "model.recompute", True),
    ("model.attention=eager", "model.attention", True),
    ("model.decay_embeddings=true", "model.decay_embeddings", True),
]


@pytest.mark.parametrize(("override", "field", "acceptable"), CHANGES, ids=[row[0] for row in CHANGES])
def test_a_change_of_what_the_run_is_has_to_be_meant(
    tmp_path: Path, override: str, field: str, acceptable: bool
) -> None:
    run_file = make_run(tmp_path)
    first = start(run_file)
    message = refusal(run_file, override)
    assert message.startswith(f"{run_file}: `{field}` is ")
    assert f"but the run in {tmp_path / 'out'} was started with" in message
    assert read_record(tmp_path / "out") == first
    if not acceptable:
        assert message.endswith("set it back, or start another run with a new `name` and `out`")
        return
    assert message.endswith(f'set it back, or accept it with accept_changes = ["{field}"]')
    record = start(run_file, override, f'accept_changes=["{field}"]')
    (change,) = record.changes
    assert (change["attempt"], change["field"]) == (2, field)
    assert change["old"] != change["new"]
    assert start(run_file, override).changes == record.changes  # it is the run's own value from now on
    assert f"`{field}`" in refusal(run_file)


def test_past_is_what_the_newest_checkpoint_has_though_a_kill_kept_it_from_being_noted(
    tmp_path: Path,
) -> None:
    run_file = make_run(tmp_path)
    start(run_file)
    note_saved(tmp_path / "out", 4)
    changed = ("schedule.decay=6 steps",)  # the decay would have begun at step 6
    known = KnownRun("step", 4, 1, None, {})
    assert directory_problems(load_plan(run_file, changed), {}, known) == []
    [problem] = directory_problems(load_plan(run_file, changed), {}, replace(known, step=8))
    assert "`schedule.decay` is 6 steps" in problem
    assert "`schedule.decay` is 6 steps" in refusal(run_file, *changed, found_step=8)
    assert start(run_file, *changed, found_step=4).changes[-1]["field"] == "schedule.decay"


AHEAD = "[[phases]]\nname = 'long'\nstart = '8 steps'\nseq_len = 32\nmixture = { text = 1.0 }\n[validation]"


def test_what_lies_ahead_may_change_and_is_noted_and_what_is_past_may_not(tmp_path: Path) -> None:
    """Twelve steps of a WSD schedule, of which the last three decay; seven are done."""
    run_file = make_run(tmp_path)
    plain = run_file.read_text()
    source = f'text = "{tmp_path}/text"'
    text = plain.replace(source, f'text = {{ path = "{tmp_path}/text", chunk_tokens = 32 }}')
    run_file.write_text(text)
    start(run_file)
    note_saved(tmp_path / "out", 7)
    longer = ("schedule.length=20 steps", "schedule.decay=4 steps")
    record = start(run_file, *longer, found_step=7)
    assert {change["field"] for change in record.changes} == {"schedule.length", "schedule.decay"}
    run_file.write_text(text.replace("[validation]", AHEAD))
    assert start(run_file, *longer, found_step=7).changes[-1]["field"] == "phases.long"
    message = refusal(run_file, *longer, "schedule.peak=2e-3", found_step=7)
    assert "`schedule.peak` is 0.002, but the run in" in message
    assert "was started with 0.01" in message
    run_file.write_text(text.replace("[validation]", AHEAD.replace("8 steps", "6 steps")))
    assert "`phases.long.first_step` is 6 steps" in refusal(run_file, *longer, found_step=7)
    run_file.write_text(plain)
    cut = refusal(run_file, *longer, found_step=7)
    assert "sources.text was read in chunks of 32 tokens, and would go on in chunks of 16" in cut
    run_file.write_text(text)
    note_saved(tmp_path / "out", 18)  # the decay has begun: its end is fixed
    assert "`schedule.length` is 30 steps" in refusal(
        run_file, *longer, "schedule.length=30 steps", found_step=18
    )


def test_a_ramp_that_goes_on_keeps_past_rates_with_the_batch_that_they_were_meant_for(tmp_path: Path) -> None:
    run_file = make_run(tmp_path)
    ramp = ['batch.ramp={ "0" = 64, "3 steps" = 128 }', "batch.rate_rule=sqrt"]
    start(run_file, *ramp)
    note_saved(tmp_path / "out", 6)
    longer = ['batch.ramp={ "0" = 64, "3 steps" = 128, "8 steps" = 256 }', "batch.rate_rule=sqrt"]
    longer.append("batch.tokens=256")
    assert refusal(run_file, *longer, found_step=6) == (
        f"{run_file}: `batch.rate_tokens` is 256 tokens, but the run in {tmp_path / 'out'} was started with "
        "128 tokens: the rule multiplies the rates of past steps by the size of their batch over "
        "batch.rate_tokens (which is batch.tokens where the file does not say it), so they would be others; "
        "batch.rate_tokens = 128 leaves them as they were; set it back, or start another run with a new "
        "`name` and `out`"
    )
    linear = refusal(run_file, *ramp, "batch.rate_rule=linear", found_step=6)
    assert '`batch.rate_rule` is "linear", but the run in' in linear
    assert "so they would be others; set it back, or" in linear
    record = start(run_file, *longer, "batch.rate_tokens=128", found_step=6)
    assert {change["field"] for change in record.changes} == {"batch.ramp", "batch.tokens"}


def test_a_phase_that_a_rollback_left_and_skips_of_may_not_change_what_it_draws(tmp_path: Path) -> None:
    """It begins at the checkpoint that was gone back to, and the run died before it saved again."""
    run_file = make_run(tmp_path)
    text = run_file.read_text().replace("[validation]", AHEAD)
    run_file.write_text(text)
    start(run_file)
    note_saved(tmp_path / "out", 8)
    rollback = Rollback(8, 11, 10, "lasting_spike", "skip", 1)
    ledger = SkipLedger((Skip("long", 8, 24, "lasting_spike", 11, 1),))
    write_cure(tmp_path / "out", RunState(8, ledger, rollbacks=(rollback,)))
    run_file.write_text(text.replace("text = 1.0", "text = 0.5, code = 0.5"))
    assert "`phases.long.mixture.text` is 0.5, but the run in" in refusal(run_file, found_step=8)
    run_file.write_text(text.replace("name = 'long'", "name = 'raised'"))
    assert "the phase `long` is called `raised`, but the run in" in refusal(run_file, found_step=8)
    run_file.write_text(text + "[watchdog]\npatience = 40\n")
    start(run_file, found_step=8)


def test_a_phase_that_is_past_and_gone_or_new_is_told_so(tmp_path: Path) -> None:
    run_file = make_run(tmp_path)
    plain = run_file.read_text()
    ahead = plain.replace("[validation]", AHEAD)
    for name, first, second, words in (
        ("gone", ahead, plain, "`phases.long` is no longer there, but the run in"),
        ("new", plain, ahead, "new was started without it; set it back"),
    ):
        folder = tmp_path / name
        own = [text.replace(f'out = "{tmp_path}/out"', f'out = "{folder}"') for text in (first, second)]
        run_file.write_text(own[0])
        start(run_file)
        note_saved(folder, 9)
        run_file.write_text(own[1])
        said = refusal(run_file, found_step=9)
        assert words in said
        assert 'sequences of 32 tokens of 1 text, from step 8 on (rope kind "default", theta 10000)' in said
        for unreadable in ("null", "None", "{", "first_step"):
            assert unreadable not in said


LONG = AHEAD.replace(
    "[validation]", "ROPE\n[[phases]]\nname = 'last'\nstart = '10 steps'\nseq_len = 32\n"
) + ("mixture = { text = 1.0 }\n[validation]")


@pytest.mark.parametrize(
    ("before", "after", "fields"),
    [
        ("", "rope = { theta = 10_000 }", ()),  # what the model has in any case
        ("", "rope = { kind = 'default' }", ()),
        (
            "rope = { theta = 1e4 }",
            "rope = { theta = 1e5 }",
            ("`phases.long.rope.theta` is 100000, {with 10000;",),
        ),
        ("", "rope = { theta = 1e5 }", ("`phases.long.rope.theta` is 100000, {with 10000;",)),
        (
            "rope = { kind = 'yarn', factor = 2 }",
            "rope = { kind = 'yarn', factor = 2, original_length = 128 }",
            (),
        ),
        (
            "",
            "rope = { kind = 'yarn', factor = 2 }",
            (
                '`phases.long.rope.kind` is "yarn", {with "default";',
                "`phases.long.rope.factor` is 2, {without it;",
                "`phases.long.rope.original_length` is 128, {without it;",
            ),
        ),
    ],
)
def test_of_a_past_rope_counts_what_it_makes_of_positions_and_only_what_differs_is_told(
    tmp_path: Path, before: str, after: str, fields: tuple[str, ...]
) -> None:
    run_file = make_run(tmp_path)
    text = run_file.read_text()
    first, second = (text.replace("[validation]", LONG.replace("ROPE", rope)) for rope in (before, after))
    run_file.write_text(first)
    start(run_file)
    note_saved(tmp_path / "out", 12)
    run_file.write_text(second)
    if not fields:
        assert start(run_file, found_step=12).changes == ()
        run_file.write_text(first)
        assert start(run_file, found_step=12).changes == ()
        return
    said = refusal(run_file, found_step=12)
    assert said.count("` is ") == len(fields)  # the last phase inherits it, which is not told again
    for field in fields:
        assert field.replace("{", f"but the run in {tmp_path}/out was started ") in said


def test_a_rope_ahead_is_noted_by_what_differs(tmp_path: Path) -> None:
    run_file = make_run(tmp_path)
    text = run_file.read_text()
    run_file.write_text(text.replace("[validation]", LONG.replace("ROPE", "")))
    start(run_file)
    note_saved(tmp_path / "out", 4)
    run_file.write_text(text.replace("[validation]", LONG.replace("ROPE", "rope = { theta = 1e5 }")))
    [change] = start(run_file, found_step=4).changes
    assert (change["field"], change["old"], change["new"]) == ("phases.long.rope.theta", 1e4, 1e5)


def test_a_phase_that_is_only_called_otherwise_is_told_as_renamed(tmp_path: Path) -> None:
    run_file = make_run(tmp_path)
    text = run_file.read_text().replace("[validation]", LONG.replace("ROPE", ""))
    run_file.write_text(text)
    start(run_file)
    note_saved(tmp_path / "out", 9)
    run_file.write_text(text.replace("name = 'last'", "name = 'anneal'"))
    [change] = start(run_file, found_step=9).changes
    assert (change["field"], change["old"], change["new"]) == ("phases.last.name", "last", "anneal")
    run_file.write_text(text.replace("name = 'long'", "name = 'longer'").replace("'last'", "'anneal'"))
    assert refusal(run_file, found_step=9) == (
        f"{run_file}: the phase `long` is called `longer`, but the run in {tmp_path}/out was started with it "
        "as `long`; set it back, or start another run with a new `name` and `out`"
    )


def test_a_source_that_was_drawn_from_and_is_in_no_mixture_any_more_is_told_by_the_mixture(
    tmp_path: Path,
) -> None:
    run_file = make_run(tmp_path)
    text = run_file.read_text()
    start(run_file)
    note_saved(tmp_path / "out", 4)
    run_file.write_text(text.replace("{ text = 0.7, code = 0.3 }", "{ text = 0.7 }"))
    message = refusal(run_file, found_step=4)
    assert "`phases.main.mixture.code` is no longer there, but the run in" in message
    assert "was started with 0.3; set it back" in message
    assert "chunk" not in message


def test_of_a_model_config_counts_what_a_model_is_made_of(tmp_path: Path) -> None:
    run_file = make_run(tmp_path)
    start(run_file)
    config = json.loads((tmp_path / "model.json").read_text())
    spelled = {"use_cache": False, "torch_dtype": "bfloat16", "hidden_act": "silu", "rope_theta": 10_000.0}
    make_run(tmp_path, model={**config, **spelled})
    assert start(run_file).changes == ()
    make_run(tmp_path, model={**config, "rope_theta": 5e5, "hidden_act": "gelu"})
    message = refusal(run_file)
    assert "`model.config.rope.theta` is 500000, but the run in" in message
    assert '`model.config.hidden_act` is "gelu", but the run in' in message
    assert "2 problems" in message


def test_a_section_in_accept_changes_lets_each_of_its_fields_through(tmp_path: Path) -> None:
    run_file = make_run(tmp_path)
    start(run_file)
    record = start(run_file, "schedule.peak=0.5", "schedule.floor=0.1", 'accept_changes=["schedule"]')
    assert [change["field"] for change in record.changes] == ["schedule.peak", "schedule.floor"]
    assert "`model.z_loss`" in refusal(
        run_file, "schedule.peak=0.5", "schedule.floor=0.1", "model.z_loss=off", 'accept_changes=["schedule"]'
    )


def test_all_changes_are_reported_at_once(tmp_path: Path) -> None:
    run_file = make_run(tmp_path)
    start(run_file)
    problems = directory_problems(
        load_plan(run_file, ["seed=8", "schedule.peak=0.5", "model.qk_norm=false"]), {}
    )
    assert len(problems) == 3


@pytest.mark.parametrize("override", ["batch.micro_sequences=4", "monitor.every=9", "checkpoint.keep=1"])
def test_what_leaves_the_trajectory_alone_may_change(tmp_path: Path, override: str) -> None:
    run_file = make_run(tmp_path)
    start(run_file)
    assert start(run_file, override).changes == ()


def test_a_changed_model_config_is_refused_by_its_own_key(tmp_path: Path) -> None:
    run_file = make_run(tmp_path)
    start(run_file)
    config = json.loads((tmp_path / "model.json").read_text())
    make_run(tmp_path, model={**config, "num_hidden_layers": 3})
    message = refusal(run_file)
    assert f"{run_file}: `model.config.num_hidden_layers` is 3, but" in message
    assert "was started with 2;" in message


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


def test_p05_data_that_changed_is_refused_and_a_corpus_that_moved_is_not(tmp_path: Path) -> None:
    """A source is its content: other tokens need a word, the same tokens elsewhere do not."""
    run_file = make_run(tmp_path)
    plan = load_plan(run_file)
    data = open_inputs(plan).data
    plan.out.mkdir()
    claim(plan, data, None)

    for ending in ("bin", "idx", "json"):
        shutil.copy(tmp_path / f"code.{ending}", tmp_path / f"moved.{ending}")
    moved = load_plan(run_file, [f"sources.code={tmp_path}/moved"])
    assert directory_problems(moved, open_inputs(moved).data) == []

    write_corpus(tmp_path / "code", seed=99)
    changed = open_inputs(plan).data
    [problem] = directory_problems(plan, changed)
    assert "`sources.code` is" in problem
    assert changed["code"] in problem
    assert data["code"] in problem
    assert 'accept_changes = ["sources.code"]' in problem
    accepting = load_plan(run_file, ['accept_changes=["sources.code"]'])
    record = claim(accepting, changed, None)
    assert record.changes == (
        {"attempt": 2, "field": "sources.code", "old": data["code"], "new": changed["code"]},
    )


def test_an_option_of_the_optimizer_that_a_load_would_override_is_refused(tmp_path: Path) -> None:
    run_file = make_run(tmp_path)
    start(run_file)
    changed = deepspeed_json()
    changed["optimizer"]["params"] |= {"weight_decay": 0.2, "torch_adam": False}
    (tmp_path / "deepspeed.json").write_text(json.dumps(changed))
    problems = directory_problems(load_plan(run_file), {})
    assert len(problems) == 1  # how Adam is computed may change
    assert "`deepspeed.optimizer.params.weight_decay` is 0.2" in problems[0]


@pytest.mark.parametrize(
    "damage", [{"phases": None}, {"batch": {"tokens": 128, "ramp": "x"}}, {"schedule": 3}]
)
def test_an_identity_that_cannot_be_read_says_where_an_intact_one_is(tmp_path: Path, damage: object) -> None:
    run_file = make_run(tmp_path)
    start(run_file)
    note_saved(tmp_path / "out", 4)
    path = tmp_path / "out" / "run.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "identity": {**record["identity"], **damage}}))  # type: ignore[dict-item]
    said = refusal(run_file, found_step=4)
    assert f"the run in {tmp_path / 'out'} has an identity that cannot be read (" in said
    assert said.endswith(
        "put an intact run.json back: the manifest of each checkpoint has the same `identity`"
    )
