"""The longer or the shorter documents of a source, as a source of their own; the corpus stays as it is.

A view is a `TokenSource` whose stream is put together as it is read: the chosen documents one after another.
So samples, document bounds and the fingerprint are those of that stream, and nothing else has to know.
Of the index only the chosen documents stay in memory, at 48 bytes each.
"""

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ds_pretrain.config.schema import HeldOutSection
from ds_pretrain.core.errors import InputError
from ds_pretrain.core.text import format_count_of
from ds_pretrain.data.indexed import TokenSource, corpus_file, open_source

_CHUNK = 1 << 18  # documents looked at at once, so that an index of any length needs little memory


@dataclass(frozen=True, eq=False)
class ChosenTokens:
    """The tokens of chosen documents, in the place of a mapped file: slices are read, and nothing before."""

    corpus: NDArray[Any]  # memory-mapped
    documents: NDArray[np.int64]  # [n], their numbers in the corpus, ascending
    origins: NDArray[np.int64]  # [n], the first token of each in the corpus
    starts: NDArray[np.int64]  # [n + 1], the first token of each here, and the number of tokens
    words: str  # which documents these are

    @property
    def shape(self) -> tuple[int]:
        """The shape, as of an array."""
        return (int(self.starts[-1]),)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype, as of an array."""
        return self.corpus.dtype

    @property
    def nbytes(self) -> int:
        """The size in bytes, as of an array."""
        return self.shape[0] * self.dtype.itemsize

    def __getitem__(self, part: slice) -> NDArray[Any]:
        """Return consecutive tokens. O(log documents + documents in it + tokens in it)."""
        start, stop, _ = part.indices(self.shape[0])
        if start >= stop:
            return self.corpus[:0]
        first = int(np.searchsorted(self.starts, start, side="right")) - 1
        last = int(np.searchsorted(self.starts, stop, side="left"))
        edges = np.clip(self.starts[first : last + 1], start, stop)
        shifts = self.origins[first:last] - self.starts[first:last]  # from here to the corpus
        return self.corpus[np.arange(start, stop) + np.repeat(shifts, np.diff(edges))]

    def origin_of(self, token: int) -> int:
        """Return the position of a token in the corpus."""
        document = int(np.searchsorted(self.starts, token, side="right")) - 1
        return int(self.origins[document]) + token - int(self.starts[document])


def open_section(section: HeldOutSection) -> TokenSource:
    """A source as a run file has it. Raises InputError: it cannot be opened, or none of it is chosen."""
    return open_filtered(open_source(section.path), section.min_document_tokens, section.max_document_tokens)


def open_filtered(
    source: TokenSource, min_document_tokens: int | None, max_document_tokens: int | None
) -> TokenSource:
    """The documents of a source with so many tokens, separators included; the source itself without bounds.

    Reads the whole index once.

    Raises:
        InputError: no document is as long.
    """
    if min_document_tokens is None and max_document_tokens is None:
        return source
    words = _describe_limits(min_document_tokens, max_document_tokens)
    least, most = min_document_tokens or 0, max_document_tokens
    chosen: list[tuple[NDArray[np.int64], ...]] = []
    shortest, longest, before = source.num_tokens, 0, 0
    for first in range(0, source.num_documents, _CHUNK):
        bounds = source.document_bounds[first : first + _CHUNK + 1]
        tokens = source.sequence_lengths[int(bounds[0]) : int(bounds[-1])]
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(tokens, dtype=np.int64)])
        edges = before + ends[bounds - bounds[0]]  # tokens of the corpus before each document
        before, lengths = int(edges[-1]), np.diff(edges)
        fits = np.flatnonzero((lengths >= least) & (lengths <= (lengths if most is None else most)))
        chosen.append((first + fits, edges[fits], lengths[fits]))
        shortest, longest = min(shortest, int(lengths.min())), max(longest, int(lengths.max()))
    documents, origins, lengths = (np.concatenate(parts) for parts in zip(*chosen, strict=True))
    if not lengths.sum():
        raise InputError(
            f"{corpus_file(source.prefix, 'idx')}: none of its "
            f"{format_count_of(source.num_documents, 'document')} has {words}: the shortest has {shortest:,} "
            f"and the longest {longest:,}; change min_document_tokens or max_document_tokens"
        )
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    stream = ChosenTokens(np.asarray(source.stream), documents, origins, starts, words)
    return TokenSource(
        prefix=source.prefix,
        stream=cast("NDArray[Any]", stream),
        sequence_lengths=lengths,  # a document is one sequence here
        document_bounds=np.arange(len(lengths) + 1, dtype=np.int64),
        sidecar=source.sidecar,
        byte_offsets=starts[:-1] * source.dtype.itemsize,
    )


def get_chosen_tokens(source: TokenSource) -> ChosenTokens | None:
    """Return the filter of a filtered source; None for a plain one."""
    stream: object = source.stream
    return stream if isinstance(stream, ChosenTokens) else None


def _describe_limits(least: int | None, most: int | None) -> str:
    if least is None:
        return f"at most {most:,} tokens"
    if most is None:
        return f"at least {least:,} tokens"
    return f"{least:,} to {most:,} tokens"
