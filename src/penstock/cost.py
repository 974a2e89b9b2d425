"""The cost model: the only formulas of seconds and bytes. Planner and simulator both ask here."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from penstock.cluster import Cluster, Level
from penstock.compression import COMPRESSIONS
from penstock.graph import Value
from penstock.plan import Plan, Stage
from penstock.profile import LayerSeconds, Profile
from penstock.schedule import Action, Family, Kind, family

MOST_SHARES = 4
"""A replica takes at most so many microbatches of a round: longer rounds update less often."""
WORTH_A_LONGER_ROUND = 1.01

Array = np.ndarray[Any, Any]
Sends = Mapping[int, str]
"""How the values that a layer makes travel, where not as they are."""
EXACT: Sends = {}


@dataclass(frozen=True, slots=True)
class Traffic:
    """Messages of one size that cross a link one after another; numbers, or arrays of them."""

    messages: Any
    bytes_each: Any

    def seconds(self, link: Level) -> Any:
        """Until the last is there. Nothing to send takes no time."""
        return self.messages * link.latency_s * (self.bytes_each > 0) + self.occupied_s(link)

    def occupied_s(self, link: Level) -> Any:
        """How long the link can carry nothing else: latency delays, and occupies nothing."""
        return self.messages * self.bytes_each / link.bytes_per_s


def message(num_bytes: Any) -> Traffic:
    return Traffic(1, num_bytes)


def sent_bytes(value: Value, sends: str) -> float:
    """Of a value, on its way to another worker under this compression; its gradient is as large."""
    return value.num_bytes * (COMPRESSIONS[sends].share if value.is_float32 else 1.0)


def ring_allreduce(num_bytes: Any, members: Any) -> Traffic:
    """Each of n members sends and receives 2 (n-1) times an n-th of the bytes."""
    return Traffic(2 * (members - 1), num_bytes / members)


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Costs of running layers of a profile on devices of a cluster, ``microbatch_size`` samples at a time.

    Seconds and activation bytes scale with the samples from what the profile measured; parameters do not.
    """

    profile: Profile
    cluster: Cluster
    microbatch_size: float

    @property
    def scale(self) -> float:
        return self.microbatch_size / self.profile.microbatch_size

    def layer_seconds(self, device: int) -> tuple[LayerSeconds, ...]:
        """Per layer, in graph order, as profiled for this device's kind."""
        return self.profile.seconds_on(self.cluster.devices[device].kind)

    def forward_s(self, layers: Collection[int], device: int, *, halves: bool = False) -> float:
        """With ``halves``, where the two halves of the backward will be taken apart."""
        return (self._sum_s(layers, device, ("forward_s",)) + self._halving_s(layers, device, halves)) * self.scale

    def backward_s(
        self, layers: Collection[int], device: int, *, recompute: bool = False, halves: bool = False
    ) -> float:
        """With ``recompute``, after a second forward."""
        input_s = self.backward_input_s(layers, device, recompute=recompute, halves=halves)
        return input_s + self.backward_weight_s(layers, device)

    def backward_input_s(
        self, layers: Collection[int], device: int, *, recompute: bool = False, halves: bool = False
    ) -> float:
        """The half of a backward that earlier stages wait for."""
        again = ("forward_s",) if recompute else ()
        seconds = self._sum_s(layers, device, ("backward_input_s", *again))
        return (seconds + self._halving_s(layers, device, halves)) * self.scale

    def backward_weight_s(self, layers: Collection[int], device: int) -> float:
        return self._sum_s(layers, device, ("backward_weight_s",)) * self.scale

    def _halving_s(self, layers: Collection[int], device: int, halves: bool) -> float:
        """About as much in the forward, which notes what to put off, as in the backward."""
        return self._sum_s(layers, device, ("halving_s",)) / 2 if halves else 0.0

    def microbatch_s(self, layers: Collection[int], device: int, schedule: Family, *, recompute: bool = False) -> float:
        """Forward and, if the schedule trains, backward."""
        forward_s = self.forward_s(layers, device, halves=schedule.halves)
        if not schedule.trains:
            return forward_s
        return forward_s + self.backward_s(layers, device, recompute=recompute, halves=schedule.halves)

    def update_s(self, layers: Collection[int], device: int, *, stashed: bool) -> float:
        """The optimizer's update; with weights ``stashed`` for microbatches in flight, of a copy of them."""
        return self._sum_s(layers, device, ("update_s", "copy_s") if stashed else ("update_s",))

    def allreduce_s(self, num_bytes: float, devices: Sequence[int]) -> float:
        """A ring all-reduce at the pace of the slowest link."""
        if len(devices) < 2:
            return 0.0
        return float(ring_allreduce(num_bytes, len(devices)).seconds(self.cluster.slowest_link(devices).ring))

    def handled_s(self, num_bytes: Any, schedule: Family) -> Any:
        """That a worker is busy with what crosses a cut next to it: values one way and, if the schedule trains, as many
        gradients the other."""
        return (2 if schedule.trains else 1) * self.cluster.handled_s(num_bytes)

    def parameter_bytes(self, layers: Collection[int]) -> int:
        return sum(parameter.num_bytes for parameter in self.profile.graph.parameters_of(layers))

    def forward_bytes(self, source: Collection[int], target: Collection[int], sends: Sends = EXACT) -> float:
        """What ``target`` reads from ``source``. Model inputs do not count: every stage loads its own."""
        return self._sent_bytes(self._crossing(source, target), sends)

    def _sent_bytes(self, values: Sequence[Value], sends: Sends) -> float:
        return self.scale * sum(sent_bytes(value, sends.get(value.producer, "exact")) for value in values)

    def stage_memory_bytes(self, stage: Stage, schedule: Family, share: int = 1) -> float:
        """Peak bytes of a replica with such a share."""
        in_flight, versions = schedule.most_in_flight(stage.in_flight, share), schedule.versions(stage.in_flight)
        return float(self.stage_memory(stage, schedule).at(in_flight=in_flight, versions=versions))

    def stage_memory(self, stage: Stage, schedule: Family) -> Memory:
        """A buffer has the size of the values even where they travel compressed: to round them takes a copy."""
        graph, layers = self.profile.graph, set(stage.layers)
        parameters = graph.parameters_of(stage.layers)
        others = graph.by_id.keys() - layers
        return memory_of(
            weights=sum(parameter.num_bytes for parameter in parameters),
            state=sum(parameter.state_bytes for parameter in parameters),
            saved=sum(graph.by_id[layer].saved_bytes for layer in stage.layers) * self.scale,
            received=self.forward_bytes(others, layers),
            sent=self.forward_bytes(layers, others),
            largest=self.largest_added(schedule),
            recompute=stage.recompute,
            trains=schedule.trains,
        )

    def largest_added(self, schedule: Family) -> float:
        """Bytes of the largest gradient that is added to another's: none where an update has one microbatch."""
        if not schedule.accumulates or self.microbatch_size >= self.profile.batch_size:
            return 0.0
        return max((parameter.num_bytes for parameter in self.profile.graph.parameters), default=0.0)

    def _crossing(self, source: Collection[int], target: Collection[int]) -> list[Value]:
        graph = self.profile.graph
        return [value for value in graph.crossing(source, target) if not graph.by_id[value.producer].is_input]

    def _sum_s(self, layers: Collection[int], device: int, fields: Sequence[str]) -> float:
        seconds, row = self.layer_seconds(device), self._row
        total: float = sum(getattr(seconds[row[layer]], field) for layer in layers if layer in row for field in fields)
        return total / self.cluster.devices[device].speed

    @cached_property
    def _row(self) -> dict[int, int]:
        """Model inputs have none: every stage that reads one loads it for itself, beside its computing."""
        return {layer.id: row for row, layer in enumerate(self.profile.graph.layers) if not layer.is_input}


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a stage's replica: what it always has, for each version of the weights, and for each microbatch between
    forward and backward. Numbers, or arrays of them."""

    fixed: Any
    per_version: Any
    per_microbatch: Any

    def at(self, *, in_flight: Any, versions: Any) -> Any:
        return self.fixed + versions * self.per_version + in_flight * self.per_microbatch


def memory_of(
    *,
    weights: Any,
    state: Any,
    saved: Any,
    received: Any,
    sent: Any,
    recompute: bool,
    largest: float = 0.0,
    trains: bool = True,
) -> Memory:
    """Weights, gradients, optimizer state, what is kept of microbatches in flight, what was sent of them included, and
    buffers for one message each way, forward and backward. A stage that recomputes keeps its inputs, and the rest for
    one microbatch at a time. A gradient that is added to another is made beside it: the ``largest`` of the model, or
    all of the stage's if less."""
    if not trains:
        return Memory(saved + received + sent, weights, 0.0 * saved)
    fixed = weights + np.minimum(weights, largest) + state + 2 * (received + sent)
    return Memory(fixed + saved, weights, received + sent) if recompute else Memory(fixed, weights, saved + sent)


