"""Documents to ids on all cores: batches out to threads, ids back in order, a bounded number in flight."""

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import local

import numpy as np
from numpy.typing import NDArray

from ds_pretrain.data.documents import read_documents
from ds_pretrain.data.inputs import DocumentMode, Input
from ds_pretrain.data.partial import Counts
from ds_pretrain.data.tokenizer import Tokenizer, copy_of

Reading = tuple[DocumentMode, str, str]  # how documents are found in an input: mode, text column, split

_BATCH_CHARACTERS = 1 << 18
_BATCH_DOCUMENTS = 1024
_BATCHES_AHEAD = 3  # for each worker


@dataclass(frozen=True)
class Batch:
    """Texts that go to one worker, and the place of the document after them."""

    texts: list[str]
    next_input: int
    next_row: int


def read_batches(inputs: Sequence[Input], reading: Reading, start: Counts) -> Iterator[Batch]:
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
                yield Batch(texts, number, row)
                texts, characters = [], 0
    yield Batch(texts, len(inputs), 0)


def encode_in_order(
    batches: Iterator[Batch], tokenizer: Tokenizer, workers: int
) -> Generator[tuple[Batch, list[NDArray[np.integer]]], None, None]:
    """Each batch with the ids of its texts, in order, a bounded number ahead.

    Threads, not processes: the tokenizer works outside the GIL, nothing is pickled, a kill leaves no orphans.
    """
    mine = local()

    def encode(texts: list[str]) -> list[NDArray[np.integer]]:
        if not hasattr(mine, "tokenizer"):
            mine.tokenizer = copy_of(tokenizer)
        return _with_separators(texts, mine.tokenizer)

    ahead: deque[tuple[Batch, Future[list[NDArray[np.integer]]]]] = deque()
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


def _with_separators(texts: list[str], tokenizer: Tokenizer) -> list[NDArray[np.integer]]:
    """The ids of each text and EOS; EOS alone for a text of nothing but white space."""
    eos = np.array([tokenizer.eos_id], dtype=np.int32)
    encoded = tokenizer.encode([text if text.strip() else "" for text in texts])
    return [np.concatenate([ids, eos]) for ids in encoded]
