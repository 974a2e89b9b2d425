"""Writes the report page: a template, its style and scripts, and the content as one block of JSON."""

from __future__ import annotations

import html
import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

from penstock import codec
from penstock.report import drawing
from penstock.report.content import report_content
from penstock.report.outcome import Outcome

_ASSETS = {
    "colours": "colours.css",
    "style": "style.css",
    "dom": "dom.js",
    "timeline": "timeline.js",
    "charts": "charts.js",
    "sections": "sections.js",
    "page": "page.js",
}
_SLOT = re.compile(r"\{\{(\w+)\}\}")


def write_report(path: Path, outcome: Outcome) -> None:
    """Write a self-contained page."""
    codec.write_text(_page(report_content(outcome), drawing.inline_svg(outcome.plan)), path)


def _page(content: dict[str, Any], graph: str) -> str:
    title = f"{content['model']} on {content['cluster']}: Penstock report"
    parts = {slot: _asset(name) for slot, name in _ASSETS.items()}
    parts |= {"drawing": graph, "drawing_style": drawing.style()}
    parts |= {"title": html.escape(title), "content": _json_for_script(content)}
    # One pass: what is put in is never searched for slots, so a layer named {{style}} stays a name.
    return _SLOT.sub(lambda slot: parts[slot[1]], _asset("template.html"))


def _json_for_script(content: dict[str, Any]) -> str:
    """JSON that cannot end the script element it stands in, whatever a layer is called."""
    return json.dumps(content, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _asset(name: str) -> str:
    return resources.files("penstock.report").joinpath(name).read_text(encoding="utf-8")
