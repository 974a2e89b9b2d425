"""A worker's part in the trials of a survey: messages, streams and all-reduces over a transport.

The first worker of a group leads: it times, and tells the other what comes before it comes.

    leader     order ->  message ->            message ->
    follower                        <- message            <- message  ..

Receives are posted ahead and sends left under way, as the mailbox does it in training: at some sizes gloo is ten times
slower with messages that nobody waits for yet. What is averaged is gathered first, from memory that is not in the
cache, as gradients are.
"""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.clocks import Clock
from penstock.errors import WorkerError
from penstock.runtime.links.message_times import OwnTime, TwoStages, handled_s
from penstock.runtime.messages.mailbox import AHEAD
from penstock.runtime.transport.base import Pending, Transport
from penstock.schedule import Kind
from penstock.survey import Pattern, Timing, Trial

WARM_UP = 1
"""For connections to be made and buffers to grow."""
ENOUGH_S = 0.15
"""How long each size is repeated, within the next two limits."""
FEWEST, MOST = 3, 200
"""How often each size is repeated at least and at most."""
MOST_HANDED_OVER = 30
"""These messages have work between them, so each takes long."""
TOO_LONG_S = 3.0
"""A size that would take longer is left out, and so are all larger ones: the smaller sizes suffice."""

COLD_BYTES = 2**26
"""More than caches hold."""
PARTS = 16
"""The number of gradients that are averaged together."""

Timed = list[tuple[int, float]]
"""Bytes, and the median seconds of a message or all-reduce of that size."""


