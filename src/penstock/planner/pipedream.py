"""PipeDream's own formulas, for comparison: what its optimizer would answer, over the same cuts, fast.

A dynamic program per level of the cluster (PipeDream, section 3.1; hierarchical form of its code). At a level with M
machines, bandwidth B, and W devices in each machine, ``best[m][x, y]`` is the seconds per minibatch of the layers
between downsets x and y on m machines:

    alone     (C + 4 (m-1) P / (B m) / W) / m
    pipeline  min over z, m' of max(best[m-m'][x, z], (C + 4 (m'-1) P / (B m')) / m' of z..y,
                                    2 out[z] / (B m'), 2 out[y] / (B m') unless y is the end)

The next level takes best[M] for C. Cuts here count every tensor once; PipeDream's counted some that were consumed
already, so on some graphs this finds less than its optimizer printed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.cluster import ANY_KIND, Cluster, Level
from penstock.errors import PlanError
from penstock.plan import Plan, Prediction
from penstock.planner.chains import CutStage, asynchronous_plan, compute_s_between, parameter_bytes, split_off_last
from penstock.planner.downsets import Bools, Downsets, Floats, find_downsets, layer_weights
from penstock.profile import Profile


@dataclass(frozen=True, kw_only=True)
class PipeDreamOptions:
    """The options of PipeDream's optimizer."""

    straight: bool = False
    """Whether replication is forbidden."""
    memory_bytes: float | None = None
    """The limit of its memory check, if used."""
    fewer_machines: bool = False
    compression: float | None = 1.0
    """A factor on the bytes of activations that are sent; None counts sending as free."""


@dataclass(frozen=True)
class PipeDreamAnswer:
    seconds_per_minibatch: float
    data_parallel_s: float
    stages: tuple[CutStage, ...]
    downsets: Downsets

    @property
    def config(self) -> str:
        return "-".join(str(len(stage.devices)) for stage in self.stages)


@dataclass(frozen=True)
class _Quantities:
    """Matrices [smaller, larger] for the layers between two downsets."""

    valid: Bools
    parameters: Floats
    activations: Floats
    out: Floats
    """[downset]: bytes that cross the cut."""


@dataclass(frozen=True)
class _Solved:
    machines: int
    best: list[Floats]
    """[m][smaller, larger], for m = 1 .. machines"""
    choice: list[np.ndarray[Any, Any]]
    """[m][smaller, larger, (cut, machines of the last part)]; a cut of -1 means one part on m machines"""


def solve(profile: Profile, cluster: Cluster, options: PipeDreamOptions | None = None) -> PipeDreamAnswer:
    """Minimise PipeDream's objective over all downsets of the profile's graph."""
    options = options or PipeDreamOptions()
    downsets = find_downsets(profile.graph, layer_weights(profile.graph, profile.compute_s(ANY_KIND)))
    seconds, quantities = _quantities(profile, downsets)
    data_parallel_s = float(seconds[0, -1])
    solved: list[_Solved] = []
    inside = 1
    for index, level in enumerate(cluster.levels):
        last = index == len(cluster.levels) - 1
        solved.append(_solve_level(seconds, quantities, level, inside, options, only_from_start=last))
        data_parallel_s = _alone_s(data_parallel_s, quantities.parameters[0, -1], level.size, level, inside)
        seconds = solved[-1].best[-1]
        inside = level.size
    if not np.isfinite(seconds[0, -1]):
        raise PlanError(
            f"PipeDream's rules leave no plan for {profile.model} on {cluster.name}: every machine must be used"
            + (" by a stage of its own" if options.straight else " and every stage fit its memory test")
        )
    everything = tuple(range(len(cluster.devices)))
    stages = tuple(_stages(solved, 0, len(downsets) - 1, len(solved) - 1, [everything]))
    return PipeDreamAnswer(float(seconds[0, -1]), data_parallel_s, stages, downsets)


def pipedream_plan(profile: Profile, cluster: Cluster, options: PipeDreamOptions | None = None) -> Plan:
    """What PipeDream's optimizer would choose, as a plan; predicted by its own formulas."""
    answer = solve(profile, cluster, options)
    total_s = sum(profile.compute_s(ANY_KIND))
    prediction = Prediction(
        seconds_per_minibatch=answer.seconds_per_minibatch,
        lower_bound_s=total_s / len(cluster.devices),
        data_parallel_s=answer.data_parallel_s,
        one_device_s=total_s,
    )
    return asynchronous_plan(profile, cluster, answer.downsets, answer.stages, prediction)


