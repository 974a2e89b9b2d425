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
from typing import NoReturn, TypeVar

import typer
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, get_error_handler

from penstock import codec, places
from penstock.cli.going_on import Checkpoints, command_to_go_on
from penstock.cli.steps import Steps
from penstock.cluster import Cluster
from penstock.errors import PenstockError, PlanError, WorkerError
from penstock.job import Job
from penstock.plan import Plan
from penstock.planner import make_plan
from penstock.profile import Profile
from penstock.provenance import provenance_of
from penstock.run import RunDirectory
from penstock.runtime.checkpoint.resume import check_run
from penstock.runtime.machine.machine import share_of_machine
from penstock.runtime.measure.measure import profile_job
from penstock.runtime.process.jobs import load_job
from penstock.runtime.process.launch import Interrupted, is_launched, is_worker, launch_workers
from penstock.runtime.process.scalars import check_tensorboard
from penstock.runtime.process.survey import THREADS, survey_cluster
from penstock.runtime.process.train import Options, train_worker
from penstock.runtime.process.verify import Verification, compare, verify_worker
from penstock.runtime.worker.assemble import check_job
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
    "profile_and_plan",
    "train",
    "train_here",
    "verify",
    "verify_here",
]

T = TypeVar("T")

REPEATS = 6


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
    if not options.quiet:
        typer.echo(f"starting {len(plan.devices)} workers", err=True)
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
    """Be one worker. Returns the directory of the run."""
    launched = is_launched()
    open_here = partial(_open_with_launcher if launched else _open_at_worker_0, job_file, run)
    found: list[Checkpoints] = []

    def work() -> RunDirectory:
        try:
            return train_worker(
                load_job(job_file),
                codec.load(Plan, plan_file),
                options,
                open_here,
                opened=lambda run: found.append(Checkpoints(run, options.resume)),
            )
        except Exception as error:
            for done in () if launched else found:  # otherwise the launcher says so
                error.add_note(
                    done.how_to_go_on(lambda newest: f"the same command on all hosts, with --resume {newest}")
                )
            raise

    return _as_worker(work)


def _open_with_launcher(job_file: Path, run: Path | None, *_: object) -> AbstractContextManager[RunDirectory]:
    """The launcher has looked at everything, and holds the directory too."""
    assert run is not None  # the launcher gives it
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


def verify(job_file: Path, plan_file: Path, timeout_s: float, steps: Steps) -> Verification:
    steps.begin(f"loading {job_file}")
    plan = _check_input(job_file, plan_file)
    with tempfile.TemporaryDirectory() as directory:
        os.environ["PENSTOCK_VERIFY"] = directory
        arguments = ["verify", str(job_file), str(plan_file), "--timeout", str(timeout_s)]
        steps.begin(f"running a minibatch on {len(plan.devices)} workers")
        try:
            _launch(arguments, len(plan.devices), plan.profile.threads, timeout_s)
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
        _launch([*arguments, "--json"] if as_json else arguments, workers, THREADS, timeout_s)
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


def check_plan(job_file: Path, plan: Plan) -> None:
    check_job(load_job(job_file), plan)


def _check_input(job_file: Path, plan_file: Path) -> Plan:
    """What is wrong with the files is told before any worker starts."""
    plan = codec.load(Plan, plan_file)
    check_plan(job_file, plan)
    return plan


def _launch(arguments: Sequence[str], workers: int, threads: int, timeout_s: float) -> None:
    launch_workers(["-m", "penstock", *arguments], workers, threads, timeout_s)


def _as_worker(work: Callable[[], T]) -> T:
    """Run a worker's part. Its error goes to the launcher, which tells the first; others keep their traceback."""
    handler = get_error_handler()
    handler.initialize()
    try:
        return work()
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
