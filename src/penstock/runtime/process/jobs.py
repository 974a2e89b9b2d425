"""Job files: a user's own Python, run to get a Job. The only code from outside that Penstock ever runs."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from penstock.errors import JobError
from penstock.job import Job, check_job_file, misspelt


def load_job(path: Path) -> Job:
    """Run a job file and call its ``job``. The random seed is the job's own, so every worker builds equal weights."""
    check_job_file(path)
    beside = str(path.absolute().parent)
    if beside not in sys.path:
        sys.path.insert(0, beside)  # a job file may import what lies beside it, as any script may
    spec = importlib.util.spec_from_file_location("penstock_job", path)
    if spec is None or spec.loader is None:
        raise JobError(f"{path}: not a Python file; a job is a .py file with `def job() -> penstock.Job`")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # so that classes defined there can be found by name, as data loaders need
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:  # of a module that it imports
        raise JobError(f"{error.filename}:{error.lineno}: {error.msg}") from None
    make = getattr(module, "job", None)
    if not callable(make):
        raise JobError(f"{path}: has no function `job`; add `def job() -> penstock.Job`")
    return build_job(make, str(path))


def build_job(make: Callable[[], Any], source: str) -> Job:
    """Call a job function with a fixed random state, so that all workers get the same model."""
    torch.manual_seed(0)
    try:
        result = make()
    except TypeError as error:
        said = misspelt(error, source)
        if said is None:
            raise
        raise said from None
    if not isinstance(result, Job):
        raise JobError(f"{source}: job() returned {type(result).__name__}, not penstock.Job; add `return Job(...)`")
    return result
