"""One worker process: trains, verifies or measures as its launcher's task says (``python -m penstock.cli.worker``).

Under torchrun the verbs call ``train_under_torchrun`` and ``measure`` instead.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, TypeVar

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, get_error_handler

from penstock import codec, places
from penstock.cli import show
from penstock.cli.answers import print_answer
from penstock.cli.exit_codes import run_process
from penstock.cli.launcher import begin_run
from penstock.cli.resuming import Checkpoints
from penstock.cli.steps import Steps
from penstock.cli.tasks import MeasureTask, Task, TrainTask, VerifyTask, parse_task
from penstock.errors import PenstockError, WorkerError
from penstock.job import Job
from penstock.plan import Plan
from penstock.run import RunDirectory
from penstock.runtime.checkpoint.resume import check_run
from penstock.runtime.process.jobs import load_job
from penstock.runtime.process.launch import is_launched
from penstock.runtime.process.options import TrainOptions
from penstock.runtime.process.survey import survey_cluster
from penstock.runtime.process.train import train_worker
from penstock.runtime.process.verify import verify_worker
from penstock.runtime.worker.assemble import check_job

T = TypeVar("T")


def run_task(task: Task) -> None:
    match task:
        case TrainTask():
            as_worker(lambda: _train(task))
        case VerifyTask():
            as_worker(lambda: _verify(task))
        case MeasureTask():
            measure(task)


def _train(task: TrainTask) -> None:
    """The launcher has checked the input, and holds the lock of the run directory too."""
    train_worker(
        load_job(task.job),
        codec.load(Plan, task.plan),
        task.options,
        lambda *_: places.in_use(RunDirectory(task.run), with_launcher=True),
    )


def _verify(task: VerifyTask) -> None:
    verify_worker(load_job(task.job), codec.load(Plan, task.plan), task.gradients, task.timeout_s)


def train_under_torchrun(job_file: Path, plan_file: Path, run: Path | None, options: TrainOptions) -> RunDirectory:
    """Be one worker of a run without a launcher. Returns the run directory, which worker 0 has opened."""
    begun: list[Checkpoints] = []

    @contextmanager
    def open_run(job: Job, plan: Plan, resume: Path | None) -> Iterator[RunDirectory]:
        with places.open_run(run, job_file.stem) as directory:
            check_job(job, plan)
            check_run(directory, job, resume)
            begin_run(directory, job_file, plan)
            del job  # its model need not stay whole
            yield directory

    def work() -> RunDirectory:
        try:
            return train_worker(
                load_job(job_file),
                codec.load(Plan, plan_file),
                options,
                open_run,
                opened=lambda run: begun.append(Checkpoints(run, options.resume)),
            )
        except Exception as error:
            for checkpoints in begun:
                error.add_note(
                    checkpoints.how_to_go_on(lambda newest: f"the same command on all hosts, with --resume {newest}")
                )
            raise

    return as_worker(work)


def measure(task: MeasureTask) -> None:
    """Be one worker of a survey of the cluster; worker 0 writes the cluster file and prints what all have found."""

    def work() -> None:
        with Steps(quiet=task.as_json or os.environ["RANK"] != "0") as steps:
            steps.begin("measuring: the workers meet")

            def progress(done: int, total: int, what: str) -> None:
                steps.begin(f"measuring {what}")
                steps.part(done, total)

            found = survey_cluster(task.timeout_s, progress)
        if found is not None:
            codec.write_text(found.toml, task.output)
            answer = show.survey_answer(found, task.output)
            print_answer(answer, task.as_json, lambda: show.survey_table(found), f"cluster written to {task.output}")

    as_worker(work)


def as_worker(work: Callable[[], T]) -> T:
    """Run a worker's part. Its error is left for the launcher or torchrun, which reports the one that came first."""
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
        sys.exit(1)


def _report(error: PenstockError, handler: ErrorHandler) -> NoReturn:
    handler.record_exception(error)
    if is_launched():  # the launcher prints it
        sys.exit(2)
    raise error


if __name__ == "__main__":
    run_process(lambda: run_task(parse_task(sys.argv[1:])))
