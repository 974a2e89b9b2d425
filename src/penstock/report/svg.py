"""What all drawings share: numbers, text and colours of an SVG file."""

from __future__ import annotations

import re
from html import escape
from importlib import resources

_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_COLOUR = re.compile(r"(--[\w-]+): ([^;]+);")


def px(length: float) -> str:
    return f"{length:.1f}".removesuffix(".0")


def safe_text(text: str) -> str:
    """Escapes names, which come from files and may contain anything."""
    return escape(_NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text))


def colours() -> tuple[dict[str, str], dict[str, str]]:
    """Every colour by its name (``--ink``), for light and for dark."""
    text = resources.files("penstock.report").joinpath("colours.css").read_text(encoding="utf-8")
    light, _, dark = text.partition("@media")
    light_values = dict(_COLOUR.findall(light))
    return light_values, light_values | dict(_COLOUR.findall(dark))


def with_colours(style: str) -> str:
    """A style with the colours filled in, for light and for dark mode. Not every SVG viewer supports CSS variables."""
    light_values, dark_values = colours()

    def filled(values: dict[str, str]) -> str:
        return re.sub(r"var\((--[\w-]+)\)", lambda match: values[match[1]], style)

    return f"{filled(light_values)}@media (prefers-color-scheme: dark) {{\n{filled(dark_values)}}}\n"
