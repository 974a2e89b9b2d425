"""Do the measured layers add up to the model? Sum of layer times against the whole step, interleaved."""

from __future__ import annotations

import statistics
import time

import torch

from penstock.bench.jobs import JOBS, bench_job
from penstock.bench.rows import Row
from penstock.job import Job
from penstock.profile import Profile
from penstock.runtime.capture import call_arguments
from penstock.runtime.data import load_batch
from penstock.runtime.machine import share_of_machine
from penstock.runtime.measure import profile_job

ROUNDS = 5
STEPS = 10
TOLERANCE = 0.15


def run() -> list[Row]:
    with share_of_machine(threads=1):
        return [_case(name) for name in JOBS]


def _case(name: str) -> Row:
    job = bench_job(name)
    sums, wholes = [], []
    for _ in range(ROUNDS):
        sums.append(_sum_s(_profile(job)))
        wholes.append(_whole_step_s(job))
    ratio = statistics.median(sums) / statistics.median(wholes)
    return Row(
        case=name,
        metric=f"sum of layer seconds / whole step (within {TOLERANCE:.0%})",
        value=statistics.median(sums),
        baseline=statistics.median(wholes),
        ratio=ratio,
        target=1.0,
        met=abs(ratio - 1) <= TOLERANCE,
    )


def _profile(job: Job) -> Profile:
    return profile_job(
        job,
        clock=time.perf_counter,
        device=torch.device("cpu"),
        microbatch_size=job.batch_size,
        threads=1,
        repeats=5,
        progress=lambda done, total: None,
    )


def _sum_s(profile: Profile) -> float:
    rows = next(iter(profile.seconds.values()))
    return sum(row.forward_s + row.backward_input_s + row.backward_weight_s + row.update_s for row in rows)


def _whole_step_s(job: Job) -> float:
    """The median of ordinary training steps of the unmodified model."""
    inputs, target = load_batch(job, range(job.batch_size), seed=0)
    args, kwargs = call_arguments(inputs)
    optimizer = job.optimizer(list(job.model.named_parameters()))
    job.model.train()
    times = []
    for _ in range(STEPS):
        start_s = time.perf_counter()
        torch.autograd.backward(job.loss(job.model(*args, **kwargs), target))
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start_s)
    return statistics.median(times[2:])
