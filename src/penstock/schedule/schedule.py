"""A schedule: for every worker, the ordered list of what it does."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from penstock.errors import ScheduleError
from penstock.schedule.action import Action, Kind
from penstock.schedule.pipeline import Pipeline, dependencies, participants

Versions = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    name: str
    pipeline: Pipeline
    microbatches: int
    rounds: tuple[tuple[int, ...], ...]
    """for each stage, the first microbatch of every round; a round is what one STEP consumes, and inference has none"""
    programs: tuple[tuple[Action, ...], ...]
    """for each worker, its actions in order"""
    versions: Versions
    """for each stage and microbatch, the updates that the weights of its forward have seen"""

    FORMAT: ClassVar[str] = "penstock.schedule/1"

    def __post_init__(self) -> None:
        if len(self.programs) != self.pipeline.num_workers:
            raise ScheduleError(f"{len(self.programs)} programs for {self.pipeline.num_workers} workers")

    @property
    def trains(self) -> bool:
        return any(self.rounds)

    def round_of(self, stage: int, microbatch: int) -> int:
        return bisect.bisect_right(self.rounds[stage], microbatch) - 1

    def round_members(self, stage: int, index: int) -> range:
        """The microbatches whose gradients the STEP ``index`` of a stage consumes."""
        starts = self.rounds[stage]
        return range(starts[index], starts[index + 1] if index + 1 < len(starts) else self.microbatches)

    def staleness(self, stage: int, microbatch: int) -> int:
        """The updates between a microbatch's forward and the one that its gradient is part of."""
        return self.round_of(stage, microbatch) - self.versions[stage][microbatch]

    def overlaps_averaging(self, worker: int, place: int) -> bool:
        """Whether averaging overlaps with this action of a worker, given by its place in the program.

        True for the backward that completes a round, with the SYNC right behind it: each gradient is final as soon as
        this backward has found it, so its all-reduce can start while the backward runs on. Not where backwards come in
        halves, since gradients of weights are then made last. Only for workers with one stage and no shared weights:
        their groups have no other all-reduce that could come in between. Worker, simulator and emulation all ask here;
        whether the link carries an all-reduce beside computing is theirs to say.
        """
        program, pipeline = self.programs[worker], self.pipeline
        if not 0 <= place < len(program) - 1:
            return False
        (stage, kind, microbatch), following = program[place : place + 2]
        return (
            kind is Kind.BACKWARD
            and following == (stage, Kind.SYNC, self.round_of(stage, microbatch))
            and len(pipeline.stages_of[worker]) == len(pipeline.sync_stages[stage]) == 1
            and not pipeline.meets_in_backwards
            and not self.takes_halves
        )

    @cached_property
    def takes_halves(self) -> bool:
        """Whether any backward comes in two halves; every stage then puts off the gradients of its weights."""
        return any(kind is Kind.INPUT for program in self.programs for _, kind, _ in program)

    def __len__(self) -> int:
        return sum(len(program) for program in self.programs)


def newest_versions(pipeline: Pipeline, programs: Sequence[Sequence[Action]], microbatches: int) -> Versions:
    """Each forward on the newest weights that its worker has."""
    found = [[0] * microbatches for _ in range(pipeline.num_stages)]
    for program in programs:
        steps = [0] * pipeline.num_stages
        for action in program:
            if action.kind is Kind.STEP:
                steps[action.stage] += 1
            elif action.kind is Kind.FORWARD:
                found[action.stage][action.index] = steps[action.stage]
    return tuple(map(tuple, found))


Moment = tuple[tuple[int, Action], ...]
"""Actions that run together, with their workers: one, or everybody of a SYNC."""


def execution_order(schedule: Schedule) -> Iterator[Moment]:
    """Some order in which every action comes after all that it needs; raises where there is none.

    Whether a schedule can deadlock does not depend on speeds, since messages never block their sender:
    if this order exists, every run ends.
    """
    programs, pipeline = schedule.programs, schedule.pipeline
    position = [0] * len(programs)
    done: set[Action] = set()
    blocked_on: dict[Action, list[int]] = defaultdict(list)
    met: dict[tuple[int, int], set[int]] = defaultdict(set)
    runnable = list(reversed(range(len(programs))))
    while runnable:
        worker = runnable.pop()
        while position[worker] < len(programs[worker]):
            action = programs[worker][position[worker]]
            missing = next((need for need in dependencies(action, pipeline) if need not in done), None)
            if missing is not None:
                blocked_on[missing].append(worker)
                break
            together = participants(action, worker, pipeline)
            if len(together) > 1:
                meeting = (pipeline.sync_stages[action.stage][0], action.index)
                met[meeting].add(worker)
                if len(met[meeting]) < len(together):
                    break
                del met[meeting]
                moment = tuple((each, programs[each][position[each]]) for each in together)
            else:
                moment = ((worker, action),)
            for each, _ in moment:
                position[each] += 1
            yield moment
            runnable.extend(each for each, _ in moment if each != worker)
            done.add(action.result)
            runnable.extend(blocked_on.pop(action.result, ()))
    if any(position[worker] < len(program) for worker, program in enumerate(programs)):
        raise ScheduleError(_explain_deadlock(schedule, position, done))


