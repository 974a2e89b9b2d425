"""Moving tensors between workers. One contract, two implementations, tested by one suite.

``TorchTransport`` speaks torch.distributed between processes; ``LocalTransport`` joins threads of one process.
"""

from __future__ import annotations

import re
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import WorkerError
from penstock.schedule import Kind

Channel = tuple[int, Kind]
"""The peer, and what travels: results of its forwards or of its backwards. Messages of a channel keep their order."""


class Pending(Protocol):
    """A transfer under way."""

    def wait(self, timeout_s: float) -> None:
        """Return once it is over; raise if the peer is gone or the time is up."""
        ...


class Transport(Protocol):
    rank: int

    def send(self, tensor: Tensor, channel: Channel, number: int) -> Pending:
        """Start sending; never blocks. The tensor must stay as it is until the transfer is over."""
        ...

    def receive(self, tensor: Tensor, channel: Channel, number: int) -> Pending:
        """Start receiving into ``tensor`` what the peer sends as its ``number``-th on this channel."""
        ...

    def all_reduce(self, tensor: Tensor, workers: tuple[int, ...], timeout_s: float) -> None:
        """Sum over these workers, in place. All of them call it, in the same order of calls."""
        ...

    def carries(self, workers: tuple[int, ...]) -> bool:
        """Whether a sum over these workers goes on while they do something else; all of them are told the same."""
        ...

    def begin_all_reduce(self, tensor: Tensor, workers: tuple[int, ...]) -> Pending:
        """The same, under way when this returns, where sums are carried. Those begun are waited for in their order."""
        ...


class TorchTransport:
    """torch.distributed: gloo on CPU, nccl on CUDA. Each direction has a group of its own, so that a late
    activation never holds up a gradient. Every rank must construct it with the same ``groups``."""

    def __init__(self, groups: Sequence[tuple[int, ...]], timeout_s: float) -> None:
        """``timeout_s`` is for making the groups, and for whatever in them has no deadline of its own."""
        self.rank = dist.get_rank()
        limit = timedelta(seconds=timeout_s)
        self._directions = {kind: dist.new_group(timeout=limit) for kind in (Kind.FORWARD, Kind.BACKWARD)}
        self._groups = {workers: dist.new_group(list(workers), timeout=limit) for workers in groups}

    def send(self, tensor: Tensor, channel: Channel, number: int) -> Pending:
        peer, direction = channel
        with _told_of(f"worker {peer}"):
            return _Transfer(dist.isend(tensor, peer, group=self._directions[direction], tag=number), tensor)

    def receive(self, tensor: Tensor, channel: Channel, number: int) -> Pending:
        peer, direction = channel
        with _told_of(f"worker {peer}"):
            return _Transfer(dist.irecv(tensor, peer, group=self._directions[direction], tag=number), tensor)

    def all_reduce(self, tensor: Tensor, workers: tuple[int, ...], timeout_s: float) -> None:
        self.begin_all_reduce(tensor, workers).wait(timeout_s)

    def carries(self, workers: tuple[int, ...]) -> bool:
        return True

    def begin_all_reduce(self, tensor: Tensor, workers: tuple[int, ...]) -> Pending:
        with _told_of(f"the workers {workers}"):
            return _Sum(dist.all_reduce(tensor, group=self._groups[workers], async_op=True), tensor, workers)


@contextmanager
def _told_of(peers: str) -> Iterator[None]:
    """torch may find at once that a connection is lost."""
    try:
        yield
    except RuntimeError as error:
        raise WorkerError(f"the connection to {peers} is lost: {short_reason(error)}") from error


@dataclass
class _Sum:
    work: Any
    tensor: Tensor
    """kept alive while it is under way"""
    workers: tuple[int, ...]

    def wait(self, timeout_s: float) -> None:
        try:
            self.work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise WorkerError(f"the all-reduce among workers {self.workers} failed: {short_reason(error)}") from error


@dataclass
class _Transfer:
    work: Any
    tensor: Tensor
    """kept alive while it is on its way"""

    def wait(self, timeout_s: float) -> None:
        try:
            self.work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise WorkerError(short_reason(error)) from error


