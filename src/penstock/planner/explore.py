"""Which search fits a request, and what it found: candidate stages, and a bound that none can beat."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from penstock.cluster import Cluster, Level
from penstock.planner.bounds import area_bound_s
from penstock.planner.hints import Hints
from penstock.planner.placements import Placements, find_placements
from penstock.planner.search import Aim, Found, TableSearch
from penstock.planner.stages import StageCosts
from penstock.planner.threshold import ThresholdSearch

MANY_DEVICES = 48
"""Beyond this, devices all alike are counted rather than placed one by one."""
FEW_CELLS = 50_000
"""Steps of placement x cuts: below this, every trade of filling time against period is tried."""
PARETO_STEPS = 24
"""Else so many periods between the fewest stages and the tightest."""


@dataclass(frozen=True)
class Explorer:
    stage_costs: StageCosts
    hints: Hints

    @property
    def lower_bound_s(self) -> float:
        """Seconds per microbatch that no plan can beat, as far as it has been proven."""
        return max(self._proven)

    def tightest(self, upper_s: float = math.inf) -> list[Found]:
        """The stages with the smallest period, by number of devices, none slower than ``upper_s``."""
        found: list[Found] = []
        bounds = []
        for search in self._searches:
            some, bound_s = search.tightest(self._area_bound_s, upper_s)
            found += some
            bounds.append(bound_s)
        if bounds and self._all_exact and not self.stage_costs.has_limits and self.stage_costs.downsets.complete:
            self._proven.append(min(bounds))
        return sorted(found, key=lambda each: (each.value_s, each.num_devices))

    def trade_offs(self, tightest_s: float, loosest_s: float) -> Iterator[Found]:
        """Stages that fill quickest, for periods from the loosest to the tightest that is worth it."""
        for search in self._searches:
            if isinstance(search, TableSearch):
                yield from self._trade_offs(search, tightest_s, loosest_s)

    def quickest(self, limit_s: float) -> list[Found]:
        """The stages with the lowest latency whose period keeps to the limit."""
        found = [each for search in self._tables for each in search.solve(Aim.LATENCY, limit_s)]
        return sorted(found, key=lambda each: (each.value_s, each.num_devices))

    def _trade_offs(self, search: TableSearch, tightest_s: float, loosest_s: float) -> Iterator[Found]:
        steps = sum(len(node.steps) for node in search.placements.nodes)
        every = steps * len(self.stage_costs) < FEW_CELLS
        shrink = 1 - 1e-9 if every else (tightest_s / max(loosest_s, tightest_s)) ** (1 / PARETO_STEPS)
        limit_s = loosest_s
        while limit_s >= tightest_s * (1 - 1e-12) and limit_s > 0:
            found = search.solve(Aim.FILL, limit_s)
            if not found:
                return
            yield from found
            slowest_s = search.period_s(min(found, key=lambda each: each.value_s))
            limit_s = min(limit_s, slowest_s) * min(shrink, 1 - 1e-9)

    @cached_property
    def _proven(self) -> list[float]:
        """What devices with any amount of memory could do, on the best links there are, bounds what these can."""
        bounds = [self._area_bound_s]
        if not self.stage_costs.downsets.complete:
            return bounds
        cluster = self.stage_costs.costs.cluster
        easier = cluster if self._all_exact else _flat(cluster)
        if self.stage_costs.has_limits or easier != cluster:
            costs = replace(self.stage_costs.costs, cluster=easier)
            relaxed = Explorer(replace(self.stage_costs, costs=costs, limited=False), self.hints)
            if relaxed._all_exact:
                relaxed.tightest()
                bounds.append(relaxed.lower_bound_s)
        return bounds

    @cached_property
    def _area_bound_s(self) -> float:
        costs = self.stage_costs
        return area_bound_s(costs.costs, costs.family, costs.microbatches)

    @property
    def _all_exact(self) -> bool:
        return all(search.exact for search in self._searches)

    @cached_property
    def _searches(self) -> Sequence[TableSearch | ThresholdSearch]:
        alike = len(set(self.stage_costs.costs.cluster.devices)) == 1
        many = len(self.stage_costs.costs.cluster.devices) > MANY_DEVICES
        plain = not self.hints.replicas and not self.hints.pins and self.hints.most_stages is None
        if alike and many and plain and self.stage_costs.family.trains:
            return [ThresholdSearch(stage_costs=self.stage_costs, straight=self.hints.straight)]
        return self._tables

    @cached_property
    def _tables(self) -> Sequence[TableSearch]:
        totals: list[int | None] = [None]
        pins: dict[int, list[int]] = {}
        for layer, stage in self.hints.pinned_layers(self.stage_costs.costs.profile.graph):
            pins.setdefault(stage, []).append(layer)
        if self.hints.replicas:
            totals = [len(self.hints.replicas)]
        elif pins:
            most = min(self._num_devices, len(self.stage_costs) - 1, self.hints.most_stages or self._num_devices)
            totals = list(range(max(pins) + 1, most + 1))
        return [
            TableSearch(stage_costs=self.stage_costs, placements=self._placements(total), num_stages=total, pins=pins)
            for total in totals
        ]

    def _placements(self, total: int | None) -> Placements:
        def sizes(stages_behind: int) -> Sequence[int]:
            return self.hints.sizes(stages_behind, self._num_devices, total)

        count = total is not None or self.hints.most_stages is not None
        return find_placements(self.stage_costs.costs.cluster, sizes, count_stages=count)

    @property
    def _num_devices(self) -> int:
        return len(self.stage_costs.costs.cluster.devices)


def _flat(cluster: Cluster) -> Cluster:
    """All devices joined by links as good as the best."""
    link = Level(
        size=len(cluster.devices),
        bytes_per_s=max(level.bytes_per_s for level in cluster.levels),
        latency_s=min(level.latency_s for level in cluster.levels),
    )
    return Cluster(name=cluster.name, devices=cluster.devices, levels=(link,))
