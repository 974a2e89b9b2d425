"""Which checkpoint a run may go on from, and which directory it may write its own to."""

from __future__ import annotations

from pathlib import Path

from penstock.errors import JobError, PenstockError
from penstock.job import Job
from penstock.run import RunDirectory
from penstock.runtime.capture.blueprint import blueprint_of
from penstock.runtime.capture.build_replay import CPU
from penstock.runtime.checkpoint.checkpoint import Tensors, clean, read_index
from penstock.runtime.checkpoint.state import state_dict_names


def check_run(run: RunDirectory, job: Job, resume: Path | None) -> None:
    """Raise if the run would go on from a checkpoint of another job, or write to a directory with another run's.

    A directory with checkpoints takes only a run that goes on from one of them: any other would replace and remove
    them. Call it with the directory locked, before anything is written there.
    """
    clean(run.checkpoints)
    if resume is not None:
        check_checkpoint(resume, job)
    complete = run.complete_checkpoints()
    if complete and (resume is None or resume.resolve().parent != run.checkpoints.resolve()):
        newest = complete[-1]
        writer = read_index(newest).job
        raise JobError(
            f"{run.path}: has checkpoints of {f'a run of job {writer}' if writer else 'an earlier run'}, the newest "
            f"{newest.name}; go on from it with --resume {newest}, or give another --run-dir"
        )
    for other in complete:
        try:
            check_checkpoint(other, job)
        except PenstockError as error:
            raise type(error)(f"{error}; a run in {run.path} would remove it: give another --run-dir") from None


def check_checkpoint(directory: Path, job: Job) -> None:
    """Raise unless the checkpoint is of this job's model, and its place in the data is a place in this job's."""
    index, model = read_index(directory), blueprint_of(job, CPU).model
    names, held = state_dict_names(model), model.state_dict(keep_vars=True)
    index.check_model(names, directory)
    Tensors(directory).check({f"model/{name}": held[key] for key, name in names.items()})
    index.check_job(job, directory)
