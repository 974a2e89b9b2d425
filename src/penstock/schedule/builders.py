"""The schedules by name. Each turns a pipeline and a number of microbatches into action lists.

Drawn for two stages on two workers, four microbatches:

    gpipe      worker 0  F0 F1 F2 F3          B0 B1 B2 B3 STEP0
               worker 1     F0 F1 F2 F3 B0 B1 B2 B3       STEP0

    1f1b       worker 0  F0 F1       B0 F2 B1 F3 B2    B3 STEP0
               worker 1     F0 B0 F1 B1 F2 B2 F3 B3       STEP0

    pipedream  worker 0  F0 F1       B0 STEP0 F2 B1 STEP1 F3 ...
               worker 1     F0 B0 STEP0 F1 B1 STEP1 F2 B2 STEP2 ...

    vertical   worker 0  F0 F1       B0 STEP0 F2 B1 STEP1 F3 ...
               worker 1     F0 B0 STEP0 F1 B1 STEP1 F2 B2 STEP2 ...

    2bw        worker 0  F0 F1       B0 F2 B1 STEP0 F3 B2    B3 STEP1
               worker 1     F0 B0 F1 B1 STEP0 F2 B2 F3 B3 STEP1

    inference  worker 0  F0 F1 F2 F3
               worker 1     F0 F1 F2 F3

Under vertical a microbatch uses at every stage the version that it met at the first. 2bw is drawn with two microbatches
to an update; those of an update use the weights from before the update before it.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.errors import ScheduleError
from penstock.schedule.action import Action, Kind
from penstock.schedule.pipeline import Pipeline
from penstock.schedule.schedule import Schedule, Versions, newest_versions


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What a planner and a user need to know of a schedule before it is built."""

    asynchronous: bool
    """updates weights after every round of its own, without waiting for the rest of the pipeline"""
    all_forwards_first: bool
    """keeps a whole minibatch in flight, whatever depth the plan gives"""
    trains: bool = True
    """whether it has backwards and updates"""
    accumulates: bool = False
    """whether a minibatch may have several microbatches, whose gradients one update consumes"""
    most_versions: int | None = None
    """of the weights, however many microbatches are in flight"""

    def widest_round(self, microbatches: int) -> float:
        """How many microbatches a stage's replicas may share out in turn: where updates accumulate without a drain,
        every replica must have its share in each."""
        return microbatches if self.asynchronous and self.accumulates else math.inf

    def versions(self, in_flight: int) -> int:
        """How many versions of its weights a stage keeps with so many microbatches in flight."""
        if not self.asynchronous:
            return 1
        return in_flight if self.most_versions is None else min(in_flight, self.most_versions)


FAMILIES: dict[str, Family] = {
    "gpipe": Family(asynchronous=False, all_forwards_first=True, accumulates=True),
    "1f1b": Family(asynchronous=False, all_forwards_first=False, accumulates=True),
    "pipedream": Family(asynchronous=True, all_forwards_first=False),
    "vertical": Family(asynchronous=True, all_forwards_first=False),
    "2bw": Family(asynchronous=True, all_forwards_first=False, accumulates=True, most_versions=2),
    "inference": Family(asynchronous=False, all_forwards_first=False, trains=False),
}


def family(name: str) -> Family:
    if name not in FAMILIES:
        raise ScheduleError(f"schedule {name!r} is unknown; choose one of {', '.join(FAMILIES)}")
    return FAMILIES[name]


