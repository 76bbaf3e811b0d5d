"""An audit proves what a run was trained on from its records, and names each thing that does not hold."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from ds_pretrain.checkpoint.manifest import step_name
from ds_pretrain.commands import audit as audit_module
from ds_pretrain.commands import audit_history as history_module
from ds_pretrain.commands.audit import find_steps_of_skip
from ds_pretrain.commands.audit_history import describe_changes, open_audited, read_history
from ds_pretrain.commands.cli import main
from ds_pretrain.config.plan import load_plan
from ds_pretrain.core.files import write_atomic
from ds_pretrain.core.jsonl import read_metrics, select_latest_attempt
from ds_pretrain.core.state import Rollback, RunState, Skip, SkipLedger
from ds_pretrain.data.loader import read_samples
from ds_pretrain.data.sampler import make_sampler
from ds_pretrain.training.compatibility import claim_run
from ds_pretrain.training.preflight import open_inputs
from ds_pretrain.training.record import read_record, write_record
from ds_pretrain.watchdog.rollback_log import write_rollback_log
from tests.scenario import make_run

BATCH = 8  # samples of a step


class Told:
    """A run that was not trained: its directory, with the records that training would have written."""

    def __init__(self, folder: Path, steps: int = 40, run_file: Path | None = None) -> None:
        self.run_file = run_file or make_run(folder, steps=steps)
        self.plan = load_plan(self.run_file)
        inputs = open_inputs(self.plan)
        weights = {phase.name: phase.mixture for phase in self.plan.run.phases}
        self.sources = inputs.sources
        self.sampler = make_sampler(self.plan.run.seed, self.plan.timeline, weights, inputs.sources)
        self.out, self.state, self.attempt, self.num_ranks = self.plan.out, RunState(), 0, 2
        self.lines: list[dict[str, Any]] = []
        self.data = inputs.data
        self.out.mkdir()

    def start(self, step: int = 0, num_ranks: int | None = None) -> "Told":
        """One more start, from a checkpoint if `step` is not 0."""
        self.attempt = claim_run(self.plan, self.data, None).attempt
        write_atomic(self.out / "run.toml", self.plan.run_text)
        self.num_ranks = num_ranks or self.num_ranks
        self.state = replace(self.state, step=step)
        kind = "resume" if step else "start"
        return self.event(kind, step=step, world_size=self.num_ranks)

    def event(self, kind: str, **fields: Any) -> "Told":
        self.lines.append({"event": kind, "attempt": self.attempt, **fields, "time": 1.0})
        return self

    def steps(self, last: int, dropped: Iterable[int] = ()) -> "Told":
        """The steps up to and including `last`, as `measure` counts them."""
        dropped = set(dropped)
        for step in range(self.state.step + 1, last + 1):
            ids = self.sampler.ids(step - 1, self.state.ledger)
            rows = read_samples(ids, self.sources, 0, len(ids.sample))
            self.event(
                "step",
                step=step,
                update_applied=step not in dropped,
                tokens=self.plan.timeline.tokens_before(step),
                samples=self.plan.timeline.samples_before(step),
                batch_checksum=sum(crc32(row.tobytes()) for row in rows),
            )
        self.state = replace(self.state, step=last)
        return self

    def back(
        self, to_step: int, skip: tuple[int, int] | None = None, told: bool = True, phase: str = "main"
    ) -> "Told":
        """A rollback, as a watchdog writes it; with `told` False it died before the record."""
        step, response = self.state.step, "replay" if skip is None else "skip"
        rollback = Rollback(to_step, step, step - 1, "lasting_spike", response, self.attempt)
        ledger, skipped = self.state.ledger, None  # type: tuple[SkipLedger, dict[str, Any] | None]
        if skip is not None:
            new = Skip(phase, *skip, "lasting_spike", step, self.attempt)
            ledger, skipped = ledger.with_skip(new), {"phase": phase, "start": skip[0], "stop": skip[1]}
            skipped["samples"] = self.sampler.skipped(new, ledger).group_by_source()
        self.state = replace(
            self.state, step=to_step, ledger=ledger, rollbacks=(*self.state.rollbacks, rollback)
        )
        write_rollback_log(self.out, self.state)
        self.untold: dict[str, Any] = {
            "incident": len(self.state.rollbacks),
            "step": step,
            "to_step": to_step,
            "onset": step - 1,
            "response": response,
            "skipped": skipped,
        }
        return self.event("rollback", **self.untold) if told else self

    def retell(self) -> "Told":
        """The newest rollback, told by a start after the crash that kept it from being told."""
        return self.event("rollback", **self.untold, retold=True)

    def checkpoint(self) -> "Told":
        """One of the state as it is, as far as an audit reads it."""
        folder = self.out / "checkpoints" / step_name(self.state.step)
        folder.mkdir(parents=True)
        (folder / "run_state.json").write_text(self.state.to_json())
        return self

    def write(self) -> "Told":
        """Write metrics.jsonl."""
        (self.out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in self.lines))
        return self

    def change(self, step: int, **fields: Any) -> "Told":
        """Another value in the record of a step."""
        for line in self.lines:
            if line["event"] == "step" and line["step"] == step:
                line.update(fields)
        return self


def _audit(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    code = main(["audit", *map(str, words)])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def _healed(folder: Path) -> Told:
    """Poison at steps 21 to 24: a replay, a skip, then on to the end on another number of ranks."""
    told = Told(folder).start().steps(24).back(18).steps(24).back(16, (19 * BATCH, 25 * BATCH))
    return told.steps(30, dropped=[27, 28]).checkpoint().start(30, num_ranks=4).steps(40).checkpoint().write()


def test_a_plain_run_is_proved_to_have_trained_each_sample_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = Told(tmp_path).start().steps(40).write()
    code, said = _audit(capsys, told.out)
    assert code == 0
    assert said.splitlines() == [
        "run        tiny: step 40 of 40",
        "steps      40 trained, each exactly once: 1 to 40",
        "samples    320 trained, each exactly once",
        "tokens     5,120 trained, each exactly once",
        "checksums  40 of 40 steps read again from the data",
        "epochs     no sample came twice within one: an epoch is a permutation, and no draw came twice",
        "untrained  0 samples: 0 skipped, 0 in skipped updates",
        "rollbacks  0",
        "restarts   0",
        "attempts   1: number 1 on 2 ranks",
        f"ok         {told.out}",
    ]


def test_p55_a_healed_run_is_proved_and_its_skips_and_drops_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = _healed(tmp_path)
    code, said = _audit(capsys, told.run_file, "--all")
    assert code == 0, said
    assert said.splitlines()[4:-1] == [
        "checksums  40 of 40 steps read again from the data",
        "epochs     no sample came twice within one: counted one by one",
        "skip 1     main draws [152, 200), 48 samples, which steps 20 to 25 would have read: lasting_spike, "
        "decided at step 24 of attempt 1",
        "skipped    updates of steps 27 to 28: 16 samples read, updates not applied",
        "untrained  64 samples: 48 skipped, 16 in skipped updates",
        "rollbacks  2 (replay, skip), which took back 14 steps (1,792 tokens)",
        "restarts   1, which took nothing back",
        "attempts   2: number 1 on 2 ranks, number 2 on 4 ranks",
    ]


def test_the_steps_that_count_are_those_of_the_latest_attempt(tmp_path: Path) -> None:
    told = _healed(tmp_path)
    with open_audited(told.out) as run:
        rows = read_history(run).rows
    kept = select_latest_attempt(read_metrics(told.out / "metrics.jsonl"))
    assert np.flatnonzero(rows["seen"]).tolist() == [record["step"] for record in kept]
    assert rows["checksum"][1:].tolist() == [record["batch_checksum"] for record in kept]
    assert rows["num_skips"].tolist() == [0] * 17 + [1] * 24


def test_a_rollback_that_died_before_its_record_is_known_from_the_cure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = Told(tmp_path).start().steps(24).back(16, (152, 200), told=False).start(16).steps(40).write()
    code, said = _audit(capsys, told.out)
    assert code == 0, said
    assert "skip 1 " in said
    assert "restarts   1, which took back 8 steps (1,024 tokens)" in said


def test_a_rollback_whose_line_was_torn_is_known_from_the_cure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = Told(tmp_path).start().steps(24).back(18, told=False).steps(24).back(16, (152, 200)).steps(40)
    code, said = _audit(capsys, told.write().out)
    assert code == 0, said
    assert "rollbacks  2 (replay, skip), which took back 14 steps" in said


def test_a_skip_whose_line_was_torn_is_in_force_for_the_steps_after_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = Told(tmp_path).start().steps(24).back(16, (152, 200), told=False).steps(40).write()
    code, said = _audit(capsys, told.out)
    assert code == 0, said


def test_a_rollback_that_is_told_after_the_crash_takes_nothing_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = Told(tmp_path).start().steps(24).back(16, (152, 200), told=False).start(16).retell().steps(40)
    code, said = _audit(capsys, told.write().out)
    assert code == 0, said
    assert "rollbacks  1 (skip), which took nothing back" in said
    assert "restarts   1, which took back 8 steps (1,024 tokens)" in said


@pytest.mark.parametrize("skip", [None, (152, 200)], ids=["replay", "skip"])
def test_a_rollback_that_a_start_beyond_its_checkpoint_tells_takes_nothing_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], skip: tuple[int, int] | None
) -> None:
    """The process lived on without its record, was killed later, and the next start found it missing."""
    told = Told(tmp_path).start().steps(24).back(16, skip, told=False).steps(26).start(22).retell().steps(40)
    code, said = _audit(capsys, told.write().out, "--all")
    assert code == 0, said
    assert "which took back 8 steps (1,024 tokens)" in said
    assert "restarts   1, which took back 4 steps (512 tokens)" in said


def test_a_rollback_that_is_told_after_the_crash_has_to_be_that_of_the_cure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = Told(tmp_path).start().steps(24).back(16, (152, 200), told=False).start(16).retell().steps(40)
    told.untold["skipped"]["stop"] = 190
    code, said = _audit(capsys, told.write().out)
    assert code == 1
    assert "rollback 1 skipped main draws [152, 190) in metrics.jsonl, and main draws [152, 200) in" in said


def _two_phases(folder: Path) -> Path:
    """A run file whose samples are twice as long from step 20 on."""
    run_file = make_run(folder, steps=40)
    phase = (
        '[[phases]]\nname = "long"\nseq_len = 32\nstart = "20 steps"\nmixture = { text = 1.0, code = 1.0 }\n'
    )
    run_file.write_text(run_file.read_text().replace("[validation]", phase + "[validation]"))
    return run_file


def _lengthened(folder: Path) -> Told:
    """A skip in each of two phases, the first of which moves where the second begins."""
    told = Told(folder, run_file=_two_phases(folder)).start().steps(18).back(12, (100, 130)).steps(28)
    return told.back(24, (18, 28), phase="long").steps(40).write()


def test_p55_a_run_whose_phases_have_samples_of_other_lengths_is_proved_across_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = _lengthened(tmp_path)
    code, said = _audit(capsys, told.out, "--all")
    assert code == 0, said
    assert "checksums  40 of 40" in said
    assert "samples    240 trained, each exactly once" in said
    assert "skip 2     long draws [18, 28), 10 samples" in said
    assert "no sample came twice within one: counted one by one" in said
    expected = (
        "an epoch is a permutation, and no draw came twice; a phase reads on where the one before left each "
    )
    assert expected in _audit(capsys, told.out)[1]
    rows = [line.split("\t") for line in _audit(capsys, told.out, "--skipped")[1].splitlines()[1:]]
    skipped = {
        (source, int(epoch), int(sample)) for _, phase, _, source, epoch, sample in rows if phase == "long"
    }
    assert skipped == set(told.sampler.skipped(told.state.ledger.skips[1], told.state.ledger).to_list())
    assert skipped != set(told.sampler.skipped(told.state.ledger.skips[1]).to_list())
    trained = {s for step in range(20, 40) for s in told.sampler.ids(step, told.state.ledger).to_list()}
    assert not skipped & trained


def test_a_phase_that_did_not_read_on_where_the_one_before_ended_is_a_problem(tmp_path: Path) -> None:
    """And with every token counted, those that it read again are found."""
    told = _lengthened(tmp_path)
    with open_audited(told.out) as run:
        main = audit_module.Read("main", 1, 20, ((0, 100), (130, 190)), run.ledger)
        right = audit_module.Read("long", 21, 40, ((0, 18), (28, 90)), run.ledger)
        wrong = replace(right, ledger=SkipLedger(told.state.ledger.skips[1:]))
        assert [*audit_module._start_problems(run, [main, right])] == []
        assert [*audit_module._find_epoch_problems(run, [main, right])] == []
        [moved] = audit_module._start_problems(run, [main, wrong])
        assert (
            "steps 21 to 40 of phase long were trained before the ledger skipped more of an earlier phase; "
            "expected none after it: of code, text they read other samples" in moved
        )
        repeated = list(audit_module._find_epoch_problems(run, [main, wrong]))
    assert [line.split(" were ")[0].split(" of ")[1] for line in repeated] == ["code", "text"]


def test_a_step_that_was_taken_back_does_not_stand_for_one_that_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the first step after a skip, were it missing, read what lies behind the skip."""
    told = Told(tmp_path).start().steps(24).back(16, (128, 176)).steps(40)
    last = {line["step"]: place for place, line in enumerate(told.lines) if line["event"] == "step"}
    told.lines = [line for place, line in enumerate(told.lines) if place not in (last[17], last[20])]
    code, said = _audit(capsys, told.write().out)
    assert code == 1
    assert "problem    steps 17, 20 are not in metrics.jsonl: the counters" in said
    assert "1 problem\n" in said
    again = Told(tmp_path / "again").start().steps(24).back(16, told=False).steps(16)
    again.event("step", step=17).state = replace(again.state, step=17)
    code, said = _audit(capsys, again.steps(30).write().out)
    assert "problem    step 17 is not in metrics.jsonl" in said


