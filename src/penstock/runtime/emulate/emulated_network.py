"""The network of an emulated cluster: when what is sent is there.

Every device, and every group of a level that has others beside it, has a port out and a port in, as fast as the level.
A transfer passes the ports on its way up and down. A port serves those that pass it in equal parts, and each goes at
the least of its parts. Latency comes after the last byte. Messages of a channel wait for each other.

Nothing runs here: what is under way is brought up to the present whenever somebody asks. A transfer that starts later
can only delay others, so what is said of the end of one is never too late, and whoever sleeps until then asks again.
"""

from __future__ import annotations

import math
import threading
from collections import Counter, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from penstock.clocks import Clock
from penstock.cluster import Cluster, Port
from penstock.cost import ring_allreduce
from penstock.schedule import Kind

Way = tuple[int, int, Kind]
"""From a worker to a worker, results of forwards or of backwards: they keep their order."""


@dataclass(eq=False)
class Transfer:
    ports: frozenset[Port]
    left_bytes: float
    latency_s: float
    most_per_s: float = math.inf
    sent_s: float = math.inf
    """when its last byte was; not yet, at first"""


@dataclass
class _Ring:
    transfer: Transfer
    asked: int = 0
    """workers that have, so far"""


@dataclass
class Flows:
    """What is under way, and how far it has come at a moment."""

    bytes_per_s: Sequence[float]
    """of each level's ports"""
    channels: dict[Hashable, deque[Transfer]] = field(default_factory=dict)
    now_s: float = 0.0

    def advance(self, until_s: float) -> None:
        while self.now_s < until_s:
            self._step(until_s)

    def foreseen_s(self, transfer: Transfer) -> float:
        """When it will be sent if nothing else comes: played on with copies."""
        copies = {each: replace(each) for queue in self.channels.values() for each in queue}
        channels = {channel: deque(copies[each] for each in queue) for channel, queue in self.channels.items()}
        ahead = replace(self, channels=channels)
        while copies[transfer].sent_s == math.inf:
            ahead._step(math.inf)
        return copies[transfer].sent_s

    def _step(self, until_s: float) -> None:
        """To the first end, if that comes before ``until_s``."""
        heads = [queue[0] for queue in self.channels.values()]
        users = Counter(port for head in heads for port in head.ports)
        rates = [
            min([head.most_per_s, *(self.bytes_per_s[port.level] / users[port] for port in head.ports)])
            for head in heads
        ]
        ends_s = [self.now_s + head.left_bytes / rate for head, rate in zip(heads, rates, strict=True)]
        next_s = min([until_s, *ends_s])
        for head, rate, end_s in zip(heads, rates, ends_s, strict=True):
            if end_s <= next_s:
                head.sent_s = next_s
            else:
                head.left_bytes -= rate * (next_s - self.now_s)
        self.now_s = next_s
        for channel, queue in list(self.channels.items()):
            if queue[0].sent_s <= next_s:
                queue.popleft()
                if not queue:
                    del self.channels[channel]


class EmulatedNetwork:
    """Shared by the threads of all workers; seconds are those of ``clock``."""

    def __init__(self, cluster: Cluster, clock: Clock) -> None:
        self.cluster, self.clock = cluster, clock
        self._lock = threading.Lock()
        self._flows = Flows([level.bytes_per_s for level in cluster.levels])
        self._messages: dict[tuple[Way, int], Transfer] = {}
        self._rings: dict[tuple[tuple[int, ...], int], _Ring] = {}

    def send(self, way: Way, number: int, ends: tuple[int, int], num_bytes: float) -> None:
        """A message of a way, the ``number``-th on it, from one device to another; its receiver claims it."""
        transfer = Transfer(frozenset(self.cluster.ports(*ends)), num_bytes, self.cluster.link(*ends).latency_s)
        with self._lock:
            self._messages[way, number] = transfer
            self._start(way, transfer)

    def claim(self, way: Way, number: int) -> Transfer:
        return self._messages.pop((way, number))

    def ring(self, workers: tuple[int, ...], call: int, devices: Sequence[int], num_bytes: float) -> Transfer:
        """An all-reduce of so many bytes, the ``call``-th of these workers: from device to device, host by host, all
        sending at once. Every worker asks when it has come, and the last starts it."""
        with self._lock:
            ring = self._rings.setdefault((workers, call), _Ring(self._around(sorted(devices), num_bytes)))
            ring.asked += 1
            if ring.asked == len(workers):
                self._start(workers, ring.transfer)
                del self._rings[workers, call]
            return ring.transfer

    def _around(self, devices: Sequence[int], num_bytes: float) -> Transfer:
        traffic = ring_allreduce(num_bytes, len(devices))
        ports = frozenset(port for pair in pairwise([*devices, devices[0]]) for port in self.cluster.ports(*pair))
        link = self.cluster.slowest_link(devices).ring
        num_bytes = traffic.messages * traffic.bytes_each
        return Transfer(ports, num_bytes, traffic.messages * link.latency_s, most_per_s=link.bytes_per_s)

    def there_s(self, transfer: Transfer) -> float:
        """When it has arrived, or will have if nothing more is sent."""
        with self._lock:
            self._flows.advance(self.clock())
            sent_s = transfer.sent_s
            return (self._flows.foreseen_s(transfer) if sent_s == math.inf else sent_s) + transfer.latency_s

    def _start(self, channel: Hashable, transfer: Transfer) -> None:
        self._flows.advance(self.clock())
        self._flows.channels.setdefault(channel, deque()).append(transfer)
