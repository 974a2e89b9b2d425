"""Timed events of a run, simulated or real, in one form."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, overload

import numpy as np

from penstock.errors import FormatError
from penstock.limits import MOST_DEVICES, MOST_SECONDS, per_second
from penstock.schedule import Action, Kind

Array = np.ndarray[Any, Any]

KINDS = tuple(Kind)
CODES = {kind: code for code, kind in enumerate(KINDS)}
"""The code of each kind in a column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    worker: int
    action: Action
    start_s: float
    end_s: float

    def __post_init__(self) -> None:
        if not 0 <= self.worker < MOST_DEVICES:
            raise FormatError(f"event {self.action} is of worker {self.worker}; workers are numbered from 0")
        if not -MOST_SECONDS <= self.start_s <= self.end_s <= MOST_SECONDS:
            raise FormatError(
                f"event {self.action} lasts from {self.start_s} to {self.end_s} s; it must end after it starts"
            )


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Events as arrays: a simulation may have millions, and mostly sums of them are needed."""

    worker: Array
    stage: Array
    kind: Array
    """Codes, as in ``CODES``."""
    index: Array
    start_s: Array
    end_s: Array

    def __len__(self) -> int:
        return len(self.worker)

    @classmethod
    def of(cls, events: Sequence[Event]) -> Columns:
        def column(values: Iterable[float], dtype: type) -> Array:
            return np.fromiter(values, dtype, len(events))

        return cls(
            worker=column((event.worker for event in events), np.int64),
            stage=column((event.action.stage for event in events), np.int64),
            kind=column((CODES[event.action.kind] for event in events), np.int8),
            index=column((event.action.index for event in events), np.int64),
            start_s=column((event.start_s for event in events), np.float64),
            end_s=column((event.end_s for event in events), np.float64),
        )

    def __getitem__(self, chosen: Any) -> Columns:
        """The events at some places."""
        return Columns(**{field.name: getattr(self, field.name)[chosen] for field in fields(self)})

    def of_kind(self, *kinds: Kind) -> Array:
        """A mask of the events of these kinds."""
        return np.isin(self.kind, [CODES[kind] for kind in kinds])

    @property
    def seconds(self) -> Array:
        lasting: Array = self.end_s - self.start_s
        return lasting


class Events(Sequence[Event]):
    """Columns as a sequence of events. Event objects are made on demand."""

    def __init__(self, columns: Columns) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns)

    def __iter__(self) -> Iterator[Event]:
        return iter(self._all)

    @overload
    def __getitem__(self, at: int) -> Event: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Event, ...]: ...
    def __getitem__(self, at: int | slice) -> Event | tuple[Event, ...]:
        return self._all[at]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Events):
            return NotImplemented
        mine, theirs = self.columns, other.columns
        return all(np.array_equal(getattr(mine, field.name), getattr(theirs, field.name)) for field in fields(mine))

    __hash__ = None  # type: ignore[assignment]  # as large as it is, nobody looks one up

    @cached_property
    def _all(self) -> tuple[Event, ...]:
        columns = [getattr(self.columns, field.name).tolist() for field in fields(self.columns)]
        return tuple(
            Event(worker=worker, action=Action(stage, KINDS[kind], index), start_s=start_s, end_s=end_s)
            for worker, stage, kind, index, start_s, end_s in zip(*columns, strict=True)
        )


@dataclass(frozen=True, kw_only=True)
class Trace:
    origin: str
    """One of measured, emulated and simulated."""
    workers: tuple[str, ...]
    """The name of each worker on a timeline."""
    samples: tuple[int, ...]
    """Samples in each microbatch, by its number."""
    events: Sequence[Event]

    FORMAT: ClassVar[str] = "penstock.trace/1"

    def __post_init__(self) -> None:
        if not isinstance(self.events, Events):
            object.__setattr__(self, "events", Events(Columns.of(self.events)))
        strangers = np.flatnonzero((self.columns.worker < 0) | (self.columns.worker >= len(self.workers)))
        if len(strangers):
            event = self.events[int(strangers[0])]
            raise FormatError(f"event {event.action} is of worker {event.worker}; there are {len(self.workers)}")
        if min(self.samples, default=0) < 0:
            raise FormatError(f"a microbatch of {min(self.samples)} samples; it has 0 or more")
        of_microbatches = ~self.columns.of_kind(Kind.SYNC, Kind.STEP)
        beyond = np.flatnonzero(of_microbatches & (self.columns.index >= len(self.samples)))
        if len(beyond):
            action = self.events[int(beyond[0])].action
            raise FormatError(f"event {action} is of microbatch {action.index}; there are {len(self.samples)}")

    @property
    def columns(self) -> Columns:
        assert isinstance(self.events, Events)
        return self.events.columns

    @cached_property
    def span_s(self) -> float:
        """From the first start to the last end."""
        return float(self.columns.end_s.max() - self.columns.start_s.min()) if len(self.columns) else 0.0

    @cached_property
    def samples_per_s(self) -> float:
        """The rate in steady state, without warm-up and drain, so that a short and a long trace of the same plan agree.
        If a trace is too short for that, all samples divided by the whole span."""
        trains = bool(self.columns.of_kind(Kind.BACKWARD, Kind.INPUT).any())
        return self._training_rate() if trains else self._inference_rate()

    def _training_rate(self) -> float:
        """Counted at the first stage, which is the last to finish a microbatch.

        It is measured from the end of one update to the end of another, in whole rounds, without the first and last
        quarter.
        """
        first_stage = self.columns[self.columns.stage == 0]
        finished = first_stage[first_stage.of_kind(Kind.BACKWARD, Kind.INPUT)]
        updates = first_stage[first_stage.of_kind(Kind.STEP)]
        rounds = np.unique(updates.index)
        if len(rounds) < 2:
            return self._rate(finished, self.span_s)
        quarter = (len(rounds) - 1) // 4
        first, last = (updates[updates.index == rounds[at]] for at in (quarter, len(rounds) - 1 - quarter))
        # each replica by its own clock: a fast one starts the next round before the slowest has ended this one
        begins_s, ends_s = (np.full(len(self.workers), none) for none in (-np.inf, np.inf))
        begins_s[first.worker], ends_s[last.worker] = first.end_s, last.end_s
        counted = (begins_s[finished.worker] < finished.end_s) & (finished.end_s <= ends_s[finished.worker])
        return self._rate(finished[counted], float(last.end_s.max() - first.end_s.max()))

    def _inference_rate(self) -> float:
        """Counted at the last stage: the sum over its replicas, each from the end of one forward to the end of
        another."""
        if not len(self.columns):
            return 0.0
        last_stage = self.columns[self.columns.stage == self.columns.stage.max()]
        finished = last_stage[np.lexsort((last_stage.end_s, last_stage.worker))]
        steady = 0.0
        for mine in np.split(np.arange(len(finished)), np.flatnonzero(np.diff(finished.worker)) + 1):
            quarter = (len(mine) - 1) // 4
            kept = finished[mine[quarter : len(mine) - quarter]]
            seconds = float(kept.end_s[-1] - kept.end_s[0])
            if seconds <= 0:
                return self._rate(finished, self.span_s)
            steady += self._rate(kept[1:], seconds)
        return steady

    def _rate(self, finished: Columns, seconds: float) -> float:
        samples = float(np.array(self.samples, np.float64)[finished.index].sum())
        return per_second(samples, seconds) or 0.0

    def busy_s(self, worker: int) -> float:
        """Seconds of computing: everything but waiting and synchronising."""
        return float(self._computing_s[worker])

    def averaging_s(self, worker: int) -> float:
        """Seconds of averaging, including waiting for others."""
        return float(self._averaging_s[worker])

    def utilisation(self, worker: int) -> float:
        return self.busy_s(worker) / self.span_s if self.span_s > 0 else 0.0

    def of_worker(self, worker: int) -> Columns:
        return self.columns[self._by_worker[worker]]

    def medians_s(self, worker: int) -> dict[Kind, float]:
        """The median seconds of each kind of action of a worker."""
        mine = self.of_worker(worker)
        return {KINDS[code]: float(np.median(mine.seconds[mine.kind == code])) for code in np.unique(mine.kind)}

    @cached_property
    def _computing_s(self) -> Array:
        return self._seconds_by_worker(self.columns[~self.columns.of_kind(Kind.SYNC)])

    @cached_property
    def _averaging_s(self) -> Array:
        return self._seconds_by_worker(self.columns[self.columns.of_kind(Kind.SYNC)])

    def _seconds_by_worker(self, chosen: Columns) -> Array:
        return np.bincount(chosen.worker, chosen.seconds, minlength=len(self.workers))

    @cached_property
    def _by_worker(self) -> list[Array]:
        """The places of each worker's events, in their order."""
        order = np.argsort(self.columns.worker, kind="stable")
        return np.split(order, np.searchsorted(self.columns.worker[order], np.arange(1, len(self.workers))))


def joined(parts: Sequence[Columns]) -> Columns:
    """The events of all parts, one after the other."""
    return Columns(
        **{field.name: np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(Columns)}
    )


def merge(origin: str, workers: tuple[str, ...], samples: tuple[int, ...], parts: Iterable[Iterable[Event]]) -> Trace:
    """One trace from the events of each worker, in order of start."""
    columns = Columns.of([event for part in parts for event in part])
    return trace_of(origin, workers, samples, columns)


def trace_of(origin: str, workers: tuple[str, ...], samples: tuple[int, ...], columns: Columns) -> Trace:
    """A trace in order of start and, for equal starts, of worker."""
    ordered = columns[np.lexsort((columns.worker, columns.start_s))]
    return Trace(origin=origin, workers=workers, samples=samples, events=Events(ordered))
