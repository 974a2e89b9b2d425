"""The network of an emulated cluster: when messages and all-reduces arrive.

It has no thread. The links are brought up to the present whenever a worker asks. A transfer that starts later can only
delay others, so a foreseen arrival is never too late: a worker that has slept until then asks again.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from penstock.clocks import Clock
from penstock.cluster import Cluster
from penstock.cost import ring_allreduce
from penstock.schedule import Kind
from penstock.simulate.shared_links import Route, SharedLinks

Stream = tuple[int, int, Kind]
"""Sender, receiver, and whether forwards or backwards send. The messages of a stream stay in order."""


@dataclass(eq=False)
class Arrival:
    """A message or an all-reduce on its way."""

    at_s: float | None = None
    """The time of its arrival, once its last byte is sent."""

    def arrive(self, index: int, at_s: float) -> None:
        self.at_s = at_s


@dataclass
class _Ring:
    """An all-reduce for which not all workers are ready."""

    arrival: Arrival
    ready: int = 0
    """Workers that are ready."""


class EmulatedNetwork:
    """Shared by the threads of all workers. Seconds are those of ``clock``."""

    def __init__(self, cluster: Cluster, clock: Clock) -> None:
        self.cluster, self.clock = cluster, clock
        self._lock = threading.Lock()
        self._links = SharedLinks(cluster)
        self._routes: dict[Hashable, Route] = {}
        self._messages: dict[tuple[Stream, int], Arrival] = {}
        self._rings: dict[tuple[tuple[int, ...], int], _Ring] = {}

    def send(self, stream: Stream, number: int, ends: tuple[int, int], num_bytes: float) -> None:
        """Start the ``number``-th message of a stream, from one device to another. Its receiver claims it."""
        arrival = Arrival()
        with self._lock:
            if stream not in self._routes:
                self._routes[stream] = self._links.route(*ends)
            self._messages[stream, number] = arrival
            self._links.send(self.clock(), self._routes[stream], (num_bytes, arrival, number))

    def claim(self, stream: Stream, number: int) -> Arrival:
        return self._messages.pop((stream, number))

    def ring(self, workers: tuple[int, ...], call: int, devices: Sequence[int], num_bytes: float) -> Arrival:
        """The ``call``-th all-reduce of these workers, of so many bytes. Every worker calls this when it is ready, and
        the last one starts the ring."""
        with self._lock:
            ring = self._rings.setdefault((workers, call), _Ring(Arrival()))
            ring.ready += 1
            if ring.ready == len(workers):
                if workers not in self._routes:
                    self._routes[workers] = self._links.ring(devices)
                sent_bytes = ring_allreduce(num_bytes, len(devices)).total_bytes
                self._links.send(self.clock(), self._routes[workers], (sent_bytes, ring.arrival, call))
                del self._rings[workers, call]
            return ring.arrival

    def arrival_s(self, arrival: Arrival) -> float:
        """When it has arrived, or will have if nothing more is sent."""
        with self._lock:
            for (_, receiver, index), at_s in self._links.run(self.clock()):
                receiver.arrive(index, at_s)
            return self._foreseen_s(arrival) if arrival.at_s is None else arrival.at_s

    def _foreseen_s(self, arrival: Arrival) -> float:
        for (_, receiver, _), at_s in self._links.copy().run():
            if receiver is arrival:
                return at_s
        raise AssertionError("a arrival is asked for that was never started")
