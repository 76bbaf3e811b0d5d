"""A progress bar on a terminal, a line now and then elsewhere."""

import sys
import time
from collections.abc import Sequence

from ds_pretrain.core.text import counted
from ds_pretrain.data.inputs import Input

_TERMINAL_SECONDS, _LOG_SECONDS = 0.2, 30.0
_WIDTH = 24


class Progress:
    """Shows how much of the input files is done, and how fast tokens come."""

    def __init__(self, inputs: Sequence[Input], enabled: bool) -> None:
        self.enabled = enabled
        self.terminal = sys.stderr.isatty()
        self.ends = [0]
        for one in inputs:
            self.ends.append(self.ends[-1] + one.num_bytes)
        self.began = self.shown = time.monotonic()
        self.first_tokens: int | None = None

    def __enter__(self) -> "Progress":
        return self

    def show(self, input_number: int, documents: int, tokens: int) -> None:
        """Draw, if it is time to: the next document is in input `input_number`."""
        if self.first_tokens is None:
            self.first_tokens = tokens
        now = time.monotonic()
        if not self.enabled or now - self.shown < (_TERMINAL_SECONDS if self.terminal else _LOG_SECONDS):
            return
        self.shown = now
        rate = (tokens - self.first_tokens) / (now - self.began)
        size = f"{counted(documents, 'document')}  {counted(tokens, 'token')}"
        line = f"{self._bar(input_number)}{size}  {rate:,.0f} tokens/s"
        sys.stderr.write(f"\r\x1b[K{line}" if self.terminal else f"{line}\n")
        sys.stderr.flush()

    def __exit__(self, *_: object) -> None:
        if self.enabled and self.terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def _bar(self, input_number: int) -> str:
        """The share of input bytes in finished files; nothing where it would say nothing."""
        if len(self.ends) < 3 or not self.ends[-1]:
            return ""
        share = self.ends[input_number] / self.ends[-1]
        full = int(share * _WIDTH)
        return f"[{'#' * full}{'.' * (_WIDTH - full)}] {share:4.0%}  "
