"""The verbs that need torch: profile here, or start and be the workers of a plan."""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, get_error_handler

from penstock import codec, places
from penstock.cli.going_on import Checkpoints, command_to_go_on
from penstock.errors import PenstockError, PlanError, WorkerError
from penstock.job import Job
from penstock.plan import Plan
from penstock.profile import Profile
from penstock.provenance import provenance_of
from penstock.run import RunDirectory
from penstock.runtime.assemble import check_job
from penstock.runtime.jobs import load_job
from penstock.runtime.launch import Interrupted, is_launched, is_worker, launch_workers
from penstock.runtime.machine import share_of_machine
from penstock.runtime.measure import profile_job
from penstock.runtime.resume import check_run
from penstock.runtime.scalars import check_tensorboard
from penstock.runtime.survey import THREADS, survey_cluster
from penstock.runtime.train import OpenRun, Options, train_worker
from penstock.runtime.verify import Verification, compare, verify_worker
from penstock.survey import Survey

__all__ = [
    "Options",
    "check_plan",
    "is_launched",
    "is_worker",
    "measure_cluster",
    "measure_cluster_here",
    "open_run",
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


@contextmanager
def open_run(job_file: Path, plan_file: Path | None, run: Path | None, resume: Path | None) -> Iterator[RunDirectory]:
    """The directory of a run that is about to begin: ``run``, or a new one. Wrong input is told before it begins."""
    with places.open_run(run, job_file.stem) as directory:
        _check_run(job_file, plan_file, directory, resume)
        yield directory


def _check_run(job_file: Path, plan_file: Path | None, run: RunDirectory, resume: Path | None) -> None:
    job = load_job(job_file)  # not kept: it may be large, and the run long
    if plan_file is not None:
        check_job(job, codec.load(Plan, plan_file))
    check_run(run, job, resume)


def train(job_file: Path, plan: Plan, run: RunDirectory, options: Options, plan_file: Path | None = None) -> None:
    """Start the workers on this machine and wait. However they end before their time, say how to go on."""
    if options.tensorboard is not None:
        check_tensorboard()
    _begin(run, job_file, plan)
    arguments = ["train", str(job_file), str(run.plan), "--run-dir", str(run.path)]
    arguments += ["--timeout", str(options.timeout_s), "--checkpoint-every", str(options.checkpoint_every)]
    arguments += ["--keep-checkpoints", str(options.keep_checkpoints)]
    if options.resume is not None:
        arguments += ["--resume", str(options.resume)]
    if options.init is not None:
        arguments += ["--init", str(options.init)]
    if options.tensorboard is not None:
        arguments += ["--tensorboard", str(options.tensorboard)]
    if options.quiet:
        arguments.append("--json")
    done = Checkpoints(run, options.resume)
    given = sys.argv[1:] if sys.argv[1:2] == ["train"] else arguments  # the demo's own command cannot go on
    command = partial(command_to_go_on, given, job_file, plan_file or run.plan)
    try:
        _launch(arguments, len(plan.devices), plan.profile.threads, options.timeout_s)
    except PenstockError as error:
        run.note_end(f"failed: {error}")
        error.add_note(done.how_to_go_on(command))
        raise
    except Interrupted as interrupted:
        run.note_end("stopped by a signal")
        sys.stderr.write(f"\npenstock: stopped, all workers ended; {done.how_to_go_on(command)}\n")
        raise typer.Exit(interrupted.exit_code) from None


def _begin(run: RunDirectory, job_file: Path, plan: Plan) -> None:
    run.begin(plan, provenance_of(job_file))
    places.make_latest(run)


def train_here(job_file: Path, plan_file: Path, run: Path | None, options: Options) -> RunDirectory:
    """Be one worker; returns where the run is kept."""
    open_here: OpenRun = partial(_open_at_worker_0, job_file, run)
    if is_launched() and run is not None:
        open_here = partial(_open_with_launcher, run)
    opened: list[Checkpoints] = []

    def work() -> None:
        try:
            train_worker(
                load_job(job_file),
                codec.load(Plan, plan_file),
                options,
                open_here,
                opened=lambda directory: opened.append(Checkpoints(directory, options.resume)),
            )
        except Exception as error:
            for done in () if is_launched() else opened:  # the launcher says so itself
                error.add_note(
                    done.how_to_go_on(lambda newest: f"the same command on all hosts, with --resume {newest}")
                )
            raise

    _as_worker(work)
    return opened[0].run


def _open_with_launcher(run: Path, *_: object) -> AbstractContextManager[RunDirectory]:
    """The launcher has looked at everything, and holds the directory too."""
    return places.in_use(RunDirectory(run), with_launcher=True)


@contextmanager
def _open_at_worker_0(
    job_file: Path, run: Path | None, job: Job, plan: Plan, resume: Path | None
) -> Iterator[RunDirectory]:
    """Under torchrun."""
    with places.open_run(run, job_file.stem) as directory:
        check_job(job, plan)
        check_run(directory, job, resume)
        _begin(directory, job_file, plan)
        del job  # its model need not stay whole
        yield directory


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


def check_plan(job_file: Path, plan: Plan) -> None:
    check_job(load_job(job_file), plan)


def _check_input(job_file: Path, plan_file: Path) -> Plan:
    """What is wrong with the files is told before any worker starts."""
    plan = codec.load(Plan, plan_file)
    check_plan(job_file, plan)
    return plan


def _launch(arguments: Sequence[str], workers: int, threads: int, timeout_s: float) -> None:
    launch_workers(["-m", "penstock", *arguments], workers, threads, timeout_s)


def _as_worker(work: Callable[[], object]) -> None:
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
