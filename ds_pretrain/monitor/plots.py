"""The verdicts of a curve as a picture: in a terminal, and as an SVG file that stands alone."""

from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from math import isfinite, log
from typing import Protocol

from ds_pretrain.watchdog.detector import Verdict

_WIDTH, _HEIGHT = 96, 14  # characters
_SVG_WIDTH, _SVG_HEIGHT, _MARGIN = 1200, 400, 50  # pixels
_MOST_POINTS = 6000  # of the SVG's line: it stays below a few hundred kB
_MARKS = {"roll_back": "X", "watch": "!"}  # the gravest first
_COLORS = {"roll_back": "#c00", "watch": "#e90", "ok": "#39c"}


class Plotted(Protocol):
    """A point of a curve."""

    @property
    def step(self) -> int: ...
    @property
    def loss(self) -> float: ...


def terminal_plot(points: Sequence[Plotted], verdicts: Sequence[Verdict]) -> str:
    """Loss on a logarithmic scale, the range of each column; below it the gravest verdict of each column."""
    marks = [_MARKS.get(verdict.action, " ") for verdict in verdicts]
    legend = {mark: action for action, mark in _MARKS.items()}
    return text_plot(points, marks, "verdicts", legend, _WIDTH, _HEIGHT)


def text_plot(
    points: Sequence[Plotted],
    marks: Sequence[str],
    name: str,
    legend: Mapping[str, str],
    width: int,
    height: int,
) -> str:
    """Loss on a logarithmic scale, at most `width` columns by `height` lines; below it a line of marks.

    `marks` is a character a point. A column shows that of its points which comes first in `legend`, which
    says what each means; `name` is what the line of marks is called.
    """
    width = min(width, len(points))
    edges = [index * len(points) // width for index in range(width + 1)] if width else []
    columns = [[p.loss for p in points[a:b] if drawable(p.loss)] for a, b in pairwise(edges)]
    losses = [loss for column in columns for loss in column]
    if not losses:
        return "no finite loss to plot"
    low, high = log(min(losses)), log(max(losses))
    span = (high - low) or 1.0
    rows = [[" "] * width for _ in range(height)]
    for x, column in enumerate(columns):
        if column:
            top, bottom = (round((high - log(of(column))) / span * (height - 1)) for of in (max, min))
            for y in range(top, bottom + 1):
                rows[y][x] = "|" if bottom > top else "-"
    labels = {0: f"{max(losses):9.4g}", height - 1: f"{min(losses):9.4g}"}
    lines = [f"{labels.get(y, ''):9} {''.join(row)}".rstrip() for y, row in enumerate(rows)]
    line = "".join(next((m for m in legend if m in marks[a:b]), " ") for a, b in pairwise(edges))
    lines.append(f"{name:9} {line}".rstrip())
    first, last = f"{points[0].step:,}", f"{points[-1].step:,}"
    meanings = "  ".join(f"{mark} {meaning}" for mark, meaning in legend.items())
    steps = f"{first}{last:>{max(len(last) + 1, width - len(first))}}" if width > 1 else first
    lines.append(f"{'step':9} {steps}   {meanings}")
    return "\n".join(lines)


def drawable(loss: float) -> bool:
    """Whether a loss has a place on a logarithmic scale."""
    return isfinite(loss) and loss > 0


def svg(points: Sequence[Plotted], verdicts: Sequence[Verdict]) -> str:
    """The curve, each verdict a line across it that tells its message when pointed at."""
    losses = [p.loss for p in points if drawable(p.loss)] or [1.0]
    low, high = log(min(losses)), log(max(losses))
    first, last = points[0].step, points[-1].step

    def x(step: int) -> float:
        return _MARGIN + (step - first) / max(1, last - first) * (_SVG_WIDTH - 2 * _MARGIN)

    def y(loss: float) -> float:
        return _MARGIN + (high - log(loss)) / ((high - low) or 1.0) * (_SVG_HEIGHT - 2 * _MARGIN)

    every = -(-len(points) // _MOST_POINTS)
    line = " ".join(f"{x(p.step):.1f},{y(p.loss):.1f}" for p in points[::every] if drawable(p.loss))
    marks = [
        f'<line x1="{x(p.step):.1f}" x2="{x(p.step):.1f}" y1="{_MARGIN}" y2="{_SVG_HEIGHT - _MARGIN}" '
        f'stroke="{_COLORS[v.action]}" stroke-opacity="{1 if v.roll_back else 0.4}">'
        f"<title>{escape(f'step {p.step}: {v.action}, {v.kind}: {v.message}')}</title></line>"
        for p, v in zip(points, verdicts, strict=True)
        if v.kind is not None
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_SVG_WIDTH} {_SVG_HEIGHT}" '
            'font-family="sans-serif" font-size="12">',
            f'<rect width="{_SVG_WIDTH}" height="{_SVG_HEIGHT}" fill="#fff"/>',
            *marks,
            f'<polyline points="{line}" fill="none" stroke="#000"/>',
            f'<text x="4" y="{_MARGIN}">{max(losses):.4g}</text>',
            f'<text x="4" y="{_SVG_HEIGHT - _MARGIN}">{min(losses):.4g}</text>',
            f'<text x="{_MARGIN}" y="{_SVG_HEIGHT - 20}">step {first:,}</text>',
            f'<text x="{_SVG_WIDTH - _MARGIN}" y="{_SVG_HEIGHT - 20}" text-anchor="end">step {last:,}</text>',
            f'<text x="{_MARGIN}" y="20">loss, log scale; red: roll_back, orange: watch, blue: healed</text>',
            "</svg>\n",
        ]
    )
