"""Links that transfers share. The simulator and the emulated network both use them; each brings its own clock.

Every device has a port out and a port in, each as fast as the level that joins it to others. So has every group of a
level that has others beside it. A transfer passes the ports on its way up and those on its way down. A port is shared
equally by the transfers on it, and a transfer goes at the least of its shares. Latency comes after the last byte and
occupies nothing. The transfers of a route follow each other.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Protocol

from penstock.cluster import Cluster, Port
from penstock.cost import ring_allreduce


class Receiver(Protocol):
    def arrive(self, index: int, at_s: float) -> None:
        """Called when a transfer has arrived; ``index`` says which."""


Transfer = tuple[float, Receiver, int]
"""Bytes, their receiver, and the index that the receiver knows the transfer by."""


class SharedPort:
    """A port and the routes that are sending through it."""

    __slots__ = ("bytes_per_s", "carried_bytes", "routes")

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.carried_bytes = 0.0
        self.routes: list[Route] = []


class Route:
    """The ports from one sender to one receiver, or around a ring. It carries one transfer at a time."""

    __slots__ = (
        "bytes_per_s",
        "current",
        "due_s",
        "latency_s",
        "left_bytes",
        "looked_at_s",
        "ports",
        "rate",
        "since_s",
        "waiting",
    )

    def __init__(self, ports: Sequence[SharedPort], latency_s: float, most_per_s: float = math.inf) -> None:
        self.ports, self.latency_s = tuple(ports), latency_s
        self.bytes_per_s = min([most_per_s, *(port.bytes_per_s for port in ports)])
        self.waiting: deque[Transfer] = deque()
        self.current: Transfer | None = None
        self.left_bytes = self.rate = 0.0
        """``left_bytes`` were left at ``since_s``; they go at ``rate`` from then on."""
        self.since_s = self.due_s = 0.0
        """``due_s`` is when the transfer ends at its present rate."""
        self.looked_at_s = 0.0
        """The time of the route's next event, never after ``due_s``."""

    def copy(self, ports: Mapping[SharedPort, SharedPort]) -> Route:
        """The same state on copies of the ports."""
        other = Route([ports[port] for port in self.ports], self.latency_s)
        other.bytes_per_s, other.current, other.waiting = self.bytes_per_s, self.current, self.waiting.copy()
        other.left_bytes, other.rate, other.since_s = self.left_bytes, self.rate, self.since_s
        other.due_s, other.looked_at_s = self.due_s, self.looked_at_s
        return other