def _quantities(profile: Profile, downsets: Downsets) -> tuple[Floats, _Quantities]:
    produced = dict.fromkeys(profile.graph.by_id, 0)
    for value in profile.graph.values:
        produced[value.producer] += value.num_bytes
    quantities = _Quantities(
        valid=downsets.contained,
        parameters=downsets.sums_between(lambda layer: parameter_bytes(profile, layer)),
        activations=downsets.sums_between(lambda layer: 0.0 if layer.is_input else float(produced[layer.id])),
        out=downsets.crossing_bytes(),
    )
    return np.where(quantities.valid, compute_s_between(profile, downsets, ANY_KIND), np.inf), quantities


def _alone_s(seconds: Any, parameter_bytes: Any, machines: int, level: Level, inside: int) -> Any:
    """Seconds of one part on so many machines of a level, including averaging over them."""
    averaging_s = 4 * (machines - 1) * parameter_bytes / (level.bytes_per_s * machines) / inside
    return (seconds + averaging_s) / machines


def _solve_level(
    seconds: Floats, given: _Quantities, level: Level, inside: int, options: PipeDreamOptions, *, only_from_start: bool
) -> _Solved:
    starts = slice(0, 1) if only_from_start else slice(None)
    solved = _Solved(level.size, [], [])
    stashed = given.parameters + given.activations
    parts = [_part_s(seconds, given, level, replicas, options) for replicas in range(1, level.size)]
    for machines in range(1, level.size + 1):
        alone = _alone_s(seconds[starts], given.parameters[starts], machines, level, inside)
        allowed = machines == 1 or not options.straight
        fits = _fits(stashed[starts], math.ceil((level.size - machines) / machines), options)
        best = np.where(fits, alone, np.inf) if allowed else np.full_like(alone, np.inf)
        choice = np.full((*best.shape, 2), (-1, machines), dtype=np.int32)
        if options.fewer_machines and machines > 1:
            fewer = solved.best[-1] < best
            best = np.where(fewer, solved.best[-1], best)
            choice[fewer] = solved.choice[-1][fewer]
        for replicas in range(1, machines):
            if options.straight and replicas > 1:
                break
            last = parts[replicas - 1]
            if options.memory_bytes is not None:
                waiting = math.ceil((level.size - machines) / replicas)
                last = np.where(_fits(stashed.T, waiting, options), last, np.inf)
            split_off_last(best, choice, solved.best[machines - replicas - 1], last, replicas)
        solved.best.append(best)
        solved.choice.append(choice)
    return solved


def _part_s(seconds: Floats, given: _Quantities, level: Level, replicas: int, options: PipeDreamOptions) -> Floats:
    """[end, cut]: the last part of a pipeline on ``replicas`` machines, and the transfers into and out of it."""
    part = _alone_s(seconds, given.parameters, replicas, level, 1)
    if options.compression is not None:
        transfer_s = 2 * given.out / (level.bytes_per_s * replicas) / options.compression
        transfer_s[-1] = 0.0  # nothing leaves the whole graph
        part = np.maximum(part, np.maximum(transfer_s[:, None], transfer_s[None, :]))
    return np.ascontiguousarray(part.T)  # ends are rows, so that the search for the best cut reads consecutive memory


def _fits(stashed: Floats, times: int, options: PipeDreamOptions) -> Any:
    return True if options.memory_bytes is None else stashed * times <= options.memory_bytes


def _stages(
    solved: list[_Solved], smaller: int, larger: int, level: int, groups: list[tuple[int, ...]]
) -> Iterator[CutStage]:
    """Follow the choices down the levels. ``groups`` are the machines of the level above that run these layers."""
    if level < 0:
        yield CutStage(smaller, larger, tuple(device for group in groups for device in group))
        return
    machines, parts, end = solved[level].machines, [], larger
    while True:
        cut, used = (int(x) for x in solved[level].choice[machines - 1][smaller, end])
        if cut < 0:
            parts.append((smaller, end, used))
            break
        parts.append((cut, end, used))
        end, machines = cut, machines - used
    size, first = len(groups[0]) // solved[level].machines, 0
    for start, stop, used in reversed(parts):
        inside = [
            group[machine * size : (machine + 1) * size] for group in groups for machine in range(first, first + used)
        ]
        yield from _stages(solved, start, stop, level - 1, inside)
        first += used
