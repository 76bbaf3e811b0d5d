"""Bad input, through the commands that people type: one message with its way out, code 2, nothing written."""

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ds_pretrain.commands.cli import main
from ds_pretrain.config.plan import load_plan
from ds_pretrain.core.distributed import World
from ds_pretrain.core.errors import EXIT_BAD_INPUT
from ds_pretrain.data.indexed import IndexedWriter
from ds_pretrain.training.compatibility import claim_run
from ds_pretrain.training.preflight import open_inputs
from tests.ranks import run_ranks
from tests.scenario import LLAMA, deepspeed_json, make_run

Spoil = Callable[[Path], list[str]]  # makes the run in a folder bad; more words for the command line


def overriding(*overrides: str) -> Spoil:
    return lambda folder: list(overrides)


def without(line_start: str) -> Spoil:
    def spoil(folder: Path) -> list[str]:
        lines = (folder / "run.toml").read_text().splitlines()
        kept = [line for line in lines if not line.startswith(line_start)]
        assert len(kept) == len(lines) - 1
        (folder / "run.toml").write_text("\n".join(kept))
        return []

    return spoil


def json_with(section: str | None, key: str, value: object) -> Spoil:
    def spoil(folder: Path) -> list[str]:
        config = deepspeed_json()
        node = config if section is None else config["optimizer"]["params"]
        node[key] = value
        (folder / "deepspeed.json").write_text(json.dumps(config))
        return []

    return spoil


def writing(name: str, text: str) -> Spoil:
    def spoil(folder: Path) -> list[str]:
        (folder / name).write_text(text)
        return []

    return spoil


def small_vocabulary(folder: Path) -> list[str]:
    """Ids stay below 128, so only the tokenizer's own size is too large."""
    for name, size in (("text", 257), ("code", 128), ("held_out", 128)):
        write_ids(folder / name, vocab_size=size, ids=np.arange(2_000) % 100, tokenizer="bytes")
    (folder / "model.json").write_text(json.dumps({**LLAMA, "vocab_size": 128}))
    return []


def id_out_of_range(folder: Path) -> list[str]:
    """A foreign shard, without a word about its vocabulary, whose token 300 is 5,000."""
    write_ids(folder / "code", vocab_size=6_000, ids=np.where(np.arange(2_000) == 300, 5_000, 7))
    (folder / "code.json").unlink()
    return []


def truncated(folder: Path) -> list[str]:
    data = (folder / "code.bin").read_bytes()
    (folder / "code.bin").write_bytes(data[:-10])
    return []


def torn(folder: Path) -> list[str]:
    data = (folder / "code.bin").read_bytes()
    (folder / "code.bin").write_bytes(data[:-1])
    return []


def missing_bin(folder: Path) -> list[str]:
    (folder / "code.bin").unlink()
    return []


def missing_run_file(folder: Path) -> list[str]:
    (folder / "run.toml").unlink()
    return []


def empty(folder: Path) -> list[str]:
    write_ids(folder / "code", vocab_size=257, ids=np.zeros(0, np.int64), documents=0)
    return []


def shorter_than_a_sequence(folder: Path) -> list[str]:
    write_ids(folder / "code", vocab_size=257, ids=np.arange(16))
    return []


def below_a_file(folder: Path) -> list[str]:
    (folder / "file").touch()
    return [f"out={folder / 'file' / 'out'}"]


def start_there(folder: Path) -> None:
    plan = load_plan(folder / "run.toml")
    plan.out.mkdir()
    claim_run(plan, open_inputs(plan).data, None)


def another_run_there(folder: Path) -> list[str]:
    start_there(folder)
    return ["name=other"]


def another_seed_there(folder: Path) -> list[str]:
    start_there(folder)
    return ["seed=8"]


def unreadable_record(folder: Path) -> list[str]:
    start_there(folder)
    (folder / "out" / "run.json").write_text('{"name": "ti')
    return []


