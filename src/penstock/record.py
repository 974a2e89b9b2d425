"""The progress record of a run: a file of lines, each a small JSON object, to which lines are only appended.

A line has one key: ``start`` (once, first), ``moment`` (progress, at intervals), ``mark`` (an event) or ``end``.
Followers of a run read what is added; the report reads everything.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from penstock import codec
from penstock.errors import FormatError

SHORTEST_S, LONGEST_S = 0.5, 10.0
"""The shortest and the longest time between two moments."""


def interval_s(elapsed_s: float) -> float:
    """Seconds between two moments: a thousandth of the run so far, so that a short run has detail and a day of training
    has about 12,000 lines."""
    return min(LONGEST_S, max(SHORTEST_S, elapsed_s / 1000))


@dataclass(frozen=True, kw_only=True)
class Start:
    model: str
    schedule: str
    workers: tuple[str, ...]
    samples: int
    """Samples to train on, in all epochs together."""
    minibatches: int
    """Minibatches to train, in all epochs together."""
    first_minibatch: int
    """Minibatches trained before, in a resumed run."""
    began_unix_s: float
    samples_per_s: float | None
    """The prediction."""
    memory_bytes: tuple[int, ...]
    """The predicted peak of each worker."""

    FORMAT: ClassVar[str] = "penstock.progress/1"

    def __post_init__(self) -> None:
        if len(self.memory_bytes) != len(self.workers):
            raise FormatError(f"memory of {len(self.memory_bytes)} workers, and there are {len(self.workers)}")

    def minibatch(self, samples: int) -> int:
        """The number of the minibatch, counted over the whole run, after so many samples of this one."""
        return self.first_minibatch + round(self.minibatches * samples / max(1, self.samples))


@dataclass(frozen=True, kw_only=True)
class Moment:
    at_s: float
    """Seconds since the first action could begin, as in the trace."""
    samples: int
    """Samples finished so far."""
    loss: float | None
    """The mean loss of the newest microbatches; None where no worker has reported one."""
    busy: tuple[float, ...]
    """For each worker, the share of the time since the last moment in which it computed."""
    memory_bytes: tuple[int | None, ...]
    """For each worker, the most memory seen since the last moment; None if it cannot be measured."""
    done: tuple[str, ...]
    """The last action that each worker reported, or empty."""
    heard_s: tuple[float, ...]
    """When each worker reported it."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """An event at one moment. Its kind may be anything; code that shows marks need not know it."""

    at_s: float
    kind: str
    """One or two words, such as evaluation or checkpoint."""
    text: str
    minibatch: int
    """Minibatches trained before it."""
    values: Mapping[str, float | None] = field(default_factory=dict)
    """Results, if they are numbers."""


@dataclass(frozen=True, kw_only=True)
class Record:
    start: Start | None = None
    moments: tuple[Moment, ...] = ()
    marks: tuple[Mark, ...] = ()
    end: str | None = None
    """How it ended, in words; None during the run."""


class Writer:
    """Appends lines. Each is written in one call, so that a reader sees it at once and never sees half of it for long.
    A line that cannot be written, as on a full disk, raises an error and is lost; later ones are not."""

    def __init__(self, path: Path, start: Start) -> None:
        """Starts a new file. If that fails, the next line is written together with the first."""
        self.path = path
        self._unwritten: Start | None = start
        with contextlib.suppress(OSError, FormatError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)  # followers of the previous run keep its file
            self._begin()

    def moment(self, moment: Moment) -> None:
        self._append("moment", moment)

    def mark(self, mark: Mark) -> None:
        self._append("mark", mark)

    def end(self, words: str) -> None:
        self._append("end", words)

    def _append(self, kind: str, value: Any) -> None:
        self._begin()
        append_line(self.path, kind, value)

    def _begin(self) -> None:
        if self._unwritten is not None:
            append_line(self.path, "start", self._unwritten)
            self._unwritten = None


def append_line(path: Path, kind: str, value: Any) -> None:
    line = json.dumps({kind: codec.encode(value)}, allow_nan=False, separators=(",", ":")).encode()
    try:
        with path.open("ab+") as file:
            end = file.seek(0, os.SEEK_END)
            is_torn = end > 0 and os.pread(file.fileno(), 1, end - 1) != b"\n"  # the line before was cut short
            file.write(b"\n" * is_torn + line + b"\n")
    except OSError as error:
        raise FormatError(f"{path}: cannot be written: {error.strerror}") from None


class Reader:
    """Reads a record as it grows. Skips lines that were cut short by a full disk or a failed machine."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.changed_unix_s = 0.0
        """When something was added last."""
        self._first = b""
        self._forget()

    def _forget(self) -> None:
        self._offset = 0
        self._lines = 0
        self._start: Start | None = None
        self._moments: list[Moment] = []
        self._marks: list[Mark] = []
        self._end: str | None = None

    def read(self) -> Record:
        """Everything so far; empty if there is no file yet."""
        try:
            with self.path.open("rb") as file:
                first = file.readline()
                if first != self._first:  # a new run
                    self._forget()
                self._first, self.changed_unix_s = first, os.fstat(file.fileno()).st_mtime
                file.seek(self._offset)
                added = file.read()
        except FileNotFoundError:
            added = b""
        except OSError as error:
            raise FormatError(f"{self.path}: cannot be read: {error.strerror}") from None
        whole = added[: added.rfind(b"\n") + 1]  # the last line may be incomplete
        self._offset += len(whole)
        for line in whole.splitlines():
            self._lines += 1
            try:
                found = codec.parse_json(line.decode(), "line")
            except (ValueError, FormatError):  # cut short: no part of a JSON object is a JSON object
                continue
            try:
                self._take(found)
            except (ValueError, AttributeError, FormatError) as error:
                raise FormatError(f"{self.path}: line {self._lines}: not a line of a run's record ({error})") from None
        return Record(start=self._start, moments=tuple(self._moments), marks=tuple(self._marks), end=self._end)

    def _take(self, line: dict[str, Any]) -> None:
        ((kind, value),) = line.items()
        if kind == "start":
            self._start = codec.decode(Start, value)
        elif kind == "moment":
            self._moments.append(self._checked(codec.decode(Moment, value)))
        elif kind == "mark":
            self._marks.append(codec.decode(Mark, value))
        elif kind == "end":
            self._end = codec.decode(str, value)
        else:
            raise FormatError(f"{kind!r} is unknown")

    def _checked(self, moment: Moment) -> Moment:
        workers = len(self._start.workers) if self._start else len(moment.busy)
        if {len(each) for each in (moment.busy, moment.memory_bytes, moment.done, moment.heard_s)} != {workers}:
            raise FormatError(f"a moment that is not of {workers} workers")
        return moment