@dataclass(frozen=True, kw_only=True)
class Prober:
    transport: Transport
    clock: Clock
    device: torch.device
    timeout_s: float
    own_time: OwnTime = field(default_factory=OwnTime)
    enough_s: float = ENOUGH_S

    def run(self, number: int, trial: Trial) -> list[Timing]:
        """This worker's part in a trial. Returns what it timed, if it leads a group."""
        rank = self.transport.rank
        for index, group in enumerate(trial.groups):
            if rank not in group:
                continue
            timed: Timed = []
            if trial.pattern is Pattern.ALL_REDUCE:
                timed = self._all_reduces(group, trial.sizes)
            elif trial.pattern is Pattern.HANDLING:
                timed = self._handled(group, trial.sizes)
            elif rank == group[0]:
                timed = self.lead(group[1], trial.pattern, trial.sizes)
            else:
                self.follow(group[0], trial.pattern)
            if rank == group[0]:
                return [Timing(trial=number, group=index, num_bytes=size, seconds=seconds) for size, seconds in timed]
        return []

    def meet(self, everyone: tuple[int, ...]) -> None:
        self._all_reduce(torch.zeros(1, device=self.device), everyone)

    def _all_reduces(self, members: tuple[int, ...], sizes: Sequence[int]) -> Timed:
        timed: Timed = []
        for num_bytes in sizes:
            if not self._agree(WARM_UP if _is_worth_it(timed, num_bytes) else 0, members):
                break
            gradients = _ColdGradients(num_bytes, self.device)
            first_s = [self._average_s(gradients, members) for _ in range(WARM_UP)]
            repeats = self._agree(self._repeats(first_s), members)
            seconds = [self._average_s(gradients, members) for _ in range(repeats)]
            timed.append((num_bytes, statistics.median(seconds)))
        return timed

    def _agree(self, repeats: int, members: tuple[int, ...]) -> int:
        """All use the leader's number: the others add zero to the sum."""
        word = torch.tensor([float(repeats if self.transport.rank == members[0] else 0)], device=self.device)
        self._all_reduce(word, members)
        return int(word.item())

    def _average_s(self, gradients: _ColdGradients, members: tuple[int, ...]) -> float:
        start_s = self.clock()
        self._all_reduce(gradients.gather(), members)
        return self.clock() - start_s

    def _all_reduce(self, tensor: Tensor, members: tuple[int, ...]) -> None:
        self.transport.all_reduce(tensor, members, self.timeout_s)
        self.settle()

    def _handled(self, pair: tuple[int, ...], sizes: Sequence[int]) -> Timed:
        return [
            (num_bytes, handled_s(num_bytes, pair, self.transport, self.own_time, self.device, self.timeout_s))
            for num_bytes in sizes
        ]

    def lead(self, peer: int, pattern: Pattern, sizes: Sequence[int]) -> Timed:
        """Time messages with a peer that follows."""
        line, timed = _Line(self, peer, leads=True), Timed()
        time_messages = _LEADS[pattern]
        for num_bytes in sizes:
            if not _is_worth_it(timed, num_bytes):
                break
            first_s = time_messages(line, num_bytes, WARM_UP)
            timed.append((num_bytes, statistics.median(time_messages(line, num_bytes, self._repeats(first_s)))))
        line.order(0, 0)
        return timed

    def follow(self, peer: int, pattern: Pattern) -> None:
        line = _Line(self, peer, leads=False)
        answer = _FOLLOWS[pattern]
        while (order := line.next_order())[0] > 0:
            answer(line, *order)

    def _repeats(self, first_s: Sequence[float]) -> int:
        return min(MOST, max(FEWEST, round(self.enough_s / max(min(first_s), 1e-9))))

    def settle(self) -> None:
        """On a GPU, a wait only orders later work of the GPU. Here the host's clock is used, so wait for the GPU
        too."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class _ColdGradients:
    """Gradients of so many bytes together, and memory to gather them in. Neither is in the cache."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        sets = max(1, COLD_BYTES // num_bytes)
        parts = torch.ones(sets * num_bytes // 4, device=device)  # zeros may have no memory yet
        self._sets = itertools.cycle([each.chunk(PARTS) for each in parts.chunk(sets)])
        self._gathered = itertools.cycle(torch.ones_like(parts).chunk(sets))

    def gather(self) -> Tensor:
        return torch.cat(next(self._sets), out=next(self._gathered))


class _Line:
    """One end of a conversation of two workers. The leader's messages travel as activations do, the answers as
    gradients do."""

    def __init__(self, prober: Prober, peer: int, *, leads: bool) -> None:
        self.prober, self.peer = prober, peer
        self._out, self._in = (Kind.FORWARD, Kind.BACKWARD) if leads else (Kind.BACKWARD, Kind.FORWARD)
        self._sent = self._received = 0
        self._leaving: deque[Pending] = deque()

    def send(self, tensor: Tensor) -> None:
        """Start a send. As many may be under way as training keeps receives posted."""
        self._leaving.append(self.prober.transport.send(tensor, (self.peer, self._out), self._sent))
        self._sent += 1
        while len(self._leaving) > AHEAD:
            self.wait(self._leaving.popleft())

    def finish(self) -> None:
        while self._leaving:
            self.wait(self._leaving.popleft())

    def receive(self, tensor: Tensor) -> Pending:
        self._received += 1
        return self.prober.transport.receive(tensor, (self.peer, self._in), self._received - 1)

    def order(self, num_bytes: int, repeats: int) -> None:
        self.send(torch.tensor([num_bytes, repeats], device=self.prober.device))
        self.finish()

    def next_order(self) -> tuple[int, int]:
        order = torch.zeros(2, dtype=torch.int64, device=self.prober.device)
        self.wait(self.receive(order))
        num_bytes, repeats = order.tolist()
        return num_bytes, repeats

    def buffers(self, num_bytes: int) -> list[Tensor]:
        """One more than may be under way."""
        return [torch.zeros(num_bytes, dtype=torch.uint8, device=self.prober.device) for _ in range(AHEAD + 1)]

    def wait(self, pending: Pending) -> None:
        try:
            pending.wait(self.prober.timeout_s)
        except WorkerError as error:
            rank, timeout_s = self.prober.transport.rank, self.prober.timeout_s
            raise WorkerError(
                f"worker {rank} waited for worker {self.peer} (at most {timeout_s:g} s): {error}. "
                "See what that worker reports; raise --timeout if it is only slow"
            ) from error
        self.prober.settle()


class _Incoming:
    """So many messages of one size, received into memory that is prepared before they arrive."""

    def __init__(self, line: _Line, num_bytes: int, count: int) -> None:
        self._line, self._left = line, count
        self._memory = deque(line.buffers(num_bytes))
        self._posted: deque[Pending] = deque()
        for _ in range(AHEAD):
            self.post_next()

    def take(self) -> None:
        self._line.wait(self._posted.popleft())

    def post_next(self) -> None:
        if self._left:
            self._left -= 1
            self._posted.append(self._line.receive(self._memory[0]))
            self._memory.rotate()


def _to_and_fro_s(line: _Line, num_bytes: int, repeats: int) -> list[float]:
    """One way: half of each round trip."""
    clock = line.prober.clock
    line.order(num_bytes, repeats)
    incoming, outgoing = _Incoming(line, num_bytes, repeats), line.buffers(num_bytes)
    seconds: list[float] = []
    for i in range(repeats):
        start_s = clock()
        line.send(outgoing[i % len(outgoing)])
        incoming.take()
        seconds.append((clock() - start_s) / 2)
        incoming.post_next()
    line.finish()
    return seconds


def _send_back(line: _Line, num_bytes: int, repeats: int) -> None:
    incoming, outgoing = _Incoming(line, num_bytes, repeats), line.buffers(num_bytes)
    for i in range(repeats):
        incoming.take()
        line.send(outgoing[i % len(outgoing)])
        incoming.post_next()
    line.finish()


def _stream_s(line: _Line, num_bytes: int, repeats: int) -> list[float]:
    """Seconds per message when the next one follows at once, until the last one is acknowledged."""
    line.order(num_bytes, repeats)
    arrived, outgoing = _Incoming(line, 1, 1), line.buffers(num_bytes)
    start_s = line.prober.clock()
    for i in range(repeats):
        line.send(outgoing[i % len(outgoing)])
    arrived.take()
    elapsed_s = line.prober.clock() - start_s
    line.finish()
    return [elapsed_s / repeats]


def _take_stream(line: _Line, num_bytes: int, repeats: int) -> None:
    incoming = _Incoming(line, num_bytes, repeats)
    for _ in range(repeats):
        incoming.take()
        incoming.post_next()
    line.send(line.buffers(1)[0])
    line.finish()


def _hand_over_s(line: _Line, num_bytes: int, repeats: int) -> list[float]:
    """Seconds from the end of one worker's action until the other, which waits for it, has the message."""
    repeats = min(repeats, MOST_HANDED_OVER)
    line.order(num_bytes, repeats)
    _Incoming(line, 1, 1).take()  # the order has arrived; from here on the mailbox numbers the messages
    return _hand_over(line, (line.prober.transport.rank, line.peer), num_bytes, repeats)


def _answer_hand_over(line: _Line, num_bytes: int, repeats: int) -> None:
    line.send(line.buffers(1)[0])
    line.finish()
    _hand_over(line, (line.peer, line.prober.transport.rank), num_bytes, repeats)


def _hand_over(line: _Line, pair: tuple[int, int], num_bytes: int, repeats: int) -> list[float]:
    prober = line.prober
    stages = TwoStages(pair, prober.transport, prober.device, prober.timeout_s)
    return stages.hand_over_s(num_bytes, repeats, prober.own_time.work, prober.clock)


_LEADS = {Pattern.TO_AND_FRO: _to_and_fro_s, Pattern.STREAM: _stream_s, Pattern.HAND_OVER: _hand_over_s}
_FOLLOWS = {Pattern.TO_AND_FRO: _send_back, Pattern.STREAM: _take_stream, Pattern.HAND_OVER: _answer_hand_over}


def _is_worth_it(timed: Timed, num_bytes: int) -> bool:
    """Whether a size can be timed in reasonable time, judged by the last two sizes."""
    if len(timed) < 2:
        return True
    (bytes_before, seconds_before), (last_bytes, last_s) = timed[-2:]
    per_byte_s = max(0.0, last_s - seconds_before) / (last_bytes - bytes_before)
    expected_s = last_s + per_byte_s * (num_bytes - last_bytes)
    return 2 * expected_s * (WARM_UP + FEWEST) <= TOO_LONG_S
