"""``penstock report`` and ``watch``: runs that have ended, and runs under way."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from penstock import codec
from penstock.cli import show as tables
from penstock.cli import watch as watching
from penstock.cli.answers import print_answer, write_report_of
from penstock.cli.comparisons import comparison_table
from penstock.cli.options import Json
from penstock.errors import FormatError
from penstock.report import comparison_answer, names_of, outcome_of, perfetto_trace, write_comparison, write_figures
from penstock.run import RunDirectory

verbs = typer.Typer()

Runs = Annotated[
    list[Path],
    typer.Argument(metavar="RUN...", help="run directory, from `penstock train`; several are compared"),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        help="where to write the page; if not given, report.html in RUN, or comparison.html for several runs",
    ),
]
Png = Annotated[
    Path | None,
    typer.Option(
        help="where to write the figures: a directory for one PNG each, or a name that ends in .png for all in one; "
        "needs matplotlib"
    ),
]


@verbs.command(
    epilog="Examples: penstock report penstock-runs/latest; "
    "penstock report penstock-runs/latest --perfetto run.pftrace --png figures; "
    "penstock report penstock-runs/first penstock-runs/second --output comparison.html"
)
def report(
    runs: Runs,
    output: Output = None,
    perfetto: Annotated[
        Path | None, typer.Option(help="where to write a trace for ui.perfetto.dev; not written if not given")
    ] = None,
    png: Png = None,
    as_json: Json = False,
) -> None:
    """Write the HTML report of a run: timeline, predicted against measured, memory, throughput, loss, plan.

    For several runs, one page that compares them."""
    if len(runs) == 1:
        _report_one(RunDirectory(runs[0]), output, perfetto, png, as_json)
    elif perfetto is not None or png is not None:
        raise FormatError("--perfetto and --png are of one run; give one RUN with them")
    else:
        _compare(runs, output or Path("comparison.html"), as_json)


def _report_one(run: RunDirectory, output: Path | None, perfetto: Path | None, png: Path | None, as_json: bool) -> None:
    page = output or run.report
    found = write_report_of(run, page)
    written: dict[str, Sequence[Path]] = {"report": [page]}
    if perfetto is not None:
        codec.write_bytes(perfetto_trace(found), perfetto)
        written["perfetto"] = [perfetto]
    if png is not None:
        written["figures"] = write_figures(png, found)
    answer = {
        "report": str(page),
        "perfetto": str(perfetto) if perfetto else None,
        "figures": [str(path) for path in written.get("figures", ())],
        "predicted_samples_per_s": found.plan.predicted_samples_per_s,
        "verdict": found.headline,
        "explanation": found.explanation.text,
        **tables.trace_answer(found.measured),
    }
    note = "\n".join(f"{what} {' '.join(map(str, paths))}" for what, paths in written.items())
    print_answer(answer, as_json, partial(tables.run_table, found), note)


def _compare(runs: Sequence[Path], output: Path, as_json: bool) -> None:
    named = {name: outcome_of(RunDirectory(run)) for name, run in zip(names_of(runs), runs, strict=True)}
    write_comparison(output, named)
    answer = {"comparison": str(output), **comparison_answer(named)}
    print_answer(answer, as_json, lambda: comparison_table(answer), f"comparison {output}")


@verbs.command(epilog="Examples: penstock watch penstock-runs/latest; penstock watch penstock-runs/latest --json")
def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="run directory, from `penstock train`")],
    as_json: Json = False,
) -> None:
    """Follow a run in the terminal until it ends: throughput, loss, time left, each worker's activity and memory."""
    directory = RunDirectory(run)
    if as_json:
        typer.echo(json.dumps(watching.answer(watching.read_run(directory).read()), allow_nan=False))
        return
    with contextlib.suppress(KeyboardInterrupt):
        watching.follow(directory, tables.plain_console())
