"""A run over time, from its progress record, reduced to what a screen can show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np

from penstock import codec
from penstock.record import Moment, Record
from penstock.report.outcome import Outcome
from penstock.simulate import Curve, Simulation
from penstock.trace import Array

MAX_POINTS = 400
RATE_OVER = 10
"""Rates are over this many minibatches: over fewer, they would show at which times minibatches happen to end."""


def course(outcome: Outcome) -> dict[str, Any] | None:
    """None for a run without progress moments."""
    moments, start = outcome.record.moments, outcome.record.start
    if start is None or len(moments) < 2:
        return None
    chunks = _chunks(moments)
    at_s = [chunk[-1].at_s for chunk in chunks]
    return {
        "at_s": at_s,
        "loss": [chunk[-1].loss for chunk in chunks],
        "samples_per_s": _rates([chunk[-1] for chunk in chunks], outcome.plan.profile.batch_size),
        "busy": [[fmean(m.busy[w] for m in chunk) for chunk in chunks] for w in range(len(start.workers))],
        "memory_bytes": [_most(chunks, worker) for worker in range(len(start.workers))],
        "simulated_bytes": simulated_memory(outcome.played, at_s, outcome.minibatches),
        "predicted": {"samples_per_s": start.samples_per_s, "memory_bytes": list(start.memory_bytes)},
    }


def marks(record: Record) -> list[dict[str, Any]]:
    return [codec.encode(mark) for mark in record.marks]


def _chunks(moments: Sequence[Moment]) -> list[Sequence[Moment]]:
    every = math.ceil(len(moments) / MAX_POINTS)
    return [moments[start : start + every] for start in range(0, len(moments), every)]


def _rates(moments: Sequence[Moment], batch_size: int) -> list[float]:
    """The rate at each moment, over enough moments around it, evenly on both sides."""
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


def simulated_memory(played: Simulation, at_s: Sequence[float], minibatches: int) -> list[list[int]]:
    """For each worker, the most memory that the simulation holds between each of these moments and the next.

    Minibatches are matched: the beginning and the end of the simulation belong to those of the run, which has
    ``minibatches`` until the last moment. The steady middle of the simulation stands for everything between.
    """
    trace = played.trace
    if not at_s or not trace.events:
        return []
    played_minibatches = max(1, round(sum(trace.samples) / played.plan.profile.batch_size))
    minibatch_s = trace.span_s / played_minibatches
    pace = minibatch_s * minibatches / at_s[-1] if at_s[-1] > 0 else 0.0
    moments = np.array(at_s) * pace
    from_end = trace.span_s - (moments[-1] - moments)
    middle = trace.span_s / 2
    ends = np.where(moments <= middle, moments, np.maximum(middle, from_end))
    begins = np.minimum(np.append(0.0, ends[:-1]), ends - minibatch_s)
    start_s = float(trace.columns.start_s.min())
    return [
        _most_within(played.memory(worker), start_s + begins, start_s + ends) for worker in range(len(trace.workers))
    ]


def _most_within(curve: Curve, begins: Array, ends: Array) -> list[int]:
    """The maximum from each begin to its end, including the value at the begin."""
    order = np.argsort(curve.at_s, kind="stable")
    at_s, held = curve.at_s[order], curve.num_bytes[order]
    first = np.maximum(0, np.searchsorted(at_s, begins, side="right") - 1)
    last = np.maximum(first + 1, np.searchsorted(at_s, ends, side="right"))
    return [round(held[i:j].max()) for i, j in zip(first, last, strict=True)]
