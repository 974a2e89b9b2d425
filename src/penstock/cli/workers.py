"""The verbs that need torch: profile here, or start and be the workers of a plan."""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, get_error_handler

from penstock import codec
from penstock.cli.going_on import Checkpoints, command_to_go_on
from penstock.errors import PenstockError, PlanError, WorkerError
from penstock.plan import Plan
from penstock.profile import Profile
from penstock.runtime.assemble import check_job
from penstock.runtime.checkpoint import read_index
from penstock.runtime.jobs import load_job
from penstock.runtime.launch import Interrupted, is_launched, is_worker, launch_workers
from penstock.runtime.machine import share_of_machine
from penstock.runtime.measure import profile_job
from penstock.runtime.scalars import check_tensorboard
from penstock.runtime.survey import THREADS, survey_cluster
from penstock.runtime.train import Options, train_worker
from penstock.runtime.verify import Verification, compare, verify_worker
from penstock.survey import Survey

__all__ = [
    "Options",
    "is_launched",
    "is_worker",
    "measure_cluster",
    "measure_cluster_here",
    "profile",
    "train",
    "train_here",
    "verify",
    "verify_here",
]

REPEATS = 6


def profile(job_file: Path, microbatch_size: int | None, threads: int) -> Profile:
    job = load_job(job_file)
    columns = (
        TextColumn("profiling"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} layers"),
        TimeElapsedColumn(),
    )
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    with progress as bar, share_of_machine(threads) as device:
        task = bar.add_task("layers", total=None)
        return profile_job(
            job,
            clock=time.perf_counter,
            device=device,
            microbatch_size=microbatch_size or job.batch_size,
            threads=threads,
            repeats=REPEATS,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )


def schedule_for(job_file: Path) -> str:
    """The schedule to plan with where none was asked for: a job whose stages update together needs 1f1b."""
    return "1f1b" if load_job(job_file).updates_together else "pipedream"


def train(job_file: Path, plan_file: Path, options: Options) -> None:
    """Start the workers on this machine and wait. However they end before their time, say how to go on."""
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
    done = Checkpoints(options.run, options.resume)
    given = sys.argv[1:] if sys.argv[1:2] == ["train"] else arguments  # the demo's own command cannot go on
    command = partial(command_to_go_on, given, job_file, plan_file)
    try:
        _launch(arguments, len(plan.devices), plan.profile.threads, options.timeout_s)
    except PenstockError as error:
        options.run.note_end(f"failed: {error}")
        error.add_note(done.how_to_go_on(command))
        raise
    except Interrupted as interrupted:
        options.run.note_end("stopped by a signal")
        sys.stderr.write(f"\npenstock: stopped, all workers ended; {done.how_to_go_on(command)}\n")
        raise typer.Exit(interrupted.exit_code) from None


def train_here(job_file: Path, plan_file: Path, options: Options) -> None:
    """Be one worker."""
    done = Checkpoints(options.run, options.resume)

    def work() -> None:
        try:
            train_worker(load_job(job_file), codec.load(Plan, plan_file), options)
        except Exception as error:
            if not is_launched():  # otherwise the launcher says so
                error.add_note(
                    done.how_to_go_on(lambda newest: f"the same command on all hosts, with --resume {newest}")
                )
            raise

    _as_worker(work)


def verify(job_file: Path, plan_file: Path, timeout_s: float) -> Verification:
    plan = _check_input(job_file, plan_file)
    job = load_job(job_file)
    with tempfile.TemporaryDirectory() as directory:
        os.environ["PENSTOCK_VERIFY"] = directory
        arguments = ["verify", str(job_file), str(plan_file), "--timeout", str(timeout_s)]
        try:
            _launch(arguments, len(plan.devices), plan.profile.threads, timeout_s)
        except Interrupted:
            sys.stderr.write("\npenstock: stopped, all workers ended; nothing was compared\n")
            raise
        return compare(job, plan, Path(directory))


def verify_here(job_file: Path, plan_file: Path, timeout_s: float) -> None:
    directory = os.environ.get("PENSTOCK_VERIFY")
    if directory is None:
        raise PlanError("verify starts its own workers; run it without torchrun")
    _as_worker(lambda: verify_worker(load_job(job_file), codec.load(Plan, plan_file), Path(directory), timeout_s))


def measure_cluster(workers: int, output: Path, timeout_s: float, as_json: bool) -> None:
    """Start workers on this machine to measure it; the first of them writes the file and shows what was found."""
    arguments = ["cluster", "measure", "--output", str(output), "--timeout", str(timeout_s)]
    try:
        _launch([*arguments, "--json"] if as_json else arguments, workers, THREADS, timeout_s)
    except Interrupted as interrupted:
        sys.stderr.write("\npenstock: stopped, all workers ended; no cluster file was written\n")
        raise typer.Exit(interrupted.exit_code) from None


def measure_cluster_here(timeout_s: float, quiet: bool, tell: Callable[[Survey], None]) -> None:
    """Be one worker; the first one tells what all have found."""

    def work() -> None:
        columns = (TextColumn("measuring"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        shown = os.environ["RANK"] == "0" and not quiet
        with Progress(*columns, console=Console(stderr=True), transient=True, disable=not shown) as bar:
            task = bar.add_task("", total=None)
            found = survey_cluster(
                timeout_s, lambda done, total, what: bar.update(task, completed=done, total=total, description=what)
            )
        if found is not None:
            tell(found)

    _as_worker(work)


def _check_input(job_file: Path, plan_file: Path) -> Plan:
    """What is wrong with the files is told before any worker starts."""
    job, plan = load_job(job_file), codec.load(Plan, plan_file)
    check_job(job, plan)
    return plan


def _launch(arguments: Sequence[str], workers: int, threads: int, timeout_s: float) -> None:
    launch_workers(["-m", "penstock", *arguments], workers, threads, timeout_s)


def _as_worker(work: Callable[[], None]) -> None:
    """Run a worker's part. Its error goes to the launcher, which tells the first; others keep their traceback."""
    handler = get_error_handler()
    handler.initialize()
    try:
        work()
    except PenstockError as error:
        _report(error, handler)
    except DistError as error:
        lost = WorkerError(f"worker {os.environ['RANK']} has lost the launcher that joins the workers: {error}")
        for note in getattr(error, "__notes__", ()):
            lost.add_note(note)
        _report(lost, handler)
    except Exception as error:
        handler.record_exception(error)
        traceback.print_exc()
        raise typer.Exit(1) from None


def _report(error: PenstockError, handler: ErrorHandler) -> NoReturn:
    handler.record_exception(error)
    if is_launched():
        raise typer.Exit(2) from None
    raise error
