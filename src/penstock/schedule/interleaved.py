"""Interleaved 1F1B: several stages on every worker, so that a pipeline of as many workers fills in less time.

Microbatches go through in groups as large as the pipeline has workers: a group's forwards through all workers once,
then again through their second stages, and so on; its backwards the other way round (Narayanan and others, 2021).
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.schedule.action import Action, Kind


def interleave(stages: Sequence[int], position: int, positions: int, microbatches: Sequence[int]) -> list[Action]:
    """The program of a worker at one of the ``positions`` of the pipeline, for the microbatches that it takes.

    It is made for whole groups; what an incomplete one lacks is left out, which no other action waits for.
    """
    groups = -(-len(microbatches) // positions)
    forwards = _lap_by_lap(stages, Kind.FORWARD, groups, positions)
    backwards = _lap_by_lap(stages[::-1], Kind.BACKWARD, groups, positions)
    ahead = min(warm_up(position, positions, len(stages)), len(forwards))
    program = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        program += [forward, backward]
    program += backwards[len(forwards) - ahead :]
    return [action._replace(index=microbatches[action.index]) for action in program if action.index < len(microbatches)]


def warm_up(position: int, positions: int, laps: int) -> int:
    """Forwards that a worker runs before its first backward can have come, less one."""
    behind = positions - 1 - position
    return 2 * behind + (laps - 1) * positions if laps > 1 else behind


def _lap_by_lap(stages: Sequence[int], kind: Kind, groups: int, positions: int) -> list[Action]:
    return [
        Action(stage, kind, group * positions + place)
        for group in range(groups)
        for stage in stages
        for place in range(positions)
    ]
