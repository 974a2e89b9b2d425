"""What benchmarks of training compare, each as something that runs so many minibatches and tells its samples/s."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from penstock.clocks import Clock
from penstock.job import Job
from penstock.plan import Plan
from penstock.runtime.capture.blueprint import Blueprint, blueprint_of
from penstock.runtime.capture.capture import call_arguments
from penstock.runtime.capture.split import Splitter
from penstock.runtime.stage.optimizers import Optimizers
from penstock.runtime.transport.base import Transport
from penstock.runtime.worker.assemble import Assembly, assemble
from penstock.runtime.worker.data import load_batch
from penstock.runtime.worker.worker import Feed, Segment
from penstock.schedule import Kind

TIMEOUT_S = 120.0
CPU = torch.device("cpu")
TORCH_SCHEDULES: dict[str, Any] = {
    "1f1b": Schedule1F1B,
    "gpipe": ScheduleGPipe,
    "zb-h1": ScheduleInterleavedZeroBubble,
    "zb-v": ScheduleZBVZeroBubble,
}


class Contender(Protocol):
    def run(self, minibatches: int) -> float:
        """The samples per second of this worker's pipeline."""
        ...


@dataclass(frozen=True)
class _SameBatch:
    """The same microbatches again and again: the pipeline is measured, not the loading of data."""

    parts: Sequence[tuple[Sequence[Any], Any]]

    def key(self, microbatch: int) -> int:
        return microbatch

    def load(self, microbatch: int, *, inputs: bool = True, target: bool = True) -> tuple[Sequence[Any], Any]:
        return self.parts[microbatch % len(self.parts)]


@dataclass(frozen=True)
class _Loading:
    """Microbatches of so many samples, one after another through the data."""

    job: Job
    size: int
    bind: Callable[[Any], list[Any]]

    def key(self, microbatch: int) -> int:
        return microbatch

    def load(self, microbatch: int, *, inputs: bool = True, target: bool = True) -> tuple[Sequence[Any], Any]:
        start = microbatch * self.size % max(1, len(self.job.data) - self.size + 1)
        batch, wanted = load_batch(self.job, range(start, start + self.size), seed=microbatch)
        return self.bind(batch), wanted


class Ours:
    """A plan's own workers."""

    def __init__(
        self, job: Job, plan: Plan, transport: Transport, captured: tuple[Splitter, Blueprint] | None = None
    ) -> None:
        self.plan, self.job = plan, job
        self.assembly = assemble(
            job,
            plan,
            transport=transport,
            clock=time.perf_counter,
            device=CPU,
            timeout_s=TIMEOUT_S,
            captured=captured,
        )
        inputs, target = load_batch(job, range(job.batch_size), seed=0)
        flat = self.assembly.splitter.captured.bind(inputs)
        self.size = job.batch_size // plan.microbatches
        starts = range(0, self.size * plan.microbatches, self.size)
        self.feed: Feed = _SameBatch([(_rows(flat, at, self.size), _rows(target, at, self.size)) for at in starts])

    def loading(self) -> Ours:
        """The same, but every microbatch is loaded from the job's data, as in training."""
        self.feed = _Loading(self.job, self.size, self.assembly.splitter.captured.bind)
        return self

    def run(self, minibatches: int) -> float:
        """The steady rate, from one update to another."""
        worker, first_stage = self.assembly.worker, min(self.assembly.worker.stages)
        schedule = self.plan.schedule_for([self.plan.microbatches] * minibatches)
        worker.events.clear()
        worker.run(Segment(schedule=schedule, samples=[self.size] * schedule.microbatches, feed=self.feed))
        for stage in worker.stages.values():
            stage.module.losses.clear()
        ends = [e.end_s for e in worker.events if e.action.kind is Kind.STEP and e.action.stage == first_stage]
        first = len(ends) // 4
        consumed = sum(len(schedule.round_members(first_stage, i)) for i in range(first + 1, len(ends)))
        return consumed * self.size / (ends[-1] - ends[first])


class Alone:
    """The stage of a straight asynchronous plan by itself: forward, backward and update without any message."""

    def __init__(self, ours: Ours) -> None:
        self.ours = ours
        (own,) = ours.assembly.worker.stages.values()
        self.stage = own.module
        self.inputs, self.target = ours.feed.load(0)
        self.received, self.gradients = _tensors_at_the_cut(ours.assembly, own.index, self.inputs)

    def run(self, minibatches: int) -> float:
        start_s = time.perf_counter()
        for _ in range(minibatches):
            self.step()
        return minibatches * self.ours.size / (time.perf_counter() - start_s)

    def step(self) -> None:
        received = {name: value.detach().requires_grad_(value.requires_grad) for name, value in self.received.items()}
        self.stage.forward(0, self.inputs, received, self.target)
        self.stage.backward(0, self.gradients, loss_weight=1.0, scale=1.0)
        self.stage.weights.step()


