"""Reads worker 0's clock from the other machines, at the start of a run and at its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist

from penstock.clocks import Alignment, RoundTrip, align
from penstock.errors import WorkerError
from penstock.runtime.machine.machine import clock_id
from penstock.runtime.peers.peers import Peers
from penstock.runtime.peers.reason import short_reason

TRIPS = 40
"""of which the quickest counts; the first also makes the connection"""


class Wire(Protocol):
    """What carries a moment from one worker to another; both ends wait for it."""

    def send(self, moment_s: float, to: int) -> None: ...

    def receive(self, source: int) -> float: ...


class GroupWire:
    """Over a process group of gloo's that is otherwise at rest."""

    def __init__(self, group: dist.ProcessGroup, rank: int) -> None:
        self.group, self.rank = group, rank

    def send(self, moment_s: float, to: int) -> None:
        with self._naming(to):
            dist.send(torch.tensor([moment_s], dtype=torch.float64), to, group=self.group)

    def receive(self, source: int) -> float:
        moment = torch.empty(1, dtype=torch.float64)
        with self._naming(source):
            dist.recv(moment, source, group=self.group)
        return float(moment)

    @contextmanager
    def _naming(self, peer: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise WorkerError(
                f"worker {self.rank} waited for worker {peer} to compare clocks: {short_reason(error)}"
            ) from error


class Clocks:
    """One worker's end. Workers that read the same clock are asked once, through the first of them."""

    def __init__(
        self, rank: int, clocks: Sequence[str], wire: Wire, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """``clocks`` says which clock each worker reads."""
        self.rank, self.wire, self.clock = rank, wire, clock
        same: dict[str, list[int]] = {}
        for worker, name in enumerate(clocks):
            same.setdefault(name, []).append(worker)
        self._near, *self._far = (tuple(workers) for workers in same.values())
        self._at_start: list[RoundTrip] = []

    def start(self) -> None:
        """All workers call it together."""
        self._at_start = self._trips()

    def finish(self) -> list[Alignment]:
        """All call it together; each worker has the alignments that it has found, worker 0 that of its own clock."""
        at_end = self._trips()
        if self.rank == 0:
            return [Alignment(workers=self._near)]
        return [align(workers, self._at_start, at_end) for workers in self._far if workers[0] == self.rank]

    def _trips(self) -> list[RoundTrip]:
        """One machine after the other, so that they do not hold each other up."""
        trips = []
        for asking, *_ in self._far:
            for _ in range(TRIPS):
                if self.rank == asking:
                    sent_s = self.clock()
                    self.wire.send(sent_s, 0)
                    read_s = self.wire.receive(0)
                    trips.append(RoundTrip(sent_s=sent_s, read_s=read_s, back_s=self.clock()))
                elif self.rank == 0:
                    self.wire.receive(asking)
                    self.wire.send(self.clock(), asking)
        return trips


def clocks_of(peers: Peers, wire: Wire) -> Clocks:
    """All workers call it together."""
    return Clocks(peers.rank, peers.gather("tell which clock it reads", clock_id()), wire)
