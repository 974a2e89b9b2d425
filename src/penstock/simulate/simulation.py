"""The result of a simulation: its trace, the load of its links, and the memory of its workers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from penstock.cluster import Port
from penstock.plan import Plan
from penstock.plan_costs import PlanCosts
from penstock.sampling import Epoch
from penstock.schedule import Kind, Schedule
from penstock.simulate.conditions import CALM, Conditions
from penstock.simulate.memory import Curve, memory_curve
from penstock.simulate.play import Player
from penstock.trace import Trace


@dataclass(frozen=True)
class LinkLoad:
    place: Port
    bytes_per_s: float
    carried_bytes: float

    @property
    def busy_s(self) -> float:
        return self.carried_bytes / self.bytes_per_s


@dataclass(frozen=True)
class Simulation:
    plan: Plan
    schedule: Schedule
    trace: Trace
    links: tuple[LinkLoad, ...]
    """Only links that carried anything."""

    @cached_property
    def costs(self) -> PlanCosts:
        return PlanCosts(self.plan)

    def averaging(self, worker: int) -> float:
        """The share of time in which a worker averages gradients, or waits for others to do so."""
        return self._share(self.trace.averaging_s(worker))

    def bubble(self, worker: int) -> float:
        """The share of time in which a worker neither computes nor averages."""
        return max(0.0, 1 - self.trace.utilisation(worker) - self.averaging(worker))

    def rings(self, stage: int) -> float:
        """The share of time in which the all-reduce of a stage runs. It starts when the last worker is ready."""
        events = self.trace.columns
        together = np.isin(events.stage, self.plan.pipeline.sync_stages[stage])
        meetings = events[events.of_kind(Kind.SYNC) & together]
        if not len(meetings):
            return 0.0
        meetings = meetings[np.argsort(meetings.index, kind="stable")]
        firsts = np.flatnonzero(np.diff(meetings.index, prepend=-1))
        return self._share(float(np.minimum.reduceat(meetings.seconds, firsts).sum()))

    def occupied(self, link: LinkLoad) -> float:
        """The bytes of a link divided by what it could have carried at full rate."""
        return self._share(link.busy_s)

    def memory(self, worker: int) -> Curve:
        return memory_curve(self.costs, self.schedule, worker, self.trace.of_worker(worker))

    @cached_property
    def peak_bytes(self) -> tuple[float, ...]:
        """Peak bytes of each worker."""
        return tuple(self.memory(worker).peak_bytes for worker in range(len(self.trace.workers)))

    def _share(self, seconds: float) -> float:
        return seconds / self.trace.span_s if self.trace.span_s > 0 else 0.0


def play(plan: Plan, minibatches: int, conditions: Conditions = CALM) -> Simulation:
    """Simulate so many full minibatches with the plan's own costs."""
    batch_size = plan.profile.batch_size
    epoch = Epoch(num_samples=batch_size * minibatches, batch_size=batch_size, microbatches=plan.microbatches, seed=0)
    schedule = plan.schedule_for(epoch.minibatches)
    player = Player(plan, schedule, conditions)
    trace = player.run(epoch.samples)
    loads = (LinkLoad(place, port.bytes_per_s, port.carried_bytes) for place, port in player.links.ports.items())
    return Simulation(plan, schedule, trace, tuple(load for load in loads if load.carried_bytes))


def simulate(plan: Plan, minibatches: int, conditions: Conditions = CALM) -> Trace:
    return play(plan, minibatches, conditions).trace
