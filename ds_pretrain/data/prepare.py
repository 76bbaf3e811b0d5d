"""Text in, corpus out: tokenize any source into a `.bin`/`.idx` pair, on all cores, in bounded memory.

The bytes written depend on the documents and the tokenizer alone: not on the number of workers, and not on
how often the work was killed and started again. Work in progress lies in OUT.partial/.
"""

import contextlib
import hashlib
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from ds_pretrain.core.errors import InputError, Preempted
from ds_pretrain.core.files import FileLock, check_folder, write_atomic
from ds_pretrain.core.jsonl import read_as
from ds_pretrain.core.text import format_count_of
from ds_pretrain.data.indexed import IndexedWriter, choose_dtype, corpus_file, parse_prefix, partial_folder
from ds_pretrain.data.inputs import DocumentMode, Input, compute_identity, find_inputs, read_documents
from ds_pretrain.data.tokenizer import (
    Tokenizer,
    copy_of,
    list_paths,
    load_tokenizer,
    refuse_training,
    train_once,
)

SYNC_TOKENS, SYNC_SECONDS = 1 << 24, 30.0  # what a kill can cost: the lesser of both
_KEY_VERSION = 1
_BATCH_CHARACTERS = 1 << 18
_BATCH_DOCUMENTS = 1024
_BATCHES_AHEAD = 3  # for each worker
_TERMINAL_SECONDS, _LOG_SECONDS = 0.2, 30.0  # between two states of the progress bar

Reading = tuple[DocumentMode, str, str]  # how documents are found in an input: mode, text column, split
Say = Callable[[str], None]


@dataclass(frozen=True)
class PrepareOptions:
    """The options of `prepare`: inputs, tokenizer, output."""

    sources: Sequence[str]
    tokenizer: str
    out: Path | str
    workers: int | None = None  # threads that tokenize; None: one for each core this process may use
    train_tokenizer_size: int | None = None
    text_column: str = "text"
    split: str = "train"
    document: DocumentMode = "file"
    eos_token: str | None = None
    overwrite: bool = False
    progress: bool = True

    @property
    def reading(self) -> Reading:
        """The options that decide how documents are found in an input."""
        return self.document, self.text_column, self.split

    @property
    def num_workers(self) -> int:
        """Threads that tokenize."""
        return self.workers if self.workers is not None else len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Summary:
    """The result of `prepare`. Token counts include separators."""

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
    tokens_per_second: float  # of this call


@dataclass(frozen=True)
class Counts:
    """The progress of the work: the next document to read, and what was written up to it."""

    input: int = 0
    row: int = 0
    documents: int = 0
    tokens: int = 0
    empty: int = 0
    longest: int = 0
    replaced: int = 0
    max_id: int = -1


@dataclass(frozen=True)
class PrepareState:
    """The content of OUT.partial/, and the inputs and tokenizer it belongs to (`key`)."""

    key: str
    counts: Counts


@dataclass(frozen=True)
class DocumentBatch:
    """Texts that go to one worker, and the place of the document after them."""

    texts: list[str]
    next_input: int
    next_row: int


def prepare(options: PrepareOptions, say: Say = lambda line: print(line, file=sys.stderr)) -> Summary:
    """Tokenize the documents of the sources into OUT.bin, OUT.idx and OUT.json, each followed by one EOS.

    Killed, it continues from its last sync when called again with the same inputs and tokenizer.

    Raises:
        InputError: whatever of this cannot be done, before anything is written where that can be known.
        Preempted: interrupted (Ctrl-C, SIGTERM, SIGHUP); what is done is kept.
    """
    prefix = parse_prefix(options.out)
    try:
        with raise_on_signals():
            inputs, tokenizer = _check(options, prefix, say)
            with _hold(prefix):
                if tokenizer is None:
                    tokenizer = _train(options, inputs, say)
                return _write(options, inputs, tokenizer, prefix, say)
    except KeyboardInterrupt:
        raise Preempted(_describe_stop(prefix)) from None


