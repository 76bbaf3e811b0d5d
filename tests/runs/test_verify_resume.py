"""`ds-pretrain verify-resume`: what it proves on real ranks, and that it finds what is planted."""

import fcntl
import json
import math
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ds_pretrain.checkpoint.manifest import list_published, parse_step
from ds_pretrain.commands.cli import main
from ds_pretrain.commands.verify_resume import (
    Workdir,
    describe_coverage,
    find_first_difference,
    verify_resume,
)
from ds_pretrain.config.plan import load_plan
from ds_pretrain.config.timeline import Segment, Timeline
from ds_pretrain.core.distributed import World
from ds_pretrain.core.errors import InputError
from ds_pretrain.core.jsonl import read_metrics
from ds_pretrain.data.sampler import Sampler
from ds_pretrain.engine import partitions
from tests.harness import record_run
from tests.ranks import run_ranks
from tests.scenario import LLAMA, make_run
from tests.tiers import slow_but

K = 2
NO_DROPOUT = {**LLAMA, "attention_dropout": 0.0}  # so that a random stream bears on nothing else
Plant = Callable[[World, Any, pytest.MonkeyPatch], None]  # does harm to a start that has resumed


@pytest.mark.slow
def test_a_resumed_run_is_proven_to_be_the_uninterrupted_one(tmp_path: Path) -> None:
    """Two real launches of two ranks; the run file's own places and services are left alone."""
    run_file = make_run(tmp_path / "run", save_every="1 steps")
    text = run_file.read_text().replace(
        "keep_last = 20", f'keep_last = 1\nlocal_dir = "{tmp_path}/nvme"\nupload_to = "s3://no"'
    )
    run_file.write_text(text + 'wandb = "online"\n')
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "ds_pretrain",
            "verify-resume",
            str(run_file),
            "--ranks",
            "2",
            "--steps",
            str(K),
        ],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-2:] == [
        "bitwise equal: 75 tensors, 2 steps, 6 random streams on 2 ranks",
        "proved     a resume after step 2, through steps 3 to 4: main",
    ]
    assert "resume " in done.stdout
    assert f"{tmp_path}/nvme" not in done.stdout
    assert not (tmp_path / "nvme").exists()
    assert not (tmp_path / "run/out").exists()
    assert not (tmp_path / "run/out.verify-resume").exists()


def _launch(run_file: str, overrides: Sequence[str], flags: Sequence[str], plant: Any = None) -> int:
    """Two ranks that `plant` acts on once a checkpoint has been restored; their exit code."""
    last = int(flags[flags.index("--stop-after") + 1])
    options: dict[str, Any] = {"stop_after": last, "plant": plant}
    return int(run_ranks(record_run, 2, run_file, tuple(overrides), **options)[0].code)


LONG = """
[[phases]]
name = "long"
start = "6 steps"
seq_len = 32
micro_batch_size = 1
mixture = { text = 1.0 }
rope = { theta = 5e4 }
"""


