"""The benchmarks as programs: what they print, how they end, what they skip. Nothing here is timed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ds_pretrain.config.plan import load_plan
from ds_pretrain.data.tokenizer import load_tokenizer

ROOT = Path(__file__).parent.parent
JUDGING = """
from report import finish, judge
finish([judge("first", 0.51, 0.5, "at_least"), judge("second", {second}, 1.03, "at_most")])
"""
RUNNER = """
import runpy, sys
from pathlib import Path
runner = runpy.run_path("benchmarks/__main__.py")
globals_of_main = runner["main"].__globals__
globals_of_main["FOLDER"] = Path(sys.argv.pop(1))
globals_of_main["NEEDS_DATA"] = {"needy": "it needs DATA"}
sys.exit(runner["main"]())
"""


def python(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], cwd=cwd, capture_output=True, text=True)


def in_benchmarks(code: str) -> subprocess.CompletedProcess[str]:
    """Run code that imports from the folder of benchmarks, as these do from one another."""
    return python("-c", code, cwd=ROOT / "benchmarks")


@pytest.mark.parametrize(("second", "holds"), [(1.03, True), (1.031, False)])
def test_a_result_is_one_json_line_and_a_missed_bar_is_exit_code_1(second: float, holds: bool) -> None:
    done = in_benchmarks(JUDGING.format(second=second))
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {"name": "first", "figure": 0.51, "bar": 0.5, "better": "at_least", "holds": True},
        {"name": "second", "figure": second, "bar": 1.03, "better": "at_most", "holds": holds},
    ]
    assert done.returncode == (0 if holds else 1)


def write_benchmarks(folder: Path, **bodies: str) -> None:
    for name, body in bodies.items():
        (folder / f"{name}.py").write_text(body)


def line(name: str, holds: bool) -> str:
    result = {"name": name, "figure": 1.5, "bar": 2, "better": "at_most", "holds": holds}
    return f"print({json.dumps(result)!r})\n"


def test_all_benchmarks_end_with_a_line_for_each_result(tmp_path: Path) -> None:
    write_benchmarks(tmp_path, one=line("speed", True) + line("memory", True), needy="raise SystemExit(1)")
    done = python("-c", RUNNER, str(tmp_path))
    assert done.stdout.split("== results\n")[1].splitlines() == [
        "holds    speed: 1.5 (at most 2)",
        "holds    memory: 1.5 (at most 2)",
        "skipped  needy: it needs DATA",
    ]
    assert done.returncode == 0


def test_the_data_goes_to_the_benchmark_that_needs_it_and_to_no_other(tmp_path: Path) -> None:
    words = "import sys\nprint('words', sys.argv[1:])\n" + line("it", True)
    write_benchmarks(tmp_path, needy=words, other=words)
    done = python("-c", RUNNER, str(tmp_path), "play.txt")
    assert [text for text in done.stdout.splitlines() if text.startswith("words")] == [
        "words ['play.txt']",
        "words []",
    ]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (line("speed", False) + "raise SystemExit(1)", "MISSED   speed: 1.5 (at most 2)"),
        ("raise SystemExit(3)", "MISSED   one: ended with exit code 3 and no result that tells why"),
        ("", "MISSED   one: ended with exit code 0 and no result that tells why"),
        (line("speed", True) + "raise SystemExit(3)", "MISSED   one: ended with exit code 3"),
    ],
)
def test_a_missed_bar_or_a_benchmark_without_a_result_is_exit_code_1(
    tmp_path: Path, body: str, said: str
) -> None:
    write_benchmarks(tmp_path, one=body, two=line("memory", True))
    done = python("-c", RUNNER, str(tmp_path))
    assert said in done.stdout.split("== results\n")[1]
    assert "holds    memory" in done.stdout
    assert done.returncode == 1


def test_the_folder_is_a_program_that_knows_every_benchmark() -> None:
    assert "DATA" in python("-m", "benchmarks", "--help").stdout
    listed = python("-c", "import runpy; print(*runpy.run_path('benchmarks/__main__.py')['names']())")
    text = (ROOT / "benchmarks/README.md").read_text()
    found = listed.stdout.split()
    assert {"data_order", "nanogpt_row", "prepare", "step_overhead", "watchdog_cost"} <= set(found)
    assert [name for name in found if f"`{name}.py`" not in text] == []


def test_the_public_row_holds_only_if_llama_is_below_gpt2() -> None:
    code = "from nanogpt_row import judge_row\nprint(all(judge_row({}, {})))"
    ends = {
        losses: in_benchmarks(code.format(*losses)).stdout.splitlines()[-1]
        for losses in [(1.88, 1.87), (1.89, 1.87), (1.87, 1.87), (1.86, 1.87)]
    }
    assert ends == {
        (1.88, 1.87): "True",
        (1.89, 1.87): "False",
        (1.87, 1.87): "False",
        (1.86, 1.87): "False",
    }


def test_the_public_row_holds_out_the_last_tenth_and_gives_each_character_a_token(tmp_path: Path) -> None:
    text = "Füße: 'nay',\r\nsaid he.\n\n" * 9
    code = (
        "from pathlib import Path\nfrom nanogpt_row import split_text, write_tokenizer\n"
        f"split_text({text!r}, Path({str(tmp_path / 'text')!r}))\n"
        f"print(write_tokenizer({text!r}, Path({str(tmp_path / 'tokenizer.json')!r})))"
    )
    size = int(in_benchmarks(code).stdout)
    parts = [(tmp_path / f"text/{name}.txt").read_bytes().decode() for name in ("train", "validation")]
    assert "".join(parts) == text
    assert len(parts[0]) == int(len(text) * 0.9)
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"), "<|endoftext|>")
    ids = tokenizer.encode([text])[0]
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (size, size - 1) == (len(set(text)) + 1, size - 1)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


def test_both_run_files_of_the_public_row_hold_its_recipe_and_differ_in_the_model_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    plans = [load_plan(f"examples/nanogpt_{name}.toml") for name in ("gpt2", "llama")]
    differing = {"name": True, "out": True, "model": {"config"}}
    first, second = (plan.run.model_dump(mode="json", exclude=differing) for plan in plans)
    assert first == second
    for plan in plans:
        assert (plan.last_step, plan.timeline.segments[0].tokens_per_step) == (2000, 12 * 64)
        assert [plan.schedule.lr(step) for step in (50, 100)] == pytest.approx([5e-4, 1e-3])
        assert plan.schedule.lr(1999) == pytest.approx(1e-4, rel=1e-3)
