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
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds_pretrain.core.errors import InputError, Preempted
from ds_pretrain.core.files import folder_problem
from ds_pretrain.data.documents import read_documents
from ds_pretrain.data.encode import Batch, Reading, encode_in_order, read_batches
from ds_pretrain.data.indexed import file_of, stem_of
from ds_pretrain.data.inputs import DocumentMode, Input, find_inputs, identity
from ds_pretrain.data.interrupt import interruptible
from ds_pretrain.data.partial import Counts, alone, refuse_existing, resume, save_state, stopped
from ds_pretrain.data.progress import Progress
from ds_pretrain.data.tokenizer import Tokenizer, load_tokenizer, paths_of
from ds_pretrain.data.training import refuse_training, train_once
from ds_pretrain.data.writer import IndexedWriter, dtype_for

SYNC_TOKENS, SYNC_SECONDS = 1 << 24, 30.0  # what a kill can cost: the lesser of both
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
        Preempted: interrupted (Ctrl-C, SIGTERM, SIGHUP); what is done is kept.
    """
    prefix = stem_of(out)
    reading: Reading = (document, text_column, split)
    num_workers = workers if workers is not None else len(os.sched_getaffinity(0))
    try:
        with interruptible():
            inputs, loaded = _checked(
                sources,
                document,
                prefix,
                num_workers,
                tokenizer,
                train_tokenizer_size,
                eos_token,
                overwrite,
                say,
            )
            with alone(prefix):
                if loaded is None:
                    assert train_tokenizer_size is not None
                    loaded = _train(inputs, reading, tokenizer, train_tokenizer_size, overwrite, say)
                return _written(inputs, reading, loaded, prefix, num_workers, progress, say)
    except KeyboardInterrupt:
        raise Preempted(stopped(prefix)) from None


def _checked(
    sources: Sequence[str],
    document: DocumentMode,
    prefix: Path,
    workers: int,
    tokenizer: str,
    train_size: int | None,
    eos_token: str | None,
    overwrite: bool,
    say: Callable[[str], None],
) -> tuple[list[Input], Tokenizer | None]:
    """The inputs, and the tokenizer unless it is to be trained. Writes nothing.

    Raises:
        InputError: all that is wrong.
    """
    inputs: list[Input] = []
    loaded: list[Tokenizer] = []
    own = [*(file_of(prefix, end) for end in ("bin", "idx", "json", "partial")), *paths_of(tokenizer)]

    def find() -> None:
        inputs.extend(find_inputs(sources, document, own, say))

    def load() -> None:
        if train_size is None:
            loaded.append(load_tokenizer(tokenizer, eos_token))
            dtype_for(loaded[0].vocab_size)
        else:
            refuse_training(tokenizer, train_size, eos_token)

    problems = [] if workers >= 1 else [f"--workers {workers}: expected at least 1"]
    if problem := folder_problem(prefix.parent, "--out"):
        problems.append(problem)
    for check in (find, load, lambda: refuse_existing(prefix, overwrite)):
        try:
            check()
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(problems)
    return inputs, loaded[0] if loaded else None


def _written(
    inputs: Sequence[Input],
    reading: Reading,
    tokenizer: Tokenizer,
    prefix: Path,
    workers: int,
    progress: bool,
    say: Callable[[str], None],
) -> Summary:
    """Tokenize and publish, from where an interrupted call stopped."""
    dtype = dtype_for(tokenizer.vocab_size)
    key = _key(inputs, reading, tokenizer.hash)
    start = resume(prefix, key, dtype.itemsize, say)
    began = time.monotonic()
    try:
        with Progress(inputs, progress) as bar:
            end = _tokenize(inputs, reading, tokenizer, prefix, key, start, workers, bar)
    except OSError as error:
        raise InputError(
            f"--out {prefix}: cannot be written ({error.strerror or error}); make room there and start the "
            "same command again: it continues"
        ) from error
    seconds = time.monotonic() - began
    return Summary(
        prefix=prefix,
        documents=end.documents,
        tokens=end.tokens,
        empty_dropped=end.empty,
        longest=end.longest,
        replaced=end.replaced,
        dtype=dtype.name,
        vocab_size=tokenizer.vocab_size,
        tokenizer_hash=tokenizer.hash,
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
    counts, synced, synced_at = start, start.tokens, time.monotonic()

    def keep() -> None:
        writer.sync()
        save_state(prefix, key, counts)

    try:
        try:
            with closing(
                encode_in_order(read_batches(inputs, reading, start), tokenizer, workers)
            ) as batches:
                for batch, encoded in batches:
                    kept = [ids for ids in encoded if ids.size > 1]  # more than its separator
                    writer.add(kept)
                    counts = _counted(counts, batch, kept)
                    if counts.tokens - synced >= SYNC_TOKENS or time.monotonic() - synced_at >= SYNC_SECONDS:
                        keep()
                        synced, synced_at = counts.tokens, time.monotonic()
                    bar.show(counts.input, counts.documents, counts.tokens)
        except KeyboardInterrupt:
            if counts.documents > 0:
                keep()  # what was added after `counts` is cut off by the call that continues
            raise
        if counts.documents == 0:
            raise InputError(
                f"{', '.join(one.name for one in inputs[:3])}: no documents with text "
                f"({counts.empty} empty ones); check the path, --text-column and --split"
            )
        keep()
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
        **({} if tokenizer.eos_token is None else {"eos_token": tokenizer.eos_token}),
        "max_id": counts.max_id,
    }


def _train(
    inputs: Sequence[Input],
    reading: Reading,
    path: str,
    size: int,
    overwrite: bool,
    say: Callable[[str], None],
) -> Tokenizer:
    note = json.dumps({"inputs": _key(inputs, reading, ""), "vocab_size": size}) + "\n"
    texts = (text for one in inputs for text in read_documents(one, *reading))
    return train_once(texts, path, size, note, overwrite, say)


def _key(inputs: Sequence[Input], reading: Reading, tokenizer_hash: str) -> str:
    """What must be unchanged for earlier work to be continued."""
    text = json.dumps([_KEY_VERSION, identity(inputs), *reading, tokenizer_hash])
    return hashlib.sha256(text.encode()).hexdigest()
