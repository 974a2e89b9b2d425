"""Messages between workers of one host through memory that both have mapped: one copy in, one copy out, no thread.

What one worker sends to another goes through one file in memory (``shared_file.py``), with a channel for each kind of
message:

    control pages   | head | tail | descriptors |  ..            one of each channel
    descriptors     | number, offset, capacity, length, total |  .. one per piece of a message, SLOTS in a ring
    buffers         | bytes |  | bytes |  ..                     as many as were ever under way at once

The sender alone writes ``head``, buffers and descriptors, the receiver alone ``tail``. A buffer is free again once
``tail`` has passed the descriptor that named it; the one freed last is taken first, since it is still in the cache.
Where the file may not grow, a message goes in pieces through the buffers there are.

Why this is safe: the payload is written before ``head`` by calls that the interpreter makes one after the other, each
counter is one aligned 8-byte store, and x86-64 shows stores to others in the order in which they were made (memmove
fences where it writes past the cache). Other processors promise less, so ``is_supported`` says no there.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import platform
import sys
import time
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.errors import WorkerError
from penstock.runtime.transport.base import Channel, Pending, Transport
from penstock.runtime.transport.shared_file import MadeFile, OpenedFile, Place
from penstock.schedule import Kind

SLOTS = 64
SMALLEST_BUFFER = 2**16
MOST_BYTES = 2**30
"""A channel's buffers take no more."""
PIECE_BYTES = 2**19
"""Of what each of a group sums at a time."""
SPIN_S = 50e-6
"""Looking so long before sleeping spares a wake-up; longer would take the core from a peer who shares it."""
LOOK_S = 0.05
"""How often one who waits looks whether the peer is still there."""
NAP_S = 2e-4
"""Between looks for room in a channel that is full."""

_HEAD, _TAIL, _SLOT, _SLOT_WORDS = 8, 16, 64, 8  # in words of 8 bytes; counters on cache lines of their own
_CONTROL_BYTES = 2 * mmap.PAGESIZE
assert (_SLOT + SLOTS * _SLOT_WORDS) * 8 <= _CONTROL_BYTES
_SYS_FUTEX, _FUTEX_WAIT, _FUTEX_WAKE = 202, 0, 1  # of x86-64
_KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.SYNC)
_FIRST_BYTES = len(_KINDS) * (_CONTROL_BYTES + SMALLEST_BUFFER)
"""Of a file: with one buffer for each channel, whatever comes can pass, piece by piece."""


def is_supported() -> bool:
    return sys.platform == "linux" and platform.machine() == "x86_64" and hasattr(os, "memfd_create")


def make_file() -> MadeFile:
    """For what this worker sends to one peer; raises OSError where there is no memory to share."""
    return MadeFile(_FIRST_BYTES, _most_bytes())


def open_file(place: Place) -> OpenedFile:
    """What a peer has made for what it sends to this worker; raises OSError where the two cannot share memory."""
    return OpenedFile(place, _FIRST_BYTES, _most_bytes())


def _most_bytes() -> int:
    return _FIRST_BYTES + len(_KINDS) * MOST_BYTES


class _Buffer(NamedTuple):
    offset: int
    """in the file"""
    capacity: int


class _End:
    """What both ends of a channel do."""

    def __init__(self, file: MadeFile | OpenedFile, channel: int) -> None:
        self.file, self.address = file, file.address
        control = file.address + channel * _CONTROL_BYTES
        pages = memoryview((ctypes.c_char * _CONTROL_BYTES).from_address(control))
        self.words = np.frombuffer(pages, np.uint64).data
        self._syscall = ctypes.CDLL(None).syscall
        self._head_address = ctypes.c_void_p(control + 8 * _HEAD)

    def sleep_while_head_is(self, head: int, most_s: float) -> None:
        """The kernel looks at the counter before it lets the caller sleep: a wake-up is never missed."""
        span = (ctypes.c_long * 2)(int(most_s), int(most_s % 1 * 1e9))
        self._syscall(_SYS_FUTEX, self._head_address, _FUTEX_WAIT, ctypes.c_uint(head & 0xFFFFFFFF), span, None, 0)

    def wake(self) -> None:
        self._syscall(_SYS_FUTEX, self._head_address, _FUTEX_WAKE, 1, None, None, 0)


