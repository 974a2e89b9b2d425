"""The costs of a stage on a team of devices, for many stages at once.

A stage lies between two downsets, so whatever adds up over layers is a difference of two sums. A block of costs has a
row for each downset where a stage may begin and a column for each where it may end.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from penstock.cluster import Cluster, Device
from penstock.cost import (
    CostModel,
    best_shares,
    memory_of,
    message,
    pace,
    ring_allreduce,
    stashes_weights,
)
from penstock.planner.downsets import Bools, Downsets, Floats
from penstock.schedule import Family

Ints = np.ndarray[Any, np.dtype[np.int64]]

FEW_DOWNSETS = 64
"""Up to so many downsets, the costs of all stages on a team are cached."""


@dataclass(frozen=True, slots=True)
class Team:
    """The devices of one stage, as far as its costs depend on them."""

    counts: tuple[int, ...]
    """How many devices of each class it has."""
    span: int
    """The level of the cluster that joins its devices; 0 for one device."""
    members: tuple[tuple[tuple[int, ...], ...], ...]
    """For each level, the distinct ways in which the level's members hold devices of the team: how many of each
    class."""

    @classmethod
    def of(cls, devices: Sequence[int], cluster: Cluster, class_of: Sequence[int]) -> Team:
        """``class_of`` has the class of each device of the cluster; equal devices have the same one."""
        classes = range(max(class_of) + 1)

        def counts(some: Iterable[int]) -> tuple[int, ...]:
            found = Counter(class_of[device] for device in some)
            return tuple(found[kind] for kind in classes)

        members = []
        for level in range(len(cluster.levels)):
            together: dict[int, list[int]] = defaultdict(list)
            for device in devices:
                together[cluster.member(level, device)].append(device)
            members.append(tuple(sorted(set(map(counts, together.values())))))
        return cls(counts(devices), cluster.span(devices), tuple(members))

    @property
    def size(self) -> int:
        return sum(self.counts)

    def most_in_one(self, level: int) -> int:
        """The largest number of devices in one member of a level."""
        return max(map(sum, self.members[level]))

    @property
    def kinds(self) -> list[int]:
        """The classes that it has devices of."""
        return [kind for kind, count in enumerate(self.counts) if count]

    @property
    def mixed(self) -> bool:
        return len(self.kinds) > 1


@dataclass(frozen=True)
class Block:
    """Costs of stages on one team, by [begin, end]."""

    period_s: Floats
    """Seconds per microbatch in steady state; inf if the stage is not allowed or does not fit."""
    trip_s: Floats
    """Seconds of one microbatch on the slowest replica."""
    shares: Any
    """[class of the team, begin, end]: microbatches of a round on each replica of the class."""

    def part(self, begin: Ints, end: Ints) -> Block:
        where = np.ix_(begin, end)
        return Block(self.period_s[where], self.trip_s[where], self.shares[:, *where])

    def busiest(self, team: Team, level: int) -> Any:
        """The largest share of all microbatches that passes one member of a level: a device, or a whole host."""
        if not team.mixed:
            return team.most_in_one(level) / team.size
        loads = [self._load(team, member) for member in team.members[level]]
        return np.max(loads, axis=0) / self._load(team, team.counts)

    def _load(self, team: Team, counts: Sequence[int]) -> Any:
        """Microbatches of a round on so many replicas of each class."""
        return np.einsum("cij,c->ij", self.shares, np.array([counts[kind] for kind in team.kinds]))

    def only(self, allowed: Bools) -> Block:
        """The same costs, with a period of inf for stages that are not allowed."""
        return replace(self, period_s=np.where(allowed, self.period_s, np.inf))

    def but(self, other: Block, where: Bools) -> Block:
        """The same costs, replaced by those of ``other`` in some places."""
        return Block(
            np.where(where, other.period_s, self.period_s),
            np.where(where, other.trip_s, self.trip_s),
            np.where(where, other.shares, self.shares),
        )


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    costs: CostModel
    downsets: Downsets
    family: Family
    microbatches: int
    """Microbatches per minibatch, under a synchronous schedule."""
    limited: bool = True
    """Whether the memory of devices is a limit."""
    recompute: bool = True
    """Whether a stage that does not fit may recompute its forward."""
    deepest: int | None = None
    """The most microbatches in flight on a replica."""
    together: Collection[tuple[int, ...]] = ()
    """Groups of layers that must be in one stage."""
    compression: str = "exact"
    """The compression of what crosses a cut."""
    crowding: float = 1.0
    """How many times as long as alone a message occupies its links, because others pass them too."""

    def __len__(self) -> int:
        return len(self.downsets)

    @cached_property
    def classes(self) -> tuple[Device, ...]:
        """The distinct devices of the cluster."""
        return tuple(dict.fromkeys(self.costs.cluster.devices))

    @cached_property
    def class_of(self) -> tuple[int, ...]:
        number = {device: index for index, device in enumerate(self.classes)}
        return tuple(number[device] for device in self.costs.cluster.devices)

    def team(self, devices: Sequence[int]) -> Team:
        return Team.of(devices, self.costs.cluster, self.class_of)

    def block(self, team: Team, behind: int, begin: Ints, end: Ints) -> Block:
        """Costs of the stages between ``begin`` and ``end`` with ``behind`` devices downstream."""
        behind = self._told_apart(team, behind)
        if len(self) > FEW_DOWNSETS:
            return self._block(team, behind, begin, end)
        known = team.counts, team.span, behind
        if known not in self._blocks:  # asked for many times
            every = np.arange(len(self))
            self._blocks[known] = self._block(team, behind, every, every)
        return self._blocks[known].part(begin, end)

    @cached_property
    def _blocks(self) -> dict[tuple[tuple[int, ...], int, int], Block]:
        return {}

    def _told_apart(self, team: Team, behind: int) -> int:
        """The smallest number of downstream devices that gives the same depth."""
        if team.mixed:
            return behind
        return (int(self.depth(behind, team.size)) - 1) * team.size

    def _block(self, team: Team, behind: int, begin: Ints, end: Ints) -> Block:
        depths = self._depths(team, behind, begin, end)
        first, *others = (int(depth) for depth in np.unique(depths))
        block = self._block_of_depth(team, first, begin, end)
        for depth in others:
            block = block.but(self._block_of_depth(team, depth, begin, end), depths == depth)
        return block

    def _depths(self, team: Team, behind: int, begin: Ints, end: Ints) -> Any:
        """Depths by the length of the team's rounds. Downstream rounds have one microbatch per device or more; if more,
        a plan is deeper than this."""
        if not team.mixed:
            return self.depth(behind, team.size)
        ways = (False, True) if self.recompute and self.family.trains else (False,)
        rounds = [self._shares(team, begin, end, again=again)[1] for again in ways]
        return np.min([self.depth(behind, sizes.astype(np.int64)) for sizes in rounds], axis=0)

    def _block_of_depth(self, team: Team, depth: int, begin: Ints, end: Ints) -> Block:
        allowed = self.allowed[np.ix_(begin, end)]
        plain = self._timed(team, depth, begin, end, again=False)
        if not self.has_limits:
            return plain.only(allowed)
        fits = self._fits(team, depth, plain, begin, end, again=False)
        if not self.recompute or not self.family.trains or fits[allowed].all():
            return plain.only(allowed & fits)
        slower = self._timed(team, depth, begin, end, again=True)
        fits_again = self._fits(team, depth, slower, begin, end, again=True)
        return slower.only(allowed & fits_again).but(plain, allowed & fits)

    def depth(self, behind: Any, replicas: Any) -> Any:
        """Microbatches in flight on a replica with so many devices downstream of its stage."""
        own = -(-self.microbatches // replicas)
        if self.family.all_forwards_first:
            return own
        if self.family.halves:  # as many as at the first stage, for which all other devices are downstream
            behind = len(self.costs.cluster.devices) - replicas
        depth = -(-(behind + replicas) // replicas)
        if self.deepest is not None:
            depth = np.minimum(depth, self.deepest)
        return np.minimum(depth, own) if self.family.accumulates else depth

    def _timed(self, team: Team, depth: int, begin: Ints, end: Ints, *, again: bool) -> Block:
        kinds = team.kinds
        stashed = stashes_weights(self.family.asynchronous, depth)
        seconds = self._seconds(team, begin, end, again=again)
        shares, sizes = self._shares(team, begin, end, again=again)
        turn_s = shares * seconds if team.mixed else seconds
        if not self.family.trains:
            return Block(turn_s.max(axis=0) / sizes, seconds.max(axis=0), shares)
        update_s = np.stack(
            [
                _difference(self.update_s(kind, stashed=stashed), begin, end) + self.own_update_s(kind, stashed=stashed)
                for kind in kinds
            ]
        )
        sync_s: Any = 0.0
        if team.size > 1:
            weights = self.parameter_bytes(begin, end)
            sync_s = ring_allreduce(weights, team.size).seconds(self.costs.cluster.links[team.span].ring)
            sync_s = sync_s + np.max([self.own_average_s(kind, begin, end) for kind in kinds], axis=0)
        microbatches = self.microbatches if self.family.accumulates else None
        period_s = pace(turn_s, update_s, sync_s, round_size=sizes, microbatches=microbatches)
        period_s = np.where(sizes <= self.family.widest_round(self.microbatches), period_s, np.inf)
        return Block(period_s, seconds.max(axis=0), shares)

    def _seconds(self, team: Team, begin: Ints, end: Ints, *, again: bool) -> Floats:
        """[class of the team, begin, end]: seconds of a microbatch, including its messages."""
        handled_s = self.handled_s[begin][:, None] + self.handled_s[end][None, :]
        own_s = np.stack([self.own_s(kind, begin, end) for kind in team.kinds])
        return self._computed_s(team, begin, end, again=again) + own_s + handled_s

    def _computed_s(self, team: Team, begin: Ints, end: Ints, *, again: bool) -> Floats:
        return np.stack([_difference(self.compute_s(kind, again=again), begin, end) for kind in team.kinds])

    def _shares(self, team: Team, begin: Ints, end: Ints, *, again: bool) -> tuple[Any, Any]:
        """Microbatches of a round on a replica, [class of the team, begin, end], and on all replicas together. They
        follow from computing alone, as in the finished plan."""
        counts = [team.counts[kind] for kind in team.kinds]
        shares = best_shares(self._computed_s(team, begin, end, again=again), counts)
        return shares, np.einsum("cij,c->ij", shares, np.array(counts)) if team.mixed else float(team.size)

    def _fits(self, team: Team, depth: int, timed: Block, begin: Ints, end: Ints, *, again: bool) -> Bools:
        fits = np.ones((len(begin), len(end)), dtype=bool)
        for kind, shares in zip(team.kinds, timed.shares, strict=True):
            limit = self.classes[kind].memory_bytes
            if limit is not None:
                need = self.memory_bytes(begin, end, depth, self.family.most_in_flight(depth, shares), again=again)
                fits &= need <= limit
        return fits

    def memory_bytes(self, begin: Ints, end: Ints, depth: int, in_flight: Any, *, again: bool) -> Floats:
        memory = memory_of(
            weights=self.parameter_bytes(begin, end),
            state=self._state_bytes(begin, end),
            saved=_difference(self._saved_sums, begin, end),
            received=self._received_bytes[np.ix_(begin, end)],
            sent=self._sent_bytes[np.ix_(begin, end)],
            largest=self.costs.largest_added(self.family),
            recompute=again,
            trains=self.family.trains,
        )
        need: Floats = memory.at(in_flight=in_flight, versions=self.family.versions(depth))
        return need

    @cached_property
    def crossing_bytes(self) -> Floats:
        """[downset]: bytes that cross the cut per microbatch."""
        return self.downsets.crossing_bytes(lambda value: self.costs.sent_bytes(value, self.compression))

    @cached_property
    def handled_s(self) -> Floats:
        """[downset]: a worker's own time for the messages across the cut, on either side."""
        seconds: Floats = self.costs.handled_s(self.crossing_bytes, self.family)
        return seconds

    @cached_property
    def cut_s(self) -> list[Floats]:
        """[level][downset]: seconds per microbatch that the cut occupies a link of that level."""
        return [self.crowding * message(self.crossing_bytes).occupied_s(link) for link in self.costs.cluster.links]

    @cached_property
    def crossing_s(self) -> list[Floats]:
        """[level][downset]: seconds until everything across the cut has arrived, including latency."""
        return [message(self.crossing_bytes).seconds(link) for link in self.costs.cluster.links]

    @cached_property
    def has_limits(self) -> bool:
        return self.limited and any(device.memory_bytes is not None for device in self.classes)

    @cached_property
    def allowed(self) -> Bools:
        """[begin, end]: whether there can be a stage between the two."""
        inside: Bools = self.downsets.contained & ~self._forbidden[None, :]
        return inside

    @cached_property
    def _forbidden(self) -> Bools:
        """[downset]: whether a cut there would separate layers that must stay together."""
        tied = self._tied_layers if self.family.asynchronous else []
        return self.downsets.parts_any_of([*tied, *self.together])

    @cached_property
    def _tied_layers(self) -> list[list[int]]:
        return [users for _, users in self._parameter_users if len(users) > 1]

    @cached_property
    def _parameter_users(self) -> list[tuple[str, list[int]]]:
        users: dict[str, list[int]] = {}
        for layer in self.costs.profile.graph.layers:
            for name in layer.parameters:
                users.setdefault(name, []).append(layer.id)
        return list(users.items())

    # Sums by downset.

    @cached_property
    def _compute_sums(self) -> dict[tuple[int, bool], Floats]:
        return {}

    def compute_s(self, kind: int, *, again: bool = False) -> Floats:
        """[downset]: seconds of forward and backward of its layers on a device of this class; ``again`` adds a second
        forward."""
        if (kind, again) not in self._compute_sums:
            device = self.class_of.index(kind)
            self._compute_sums[kind, again] = self.downsets.sums(
                lambda layer: self.costs.microbatch_s([layer.id], device, self.family, recompute=again)
            )
        return self._compute_sums[kind, again]

    @cached_property
    def _update_sums(self) -> dict[tuple[int, bool], Floats]:
        return {}

    def update_s(self, kind: int, *, stashed: bool) -> Floats:
        """[downset]: seconds of the update of its weights on a device of this class."""
        if (kind, stashed) not in self._update_sums:
            device = self.class_of.index(kind)
            self._update_sums[kind, stashed] = self.downsets.sums(
                lambda layer: self.costs.update_s([layer.id], device, stashed=stashed)
            )
        return self._update_sums[kind, stashed]

    def own_s(self, kind: int, begin: Ints, end: Ints) -> Floats:
        """[begin, end]: a worker's own time per microbatch, including loading if the stage reads data."""
        device = self.class_of.index(kind)
        own_s, load_s = self.costs.own_microbatch_s(device, self.family), self.costs.load_s(device)
        reads = (_difference(self._data_readers, begin, end) > 0).astype(np.float64)
        seconds: Floats = own_s + load_s * reads
        return seconds

    def own_update_s(self, kind: int, *, stashed: bool) -> float:
        """A worker's own time per update."""
        return self.costs.own_update_s(self.class_of.index(kind), stashed=stashed)

    def own_average_s(self, kind: int, begin: Ints, end: Ints) -> Floats:
        """[begin, end]: a worker's own time to average the stage's gradients."""
        device = self.class_of.index(kind)
        if kind not in self._average_sums:
            once_s = self.costs.own_average_s([], device)
            self._average_sums[kind] = self.downsets.sums(
                lambda layer: self.costs.own_average_s([layer.id], device) - once_s
            )
        return self.costs.own_average_s([], device) + _difference(self._average_sums[kind], begin, end)

    @cached_property
    def _average_sums(self) -> dict[int, Floats]:
        return {}

    @cached_property
    def _data_readers(self) -> Floats:
        """[downset]: the number of its layers that read data."""
        return self.downsets.sums(lambda layer: float(layer.reads_data))

    def parameter_bytes(self, begin: Ints, end: Ints) -> Floats:
        return self._per_parameter("num_bytes", begin, end)

    def _state_bytes(self, begin: Ints, end: Ints) -> Floats:
        return self._per_parameter("state_bytes", begin, end)

    def _per_parameter(self, field: str, begin: Ints, end: Ints) -> Floats:
        """A sum over parameters. A parameter that several layers of a stage share counts once."""
        total = _difference(self._parameter_sums[field], begin, end)
        for size, users in self._shared_parameters[field]:
            total = total + size * (users[end][None, :] > users[begin][:, None])
        return total

    @cached_property
    def _parameter_sums(self) -> dict[str, Floats]:
        """Sums over the parameters that only one layer uses."""
        graph = self.costs.profile.graph
        alone = {name for name, users in self._parameter_users if len(users) == 1}

        def sums(field: str) -> Floats:
            return self.downsets.sums(
                lambda layer: float(sum(getattr(p, field) for p in graph.parameters_of([layer.id]) if p.name in alone))
            )

        return {field: sums(field) for field in ("num_bytes", "state_bytes")}

    @cached_property
    def _shared_parameters(self) -> dict[str, list[tuple[float, Floats]]]:
        """For the parameters that several layers use: the size, and how many of these layers are in each downset."""
        by_name = self.costs.profile.graph.parameter_by_name
        found: dict[str, list[tuple[float, Floats]]] = {"num_bytes": [], "state_bytes": []}
        for name, users in self._parameter_users:
            if len(users) > 1:
                held = self.downsets.sums(lambda layer, users=users: float(layer.id in users))  # type: ignore[misc]
                for field, entries in found.items():
                    entries.append((float(getattr(by_name[name], field)), held))
        return found

    @cached_property
    def _saved_sums(self) -> Floats:
        return self.downsets.sums(lambda layer: self.costs.saved_bytes(layer.id))

    @cached_property
    def _received_bytes(self) -> Floats:
        """[begin, end]: bytes of the values made before a stage and read in it."""
        return self.downsets.received_bytes(self.costs.value_bytes)

    @cached_property
    def _sent_bytes(self) -> Floats:
        """[begin, end]: bytes of the values made in a stage and read downstream."""
        return self.downsets.sent_bytes(self.costs.value_bytes)


def _difference(sums: Floats, begin: Ints, end: Ints) -> Floats:
    result: Floats = sums[end][None, :] - sums[begin][:, None]
    return result
