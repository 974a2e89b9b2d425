"""Batch norm over replicas: that of one process on their microbatches together."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from in_threads import even_plan, only_stage, profile, recomputing, run_in_threads, uneven_plan
from models import make_job
from penstock import Job
from penstock.errors import JobError, PlanError
from penstock.plan import Plan
from penstock.runtime.process.verify import compare, save_gradients
from penstock.runtime.worker.assemble import check_job
from test_worker import check_same_weights, single_process


def normed() -> nn.Sequential:
    """A batch norm in each half, of two and of one dimension, one of them without weights."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 8),
        nn.BatchNorm1d(8, affine=False),
        nn.Tanh(),
        nn.BatchNorm1d(8, track_running_stats=False),
        nn.Linear(8, 4),
    )


def normed_job(sync: bool = True, samples: int = 24, **fields: Any) -> Job:
    torch.manual_seed(0)
    data = list(zip(torch.randn(samples, 1, 4, 4) + 3, torch.randint(0, 4, (samples,)), strict=True))
    job = make_job("conv", batch_size=8, epochs=2)
    return replace(job, model=normed(), data=data, loss=F.cross_entropy, sync_batch_norm=sync, **fields)


@functools.cache
def plan_of(replicas: tuple[int, ...], schedule: str, microbatches: int) -> Plan:
    return even_plan(profile(normed_job()), replicas, schedule, microbatches)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("replicas", "microbatches"), [((2,), 2), ((2,), 4), ((4,), 4), ((2, 2), 4)], ids=str)
def test_synchronised_batch_norm_is_that_of_one_process_on_the_union(
    replicas: tuple[int, ...], microbatches: int, schedule: str
) -> None:
    """Weights and running statistics, where one process runs the microbatches of all replicas as one."""
    job = normed_job(sync=False)
    union = even_plan(profile(job), (1,), schedule, microbatches // replicas[0])
    expected = single_process(job, union)
    assemblies = run_in_threads(plan_of(replicas, schedule, microbatches), normed_job)
    check_same_weights(assemblies, expected)
    statistics = dict(job.model.named_buffers())
    for assembly in assemblies:
        for name, buffer in only_stage(assembly).module.section.buffers.items():
            torch.testing.assert_close(buffer, statistics[name], rtol=1e-4, atol=1e-5)
    apart = run_in_threads(plan_of(replicas, schedule, microbatches), functools.partial(normed_job, sync=False))
    with pytest.raises(AssertionError):
        check_same_weights(apart, expected)


def test_a_stage_that_recomputes_meets_again() -> None:
    plan = plan_of((2, 2), "1f1b", 4)
    kept, again = (run_in_threads(each, normed_job) for each in (plan, recomputing(plan)))
    for one, two in zip(kept, again, strict=True):
        for name, parameter in only_stage(one).weights.parameters.items():
            assert torch.equal(parameter, only_stage(two).weights.parameters[name])


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_verify_compares_with_the_union(precision: Any, tmp_path: Path) -> None:
    """Ten samples in four microbatches: three, three, two and two."""
    make = functools.partial(normed_job, batch_size=10, samples=10, precision=precision)
    plan = even_plan(profile(make()), (2, 2), "1f1b", 4)
    run_in_threads(plan, make, work=lambda assembly: save_gradients(assembly, tmp_path))
    assert compare(make(), plan, tmp_path).passed
    assert not compare(replace(make(), sync_batch_norm=False), plan, tmp_path).passed


@pytest.mark.parametrize(
    ("shares", "schedule", "microbatches", "message"),
    [
        (((1,), (1, 1)), "1f1b", 4, r"1f1b and \[1, 2\] replicas"),
        (((2, 1),), "1f1b", 3, "with equal shares"),
        (((1, 1),), "pipedream", 1, "needs a synchronous schedule"),
        (((1, 1),), "1f1b", 3, "each of 2 replicas, but a minibatch has 3"),
    ],
)
def test_plans_whose_replicas_are_not_in_lock_step_are_refused(
    shares: Any, schedule: str, microbatches: int, message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        check_job(normed_job(), uneven_plan(profile(normed_job()), shares, schedule, microbatches))


def test_a_last_minibatch_that_replicas_cannot_share_is_refused() -> None:
    plan = plan_of((2,), "1f1b", 2)
    with pytest.raises(PlanError, match="but a minibatch has 1;"):
        check_job(normed_job(samples=25), plan)


def test_a_model_of_whole_modules_is_refused() -> None:
    class Undecided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(6)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x) if float(x.detach().sum()) > 0 else self.norm(-x)

    def make() -> Job:
        torch.manual_seed(0)
        return replace(make_job("undecided", samples=8), model=Undecided(), sync_batch_norm=True)

    with pytest.raises(JobError, match=r"needs the model's operations, which torch\.export gives"):
        run_in_threads(even_plan(profile(make()), (2,), "1f1b", 2), make)