def pace(turn_s: Any, update_s: Any, sync_s: Any, *, round_size: Any, microbatches: int | None) -> Any:
    """Seconds per microbatch of a stage in steady state, at the pace of the replica that takes longest.

    ``turn_s`` and ``update_s`` [replica, ...] are its share of a round and its update. Update and averaging come once
    per round, or once per minibatch of so many ``microbatches``.
    """
    updates = microbatches or round_size
    return np.max(turn_s / round_size + update_s / updates, axis=0) + sync_s / updates


def best_shares(seconds: Array, counts: Sequence[int]) -> Array:
    """Microbatches of a round for a replica of each class: the quickest round per microbatch, and a short one.

    ``seconds`` [class, ...] is what a microbatch takes on a replica of that class, ``counts`` how many there are. In
    a round of t seconds a replica does the t / seconds microbatches that fit, and t is a multiple of somebody's.
    """
    if len(counts) == 1:
        return np.ones_like(seconds, dtype=np.int64)
    with np.errstate(divide="ignore", invalid="ignore"):
        rounds = [times * each for times in range(1, MOST_SHARES + 1) for each in seconds]
        fit = np.nan_to_num(np.floor(np.stack(rounds)[:, None] / seconds[None] + 1e-9), nan=1.0)
    shares = np.clip(fit, 1, MOST_SHARES)
    sizes = np.einsum("rc...,c->r...", shares, np.array(counts, dtype=np.float64))
    paces = (shares * seconds[None]).max(axis=1) / sizes
    good = paces <= paces.min(axis=0) * WORTH_A_LONGER_ROUND
    shortest = np.where(good, sizes, np.inf).argmin(axis=0)
    chosen: Array = np.take_along_axis(shares, shortest[None, None], axis=0)[0].astype(np.int64)
    return chosen


