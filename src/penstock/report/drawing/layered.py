"""Layered drawing of a directed acyclic graph, from top to bottom (Sugiyama, Tagawa and Toda, 1981).

Nodes are in ranks, so that every edge leads down. An edge over several ranks has a bend in each rank between, and bends
are ordered and placed like nodes: first for few crossings, then for straight lines. This module does not know what a
node is, or how high a rank is drawn.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import inf
from operator import mul, sub

ORDER_SWEEPS = 24
PLACE_SWEEPS = 16
STRAIGHTEN_ROUNDS = 3
NODE_GAP, BEND_GAP = 16.0, 11.0
BEND_WIDTH = 2.0
JOG = 14.0
"""A smaller step to the side looks like a mistake."""
GRAVITY = 0.1
"""How strongly a point is pulled to the middle: enough that unconnected parts do not drift off."""
STRAIGHTNESS = {0: 1.0, 1: 2.0, 2: 8.0}
"""How strongly an edge pulls its ends above each other, by how many of them are bends. Long lines should be
straight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    width: float
    band: int
    """All nodes of a band are above those of the next band."""
    leads: bool = False
    """Whether it is in the first rank of its band, which has only such nodes."""


Edge = tuple[int, int]
Ranks = list[list[int]]
Neighbours = Sequence[list[int]]


@dataclass(frozen=True)
class Ranked:
    """Nodes in ranks, and the bends of long edges between them. Points are nodes, then bends."""

    nodes: Sequence[Node]
    edges: Sequence[Edge]
    ranks: tuple[int, ...]
    """The rank of each point."""
    routes: tuple[tuple[int, ...], ...]
    """For each edge, the points that it passes, from its source to its target."""

    @cached_property
    def num_ranks(self) -> int:
        return max(self.ranks) + 1

    @cached_property
    def rows(self) -> Ranks:
        rows: Ranks = [[] for _ in range(self.num_ranks)]
        for point, rank in enumerate(self.ranks):
            rows[rank].append(point)
        return rows

    @property
    def width(self) -> float:
        """The width of the widest rank with its points side by side. The drawing is at least as wide."""
        return max(sum(self.width_of(point) + self._gap(point) for point in row) for row in self.rows)

    def is_bend(self, point: int) -> bool:
        return point >= len(self.nodes)

    def width_of(self, point: int) -> float:
        return BEND_WIDTH if self.is_bend(point) else self.nodes[point].width

    def distance(self, left: int, right: int) -> float:
        """The smallest distance between the middles of two neighbours."""
        return (self.width_of(left) + self.width_of(right) + self._gap(left) + self._gap(right)) / 2

    def _gap(self, point: int) -> float:
        return BEND_GAP if self.is_bend(point) else NODE_GAP

    @cached_property
    def steps(self) -> tuple[Edge, ...]:
        """The pieces of all routes, from rank to rank, each once."""
        return tuple(dict.fromkeys(step for route in self.routes for step in pairwise(route)))


def rank_nodes(nodes: Sequence[Node], edges: Sequence[Edge]) -> Ranked:
    """Ranks follow from longest paths. Nodes come band by band, leading ones first, and edges lead to later nodes."""
    ranks = _node_ranks(nodes, edges)
    bends: list[int] = []
    trunks: dict[int, list[int]] = {}
    routes = []
    for source, target in edges:
        # Edges from a node within its band are drawn as one line that forks as late as possible.
        shared = nodes[source].band == nodes[target].band
        trunk = trunks.setdefault(source, [source]) if shared else [source]
        while ranks[source] + len(trunk) < ranks[target]:
            bends.append(ranks[source] + len(trunk))
            trunk.append(len(nodes) + len(bends) - 1)
        routes.append((*trunk[: ranks[target] - ranks[source]], target))
    return Ranked(nodes, edges, (*ranks, *bends), tuple(routes))


