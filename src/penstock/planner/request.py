"""One request for a plan: its candidates, and the predicted seconds of each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from penstock.cluster import Cluster
from penstock.compression import up_to
from penstock.cost import CostModel, best_shares
from penstock.plan import NO_PREDICTION, Plan, Prediction, Stage
from penstock.plan_costs import PlanCosts
from penstock.planner.explore import Explorer, cuts_of
from penstock.planner.hints import Hints
from penstock.planner.layout import cut_for, layouts
from penstock.planner.search import Found
from penstock.planner.stages import StageCosts
from penstock.profile import Profile
from penstock.schedule import Family, depths_with_slack, family, planned_depth, shallow_depths
from penstock.schedule.custom import custom_workers, parse_custom
from penstock.simulate import simulate

SIMULATED = 6
"""How many cuts are simulated: those that are best by the cost model alone."""
MOST_SIMULATED_WORKERS = 32
"""Larger pipelines are not simulated, but assumed to keep the pace of their bottleneck."""
CONFIRMED = 1.02
"""A simulation within this factor of the cost model's steady state confirms it."""
CLOSE_ENOUGH = 1.01
"""A gain below 1% is not worth more memory or more microbatches."""
LONGEST_TURN = 32
"""The longest cycle in which all replicas get equally many turns, in minibatches, that a simulation covers whole."""
MOST_CROWDED = 3
"""How often the search is repeated for plans that send less."""

Scored = tuple[float, Plan]
"""Predicted seconds, and the plan."""
Placed = tuple[tuple[int, ...], tuple[int, ...]]
"""The layers of a stage, and its devices."""


