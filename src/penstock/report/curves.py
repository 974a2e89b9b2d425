"""The course of a run over time, from what it wrote down as it went, thinned to what a screen can show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from penstock import codec
from penstock.record import Moment, Record

MAX_POINTS = 400
RATE_OVER = 10
"""minibatches: over fewer, the moments at which they happen to end would be seen, not the pace"""


def course(record: Record, batch_size: int) -> dict[str, Any] | None:
    """None for a run that left no moments."""
    moments, start = record.moments, record.start
    if start is None or len(moments) < 2:
        return None
    chunks = _chunks(moments)
    return {
        "at_s": [chunk[-1].at_s for chunk in chunks],
        "samples_per_s": _rates([chunk[-1] for chunk in chunks], batch_size),
        "busy": [[fmean(m.busy[w] for m in chunk) for chunk in chunks] for w in range(len(start.workers))],
        "memory_bytes": [_most(chunks, worker) for worker in range(len(start.workers))],
        "predicted": {"samples_per_s": start.samples_per_s, "memory_bytes": list(start.memory_bytes)},
    }


def marks(record: Record) -> list[dict[str, Any]]:
    return [codec.encode(mark) for mark in record.marks]


def _chunks(moments: Sequence[Moment]) -> list[Sequence[Moment]]:
    every = math.ceil(len(moments) / MAX_POINTS)
    return [moments[start : start + every] for start in range(0, len(moments), every)]


def _rates(moments: Sequence[Moment], batch_size: int) -> list[float]:
    """At each moment over enough of them around it, evenly on both sides."""
    elapsed, samples = [m.at_s for m in moments], [m.samples for m in moments]
    per_moment = (samples[-1] - samples[0]) / (len(moments) - 1)
    reach = math.ceil(RATE_OVER * batch_size / (2 * per_moment)) if per_moment > 0 else 1
    rates = []
    for middle in range(len(moments)):
        first, last = max(0, middle - reach), min(len(moments) - 1, middle + reach)
        seconds = elapsed[last] - elapsed[first]
        rates.append((samples[last] - samples[first]) / seconds if seconds > 0 else 0.0)
    return rates


def _most(chunks: Sequence[Sequence[Moment]], worker: int) -> list[int | None]:
    found = [[m.memory_bytes[worker] for m in chunk] for chunk in chunks]
    return [max((each for each in chunk if each is not None), default=None) for chunk in found]
