"""Text in, corpus out: tokenize any source into a `.bin`/`.idx` pair, on all cores, in bounded memory.

The bytes written depend on the documents and the tokenizer alone: not on the number of workers, and not on
how often the work was killed and started again.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds_pretrain.data.documents import DocumentMode, Input, find_inputs, identity, read_documents
from ds_pretrain.data.encode import Batch, Reading, encode_in_order, read_batches
from ds_pretrain.data.indexed import file_of, stem_of
from ds_pretrain.data.partial import Counts, alone, refuse_existing, resume, save_state
from ds_pretrain.data.progress import Progress
from ds_pretrain.data.tokenizer import BYTES, Tokenizer, load_tokenizer, train_tokenizer
from ds_pretrain.data.writer import IndexedWriter, dtype_for, partial_folder
from ds_pretrain.errors import InputError
from ds_pretrain.files import ensure_writable_folder

SYNC_TOKENS = 1 << 24  # what a kill can cost: a few seconds' work
_KEY_VERSION = 1


@dataclass(frozen=True)
class Summary:
    """What `prepare` did. Tokens, also those of the longest document, count the separators."""

    prefix: Path
    documents: int
    tokens: int
    empty_dropped: int
    longest: int
    replaced: int  # documents with U+FFFD in them, which stands for bytes that are not UTF-8
    dtype: str
    vocab_size: int
    tokenizer_hash: str
    resumed_at: int  # documents that an earlier, interrupted call had done
    seconds: float
    tokens_per_second: float  # of this call

    @property
    def paths(self) -> tuple[Path, Path, Path]:
        """The tokens, the index, and what is stored beside them."""
        return file_of(self.prefix, "bin"), file_of(self.prefix, "idx"), file_of(self.prefix, "json")


def prepare(
    sources: Sequence[str],
    tokenizer: str,
    out: Path | str,
    workers: int | None = None,
    *,
    train_tokenizer_size: int | None = None,
    text_column: str = "text",
    split: str = "train",
    document: DocumentMode = "file",
    eos_token: str | None = None,
    overwrite: bool = False,
    progress: bool = True,
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
) -> Summary:
    """Tokenize the documents of `sources` into OUT.bin, OUT.idx and OUT.json, each followed by one EOS.

    Killed, it continues from its last sync when called again with the same inputs and tokenizer. `workers` is
    the number of threads that tokenize; None: one for each core this process may use.

    Raises:
        InputError: whatever of this cannot be done, before anything is written where that can be known.
    """
    prefix = stem_of(out)
    num_workers = workers if workers is not None else len(os.sched_getaffinity(0))
    if num_workers < 1:
        raise InputError(f"--workers {workers}: expected at least 1")
    inputs = find_inputs(sources, document)
    refuse_existing(prefix, overwrite)
    ensure_writable_folder(prefix.parent, "--out")
    partial_folder(prefix).mkdir(exist_ok=True)
    reading = (document, text_column, split)
    with alone(prefix):
        if train_tokenizer_size is not None:
            _train(inputs, reading, tokenizer, train_tokenizer_size, overwrite, say)
        loaded = load_tokenizer(tokenizer, eos_token)
        dtype_for(loaded.vocab_size)
        key = _key(inputs, reading, loaded.hash)
        start = resume(prefix, key, dtype_for(loaded.vocab_size).itemsize, say)
        began = time.monotonic()
        with Progress(inputs, progress) as bar:
            end = _tokenize(inputs, reading, loaded, prefix, key, start, num_workers, bar)
        seconds = time.monotonic() - began
    return Summary(
        prefix=prefix,
        documents=end.documents,
        tokens=end.tokens,
        empty_dropped=end.empty,
        longest=end.longest,
        replaced=end.replaced,
        dtype=dtype_for(loaded.vocab_size).name,
        vocab_size=loaded.vocab_size,
        tokenizer_hash=loaded.hash,
        resumed_at=start.documents,
        seconds=seconds,
        tokens_per_second=(end.tokens - start.tokens) / max(seconds, 1e-9),
    )


def _tokenize(
    inputs: Sequence[Input],
    reading: Reading,
    tokenizer: Tokenizer,
    prefix: Path,
    key: str,
    start: Counts,
    workers: int,
    bar: Progress,
) -> Counts:
    """Read, tokenize, write, sync now and then, publish. The counts at the end."""
    writer = IndexedWriter(prefix, tokenizer.vocab_size, start.documents, start.tokens)
    counts, synced = start, start.tokens
    try:
        batches = read_batches(inputs, reading, start)
        for batch, encoded in encode_in_order(batches, tokenizer, workers):
            kept = [ids for ids in encoded if ids.size > 1]  # more than its separator
            writer.add(kept)
            counts = _counted(counts, batch, kept)
            if counts.tokens - synced >= SYNC_TOKENS:
                writer.sync()
                save_state(prefix, key, counts)
                synced = counts.tokens
            bar.show(counts.input, counts.documents, counts.tokens)
        if counts.documents == 0:
            raise InputError(
                f"{', '.join(one.name for one in inputs[:3])}: no documents with text "
                f"({counts.empty} empty ones); check the path, --text-column and --split"
            )
        writer.sync()
        save_state(prefix, key, counts)
        writer.finish(_sidecar(tokenizer, counts))
    finally:
        writer.close()
    return counts


def _counted(counts: Counts, batch: Batch, kept: list[NDArray[np.integer]]) -> Counts:
    return replace(
        counts,
        input=batch.next_input,
        row=batch.next_row,
        documents=counts.documents + len(kept),
        tokens=counts.tokens + sum(ids.size for ids in kept),
        empty=counts.empty + len(batch.texts) - len(kept),
        longest=max([counts.longest, *(ids.size for ids in kept)]),
        replaced=counts.replaced + sum("\ufffd" in text for text in batch.texts),
        max_id=max([counts.max_id, *(int(ids.max()) for ids in kept)]),
    )


def _sidecar(tokenizer: Tokenizer, counts: Counts) -> dict[str, Any]:
    return {
        "tokenizer": tokenizer.name,
        "tokenizer_hash": tokenizer.hash,
        "eos_id": tokenizer.eos_id,
        "max_id": counts.max_id,
    }


def _train(
    inputs: Sequence[Input],
    reading: Reading,
    path: str,
    size: int,
    overwrite: bool,
    say: Callable[[str], None],
) -> None:
    """Train a tokenizer at `path`, unless an interrupted call has already trained this one there."""
    if path == BYTES:
        raise InputError("--train-tokenizer: `bytes` is built in; pass the folder to write with --tokenizer")
    folder = Path(path)
    note = json.dumps({"inputs": _key(inputs, reading, ""), "vocab_size": size}) + "\n"
    trained = folder / "training.json"
    if trained.is_file() and trained.read_text() == note:
        say(f"{path}: already trained on these inputs; used as it is")
        return
    if folder.exists() and not overwrite:
        raise InputError(
            f"--tokenizer {path}: exists, and was not trained on these inputs with {size} entries; leave out "
            "--train-tokenizer to use it, choose another path, or pass --overwrite"
        )
    ensure_writable_folder(folder.parent, "--tokenizer")
    texts = (text for one in inputs for text in read_documents(one, *reading))
    train_tokenizer(texts, size, folder, note)
    got = load_tokenizer(path).vocab_size
    short = "" if got == size else f" (not {size}: the text has no more pairs to merge)"
    say(f"{path}: trained a tokenizer of {got} entries{short}")


def _key(inputs: Sequence[Input], reading: Reading, tokenizer_hash: str) -> str:
    """What must be unchanged for earlier work to be continued."""
    text = json.dumps([_KEY_VERSION, identity(inputs), *reading, tokenizer_hash])
    return hashlib.sha256(text.encode()).hexdigest()
