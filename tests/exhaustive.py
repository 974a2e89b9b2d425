"""Every plan there is for a small model on a small cluster: what the planner's searches are compared with."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from penstock.graph import LayerGraph
from penstock.plan import Plan
from penstock.plan_costs import PlanCosts
from penstock.planner.request import Placed, Request


def best_s(request: Request) -> float:
    """By the cost model, of the plans that fit, keep to the hints and can run; inf if there is none."""
    return min((seconds(request, plan) for plan in plans(request)), default=math.inf)


def seconds(request: Request, plan: Plan) -> float:
    costs = PlanCosts(plan)
    return costs.minibatch_s() if request.family.trains else costs.latency_s()


def plans(request: Request) -> Iterator[Plan]:
    devices = frozenset(range(len(request.cluster.devices)))
    for layers in _chains(request.profile.graph):
        for teams in _teams(devices, len(layers)):
            plan = request.plan_of(list[Placed](zip(layers, teams, strict=True)))
            if plan and request.allowed(plan) and not (plan.is_asynchronous and plan.pipeline.ties):
                yield plan


def _chains(graph: LayerGraph) -> list[list[tuple[int, ...]]]:
    """All ways to cut the layers into stages."""
    before: dict[int, set[int]] = {layer: set() for layer in graph.order}
    for value in graph.values:
        for consumer in value.consumers:
            before[consumer].add(value.producer)
    subsets = (
        set(each) for size in range(1, len(graph.order) + 1) for each in itertools.combinations(graph.order, size)
    )
    downsets = [each for each in subsets if all(before[layer] <= each for layer in each)]

    def from_(start: set[int]) -> list[list[tuple[int, ...]]]:
        if len(start) == len(graph.order):
            return [[]]
        return [
            [tuple(layer for layer in graph.order if layer in larger - start), *rest]
            for larger in downsets
            if start < larger
            for rest in from_(larger)
        ]

    return from_(set())


def _teams(free: frozenset[int], stages: int) -> Iterator[list[tuple[int, ...]]]:
    """All ways to give devices to so many stages, some left idle."""
    if stages == 0:
        yield []
        return
    for size in range(1, len(free) - stages + 2):
        for team in itertools.combinations(sorted(free), size):
            for rest in _teams(free - set(team), stages - 1):
                yield [team, *rest]
