"""A source of tokens: a `.bin`/`.idx` pair in the Megatron indexed format, memory-mapped, and its writer.

What Megatron-LM and GPT-NeoX write opens as it is; `docs/design/data-format.md` gives the layout. The file
`PREFIX.json` beside it is ours and optional: it says what the format has no room for (vocabulary, tokenizer).

Shapes: n samples asked for, L tokens a sequence.
"""

import hashlib
import json
import mmap
import os
import shutil
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ds_pretrain.core.errors import InputError
from ds_pretrain.core.files import sync_file, sync_folder, write_atomic

MAGIC = b"MMIDIDX\x00\x00"
HEADER_BYTES = 34  # magic 9, version u64, type code u8, number of sequences u64, of document bounds u64
DTYPES: dict[int, np.dtype[Any]] = {
    code: np.dtype(name).newbyteorder("<")
    for code, name in {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 8: "u2"}.items()
}
_CHUNK = 1 << 20  # sequences checked at once, so that an index of any length needs little memory
_EDGE_BYTES = 1 << 16
_DAMAGED = "the index is damaged: copy it again, or prepare the source again"


@dataclass(frozen=True, eq=False)
class TokenSource:
    """A stream of tokens on disk, and the documents it is made of. Reads touch only the tokens asked for."""

    prefix: Path
    stream: NDArray[Any]  # [num_tokens], memory-mapped
    sequence_lengths: NDArray[np.int32]  # [num_sequences], memory-mapped
    document_bounds: NDArray[np.int64]  # [num_documents + 1] indices of sequences, memory-mapped
    sidecar: dict[str, Any] | None  # what `prepare` wrote beside it; None for a foreign corpus
    byte_offsets: NDArray[np.int64] | None = None  # [num_sequences] of the index, memory-mapped

    @property
    def num_tokens(self) -> int:
        """Tokens in the stream, separators included."""
        return int(self.stream.shape[0])

    @property
    def num_documents(self) -> int:
        """Documents as the bounds say: one may be several sequences."""
        return int(self.document_bounds.shape[0]) - 1

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of a token on disk."""
        return self.stream.dtype

    @property
    def document_lengths(self) -> NDArray[np.int64]:
        """Tokens of each document: [num_documents]. Reads the whole index."""
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.sequence_lengths, dtype=np.int64)])
        return np.diff(ends[self.document_bounds])

    def tokens(self, start: int, count: int) -> NDArray[np.int64]:
        """Tokens [start, start + count) of the stream: [count].

        Raises:
            IndexError: they are not all there.
        """
        if start < 0 or count < 0 or start + count > self.num_tokens:
            raise IndexError(f"{self.prefix}: no tokens [{start}, {start + count}) among {self.num_tokens}")
        return np.asarray(self.stream[start : start + count]).astype(np.int64)

    def num_samples(self, seq_len: int) -> int:
        """Whole samples of `seq_len` inputs and the label after the last."""
        return max(0, self.num_tokens - 1) // seq_len

    def sample(self, index: int, seq_len: int) -> NDArray[np.int64]:
        """Sample `index`: tokens [index * L, index * L + L + 1); its last is the first of the next."""
        return self.tokens(index * seq_len, seq_len + 1)

    def samples(self, indices: Sequence[int] | NDArray[np.integer], seq_len: int) -> NDArray[np.int64]:
        """Several samples, in the order asked for: [n, L + 1]. No id is ever masked, padded or changed."""
        out = np.empty((len(indices), seq_len + 1), dtype=np.int64)
        for row, index in zip(out, indices, strict=True):
            row[:] = self.tokens(int(index) * seq_len, seq_len + 1)
        return out

    def document_starts(self, start: int, count: int) -> NDArray[np.int64]:
        """Return where documents begin in [start, start + count), counted from `start`: [n], ascending.

        Bisects the mapped index: O(log num_sequences + n), and no memory but the pages that it touches.
        """
        size = self.dtype.itemsize
        offsets, bounds = self._byte_offsets, self.document_bounds
        low = bisect_left(offsets, start * size)  # sequence
        high = bisect_left(offsets, (start + count) * size, low)
        first = bisect_left(bounds, low)  # document
        last = bisect_left(bounds, high, first)
        # Where an empty document is, the next one begins too.
        return np.unique(offsets[bounds[first:last]] // size - start)

    @cached_property
    def _byte_offsets(self) -> NDArray[np.int64]:
        """Return the index's byte offsets; without an index they are summed up once, 8 bytes a sequence."""
        if self.byte_offsets is not None:
            return self.byte_offsets
        ends = np.cumsum(self.sequence_lengths, dtype=np.int64)  # [num_sequences]
        return np.asarray((ends - self.sequence_lengths) * self.dtype.itemsize)

    def fingerprint(self) -> str:
        """A hash that changes when the corpus does: of sizes, the index, both ends of the tokens."""
        digest = hashlib.sha256(f"{self.stream.nbytes} {self.dtype.str}".encode())
        for part in (self.sequence_lengths, self.document_bounds):
            for start in range(0, part.size, _CHUNK):
                digest.update(part[start : start + _CHUNK].tobytes())
        edge = _EDGE_BYTES // self.dtype.itemsize
        digest.update(self.stream[:edge].tobytes() + self.stream[-edge:].tobytes())
        return digest.hexdigest()


