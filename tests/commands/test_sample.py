"""`sample` on a run that really trained: the engine's own weights, and text from them."""

import contextlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_pretrain import train as train_module
from ds_pretrain.checkpoint.restore import find_newest_intact
from ds_pretrain.commands import cli
from ds_pretrain.commands import sample as sample_module
from ds_pretrain.config.plan import load_plan
from ds_pretrain.core.distributed import World
from ds_pretrain.core.errors import EXIT_BAD_INPUT, EXIT_FINISHED
from ds_pretrain.core.run_files import StopSignal, run_lock
from ds_pretrain.data.tokenizer import load_tokenizer
from tests.ranks import run_ranks
from tests.scenario import make_run, write_corpus

Said = tuple[int, str, str]  # exit code, stdout, stderr


def two_steps(folder: Path) -> Path:
    """The run file of a run of two steps."""
    run_file = make_run(folder, steps=2, batch_tokens=64, save_every="2 steps")
    run_file.write_text(run_file.read_text().replace('warmup = "2 steps"', 'warmup = "1 steps"'))
    return run_file


def train_and_gather(world: World, run_file: str) -> dict[str, Any]:
    """Train to the end; the live weights by name, whole, as lists. Collective."""
    import deepspeed

    engines: list[Any] = []
    patch = pytest.MonkeyPatch()
    open_engine: Any = vars(train_module)["open_run_engine"]

    def opened(*args: Any) -> Any:
        engines.append(open_engine(*args))
        return engines[-1]

    patch.setattr(train_module, "open_run_engine", opened)
    plan = load_plan(run_file, ())
    with StopSignal(plan.out, world) as stop:
        train_module.train(plan, world, stop, run_lock(plan.out))
    patch.undo()
    weights = {}
    for name, parameter in engines[0]._engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            weights[name] = parameter.detach().clone().tolist()
    return weights


def commands(_: World, lines: list[list[str]]) -> list[Said]:
    """Run several `ds-pretrain` commands in one process."""
    results = []
    for words in lines:
        said, complained = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complained):
            code = cli.main(words)
        results.append((code, said.getvalue(), complained.getvalue()))
    return results


def restored_weights(_: World, run_file: str) -> dict[str, Any]:
    """The weights that `sample` computes with."""
    plan = load_plan(run_file, ())
    model = sample_module.load_trained_model(plan, find_newest_intact(plan.out / "checkpoints"))
    assert not model.training
    return {name: parameter.tolist() for name, parameter in model.named_parameters()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The run file of a run that trained 2 steps on 2 ranks, and the engine's weights at its end."""
    folder = tmp_path_factory.mktemp("sampled")
    bytes_ = load_tokenizer("bytes")
    for seed, source in enumerate(("text", "code", "held_out")):
        write_corpus(folder / source, seed, sidecar={"tokenizer": bytes_.name, "tokenizer_hash": bytes_.hash})
    run_file = two_steps(folder)
    first, second = run_ranks(train_and_gather, 2, str(run_file))
    assert first == second
    return run_file, first


def sampled(run_file: Path, *lines: str) -> list[Said]:
    """What `sample RUN.toml` and the words of each line answer."""
    words = [["sample", str(run_file), *line.split()] for line in lines]
    return run_ranks(commands, 1, words)[0]  # type: ignore[no-any-return]


def test_the_weights_are_those_of_the_engine(trained: tuple[Path, dict[str, Any]]) -> None:
    run_file, weights = trained
    (restored,) = run_ranks(restored_weights, 1, str(run_file))
    assert sorted(restored) == sorted(weights)
    for name, values in weights.items():
        assert torch.equal(torch.tensor(restored[name]), torch.tensor(values)), name


def test_text_is_printed_greedy_text_is_deterministic_and_a_seed_repeats_a_draw(
    trained: tuple[Path, dict[str, Any]],
) -> None:
    run_file, _ = trained
    options = "--prompt abc --tokens 30"
    results = sampled(
        run_file,
        f"{options} --temperature 0 --seed 1",
        f"{options} --temperature 0 --seed 2 --count 2",
        f"{options} --temperature 1.5 --seed 3",
        f"{options} --temperature 1.5 --seed 3",
        f"{options} --temperature 1.5 --seed 4",
        "--tokens 5",
    )
    for code, said, complained in results:
        assert code == EXIT_FINISHED
        others = [line for line in complained.replace("\r", "\n").splitlines() if line and "%|" not in line]
        assert others == []  # nothing but the bars of reading the checkpoint, no warning
        assert said.startswith("--- step_000000002\n")
    greedy, again, warm, repeated, other, _ = (said for _, said, _ in results)
    assert greedy.startswith("--- step_000000002\nabc")
    assert len(greedy) > len("--- step_000000002\nabc") + 1
    assert again == greedy * 2
    assert warm == repeated != other != greedy


def test_greedy_text_is_what_the_engine_s_weights_say(trained: tuple[Path, dict[str, Any]]) -> None:
    """Token by token from a forward of the whole text, without `generate` and its cache."""
    run_file, _ = trained
    plan = load_plan(str(run_file), ())
    model = sample_module.load_trained_model(plan, find_newest_intact(plan.out / "checkpoints"))
    ids = [256, *b"abc"]
    with torch.no_grad():
        for _ in range(10):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] == 256:
                break
    ((_, said, _),) = sampled(run_file, "--prompt abc --tokens 10 --temperature 0")
    assert said == f"--- step_000000002\n{load_tokenizer('bytes').decode(ids)}\n"


