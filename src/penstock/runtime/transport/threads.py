"""Tensors between workers that are threads of one process: for tests, emulation and measuring."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock.errors import WorkerError
from penstock.runtime.transport.base import Channel, Pending
from penstock.schedule import Kind


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