def test_all_steps_are_read_again_only_if_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_module, "_MOST_CHECKSUMS", 6)
    told = Told(tmp_path).start().steps(40).write()
    assert "checksums  6 of 40 steps read again" in _audit(capsys, told.out)[1]
    assert "checksums  40 of 40 steps read again" in _audit(capsys, told.out, "--all")[1]


def test_a_stop_for_a_person_and_the_start_after_it_are_a_history_like_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = Told(tmp_path).start().steps(24)
    stop = Rollback(16, 24, 22, "lasting_spike", "stop", 1)
    told.state = replace(told.state, rollbacks=(stop,))
    write_rollback_log(told.out, told.state)
    told.event("needs_operator", incident=1, step=24, to_step=16).start(16).steps(30)
    told.back(20, (168, 200)).steps(40).write()
    code, said = _audit(capsys, told.out)
    assert code == 0, said
    assert "rollbacks  1 (skip), which took back 10 steps (1,280 tokens)" in said
    assert "restarts   1, which took back 8 steps (1,024 tokens)" in said


def test_a_stop_that_went_back_to_nothing_is_no_rollback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = Told(tmp_path).start().steps(6).event("needs_operator", incident=1, step=6, to_step=None)
    told.start(4).steps(24).back(16, (152, 200)).steps(40).write()
    code, said = _audit(capsys, told.out)
    assert code == 0, said
    assert "skip 1 " in said


