"""SparsePipe's own formulas, for comparison: unequal devices, shared out in every way rather than in one order.

At a level of bandwidth B, a stage whose layers have P bytes of weights takes, on m units of any kinds,

    (T + 2 (m-1) P / (B m)) / m        T: seconds of the slowest of the units for one minibatch

and a cut with a bytes across it takes 2 a / B, however many share it; a pipeline is as fast as the slowest of these.
Units are devices and, at the next level, servers, each as fast as its own best pipeline. Every device is used.
SparsePipe takes devices in a fixed order, and after the first stage only 1 or an even number; here any share of those
left may come next. With c units of each kind, so that equal ones are not told apart:

    best[c][x, y] = min over cuts z, shares s of max(best[c - s][x, z], stage of z..y on s, transfers at z and y)

Servers of different devices that share a stage would each cut it elsewhere, which no plan can say: they run it whole.
The published answers have one server each; several follow its description, unchecked.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.cluster import Cluster, Level
from penstock.errors import PlanError
from penstock.plan import Plan, Prediction
from penstock.planner.chains import (
    CutStage,
    asynchronous_plan,
    compute_s_between,
    device_seconds,
    lower_bound_s,
    parameter_bytes,
    split_off_last,
)
from penstock.planner.downsets import Downsets, Floats, find_downsets, layer_weights
from penstock.profile import Profile

MOST_STEPS = 2e9
"""Comparisons that a search may make: about ten seconds. If many unequal devices need more, fewer cuts are tried."""
MOST_DOWNSETS = 600
FEWEST_DOWNSETS = 32

Counts = tuple[int, ...]
"""The number of units of each kind."""


@dataclass(frozen=True)
class SparsePipeAnswer:
    seconds_per_minibatch: float
    data_parallel_s: float
    stages: tuple[CutStage, ...]
    downsets: Downsets


@dataclass(frozen=True)
class _Unit:
    """A device, or at a higher level a server."""

    kind: int
    devices: tuple[int, ...]
    parts: tuple[_Unit, ...] = ()


@dataclass(frozen=True)
class _Arrangement:
    makes: tuple[tuple[str, float], ...]
    """The kinds of devices, as name and speed."""
    servers: tuple[tuple[Counts, ...], ...]
    """For each level, the kinds of units, given by what they consist of at the level below."""
    top: _Unit
    """The unit of all devices."""


@dataclass(frozen=True)
class _Split:
    """The best pipelines on the units of one server."""

    counts: Counts
    shares: tuple[Counts, ...]
    choice: dict[Counts, np.ndarray[Any, Any]]
    """By the units to use: [smaller, larger, (cut, units after it)]. A cut of -1 means one stage on all of them."""


@dataclass(frozen=True)
class _Kind:
    """Seconds [smaller, larger] on one unit of a kind."""

    best_s: Floats
    whole_s: Floats
    """Seconds as one stage on all devices of the unit."""
    split: _Split | None = None


@dataclass(frozen=True)
class _Given:
    parameters: Floats
    """[smaller, larger]: bytes of the parameters."""
    out: Floats
    """[downset]: bytes that cross the cut; none for the whole graph."""
    straight: bool


def solve(profile: Profile, cluster: Cluster, *, straight: bool = False) -> SparsePipeAnswer:
    """Minimise SparsePipe's objective over all downsets and all ways to divide the devices."""
    arrangement = _arrange(cluster)
    first = profile.compute_s(arrangement.makes[0][0])
    weights = layer_weights(profile.graph, first)
    downsets = find_downsets(profile.graph, weights, _most_downsets(arrangement, cluster))
    kinds = [_device_kind(profile, downsets, *make) for make in arrangement.makes]
    out = downsets.crossing_bytes()
    out[-1] = 0.0
    given = _Given(downsets.sums_between(lambda layer: parameter_bytes(profile, layer)), out, straight)
    solved = [kinds]
    for index, (level, servers) in enumerate(zip(cluster.levels, arrangement.servers, strict=True)):
        last = index == len(cluster.levels) - 1
        kinds = [_solve_server(kinds, counts, level, given, only_from_start=last) for counts in servers]
        solved.append(kinds)
    (everything,) = kinds
    seconds = float(everything.best_s[0, -1])
    if not math.isfinite(seconds):
        raise PlanError(
            f"SparsePipe's rules leave no plan for {profile.model} on {cluster.name}: each of the "
            f"{len(cluster.devices)} devices needs a stage of its own; leave out --straight, or use fewer devices"
        )
    stages = tuple(_stages(solved, len(cluster.levels), [arrangement.top], 0, len(downsets) - 1))
    return SparsePipeAnswer(seconds, float(everything.whole_s[0, -1]), stages, downsets)


