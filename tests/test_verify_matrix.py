"""`penstock verify` over every schedule, replication, tie and accumulation: the gradients of one process. With it the
cases in which other pipelines are known to go wrong, each by name."""

from __future__ import annotations

import functools
import gc
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from builders import LOOPED, SYNCHRONOUS, TRAINING
from in_threads import (
    check_same_gradients,
    even_plan,
    looped_plan,
    profile,
    profile_of,
    run_in_threads,
    with_batch_size,
)
from models import make_job
from penstock import Job
from penstock.errors import ScheduleError
from penstock.plan import Plan
from penstock.runtime.worker.assemble import Assembly, make_epoch
from penstock.schedule import check, family
from penstock.simulate import simulate
from test_worker import check_same_weights, single_process

REPLICATIONS = [(1,), (1, 2), (2, 1), (1, 3), (3, 1), (2, 3)]
MODELS = ["conv", "tied"]
"""without a tie, and with one across stages"""
SUMMED_IN_ANOTHER_ORDER = 5e-5
"""the gradient of a bias before batch norm, which is nothing but rounding"""


def replicas_id(replicas: Sequence[int]) -> str:
    return "-".join(map(str, replicas))


@pytest.mark.parametrize("replicas", REPLICATIONS, ids=replicas_id)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("schedule", TRAINING)
def test_every_schedule_on_every_replication(schedule: str, name: str, replicas: tuple[int, ...]) -> None:
    for accumulate in (1, 3) if family(schedule).accumulates else (1,):
        plan = even_plan(profile_of(name), replicas, schedule, accumulate)
        if plan.is_asynchronous and plan.pipeline.ties and len(set(replicas)) > 1:
            with pytest.raises(ScheduleError, match="share a weight but update after different rounds"):
                plan.schedule_for([accumulate] * 4)
            continue
        check_same_gradients(plan, functools.partial(make_job, name), SUMMED_IN_ANOTHER_ORDER)


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("schedule", LOOPED)
def test_every_schedule_with_several_stages_on_a_worker(schedule: str, name: str, replicas: int) -> None:
    for accumulate in (1, 3):
        plan = looped_plan(profile_of(name), 2, 2, schedule, accumulate, replicas)
        check_same_gradients(plan, functools.partial(make_job, name), SUMMED_IN_ANOTHER_ORDER)


def test_a_schedule_from_a_file() -> None:
    lines = ("0F0 0F1 0I0 0F2 0W0 0I1 0I2 0W1 0W2", "1F0 1B0 1F1 1I1 1F2 1W1 1B2")
    plan = replace(even_plan(profile_of("tied"), (1, 1), "1f1b", 3), schedule="custom", custom=lines)
    check(plan.schedule_for([3, 3, 2]))
    check_same_gradients(plan, functools.partial(make_job, "tied"))
    make = functools.partial(make_job, "tied", samples=11, epochs=2)
    check_same_weights(run_in_threads(plan, make), single_process(make(), plan))


# --- where torch.distributed.pipelining is wrong or fails; models with rotary embeddings are in test_hugging_face.py


def test_tied_embedding_and_head_in_different_stages() -> None:
    plan = even_plan(profile_of("tied"), (1, 1, 1, 1), "1f1b", 2)
    assert plan.pipeline.ties
    check_same_gradients(plan, functools.partial(make_job, "tied"))


def test_a_value_with_consumers_in_two_later_stages() -> None:
    plan = even_plan(profile_of("branches"), (1, 1, 1, 1), "gpipe", 2)
    assert any(len(readers) > 1 for readers in plan.pipeline.read_by)
    check_same_gradients(plan, functools.partial(make_job, "branches"))


def test_zero_bubble_there_and_back_with_replicas_sums_their_gradients() -> None:
    plan = looped_plan(profile_of("conv"), 2, 2, "zb-v", 2, replicas=2)
    check_same_gradients(plan, functools.partial(make_job, "conv"), SUMMED_IN_ANOTHER_ORDER)


