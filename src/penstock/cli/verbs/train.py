"""``penstock train`` and ``verify``: the workers of a plan, started here or by torchrun."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from penstock import codec
from penstock.cli import checks
from penstock.cli import show as tables
from penstock.cli.answers import print_answer, report_and_print
from penstock.cli.options import JobFile, Json, PlanFile, Timeout, with_options
from penstock.cli.steps import loading_torch
from penstock.cluster import Cluster
from penstock.errors import FormatError, PlanError
from penstock.formats import read_cluster
from penstock.job import check_job_file
from penstock.plan import Plan
from penstock.runtime.process.options import DEFAULT_TIMEOUT_S, TrainOptions

verbs = typer.Typer()

RunDirectoryOption = Annotated[
    Path | None,
    typer.Option(
        "--run-dir", help="directory for checkpoints, trace and report; if not given, a new one in penstock-runs"
    ),
]


@verbs.command(
    epilog="Examples: penstock train train.py plan.json; penstock train train.py --cluster local:2; "
    "penstock train train.py other-plan.json --resume penstock-runs/latest/checkpoints/step-00000500; "
    "penstock train train.py plan.json --init model.safetensors; on several hosts: "
    "torchrun --nnodes 2 --node-rank 0 --master-addr host0 --nproc-per-node 4 "
    "-m penstock train train.py plan.json"
)
@with_options(TrainOptions)
def train(
    job: JobFile,
    plan: Annotated[
        Path | None,
        typer.Argument(metavar="[PLAN]", help="plan file; without it the job is profiled and planned"),
    ] = None,
    cluster: Annotated[
        str, typer.Option(help="cluster to plan for if no PLAN is given, as for `penstock plan`")
    ] = "local:2",
    run: RunDirectoryOption = None,
    *,
    options: TrainOptions,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    as_json: Json = False,
) -> None:
    """Train a job under a plan. One process per worker: started here, or by torchrun."""
    check_job_file(job)
    devices = read_cluster(cluster)
    checks.check_run_directory(run)
    if plan is not None:
        checks.check_plan_file(plan)
    options = replace(options, timeout_s=timeout, quiet=as_json, job_name=job.name)
    with loading_torch(as_json or "RANK" in os.environ):
        from penstock.runtime.process.launch import is_worker
    if is_worker():
        _train_under_torchrun(job, plan, run, options)
    else:
        _train_here(job, plan, run, options, devices)


def _train_under_torchrun(job: Path, plan: Path | None, run: Path | None, options: TrainOptions) -> None:
    """Be one worker. At the end worker 0 prints the result; every other host has one worker say that it is done."""
    from penstock.cli import worker

    if plan is None:
        raise FormatError("torchrun needs a PLAN: profile and plan once, then give the same file on every host")
    directory = worker.train_under_torchrun(job, plan, run, _resolved(options))
    if os.environ["RANK"] == "0":
        report_and_print(directory, options.quiet)
    elif os.environ["LOCAL_RANK"] == "0" and not options.quiet:
        typer.echo(f"the workers of this host are done; worker 0 shows the result, and writes {directory.report}")


def _train_here(job: Path, plan: Path | None, run: Path | None, options: TrainOptions, cluster: Cluster) -> None:
    """Start the workers on this machine; without a plan, profile and plan first."""
    from penstock.cli import launcher, profiling

    with launcher.open_run(job, plan, run, options.resume) as directory:
        planned = (
            codec.load(Plan, plan)
            if plan is not None
            else profiling.profile_and_plan(job, cluster, quiet=options.quiet)
        )
        try:
            launcher.train(job, planned, directory, _resolved(options), plan)
        except KeyboardInterrupt:
            kept = f"the plan is kept: {directory.plan}" if directory.plan.exists() else "nothing is kept"
            sys.stderr.write(f"\npenstock: stopped before training began; {kept}\n")
            raise typer.Exit(130) from None
        report_and_print(directory, options.quiet)


def _resolved(options: TrainOptions) -> TrainOptions:
    """Without links: ``penstock-runs/latest`` leads to another run once this one has begun."""
    resume, init = options.resume, options.init
    return replace(options, resume=resume and resume.resolve(), init=init and init.resolve())


@verbs.command(epilog="Example: penstock verify train.py plan.json")
def verify(job: JobFile, plan: PlanFile, timeout: Timeout = DEFAULT_TIMEOUT_S, as_json: Json = False) -> None:
    """Compare loss and every gradient of a plan's workers with the single-process model."""
    check_job_file(job)
    checks.check_plan_file(plan)
    with loading_torch(as_json or "RANK" in os.environ) as steps:
        from penstock.cli import launcher
        from penstock.runtime.process.launch import is_worker

        if is_worker():
            raise PlanError("verify starts its own workers; run it without torchrun")
        found = launcher.verify(job, plan, timeout, steps)
    print_answer(tables.verification_answer(found), as_json, lambda: tables.verification_table(found))
    if not found.passed:
        raise typer.Exit(1)