def test_the_samples_that_a_rollback_lists_have_to_be_those_of_the_ledger(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = Told(tmp_path).start().steps(24).back(16, (152, 200)).steps(40)
    [skipped] = [line["skipped"] for line in told.lines if line["event"] == "rollback"]
    code, said = _audit(capsys, told.write().out)
    assert code == 0, said
    next(iter(skipped["samples"]["text"].values())).pop()
    code, said = _audit(capsys, told.write().out)
    assert code == 1
    assert (
        "rollback 1 lists other samples in metrics.jsonl than main draws [152, 200) are by the run file"
        in said
    )


def test_a_skip_that_the_run_has_not_come_past_is_said_to_lie_ahead(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = Told(tmp_path).start().steps(24).back(16, (152, 200)).steps(18).write()
    code, said = _audit(capsys, told.out)
    assert code == 0, said
    assert "of attempt 1; the run has not come past it yet" in said
    assert "ahead" not in _audit(capsys, told.steps(20).write().out)[1]


def test_a_changed_token_is_named_with_the_step_that_read_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = _healed(tmp_path)
    ids = told.sampler.ids(4, RunState().ledger)
    place = next(i for i, index in enumerate(ids.source) if ids.names[index] == "text")
    stream = np.memmap(tmp_path / "text.bin", "<u2", "r+")
    stream[int(ids.sample[place]) * 16 + 5] ^= 1
    stream.flush()
    code, said = _audit(capsys, told.out, "--all")
    assert code == 1
    assert "problem    step 5: its samples have the checksum" in said
    assert "was recorded as it was trained: the data was changed since, or it read other samples" in said
    assert "not ok     " in said
    assert "exactly once" not in said


def test_another_corpus_is_named_and_the_steps_that_differ_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = _healed(tmp_path)
    code, said = _audit(capsys, told.out, f"sources.text={tmp_path}/held_out")
    assert code == 1
    assert "problem    sources.text holds" in said
    assert "it is other data, so what the steps read cannot be read again" in said
    assert "and 30 more steps whose samples have other checksums" in said
    assert "not ok" in said
    assert "lists other samples in metrics.jsonl than main draws [152, 200) are by the run file" in said
    assert "13 problems" in said


def test_missing_lines_are_holes_in_the_record_if_the_counters_around_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = _healed(tmp_path)
    told.lines = [line for line in told.lines if line.get("step") not in (5, 7, 8, 9)]
    code, said = _audit(capsys, told.write().out)
    assert code == 1
    assert (
        "problem    steps 5, 7 to 9 are not in metrics.jsonl: the counters of the steps around agree" in said
    )
    assert "1 problem\n" in said
    told.change(6, samples=1)
    code, said = _audit(capsys, told.write().out)
    assert "step 6 counts samples to 1 and tokens to 768; expected 48 and 768: a step before it" in said
    assert "the counters of other steps are wrong too, so it is unknown whether they were trained" in said


@pytest.mark.parametrize("value", [None, "x", float("nan"), float("inf"), 10**30, [1]])
def test_a_step_whose_record_makes_no_sense_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: Any
) -> None:
    told = Told(tmp_path).start().steps(6).change(4, batch_checksum=value).write()
    code, said = _audit(capsys, told.out)
    assert code == 1
    assert "problem    step 4 is not in metrics.jsonl: the counters" in said


def test_counters_that_are_wrong_in_many_steps_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = Told(tmp_path).start().steps(40)
    for step in range(5, 40):
        told.change(step, tokens=step)
    assert "and 25 more steps count otherwise than the run file says" in _audit(capsys, told.write().out)[1]


def test_a_step_recorded_twice_without_a_reason_is_a_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = Told(tmp_path).start().steps(40)
    place = next(i for i, line in enumerate(told.lines) if line.get("step") == 12 and line["event"] == "step")
    told.lines.insert(place, dict(told.lines[place]))
    code, said = _audit(capsys, told.write().out)
    assert code == 1
    assert "step 12 of attempt 1 is recorded again, with no rollback and no start before it" in said


def test_a_record_that_was_cut_is_a_problem_if_a_checkpoint_is_newer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = _healed(tmp_path)
    path = told.out / "metrics.jsonl"
    text = path.read_bytes()
    path.write_bytes(text[: -len(text.splitlines()[-1]) - 20])  # inside the line of step 39
    code, said = _audit(capsys, told.out)
    assert code == 1
    assert (
        "metrics.jsonl ends with step 38, and a checkpoint of step 40 is there: the end of the record" in said
    )


def test_a_checkpoint_on_a_branch_that_was_left_says_nothing_about_the_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = Told(tmp_path).start().steps(24).checkpoint().back(18).steps(20).write()
    assert _audit(capsys, told.out)[0] == 0


def test_a_ledger_that_was_changed_shows_in_checksums_and_in_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = Told(tmp_path).start().steps(24).back(16, (152, 200)).steps(40).write()
    [skip] = told.state.ledger.skips
    for start, expected in (
        (160, "its samples have the checksum"),
        (120, "draws [120, 128) are of steps 1 to 16"),
    ):
        ledger = replace(told.state.ledger, skips=(replace(skip, start=start),))
        write_rollback_log(told.out, replace(told.state, ledger=ledger))
        code, said = _audit(capsys, told.out)
        assert code == 1
        assert expected in said
        assert f"in metrics.jsonl, and main draws [{start}, 200) in the ledger; expected the same" in said
    assert (
        "and of the skip ledger too; expected every draw in one of them: they were trained although" in said
    )


def test_what_the_ledger_the_rollbacks_and_the_checkpoint_say_has_to_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = Told(tmp_path).start().steps(24).back(16, (152, 200)).steps(40).checkpoint().write()
    state = told.state
    write_rollback_log(told.out, replace(state, ledger=RunState().ledger))
    said = _audit(capsys, told.out)[1]
    assert "rollbacks.json lists 0 skips, and the checkpoint of step 40 1 skip that are not the same" in said
    assert "the ledger has 0 skips, and 1 of the rollbacks skipped something; expected equal numbers" in said
    write_rollback_log(told.out, replace(state, rollbacks=(replace(state.rollbacks[0], to_step=15),)))
    said = _audit(capsys, told.out)[1]
    assert (
        "rollback 1 is a skip at step 24 to step 16 in metrics.jsonl, and a skip at step 24 to step 15"
        in said
    )


def test_a_cure_that_is_lost_is_read_from_the_checkpoint_or_missed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = Told(tmp_path).start().steps(24).back(16, (152, 200)).steps(30).write()
    (told.out / "rollbacks.json").unlink()
    code, said = _audit(capsys, told.out)
    assert code == 1
    assert (
        "metrics.jsonl records rollback 1 at step 24, and rollbacks.json and the checkpoints know 0"
    ) in said
    told.checkpoint()
    state = told.out / "checkpoints" / step_name(30) / "run_state.json"
    for is_emptied in (False, True):
        if is_emptied:
            write_rollback_log(told.out, RunState())
        code, said = _audit(capsys, told.out)
        assert code == 1
        assert "skip 1 " in said
        assert "not ok     " in said.splitlines()[-1]
        assert "1 problem" in said.splitlines()[-1]
        assert (
            "rollbacks.json is missing, or lists 0 of the 1 rollbacks that the checkpoint of step 30 knows"
        ) in said
        assert f'rebuild it from "rollbacks" and "skips" of {state}' in said
    known = json.loads(state.read_text())
    (told.out / "rollbacks.json").write_text(
        json.dumps({name: known[name] for name in ("rollbacks", "skips")})
    )
    assert _audit(capsys, told.out)[0] == 0


@pytest.mark.parametrize(
    ("skip", "said"),
    [
        (
            {"phase": "pain"},
            "rollbacks.json: skip 1 is of phase 'pain'; expected one of main; put an intact copy back",
        ),
        (
            {"stop": 10**30},
            "rollbacks.json: skip 1 ends with draw 1,000,000,000,000,000,000,000,000,000,000; expected",
        ),
        ({"stop": 901.5}, "rollbacks.json cannot be read (`skips.0.stop`: Input should be a valid integer"),
        ({"phase": None}, "rollbacks.json cannot be read (`skips.0.phase`: Input should be a valid string"),
    ],
)
def test_a_skip_that_cannot_be_of_the_run_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], skip: dict[str, Any], said: str
) -> None:
    told = Told(tmp_path).start().steps(24).back(16, (152, 200)).steps(30).write()
    cure = json.loads((told.out / "rollbacks.json").read_text())
    cure["skips"][0].update(skip)
    (told.out / "rollbacks.json").write_text(json.dumps(cure))
    for words in ((), ("--skipped",), ("--step", 20)):
        code, told_words = _audit(capsys, told.out, *words)
        assert code == 2
        assert said in told_words