@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_accumulating_over_several_microbatches_is_one_larger_batch(schedule: str) -> None:
    profile = with_batch_size(profile_of("tied"), 9)
    make = functools.partial(make_job, "tied", samples=9, batch_size=9)
    weights = []
    for microbatches in (1, 3, 9):
        plan = even_plan(profile, (1, 1), schedule, microbatches)
        assemblies = run_in_threads(plan, make)
        weights.append(
            {n: p for a in assemblies for s in a.worker.stages.values() for n, p in s.weights.parameters.items()}
        )
    for other in weights[1:]:
        for name, parameter in weights[0].items():
            torch.testing.assert_close(other[name].data, parameter.data, rtol=1e-4, atol=1e-6)


def test_a_larger_batch_than_the_first_and_a_smaller_last_one() -> None:
    """Two batches of other sizes through one set of workers."""
    profile = with_batch_size(profile_of("conv"), 8)
    plan = even_plan(profile, (1, 2), "1f1b", 3)
    make = functools.partial(make_job, "conv", samples=29, batch_size=8)

    def small_first(assembly: Assembly) -> None:
        epoch = make_epoch(assembly.job, plan, 0)
        assembly.worker.run(assembly.segment(replace(epoch, batch_size=3, last_minibatch=1)))
        assembly.worker.run(assembly.segment(epoch))

    run_in_threads(plan, make, work=small_first)
    check_same_weights(run_in_threads(plan, make), single_process(make(), plan))


def every_plan() -> list[Plan]:
    straight = [even_plan(profile_of("conv"), (1, 1), s, 3 if family(s).accumulates else 1) for s in TRAINING]
    return straight + [looped_plan(profile_of("conv"), 2, 2, schedule, 3) for schedule in LOOPED]


@pytest.mark.parametrize("plan", every_plan(), ids=lambda plan: plan.schedule)
def test_every_schedule_is_simulated_with_costs(plan: Plan) -> None:
    trace = simulate(plan, 4)
    assert trace.samples_per_s > 0
    assert sum(trace.samples) == 4 * plan.profile.batch_size


@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_fewer_microbatches_than_stages(schedule: str) -> None:
    check_same_gradients(even_plan(profile_of("tied"), (1, 1, 1), schedule, 1), functools.partial(make_job, "tied"))


class ChannelsLast(nn.Module):
    """As ConvNeXt: a norm over channels, which leaves them last in memory, before a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(1, 4, 1), nn.LayerNorm(4), nn.Conv2d(4, 4, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)).mean((2, 3))  # type: ignore[no-any-return]


def test_gradients_that_are_not_contiguous_are_compared() -> None:
    def make() -> Job:
        job = make_job("conv")
        return replace(job, model=ChannelsLast())

    check_same_gradients(even_plan(profile(make()), (1,), "zb-h1", 2), make)


# --- what users of any pipeline take for granted


@pytest.mark.parametrize("plan", every_plan(), ids=lambda plan: plan.schedule)
def test_nothing_is_left_behind_by_an_epoch(plan: Plan) -> None:
    """No graph, message, version or gradient outlives the epoch that made it; capturing may leave something."""

    def live_after(epochs: int) -> int:
        def check(assembly: Assembly) -> None:
            for stage in assembly.worker.stages.values():
                assert stage.module.in_flight == 0
                assert not stage.weights.gradients

        run_in_threads(plan, functools.partial(make_job, "conv", samples=24, batch_size=4, epochs=epochs), then=check)
        gc.collect()
        return sum(isinstance(each, torch.Tensor) for each in gc.get_objects())

    live = [live_after(epochs) for epochs in (1, 1, 1, 4)]
    assert live[3] - live[2] == live[2] - live[1]


def test_the_names_of_a_model_are_those_of_its_state_dict() -> None:
    plan = even_plan(profile_of("conv"), (1, 1), "1f1b", 2)
    assemblies = run_in_threads(plan, functools.partial(make_job, "conv"))
    stages = [stage for assembly in assemblies for stage in assembly.worker.stages.values()]
    held = [name for stage in stages for name in (*stage.weights.parameters, *stage.module.section.buffers)]
    assert sorted(held) == sorted(make_job("conv").model.state_dict())
