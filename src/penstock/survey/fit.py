"""Fits latency and bandwidth to measured times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.cluster import Level
from penstock.cost import Traffic

LEAST_LATENCY_S = 1e-6
"""No transport of torch is faster. A fit below this means that latency is too small to measure."""
MOST_BYTES_PER_S = 1e13
"""No link is faster. A fit above this means that the time per byte is too small to measure."""
OUTLIER = np.log(1.5)
"""A time that is off by more than this factor has no more weight than one that is off by this factor."""


class Sample(NamedTuple):
    traffic: Traffic
    seconds: float


def fit_link(samples: Sequence[Sample]) -> Level:
    """The level with the smallest relative differences between predicted and measured seconds.

    It minimises squares of log(measured / predicted): a message of 4 KiB that takes twice as long as predicted counts
    as much as one of 16 MiB that does. Huber's weights limit the effect of outliers. Both unknowns are logarithms, so
    that they stay positive. The derivative of log(predicted) is then the latency's share of the time for the one, and
    the rest for the other.
    """
    bytes_each = np.array([sample.traffic.bytes_each for sample in samples])
    log_s = np.log([sample.seconds / sample.traffic.messages for sample in samples])
    largest = int(np.argmax(bytes_each))
    latency, per_byte = float(log_s.min()), float(log_s[largest] - np.log(bytes_each[largest]))
    for _ in range(100):
        predicted_s = np.exp(latency) + bytes_each * np.exp(per_byte)
        share = np.exp(latency) / predicted_s
        residual = log_s - np.log(predicted_s)
        weight = np.minimum(1.0, OUTLIER / np.maximum(np.abs(residual), 1e-12))
        slope = np.stack([share, 1 - share])
        normal = (slope * weight) @ slope.T + 1e-9 * np.eye(2)  # the sizes may not suffice to tell the two apart
        step = np.clip(np.linalg.solve(normal, (slope * weight) @ residual), -1.0, 1.0)
        latency = max(latency + float(step[0]), float(np.log(LEAST_LATENCY_S)))
        per_byte = max(per_byte + float(step[1]), -float(np.log(MOST_BYTES_PER_S)))
    return Level(size=1, bytes_per_s=float(np.exp(-per_byte)), latency_s=float(np.exp(latency)))


class Handling(NamedTuple):
    """A worker's own time for a message that it sends or receives."""

    seconds: float
    bytes_per_s: float | None
    """The rate of copying; None if it is too fast to measure."""


def fit_handling(timed: Sequence[tuple[int, float]]) -> Handling:
    """Fit to pairs of bytes and seconds: the slope between the smallest and the largest message, and the rest of the
    smallest's time."""
    (least, least_s), (most, most_s) = min(timed), max(timed)
    if most_s <= least_s or most == least:
        return Handling(least_s, None)
    bytes_per_s = (most - least) / (most_s - least_s)
    return Handling(max(0.0, least_s - least / bytes_per_s), bytes_per_s)
