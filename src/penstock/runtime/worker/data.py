"""Microbatches from a job's data, read by whichever stage needs them and alike at all of them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import Subset, TensorDataset, default_collate

from penstock.errors import JobError
from penstock.job import Job
from penstock.runtime.capture.randomness import generators_put_back, mixed, seed_all
from penstock.sampling import Epoch

_PROBES, _PROBE_SAMPLES = 8, 2
_COLLATE = -1


def load_batch(job: Job, indices: Iterable[int], seed: int, number: int = 0) -> tuple[Any, Any]:
    """The inputs and target of these samples, as batch ``number``.

    A random transform of a sample draws by ``seed`` and the sample's index, from torch's, Python's or numpy's
    generator; ``Job.collate`` draws by ``seed`` and ``number``. So every stage that reads a batch gets the same, and a
    sample does not depend on the batch that it falls into. The generators are put back.
    """
    stored = _is_stored(job.data)
    with nullcontext() if stored and job.collate is None else generators_put_back():
        samples = [job.data[i] for i in indices] if stored else [_sample(job, i, seed) for i in indices]
        if job.collate is None:
            batch = default_collate(samples)
        else:
            seed_all(mixed(seed, number, _COLLATE))
            batch = job.collate(samples)
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise JobError(
            f"a batch of the job's data is {type(batch).__name__}, not (inputs, target); "
            "have the dataset return pairs, or give Job.collate"
        )
    return batch[0], batch[1]


def _is_stored(data: Any) -> bool:
    """Whether the samples are there already, so that to take one draws no random number."""
    return type(data) in (list, tuple, TensorDataset) or (type(data) is Subset and _is_stored(data.dataset))


def _sample(job: Job, index: int, seed: int) -> Any:
    seed_all(mixed(seed, index))
    return job.data[index]


def inputs_of_other_shapes(job: Job, inputs: Any) -> list[Any]:
    """Inputs of small batches from all over the data that differ from these in more than the number of samples."""
    found = {_sizes(inputs): inputs}
    last = len(job.data) - _PROBE_SAMPLES
    for start in sorted({max(0, last * probe // (_PROBES - 1)) for probe in range(_PROBES)}):
        other, _ = load_batch(job, range(start, min(start + _PROBE_SAMPLES, len(job.data))), seed=0)
        found.setdefault(_sizes(other), other)
    return list(found.values())[1:]


def _sizes(inputs: Any) -> tuple[torch.Size, ...]:
    return tuple(leaf.shape[1:] for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor))


def load_microbatch(job: Job, epoch: Epoch, microbatch: int) -> tuple[Any, Any]:
    seed = mixed(epoch.seed, epoch.number)
    return load_batch(job, epoch.indices(microbatch), seed, epoch.first_microbatch + microbatch)


def microbatch_key(epoch: Epoch, microbatch: int) -> int:
    """By which the layers draw random numbers for a microbatch, wherever it runs."""
    return mixed(epoch.seed, epoch.number, epoch.first_microbatch + microbatch)


def to_device(tree: Any, device: torch.device) -> Any:
    return pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, tree)
