"""``penstock demo``: the whole flow on a real small model, as a user would run it."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import typer

from penstock.cli import app as verbs
from penstock.cli import show as shown
from penstock.cli import workers
from penstock.cluster import parse_cluster
from penstock.planner import Hints, make_plan
from penstock.workloads import demo

CLUSTER = "local:2"


def run_demo(run: Path | None) -> None:
    job_file = Path(demo.__file__)
    with workers.open_run(job_file, None, run, None) as directory:
        typer.echo("1/4  profile: a character-level transformer over Python's own documentation")
        profile = workers.profile(job_file, None, threads=1)
        typer.echo(f"     {len(profile.graph.layers)} layers, captured by {profile.front_end}")
        typer.echo(f"2/4  plan: the best pipeline of two workers of this machine ({CLUSTER})")
        # The model is small enough for data parallelism to do as well, and that would show no pipeline.
        plan = make_plan(profile, parse_cluster(CLUSTER), hints=Hints(straight=True))
        shown.print_table(shown.plan_table(plan))
        typer.echo("3/4  train: asynchronous 1F1B with weight stashing, one process per worker")
        workers.train(job_file, plan, directory, workers.Options(job_name=job_file.name, checkpoint_every=300))
        result = directory.load()[2]
        first, last = (
            [loss for loss in part if loss is not None] for part in (result.losses[:20], result.losses[-20:])
        )
        typer.echo(f"     loss {fmean(first):.3f} -> {fmean(last):.3f} over {len(result.losses)} minibatches")
        typer.echo("4/4  report: predicted against measured")
        found = verbs.write_report_of(directory)
        shown.print_table(shown.run_table(found))
        typer.echo(f"checkpoint  {directory.path / (result.checkpoint or '')}")
        typer.echo(f"report      {directory.report.resolve()}   (open it in a browser)")
