"""Writes HTML pages: a template with its style and scripts, and the content as one block of JSON."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from penstock import codec
from penstock.report import drawing
from penstock.report.compare import Runs, comparison_content
from penstock.report.content import report_content
from penstock.report.outcome import Outcome

_SLOT = re.compile(r"\{\{(\w+)\}\}")


def write_report(path: Path, outcome: Outcome) -> None:
    """Write a self-contained page of one run."""
    content = report_content(outcome)
    parts = {
        "title": html.escape(f"{content['model']} on {content['cluster']}: Penstock report"),
        "drawing": drawing.inline_svg(outcome.plan),
        "drawing_style": drawing.style(),
    }
    codec.write_text(_page("template.html", content, parts), path)


def write_comparison(path: Path, runs: Runs) -> None:
    """Write a self-contained page of several runs side by side."""
    title = html.escape(f"{', '.join(runs)}: Penstock comparison")
    codec.write_text(_page("comparison.html", comparison_content(runs), {"title": title}), path)


def _page(template: str, content: dict[str, Any], parts: Mapping[str, str]) -> str:
    """The template with its slots filled: ``{{name_js}}`` and ``{{name_css}}`` by a file, others from ``parts``."""

    def filled(slot: re.Match[str]) -> str:
        name = slot[1]
        if name == "content":
            return _json_for_script(content)
        return parts[name] if name in parts else _asset(".".join(name.rsplit("_", 1)))

    # One pass: inserted text is not searched for slots, so a layer named {{style}} stays a name.
    return _SLOT.sub(filled, _asset(template))


def _json_for_script(content: dict[str, Any]) -> str:
    """JSON that cannot end the script element around it, whatever a layer's name is."""
    return json.dumps(content, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _asset(name: str) -> str:
    return resources.files("penstock.report").joinpath(name).read_text(encoding="utf-8")
