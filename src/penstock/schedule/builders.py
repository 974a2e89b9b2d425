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

    zb-h1      worker 0  F0 F1    I0 W0 I1 F2 W1 F3 I2 W2 I3 W3 STEP0
               worker 1     F0 I0 F1 I1 W0 W1 F2 I2 F3 I3 W2 W3 STEP0

    inference  worker 0  F0 F1 F2 F3
               worker 1     F0 F1 F2 F3

Under vertical a microbatch uses at every stage the version that it met at the first. 2bw is drawn with two microbatches
to an update; those of an update use the weights from before the update before it. zb-h1 makes a backward in two
halves. Two more run several stages on a worker: interleaved, where stage 2 is on worker 0 again, and zb-v, where it is
on worker 1. A custom schedule is read from a file (``penstock.schedule.custom``).
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from penstock.errors import ScheduleError
from penstock.schedule.action import Action, Kind
from penstock.schedule.custom import Programs, repeat_custom
from penstock.schedule.interleaved import interleave, warm_up
from penstock.schedule.pipeline import Pipeline
from penstock.schedule.schedule import Schedule, Versions, newest_versions
from penstock.schedule.zero_bubble import pack


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
    fixed_versions: int | None = None
    """of the weights, however many microbatches are in flight"""
    forwards_on: Literal["newest", "first stage's", "one before the newest"] = "newest"
    """the version of the weights that a microbatch uses: that of the latest update here, of those that the first stage
    had seen, or of the one before the latest"""
    halves: bool = False
    """makes backwards in two halves"""
    layout: Literal["once", "laps", "there and back", "any"] = "once"
    """how stages go over the workers: one on each; or several, from the first worker to the last again and again, or to
    the last and back to the first"""

    @property
    def may_overlap(self) -> bool:
        """Whether a schedule of this kind may average during a backward (``Schedule.overlaps_averaging``)."""
        return self.trains and not self.halves

    def widest_round(self, microbatches: int) -> float:
        """How many microbatches a stage's replicas may share out in turn: where updates accumulate without a drain,
        every replica must have its share in each."""
        return microbatches if self.asynchronous and self.accumulates else math.inf

    def most_in_flight(self, depth: int, share: Any) -> Any:
        """Microbatches on a replica with such a share of a round, a number or an array of them, at a stage of that
        depth: with all forwards first, its share of every round."""
        return share * depth if self.all_forwards_first else replica_depth(depth, share)

    def versions(self, in_flight: int) -> int:
        """How many versions of its weights a stage keeps with so many microbatches in flight."""
        if not self.asynchronous:
            return 1
        return in_flight if self.fixed_versions is None else self.fixed_versions


FAMILIES: dict[str, Family] = {
    "gpipe": Family(asynchronous=False, all_forwards_first=True, accumulates=True),
    "1f1b": Family(asynchronous=False, all_forwards_first=False, accumulates=True),
    "pipedream": Family(asynchronous=True, all_forwards_first=False),
    "vertical": Family(asynchronous=True, all_forwards_first=False, forwards_on="first stage's"),
    "2bw": Family(
        asynchronous=True,
        all_forwards_first=False,
        accumulates=True,
        fixed_versions=2,
        forwards_on="one before the newest",
    ),
    "interleaved": Family(asynchronous=False, all_forwards_first=False, accumulates=True, layout="laps"),
    "zb-h1": Family(asynchronous=False, all_forwards_first=False, accumulates=True, halves=True),
    "zb-v": Family(
        asynchronous=False, all_forwards_first=False, accumulates=True, halves=True, layout="there and back"
    ),
    "custom": Family(asynchronous=False, all_forwards_first=False, accumulates=True, layout="any"),
    "inference": Family(asynchronous=False, all_forwards_first=False, trains=False),
}


def family(name: str) -> Family:
    if name not in FAMILIES:
        raise ScheduleError(f"schedule {name!r} is unknown; choose one of {', '.join(FAMILIES)}, or a file of actions")
    return FAMILIES[name]


