"""The latency and bandwidth that explain measured times best."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.cluster import Level
from penstock.cost import Traffic

LEAST_LATENCY_S = 1e-6
"""No transport of torch is quicker; a fit that finds less has found that latency does not show."""
MOST_BYTES_PER_S = 1e13
"""No link is faster; a fit that finds more has found that bytes do not show."""
OUTLIER = np.log(1.5)
"""A time that is off by more than this factor pulls no harder than one that is off by this factor."""


class Sample(NamedTuple):
    traffic: Traffic
    seconds: float


def fit_link(samples: Sequence[Sample]) -> Level:
    """The level of which predicted and measured seconds differ least, as a ratio.

    Least squares of the logarithm of measured over predicted: a message of 4 KiB that takes twice as long as
    predicted counts as much as one of 16 MiB that does. Huber's weights keep outliers from deciding.
    Both unknowns are held as logarithms, so that they stay positive: log(predicted) then changes with the latency's
    by the latency's share of the time, with the other's by the rest.
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
        normal = (slope * weight) @ slope.T + 1e-9 * np.eye(2)  # sizes that tell the two apart may be missing
        step = np.clip(np.linalg.solve(normal, (slope * weight) @ residual), -1.0, 1.0)
        latency = max(latency + float(step[0]), float(np.log(LEAST_LATENCY_S)))
        per_byte = max(per_byte + float(step[1]), -float(np.log(MOST_BYTES_PER_S)))
    return Level(size=1, bytes_per_s=float(np.exp(-per_byte)), latency_s=float(np.exp(latency)))


class Handling(NamedTuple):
    """What a message takes of the time of a worker that sends or takes it."""

    seconds: float
    bytes_per_s: float | None
    """None where copying does not show"""


def fit_handling(timed: Sequence[tuple[int, float]]) -> Handling:
    """From bytes and seconds: the slope between the smallest and the largest, and what is left of the smallest."""
    (least, least_s), (most, most_s) = min(timed), max(timed)
    if most_s <= least_s or most == least:
        return Handling(least_s, None)
    bytes_per_s = (most - least) / (most_s - least_s)
    return Handling(max(0.0, least_s - least / bytes_per_s), bytes_per_s)
