"""Says why no plan fits: which stage, by how much, and what would make it fit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from penstock.plan import Plan
from penstock.planner.explore import Explorer
from penstock.planner.hints import Hints
from penstock.planner.request import Request
from penstock.units import show_bytes

HALVINGS = 7
"""Bisection steps: enough to find the sufficient memory to about 1%."""


def explain_infeasible(request: Request) -> str:
    """One sentence about the plan that needs least memory, and the remedies that were found to work."""
    model, cluster = request.profile.model, request.cluster
    if request.family.layout != "once":
        return (
            f"no plan for {model} on {cluster.name} under schedule {request.schedule} fits its devices, keeps to the "
            "hints and has layers for every stage; try 1f1b, which says what is missing"
        )
    unhinted = replace(request, hints=Hints())
    if request.hints != Hints() and _leanest(_with_memory(request, math.inf)) is None:
        return f"no plan for {model} on {cluster.name} keeps to {_unkept(request)}"
    if not request.family.trains and _leanest(_with_memory(unhinted, math.inf)) is None:
        return (
            f"{model} cannot serve {request.samples_per_s:g} samples/s on {cluster.name}; ask for fewer, or add devices"
        )
    if not any(device.memory_bytes for device in cluster.devices):
        return f"no plan for {model} on {cluster.name} keeps to {_unkept(request)}"
    times, plan = _least_memory(request)
    if plan is None:
        return f"no plan for {model} on {cluster.name} fits, however large its devices; drop a hint"
    index, place = max(
        ((i, p) for i, stage in enumerate(plan.stages) for p in range(len(stage.devices))),
        key=lambda at: _excess_bytes(request, plan, *at),
    )
    stage = plan.stages[index]
    device = stage.devices[place]
    need, have = request.need_bytes(stage, stage.shares[place]), cluster.devices[device].memory_bytes or math.inf
    names = request.profile.graph.by_id
    whole = len(plan.stages) == 1
    layers = "the whole model" if whole else f"{names[stage.layers[0]].name} .. {names[stage.layers[-1]].name}"
    leanest = "one stage" if whole else f"{len(plan.stages)} stages"
    remedies = [f"devices with {times:.2g} times the memory", *_other_remedies(request)]
    return (
        f"no plan for {model} fits {cluster.name}: even the leanest, of {leanest}, needs {show_bytes(need)} for stage "
        f"{index} ({layers}) where device {device} has {show_bytes(have)}, {show_bytes(need - have)} too little. "
        f"What would fit: {', or '.join(remedies)}"
    )


def _unkept(request: Request) -> str:
    """The hints that prevent a plan: each one whose removal allows a plan, or all if several must be removed."""
    boundless = _with_memory(request, math.inf)
    without = request.hints.without_each()
    guilty = [name for name, hints in without.items() if _leanest(replace(boundless, hints=hints)) is not None]
    if guilty:
        return f"{' and '.join(guilty)}; drop or change {'it' if len(guilty) == 1 else 'one of them'}"
    return f"these hints together: {', '.join(without)}; drop or change some"


def _excess_bytes(request: Request, plan: Plan, index: int, place: int) -> float:
    stage = plan.stages[index]
    limit = request.cluster.devices[stage.devices[place]].memory_bytes
    return request.need_bytes(stage, stage.shares[place]) - (limit if limit is not None else math.inf)


def _least_memory(request: Request) -> tuple[float, Plan | None]:
    """The smallest multiple of the devices' memory for which a plan fits, and that plan."""
    high, plan = 2.0, None
    while plan is None and high < 2**40:
        plan = _leanest(_with_memory(request, high))
        high *= 2
    low, high = high / 4, high / 2
    if plan is None:
        return math.inf, None
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        found = _leanest(_with_memory(request, middle))
        if found is None:
            low = middle
        else:
            high, plan = middle, found
    return high, plan


def _other_remedies(request: Request) -> list[str]:
    found = []
    if not request.recompute and _leanest(replace(request, recompute=True)):
        found.append("recomputing")
    batch = request.profile.batch_size
    smaller = [size for size in (batch // 2, batch // 4, batch // 8, 1) if 0 < size < batch]
    for size in dict.fromkeys(smaller):
        profile = replace(request.profile, batch_size=size)
        if _leanest(replace(request, profile=profile, microbatches=min(request.microbatches, size))):
            found.append(f"a batch of {size} instead of {batch}")
            break
    levels = request.cluster.levels
    for times in (2, 4):
        more = replace(
            request.cluster,
            devices=request.cluster.devices * times,
            levels=(*levels[:-1], replace(levels[-1], size=levels[-1].size * times)),
        )
        if _leanest(replace(request, cluster=more)):
            found.append(f"{times} times as many devices")
            break
    return found


def _with_memory(request: Request, times: float) -> Request:
    def larger(memory_bytes: int | None) -> int | None:
        return None if memory_bytes is None or math.isinf(times) else int(memory_bytes * times)

    devices = tuple(replace(d, memory_bytes=larger(d.memory_bytes)) for d in request.cluster.devices)
    return replace(request, cluster=replace(request.cluster, devices=devices))


def _leanest(request: Request) -> Plan | None:
    """A plan that fits, if necessary with one microbatch in flight; the fastest is preferred."""
    explorers: list[Callable[[], Explorer]] = [
        lambda: Explorer(request.stage_costs, request.hints),
        lambda: Explorer(replace(request.stage_costs, deepest=1), request.hints),
    ]
    for deepest, explorer in zip((None, 1), explorers, strict=True):
        found = explorer().tightest() if request.family.trains else explorer().quickest(request.period_limit_s)
        for each in found:
            plan = request.plan_of_found(each, shallow=deepest is not None and request.family.asynchronous)
            if plan is not None:
                return plan
    return None
