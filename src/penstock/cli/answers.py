"""Prints the answer of a verb: a table, or JSON if asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import typer
from rich.console import RenderableType

from penstock import codec
from penstock.cli import show
from penstock.report import Outcome, outcome_of, write_report
from penstock.run import RunDirectory


def print_answer(value: Any, as_json: bool, table: Callable[[], RenderableType], note: str = "") -> None:
    """``value`` as JSON, or the table with a note below it."""
    if as_json:
        typer.echo(json.dumps(codec.encode(value), allow_nan=False))
        return
    show.print_table(table())
    if note:
        typer.echo(note)


def write_report_of(run: RunDirectory, page: Path | None = None) -> Outcome:
    """Write the HTML report of a run that has ended, by default into its directory."""
    found = outcome_of(run)
    write_report(page or run.report, found)
    return found


def report_and_print(run: RunDirectory, as_json: bool) -> None:
    """The end of a run: write its report, and print its result and where everything is."""
    found = write_report_of(run)
    result = found.result
    lines = [
        *(str(evaluation) for evaluation in result.evaluations[-1:]),
        *(["stopped early"] if result.stopped_early else []),
        f"checkpoint {run.path / (result.checkpoint or '')}",
        f"report {run.report}",
    ]
    print_answer(result, as_json, partial(show.run_table, found), "\n".join(lines))
