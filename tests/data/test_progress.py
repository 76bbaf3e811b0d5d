"""The progress bar says what is done, and stays out of logs."""

import io
import sys

import pytest

from ds_pretrain.data import progress as module
from ds_pretrain.data.inputs import Input
from ds_pretrain.data.progress import Progress

INPUTS = [Input("a", "text", 100), Input("b", "text", 300)]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_that_is_wiped_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(module, "_TERMINAL_SECONDS", 0.0)
    with Progress(INPUTS, enabled=True) as bar:
        bar.show(1, 1234, 5_678_901)
    assert "[######..................]  25%  1,234 documents  5,678,901 tokens" in screen.getvalue()
    assert screen.getvalue().endswith("\r\x1b[K")


def test_a_log_gets_a_line_only_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bar = Progress(INPUTS[:1], enabled=True)
    bar.show(0, 1, 2)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(module, "_LOG_SECONDS", 0.0)
    bar.show(0, 1, 2)
    assert capsys.readouterr().err.startswith("1 document  2 tokens")


def test_progress_that_is_off_prints_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "_LOG_SECONDS", 0.0)
    with Progress(INPUTS, enabled=False) as bar:
        bar.show(1, 1, 2)
    assert capsys.readouterr().err == ""
