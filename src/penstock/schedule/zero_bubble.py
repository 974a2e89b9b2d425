"""Zero-bubble schedules: a backward in two halves, of which only the first is waited for.

The gradients of the weights fill what would otherwise be idle. Every worker takes at any moment what is ready, in this
order: the gradients that an earlier stage waits for, the forward of the latest stage that it may begin, and the
gradients of weights. One rule serves any layout of stages over workers: with a stage on each it makes ZB-H1, with two
on each, laid out to the last worker and back, ZB-V (Qi and others, 2023; sections 2.2 and 4.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.schedule.action import Action, Kind
from penstock.schedule.pipeline import Pipeline, dependencies

_IN_HASTE = (Kind.INPUT, Kind.FORWARD, Kind.WEIGHT)


@dataclass
class _Queue:
    """What a worker still has to do at one of its stages, each kind in the order of the microbatches."""

    stage: int
    microbatches: list[int]
    at_most: int
    """microbatches between forward and the first half of the backward"""
    done: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(_IN_HASTE, 0))

    def next(self, kind: Kind) -> Action | None:
        at = self.done[kind]
        return Action(self.stage, kind, self.microbatches[at]) if at < len(self.microbatches) else None

    @property
    def kept(self) -> int:
        """Microbatches whose values are still needed here."""
        return self.done[Kind.FORWARD] - self.done[Kind.WEIGHT]

    @property
    def is_full(self) -> bool:
        return self.done[Kind.FORWARD] - self.done[Kind.INPUT] >= self.at_most


def pack(pipeline: Pipeline, microbatches: range, limits: Sequence[int], depths: Sequence[int]) -> list[list[Action]]:
    """Each worker's program for some microbatches, made by playing it with halves that take as long as a forward.

    ``limits`` is how many microbatches each worker may keep until their weights' gradients are made; ``depths`` how
    many each stage may have between forward and backward, per replica.
    """
    queues = [
        [
            _Queue(stage, pipeline.microbatches_of(worker, stage, microbatches), depths[stage])
            for stage in reversed(stages)
        ]
        for worker, stages in enumerate(pipeline.stages_of)
    ]
    programs: list[list[Action]] = [[] for _ in queues]
    done: set[Action] = set()
    left = sum(len(_IN_HASTE) * len(queue.microbatches) for own in queues for queue in own)
    beyond = 0
    while left:
        chosen = [
            (worker, choice)
            for worker, own in enumerate(queues)
            if (choice := _choice(own, limits[worker] + beyond, done, pipeline))
        ]
        # A limit too small to go on would be a deadlock; one more microbatch may be what everybody waits for.
        beyond = 0 if chosen else beyond + 1
        for worker, (queue, action) in chosen:
            queue.done[action.kind] += 1
            programs[worker].append(action)
        done.update(action.result for _, (_, action) in chosen)
        left -= len(chosen)
    return programs


def _choice(own: Sequence[_Queue], limit: int, done: set[Action], pipeline: Pipeline) -> tuple[_Queue, Action] | None:
    kept = sum(queue.kept for queue in own)
    for kind in _IN_HASTE:
        for queue in own:  # the latest stage first: it frees what earlier ones keep
            if kind is Kind.FORWARD and (kept >= limit or queue.is_full):
                continue
            action = queue.next(kind)
            if action and done.issuperset(dependencies(action, pipeline)):
                return queue, action
    return None
