"""Charts: points where their numbers say, names that can be read, both colour schemes."""

from __future__ import annotations

import itertools
import re
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from penstock.report.chart import Line, Panel, chart_svg

POSITIVE = st.floats(1e-6, 1e9)


def panel(*lines: Line) -> Panel:
    return Panel(x_label="x", y_label="y", lines=lines)


def dots(svg: str) -> list[tuple[float, float]]:
    root = ElementTree.fromstring(svg.encode())
    return [(float(e.attrib["cx"]), float(e.attrib["cy"])) for e in root.iter() if e.get("class") == "dot"]


def test_equal_ratios_are_equal_lengths() -> None:
    (x0, y0), (x1, y1), (x2, y2) = dots(chart_svg([panel(Line("a", ((1, 1), (10, 100), (100, 10))))], about="a"))
    assert abs((x1 - x0) - (x2 - x1)) < 0.2
    assert abs((y0 - y1) - 2 * (y2 - y1)) < 0.2


def test_equal_differences_are_equal_lengths_where_axes_are_even() -> None:
    curve = Panel(x_label="x", y_label="y", lines=(Line("a", ((0, 1.5), (500, 2.5), (1000, 3.5))),), even=True)
    svg = chart_svg([curve], about="a")
    assert dots(svg) == []
    (path,) = re.findall(r'class="line" d="M(.*?)"', svg)
    (x0, y0), (x1, y1), (x2, y2) = (map(float, point.split()) for point in path.split("L"))
    assert abs((x1 - x0) - (x2 - x1)) < 0.2
    assert abs((y0 - y1) - (y1 - y2)) < 0.2
    assert {"0", "1,000", "1.5", "3.5"} <= {e.text for e in ElementTree.fromstring(svg.encode()).iter()}


@given(st.lists(st.tuples(POSITIVE, POSITIVE), min_size=1, max_size=6))
def test_every_point_is_inside_the_picture(points: list[tuple[float, float]]) -> None:
    svg = chart_svg([panel(Line("a", tuple(points)))], about="a")
    root = ElementTree.fromstring(svg.encode())
    for x, y in dots(svg):
        assert 0 <= x <= float(root.attrib["width"])
        assert 0 <= y <= float(root.attrib["height"])


def test_names_of_lines_that_end_together_stand_apart() -> None:
    lines = [Line(f"line {i}", ((1, 1), (2, 2 + i / 1000))) for i in range(4)]
    root = ElementTree.fromstring(chart_svg([panel(*lines)], about="a").encode())
    heights = sorted(float(e.attrib["y"]) for e in root.iter() if e.get("class") == "name")
    assert all(below - above >= 14.9 for above, below in itertools.pairwise(heights))


def test_a_chart_follows_the_reader_and_needs_nothing_else() -> None:
    svg = chart_svg([panel(Line("<a> & b", ((1, 1), (2, 2))))], about='quoted "so"')
    assert "prefers-color-scheme: dark" in svg
    assert "var(" not in svg
    assert re.findall(r"https?://[^\"]+", svg) == ["http://www.w3.org/2000/svg"]
    root = ElementTree.fromstring(svg.encode())
    assert root.attrib["aria-label"] == 'quoted "so"'
    assert "<a> & b" in {e.text for e in root.iter()}
