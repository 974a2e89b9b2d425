"""Line charts with logarithmic or linear axes, as an SVG file that follows the reader's light or dark mode."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import pairwise

from penstock.report.svg import px, safe_text, with_colours

WIDTH, HEIGHT = 250.0, 240.0
"""The area of a panel's lines."""
LEFT, RIGHT, TOP, BOTTOM = 62.0, 112.0, 20.0, 52.0
"""The margins around that area, for numbers, names and axis labels."""
NAME_HEIGHT = 15.0
COLOURS = 6
STEPS = 6
"""About how many steps a linear axis has."""


@dataclass(frozen=True)
class Line:
    name: str
    points: tuple[tuple[float, float], ...]
    """Pairs (x, y), both above 0 if axes are logarithmic."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    even: bool = False
    """Whether axes are linear and points have no marks, as for curves."""


def chart_svg(panels: Sequence[Panel], *, about: str) -> str:
    """The panels side by side. ``about`` describes them for screen readers."""
    style = resources.files("penstock.report").joinpath("chart.css").read_text(encoding="utf-8")
    panel_width = LEFT + WIDTH + RIGHT
    width, height = px(panel_width * len(panels)), px(TOP + HEIGHT + BOTTOM)
    body = [line for index, panel in enumerate(panels) for line in _panel(panel, LEFT + panel_width * index)]
    head = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" aria-label="{safe_text(about)}">',
        f"<style>\n{with_colours(style)}</style>",
        f'<rect class="paper" width="{width}" height="{height}"/>',
    ]
    return "\n".join([*head, *body, "</svg>", ""])


@dataclass(frozen=True)
class _Scale:
    """Maps numbers to positions on an axis."""

    low: float
    high: float
    start: float
    end: float
    even: bool

    def __call__(self, number: float) -> float:
        if self.even:
            share = (number - self.low) / (self.high - self.low)
        else:
            share = math.log(number / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)


def _panel(panel: Panel, left: float) -> Iterator[str]:
    points = [point for line in panel.lines for point in line.points]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    columns, rows = (_even_numbers(xs), _even_numbers(ys)) if panel.even else (sorted(set(xs)), _round_numbers(ys))
    x_at = _scale(columns, left, left + WIDTH, even=panel.even)
    y_at = _scale(rows, TOP + HEIGHT, TOP, even=panel.even)
    for number in rows:
        y = px(y_at(number))
        yield f'<path class="grid" d="M{px(left)} {y}H{px(left + WIDTH)}"/>'
        yield f'<text text-anchor="end" x="{px(left - 8)}" y="{px(y_at(number) + 4)}">{number:g}</text>'
    for number in columns:
        x = px(x_at(number))
        yield f'<path class="grid" d="M{x} {px(TOP)}V{px(TOP + HEIGHT)}"/>'
        yield f'<text text-anchor="middle" x="{x}" y="{px(TOP + HEIGHT + 18)}">{number:,g}</text>'
    middle, foot = px(left + WIDTH / 2), px(TOP + HEIGHT + 40)
    yield f'<text class="axis" text-anchor="middle" x="{middle}" y="{foot}">{safe_text(panel.x_label)}</text>'
    x, y = px(left - 46), px(TOP + HEIGHT / 2)
    turned = f'transform="rotate(-90 {x} {y})"'
    yield f'<text class="axis" text-anchor="middle" x="{x}" y="{y}" {turned}>{safe_text(panel.y_label)}</text>'
    for index, (line, name_y) in enumerate(zip(panel.lines, _name_heights(panel, y_at), strict=True)):
        yield f'<g class="l{index % COLOURS}">'
        yield from _line(line, x_at, y_at, left + WIDTH + 8, name_y, marked=not panel.even)
        yield "</g>"


def _line(line: Line, x_at: _Scale, y_at: _Scale, name_x: float, name_y: float, *, marked: bool) -> Iterator[str]:
    path = "L".join(f"{px(x_at(x))} {px(y_at(y))}" for x, y in line.points)
    yield f'<path class="line" d="M{path}"/>'
    for x, y in line.points if marked else ():
        tip = safe_text(f"{line.name}, {x:,g}: {y:.3g}")
        yield f'<circle class="dot" cx="{px(x_at(x))}" cy="{px(y_at(y))}" r="4"><title>{tip}</title></circle>'
    yield f'<text class="name" x="{px(name_x)}" y="{px(name_y + 4)}">{safe_text(line.name)}</text>'


def _name_heights(panel: Panel, y_at: _Scale) -> list[float]:
    """Heights of the names next to the ends of their lines: apart from each other and, if there is room, above the axis
    numbers."""
    ends = [y_at(line.points[-1][1]) for line in panel.lines]
    order = sorted(range(len(ends)), key=ends.__getitem__)
    for above, below in pairwise(order):
        ends[below] = max(ends[below], ends[above] + NAME_HEIGHT)
    lowest = TOP + HEIGHT
    for place in reversed(order):
        ends[place] = min(ends[place], lowest)
        lowest = ends[place] - NAME_HEIGHT
    return ends


def _scale(numbers: Sequence[float], start: float, end: float, *, even: bool) -> _Scale:
    low, high = numbers[0], numbers[-1]
    return _Scale(low, high, start, end, even) if low < high else _Scale(low / 2, high * 2, start, end, even)


def _even_numbers(numbers: Sequence[float]) -> list[float]:
    """Round numbers in equal steps that enclose all numbers."""
    span = max(numbers) - min(numbers) or 1.0
    power = 10.0 ** math.floor(math.log10(span / STEPS))
    step = next(power * digit for digit in (1, 2, 5, 10) if power * digit >= span / STEPS)
    first, last = math.floor(min(numbers) / step), math.ceil(max(numbers) / step)
    return [float(f"{index * step:.12g}") for index in range(first, max(last, first + 1) + 1)]


def _round_numbers(numbers: Sequence[float]) -> list[float]:
    """1, 2 and 5 times powers of ten that enclose all numbers."""
    low, high = math.floor(math.log10(min(numbers))), math.ceil(math.log10(max(numbers)))
    # one more at both ends, since logarithms are rounded
    steps = [float(f"{digit}e{power}") for power in range(low - 1, high + 2) for digit in (1, 2, 5)]
    first = max(step for step in steps if step <= min(numbers))
    last = min(step for step in steps if step >= max(numbers))
    return [step for step in steps if first <= step <= last]
