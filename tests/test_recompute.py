"""A stage that recomputes: the same numbers to the last bit, with inputs alone kept between forward and backward."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from in_threads import CPU, even_plan, profile, profile_of, recomputing, run_in_threads, with_batch_size
from models import make_job, sgd
from penstock import Job
from penstock.plan import Plan
from penstock.runtime.stage.stage import StageModule
from penstock.runtime.stage.weights import Weights
from penstock.runtime.worker.assemble import Assembly, JobFeed, capture_for_plan, make_epoch
from penstock.schedule import Kind, execution_order
from test_worker import asynchronous_reference, check_same_weights, single_process


@dataclass
class Run:
    """What a run leaves that another must equal bit by bit."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    sent: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    """of what each stage received"""
    losses: dict[int, float] = field(default_factory=dict)

    def check_same(self, other: Run) -> None:
        torch.testing.assert_close(vars(self), vars(other), rtol=0, atol=0, equal_nan=True)


def run_alone(plan: Plan, job: Job) -> Run:
    """All stages in one thread."""
    splitter, _ = capture_for_plan(job, plan, CPU)
    rebuild = splitter.captured.rebuild_output
    stages = []
    for stage in plan.stages:
        section = splitter.section(stage.layers)
        weights = Weights(section.parameters, job.optimizer)
        loss = lambda output, target: job.loss(rebuild(output), target)  # noqa: E731
        stages.append(StageModule(section, weights, loss, recompute=stage.recompute))
    epoch = make_epoch(job, plan, 0)
    feed = JobFeed(job, epoch, splitter.captured, CPU)
    values: dict[tuple[int, str], Tensor] = {}
    owed: dict[tuple[int, str], list[Tensor | None]] = {}
    run = Run()
    for ((_, (index, kind, microbatch)),) in execution_order(plan.schedule_for(epoch.minibatches)):
        stage = stages[index]
        if kind is Kind.FORWARD:
            inputs, target = feed.load(microbatch)
            received = {
                name: values[microbatch, name].detach().clone().requires_grad_(values[microbatch, name].requires_grad)
                for name in stage.section.received_names
            }
            made = stage.forward(microbatch, inputs, received, target, key=feed.key(microbatch))
            values |= {(microbatch, name): value for name, value in made.items()}
            run.sent += [value.detach().clone() for value in made.values()]
        elif kind is Kind.BACKWARD:
            gradients = {name: owed.get((microbatch, name), []) for name in stage.section.sent_names}
            found = stage.backward(microbatch, gradients, loss_weight=0.5, scale=1.0)
            for name, gradient in found.items():
                owed.setdefault((microbatch, name), []).append(gradient)
                run.gradients += [] if gradient is None else [gradient.clone()]
        else:
            stage.weights.step()
    for stage in stages:
        run.weights |= {name: parameter.detach() for name, parameter in stage.weights.parameters.items()}
        run.buffers |= stage.section.buffers
        run.losses |= stage.losses
    return run


SCHEDULES = [("pipedream", 1), ("1f1b", 3), ("gpipe", 3)]


@pytest.mark.parametrize(("schedule", "microbatches"), SCHEDULES)
@pytest.mark.parametrize("name", ["noisy", "transformer", "conv", "branches", "recurrent", "undecided"])
def test_everything_is_bit_equal_to_a_run_without_recompute(name: str, schedule: str, microbatches: int) -> None:
    """Values, gradients, weights, statistics of batch norm and losses."""
    plan = even_plan(profile_of(name), (1, 1, 1), schedule, microbatches)
    make = functools.partial(make_job, name, samples=22)
    plain = run_alone(plan, make())
    for stages in ([0], [1], [2], [0, 1, 2]):
        run_alone(recomputing(plan, stages), make()).check_same(plain)


@pytest.mark.parametrize(("schedule", "microbatches"), SCHEDULES)
@pytest.mark.parametrize("replicas", [(1, 1), (1, 2), (2, 1), (1, 1, 1)], ids=str)
def test_workers_that_recompute_train_as_one_process_does(
    schedule: str, microbatches: int, replicas: tuple[int, ...]
) -> None:
    make = functools.partial(make_job, "conv", samples=23)
    plan = recomputing(even_plan(profile_of("conv"), replicas, schedule, microbatches))
    reference = asynchronous_reference if schedule == "pipedream" else single_process
    check_same_weights(run_in_threads(plan, make), reference(make(), plan))


@pytest.mark.parametrize("name", ["tied", "branches"])
def test_tied_weights_and_values_that_skip_stages_train_as_in_one_process_too(name: str) -> None:
    make = functools.partial(make_job, name, epochs=2)
    plan = recomputing(even_plan(profile_of(name), (1, 2, 1), "1f1b", 3))
    check_same_weights(run_in_threads(plan, make), single_process(make(), plan))


@pytest.mark.parametrize("schedule", ["pipedream", "1f1b"])
def test_workers_that_recompute_leave_the_buffers_of_those_that_do_not(schedule: str) -> None:
    make = functools.partial(make_job, "conv", samples=23)
    plan = even_plan(profile_of("conv"), (1, 1), schedule)
    plain, again = run_in_threads(plan, make), run_in_threads(recomputing(plan), make)
    for one, two in zip(buffers_of(plain), buffers_of(again), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)
    assert sum(len(each) for each in buffers_of(again)) == 3


def buffers_of(assemblies: list[Assembly]) -> list[dict[str, Tensor]]:
    stages = [stage for assembly in assemblies for stage in assembly.worker.stages.values()]
    return [dict(stage.module.section.buffers) for stage in stages]


class Habit(nn.Module):
    """What it computes depends on a buffer, which it changes at every second sight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("scale", torch.ones(6))
        self.register_buffer("same_scale", self.scale)

    def forward(self, x: Tensor) -> Tensor:
        changes = float(self.seen) % 2 == float(x.sum() > 1e9)  # no front end sees through this
        y = self.linear(x) * self.scale.clone()
        with torch.no_grad():
            self.seen.add_(1)
            if changes:
                self.scale.add_(x.detach().mean(0))
        return y * self.same_scale.clone()


