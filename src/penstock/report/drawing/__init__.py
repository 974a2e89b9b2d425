"""A plan's layer graph, drawn: which layers are which stage, and what the stages send to each other."""

from penstock.report.drawing.svg import inline_svg, style, svg_file

__all__ = ["inline_svg", "style", "svg_file"]
