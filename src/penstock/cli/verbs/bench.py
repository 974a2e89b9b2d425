"""``penstock bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock import codec
from penstock.bench import DRAWN, MODULES, run_benchmark
from penstock.cli import show
from penstock.cli.answers import print_answer
from penstock.cli.options import Json
from penstock.errors import FormatError

verbs = typer.Typer()


@verbs.command(
    epilog="Examples: penstock bench runtime --json; penstock bench planner --svg growth.svg; "
    "penstock bench table1 --emulate"
)
def bench(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"{', '.join(MODULES)}; table1 is PipeDream's")],
    svg: Annotated[
        Path | None, typer.Option(help=f"where to write a drawing of the results; for {', '.join(DRAWN)}")
    ] = None,
    emulate: Annotated[
        bool, typer.Option("--emulate", help="with table1: run its plans for 16 GPUs on emulated devices")
    ] = False,
    as_json: Json = False,
) -> None:
    """Benchmark Penstock against its peers on this machine, or compare its plans with published ones."""
    if svg is not None and name not in DRAWN:
        raise FormatError(f"bench {name} has no drawing; --svg goes with bench {', '.join(DRAWN)}")
    found = run_benchmark(name, emulate=emulate)
    if svg is not None and found.svg is not None:
        codec.write_text(found.svg, svg)
    note = f"drawing written to {svg}" if svg else ""
    print_answer(found.rows, as_json, lambda: show.bench_table(name, found.rows), note)