def sparsepipe_plan(profile: Profile, cluster: Cluster, *, straight: bool = False) -> Plan:
    """The best plan by SparsePipe's formulas, predicted by them."""
    answer = solve(profile, cluster, straight=straight)
    prediction = Prediction(
        seconds_per_minibatch=answer.seconds_per_minibatch,
        lower_bound_s=lower_bound_s(profile, cluster),
        data_parallel_s=answer.data_parallel_s,
        one_device_s=min(sum(device_seconds(profile, d.kind, d.speed).values()) for d in cluster.devices),
    )
    return asynchronous_plan(profile, cluster, answer.downsets, answer.stages, prediction)


def _arrange(cluster: Cluster) -> _Arrangement:
    makes = list(dict.fromkeys((device.kind, device.speed) for device in cluster.devices))
    units = [_Unit(makes.index((d.kind, d.speed)), (index,)) for index, d in enumerate(cluster.devices)]
    num_kinds, servers = len(makes), []
    for level in cluster.levels:
        groups = [tuple(units[start : start + level.size]) for start in range(0, len(units), level.size)]
        counts = [tuple(sum(unit.kind == kind for unit in group) for kind in range(num_kinds)) for group in groups]
        distinct = list(dict.fromkeys(counts))
        units = [
            _Unit(distinct.index(count), tuple(d for unit in group for d in unit.devices), group)
            for group, count in zip(groups, counts, strict=True)
        ]
        num_kinds = len(distinct)
        servers.append(tuple(distinct))
    return _Arrangement(tuple(makes), tuple(servers), units[0])


