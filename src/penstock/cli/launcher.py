"""Starts the workers of a verb on this machine, and waits for them."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import typer

from penstock import codec, places
from penstock.cli.options import command_words
from penstock.cli.resuming import Checkpoints, command_to_go_on
from penstock.cli.steps import Steps
from penstock.cli.tasks import MeasureTask, Task, TrainTask, VerifyTask, command_of
from penstock.errors import PenstockError
from penstock.plan import Plan
from penstock.provenance import provenance_of
from penstock.run import RunDirectory
from penstock.runtime.checkpoint.resume import check_run
from penstock.runtime.process.jobs import load_job
from penstock.runtime.process.launch import Interrupted, launch_workers
from penstock.runtime.process.options import TrainOptions
from penstock.runtime.process.scalars import check_tensorboard
from penstock.runtime.process.survey import THREADS
from penstock.runtime.process.verify import Verification, compare
from penstock.runtime.worker.assemble import check_job


@contextmanager
def open_run(job_file: Path, plan_file: Path | None, run: Path | None, resume: Path | None) -> Iterator[RunDirectory]:
    """The run directory ``run``, or a new one, locked. Raises what is wrong with the input before the run begins."""
    with places.open_run(run, job_file.stem) as directory:
        _check_input(job_file, plan_file, directory, resume)
        yield directory


def _check_input(job_file: Path, plan_file: Path | None, run: RunDirectory, resume: Path | None) -> None:
    job = load_job(job_file)  # a local of this function alone: it may be large, and the run long
    if plan_file is not None:
        check_job(job, codec.load(Plan, plan_file))
    check_run(run, job, resume)


def begin_run(run: RunDirectory, job_file: Path, plan: Plan) -> None:
    """Record the plan and where the run comes from, and make it the latest run."""
    run.begin(plan, provenance_of(job_file))
    places.make_latest(run)


def train(job_file: Path, plan: Plan, run: RunDirectory, options: TrainOptions, plan_file: Path | None = None) -> None:
    """Train on this machine. If the run ends early, by an error or a signal, say how to go on."""
    if options.tensorboard is not None:
        check_tensorboard()
    begin_run(run, job_file, plan)
    checkpoints = Checkpoints(run, options.resume)
    command = partial(command_to_go_on, _train_command(job_file, run, options), job_file, plan_file or run.plan)
    if not options.quiet:
        typer.echo(f"starting {len(plan.devices)} workers", err=True)
    task = TrainTask(job=job_file, plan=run.plan, run=run.path, options=options)
    try:
        _launch(task, len(plan.devices), plan.profile.threads, options.timeout_s)
    except PenstockError as error:
        run.note_end(f"failed: {error}")
        error.add_note(checkpoints.how_to_go_on(command))
        raise
    except Interrupted as interrupted:
        run.note_end("stopped by a signal")
        sys.stderr.write(f"\npenstock: stopped, all workers ended; {checkpoints.how_to_go_on(command)}\n")
        raise typer.Exit(interrupted.exit_code) from None


def _train_command(job_file: Path, run: RunDirectory, options: TrainOptions) -> Sequence[str]:
    """The user's own arguments, or those that would do the same where the verb is another (``penstock demo``)."""
    if sys.argv[1:2] == ["train"]:
        return sys.argv[1:]
    return ["train", str(job_file), str(run.plan), "--run-dir", str(run.path), *command_words(options)]


def verify(job_file: Path, plan_file: Path, timeout_s: float, steps: Steps) -> Verification:
    """Run one minibatch on workers of this machine and compare their gradients with those of one process."""
    steps.begin(f"loading {job_file}")
    plan = codec.load(Plan, plan_file)
    check_job(load_job(job_file), plan)
    with tempfile.TemporaryDirectory() as directory:
        task = VerifyTask(job=job_file, plan=plan_file, gradients=Path(directory), timeout_s=timeout_s)
        steps.begin(f"running a minibatch on {len(plan.devices)} workers")
        try:
            _launch(task, len(plan.devices), plan.profile.threads, timeout_s)
        except Interrupted as interrupted:
            steps.end()
            sys.stderr.write("\npenstock: stopped, all workers ended; nothing was compared, and nothing is kept\n")
            raise typer.Exit(interrupted.exit_code) from None
        steps.begin("running the same minibatch in one process")
        return compare(load_job(job_file), plan, Path(directory))


def measure_cluster(workers: int, task: MeasureTask) -> None:
    """Measure this machine with so many workers; worker 0 writes the cluster file and prints the answer."""
    try:
        _launch(task, workers, THREADS, task.timeout_s)
    except Interrupted as interrupted:
        sys.stderr.write("\npenstock: stopped, all workers ended; no cluster file was written\n")
        raise typer.Exit(interrupted.exit_code) from None


def _launch(task: Task, workers: int, threads: int, timeout_s: float) -> None:
    launch_workers(command_of(task), workers, threads, timeout_s)