def parse_prefix(prefix: Path | str) -> Path:
    """The prefix of a corpus, given with or without `.bin` or `.idx`.

    Raises:
        InputError: it has no last name that `.bin` could be added to.
    """
    path = Path(prefix)
    if path.name in ("", "..") or str(prefix).endswith("/"):
        raise InputError(
            f"{str(prefix)!r} names a folder; expected a corpus in it by its prefix, such as "
            f"{path / 'train'} for {path / 'train'}.bin and .idx"
        )
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else path


def corpus_file(prefix: Path, ending: str) -> Path:
    """`PREFIX.bin` and its like; a prefix may hold dots of its own."""
    return prefix.with_name(f"{prefix.name}.{ending}")


def open_source(prefix: Path | str) -> TokenSource:
    """Open a corpus by its prefix and check that its files fit together. Reads the index, not the tokens.

    Raises:
        InputError: a file is missing, unreadable, foreign, truncated, or disagrees with another.
    """
    stem = parse_prefix(prefix)
    try:
        return _open(stem)
    except OSError as error:
        raise InputError(
            f"{error.filename or stem}: cannot be read ({error.strerror or error}); correct its name or its "
            "permissions"
        ) from error


def _open(stem: Path) -> TokenSource:
    bin_path, idx_path = corpus_file(stem, "bin"), corpus_file(stem, "idx")
    missing = [path for path in (bin_path, idx_path) if not path.is_file()]
    if missing:
        raise InputError(
            f"{path}: no such file; a source is a PREFIX.bin and a PREFIX.idx, "
            f"as `ds-pretrain prepare --out {stem}` writes them"
            for path in missing
        )
    dtype, lengths, bounds, offsets = _read_index(idx_path)
    _check_bin(bin_path, idx_path, dtype, int(lengths.sum(dtype=np.int64)))
    # Read before the map: an empty file cannot be mapped, and has been refused above.
    stream = np.memmap(bin_path, dtype=dtype, mode="r")
    source = TokenSource(stem, stream, lengths, bounds, _read_sidecar(corpus_file(stem, "json")), offsets)
    if problems := _find_type_problems(source) or _find_sidecar_problems(source):
        raise InputError(problems)
    return source


