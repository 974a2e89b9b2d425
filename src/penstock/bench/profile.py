"""Do the measured layers add up to the model? Sum of layer times against the whole step, interleaved."""

from __future__ import annotations

import statistics
import time

import torch

from penstock.bench.jobs import JOBS, bench_job, bench_profile
from penstock.bench.rows import Findings, Row
from penstock.cluster import ANY_KIND
from penstock.job import Job
from penstock.profile import Profile
from penstock.runtime.blueprint import blueprint_of
from penstock.runtime.capture import call_arguments
from penstock.runtime.data import load_batch
from penstock.runtime.machine import share_of_machine
from penstock.runtime.optimizers import Optimizers
from penstock.runtime.recording import CPU

ROUNDS = 5
STEPS = 10
TOLERANCE = 0.15


def run() -> Findings:
    with share_of_machine(threads=1):
        return Findings([_case(name) for name in JOBS])


def _case(name: str) -> Row:
    job = bench_job(name)
    sums, wholes = [], []
    for _ in range(ROUNDS):
        sums.append(_sum_s(bench_profile(job, repeats=5)))
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


def _sum_s(profile: Profile) -> float:
    update_s = sum(row.update_s for row in profile.seconds_on(ANY_KIND))
    return sum(profile.compute_s(ANY_KIND)) + update_s


def _whole_step_s(job: Job) -> float:
    """The median of ordinary training steps of the unmodified model."""
    inputs, target = load_batch(job, range(job.batch_size), seed=0)
    args, kwargs = call_arguments(inputs)
    model = blueprint_of(job, CPU).model
    optimizers = Optimizers(job.optimizer, None, list(model.named_parameters()))
    model.train()
    times = []
    for _ in range(STEPS):
        start_s = time.perf_counter()
        torch.autograd.backward(job.loss(model(*args, **kwargs), target))
        optimizers.step(0)
        model.zero_grad()
        times.append(time.perf_counter() - start_s)
    return statistics.median(times[2:])
