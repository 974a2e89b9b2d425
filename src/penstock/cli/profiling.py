"""Profiles a job in this process, and plans a job that comes without a plan."""

from __future__ import annotations

import time
from pathlib import Path

from penstock.cli import show
from penstock.cli.steps import Steps
from penstock.cluster import Cluster
from penstock.plan import Plan
from penstock.planner import make_plan
from penstock.profile import Profile
from penstock.runtime.machine.machine import share_of_machine
from penstock.runtime.measure.measure import profile_job
from penstock.runtime.process.jobs import load_job
from penstock.runtime.worker.assemble import check_job

REPEATS = 6


def profile(job_file: Path, steps: Steps, *, microbatch_size: int | None = None, threads: int = 1) -> Profile:
    """Measure a job's model. ``microbatch_size`` is the largest to measure, by default the job's batch size."""
    steps.begin(f"loading {job_file}")
    job = load_job(job_file)
    steps.begin("profiling: capturing the model")

    def progress(done: int, total: int) -> None:
        if done == 1:
            steps.begin("profiling")
        steps.part(done, total, "parts")

    with share_of_machine(threads) as device:
        return profile_job(
            job,
            clock=time.perf_counter,
            device=device,
            microbatch_size=microbatch_size or job.batch_size,
            threads=threads,
            repeats=REPEATS,
            progress=progress,
        )


def profile_and_plan(job_file: Path, cluster: Cluster, *, quiet: bool) -> Plan:
    """The best plan under the default schedule, or under 1f1b for a job whose stages must update together."""
    with Steps(quiet=quiet) as steps:
        profiled = profile(job_file, steps)
        steps.begin("planning")
        job = load_job(job_file)
        plan = make_plan(profiled, cluster, schedule="1f1b" if job.updates_together else "pipedream")
    if not quiet:
        show.print_table(show.plan_table(plan))
    check_job(job, plan)
    return plan
