"""What a worker has sent is let go as soon as it is known to have come, and never waited for before."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
from torch import Tensor

from in_threads import even_plan, profile_of, run_in_threads
from models import make_job
from penstock.errors import WorkerError
from penstock.runtime.transport.base import Channel, Pending
from penstock.runtime.transport.threads import LocalExchange, LocalTransport
from penstock.runtime.worker.assemble import Assembly, make_epoch
from penstock.schedule import Action, Kind


@dataclass
class Unsaid:
    """Says nothing until it is waited for, as gloo does; but its wait fails where it would have to wait."""

    exchange: LocalExchange
    key: tuple[int, int, Kind, int]

    def wait(self, timeout_s: float) -> None:
        if self.key in self.exchange.messages:
            raise WorkerError(f"waited for {self.key} before it had come")


def most_kept(
    schedule: str, replicas: tuple[int, ...], minibatches: int, microbatches: int, monkeypatch: pytest.MonkeyPatch
) -> int:
    """The most tensors that a worker kept at any moment for one that might not have received them."""

    def send(self: LocalTransport, tensor: Tensor, channel: Channel, number: int) -> Pending:
        peer, direction = channel
        with self._exchange.condition:
            self._exchange.messages[self.rank, peer, direction, number] = tensor
            self._exchange.condition.notify_all()
        return Unsaid(self._exchange, (self.rank, peer, direction, number))

    monkeypatch.setattr(LocalTransport, "send", send)
    kept = 0
    plan = even_plan(profile_of("conv"), replicas, schedule, microbatches)

    def work(assembly: Assembly) -> None:
        def count(action: Action) -> None:
            nonlocal kept
            kept = max(kept, *map(len, assembly.worker.mailbox._leaving.values()), 0)

        assembly.worker.on_action = count
        monkeypatch.setattr(assembly.worker.mailbox, "finish", lambda: None)  # it may wait: nothing comes after
        assembly.worker.run(assembly.segment(make_epoch(assembly.job, plan, 0)))

    run_in_threads(plan, functools.partial(make_job, "conv", samples=4 * minibatches), work=work)
    return kept


@pytest.mark.parametrize("replicas", [(1, 1), (1, 2), (2, 1), (1, 1, 1), (2, 3)], ids=str)
@pytest.mark.parametrize(("schedule", "microbatches"), [("pipedream", 1), ("1f1b", 2), ("gpipe", 2), ("2bw", 4)])
def test_what_is_kept_of_messages_does_not_grow_with_the_run(
    schedule: str, microbatches: int, replicas: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    few, many = (most_kept(schedule, replicas, count, microbatches, monkeypatch) for count in (20, 60))
    assert 0 < many == few < 20
