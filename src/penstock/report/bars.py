"""Bars with a name and a number each, as an SVG file that follows the reader's light or dark mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from penstock.report.svg import px, safe_text, with_colours

HEIGHT, GAP, PAD = 18.0, 8.0, 16.0
LENGTH = 360.0
"""Length of the longest bar."""
LETTER = 6.4
"""About the width of a letter."""
COLOURS = 6


@dataclass(frozen=True)
class Bar:
    name: str
    value: float
    shown: str
    """The text after the bar."""
    colour: int = 0


def bars_svg(bars: Sequence[Bar], *, about: str) -> str:
    """Bars from top to bottom in the given order. ``about`` describes them for screen readers."""
    style = resources.files("penstock.report").joinpath("chart.css").read_text(encoding="utf-8")
    left = PAD + LETTER * max(len(bar.name) for bar in bars) + 8
    right = LETTER * max(len(bar.shown) for bar in bars) + PAD + 8
    width, height = px(left + LENGTH + right), px(2 * PAD + len(bars) * (HEIGHT + GAP) - GAP)
    longest = max(bar.value for bar in bars) or 1.0
    lines = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" aria-label="{safe_text(about)}">',
        f"<style>\n{with_colours(style)}</style>",
        f'<rect class="paper" width="{width}" height="{height}"/>',
    ]
    for place, bar in enumerate(bars):
        top = PAD + place * (HEIGHT + GAP)
        length, base = LENGTH * bar.value / longest, px(top + HEIGHT - 5)
        lines += [
            f'<g class="l{bar.colour % COLOURS}">',
            f'<text text-anchor="end" x="{px(left - 8)}" y="{base}">{safe_text(bar.name)}</text>',
            f'<rect class="bar" x="{px(left)}" y="{px(top)}" width="{px(length)}" height="{px(HEIGHT)}" rx="2"/>',
            f'<text x="{px(left + length + 8)}" y="{base}">{safe_text(bar.shown)}</text>',
            "</g>",
        ]
    return "\n".join([*lines, "</svg>", ""])
