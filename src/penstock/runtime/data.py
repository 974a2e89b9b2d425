"""Microbatches from a job's data, read by whichever stage needs them and alike at all of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import default_collate

from penstock.errors import JobError
from penstock.job import Job
from penstock.sampling import Epoch

_PROBES, _PROBE_SAMPLES = 8, 2


def load_batch(job: Job, indices: Iterable[int], seed: int) -> tuple[Any, Any]:
    """The inputs and target of these samples.

    A random transform draws from ``seed``, so that the stage that reads inputs and the one that reads targets see
    the same samples.
    """
    generator = torch.default_generator
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        samples = [job.data[index] for index in indices]
        batch = (job.collate or default_collate)(samples)
    finally:
        generator.set_state(before)
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise JobError(
            f"a batch of the job's data is {type(batch).__name__}, not (inputs, target); "
            "have the dataset return pairs, or give Job.collate"
        )
    return batch[0], batch[1]


def inputs_of_other_shapes(job: Job, inputs: Any) -> list[Any]:
    """Inputs of small batches from all over the data that differ from these in more than the number of samples."""
    found = {_sizes(inputs): inputs}
    last = len(job.data) - _PROBE_SAMPLES
    for start in sorted({max(0, last * probe // (_PROBES - 1)) for probe in range(_PROBES)}):
        other, _ = load_batch(job, range(start, min(start + _PROBE_SAMPLES, len(job.data))), seed=start)
        found.setdefault(_sizes(other), other)
    return list(found.values())[1:]


def _sizes(inputs: Any) -> tuple[torch.Size, ...]:
    return tuple(leaf.shape[1:] for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor))


def load_microbatch(job: Job, epoch: Epoch, microbatch: int) -> tuple[Any, Any]:
    return load_batch(job, epoch.indices(microbatch), microbatch_seed(epoch, microbatch))


def microbatch_seed(epoch: Epoch, microbatch: int, *user: int) -> int:
    """Of the random numbers that go with a microbatch, for its samples or for another user, wherever it runs."""
    numbers = (epoch.seed, epoch.number, epoch.first_microbatch + microbatch, *user)
    return hash(numbers) % 2**63  # of integers only: the same in every process


def seed_random(seed: int, device: torch.device) -> None:
    """As torch.manual_seed does, for the one device: that takes 1 µs, and all devices take 80."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