def write_ids(
    prefix: Path, vocab_size: int, ids: NDArray[np.int64], documents: int = 1, **sidecar: str
) -> None:
    writer = IndexedWriter(prefix, vocab_size)
    writer.add([ids][:documents])
    writer.finish(dict(sidecar))


# What is wrong: how to make it so, and what the one message says. FOLDER stands for the run's folder.
BAD: dict[str, tuple[Spoil, tuple[str, ...]]] = {
    "a missing key": (without("peak_lr = "), ("FOLDER/run.toml: `schedule.peak_lr` is missing",)),
    "a misspelt key": (
        overriding("schedule.warmpu=3 steps"),
        ("override of schedule.warmpu: unknown key `schedule.warmpu`; did you mean `warmup`?",),
    ),
    "a misspelt section": (
        overriding("modell.qk_norm=true"),
        ("unknown key `modell`; did you mean `model`?",),
    ),
    "a wrong type": (
        overriding('seed="seven"'),
        ('override of seed: `seed` = "seven": expected a valid integer',),
    ),
    "a duration without a unit": (
        overriding("schedule.length=2000"),
        ('`schedule.length`: 2000 has no unit; write it as text with one, like "2000 steps"',),
    ),
    "contradicting durations": (
        overriding("schedule.warmup=10 steps"),
        (
            'FOLDER/run.toml: schedule.warmup = "10 steps" (10 steps) and schedule.decay = "25%" (3 steps)',
            'exceed schedule.length = "12 steps" (12 steps); shorten one',
        ),
    ),
    "a rate in the JSON": (
        json_with("params", "lr", 1e-3),
        (
            "FOLDER/deepspeed.json: `optimizer.params.lr` = 0.001, but FOLDER/run.toml sets "
            "schedule.peak_lr = 0.01; delete it from the JSON: the run file owns the rate",
        ),
    ),
    "a scheduler in the JSON": (
        json_with(None, "scheduler", {"type": "WarmupDecayLR"}),
        ("FOLDER/deepspeed.json: `scheduler` is set: the rate comes from [schedule] of the run file",),
    ),
    "a batch in the JSON": (
        json_with(None, "train_batch_size", 16),
        (
            "FOLDER/deepspeed.json: `train_batch_size` = 16, but FOLDER/run.toml gives 8 (batch.tokens "
            "/ seq_len); delete it from the JSON: the run file owns the batch",
        ),
    ),
    "a micro-batch in the JSON": (
        json_with(None, "train_micro_batch_size_per_gpu", 1),
        ("`train_micro_batch_size_per_gpu` = 1, but FOLDER/run.toml gives 2 (batch.micro_batch_size)",),
    ),
    "a misspelt key in the JSON": (
        json_with(None, "gradient_cliping", 1.0),
        ("FOLDER/deepspeed.json: unknown key `gradient_cliping`; did you mean `gradient_clipping`?",),
    ),
    "a text for a switch in the JSON": (
        json_with(None, "bf16", {"enabled": "false"}),
        ('FOLDER/deepspeed.json: `bf16.enabled` = "false": expected a valid boolean',),
    ),
    "a list for the optimizer's parameters": (
        json_with(None, "optimizer", {"type": "AdamW", "params": [1]}),
        ("FOLDER/deepspeed.json: `optimizer.params` = [1]: expected a section with keys",),
    ),
    "a JSON that is nested too deeply": (
        writing("deepspeed.json", '{"a":' * 100_000),
        ("FOLDER/deepspeed.json is not valid JSON: nested too deeply",),
    ),
    "a model config that is nested too deeply": (
        writing("model.json", '{"a":' * 100_000),
        ("FOLDER/model.json is not valid JSON: nested too deeply",),
    ),
    "a misspelt key in the model config": (
        writing("model.json", json.dumps({**LLAMA, "hiden_size": 64})),
        ('FOLDER/model.json: LlamaConfig has no key "hiden_size"; did you mean "hidden_size"?',),
    ),
    "an activation that does not exist": (
        writing("model.json", json.dumps({**LLAMA, "hidden_act": "nope"})),
        ('FOLDER/model.json: "hidden_act" = "nope"; expected one of gelu, ',),
    ),
    "a source that is no prefix": (
        overriding("sources.code=."),
        ("FOLDER/run.toml: sources.code: '.' names a folder; expected a corpus in it by its prefix",),
    ),
    "weights whose sum is too large": (
        overriding("phases.0.mixture.code=1e308"),
        ("override of phases.0.mixture.code: `phases.0.mixture.code` = 1e+308: expected less than",),
    ),
    "a null character in a path": (
        overriding('deepspeed="a\\u0000b"'),
        ('override of deepspeed: `deepspeed`: "a\\u0000b" is not a path on this host; write one',),
    ),
    "an output without a name": (
        overriding("out="),
        ('override of out: `out`: "" is not a path on this host; write one',),
    ),
    "an output below a home that nobody looked up": (
        overriding("out=~/x"),
        ('override of out: `out`: "~/x" is not a path on this host; write one',),
    ),
    "a length beyond all reason": (
        overriding("schedule.length=1e99 steps"),
        ('override of schedule.length: `schedule.length`: "1e99 steps" is more than 1,000,000,000 steps',),
    ),
    "auto in the JSON": (
        json_with(None, "gradient_clipping", "auto"),
        (
            'FOLDER/deepspeed.json: `gradient_clipping` is "auto", which only the Hugging Face Trainer fills '
            "in; write a value or delete the key",
        ),
    ),
    "auto among the optimizer's parameters": (
        json_with("params", "weight_decay", "auto"),
        ('`optimizer.params.weight_decay` is "auto"', "write a value or delete the key"),
    ),
    "a batch that the world does not divide": (
        overriding("--world", "3"),
        (
            "FOLDER/run.toml: global batch 8 sequences (128 tokens / seq_len 16), micro-batch 2, world size "
            "3 (from --world) do not multiply out; world sizes that do: 1, 2, 4",
        ),
    ),
    "a batch that no world divides": (
        overriding("batch.micro_batch_size=3"),
        ("which no number of ranks divides into whole micro-batches", "nearest batch.tokens: 96 or 144"),
    ),
    "no rank at all": (overriding("--world", "0"), ("world size 0 (from --world): expected 1 or more",)),
    "a tokenizer larger than the model's vocabulary": (
        small_vocabulary,
        (
            "FOLDER/text.json: its tokenizer 'bytes' has 257 entries, added tokens included, but the model's "
            "vocabulary is 128; set vocab_size in the model config to at least 257",
        ),
    ),
    "a token id out of range": (
        id_out_of_range,
        ("FOLDER/code.bin: offset 600: token 300 has id 5000, outside the model's vocabulary of 257",),
    ),
    "a truncated .bin": (
        truncated,
        (
            "FOLDER/run.toml: sources.code: FOLDER/code.bin: ",
            " bytes, but code.idx lists ",
            "copy both files",
        ),
    ),
    "a .bin that ends inside a token": (
        torn,
        ("sources.code: FOLDER/code.bin: ", "is not a multiple of 2", "it was cut short", "copy it again"),
    ),
    "an empty source": (
        empty,
        ("sources.code: FOLDER/code.idx: holds no documents; prepare the source again",),
    ),
    "a source shorter than one sequence": (
        shorter_than_a_sequence,
        ("FOLDER/code.bin: 16 tokens, fewer than one sample of 16 + 1; shorten the sequence or prepare",),
    ),
    "a source that is not there": (
        missing_bin,
        ("sources.code: FOLDER/code.bin: no such file", "`ds-pretrain prepare --out FOLDER/code` writes"),
    ),
    "an output that cannot be written": (
        below_a_file,
        ("FOLDER/run.toml: out = FOLDER/file/out: cannot write there (FOLDER/file is not a folder); choose",),
    ),
    "a run directory that holds another run": (
        another_run_there,
        ("FOLDER/out holds the run 'tiny', and FOLDER/run.toml is 'other'; give it its own `out`",),
    ),
    "a run directory of the same run with another seed": (
        another_seed_there,
        ("FOLDER/run.toml: `seed` is 8, but the run in FOLDER/out was started with 7; set it back, or",),
    ),
    "a run record that is torn": (
        unreadable_record,
        ("FOLDER/out/run.json cannot be read (", "or give the run file a new `out`"),
    ),
    "a missing hostfile": (
        lambda folder: ["--hostfile", str(folder / "hosts")],
        (
            "hostfile FOLDER/hosts: cannot be read (No such file or directory)",
            "leave --hostfile out to train on this host alone",
        ),
    ),
    "a missing run file": (
        missing_run_file,
        ("run file: cannot read FOLDER/run.toml (No such file or directory); check the path",),
    ),
    "a missing JSON": (
        overriding("deepspeed=none.json"),
        ("FOLDER/run.toml: deepspeed: cannot read none.json (No such file or directory); check the path",),
    ),
    "a model config that is not JSON": (
        lambda folder: [f"model.config={folder / 'run.toml'}"],
        ("FOLDER/run.toml is not valid JSON: ",),
    ),
}


