"""Tensors between processes by torch.distributed: gloo on CPU, nccl on CUDA."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from penstock.errors import WorkerError
from penstock.runtime.peers.reason import short_reason
from penstock.runtime.transport.base import Channel, Pending
from penstock.schedule import Kind


class TorchTransport:
    """torch.distributed: gloo on CPU, nccl on CUDA. Each direction has a group of its own, so that a late
    activation never holds up a gradient. Every rank must construct it with the same ``groups``."""

    def __init__(self, groups: Sequence[tuple[int, ...]], timeout_s: float) -> None:
        """``timeout_s`` is for making the groups, and for whatever in them has no deadline of its own."""
        self.rank, self.backend = dist.get_rank(), str(dist.get_backend())
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
