"""nanoGPT's published CPU row, through the commands that a user types.

    python benchmarks/nanogpt_row.py DATA [section.key=value ...]

The row (https://github.com/karpathy/nanoGPT, "I only have a macbook"): tiny Shakespeare by characters, the
last tenth held out, 4 layers, 4 heads, width 128, context 64, 2,000 steps of 12 sequences, no dropout:
validation loss 1.88. DATA is that text. It is split, prepared with a vocabulary of its own characters, and
trained by examples/nanogpt_gpt2.toml and examples/nanogpt_llama.toml, which hold that recipe. Losses are
means over all of the held-out text, in nats a character. Bars: GPT-2 at most 1.88; Llama, of the same size,
below it.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from report import finish, judge
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from ds_pretrain.core.jsonl import read_metrics, select_latest_attempt

ROOT = Path(__file__).parent.parent
FOLDER = Path("runs/nanogpt")  # where the run files look for the data
BAR = 1.88
EOS = "<|endoftext|>"


def split_text(text: str, folder: Path) -> None:
    """Write the first nine tenths and the rest, as nanoGPT does, to folder/{train,validation}.txt."""
    folder.mkdir(parents=True)
    border = int(len(text) * 0.9)
    for name, part in (("train", text[:border]), ("validation", text[border:])):
        (folder / f"{name}.txt").write_text(part, encoding="utf-8", newline="")


def write_tokenizer(text: str, path: Path) -> int:
    """A tokenizer.json where each character of `text` is a token, and one more ends documents; its size."""
    entries = [*sorted(set(text)), EOS]
    model = Tokenizer(models.WordLevel({entry: index for index, entry in enumerate(entries)}, unk_token=EOS))
    model.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    model.decoder = decoders.Fuse()
    model.save(str(path))
    return len(entries)


def last_validation(out: Path) -> float:
    """The held-out loss after the last step of a run."""
    records = select_latest_attempt(read_metrics(out / "metrics.jsonl"), "validation")
    return float(records[-1]["losses"]["held_out"])


def ds_pretrain(*words: object) -> None:
    """Show a command and run it; its failure is the benchmark's."""
    print(f"$ ds-pretrain {shlex.join(map(str, words))}", flush=True)
    environment = {"OMP_NUM_THREADS": "1", **os.environ}  # these matrices are too small for two threads
    command = [sys.executable, "-m", "ds_pretrain", *map(str, words)]
    code = subprocess.run(command, cwd=ROOT, env=environment).returncode
    if code:
        sys.exit(code)


def train(name: str, overrides: Sequence[str]) -> float:
    """Train one of the two run files; its held-out loss."""
    started = time.monotonic()
    ds_pretrain("train", f"examples/nanogpt_{name}.toml", "--ranks", 1, *overrides)
    loss = last_validation(ROOT / FOLDER / name)
    print(f"{name}: {loss:.4f} nats a held-out character, {time.monotonic() - started:.0f} s", flush=True)
    return loss


def judge_row(gpt2: float, llama: float) -> list[bool]:
    """Return whether both bars are met."""
    return [
        judge("nanoGPT row: validation loss with a GPT-2 config", gpt2, BAR, "at_most"),
        judge("nanoGPT row: validation loss with a Llama config / GPT-2's", llama / gpt2, 0.9999, "at_most"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="nanoGPT's published CPU row.")
    parser.add_argument("data", type=Path, metavar="DATA", help="the text of tiny Shakespeare")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="of both run files")
    words = parser.parse_args()
    text = words.data.read_text(encoding="utf-8")
    shutil.rmtree(ROOT / FOLDER, ignore_errors=True)
    split_text(text, ROOT / FOLDER / "text")
    size = write_tokenizer(text, ROOT / FOLDER / "tokenizer.json")
    print(f"{len(text):,} characters, {size - 1} different ones")
    for part in ("train", "validation"):
        where = ("--eos-token", EOS, "--out", FOLDER / "data" / part)
        ds_pretrain(
            "prepare",
            FOLDER / f"text/{part}.txt",
            "--tokenizer",
            f"{FOLDER}/tokenizer.json",
            *where,
            "--quiet",
        )
    finish(judge_row(train("gpt2", words.overrides), train("llama", words.overrides)))


if __name__ == "__main__":
    main()