@contextmanager
def raise_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does, unless someone else has a use for them.

    Only in the main thread, as Python has it; elsewhere nothing changes.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    taken: list[signal.Signals] = []
    if threading.current_thread() is threading.main_thread():
        taken = [s for s in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _check(options: PrepareOptions, prefix: Path, say: Say) -> tuple[list[Input], Tokenizer | None]:
    """The inputs, and the tokenizer unless it is to be trained. Writes nothing.

    Raises:
        InputError: all that is wrong.
    """
    inputs: list[Input] = []
    loaded: list[Tokenizer] = []
    size = options.train_tokenizer_size
    own = [corpus_file(prefix, end) for end in ("bin", "idx", "json", "partial")] + list_paths(
        options.tokenizer
    )

    def load() -> None:
        if size is None:
            loaded.append(load_tokenizer(options.tokenizer, options.eos_token))
            choose_dtype(loaded[0].vocab_size)
        else:
            refuse_training(options.tokenizer, size, options.eos_token)

    problems = []
    if options.num_workers < 1:
        problems.append(f"--workers {options.num_workers}: expected at least 1")
    if problem := check_folder(prefix.parent, "--out"):
        problems.append(problem)
    checks: list[Callable[[], None]] = [
        lambda: inputs.extend(find_inputs(options.sources, options.document, own, say)),
        load,
        lambda: _refuse_existing(prefix, options.overwrite),
    ]
    for check in checks:
        try:
            check()
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(problems)
    return inputs, loaded[0] if loaded else None


def _refuse_existing(prefix: Path, overwrite: bool) -> None:
    """Never write over a corpus unasked."""
    # A .bin without an index, beside a state, is ours: killed between two renames.
    if os.path.exists(_state_path(prefix)) and not os.path.exists(corpus_file(prefix, "idx")):
        return
    existing = [path for end in ("bin", "idx", "json") if os.path.exists(path := corpus_file(prefix, end))]
    if existing and not overwrite:
        names = ", ".join(path.name for path in existing)
        raise InputError(f"--out {prefix}: {names} exist already; choose another prefix, or pass --overwrite")


@contextmanager
def _hold(prefix: Path) -> Iterator[None]:
    """Hold OUT.partial/ against a second `prepare`, and remove it unless something in it is worth keeping."""
    folder = partial_folder(prefix)
    created = [path for path in folder.parents if not os.path.exists(path)]  # innermost first
    lock = FileLock(folder, lambda _: f"{folder}: another prepare is writing there; wait for it, or end it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.take()
    except OSError as error:
        raise InputError(
            f"--out: cannot write {folder} ({error.strerror or error}); choose another prefix"
        ) from error
    try:
        yield
    finally:
        lock.release()
        if folder.is_dir() and not _state_path(prefix).exists():
            shutil.rmtree(folder)
            with contextlib.suppress(OSError):  # as soon as one holds something else
                for path in created:
                    path.rmdir()


def _train(options: PrepareOptions, inputs: Sequence[Input], say: Say) -> Tokenizer:
    size = options.train_tokenizer_size
    assert size is not None
    note = json.dumps({"inputs": _compute_key(inputs, options.reading, ""), "vocab_size": size}) + "\n"
    texts = (text for one in inputs for text in read_documents(one, *options.reading))
    return train_once(texts, options.tokenizer, size, note, options.overwrite, say)


def _write(
    options: PrepareOptions, inputs: Sequence[Input], tokenizer: Tokenizer, prefix: Path, say: Say
) -> Summary:
    """Tokenize and publish, from where an interrupted call stopped."""
    dtype = choose_dtype(tokenizer.vocab_size)
    start = _resume(prefix, _compute_key(inputs, options.reading, tokenizer.hash), dtype.itemsize, say)
    began = time.monotonic()
    try:
        end = _tokenize(options, inputs, tokenizer, prefix, start)
    except OSError as error:
        raise InputError(
            f"--out {prefix}: cannot be written ({error.strerror or error}); free disk space and rerun "
            f"the same command: it continues"
        ) from error
    seconds = max(time.monotonic() - began, 1e-9)
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
        resumed_at=start.counts.documents,
        tokens_per_second=(end.tokens - start.counts.tokens) / seconds,
    )


def _tokenize(
    options: PrepareOptions, inputs: Sequence[Input], tokenizer: Tokenizer, prefix: Path, start: PrepareState
) -> Counts:
    """Read, tokenize, write, sync now and then, publish. The counts at the end."""
    counts = start.counts
    writer = IndexedWriter(prefix, tokenizer.vocab_size, counts.documents, counts.tokens)
    synced, synced_at = counts.tokens, time.monotonic()

    def keep() -> None:
        writer.sync()
        write_atomic(_state_path(prefix), json.dumps(asdict(replace(start, counts=counts))) + "\n")

    batches = encode_in_order(read_batches(inputs, options.reading, counts), tokenizer, options.num_workers)
    with closing(writer), closing(batches), _open_progress_bar(options.progress) as bar:
        try:
            for batch, encoded in batches:
                kept = [ids for ids in encoded if ids.size > 1]  # more than its separator
                writer.add(kept)
                before, counts = counts, _add(counts, batch, kept)
                if counts.tokens - synced >= SYNC_TOKENS or time.monotonic() - synced_at >= SYNC_SECONDS:
                    keep()
                    synced, synced_at = counts.tokens, time.monotonic()
                bar.set_description(
                    f"{counts.input} of {format_count_of(len(inputs), 'input')}", refresh=False
                )
                bar.update(counts.tokens - before.tokens)
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
        facts = {"tokenizer": tokenizer.name, "tokenizer_hash": tokenizer.hash, "eos_id": tokenizer.eos_id}
        if tokenizer.eos_token is not None:
            facts["eos_token"] = tokenizer.eos_token
        writer.finish({**facts, "max_id": counts.max_id})
    return counts


def _open_progress_bar(enabled: bool) -> "tqdm[Any]":
    """Tokens and their rate: on a terminal wiped at the end, in a log renewed now and then."""
    seconds = _TERMINAL_SECONDS if sys.stderr.isatty() else _LOG_SECONDS
    return tqdm(
        disable=not enabled,
        unit=" tokens",
        unit_scale=True,
        mininterval=seconds,
        maxinterval=seconds,
        delay=seconds,
        leave=False,
    )


def read_batches(inputs: Sequence[Input], reading: Reading, start: Counts) -> Iterator[DocumentBatch]:
    """Documents from `start` on, in batches of a size that keeps a worker busy for a tenth of a second."""
    texts: list[str] = []
    characters = 0
    for number in range(start.input, len(inputs)):
        row = start.row if number == start.input else 0
        for text in read_documents(inputs[number], *reading, start=row):
            row += 1
            texts.append(text)
            characters += len(text)
            if characters >= _BATCH_CHARACTERS or len(texts) >= _BATCH_DOCUMENTS:
                yield DocumentBatch(texts, number, row)
                texts, characters = [], 0
    yield DocumentBatch(texts, len(inputs), 0)


def encode_in_order(
    batches: Iterator[DocumentBatch], tokenizer: Tokenizer, workers: int
) -> Generator[tuple[DocumentBatch, list[NDArray[np.integer]]], None, None]:
    """Each batch with the ids of its texts, in order, a bounded number ahead.

    Threads, not processes: the tokenizer works outside the GIL, nothing is pickled, a kill leaves no orphans.
    """
    mine = threading.local()
    eos = np.array([tokenizer.eos_id], dtype=np.int32)

    def encode(texts: list[str]) -> list[NDArray[np.integer]]:
        """The ids of each text and EOS; EOS alone for a text of nothing but white space."""
        if not hasattr(mine, "tokenizer"):
            mine.tokenizer = copy_of(tokenizer)
        encoded = mine.tokenizer.encode([text if text.strip() else "" for text in texts])
        return [np.concatenate([ids, eos]) for ids in encoded]

    ahead: deque[tuple[DocumentBatch, Future[list[NDArray[np.integer]]]]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="tokenize")
    try:
        for batch in batches:
            ahead.append((batch, pool.submit(encode, batch.texts)))
            if len(ahead) > workers * _BATCHES_AHEAD:
                first, future = ahead.popleft()
                yield first, future.result()
        while ahead:
            first, future = ahead.popleft()
            yield first, future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _add(counts: Counts, batch: DocumentBatch, kept: list[NDArray[np.integer]]) -> Counts:
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


def _compute_key(inputs: Sequence[Input], reading: Reading, tokenizer_hash: str) -> str:
    """Hash everything that must be unchanged for earlier work to be continued."""
    text = json.dumps([_KEY_VERSION, compute_identity(inputs), *reading, tokenizer_hash])
    return hashlib.sha256(text.encode()).hexdigest()


def _state_path(prefix: Path) -> Path:
    return partial_folder(prefix) / "state.json"


def _read_state(prefix: Path) -> PrepareState | None:
    try:
        return read_as(PrepareState, _state_path(prefix).read_bytes())
    except (OSError, ValueError):
        return None


def _resume(prefix: Path, key: str, itemsize: int, say: Say) -> PrepareState:
    """Return the point at which an interrupted call with the same inputs stopped, or the beginning."""
    path = _state_path(prefix)
    if not path.exists():
        return PrepareState(key, Counts())
    state = _read_state(prefix)
    if state is None:
        say(f"{path}: cannot be read; starting over")
    elif state.key != key:
        say(f"{prefix}: the inputs or the tokenizer changed since the interrupted call; starting over")
    elif not _is_complete(prefix, state.counts, itemsize):
        say(f"{prefix}: the files of the interrupted call are gone; starting over")
    else:
        say(f"{prefix}: continuing after {_format_size(state.counts)}")
        return state
    path.unlink()
    return PrepareState(key, Counts())


def _is_complete(prefix: Path, counts: Counts, itemsize: int) -> bool:
    tokens, lengths = partial_folder(prefix) / "tokens", partial_folder(prefix) / "lengths"
    if not tokens.exists() and not corpus_file(prefix, "idx").exists():
        tokens = corpus_file(prefix, "bin")  # killed between the last renames
    needed = {tokens: counts.tokens * itemsize, lengths: counts.documents * 4}
    return all(path.exists() and path.stat().st_size >= size for path, size in needed.items())


def _describe_stop(prefix: Path) -> str:
    """Tell the user how to continue after an interrupted `prepare`."""
    state = _read_state(prefix)
    if state is None:
        return f"{prefix}: interrupted before a document was written; the same command starts over"
    return (
        f"{prefix}: interrupted; {_format_size(state.counts)} are kept, and the same command continues "
        f"after them"
    )


def _format_size(counts: Counts) -> str:
    return f"{format_count_of(counts.documents, 'document')}, {format_count_of(counts.tokens, 'token')}"