def stashes_weights(asynchronous: bool, in_flight: int) -> bool:
    """Whether a stage updates while microbatches are in flight, and so keeps versions of its weights."""
    return asynchronous and in_flight > 1


class PlanCosts:
    """Seconds of every action and message of a plan, looked up rather than summed again for each."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.model = CostModel(profile=plan.profile, cluster=plan.cluster, microbatch_size=plan.microbatch_size)
        alike: dict[Any, dict[Kind, float]] = {}  # replicas on devices alike take as long
        self._compute: dict[tuple[int, int], dict[Kind, float]] = {}
        for index, workers in enumerate(plan.pipeline.workers):
            for worker in workers:
                key = index, plan.cluster.devices[plan.devices[worker]]
                if key not in alike:
                    alike[key] = self._compute_of(plan.stages[index], plan.devices[worker])
                self._compute[index, worker] = alike[key]
        self._sends = {layer: stage.sends for stage in plan.stages for layer in stage.layers}
        self._syncs: dict[int, float] = {}

    def _compute_of(self, stage: Stage, device: int) -> dict[Kind, float]:
        stashed = stashes_weights(self.plan.is_asynchronous, stage.in_flight)
        halves, again = self.plan.takes_halves, stage.recompute
        return {
            Kind.FORWARD: self.model.forward_s(stage.layers, device, halves=halves),
            Kind.BACKWARD: self.model.backward_s(stage.layers, device, recompute=again, halves=halves),
            Kind.INPUT: self.model.backward_input_s(stage.layers, device, recompute=again, halves=halves),
            Kind.WEIGHT: self.model.backward_weight_s(stage.layers, device),
            Kind.STEP: self.model.update_s(stage.layers, device, stashed=stashed),
        }

    def compute_s(self, action: Action, worker: int) -> float:
        return self.seconds_of(action.stage, worker)[action.kind]

    def seconds_of(self, stage: int, worker: int) -> Mapping[Kind, float]:
        """Of each kind of action that a worker computes for one of its stages."""
        return self._compute[stage, worker]

    def sync_s(self, stage: int) -> float:
        if stage not in self._syncs:
            self._syncs[stage] = self._sync_s(stage)
        return self._syncs[stage]

    def _sync_s(self, stage: int) -> float:
        """Averaging a stage's gradients over its replicas, and tied ones over their owners too."""
        devices = [self.plan.devices[worker] for worker in self.plan.pipeline.sync_workers(stage)]
        return self.model.allreduce_s(self.sync_bytes(stage), devices)

    def sync_bytes(self, stage: int) -> float:
        """The gradients that a stage averages."""
        return self.model.parameter_bytes(self.plan.stages[stage].layers)

    def message_bytes(self, source: int, target: int) -> float:
        """The values that a stage sends to a later one, or the gradients that it returns to an earlier one."""
        return self._edges[source, target]

    @cached_property
    def _edges(self) -> dict[tuple[int, int], float]:
        """All messages of a microbatch, by the stages that they go from and to."""
        owner = self.plan.stage_of_layer
        edges: dict[tuple[int, int], float] = defaultdict(float)
        for value in self._sent_values:
            source, num_bytes = owner[value.producer], self._value_bytes(value)
            for target in {owner[consumer] for consumer in value.consumers} - {source}:
                edges[source, target] += num_bytes
                edges[target, source] += num_bytes if value.differentiable else 0.0
        return edges

    @cached_property
    def _sent_values(self) -> list[Value]:
        """Those that a layer reads from another. Model inputs are not: every stage loads its own."""
        graph = self.plan.profile.graph
        return [value for value in graph.values if value.consumers and not graph.by_id[value.producer].is_input]

    def _value_bytes(self, value: Value) -> float:
        return self.model.scale * sent_bytes(value, self._sends[value.producer])

    def memory(self, stage: int) -> Memory:
        return self.model.stage_memory(self.plan.stages[stage], family(self.plan.schedule))

    def memory_bytes(self, worker: int) -> float:
        """Peak bytes of a worker."""
        pipeline, kind = self.plan.pipeline, family(self.plan.schedule)
        return sum(
            self.model.stage_memory_bytes(self.plan.stages[stage], kind, pipeline.share_of(worker, stage))
            for stage in pipeline.stages_of[worker]
        )

    def stage_s(self, stage: int) -> float:
        """Seconds per microbatch of a stage in steady state, its updates and averaging shared out; no waiting."""
        workers, shares = self.plan.pipeline.workers[stage], self.plan.stages[stage].shares
        turn_s = np.array([n * self._microbatch_s(stage, worker) for worker, n in zip(workers, shares, strict=True)])
        if not family(self.plan.schedule).trains:
            return float(turn_s.max()) / sum(shares)
        update_s = np.array([self._compute[stage, worker][Kind.STEP] for worker in workers])
        microbatches = self.plan.microbatches if family(self.plan.schedule).accumulates else None
        return float(pace(turn_s, update_s, self.sync_s(stage), round_size=sum(shares), microbatches=microbatches))

    def cut_s(self, stage: int) -> float:
        """Seconds per microbatch on the links into the stage behind this one.

        All that crosses the cut, over the slowest link between any two devices of the two stages. A host has one such
        link for all its devices, so the busiest on either side handles the share of all its replicas. Between two
        stages of the same workers nothing moves.
        """
        ends = self.plan.stages[stage : stage + 2]
        if ends[0].devices == ends[1].devices:
            return 0.0
        cluster = self.plan.cluster
        level = cluster.span((*ends[0].devices, *ends[1].devices))
        occupied_s = float(self._crossing(stage).occupied_s(cluster.links[level]))
        return occupied_s * max(self._busiest(end, level) for end in ends)

    def _busiest(self, stage: Stage, level: int) -> float:
        """The share of all microbatches that passes the busiest of a level's members: devices, or whole hosts."""
        return max(self._by_member(stage, level).values())

    def _by_member(self, stage: Stage, level: int) -> dict[int, float]:
        loads: dict[int, float] = defaultdict(float)
        total = sum(stage.shares)
        for device, share in zip(stage.devices, stage.shares, strict=True):
            loads[self.plan.cluster.member(level, device)] += share / total
        return loads

    def busiest_port_s(self) -> float:
        """Seconds per microbatch on the busiest port of any device or host, out or in: all messages of all stages that
        pass it, values and gradients. What a cut costs is part of it."""
        stages, trains = self.plan.stages, family(self.plan.schedule).trains
        edges = {ends: size for ends, size in self._edges.items() if size and (trains or ends[0] < ends[1])}
        loads_s: dict[tuple[int, int, bool], float] = defaultdict(float)
        for level, link in enumerate(self.plan.cluster.levels):
            members = [self._by_member(stage, level) for stage in stages]
            for (source, target), num_bytes in edges.items() if link.size > 1 else ():
                for out, here, there in ((True, source, target), (False, target, source)):
                    for member, share in members[here].items():
                        leaving = share * (1 - members[there].get(member, 0.0))
                        loads_s[level, member, out] += leaving * num_bytes / link.bytes_per_s
        return max(loads_s.values(), default=0.0)

    def _crossing(self, stage: int) -> Traffic:
        return message(self._crossing_bytes[stage])

    @cached_property
    def _crossing_bytes(self) -> list[float]:
        """What crosses each cut for one microbatch, a value once however many stages behind it read it."""
        owner, crossing = self.plan.stage_of_layer, [0.0] * len(self.plan.stages)
        for value in self._sent_values:
            for cut in range(owner[value.producer], max(owner[consumer] for consumer in value.consumers)):
                crossing[cut] += self._value_bytes(value)
        return crossing

    def bottleneck(self) -> tuple[int, int]:
        """What sets the pace: a stage, as (stage, stage), or the cut behind it, as (stage, stage + 1)."""
        return max(self._loads_s, key=self._loads_s.__getitem__)

    def bottleneck_s(self) -> float:
        """The slowest stage or cut: what a microbatch takes in steady state, however many are in flight; more, where
        devices share too few cores."""
        return max(self._loads_s[self.bottleneck()], self._cores_s)

    @cached_property
    def _cores_s(self) -> float:
        """What all workers of a host compute for a microbatch, over its cores."""
        if self.plan.cluster.cores is None:
            return 0.0
        pipeline, busy_s = self.plan.pipeline, defaultdict[int, float](float)
        for stage, (workers, shares) in enumerate(zip(pipeline.workers, pipeline.shares, strict=True)):
            size = pipeline.round_sizes[stage]
            updates = self.plan.microbatches if family(self.plan.schedule).accumulates else size
            for worker, share in zip(workers, shares, strict=True):
                update_s = self._compute[stage, worker][Kind.STEP]
                turn_s = self._microbatch_s(stage, worker) * share / size
                busy_s[self.plan.cluster.host(self.plan.devices[worker])] += turn_s + update_s / updates
        return max(busy_s.values()) / self.plan.cluster.cores

    @cached_property
    def _loads_s(self) -> dict[tuple[int, int], float]:
        """Seconds per microbatch of all stages of the same workers together, and of all cuts between the same two."""
        stages = range(self.plan.pipeline.num_stages)
        workers_s: dict[tuple[int, ...], float] = defaultdict(float)
        links_s: dict[frozenset[tuple[int, ...]], float] = defaultdict(float)
        devices = [stage.devices for stage in self.plan.stages]
        for stage in stages:
            workers_s[devices[stage]] += self.stage_s(stage)
        for stage in stages[:-1]:
            links_s[frozenset(devices[stage : stage + 2])] += self.cut_s(stage)
        loads = {(stage, stage): workers_s[devices[stage]] for stage in stages}
        return loads | {(stage, stage + 1): links_s[frozenset(devices[stage : stage + 2])] for stage in stages[:-1]}

    def fill_s(self) -> float:
        """How long a synchronous pipeline fills and drains: one microbatch through the workers but the last, forth and
        back. Where stages lie in laps, through one stage of each. Gradients of weights, where they are made apart,
        take its place; laid out there and back, all but the way there."""
        kind, workers = family(self.plan.schedule), self.plan.pipeline.workers
        first_lap = range(len(set(workers)) - 1)
        if not kind.halves:
            return sum(self._trip_s(stage) for stage in first_lap)
        filled = (Kind.FORWARD,) if kind.layout == "there and back" else (Kind.FORWARD, Kind.INPUT)
        spared = () if kind.layout == "there and back" else (Kind.WEIGHT,)
        return sum(
            max(0.0, sum(own[k] for k in filled) - sum(own[k] for k in spared))
            for own in (self._compute[stage, workers[stage][0]] for stage in first_lap)
        )

    def _trip_s(self, stage: int) -> float:
        """One microbatch on the replica that takes longest."""
        return max(self._microbatch_s(stage, worker) for worker in self.plan.pipeline.workers[stage])

    def latency_s(self) -> float:
        """One microbatch through all stages and cuts, alone."""
        stages = range(self.plan.pipeline.num_stages)
        return sum(map(self._trip_s, stages)) + sum(map(self._crossing_s, stages[:-1]))

    def _crossing_s(self, stage: int) -> float:
        here, behind = self.plan.stages[stage : stage + 2]
        return float(self._crossing(stage).seconds(self.plan.cluster.slowest_link((*here.devices, *behind.devices))))

    def input_bytes(self, stage: int) -> float:
        """What a stage reads from earlier ones, per microbatch."""
        return sum(self.message_bytes(source, stage) for source in self.plan.pipeline.reads[stage])

    def output_bytes(self, stage: int) -> float:
        """What a stage sends to later ones, per microbatch."""
        return sum(self.message_bytes(stage, target) for target in self.plan.pipeline.read_by[stage])

    def sent_bytes(self, source: Collection[int], target: Collection[int]) -> float:
        """What some layers send to others per microbatch, as compressed as the plan has it."""
        return self.model.forward_bytes(source, target, self._sends)

    def stage_memory_bytes(self, stage: int) -> float:
        """Peak bytes of the replica that needs most."""
        return max(map(self.memory_bytes, self.plan.pipeline.workers[stage]))

    def memory_share(self, stage: int) -> float | None:
        """Of its device's memory, by the replica that is nearest to filling it; None where memory is no constraint."""
        workers = self.plan.pipeline.workers[stage]
        sizes = {worker: self.plan.cluster.devices[self.plan.devices[worker]].memory_bytes for worker in workers}
        return max((self.memory_bytes(worker) / size for worker, size in sizes.items() if size), default=None)

    def layers_s(self, stage: int, layers: Collection[int]) -> tuple[float, float]:
        """Forward and backward of some of a stage's layers, on the replica that takes longest for a microbatch."""
        slowest = max(self.plan.pipeline.workers[stage], key=lambda worker: self._microbatch_s(stage, worker))
        device, kind = self.plan.devices[slowest], family(self.plan.schedule)
        forward_s = self.model.forward_s(layers, device, halves=kind.halves)
        if not kind.trains:
            return forward_s, 0.0
        again = self.plan.stages[stage].recompute
        return forward_s, self.model.backward_s(layers, device, recompute=again, halves=kind.halves)

    def minibatch_s(self) -> float:
        """A minibatch's microbatches at the bottleneck's pace, and what it takes to fill a synchronous pipeline."""
        fill_s = 0.0 if self.plan.is_asynchronous else self.fill_s()
        return self.plan.microbatches * self.bottleneck_s() + fill_s

    def _microbatch_s(self, stage: int, worker: int) -> float:
        """Computed, and handled of its messages."""
        seconds = self._compute[stage, worker]
        backward_s = seconds[Kind.BACKWARD] if family(self.plan.schedule).trains else 0.0
        return seconds[Kind.FORWARD] + backward_s + self._handled_s[stage]

    @cached_property
    def _handled_s(self) -> list[float]:
        stages, kind = self.plan.stages, family(self.plan.schedule)
        handled_s = [0.0] * len(stages)
        for cut, (here, behind) in enumerate(itertools.pairwise(stages)):
            if here.devices != behind.devices:
                each_s = float(self.model.handled_s(self._crossing_bytes[cut], kind))
                handled_s[cut] += each_s
                handled_s[cut + 1] += each_s
        return handled_s

    def message_handled_s(self, source: int, target: int) -> float:
        """That a worker of either stage is busy with a message from one to the other, if they are not the same."""
        if self.plan.stages[source].devices == self.plan.stages[target].devices:
            return 0.0
        return float(self.plan.cluster.handled_s(self.message_bytes(source, target)))
