"""What every transport does: the contract between a worker and whatever moves its tensors.

One suite, `tests/test_transport.py`, tests all implementations.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

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
