"""Stages for very many equal devices: how few of them suffice for a given period?

A guess T is tested by covering the graph from the last stage: ``used[I]`` is the smallest number of devices, counted
from the last, on which the layers outside the downset I run with no stage and no cut slower than T per microbatch.
Using fewer devices downstream is never worse, so one number per downset and promised link level is enough. Bisection
between an impossible and a possible period finds the best. The number of replicas of a stage has a closed form.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from penstock.cost import ring_terms
from penstock.planner.downsets import Floats
from penstock.planner.search import Found, FoundStage
from penstock.planner.stages import Ints, StageCosts, Team

PRECISION = 2e-3
"""Relative precision of the period."""
ROUNDING = 1e-9


class _Placed(NamedTuple):
    begin: int
    end: int
    replicas: int
    behind: int
    """The number of devices between its last one and the end of the cluster."""
    promise_out: int


@dataclass(frozen=True, kw_only=True)
class ThresholdSearch:
    stage_costs: StageCosts
    straight: bool = False

    @property
    def exact(self) -> bool:
        """Stages take devices in order, so with several levels a better placement may exist."""
        return len(self.stage_costs.costs.cluster.levels) == 1 and not self.stage_costs.has_limits

    def tightest(self, lower_s: float, upper_s: float = math.inf) -> tuple[list[Found], float]:
        """The stages with the smallest period, if it is at most ``upper_s``; and a lower bound of the period."""
        slow_s = min(upper_s, float(self._stage_compute[0, -1]) + float(self._stage_update[0, -1]) + 1e-12)
        best = self._cover(slow_s)
        while best is None and slow_s < upper_s and slow_s < 1e12:  # links may take longer than all the computing
            slow_s = min(slow_s * 4, upper_s)
            best = self._cover(slow_s)
        if best is None:
            return [], max(lower_s, slow_s)
        fast_s, slow_s = lower_s, self._period_s(best)
        near_s = lower_s * 1.02  # often within reach
        while slow_s - fast_s > PRECISION * slow_s:
            middle_s = near_s if fast_s < near_s < slow_s else (fast_s + slow_s) / 2
            found = self._cover(middle_s)
            if found is None:
                fast_s = middle_s
            else:
                best, slow_s = found, min(middle_s, self._period_s(found))
        return [Found(slow_s, self._stages(best))], max(lower_s, fast_s)

    def _cover(self, period_s: float) -> tuple[_Placed, ...] | None:
        """Stages with a period of at most ``period_s`` on the available devices, or None."""
        size, levels = len(self.stage_costs), len(self._reach)
        used = np.full((levels, size), np.inf)
        used[levels - 1, -1] = 0
        choice: dict[tuple[int, int], _Placed] = {}
        needed = [self._replicas(period_s, level) for level in range(levels)]
        enough = [self._senders(period_s, level) for level in range(levels)]
        for begin in range(size - 2, -1, -1):
            for promise_out in range(levels):
                ends = self._ends[begin]
                ends = ends[used[promise_out, ends] < self._devices]
                if len(ends):
                    self._extend(begin, ends, promise_out, used, choice, needed, enough)
        if not np.isfinite(used[:, 0]).any():
            return None
        at, level, placed = 0, int(np.argmin(used[:, 0])), []
        while at < size - 1:
            stage = choice[level, at]
            placed.append(stage)
            at, level = stage.end, stage.promise_out
        return tuple(placed)

    def _senders(self, period_s: float, level: int) -> Floats:
        """[downset]: how many replicas suffice to send or receive what crosses the cut over this level. If one of the
        level's links is not enough, whole groups are counted."""
        links = np.ceil(self.stage_costs.cut_s[level] / period_s - ROUNDING)
        inside = self._reach[level - 1] if level else 1
        return np.where(links > 1, links * inside, links)

    def _extend(
        self,
        begin: int,
        ends: Ints,
        promise_out: int,
        used: Floats,
        choice: dict[tuple[int, int], _Placed],
        needed: list[Floats],
        enough: list[Floats],
    ) -> None:
        """Place a stage from ``begin`` to each of ``ends``, over every level, upstream of what is placed."""
        behind = used[promise_out, ends]
        fixed = np.maximum(enough[promise_out][ends], self._memory_replicas(begin, ends, behind))
        for span, reach in enumerate(self._reach):
            for promise_in in range(span, len(self._reach)):
                replicas = np.maximum(np.maximum(needed[span][begin, ends], fixed), enough[promise_in][begin])
                if self.straight:
                    replicas = np.where(replicas <= 1, replicas, np.inf)
                first, total = self._placed(replicas, behind, reach, promise_out)
                best = int(np.argmin(total))
                if total[best] < used[promise_in, begin] and total[best] <= self._devices:
                    used[promise_in, begin] = total[best]
                    choice[promise_in, begin] = _Placed(
                        begin, int(ends[best]), int(replicas[best]), int(first[best]), promise_out
                    )

    def _placed(self, replicas: Floats, behind: Floats, reach: int, promise_out: int) -> tuple[Floats, Floats]:
        """Where each team begins (in the group that is partly used, or at the start of the next one) and where it
        ends."""
        if reach >= self._devices:
            first = behind
        else:
            first = np.where(replicas <= reach - behind % reach, behind, np.ceil(behind / reach) * reach)
            replicas = np.where(replicas <= reach, replicas, np.inf)
        total = first + replicas
        group = self._reach[promise_out]
        if group < self._devices:  # it must share a group with the next stage
            near = np.floor((behind - 1) / group)
            total = np.where(np.floor((total - 1) / group) == near, total, np.inf)
        return first, total

    def _replicas(self, period_s: float, level: int) -> Floats:
        """[begin, end]: fewest replicas r whose compute, update and averaging over this level take r periods.

        Averaging takes (r-1) (latency_s + wire_s / r), so the answer is a root of a quadratic in r.
        """
        link = self.stage_costs.costs.cluster.links[level].ring
        compute_s, weights = self._stage_compute, self._weights
        update_s = self._stage_update + self._stage_average  # for several replicas; one has nothing to average
        latency_s, wire_s = ring_terms(weights, link)
        if not self.stage_costs.family.accumulates:
            a, b, c = latency_s - period_s, compute_s + update_s + wire_s - latency_s, -wire_s
        else:
            m = self.stage_costs.microbatches
            a, b, c = latency_s / m, (update_s + wire_s - latency_s) / m - period_s, compute_s - wire_s / m
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            # two forms of the same root: neither subtracts nearly equal numbers
            sqrt = np.sqrt(b * b - 4 * a * c)
            root = np.where(b > 0, (-b - sqrt) / (2 * a), 2 * c / (sqrt - b))
            replicas = np.where(a + b + c <= 0, 1.0, np.ceil(root - ROUNDING))
            good = (replicas >= 1) & ((a * replicas + b) * replicas + c <= 1e-9 * np.abs(compute_s))
        per_microbatch = self.stage_costs.microbatches if self.stage_costs.family.accumulates else 1
        alone_s = compute_s + self._stage_update / per_microbatch
        return np.where(alone_s <= period_s * (1 + ROUNDING), 1.0, np.where(good, np.maximum(replicas, 2.0), np.inf))

    def _memory_replicas(self, begin: int, ends: Ints, behind: Floats) -> Any:
        """How many replicas are needed so that each keeps few enough microbatches in flight to fit, without
        recomputing."""
        limit = self.stage_costs.classes[0].memory_bytes
        if not self.stage_costs.has_limits or limit is None:
            return 1.0
        rows = np.array([begin])
        need = [self.stage_costs.memory_bytes(rows, ends, depth, depth, again=False)[0] for depth in (1, 2)]
        each, fixed = need[1] - need[0], 2 * need[0] - need[1]
        with np.errstate(divide="ignore", invalid="ignore"):
            depth = np.where(
                each > 0, np.floor((limit - fixed) / each + ROUNDING), np.where(need[0] <= limit, np.inf, 0)
            )
            by_devices = np.where(behind == 0, 1.0, np.where(depth > 1, np.ceil(behind / (depth - 1)), np.inf))
            by_minibatch = np.ceil(self.stage_costs.microbatches / depth)
        if self.stage_costs.family.all_forwards_first:
            replicas = by_minibatch
        else:
            accumulates = self.stage_costs.family.accumulates
            replicas = np.minimum(by_devices, by_minibatch) if accumulates else by_devices
        return np.where(depth >= 1, np.maximum(replicas, 1.0), np.inf)

    def _period_s(self, placed: tuple[_Placed, ...]) -> float:
        """The actual period of the stages, which is at most the one they were found for."""
        slowest_s = 0.0
        for stage, behind in zip(placed, [*placed[1:], None], strict=True):
            block = self.stage_costs.block(
                self._team(stage), stage.behind, np.array([stage.begin]), np.array([stage.end])
            )
            slowest_s = max(slowest_s, float(block.period_s[0, 0]))
            if behind is not None:
                level = self._level(behind.behind, stage.behind + stage.replicas - 1)
                teams = (self._team(stage), self._team(behind))
                busiest = max(team.most_in_one(level) / team.size for team in teams)
                slowest_s = max(slowest_s, float(self.stage_costs.cut_s[level][stage.end]) * busiest)
        return slowest_s

    def _stages(self, placed: tuple[_Placed, ...]) -> tuple[FoundStage, ...]:
        """The stages in order, on actual devices."""
        return tuple(
            FoundStage(
                stage.begin,
                stage.end,
                self._team(stage),
                tuple(self._on(stage)),
                self.stage_costs.downsets.between(stage.begin, stage.end),
                stage.behind,
            )
            for stage in placed
        )

    def _team(self, stage: _Placed) -> Team:
        return self.stage_costs.team(self._on(stage))

    def _on(self, stage: _Placed) -> range:
        end = self._devices - stage.behind
        return range(end - stage.replicas, end)

    def _level(self, first: int, last: int) -> int:
        """The lowest level that joins two devices, given as positions from the end of the cluster. Groups are full, so
        they align."""
        return next(level for level, reach in enumerate(self._reach) if first // reach == last // reach)

    @property
    def _devices(self) -> int:
        return len(self.stage_costs.costs.cluster.devices)

    @property
    def _reach(self) -> tuple[int, ...]:
        return self.stage_costs.costs.cluster.reach

    @cached_property
    def _ends(self) -> list[Ints]:
        return [np.flatnonzero(row) for row in self.stage_costs.allowed]

    @cached_property
    def _compute(self) -> Floats:
        return self.stage_costs.compute_s(0)

    @cached_property
    def _update(self) -> Floats:
        return self.stage_costs.update_s(0, stashed=self.stage_costs.family.asynchronous)

    @cached_property
    def _stage_compute(self) -> Floats:
        handled_s = self.stage_costs.handled_s
        difference: Floats = self._compute[None, :] - self._compute[:, None]
        every = np.arange(len(self.stage_costs))
        return difference + self.stage_costs.own_s(0, every, every) + handled_s[None, :] + handled_s[:, None]

    @cached_property
    def _stage_update(self) -> Floats:
        """Includes a copy of the weights, except for the last stage, which has no microbatch in flight at its
        update."""
        costs, stashed = self.stage_costs, self.stage_costs.family.asynchronous
        update_s: Floats = self._update[None, :] - self._update[:, None] + costs.own_update_s(0, stashed=stashed)
        plain = costs.update_s(0, stashed=False)
        update_s[:, -1] = plain[-1] - plain + costs.own_update_s(0, stashed=False)
        return update_s

    @cached_property
    def _stage_average(self) -> Floats:
        every = np.arange(len(self.stage_costs))
        return self.stage_costs.own_average_s(0, every, every)

    @cached_property
    def _weights(self) -> Floats:
        every = np.arange(len(self.stage_costs))
        return self.stage_costs.parameter_bytes(every, every)
