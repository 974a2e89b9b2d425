"""A schedule of the user's own, read from a text or CSV file of actions.

A line for each worker with what it does in one minibatch:

    # zero bubble for two stages, two microbatches
    0F0 0F1 0I0 0W0 0I1 0W1
    1F0,1I0,1F1,1I1,1W0,1W1

Commas and spaces part the actions; empty cells, as a table of time slots has them, mean nothing. Updates and
averaging follow at the end of the minibatch by themselves.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from penstock.errors import ScheduleError
from penstock.limits import MOST_MICROBATCHES
from penstock.schedule.action import Action
from penstock.schedule.pipeline import Pipeline

Programs = tuple[tuple[Action, ...], ...]


def parse_custom(lines: Sequence[str]) -> Programs:
    programs = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text and line.strip():  # a comment; an empty line between others would be a worker without work
            continue
        try:
            actions = tuple(map(Action.parse, filter(None, re.split(r"[,\s]+", text))))
        except ScheduleError as error:
            raise ScheduleError(f"line {number}: {error}") from None
        for action in actions:
            if not action.of_microbatch:
                raise ScheduleError(f"line {number}: {action} comes by itself at the end of a minibatch; leave it out")
            if action.index >= MOST_MICROBATCHES:
                raise ScheduleError(
                    f"line {number}: {action}: a minibatch has at most {MOST_MICROBATCHES} microbatches"
                )
        if actions:
            programs.append(actions)
    if not programs:
        raise ScheduleError("no actions; write a line for each worker such as 0F0 0F1 0B0 0B1")
    return tuple(programs)


def numbered_by_stage(programs: Programs) -> Programs:
    """The same with the workers of stage 0 first, then those of stage 1 that are not among them, and so on."""
    order = dict.fromkeys(worker for workers in custom_workers(programs) for worker in workers)
    return tuple(programs[worker] for worker in order)


def custom_lines(programs: Programs) -> tuple[str, ...]:
    return tuple(" ".join(map(str, program)) for program in programs)


def custom_microbatches(programs: Programs) -> int:
    """How many a minibatch has."""
    return 1 + max(action.index for program in programs for action in program)


def custom_workers(programs: Programs) -> tuple[tuple[int, ...], ...]:
    """Of each stage, the workers that run it; a stage's replicas take its microbatches in turn, in this order."""
    first: dict[int, dict[int, int]] = {}
    for worker, program in enumerate(programs):
        for action in program:
            mine = first.setdefault(action.stage, {})
            mine[worker] = min(action.index, mine.get(worker, action.index))
    missing = next((stage for stage in range(len(first)) if stage not in first), None)
    if missing is not None:
        raise ScheduleError(f"nobody runs stage {missing}; stages are numbered 0, 1, 2 ...")
    return tuple(tuple(sorted(first[stage], key=first[stage].__getitem__)) for stage in range(len(first)))


def repeat_custom(programs: Programs, span: range) -> list[list[Action]]:
    """For a minibatch of no more microbatches; those beyond are left out, which nothing waits for."""
    microbatches = custom_microbatches(programs)
    if len(span) > microbatches:
        raise ScheduleError(
            f"a minibatch of {len(span)} microbatches under a schedule written for {microbatches}; "
            f"plan with --microbatches {microbatches}"
        )
    return [
        [Action(stage, kind, span.start + at) for stage, kind, at in program if at < len(span)] for program in programs
    ]


def check_custom(programs: Programs, pipeline: Pipeline) -> None:
    """Raise unless minibatch after minibatch falls to the replicas as the file has it."""
    microbatches = custom_microbatches(programs)
    for stage, size in enumerate(pipeline.round_sizes):
        if microbatches % size:
            raise ScheduleError(
                f"{microbatches} microbatches in a minibatch do not divide by the {size} replicas of stage {stage}; "
                "write the schedule for a multiple"
            )
