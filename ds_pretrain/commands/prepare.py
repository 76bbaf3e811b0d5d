"""`ds-pretrain prepare SOURCE ...`: tokenizes text into a source."""

import argparse
import sys

from ds_pretrain.core.text import format_count_of
from ds_pretrain.data.prepare import PrepareOptions, prepare


def execute(words: argparse.Namespace) -> int:
    """Write the `.bin/.idx` pair, and say what is in it."""
    options = PrepareOptions(
        words.sources,
        words.tokenizer,
        words.out,
        words.workers,
        train_tokenizer_size=words.train_tokenizer,
        text_column=words.text_column,
        split=words.split,
        document=words.document,
        eos_token=words.eos_token,
        overwrite=words.overwrite,
        progress=not words.quiet,
    )
    done = prepare(options)
    size = f"{format_count_of(done.documents, 'document')}, {format_count_of(done.tokens, 'token')}"
    print(
        f"{done.prefix}: {size} ({done.dtype}, vocabulary {done.vocab_size:,}), longest {done.longest:,}, "
        f"{done.empty_dropped:,} empty ones dropped, {done.tokens_per_second:,.0f} tokens/s"
    )
    if done.replaced:
        print(
            f"WARNING    {format_count_of(done.replaced, 'document')} with U+FFFD in place of bytes that "
            f"are not UTF-8; `grep -axv '.*' FILE` shows such lines of a file, and `iconv` converts it",
            file=sys.stderr,
        )
    return 0
