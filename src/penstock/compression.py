"""How float32 numbers travel between workers: exactly, or rounded to fewer bytes. A plan chooses per stage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from penstock.errors import PlanError

BLOCK = 256
"""Consecutive numbers that share a scale in int8. They are not a row, so that the number of bytes does not depend on
the shape."""


@dataclass(frozen=True, slots=True)
class Compression:
    share: float
    """The share of the bytes that is left."""
    tolerance: float
    """The largest accepted difference of a gradient from that of one process, relative to its largest element. With
    int8, a unit that rounding switches on or off changes the gradient of a small layer by a third."""
    loss_tolerance: float
    """The largest accepted relative difference of the loss."""
    noise: float
    """A gradient below this share of the largest of all may be mere rounding, such as that of a bias before batch
    norm."""


# Mildest first.
COMPRESSIONS: Mapping[str, Compression] = {
    "exact": Compression(share=1.0, tolerance=1e-4, loss_tolerance=1e-4, noise=0.0),
    "bf16": Compression(share=1 / 2, tolerance=0.05, loss_tolerance=0.01, noise=0.1),
    "int8": Compression(share=1 / 4 + 1 / BLOCK, tolerance=0.5, loss_tolerance=0.05, noise=0.1),
}


def check_compression(name: str) -> None:
    if name not in COMPRESSIONS:
        raise PlanError(f"compression {name!r} is unknown; choose one of {', '.join(COMPRESSIONS)}")


def up_to(name: str) -> tuple[str, ...]:
    """The compressions that are no coarser than this one, mildest first."""
    names = tuple(COMPRESSIONS)
    return names[: names.index(name) + 1]


def coarsest(names: Iterable[str]) -> str:
    return max(names, key=list(COMPRESSIONS).index, default="exact")
