"""A run that branches off another is, bit for bit, the run that had its plan from the start."""

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ds_pretrain.commands import branch
from ds_pretrain.commands.cli import main
from ds_pretrain.config.plan import load_plan
from ds_pretrain.core.distributed import World
from ds_pretrain.core.errors import EXIT_FINISHED
from tests.harness import record_run, start
from tests.ranks import KILLED, run_ranks
from tests.runs.results import trace, validations
from tests.scenario import LLAMA, make_run, write_corpus
from tests.tiers import slow

STEPS, DECAY = 16, 4
PHASE = """
[[phases]]
name = "long"
start = "8 steps"
seq_len = 32
micro_batch_size = 1
mixture = { text = 0.5, math = 0.5 }
rope = { theta = 5e4 }
"""


def write_run(folder: Path, name: str, more: str = "", **changes: str) -> Path:
    """The parent's run file with lines replaced, under a name and with a directory of its own."""
    text = (folder / "run.toml").read_text().replace('name = "tiny"', f'name = "{name}"')
    lines = {"out": f'"{folder}/{name}"', **changes}
    written = [
        f"{key} = {lines[key]}" if (key := line.partition(" = ")[0]) in lines else line
        for line in text.splitlines()
    ]
    marker = "[validation]"
    run_file = folder / f"{name}.toml"
    run_file.write_text("\n".join(written).replace(marker, f"{more}{marker}"))
    return run_file


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a WSD run of 16 steps on two ranks, saved every 2."""
    folder = tmp_path_factory.mktemp("parent")
    run_file = make_run(folder, steps=STEPS, save_every="2 steps", model={**LLAMA, "attention_dropout": 0.1})
    text = run_file.read_text().replace(f'text = "{folder}/text"', _chunked(folder, "text"))
    run_file.write_text(text.replace(f'code = "{folder}/code"', _chunked(folder, "code")))
    write_corpus(folder / "math", seed=11)
    run_ranks(record_run, 2, str(run_file))
    return folder


def _chunked(folder: Path, name: str) -> str:
    return f'{name} = {{ path = "{folder}/{name}", chunk_tokens = 64 }}'


def _same_from(step: int, branched: Any, straight: Any, out: Path, straight_out: Path) -> None:
    """Weights, moments, rates, samples and everything recorded of the steps after `step`."""
    assert [ended.digest for ended in branched] == [ended.digest for ended in straight]
    assert trace(out) == trace(straight_out)[step:]
    assert validations(out).items() <= validations(straight_out).items()
    for ours, theirs in zip(branched, straight, strict=True):
        assert ours.rates.items() <= theirs.rates.items()
        assert ours.samples.items() <= theirs.samples.items()
        assert min(ours.rates) == step + 1


def _branched(parent: Path, run_file: Path, step: int, overrides: tuple[str, ...] = ()) -> None:
    assert main(["branch", str(parent / "out"), "--at", str(step), str(run_file), *overrides]) == 0


@pytest.mark.parametrize("step", [slow(4), 8, slow(10)])
def test_a_cooldown_from_a_stable_checkpoint_is_the_run_that_had_that_schedule_from_the_start(
    parent: Path, step: int, capsys: pytest.CaptureFixture[str]
) -> None:
    schedule = {"length": f'"{step + DECAY} steps"', "decay": f'"{DECAY} steps"'}
    cooldown = write_run(parent, f"cooldown{step}", **schedule)
    straight = write_run(parent, f"straight{step}", **schedule)
    _branched(parent, cooldown, step)
    _same_from(
        step,
        run_ranks(record_run, 2, str(cooldown)),
        run_ranks(record_run, 2, str(straight)),
        parent / f"cooldown{step}",
        parent / f"straight{step}",
    )
    capsys.readouterr()
    assert main(["audit", str(parent / f"cooldown{step}"), "--all"]) == 0
    assert f"steps 1 to {step} are of that run; audit it for them" in capsys.readouterr().out
    parents = {record["step"]: record["loss"] for record in trace(parent / "out")}
    ours = {record["step"]: record["loss"] for record in trace(parent / f"cooldown{step}")}
    assert ours[step + 2] == parents[step + 2]  # the same rates so far
    assert ours[step + DECAY] != parents[step + DECAY]


def test_p13_the_first_step_of_a_branch_has_the_new_schedules_rate_in_every_group(parent: Path) -> None:
    """The old rates lie in the checkpoint's parameter groups; a branch in the middle of its new decay."""
    schedule = {"length": '"10 steps"', "decay": '"4 steps"', "decay_shape": '"linear"'}
    accepting = ('accept_changes=["schedule"]', "schedule.peak_lr=4e-3", "schedule.decay_shape=linear")
    run_file = write_run(parent, "cooler", **schedule)
    _branched(parent, run_file, 8, accepting)
    rates = run_ranks(record_run, 2, str(run_file), accepting)[0].rates
    schedule_ahead = load_plan(run_file, accepting).schedule
    assert rates == {step: [schedule_ahead.lr(step - 1)] * len(rates[9]) for step in (9, 10)}
    assert rates[9] == [pytest.approx(2e-3)] * len(rates[9])
    assert len(rates[9]) > 1


