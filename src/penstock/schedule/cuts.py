"""Where a run can be cut in two without stopping it: points that each stage passes, at a time of its own, between two
updates."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Mapping, Sequence

from penstock.schedule.schedule import Schedule

Cuts = Mapping[int, tuple[int, ...]]
"""How many minibatches are before a cut -> for each stage, the STEP that it makes last before it."""


def cuts_of(schedule: Schedule, minibatches: Sequence[int]) -> Cuts:
    """All cuts of a schedule for minibatches of these numbers of microbatches, in order.

    At a cut every stage has made the updates of just the minibatches before it, and the replicas have had their turns,
    so that whoever goes on from there gives the same microbatches to the same replicas. The end is always one.

    Under an asynchronous schedule a stage may have begun on microbatches behind the cut by then:

        worker 0  F0 F1       B0 STEP0 F2 B1 STEP1 | F3 B2 STEP2 ...
        worker 1     F0 B0 STEP0 F1 B1 STEP1 | F2 B2 STEP2 ...
    """
    found = {}
    for number, done in enumerate(itertools.accumulate(minibatches), start=1):
        rounds = tuple(bisect.bisect_left(starts, done) for starts in schedule.rounds)
        whole = all(
            rounds[stage] < len(starts) and starts[rounds[stage]] == done and done % size == 0
            for stage, (starts, size) in enumerate(zip(schedule.rounds, schedule.pipeline.round_sizes, strict=True))
        )
        if whole or done == schedule.microbatches:
            found[number] = tuple(index - 1 for index in rounds)
    return found


def due(cuts: Iterable[int], *, before: int, every: int) -> list[int]:
    """Of these cuts, the first at or after each multiple of ``every`` minibatches of a run that had ``before``."""
    chosen, last = [], before
    for cut in cuts:
        if (before + cut) // every > last // every:
            chosen.append(cut)
            last = before + cut
    return chosen
