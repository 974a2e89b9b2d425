"""What messages cost in training, measured in a pipeline of two workers that do some work between messages.

In training, the caches are full of other data when a message is sent or received; the work has that effect here.
Messages go through the mailbox, which takes time too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.clocks import Clock
from penstock.runtime.messages.mailbox import Mailbox
from penstock.runtime.transport.base import Channel, Pending, Transport
from penstock.schedule import Action, Kind, Pipeline, Schedule, build_schedule

MICROBATCHES, WARM_UP = 12, 2
LATE = (5, 2)
"""How many times each worker works before it first receives. By then the message has arrived, and so have all later
ones."""
LEAST_S = 1e-6
"""No message is faster. The clocks of two workers may differ by more than a message takes."""
PLAINLY_S = 0.05
"""The shortest time for which the clock of cores, which counts hundredths of a second, is trusted."""
_PIPELINE = Pipeline(workers=((0,), (1,)), reads=((), (0,)))


@dataclass(frozen=True, kw_only=True)
class OwnTime:
    work: Callable[[], None] = lambda: None
    thread_s: Clock = time.thread_time
    """Processor seconds of the worker's own thread."""
    helpers_s: Clock = lambda: time.process_time() - time.thread_time()
    """Processor seconds of threads that carry its messages."""
    core_s: Clock | None = None
    """Seconds that its cores were busy, including the kernel's network code. None if others use the same cores."""


class TwoStages:
    """This worker's stage in a pipeline of two workers with one stage each."""

    def __init__(self, pair: tuple[int, ...], transport: Transport, device: torch.device, timeout_s: float) -> None:
        self.place = pair.index(transport.rank)
        self.other = 1 - self.place
        self.device = device
        between = _Between(transport, pair, self.place)
        self.mailbox = Mailbox(_PIPELINE, {(0, 1): 1}, transport=between, device=device, timeout_s=timeout_s)

    def begin(self, schedule_name: str, minibatches: Sequence[int]) -> Schedule:
        schedule = build_schedule(schedule_name, _PIPELINE, minibatches)
        self.mailbox.begin(schedule, [1] * schedule.microbatches)
        return schedule

    def tensor(self, num_bytes: int) -> Tensor:
        return torch.zeros(max(1, num_bytes // 4), device=self.device)

    def hand_over_s(self, num_bytes: int, count: int, work: Callable[[], None], clock: Clock) -> list[float]:
        """Seconds from the end of one worker's action until the other, who waits for it, has the message.

            worker 0   work -> message ..................... take
            worker 1                    take work -> message

        One way is half of a round trip without the work of worker 1, which sends along how long that was.
        Worker 1 gets no times.
        """
        tensor, found = self.tensor(num_bytes), []
        total = WARM_UP + count
        self.begin("1f1b", [1] * total)
        for microbatch in range(total):
            forward, backward = Action(0, Kind.FORWARD, microbatch), Action(1, Kind.BACKWARD, microbatch)
            self.mailbox.post_receives()
            if self.place == 1:
                self.mailbox.take(forward, 1)
                start_s = clock()
                work()
                tensor[0] = clock() - start_s
                self.mailbox.send(backward, 0, [tensor])
                continue
            work()
            start_s = clock()
            self.mailbox.send(forward, 1, [tensor])
            self.mailbox.post_receives()
            (answer,) = self.mailbox.take(backward, 0)
            end_s = clock()
            assert answer is not None
            found.append(max(LEAST_S, (end_s - start_s - float(answer[0])) / 2))
        self.mailbox.finish()
        return found[WARM_UP:]

    def handled_s(self, num_bytes: int, work: Callable[[], None], thread_s: Clock) -> float:
        """Median seconds of a worker's own time for a message that it sends, or that it receives after it has
        arrived."""
        tensor = self.tensor(num_bytes)
        taken_s: list[float] = []
        sent_s: list[float] = []
        schedule = self.begin("gpipe", [MICROBATCHES])
        for action in schedule.programs[self.place]:
            if not action.of_microbatch:
                continue
            takes = (action.kind is Kind.FORWARD) == (self.place == 1)
            for _ in range(LATE[self.place] if takes and not taken_s else 0):
                work()
            start_s = thread_s()
            self.mailbox.post_receives()
            if takes:
                self.mailbox.take(Action(self.other, action.kind, action.index), self.place)
                taken_s.append(thread_s() - start_s)
            work()
            start_s = thread_s()
            if not takes:
                self.mailbox.send(action.result, self.other, [tensor])
                sent_s.append(thread_s() - start_s)
        self.mailbox.finish()
        return statistics.mean(statistics.median(each[WARM_UP:]) for each in (taken_s, sent_s))


def handled_s(
    num_bytes: int, pair: tuple[int, ...], transport: Transport, own: OwnTime, device: torch.device, timeout_s: float
) -> float:
    """Seconds of a worker's own time for a message that it sends or receives. Both workers of the pair call it.

    The kernel's part counts for no thread. If it is large, as over a network, it is measured as the time that a core is
    busy with messages and nothing else.
    """
    stages = TwoStages(pair, transport, device, timeout_s)
    messages = 2 * MICROBATCHES
    start_s = own.helpers_s()
    for _ in range(messages + LATE[stages.place]):
        own.work()
    idle_s = own.helpers_s() - start_s
    own_s = stages.handled_s(num_bytes, own.work, own.thread_s)
    helped_s = own.helpers_s() - start_s - 2 * idle_s
    told_s = own_s + max(0.0, helped_s) / messages
    if own.core_s is None:
        return told_s
    start_s = own.core_s()
    stages.handled_s(num_bytes, lambda: None, own.thread_s)
    core_s = own.core_s() - start_s
    return max(told_s, core_s / messages) if core_s > PLAINLY_S else told_s


@dataclass
class _Between:
    """A transport on which the two workers of a pair are workers 0 and 1."""

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
