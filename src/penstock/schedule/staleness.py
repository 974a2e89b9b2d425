"""How old gradients are when they are applied: the updates that a stage's weights have seen since the forward."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock.errors import FormatError
from penstock.schedule.builders import family
from penstock.schedule.pipeline import Pipeline
from penstock.schedule.schedule import Schedule


@dataclass(frozen=True)
class Staleness:
    """Of a stage."""

    microbatches: tuple[int, ...]
    """how many had a gradient that was applied to the very weights of their forward, to weights one update newer ..."""

    def __post_init__(self) -> None:
        if not any(self.microbatches) or min(self.microbatches) < 0:
            raise FormatError(f"staleness of {list(self.microbatches)} microbatches; count at least one, none below 0")

    @classmethod
    def counted(cls, found: Mapping[int, int]) -> Staleness:
        """From the microbatches of each number of updates."""
        return cls(tuple(found.get(updates, 0) for updates in range(max(found, default=0) + 1)))

    @property
    def mean(self) -> float:
        updates = sum(age * count for age, count in enumerate(self.microbatches))
        return updates / sum(self.microbatches)

    @property
    def most(self) -> int:
        return max(age for age, count in enumerate(self.microbatches) if count)


def staleness_of(schedule: Schedule, microbatches: Iterable[int] | None = None) -> tuple[Staleness, ...]:
    """Of each stage, over these microbatches, by default all."""
    chosen = range(schedule.microbatches) if microbatches is None else list(microbatches)
    found = []
    for stage in range(schedule.pipeline.num_stages):
        counts: dict[int, int] = {}
        for microbatch in chosen:
            updates = schedule.staleness(stage, microbatch)
            counts[updates] = counts.get(updates, 0) + 1
        found.append(Staleness.counted(counts))
    return tuple(found)


def steady_staleness(name: str, pipeline: Pipeline, depths: Sequence[int]) -> tuple[Staleness, ...]:
    """Of each stage under an asynchronous schedule once the pipeline is full, without building it.

    A replica that keeps d in flight begins a microbatch just after the update d rounds before its own, and stages that
    share a weight update it when the first of them does.
    """
    behind = [depths[tied[0]] - 1 for tied in pipeline.sync_stages]
    forwards_on, (first, *_) = family(name).forwards_on, pipeline.round_sizes
    if forwards_on == "newest":
        return tuple(Staleness.counted({updates: 1}) for updates in behind)
    if forwards_on == "one before the newest":
        return (Staleness.counted({1: 1}),) * pipeline.num_stages
    found = []
    for size in pipeline.round_sizes:
        seen = range(first * behind[0], first * behind[0] + math.lcm(first, size))
        found.append(Staleness.counted(Counter(m // size - (m // first - behind[0]) * first // size for m in seen)))
    return tuple(found)