@pytest.mark.parametrize(
    "change",
    [
        {"attempt": "a"},
        {"to_step": None},
    ],
)
def test_a_rollback_of_wrong_types_is_said_and_a_checkpoint_with_one_is_no_witness(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any]
) -> None:
    told = Told(tmp_path).start().steps(24).back(16, (152, 200)).steps(30).checkpoint().write()
    for path, code in (
        (told.out / "checkpoints" / step_name(30) / "run_state.json", 0),
        (told.out / "rollbacks.json", 2),
    ):
        data = json.loads(path.read_text())
        data["rollbacks"][0].update(change)
        path.write_text(json.dumps(data))
        found, said = _audit(capsys, told.out)
        assert found == code, said
    assert "rollbacks.json cannot be read" in said
    (told.out / "rollbacks.json").unlink()
    found, said = _audit(capsys, told.out)
    assert found == 1
    assert "rollbacks.json and the checkpoints know 0" in said


def test_a_checkpoint_whose_state_is_no_object_is_no_witness(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = Told(tmp_path).start().steps(40).checkpoint().write()
    (told.out / "checkpoints" / step_name(40) / "run_state.json").write_text("[]")
    assert _audit(capsys, told.out)[0] == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"identity": None},
            "run.json cannot be read (`identity`: Input should be an object, found null); put an",
        ),
        (
            {"overrides": [1]},
            "run.json cannot be read (`overrides.0`: Input should be a valid string, found 1",
        ),
        (
            {"num_inherited": -1},
            "(`num_inherited`: Input should be greater than or equal to 0, found -1); put an",
        ),
        (
            {"version": 9},
            "run.json cannot be read (it is not a record of format 2; resume with the ds_pretrain that "
            "wrote it",
        ),
    ],
)
def test_a_run_record_of_wrong_types_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], said: str
) -> None:
    told = Told(tmp_path).start().steps(40).write()
    record = json.loads((told.out / "run.json").read_text())
    (told.out / "run.json").write_text(json.dumps(record | change))
    code, printed = _audit(capsys, told.out)
    assert code == 2
    assert said in printed