class SharedLinks:
    """The links of a cluster and what is under way on them. Time goes from one event to the next."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.ports: dict[Port, SharedPort] = {}
        self.now_s = 0.0
        self._events: list[tuple[float, int, Route, Transfer | None]] = []
        self._count = 0

    def route(self, source: int, target: int) -> Route:
        """From one device to another."""
        return Route(self._ports_between(source, target), self.cluster.link(source, target).latency_s)

    def cores(self, devices: Sequence[int]) -> list[Route | None]:
        """For each device, a route on which seconds of computing travel as bytes do over links: the cores of a host are
        a port that its devices share, and none gets more than one core. None where the host has a core for each."""
        hosts = [self.cluster.host(device) for device in devices]
        count = self.cluster.cores or len(devices)
        shared = {host: SharedPort(count) for host in set(hosts) if hosts.count(host) > count}
        return [Route([shared[host]], 0.0, most_per_s=1.0) if host in shared else None for host in hosts]

    def ring(self, devices: Iterable[int]) -> Route:
        """Through several devices, host by host, and back to the first, all sending at once."""
        around = sorted(devices)
        ports = dict.fromkeys(port for pair in pairwise([*around, around[0]]) for port in self._ports_between(*pair))
        steps, link = ring_allreduce(0, len(around)).messages, self.cluster.slowest_link(around).ring
        return Route(tuple(ports), steps * link.latency_s, most_per_s=link.bytes_per_s)

    def _ports_between(self, source: int, target: int) -> list[SharedPort]:
        return [self._shared(port) for port in self.cluster.ports(source, target)]

    def _shared(self, port: Port) -> SharedPort:
        if port not in self.ports:
            self.ports[port] = SharedPort(self.cluster.levels[port.level].bytes_per_s)
        return self.ports[port]

    def send(self, at_s: float, route: Route, transfer: Transfer) -> None:
        """Start a transfer at a time that is not before ``now_s``. It may lie ahead: a simulated worker knows what it
        will send until it waits for another."""
        self._count += 1
        heapq.heappush(self._events, (at_s, self._count, route, transfer))

    def run(self, until_s: float = math.inf) -> Iterator[tuple[Transfer, float]]:
        """Go on to ``until_s``, or until nothing is under way. Yields each transfer when its last byte is sent, and the
        time at which it arrives."""
        events = self._events
        while events and events[0][0] <= until_s:
            now_s, _, route, transfer = heapq.heappop(events)
            self.now_s = now_s
            if transfer is not None:
                if route.current is None:
                    self._start(route, transfer, now_s)
                else:
                    route.waiting.append(transfer)
            elif now_s == route.looked_at_s:  # otherwise the route's event was moved forward
                if route.due_s > now_s:
                    self._look(route, route.due_s)
                else:
                    yield self._end(route, now_s), now_s + route.latency_s

    def copy(self) -> SharedLinks:
        """The same state, which goes on independently. Only what is under way is copied; transfers are the same."""
        other = SharedLinks(self.cluster)
        other.now_s, other._count = self.now_s, self._count
        active = dict.fromkeys(route for _, _, route, _ in self._events)
        ports = {port: SharedPort(port.bytes_per_s) for route in active for port in route.ports}
        copies = {route: route.copy(ports) for route in active}
        for port, copied in ports.items():
            copied.routes = [copies[route] for route in port.routes]
        other._events = [(at_s, count, copies[route], transfer) for at_s, count, route, transfer in self._events]
        return other

    def _start(self, route: Route, transfer: Transfer, now_s: float) -> None:
        route.current = transfer
        left_bytes = route.left_bytes = transfer[0]
        route.since_s = now_s
        rate, alone = route.bytes_per_s, True
        for port in route.ports:
            others = port.routes
            if others:
                alone = False
                rate = min(rate, port.bytes_per_s / (len(others) + 1))
            others.append(route)
        route.rate = rate
        route.due_s = now_s + left_bytes / rate
        self._look(route, route.due_s)
        if not alone:
            self._share_anew(route, now_s)

    def _end(self, route: Route, now_s: float) -> Transfer:
        transfer = route.current
        assert transfer is not None
        route.current, route.looked_at_s = None, -1.0
        alone = True
        for port in route.ports:
            port.carried_bytes += transfer[0]
            others = port.routes
            others.remove(route)
            if others:
                alone = False
        if not alone:
            self._share_anew(route, now_s)
        if route.waiting:
            self._start(route, route.waiting.popleft(), now_s)
        return transfer

    def _share_anew(self, changed: Route, now_s: float) -> None:
        """A route has started or ended a transfer: set the rates of those that share a port with it."""
        for port in changed.ports:
            for route in port.routes:
                if route is changed:
                    continue
                rate = route.bytes_per_s
                for passed in route.ports:
                    part = passed.bytes_per_s / len(passed.routes)
                    if part < rate:
                        rate = part
                if rate != route.rate:
                    route.left_bytes -= (now_s - route.since_s) * route.rate
                    route.since_s, route.rate = now_s, rate
                    route.due_s = now_s + max(route.left_bytes, 0.0) / rate
                    if route.due_s < route.looked_at_s:
                        self._look(route, route.due_s)

    def _look(self, route: Route, at_s: float) -> None:
        route.looked_at_s = at_s
        self._count += 1
        heapq.heappush(self._events, (at_s, self._count, route, None))