def _tensors_at_the_cut(
    assembly: Assembly, stage: int, inputs: Sequence[Any]
) -> tuple[dict[str, Tensor], dict[str, list[Tensor | None]]]:
    """What a stage receives, from the stages before it run here; and gradients for what it sends."""
    values: dict[str, Tensor] = {}
    for before in assembly.plan.stages[: stage + 1]:
        section = assembly.splitter.section(before.layers)
        arguments = [inputs[position] for position in section.reads] + [values[n] for n in section.received_names]
        sent, _ = section.run(section.parameters, arguments)
        values.update(zip(section.sent_names, sent, strict=True))
    return (
        {name: values[name] for name in section.received_names},
        {name: [torch.ones_like(values[name])] for name in section.sent_names},
    )


class Whole:
    """One worker with the whole model and ``samples`` at a time: how fast the machine is at the moment."""

    def __init__(self, job: Job, samples: int) -> None:
        self.job, self.adds = job, samples < job.batch_size
        self.model = copy.deepcopy(blueprint_of(job, CPU).model).train()
        self.optimizers = Optimizers(job.optimizer, None, list(self.model.named_parameters()))
        inputs, self.target = load_batch(job, range(samples), seed=0)
        self.args, self.kwargs = call_arguments(inputs)
        self.step()  # what torch sets up once

    def step(self) -> None:
        """Forward, backward and update; the gradients of part of a minibatch are added to others."""
        torch.autograd.backward(self.job.loss(self.model(*self.args, **self.kwargs), self.target))
        self.optimizers.step(0)
        self.model.zero_grad(set_to_none=not self.adds)


def steps_per_s(contender: Alone | Whole, seconds: float, clock: Clock = time.perf_counter) -> float:
    """By a clock, for so long: workers that start together end together, and share what they share to the end."""
    end_s, start_s, steps = time.perf_counter() + seconds, clock(), 0
    while steps == 0 or time.perf_counter() < end_s:
        contender.step()
        steps += 1
    return steps / (clock() - start_s)


class TorchPipeline:
    """torch.distributed.pipelining on copies of the same sections, with as many microbatches."""

    def __init__(self, ours: Ours) -> None:
        plan, job, assembly = ours.plan, ours.job, ours.assembly
        self.batch_size = job.batch_size
        inputs, self.target = load_batch(job, range(job.batch_size), seed=0)
        self.inputs = assembly.splitter.captured.bind(inputs)
        own = assembly.worker.stages
        self.is_first, self.is_last = 0 in own, len(plan.stages) - 1 in own
        rebuild = assembly.splitter.captured.rebuild_output
        self.modules = [copy.deepcopy(stage.module.section.module) for stage in own.values()]
        named = [pair for module in self.modules for pair in module.named_parameters()]
        self.optimizers = Optimizers(job.optimizer, None, named)
        stages = [
            PipelineStage(
                _OneValue(module, rebuild if index == len(plan.stages) - 1 else None), index, len(plan.stages), CPU
            )
            for index, module in zip(own, self.modules, strict=True)
        ]
        make, several = TORCH_SCHEDULES[plan.schedule], plan.schedule.startswith("zb")
        self.schedule = make(stages if several else stages[0], plan.microbatches, loss_fn=job.loss)

    def run(self, minibatches: int) -> float:
        start_s = time.perf_counter()
        for _ in range(minibatches):
            for module in self.modules:
                module.zero_grad()
            given = self.inputs if self.is_first else ()
            if self.is_last:
                self.schedule.step(*given, target=self.target, losses=[])
            else:
                self.schedule.step(*given)
            self.optimizers.step(0)
        return minibatches * self.batch_size / (time.perf_counter() - start_s)


class _OneValue(nn.Module):
    """A section with one value in and one out, as torch's stages want it."""

    def __init__(self, module: nn.Module, rebuild: Callable[[Any], Any] | None) -> None:
        super().__init__()
        self.module, self.rebuild = module, rebuild

    def forward(self, *arguments: Tensor) -> Any:
        sent, output = self.module(*arguments)
        if self.rebuild is not None:
            return self.rebuild(output)
        return sent[0] if len(sent) == 1 else sent


class TorchDataParallel:
    """DistributedDataParallel: every worker has the whole model and ``samples`` of its own at each update."""

    def __init__(self, job: Job, workers: int, samples: int) -> None:
        self.job, self.samples_per_update = job, workers * samples
        self.model = DistributedDataParallel(copy.deepcopy(blueprint_of(job, CPU).model).train())
        self.optimizers = Optimizers(job.optimizer, None, list(self.model.module.named_parameters()))
        inputs, self.target = load_batch(job, range(samples), seed=0)
        self.args, self.kwargs = call_arguments(inputs)

    def run(self, minibatches: int) -> float:
        start_s = time.perf_counter()
        updates = max(1, minibatches * self.job.batch_size // self.samples_per_update)
        for _ in range(updates):
            self.model.zero_grad()
            torch.autograd.backward(self.job.loss(self.model(*self.args, **self.kwargs), self.target))
            self.optimizers.step(0)
        return updates * self.samples_per_update / (time.perf_counter() - start_s)


def _rows(batch: Any, start: int, count: int) -> Any:
    return pytree.tree_map(lambda leaf: leaf[start : start + count] if isinstance(leaf, Tensor) else leaf, batch)