def test_a_branch_into_longer_sequences_and_another_source_is_the_run_that_had_them_from_the_start(
    parent: Path,
) -> None:
    source = f'math = "{parent}/math"\n[[phases]]\n'
    changes = {"length": '"12 steps"', "decay": '"4 steps"'}
    files = [write_run(parent, name, PHASE, **changes) for name in ("longer", "longer_straight")]
    for file in files:
        file.write_text(file.read_text().replace("[[phases]]\n", source, 1))
    _branched(parent, files[0], 8)
    _same_from(
        8,
        run_ranks(record_run, 2, str(files[0])),
        run_ranks(record_run, 2, str(files[1])),
        parent / "longer",
        parent / "longer_straight",
    )
    assert {record["phase"] for record in trace(parent / "longer")} == {"long"}


FAR = """
[[phases]]
name = "far"
start = "8 steps"
seq_len = 128
micro_batch_size = 1
mixture = { far_text = 0.5, far_code = 0.5 }
rope = { theta = 5e4 }
"""


@pytest.mark.slow
def test_sequences_longer_than_the_chunks_that_were_read_take_a_source_of_another_name(
    parent: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same files under another name, one of them as a view of its long documents."""
    run_file = write_run(parent, "far", FAR, length='"12 steps"', decay='"4 steps"')
    view = f'far_code = {{ path = "{parent}/code", min_document_tokens = 40 }}'
    text = run_file.read_text().replace("[[phases]]", f'far_text = "{parent}/text"\n{view}\n[[phases]]', 1)
    command = ["branch", str(parent / "out"), "--at", "8", str(run_file)]
    run_file.write_text(text.replace("far_text = 0.5", "text = 0.5"))
    capsys.readouterr()
    assert main(command) == 2
    assert (
        "sources.text.chunk_tokens = 64 and phases.far.seq_len = 128: sources.text is read in chunks of 64 "
        "tokens (its phases take main 16, far 128), which sequences of every phase must divide; choose "
        "lengths that divide one another, or give the phase a source of another name with the same path"
    ) in capsys.readouterr().err
    run_file.write_text(text)
    assert main(command) == 0
    [ended] = run_ranks(start, 1, str(run_file))
    assert ended.code == EXIT_FINISHED, ended.stderr
    assert [record["tokens"] for record in trace(parent / "far")] == [128 * step for step in range(9, 13)]
    assert {record["phase"] for record in trace(parent / "far")} == {"far"}
    assert main(["audit", str(parent / "far"), "--all"]) == 0
    assert "4 of 4 steps read again from the data" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "local"), [slow("alone", None), slow("alone_local", "fast"), ("both_local", "fast")]
)
def test_a_branch_on_other_ranks_or_with_folders_of_each_hosts_own_reads_the_same_samples(
    parent: Path, name: str, local: str | None
) -> None:
    run_file = write_run(parent, name)
    overrides = () if local is None else (f"checkpoint.local_dir={parent}/{name}_{local}",)
    _branched(parent, run_file, 12, overrides)
    num_ranks = 2 if name == "both_local" else 1
    ranks = run_ranks(start, num_ranks, str(run_file), overrides)
    assert [ended.code for ended in ranks] == [EXIT_FINISHED] * num_ranks, ranks[0].stderr
    assert "resume     step 12/16 from " in ranks[0].stdout
    ours, theirs = trace(parent / name), trace(parent / "out")[12:]
    assert [_read(record) for record in ours] == [_read(record) for record in theirs]
    if num_ranks == 2:
        assert ours == theirs


def _read(record: Mapping[str, Any]) -> list[Any]:
    return [record[key] for key in ("step", "samples", "batch_checksum", "learning_rate")]


def _killed_before_it_is_published(world: World, words: list[str]) -> None:
    def point(name: str) -> None:
        if name == "publish branch":
            os.kill(os.getpid(), signal.SIGKILL)

    vars(branch)["write_point"] = point  # in a process that ends with the test
    main(words)


def test_a_branch_that_is_killed_before_its_checkpoint_has_a_name_never_begins_at_step_0(
    parent: Path,
) -> None:
    run_file = write_run(parent, "killed")
    words = ["branch", str(parent / "out"), "--at", "8", str(run_file)]
    assert run_ranks(_killed_before_it_is_published, 1, words, allow_kill=True) == [KILLED]
    [ended] = run_ranks(start, 1, str(run_file))
    steps = [record["step"] for record in trace(parent / "killed")]
    assert (ended.code, steps) == (EXIT_FINISHED, [*range(9, STEPS + 1)])  # the start gave it its name
    assert "step_000000008 was complete but not renamed when the run died" in ended.stderr