def _most_downsets(arrangement: _Arrangement, cluster: Cluster) -> int:
    """A number of downsets for which the search ends soon. Each state and share takes time in proportion to its square
    or, below the last level, its cube."""
    most = MOST_DOWNSETS
    for index, servers in enumerate(arrangement.servers):
        pairs = sum(math.prod((count + 1) * (count + 2) // 2 for count in counts) for counts in servers)
        power = 2 if index == len(arrangement.servers) - 1 else 3
        most = min(most, int((MOST_STEPS / pairs) ** (1 / power)))
    if most < FEWEST_DOWNSETS:
        raise PlanError(
            f"{cluster.name}: {len(arrangement.makes)} kinds of devices can be shared out in too many ways; "
            "give devices that are nearly alike the same kind and speed"
        )
    return most


def _device_kind(profile: Profile, downsets: Downsets, kind: str, speed: float) -> _Kind:
    seconds = np.where(downsets.contained, compute_s_between(profile, downsets, kind, speed), np.inf)
    return _Kind(seconds, seconds)


def _solve_server(
    kinds: Sequence[_Kind], counts: Counts, level: Level, given: _Given, *, only_from_start: bool
) -> _Kind:
    starts = slice(0, 1) if only_from_start else slice(None)
    states = [state for state in itertools.product(*(range(count + 1) for count in counts)) if any(state)]
    shares = tuple(share for share in states if sum(share) == 1 or not given.straight)
    alone = _Alone(kinds, level, given)
    transfer_s = 2 * given.out / level.bytes_per_s
    transfers_s = np.maximum(transfer_s[:, None], transfer_s[None, :])
    # ends are rows, so that the search for the best cut reads consecutive memory
    last = {key: np.ascontiguousarray(np.maximum(alone(key), transfers_s).T) for key in map(_key, shares)}
    best: dict[Counts, Floats] = {}
    choice: dict[Counts, np.ndarray[Any, Any]] = {}
    for state in states:  # in this order, what is left of a state after a share comes before the state
        best[state] = alone(_key(state))[starts].copy()
        if given.straight and sum(state) > 1:
            best[state][:] = np.inf
        choice[state] = np.full((*best[state].shape, 2), -1, dtype=np.int32)
        for label, share in enumerate(shares):
            left = tuple(all_ - taken for all_, taken in zip(state, share, strict=True))
            if min(left) >= 0 and any(left):
                split_off_last(best[state], choice[state], best[left], last[_key(share)], label)
    return _Kind(best[counts], alone.whole_s(counts), _Split(counts, shares, choice))


_Key = tuple[tuple[int, ...], int]
"""The kinds of units that share a stage, and the number of units. Its seconds depend on nothing else."""


def _key(share: Counts) -> _Key:
    return tuple(kind for kind, count in enumerate(share) if count), sum(share)


class _Alone:
    """Seconds [smaller, larger] of one stage on some of a level's units."""

    def __init__(self, kinds: Sequence[_Kind], level: Level, given: _Given) -> None:
        self._kinds, self._level, self._given = kinds, level, given
        self._found: dict[_Key, Floats] = {}

    def __call__(self, key: _Key) -> Floats:
        if key not in self._found:
            members = key[0]
            alike = len(members) == 1
            slowest = self._kinds[members[0]].best_s if alike else self._slowest_whole_s(members)
            self._found[key] = self._averaged(slowest, key[1])
        return self._found[key]

    def whole_s(self, counts: Counts) -> Floats:
        members, units = _key(counts)
        return self._averaged(self._slowest_whole_s(members), units)

    def _slowest_whole_s(self, members: Sequence[int]) -> Floats:
        slowest: Floats = np.max([self._kinds[kind].whole_s for kind in members], axis=0)
        return slowest

    def _averaged(self, seconds: Floats, units: int) -> Floats:
        averaging_s = 2 * (units - 1) * self._given.parameters / (self._level.bytes_per_s * units)
        shared: Floats = (seconds + averaging_s) / units
        return shared


def _stages(
    solved: Sequence[Sequence[_Kind]], level: int, units: Sequence[_Unit], smaller: int, larger: int
) -> Iterator[CutStage]:
    """Follow the choices down the levels. All ``units`` run these layers, and split them equally if they are equal."""
    split = solved[level][units[0].kind].split
    if split is None or len({unit.kind for unit in units}) > 1:
        yield CutStage(smaller, larger, tuple(device for unit in units for device in unit.devices))
        return
    given_out = [0] * len(split.counts)
    for start, end, share in _parts(split, smaller, larger):
        chosen = []
        for unit in units:
            for kind, count in enumerate(share):
                alike = [part for part in unit.parts if part.kind == kind]
                chosen += alike[given_out[kind] : given_out[kind] + count]
        yield from _stages(solved, level - 1, chosen, start, end)
        given_out = [used + count for used, count in zip(given_out, share, strict=True)]


def _parts(split: _Split, smaller: int, larger: int) -> list[tuple[int, int, Counts]]:
    """The stages of one server: start, end, and how many of its units run each."""
    counts = split.counts
    parts: list[tuple[int, int, Counts]] = []
    while True:
        cut, label = (int(x) for x in split.choice[counts][smaller, larger])
        if cut < 0:
            return [(smaller, larger, counts), *reversed(parts)]
        share = split.shares[label]
        parts.append((cut, larger, share))
        larger, counts = cut, tuple(all_ - taken for all_, taken in zip(counts, share, strict=True))
