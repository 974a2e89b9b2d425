"""Finds the best stages over all cuts of the layer graph and all placements, by a dynamic program from the last stage.

``value[node][I]`` is the best way to run the layers outside the downset I on the devices that the node has used. Going
from the last stage to the first makes a stage's in-flight depth known, since it depends on the devices downstream, and
with it the stage's memory. Entries that cannot end below a limit are dropped: the layers inside I must still run on the
free devices. A limit close to the best leaves little to search, so the limit starts low and grows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

import numpy as np

from penstock.planner.bounds import work_of
from penstock.planner.downsets import Bools, Floats
from penstock.planner.placements import Node, Placements, Step
from penstock.planner.stages import Block, Ints, StageCosts, Team

ROUNDING = 1 + 1e-9
"""Tolerance for stages that take exactly the limit."""


class Aim(Enum):
    PERIOD = "the slowest stage or cut"
    FILL = "a microbatch through all stages but the last"
    LATENCY = "a microbatch through all stages and cuts"


@dataclass(frozen=True)
class FoundStage:
    begin: int
    end: int
    team: Team
    devices: tuple[int, ...]
    layers: tuple[int, ...]
    behind: int
    """The number of devices downstream of it."""


@dataclass(frozen=True)
class Found:
    value_s: float
    stages: tuple[FoundStage, ...]

    @property
    def num_devices(self) -> int:
        return sum(len(stage.devices) for stage in self.stages)


@dataclass(frozen=True, kw_only=True)
class TableSearch:
    stage_costs: StageCosts
    placements: Placements
    num_stages: int | None = None
    """The exact number of stages, if given."""
    pins: Mapping[int, Sequence[int]] | None = None
    """For a stage, the layers that must be in it. Needs ``num_stages``."""

    def tightest(self, lower_s: float, upper_s: float = math.inf) -> tuple[list[Found], float]:
        """The stages with the smallest period, for each number of devices, best first; and a lower bound of the period.

        Nothing is found if every period is above ``upper_s``. ``lower_s`` must be a valid lower bound.
        """
        limit_s, growth = max(lower_s, 0.0) * 1.01 + 1e-12, 1.05
        while True:
            limit_s = min(limit_s, upper_s)
            found = self.solve(Aim.PERIOD, limit_s)
            if found:
                return found, max(lower_s, min(found[0].value_s, limit_s))
            lower_s = max(lower_s, limit_s)
            if limit_s >= upper_s or math.isinf(limit_s):
                return [], lower_s
            limit_s *= growth
            growth = min(growth**2, 1e12)
            if growth > 1e3:
                limit_s = upper_s

    @property
    def exact(self) -> bool:
        """Whether all placements are searched."""
        return self.placements.every_way

    def period_s(self, found: Found) -> float:
        """Seconds per microbatch of the slowest stage or cut."""
        slowest_s, cluster = 0.0, self.placements.cluster
        for stage, behind in zip(found.stages, [*found.stages[1:], None], strict=True):
            one = np.array([stage.begin]), np.array([stage.end])
            block = self.stage_costs.block(stage.team, stage.behind, *one)
            slowest_s = max(slowest_s, float(block.period_s[0, 0]))
            if behind is not None:
                level = cluster.span((*stage.devices, *behind.devices))
                other = self.stage_costs.block(behind.team, behind.behind, one[1], np.array([behind.end]))
                ends = (block.busiest(stage.team, level), other.busiest(behind.team, level))
                crossing_s = float(self.stage_costs.cut_s[level][stage.end])
                slowest_s = max(slowest_s, crossing_s * max(float(np.max(busiest)) for busiest in ends))
        return slowest_s

    def solve(self, aim: Aim, limit_s: float) -> list[Found]:
        """The best stages whose period is at most ``limit_s``, for each number of devices, best first."""
        nodes, size = self.placements.nodes, len(self.stage_costs)
        values = [np.full(size, np.inf) for _ in nodes]
        values[0][-1] = 0.0
        choices: list[Ints | None] = [None] * len(nodes)
        rest = self._rest
        for number, node in enumerate(nodes):
            useful = np.isfinite(values[number]) & (rest[node.free] <= limit_s * ROUNDING)
            useful[0] = False
            end = np.flatnonzero(useful)
            if not len(end):
                continue
            for place, step in enumerate(node.steps):
                target = nodes[step.target]
                if step.team is None:
                    self._idle(values, choices, number, place, step)
                    continue
                reachable = rest[target.free][: end[-1]] <= limit_s * ROUNDING
                begins, ends = self._pinned(reachable, end, node)
                if len(begins) and len(ends):
                    self._relax(values, choices, number, place, begins, ends, aim, limit_s)
        return self._best(values, choices, aim)

    def _relax(
        self,
        values: list[Floats],
        choices: list[Ints | None],
        number: int,
        place: int,
        begins: Ints,
        ends: Ints,
        aim: Aim,
        limit_s: float,
    ) -> None:
        """Place one team upstream of everything that the node has placed."""
        node = self.placements.nodes[number]
        step = node.steps[place]
        assert step.team is not None
        block = self.stage_costs.block(step.team, self._behind(node), begins, ends)
        period_s = self._with_links(block, node, step, begins, ends)
        behind_s = values[number][ends][None, :]
        if aim is Aim.PERIOD:
            total = np.maximum(period_s, behind_s)
        else:
            total = np.where(
                period_s <= limit_s * ROUNDING, behind_s + self._added_s(block, node, step, begins, aim), np.inf
            )
        chosen = total.argmin(axis=1)
        found = total[np.arange(len(begins)), chosen]
        if aim is Aim.PERIOD:
            found[found > limit_s * ROUNDING] = np.inf
        target = values[step.target]
        better = found < target[begins]
        if better.any():
            target[begins[better]] = found[better]
            choice = choices[step.target]
            if choice is None:
                choice = choices[step.target] = np.zeros((len(target), 3), dtype=np.int64)
            choice[begins[better], 0] = number
            choice[begins[better], 1] = place
            choice[begins[better], 2] = ends[chosen[better]]

    def _with_links(self, block: Block, node: Node, step: Step, begins: Ints, ends: Ints) -> Floats:
        """The period of a stage, or of its links upstream and downstream if they are slower."""
        assert step.team is not None
        busiest = [block.busiest(step.team, level) for level in (node.promise, step.promise)]
        out_s = self.stage_costs.cut_s[node.promise][ends][None, :] * busiest[0]
        in_s = self.stage_costs.cut_s[step.promise][begins][:, None] * busiest[1]
        slowest: Floats = np.maximum(np.maximum(block.period_s, out_s), in_s)
        return slowest

    def _added_s(self, block: Block, node: Node, step: Step, begins: Ints, aim: Aim) -> Any:
        if aim is Aim.LATENCY:
            return block.trip_s + self.stage_costs.crossing_s[step.promise][begins][:, None]
        return block.trip_s if self._behind(node) else 0.0

    def _idle(self, values: list[Floats], choices: list[Ints | None], number: int, place: int, step: Step) -> None:
        better = np.flatnonzero(values[number] < values[step.target])
        if len(better):
            values[step.target][better] = values[number][better]
            choice = choices[step.target]
            if choice is None:
                choice = choices[step.target] = np.zeros((len(values[number]), 3), dtype=np.int64)
            choice[better] = np.stack([np.full(len(better), number), np.full(len(better), place), better], axis=1)

    def _best(self, values: list[Floats], choices: list[Ints | None], aim: Aim) -> list[Found]:
        best: dict[int, tuple[float, int]] = {}
        for number, node in enumerate(self.placements.nodes):
            value_s = float(values[number][0])
            wanted = self.num_stages is None or node.stages == self.num_stages
            if math.isfinite(value_s) and wanted and value_s < best.get(self._behind(node), (math.inf, 0))[0]:
                best[self._behind(node)] = value_s, number
        ranked = sorted(best.items(), key=lambda item: (item[1][0], item[0]))
        return [Found(value_s, self._stages(number, choices)) for _, (value_s, number) in ranked]

    def _stages(self, number: int, choices: list[Ints | None]) -> tuple[FoundStage, ...]:
        path, begin = [], 0
        while number != 0:
            choice = choices[number]
            assert choice is not None
            source, place, end = (int(x) for x in choice[begin])
            step = self.placements.nodes[source].steps[place]
            path.append((step, begin, end, self._behind(self.placements.nodes[source])))
            number, begin = source, end
        path.reverse()
        devices = iter(self.placements.devices([step for step, *_ in path]))
        placed = [
            FoundStage(begin, end, step.team, next(devices), self.stage_costs.downsets.between(begin, end), behind)
            for step, begin, end, behind in path
            if step.team is not None
        ]
        return tuple(reversed(placed))

    def _behind(self, node: Node) -> int:
        return len(self.placements.cluster.devices) - len(node.free)

    def _pinned(self, reachable: Bools, ends: Ints, node: Node) -> tuple[Ints, Ints]:
        if self.num_stages is None or not self.pins:
            return np.flatnonzero(reachable), ends
        layers = self.pins.get(self.num_stages - 1 - node.stages, ())
        inside = self._holds(tuple(layers))
        none, every = np.asarray(~inside.any(axis=1)), np.asarray(inside.all(axis=1))
        return np.flatnonzero(reachable & none[: len(reachable)]), ends[every[ends]]

    def _holds(self, layers: tuple[int, ...]) -> Bools:
        rows = [self.stage_costs.downsets.graph.order.index(layer) for layer in layers]
        held: Bools = self.stage_costs.downsets.members[:, rows]
        return held

    @cached_property
    def _rest(self) -> dict[frozenset[int], Floats]:
        """For each set of free devices, [downset]: a lower bound for the layers in the downset on these devices, by
        sharing all work perfectly."""
        work = work_of(self.stage_costs.costs, self.stage_costs.family)
        inside = self.stage_costs.downsets.sums(lambda layer: work.of_layer[layer.id])
        bounds = {}
        for node in self.placements.nodes:
            rate = sum(work.rates[device] for device in sorted(node.free))
            bounds[node.free] = inside / rate if rate > 0 else np.full(len(inside), np.inf)
            bounds[node.free][0] = 0.0
        return bounds
