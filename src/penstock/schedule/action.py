"""One thing a worker does, with a text form that round-trips: ``2F0`` is stage 2's forward of microbatch 0."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

from penstock.errors import ScheduleError


class Kind(StrEnum):
    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    """the first half of a backward: the gradients of what the stage received"""
    WEIGHT = "W"
    """the second half: the gradients of its weights"""
    SYNC = "SYNC"
    """replicas of the stage, and stages tied to it, agree on the gradients of a round"""
    STEP = "STEP"
    """the optimizer updates the stage's weights with the gradients of a round"""

    __hash__ = str.__hash__  # an Enum's own is Python code, and actions are looked up all the time


class Action(NamedTuple):
    stage: int
    kind: Kind
    index: int  # type: ignore[assignment]  # of no use here: tuple.index
    """the microbatch of F, B, I and W, the round of SYNC and STEP"""

    @property
    def result(self) -> Action:
        """The name under which others wait for what this makes: half a backward hands on what a whole one does."""
        return self._replace(kind=Kind.BACKWARD) if self.kind is Kind.INPUT else self

    @property
    def of_microbatch(self) -> bool:
        return self.kind not in (Kind.SYNC, Kind.STEP)

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.index}"

    @classmethod
    def parse(cls, text: str) -> Action:
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ScheduleError(f"{text!r} is not an action; write stage, kind and microbatch such as 2F0 or 1STEP3")
        return cls(int(match[1]), Kind(match[2]), int(match[3]))


_TEXT = re.compile(rf"([0-9]{{1,9}})({'|'.join(kind.value for kind in Kind)})([0-9]{{1,9}})")
