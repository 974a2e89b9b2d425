"""The drawing of a plan as SVG text. Names come from files: all text is escaped."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from importlib import resources

from penstock.plan import Plan
from penstock.report.drawing.labels import DeliveryLabel, RowLabel
from penstock.report.drawing.picture import BLOCK_EDGE, LINE, ROW, Band, Box, Picture, Wire, make_picture

STAGE_COLOURS = 8
KEY = (
    "bar: time of forward and backward beside the slowest",
    "line from stage to stage: bytes sent per microbatch",
)
KEY_HEIGHT = 42.0
THIN, THICK = 1.6, 5.0
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_COLOUR = re.compile(r"(--[\w-]+): ([^;]+);")


def inline_svg(plan: Plan) -> str:
    """An element of an HTML page that has colours.css and ``style()``."""
    return "\n".join(_svg(make_picture(plan), ""))


def svg_file(plan: Plan) -> str:
    """A file of its own, which follows the reader's light or dark mode."""
    first, *rest = _svg(make_picture(plan), ' xmlns="http://www.w3.org/2000/svg"')
    return "\n".join(['<?xml version="1.0" encoding="UTF-8"?>', first, f"<style>\n{_plain_style()}</style>", *rest, ""])


def style() -> str:
    return resources.files("penstock.report.drawing").joinpath("style.css").read_text(encoding="utf-8")


def _plain_style() -> str:
    """With the colours filled in, once for light and once for dark: not every viewer of SVG knows CSS variables."""
    colours = resources.files("penstock.report").joinpath("colours.css").read_text(encoding="utf-8")
    light, _, dark = colours.partition("@media")
    light_values = dict(_COLOUR.findall(light))
    dark_values = light_values | dict(_COLOUR.findall(dark))

    def filled(values: dict[str, str]) -> str:
        return re.sub(r"var\((--[\w-]+)\)", lambda match: values[match[1]], style())

    return f"{filled(light_values)}@media (prefers-color-scheme: dark) {{\n{filled(dark_values)}}}\n"


def _svg(picture: Picture, attributes: str) -> Iterator[str]:
    width, height = _px(picture.width), _px(picture.height + KEY_HEIGHT)
    yield (
        f'<svg{attributes} class="plan" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" '
        'aria-label="The layer graph, stage by stage">'
    )
    yield f'<rect class="paper" width="{width}" height="{height}"/>'
    for band in picture.bands:
        yield from _band(band, picture.width)
    heaviest = max((wire.label.num_bytes for wire in picture.wires if wire.label), default=0.0)
    for wire in sorted(picture.wires, key=lambda wire: wire.label is not None):
        yield _wire(wire, heaviest)
    rows = [row for box in picture.boxes if isinstance(box.label, tuple) for row in box.label]
    slowest_s = max(row.seconds for row in rows)
    for box in picture.boxes:
        if isinstance(box.label, DeliveryLabel):
            yield from _delivery(box, box.label)
        else:
            yield from _block(box, box.label, slowest_s)
    for line, text in enumerate(KEY):
        yield f'<text class="quiet" x="10" y="{_px(picture.height + 18 + line * LINE)}">{_text(text)}</text>'
    yield "</svg>"


def _band(band: Band, width: float) -> Iterator[str]:
    label, top, height = band.label, _px(band.top), _px(band.bottom - band.top)
    yield f'<g class="s{band.stage % STAGE_COLOURS}"><title>{_text(label.tooltip)}</title>'
    yield f'<rect class="band" y="{top}" width="{_px(width)}" height="{height}" rx="5"/>'
    yield f'<rect class="mark" y="{top}" width="5" height="{height}" rx="2.5"/>'
    lines = [("heading", label.title), *([("alarm", label.alarm)] if label.alarm else [])]
    lines += [("quiet", fact) for fact in label.facts]
    for line, (kind, text) in enumerate(lines):
        y = band.top + 24 + line * LINE
        yield f'<text class="{kind}" x="14" y="{_px(y)}">{_text(text)}</text>'
    yield "</g>"


def _wire(wire: Wire, heaviest: float) -> str:
    path, at = [], None
    for p in wire.pieces:
        if at != (p.x, p.top):
            path.append(f"M{_px(p.x)} {_px(p.top)}")
        if p.x != p.end_x:
            middle = _px((p.turn + p.end_turn) / 2)
            path.append(f"V{_px(p.turn)}C{_px(p.x)} {middle} {_px(p.end_x)} {middle} {_px(p.end_x)} {_px(p.end_turn)}")
        path.append(f"V{_px(p.bottom)}")
        at = (p.end_x, p.bottom)
    if wire.label is None:
        return f'<path class="wire" d="{"".join(path)}"/>'
    share = wire.label.num_bytes / heaviest if wire.crosses and heaviest else 0.0
    thickness = THIN + (THICK - THIN) * share
    return (
        f'<path class="cut{_state(wire.label)}" stroke-width="{_px(thickness)}" d="{"".join(path)}">'
        f"<title>{_text(wire.label.tooltip)}</title></path>"
    )


def _delivery(box: Box, label: DeliveryLabel) -> Iterator[str]:
    state, radius = _state(label), _px(box.height / 2)
    yield f"<g><title>{_text(label.tooltip)}</title>"
    yield f'<rect class="pill{state}" {_place(box)} rx="{radius}"/>'
    x, y = _px(box.left + box.width / 2), _px(box.top + box.height / 2 + 4)
    yield f'<text class="bytes{state}" text-anchor="middle" x="{x}" y="{y}">{_text(label.text)}</text></g>'


def _state(label: DeliveryLabel) -> str:
    return " slow" if label.slow else " nothing" if label.num_bytes == 0 else ""


def _block(box: Box, rows: tuple[RowLabel, ...], slowest_s: float) -> Iterator[str]:
    yield f'<g class="s{box.stage % STAGE_COLOURS}"><rect class="box" {_place(box)} rx="5"/>'
    for index, row in enumerate(rows):
        yield from _row(row, box, box.top + BLOCK_EDGE + index * ROW, slowest_s)
    yield "</g>"


def _row(row: RowLabel, box: Box, top: float, slowest_s: float) -> Iterator[str]:
    left, width = box.left + 4, box.width - 8
    layers = " ".join(map(str, row.layers))
    yield f'<g data-layers="{layers}"><title>{_text(row.tooltip)}</title>'
    yield f'<rect class="row" x="{_px(left)}" y="{_px(top)}" width="{_px(width)}" height="{_px(ROW)}"/>'
    share = row.seconds / slowest_s if slowest_s else 0.0
    if share * width >= 0.5:
        size = f'width="{_px(share * width)}" height="{_px(ROW - 2)}"'
        yield f'<rect class="bar" x="{_px(left)}" y="{_px(top + 1)}" {size} rx="2"/>'
    y = _px(top + ROW / 2 + 4)
    name = f'<tspan class="quiet" dx="6">{_text(row.name)}</tspan>' if row.name else ""
    yield f'<text x="{_px(left + 4)}" y="{y}">{_text(row.text)}{name}</text>'
    if row.seconds_text:
        right = _px(left + width - 4)
        yield f'<text class="number" text-anchor="end" x="{right}" y="{y}">{_text(row.seconds_text)}</text>'
    yield "</g>"


def _place(box: Box) -> str:
    return f'x="{_px(box.left)}" y="{_px(box.top)}" width="{_px(box.width)}" height="{_px(box.height)}"'


def _px(length: float) -> str:
    return f"{length:.1f}".removesuffix(".0")


def _text(text: str) -> str:
    return escape(_NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text))
