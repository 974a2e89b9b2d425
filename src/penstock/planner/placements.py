"""The ways to give devices to stages, from the last stage to the first.

A node is a state: which devices are free, and how close the next stage (upstream) must be to the one just placed. That
closeness is a level of the cluster, promised when a stage is placed and kept by the next: no link between the two
stages is above that level. Equal devices and equal hosts are interchangeable, so states that differ only by their names
are one. If there are too many states even so, stages take devices in one order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

from penstock.cluster import Cluster
from penstock.planner.stages import Team

MOST_STATES = 128
"""Up to so many states, every placement is tried."""

Sizes = Callable[[int], Sequence[int]]
"""The team sizes allowed for a stage with so many stages downstream."""


@dataclass(slots=True)
class Step:
    """The placing of one stage."""

    target: int
    """The node that it leads to."""
    team: Team | None
    """None leaves a device idle."""
    promise: int
    """The highest level of the links into the stage."""


@dataclass(slots=True)
class Node:
    free: frozenset[int]
    """An example of a set of free devices; it stands for all sets of equal devices."""
    stages: int
    """The number of stages placed so far."""
    promise: int
    """The highest level of the links out of the stage to be placed."""
    near: frozenset[int] | None
    """The devices that the stage to be placed may use, since only these keep the promise; None for any."""
    steps: list[Step] = field(default_factory=list)


@dataclass(frozen=True)
class Placements:
    """Nodes sorted so that steps lead from earlier to later ones. At the first node all devices are free."""

    cluster: Cluster
    nodes: list[Node]
    every_way: bool
    """Whether every placement is included."""
    choose: Callable[[Node], Iterator[tuple[tuple[int, ...], Node]]]
    """The teams that a state allows, with the states that they lead to. Some may come more than once."""
    key: Callable[[Node], object]

    def devices(self, path: Sequence[Step]) -> list[tuple[int, ...]]:
        """The devices of each stage for a path of steps from the first node. Stages come last to first."""
        node, found, tree = self.nodes[0], [], _Tree(self.cluster)
        for step in path:
            wanted = self.key(self.nodes[step.target])
            for team, after in self.choose(node):
                alike = tree.team(team) == step.team if team else step.team is None
                if alike and self.key(after) == wanted:
                    break
            else:  # pragma: no cover - a step came from `choose`
                raise AssertionError("a step that no choice explains")
            if team:
                found.append(team)
            node = after
        return found


def find_placements(cluster: Cluster, sizes: Sizes, *, count_stages: bool = False) -> Placements:
    """Every placement if there are not too many, otherwise those along the order of the devices.

    ``count_stages`` distinguishes states by the number of stages placed.
    """
    tree = _Tree(cluster)
    every_way = tree.states <= MOST_STATES

    def key(node: Node) -> object:
        where = (tree.shape(node.free, node.near), node.promise) if every_way else (node.free, node.promise, node.near)
        return where, node.stages if count_stages else 0

    def choose(node: Node) -> Iterator[tuple[tuple[int, ...], Node]]:
        allowed = sizes(node.stages)
        teams = tree.teams(node.free & node.near if node.near is not None else node.free, node.free, node.near)
        if not every_way:
            teams = _in_order(node, allowed)
        for team in teams:
            if len(team) in allowed:
                free = node.free - set(team)
                for promise, near in tree.promises(team, free):
                    yield team, Node(free, node.stages + 1, promise, near)
            elif not team:  # idle: the device next in order
                yield team, Node(node.free - {max(node.free)}, node.stages, node.promise, node.near)

    start = Node(frozenset(range(len(cluster.devices))), 0, len(cluster.levels) - 1, None)
    nodes, numbers = [start], {key(start): 0}
    for node in nodes:  # grows while it is read
        seen = set()
        for team, after in choose(node):
            name = key(after)
            if name not in numbers:
                numbers[name] = len(nodes)
                nodes.append(after)
            step = Step(numbers[name], tree.team(team) if team else None, after.promise)
            if (step.target, step.team) not in seen:
                seen.add((step.target, step.team))
                node.steps.append(step)
    return _sorted(Placements(cluster, nodes, every_way, choose, key))


def _sorted(found: Placements) -> Placements:
    """Sorted by the number of free devices, most first."""
    order = sorted(range(len(found.nodes)), key=lambda number: (-len(found.nodes[number].free), number))
    place = {number: index for index, number in enumerate(order)}
    for node in found.nodes:
        for step in node.steps:
            step.target = place[step.target]
    found.nodes[:] = [found.nodes[number] for number in order]
    return found


def _in_order(node: Node, sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The next devices from the end of the cluster; or none, which leaves the last free one idle."""
    last = max(node.free, default=-1)
    for size in sizes:
        team = tuple(range(last - size + 1, last + 1))
        if size <= last + 1 and (node.near is None or node.near.issuperset(team)):
            yield team
    if node.stages and node.free:
        yield ()


