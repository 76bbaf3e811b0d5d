"""Numbers, lines and plots for people."""

import io
import math

import pytest

from ds_pretrain.core.text import draw_loss_plot, format_count, format_duration, say


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.4, "59s"), (59.6, "1m 00s"), (725, "12m 05s"), (3599.7, "1h 00m"), (12_000, "3h 20m"),
     (370_800, "4d 07h"), (-3, "0s")],
)  # fmt: skip
def test_durations_show_the_two_units_that_matter(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (950, "950"), (999.7, "1.00k"), (12_345, "12.3k"), (99_960, "100k"), (4_194_304, "4.19M"),
     (1.2e12, "1.20T"), (5e15, "5000T")],
)  # fmt: skip
def test_counts_show_three_digits(number: float, text: str) -> None:
    assert format_count(number) == text


def test_a_stream_that_cannot_print_a_name_prints_it_escaped() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    assert say(stream, "Zürich")
    assert raw.getvalue() == b"Z\\xfcrich\n"


def test_a_plot_of_any_size_shows_in_each_column_the_mark_that_comes_first_in_the_legend() -> None:
    points = [(step, 2.0 if step < 8 else 4.0) for step in range(1, 13)]
    legend = {"A": "worst", "b": "bad"}
    lines = draw_loss_plot(points, list("     b bbA b"), legend, width=6, height=3).splitlines()
    assert lines == [
        "        4    |--",
        "             |",
        "        2 ---|",
        "verdict     bbAb",
        "step      1   12   A worst  b bad",
    ]
    short = draw_loss_plot(points[-2:], ["A", "b"], legend, 6, 3).splitlines()
    assert short[-1] == "step      11 12   A worst  b bad"
    single = draw_loss_plot(points[-1:], ["b"], legend, 6, 3).splitlines()
    assert single[-1] == "step      12   A worst  b bad"
    assert draw_loss_plot([], [], legend, 6, 3) == "no finite loss to plot"


def test_a_plot_leaves_out_losses_that_are_not_finite() -> None:
    assert draw_loss_plot([(1, math.nan), (2, math.inf)], "  ", {}, 9, 3) == "no finite loss to plot"
    flat = draw_loss_plot([(1, 2.0), (2, math.nan), (3, 2.0)], "   ", {}, 9, 3)
    assert flat.splitlines()[0] == "        2 - -"
