"""Writes a corpus: tokens stream to disk, and nothing of it has its final name until all of it is there."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ds_pretrain.core.errors import InputError
from ds_pretrain.core.files import sync_file, sync_folder, write_atomic
from ds_pretrain.data.indexed import DTYPES, HEADER_BYTES, MAGIC, file_of, stem_of

_CHUNK = 1 << 20
_UINT16, _INT32 = DTYPES[8], DTYPES[4]


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """The smaller token type that holds every id below `vocab_size`: uint16 or int32.

    Raises:
        InputError: neither does.
    """
    if not 1 <= vocab_size <= 1 << 31:
        raise InputError(
            f"a vocabulary of {vocab_size} entries; expected 1 to {1 << 31}, what an int32 id can name"
        )
    return _UINT16 if vocab_size <= 1 << 16 else _INT32


class IndexedWriter:
    """Streams documents into PREFIX.partial/ and publishes them as PREFIX.bin, .json and .idx, the .idx last.

    Memory does not grow with the corpus. After `sync` what was added so far survives a kill: a writer opened
    with `keep_documents` and `keep_tokens` continues from there, dropping what came after.
    """

    def __init__(
        self, prefix: Path | str, vocab_size: int, keep_documents: int = 0, keep_tokens: int = 0
    ) -> None:
        self.prefix = stem_of(prefix)
        self.vocab_size = vocab_size
        self.dtype = dtype_for(vocab_size)
        self.folder = partial_folder(self.prefix)
        self.num_documents, self.num_tokens = keep_documents, keep_tokens
        self.folder.mkdir(parents=True, exist_ok=True)
        if not (self.folder / "tokens").exists() and not file_of(self.prefix, "idx").exists() and keep_tokens:
            file_of(self.prefix, "bin").rename(self.folder / "tokens")  # killed between the last two renames
        self._tokens = _open_at(self.folder / "tokens", keep_tokens * self.dtype.itemsize)
        self._lengths = _open_at(self.folder / "lengths", keep_documents * 4)

    def add(self, documents: Sequence[NDArray[np.integer]]) -> None:
        """Append documents, each an array of ids.

        Raises:
            InputError: an id is outside the vocabulary, which the token type may not even hold.
        """
        if not documents:
            return
        ids = np.concatenate(documents)
        if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= self.vocab_size):
            wrong = int(ids.max() if int(ids.min()) >= 0 else ids.min())
            last = self.num_documents + len(documents) - 1
            raise InputError(
                f"{self.prefix}: a token id of {wrong} in documents {self.num_documents} to {last}, outside "
                f"the vocabulary of {self.vocab_size}; pass the tokenizer's full size, added tokens included"
            )
        self._tokens.write(ids.astype(self.dtype).tobytes())
        self._lengths.write(np.array([len(d) for d in documents], dtype="<i4").tobytes())
        self.num_documents += len(documents)
        self.num_tokens += int(ids.size)

    def sync(self) -> None:
        """Make what was added survive a power cut."""
        for file in (self._tokens, self._lengths):
            file.flush()
            os.fsync(file.fileno())

    def finish(self, sidecar: Mapping[str, Any]) -> None:
        """Publish the corpus; `sidecar` goes into PREFIX.json with what the writer itself knows."""
        self.sync()
        self.close()
        facts = {
            "version": 1,
            "dtype": self.dtype.name,
            "vocab_size": self.vocab_size,
            "documents": self.num_documents,
            "tokens": self.num_tokens,
        }
        index = self.folder / "index"
        with index.open("wb") as file:
            for part in _index_parts(self.folder / "lengths", self.num_documents, self.dtype):
                file.write(part)
        sync_file(index)
        file_of(self.prefix, "idx").unlink(missing_ok=True)  # an old index must never meet the new tokens
        os.replace(self.folder / "tokens", file_of(self.prefix, "bin"))
        write_atomic(file_of(self.prefix, "json"), json.dumps({**facts, **sidecar}, indent=1) + "\n")
        sync_folder(self.prefix.parent)
        os.replace(index, file_of(self.prefix, "idx"))
        sync_folder(self.prefix.parent)
        shutil.rmtree(self.folder)

    def close(self) -> None:
        """Let go of the files; what was added and not published stays in PREFIX.partial/."""
        self._tokens.close()
        self._lengths.close()


def partial_folder(prefix: Path) -> Path:
    """Where a corpus is while it is written."""
    return file_of(prefix, "partial")


def _open_at(path: Path, size: int) -> BinaryIO:
    """Open for appending at `size`; what a killed writer wrote beyond is dropped."""
    if size and path.stat().st_size < size:
        raise InputError(
            f"{path}: {path.stat().st_size} bytes, expected at least {size}; remove {path.parent}"
        )
    file = path.open("r+b" if path.exists() else "w+b")
    file.truncate(size)
    file.seek(size)
    return file


def _index_parts(lengths_path: Path, num_documents: int, dtype: np.dtype[Any]) -> Iterator[bytes]:
    """The bytes of an `.idx` in order, in chunks: one sequence a document."""
    code = next(code for code, known in DTYPES.items() if known == dtype)
    header = MAGIC + (1).to_bytes(8, "little") + bytes([code])
    header += num_documents.to_bytes(8, "little") + (num_documents + 1).to_bytes(8, "little")
    assert len(header) == HEADER_BYTES
    yield header
    yield from _chunks(lengths_path)
    at = 0
    for chunk in _chunks(lengths_path):
        ends = at + np.cumsum(np.frombuffer(chunk, "<i4"), dtype=np.int64) * dtype.itemsize
        yield np.concatenate([[at], ends[:-1]]).astype("<i8").tobytes()
        at = int(ends[-1])
    for start in range(0, num_documents + 1, _CHUNK):
        yield np.arange(start, min(start + _CHUNK, num_documents + 1), dtype="<i8").tobytes()


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(4 * _CHUNK):
            yield chunk
