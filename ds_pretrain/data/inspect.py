"""Is a source fit for a run, and what is in it? Found before a GPU is touched, all problems at once."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds_pretrain.data.filtered import chosen_of
from ds_pretrain.data.indexed import TokenSource, file_of

SCAN_TOKENS = 50_000_000  # up to here every token is looked at: about 0.1 s
_BLOCK_TOKENS = 1 << 16
_SAMPLED_BLOCKS = 256


@dataclass(frozen=True)
class SourceReport:
    """What a source holds, and what is odd about it."""

    prefix: str
    num_tokens: int
    num_documents: int
    dtype: str
    eos_per_million: float | None  # None: nobody said which id ends a document
    scanned_share: float  # of the tokens, for the count above
    warnings: tuple[str, ...]


def check_source(
    source: TokenSource,
    seq_len: int,
    vocab_size: int,
    eos_id: int | None = None,
    scan_tokens: int = SCAN_TOKENS,
) -> list[str]:
    """Why a model of `vocab_size` embedding rows cannot train on `source` at `seq_len`; empty if it can.

    Every token is looked at up to `scan_tokens`; in a longer source evenly spaced blocks are, and the largest
    id that its PREFIX.json records.
    """
    problems = []
    if source.num_samples(seq_len) == 0:
        chosen = chosen_of(source)
        where = "" if chosen is None else f"in documents of {chosen.words}: "
        problems.append(
            f"{file_of(source.prefix, 'bin')}: {where}{source.num_tokens} tokens, fewer than one sample of "
            f"{seq_len} + 1; shorten the sequence or prepare more text"
        )
    if eos_id is not None and not 0 <= eos_id < vocab_size:
        problems.append(
            f"{source.prefix}: EOS id {eos_id} is outside the model's vocabulary of {vocab_size}; "
            f"set vocab_size in the model config to at least {eos_id + 1}"
        )
    problems += _sidecar_problems(source, vocab_size, eos_id)
    return problems + _range_problems(source, vocab_size, scan_tokens)


def describe_source(
    source: TokenSource, eos_id: int | None = None, scan_tokens: int = SCAN_TOKENS
) -> SourceReport:
    """Counts of a source for the start-up report; warns when no document ends with EOS."""
    eos = (source.sidecar or {}).get("eos_id") if eos_id is None else eos_id
    rate, scanned, warnings = None, 0, []
    if eos is None:
        warnings.append(f"{source.prefix}: nothing says which id is EOS, so separators are not counted")
    else:
        found = 0
        for _, block in _blocks(source, scan_tokens):
            found += int(np.count_nonzero(block == eos))
            scanned += block.size
        rate = 1e6 * found / scanned
        if found == 0:
            warnings.append(
                f"{source.prefix}: 0 EOS (id {eos}) per million tokens: documents run into one another "
                "and the model never learns to stop; prepare the source again, or name the id of EOS"
            )
    return SourceReport(
        prefix=str(source.prefix),
        num_tokens=source.num_tokens,
        num_documents=source.num_documents,
        dtype=source.dtype.name,
        eos_per_million=rate,
        scanned_share=scanned / source.num_tokens,
        warnings=tuple(warnings),
    )


def _sidecar_problems(source: TokenSource, vocab_size: int, eos_id: int | None) -> list[str]:
    sidecar, path = source.sidecar or {}, file_of(source.prefix, "json")
    problems = []
    if (vocabulary := sidecar.get("vocab_size", 0)) > vocab_size:
        problems.append(
            f"{path}: its tokenizer {sidecar.get('tokenizer')!r} has {vocabulary} entries, added tokens "
            f"included, but the model's vocabulary is {vocab_size}; "
            f"set vocab_size in the model config to at least {vocabulary}"
        )
    elif (largest := sidecar.get("max_id", -1)) >= vocab_size:
        problems.append(
            f"{path}: the largest token id is {largest}, but the model's vocabulary is {vocab_size}; "
            f"set vocab_size in the model config to at least {largest + 1}"
        )
    if eos_id is not None and sidecar.get("eos_id", eos_id) != eos_id:
        problems.append(
            f"{path}: its documents end with id {sidecar['eos_id']}, but the run says EOS is {eos_id}; "
            "they come from different tokenizers: make them agree"
        )
    return problems


def _range_problems(source: TokenSource, vocab_size: int, scan_tokens: int) -> list[str]:
    """The first token id that has no embedding row, by file and offset."""
    for start, block in _blocks(source, scan_tokens):
        # Extremes first: they cost far less than a comparison of every token.
        if block.size and (int(block.max()) >= vocab_size or int(block.min()) < 0):
            at = int(np.flatnonzero((block.astype(np.int64) >= vocab_size) | (block < 0))[0])
            chosen = chosen_of(source)
            token = start + at if chosen is None else chosen.origin_of(start + at)
            return [
                f"{file_of(source.prefix, 'bin')}: offset {token * source.dtype.itemsize}: "
                f"token {token} has id {block[at]}, "
                f"outside the model's vocabulary of {vocab_size}; the model config has another tokenizer's "
                f"vocab_size, or the file is not {source.dtype.name}"
            ]
    return []


def _blocks(source: TokenSource, scan_tokens: int) -> Iterator[tuple[int, NDArray[Any]]]:
    """The whole stream in blocks, or evenly spaced blocks of it (both ends among them) if it is longer."""
    total = source.num_tokens
    starts = np.arange(0, total, _BLOCK_TOKENS)
    if total > scan_tokens:
        starts = np.linspace(0, max(0, total - _BLOCK_TOKENS), _SAMPLED_BLOCKS).astype(np.int64)
    for start in starts.tolist():
        yield start, np.asarray(source.stream[start : start + _BLOCK_TOKENS])
