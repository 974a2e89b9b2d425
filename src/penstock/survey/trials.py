"""Which workers exchange messages, and which do so at the same time: enough to know the links, without timing every
pair."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from penstock.survey.hosts import Host, level_sizes

T = TypeVar("T")

KIB, MIB = 2**10, 2**20


class Reach(Enum):
    """The level that a trial measures."""

    INSIDE = "inside a host"
    BETWEEN = "between hosts"


class Pattern(Enum):
    TO_AND_FRO = "round trip"
    """One message in each direction, and nothing else."""
    HAND_OVER = "message"
    """Messages in a pipeline of two workers that compute by turns, so each waits for the other."""
    STREAM = "stream"
    """Message after message in one direction."""
    ALL_REDUCE = "all-reduce"
    HANDLING = "handling"
    """Messages in a pipeline of two workers that both compute: measures a worker's own time for them."""


SIZES = {
    Pattern.TO_AND_FRO: (4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB),
    Pattern.HAND_OVER: (4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB),
    Pattern.STREAM: (MIB,),
    Pattern.ALL_REDUCE: (MIB, 4 * MIB, 16 * MIB, 32 * MIB),  # gradients of a stage are large
    Pattern.HANDLING: (64 * KIB, MIB, 4 * MIB),
}
"""In bytes, ascending."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    reach: Reach
    pattern: Pattern
    groups: tuple[tuple[int, ...], ...]
    """Workers that exchange messages: pairs, or the members of an all-reduce. All groups run at the same time."""

    @property
    def sizes(self) -> tuple[int, ...]:
        return SIZES[self.pattern]


@dataclass(frozen=True, kw_only=True)
class Timing:
    trial: int
    group: int
    num_bytes: int
    seconds: float
    """The median time of one message or all-reduce."""


def make_trials(hosts: Sequence[Host]) -> tuple[Trial, ...]:
    trials: list[Trial] = []
    if len(hosts) == 1 or len(level_sizes(hosts)) > 1:
        trials += _inside([host.workers for host in hosts])
    if len(hosts) > 1:
        trials += _between([host.workers for host in hosts])
    return tuple(trials)


def _inside(hosts: Sequence[tuple[int, ...]]) -> list[Trial]:
    """Hosts do not disturb each other, so all run at the same time."""
    rounds = itertools.zip_longest(*(few_pairs(workers) for workers in hosts))
    trials = [_trial(Reach.INSIDE, Pattern.HAND_OVER, [pair for pair in pairs if pair]) for pairs in rounds]
    trials.append(_trial(Reach.INSIDE, Pattern.ALL_REDUCE, hosts))
    trials.append(_trial(Reach.INSIDE, Pattern.HANDLING, [workers[:2] for workers in hosts]))
    at_once = [pair for workers in hosts if len(workers) >= 4 for pair in _neighbours(workers)]
    alone = [workers[:2] for workers in hosts if len(workers) >= 4]
    return trials + _streams(Reach.INSIDE, alone, at_once)


def _between(hosts: Sequence[tuple[int, ...]]) -> list[Trial]:
    """One pair at a time, since pairs may share a switch. Pairs are the first or the last workers of their hosts."""
    trials = [
        _trial(Reach.BETWEEN, Pattern.HAND_OVER, [(one[end], two[end])])
        for (one, two), end in zip(few_pairs(hosts), (0, -1, 0), strict=False)
    ]
    trials.append(_trial(Reach.BETWEEN, Pattern.ALL_REDUCE, [tuple(itertools.chain(*hosts))]))
    trials.append(_trial(Reach.BETWEEN, Pattern.HANDLING, [(hosts[0][0], hosts[1][0])]))
    at_once = [pair for one, two in _neighbours(hosts) for pair in zip(one, two, strict=False)]
    return trials + _streams(Reach.BETWEEN, at_once[:1], at_once)


def _streams(reach: Reach, alone: Sequence[tuple[int, ...]], at_once: Sequence[tuple[int, ...]]) -> list[Trial]:
    if len(at_once) <= len(alone):
        return []
    return [_trial(reach, Pattern.STREAM, groups) for groups in (alone, at_once)]


def few_pairs(items: Sequence[T]) -> list[tuple[T, T]]:
    """At most three pairs: the first two items, the two in the middle, and the two ends."""
    middle = len(items) // 2
    pairs = [(0, 1), (middle - 1, middle), (0, len(items) - 1)]
    return [(items[a], items[b]) for a, b in dict.fromkeys(pairs) if a < b]


def _neighbours(items: Sequence[T]) -> list[tuple[T, T]]:
    return list(zip(items[::2], items[1::2], strict=False))


def _trial(reach: Reach, pattern: Pattern, groups: Sequence[tuple[int, ...]]) -> Trial:
    return Trial(reach=reach, pattern=pattern, groups=tuple(groups))
