"""What the planners for comparison share: stages as pairs of downsets, the step that finds them, and the plan made of
them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock.cluster import Cluster
from penstock.graph import Layer
from penstock.plan import Plan, Prediction, Stage
from penstock.planner.downsets import Downsets, Floats
from penstock.profile import Profile
from penstock.schedule import default_depth


@dataclass(frozen=True)
class CutStage:
    """A stage in a search: two downsets, and the devices that run the layers between them."""

    smaller: int
    larger: int
    devices: tuple[int, ...]


def split_off_last(best: Floats, choice: np.ndarray[Any, Any], front: Floats, last: Floats, label: int) -> None:
    """Split the layers between a start and an end in two, where that is faster, and keep (cut, label) as the choice.

    ``best`` and ``front`` are [start, end], for all starts or only the first few: the seconds found so far, and the
    seconds of the layers before a cut. ``last`` is [end, cut]: the seconds of the layers after the cut, inf where there
    can be no cut.
    """
    for start in range(min(len(best), len(last) - 1)):
        behind = slice(start + 1, None)  # the order puts every cut and every end after the start
        slowest = np.maximum(front[start, behind], last[behind, behind])
        chosen = slowest.argmin(axis=1)
        found = slowest[np.arange(len(slowest)), chosen]
        better = np.flatnonzero(found < best[start, behind])
        ends = better + start + 1
        best[start, ends] = found[better]
        choice[start, ends, 0] = chosen[better] + start + 1
        choice[start, ends, 1] = label


def asynchronous_plan(
    profile: Profile, cluster: Cluster, downsets: Downsets, stages: Sequence[CutStage], prediction: Prediction
) -> Plan:
    """The stages under PipeDream's schedule, at their usual depths."""
    plan = Plan(
        profile=profile,
        cluster=cluster,
        stages=tuple(
            Stage(layers=downsets.between(stage.smaller, stage.larger), devices=stage.devices) for stage in stages
        ),
        schedule="pipedream",
        microbatches=1,
        prediction=prediction,
    )
    depths = [default_depth(plan.pipeline, index) for index in range(len(stages))]
    return replace(plan, stages=tuple(replace(s, in_flight=d) for s, d in zip(plan.stages, depths, strict=True)))


def device_seconds(profile: Profile, kind: str, speed: float) -> dict[int, float]:
    """For each layer, seconds of its forward and backward on a device. Model inputs cost nothing."""
    rows = zip(profile.graph.layers, profile.compute_s(kind), strict=True)
    return {layer.id: seconds / speed for layer, seconds in rows}


def compute_s_between(profile: Profile, downsets: Downsets, kind: str, speed: float = 1.0) -> Floats:
    """[smaller, larger]: seconds of the forward and backward of the layers between, on one device."""
    seconds = device_seconds(profile, kind, speed)
    return downsets.sums_between(lambda layer: seconds[layer.id])


def parameter_bytes(profile: Profile, layer: Layer) -> float:
    """Bytes of a layer's parameters. The systems compared do not know shared parameters."""
    return float(sum(parameter.num_bytes for parameter in profile.graph.parameters_of([layer.id])))


def lower_bound_s(profile: Profile, cluster: Cluster) -> float:
    """A lower bound for all plans: every layer at the speed of its fastest device, divided among all devices.

    A device does at most as much of that work per second as on the layer that suits it best.
    """
    makes = [(device.kind, device.speed) for device in cluster.devices]
    seconds = {make: np.array(list(device_seconds(profile, *make).values())) for make in dict.fromkeys(makes)}
    fastest = np.min(list(seconds.values()), axis=0)
    busy = fastest > 0
    if not busy.any():
        return 0.0
    rates = {make: float((fastest[busy] / each[busy]).max()) for make, each in seconds.items()}
    return float(fastest.sum()) / sum(rates[make] for make in makes)
