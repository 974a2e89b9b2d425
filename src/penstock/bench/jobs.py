"""The jobs that benchmarks run, by name, so that worker processes can build the same one."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from penstock.errors import JobError
from penstock.job import Job
from penstock.profile import Profile
from penstock.runtime.jobs import build_job
from penstock.runtime.measure import Progress, profile_job
from penstock.workloads import demo
from penstock.workloads.models import small_vgg, vgg11


def vgg_job() -> Job:
    """VGG-like, 7.5 M parameters."""
    return _image_job(small_vgg())


def vgg11_job() -> Job:
    """VGG-11, 28 M parameters."""
    return _image_job(vgg11())


def _image_job(model: torch.nn.Module) -> Job:
    """With random images of CIFAR's size."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(32, 3, 32, 32, generator=generator)
    labels = torch.randint(0, 10, (32,), generator=generator)
    return Job(
        model=model,
        data=torch.utils.data.TensorDataset(images, labels),
        loss=F.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
        batch_size=32,
    )


def tiny_job() -> Job:
    """Layers that take next to no time."""
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(64, 8, generator=generator)
    return Job(
        model=torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4))),
        data=torch.utils.data.TensorDataset(vectors, vectors),
        loss=F.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        batch_size=64,
    )


JOBS: dict[str, Callable[[], Job]] = {"vgg": vgg_job, "vgg11": vgg11_job, "transformer": demo.job, "tiny": tiny_job}


def bench_job(name: str) -> Job:
    if name not in JOBS:
        raise JobError(f"benchmark job {name!r} is unknown; choose one of {', '.join(JOBS)}")
    return build_job(JOBS[name], name)


def bench_profile(
    job: Job, *, repeats: int, microbatches: int = 1, progress: Progress = lambda done, total: None
) -> Profile:
    """A job's profile as one CPU worker of one thread sees it, with so many microbatches to a minibatch; call it with
    such a share of the machine."""
    return profile_job(
        job,
        clock=time.perf_counter,
        device=torch.device("cpu"),
        microbatch_size=job.batch_size // microbatches,
        threads=1,
        repeats=repeats,
        progress=progress,
    )