def default_depth(pipeline: Pipeline, stage: int) -> int:
    """Microbatches that a replica keeps in flight so that those behind it never starve.

    PipeDream (section 3.2) divides the workers from this stage on by the stage's replicas; rounding up instead of
    down lets fewer replicas feed more. It is enough where all stages have as many replicas. A replica with a larger
    share counts as that many.
    """
    return -(-sum(pipeline.round_sizes[stage:]) // pipeline.round_sizes[stage])


def usual_depth(name: str, pipeline: Pipeline, stage: int) -> int:
    """Microbatches in flight on a replica of a stage, as its schedule has it where memory is no constraint.

    Under a zero-bubble schedule that is until their weights' gradients are made: every worker may keep as many as the
    first. Where a worker has several stages, they share what it keeps.
    """
    kind, laps = family(name), len(pipeline.stages_of[pipeline.workers[stage][0]])
    if kind.halves:
        return -(-default_depth(pipeline, 0) // laps)
    if laps == 1:
        return default_depth(pipeline, stage)
    positions = pipeline.num_stages // laps
    return -(-(warm_up(stage % positions, positions, laps) + 1) // laps)


def planned_depth(name: str, pipeline: Pipeline, stage: int, microbatches: int) -> int:
    """The usual depth, and no more than there are microbatches where a minibatch ends with nothing in flight."""
    kind, own = family(name), -(-microbatches // pipeline.round_sizes[stage])
    if kind.all_forwards_first or not kind.trains:
        return own
    depth = usual_depth(name, pipeline, stage)
    return min(depth, own) if kind.accumulates else depth


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
    custom: Programs = (),
) -> Schedule:
    """The schedule ``name`` for minibatches of the given numbers of microbatches.

    ``depths`` is each stage's number of microbatches in flight per replica. An asynchronous schedule has no common
    minibatch: every stage steps after a round, which is one microbatch per replica, or as many as its share. Inference
    has no rounds, and keeps nothing in flight. ``custom`` is what each worker does in a minibatch, for that schedule.
    """
    kind = family(name)
    if kind.trains:
        check_layout(name, pipeline)
    if not minibatches or min(minibatches) < 1:
        raise ScheduleError(f"minibatches of {list(minibatches)[:4]} microbatches; each has at least one")
    if kind.asynchronous:
        _check_ties(name, pipeline)
    depths = depths or [usual_depth(name, pipeline, stage) for stage in range(pipeline.num_stages)]
    total = sum(minibatches)
    rounds: tuple[tuple[int, ...], ...]
    programs: Sequence[Iterable[Action]]
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
            programs = _synchronous(pipeline, spans, _minibatch_maker(kind, pipeline, depths, custom))
    made = tuple(map(tuple, programs))
    versions = newest_versions(pipeline, made, total)
    if kind.forwards_on == "first stage's":
        versions = _vertical(pipeline, versions)
    elif kind.forwards_on == "one before the newest":
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


def check_layout(name: str, pipeline: Pipeline) -> None:
    """Raise unless the stages lie over the workers as the schedule has them."""
    layout, num_stages = family(name).layout, pipeline.num_stages
    laps = max(map(len, pipeline.stages_of))
    if layout == "any" or (layout == "once" and laps == 1):
        return
    if layout == "once":
        several = next(worker for worker, stages in enumerate(pipeline.stages_of) if len(stages) > 1)
        raise ScheduleError(
            f"worker {several} has stages {', '.join(map(str, pipeline.stages_of[several]))}, and schedule {name} runs "
            "one on each; use interleaved or zb-v"
        )
    positions = num_stages // laps
    places = [position_on(layout, stage, positions) for stage in range(num_stages)]
    wanted = tuple(pipeline.workers[place] for place in places)
    if num_stages % laps or pipeline.workers != wanted:
        raise ScheduleError(
            f"stages on workers {' '.join(map(str, pipeline.workers))}; schedule {name} wants each worker to have as "
            f"many stages as any other, laid out {layout}"
        )
    if len(set(pipeline.shares)) > 1 and (laps > 1 or layout == "laps"):
        raise ScheduleError(f"schedule {name} wants as many replicas of each stage, with the same shares")


def position_on(layout: str, stage: int, positions: int) -> int:
    """Which of the workers along a pipeline has a stage, where each has one or several."""
    lap, place = divmod(stage, positions)
    return positions - 1 - place if layout == "there and back" and lap % 2 else place


MakeMinibatch = Callable[[range], Sequence[Sequence[Action]]]


def _minibatch_maker(kind: Family, pipeline: Pipeline, depths: Sequence[int], custom: Programs) -> MakeMinibatch:
    """What each worker does in a minibatch, before its update."""
    if kind.layout == "any":
        return partial(repeat_custom, custom)
    per_worker = [
        {stage: replica_depth(depths[stage], pipeline.share_of(worker, stage)) for stage in stages}
        for worker, stages in enumerate(pipeline.stages_of)
    ]
    if kind.halves:
        limits = [sum(own.values()) for own in per_worker]
        one_each = max(map(len, pipeline.stages_of)) == 1
        at_most = [
            min(depths[stage], default_depth(pipeline, stage)) if one_each else sum(depths)
            for stage in range(pipeline.num_stages)
        ]
        return lambda span: pack(pipeline, span, limits, at_most)
    if kind.layout == "laps":
        return partial(_interleaved, pipeline)
    return lambda span: [
        list(_one_stage(pipeline, worker, span, len(span) if kind.all_forwards_first else own[stage]))
        for worker, own in enumerate(per_worker)
        for stage in own
    ]


def _synchronous(pipeline: Pipeline, spans: Sequence[range], make: MakeMinibatch) -> list[list[Action]]:
    """Minibatch after minibatch; those alike, of as many microbatches on the same replicas, are made once."""
    programs: list[list[Action]] = [[] for _ in range(pipeline.num_workers)]
    turn = math.lcm(*pipeline.round_sizes)
    alike: dict[tuple[int, int], Sequence[Sequence[Action]]] = {}
    for index, span in enumerate(spans):
        first = span.start % turn
        if (first, len(span)) not in alike:
            alike[first, len(span)] = make(range(first, first + len(span)))
        for worker, made in enumerate(alike[first, len(span)]):
            shift = span.start - first
            programs[worker] += [Action(stage, kind, at + shift) for stage, kind, at in made] if shift else made
            programs[worker] += _end_of_round(pipeline, worker, index)
    return programs


def _one_stage(pipeline: Pipeline, worker: int, span: range, depth: int) -> Iterator[Action]:
    (stage,) = pipeline.stages_of[worker]
    for forward, backward in _one_forward_one_backward(pipeline.microbatches_of(worker, stage, span), depth):
        if forward is not None:
            yield Action(stage, Kind.FORWARD, forward)
        if backward is not None:
            yield Action(stage, Kind.BACKWARD, backward)


def _interleaved(pipeline: Pipeline, span: range) -> list[list[Action]]:
    programs = []
    for worker, stages in enumerate(pipeline.stages_of):
        mine = pipeline.microbatches_of(worker, stages[0], span)
        programs.append(interleave(stages, stages[0], pipeline.num_stages // len(stages), mine))
    return programs


def _forwards(pipeline: Pipeline, worker: int, total: int) -> Iterator[Action]:
    """Where a worker has several stages, group after group of microbatches, each as large as there are workers along
    the pipeline, so that they need not wait for each other."""
    stages = pipeline.stages_of[worker]
    size = total if len(stages) == 1 else max(pipeline.round_sizes) * len(set(pipeline.workers))
    for first in range(0, total, size):
        for stage in stages:
            for microbatch in pipeline.microbatches_of(worker, stage, range(first, min(first + size, total))):
                yield Action(stage, Kind.FORWARD, microbatch)


def _check_ties(name: str, pipeline: Pipeline) -> None:
    """Stages that share a weight add up its gradients round by round, so their rounds must be the same."""
    for tied in pipeline.sync_stages:
        if len({pipeline.shares[stage] for stage in tied}) > 1:
            raise ScheduleError(
                f"stages {', '.join(map(str, tied))} share a weight but update after different rounds under {name}; "
                "give them as many replicas, or plan those layers into one stage, or use a synchronous schedule"
            )


def _asynchronous(
    pipeline: Pipeline, worker: int, total: int, rounds: Sequence[Sequence[int]], depths: Sequence[int]
) -> Iterator[Action]:
    (stage,) = pipeline.stages_of[worker]
    starts = rounds[stage]
    mine = pipeline.microbatches_of(worker, stage, range(total))
    own = [bisect.bisect_right(starts, microbatch) - 1 for microbatch in mine]
    ended, done = 0, 0
    share = pipeline.share_of(worker, stage)
    depth = replica_depth(depths[stage], share)
    # Stages that share a weight update it together, when the first of them has got to it: the others so much later.
    late = replica_depth(depths[pipeline.sync_stages[stage][0]], share) - depth
    for forward, backward in _one_forward_one_backward(mine, depth):
        if forward is not None:
            yield Action(stage, Kind.FORWARD, forward)
        if backward is not None:
            yield Action(stage, Kind.BACKWARD, backward)
            done += 1
            if late <= done < len(mine):  # a round without a microbatch of this replica's ends with the one before it
                for index in range(ended, own[done - late]):
                    yield from _end_of_round(pipeline, worker, index)
                ended = own[done - late]
    # A replica that the last round leaves without a microbatch still takes part in it, so that all keep equal weights.
    for index in range(ended, len(starts)):
        yield from _end_of_round(pipeline, worker, index)


def _end_of_round(pipeline: Pipeline, worker: int, index: int) -> Iterator[Action]:
    stages = pipeline.stages_of[worker]
    for stage in stages:
        if stage in pipeline.synced_with(worker, stage)[:1]:
            yield Action(stage, Kind.SYNC, index)
    for stage in stages:
        yield Action(stage, Kind.STEP, index)


def _one_forward_one_backward(microbatches: Sequence[int], depth: int) -> Iterator[tuple[int | None, int | None]]:
    """Fill to ``depth`` in flight, then one backward for each forward, then drain."""
    depth = max(1, min(depth, len(microbatches)))
    for i in range(len(microbatches) + depth - 1):
        forward = microbatches[i] if i < len(microbatches) else None
        backward = microbatches[i - depth + 1] if i >= depth - 1 else None
        yield forward, backward
