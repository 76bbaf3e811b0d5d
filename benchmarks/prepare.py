"""`ds-pretrain prepare` against the bare tokenizer on the same documents and cores, and its memory.

    python benchmarks/prepare.py

The documents are modules of the running Python's standard library as jsonl, tokenized by a BPE trained on
them. The bare side is `tokenizers.Tokenizer.encode_batch` on documents already in memory, 1,024 a call, its
result thrown away; ours reads, tokenizes, adds separators and writes. Bars: at least 0.8 of its tokens a
second; at most 1.25 times the peak resident memory on five times the input.
"""

import json
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import replace
from pathlib import Path

from report import finish, judge, spread, time_in_turn

from ds_pretrain.data.prepare import PrepareOptions, prepare
from ds_pretrain.data.tokenizer import load_tokenizer

ROUNDS = 5
VOCABULARY = 8192
MAX_DOCUMENTS = 600
SMALL_COPIES, LARGE_COPIES = 2, 10
BATCH_DOCUMENTS = 1024
# A child's high-water mark starts at its parent's size, so it is reset first.
MEASURE = """
import sys
from pathlib import Path
Path("/proc/self/clear_refs").write_text("5")
from ds_pretrain.data.prepare import PrepareOptions, prepare
prepare(PrepareOptions([sys.argv[1]], sys.argv[2], sys.argv[3], progress=False))
print(next(l.split()[1] for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("VmHWM")))
"""


def standard_library() -> list[str]:
    """Texts of modules, spread over the standard library, the very long tables left out."""
    folder = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path for path in folder.rglob("*.py") if "site-packages" not in path.parts)
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in paths)
    kept = [text for text in texts if text.strip() and len(text) < 200_000]
    return kept[:: -(-len(kept) // MAX_DOCUMENTS)]


def write_jsonl(path: Path, texts: list[str], copies: int) -> None:
    with path.open("w") as file:
        for _ in range(copies):
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts)


def peak_megabytes(source: Path, tokenizer: Path, out: Path) -> float:
    command = [sys.executable, "-c", MEASURE, str(source), str(tokenizer), str(out)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) / 1024


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = standard_library()
        source = folder / "library.jsonl"
        write_jsonl(source, texts, 1)
        tokenizer = folder / "tokenizer"
        options = PrepareOptions(
            [str(source)], str(tokenizer), folder / "out", overwrite=True, progress=False
        )
        first = prepare(replace(options, train_tokenizer_size=VOCABULARY), lambda _: None)
        print(f"{len(texts):,} documents, {first.tokens:,} tokens, {source.stat().st_size / 1e6:.0f} MB")
        bare = load_tokenizer(str(tokenizer)).model

        def ours() -> None:
            prepare(options)

        def theirs() -> None:
            for start in range(0, len(texts), BATCH_DOCUMENTS):
                bare.encode_batch(texts[start : start + BATCH_DOCUMENTS])

        ours_seconds, bare_seconds = time_in_turn(ours, theirs, ROUNDS)
        print(f"prepare:      {spread([first.tokens / s for s in ours_seconds], 'M tokens/s', 1e-6)}")
        print(f"encode_batch: {spread([first.tokens / s for s in bare_seconds], 'M tokens/s', 1e-6)}")
        ratios = [b / a for a, b in zip(ours_seconds, bare_seconds, strict=True)]
        print(f"ratio:        {spread(ratios)}")
        peaks = []
        for copies in (SMALL_COPIES, LARGE_COPIES):
            path = folder / f"{copies}.jsonl"
            write_jsonl(path, texts, copies)
            peaks.append(peak_megabytes(path, tokenizer, folder / f"out{copies}"))
            print(f"peak memory on {path.stat().st_size / 1e6:.0f} MB of input: {peaks[-1]:.0f} MB")
        finish(
            [
                judge("prepare: tokens/s / encode_batch", statistics.median(ratios), 0.8, "at_least"),
                judge("prepare: peak memory, 5 x input / 1 x", peaks[1] / peaks[0], 1.25, "at_most"),
            ]
        )


if __name__ == "__main__":
    main()
