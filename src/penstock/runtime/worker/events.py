"""What a worker did and when: its first actions and its newest, however long it runs, at 24 bytes each."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from penstock.schedule import Action
from penstock.trace import CODES, KINDS, Array, Columns, joined

CHUNK = 1024
FIRST, NEWEST = 64, 384
"""Chunks that are kept of a run, all workers together: 65,536 and 393,216 actions, 11 MB."""

_KIND_BITS, _INDEX_BITS = 3, 40
ROW = np.dtype([("action", "<i8"), ("start_s", "<f8"), ("end_s", "<f8")])
"""An action as it is handed in: stage, index and kind in one number, and its times."""


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

    def rows(self) -> Array:
        made = np.empty(len(self), ROW)
        made["action"], times = np.asarray(self.actions), np.asarray(self.times)
        made["start_s"], made["end_s"] = times[0::2], times[1::2]
        return made

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
        return [[event for chunk in chunks for event in chunk] for chunks in self._kept()]

    def rows(self) -> list[Array]:
        """The same as arrays of ``ROW``."""
        return [_joined_rows(part) for part in self._kept()]

    def _kept(self) -> list[list[_Chunk]]:
        return [self._first, list(self._newest)] if self._dropped else [[*self._first, *self._newest]]

    def __len__(self) -> int:
        return sum(map(len, self._first)) + sum(map(len, self._newest))

    def __iter__(self) -> Iterator[Timed]:
        return iter([event for part in self.parts() for event in part])


def _joined_rows(chunks: Iterable[_Chunk]) -> Array:
    return np.concatenate([chunk.rows() for chunk in chunks])


def columns_of(rows: Array, worker: int) -> Columns:
    """Rows of ``ROW`` as the columns of a trace."""
    actions = rows["action"]
    return Columns(
        worker=np.full(len(rows), worker, np.int64),
        stage=actions >> _KIND_BITS + _INDEX_BITS,
        kind=(actions & (1 << _KIND_BITS) - 1).astype(np.int8),
        index=actions >> _KIND_BITS & (1 << _INDEX_BITS) - 1,
        start_s=rows["start_s"],
        end_s=rows["end_s"],
    )


def beginning_and_newest(workers: Sequence[Sequence[Columns]]) -> tuple[Columns | None, Columns]:
    """The events of all workers at the beginning of the run, and its newest. Each worker gives its events in the parts
    that ``EventLog.parts`` has.

    Where nobody let anything go these are nothing and everything. Otherwise each is the stretch of time for which all
    workers have their events, so that nobody seems idle who was not.
    """
    gaps = [(parts[0].end_s[-1], parts[1].start_s[0]) for parts in workers if len(parts) > 1]
    every = joined([part for parts in workers for part in parts])
    if not gaps:
        return None, every
    until_s, since_s = min(end_s for end_s, _ in gaps), max(start_s for _, start_s in gaps)
    return every[every.end_s <= until_s], every[every.start_s >= since_s]
