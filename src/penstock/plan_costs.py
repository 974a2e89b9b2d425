"""What a plan costs: the cost model's formulas for its stages on its devices."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from penstock.cost import Caches, CostModel, Memory, Traffic, in_buckets, message, pace, stashes_weights
from penstock.graph import Value
from penstock.plan import Plan, Stage
from penstock.schedule import Action, Kind, family


class PlanCosts:
    """Seconds of every action and message of a plan, computed once and then looked up."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.model = CostModel(profile=plan.profile, cluster=plan.cluster, microbatch_size=plan.microbatch_size)
        alike: dict[Any, dict[Kind, float]] = {}  # replicas on equal devices take equally long
        self._compute: dict[tuple[int, int], dict[Kind, float]] = {}
        self._before: dict[tuple[int, int], dict[Kind, float]] = {}
        before: dict[Any, dict[Kind, float]] = {}
        for index, workers in enumerate(plan.pipeline.workers):
            for worker in workers:
                key = index, plan.cluster.devices[plan.devices[worker]]
                if key not in alike:
                    alike[key] = self._compute_of(plan.stages[index], plan.devices[worker])
                    before[key] = self._before_of(plan.stages[index], plan.devices[worker])
                self._compute[index, worker], self._before[index, worker] = alike[key], before[key]
        self._compressions = {layer: stage.sends for stage in plan.stages for layer in stage.layers}
        self._syncs: dict[int, float] = {}

    def _compute_of(self, stage: Stage, device: int) -> dict[Kind, float]:
        stashed = stashes_weights(self.plan.is_asynchronous, stage.in_flight)
        halves, again = self.plan.takes_halves, stage.recompute
        own, speed = self.model.worker_seconds(device), self.plan.cluster.devices[device].speed
        beside = {layer for each in self.plan.stages if each.devices == stage.devices for layer in each.layers}
        crowded_s = self.model.crowded_s(stage.layers, device, beside=beside)
        layers_s = {
            Kind.FORWARD: self.model.forward_s(stage.layers, device, halves=halves) + crowded_s,
            Kind.BACKWARD: self.model.backward_s(stage.layers, device, recompute=again, halves=halves),
            Kind.INPUT: self.model.backward_input_s(stage.layers, device, recompute=again, halves=halves),
            Kind.WEIGHT: self.model.backward_weight_s(stage.layers, device, halves=halves),
            Kind.STEP: self.model.update_s(stage.layers, device, stashed=stashed),
        }
        own_s = {
            Kind.FORWARD: own.forward_s,
            Kind.BACKWARD: own.backward_s,
            Kind.INPUT: own.backward_input_s,
            Kind.WEIGHT: own.backward_weight_s,
            Kind.STEP: own.update_s + (own.copy_s if stashed else 0.0),
        }
        return {kind: seconds + own_s[kind] / speed for kind, seconds in layers_s.items()}

    def _before_of(self, stage: Stage, device: int) -> dict[Kind, float]:
        between_s = self.model.worker_seconds(device).between_s / self.plan.cluster.devices[device].speed
        loads = any(self.plan.profile.graph.by_id[layer].reads_data for layer in stage.layers)
        load_s = self.model.load_s(device) if loads else 0.0
        return {kind: between_s + (load_s if kind is Kind.FORWARD else 0.0) for kind in Kind}

    def before_s(self, stage: int, worker: int, kind: Kind) -> float:
        """A worker's own time before an action computes: bookkeeping, and loading data if the stage reads it."""
        return self._before[stage, worker][kind]

    def caches(self, worker: int) -> Caches | None:
        """Follows a worker's actions and tells their extra seconds due to the action before. None if there never are
        any."""
        device, stages = self.plan.devices[worker], self.plan.pipeline.stages_of[worker]
        cold = {stage: self.model.cold_s(self.plan.stages[stage].layers, device) for stage in stages}
        return Caches(cold) if any(cold.values()) else None

    def compute_s(self, action: Action, worker: int) -> float:
        return self.seconds_of(action.stage, worker)[action.kind]

    def seconds_of(self, stage: int, worker: int) -> Mapping[Kind, float]:
        """Seconds of each kind of action that a worker computes for one of its stages."""
        return self._compute[stage, worker]

    def sync_s(self, stage: int) -> float:
        """Seconds to average a stage's gradients, including what overlaps with a backward."""
        if stage not in self._syncs:
            self._syncs[stage] = self._sync_s(stage)
        return self._syncs[stage]

    def _sync_s(self, stage: int) -> float:
        """Over the replicas of the stage, and of all stages that share a parameter with it."""
        devices = [self.plan.devices[worker] for worker in self.plan.pipeline.sync_workers(stage)]
        return self.model.allreduce_s(self.sync_bytes(stage), devices) + self.own_average_s(stage)

    def own_average_s(self, stage: int) -> float:
        """A worker's own time to average a stage's gradients, on its slowest replica. Zero for a stage that averages
        with nobody."""
        here = self.plan.stages[stage]
        if len(self.plan.pipeline.sync_workers(stage)) < 2:
            return 0.0
        return max(self.model.own_average_s(here.layers, device) for device in set(here.devices))

    def finals(self, stage: int) -> list[tuple[str, float]]:
        """The parameters of a stage in the order in which a backward completes their gradients, each with the share of
        the backward that has passed by then."""
        here, graph = self.plan.stages[stage], self.plan.profile.graph
        device, own = here.devices[0], set(here.layers)
        layers = [layer for layer in graph.layers if layer.id in own]
        seconds = [self.model.backward_s([layer.id], device) for layer in layers]
        again_s = self.model.forward_s(here.layers, device) if here.recompute else 0.0
        total_s, left_s = again_s + sum(seconds), 0.0
        shares: dict[str, float] = {}
        for layer, layer_s in zip(layers, seconds, strict=True):
            share = 1 - left_s / total_s if total_s else 1.0
            for name in layer.parameters:  # complete with the first layer that uses it, which comes last in a backward
                shares.setdefault(name, share)
            left_s += layer_s
        return list(shares.items())[::-1]

    def buckets(self, stage: int) -> list[tuple[float, float]]:
        """The buckets in which a stage's gradients are averaged: the share of a backward that has passed when a bucket
        is complete, and its bytes. Where workers sum by themselves, all gradients are one bucket, averaged after the
        backward."""
        if not self.plan.cluster.carries(self.plan.stages[stage].devices):
            return [(1.0, self.sync_bytes(stage))]
        finals = self.finals(stage)
        sizes = [self.plan.profile.graph.parameter_by_name[name].num_bytes for name, _ in finals]
        found: dict[int, tuple[float, float]] = {}
        for number, size, (_, share) in zip(in_buckets(sizes), sizes, finals, strict=True):
            before = found.get(number, (0.0, 0.0))
            found[number] = max(before[0], share), before[1] + size
        return list(found.values())

    def sync_bytes(self, stage: int) -> float:
        """Bytes of the gradients that a stage averages."""
        return self.model.parameter_bytes(self.plan.stages[stage].layers)

    def message_bytes(self, source: int, target: int) -> float:
        """Bytes of the values that a stage sends to a later one, or of the gradients that it returns to an earlier
        one."""
        return self._message_bytes.get((source, target), 0.0)

    @cached_property
    def _message_bytes(self) -> dict[tuple[int, int], float]:
        """Bytes of all messages of a microbatch, by the stages that they go from and to."""
        sizes: dict[tuple[int, int], float] = {}
        for (source, target), values in self.plan.edges.items():
            sizes[source, target] = sum(map(self._value_bytes, values))
            sizes[target, source] = sum(map(self._gradient_bytes, values))
        return sizes

    def _value_bytes(self, value: Value) -> float:
        return self.model.sent_bytes(value, self._compressions[value.producer])

    def _gradient_bytes(self, value: Value) -> float:
        return self.model.gradient_bytes(value, self._compressions[value.producer])

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
        """Seconds per microbatch of a stage in steady state, without waiting. Updates and averaging are spread over the
        microbatches."""
        workers, shares = self.plan.pipeline.workers[stage], self.plan.stages[stage].shares
        turn_s = np.array([n * self._microbatch_s(stage, worker) for worker, n in zip(workers, shares, strict=True)])
        if not family(self.plan.schedule).trains:
            return float(turn_s.max()) / sum(shares)
        update_s = np.array([self._update_s(stage, worker) for worker in workers])
        microbatches = self.plan.microbatches if family(self.plan.schedule).accumulates else None
        return float(pace(turn_s, update_s, self.sync_s(stage), round_size=sum(shares), microbatches=microbatches))

    def cut_s(self, stage: int) -> float:
        """Seconds per microbatch on the links into the next stage.

        It counts all that crosses the cut, over the slowest link between any two devices of the two stages. The devices
        of a host share one such link, so the busiest host on either side counts with the shares of all its replicas.
        Between two stages on the same workers nothing is sent.
        """
        ends = self.plan.stages[stage : stage + 2]
        if ends[0].devices == ends[1].devices:
            return 0.0
        cluster = self.plan.cluster
        level = cluster.span((*ends[0].devices, *ends[1].devices))
        occupied_s = float(self._crossing(stage).occupied_s(cluster.links[level]))
        return occupied_s * max(self._busiest(end, level) for end in ends)

    def _busiest(self, stage: Stage, level: int) -> float:
        """The largest share of all microbatches that passes one member of a level: a device, or a whole host."""
        return max(self._by_member(stage, level).values())

    def _by_member(self, stage: Stage, level: int) -> dict[int, float]:
        loads: dict[int, float] = defaultdict(float)
        total = sum(stage.shares)
        for device, share in zip(stage.devices, stage.shares, strict=True):
            loads[self.plan.cluster.member(level, device)] += share / total
        return loads

    def busiest_port_s(self) -> float:
        """Seconds per microbatch on the busiest port of any device or host, in either direction. All messages of all
        stages that pass the port count: values and gradients, including those of ``cut_s``."""
        stages, trains = self.plan.stages, family(self.plan.schedule).trains
        edges = {ends: size for ends, size in self._message_bytes.items() if size and (trains or ends[0] < ends[1])}
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
        """Bytes that cross each cut per microbatch. A value counts once per cut, however many later stages read it."""
        owner, crossing = self.plan.stage_of_layer, [0.0] * len(self.plan.stages)
        for value in self.plan.profile.graph.sent_values:
            for cut in range(owner[value.producer], max(owner[consumer] for consumer in value.consumers)):
                crossing[cut] += self._value_bytes(value)
        return crossing

    def bottleneck(self) -> tuple[int, int]:
        """What sets the pace: a stage, as (stage, stage), or the cut after it, as (stage, stage + 1)."""
        return max(self._loads_s, key=self._loads_s.__getitem__)

    def bottleneck_s(self) -> float:
        """Seconds of a microbatch in steady state: those of the slowest stage or cut, however many microbatches are in
        flight; or more, if devices share too few cores."""
        return max(self._loads_s[self.bottleneck()], self._cores_s)

    @cached_property
    def _cores_s(self) -> float:
        """Seconds per microbatch that the workers of the busiest host compute, divided by its cores."""
        if self.plan.cluster.cores is None:
            return 0.0
        pipeline, busy_s = self.plan.pipeline, defaultdict[int, float](float)
        for stage, (workers, shares) in enumerate(zip(pipeline.workers, pipeline.shares, strict=True)):
            size = pipeline.round_sizes[stage]
            updates = self.plan.microbatches if family(self.plan.schedule).accumulates else size
            for worker, share in zip(workers, shares, strict=True):
                update_s = self._update_s(stage, worker)
                turn_s = self._microbatch_s(stage, worker) * share / size
                busy_s[self.plan.cluster.host(self.plan.devices[worker])] += turn_s + update_s / updates
        return max(busy_s.values()) / self.plan.cluster.cores

    @cached_property
    def _loads_s(self) -> dict[tuple[int, int], float]:
        """Seconds per microbatch: of a stage with all other stages of the same workers, and of a cut with all other
        cuts between the same two sets of workers."""
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
        """Seconds to fill and drain a synchronous pipeline: the forward and backward of one microbatch on all workers
        but the last.

        If workers have several stages, only the first stage of each counts. In zero-bubble schedules, the second halves
        of backwards run in the time that is otherwise idle, so they are subtracted; with the layout "there and back",
        only the forwards remain.
        """
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
        """Seconds of one microbatch on the slowest replica."""
        return max(self._microbatch_s(stage, worker) for worker in self.plan.pipeline.workers[stage])

    def latency_s(self) -> float:
        """Seconds of one microbatch through all stages and cuts, with nothing else in the pipeline."""
        stages = range(self.plan.pipeline.num_stages)
        return sum(map(self._trip_s, stages)) + sum(map(self._crossing_s, stages[:-1]))

    def _crossing_s(self, stage: int) -> float:
        here, behind = self.plan.stages[stage : stage + 2]
        return float(self._crossing(stage).seconds(self.plan.cluster.slowest_link((*here.devices, *behind.devices))))

    def input_bytes(self, stage: int) -> float:
        """Bytes that a stage reads from earlier ones, per microbatch."""
        return sum(self.message_bytes(source, stage) for source in self.plan.pipeline.reads[stage])

    def output_bytes(self, stage: int) -> float:
        """Bytes that a stage sends to later ones, per microbatch."""
        return sum(self.message_bytes(stage, target) for target in self.plan.pipeline.read_by[stage])

    def sent_bytes(self, source: Collection[int], target: Collection[int]) -> float:
        """Bytes that some layers send to others per microbatch, with the plan's compression."""
        return self.model.forward_bytes(source, target, self._compressions)

    def stage_memory_bytes(self, stage: int) -> float:
        """Peak bytes of the replica that needs most."""
        return max(map(self.memory_bytes, self.plan.pipeline.workers[stage]))

    def memory_share(self, stage: int) -> float | None:
        """The share of its device's memory that a replica uses, for the replica closest to the limit. None where memory
        is no constraint."""
        workers = self.plan.pipeline.workers[stage]
        sizes = {worker: self.plan.cluster.devices[self.plan.devices[worker]].memory_bytes for worker in workers}
        return max((self.memory_bytes(worker) / size for worker, size in sizes.items() if size), default=None)

    def layers_s(self, stage: int, layers: Collection[int]) -> tuple[float, float]:
        """Forward and backward seconds of some of a stage's layers, on the stage's slowest replica."""
        slowest = max(self.plan.pipeline.workers[stage], key=lambda worker: self._microbatch_s(stage, worker))
        device, kind = self.plan.devices[slowest], family(self.plan.schedule)
        forward_s = self.model.forward_s(layers, device, halves=kind.halves)
        if not kind.trains:
            return forward_s, 0.0
        again = self.plan.stages[stage].recompute
        return forward_s, self.model.backward_s(layers, device, recompute=again, halves=kind.halves)

    def minibatch_s(self) -> float:
        """Seconds of a minibatch: all its microbatches at the pace of the bottleneck and, under a synchronous
        schedule, the time to fill the pipeline."""
        fill_s = 0.0 if self.plan.is_asynchronous else self.fill_s()
        return self.plan.microbatches * self.bottleneck_s() + fill_s

    def _microbatch_s(self, stage: int, worker: int) -> float:
        """Seconds of a microbatch at a stage: computing, loading, messages and the worker's own time."""
        kind = family(self.plan.schedule)
        backward = (Kind.INPUT, Kind.WEIGHT) if kind.halves else (Kind.BACKWARD,)
        done = (Kind.FORWARD, *backward) if kind.trains else (Kind.FORWARD,)
        return self._handled_s[stage] + sum(self._action_s(stage, worker, each) for each in done)

    def _update_s(self, stage: int, worker: int) -> float:
        return self._action_s(stage, worker, Kind.STEP)

    def _action_s(self, stage: int, worker: int, kind: Kind) -> float:
        return self._compute[stage, worker][kind] + self._before[stage, worker][kind]

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
        """A worker's own time for a message between two stages, at either end. Zero if both stages are on the same
        devices."""
        if self.plan.stages[source].devices == self.plan.stages[target].devices:
            return 0.0
        return float(self.plan.cluster.handled_s(self.message_bytes(source, target)))
