"""Microbatches from a job's data, read by whichever stage needs them and alike at all of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data import default_collate

from penstock.errors import JobError
from penstock.job import Job
from penstock.sampling import Epoch


def load_batch(job: Job, indices: Iterable[int], seed: int) -> tuple[Any, Any]:
    """The inputs and target of these samples.

    A random transform draws from ``seed``, so that the stage that reads inputs and the one that reads targets see
    the same samples.
    """
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        samples = [job.data[index] for index in indices]
        batch = (job.collate or default_collate)(samples)
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise JobError(
            f"a batch of the job's data is {type(batch).__name__}, not (inputs, target); "
            "have the dataset return pairs, or give Job.collate"
        )
    return batch[0], batch[1]


def load_microbatch(job: Job, epoch: Epoch, microbatch: int) -> tuple[Any, Any]:
    seed = (
        hash((epoch.seed, epoch.number, epoch.first_microbatch + microbatch)) % 2**63
    )  # of integers only: the same in every process
    return load_batch(job, epoch.indices(microbatch), seed)
