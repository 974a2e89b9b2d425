"""The verbs that need torch: profile here, or start and be the workers of a plan."""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import typer
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from penstock import codec
from penstock.cli.steps import Steps
from penstock.cluster import Cluster
from penstock.errors import PenstockError, PlanError
from penstock.plan import Plan
from penstock.planner import make_plan
from penstock.profile import Profile
from penstock.runtime.assemble import check_job
from penstock.runtime.checkpoint import read_index
from penstock.runtime.jobs import load_job
from penstock.runtime.launch import Interrupted, is_worker, launch_workers
from penstock.runtime.machine import share_of_machine
from penstock.runtime.measure import profile_job
from penstock.runtime.scalars import check_tensorboard
from penstock.runtime.survey import THREADS, survey_cluster
from penstock.runtime.train import Options, train_worker
from penstock.runtime.verify import Verification, compare, verify_worker
from penstock.survey import Survey

__all__ = [
    "Options",
    "is_worker",
    "measure_cluster",
    "measure_cluster_here",
    "profile",
    "profile_and_plan",
    "train",
    "train_here",
    "verify",
    "verify_here",
]

REPEATS = 6
LAUNCHED = "PENSTOCK_LAUNCHED"
"""Set in workers that this command line started: it shows their errors itself."""


def profile(job_file: Path, microbatch_size: int | None, threads: int, steps: Steps) -> Profile:
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


def profile_and_plan(job_file: Path, cluster: Cluster, steps: Steps) -> Plan:
    """With the usual schedule; a job whose stages update together needs 1f1b."""
    made = profile(job_file, None, 1, steps)
    steps.begin("planning")
    return make_plan(made, cluster, schedule="1f1b" if load_job(job_file).updates_together else "pipedream")


def train(job_file: Path, plan_file: Path, options: Options) -> None:
    """Start the workers on this machine and wait; on a signal say where the newest checkpoint is."""
    plan = _check_input(job_file, plan_file)
    arguments = ["train", str(job_file), str(plan_file), "--run-dir", str(options.run.path)]
    arguments += ["--timeout", str(options.timeout_s), "--checkpoint-every", str(options.checkpoint_every)]
    arguments += ["--keep-checkpoints", str(options.keep_checkpoints)]
    if options.resume is not None:
        read_index(options.resume).check_job(load_job(job_file), options.resume)
        arguments += ["--resume", str(options.resume)]
    if options.init is not None:
        arguments += ["--init", str(options.init)]
    if options.tensorboard is not None:
        check_tensorboard()
        arguments += ["--tensorboard", str(options.tensorboard)]
    if options.quiet:
        arguments.append("--json")
    for left in (options.run.result, options.run.progress):
        left.unlink(missing_ok=True)
    if not options.quiet:
        typer.echo(f"starting {len(plan.devices)} workers", err=True)
    try:
        _launch(arguments, len(plan.devices), plan.profile.threads)
    except PenstockError as error:
        options.run.note_end(f"failed: {error}")
        raise
    except Interrupted as interrupted:
        options.run.note_end("stopped by a signal")
        newest = options.run.newest_checkpoint()
        where = f"checkpoint {newest}; go on with --resume {newest}" if newest else "no checkpoint was complete yet"
        sys.stderr.write(f"\npenstock: stopped, all workers ended; {where}\n")
        raise typer.Exit(interrupted.exit_code) from None


def train_here(job_file: Path, plan_file: Path, options: Options) -> None:
    """Be one worker."""
    _as_worker(lambda: train_worker(load_job(job_file), codec.load(Plan, plan_file), options))


def verify(job_file: Path, plan_file: Path, timeout_s: float, steps: Steps) -> Verification:
    steps.begin(f"loading {job_file}")
    plan = _check_input(job_file, plan_file)
    with tempfile.TemporaryDirectory() as directory:
        os.environ["PENSTOCK_VERIFY"] = directory
        arguments = ["verify", str(job_file), str(plan_file), "--timeout", str(timeout_s)]
        steps.begin(f"running a minibatch on {len(plan.devices)} workers")
        try:
            _launch(arguments, len(plan.devices), plan.profile.threads)
        except Interrupted as interrupted:
            steps.end()
            sys.stderr.write("\npenstock: stopped, all workers ended; nothing was compared, and nothing is kept\n")
            raise typer.Exit(interrupted.exit_code) from None
        steps.begin("running the same minibatch in one process")
        return compare(load_job(job_file), plan, Path(directory))


def verify_here(job_file: Path, plan_file: Path, timeout_s: float) -> None:
    directory = os.environ.get("PENSTOCK_VERIFY")
    if directory is None:
        raise PlanError("verify starts its own workers; run it without torchrun")
    _as_worker(lambda: verify_worker(load_job(job_file), codec.load(Plan, plan_file), Path(directory), timeout_s))


def measure_cluster(workers: int, output: Path, timeout_s: float, as_json: bool) -> None:
    """Start workers on this machine to measure it; the first of them writes the file and shows what was found."""
    arguments = ["cluster", "measure", "--overwrite", "--output", str(output), "--timeout", str(timeout_s)]
    try:
        _launch([*arguments, "--json"] if as_json else arguments, workers, THREADS)
    except Interrupted as interrupted:
        sys.stderr.write("\npenstock: stopped, all workers ended; no cluster file was written\n")
        raise typer.Exit(interrupted.exit_code) from None


def measure_cluster_here(timeout_s: float, quiet: bool, tell: Callable[[Survey], None]) -> None:
    """Be one worker; the first one tells what all have found."""

    def work() -> None:
        with Steps(quiet=quiet or os.environ["RANK"] != "0") as steps:
            steps.begin("measuring: the workers meet")

            def progress(done: int, total: int, what: str) -> None:
                steps.begin(f"measuring {what}")
                steps.part(done, total)

            found = survey_cluster(timeout_s, progress)
        if found is not None:
            tell(found)

    _as_worker(work)


def _check_input(job_file: Path, plan_file: Path) -> Plan:
    """What is wrong with the files is told before any worker starts."""
    job, plan = load_job(job_file), codec.load(Plan, plan_file)
    check_job(job, plan)
    return plan


def _launch(arguments: Sequence[str], workers: int, threads: int) -> None:
    os.environ[LAUNCHED] = "1"
    launch_workers(["-m", "penstock", *arguments], workers, threads)


def _as_worker(work: Callable[[], None]) -> None:
    """Run a worker's part. Its error goes to the launcher, which tells the first; others keep their traceback."""
    handler = get_error_handler()
    handler.initialize()
    try:
        work()
    except PenstockError as error:
        handler.record_exception(error)
        if LAUNCHED in os.environ:
            raise typer.Exit(2) from None
        raise
    except Exception as error:
        handler.record_exception(error)
        traceback.print_exc()
        raise typer.Exit(1) from None