def _read_index(
    path: Path,
) -> tuple[np.dtype[Any], NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
    """The token dtype, sequence lengths, document bounds and byte offsets of an `.idx`, checked."""
    size = path.stat().st_size
    again = "it is not a Megatron index, or was cut short: copy it again, or prepare the source again"
    with path.open("rb") as file:
        header = file.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES or not header.startswith(MAGIC):
        raise InputError(f"{path}: starts with {header[:9]!r}, expected {MAGIC!r}; {again}")
    version, code = int.from_bytes(header[9:17], "little"), header[17]
    num_sequences, num_bounds = (int.from_bytes(header[at : at + 8], "little") for at in (18, 26))
    if version != 1:
        raise InputError(f"{path}: offset 9: version {version}, expected 1; {again}")
    if code not in DTYPES:
        raise InputError(
            f"{path}: offset 17: type code {code}, expected one of {sorted(DTYPES)} (integers); "
            "token ids cannot be read from it: prepare the source again"
        )
    expected = HEADER_BYTES + 12 * num_sequences + 8 * num_bounds
    if size != expected:
        raise InputError(
            f"{path}: {size} bytes, but its header ({num_sequences} sequences, {num_bounds} document bounds) "
            f"asks for {expected}; {again}"
        )
    if num_sequences == 0:
        raise InputError(f"{path}: holds no documents; prepare the source again from inputs that hold text")
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    lengths = np.frombuffer(mapped, "<i4", num_sequences, HEADER_BYTES)
    pointers = np.frombuffer(mapped, "<i8", num_sequences, HEADER_BYTES + 4 * num_sequences)
    bounds = np.frombuffer(mapped, "<i8", num_bounds, HEADER_BYTES + 12 * num_sequences)
    if problems := _find_index_problems(path, DTYPES[code].itemsize, lengths, pointers, bounds):
        raise InputError(problems)
    return DTYPES[code], lengths, bounds, pointers


def _find_index_problems(
    path: Path,
    itemsize: int,
    lengths: NDArray[np.int32],
    pointers: NDArray[np.int64],
    bounds: NDArray[np.int64],
) -> list[str]:
    """Find contradictions inside an index, each with its first position."""
    problems = []
    total = 0  # bytes before the chunk
    for start in range(0, lengths.size, _CHUNK):
        part = lengths[start : start + _CHUNK].astype(np.int64)
        ends = total + np.cumsum(part) * itemsize
        wrong = np.flatnonzero((pointers[start : start + _CHUNK] != ends - part * itemsize) | (part < 0))
        if wrong.size:
            at = start + int(wrong[0])
            problems.append(
                f"{path}: offset {HEADER_BYTES + 4 * lengths.size + 8 * at}: sequence {at} of "
                f"{part[wrong[0]]} tokens is said to begin at byte {pointers[at]} and, by the lengths, "
                f"ends at byte {ends[wrong[0]]}; {_DAMAGED}"
            )
            break
        total = int(ends[-1])
    ends_right = bounds.size >= 2 and bounds[0] == 0 and bounds[-1] == lengths.size
    if not ends_right or bool((bounds[1:] < bounds[:-1]).any()):
        problems.append(
            f"{path}: offset {HEADER_BYTES + 12 * lengths.size}: the {bounds.size} document bounds do not "
            f"rise from 0 to {lengths.size} sequences; {_DAMAGED}"
        )
    return problems


def _check_bin(path: Path, idx_path: Path, dtype: np.dtype[Any], num_tokens: int) -> None:
    size, expected = path.stat().st_size, num_tokens * dtype.itemsize
    if size % dtype.itemsize:
        raise InputError(
            f"{path}: {size} bytes is not a multiple of {dtype.itemsize}, the bytes of a {dtype.name} token; "
            "it was cut short or written with another type: copy it again, or prepare the source again"
        )
    if size != expected:
        ratio = (
            "" if size < expected else f" ({size / max(expected, 1):.2f} times as many: another token type?)"
        )
        raise InputError(
            f"{path}: {size} bytes, but {idx_path.name} lists {num_tokens} {dtype.name} tokens, "
            f"which are {expected} bytes{ratio}; copy both files again, or prepare the source again"
        )
    if num_tokens == 0:
        raise InputError(f"{path}: holds no tokens; prepare the source again from inputs that hold text")


def _read_sidecar(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        sidecar = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON ({error}); remove it, or prepare the source again") from error
    return sidecar if isinstance(sidecar, dict) else None


def _find_type_problems(source: TokenSource) -> list[str]:
    """Find values of PREFIX.json in another form than `prepare` writes."""
    sidecar, path = source.sidecar or {}, corpus_file(source.prefix, "json")
    problems = [
        f"{path}: {name} = {sidecar[name]!r}; expected a whole number, at least {least}: correct or remove it"
        for name, least in (("vocab_size", 1), ("eos_id", 0), ("max_id", 0))
        if name in sidecar and not (type(sidecar[name]) is int and sidecar[name] >= least)
    ]
    return problems + [
        f"{path}: {name} = {sidecar[name]!r}; expected text: correct or remove it"
        for name in ("tokenizer", "tokenizer_hash", "eos_token")
        if name in sidecar and not isinstance(sidecar[name], str)
    ]


def _find_sidecar_problems(source: TokenSource) -> list[str]:
    """Find contradictions between PREFIX.json and the index: one belongs to another corpus."""
    found = {"dtype": source.dtype.name, "tokens": source.num_tokens, "documents": source.num_documents}
    return [
        f"{corpus_file(source.prefix, 'json')}: {name} = {source.sidecar[name]!r}, but the index says "
        f"{value!r}; they belong to different corpora: copy all three files together, or prepare the source "
        "again"
        for name, value in found.items()
        if source.sidecar is not None and name in source.sidecar and source.sidecar[name] != value
    ]


def choose_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smaller token type that holds every id below `vocab_size`: uint16 or int32.

    Raises:
        InputError: neither does.
    """
    if not 1 <= vocab_size <= 1 << 31:
        raise InputError(
            f"a vocabulary of {vocab_size} entries; expected 1 to {1 << 31}, what an int32 id can name"
        )
    return DTYPES[8] if vocab_size <= 1 << 16 else DTYPES[4]


class IndexedWriter:
    """Streams documents into PREFIX.partial/ and publishes them as PREFIX.bin, .json and .idx, the .idx last.

    Memory does not grow with the corpus. After `sync` what was added so far survives a kill: a writer opened
    with `keep_documents` and `keep_tokens` continues from there, dropping what came after.
    """

    def __init__(
        self, prefix: Path | str, vocab_size: int, keep_documents: int = 0, keep_tokens: int = 0
    ) -> None:
        self.prefix = parse_prefix(prefix)
        self.vocab_size = vocab_size
        self.dtype = choose_dtype(vocab_size)
        self.folder = partial_folder(self.prefix)
        self.num_documents, self.num_tokens = keep_documents, keep_tokens
        self.folder.mkdir(parents=True, exist_ok=True)
        if (
            not (self.folder / "tokens").exists()
            and not corpus_file(self.prefix, "idx").exists()
            and keep_tokens
        ):
            corpus_file(self.prefix, "bin").rename(
                self.folder / "tokens"
            )  # killed between the last two renames
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
        facts = {"version": 1, "dtype": self.dtype.name, "vocab_size": self.vocab_size}
        facts |= {"documents": self.num_documents, "tokens": self.num_tokens}
        index = self.folder / "index"
        with index.open("wb") as file:
            for part in _build_index_parts(self.folder / "lengths", self.num_documents, self.dtype):
                file.write(part)
        sync_file(index)
        corpus_file(self.prefix, "idx").unlink(missing_ok=True)  # an old index must never meet the new tokens
        os.replace(self.folder / "tokens", corpus_file(self.prefix, "bin"))
        write_atomic(corpus_file(self.prefix, "json"), json.dumps({**facts, **sidecar}, indent=1) + "\n")
        sync_folder(self.prefix.parent)
        os.replace(index, corpus_file(self.prefix, "idx"))
        sync_folder(self.prefix.parent)
        shutil.rmtree(self.folder)

    def close(self) -> None:
        """Let go of the files; what was added and not published stays in PREFIX.partial/."""
        self._tokens.close()
        self._lengths.close()


def partial_folder(prefix: Path) -> Path:
    """The folder of a corpus while it is written."""
    return corpus_file(prefix, "partial")


def _open_at(path: Path, size: int) -> BinaryIO:
    """Open for appending at `size`; what a killed writer wrote beyond is truncated."""
    if size and path.stat().st_size < size:
        raise InputError(
            f"{path}: {path.stat().st_size} bytes, expected at least {size}; remove {path.parent}"
        )
    file = path.open("r+b" if path.exists() else "w+b")
    file.truncate(size)
    file.seek(size)
    return file


def _build_index_parts(lengths_path: Path, num_documents: int, dtype: np.dtype[Any]) -> Iterator[bytes]:
    """The bytes of an `.idx` in order, in chunks: one sequence a document."""
    code = next(code for code, known in DTYPES.items() if known == dtype)
    header = MAGIC + (1).to_bytes(8, "little") + bytes([code])
    header += num_documents.to_bytes(8, "little") + (num_documents + 1).to_bytes(8, "little")
    assert len(header) == HEADER_BYTES
    yield header
    yield from _read_chunks(lengths_path)
    at = 0
    for chunk in _read_chunks(lengths_path):
        ends = at + np.cumsum(np.frombuffer(chunk, "<i4"), dtype=np.int64) * dtype.itemsize
        yield np.concatenate([[at], ends[:-1]]).astype("<i8").tobytes()
        at = int(ends[-1])
    for start in range(0, num_documents + 1, _CHUNK):
        yield np.arange(start, min(start + _CHUNK, num_documents + 1), dtype="<i8").tobytes()


def _read_chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(4 * _CHUNK):
            yield chunk