def short_reason(error: BaseException) -> str:
    """What torch says, without the place in its sources and the advice."""
    text = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return re.sub(r"^\[[^\]]*\] ", "", text).partition(". This is")[0][:200]


@dataclass
class LocalExchange:
    """What the LocalTransports of one process share."""

    condition: threading.Condition = field(default_factory=threading.Condition)
    messages: dict[tuple[int, int, Kind, int], Tensor] = field(default_factory=dict)
    sums: dict[tuple[tuple[int, ...], int], dict[int, Tensor]] = field(default_factory=lambda: defaultdict(dict))
    failed: str | None = None

    def fail(self, reason: str) -> None:
        """Wake whoever waits: a worker is gone."""
        with self.condition:
            self.failed = self.failed or reason
            self.condition.notify_all()

    def wait_for(self, predicate: Any, timeout_s: float) -> None:
        """Call with the condition held."""
        deadline = time.monotonic() + timeout_s
        while not predicate():
            if self.failed is not None:
                raise WorkerError(f"another worker failed: {self.failed}")
            if not self.condition.wait(max(0.0, deadline - time.monotonic())):
                raise WorkerError(f"nothing came within {timeout_s:g} s")


class LocalTransport:
    def __init__(self, rank: int, exchange: LocalExchange) -> None:
        self.rank = rank
        self._exchange = exchange
        self._calls: dict[tuple[int, ...], int] = defaultdict(int)

    def send(self, tensor: Tensor, channel: Channel, number: int) -> Pending:
        peer, direction = channel
        with self._exchange.condition:
            self._exchange.messages[self.rank, peer, direction, number] = tensor
            self._exchange.condition.notify_all()
        return _Delivered()

    def receive(self, tensor: Tensor, channel: Channel, number: int) -> Pending:
        peer, direction = channel
        return _Awaited(self._exchange, (peer, self.rank, direction, number), tensor)

    def all_reduce(self, tensor: Tensor, workers: tuple[int, ...], timeout_s: float) -> None:
        self.begin_all_reduce(tensor, workers).wait(timeout_s)

    def carries(self, workers: tuple[int, ...]) -> bool:
        return True

    def begin_all_reduce(self, tensor: Tensor, workers: tuple[int, ...]) -> Pending:
        call = (workers, self._calls[workers])
        self._calls[workers] += 1
        with self._exchange.condition:
            terms = self._exchange.sums[call]
            terms[self.rank] = tensor.clone()
            if len(terms) == len(workers):
                del self._exchange.sums[call]  # all have it who want it
            self._exchange.condition.notify_all()
        return _Summed(self._exchange, terms, workers, tensor)


@dataclass
class _Summed:
    exchange: LocalExchange
    terms: dict[int, Tensor]
    workers: tuple[int, ...]
    tensor: Tensor

    def wait(self, timeout_s: float) -> None:
        with self.exchange.condition:
            self.exchange.wait_for(lambda: len(self.terms) == len(self.workers), timeout_s)
        # in the order of ranks, whoever came first: a run repeated gives the same bits
        self.tensor.copy_(torch.stack([self.terms[rank] for rank in self.workers]).sum(0))


class _Delivered:
    def wait(self, timeout_s: float) -> None:
        pass


@dataclass
class _Awaited:
    exchange: LocalExchange
    key: tuple[int, int, Kind, int]
    tensor: Tensor
    over: bool = False

    def wait(self, timeout_s: float) -> None:
        if self.over:
            return
        with self.exchange.condition:
            self.exchange.wait_for(lambda: self.key in self.exchange.messages, timeout_s)
            message = self.exchange.messages.pop(self.key)
            if message.shape != self.tensor.shape or message.dtype != self.tensor.dtype:
                raise WorkerError(f"{_form(message)} came where {_form(self.tensor)} was expected")
            # Byte by byte, as on a wire: copying booleans would make every byte 0 or 1.
            self.tensor.view(-1).view(torch.uint8).copy_(message.view(-1).view(torch.uint8))
        self.over = True


def _form(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
