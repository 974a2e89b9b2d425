"""The table that compares several runs."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.report import figure_rows


def comparison_table(answer: dict[str, Any]) -> RenderableType:
    """A column for each run: its figures, and where its plan differs. Below, the bottleneck of each."""
    table = Table(box=box.SIMPLE_HEAD, title="runs side by side")
    table.add_column("what", overflow="fold")
    for run in answer["runs"]:
        table.add_column(run["name"], justify="right", overflow="fold")
    for what, values in figure_rows(answer):
        table.add_row(what, *values)
    if answer["differences"]:
        table.add_section()
    for row in answer["differences"]:
        table.add_row(row["what"], *row["values"])
    same = [] if answer["differences"] else [Text("The plans are the same.")]
    return Group(table, *same, *(Text(f"{run['name']}: {run['verdict']}") for run in answer["runs"]))
