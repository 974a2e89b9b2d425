"""Runs a plan on emulated devices: its workers are threads of one process."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from penstock.cost import BUCKET_BYTES, Caches
from penstock.errors import PlanError, WorkerError
from penstock.plan import Plan
from penstock.plan_costs import PlanCosts
from penstock.run import Result
from penstock.runtime.emulate.network import EmulatedNetwork
from penstock.runtime.emulate.stand_ins import (
    DilatedClock,
    EmulatedStage,
    EmulatedSync,
    EmulatedTransport,
    EmulatedWeights,
    emulated_value,
    shrunk,
)
from penstock.runtime.links.choice import talking_pairs
from penstock.runtime.messages.mailbox import Mailbox
from penstock.runtime.transport.threads import LocalExchange, LocalTransport
from penstock.runtime.worker.worker import OwnStage, Segment, Worker, received_by, sent_by
from penstock.sampling import Epoch
from penstock.schedule import Action, Kind, Schedule, Staleness, family
from penstock.sync import sync_policy
from penstock.trace import Event, Trace, merge

CPU = torch.device("cpu")
ACTION_S = 1e-3
"""Real seconds to run an action, on the one core that Python threads share."""
OVERHEAD = 0.05
"""All actions of a minibatch together take at most this share of it."""
HELD_BYTES = 2**23
"""The tensors of all workers together are shrunk to about this size."""


@dataclass(frozen=True)
class EmulatedRun:
    trace: Trace
    """In emulated seconds."""
    result: Result
    dilation: float
    """Real seconds per emulated second."""
    shrink: float
    """How many times smaller tensors were than those they stand for."""


def emulate(
    plan: Plan,
    minibatches: int,
    *,
    dilation: float | None = None,
    timeout_s: float = 300.0,
) -> EmulatedRun:
    """Run so many minibatches. By default, time is dilated enough that the real work takes only a small share of it."""
    epoch = Epoch(
        num_samples=plan.profile.batch_size * minibatches,
        batch_size=plan.profile.batch_size,
        microbatches=plan.microbatches,
        seed=0,
    )
    if not family(plan.schedule).trains:
        raise PlanError(f"schedule {plan.schedule} trains nothing, and emulation is of training; simulate it instead")
    schedule = plan.schedule_for(epoch.minibatches)
    dilation = usual_dilation(plan, schedule, minibatches) if dilation is None else dilation
    if dilation <= 0:
        raise PlanError(f"dilation is {dilation:g}; it must be above 0 (2 makes an emulated second last two)")
    made = _Emulation(plan, dilation, timeout_s)
    segment = Segment(schedule=schedule, samples=epoch.samples, feed=_NoData())
    seconds = made.run(segment)
    events = ([Event(worker=worker.rank, **timed._asdict()) for timed in worker.events] for worker in made.workers)
    trace = merge("emulated", plan.worker_names, epoch.samples, events)
    return EmulatedRun(trace, made.result(segment, seconds), dilation, made.shrink)


def usual_dilation(plan: Plan, schedule: Schedule, minibatches: int) -> float:
    actions = sum(map(len, schedule.programs)) / minibatches
    minibatch_s = PlanCosts(plan).minibatch_s()
    return actions * ACTION_S / OVERHEAD / minibatch_s if minibatch_s > 0 else 1.0


class _NoData:
    """A feed without data, since no emulated stage reads any."""

    def key(self, microbatch: int) -> int:
        return 0

    def load(self, microbatch: int, *, inputs: bool = True, target: bool = True) -> tuple[Sequence[Any], Any]:
        raise AssertionError("an emulated stage reads no data")


class _Emulation:
    def __init__(self, plan: Plan, dilation: float, timeout_s: float) -> None:
        self.plan, self.timeout_s, self.costs = plan, timeout_s, PlanCosts(plan)
        self.clock = DilatedClock(dilation)
        held = sum(map(self.costs.memory_bytes, range(len(plan.devices))))
        self.shrink = max(1.0, held / HELD_BYTES)
        self.exchange = LocalExchange()
        self.network = EmulatedNetwork(plan.cluster, self.clock)
        self.values = {value.name: value for value in plan.profile.graph.values}
        self.edges = {edge: tuple(value.name for value in values) for edge, values in plan.edges.items()}
        self.workers = [self._worker(rank) for rank in range(len(plan.devices))]

    def run(self, segment: Segment) -> float:
        """Run all workers to the end. Returns the emulated seconds."""

        def run(worker: Worker) -> None:
            try:
                worker.run(segment)
            except Exception as error:
                errors.append(error)
                self.exchange.fail(str(error))

        errors: list[Exception] = []
        threads = [threading.Thread(target=run, args=(worker,), daemon=True) for worker in self.workers]
        start_s = self.clock()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise WorkerError(f"an emulated worker failed: {errors[0]}") from errors[0]
        return self.clock() - start_s

    def result(self, segment: Segment, seconds: float) -> Result:
        devices = [self.plan.cluster.devices[device] for device in self.plan.devices]
        return Result(
            samples=sum(segment.samples),
            seconds=seconds,
            losses=(),
            checkpoint=None,
            device_kinds={str(rank): f"emulated {device.kind}" for rank, device in enumerate(devices)},
            links={f"{low}-{high}": "emulated" for low, high in talking_pairs(self.plan)},
            staleness=tuple(self._staleness(stage) for stage in range(len(self.plan.stages))),
        )

    def _staleness(self, stage: int) -> Staleness:
        counted = [worker.stages[stage].weights.staleness for worker in self.workers if stage in worker.stages]
        return Staleness.counted(sum(counted, Counter[int]()))

    def _worker(self, rank: int) -> Worker:
        inner = LocalTransport(rank, self.exchange)
        transport = EmulatedTransport(inner, self.plan.devices, self.network, self.shrink, self.clock)
        caches = self.costs.caches(rank)
        return Worker(
            rank=rank,
            stages={index: self._stage(index, rank, caches) for index in self.plan.pipeline.stages_of[rank]},
            mailbox=Mailbox(
                self.plan.pipeline,
                {edge: len(names) for edge, names in self.edges.items()},
                transport=transport,
                device=CPU,
                timeout_s=self.timeout_s,
                sends={index: stage.sends for index, stage in enumerate(self.plan.stages)},
            ),
            sync=EmulatedSync(
                self.plan.owners_of_parameters,
                sync_policy(self.plan.sync),
                transport=transport,
                timeout_s=self.timeout_s,
                bucket_bytes=BUCKET_BYTES / self.shrink,
                clock=self.clock,
            ),
            clock=self.clock,
            device=CPU,
        )

    def _stage(self, index: int, rank: int, caches: Caches | None) -> OwnStage:
        layers, graph = self.plan.stages[index].layers, self.plan.profile.graph
        kinds: list[Kind] = [kind for kind in Kind if kind is not Kind.SYNC]
        always_s = {  # an emulated worker has no data to load, and takes no emulated time between actions
            kind: self.costs.before_s(index, rank, kind) + self.costs.compute_s(Action(index, kind, 0), rank)
            for kind in kinds
        }

        def seconds(kind: Kind) -> float:
            return always_s[kind] + (0.0 if caches is None else caches.extra_s(index, kind))

        parameters = {
            parameter.name: nn.Parameter(shrunk(parameter.num_bytes, self.shrink))
            for parameter in graph.parameters_of(layers)
        }
        sends_to, receives_from = sent_by(index, self.edges), received_by(index, self.edges)
        makes = {
            name: emulated_value(self.values[name], self.costs.model.value_bytes(self.values[name]), self.shrink)
            for names in sends_to.values()
            for name in names
        }
        module = EmulatedStage(
            EmulatedWeights(parameters, partial(seconds, Kind.STEP), self.clock, self.costs.own_average_s(index)),
            seconds,
            makes=makes,
            finals=self.costs.finals(index),
            clock=self.clock,
        )
        return OwnStage(index=index, module=module, sends_to=sends_to, receives_from=receives_from)
