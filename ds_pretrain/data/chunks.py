"""The position in each source, and the samples of its next draws: one order over the run, at any length.

A source is cut into chunks of C tokens. Epoch after epoch visits the chunks in the order of a permutation; a
phase of sequences of L tokens takes the C / L pieces of a chunk as samples. With L = C a chunk is a sample.
With shorter ones the pieces of a window of chunks are shuffled together, so that those of one document lie
apart. A position is a place in this order: of a few numbers, and computed from the draws before.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ds_pretrain.data.mixture import locate_samples
from ds_pretrain.data.permutation import Words, derive_keys, make_key, permute

# Pieces of a window are shuffled together. What is left of one where the length changes waits for the next
# epoch, so a window is a small part of an epoch, too.
WINDOW_CHUNKS = 1024
EPOCH_WINDOWS = 32


@dataclass(frozen=True)
class Position:
    """`draws` samples of `seq_len` tokens after chunk `chunk`, which is counted over all epochs."""

    chunk: int = 0
    seq_len: int = 0  # 0: nothing was drawn yet
    draws: int = 0


@dataclass(frozen=True)
class Chunks:
    """One source, cut into `num_chunks` chunks of `chunk_tokens` tokens; `key` orders them."""

    num_chunks: int
    chunk_tokens: int
    key: int

    @property
    def window_chunks(self) -> int:
        """Chunks whose pieces are shuffled together."""
        return min(WINDOW_CHUNKS, -(-self.num_chunks // EPOCH_WINDOWS))

    def after(self, position: Position, seq_len: int, draws: int) -> Position:
        """The position `draws` samples of `seq_len` further on.

        Another length begins at the first chunk that is untouched, and not in a window that was begun.
        """
        if draws and seq_len != position.seq_len:
            position = Position(self.end_of_window(position), seq_len)
        return replace(position, draws=position.draws + draws)

    def end_of_window(self, position: Position) -> int:
        """The chunk, over all epochs, after the last window that a position has begun."""
        if position.draws == 0:
            return position.chunk
        if position.seq_len == self.chunk_tokens:
            return position.chunk + position.draws
        last = np.array([position.draws - 1], dtype=np.uint64)
        epoch, start, length, _ = self._windows(position, last)
        return int(epoch[0]) * self.num_chunks + int(start[0]) + int(length[0])

    def chunks_before(self, position: Position) -> float:
        """Chunks passed, left out ones included, over all epochs."""
        if position.draws == 0:
            return position.chunk
        return position.chunk + position.draws * position.seq_len / self.chunk_tokens

    def locate(
        self, position: Position, seq_len: int, draws: Words
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The epoch and the sample of `seq_len` tokens that each draw after a position reads: [n] each."""
        if seq_len != position.seq_len:
            position = Position(self.end_of_window(position), seq_len)
        if seq_len == self.chunk_tokens:
            return locate_samples(
                draws + np.uint64(position.chunk + position.draws), self.num_chunks, self.key
            )
        pieces = np.uint64(self.chunk_tokens // seq_len)
        epoch, start, length, place = self._windows(position, draws + np.uint64(position.draws))
        window = epoch * np.uint64(self.num_chunks) + start  # no two of a source are equal
        keys = derive_keys(make_key(self.key, "window", seq_len), window)
        shuffled = np.empty_like(place)
        for chunks in np.unique(length):  # whole windows, and those cut at the end of an epoch
            here = length == chunks
            shuffled[here] = permute(place[here], int(chunks * pieces), keys[here])
        passed, chunk = locate_samples(window + shuffled // pieces, self.num_chunks, self.key)
        return passed, chunk * np.int64(pieces) + (shuffled % pieces).astype(np.int64)

    def _windows(self, position: Position, number: Words) -> tuple[Words, Words, Words, Words]:
        """The window of each draw of an interval of one length, and its place among the window's pieces.

        Epoch, first chunk in the order of that epoch, number of chunks, place: [n] each. The first window
        begins where the interval does; the end of an epoch ends one.
        """
        pieces, per_epoch = self.chunk_tokens // position.seq_len, np.uint64(self.num_chunks)
        first_epoch, offset = divmod(position.chunk, self.num_chunks)
        piece = number + np.uint64(offset * pieces)  # counted from the start of the interval's first epoch
        epoch, piece = np.divmod(piece, per_epoch * np.uint64(pieces))
        base = np.where(epoch == 0, np.uint64(offset), np.uint64(0))  # of the epoch's first window
        piece -= base * np.uint64(pieces)
        window, place = np.divmod(piece, np.uint64(self.window_chunks * pieces))
        start = base + window * np.uint64(self.window_chunks)
        length = np.minimum(np.uint64(self.window_chunks), per_epoch - start)
        return epoch + np.uint64(first_epoch), start, length, place
