"""Chooses the search for a request. Returns candidate stages, and a lower bound that no plan can beat."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from penstock.cluster import Cluster, Level
from penstock.planner.bounds import area_bound_s
from penstock.planner.downsets import MOST_DOWNSETS, Downsets, find_downsets, layer_weights
from penstock.planner.hints import Hints
from penstock.planner.placements import Placements, find_placements
from penstock.planner.search import Aim, Found, TableSearch
from penstock.planner.stages import StageCosts
from penstock.planner.threshold import ThresholdSearch
from penstock.profile import Profile

MANY_DEVICES = 48
"""Above this number, equal devices are counted rather than placed one by one."""
FEW_CELLS = 50_000
"""Placement steps times cuts. Below this, every trade-off between fill time and period is tried."""
PARETO_STEPS = 6
"""Otherwise, this many periods between the plan with the fewest stages and that with the smallest period."""
MOST_TRADE_OFFS = 100
MOST_CELLS = 30_000_000
"""The most placement steps times stages to try for each of these periods."""
FEWEST_CUTS = 24


@dataclass(frozen=True)
class Explorer:
    stage_costs: StageCosts
    hints: Hints

    @property
    def lower_bound_s(self) -> float:
        """Seconds per microbatch that no plan can beat, as far as this is proven."""
        return max(self._proven)

    def tightest(self, upper_s: float = math.inf) -> list[Found]:
        """The stages with the smallest period for each number of devices, none slower than ``upper_s``."""
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
        """Stages with the shortest fill time, for periods from the longest to the shortest that is worth trying."""
        if isinstance(self._searches[0], TableSearch):
            for search in self._coarse._tables:
                yield from self._trade_offs(search, tightest_s, loosest_s)

    def quickest(self, limit_s: float) -> list[Found]:
        """The stages with the lowest latency among those with a period within the limit."""
        found = [each for search in self._tables for each in search.solve(Aim.LATENCY, limit_s)]
        return sorted(found, key=lambda each: (each.value_s, each.num_devices))

    @cached_property
    def _coarse(self) -> Explorer:
        """The same search with fewer cuts, so that it can be repeated several times."""
        steps = sum(len(node.steps) for search in self._tables for node in search.placements.nodes)
        most = max(FEWEST_CUTS, math.isqrt(MOST_CELLS // max(steps, 1)))
        if len(self.stage_costs) <= most:
            return self
        costs = self.stage_costs.costs
        return Explorer(replace(self.stage_costs, downsets=cuts_of(costs.profile, costs.cluster, most)), self.hints)

    def _trade_offs(self, search: TableSearch, tightest_s: float, loosest_s: float) -> Iterator[Found]:
        steps = sum(len(node.steps) for node in search.placements.nodes)
        every = steps * len(self.stage_costs) < FEW_CELLS
        shrink = 1 - 1e-9 if every else (tightest_s / max(loosest_s, tightest_s)) ** (1 / PARETO_STEPS)
        limit_s = loosest_s
        for _ in range(MOST_TRADE_OFFS):
            if limit_s < tightest_s * (1 - 1e-12) or limit_s <= 0:
                return
            found = search.solve(Aim.FILL, limit_s)
            if not found:
                return
            yield from found
            slowest_s = search.period_s(min(found, key=lambda each: each.value_s))
            limit_s = min(limit_s, slowest_s) * min(shrink, 1 - 1e-9)

    @cached_property
    def _proven(self) -> list[float]:
        """A lower bound: what the devices could do with unlimited memory and the best links of the cluster."""
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
    """The cluster with all devices joined by its best links."""
    link = Level(
        size=len(cluster.devices),
        bytes_per_s=max(level.bytes_per_s for level in cluster.levels),
        latency_s=min(level.latency_s for level in cluster.levels),
    )
    return Cluster(name=cluster.name, devices=cluster.devices, levels=(link,))


def cuts_of(profile: Profile, cluster: Cluster, most: int = MOST_DOWNSETS) -> Downsets:
    """The places where the model may be cut."""
    seconds = profile.compute_s(cluster.devices[0].kind)
    return find_downsets(profile.graph, layer_weights(profile.graph, seconds), most)