def listing(folder: Path) -> dict[str, bytes | None]:
    """Every path below a folder, with the content of the files."""
    return {str(p): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


@pytest.mark.parametrize(("spoil", "pieces"), BAD.values(), ids=BAD.keys())
def test_bad_input_gives_one_message_code_2_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], spoil: Spoil, pieces: tuple[str, ...]
) -> None:
    run_file = make_run(tmp_path)
    words = spoil(tmp_path)
    before = listing(tmp_path)
    code = main(["check", str(run_file), *words])
    output = capsys.readouterr()
    assert code == EXIT_BAD_INPUT
    assert output.out == ""
    assert output.err.startswith("ds-pretrain: ")
    assert output.err.count("\n") == 1, output.err
    for piece in pieces:
        assert piece.replace("FOLDER", str(tmp_path)) in output.err
    assert listing(tmp_path) == before


@pytest.mark.parametrize("command", [["check"], ["train", "--ranks", "1"]])
def test_all_problems_are_reported_at_once_by_each_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    run_file = make_run(tmp_path)
    id_out_of_range(tmp_path)
    another_seed_there(tmp_path)
    before = listing(tmp_path)
    code = main([command[0], str(run_file), *command[1:], "seed=8", "phases.0.mixture.text=1e-9"])
    errors = capsys.readouterr().err
    assert code == EXIT_BAD_INPUT
    assert "ds-pretrain: 4 problems:\n" in errors
    for piece in ("offset 600", "`seed` is 8", "`phases.main.mixture.text` is ", "mixture weight of 'text'"):
        assert f"{piece}" in errors
    assert listing(tmp_path) == before