def test_negative_steps_in_the_record_are_problems(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = Told(tmp_path).start().steps(24).back(16, (152, 200))
    told.lines[-1]["to_step"] = -7
    told.start(16).steps(30)
    next(line for line in told.lines if line["event"] == "resume")["step"] = -3
    told.lines.append({**told.lines[-1], "step": -1})
    code, said = _audit(capsys, told.write().out)
    assert code == 1
    for expected in (
        "rollback 1 is a skip at step 24 to step -7 in metrics.jsonl, and a skip at step 24 to step 16",
        "attempt 2 is recorded to begin after step -3; expected 0 or more",
        "step -1 of attempt 2 is recorded; expected steps 1 to 40",
    ):
        assert expected in said


def test_the_steps_of_a_skip_are_those_that_would_have_read_it(tmp_path: Path) -> None:
    """By the order itself: of each step under the ledger before the skip, which draws it reads."""
    told = _lengthened(tmp_path)
    ledger = told.state.ledger.with_skip(Skip("long", 22, 60, "drift", 40, 1))
    ledger = ledger.with_skip(Skip("main", 50, 64, "drift", 40, 1))
    for number, skip in enumerate(ledger.skips):
        before = SkipLedger(ledger.skips[:number])
        segments = [s for s in told.plan.timeline.segments if s.phase == skip.phase]
        steps = range(segments[0].first_step, segments[-1].end_step)
        new = {
            d
            for d in range(skip.start, skip.stop)
            if not any(a <= d < b for a, b in before.merged(skip.phase))
        }
        reading = [s + 1 for s in steps if new & set(told.sampler.ids(s, before).draw.tolist())]
        assert find_steps_of_skip(skip, before, told.plan.timeline) == (reading[0], reading[-1])


def test_one_rank_is_one_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = Told(tmp_path).start(num_ranks=1).steps(40).write()
    assert "attempts   1: number 1 on 1 rank\n" in _audit(capsys, told.out)[1]


def test_a_step_past_the_end_of_the_run_is_a_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = Told(tmp_path).start().steps(40)
    told.lines.append({**told.lines[-1], "step": 10**12})
    said = _audit(capsys, told.write().out)[1]
    assert (
        "step 1,000,000,000,000 of attempt 1 is recorded; expected steps 1 to 40, as schedule.length" in said
    )


def test_draws_that_are_lost_or_come_twice_are_told_with_the_steps_around(tmp_path: Path) -> None:
    told = Told(tmp_path).start().steps(4).write()
    with open_audited(told.out) as run:
        reads = [
            audit_module.Read("main", 1, 2, ((0, 16),)),
            audit_module.Read("main", 3, 4, ((20, 36),)),
            audit_module.Read("main", 5, 6, ((30, 46),)),
        ]
        lost, twice = audit_module._draw_problems(run, reads)
        counted = list(audit_module._find_epoch_problems(run, reads))
    assert lost == (
        "main draws [16, 20) are in no step and in no skip, between steps 1 to 2 and steps 3 to 4; expected "
        "every draw in one of them: those samples were lost"
    )
    assert twice == (
        "main draws [30, 36) are of steps 3 to 4 and of steps 5 to 6 too; expected every draw in one of "
        "them: they were trained twice"
    )
    assert sum(int(line.split()[0]) for line in counted) == 6 * 16
    assert " tokens of code were trained again within its epoch 0; expected each at most once" in counted[0]


def test_epochs_are_counted_across_chunks_and_several_epochs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_module, "_CHUNK", 7)
    told = Told(tmp_path, steps=400).start().write()
    with open_audited(told.out) as run:
        whole = [audit_module.Read("main", 1, 400, ((0, 3200),))]  # some ten epochs
        assert list(audit_module._find_epoch_problems(run, whole)) == []
        locate = type(run.sampler).at_draws

        def repeating(self: Any, phase: str, seq_len: int, draws: Any, step: int, ledger: Any = None) -> Any:
            ids = locate(self, phase, seq_len, draws, step, ledger or SkipLedger())
            return replace(ids, sample=np.where(ids.sample == 3, 4, ids.sample))

        monkeypatch.setattr(type(run.sampler), "at_draws", repeating)
        problems = list(audit_module._find_epoch_problems(run, whole))
    epochs = max(told.sampler.at_draws("main", 16, np.arange(3200, dtype=np.uint64), 0).epoch) + 1
    assert len(problems) > epochs


