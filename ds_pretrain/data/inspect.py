"""Is a source fit for a run, and what is in it? Also what single samples say, as text.

Problems are found before a GPU is touched, all at once.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds_pretrain.core.errors import InputError
from ds_pretrain.data.filtered import get_chosen_tokens
from ds_pretrain.data.indexed import TokenSource, corpus_file
from ds_pretrain.data.sampler import SampleIds
from ds_pretrain.data.tokenizer import END_OF_TEXT, Tokenizer, open_tokenizer_of

SCAN_TOKENS = 50_000_000  # up to here every token is looked at: about 0.1 s
_BLOCK_TOKENS = 1 << 16
_SAMPLED_BLOCKS = 256
_CHUNK = 1 << 20  # sequences added up at once, so that an index of any length needs little memory


@dataclass(frozen=True)
class SourceReport:
    """How often documents end in a source, and warnings about it."""

    eos_per_million: float | None  # None: nobody said which id ends a document
    warnings: tuple[str, ...]


def check_source(
    source: TokenSource, seq_len: int, vocab_size: int, scan_tokens: int = SCAN_TOKENS
) -> list[str]:
    """Return why a model of `vocab_size` rows cannot train on `source` at `seq_len`; empty if it can.

    Every token is looked at up to `scan_tokens`; in a longer source evenly spaced blocks are, and the largest
    id that its PREFIX.json records.
    """
    problems = []
    if source.num_samples(seq_len) == 0:
        chosen = get_chosen_tokens(source)
        where = "" if chosen is None else f"in documents of {chosen.words}: "
        problems.append(
            f"{corpus_file(source.prefix, 'bin')}: {where}{source.num_tokens} tokens, fewer than one sample "
            f"of {seq_len} + 1; shorten the sequence or prepare more text"
        )
    problems += _find_sidecar_problems(source, vocab_size)
    return problems + _find_range_problems(source, vocab_size, scan_tokens)


def describe_source(source: TokenSource) -> SourceReport:
    """Count the separators of a source for the start-up report; warns when no document ends with one."""
    eos = (source.sidecar or {}).get("eos_id")
    if eos is None:
        return SourceReport(
            None, (f"{source.prefix}: nothing says which id is EOS, so separators are not counted",)
        )
    found = scanned = 0
    for _, block in _read_blocks(source, SCAN_TOKENS):
        found += int(np.count_nonzero(block == eos))
        scanned += block.size
    if found:
        return SourceReport(1e6 * found / scanned, ())
    warning = (
        f"{source.prefix}: 0 EOS (id {eos}) per million tokens: documents run into one another "
        "and the model never learns to stop; prepare the source again, or name the id of EOS"
    )
    return SourceReport(0.0, (warning,))


def _find_sidecar_problems(source: TokenSource, vocab_size: int) -> list[str]:
    sidecar, path = source.sidecar or {}, corpus_file(source.prefix, "json")
    problems = []
    if (vocabulary := sidecar.get("vocab_size", 0)) > vocab_size:
        problems.append(
            f"{path}: its tokenizer {sidecar.get('tokenizer')!r} has {vocabulary} entries, added tokens "
            f"included, but the model's vocabulary is {vocab_size}; set vocab_size in the model config to at "
            f"least {vocabulary}"
        )
    elif (largest := sidecar.get("max_id", -1)) >= vocab_size:
        problems.append(
            f"{path}: the largest token id is {largest}, but the model's vocabulary is {vocab_size}; "
            f"set vocab_size in the model config to at least {largest + 1}"
        )
    return problems


def _find_range_problems(source: TokenSource, vocab_size: int, scan_tokens: int) -> list[str]:
    """The first token id that has no embedding row, by file and offset."""
    for start, block in _read_blocks(source, scan_tokens):
        # Extremes first: they cost far less than a comparison of every token.
        if block.size and (int(block.max()) >= vocab_size or int(block.min()) < 0):
            at = int(np.flatnonzero((block.astype(np.int64) >= vocab_size) | (block < 0))[0])
            chosen = get_chosen_tokens(source)
            token = start + at if chosen is None else chosen.origin_of(start + at)
            return [
                f"{corpus_file(source.prefix, 'bin')}: offset {token * source.dtype.itemsize}: token {token} "
                f"has id {block[at]}, outside the model's vocabulary of {vocab_size}; the model config has "
                f"another tokenizer's vocab_size, or the file is not {source.dtype.name}"
            ]
    return []


def _read_blocks(source: TokenSource, scan_tokens: int) -> Iterator[tuple[int, NDArray[Any]]]:
    """The whole stream in blocks, or evenly spaced blocks of it (both ends among them) if it is longer."""
    total = source.num_tokens
    starts = np.arange(0, total, _BLOCK_TOKENS)
    if total > scan_tokens:
        starts = np.linspace(0, max(0, total - _BLOCK_TOKENS), _SAMPLED_BLOCKS).astype(np.int64)
    for start in starts.tolist():
        yield start, np.asarray(source.stream[start : start + _BLOCK_TOKENS])


@dataclass(frozen=True)
class Passage:
    """One sample, as `audit --step` shows it."""

    source: str
    epoch: int
    sample: int
    documents: tuple[int, ...]  # of the corpus, 0 for the first; those with a token in the sample
    text: str  # whole


def read_passages(ids: SampleIds, places: Sequence[int], sources: Mapping[str, TokenSource]) -> list[Passage]:
    """The samples at `places` of a batch, in the order asked for. Reads the index and those tokens.

    Without a tokenizer that can be opened, the text of a source is its token ids, and why.
    """
    found: dict[int, Passage] = {}
    for index in sorted({int(ids.source[place]) for place in places}):
        name = ids.names[index]
        source = sources[name]
        here = [place for place in dict.fromkeys(places) if ids.source[place] == index]
        samples = ids.sample[here]
        documents = _find_documents(source, samples * ids.seq_len, ids.seq_len + 1)
        tokenizer, lacking = _open_tokenizer(name, source)
        for place, sample, inside in zip(here, samples.tolist(), documents, strict=True):
            tokens = source.sample(sample, ids.seq_len)  # [T + 1]
            text = (
                lacking + " ".join(map(str, tokens))
                if tokenizer is None
                else _decode_tokens(tokenizer, tokens)
            )
            found[place] = Passage(name, int(ids.epoch[place]), sample, inside, text)
    return [found[place] for place in places]


def _open_tokenizer(name: str, source: TokenSource) -> tuple[Tokenizer | None, str]:
    """Open the tokenizer that decodes a source, or return the text to show before its ids."""
    try:
        tokenizer = open_tokenizer_of(source)
    except InputError as error:
        return None, f"[token ids: {error}] "
    return tokenizer, f"[token ids: no tokenizer is known for {name}] "


def _decode_tokens(tokenizer: Tokenizer, tokens: NDArray[np.int64]) -> str:
    """Text in which the ends of documents show, as the model is shown them."""
    pieces = np.split(tokens, np.flatnonzero(tokens == tokenizer.eos_id))
    parts = [pieces[0], *(piece[1:] for piece in pieces[1:])]
    return (tokenizer.eos_token or END_OF_TEXT).join(tokenizer.decode(part.tolist()) for part in parts)


def _find_documents(source: TokenSource, starts: NDArray[np.int64], count: int) -> list[tuple[int, ...]]:
    """The documents that tokens [start, start + count) lie in, for each start; empty documents hold none."""
    first = _find_sequences(source, starts)
    last = _find_sequences(source, starts + count - 1)
    bounds, chosen = source.document_bounds, get_chosen_tokens(source)
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


def _find_sequences(source: TokenSource, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """The sequence that holds each token: [n]. Adds up the index once, a chunk at a time."""
    held = np.zeros(len(tokens), dtype=np.int64)
    before = 0  # tokens before the chunk
    for start in range(0, source.sequence_lengths.size, _CHUNK):
        ends = before + np.cumsum(source.sequence_lengths[start : start + _CHUNK], dtype=np.int64)
        here = (tokens >= before) & (tokens < ends[-1])
        held[here] = start + np.searchsorted(ends, tokens[here], side="right")
        before = int(ends[-1])
    return held