def check(schedule: Schedule) -> None:
    """Raise unless every worker does what falls to it once and no more, in an order that ends: each microbatch forward
    and, to train, backward, and each update after the gradients that it consumes."""
    for worker, program in enumerate(schedule.programs):
        _check_program(schedule, worker, program)
    for _ in execution_order(schedule):
        pass
    newest = newest_versions(schedule.pipeline, schedule.programs, schedule.microbatches)
    for stage, (wanted, there) in enumerate(zip(schedule.versions, newest, strict=True)):
        early = next((m for m in range(schedule.microbatches) if wanted[m] > there[m]), None)
        if early is not None:
            raise ScheduleError(
                f"{Action(stage, Kind.FORWARD, early)} wants weights of {wanted[early]} updates and there are "
                f"{there[early]}; fewer microbatches may be in flight, or more in an update"
            )


def _check_program(schedule: Schedule, worker: int, program: Sequence[Action]) -> None:
    expected = set(_work_of(schedule, worker))
    place: dict[Action, int] = {}
    for at, action in enumerate(program):
        if action in place:
            raise ScheduleError(f"worker {worker} runs {action} twice; remove one")
        place[action] = at
        if action.kind in (Kind.INPUT, Kind.WEIGHT) and action._replace(kind=Kind.BACKWARD) in expected:
            continue
        if action not in expected:
            raise ScheduleError(f"worker {worker} runs {action}, which is not its to run; {_runs(schedule, worker)}")
    for action in expected - place.keys():
        halves = [action._replace(kind=kind) for kind in (Kind.INPUT, Kind.WEIGHT)]
        missing = [half for half in halves if half not in place]
        if action.kind is not Kind.BACKWARD or len(missing) == 2:
            missing = [action]
        if missing:
            raise ScheduleError(f"worker {worker} never runs {missing[0]}; add it")
    for action in program:
        if action.kind is Kind.INPUT and action._replace(kind=Kind.BACKWARD) in place:
            raise ScheduleError(f"worker {worker} runs {action} and the whole backward too; remove one")
        if action.kind in (Kind.BACKWARD, Kind.WEIGHT) and schedule.trains:
            update = Action(action.stage, Kind.STEP, schedule.round_of(action.stage, action.index))
            covering = schedule.pipeline.synced_with(worker, action.stage)
            meeting = [Action(covering[0], Kind.SYNC, update.index)] if covering else []
            for later in (*meeting, update):
                if place[later] < place[action]:
                    raise ScheduleError(f"worker {worker} runs {later} before {action}, whose gradients it consumes")


def _work_of(schedule: Schedule, worker: int) -> Iterator[Action]:
    """What a worker must do, with backwards whole."""
    pipeline = schedule.pipeline
    kinds = (Kind.FORWARD, Kind.BACKWARD) if schedule.trains else (Kind.FORWARD,)
    for stage in pipeline.stages_of[worker]:
        for microbatch in pipeline.microbatches_of(worker, stage, range(schedule.microbatches)):
            for kind in kinds:
                yield Action(stage, kind, microbatch)
        for index in range(len(schedule.rounds[stage])):
            if stage in pipeline.synced_with(worker, stage)[:1]:
                yield Action(stage, Kind.SYNC, index)
            yield Action(stage, Kind.STEP, index)


def _runs(schedule: Schedule, worker: int) -> str:
    pipeline = schedule.pipeline
    stages = pipeline.stages_of[worker]
    mine = pipeline.microbatches_of(worker, stages[0], range(schedule.microbatches))
    shown = ", ".join(map(str, mine[:6])) + (" ..." if len(mine) > 6 else "")
    return f"it has stage {', '.join(map(str, stages))} and of its {schedule.microbatches} microbatches {shown}"


def _explain_deadlock(schedule: Schedule, position: list[int], done: set[Action]) -> str:
    """The programs around the point where each worker stops, its next action marked."""
    lines = []
    for worker, program in enumerate(schedule.programs):
        at = position[worker]
        if at == len(program):
            lines.append(f"  worker {worker}: finished")
            continue
        before = " ".join(str(action) for action in program[max(0, at - 4) : at])
        after = " ".join(str(action) for action in program[at + 1 : at + 4])
        needs = [str(need) for need in dependencies(program[at], schedule.pipeline) if need not in done]
        waits = ", ".join(needs) or f"workers {participants(program[at], worker, schedule.pipeline)}"
        lines.append(f"  worker {worker}: {before} [{program[at]}] {after}   waits for {waits}")
    return f"schedule {schedule.name} deadlocks:\n" + "\n".join(lines)