@dataclass(frozen=True)
class Request:
    """A profile to plan on a cluster, under a schedule with so many microbatches per minibatch."""

    profile: Profile
    cluster: Cluster
    schedule: str
    microbatches: int
    hints: Hints
    recompute: bool = True
    samples_per_s: float | None = None
    custom: tuple[str, ...] = ()
    """The actions of each worker in a minibatch, for the schedule ``custom``."""
    compress: str = "exact"
    """The coarsest compression allowed between workers."""

    def scored(self) -> list[Scored]:
        """The baselines and the best cuts that fit and are allowed; empty if there are none."""
        scored = [*self.baselines, *(self._deepened(plan) for plan in self.cuts[:SIMULATED])]
        if not scored and self.family.asynchronous:
            scored = [self._simulated(plan) for plan in self._shallow()]
        return scored

    @property
    def baselines(self) -> list[Scored]:
        """The baselines that are allowed."""
        return [item for item in self._plain.values() if self.allowed(item[1])]

    @cached_property
    def _plain(self) -> dict[str, Scored]:
        """The baselines that fit, allowed or not."""
        return {name: self._simulated(plan) for name, plan in self._baselines.items() if plan}

    def finished(self, scored: Scored) -> Scored:
        """One of its plans, with its prediction."""
        seconds, plan = self._mildest(scored)
        return seconds, replace(plan, prediction=self._prediction(seconds, plan))

    def _prediction(self, seconds: float, plan: Plan) -> Prediction:
        beside = {name: self._plain[name][0] if name in self._plain else None for name in self._baselines}
        if self.family.trains:
            bound_s = min(self._explorer.lower_bound_s * self.microbatches, seconds)  # above it by rounding at most
            return replace(
                plan.prediction,
                seconds_per_minibatch=seconds,
                lower_bound_s=bound_s,
                data_parallel_s=beside["data_parallel_s"],
                one_device_s=beside["one_device_s"],
            )
        layers = self.profile.graph.order
        bound_s = sum(min(self.costs.forward_s([n], device) for device in self._different_devices) for n in layers)
        return replace(
            plan.prediction,
            seconds_per_minibatch=PlanCosts(plan).bottleneck_s(),
            latency_s=seconds,
            lower_bound_s=min(bound_s, seconds),
            data_parallel_s=beside["data_parallel_s"],
            one_device_s=beside["one_device_s"],
        )

    @cached_property
    def family(self) -> Family:
        return family(self.schedule)

    @cached_property
    def costs(self) -> CostModel:
        size = self.profile.batch_size / self.microbatches
        return CostModel(profile=self.profile, cluster=self.cluster, microbatch_size=size)

    @cached_property
    def stage_costs(self) -> StageCosts:
        return StageCosts(
            costs=self.costs,
            downsets=cuts_of(self.profile, self.cluster),
            family=self.family,
            microbatches=self.microbatches,
            recompute=self.recompute,
            together=self.hints.layers_together(self.profile.graph),
            compression=self.compress,
        )

    @cached_property
    def _explorer(self) -> Explorer:
        return Explorer(self.stage_costs, self.hints)

    # Candidates.

    @cached_property
    def _baselines(self) -> dict[str, Plan | None]:
        """All layers as one stage: on all devices, and on the fastest device that can hold it."""
        if self.custom:
            return {"data_parallel_s": None, "one_device_s": None}
        whole, devices = self.profile.graph.order, range(len(self.cluster.devices))
        alone = [plan for device in self._different_devices if (plan := self.plan_of([(whole, (device,))]))]
        return {
            "data_parallel_s": self.plan_of([(whole, tuple(devices))]),
            "one_device_s": min(alone, key=self._estimate_s, default=None),
        }

    @cached_property
    def _different_devices(self) -> list[int]:
        return [self.cluster.devices.index(device) for device in dict.fromkeys(self.cluster.devices)]

    @cached_property
    def candidates(self) -> list[Plan]:
        """The best plans by the cost model, best first."""
        plain = [plan for plan in self._baselines.values() if plan and self.allowed(plan)]
        return sorted([*plain, *self.cuts], key=self._rank)

    def _rank(self, plan: Plan) -> tuple[float, int]:
        return self._estimate_s(plan), len(plan.devices)

    @cached_property
    def cuts(self) -> list[Plan]:
        """The plans of the search that are not predicted slower than the baselines, best first.

        The search looks at each cut by itself. If the best plan is slower because messages of other cuts pass the same
        ports, the search is repeated with links slower by that factor, for plans that send less.
        """
        if self.family.layout != "once":
            return sorted(self._laid_out(), key=self._rank)
        plans = self._searched(self._explorer)
        crowding = 1.0
        for _ in range(MOST_CROWDED if self.family.trains and plans else 0):
            best = PlanCosts(min(plans, key=self._rank))
            cut_s = max(map(best.cut_s, range(len(best.plan.stages) - 1)), default=0.0)
            if cut_s == 0 or best.busiest_port_s() <= best.bottleneck_s() * CLOSE_ENOUGH:
                break
            crowding = max(crowding, best.busiest_port_s() / cut_s) * CLOSE_ENOUGH
            plans += self._searched(Explorer(replace(self.stage_costs, crowding=crowding), self.hints))
        return sorted({plan.stages: plan for plan in plans}.values(), key=self._rank)

    def _searched(self, explorer: Explorer) -> list[Plan]:
        known = [plan for plan in self._baselines.values() if plan and self.allowed(plan)]
        if not self.family.trains:
            found = explorer.quickest(self.period_limit_s)
        else:
            limit_s = min((PlanCosts(plan).bottleneck_s() for plan in known), default=math.inf)
            if not self.family.asynchronous:  # some plans trade a longer period for a shorter fill
                limit_s = min((self._estimate_s(plan) / self.microbatches for plan in known), default=math.inf)
            found = explorer.tightest(limit_s)
            if found and not self.family.asynchronous:
                first = [plan for each in found for plan in self.plans_of_found(each)]
                loosest_s = min((self._estimate_s(plan) / self.microbatches for plan in first), default=limit_s)
                found += explorer.trade_offs(found[0].value_s, loosest_s)
        return [plan for each in found for plan in self.plans_of_found(each) if self.allowed(plan)]

    def _laid_out(self) -> Iterator[Plan]:
        """If the schedule decides which workers have which stages: the best cuts for each such layout."""
        ways = [custom_workers(parse_custom(self.custom))] if self.custom else layouts(self.family, self._num_devices)
        for places in ways:
            stages = cut_for(self.stage_costs, list(places))
            plan = self.plan_of(stages) if stages else None
            if plan and self.allowed(plan):
                yield plan

    @property
    def _num_devices(self) -> int:
        return len(self.cluster.devices)

    def plans_of_found(self, found: Found) -> Iterator[Plan]:
        """The plan at its usual depth and, if that does not fit or must recompute, also with fewer microbatches in
        flight.

        The search counts each downstream device as one microbatch, which is too few where devices differ.
        """
        usual = self.plan_of_found(found)
        if usual:
            yield usual
        if not self.family.all_forwards_first and (usual is None or any(stage.recompute for stage in usual.stages)):
            shallow = self.plan_of_found(found, shallow=True, recompute=False)
            if shallow:
                yield shallow

    def plan_of_found(self, found: Found, *, shallow: bool = False, recompute: bool | None = None) -> Plan | None:
        stages = [(stage.layers, stage.devices) for stage in found.stages]
        return self.plan_of(stages, shallow=shallow, recompute=recompute)

    def plan_of(self, stages: Sequence[Placed], *, shallow: bool = False, recompute: bool | None = None) -> Plan | None:
        """The plan with these layers on these devices, with shares and depths; None if a device is too small.

        ``shallow`` takes as many microbatches in flight as fit, even if they are too few to keep every stage busy.
        ``recompute`` says whether their memory is that of recomputed ones; by default as in the request.
        """
        sends = [self.compress] * (len(stages) - 1) + ["exact"]
        made = tuple(
            Stage(layers=layers, devices=devices, shares=self._shares(layers, devices), sends=how)
            for (layers, devices), how in zip(stages, sends, strict=True)
        )
        plan = Plan(
            profile=self.profile,
            cluster=self.cluster,
            stages=made,
            schedule=self.schedule,
            microbatches=self.microbatches,
            prediction=NO_PREDICTION,
            custom=self.custom,
        )
        if max(plan.pipeline.round_sizes) > self.family.widest_round(self.microbatches):
            return None
        if shallow:
            again = self.recompute if recompute is None else recompute
            deepest = [self._deepest(plan, index, again=again) for index in range(len(made))]
            return self._fitted(plan, shallow_depths(plan.pipeline, deepest))
        return self._fitted(plan, [self._depth(plan, index) for index in range(len(made))])

    def _shares(self, layers: tuple[int, ...], devices: tuple[int, ...], *, again: bool = False) -> tuple[int, ...]:
        """Shares in proportion to speed."""
        kinds = list(dict.fromkeys(self.cluster.devices[device] for device in devices))
        if len(kinds) == 1:
            return (1,) * len(devices)
        examples = [self.cluster.devices.index(kind) for kind in kinds]
        counts = [sum(self.cluster.devices[device] == kind for device in devices) for kind in kinds]
        seconds = np.array([self.costs.microbatch_s(layers, d, self.family, recompute=again) for d in examples])
        shares = best_shares(seconds, counts)
        return tuple(int(shares[kinds.index(self.cluster.devices[device])]) for device in devices)

    def _depth(self, plan: Plan, index: int) -> int:
        return planned_depth(self.schedule, plan.pipeline, index, plan.microbatches)

    def _deepest(self, plan: Plan, index: int, *, again: bool) -> int:
        """The most microbatches in flight that fit, with or without recomputing; at least one."""
        stage = replace(plan.stages[index], recompute=again)
        depths = range(self._depth(plan, index), 1, -1)
        return next((depth for depth in depths if self.fits(replace(stage, in_flight=depth))), 1)

    def _fitted(self, plan: Plan, depths: Sequence[int]) -> Plan | None:
        """The plan with these depths, recomputing where it must; None if a device is too small even so."""
        stages = []
        for stage, depth in zip(plan.stages, depths, strict=True):
            deep = replace(stage, in_flight=depth)
            if not self.fits(deep):
                again = self._shares(stage.layers, stage.devices, again=True)
                deep = replace(deep, recompute=True, shares=again)
                if not (self.recompute and self.family.trains and self.fits(deep)):
                    return None
            stages.append(deep)
        fitted = replace(plan, stages=tuple(stages))
        if plan.shares_workers and not self._workers_fit(fitted):
            fitted = replace(plan, stages=tuple(replace(stage, recompute=self.recompute) for stage in stages))
            return fitted if self._workers_fit(fitted) else None
        return fitted

    def _workers_fit(self, plan: Plan) -> bool:
        costs = PlanCosts(plan)
        limits = [self.cluster.devices[device].memory_bytes for device in plan.devices]
        return all(limit is None or costs.memory_bytes(worker) <= limit for worker, limit in enumerate(limits))

    def fits(self, stage: Stage) -> bool:
        limits = [self.cluster.devices[device].memory_bytes for device in stage.devices]
        different = dict.fromkeys(zip(limits, stage.shares, strict=True))
        return all(limit is None or self.need_bytes(stage, share) <= limit for limit, share in different)

    def need_bytes(self, stage: Stage, share: int) -> float:
        return self.costs.stage_memory_bytes(stage, self.family, share)

    def _shallow(self) -> list[Plan]:
        """For the case that nothing fits at the usual depth: the same stages with fewer microbatches in flight."""
        for deepest in (2, 1):
            found = Explorer(replace(self.stage_costs, deepest=deepest), self.hints).tightest()
            plans = [plan for each in found[:SIMULATED] if (plan := self.plan_of_found(each, shallow=True))]
            if plans := [plan for plan in plans if self.allowed(plan)]:
                return plans
        return []

    def allowed(self, plan: Plan) -> bool:
        """Whether the hints allow the plan, and whether it is fast enough if a rate is asked for."""
        replicas = [len(stage.devices) for stage in plan.stages]
        if not self.hints.allow(replicas, plan.stage_of_layer, self.profile.graph):
            return False
        return self.family.trains or PlanCosts(plan).bottleneck_s() <= self.period_limit_s * (1 + 1e-9)

    @property
    def period_limit_s(self) -> float:
        return self.profile.batch_size / self.samples_per_s if self.samples_per_s else math.inf

    # Scores.

    def _estimate_s(self, plan: Plan) -> float:
        costs = PlanCosts(plan)
        if not self.family.trains:
            return costs.latency_s()
        return max(costs.minibatch_s(), plan.microbatches * costs.busiest_port_s())

    def _simulated(self, plan: Plan) -> Scored:
        """The simulator's seconds, unless they confirm the cost model's steady state."""
        estimate_s = self._estimate_s(plan)
        alone = len(plan.stages) == 1 and self.family.trains and not self.family.accumulates  # nobody to wait for
        if alone or not self.family.trains or len(plan.devices) > MOST_SIMULATED_WORKERS:
            return estimate_s, plan
        first = plan.stages[0]
        minibatches = _whole_turns(plan, at_least=len(plan.devices) + 4)
        if plan.is_asynchronous:  # long enough for a steady rate despite warm-up and drain
            minibatches = 4 * len(plan.devices) + 4 * plan.pipeline.round_sizes[0] * first.in_flight + 16
            minibatches = -(-minibatches // plan.microbatches) + 2
        rate = simulate(plan, minibatches).samples_per_s
        simulated_s = plan.profile.batch_size / rate if rate > 0 else 0.0
        if not plan.is_asynchronous:
            return simulated_s, plan
        return (estimate_s if simulated_s <= estimate_s * CONFIRMED else simulated_s), plan

    def _deepened(self, plan: Plan) -> Scored:
        """The plan with more microbatches in flight than by PipeDream's rule, if that brings an uneven pipeline to its
        pace."""
        best = self._simulated(plan)
        if not plan.is_asynchronous:
            return best
        costs = PlanCosts(plan)
        goal_s = plan.microbatches * max(costs.bottleneck_s(), costs.busiest_port_s())
        for rounds in (1, 1.5, 2, 3, 4, 6):
            if best[0] <= goal_s * CLOSE_ENOUGH:
                break
            deeper = self._fitted(plan, depths_with_slack(plan.pipeline, rounds))
            if deeper is None or [s.recompute for s in deeper.stages] != [s.recompute for s in plan.stages]:
                break
            scored = self._simulated(deeper)
            if scored[0] < best[0] / CLOSE_ENOUGH:
                best = scored
        return best

    def _mildest(self, scored: Scored) -> Scored:
        """The plan with each stage's compression as mild as possible without losing time."""
        seconds, plan = scored
        limit_s = seconds * CLOSE_ENOUGH
        for index, stage in enumerate(plan.stages):
            for how in up_to(stage.sends)[:-1]:
                stages = (*plan.stages[:index], replace(stage, sends=how), *plan.stages[index + 1 :])
                milder_s, milder = self._deepened(replace(plan, stages=stages))
                if milder_s <= limit_s and self.allowed(milder):
                    seconds, plan = milder_s, milder
                    break
        return seconds, plan


def fastest(scored: Iterable[Scored]) -> Scored | None:
    """The fastest; of equally fast ones, that with the fewest devices."""
    return min(scored, key=lambda item: (item[0], len(item[1].devices)), default=None)


def _whole_turns(plan: Plan, *, at_least: int) -> int:
    """A number of minibatches such that, in the half that is measured, all replicas have had equally many turns."""
    turn = math.lcm(*plan.pipeline.round_sizes)
    turn //= math.gcd(turn, plan.microbatches)
    turn = turn if turn <= LONGEST_TURN else 1
    return 4 * turn * -(-at_least // (4 * turn)) + 1