def _node_ranks(nodes: Sequence[Node], edges: Sequence[Edge]) -> list[int]:
    before: list[list[int]] = [[] for _ in nodes]
    after: list[list[int]] = [[] for _ in nodes]
    for source, target in edges:
        before[target].append(source)
        after[source].append(target)
    ranks: list[int] = []
    first = 0
    last_of_band: dict[int, int] = {}
    for index, node in enumerate(nodes):
        if index and node.band != nodes[index - 1].band:
            first = max(ranks) + 1
        elif index and nodes[index - 1].leads and not node.leads:
            first += 1
        ranks.append(max([first, *(ranks[source] + 1 for source in before[index])]))
        last_of_band[node.band] = max(ranks[-1], last_of_band.get(node.band, 0))
    for index, node in enumerate(nodes):
        if not before[index] and not node.leads and after[index]:  # an input goes down to its first reader
            ranks[index] = min(last_of_band[node.band], *(ranks[target] - 1 for target in after[index]))
    return ranks


def place(ranked: Ranked) -> tuple[float, ...]:
    """The x position of each point's middle."""
    above: list[list[int]] = [[] for _ in ranked.ranks]
    below: list[list[int]] = [[] for _ in ranked.ranks]
    for source, target in ranked.steps:
        above[target].append(source)
        below[source].append(target)
    rows = _ordered(_first_order(ranked, below), above, below)
    x = _positions(ranked, rows, above, below)
    _snap(ranked, rows, above, x)
    _straighten(ranked, rows, x)
    _snap(ranked, rows, above, x)
    return tuple(x)


def _first_order(ranked: Ranked, below: Neighbours) -> Ranks:
    """Points in the order of a walk down from each source, so that connected points start out together."""
    rows: Ranks = [[] for _ in range(ranked.num_ranks)]
    seen: set[int] = set()
    for start in sorted(range(len(ranked.ranks)), key=lambda point: ranked.ranks[point]):
        stack = [start]
        while stack:
            point = stack.pop()
            if point not in seen:
                seen.add(point)
                rows[ranked.ranks[point]].append(point)
                stack.extend(reversed(below[point]))
    return rows


def _ordered(rows: Ranks, above: Neighbours, below: Neighbours) -> Ranks:
    """The best of several sweeps down and up, each sorting a rank by the mean position of its neighbours."""
    best, fewest = [list(row) for row in rows], _crossings(rows, below)
    for sweep in range(ORDER_SWEEPS):
        if fewest == 0:
            break
        downwards = sweep % 2 == 0
        for rank in range(1, len(rows)) if downwards else range(len(rows) - 2, -1, -1):
            fixed = _shares(rows[rank - 1 if downwards else rank + 1])
            own = _shares(rows[rank])
            near = above if downwards else below
            mean = {p: sum(fixed[q] for q in near[p]) / len(near[p]) if near[p] else own[p] for p in rows[rank]}
            rows[rank].sort(key=mean.__getitem__)
        count = _crossings(rows, below)
        if count < fewest:
            best, fewest = [list(row) for row in rows], count
    return best


def _shares(row: Sequence[int]) -> dict[int, float]:
    """The position of each point in its rank, between 0 and 1, so that ranks of different sizes compare."""
    return {point: (index + 0.5) / len(row) for index, point in enumerate(row)}


def _crossings(rows: Ranks, below: Neighbours) -> int:
    total = 0
    for upper, lower in pairwise(rows):
        index = {point: i for i, point in enumerate(lower)}
        seen: list[int] = []
        for point in upper:
            ends = sorted(index[target] for target in below[point])
            total += sum(len(seen) - bisect_right(seen, end) for end in ends)
            for end in ends:
                insort(seen, end)
    return total


