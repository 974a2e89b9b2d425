"""What a worker did and when: its first actions and its newest, however long it runs, at 24 bytes each."""

from __future__ import annotations

import base64
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from penstock.schedule import Action
from penstock.trace import CODES, KINDS, Event

CHUNK = 1024
FIRST, NEWEST = 64, 384
"""Chunks that are kept of a run, all workers together: 65,536 and 393,216 actions, 11 MB."""

_KIND_BITS, _INDEX_BITS = 3, 40


class Timed(NamedTuple):
    action: Action
    start_s: float
    end_s: float


class _Chunk:
    __slots__ = ("actions", "times")

    def __init__(self) -> None:
        self.actions = array("q")
        """stage, index and kind in one number each"""
        self.times = array("d")
        """start and end of each"""

    def packed(self) -> list[str]:
        return [
            base64.b64encode(np.asarray(column).astype(form).tobytes()).decode()
            for column, form in ((self.actions, "<i8"), (self.times, "<f8"))
        ]

    @classmethod
    def unpacked(cls, actions: str, times: str) -> _Chunk:
        chunk = cls()
        chunk.actions.extend(np.frombuffer(base64.b64decode(actions), "<i8").tolist())
        chunk.times.extend(np.frombuffer(base64.b64decode(times), "<f8").tolist())
        return chunk

    def __len__(self) -> int:
        return len(self.actions)

    def __iter__(self) -> Iterator[Timed]:
        for at, packed in enumerate(self.actions):
            kind = KINDS[packed & (1 << _KIND_BITS) - 1]
            index = packed >> _KIND_BITS & (1 << _INDEX_BITS) - 1
            action = Action(packed >> _KIND_BITS + _INDEX_BITS, kind, index)
            yield Timed(action, self.times[2 * at], self.times[2 * at + 1])


class EventLog:
    """Iterates over all that is kept; ``parts`` says where something was let go."""

    def __init__(self, first: int = FIRST, newest: int = NEWEST) -> None:
        """Of how many chunks."""
        self._most_first = first
        self._newest: deque[_Chunk] = deque(maxlen=newest)
        self.clear()

    def clear(self) -> None:
        self._first: list[_Chunk] = []
        self._newest.clear()
        self._dropped = 0
        self._open()

    def add(self, action: Action, offset: int, start_s: float, end_s: float) -> None:
        """``offset`` is where the action's index stands in the whole run."""
        stage, kind, index = action
        self._actions.append((stage << _INDEX_BITS | index + offset) << _KIND_BITS | CODES[kind])
        self._times.extend((start_s, end_s))
        if len(self._actions) == CHUNK:
            self._open()

    def _open(self) -> None:
        """A new chunk, at the cost of the oldest of the newest where there are enough."""
        chunk = _Chunk()
        self._actions, self._times = chunk.actions, chunk.times
        if len(self._first) < self._most_first:
            self._first.append(chunk)
            return
        self._dropped += len(self._newest) == self._newest.maxlen
        self._newest.append(chunk)

    @classmethod
    def one_of(cls, workers: int) -> EventLog:
        """One worker's share of what a run keeps."""
        return cls(max(1, FIRST // workers), max(2, NEWEST // workers))

    def parts(self) -> list[list[Timed]]:
        """One, or where something between was let go two: the first actions, and the newest."""
        first, newest = ([event for chunk in chunks for event in chunk] for chunks in (self._first, self._newest))
        return [first, newest] if self._dropped else [first + newest]

    def packed(self) -> list[list[list[str]]]:
        """The same, to send to another worker as JSON."""
        kept = [self._first, list(self._newest)] if self._dropped else [[*self._first, *self._newest]]
        return [[chunk.packed() for chunk in part] for part in kept]

    def __len__(self) -> int:
        return sum(map(len, self._first)) + sum(map(len, self._newest))

    def __iter__(self) -> Iterator[Timed]:
        return iter([event for part in self.parts() for event in part])


def unpacked(parts: Sequence[Sequence[Sequence[str]]]) -> list[list[Timed]]:
    return [[event for chunk in part for event in _Chunk.unpacked(*chunk)] for part in parts]


Parts = Sequence[Sequence[Event]]
"""a worker's events as EventLog.parts has them"""


def beginning_and_newest(workers: Sequence[Parts]) -> tuple[list[list[Event]] | None, list[list[Event]]]:
    """The events of all workers at the beginning of the run, and its newest: nothing and everything, where nobody let
    anything go; else each the stretch of time for which all have theirs, so that nobody seems idle who was not."""
    gaps = [(parts[0][-1].end_s, parts[1][0].start_s) for parts in workers if len(parts) > 1]
    every = [[event for part in parts for event in part] for parts in workers]
    if not gaps:
        return None, every
    until_s, since_s = min(end_s for end_s, _ in gaps), max(start_s for _, start_s in gaps)
    return (
        [[event for event in events if event.end_s <= until_s] for events in every],
        [[event for event in events if event.start_s >= since_s] for events in every],
    )
