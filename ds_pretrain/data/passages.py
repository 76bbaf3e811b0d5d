"""What a sample says, for people: the documents that it lies in, and its tokens as text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ds_pretrain.core.errors import InputError
from ds_pretrain.data.filtered import chosen_of
from ds_pretrain.data.indexed import TokenSource
from ds_pretrain.data.sampler import SampleIds
from ds_pretrain.data.tokenizer import END_OF_TEXT, Tokenizer, tokenizer_of

_CHUNK = 1 << 20  # sequences added up at once, so that an index of any length needs little memory


@dataclass(frozen=True)
class Passage:
    """One sample, as a person looks at it."""

    source: str
    epoch: int
    sample: int
    documents: tuple[int, ...]  # of the corpus, 0 for the first; those with a token in the sample
    text: str  # whole


def passages(ids: SampleIds, places: Sequence[int], sources: Mapping[str, TokenSource]) -> list[Passage]:
    """The samples at `places` of a batch, in the order asked for. Reads the index and those tokens.

    Without a tokenizer that can be opened, the text of a source is its token ids, and why.
    """
    found: dict[int, Passage] = {}
    for index in sorted({int(ids.source[place]) for place in places}):
        name = ids.names[index]
        source = sources[name]
        here = [place for place in dict.fromkeys(places) if ids.source[place] == index]
        samples = ids.sample[here]
        documents = _documents(source, samples * ids.seq_len, ids.seq_len + 1)
        tokenizer, lacking = _tokenizer(name, source)
        for place, sample, inside in zip(here, samples.tolist(), documents, strict=True):
            tokens = source.sample(sample, ids.seq_len)  # [T + 1]
            text = lacking + " ".join(map(str, tokens)) if tokenizer is None else _decoded(tokenizer, tokens)
            found[place] = Passage(name, int(ids.epoch[place]), sample, inside, text)
    return [found[place] for place in places]


def _tokenizer(name: str, source: TokenSource) -> tuple[Tokenizer | None, str]:
    """What decodes a source, or the words to put before its ids."""
    try:
        tokenizer = tokenizer_of(source)
    except InputError as error:
        return None, f"[token ids: {error}] "
    return tokenizer, f"[token ids: no tokenizer is known for {name}] "


def _decoded(tokenizer: Tokenizer, tokens: NDArray[np.int64]) -> str:
    """Text in which the ends of documents show, as the model is shown them."""
    pieces = np.split(tokens, np.flatnonzero(tokens == tokenizer.eos_id))
    parts = [pieces[0], *(piece[1:] for piece in pieces[1:])]
    return (tokenizer.eos_token or END_OF_TEXT).join(tokenizer.decode(part.tolist()) for part in parts)


def _documents(source: TokenSource, starts: NDArray[np.int64], count: int) -> list[tuple[int, ...]]:
    """The documents that tokens [start, start + count) lie in, for each start; empty documents hold none."""
    first = _sequences_at(source, starts)
    last = _sequences_at(source, starts + count - 1)
    bounds, chosen = source.document_bounds, chosen_of(source)
    found = []
    for low, high in zip(first.tolist(), last.tolist(), strict=True):
        begin = int(np.searchsorted(bounds, low, side="right")) - 1
        end = int(np.searchsorted(bounds, high, side="right")) - 1
        inside = [d for d in range(begin, end + 1) if _has_tokens(source, d, low, high)]
        found.append(tuple(inside if chosen is None else chosen.documents[inside].tolist()))
    return found


def _has_tokens(source: TokenSource, document: int, first: int, last: int) -> bool:
    """True if the document has a token in sequences [first, last]."""
    low = max(first, int(source.document_bounds[document]))
    high = min(last + 1, int(source.document_bounds[document + 1]))
    return bool(source.sequence_lengths[low:high].any())


def _sequences_at(source: TokenSource, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """The sequence that holds each token: [n]. Adds up the index once, a chunk at a time."""
    held = np.zeros(len(tokens), dtype=np.int64)
    before = 0  # tokens before the chunk
    for start in range(0, source.sequence_lengths.size, _CHUNK):
        ends = before + np.cumsum(source.sequence_lengths[start : start + _CHUNK], dtype=np.int64)
        here = (tokens >= before) & (tokens < ends[-1])
        held[here] = start + np.searchsorted(ends, tokens[here], side="right")
        before = int(ends[-1])
    return held