def test_a_forward_is_made_again_on_the_buffers_that_it_saw() -> None:
    """Four in flight: the buffers have moved on by the time of the backward, for some by a change of another's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Habit(), Habit(), nn.Linear(6, 4))
    job = replace(make_job("undecided", samples=40), model=model)
    plan = even_plan(profile(copy_of(job)), (1, 1, 1), "pipedream")
    plan = replace(plan, stages=tuple(replace(s, in_flight=d) for s, d in zip(plan.stages, (5, 4, 1), strict=True)))
    plain = run_alone(plan, copy_of(job))
    assert float(plain.buffers["1.seen"]) == 10
    run_alone(recomputing(plan), copy_of(job)).check_same(plain)


def copy_of(job: Job) -> Job:
    return replace(job, model=copy.deepcopy(job.model))


class Doubling(nn.Module):
    """Writes into its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2.0)


class DoublingUnseen(nn.Module):
    """Writes into its input where no graph shows it."""

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2.0)
        return x + 1 if float(x.sum()) > 0 else x - 1


@pytest.mark.parametrize("module", [Doubling, DoublingUnseen])
def test_inputs_that_the_forward_overwrites_are_kept_as_they_were(module: type[nn.Module]) -> None:
    job = make_job("undecided", samples=12)
    job = replace(job, model=nn.Sequential(module(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4)))
    plan = even_plan(profile(copy_of(job)), (1, 1), "1f1b", 2)
    plain = run_alone(plan, copy_of(job))
    run_alone(recomputing(plan), copy_of(job)).check_same(plain)


