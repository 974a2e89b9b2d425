"""How the clocks of different machines compare, from messages sent to and fro: Cristian's method, with drift.

    own clock     sent ───────────────────── back
                      ╲                     ╱
    the reference      ╲─────── read ──────╱

When ``back`` is read here, the reference's ``read`` lies somewhere between ``sent`` and ``back``. Taken to be in the
middle, it is off by half the round trip at most; so of many round trips the quickest tells most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

Clock = Callable[[], float]
"""Returns the seconds since some fixed time."""
Seconds = TypeVar("Seconds", float, np.ndarray[Any, Any])
"""One reading of a clock, or many."""


@dataclass(frozen=True, kw_only=True)
class RoundTrip:
    sent_s: float
    """By the own clock."""
    read_s: float
    """By the reference clock, in between."""
    back_s: float

    @property
    def seconds(self) -> float:
        return self.back_s - self.sent_s

    @property
    def middle_s(self) -> float:
        return (self.sent_s + self.back_s) / 2

    @property
    def ahead_s(self) -> float:
        """How far the reference is ahead of the own clock."""
        return self.read_s - self.middle_s


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """Converts readings of a machine's clock into those of worker 0's clock."""

    workers: tuple[int, ...]
    """The workers that read this clock."""
    ahead_s: float = 0.0
    """How far worker 0's clock is ahead at ``since_s``."""
    since_s: float = 0.0
    drift: float = 0.0
    """Seconds that worker 0's clock gains per second."""
    error_s: float = 0.0
    """The largest error of aligned times, if both clocks run evenly."""

    def to_reference(self, own_s: Seconds) -> Seconds:
        return own_s + self.ahead_s + self.drift * (own_s - self.since_s)


def align(workers: tuple[int, ...], at_start: Sequence[RoundTrip], at_end: Sequence[RoundTrip]) -> Alignment:
    """From round trips before and after a run. The drift is assumed to be even in between."""
    first, last = (min(trips, key=lambda trip: trip.seconds) for trips in (at_start, at_end))
    between_s = last.middle_s - first.middle_s
    return Alignment(
        workers=workers,
        ahead_s=first.ahead_s,
        since_s=first.middle_s,
        drift=(last.ahead_s - first.ahead_s) / between_s if between_s > 0 else 0.0,
        error_s=max(first.seconds, last.seconds) / 2,
    )
