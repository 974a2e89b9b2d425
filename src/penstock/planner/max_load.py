"""The smallest maximum load of a device: the objective of the dnn-partitioning benchmark (NeurIPS 2020).

Each device runs one stage, or nothing. Its load is its seconds of compute and of transfers: a value costs its bytes
over the bandwidth once for the device that makes it, if any other reads it, and once for each other device that reads
it; twice that where its gradient travels too. So a load follows from the stage's two downsets x and y alone:

    load[x, y] = compute of x..y  +  values made in x..y, read after y  +  values made in x, read in x..y
    best[c][y] = min over cuts z, device kinds k of max(best[c - 1 of k][z], load on k of z..y, if it fits)

where c counts the devices of each kind. Cores of the host (kind ``host``) transfer for free: accelerators meet in their
memory. A stage keeps the sum over its layers: weights, gradients, optimizer state, what autograd keeps of a microbatch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock import units
from penstock.cluster import HOST_KIND, Cluster, Device
from penstock.errors import PlanError
from penstock.graph import Layer, LayerGraph
from penstock.plan import Plan, Prediction
from penstock.planner.chains import (
    CutStage,
    asynchronous_plan,
    compute_s_between,
    device_seconds,
    lower_bound_s,
    split_off_last,
)
from penstock.planner.downsets import Downsets, Floats, find_downsets, layer_weights
from penstock.profile import Profile

MOST_STEPS = 5e9
"""Comparisons that a search may make: about half a minute."""

Counts = tuple[int, ...]
"""The number of devices of each kind."""


@dataclass(frozen=True)
class MaxLoadAnswer:
    load_s: float
    stages: tuple[CutStage, ...]
    downsets: Downsets


@dataclass(frozen=True)
class _Search:
    devices: tuple[Device, ...]
    """One device of each kind."""
    best: dict[Counts, Floats]
    """By the numbers of devices used, all of which have a stage: [0, downset]."""
    choice: dict[Counts, np.ndarray[Any, Any]]
    """By the numbers of devices used: [0, downset, (cut, kind of the last device)]."""


def solve(profile: Profile, cluster: Cluster) -> MaxLoadAnswer:
    """Minimise the maximum load over all downsets; devices may stay idle."""
    graph = profile.graph
    downsets = find_downsets(graph, layer_weights(graph, profile.compute_s(cluster.devices[0].kind)))
    search = _search(profile, cluster, downsets)
    used = min(search.best, key=lambda counts: (search.best[counts][0, -1], sum(counts)))
    load_s = float(search.best[used][0, -1])
    if not math.isfinite(load_s):
        need = downsets.sums(lambda layer: _kept_bytes(graph, layer))[-1]
        raise PlanError(
            f"{profile.model} needs {units.show_bytes(need)} and no split of it fits the memory of {cluster.name}; "
            "add a device, or give them more memory"
        )
    return MaxLoadAnswer(load_s, tuple(_stages(search, used, cluster, len(downsets) - 1)), downsets)


def max_load_plan(profile: Profile, cluster: Cluster) -> Plan:
    """The plan with the smallest maximum load, which is the time of a minibatch in its pipeline."""
    answer = solve(profile, cluster)
    need = sum(_kept_bytes(profile.graph, layer) for layer in profile.graph.layers)
    alone = [
        sum(device_seconds(profile, device.kind, device.speed).values())
        for device in cluster.devices
        if device.memory_bytes is None or need <= device.memory_bytes
    ]
    prediction = Prediction(
        seconds_per_minibatch=answer.load_s,
        lower_bound_s=lower_bound_s(profile, cluster),
        data_parallel_s=None,  # the objective has no replicas
        one_device_s=min(alone, default=None),
    )
    return asynchronous_plan(profile, cluster, answer.downsets, answer.stages, prediction)


def _search(profile: Profile, cluster: Cluster, downsets: Downsets) -> _Search:
    devices = tuple(dict.fromkeys(cluster.devices))
    counts = [cluster.devices.count(device) for device in devices]
    if math.prod(count + 1 for count in counts) * len(devices) * len(downsets) ** 2 > MOST_STEPS:
        raise PlanError(
            f"{cluster.name}: {len(devices)} kinds of devices can follow each other in too many ways; "
            "give devices that are nearly alike the same kind, speed and memory"
        )
    # ends are rows, so that the search for the best cut reads consecutive memory
    loads = [np.ascontiguousarray(load.T) for load in _loads_s(profile, cluster, downsets, devices)]
    best: dict[Counts, Floats] = {}
    choice: dict[Counts, np.ndarray[Any, Any]] = {}
    for state in itertools.product(*(range(count + 1) for count in counts)):
        if not any(state):
            continue
        best[state] = np.full((1, len(downsets)), np.inf)
        choice[state] = np.zeros((1, len(downsets), 2), dtype=np.int32)
        for kind, load in enumerate(loads):
            left = _without(state, kind)
            if min(left) < 0:
                continue
            if any(left):
                split_off_last(best[state], choice[state], best[left], load, kind)
            else:
                best[state][0], choice[state][0, :, 1] = load[:, 0], kind
    return _Search(devices, best, choice)


def _loads_s(profile: Profile, cluster: Cluster, downsets: Downsets, devices: tuple[Device, ...]) -> Iterator[Floats]:
    """[smaller, larger] for each kind of device; inf if there is no stage between the two or it does not fit."""
    kept_bytes = downsets.sums_between(lambda layer: _kept_bytes(profile.graph, layer))
    transfer_s = _transferred_bytes(downsets) / min(level.bytes_per_s for level in cluster.levels)
    for device in devices:
        load = compute_s_between(profile, downsets, device.kind, device.speed)
        if device.kind != HOST_KIND:
            load = load + transfer_s
        fits = True if device.memory_bytes is None else kept_bytes <= device.memory_bytes
        yield np.where(downsets.contained & fits, load, np.inf)


def _transferred_bytes(downsets: Downsets) -> Floats:
    """[smaller, larger]: bytes that the stage between receives and sends, both ways; as matrix products, for speed."""
    graph, members = downsets.graph, downsets.members
    row = {layer: index for index, layer in enumerate(graph.order)}
    in_smaller, in_larger = [], []
    for value in graph.sent_values:
        if not value.num_bytes:
            continue
        num_bytes = value.num_bytes + value.gradient_bytes
        made = members[:, row[value.producer]]
        readers = members[:, [row[consumer] for consumer in value.consumers]].sum(axis=1)
        # sent: made in the stage, and not all of its readers are in it or before it
        in_smaller.append(~made)
        in_larger.append(num_bytes * (made & (readers < len(value.consumers))))
        # received: made before the stage, and some of its readers are in the stage
        for count in range(len(value.consumers)):
            in_smaller.append(made & (readers == count))
            in_larger.append(num_bytes * (readers > count))
    if not in_smaller:
        return np.zeros((len(downsets), len(downsets)))
    total: Floats = np.array(in_smaller, dtype=np.float64).T @ np.array(in_larger)
    return total


def _kept_bytes(graph: LayerGraph, layer: Layer) -> float:
    parameters = graph.parameters_of([layer.id])
    return float(sum(2 * each.num_bytes + each.state_bytes for each in parameters) + layer.saved_bytes)


def _without(counts: Counts, kind: int) -> Counts:
    return tuple(count - (each == kind) for each, count in enumerate(counts))


def _stages(search: _Search, counts: Counts, cluster: Cluster, larger: int) -> Iterator[CutStage]:
    """The stages first to last. Each takes the first free device of its kind."""
    parts = []
    while larger > 0:
        cut, kind = (int(x) for x in search.choice[counts][0, larger])
        parts.append((cut, larger, search.devices[kind]))
        larger, counts = cut, _without(counts, kind)
    free = list(range(len(cluster.devices)))
    for smaller, end, device in reversed(parts):
        index = next(each for each in free if cluster.devices[each] == device)
        free.remove(index)
        yield CutStage(smaller, end, (index,))