class _Tree:
    """The cluster's groups, innermost first."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.top = len(cluster.levels) - 1
        self.reach = cluster.reach
        classes = list(dict.fromkeys(cluster.devices))
        self.class_of = [classes.index(device) for device in cluster.devices]
        self._teams: dict[tuple[int, ...], Team] = {}
        inner = self.reach[0]
        self.groups = [range(start, start + inner) for start in range(0, len(cluster.devices), inner)]

    def team(self, devices: tuple[int, ...]) -> Team:
        if devices not in self._teams:
            self._teams[devices] = Team.of(devices, self.cluster, self.class_of)
        return self._teams[devices]

    @property
    def states(self) -> int:
        """About how many distinct sets of free devices there are, if equal groups are interchangeable."""
        alike: dict[tuple[int, ...], int] = {}
        for group in self.groups:
            counts = [0] * (max(self.class_of) + 1)
            for device in group:
                counts[self.class_of[device]] += 1
            alike[tuple(counts)] = alike.get(tuple(counts), 0) + 1
        ways = 1
        for each, groups in alike.items():
            inside = math.prod(count + 1 for count in each)
            ways *= math.comb(inside - 1 + groups, groups)
        return ways

    def shape(self, free: frozenset[int], near: frozenset[int] | None) -> object:
        """A key that is the same for states that differ only by the names of equal devices and groups."""
        return self._shape(self.top, 0, free, near)

    def _shape(self, level: int, group: int, free: frozenset[int], near: frozenset[int] | None) -> object:
        start = group * self.reach[level]
        marked = near is not None and start in near and len(near) == self.reach[level]
        members = range(start, start + self.reach[level])
        kinds = tuple(self.class_of[device] for device in members)  # groups that were never equal stay apart
        if level == 0:
            return marked, tuple(sorted(kinds)), tuple(sorted(self.class_of[d] for d in members if d in free))
        size = self.cluster.levels[level].size
        below = [self._shape(level - 1, group * size + child, free, near) for child in range(size)]
        return marked, tuple(sorted(below, key=repr))

    def promises(self, team: Sequence[int], free: frozenset[int]) -> Iterator[tuple[int, frozenset[int] | None]]:
        """The levels that the links into a team may promise, each with the group that keeps the promise, if it has
        devices left."""
        for level in range(self.top):
            size = self.reach[level]
            first = min(team) // size
            if first == max(team) // size:
                group = frozenset(range(first * size, (first + 1) * size))
                if group & free:
                    yield level, group
        yield self.top, None

    def teams(
        self, eligible: frozenset[int], free: frozenset[int], near: frozenset[int] | None
    ) -> Iterator[tuple[int, ...]]:
        """The distinct subsets of the eligible devices. Of equal devices in a group, the first are taken."""
        choices: list[list[tuple[int, ...]]] = []
        shapes: list[object] = []
        for number, group in enumerate(self.groups):
            by_class: dict[int, list[int]] = {}
            for device in group:
                if device in eligible:
                    by_class.setdefault(self.class_of[device], []).append(device)
            members = [by_class[kind] for kind in sorted(by_class)]  # so that equal groups have equal choices
            takes = [range(len(kind) + 1) for kind in members]
            choices.append(
                [
                    tuple(device for kind, take in zip(members, taken, strict=True) for device in kind[:take])
                    for taken in product(*takes)
                ]
            )
            parent = number // self.cluster.levels[1].size if self.top > 0 else 0
            shapes.append((parent, repr(self._shape(0, number, free, near)), len(choices[-1])))
        yield from self._combined(choices, shapes, 0, (), {})

    def _combined(
        self,
        choices: list[list[tuple[int, ...]]],
        shapes: list[object],
        at: int,
        taken: tuple[int, ...],
        limits: dict[object, int],
    ) -> Iterator[tuple[int, ...]]:
        """Combinations in which, of equal groups, no later one gives more devices than an earlier one."""
        if at == len(choices):
            if taken:
                yield tuple(sorted(taken))
            return
        most = limits.get(shapes[at], len(choices[at]) - 1)
        for index in range(most + 1):
            yield from self._combined(choices, shapes, at + 1, taken + choices[at][index], limits | {shapes[at]: index})
