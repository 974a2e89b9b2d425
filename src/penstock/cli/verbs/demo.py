"""``penstock demo``: the whole flow on a small real model, as a user would run it."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer

from penstock.cli import checks, show
from penstock.cli.answers import write_report_of
from penstock.cli.steps import Steps, loading_torch
from penstock.cluster import parse_cluster
from penstock.planner import Hints, make_plan
from penstock.run import RunDirectory
from penstock.runtime.process.options import TrainOptions

CLUSTER = "local:2"

verbs = typer.Typer()


@verbs.command(epilog="Example: penstock demo --run-dir /tmp/demo")
def demo(
    run: Annotated[
        Path | None,
        typer.Option(
            "--run-dir", help="directory for everything the demo makes; if not given, a new one in penstock-runs"
        ),
    ] = None,
) -> None:
    """Profile, plan, train and report a small language model on two workers of this machine."""
    checks.check_run_directory(run)
    with loading_torch(quiet=False):
        from penstock.cli import launcher
        from penstock.workloads import demo as workload

    job_file = Path(workload.__file__)
    with launcher.open_run(job_file, None, run, None) as directory:
        _run_flow(job_file, directory)


def _run_flow(job_file: Path, run: RunDirectory) -> None:
    from penstock.cli import launcher, profiling

    typer.echo("1/4  profile: a character-level transformer over Python's own documentation")
    with Steps() as steps:
        profile = profiling.profile(job_file, steps)
    typer.echo(f"     {len(profile.graph.layers)} layers, captured by {profile.front_end}")
    typer.echo(f"2/4  plan: the best pipeline of two workers of this machine ({CLUSTER})")
    # The model is so small that data parallelism is as fast, which would show no pipeline.
    plan = make_plan(profile, parse_cluster(CLUSTER), hints=Hints(straight=True))
    show.print_table(show.plan_table(plan))
    typer.echo("3/4  train: asynchronous 1F1B with weight stashing, one process per worker")
    launcher.train(job_file, plan, run, TrainOptions(job_name=job_file.name, checkpoint_every=300))
    result = run.load()[2]
    first, last = ([loss for loss in part if loss is not None] for part in (result.losses[:20], result.losses[-20:]))
    typer.echo(f"     loss {fmean(first):.3f} -> {fmean(last):.3f} over {len(result.losses)} minibatches")
    typer.echo("4/4  report: predicted against measured")
    show.print_table(show.run_table(write_report_of(run)))
    typer.echo(f"checkpoint  {run.path / (result.checkpoint or '')}")
    typer.echo(f"report      {run.report.resolve()}   (open it in a browser)")
