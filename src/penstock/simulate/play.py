"""Plays the workers' action lists over shared links. What comes out has the form of a real run's trace.

A worker's next actions depend on nobody else until one lacks an input, so each is played ahead of time up to there.
Only messages and meetings, where workers meet on links, go through the clock; and what is computed on shared cores.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from penstock.cost import ring_allreduce
from penstock.plan import Plan
from penstock.plan_costs import PlanCosts
from penstock.schedule import Action, Kind, Schedule, execution_order
from penstock.simulate.conditions import Conditions
from penstock.simulate.shared_links import Route, SharedLinks
from penstock.trace import CODES, Columns, Trace, trace_of


class Inbox:
    """What the forwards of a stage wait for, or its backwards, one by one."""

    __slots__ = ("missing", "ready_s", "waiting", "wake")

    def __init__(self, microbatches: int, needs: int, wake: Callable[[int], None]) -> None:
        self.missing = [needs] * microbatches
        self.ready_s = [0.0] * microbatches
        self.waiting: dict[int, int] = {}
        """workers that have come to them"""
        self.wake = wake

    def arrive(self, index: int, at_s: float) -> None:
        self.missing[index] -= 1
        if at_s > self.ready_s[index]:
            self.ready_s[index] = at_s
        if not self.missing[index] and index in self.waiting:
            self.wake(self.waiting.pop(index))


@dataclass(frozen=True, slots=True)
class Way:
    """Where a result goes: one of another stage's replicas, each over a channel of its own."""

    inbox: Inbox
    turns: tuple[int, ...]
    num_bytes: float
    channels: dict[int, Route]
    """to each replica on another worker"""


@dataclass(frozen=True, slots=True)
class Task:
    """What a worker does for one kind of action of one stage."""

    seconds: float
    inbox: Inbox | None = None
    ways: tuple[Way, ...] = ()
    enables: tuple[Inbox, ...] = ()
    """what its worker may do after it, whatever else that waits for"""
    taking_s: float = 0.0
    """that the worker is busy with what it takes before it computes: the end of that message's way"""
    sending_s: float = 0.0
    """and with what it sends when it has computed: the beginning of that one's"""
    before_s: float = 0.0
    """its own time before it computes, once what it takes is there"""


@dataclass(slots=True)
class Meeting:
    """The workers that average together; blocking: each goes on when all have come and the ring has run."""

    workers: tuple[int, ...]
    buckets: tuple[tuple[float, float], ...]
    """gradients that travel together: the share of the last backward that has passed when they are final, and what
    passes each port of the ring, in bytes; or seconds, where its workers share cores and sum in their memory"""
    ways: tuple[Route, ...]
    """around the ring; or to the core of each worker"""
    end: Callable[[tuple[int, ...], float], None]
    own_s: float
    """each worker's own time, beside the ring"""
    come: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    final_s: dict[int, list[float]] = field(default_factory=dict)
    """of each bucket, on those who have come"""
    over: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    def arrive(self, index: int, at_s: float) -> None:
        self.over[index] += 1
        if self.over[index] >= len(self.ways) * len(self.buckets):
            del self.over[index]
            self.end(self.workers, at_s + self.own_s)


@dataclass(slots=True)
class Desk:
    """Where a worker gets the actions back that it has given to a shared core."""

    worker: int
    core: Route
    done: Callable[[int, float], None]

    def arrive(self, index: int, at_s: float) -> None:
        self.done(self.worker, at_s)


