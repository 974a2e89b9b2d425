"""Lower bounds: seconds that no plan can beat, whatever its cuts and placement."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from penstock.cost import CostModel, ring_allreduce
from penstock.planner.downsets import Floats
from penstock.schedule import Family

PRECISION = 1e-4


@dataclass(frozen=True)
class Work:
    """Computing in units of work, and how many units each device does per second at most.

    Kinds of devices may be fast at different layers, so seconds on one device do not measure work. The work of a layer
    is its share of the whole model's time, on the device where that share is smallest.
    """

    of_layer: Mapping[int, float]
    rates: tuple[float, ...]
    """Units per second, for each device of the cluster."""

    @property
    def total(self) -> float:
        return sum(self.of_layer.values())


def work_of(costs: CostModel, family: Family) -> Work:
    layers = costs.profile.graph.order
    different = list(dict.fromkeys(costs.cluster.devices))
    examples = [costs.cluster.devices.index(device) for device in different]
    table = np.array([[costs.microbatch_s([layer], device, family) for layer in layers] for device in examples])
    whole = table.sum(axis=1)
    if whole.min() == 0:
        return Work(dict.fromkeys(layers, 0.0), (1.0,) * len(costs.cluster.devices))
    weights = (table / whole[:, None]).min(axis=0)
    rates = {device: 1 / float(whole[kind]) for kind, device in enumerate(different)}
    return Work(
        dict(zip(layers, weights.tolist(), strict=True)), tuple(rates[device] for device in costs.cluster.devices)
    )


def compute_bound_s(costs: CostModel, family: Family) -> float:
    """Seconds per microbatch if all devices shared all computing perfectly and nothing had to be sent."""
    work = work_of(costs, family)
    return work.total / sum(work.rates)


def area_bound_s(costs: CostModel, family: Family, microbatches: int) -> float:
    """The same bound for equal devices, with the averaging that replicas need over the fastest links of the cluster.

    In a period of T, a layer needs enough replicas that its computing, update and averaging fit. Each replica also
    averages, which takes device time. The device time of all layers must fit into that of all devices. If averaging
    overlaps with a backward, only what is left of it after the backward counts. A period must then be possible in two
    cases: without any averaging, and with averaging in place of the backward that hides it.
    """
    devices, graph = len(costs.cluster.devices), costs.profile.graph
    if len(set(costs.cluster.devices)) > 1 or not family.trains:
        return compute_bound_s(costs, family)
    layers = [layer.id for layer in graph.layers]
    compute_s = np.array([costs.microbatch_s([n], 0, family) for n in layers])
    update_s = np.array([costs.update_s([n], 0, stashed=False) for n in layers])
    fastest = max((level.ring for level in costs.cluster.levels), key=lambda ring: ring.bytes_per_s)
    users = Counter(name for layer in graph.layers for name in layer.parameters)
    own = [[p for p in graph.parameters_of([n]) if users[p.name] == 1] for n in layers]
    own_bytes = np.array([sum(p.num_bytes for p in parameters) for parameters in own])
    backward_s = np.array([costs.backward_s([n], 0) for n in layers])
    # Predictions of asynchronous plans count averaging after the backward. Those of synchronous plans are simulated.
    overlaps = not family.asynchronous and costs.may_overlap(family)
    counted = ((0.0, 0.0), (1.0, 1.0)) if overlaps else ((0.0, 1.0),)
    """Two shares for each case: of the backward that hides averaging, and of averaging."""

    def area_s(replicas: Floats, hidden: float, averaged: float) -> Floats:
        """Device seconds per microbatch."""
        ring_s: Floats = ring_allreduce(own_bytes, replicas).occupied_s(fastest)
        overhead_s = update_s + averaged * ring_s - hidden * backward_s * (replicas > 1)
        return compute_s + (overhead_s * replicas / microbatches if family.accumulates else overhead_s)

    def possible(period_s: float) -> bool:
        return all(fits(period_s, *which) for which in counted)

    def fits(period_s: float, hidden: float, averaged: float) -> bool:
        replicas = np.ones(len(layers))
        for _ in range(devices):
            needed_s = area_s(replicas, hidden, averaged)
            short = needed_s > replicas * period_s * (1 + 1e-12)
            if not short.any():
                return bool(needed_s.sum() <= devices * period_s)
            replicas[short] += 1
            if replicas.max() > devices:
                return False
        return False

    low, high = compute_bound_s(costs, family), float(compute_s.sum() + update_s.sum())
    if low == 0 or possible(low):
        return low
    while high - low > PRECISION * low:
        middle = (low + high) / 2
        low, high = (low, middle) if possible(middle) else (middle, high)
    return low
