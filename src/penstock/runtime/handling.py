"""What messages take of a worker's own time: a pipeline of two workers that do some work between their messages.

Work comes between, since in training the caches are full of other things when a message comes or goes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.runtime.mailbox import Mailbox
from penstock.runtime.transport import Channel, Pending, Transport
from penstock.runtime.worker import Clock
from penstock.schedule import Action, Kind, Pipeline, build_schedule

MICROBATCHES, WARM_UP = 12, 2
PLAINLY_S = 0.05
"""What a clock of cores, which goes by hundredths of a second, can be believed from."""
_PIPELINE = Pipeline(workers=((0,), (1,)), reads=((), (0,)))


@dataclass(frozen=True, kw_only=True)
class OwnTime:
    work: Callable[[], None] = lambda: None
    thread_s: Clock = time.thread_time
    """processor seconds of the worker"""
    helpers_s: Clock = lambda: time.process_time() - time.thread_time()
    """and of threads that carry messages for it"""
    core_s: Clock | None = None
    """seconds that its cores have been busy, the kernel's network included; None where others work on them too"""


def handled_s(
    num_bytes: int, pair: tuple[int, ...], transport: Transport, own: OwnTime, device: torch.device, timeout_s: float
) -> float:
    """Seconds that a worker of the pair is busy with a message that it sends or takes; both call it.

    The kernel's part shows in nobody's time. Where it is large, as over a network, it is what a core does that has
    messages to pass and nothing else.
    """
    place = pair.index(transport.rank)
    mailbox = Mailbox(
        _PIPELINE, {(0, 1): 1}, transport=_Between(transport, pair, place), device=device, timeout_s=timeout_s
    )
    schedule = build_schedule("1f1b", _PIPELINE, [MICROBATCHES])
    tensor = torch.zeros(num_bytes // 4, device=device)
    program = [action for action in schedule.programs[place] if action.of_microbatch]

    def act(action: Action, work: Callable[[], None], taken_s: list[float], sent_s: list[float]) -> None:
        other, takes = 1 - place, (action.kind is Kind.FORWARD) == (place == 1)
        start_s = own.thread_s()
        mailbox.post_receives()
        if takes:
            mailbox.take(Action(other, action.kind, action.index), place)
            taken_s.append(own.thread_s() - start_s)
        work()
        start_s = own.thread_s()
        if not takes:
            mailbox.send(action.result, other, [tensor])
            sent_s.append(own.thread_s() - start_s)

    def pass_messages(work: Callable[[], None]) -> float:
        """The worker's own time with each, the median."""
        taken_s: list[float] = []
        sent_s: list[float] = []
        mailbox.begin(schedule, [1] * MICROBATCHES)
        for action in program:
            act(action, work, taken_s, sent_s)
        mailbox.finish()
        return statistics.mean(statistics.median(each[WARM_UP:]) for each in (taken_s, sent_s))

    start_s = own.helpers_s()
    for _ in program:
        own.work()
    idle_s = own.helpers_s() - start_s
    own_s = pass_messages(own.work)
    helped_s = own.helpers_s() - start_s - 2 * idle_s
    told_s = own_s + max(0.0, helped_s) / len(program)
    if own.core_s is None:
        return told_s
    start_s = own.core_s()
    pass_messages(lambda: None)
    core_s = own.core_s() - start_s
    return max(told_s, core_s / len(program)) if core_s > PLAINLY_S else told_s


@dataclass
class _Between:
    """A transport on which the two of a pair are workers 0 and 1."""

    transport: Transport
    pair: tuple[int, ...]
    rank: int

    def send(self, tensor: Tensor, channel: Channel, number: int) -> Pending:
        return self.transport.send(tensor, (self.pair[channel[0]], channel[1]), number)

    def receive(self, tensor: Tensor, channel: Channel, number: int) -> Pending:
        return self.transport.receive(tensor, (self.pair[channel[0]], channel[1]), number)

    def all_reduce(self, tensor: Tensor, workers: tuple[int, ...], timeout_s: float) -> None:
        self.transport.all_reduce(tensor, self._of_pair(workers), timeout_s)

    def carries(self, workers: tuple[int, ...]) -> bool:
        return self.transport.carries(self._of_pair(workers))

    def begin_all_reduce(self, tensor: Tensor, workers: tuple[int, ...]) -> Pending:
        return self.transport.begin_all_reduce(tensor, self._of_pair(workers))

    def _of_pair(self, workers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.pair[worker] for worker in workers)