def test_the_loss_is_computed_and_recorded_once() -> None:
    job = make_job("conv", samples=12)
    calls = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        value = job.loss(output, target)
        calls.append(float(value.detach()))
        return value

    plan = recomputing(even_plan(profile_of("conv"), (1, 1), "1f1b", 2))
    run = run_alone(plan, replace(job, loss=loss))
    assert list(run.losses.values()) == calls
    assert len(calls) == len(make_epoch(job, plan, 0).samples)


def test_the_time_of_a_backward_includes_computing_the_forward_again() -> None:
    log: list[str] = []

    def make() -> Job:
        job = make_job("conv", samples=2, batch_size=2)
        return replace(job, loss=lambda output, target: log.append("loss") or job.loss(output, target))

    def work(assembly: Assembly) -> None:
        assembly.worker.clock = lambda: float(log.append("clock") or len(log))
        assembly.worker.run(assembly.segment(make_epoch(assembly.job, assembly.plan, 0)))

    plan = even_plan(with_batch_size(profile_of("conv"), 2), (1,), "1f1b")
    run_in_threads(recomputing(plan), make, work=work)
    assert log == ["clock", "clock", "clock", "loss", "clock", "clock", "clock"]  # forward, backward, step


def storages(tree: Any) -> dict[int, torch.UntypedStorage]:
    tensors = (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))
    return {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}


class NewMemory(TorchDispatchMode):
    """Knows every piece of memory that was made while it was on, and how much of it is still there."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = storages((args, kwargs))
        self.made |= {key: (StorageWeakRef(s), s.nbytes()) for key, s in storages(result).items() if key not in given}
        return result

    def kept_bytes(self) -> int:
        return sum(num_bytes for reference, num_bytes in self.made.values() if not reference.expired())


def kept_bytes(name: str, *, recompute: bool) -> int:
    """What five forwards of a middle stage leave in memory besides inputs and the buffers that each saw."""
    job = make_job(name, samples=64, batch_size=64)
    plan = even_plan(with_batch_size(profile_of(name), 64), (1, 1, 1), "1f1b")
    splitter, _ = capture_for_plan(job, plan, CPU)
    first, section = (splitter.section(stage.layers) for stage in plan.stages[:2])
    inputs, _ = JobFeed(job, make_epoch(job, plan, 0), splitter.captured, CPU).load(0)
    values, _ = first.run(first.parameters, [inputs[position] for position in first.reads])
    stage = StageModule(section, Weights(section.parameters, sgd), job.loss, recompute=recompute)
    with NewMemory() as memory:
        for microbatch in range(5):
            received = {n: v.detach().requires_grad_() for n, v in zip(section.received_names, values, strict=True)}
            stage.forward(microbatch, inputs, received, None)
    buffers = sum(buffer.nbytes for buffer in section.module.buffers())
    return memory.kept_bytes() - 5 * buffers


@pytest.mark.parametrize("name", ["noisy", "transformer"])
def test_between_forward_and_backward_nothing_is_kept_but_inputs_buffers_and_the_state_of_random_numbers(
    name: str,
) -> None:
    assert kept_bytes(name, recompute=False) > 100_000
    assert kept_bytes(name, recompute=True) <= 0


def test_a_value_sent_by_a_stage_that_recomputes_says_whether_a_gradient_is_owed() -> None:
    job = make_job("branches")
    plan = even_plan(profile_of("branches"), (1, 1, 1), "1f1b")
    splitter, _ = capture_for_plan(job, plan, CPU)
    section = splitter.section(plan.stages[0].layers)
    inputs, target = JobFeed(job, make_epoch(job, plan, 0), splitter.captured, CPU).load(0)
    sent = []
    for recompute in (False, True):
        stage = StageModule(section, Weights(section.parameters, sgd), job.loss, recompute=recompute)
        sent.append(stage.forward(0, inputs, {}, target))
    assert [value.requires_grad for value in sent[0].values()] == [value.requires_grad for value in sent[1].values()]
    assert any(value.requires_grad for value in sent[1].values())
    assert all(value.grad_fn is None for value in sent[1].values())