class Outlet(_End):
    """The sending end of a channel."""

    def __init__(self, file: MadeFile, channel: int) -> None:
        super().__init__(file, channel)
        self._grow_file, self._left_bytes = file.grow, MOST_BYTES
        first = len(_KINDS) * _CONTROL_BYTES + channel * SMALLEST_BUFFER
        self._free = [_Buffer(first, SMALLEST_BUFFER)]
        self._head = self._tail = 0
        self._under_way: deque[_Buffer | None] = deque()
        self._waiting: deque[_Sent] = deque()

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting)

    def post(self, sent: _Sent) -> None:
        self._waiting.append(sent)
        self.push()

    def push(self) -> None:
        """Hand over as much as there is room for."""
        while self._waiting and self._push_piece(self._waiting[0]):
            if self._waiting[0].over:
                self._waiting.popleft()

    def _push_piece(self, sent: _Sent) -> bool:
        self._reclaim()
        if self._head - self._tail == SLOTS:
            return False
        total = sent.tensor.nbytes
        left = total - sent.done
        buffer = self._buffer(left) if left else None
        if left and buffer is None:
            return False
        length = 0
        if buffer is not None:
            length = min(left, buffer.capacity)
            ctypes.memmove(self.address + buffer.offset, sent.tensor.data_ptr() + sent.done, length)
        slot = _SLOT + self._head % SLOTS * _SLOT_WORDS
        place = buffer or (0, 0)
        for i, word in enumerate((sent.number, *place, length, total)):
            self.words[slot + i] = word
        self._under_way.append(buffer)
        self._head += 1
        self.words[_HEAD] = self._head
        self.wake()
        sent.done += length
        sent.over = sent.done == total
        return True

    def _reclaim(self) -> None:
        tail = self.words[_TAIL]
        while self._tail < tail:
            self._tail += 1
            if (buffer := self._under_way.popleft()) is not None:
                self._free.append(buffer)

    def _buffer(self, num_bytes: int) -> _Buffer | None:
        """The tightest free one that holds it all, a new one, or else the largest free one."""
        fitting = [buffer for buffer in self._free if buffer.capacity >= num_bytes]
        if not fitting:
            with suppress(OSError):  # no memory for it
                self._grow(num_bytes)
        candidates = reversed(fitting or self._free)
        found = min(candidates, key=lambda b: (b.capacity < num_bytes, abs(b.capacity - num_bytes)), default=None)
        if found is not None:
            self._free.remove(found)
        return found

    def _grow(self, num_bytes: int) -> None:
        capacity = -(-num_bytes // SMALLEST_BUFFER) * SMALLEST_BUFFER
        if capacity <= self._left_bytes:
            self._free.append(_Buffer(self._grow_file(capacity), capacity))
            self._left_bytes -= capacity


class Inlet(_End):
    """The receiving end of a channel."""

    def __init__(self, file: OpenedFile, channel: int) -> None:
        super().__init__(file, channel)
        self._tail = 0
        self._posted: deque[_Received] = deque()

    def post(self, received: _Received) -> None:
        self._posted.append(received)

    def pull(self) -> None:
        """Take what has come, as far as receives are posted for it."""
        while self._posted and not self.is_empty():
            self._pull_piece(self._posted[0])
            if self._posted[0].over:
                self._posted.popleft()

    def is_empty(self) -> bool:
        return self.words[_HEAD] == self._tail

    def sleep_while_empty(self, most_s: float) -> None:
        self.sleep_while_head_is(self._tail, most_s)

    def _pull_piece(self, received: _Received) -> None:
        slot = _SLOT + self._tail % SLOTS * _SLOT_WORDS
        number, offset, _, length, total = self.words[slot : slot + 5]
        tensor = received.tensor
        if (number, total) != (received.number, tensor.nbytes):
            raise WorkerError(
                f"message {number} of {total} bytes came where message {received.number} of {tensor.nbytes} bytes "
                "was expected"
            )
        if length:
            ctypes.memmove(tensor.data_ptr() + received.done, self.address + offset, length)
        self._tail += 1
        self.words[_TAIL] = self._tail
        received.done += length
        received.over = received.done == total


@dataclass(frozen=True)
class Line:
    """This worker's ends of the channels it shares with one peer."""

    own: MadeFile
    outlets: Mapping[Kind, Outlet]
    inlets: Mapping[Kind, Inlet]

    @classmethod
    def over(cls, own: MadeFile, peers: OpenedFile) -> Line:
        """Through what this worker has made for the peer, and the peer for this worker."""
        return cls(
            own,
            {kind: Outlet(own, channel) for channel, kind in enumerate(_KINDS)},
            {kind: Inlet(peers, channel) for channel, kind in enumerate(_KINDS)},
        )

    def peer_is_gone(self) -> bool:
        return self.own.is_left()


@dataclass(frozen=True)
class _SumUnderneath:
    transport: SharedMemoryTransport
    inner: Pending

    def wait(self, timeout_s: float) -> None:
        self.transport.see_in(self.inner, timeout_s)


class SharedMemoryTransport:
    """Through shared memory where there is a line to the peer; all else by the transport underneath."""

    def __init__(
        self, underneath: Transport, lines: Mapping[int, Line], rings: Collection[tuple[int, ...]] = ()
    ) -> None:
        """``rings`` are groups in which each has a line to the next, and the last to the first: they sum over those."""
        self.rank = underneath.rank
        self._underneath, self._lines, self._rings = underneath, lines, rings
        self._outlets = [outlet for line in lines.values() for outlet in line.outlets.values()]
        self._passed: Counter[tuple[int, str]] = Counter()

    def send(self, tensor: Tensor, channel: Channel, number: int) -> Pending:
        peer, direction = channel
        if peer not in self._lines:
            return self._underneath.send(tensor, channel, number)
        self.push()
        line = self._lines[peer]
        sent = _Sent(self, peer, line, line.outlets[direction], tensor.detach().contiguous(), number)
        sent.outlet.post(sent)
        return sent

    def receive(self, tensor: Tensor, channel: Channel, number: int) -> Pending:
        peer, direction = channel
        if peer not in self._lines:
            return self._underneath.receive(tensor, channel, number)
        if not tensor.is_contiguous():
            raise WorkerError(f"a tensor of strides {tensor.stride()} cannot be received into; make it contiguous")
        self.push()
        line = self._lines[peer]
        received = _Received(self, peer, line, line.inlets[direction], tensor.detach(), number)
        received.inlet.post(received)
        return received

    def all_reduce(self, tensor: Tensor, workers: tuple[int, ...], timeout_s: float) -> None:
        if workers in self._rings and tensor.is_contiguous():
            self._sum_around(tensor.view(-1), workers, timeout_s)
        else:
            self.see_in(self._underneath.begin_all_reduce(tensor, workers), timeout_s)

    def carries(self, workers: tuple[int, ...]) -> bool:
        return workers not in self._rings and self._underneath.carries(workers)

    def begin_all_reduce(self, tensor: Tensor, workers: tuple[int, ...]) -> Pending:
        return _SumUnderneath(self, self._underneath.begin_all_reduce(tensor, workers))

    def see_in(self, summing: Pending, timeout_s: float) -> None:
        """What found no room yet may be what another member waits for before it joins in."""
        if not self.push():
            summing.wait(timeout_s)
            return
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(summing.wait, timeout_s)
            while not waiting.done():
                self.push()
                time.sleep(NAP_S)
            waiting.result()

    def _sum_around(self, flat: Tensor, workers: tuple[int, ...], timeout_s: float) -> None:
        """A part for each worker goes around, growing by everyone's, until it is whole; then it goes around again. All
        get the same bits. Pieces that stay in the cache follow each other a turn apart, so that a worker seldom waits
        for what the one before it has not done yet."""
        count = len(workers)
        step = max(1, count * PIECE_BYTES // flat.element_size())
        turns = 2 * (count - 1)
        rings = [_Ring.over(flat[start : start + step], workers, self.rank) for start in range(0, len(flat), step)]
        try:
            for tick in range(len(rings) + turns - 1):
                active = range(max(0, tick - turns + 1), min(tick + 1, len(rings)))
                sent = [self._pass_on(rings[piece].sent(tick - piece), rings[piece].after) for piece in active]
                for piece in active:
                    self._take_turn(rings[piece], tick - piece, timeout_s)
                for each in sent:
                    each.wait(timeout_s)
        except WorkerError as error:
            raise WorkerError(f"the all-reduce among workers {workers} failed: {error}") from error

    def _take_turn(self, ring: _Ring, turn: int, timeout_s: float) -> None:
        part = ring.received(turn)
        if not ring.grows(turn):
            self._take_over(part, ring.before, timeout_s)
            return
        other = torch.empty_like(part)
        self._take_over(other, ring.before, timeout_s)
        part.add_(other)

    def _pass_on(self, part: Tensor, peer: int) -> Pending:
        self._passed[peer, "to"] += 1
        return self.send(part, (peer, Kind.SYNC), self._passed[peer, "to"])

    def _take_over(self, part: Tensor, peer: int, timeout_s: float) -> None:
        self._passed[peer, "from"] += 1
        self.receive(part, (peer, Kind.SYNC), self._passed[peer, "from"]).wait(timeout_s)

    def push(self) -> bool:
        """Try again what found no room; returns whether some still has none."""
        waiting = [outlet for outlet in self._outlets if outlet.is_waiting]
        for outlet in waiting:
            outlet.push()
        return any(outlet.is_waiting for outlet in waiting)


@dataclass(frozen=True)
class _Ring:
    """One piece on its way around a ring, as one of its workers sees it: which part goes and which comes at a turn."""

    parts: Sequence[Tensor]
    place: int
    before: int
    after: int

    @classmethod
    def over(cls, piece: Tensor, workers: tuple[int, ...], rank: int) -> _Ring:
        count, place = len(workers), workers.index(rank)
        bounds = [len(piece) * part // count for part in range(count + 1)]
        parts = [piece[begin:end] for begin, end in itertools.pairwise(bounds)]
        return cls(parts, place, workers[place - 1], workers[(place + 1) % count])

    def grows(self, turn: int) -> bool:
        """Whether what comes is one of the sums to come; else it is whole."""
        return turn < len(self.parts) - 1

    def sent(self, turn: int) -> Tensor:
        """What came last; at first, its own."""
        return self.parts[(self.place - turn) % len(self.parts)]

    def received(self, turn: int) -> Tensor:
        return self.parts[(self.place - turn - 1) % len(self.parts)]


@dataclass(eq=False)
class _Sent:
    transport: SharedMemoryTransport
    peer: int
    line: Line
    outlet: Outlet
    tensor: Tensor
    number: int
    done: int = field(default=0, init=False)
    over: bool = field(default=False, init=False)

    def wait(self, timeout_s: float) -> None:
        for _ in _looks(self.peer, self.line, timeout_s):
            self.transport.push()
            if self.over:
                return
            time.sleep(NAP_S)

    def is_over(self) -> bool:
        self.transport.push()
        return self.over


@dataclass(eq=False)
class _Received:
    transport: SharedMemoryTransport
    peer: int
    line: Line
    inlet: Inlet
    tensor: Tensor
    number: int
    done: int = field(default=0, init=False)
    over: bool = field(default=False, init=False)

    def wait(self, timeout_s: float) -> None:
        for _ in _looks(self.peer, self.line, timeout_s):
            self.inlet.pull()
            if self.over:
                return
            owes = self.transport.push()
            self._spin()
            self.inlet.sleep_while_empty(min(timeout_s, NAP_S if owes else LOOK_S))

    def is_over(self) -> bool:
        self.transport.push()
        self.inlet.pull()
        return self.over

    def _spin(self) -> None:
        end_s = time.perf_counter() + SPIN_S
        while self.inlet.is_empty() and time.perf_counter() < end_s:
            pass


def _looks(peer: int, line: Line, timeout_s: float) -> Iterator[None]:
    """Time to look again, until the time is up; once more after the peer has gone, for what it left."""
    start_s = looked_s = time.monotonic()
    while True:
        yield
        now_s = time.monotonic()
        if now_s - looked_s >= min(LOOK_S, timeout_s):
            looked_s = now_s
            if line.peer_is_gone():
                yield
                raise WorkerError(f"worker {peer} has ended")
        if now_s - start_s >= timeout_s:
            yield
            raise WorkerError(f"nothing came within {timeout_s:g} s")