class Player:
    """Plays a schedule once."""

    def __init__(self, plan: Plan, schedule: Schedule, conditions: Conditions) -> None:
        conditions.check(plan.cluster)
        self.plan, self.schedule, self.costs = plan, schedule, PlanCosts(plan)
        self.links = SharedLinks(plan.cluster)
        workers = range(schedule.pipeline.num_workers)
        self._position = [0 for _ in workers]
        self._free_s = [0.0 for _ in workers]
        self._starts_s = [array("d") for _ in workers]
        self._ends_s = [array("d") for _ in workers]
        self._paces = [conditions.pace_of(device) for device in plan.devices]
        self._caches = [self.costs.caches(worker) for worker in workers]
        self._desks = [
            None if core is None else Desk(worker, core, self._computed)
            for worker, core in enumerate(self.links.cores(plan.devices))
        ]
        self._runnable = list(workers)
        self._channels: dict[tuple[int, int, Kind], Route] = {}
        self._tasks = self._all_tasks()
        self._meetings: dict[int, Meeting] = {}

    def run(self, samples: tuple[int, ...]) -> Trace:
        self._go_on()
        for (_, receiver, index), at_s in self.links.run():
            receiver.arrive(index, at_s)
            self._go_on()
        programs = self.schedule.programs
        if any(at < len(program) for at, program in zip(self._position, programs, strict=True)):
            for _ in execution_order(self.schedule):  # which says who waits for whom
                pass
        return trace_of("simulated", self.plan.worker_names, samples, self._columns())

    def _go_on(self) -> None:
        runnable = self._runnable
        while runnable:
            self._advance(runnable.pop())

    def _advance(self, worker: int) -> None:
        """Play the actions of a worker until one must wait for a message or an all-reduce, or the program ends."""
        program, tasks, pace = self.schedule.programs[worker], self._tasks[worker], self._paces[worker]
        desk, caches = self._desks[worker], self._caches[worker]
        starts_s, ends_s, free_s = self._starts_s[worker], self._ends_s[worker], self._free_s[worker]
        for at in range(self._position[worker], len(program)):
            stage, kind, index = program[at]
            if kind is Kind.SYNC:
                self._position[worker], self._free_s[worker] = at, free_s
                self._come(worker, stage, self._meeting(stage), index)
                return
            task = tasks[kind][stage]
            inbox = task.inbox
            if inbox is not None:
                if inbox.missing[index]:
                    inbox.waiting[index] = worker
                    self._position[worker], self._free_s[worker] = at, free_s
                    return
                ready_s = inbox.ready_s[index] - task.taking_s
                if ready_s > free_s:
                    free_s = ready_s
                free_s += task.taking_s
            free_s += task.before_s
            starts_s.append(free_s)
            seconds = task.seconds
            if caches is not None:
                seconds += caches.extra_s(stage, kind)
            end_s = free_s + seconds if pace is None else pace.end_s(free_s, seconds)
            if desk is not None:
                self._position[worker], self._free_s[worker] = at, free_s
                ahead_s = task.taking_s + task.before_s
                busy_s = ahead_s + end_s - free_s + task.sending_s
                self.links.send(free_s - ahead_s, desk.core, (busy_s, desk, index))
                return
            ends_s.append(end_s)
            self._hand_on(worker, program[at], task, end_s)
            free_s = end_s + task.sending_s
        self._position[worker] = len(program)

    def _computed(self, worker: int, at_s: float) -> None:
        """On a shared core."""
        action = self.schedule.programs[worker][self._position[worker]]
        self._ends_s[worker].append(at_s)
        self._free_s[worker] = at_s
        self._position[worker] += 1
        self._hand_on(worker, action, self._tasks[worker][action.kind][action.stage], at_s)
        self._runnable.append(worker)

    def _hand_on(self, worker: int, action: Action, task: Task, at_s: float) -> None:
        _, kind, index = action
        for enabled in task.enables:
            enabled.missing[index] -= 1
        for way in task.ways:
            receiver = way.turns[index % len(way.turns)]
            if receiver == worker or not way.num_bytes:
                way.inbox.arrive(index, at_s)
                continue
            channel = way.channels.get(receiver)
            if channel is None:
                channel = way.channels[receiver] = self._channel(worker, receiver, kind)
            self.links.send(at_s, channel, (way.num_bytes, way.inbox, index))

    def _come(self, worker: int, stage: int, meeting: Meeting, index: int) -> None:
        final_s = self._final_s(worker, stage, meeting)
        self._starts_s[worker].append(self._free_s[worker])
        meeting.final_s[index] = list(map(max, meeting.final_s.get(index, final_s), final_s))
        meeting.come[index] += 1
        if meeting.come[index] < len(meeting.workers):
            return
        del meeting.come[index]
        for at_s, (_, amount) in zip(meeting.final_s.pop(index), meeting.buckets, strict=True):
            for way in meeting.ways:
                self.links.send(max(at_s, self.links.now_s), way, (amount, meeting, index))
        if not meeting.ways:
            meeting.arrive(index, max(self._free_s[each] for each in meeting.workers))

    def _final_s(self, worker: int, stage: int, meeting: Meeting) -> list[float]:
        """When the buckets of a worker are final: during the backward that it has just ended, where averaging overlaps
        with that, or now."""
        overlaps = self.schedule.overlaps_averaging(worker, self._position[worker] - 1)
        if not overlaps or not self.plan.cluster.carries(self.plan.stages[stage].devices):
            return [self._free_s[worker]] * len(meeting.buckets)
        start_s, end_s = self._starts_s[worker][-1], self._ends_s[worker][-1]
        return [start_s + share * (end_s - start_s) for share, _ in meeting.buckets]

    def _part(self, workers: tuple[int, ...], at_s: float) -> None:
        """A meeting ends: for a worker whose backward is still running, when it comes to wait for it."""
        for worker in workers:
            self._free_s[worker] = max(at_s, self._free_s[worker])
            self._ends_s[worker].append(self._free_s[worker])
            self._position[worker] += 1
        self._runnable += workers

    # What there is to do, made once.

    def _all_tasks(self) -> list[dict[Kind, dict[int, Task]]]:
        """Of each worker, by kind and stage."""
        pipeline, total, wake = self.schedule.pipeline, self.schedule.microbatches, self._runnable.append
        stages = range(pipeline.num_stages)
        forward = [Inbox(total, len(pipeline.reads[stage]), wake) for stage in stages]
        backward = [Inbox(total, 1 + len(pipeline.read_by[stage]), wake) for stage in stages]
        weight = [Inbox(total, 1, wake) for stage in stages] if self.plan.takes_halves else []
        tasks: list[dict[Kind, dict[int, Task]]] = [defaultdict(dict) for _ in range(pipeline.num_workers)]
        for stage, replicas in enumerate(pipeline.workers):
            halves = (weight[stage],) if weight else ()
            before, behind = pipeline.reads[stage], pipeline.read_by[stage]
            there = self._handled_s((at, stage) for at in before), self._handled_s((stage, at) for at in behind)
            and_back = self._handled_s((at, stage) for at in behind), self._handled_s((stage, at) for at in before)
            for worker in replicas:
                onward = tuple(self._way(stage, reader, forward[reader]) for reader in pipeline.read_by[stage])
                back = tuple(self._way(stage, source, backward[source]) for source in pipeline.reads[stage])
                seconds = self.costs.seconds_of(stage, worker)
                for kind, task in (
                    (Kind.FORWARD, Task(seconds[Kind.FORWARD], forward[stage], onward, (backward[stage],), *there)),
                    (Kind.BACKWARD, Task(seconds[Kind.BACKWARD], backward[stage], back, halves, *and_back)),
                    (Kind.INPUT, Task(seconds[Kind.INPUT], backward[stage], back, halves, *and_back)),
                    *((Kind.WEIGHT, Task(seconds[Kind.WEIGHT], inbox)) for inbox in halves),
                    (Kind.STEP, Task(seconds[Kind.STEP])),
                ):
                    before_s = self.costs.before_s(stage, worker, kind)
                    tasks[worker][kind][stage] = replace(task, before_s=before_s)
        return tasks

    def _handled_s(self, messages: Iterable[tuple[int, int]]) -> float:
        """That a worker is busy with messages from and to these stages."""
        return sum(self.costs.message_handled_s(*ends) for ends in messages)

    def _way(self, stage: int, target: int, inbox: Inbox) -> Way:
        return Way(inbox, self.schedule.pipeline.turns[target], self.costs.message_bytes(stage, target), {})

    def _channel(self, sender: int, receiver: int, kind: Kind) -> Route:
        """Messages of one direction between two workers stay in order, whichever of their stages they are of."""
        key = sender, receiver, Kind.FORWARD if kind is Kind.FORWARD else Kind.BACKWARD
        if key not in self._channels:
            self._channels[key] = self.links.route(self.plan.devices[sender], self.plan.devices[receiver])
        return self._channels[key]

    def _meeting(self, stage: int) -> Meeting:
        """Whom the sync policy brings together: everybody who averages with this stage."""
        pipeline = self.schedule.pipeline
        together, workers = pipeline.sync_stages[stage], pipeline.sync_workers(stage)
        if together[0] not in self._meetings:
            devices = [self.plan.devices[worker] for worker in workers]
            parts = self.costs.buckets(stage) if len(together) == 1 else [(1.0, self._most_synced(together))]
            rings = [(share, ring_allreduce(num_bytes, len(workers))) for share, num_bytes in parts]
            buckets = tuple((share, ring.total_bytes) for share, ring in rings)
            ways: tuple[Route, ...] = (self.links.ring(devices),) if any(amount for _, amount in buckets) else ()
            desks = [desk for desk in map(self._desks.__getitem__, workers) if desk is not None]
            if ways and len(desks) == len(workers) and len(set(map(self.plan.cluster.host, devices))) == 1:
                link = self.plan.cluster.slowest_link(devices).ring
                buckets = tuple((share, float(ring.seconds(link))) for share, ring in rings)
                ways = tuple(desk.core for desk in desks)
            own_s = max(map(self.costs.own_average_s, together))
            self._meetings[together[0]] = Meeting(workers, buckets, ways, self._part, own_s)
        return self._meetings[together[0]]

    def _most_synced(self, together: Iterable[int]) -> float:
        return max(map(self.costs.sync_bytes, together))

    def _columns(self) -> Columns:
        programs = self.schedule.programs
        actions = [action for program in programs for action in program]
        return Columns(
            worker=np.repeat(np.arange(len(programs)), [len(program) for program in programs]),
            stage=np.array([stage for stage, _, _ in actions], dtype=np.int64),
            kind=np.array([CODES[kind] for _, kind, _ in actions], dtype=np.int8),
            index=np.array([index for _, _, index in actions], dtype=np.int64),
            start_s=np.concatenate([np.frombuffer(each) for each in self._starts_s]),
            end_s=np.concatenate([np.frombuffer(each) for each in self._ends_s]),
        )
