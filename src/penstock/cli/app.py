"""The typer app, put together from the families of verbs."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from penstock import __version__
from penstock.cli.exit_codes import run_process
from penstock.cli.verbs import bench, cluster, demo, files, plan, profile, report, simulate, train


class Verbs(typer.core.TyperGroup):
    """Handles Ctrl-C for every verb that does not say itself what was kept."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            sys.stderr.write("\npenstock: stopped; nothing was written\n")
            raise typer.Exit(130) from None


app = typer.Typer(
    name="penstock",
    help="Train any PyTorch model over many devices with the best mix of pipeline and data parallelism.",
    epilog="Start with: penstock demo",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    cls=Verbs,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for family in (profile, plan, files, simulate, train, report, bench, demo):  # the order of `penstock --help`
    app.add_typer(family.verbs)
app.add_typer(cluster.verbs, name="cluster")


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="print the version and exit")] = False,
) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    """Run the command line."""
    run_process(app)
