"""An audit proves what a run was trained on from its records, and names each thing that does not hold."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from ds_pretrain.audit import history as history_module
from ds_pretrain.audit import proof as proof_module
from ds_pretrain.audit.history import read_history
from ds_pretrain.audit.run import opened
from ds_pretrain.checkpoint.layout import step_name
from ds_pretrain.cli import main
from ds_pretrain.cure import write_cure
from ds_pretrain.data.feed import read_samples
from ds_pretrain.data.sampler import make_sampler
from ds_pretrain.files import write_atomic
from ds_pretrain.monitor.sinks import latest_attempt, read_metrics
from ds_pretrain.plan import load_plan
from ds_pretrain.preflight import open_inputs
from ds_pretrain.run_directory import claim, read_record, write_record
from ds_pretrain.state import Rollback, RunState, Skip
from tests.scenario import make_run

BATCH = 8  # samples of a step
TOKENS = 128


class Told:
    """A run that was not trained: its directory, with the records that training would have written."""

    def __init__(self, folder: Path, num_ranks: int = 2, steps: int = 40, **more: Any) -> None:
        self.run_file = make_run(folder, steps=steps, **more)
        self.plan = load_plan(self.run_file)
        inputs = open_inputs(self.plan)
        weights = {phase.name: phase.mixture for phase in self.plan.run.phases}
        self.sources = inputs.sources
        self.sampler = make_sampler(self.plan.run.seed, self.plan.timeline, weights, inputs.sources)
        self.out, self.state, self.attempt, self.num_ranks = self.plan.out, RunState(), 0, num_ranks
        self.lines: list[dict[str, Any]] = []
        self.data = inputs.data
        self.out.mkdir()

    def start(self, step: int = 0, num_ranks: int | None = None) -> "Told":
        """One more start, from a checkpoint if `step` is not 0."""
        self.attempt = claim(self.plan, self.data, None).attempt
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
            rows = read_samples(ids, self.sources, 0, BATCH)
            self.event(
                "step",
                step=step,
                update_applied=step not in dropped,
                tokens=step * TOKENS,
                samples=step * BATCH,
                batch_checksum=sum(crc32(row.tobytes()) for row in rows),
            )
        self.state = replace(self.state, step=last)
        return self

    def back(self, to_step: int, skip: tuple[int, int] | None = None, told: bool = True) -> "Told":
        """A rollback, as a watchdog writes it; with `told` False it died before the record."""
        step, response = self.state.step, "replay" if skip is None else "skip"
        rollback = Rollback(to_step, step, step - 1, "lasting_spike", response, self.attempt)
        ledger, skipped = self.state.ledger, None
        if skip is not None:
            new = Skip("main", *skip, "lasting_spike", step, self.attempt)
            ledger, skipped = ledger.with_skip(new), {"phase": "main", "start": skip[0], "stop": skip[1]}
        self.state = replace(
            self.state, step=to_step, ledger=ledger, rollbacks=(*self.state.rollbacks, rollback)
        )
        write_cure(self.out, self.state)
        if told:
            self.event(
                *("rollback",),
                **{"incident": len(self.state.rollbacks), "step": step, "to_step": to_step},
                **{"onset": step - 1, "response": response, "skipped": skipped},
            )
        return self

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
        "untrained  0 samples: 0 skipped, 0 dropped",
        "rollbacks  0, which took back 0 steps (0 tokens)",
        "restarts   0, which took back 0 steps (0 tokens)",
        "attempts   1 on 2 ranks",
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
        "skip 1     main draws [152, 200), 48 samples: lasting_spike, decided at step 24 of attempt 1",
        "dropped    steps 27 to 28: 16 samples read and not learned from",
        "untrained  64 samples: 48 skipped, 16 dropped",
        "rollbacks  2 (replay, skip), which took back 14 steps (1,792 tokens)",
        "restarts   1, which took back 0 steps (0 tokens)",
        "attempts   1 on 2 ranks, 2 on 4 ranks",
    ]