def default_depth(pipeline: Pipeline, stage: int) -> int:
    """Microbatches that a replica keeps in flight so that those behind it never starve.

    PipeDream (section 3.2) divides the workers from this stage on by the stage's replicas; rounding up instead of
    down lets fewer replicas feed more. It is enough where all stages have as many replicas. A replica with a larger
    share counts as that many.
    """
    return -(-sum(pipeline.round_sizes[stage:]) // pipeline.round_sizes[stage])


def depths_with_slack(pipeline: Pipeline, rounds: float) -> list[int]:
    """Depths that let every stage run so many rounds ahead of the next, a round being as wide as the wider of the two.

    An unevenly replicated pipeline wants that: replicas step together, so they send in bursts. The width of a round
    times (depth - 1) never grows from a stage to a later one; if it did, an asynchronous schedule would deadlock, as
    a round could wait for a microbatch that is only sent after it.
    """
    depths = [1]
    for stage in range(pipeline.num_stages - 2, -1, -1):
        here, behind = pipeline.round_sizes[stage], pipeline.round_sizes[stage + 1]
        ahead = behind * (depths[0] - 1) + math.ceil(rounds * max(here, behind))
        depths.insert(0, 1 + -(-ahead // here))
    return depths


def shallow_depths(pipeline: Pipeline, most: Sequence[int], usual: Sequence[int] | None = None) -> list[int]:
    """The usual depths, none above the ``most`` of its stage, and no stage ahead of what the one before it sends."""
    usual = usual or [default_depth(pipeline, stage) for stage in range(pipeline.num_stages)]
    depths: list[int] = []
    for stage in range(pipeline.num_stages):
        depth = min(usual[stage], most[stage])
        if stage:
            sent = pipeline.round_sizes[stage - 1] * (depths[-1] - 1)
            depth = min(depth, 1 + sent // pipeline.round_sizes[stage])
        depths.append(depth)
    return depths


def replica_depth(depth: int, share: int) -> int:
    """Microbatches in flight on a replica whose share of a round is ``share``, at a stage of that depth."""
    return share * (depth - 1) + 1


def build_schedule(
    name: str,
    pipeline: Pipeline,
    minibatches: Sequence[int],
    depths: Sequence[int] | None = None,
) -> Schedule:
    """The schedule ``name`` for minibatches of the given numbers of microbatches.

    ``depths`` is each stage's number of microbatches in flight per replica. An asynchronous schedule has no common
    minibatch: every stage steps after a round, which is one microbatch
    per replica, or as many as its share. Inference has no rounds, and keeps nothing in flight.
    """
    kind = family(name)
    if not minibatches or min(minibatches) < 1:
        raise ScheduleError(f"minibatches of {list(minibatches)[:4]} microbatches; each has at least one")
    if kind.asynchronous and pipeline.ties:
        raise ScheduleError(
            f"stages {pipeline.ties[0]} share a weight, which schedule {name} cannot keep equal; "
            "use 1f1b or gpipe, or a plan with those layers in one stage"
        )
    depths = depths or [default_depth(pipeline, stage) for stage in range(pipeline.num_stages)]
    total = sum(minibatches)
    rounds: tuple[tuple[int, ...], ...]
    if not kind.trains:
        rounds = ((),) * pipeline.num_stages
        programs = [_forwards(pipeline, worker, total) for worker in range(pipeline.num_workers)]
    elif not kind.accumulates:
        rounds = tuple(tuple(range(0, total, size)) for size in pipeline.round_sizes)
        programs = [_asynchronous(pipeline, worker, total, rounds, depths) for worker in range(pipeline.num_workers)]
    else:
        starts = tuple(itertools.accumulate(minibatches[:-1], initial=0))
        rounds = (starts,) * pipeline.num_stages
        spans = [range(start, start + size) for start, size in zip(starts, minibatches, strict=True)]
        if kind.asynchronous:  # a forward waits for no update but that before the last
            full = min(minibatches[:-1], default=total)
            widest = max(pipeline.round_sizes)
            if len(minibatches) > 1 and widest > kind.widest_round(full):
                raise ScheduleError(
                    f"{full} microbatches to an update leave replicas without one, where a stage shares out {widest}; "
                    f"schedule {name} needs as many microbatches, or fewer replicas"
                )
            depths = shallow_depths(pipeline, [1 + full // size for size in pipeline.round_sizes], depths)
            programs = [
                _asynchronous(pipeline, worker, total, rounds, depths) for worker in range(pipeline.num_workers)
            ]
        else:
            limits = [total] * len(depths) if kind.all_forwards_first else depths
            programs = [_synchronous(pipeline, worker, spans, limits) for worker in range(pipeline.num_workers)]
    made = tuple(map(tuple, programs))
    versions = newest_versions(pipeline, made, total)
    if name == "vertical":
        versions = _vertical(pipeline, versions)
    elif name == "2bw":
        versions = (_two_updates_ago(rounds[0], total),) * pipeline.num_stages
    return Schedule(
        name=name,
        pipeline=pipeline,
        microbatches=total,
        rounds=rounds,
        programs=made,
        versions=versions,
    )


def _vertical(pipeline: Pipeline, newest: Versions) -> Versions:
    """At every stage the updates of just those microbatches whose updates the first stage had seen (PipeDream,
    section 3.3), as far as its rounds divide them alike."""
    first = pipeline.round_sizes[0]
    return tuple(tuple(version * first // size for version in newest[0]) for size in pipeline.round_sizes)


def _two_updates_ago(rounds: Sequence[int], total: int) -> tuple[int, ...]:
    """Double buffering (PipeDream-2BW, section 3.1): the weights before the update that is being accumulated for."""
    return tuple(max(0, bisect.bisect_right(rounds, microbatch) - 2) for microbatch in range(total))


def _forwards(pipeline: Pipeline, worker: int, total: int) -> Iterator[Action]:
    stage = pipeline.stage_of[worker]
    for microbatch in pipeline.microbatches_of(worker, range(total)):
        yield Action(stage, Kind.FORWARD, microbatch)


def _synchronous(pipeline: Pipeline, worker: int, spans: Sequence[range], depths: Sequence[int]) -> Iterator[Action]:
    stage = pipeline.stage_of[worker]
    for index, span in enumerate(spans):
        mine = pipeline.microbatches_of(worker, span)
        for forward, backward in _one_forward_one_backward(
            mine, replica_depth(depths[stage], pipeline.share_of(worker))
        ):
            if forward is not None:
                yield Action(stage, Kind.FORWARD, forward)
            if backward is not None:
                yield Action(stage, Kind.BACKWARD, backward)
        yield from _end_of_round(pipeline, stage, index)


def _asynchronous(
    pipeline: Pipeline, worker: int, total: int, rounds: Sequence[Sequence[int]], depths: Sequence[int]
) -> Iterator[Action]:
    stage = pipeline.stage_of[worker]
    starts = rounds[stage]
    mine = pipeline.microbatches_of(worker, range(total))
    own = [bisect.bisect_right(starts, microbatch) - 1 for microbatch in mine]
    ended, done = 0, 0
    depth = replica_depth(depths[stage], pipeline.share_of(worker))
    for forward, backward in _one_forward_one_backward(mine, depth):
        if forward is not None:
            yield Action(stage, Kind.FORWARD, forward)
        if backward is not None:
            yield Action(stage, Kind.BACKWARD, backward)
            done += 1
            if done < len(mine):  # a round without a microbatch of this replica's ends with the one before it
                for index in range(ended, own[done]):
                    yield from _end_of_round(pipeline, stage, index)
                ended = own[done]
    # A replica that the last round leaves without a microbatch still takes part in it, so that all keep equal weights.
    for index in range(ended, len(starts)):
        yield from _end_of_round(pipeline, stage, index)


def _end_of_round(pipeline: Pipeline, stage: int, index: int) -> Iterator[Action]:
    if len(pipeline.sync_workers(stage)) > 1:
        yield Action(stage, Kind.SYNC, index)
    yield Action(stage, Kind.STEP, index)


def _one_forward_one_backward(microbatches: Sequence[int], depth: int) -> Iterator[tuple[int | None, int | None]]:
    """Fill to ``depth`` in flight, then one backward for each forward, then drain."""
    depth = max(1, min(depth, len(microbatches)))
    for i in range(len(microbatches) + depth - 1):
        forward = microbatches[i] if i < len(microbatches) else None
        backward = microbatches[i - depth + 1] if i >= depth - 1 else None
        yield forward, backward
