"""Links that transfers share, and the clock that they run by.

Every device, and every group of a level that has others beside it, is joined to that level by a port out and a port in,
each as fast as the level. A transfer passes the ports on its way up and those on its way down again. A port serves the
transfers on it in equal parts, and a transfer goes at the least of its parts. Latency comes after the last byte and
occupies nothing. Messages of one channel wait for each other.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Protocol

from penstock.cluster import Cluster, Port
from penstock.cost import ring_allreduce


class Receiver(Protocol):
    def arrive(self, index: int, at_s: float) -> None:
        """What was sent is there."""


Message = tuple[float, Receiver, int]
"""Bytes, for whom, and which of those that it waits for."""


class Gate:
    """A port at work."""

    __slots__ = ("bytes_per_s", "carried_bytes", "channels")

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.carried_bytes = 0.0
        self.channels: list[Channel] = []
        """those that are sending"""


class Channel:
    """From one sender to one receiver in one direction, or around a ring: one transfer at a time."""

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

    def __init__(self, ports: Sequence[Gate], latency_s: float, most_per_s: float = math.inf) -> None:
        self.ports, self.latency_s = tuple(ports), latency_s
        self.bytes_per_s = min([most_per_s, *(port.bytes_per_s for port in ports)])
        self.waiting: deque[Message] = deque()
        self.current: Message | None = None
        self.left_bytes = self.rate = self.since_s = 0.0
        self.due_s = self.looked_at_s = 0.0
        """when the transfer ends at its present rate, and when it will be looked at: no later"""


class Links:
    """The links of a cluster while a schedule is played; time goes from one event to the next."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.ports: dict[Port, Gate] = {}
        self.now_s = 0.0
        self._events: list[tuple[float, int, Channel, Message | None]] = []
        self._count = 0

    def channel(self, source: int, target: int) -> Channel:
        """From one device to another."""
        return Channel(self._way(source, target), self.cluster.link(source, target).latency_s)

    def cores(self, devices: Sequence[int]) -> list[Channel | None]:
        """Where each of these devices computes, with seconds for bytes: at most one core, shared as a port is. None
        where its host has enough of them."""
        hosts = [self.cluster.host(device) for device in devices]
        count = self.cluster.cores or len(devices)
        shared = {host: Gate(count) for host in set(hosts) if hosts.count(host) > count}
        return [Channel([shared[host]], 0.0, most_per_s=1.0) if host in shared else None for host in hosts]

    def ring(self, devices: Iterable[int]) -> Channel:
        """Through several devices, host by host, and back to the first, all sending at once."""
        around = sorted(devices)
        ports = dict.fromkeys(port for pair in pairwise([*around, around[0]]) for port in self._way(*pair))
        steps, link = ring_allreduce(0, len(around)).messages, self.cluster.slowest_link(around).ring
        return Channel(tuple(ports), steps * link.latency_s, most_per_s=link.bytes_per_s)

    def _way(self, source: int, target: int) -> list[Gate]:
        return [self._gate(port) for port in self.cluster.ports(source, target)]

    def _gate(self, port: Port) -> Gate:
        if port not in self.ports:
            self.ports[port] = Gate(self.cluster.levels[port.level].bytes_per_s)
        return self.ports[port]

    def send(self, at_s: float, channel: Channel, message: Message) -> None:
        """Now or later: a worker's future is known until it waits for somebody."""
        self._count += 1
        heapq.heappush(self._events, (at_s, self._count, channel, message))

    def run(self) -> Iterator[None]:
        """Until nothing is under way; stops after each arrival for whatever that sets going."""
        events = self._events
        while events:
            now_s, _, channel, message = heapq.heappop(events)
            self.now_s = now_s
            if message is not None:
                if channel.current is None:
                    self._start(channel, message, now_s)
                else:
                    channel.waiting.append(message)
            elif now_s == channel.looked_at_s:  # else it was moved forward since
                if channel.due_s > now_s:
                    self._look(channel, channel.due_s)
                else:
                    self._end(channel, now_s)
                    yield

    def _start(self, channel: Channel, message: Message, now_s: float) -> None:
        channel.current = message
        left_bytes = channel.left_bytes = message[0]
        channel.since_s = now_s
        rate, alone = channel.bytes_per_s, True
        for port in channel.ports:
            others = port.channels
            if others:
                alone = False
                rate = min(rate, port.bytes_per_s / (len(others) + 1))
            others.append(channel)
        channel.rate = rate
        channel.due_s = now_s + left_bytes / rate
        self._look(channel, channel.due_s)
        if not alone:
            self._share_anew(channel, now_s)

    def _end(self, channel: Channel, now_s: float) -> None:
        message = channel.current
        assert message is not None
        channel.current, channel.looked_at_s = None, -1.0
        alone = True
        for port in channel.ports:
            port.carried_bytes += message[0]
            others = port.channels
            others.remove(channel)
            if others:
                alone = False
        if not alone:
            self._share_anew(channel, now_s)
        if channel.waiting:
            self._start(channel, channel.waiting.popleft(), now_s)
        message[1].arrive(message[2], now_s + channel.latency_s)

    def _share_anew(self, changed: Channel, now_s: float) -> None:
        """One has come or gone: those that meet it at a port go slower or faster from now on."""
        for port in changed.ports:
            for channel in port.channels:
                if channel is changed:
                    continue
                rate = channel.bytes_per_s
                for passed in channel.ports:
                    part = passed.bytes_per_s / len(passed.channels)
                    if part < rate:
                        rate = part
                if rate != channel.rate:
                    channel.left_bytes -= (now_s - channel.since_s) * channel.rate
                    channel.since_s, channel.rate = now_s, rate
                    channel.due_s = now_s + max(channel.left_bytes, 0.0) / rate
                    if channel.due_s < channel.looked_at_s:
                        self._look(channel, channel.due_s)

    def _look(self, channel: Channel, at_s: float) -> None:
        channel.looked_at_s = at_s
        self._count += 1
        heapq.heappush(self._events, (at_s, self._count, channel, None))