def _positions(ranked: Ranked, rows: Ranks, above: Neighbours, below: Neighbours) -> list[float]:
    """Each point as close to the mean of its neighbours as order and distances allow. Sweeps until positions settle."""
    x = [0.0] * len(ranked.ranks)
    offsets = [[0.0, *accumulate(ranked.distance(left, right) for left, right in pairwise(row))] for row in rows]
    for row, steps in zip(rows, offsets, strict=True):
        for point, offset in zip(row, steps, strict=True):
            x[point] = offset - steps[-1] / 2
    for sweep in range(PLACE_SWEEPS):
        downwards = sweep % 2 == 0
        settles = sweep >= PLACE_SWEEPS - 4  # the last sweeps weigh both sides equally
        for rank in range(len(rows)) if downwards else reversed(range(len(rows))):
            wanted, weights = [], []
            for point in rows[rank]:
                near = above[point] + below[point] if settles else (above if downwards else below)[point]
                pulls = [STRAIGHTNESS[ranked.is_bend(point) + ranked.is_bend(other)] for other in near]
                weights.append(sum(pulls) + GRAVITY)
                wanted.append(sum(map(mul, pulls, (x[other] for other in near))) / weights[-1])
            bases = _rising(list(map(sub, wanted, offsets[rank])), weights)
            for point, base, offset in zip(rows[rank], bases, offsets[rank], strict=True):
                x[point] = base + offset
    return x


def _snap(ranked: Ranked, rows: Ranks, above: Neighbours, x: list[float]) -> None:
    """Move a node that is nearly below its predecessor exactly below it, if there is room."""
    room = _Room(ranked, rows, x)
    for node in (point for row in rows for point in row if not ranked.is_bend(point)):
        nearest = min((x[other] for other in above[node]), key=lambda other: abs(other - x[node]), default=inf)
        low, high = room.of(node)
        if abs(nearest - x[node]) <= JOG and low <= nearest <= high:
            x[node] = nearest


class _Room:
    """The range in which a point can move while the others stay."""

    def __init__(self, ranked: Ranked, rows: Ranks, x: Sequence[float]) -> None:
        self._ranked, self._x = ranked, x
        self._left = {right: left for row in rows for left, right in pairwise(row)}
        self._right = {left: right for row in rows for left, right in pairwise(row)}

    def of(self, point: int) -> tuple[float, float]:
        left, right = self._left.get(point), self._right.get(point)
        low = -inf if left is None else self._x[left] + self._ranked.distance(left, point)
        return low, inf if right is None else self._x[right] - self._ranked.distance(point, right)


def _straighten(ranked: Ranked, rows: Ranks, x: list[float]) -> None:
    """Align the bends of a route vertically as far as neighbours leave room, for as few turns as possible."""
    room = _Room(ranked, rows, x)
    # The longest first, and again once their neighbours have found their places.
    routes = sorted((route for route in ranked.routes if len(route) > 2), key=lambda route: (-len(route), route))
    for source, *bends, target in routes * STRAIGHTEN_ROUNDS:
        start = 0
        while start < len(bends):
            low, high, end = -inf, inf, start
            while end < len(bends):
                least, most = room.of(bends[end])
                if max(low, least) > min(high, most):
                    break
                low, high, end = max(low, least), min(high, most), end + 1
            if end == start:  # rounding left no room
                end, low, high = start + 1, x[bends[start]], x[bends[start]]
            before = x[source] if start == 0 else x[bends[start - 1]]
            after = x[target] if end == len(bends) else before
            fair = min(max((before + after) / 2, low), high)
            straight = next((end_x for end_x in (after, before) if low <= end_x <= high), fair)
            for bend in bends[start:end]:
                x[bend] = straight
            start = end


def _rising(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The non-decreasing numbers closest to these by weighted squares. Neighbours in conflict share their mean."""
    pools: list[tuple[float, float, int]] = []
    for value, own_weight in zip(values, weights, strict=True):
        mean, weight, count = value, own_weight, 1
        while pools and pools[-1][0] > mean:
            before, before_weight, before_count = pools.pop()
            mean = (mean * weight + before * before_weight) / (weight + before_weight)
            weight, count = weight + before_weight, count + before_count
        pools.append((mean, weight, count))
    return [value for value, _, count in pools for _ in range(count)]
