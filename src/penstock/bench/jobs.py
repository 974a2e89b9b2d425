"""The jobs that benchmarks run, by name, so that worker processes can build the same one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from penstock.errors import JobError
from penstock.job import Job
from penstock.profile import Profile
from penstock.runtime.measure.measure import Progress, profile_job
from penstock.runtime.process.jobs import build_job
from penstock.workloads import demo
from penstock.workloads.models import small_vgg, vgg11
from penstock.workloads.transformers import import_transformers
from penstock.workloads.varied import RecurrentLanguageModel, SmallResNet, SmallUNet, mixture_of_experts


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


def resnet_job() -> Job:
    """Residual, with batch norm."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(256, 3, 32, 32), torch.randint(0, 10, (256,)))
    return Job(model=SmallResNet(), data=data, loss=F.cross_entropy, optimizer=_momentum, batch_size=16)


def unet_job() -> Job:
    """Group norm, and skips across the net."""
    torch.manual_seed(0)
    images = torch.randn(256, 1, 64, 64)
    return Job(model=SmallUNet(), data=TensorDataset(images, images), loss=F.mse_loss, optimizer=_adam, batch_size=8)


def experts_job() -> Job:
    """A mixture of experts chosen by the data, with next to nothing to compute for each."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(1024, 32), torch.randint(0, 10, (1024,)))
    return Job(model=mixture_of_experts(), data=data, loss=F.cross_entropy, optimizer=_adam, batch_size=64)


def lstm_job() -> Job:
    """A recurrent language model."""
    torch.manual_seed(0)
    words = torch.randint(0, 500, (256, 48))
    return Job(
        model=RecurrentLanguageModel(),
        data=TensorDataset(words, words),
        loss=lambda scores, target: F.cross_entropy(scores.flatten(0, 1), target.flatten()),
        optimizer=_adam,
        batch_size=16,
    )


def gpt2_job() -> Job:
    """Hugging Face's GPT-2, small, with its head tied to its embedding; dropout as it comes."""
    transformers = import_transformers()
    torch.manual_seed(0)
    words, length = 1000, 64
    config = transformers.GPT2Config(
        n_layer=6,
        n_embd=192,
        n_head=6,
        vocab_size=words,
        n_positions=length,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    tokens = torch.randint(0, words, (256, length))
    return Job(
        model=transformers.GPT2LMHeadModel(config),
        data=TensorDataset(tokens, tokens),
        loss=lambda output, target: F.cross_entropy(output.logits.flatten(0, 1), target.flatten()),
        optimizer=_adam,
        batch_size=8,
    )


def _momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


JOBS: dict[str, Callable[[], Job]] = {
    "vgg": vgg_job,
    "vgg11": vgg11_job,
    "transformer": demo.job,
    "resnet": resnet_job,
    "gpt2": gpt2_job,
    "unet": unet_job,
    "experts": experts_job,
    "lstm": lstm_job,
    "tiny": tiny_job,
}


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
