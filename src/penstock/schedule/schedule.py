"""A schedule: for every worker, the ordered list of what it does."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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

    def __len__(self) -> int:
        return sum(len(program) for program in self.programs)


def newest_versions(pipeline: Pipeline, programs: Sequence[Sequence[Action]], microbatches: int) -> Versions:
    """Each forward on the newest weights that its worker has."""
    found = [[0] * microbatches for _ in range(pipeline.num_stages)]
    for program in programs:
        steps = 0
        for action in program:
            if action.kind is Kind.STEP:
                steps += 1
            elif action.kind is Kind.FORWARD:
                found[action.stage][action.index] = steps
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
            done.add(action)
            runnable.extend(blocked_on.pop(action, ()))
    if any(position[worker] < len(program) for worker, program in enumerate(programs)):
        raise ScheduleError(_explain_deadlock(schedule, position, done))


def check(schedule: Schedule) -> None:
    """Raise unless the schedule ends and does every microbatch once at every stage: forward and, to train, backward."""
    seen: set[tuple[int, Action]] = set()
    for moment in execution_order(schedule):
        for entry in moment:
            if entry in seen:
                raise ScheduleError(f"worker {entry[0]} runs {entry[1]} twice; remove one")
            seen.add(entry)
    pipeline = schedule.pipeline
    newest = newest_versions(pipeline, schedule.programs, schedule.microbatches)
    for stage, (wanted, there) in enumerate(zip(schedule.versions, newest, strict=True)):
        early = next((m for m in range(schedule.microbatches) if wanted[m] > there[m]), None)
        if early is not None:
            raise ScheduleError(
                f"{Action(stage, Kind.FORWARD, early)} wants weights of {wanted[early]} updates and there are "
                f"{there[early]}; fewer microbatches may be in flight, or more in an update"
            )
    kinds = (Kind.FORWARD, Kind.BACKWARD) if schedule.trains else (Kind.FORWARD,)
    for stage in range(pipeline.num_stages):
        for microbatch in range(schedule.microbatches):
            worker = pipeline.worker_of(stage, microbatch)
            for kind in kinds:
                if (worker, Action(stage, kind, microbatch)) not in seen:
                    raise ScheduleError(f"worker {worker} never runs {Action(stage, kind, microbatch)}; add it")


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
