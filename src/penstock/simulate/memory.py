"""Bytes that a worker holds over time, by the formulas of the predicted peak. The two agree when a schedule has as much
in flight as its plan allows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.plan_costs import PlanCosts
from penstock.schedule import Kind, Schedule
from penstock.trace import CODES, Array, Columns


@dataclass(frozen=True)
class Curve:
    """A step function: ``num_bytes[i]`` from ``at_s[i]`` on."""

    at_s: Array
    num_bytes: Array

    @property
    def peak_bytes(self) -> float:
        return float(self.num_bytes.max())


def memory_curve(costs: PlanCosts, schedule: Schedule, worker: int, events: Columns) -> Curve:
    """``events`` are those of the worker, in program order.

    A microbatch is held from the start of its forward to the end of its backward or, if the backward is in halves, of
    its second half. Each event has two moments, its start and its end.
    """
    changes = np.zeros(2 * len(events))
    fixed = 0.0
    for stage in schedule.pipeline.stages_of[worker]:
        memory = costs.memory(stage)
        own = _Stage(schedule, stage, events)
        fixed += memory.fixed + memory.per_version
        changes += own.in_flight * memory.per_microbatch + own.more_versions * memory.per_version
    moments_s = np.stack([events.start_s, events.end_s], axis=1).reshape(-1)
    return Curve(moments_s, fixed + np.cumsum(changes))


@dataclass(frozen=True)
class _Stage:
    """The changes of a stage's memory at each moment of its worker's events."""

    schedule: Schedule
    stage: int
    events: Columns

    @property
    def in_flight(self) -> Array:
        """Microbatches in flight at each moment."""
        changes = np.zeros(2 * len(self.events))
        changes[2 * self._places(Kind.FORWARD)] += 1
        changes[2 * self._last_of_backwards + 1] -= 1
        return changes

    @property
    def more_versions(self) -> Array:
        """Versions of the weights besides the newest. A version is kept from the update that makes it until the next
        update, or until the last microbatch that started with it has ended. A version that no microbatch holds is
        updated in place."""
        changes = np.zeros(2 * len(self.events))
        updates, ends = self._places(Kind.STEP), self._last_of_backwards
        if not self.schedule.trains or not len(updates):
            return changes
        gone = np.append(2 * updates, 2 * len(self.events))  # version v is superseded by update v
        used = np.array(self.schedule.versions[self.stage])[self.events.index[ends]]
        np.maximum.at(gone, used, 2 * ends + 1)
        np.add.at(changes, 2 * updates, 1)
        inside = gone < len(changes)
        np.add.at(changes, gone[inside], -1)
        return changes

    @property
    def _last_of_backwards(self) -> Array:
        """The places of the actions that end a microbatch."""
        return self._places(Kind.BACKWARD, Kind.WEIGHT)

    def _places(self, *kinds: Kind) -> Array:
        mine = (self.events.stage == self.stage) & np.isin(self.events.kind, [CODES[kind] for kind in kinds])
        return np.flatnonzero(mine)
