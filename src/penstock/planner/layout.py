"""Plans whose schedule decides where stages are: several on each worker, or as the user's own schedule says.

Only the cuts are left to choose. The search over placements cannot do that, since there a device has one stage.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from penstock.planner.stages import StageCosts
from penstock.schedule import Family
from penstock.schedule.builders import position_on

MOST_LAPS = 4
"""More stages on a worker shorten the bubble little and send much more."""

Places = list[tuple[int, ...]]
"""The devices of each stage."""


def layouts(kind: Family, num_devices: int) -> Iterator[Places]:
    """The ways to lay stages over the devices in their order: pipelines of any length, with as many replicas as fill
    the devices, and several stages on each worker."""
    for positions in range(2, num_devices + 1):
        replicas = num_devices // positions
        teams = [tuple(range(p * replicas, (p + 1) * replicas)) for p in range(positions)]
        for laps in range(2, (MOST_LAPS if kind.layout == "laps" else 2) + 1):
            yield [teams[position_on(kind.layout, stage, positions)] for stage in range(positions * laps)]


def cut_for(costs: StageCosts, places: Places) -> list[tuple[tuple[int, ...], tuple[int, ...]]] | None:
    """Layers for each stage so that the slowest stage or cut is as fast as possible; None if there are too few
    layers."""
    every, ends = np.arange(len(costs)), []
    best = np.where(every == 0, 0.0, np.inf)
    for index, devices in enumerate(places):
        behind = len({device for later in places[index + 1 :] for device in later} - set(devices))
        team = costs.team(devices)
        period_s = costs.block(team, behind, every, every).period_s
        if index and places[index - 1] != devices:
            level = costs.costs.cluster.span((*places[index - 1], *devices))
            busiest = max(end.most_in_one(level) / end.size for end in (team, costs.team(places[index - 1])))
            best = np.maximum(best, costs.cut_s[level] * busiest)
        reached = np.maximum(best[:, None], period_s)
        ends.append(reached.argmin(axis=0))
        best = reached.min(axis=0)
    if not np.isfinite(best[-1]):
        return None
    end, stages = len(costs) - 1, []
    for devices, choice in zip(reversed(places), reversed(ends), strict=True):
        begin = int(choice[end])
        stages.append((costs.downsets.between(begin, end), devices))
        end = begin
    return stages[::-1]