def test_a_long_run_is_read_again_at_a_spread_of_steps_and_after_every_change() -> None:
    rows = np.zeros(100_001, history_module._ROW)
    rows["seen"][1:] = True
    rows["attempt"][50_001:] = 2
    rows["num_rollbacks"][70_003:] = 1  # a replay, which is no skip
    chosen = audit_module._spread(rows, np.flatnonzero(rows["seen"]))
    assert 990 <= len(chosen) <= 1000
    assert {1, 50_001, 70_003, 100_000} <= set(chosen.tolist())
    assert int(np.diff(chosen).max()) < 110


def test_the_record_of_a_long_run_takes_little_memory(tmp_path: Path) -> None:
    told = Told(tmp_path, steps=5000).start().steps(3).write()
    line = told.lines[-1]
    told.lines += [
        {**line, "step": step, "tokens": step * 128, "samples": step * 8} for step in range(4, 3001)
    ]
    with open_audited(told.write().out) as run:
        rows = read_history(run).rows
    assert (len(rows), int(rows["seen"].sum())) == (3001, 3000)
    assert rows.itemsize < 50


def test_p55_a_step_is_shown_as_its_rank_read_it_in_each_attempt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = _healed(tmp_path)
    code, said = _audit(capsys, told.out, "--step", 22)
    assert code == 0
    lines = said.splitlines()
    ids = told.sampler.ids(21, told.state.ledger)
    assert lines[:4] == [
        "step       22 of attempt 1: 8 samples on 2 ranks, 1 skip in force",
        "also       taken in attempt 1 on 2 ranks, 0 skips in force, other samples",
        "also       taken in attempt 1 on 2 ranks, 0 skips in force, other samples",
        "checksum   as recorded: these are the samples that were read",
    ]
    heads = [line for line in lines if line.startswith("--- ")]
    for place, (head, (source, epoch, sample)) in enumerate(zip(heads, ids.to_list(), strict=True)):
        where = f"{source}, epoch {epoch}, sample {sample}, document"
        assert head.startswith(f"--- rank {place // 4}, draw {ids.draw[place]}: {where}")
    assert all(len(line) <= 200 for line in lines if not line.startswith("--- "))
    assert "[token ids: no tokenizer is known for" in said
    assert "on 4 ranks" in _audit(capsys, told.out, "--step", 35)[1]
    one = _audit(capsys, told.out, "--step", 35, "--rank", 3, "--attempt", 2)[1]
    assert [line.split(",")[0] for line in one.splitlines() if line.startswith("--- ")] == ["--- rank 3"] * 2