def test_from_a_checkpoint_of_the_run_a_resume_on_a_change_of_phase_is_proven(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file = make_run(tmp_path, save_every="4 steps", extra=LONG)
    _launch(str(run_file), (), ("--stop-after", "5"))
    kept = sorted(path.name for path in (tmp_path / "out" / "checkpoints").iterdir())
    resumed: list[str] = []

    def start(overrides: Sequence[str], flags: Sequence[str]) -> int:
        code = _launch(str(run_file), overrides, flags)
        out = tmp_path / "out.verify-resume" / "run"
        events = [r for r in read_metrics(out / "metrics.jsonl") if r["event"] == "resume"]
        resumed.append(f"{events[-1]['checkpoint']}: {events[-1]['probe']}")
        return code

    assert verify_resume(str(run_file), (), K, start, begin=4) == 0
    assert [line.partition(": ")[0] for line in resumed] == ["step_000000004", "step_000000006"]
    assert all("matches" in line for line in resumed)
    said = capsys.readouterr().out.splitlines()
    assert said[-3].startswith("bitwise equal: 75 tensors, 2 steps, ")
    assert said[-2] == "proved     a resume after step 6, through steps 7 to 8: long"
    assert said[-1].startswith("not proved main from step 0; --from STEP starts at a checkpoint of the run")
    assert sorted(path.name for path in (tmp_path / "out" / "checkpoints").iterdir()) == kept
    with pytest.raises(InputError, match="has no checkpoint of step 3; it has: 5, 4"):
        verify_resume(str(run_file), (), K, start, begin=3)
    with pytest.raises(InputError, match="is 12 steps, and the proof trains 10 after step 4"):
        verify_resume(str(run_file), (), 5, start, begin=4)


def test_what_is_saved_at_a_phases_end_between_the_two_saves_is_out_of_the_second_launchs_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file = make_run(tmp_path)
    change = LONG.replace("6 steps", "3 steps")
    run_file.write_text(run_file.read_text().replace("[validation]", f"{change}[validation]"))
    place, found = Workdir(tmp_path / "out.verify-resume"), []

    def start(overrides: Sequence[str], flags: Sequence[str]) -> int:
        found.append(published_steps(place))
        code = _launch(str(run_file), overrides, flags)
        found.append(published_steps(place))
        return code

    assert verify_resume(str(run_file), (), K, start) == 0, capsys.readouterr().out
    assert found == [[], [4, 3, 2, 1], [2, 1], [4, 3, 2, 1]]
    assert "proved     a resume after step 2, through steps 3 to 4: main, long" in capsys.readouterr().out


def published_steps(place: Workdir) -> list[int | None]:
    """Those that a start would find, newest first."""
    return [parse_step(folder.name) for folder in list_published(place.out / "checkpoints")]


def test_all_that_was_saved_after_the_middle_is_put_aside_whatever_its_name_ends_in(tmp_path: Path) -> None:
    """A start would give a whole `.replaced.partial` its name back, and go on from there."""
    run_file, place = str(make_run(tmp_path)), Workdir(tmp_path / "out.verify-resume")
    endings = ("step_000000005", "step_000000005.replaced.partial", "step_000000004.abandoned_1")
    seen: list[list[str]] = []

    def start(overrides: Sequence[str], flags: Sequence[str]) -> int:
        root = place.out / "checkpoints"
        if not root.is_dir():
            for name in ("step_000000003", "step_000000003.broken", "step_000000006", "latest", *endings):
                (root / name).mkdir(parents=True)
            return 0
        seen.append(sorted(path.name for path in root.iterdir()))
        return 1

    assert verify_resume(run_file, (), 3, start) == 1
    assert seen == [["latest", "step_000000003", "step_000000003.broken"]]
    assert sorted(p.name for p in place.straight(6).parent.iterdir()) == sorted([*endings, "step_000000006"])


@pytest.mark.parametrize(
    ("event", "where"),
    [
        ({"event": "resume", "attempt": 2, "step": 1}, "after step 1"),
        ({"event": "start", "attempt": 2, "step": 0}, "after step 0"),
        ({"event": "resume", "attempt": 1, "step": 3}, "at a step that metrics.jsonl does not show"),
    ],
)
def test_a_second_launch_that_did_not_go_on_from_the_middle_proves_nothing(
    event: dict[str, Any], where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file, place = str(make_run(tmp_path)), Workdir(tmp_path / "out.verify-resume")

    def start(overrides: Sequence[str], flags: Sequence[str]) -> int:
        for step in (3, 6):
            place.saved(step).mkdir(parents=True, exist_ok=True)
        (place.out / "metrics.jsonl").write_text(json.dumps(event) + "\n")
        return 0

    assert verify_resume(run_file, (), 3, start) == 1
    said = capsys.readouterr().out
    assert f"the second launch went on {where}, expected 3 (see above why); nothing is proven" in said
    assert "not the uninterrupted one" not in said
    assert said.endswith(f"kept for a closer look: {place.folder}\n")


def test_a_branch_is_proven_from_its_first_checkpoint_which_has_its_parents_past(tmp_path: Path) -> None:
    """And so is a run whose plan ahead of the checkpoint has changed since."""
    _launch(str(make_run(tmp_path, save_every="4 steps")), (), ("--stop-after", "4"))
    run_file = tmp_path / "cool.toml"
    text = (tmp_path / "run.toml").read_text().replace('name = "tiny"', 'name = "cool"')
    text = text.replace("12 steps", "9 steps")
    run_file.write_text(text.replace(f'out = "{tmp_path}/out"', f'out = "{tmp_path}/cool"'))
    assert main(["branch", str(tmp_path / "out"), "--at", "4", str(run_file)]) == 0

    def start(overrides: Sequence[str], flags: Sequence[str]) -> int:
        return _launch(str(run_file), overrides, flags)

    assert verify_resume(str(run_file), (), K, start, begin=4) == 0
    with pytest.raises(AssertionError, match="`seed` is 8, but the run of"):
        verify_resume(str(run_file), ("seed=8",), K, start, begin=4)


def test_what_was_proven_is_told_by_phase_and_batch() -> None:
    segments = (("main", 0, 4, 64), ("main", 4, 8, 128), ("long", 8, 12, 128))
    timeline = Timeline(tuple(Segment(p, a, b, 16, t // 16, 0, 0, 0) for p, a, b, t in segments))
    assert list(describe_coverage(timeline, 3, 6)) == [
        "proved     a resume after step 3, through steps 4 to 6: main (64 tokens a step), main (128 tokens a "
        "step)",
        "not proved long from step 8; --from STEP starts at a checkpoint of the run: one from K steps "
        "before a change puts the resume right on it",
    ]
    assert next(describe_coverage(timeline, 4, 8)).endswith("steps 5 to 8: main (128 tokens a step)")


def nothing(world: World, engine: Any, patch: pytest.MonkeyPatch) -> None:
    """No harm."""


def draws_a_random_number(world: World, engine: Any, patch: pytest.MonkeyPatch) -> None:
    if world.rank == 1:
        random.random()


def spoils_a_moment(world: World, engine: Any, patch: pytest.MonkeyPatch) -> None:
    for part in partitions.list_parts(engine._engine):
        if part.name == "lm_head.weight":
            part.moments["exp_avg"].mul_(1.5)


def reads_other_samples(world: World, engine: Any, patch: pytest.MonkeyPatch) -> None:
    ids = Sampler.ids
    patch.setattr(Sampler, "ids", lambda self, step, ledger: ids(self, step + (step == 2 * K - 1), ledger))


PLANTS: dict[str, tuple[Plant, list[str]]] = {
    "a random stream": (draws_a_random_number, ["rank 1: the random stream of python differs"]),
    "an optimizer's moment": (
        spoils_a_moment,
        ["step 4: its loss differs: ", "lm_head.weight  exp_avg  relat"],
    ),
    "other samples": (
        reads_other_samples,
        ["step 4: its samples differ (batch_checksum): ", "lm_head.weight"],
    ),
}


@pytest.mark.parametrize(("plant", "named"), slow_but(PLANTS.values(), PLANTS["a random stream"]), ids=PLANTS)
def test_what_a_resume_changes_is_named(
    plant: Plant, named: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file = str(make_run(tmp_path, model=NO_DROPOUT))
    plants = iter([None, plant])

    def start(overrides: Sequence[str], flags: Sequence[str]) -> int:
        return _launch(run_file, overrides, flags, next(plants))

    assert verify_resume(run_file, (), K, start) == 1
    said = capsys.readouterr().out.splitlines()
    assert "a resumed run is not the uninterrupted one; docs/operations.md says what to look at" in said
    findings = said[said.index("verify-resume: the second launch") + 2 : -1]
    for line in named:
        assert any(finding.startswith(line) for finding in findings), findings
    assert findings[0].startswith(named[0])
    assert len(findings) == 1 or plant is not draws_a_random_number
    assert said[-1] == f"kept for a closer look: {tmp_path}/out.verify-resume"
    assert Workdir(tmp_path / "out.verify-resume").straight(2 * K).is_dir()


def _fake(place: Workdir, code: int, *saved: int) -> Callable[[Sequence[str], Sequence[str]], int]:
    """A launch that only leaves folders with a checkpoint's name."""

    def start(overrides: Sequence[str], flags: Sequence[str]) -> int:
        for step in saved:
            place.saved(step).mkdir(parents=True)
        return code

    return start


@pytest.mark.parametrize(
    ("code", "saved", "expected", "said"),
    [
        (
            2,
            (),
            2,
            "the first launch ended with code 2, and there is no checkpoint of step 3; nothing is proven",
        ),
        (75, (1, 3), 75, "the first launch ended with code 75, and there is no checkpoint of step 6"),
        (0, (), 1, "the first launch ended with code 0, and there is no checkpoint of step 3"),
        (1, (3, 6), 1, "the first launch ended with code 1; nothing is proven"),
    ],
)
def test_a_launch_that_does_not_come_to_its_end_proves_nothing(
    code: int,
    saved: tuple[int, ...],
    expected: int,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_file, place = str(make_run(tmp_path)), Workdir(tmp_path / "out.verify-resume")
    assert verify_resume(run_file, (), 3, _fake(place, code, *saved)) == expected
    out = capsys.readouterr().out
    assert said in out
    assert f"kept for a closer look: {place.folder}" in out


def test_the_launches_get_a_folder_of_their_own_and_nothing_that_bears_on_the_numbers(tmp_path: Path) -> None:
    run_file = str(make_run(tmp_path))
    given: list[tuple[Sequence[str], Sequence[str]]] = []

    def start(overrides: Sequence[str], flags: Sequence[str]) -> int:
        given.append((overrides, flags))
        return 1

    own = (
        "schedule.peak_lr=2e-3",
        f"out={tmp_path}/elsewhere",
        "resume_from=/a",
        "checkpoint.upload_to=s3://b",
    )
    verify_resume(run_file, own, 3, start)
    [(overrides, flags)] = given
    before, after = load_plan(run_file), load_plan(run_file, overrides)
    assert after.out == tmp_path / "elsewhere.verify-resume/run"
    assert after.run.schedule.peak_lr == 2e-3
    assert (after.run.resume_from, after.run.checkpoint.upload_to) == (None, None)
    assert [str(every) for every in after.run.checkpoint.every] == ["3 steps"]
    assert after.run.monitor.wandb == "off"
    kept = {"batch", "sources", "phases", "validation", "model", "seed", "name", "deepspeed"}
    assert after.run.model_dump(include=kept) == before.run.model_dump(include=kept)
    assert flags == ["--stop-after", "6"]


def test_a_run_that_is_too_short_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_file = str(make_run(tmp_path, steps=12))
    assert main(["verify-resume", run_file, "--ranks", "1", "--steps", "7"]) == 2
    assert "schedule.length is 12 steps, and the proof trains 14 (twice --steps 7)" in capsys.readouterr().err
    assert main(["verify-resume", run_file, "--ranks", "1", "--steps", "0"]) == 2
    assert "--steps 0: give 1 or more" in capsys.readouterr().err
    assert main(["verify-resume", run_file, "--ranks", "1", "--from", "4"]) == 2
    assert "has no checkpoint of step 4; it has: none" in capsys.readouterr().err
    assert not (tmp_path / "out.verify-resume").exists()


def test_somebody_elses_folder_is_left_alone_and_an_earlier_proof_is_replaced(tmp_path: Path) -> None:
    run_file, place = str(make_run(tmp_path)), Workdir(tmp_path / "out.verify-resume")
    place.straight(6).mkdir(parents=True)
    with pytest.raises(InputError, match="was not made by verify-resume, which needs a folder of that name"):
        verify_resume(run_file, (), 3, _fake(place, 1))
    assert place.straight(6).is_dir()
    lock = place.folder / "verify-resume.lock"
    lock.touch()
    assert verify_resume(run_file, (), 3, _fake(place, 1)) == 1
    assert [path.name for path in place.folder.iterdir()] == [lock.name]
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="another verify-resume of this run is at work"):
            verify_resume(run_file, (), 3, _fake(place, 1))


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    run_file = str(make_run(tmp_path))
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot write there"):
        verify_resume(run_file, (f"out={tmp_path}/file/out",), 3, _fake(Workdir(tmp_path), 1))


RECORD = {
    "batch_checksum": 5,
    "samples": 8,
    "num_valid_tokens": 128,
    "learning_rate": 0.1,
    "loss": math.nan,
    "z_loss": None,
    "grad_norm": 1.0,
    "update_applied": True,
}
OTHER = {
    "batch_checksum": (6, "step 4: its samples differ (batch_checksum): 5 uninterrupted, 6 resumed"),
    "samples": (9, "step 4: it is at another sample: 8 uninterrupted, 9 resumed"),
    "num_valid_tokens": (7, "step 4: its number of valid tokens differs: 128 uninterrupted, 7 resumed"),
    "learning_rate": (0.2, "step 4: its learning rate differs: 0.1 uninterrupted, 0.2 resumed"),
    "loss": (1.5, "step 4: its loss differs: nan uninterrupted, 1.5 resumed"),
    "z_loss": (0.0, "step 4: its z-loss differs: null uninterrupted, 0.0 resumed"),
    "grad_norm": (1.0000000000000002, "step 4: its gradient norm differs: 1.0 uninterrupted, 1.00000000000"),
    "update_applied": (
        False,
        "step 4: its update was applied in one of them only: true uninterrupted, false",
    ),
}


@pytest.mark.parametrize(("field", "other", "line"), [(f, *o) for f, o in OTHER.items()], ids=OTHER)
def test_the_first_step_that_differs_is_named_with_what_differs(field: str, other: Any, line: str) -> None:
    straight = {step: dict(RECORD) for step in (3, 4, 5)}
    resumed = {3: dict(RECORD), 4: {**RECORD, field: other}, 5: {**RECORD, "batch_checksum": 0}}
    found = find_first_difference(straight, resumed, range(3, 6))
    assert found is not None
    assert found.startswith(line)


def test_steps_alike_have_no_difference_and_a_step_without_a_record_is_one() -> None:
    records = {step: {**RECORD, "loss": float("nan")} for step in (3, 4)}
    assert find_first_difference(records, {step: dict(RECORD) for step in (3, 4)}, range(3, 5)) is None
    missing = "run has no record of it in metrics.jsonl"
    assert find_first_difference(records, {3: RECORD}, range(3, 5)) == f"step 4: the resumed {missing}"
    assert find_first_difference({}, records, range(3, 5)) == f"step 3: the uninterrupted {missing}"