def test_numbers_that_cannot_be_meant_are_refused_at_once(trained: tuple[Path, dict[str, Any]]) -> None:
    run_file, _ = trained
    results = sampled(
        run_file,
        "--tokens 0",
        "--count 0",
        "--count -2",
        "--temperature -1",
        "--temperature nan",
        "--temperature inf",
        "--temperature 1e-30",
        "--seed -1",
        "--tokens 500",
        "--prompt " + "x" * 200,
        "--step 7",
        "--tokens 0 --count 0 --temperature -1",
    )
    for (code, said, complained), message in zip(
        results,
        (
            "--tokens 0: expected at least 1",
            "--count 0: expected at least 1",
            "--count -2: expected at least 1",
            "--temperature -1: expected at least 0.001, or 0 for the likeliest token",
            "--temperature nan: expected",
            "--temperature inf: expected",
            "--temperature 1e-30: expected",
            "--seed -1: expected 0 to 2**63 - 1",
            "--tokens 500 are more than the model's 128 positions; --tokens 127 is the most",
            "201 tokens of prompt (with the start of a document) and --tokens 100 are more than the model's "
            "128 positions; shorten the prompt",
            "does not hold a checkpoint of step 7",
            "3 problems",
        ),
        strict=True,
    ):
        assert (code, said) == (EXIT_BAD_INPUT, "")
        assert message in complained
        assert "Traceback" not in complained


def test_a_prompt_that_is_not_utf8_is_refused(trained: tuple[Path, dict[str, Any]]) -> None:
    ((code, _, complained),) = sampled(trained[0], "--prompt caf\udce9")
    assert code == EXIT_BAD_INPUT
    assert "holds bytes that are not UTF-8" in complained


def test_another_model_than_the_trained_one_is_refused(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    run_file, _ = trained
    model = json.loads((run_file.parent / "model.json").read_text())
    (tmp_path / "model.json").write_text(json.dumps({**model, "hidden_size": 64}))
    for override in (f"model.config={tmp_path}/model.json", "model.qk_norm=false"):
        ((code, _, complained),) = sampled(run_file, override)
        assert code == EXIT_BAD_INPUT
        assert "step_000000002 does not fit" in complained
        assert "set the model back to what was trained" in complained


def test_a_run_whose_sources_do_not_say_their_tokenizer_cannot_be_sampled(tmp_path: Path) -> None:
    run_file = two_steps(tmp_path)
    ((code, _, complained),) = sampled(run_file, "")
    assert code == EXIT_BAD_INPUT
    assert "no source says which tokenizer made it, so ids cannot be turned into text" in complained


def test_another_tokenizer_than_the_one_of_the_data_is_refused(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    run_file, _ = trained
    for end in ("bin", "idx", "json"):
        shutil.copy(run_file.parent / f"text.{end}", tmp_path / f"text.{end}")
    sidecar = json.loads((tmp_path / "text.json").read_text())
    (tmp_path / "text.json").write_text(json.dumps({**sidecar, "tokenizer_hash": "0" * 64}))
    ((code, _, complained),) = sampled(run_file, f"sources.text={tmp_path}/text")
    assert code == EXIT_BAD_INPUT
    assert "text.json: its tokenizer has hash 0000000000000000, bytes " in complained


def test_ctrl_c_says_so_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sample_module, "load_plan", interrupted)
    assert cli.main(["sample", "run.toml"]) == 130
    assert capsys.readouterr().err == "ds-pretrain: interrupted\n"
