"""The largest numbers that Penstock computes with.

A file with larger ones is damaged. Using them would give infinite results, or fill the memory.
"""

from __future__ import annotations

MOST_SECONDS = 1e12
"""32,000 years."""
LEAST_RATE, MOST_RATE = 1e-3, 1e18
"""Bytes per second."""
LEAST_SPEED, MOST_SPEED = 1e-6, 1e6
"""Speeds of devices relative to their profile."""
MOST_WHOLE = 2**64
"""More than any seed or count."""
MOST_BYTES = 2**53
"""9 petabytes, exact as a float."""
MOST_DEVICES = 65_536
MOST_MICROBATCHES = 65_536
"""Microbatches in a minibatch, or in flight."""
MOST_SHARE = 1_000
"""Microbatches of a round on one replica."""

_MOST = 1e100
_LEAST_SECONDS = 1e-100


def is_usable(number: float) -> bool:
    """Whether sums and products of such numbers stay finite."""
    return abs(number) <= _MOST


def per_second(amount: float, seconds: float) -> float | None:
    """The rate; None if the time is 0."""
    return amount / seconds if seconds > _LEAST_SECONDS else None


def is_seconds(seconds: float) -> bool:
    """Whether it can be a duration."""
    return 0 <= seconds <= MOST_SECONDS


def is_size(num_bytes: float) -> bool:
    return 0 <= num_bytes <= MOST_BYTES


def is_rate(bytes_per_s: float) -> bool:
    return LEAST_RATE <= bytes_per_s <= MOST_RATE


def is_speed(times: float) -> bool:
    return LEAST_SPEED <= times <= MOST_SPEED