def test_ranks_that_share_sequences_are_shown_with_what_their_group_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = Told(tmp_path).start(num_ranks=4)
    told.lines[-1]["sequence_parallel_size"] = 2
    told.steps(4).write()
    heads = [
        line for line in _audit(capsys, told.out, "--step", 3)[1].splitlines() if line.startswith("--- ")
    ]
    assert [line.split(",")[0] for line in heads] == ["--- ranks 0 to 1"] * 4 + ["--- ranks 2 to 3"] * 4
    for rank in (2, 3):
        one = _audit(capsys, told.out, "--step", 3, "--rank", rank)[1]
        assert [line for line in one.splitlines() if line.startswith("--- ")] == heads[4:]


def test_p55_a_step_is_shown_under_the_ledger_of_the_attempt_that_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = Told(tmp_path).start().steps(24).start(20, num_ranks=4).steps(24).back(16, (152, 200)).steps(40)
    told.write()
    shown = {attempt: _audit(capsys, told.out, "--step", 22, "--attempt", attempt)[1] for attempt in (1, 2)}
    assert shown[1].startswith("step       22 of attempt 1: 8 samples on 2 ranks, 0 skips in force")
    assert shown[2].startswith("step       22 of attempt 2: 8 samples on 4 ranks, 1 skip in force")
    assert all("checksum   as recorded" in text for text in shown.values())


def test_the_text_of_one_rank_is_whole_and_what_a_terminal_would_obey_is_written_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told(tmp_path).start().steps(4).write()
    text = "a\x1b[2J b\n" + "word " * 100
    monkeypatch.setattr("ds_pretrain.data.inspect.Tokenizer.decode", lambda self, ids: text)
    for name in ("text", "code"):
        note = json.loads((tmp_path / f"{name}.json").read_text())
        (tmp_path / f"{name}.json").write_text(json.dumps({**note, "tokenizer": "bytes"}))
    whole = _audit(capsys, told.out, "--step", 2, "--rank", 1)[1]
    assert "a\\x1b[2J b\n" + "word " * 100 in whole
    short = _audit(capsys, told.out, "--step", 2)[1]
    lines = [line for line in short.splitlines() if line.startswith("a\\x1b[2J b word")]
    assert len(lines) >= 4
    assert all(len(line) == 200 and line.endswith("...") for line in lines)


def test_a_step_whose_samples_were_others_is_shown_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = Told(tmp_path).start().steps(8).change(5, batch_checksum=17).write()
    code, said = _audit(capsys, told.out, "--step", 5)
    assert code == 0
    assert "and 17 was recorded: these are NOT the samples that were read" in said


def test_a_step_that_cannot_be_shown_says_what_there_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = _healed(tmp_path)
    told.lines = [line for line in told.lines if (line["event"], line.get("step")) != ("resume", 30)]
    told.write()
    expected = {
        ("--step", 41): "step 41 is not in ",
        ("--step", 0): "whose newest is step 40 of 40; name one that was recorded",
        ("--step", 35, "--attempt", 1): "attempt 1 did not take step 35; those that did: 2",
        ("--step", 22, "--rank", 2): "--rank 2: step 22 of attempt 1 was taken on 2 ranks; expected 0 to 1",
        ("--step", 22, "--rank", -1): "--rank -1: step 22 of attempt 1 was taken on 2 ranks; expected 0 to 1",
        ("--step", 35, "--rank", 0): "--rank 0: the record of how attempt 2 began is lost",
        ("--rank", 0): "--rank belongs to --step; name the step too",
        ("--attempt", 1): "--attempt belongs to --step; name the step too",
        ("--step", 5, "--skipped"): "give either --skipped or --step",
        ("--step", 5, "--all"): "--all audits the whole run and cannot be combined with --skipped or --step",
    }
    for words, message in expected.items():
        code, said = _audit(capsys, told.out, *words)
        assert code == 2, words
        assert message in said
    assert (
        "samples on an unknown number of ranks, 1 skip in force" in _audit(capsys, told.out, "--step", 35)[1]
    )