def test_a_sound_run_passes_the_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_file = make_run(tmp_path)
    before = listing(tmp_path)
    assert main(["check", str(run_file), "--world", "2"]) == 0
    output = capsys.readouterr()
    assert output.out.endswith(f"ok         {run_file}\n")
    assert output.err == ""
    assert listing(tmp_path) == before


def test_a_quick_check_imports_neither_torch_nor_transformers_and_says_what_it_leaves_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_file = make_run(tmp_path)
    code = (
        "import sys, time; from ds_pretrain.commands.cli import main; "
        f"code = main(['check', {str(run_file)!r}, '--quick']); "
        "print(code, [m for m in ('torch', 'transformers') if m in sys.modules], time.process_time() < 3)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith(f"ok         {run_file}\n0 [] True\n")
    assert (
        "not checked (--quick): keys and types of the model config, how the model is built, its para"
        in done.stdout
    )
    assert "model      llama: parameters not counted" in done.stdout
    misspelt = overriding(f"model.config={tmp_path / 'odd.json'}")(tmp_path)
    (tmp_path / "odd.json").write_text(json.dumps({**LLAMA, "hiden_act": "silu"}))
    assert main(["check", str(run_file), "--quick", *misspelt]) == 0
    assert main(["check", str(run_file), *misspelt]) == EXIT_BAD_INPUT
    assert 'has no key "hiden_act"; did you mean "hidden_act"?' in capsys.readouterr().err
    monkeypatch.setattr("ds_pretrain.models.config_check._can_import", lambda: False)
    assert main(["check", str(run_file), *misspelt]) == 0
    assert "not checked (transformers or torch cannot be imported here): keys and" in capsys.readouterr().out


def test_the_process_ends_with_code_2_and_one_message(tmp_path: Path) -> None:
    """Through the interpreter, as a shell starts it."""
    run_file = make_run(tmp_path)
    before = listing(tmp_path)
    argv = [sys.executable, "-m", "ds_pretrain", "check", str(run_file), "sched=1"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (EXIT_BAD_INPUT, "")
    assert done.stderr == "ds-pretrain: override of sched: unknown key `sched`; did you mean `schedule`?\n"
    assert listing(tmp_path) == before


def _train(world: World, run_file: str, overrides: list[str]) -> tuple[int, str]:
    """What a launched rank ends with, and says."""
    from ds_pretrain.train import main as train

    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = train([run_file, *overrides])
    return code, said.getvalue()


RANKS: dict[str, tuple[Spoil, str]] = {
    "a misspelt key": (overriding("sched=1"), "unknown key `sched`; did you mean `schedule`?"),
    "a token id out of range": (id_out_of_range, "FOLDER/code.bin: offset 600: token 300 has id 5000"),
    "a truncated .bin": (truncated, "FOLDER/code.bin: "),
    "an accumulation that does not follow": (
        overriding("batch.gradient_accumulation_steps=4"),
        "(from the launcher) make accumulation 2, but batch.gradient_accumulation_steps = 4",
    ),
    "an output that cannot be written": (below_a_file, "cannot write there (FOLDER/file is not a folder)"),
    "an output that turns out unwritable": (
        overriding("out=/proc/out"),
        "out = /proc/out: cannot write there",
    ),
}


@pytest.mark.parametrize(("spoil", "piece"), RANKS.values(), ids=RANKS.keys())
def test_ranks_that_find_bad_input_all_end_with_code_2_and_write_nothing(
    tmp_path: Path, spoil: Spoil, piece: str
) -> None:
    run_file = make_run(tmp_path)
    overrides = spoil(tmp_path)
    before = listing(tmp_path)
    (first_code, first_said), (second_code, second_said) = run_ranks(_train, 2, str(run_file), overrides)
    assert (first_code, second_code) == (EXIT_BAD_INPUT, EXIT_BAD_INPUT)
    assert piece.replace("FOLDER", str(tmp_path)) in first_said
    assert first_said.count("ds_pretrain: ") == 1
    assert second_said == ""
    assert listing(tmp_path) == before


def test_a_start_in_the_directory_of_another_run_leaves_its_stop_file(tmp_path: Path) -> None:
    """That other run may be training right now, and was asked to stop."""
    run_file = make_run(tmp_path)
    overrides = another_run_there(tmp_path)
    (tmp_path / "out" / "stop").touch()
    ((code, said),) = run_ranks(_train, 1, str(run_file), overrides)
    assert code == EXIT_BAD_INPUT
    assert "holds the run 'tiny'" in said
    assert (tmp_path / "out" / "stop").exists()


def test_a_start_in_the_directory_of_another_run_writes_nothing(tmp_path: Path) -> None:
    run_file = make_run(tmp_path)
    overrides = another_run_there(tmp_path)
    before = listing(tmp_path)
    ((code, _),) = run_ranks(_train, 1, str(run_file), overrides)
    assert code == EXIT_BAD_INPUT
    assert listing(tmp_path) == before
