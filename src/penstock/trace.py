"""What happened when: timed events of a run, simulated or real, in one form."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from penstock.errors import FormatError
from penstock.schedule import Action, Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    worker: int
    action: Action
    start_s: float
    end_s: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.start_s) and self.start_s <= self.end_s < math.inf):
            raise FormatError(
                f"event {self.action} lasts from {self.start_s} to {self.end_s} s; it must end after it starts"
            )


@dataclass(frozen=True, kw_only=True)
class Trace:
    origin: str
    """measured or simulated"""
    workers: tuple[str, ...]
    """what each worker is called on a timeline"""
    samples: tuple[int, ...]
    """samples in each microbatch, by its number"""
    events: tuple[Event, ...]

    FORMAT: ClassVar[str] = "penstock.trace/1"

    def __post_init__(self) -> None:
        for event in self.events:
            if not 0 <= event.worker < len(self.workers):
                raise FormatError(f"event {event.action} is of worker {event.worker}; there are {len(self.workers)}")

    @property
    def span_s(self) -> float:
        """From the first start to the last end."""
        if not self.events:
            return 0.0
        return max(event.end_s for event in self.events) - min(event.start_s for event in self.events)

    @cached_property
    def samples_per_s(self) -> float:
        """The steady rate, without the filling and the draining of the pipeline, so that a short and a long trace of
        the same plan agree; where a trace is too short for that, all samples over the whole span."""
        trains = any(event.action.result.kind is Kind.BACKWARD for event in self.events)
        return self._training_rate() if trains else self._inference_rate()

    def _training_rate(self) -> float:
        """Counted at the first stage, which is the last to finish a microbatch.

        It runs from the end of one update to the end of another, without the first and last quarter: whole rounds only.
        """
        finished = [e for e in self.events if e.action.stage == 0 and e.action.result.kind is Kind.BACKWARD]
        updates: dict[int, dict[int, float]] = defaultdict(dict)
        for event in self.events:
            if event.action.stage == 0 and event.action.kind is Kind.STEP:
                updates[event.action.index][event.worker] = event.end_s
        rounds = sorted(updates)
        if len(rounds) < 2:
            return self._rate(finished, self.span_s)
        quarter = (len(rounds) - 1) // 4
        first, last = updates[rounds[quarter]], updates[rounds[-1 - quarter]]
        # each replica by its own clock: a fast one is into the next round before the slowest has ended this one
        counted = [e for e in finished if first.get(e.worker, -math.inf) < e.end_s <= last.get(e.worker, math.inf)]
        return self._rate(counted, max(last.values()) - max(first.values()))

    def _inference_rate(self) -> float:
        """Counted at the last stage: the sum over its replicas, each from the end of one forward to that of another."""
        last_stage = max((event.action.stage for event in self.events), default=0)
        finished = sorted((e for e in self.events if e.action.stage == last_stage), key=lambda event: event.end_s)
        steady = 0.0
        for worker in {event.worker for event in finished}:
            mine = [event for event in finished if event.worker == worker]
            quarter = (len(mine) - 1) // 4
            first, *counted = mine[quarter : len(mine) - quarter]
            if not counted or counted[-1].end_s <= first.end_s:
                return self._rate(finished, self.span_s)
            steady += self._rate(counted, counted[-1].end_s - first.end_s)
        return steady

    def _rate(self, finished: Iterable[Event], seconds: float) -> float:
        return sum(self.samples[event.action.index] for event in finished) / seconds if seconds > 0 else 0.0

    def busy_s(self, worker: int) -> float:
        """Seconds of computing: everything but waiting and synchronising."""
        return sum(e.end_s - e.start_s for e in self.events if e.worker == worker and e.action.kind is not Kind.SYNC)

    def utilisation(self, worker: int) -> float:
        return self.busy_s(worker) / self.span_s if self.span_s > 0 else 0.0


def merge(origin: str, workers: tuple[str, ...], samples: tuple[int, ...], parts: Iterable[Iterable[Event]]) -> Trace:
    """One trace from each worker's own events, in order of start."""
    events = sorted((event for part in parts for event in part), key=lambda event: (event.start_s, event.worker))
    return Trace(origin=origin, workers=workers, samples=samples, events=tuple(events))
