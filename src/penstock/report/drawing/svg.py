"""The drawing of a plan as SVG text. Names come from files: all text is escaped."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources

from penstock.plan import Plan
from penstock.report.drawing.labels import DeliveryLabel, FoldLabel, RowLabel
from penstock.report.drawing.picture import BLOCK_EDGE, LINE, ROW, Band, Box, Picture, Wire, make_picture
from penstock.report.svg import px, safe_text, with_colours

STAGE_COLOURS = 8
KEY = (
    "bar: time of forward and backward beside the slowest",
    "line from stage to stage: bytes sent per microbatch",
)
KEY_HEIGHT = 42.0
THIN, THICK = 1.6, 5.0
BAR_HEIGHT = 2.5
"""Bars are below the text of their row, so that none crosses a name."""


def inline_svg(plan: Plan) -> str:
    """An element for an HTML page that has colours.css and ``style()``."""
    return "\n".join(_svg(make_picture(plan), ""))


def svg_file(plan: Plan) -> str:
    """A separate file, which follows the reader's light or dark mode."""
    first, *rest = _svg(make_picture(plan), ' xmlns="http://www.w3.org/2000/svg"')
    return "\n".join(
        ['<?xml version="1.0" encoding="UTF-8"?>', first, f"<style>\n{with_colours(style())}</style>", *rest, ""]
    )


def style() -> str:
    return resources.files("penstock.report.drawing").joinpath("style.css").read_text(encoding="utf-8")


def _svg(picture: Picture, attributes: str) -> Iterator[str]:
    width, height = px(picture.width), px(picture.height + KEY_HEIGHT)
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
        yield f'<text class="quiet" x="10" y="{px(picture.height + 18 + line * LINE)}">{safe_text(text)}</text>'
    yield "</svg>"


def _band(band: Band, width: float) -> Iterator[str]:
    label, top, height = band.label, px(band.top), px(band.bottom - band.top)
    yield f'<g class="s{band.stage % STAGE_COLOURS}"><title>{safe_text(label.tooltip)}</title>'
    yield f'<rect class="band" y="{top}" width="{px(width)}" height="{height}" rx="5"/>'
    yield f'<rect class="mark" y="{top}" width="5" height="{height}" rx="2.5"/>'
    lines = [("heading", label.title), *([("alarm", label.alarm)] if label.alarm else [])]
    lines += [("quiet", fact) for fact in label.facts]
    for line, (kind, text) in enumerate(lines):
        y = band.top + 24 + line * LINE
        yield f'<text class="{kind}" x="14" y="{px(y)}">{safe_text(text)}</text>'
    yield "</g>"


def _wire(wire: Wire, heaviest: float) -> str:
    path, at = [], None
    for p in wire.pieces:
        if at != (p.x, p.top):
            path.append(f"M{px(p.x)} {px(p.top)}")
        if p.x != p.end_x:
            middle = px((p.turn + p.end_turn) / 2)
            path.append(f"V{px(p.turn)}C{px(p.x)} {middle} {px(p.end_x)} {middle} {px(p.end_x)} {px(p.end_turn)}")
        path.append(f"V{px(p.bottom)}")
        at = (p.end_x, p.bottom)
    if wire.label is None:
        return f'<path class="wire" d="{"".join(path)}"/>'
    share = wire.label.num_bytes / heaviest if wire.crosses and heaviest else 0.0
    thickness = THIN + (THICK - THIN) * share
    return (
        f'<path class="cut{_state(wire.label)}" stroke-width="{px(thickness)}" d="{"".join(path)}">'
        f"<title>{safe_text(wire.label.tooltip)}</title></path>"
    )


def _delivery(box: Box, label: DeliveryLabel) -> Iterator[str]:
    state, radius = _state(label), px(box.height / 2)
    yield f"<g><title>{safe_text(label.tooltip)}</title>"
    yield f'<rect class="pill{state}" {_place(box)} rx="{radius}"/>'
    x, y = px(box.left + box.width / 2), px(box.top + box.height / 2 + 4)
    yield f'<text class="bytes{state}" text-anchor="middle" x="{x}" y="{y}">{safe_text(label.text)}</text></g>'


def _state(label: DeliveryLabel) -> str:
    return " slow" if label.slow else " nothing" if label.num_bytes == 0 else ""


def _block(box: Box, rows: tuple[RowLabel, ...], slowest_s: float) -> Iterator[str]:
    yield f'<g class="s{box.stage % STAGE_COLOURS}"><rect class="box" {_place(box)} rx="5"/>'
    top = box.top + BLOCK_EDGE
    if box.fold is not None:
        yield from _fold(box.fold, box)
        top += ROW
    for index, row in enumerate(rows):
        yield from _row(row, box, top + index * ROW, slowest_s)
    yield "</g>"


def _fold(label: FoldLabel, box: Box) -> Iterator[str]:
    top, right = box.top + BLOCK_EDGE, box.left + box.width
    y = px(top + ROW / 2 + 3)
    size = f'width="{px(box.width - 8)}" height="{px(ROW - 2)}"'
    yield f'<g class="fold"><title>{safe_text(label.tooltip)}</title>'
    yield f'<rect class="row" x="{px(box.left + 4)}" y="{px(top)}" {size}/>'
    yield f'<text class="strong" x="{px(box.left + 8)}" y="{y}">{safe_text(label.text)}</text>'
    yield f'<text class="strong" text-anchor="end" x="{px(right - 8)}" y="{y}">{safe_text(label.times)}</text>'
    yield f'<path class="edge" d="M{px(box.left)} {px(top + ROW - 1)}H{px(right)}"/></g>'


def _row(row: RowLabel, box: Box, top: float, slowest_s: float) -> Iterator[str]:
    left, width = box.left + 4, box.width - 8
    layers = " ".join(map(str, row.layers))
    yield f'<g data-layers="{layers}"><title>{safe_text(row.tooltip)}</title>'
    yield f'<rect class="row" x="{px(left)}" y="{px(top)}" width="{px(width)}" height="{px(ROW)}"/>'
    share = row.seconds / slowest_s if slowest_s else 0.0
    if share * width >= 0.5:
        size = f'width="{px(share * (width - 8))}" height="{px(BAR_HEIGHT)}"'
        yield f'<rect class="bar" x="{px(left + 4)}" y="{px(top + ROW - BAR_HEIGHT)}" {size} rx="1"/>'
    y = px(top + ROW / 2 + 3)
    name = f'<tspan class="quiet" dx="6">{safe_text(row.name)}</tspan>' if row.name else ""
    yield f'<text x="{px(left + 4)}" y="{y}">{safe_text(row.text)}{name}</text>'
    if row.seconds_text:
        right = px(left + width - 4)
        yield f'<text class="number" text-anchor="end" x="{right}" y="{y}">{safe_text(row.seconds_text)}</text>'
    yield "</g>"


def _place(box: Box) -> str:
    return f'x="{px(box.left)}" y="{px(box.top)}" width="{px(box.width)}" height="{px(box.height)}"'