def test_every_skipped_sample_is_listed_once_and_is_one_that_was_never_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ds_pretrain.commands.audit._CHUNK", 5)
    told = (
        Told(tmp_path).start().steps(24).back(16, (152, 200)).steps(28).back(17, (140, 230)).steps(40).write()
    )
    code, said = _audit(capsys, told.out, "--skipped")
    assert code == 0
    head, *rows = [line.split("\t") for line in said.splitlines()]
    assert head == ["skip", "phase", "draw", "source", "epoch", "sample"]
    assert [row[0] for row in rows] == ["1"] * 48 + ["2"] * 42
    draws = [int(row[2]) for row in rows]
    assert sorted(draws) == list(range(140, 230))
    trained = {sample for step in range(40) for sample in told.sampler.ids(step, told.state.ledger).to_list()}
    skipped = {(source, int(epoch), int(sample)) for _, _, _, source, epoch, sample in rows}
    assert len(skipped) == 90
    assert not skipped & trained
    code, said = _audit(capsys, told.out, "--all")
    assert code == 0, said
    assert "untrained  90 samples: 90 skipped, 0 in skipped updates" in said


def test_a_run_that_began_from_another_is_audited_from_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    origin = Told(tmp_path / "first").start().steps(24).back(16, (152, 200)).steps(30).checkpoint()
    told = Told(tmp_path / "second")
    told.state = origin.state
    told.start(30)
    record = read_record(told.out)
    assert record is not None
    folder = str(origin.out / "checkpoints" / step_name(30))
    write_record(told.out, replace(record, origin=folder, num_inherited=1))
    told.steps(36).back(34, (320, 330)).steps(40).write()
    code, said = _audit(capsys, told.out, "--all")
    assert code == 0, said
    assert f"origin     {folder}: steps 1 to 30 are of that run; audit it for them" in said
    assert "steps      10 trained, each exactly once: 31 to 40" in said
    assert "rollbacks  1 (skip), which took back 2 steps (256 tokens)" in said


def test_a_run_that_cannot_be_audited_says_what_was_expected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(place: object, *words: object) -> str:
        code, said = _audit(capsys, place, *words)
        assert code == 2, said
        return said

    assert "nothing is neither a run directory nor a run file; name one" in refused(tmp_path / "nothing")
    assert f"{tmp_path} is not the directory of a started run; expected a run.json and" in refused(tmp_path)
    told = Told(tmp_path / "run").start()
    assert "has no metrics.jsonl: nothing says which steps were trained; put it back" in refused(told.out)
    told.write()
    assert "metrics.jsonl has no step record; expected a run that has trained" in refused(told.run_file)
    told.lines.append({"event": "step", "attempt": 1, "step": 1})
    assert "metrics.jsonl has no step record" in refused(told.write().out)
    (tmp_path / "run" / "text.bin").rename(tmp_path / "text.bin")
    said = refused(told.out)
    assert "sources.text: " in said
    assert "relative paths are taken from " in said
    assert "override them with sources.NAME=PATH" in said
    (told.out / "metrics.jsonl").unlink()
    (told.out / "metrics.jsonl").mkdir()
    assert "has no metrics.jsonl" in refused(told.out)


def test_a_record_that_cannot_be_read_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told(tmp_path).start().steps(4).write()

    def failing(path: Path) -> Any:
        raise OSError("no such device")

    monkeypatch.setattr(history_module, "read_metrics", failing)
    code, said = _audit(capsys, told.out)
    assert code == 2
    assert "metrics.jsonl cannot be read: no such device" in said


def test_relative_paths_are_those_of_the_folder_that_the_run_was_started_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_file = make_run(tmp_path / "home", steps=8)
    run_file.write_text(run_file.read_text().replace(f"{tmp_path}/home/", ""))
    monkeypatch.chdir(tmp_path / "home")
    Told(Path(), run_file=Path("run.toml")).start().steps(8).write()
    assert _audit(capsys, "run.toml")[0] == 0
    assert _audit(capsys, "out")[0] == 0
    monkeypatch.chdir(tmp_path)
    assert _audit(capsys, "home/out")[0] == 0
    monkeypatch.chdir("/")
    assert _audit(capsys, tmp_path / "home" / "out")[0] == 0
    assert Path.cwd() == Path("/")
    (tmp_path / "home" / "out").rename(tmp_path / "moved")
    assert "deepspeed.json" in _audit(capsys, tmp_path / "moved")[1]  # nothing tells where it was
    monkeypatch.chdir(tmp_path / "home")
    assert _audit(capsys, tmp_path / "moved")[0] == 0


def test_a_run_file_that_was_changed_is_named_where_what_was_read_before_cannot_be_shown() -> None:
    changes = [
        {"attempt": 2, "field": "batch.ramp", "old": None, "new": None},
        {"attempt": 2, "field": "schedule.length", "old": 1, "new": 2},
        {"attempt": 3, "field": "sources.web", "old": "a", "new": "b"},
    ]
    run: Any = SimpleNamespace(record=SimpleNamespace(changes=changes))
    assert describe_changes(run) == (
        "the run file was changed, `batch.ramp` at start 2, `sources.web` at start 3: steps from before can "
        "have read otherwise than it says now"
    )
    run.record.changes = changes[1:2]
    assert describe_changes(run) == ""
